"""What is in a LeRobot dataset (`info`), read from its metadata."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from penstock.core.memory import format_bytes
from penstock.dataset.layout import INFO_PATH
from penstock.dataset.plan import Built
from penstock.dataset.reader import Dataset
from penstock.dataset.remote import RemoteDataset
from penstock.errors import UsageError
from penstock.objects import ObjectPath
from penstock.ui.report import aligned, text_table

Facts = dict[str, Any]


def is_dataset(path: Path) -> bool:
    """Tell whether a folder is a LeRobot dataset."""
    return (path / INFO_PATH).is_file()


def describe(path: Path) -> Facts:
    """Say what is in a dataset."""
    dataset = Dataset(path)
    files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    lengths = [episode.length for episode in dataset.episodes]
    return {
        "path": str(path),
        "kind": f"LeRobot dataset {dataset.info['codebase_version']}",
        "size_bytes": sum(file.stat().st_size for file in files),
        "files": len(files),
        "robot_type": dataset.info.get("robot_type"),
        "fps": dataset.fps,
        "episodes": len(lengths),
        "frames": sum(lengths),
        "longest_episode": max(lengths, default=0),
        "shortest_episode": min(lengths, default=0),
        "origin": origin(path),
        "tasks": sorted({task for episode in dataset.episodes for task in episode.tasks}),
        "features": {
            name: {
                "dtype": feature.dtype,
                "shape": list(feature.shape),
                "codec": (feature.info or {}).get("video.codec"),
            }
            for name, feature in dataset.features.items()
        },
    }


def describe_remote(url: str) -> Facts:
    """Say what is in a dataset in object storage: a listing, and its metadata.

    Raises:
        UsageError: There is no dataset.
    """
    with RemoteDataset(ObjectPath(url), changes=False) as remote:
        if not is_dataset(remote.folder):
            raise UsageError(f"{url} is no LeRobot dataset: it has no {INFO_PATH}")
        return describe(remote.folder) | {"path": url}


def origin(path: Path) -> list[Facts]:
    """Say which episodes came from where; nothing if penstock did not make the dataset."""
    built = Built.read(path)
    found: list[Facts] = []
    first = built.base.episodes if built else 0
    for unit in built.units if built else ():
        if not unit.episodes:
            continue  # all were removed
        start_ns, end_ns = unit.episodes[0].start_ns, unit.episodes[-1].end_ns
        found.append(
            {
                "first_episode": first,
                "episodes": len(unit.episodes),
                "frames": unit.frames,
                "start_ns": start_ns,
                "end_ns": end_ns,
                "spans_ns": [(episode.start_ns, episode.end_ns) for episode in unit.episodes],
                **unit.source,
            }
        )
        first += len(unit.episodes)
    return found


def _origin_text(origin: list[Facts], top: int) -> str:
    """Lay out where the first episodes came from."""
    rows = []
    for entry in origin[:top]:
        first, last = entry["first_episode"], entry["first_episode"] + entry["episodes"] - 1
        when = "-"
        if entry["start_ns"] is not None:
            start = datetime.fromtimestamp(entry["start_ns"] / 1e9, timezone.utc)
            seconds = (entry["end_ns"] - entry["start_ns"]) / 1e9
            when = f"{start:%Y-%m-%d %H:%M:%S}Z + {seconds:.1f} s"
        name = str(entry.get("bag") or entry.get("rollout") or "-")
        numbers = str(first) if first == last else f"{first}-{last}"
        rows.append((numbers, entry["frames"], name, when))
    table = text_table(("episode", "frames", "from", "recorded"), rows)
    more = len(origin) - top
    return f"{table}\n… and {more} more: see -v" if more > 0 else table


def text(facts: Facts, top: int = 10) -> str:
    """Lay out what `describe` found for the terminal."""
    seconds = facts["frames"] / facts["fps"]
    head = [
        ("path", facts["path"]),
        ("kind", facts["kind"]),
        ("size on disk", f"{format_bytes(facts['size_bytes'])} in {facts['files']} files"),
        ("robot", facts["robot_type"] or "-"),
        ("frames", f"{facts['frames']} at {facts['fps']} fps ({seconds:.1f} s)"),
        (
            "episodes",
            f"{facts['episodes']} of {facts['shortest_episode']} to "
            f"{facts['longest_episode']} frames",
        ),
        ("tasks", ", ".join(facts["tasks"][:5]) or "-"),
    ]
    rows = [
        (name, entry["dtype"], "x".join(map(str, entry["shape"])), entry["codec"] or "-")
        for name, entry in facts["features"].items()
    ]
    table = text_table(("feature", "dtype", "shape", "codec"), rows)
    parts = [aligned(head), table]
    if facts["origin"]:
        parts.append(_origin_text(facts["origin"], top))
    return "\n\n".join(parts)
