"""The shield in plain numpy: slow for many drones, obvious, and all that one drone needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.nav.simulation.task import Obstacle

if TYPE_CHECKING:
    from penstock.nav.shield.shield import ShieldSettings, Tables

Floats = NDArray[np.float64]
Moving = tuple[Floats, Floats, Floats, NDArray[np.bool_]]

LATE_S = 2.0
COLLISION_COST = 10.0
DEVIATION_COST = 0.3
DEPTH_COST = 20.0
_STRICTER = 1e-9
_LOOKED_AT = 16  # candidates at a time: mostly one of the first is safe
_NOTHING: Moving = (np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0), np.zeros(0, np.bool_))


def choose(
    velocity: Floats,
    lidar: Floats,
    obstacles: Floats,
    current: Floats,
    height: Floats | None,
    tables: Tables,
    settings: ShieldSettings,
) -> NDArray[np.int64]:
    """Return the number of the cheapest velocity, [N]: 0 for the wanted one, k + 1 for the table's.

    Args:
        velocity: [N, 3] wanted.
        lidar: [N, beams] as observed: range minus distance.
        obstacles: [N, M, 10] as observed.
        current: [N, 3].
        height: [N], or None.
        tables: Candidates, beams and shares.
        settings: Radii and margins.
    """
    best = np.zeros(len(velocity), np.int64)
    for n, wanted in enumerate(velocity):
        hit = lidar[n].nonzero()[0]
        points = (settings.lidar_range_m - lidar[n][hit])[:, None] * tables.beams[hit]
        moving = read_obstacles(obstacles[n]) if obstacles[n].any() else _NOTHING
        level = None if height is None else float(height[n])
        scene = (points, moving, current[n], level, tables.shares, settings)
        if not _clear(wanted, *scene):
            best[n] = _cheapest(np.concatenate((wanted[None], tables.candidates)), scene)
    return best


def _clear(
    wanted: Floats,
    points: Floats,
    moving: Moving,
    current: Floats,
    height: float | None,
    shares: Floats,
    settings: ShieldSettings,
) -> bool:
    """Whether a velocity certainly meets nothing: mostly so, and then the others need no look.

    In few calls, and a little stricter than `_cheapest`, which decides where this does not.
    """
    at = shares[:, :1] * wanted + shares[:, 1:] * current  # [S, 3]
    if height is not None:
        floor = settings.floor_m + settings.static_margin_m + _STRICTER
        ceiling = settings.ceiling_m - settings.static_margin_m - _STRICTER
        levels = (at[:, 2] + height).tolist()
        if min(levels) < floor or max(levels) > ceiling:
            return False
    if len(points):
        keep = settings.radius_m + settings.static_margin_m + _STRICTER
        away = at[:, None] - points  # [S, P, 3]
        above = away[:, :, 2]
        np.maximum(above, 0.0, out=above)
        if np.einsum("spi,spi->sp", away, away).min() < keep * keep:
            return False
    place, motion, half, tall = moving
    if len(place):
        times = settings.step_s * np.arange(1, len(shares) + 1)
        keep = settings.radius_m + settings.dynamic_margin_m + _STRICTER
        away = at[:, None] - (place + times[:, None, None] * motion)  # [S, M, 3]
        near = np.hypot(away[:, :, 0], away[:, :, 1]) < half + keep
        if (near & (tall | (np.abs(away[:, :, 2]) < 0.5 + keep))).any():
            return False
    return True


def _cheapest(candidates: Floats, scene: tuple[Any, ...]) -> int:
    """Return the number of the cheapest of all candidates; the first one is what is wanted."""
    settings, steps = scene[-1], len(scene[-2])
    x, y, z = (candidates - candidates[0]).T
    deviation = DEVIATION_COST * np.sqrt(x * x + y * y + z * z)
    times = settings.step_s * np.arange(1, steps + 1)
    # A safe one costs less than any that collides, so the safe one that deviates least is it.
    if deviation.max() < COLLISION_COST * (LATE_S - times[-1]):
        order = deviation.argsort(kind="stable")
        for some in np.split(order, range(_LOOKED_AT, len(order), _LOOKED_AT)):
            safe = (_depth(candidates[some], *scene).max(0) <= 0.0).nonzero()[0]
            if len(safe):
                return int(some[safe[0]])
    inside = _depth(candidates, *scene)
    late = np.where(inside > 0.0, times[:, None], LATE_S).min(0)
    cost = COLLISION_COST * (LATE_S - late) + deviation
    return int((cost + DEPTH_COST * inside.max(0)).argmin())


def _depth(
    candidates: Floats,
    points: Floats,
    moving: Moving,
    current: Floats,
    height: float | None,
    shares: Floats,
    settings: ShieldSettings,
) -> Floats:
    """How deep each candidate is inside something at each step, [S, C]."""
    times = settings.step_s * np.arange(1, len(shares) + 1)
    at = shares[:, 0, None, None] * candidates + shares[:, 1, None, None] * current  # [S, C, 3]

    inside = np.zeros(at.shape[:2])
    keep = settings.radius_m + settings.static_margin_m
    reach = np.abs(at[..., :2]).max(axis=(0, 1)) + keep  # farther points cannot be met
    near = points[(np.abs(points[:, :2]) < reach).all(1)]
    if len(near):
        x, y, z = (at[..., axis, None] - near[:, axis] for axis in range(3))
        above = np.maximum(z, 0.0)  # boxes stand on the ground: below a hit there is no way
        away = np.sqrt((x * x + y * y + above * above).min(-1))
        inside = np.maximum(keep - away, 0.0)

    place, motion, half, tall = moving
    if len(place):
        keep = settings.radius_m + settings.dynamic_margin_m
        there = place + times[:, None, None] * motion  # [S, M, 3]
        x, y, z = (at[..., axis, None] - there[:, None, :, axis] for axis in range(3))
        level = tall | (np.abs(z) < 0.5 + keep)
        depth = ((half + keep) - np.sqrt(x * x + y * y)) * level
        inside = np.maximum(inside, depth.max(-1))

    if height is not None:
        floor = settings.floor_m + settings.static_margin_m
        ceiling = settings.ceiling_m - settings.static_margin_m
        z = height + at[..., 2]
        inside = np.maximum(inside, np.maximum(floor - z, z - ceiling))
    return inside


def read_obstacles(obstacles: Floats) -> Moving:
    """Turn the observed obstacles of one drone, [M, 10], into what the shield looks at.

    Returns:
        Of those in sight: places and velocities [m, 3], half widths [m], and whether they are
        cylinders from floor to ceiling [m].
    """
    seen = obstacles[(obstacles[:, Obstacle.PLACE] != 0.0).any(1)]
    x, y = seen[:, 0], seen[:, 1]
    scale = seen[:, Obstacle.DISTANCE] / np.maximum(np.sqrt(x * x + y * y), 1e-9)
    place = np.stack((x * scale, y * scale, seen[:, Obstacle.RISE]), 1)
    half = (seen[:, Obstacle.WIDTH] + 1.0) * 0.125
    return place, seen[:, Obstacle.VELOCITY], half, seen[:, Obstacle.FLOATS] == 0.0
