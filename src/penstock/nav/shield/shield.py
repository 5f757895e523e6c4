"""Velocities checked by short looks ahead, and exchanged for the nearest safe one.

The velocity that the policy wants and 97 others (16 headings x 3 climbs x 2 speeds, and a stop) are
rolled forward with the response of the drone: against the dynamic obstacles in sight, which go on
as they are going, and against the lidar hits and all that is below them. A velocity costs 10 for
every second that it collides before 2 s, 20 for every metre that it intrudes, and 0.3 for every m/s
that it differs from what the policy wants; the cheapest is flown. (The intrusion decides where all
collide at once: without it, a drone inside the margin would fly on.) Two back ends do the same in
the same order, in double precision, so that they agree; neither needs torch.

Fly with it, but train without: policies trained behind a shield lean on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.errors import MissingExtra, UsageError
from penstock.nav.shield import reference
from penstock.nav.simulation.task import Settings
from penstock.ui.suggestions import did_you_mean

BACKENDS = ("numba", "numpy")


@dataclass(frozen=True)
class ShieldSettings:
    """What the shield assumes of the drone and its sensor; see the module for the cost."""

    dynamic_margin_m: float = 0.10
    static_margin_m: float = 0.05
    radius_m: float = 0.3
    speed_limit: float = 2.0
    horizon_s: float = 1.65
    step_s: float = 0.15
    response_s: float = 0.5
    """Time constant of the velocity."""
    lidar_range_m: float = 4.0
    elevations_deg: tuple[float, ...] = (-10.0, 0.0, 10.0, 20.0)
    azimuths: int = 36
    floor_m: float = 0.2
    ceiling_m: float = 4.0

    def __post_init__(self) -> None:
        for name in ("radius_m", "speed_limit", "horizon_s", "step_s", "response_s"):
            if not (value := getattr(self, name)) > 0.0:
                raise UsageError(f"shield: {name} is {value!r}; give a number above 0")
        for name in ("dynamic_margin_m", "static_margin_m"):
            if not (value := getattr(self, name)) >= 0.0:
                raise UsageError(f"shield: {name} is {value!r}; give metres, 0 or more")


class Tables(NamedTuple):
    """What a shield computes once."""

    candidates: NDArray[np.float64]
    beams: NDArray[np.float64]
    shares: NDArray[np.float64]


class Shield:
    """Exchanges velocities that would collide.

    All vectors are in the goal frame; the lidar shares it as long as the drone keeps its heading.
    Arrays and tensors are taken, and given back as they came.

    Args:
        margins: Distance kept beyond the radius of the drone: from dynamic obstacles, from static
            ones, in metres. Larger ones were worse: gaps close.
        backend: "numba" (about 10 us per drone) or "numpy" (the reference, for a few drones).
        settings: Everything else; its margins are replaced by `margins` if those are given.

    Raises:
        UsageError: An unknown back end, or a negative margin.

    Example:
        shield = Shield()
        velocity, changed = shield.filter(wanted, obs, obs["state"][:, 5:8])
        shield.interventions, shield.decisions
    """

    def __init__(
        self,
        margins: tuple[float, float] | None = None,
        backend: str = "numba",
        settings: ShieldSettings | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise UsageError(
                f"there is no shield back end {backend!r}; {did_you_mean(backend, BACKENDS)}"
            )
        base = settings or ShieldSettings()
        if margins is not None:
            base = replace(base, dynamic_margin_m=margins[0], static_margin_m=margins[1])
        self.backend = backend
        self.settings = base
        self.decisions = 0
        self.interventions = 0
        self._tables = Tables(
            candidates(base.speed_limit),
            beams(base.azimuths, base.elevations_deg),
            response(base),
        )

    @classmethod
    def for_task(
        cls,
        settings: Settings,
        margins: tuple[float, float] | None = None,
        backend: str = "numba",
    ) -> Self:
        """Return a shield that fits the drone and the lidar of some settings."""
        fitted = ShieldSettings(
            speed_limit=settings.action_limit,
            lidar_range_m=settings.lidar_range_m,
            elevations_deg=tuple(np.degrees(settings.elevations).tolist()),
            azimuths=settings.lidar_beams[0],
        )
        return cls(margins, backend, fitted)

    def filter(
        self, velocity: Any, obs: Mapping[str, Any], current: Any, height: Any = None
    ) -> tuple[Any, Any]:
        """Return the velocities to fly, and where they are not those that were wanted.

        Args:
            velocity: [N, 3], what the policy wants.
            obs: Observations; lidar [N, 1, 36, 4] and dynamic_obstacle [N, 5, 10] are looked at.
            current: [N, 3], how the drone moves now.
            height: [N] above the ground, if it is known: then velocities that would leave the
                flight levels count as collisions.

        Returns:
            Velocities [N, 3], and the interventions, [N] bool.

        Raises:
            UsageError: Shapes do not fit together.
        """
        count = len(velocity)
        settings = self.settings
        lidar, obstacles = _array(obs["lidar"]), _array(obs["dynamic_obstacle"])
        parts = {
            "velocity": _array(velocity),
            # With or without axes of length 1.
            "lidar": lidar.reshape(len(lidar), math.prod(lidar.shape[1:])),
            "dynamic_obstacle": obstacles.reshape(
                len(obstacles), math.prod(obstacles.shape[1:-1]), obstacles.shape[-1]
            ),
            "current": _array(current),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "velocity": (count, 3),
            "lidar": (count, settings.azimuths * len(settings.elevations_deg)),
            "dynamic_obstacle": (count, parts["dynamic_obstacle"].shape[1], 10),
            "current": (count, 3),
        }
        if height is not None:
            parts["height"], shapes["height"] = _array(height), (count,)
        for name, array in parts.items():
            if array.shape != shapes[name]:
                raise UsageError(
                    f"shield: {name} has shape {list(array.shape)}; give {list(shapes[name])}"
                )
        run = self._numba if self.backend == "numba" else self._numpy
        order = ("velocity", "lidar", "dynamic_obstacle", "current", "height")
        best = run(*(parts.get(name) for name in order))
        changed = best > 0
        self.decisions += count
        self.interventions += int(changed.sum())
        flown = np.where(changed[:, None], self._tables.candidates[best - 1], parts["velocity"])
        if isinstance(velocity, np.ndarray):
            return flown.astype(velocity.dtype), changed
        which = velocity.new_tensor(changed).bool()
        return velocity.new_tensor(flown).where(which[:, None], velocity), which

    def state_dict(self) -> dict[str, int]:
        """Return the counters."""
        return {"decisions": self.decisions, "interventions": self.interventions}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue counting."""
        self.decisions, self.interventions = state["decisions"], state["interventions"]

    def _numpy(
        self, velocity: Any, lidar: Any, obstacles: Any, current: Any, height: Any
    ) -> NDArray[np.int64]:
        return reference.choose(
            velocity, lidar, obstacles, current, height, self._tables, self.settings
        )

    def _numba(
        self, velocity: Any, lidar: Any, obstacles: Any, current: Any, height: Any
    ) -> NDArray[np.int64]:
        try:
            from penstock.nav.shield import kernels
        except ModuleNotFoundError as error:
            raise MissingExtra("numba", "rl") from error
        settings = self.settings
        best = np.empty(len(velocity), np.int64)
        kernels.choose(
            velocity,
            lidar,
            obstacles,
            current,
            np.full(1, np.nan) if height is None else height,
            *self._tables,
            settings.step_s,
            settings.lidar_range_m,
            settings.radius_m + settings.static_margin_m,
            settings.radius_m + settings.dynamic_margin_m,
            settings.floor_m + settings.static_margin_m,
            settings.ceiling_m - settings.static_margin_m,
            reference.LATE_S,
            reference.COLLISION_COST,
            reference.DEVIATION_COST,
            reference.DEPTH_COST,
            best,
        )
        return best


