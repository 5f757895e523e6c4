"""What is in the folder of a training run, and runs side by side; nav/ is not needed to look."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from penstock.core.memory import format_bytes
from penstock.inspect import checkpoint, replay
from penstock.ui.report import aligned

Facts = dict[str, Any]

_MAX_BYTES = 4 << 20
_ACTIVE_S = 60.0
_OWN = {"name", "run_dir", "resume"}  # of a run, not of what it trains
_PHYSICS_S = 0.016  # a step of the simulator; a decision takes sim.substeps of them
_SHOWN = (  # of the settings
    "env.num_envs",
    "env.num_obstacles",
    "env_dyn.num_obstacles",
    "env.drone",
    "algo.name",
    "collector",
    "seed",
    "max_frame_num",
)


def is_run(path: Path) -> bool:
    """Whether a folder is that of a training run."""
    return (path / "config.yaml").is_file() and (path / "checkpoints").is_dir()


def parts(path: Path) -> list[Path]:
    """Return the folders of a run that hold packs."""
    rollouts = path / "rollouts"
    found = [path / "checkpoints", rollouts, *sorted(rollouts.glob("rank_*"))]
    return [folder for folder in found if folder.is_dir()]


def describe(path: Path) -> Facts:
    """Say what a run is, how far it is, and what it holds."""
    facts: Facts = {
        "path": str(path),
        "kind": "training run",
        "settings": _settings(path / "config.yaml"),
        "last": _last_row(path / "metrics.jsonl"),
        "checkpoints": checkpoint.describe_folder(path / "checkpoints"),
    }
    rollouts = path / "rollouts"
    if replay.is_rollouts(rollouts):
        facts["saved_rollouts"] = replay.describe_rollouts(rollouts)
    evaluation = _evaluation(path)
    if evaluation is not None:
        facts["evaluation"] = evaluation
    return facts


def _evaluation(path: Path) -> Facts | None:
    """Return the share of crossings that each pilot finished; None if nobody looked."""
    file = path / "evaluation" / "evaluation.json"
    if not file.is_file() or file.stat().st_size > _MAX_BYTES:
        return None
    try:
        results = json.loads(file.read_text())["results"]
        return {name: found["rates"]["success"]["mean"] for name, found in results.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"damaged": str(file)}


@dataclass(frozen=True)
class RunFacts:
    """A run, as one row beside others.

    Attributes:
        name: Of its folder; the whole path where names repeat.
        state: done, stopped, or active: something was logged within a minute.
        iteration: The last one logged.
        frames: Up to there.
        seconds: Of all iterations.
        validation: Best share of crossings on validation maps.
        evaluation: Share of crossings on unseen worlds, by pilot.
        settings: All of them, by their dotted names.
    """

    name: str
    state: str
    iteration: int
    frames: float
    seconds: float
    validation: float | None
    evaluation: dict[str, float]
    settings: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Comparison:
    """Runs, and the settings in which they differ: the values by setting and run."""

    runs: list[RunFacts]
    differences: dict[str, dict[str, Any]]


def compare(paths: Sequence[Path]) -> Comparison:
    """Put runs side by side."""
    unique = len({path.name for path in paths}) == len(paths)
    runs = [_run_facts(path, path.name if unique else str(path)) for path in paths]
    keys = sorted({key for run in runs for key in run.settings} - _OWN)
    values = {key: {run.name: run.settings.get(key) for run in runs} for key in keys}
    differences = {
        key: found for key, found in values.items() if len(set(map(str, found.values()))) > 1
    }
    return Comparison(runs, differences)


def _run_facts(path: Path, name: str) -> RunFacts:
    metrics = path / "metrics.jsonl"
    last: Facts = {}
    seconds, validation = 0.0, None
    for row in _rows(metrics):
        last = row
        seconds += row.get("perf/iteration") or 0.0
        share = row.get("validation/success")
        if share is not None and (validation is None or share > validation):
            validation = share
    state = "stopped"
    if (path / "checkpoints" / "checkpoint_final.pt").exists():
        state = "done"
    elif metrics.is_file() and time.time() - metrics.stat().st_mtime < _ACTIVE_S:
        state = "active"
    shares = {k: v for k, v in (_evaluation(path) or {}).items() if isinstance(v, float)}
    settings = dict(_flattened(_load_yaml(path / "config.yaml")))
    return RunFacts(
        name,
        state,
        int(last.get("step") or 0),
        float(last.get("env_frames") or 0),
        seconds,
        validation,
        shares,
        settings,
    )


def _rows(path: Path) -> Iterator[Facts]:
    """Yield the whole rows of a file of metrics."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def _flattened(content: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _flattened(value, f"{place}.{key}" if place else str(key))
    elif place:
        yield place, content


def rate_note(rollouts: Path, fps: int) -> str | None:
    """Say that the rollouts of a run have another rate than a dataset of them; None if not."""
    run = next((each for each in (rollouts, *rollouts.parents[:3]) if is_run(each)), None)
    if run is None:
        return None
    found = _settings(run / "config.yaml", ("sim.substeps", "env._target_"))
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


def _settings(path: Path, names: Sequence[str] = _SHOWN) -> Facts:
    content = _load_yaml(path)
    if content is None:
        return {"damaged": str(path)}
    values = dict(_flattened(content))
    return {name: values[name] for name in names if values.get(name) is not None}


def _load_yaml(path: Path) -> Any:
    """Return what a YAML file holds; None if it is damaged."""
    if path.stat().st_size > _MAX_BYTES:
        return None
    try:
        return YAML(typ="safe").load(path) or {}
    except (YAMLError, UnicodeDecodeError):
        return None


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


def text(facts: Facts) -> str:
    """Lay it out for the terminal."""
    settings = "  ".join(f"{name}={value}" for name, value in facts["settings"].items())
    lines = [("path", facts["path"]), ("kind", "training run"), ("settings", settings)]
    last = facts["last"]
    if last:
        frames = last.get("env_frames") or 0
        how_far = f"iteration {last.get('step')}, {frames / 1e6:.2f} M frames"
        success = last.get("train/success")
        if success is not None:
            how_far += f", {success:.1%} of the last training episodes succeeded"
        lines.append(("how far", how_far))
    if "evaluation" in facts:
        shares = [
            f"{name} {share}" if isinstance(share, str) else f"{name} {share:.1%}"
            for name, share in facts["evaluation"].items()
        ]
        lines.append(("evaluation", ", ".join(shares)))
    if "saved_rollouts" in facts:
        rollouts = facts["saved_rollouts"]
        count, size = len(rollouts["rollouts"]), rollouts.get("size_bytes", 0)
        lines.append(("rollouts", f"{count}, {format_bytes(size)}"))
    return f"{aligned(lines)}\n\n{checkpoint.folder_text(facts['checkpoints'])}"
