"""A trained policy that flies any drone: observations in, velocities out, the shield between.

Neither torch nor the simulator is needed: a policy that `penstock export` wrote runs on
numpy and onnxruntime.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.errors import MissingExtra, UnknownFormat, UsageError
from penstock.nav.shield.shield import Shield, as_array
from penstock.nav.simulation.task import POLICY_INPUTS, Settings, State
from penstock.ui.suggestions import did_you_mean

Floats = NDArray[np.float32]
Decide = Callable[[dict[str, Floats]], Floats]
"""Observations [n, ...] -> actions [n, 3] from 0 to 1, goal frame."""

INPUTS = POLICY_INPUTS
NOTES = "penstock"  # key of an ONNX file's metadata: settings and origin, as JSON
_SWITCH = ("on", "off")


class Navigator:
    """Decides velocities from observations: the mean action of a policy, filtered by the shield.

    Observations are float32 arrays of n drones, axes of length 1 may be more or fewer:

        state             [n, 8]         unit vector to the target (3), horizontal distance, height
                                         of the target above the drone, velocity (3)
        lidar             [n, 1, 36, 4]  range minus distance: 0 is free, 4 is contact; 36 beams
                                         counter-clockwise from ahead, 4 from low to high
        dynamic_obstacle  [n, 5, 10]     the nearest: unit vector to it (3), horizontal distance,
                                         height above the drone, velocity (3), width / 0.25 m - 1,
                                         0 for a cylinder or 1 for a box; zeros for none
        direction         [n, 1, 3]      from start to target in the world; for `velocity` only

    Metres and seconds, in the goal frame: x from start to target, horizontal, z up. Tensors are
    taken, too, and answered with tensors.

    Made of the policy, the settings that it was trained with, the shield if any, and the file that
    it came from with its metadata; see `load`.

    Example:
        navigator = Navigator.load("policy.onnx")
        velocity = navigator.velocity(obs, height)  # [n, 3], m/s, world frame
        navigator.interventions
    """

    def __init__(
        self,
        decide: Decide,
        settings: Settings,
        shield: Shield | None = None,
        path: Path | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        self.shield = shield
        self.path = path
        self.metadata = dict(metadata or {})
        self._decide = decide
        self._shapes = settings.shapes()
        self._plain = {name: _plain(shape) for name, shape in self._shapes.items()}

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        shield: str = "on",
        margins: tuple[float, float] | None = None,
        backend: str = "numpy",
    ) -> Self:
        """Read a policy that was exported as ONNX.

        Args:
            path: Of `penstock export`.
            shield: "on" or "off".
            margins: Of the shield, see `Shield`.
            backend: Of the shield; both do the same.

        Raises:
            UsageError: There is no such file, or a word is wrong.
            UnknownFormat: The file is no policy of penstock.
            MissingExtra: onnxruntime is not installed.
        """
        file = Path(path)
        if not file.is_file():
            raise UsageError(
                f"there is no policy {file}; make one with penstock export RUN policy.onnx"
            )
        check_switch(shield)
        session = open_session(file)
        noted = session.get_modelmeta().custom_metadata_map.get(NOTES)
        try:
            metadata = json.loads(noted or "{}")
        except ValueError as error:
            raise UnknownFormat(f"{file}: its settings cannot be read: {error}") from error
        settings = read_settings(file, metadata)
        guard = Shield.for_task(settings, margins, backend) if shield == "on" else None
        return cls(runner(session), settings, guard, file, metadata)

    @property
    def decisions(self) -> int:
        """How many velocities the shield looked at."""
        return self.shield.decisions if self.shield else 0

    @property
    def interventions(self) -> int:
        """How many velocities the shield exchanged."""
        return self.shield.interventions if self.shield else 0

    def action(self, obs: Mapping[str, Any], height: Any = None) -> Any:
        """Return actions [n, 3] from 0 to 1 in the goal frame, as the simulator takes them.

        Args:
            obs: Observations [n, ...], see the class.
            height: Above the ground, [n]. The shield was evaluated with it, and needs it.

        Raises:
            UsageError: An observation is missing, of another shape, or not finite; or there is a
                shield, and no height.
        """
        limit = self.settings.action_limit
        return _like(obs["state"], np.clip(self._wanted(obs, height) / (2 * limit) + 0.5, 0, 1))

    def velocity(self, obs: Mapping[str, Any], height: Any = None) -> Any:
        """Return velocities [n, 3] in m/s, in the frame of the world that `direction` is in.

        Args and errors are those of `action`, and `direction` is looked at.
        """
        wanted = self._wanted(obs, height)
        way = self._checked(obs, "direction").reshape(len(wanted), 3)[:, :2].astype(np.float64)
        length = np.hypot(way[:, 0], way[:, 1])
        way[length < 1e-6] = 1.0, 0.0  # straight up or down: the simulator takes x for ahead then
        x, y = way.T / np.where(length < 1e-6, 1.0, length)
        turned = np.array(wanted, np.float64)
        turned[:, 0] = x * wanted[:, 0] - y * wanted[:, 1]
        turned[:, 1] = y * wanted[:, 0] + x * wanted[:, 1]
        return _like(obs["state"], turned)

    def _wanted(self, obs: Mapping[str, Any], height: Any) -> Floats:
        if self.shield is not None and height is None:
            raise UsageError(
                "the shield needs the height above the ground, as it was evaluated with: give "
                "height=[n], or load the policy with shield='off'"
            )
        seen = {name: self._checked(obs, name) for name in INPUTS}
        velocity: Floats = (self._decide(seen) * 2 - 1) * np.float32(self.settings.action_limit)
        if self.shield is None:
            return velocity
        level = as_array(height, np.float32)
        if not np.isfinite(level).all():
            raise UsageError("height has values that are not finite; check sensors")
        current = seen["state"][:, State.VELOCITY]
        flown: Floats = self.shield.filter(velocity, seen, current, level)[0]
        return flown

    def _checked(self, obs: Mapping[str, Any], name: str) -> Floats:
        shape = self._shapes[name]
        if obs.get(name) is None:
            raise UsageError(f"the observation has no {name!r}; give [n, {_words(shape)}]")
        value = as_array(obs[name], np.float32)
        if value.ndim < 2 or _plain(value.shape[1:]) != self._plain[name]:
            raise UsageError(
                f"observation {name!r} is {list(value.shape)}; give [n, {_words(shape)}]"
            )
        if not math.isfinite(value.sum(dtype=np.float64)):  # finite only if all are
            raise UsageError(f"observation {name!r} has values that are not finite; check sensors")
        return value.reshape(len(value), *shape)


def _plain(shape: tuple[int, ...]) -> list[int]:
    """Return a shape without axes of length 1."""
    return [size for size in shape if size != 1]


def _words(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def check_switch(shield: str) -> None:
    """Refuse what is neither on nor off."""
    if shield not in _SWITCH:
        raise UsageError(f"shield={shield!r} is unknown; {did_you_mean(shield, _SWITCH)}")


def open_session(file: Path | bytes) -> Any:
    """Open an ONNX file, or its bytes, for one core: a policy is too small to share."""
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise MissingExtra("onnxruntime", "onnx") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(
            str(file) if isinstance(file, Path) else file,
            options,
            providers=["CPUExecutionProvider"],
        )
    except Exception as error:  # onnxruntime's errors have no common class
        line = str(error).strip().partition("\n")[0][:200]
        raise UnknownFormat(f"{file!s:.200} is no ONNX file that can be run: {line}") from error


def runner(session: Any) -> Decide:
    """Return the policy of an open ONNX file."""

    def decide(seen: dict[str, Floats]) -> Floats:
        action: Floats = session.run(("action",), {name: seen[name] for name in INPUTS})[0]
        return action

    return decide


def read_settings(path: Path, metadata: Any) -> Settings:
    """Return the settings in the notes of a checkpoint or an exported policy."""
    if not (isinstance(metadata, dict) and isinstance(metadata.get("settings"), dict)):
        raise UnknownFormat(
            f"{path} does not say its navigation settings; give a checkpoint of penstock train, or "
            "what penstock export made of it"
        )
    try:
        return Settings.from_json(metadata["settings"])
    except (UsageError, TypeError, ValueError) as error:
        raise UnknownFormat(f"{path}: its settings cannot be used: {error}") from error


def _like(given: Any, result: Any) -> Any:
    """Answer a tensor with a tensor."""
    result = result.astype(np.float32, copy=False)
    return given.new_tensor(result) if hasattr(given, "new_tensor") else result