def _array(value: Any) -> NDArray[np.float64]:
    """Take an array or a tensor of any device."""
    if not isinstance(value, np.ndarray):
        value = value.detach().cpu().numpy()
    return np.ascontiguousarray(value, np.float64)


def candidates(speed_limit: float) -> NDArray[np.float64]:
    """Return the velocities to choose from, [97, 3]: a stop, then by speed, climb and heading."""
    rows = [(0.0, 0.0, 0.0)]
    for speed in (speed_limit, speed_limit / 2):
        for climb in (0.0, -speed / 2, speed / 2):
            for heading in range(16):
                angle = heading * math.pi / 8
                rows.append((speed * math.cos(angle), speed * math.sin(angle), climb))
    return np.array(rows)


def beams(azimuths: int, elevations_deg: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the unit vectors of the lidar, azimuth by azimuth, [beams, 3]."""
    rows = []
    for i in range(azimuths):
        azimuth = 2 * math.pi * i / azimuths
        for degrees in elevations_deg:
            up = math.radians(degrees)
            flat = math.cos(up)
            rows.append((flat * math.cos(azimuth), flat * math.sin(azimuth), math.sin(up)))
    return np.array(rows)


def response(settings: ShieldSettings) -> NDArray[np.float64]:
    """Return how far the drone gets, per step: weights of the wanted and the current velocity.

    The velocity approaches the wanted one exponentially, so its integral is exact: place after t =
    t x wanted + response x (1 - exp(-t / response)) x (current - wanted).
    """
    steps = round(settings.horizon_s / settings.step_s)
    times = settings.step_s * np.arange(1, steps + 1)
    lag = settings.response_s * -np.expm1(-times / settings.response_s)
    return np.ascontiguousarray(np.stack((times - lag, lag), 1))
