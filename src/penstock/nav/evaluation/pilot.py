"""A trained policy that flies: read from a checkpoint, with the shield, for any drone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from penstock.checkpoints.load import from_newest, load_checkpoint, load_metadata, resolve
from penstock.errors import DataError, UnknownFormat, UsageError
from penstock.nav.evaluation.crossing import Pilot, shield_for, steady
from penstock.nav.learning.policy import PRESETS, Policy
from penstock.nav.shield import Shield
from penstock.nav.simulation.geometry import to_world
from penstock.nav.simulation.results import Observation
from penstock.nav.simulation.task import Reward, Settings
from penstock.ui.suggestions import did_you_mean

CHECKPOINTS = "checkpoints"  # folder of a run
BEST = "best.pt"
_SWITCH = ("on", "off")


class Navigator:
    """Decides velocities from observations: the mean action of a policy, filtered by the shield.

    Args:
        policy: What decides.
        settings: What it was trained with: speed limit, lidar.
        shield: What filters; None for nothing.
        path: The checkpoint that it came from, if any.
        metadata: Of that checkpoint.

    Example:
        navigator = Navigator.load("runs/x")
        velocity = navigator.velocity(obs)  # [n, 3], m/s, world frame
        navigator.interventions
    """

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        shield: Shield | None = None,
        path: Path | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.policy = policy.eval()
        self.settings = settings
        self.shield = shield
        self.path = path
        self.metadata = dict(metadata or {})
        self._pilot = steady(policy)

    @classmethod
    def load(
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
        if shield not in _SWITCH:
            raise UsageError(f"shield={shield!r} is unknown; {did_you_mean(shield, _SWITCH)}")
        file, state, metadata = _read(Path(path), checkpoint)
        settings = _settings(file, metadata)
        policy = _policy(file, state)
        return cls(
            policy,
            settings,
            shield_for(settings, margins) if shield == "on" else None,
            file,
            metadata,
        )

    @property
    def pilot(self) -> Pilot:
        """The policy alone, for `fly`."""
        return self._pilot

    @property
    def decisions(self) -> int:
        """How many velocities the shield looked at."""
        return self.shield.decisions if self.shield else 0

    @property
    def interventions(self) -> int:
        """How many velocities the shield exchanged."""
        return self.shield.interventions if self.shield else 0

    @torch.no_grad()
    def action(self, obs: Observation, height: Tensor | None = None) -> Tensor:
        """Return actions [n, 3] from 0 to 1 in the goal frame, as the simulator takes them.

        Args:
            obs: Observations [n, ...]; axes of length 1 may be more or fewer.
            height: Above the ground, [n], where it is known: the shield then keeps the drone
                between its lowest and highest flight level.

        Raises:
            UsageError: An observation is missing, of another shape, or not finite.
        """
        limit = self.settings.action_limit
        return (self._wanted(obs, height) / (2.0 * limit) + 0.5).clamp(0.0, 1.0)

    @torch.no_grad()
    def velocity(self, obs: Observation, height: Tensor | None = None) -> Tensor:
        """Return velocities [n, 3] in m/s, in the frame of the world that `direction` is in.

        Args:
            obs: As for `action`, and direction: from start to target, [n, 3].
            height: As for `action`.

        Raises:
            UsageError: As for `action`.
        """
        wanted = self._wanted(obs, height)
        way = self._checked(obs, "direction").flatten(1)[:, :2]
        length = torch.linalg.vector_norm(way, dim=1, keepdim=True)
        ahead = way.new_tensor([1.0, 0.0])  # what the simulator takes for a target overhead
        return to_world(wanted, torch.where(length < 1e-6, ahead, way / length.clamp(min=1e-6)))

    def _wanted(self, obs: Observation, height: Tensor | None) -> Tensor:
        names = ("state", "lidar", "dynamic_obstacle")
        seen = {name: self._checked(obs, name) for name in names}
        velocity = (self._pilot(seen) * 2.0 - 1.0) * self.settings.action_limit
        if self.shield is None:
            return velocity
        return self.shield.filter(velocity, seen, seen["state"][:, 5:8], height)[0]

    def _checked(self, obs: Observation, name: str) -> Tensor:
        value, shape = obs.get(name), self.settings.shapes()[name]
        if value is None:
            raise UsageError(f"the observation has no {name!r}; give [n, {_words(shape)}]")
        plain = [size for size in value.shape[1:] if size != 1]
        if value.ndim < 2 or plain != [size for size in shape if size != 1]:
            raise UsageError(
                f"observation {name!r} is {list(value.shape)}; give [n, {_words(shape)}]"
            )
        if not bool(torch.isfinite(value).all()):
            raise UsageError(f"observation {name!r} has values that are not finite; check sensors")
        return value.float().reshape(len(value), *shape)


def _words(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


# ---------------------------------------------------------------------- reading


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
        best = [folder / BEST, folder / f"{BEST}.lz4"]
        checkpoint = BEST if any(file.is_file() for file in best) else "latest"
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
    if not isinstance(metadata, dict) or not isinstance(metadata.get("settings"), dict):
        raise UnknownFormat(f"{path} does not say its navigation settings; {_TRAINED}")
    return path, state, metadata


_TRAINED = "give a checkpoint of penstock train"


def _settings(path: Path, metadata: Mapping[str, Any]) -> Settings:
    given = dict(metadata["settings"])
    try:
        if isinstance(given.get("reward"), dict):
            given["reward"] = Reward(**_known(Reward, given["reward"]))
        return Settings(**_known(Settings, given))
    except (UsageError, TypeError, ValueError) as error:
        raise UnknownFormat(f"{path}: its settings cannot be used: {error}") from error


def _known(kind: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    known = [item.name for item in fields(kind)]
    for name in given:
        if name not in known:
            raise UsageError(
                f"there is no setting {name!r}, written by another version of penstock"
            )
    return given


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
    policy = Policy(preset)
    mine = policy.state_dict()
    for name, tensor in mine.items():
        other = weights.get(name)
        if not isinstance(other, Tensor) or other.shape != tensor.shape:
            there = list(other.shape) if isinstance(other, Tensor) else "missing"
            raise UnknownFormat(
                f"{path} is of another network than {preset!r}: {name} is {there} there, "
                f"{list(tensor.shape)} here"
            )
        if not bool(torch.isfinite(other).all()):
            raise DataError(f"{path}: {name} is not finite; take an earlier checkpoint")
    if more := sorted(set(weights) - set(mine)):
        raise UnknownFormat(f"{path} is of another network than {preset!r}: it has {more[0]}, too")
    policy.load_state_dict(weights)
    return policy
