"""Velocities checked by short looks ahead, and exchanged for the nearest safe one.

The velocity that the policy wants and 97 others (16 headings x 3 climbs x 2 speeds, and a stop) are
rolled forward with the response of the drone: against the dynamic obstacles in sight, which go on
as they are going, and against the lidar hits and all that is below them. A velocity costs 10 for
every second that it collides before 2 s, 20 for every metre that it intrudes, and 0.3 for every m/s
that it differs from what the policy wants; the cheapest is flown. (The intrusion decides where all
collide at once: without it, a drone inside the margin would fly on.) Two back ends do the same in
the same order, in double precision, so that they agree; neither needs torch. The compiled one is
for the thousands of drones of an evaluation, the other for the one that flies.

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
from penstock.nav.simulation.task import HIGH_M, LOW_M, RADIUS_M, Obstacle, Settings
from penstock.ui.suggestions import did_you_mean

Floats = NDArray[np.float64]

BACKENDS = ("numba", "numpy")
LATE_S = 2.0
COLLISION_COST = 10.0
DEVIATION_COST = 0.3
DEPTH_COST = 20.0
_LOOKED_AT = 8  # candidates at a time: mostly one of the first is safe


@dataclass(frozen=True)
class ShieldSettings:
    """What the shield assumes of the drone and its sensor; see the module for the cost."""

    dynamic_margin_m: float = 0.10
    static_margin_m: float = 0.05
    speed_limit: float = 2.0
    horizon_s: float = 1.65
    step_s: float = 0.15
    response_s: float = 0.5
    """Time constant of the velocity."""
    lidar_range_m: float = 4.0
    elevations_deg: tuple[float, ...] = (-10.0, 0.0, 10.0, 20.0)
    azimuths: int = 36

    def __post_init__(self) -> None:
        for name in ("dynamic_margin_m", "static_margin_m"):
            if not (value := getattr(self, name)) >= 0.0:
                raise UsageError(f"shield: {name} is {value!r}; give metres, 0 or more")


class Rules(NamedTuple):
    """What both back ends go by, computed once."""

    candidates: Floats
    beams: Floats
    shares: Floats
    times: Floats
    range_m: float
    keep_static: float
    keep_dynamic: float
    floor: float
    ceiling: float


class Shield:
    """Exchanges velocities that would collide.

    All vectors are in the goal frame; the lidar shares it as long as the drone keeps its heading.
    Arrays and tensors are taken, and given back as they came.

    Args:
        margins: Distance kept beyond the radius of the drone: from dynamic obstacles, from static
            ones, in metres. Larger ones were worse: gaps close.
        backend: "numba" (about 10 us per drone) or "numpy".
        settings: Everything else; its margins are replaced by `margins` if those are given.

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
        shares = response(base)
        self._rules = Rules(
            candidates(base.speed_limit),
            beams(base.azimuths, base.elevations_deg),
            shares,
            base.step_s * np.arange(1.0, len(shares) + 1),
            base.lidar_range_m,
            RADIUS_M + base.static_margin_m,
            RADIUS_M + base.dynamic_margin_m,
            LOW_M + base.static_margin_m,
            HIGH_M - base.static_margin_m,
        )

    @classmethod
    def for_task(
        cls, settings: Settings, margins: tuple[float, float] | None = None, backend: str = "numba"
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
            obs: Observations; lidar [N, 1, 36, 4] and dynamic_obstacle [N, 5, 10] are looked at,
                with or without axes of length 1.
            current: [N, 3], how the drone moves now.
            height: [N] above the ground, if it is known: then velocities that would leave the
                flight levels count as collisions.

        Returns:
            Velocities [N, 3], and the interventions, [N] bool.
        """
        count, rules = len(velocity), self._rules
        wanted, now = as_array(velocity), as_array(current)
        level = np.full(count, np.nan) if height is None else as_array(height)  # NaN: unknown
        lidar, obstacles = (as_array(obs[key]) for key in ("lidar", "dynamic_obstacle"))
        lidar = lidar.reshape(len(lidar), math.prod(lidar.shape[1:]))
        seen = math.prod(obstacles.shape[1:-1])
        obstacles = obstacles.reshape(len(obstacles), seen, obstacles.shape[-1])
        for name, array, shape in (
            ("velocity", wanted, (count, 3)),
            ("lidar", lidar, (count, len(rules.beams))),
            ("dynamic_obstacle", obstacles, (count, seen, Obstacle.SIZE)),
            ("current", now, (count, 3)),
            ("height", level, (count,)),
        ):
            if array.shape != shape:
                raise UsageError(
                    f"shield: {name} has shape {list(array.shape)}; give {list(shape)}"
                )
        choose: Any = choose_in_numpy
        if self.backend == "numba":
            try:
                from penstock.nav.shield.kernels import choose
            except ModuleNotFoundError as error:
                raise MissingExtra("numba", "rl") from error
        best = np.zeros(count, np.int64)
        choose(wanted, lidar, read_obstacles(obstacles), now, level, rules, best)
        changed = best > 0
        self.decisions += count
        self.interventions += int(changed.sum())
        flown = np.where(changed[:, None], rules.candidates[best - 1], wanted)
        if isinstance(velocity, np.ndarray):
            return flown.astype(velocity.dtype), changed
        which = velocity.new_tensor(changed).bool()
        return velocity.new_tensor(flown).where(which[:, None], velocity), which


def as_array(value: Any, dtype: Any = np.float64) -> NDArray[Any]:
    """Take an array, a list, or a tensor of any device."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.ascontiguousarray(value, dtype)


# ---------------------------------------------------------------------- what is computed once


def candidates(speed_limit: float) -> Floats:
    """Return the velocities to choose from, [97, 3]: a stop, then by speed, climb and heading."""
    rows = [(0.0, 0.0, 0.0)]
    for speed in (speed_limit, speed_limit / 2):
        for climb in (0.0, -speed / 2, speed / 2):
            for heading in range(16):
                angle = heading * math.pi / 8
                rows.append((speed * math.cos(angle), speed * math.sin(angle), climb))
    return np.array(rows)


def beams(azimuths: int, elevations_deg: tuple[float, ...]) -> Floats:
    """Return the unit vectors of the lidar, azimuth by azimuth, [beams, 3]."""
    azimuth = np.repeat(2 * np.pi / azimuths * np.arange(azimuths), len(elevations_deg))
    up = np.tile(np.radians(elevations_deg), azimuths)
    flat = np.cos(up)
    return np.stack((flat * np.cos(azimuth), flat * np.sin(azimuth), np.sin(up)), 1)


def response(settings: ShieldSettings) -> Floats:
    """Return how far the drone gets, per step: weights of the wanted and the current velocity.

    The velocity approaches the wanted one exponentially, so its integral is exact: place after t =
    t x wanted + response x (1 - exp(-t / response)) x (current - wanted).
    """
    steps = round(settings.horizon_s / settings.step_s)
    times = settings.step_s * np.arange(1, steps + 1)
    lag = settings.response_s * -np.expm1(-times / settings.response_s)
    return np.ascontiguousarray(np.stack((times - lag, lag), 1))


def read_obstacles(obstacles: Floats) -> Floats:
    """Turn observed obstacles [N, M, 10] into what both back ends look at, [N, M, 7].

    Place (3), velocity (3) and half the width, relative to the drone. A cylinder from floor to
    ceiling has no height (NaN): it is met at every one. One that is out of sight has no place.
    """
    x, y = obstacles[..., 0], obstacles[..., 1]
    scale = obstacles[..., Obstacle.DISTANCE] / np.maximum(np.sqrt(x * x + y * y), 1e-9)
    rows = np.empty((*obstacles.shape[:2], 7))
    rows[..., 0], rows[..., 1] = x * scale, y * scale
    tall = obstacles[..., Obstacle.FLOATS] == 0.0
    rows[..., 2] = np.where(tall, np.nan, obstacles[..., Obstacle.RISE])
    rows[..., 3:6] = obstacles[..., Obstacle.VELOCITY]
    rows[..., 6] = (obstacles[..., Obstacle.WIDTH] + 1.0) * 0.125
    rows[~obstacles[..., Obstacle.PLACE].any(-1), 0] = np.nan
    return rows


# ---------------------------------------------------------------------- in numpy


def choose_in_numpy(
    velocity: Floats,
    lidar: Floats,
    obstacles: Floats,
    current: Floats,
    height: Floats,
    rules: Rules,
    best: NDArray[np.int64],
) -> None:
    """Write the number of the cheapest velocity, [N]: 0 for the wanted one, k + 1 for candidate k.

    The lidar is [N, beams] as observed, range minus distance; obstacles are of `read_obstacles`.
    """
    for n, wanted in enumerate(velocity):
        hit = (lidar[n] > 0.0).nonzero()[0]
        points = (rules.range_m - lidar[n][hit])[:, None] * rules.beams[hit]
        moving = obstacles[n][~np.isnan(obstacles[n, :, 0])]
        scene = (points, moving, current[n], float(height[n]), rules)
        if (_depth(wanted[None], *scene) > 0.0).any():  # mostly it meets nothing
            best[n] = _cheapest(np.concatenate((wanted[None], rules.candidates)), scene)


def _cheapest(options: Floats, scene: tuple[Any, ...]) -> int:
    """Return the number of the cheapest velocity; the first one is what is wanted."""
    times = scene[-1].times
    x, y, z = (options - options[0]).T
    deviation = DEVIATION_COST * np.sqrt(x * x + y * y + z * z)
    # A safe one costs less than any that collides, so the safe one that deviates least is it.
    if deviation.max() < COLLISION_COST * (LATE_S - times[-1]):
        order = deviation.argsort(kind="stable")
        for begin in range(0, len(order), _LOOKED_AT):
            some = order[begin : begin + _LOOKED_AT]
            safe = (_depth(options[some], *scene).max(0) <= 0.0).nonzero()[0]
            if len(safe):
                return int(some[safe[0]])
    inside = _depth(options, *scene)
    late = np.where(inside > 0.0, times[:, None], LATE_S).min(0)
    cost = COLLISION_COST * (LATE_S - late) + deviation
    return int((cost + DEPTH_COST * inside.max(0)).argmin())


def _depth(
    options: Floats, points: Floats, moving: Floats, current: Floats, height: float, rules: Rules
) -> Floats:
    """How deep each velocity is inside something at each step, [S, C]."""
    shares = rules.shares
    at = shares[:, 0, None, None] * options + shares[:, 1, None, None] * current  # [S, C, 3]
    inside = np.zeros(at.shape[:2])
    keep = rules.keep_static
    reach = np.abs(at[..., :2]).max(axis=(0, 1)) + keep  # farther points cannot be met
    near = points[(np.abs(points[:, :2]) < reach).all(1)]
    if len(near):
        x, y, z = (at[..., axis, None] - near[:, axis] for axis in range(3))
        np.maximum(z, 0.0, out=z)  # boxes stand on the ground: below a hit there is no way
        for each in (x, y, z):
            each *= each
        x += y
        x += z
        inside = np.maximum(keep - np.sqrt(x.min(-1)), 0.0)
    if len(moving):
        keep = rules.keep_dynamic
        there = moving[:, :3] + rules.times[:, None, None] * moving[:, 3:6]  # [S, M, 3]
        x, y, z = (at[..., axis, None] - there[:, None, :, axis] for axis in range(3))
        level = ~(np.abs(z) >= 0.5 + keep)
        depth = ((moving[:, 6] + keep) - np.sqrt(x * x + y * y)) * level
        inside = np.maximum(inside, depth.max(-1))
    if not math.isnan(height):
        z = height + at[..., 2]
        inside = np.maximum(inside, np.maximum(rules.floor - z, z - rules.ceiling))
    return inside
