"""The folder of a run, and the state in its checkpoints.

runs/x/  config.yaml  metrics.jsonl  tensorboard/  rollouts/  evaluation/
         checkpoints/  checkpoint_000100.pt …  best.pt  latest
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoints.load import load_checkpoint
from penstock.core.files import make_folder
from penstock.errors import DataError, UsageError
from penstock.nav.simulation.task import Settings
from penstock.nav.training.config import Config, load_config, write_config
from penstock.ui.suggestions import did_you_mean

BEST = "best.pt"
FINAL = "checkpoint_final.pt"


class Run:
    """The folder of a run.

    Args:
        folder: Where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        self.checkpoints = folder / "checkpoints"
        self.rollouts = folder / "rollouts"
        self.metrics = folder / "metrics.jsonl"
        self.tensorboard = folder / "tensorboard"

    @property
    def exists(self) -> bool:
        """Whether a training has begun here."""
        return self.config.exists()

    def create(self, config: Config) -> None:
        """Make the folder.

        Raises:
            UsageError: There is something already; it is left alone.
        """
        if self.folder.exists() and (not self.folder.is_dir() or any(_visible(self.folder))):
            raise UsageError(
                f"{self.folder} exists already: go on with resume={self.folder}, or give another "
                "name=… or run_dir=…"
            )
        make_folder(self.checkpoints)
        write_config(config, self.config)


def _visible(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.name.startswith(".penstock")]


def open_run(config: Config, words: Sequence[str]) -> tuple[Config, Run, dict[str, Any] | None]:
    """Return the settings, the folder and, if the run is resumed, the state to go on from.

    Args:
        config: As given; with `resume` only its words count, on top of the run's own settings.
        words: The words it was made of.

    Raises:
        UsageError: There is no such run, or none of its checkpoints can be used.
    """
    if config["resume"] is None:
        given, name = config["run_dir"], config["name"]
        name = time.strftime("%Y%m%d-%H%M%S") if name is None else str(name)
        if Path(name).name != name:
            raise UsageError(f"name={name!r} is a path; give a plain name, or run_dir=…")
        return config, Run(Path("runs") / name if given is None else Path(str(given))), None
    run = Run(Path(str(config["resume"])))
    if not run.exists:
        known = [str(path.parent) for path in run.folder.parent.glob("*/config.yaml")]
        hint = did_you_mean(str(run.folder), known) if known else "start it without resume="
        raise UsageError(f"resume={run.folder}: there is no run; {hint}")
    changes = [word for word in words if not word.lstrip("+").startswith(("resume=", "run_dir="))]
    merged = load_config([*changes, f"resume={run.folder}"], base=run.config)
    return merged, run, load_state(run)


def load_state(run: Run) -> dict[str, Any] | None:
    """Read the newest checkpoint that is whole; None if the run was stopped before the first."""
    if not run.checkpoints.is_dir() or not any(run.checkpoints.glob("*.pt")):
        return None
    state = load_checkpoint(run.checkpoints)
    missing = {"ppo", "shards", "iteration", "frames"} - set(state)
    if missing:
        raise DataError(
            f"{run.checkpoints} holds no state of `penstock train`: {sorted(missing)[0]!r} is "
            "missing"
        )
    return dict(state)


def metadata(config: Config, iteration: int, frames: int, map_seeds: Sequence[int]) -> Any:
    """Return what is kept beside a state: what the policy was trained for."""
    return {
        "settings": settings_json(config.settings),
        "preset": config.preset,
        "iteration": iteration,
        "frames": frames,
        "map_seeds": [config.settings.map_seed, max(map_seeds, default=config.settings.map_seed)],
    }


def settings_json(settings: Settings) -> dict[str, Any]:
    """Return settings as plain values, for `Settings(**…)` with `Reward(**values["reward"])`."""
    values = asdict(settings)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


# ---------------------------------------------------------------------- states as flat tensors


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Turn nested dicts of tensors and whole numbers into one dict of tensors."""
    flat: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = torch.as_tensor(value)
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `flatten` round; whole numbers stay tensors of one element."""
    state: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split("/")
        place = state
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return state
