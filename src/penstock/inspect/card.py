"""The card of a dataset: README.md as the Hugging Face Hub shows it, with a picture."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from penstock import __version__
from penstock.core.files import publish_bytes
from penstock.core.memory import format_bytes
from penstock.dataset.reader import Dataset
from penstock.errors import DataError, UsageError
from penstock.inspect.dataset import describe
from penstock.media.depth import false_colours
from penstock.media.images import resize_depth, thumbnail

CARD, PICTURE = "README.md", "card.jpg"
_MARK = "<!-- written by penstock card: it may be written again -->"
_MOST_ROWS = 20
_HEIGHT = 240
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!&~$])")


def write_card(
    path: Path | str,
    *,
    license: str | None = None,
    name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write README.md and its picture into a dataset.

    Args:
        path: The dataset.
        license: The hub's word for it, such as "apache-2.0"; None keeps that of the last card.
        name: Of the repository, "user/name", for the example; None for the folder's.
        overwrite: Also over a README.md that somebody else wrote.

    Raises:
        UsageError: There is another README.md.
        DataError: The dataset cannot be read.
    """
    root = Path(path)
    target = root / CARD
    before = target.read_text(encoding="utf-8", errors="replace") if target.is_file() else None
    if before is not None and _MARK not in before and not overwrite:
        raise UsageError(f"{target} was written by somebody else: keep it, or pass --overwrite")
    if license is None:
        known = re.search(r"^license: (.+)$", before or "", re.MULTILINE)
        license = known[1] if known else "unknown"
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,60}", license):
        raise UsageError(f"{license[:80]!r} is no name of a licence: apache-2.0, cc-by-4.0, mit, …")
    dataset = Dataset(root)
    picture = _picture(dataset)
    if picture is not None:
        publish_bytes(root / PICTURE, picture)
    publish_bytes(target, _text(dataset, license, name, picture is not None).encode())
    return target


def _text(dataset: Dataset, license: str, name: str | None, pictured: bool) -> str:
    facts = describe(dataset.path)
    robot = facts["robot_type"]
    tags = ["LeRobot", "penstock", *([str(robot)] if robot else [])]
    front = [
        "---",
        f"license: {license}",
        "task_categories:",
        "- robotics",
        "tags:",
        *(f"- {json.dumps(tag, ensure_ascii=False)}" for tag in tags),
        "configs:",
        "- config_name: default",
        "  data_files: data/*/*.parquet",
        "---",
        _MARK,
    ]
    title = name or dataset.path.resolve().name
    seconds = facts["frames"] / facts["fps"]
    parts = ["\n".join(front), f"# {_plain(title)}"]
    if pictured:
        parts.append(f"![one frame of every camera]({PICTURE})")
    parts.append(
        _table(
            ("", ""),
            [
                ("format", facts["kind"]),
                ("robot", robot or "-"),
                ("episodes", facts["episodes"]),
                ("frames", f"{facts['frames']} at {facts['fps']} fps, {_duration(seconds)}"),
                ("episode length", f"{facts['shortest_episode']} to {facts['longest_episode']}"),
                ("size", format_bytes(facts["size_bytes"])),
                ("licence", license),
            ],
        )
    )
    parts += ["## Features", _features(dataset), "## Tasks", _tasks(dataset)]
    if facts["origin"]:
        parts += ["## Where it comes from", _origin(facts["origin"])]
    load = json.dumps(title, ensure_ascii=False)
    parts += [
        "## Use",
        "```python\nfrom lerobot.datasets.lerobot_dataset import LeRobotDataset\n\n"
        f"dataset = LeRobotDataset({load})\n```",
        f"Made with penstock {__version__}.",
    ]
    return "\n\n".join(parts) + "\n"


def _features(dataset: Dataset) -> str:
    rows = []
    for name, feature in dataset.features.items():
        codec = (feature.info or {}).get("video.codec")
        names: Any = feature.names
        while isinstance(names, dict) and names:
            names = next(iter(names.values()))
        named = isinstance(names, list) and not feature.is_picture
        said = codec or (", ".join(str(one) for one in names[:_MOST_ROWS]) if named else "")
        shape = " x ".join(map(str, feature.shape))
        rows.append((name, feature.dtype, shape, said or "-"))
    return _table(("feature", "type", "shape", "codec or names"), rows)


def _tasks(dataset: Dataset) -> str:
    counts = Counter(task for episode in dataset.episodes for task in episode.tasks)
    rows: list[tuple[Any, ...]] = counts.most_common(_MOST_ROWS)
    table = _table(("task", "episodes"), rows)
    more = len(counts) - _MOST_ROWS
    return f"{table}\n\n… and {more} more." if more > 0 else table


def _origin(origin: list[dict[str, Any]]) -> str:
    rows = []
    for entry in origin[:_MOST_ROWS]:
        first, last = entry["first_episode"], entry["first_episode"] + entry["episodes"] - 1
        account = entry.get("account") if isinstance(entry.get("account"), dict) else {}
        dropped = sum((account or {}).get("dropped", {}).values())
        source = next((entry[k] for k in ("bag", "rollout", "dataset") if entry.get(k)), "-")
        numbers = str(first) if first == last else f"{first} to {last}"
        rows.append((source, numbers, entry["frames"], dropped or "-"))
    table = _table(("source", "episodes", "frames", "frames dropped"), rows)
    more = len(origin) - _MOST_ROWS
    return f"{table}\n\n… and {more} more." if more > 0 else table


def _table(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join(
        f"| {' | '.join(text if text == '---' else _plain(str(text)) for text in line)} |"
        for line in lines
    )


def _plain(text: str) -> str:
    """Return a text of a file as one line of Markdown that means nothing but itself."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())[:300])


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _picture(dataset: Dataset) -> bytes | None:
    """Return one frame of every camera, side by side, as JPEG."""
    shown = []
    if dataset.episodes:
        episode = dataset.episodes[0]
        for key in dataset.camera_keys[:8]:
            try:
                pixels = episode.image(key, episode.length // 2)
            except DataError:
                continue
            rows, columns = pixels.shape[:2]
            width = max(1, columns * _HEIGHT // rows)
            if pixels.ndim == 2:
                seen = pixels[pixels > 0]
                low, high = np.percentile(seen, (1, 99)) if seen.size else (0, 1)
                pixels = false_colours(pixels, (int(low), int(high) + 1))
            lines = [resize_depth(pixels[..., c], width, _HEIGHT) for c in range(3)]
            shown.append(np.stack(lines, -1))
    return thumbnail(np.concatenate(shown, 1), 2400) if shown else None
