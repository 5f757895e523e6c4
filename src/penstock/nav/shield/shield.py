"""Velocities checked by short looks ahead, and exchanged for the nearest safe one.

The velocity that the policy wants and 97 others (16 headings x 3 climbs x 2 speeds, and a stop) are
rolled forward with the response of the drone: against the dynamic obstacles in sight, which go on
as they are going, and against the lidar hits and all that is below them. A velocity costs 10 for
every second that it collides before 2 s, 20 for every metre that it intrudes, and 0.3 for every m/s
that it differs from what the policy wants; the cheapest is flown. (The intrusion decides where all
collide at once: without it, a drone inside the margin would fly on.) Two back ends do the same in
the same order, in double precision, so that they agree.

Fly with it, but train without: policies trained behind a shield lean on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import MissingExtra, UsageError
from penstock.nav.shield import reference
from penstock.ui.suggestions import did_you_mean

BACKENDS = ("numba", "torch")


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


class Shield:
    """Exchanges velocities that would collide.

    All vectors are in the goal frame; the lidar shares it as long as the drone keeps its heading.

    Args:
        margins: Distance kept beyond the radius of the drone: from dynamic obstacles, from static
            ones, in metres. Larger ones were worse: gaps close.
        backend: "numba" (CPU, about 10 us per drone) or "torch" (any device, the reference).
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
            values = {
                **base.__dict__,
                "dynamic_margin_m": margins[0],
                "static_margin_m": margins[1],
            }
            base = ShieldSettings(**values)
        self.backend = backend
        self.settings = base
        self.decisions = 0
        self.interventions = 0
        self._tables = {
            "candidates": candidates(base.speed_limit),
            "beams": beams(base.azimuths, base.elevations_deg),
            "shares": response(base),
        }

    def filter(
        self,
        velocity: Tensor,
        obs: Mapping[str, Tensor],
        current: Tensor,
        height: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
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
        beams = self.settings.azimuths * len(self.settings.elevations_deg)
        lidar = obs["lidar"].flatten(1)
        obstacles = obs["dynamic_obstacle"].flatten(1, -2)  # with or without an axis of agents
        for name, tensor, shape in (
            ("velocity", velocity, (count, 3)),
            ("current", current, (count, 3)),
            ("lidar", lidar, (count, beams)),
            ("dynamic_obstacle", obstacles, (count, obstacles.shape[1], 10)),
            ("height", height if height is not None else velocity[:, 0], (count,)),
        ):
            if tensor.shape != shape:
                raise UsageError(
                    f"shield: {name} has shape {list(tensor.shape)}; give {list(shape)}"
                )
        run = self._numba if self.backend == "numba" else self._torch
        result, changed = run(velocity, lidar, obstacles, current, height)
        self.decisions += count
        self.interventions += int(changed.sum())
        return result, changed

    def state_dict(self) -> dict[str, int]:
        """Return the counters."""
        return {"decisions": self.decisions, "interventions": self.interventions}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue counting."""
        self.decisions, self.interventions = state["decisions"], state["interventions"]

    def _torch(
        self, velocity: Tensor, lidar: Tensor, obstacles: Tensor, current: Tensor, height: Any
    ) -> tuple[Tensor, Tensor]:
        device = velocity.device
        tables = {
            name: torch.as_tensor(table, device=device) for name, table in self._tables.items()
        }
        best = reference.choose(
            velocity.double(),
            lidar.double(),
            obstacles.double(),
            current.double(),
            None if height is None else height.double(),
            tables,
            self.settings,
        )
        changed = best > 0
        chosen = tables["candidates"][(best - 1).clamp(min=0)].to(velocity.dtype)
        return torch.where(changed[:, None], chosen, velocity), changed

    def _numba(
        self, velocity: Tensor, lidar: Tensor, obstacles: Tensor, current: Tensor, height: Any
    ) -> tuple[Tensor, Tensor]:
        try:
            from penstock.nav.shield import kernels
        except ModuleNotFoundError as error:
            raise MissingExtra("numba", "rl") from error
        settings = self.settings
        if velocity.device.type != "cpu":
            raise UsageError("shield: the numba back end runs on the CPU; use backend='torch'")
        best = np.empty(len(velocity), np.int64)
        kernels.choose(
            *(_array(tensor) for tensor in (velocity, lidar, obstacles, current)),
            np.full(1, np.nan) if height is None else _array(height),
            self._tables["candidates"],
            self._tables["beams"],
            self._tables["shares"],
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
        index = torch.from_numpy(best)
        changed = index > 0
        table = torch.from_numpy(self._tables["candidates"]).to(velocity.dtype)
        return torch.where(changed[:, None], table[(index - 1).clamp_(min=0)], velocity), changed


def _array(tensor: Tensor) -> NDArray[np.float64]:
    return np.ascontiguousarray(tensor.detach().numpy(), np.float64)


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
