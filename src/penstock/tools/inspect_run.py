"""What is in the folder of a training run; neither torch nor nav/ is needed to look."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from penstock.core.memory import format_bytes
from penstock.tools import inspect_replay

Facts = dict[str, Any]

_MAX_BYTES = 4 << 20
_PHYSICS_S = 0.016  # a step of the simulator; a decision takes sim.substeps of them
_SHOWN = (  # of the settings, by their place
    ("env", "num_envs"),
    ("env", "num_obstacles"),
    ("env_dyn", "num_obstacles"),
    ("env", "drone"),
    ("algo", "name"),
    ("collector",),
    ("seed",),
    ("max_frame_num",),
)


def is_run(path: Path) -> bool:
    """Whether a folder is that of a training run."""
    return (path / "config.yaml").is_file() and (path / "checkpoints").is_dir()


def parts(path: Path) -> list[Path]:
    """Return the folders of a run that hold packs."""
    rollouts = path / "rollouts"
    found = [path / "checkpoints", rollouts, *sorted(rollouts.glob("rank_*"))]
    return [folder for folder in found if folder.is_dir()]


def describe(path: Path, describe_folder: Callable[[Path], Facts]) -> Facts:
    """Say what a run is, how far it is, and what it holds.

    Args:
        path: Its folder.
        describe_folder: Describes the folder of its checkpoints.
    """
    rows = _last_row(path / "metrics.jsonl")
    facts: Facts = {
        "path": str(path),
        "kind": "training run",
        "settings": _settings(path / "config.yaml"),
        "last": rows,
        "checkpoints": describe_folder(path / "checkpoints"),
    }
    rollouts = path / "rollouts"
    if inspect_replay.is_rollouts(rollouts):
        facts["saved_rollouts"] = inspect_replay.describe_rollouts(rollouts)
    evaluation = path / "evaluation" / "evaluation.json"
    if evaluation.is_file() and evaluation.stat().st_size <= _MAX_BYTES:
        try:
            results = json.loads(evaluation.read_text())["results"]
            facts["evaluation"] = {
                name: found["rates"]["success"]["mean"] for name, found in results.items()
            }
        except (ValueError, KeyError, TypeError):
            facts["evaluation"] = {"damaged": str(evaluation)}
    return facts


def rate_note(rollouts: Path, fps: int) -> str | None:
    """Say that the rollouts of a run have another rate than a dataset of them; None if not."""
    run = next((each for each in (rollouts, *rollouts.parents[:3]) if is_run(each)), None)
    if run is None:
        return None
    found = _settings(run / "config.yaml", (("sim", "substeps"), ("env", "_target_")))
    substeps = found.get("sim.substeps")
    if not isinstance(substeps, int) or "env._target_" in found:
        return None
    period_s = substeps * _PHYSICS_S
    if abs(fps * period_s - 1.0) < 1e-6:
        return None
    return (
        f"the dataset says {fps} fps, the run decided every {period_s:g} s "
        f"({1 / period_s:.2f} per second); LeRobot takes whole frames per second, see --fps"
    )


def _settings(path: Path, places: Sequence[tuple[str, ...]] = _SHOWN) -> Facts:
    if path.stat().st_size > _MAX_BYTES:
        return {}
    try:
        content = YAML(typ="safe").load(path)
    except (YAMLError, UnicodeDecodeError):
        return {"damaged": str(path)}
    found = {}
    for place in places:
        value = content
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[".".join(place)] = value
    return found


def _last_row(path: Path) -> Facts:
    """Read the last whole row; a file of metrics may be long, its end is enough."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (64 << 10)))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            return row
    return {}


def text(facts: Facts, folder_text: Callable[[Facts], str]) -> str:
    """Lay it out for the terminal."""
    lines = [f"path:       {facts['path']}", "kind:       training run"]
    settings = "  ".join(f"{name}={value}" for name, value in facts["settings"].items())
    lines.append(f"settings:   {settings}")
    last = facts["last"]
    if last:
        frames = last.get("env_frames") or 0
        how_far = f"iteration {last.get('step')}, {frames / 1e6:.2f} M frames"
        success = last.get("train/success")
        if success is not None:
            how_far += f", {success:.1%} of the last training episodes succeeded"
        lines.append(f"how far:    {how_far}")
    if "evaluation" in facts:
        shares = [
            f"{name} {share}" if isinstance(share, str) else f"{name} {share:.1%}"
            for name, share in facts["evaluation"].items()
        ]
        lines.append(f"evaluation: {', '.join(shares)}")
    if "saved_rollouts" in facts:
        rollouts = facts["saved_rollouts"]
        count, size = len(rollouts["rollouts"]), rollouts.get("size_bytes", 0)
        lines.append(f"rollouts:   {count}, {format_bytes(size)}")
    return "\n".join([*lines, "", folder_text(facts["checkpoints"])])
