"""The shield in plain numpy: slow for many drones, obvious, and all that one drone needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from penstock.nav.shield.shield import ShieldSettings, Tables

Floats = NDArray[np.float64]
Moving = tuple[Floats, Floats, Floats, NDArray[np.bool_]]

LATE_S = 2.0
COLLISION_COST = 10.0
DEVIATION_COST = 0.3
DEPTH_COST = 20.0


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
        hit = lidar[n] > 0.0
        points = (settings.lidar_range_m - lidar[n][hit])[:, None] * tables.beams[hit]
        moving = read_obstacles(obstacles[n])
        level = None if height is None else float(height[n])
        scene = (points, moving, current[n], level, tables.shares, settings)
        # Mostly what is wanted is safe, and the others need no look.
        if _cost(wanted[None], wanted, *scene)[0] > 0.0:
            every = np.concatenate((wanted[None], tables.candidates))
            best[n] = _cost(every, wanted, *scene).argmin()
    return best


def _cost(
    candidates: Floats,
    wanted: Floats,
    points: Floats,
    moving: Moving,
    current: Floats,
    height: float | None,
    shares: Floats,
    settings: ShieldSettings,
) -> Floats:
    """What each candidate costs, [C]: every point and obstacle is looked at, at every step."""
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
    late = np.where(inside > 0.0, times[:, None], LATE_S).min(0)
    change = candidates - wanted
    x, y, z = change.T
    deviation = np.sqrt(x * x + y * y + z * z)
    cost = COLLISION_COST * (LATE_S - late) + DEVIATION_COST * deviation
    result: Floats = cost + DEPTH_COST * inside.max(0)
    return result


def read_obstacles(obstacles: Floats) -> Moving:
    """Turn the observed obstacles of one drone, [M, 10], into what the shield looks at.

    Returns:
        Of those in sight: places and velocities [m, 3], half widths [m], and whether they are
        cylinders from floor to ceiling [m].
    """
    seen = obstacles[(obstacles[:, :5] != 0.0).any(1)]
    x, y = seen[:, 0], seen[:, 1]
    scale = seen[:, 3] / np.maximum(np.sqrt(x * x + y * y), 1e-9)
    place = np.stack((x * scale, y * scale, seen[:, 4]), 1)
    return place, seen[:, 5:8], (seen[:, 8] + 1.0) * 0.125, seen[:, 9] == 0.0
