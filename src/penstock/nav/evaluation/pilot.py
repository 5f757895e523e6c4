"""A trained policy that flies: read from a checkpoint, with the shield, for any drone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Self

from penstock.checkpoints.load import from_newest, load_checkpoint, load_metadata, resolve
from penstock.errors import DataError, UnknownFormat, UsageError
from penstock.nav.evaluation.crossing import Pilot, deterministic_pilot
from penstock.nav.navigator import Navigator as PolicyNavigator
from penstock.nav.navigator import check_switch, read_settings
from penstock.nav.networks import PRESETS, Policy
from penstock.nav.shield import Shield
from penstock.nav.simulation.task import Settings
from penstock.ui.suggestions import did_you_mean

CHECKPOINTS = "checkpoints"  # folder of a run
BEST = "best.pt"


class Navigator(PolicyNavigator):
    """A policy straight from its checkpoint, on torch; otherwise as `penstock.nav.Navigator`.

    Example:
        navigator = Navigator.load("runs/x")
        velocity = navigator.velocity(obs, height)  # [n, 3], m/s, world frame
    """

    def __init__(self, policy: Policy, settings: Settings, *rest: Any) -> None:
        self.policy = policy.eval()
        self.pilot: Pilot = deterministic_pilot(policy)

        def decide(seen: dict[str, Any]) -> Any:
            return self.pilot({name: torch.from_numpy(seen[name]) for name in seen}).numpy()

        super().__init__(decide, settings, *rest)

    @classmethod
    def load(  # type: ignore[override]
        cls,
        path: str | os.PathLike[str],
        checkpoint: str = "best",
        shield: str = "on",
        margins: tuple[float, float] | None = None,
    ) -> Self:
        """Read a policy; nothing in the file is run.

        Args:
            path: A run, its folder of checkpoints, or a checkpoint.
            checkpoint: In a folder: "best" by validation (the newest, if there is none yet),
                "latest", or the name of a file.
            shield: "on" or "off".
            margins: Of the shield, see `Shield`.

        Raises:
            UsageError: There is no such run or checkpoint, or a word is wrong.
            DataError: The file is damaged, or no checkpoint of a navigation policy.
        """
        check_switch(shield)
        file, state, metadata = _read(Path(path), checkpoint)
        settings = read_settings(file, metadata)
        guard = Shield.for_task(settings, margins) if shield == "on" else None
        return cls(_policy(file, state), settings, guard, file, metadata)


def run_folder(path: str | os.PathLike[str]) -> Path:
    """Return the run that a path belongs to: itself, or the folder around its checkpoints."""
    where = Path(path).absolute()
    if not where.is_dir():
        where = where.parent
    return where.parent if where.name == CHECKPOINTS else where


def _read(path: Path, checkpoint: str) -> tuple[Path, Any, dict[str, Any]]:
    """Find the checkpoint that is meant, and read the policy and the metadata of one file."""
    if not path.is_dir():
        if not path.exists() and not path.parent.is_dir():
            raise UsageError(
                f"there is no run {path}; give a run, a folder of checkpoints or a checkpoint"
            )
        return _read_file(resolve(path))
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    if checkpoint == "best":
        checkpoint = BEST if (folder / BEST).is_file() else "latest"
    if checkpoint == "latest":
        found: tuple[Path, Any, dict[str, Any]] = from_newest(folder, _read_file)
        return found
    if Path(checkpoint).name != checkpoint:
        raise UsageError(f"checkpoint={checkpoint!r} is a path; give best, latest or a file name")
    return _read_file(resolve(folder / checkpoint))


def _read_file(path: Path) -> tuple[Path, Any, dict[str, Any]]:
    try:
        metadata = load_metadata(path)
        state = load_checkpoint(path, only="ppo.p*")  # policy and preset, not the optimizers
    except UsageError as error:  # nothing matches
        raise UnknownFormat(f"{path} holds no navigation policy; {_TRAINED}") from error
    return path, state, metadata or {}


_TRAINED = "give a checkpoint of penstock train"


def _policy(path: Path, state: Any) -> Policy:
    ppo: Any = state.get("ppo") if isinstance(state, dict) else None
    weights = ppo.get("policy") if isinstance(ppo, dict) else None
    if not isinstance(weights, dict):
        raise UnknownFormat(f"{path} holds no navigation policy; {_TRAINED}")
    preset = ppo.get("preset")
    if preset not in PRESETS:
        raise UnknownFormat(
            f"{path} is of the unknown network {preset!r}; {did_you_mean(preset, PRESETS)}"
        )
    policy = Policy(preset, bf16=False)  # in float32, as it is deployed, on every processor
    if misfit := policy.misfit(weights):
        raise UnknownFormat(f"{path} is of another network than {preset!r}: {misfit}")
    for name, tensor in weights.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(f"{path}: {name} is not finite; take an earlier checkpoint")
    policy.load_state_dict(weights)
    return policy
