"""The shield, compiled: the same arithmetic in the same order, without work that cannot matter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.core.kernels.native import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled
def choose(
    velocity: Floats,
    lidar: Floats,
    obstacles: Floats,
    current: Floats,
    height: Floats,
    candidates: Floats,
    beams: Floats,
    shares: Floats,
    step_s: float,
    lidar_range: float,
    keep_static: float,
    keep_dynamic: float,
    floor: float,
    ceiling: float,
    late: float,
    collision_cost: float,
    deviation_cost: float,
    depth_cost: float,
    best: Ints,
) -> None:
    """Write the number of the cheapest velocity of each drone: 0 for the wanted one.

    `height` is one NaN if it is not known. The other arguments are those of the reference.
    """
    steps = shares.shape[0]
    points = np.empty((beams.shape[0], 3))
    moving = np.empty((obstacles.shape[1], 7))
    no_height = np.isnan(height[0]) if height.size else True
    fastest = 0.0
    for c in range(candidates.shape[0]):
        fastest = max(fastest, _squares(candidates[c, 0], candidates[c, 1], candidates[c, 2]))
    for n in range(velocity.shape[0]):
        vx, vy, vz = velocity[n, 0], velocity[n, 1], velocity[n, 2]
        cx, cy, cz = current[n, 0], current[n, 1], current[n, 2]
        # No candidate gets farther than this, so hits beyond need no look. A little is added, lest
        # rounding makes a difference to the reference.
        wanted = np.sqrt(max(fastest, _squares(vx, vy, vz)))
        now = np.sqrt(_squares(cx, cy, cz))
        reach = keep_static + 1e-6
        reach += shares[steps - 1, 0] * wanted + shares[steps - 1, 1] * now
        count = 0
        for k in range(beams.shape[0]):
            if lidar[n, k] > 0.0:
                distance = lidar_range - lidar[n, k]
                if distance * np.sqrt(_squares(beams[k, 0], beams[k, 1], 0.0)) < reach:
                    points[count, 0] = distance * beams[k, 0]
                    points[count, 1] = distance * beams[k, 1]
                    points[count, 2] = distance * beams[k, 2]
                    count += 1
        seen = _read_obstacles(obstacles[n], keep_dynamic, moving)
        level = np.nan if no_height else height[n]
        cheapest = np.inf
        chosen = 0
        for c in range(candidates.shape[0] + 1):
            if c:
                wx, wy, wz = candidates[c - 1, 0], candidates[c - 1, 1], candidates[c - 1, 2]
            else:
                wx, wy, wz = vx, vy, vz
            cost = deviation_cost * np.sqrt(_squares(wx - vx, wy - vy, wz - vz))
            deepest = 0.0
            if cost < cheapest:
                for step in range(steps):
                    x = shares[step, 0] * wx + shares[step, 1] * cx
                    y = shares[step, 0] * wy + shares[step, 1] * cy
                    z = shares[step, 0] * wz + shares[step, 1] * cz
                    time = (step + 1) * step_s
                    inside = _into_points(points[:count], x, y, z, keep_static)
                    inside = max(
                        inside, _into_moving(moving[:seen], x, y, z, time, 0.5 + keep_dynamic)
                    )
                    if level + z < floor:
                        inside = max(inside, floor - (level + z))
                    if level + z > ceiling:
                        inside = max(inside, level + z - ceiling)
                    if inside > 0.0:
                        if deepest == 0.0:
                            cost = collision_cost * (late - time) + cost
                        deepest = max(deepest, inside)
                        if cost + depth_cost * deepest >= cheapest:
                            break
                cost = cost + depth_cost * deepest
                if cost < cheapest:
                    cheapest = cost
                    chosen = c
            if cheapest == 0.0:
                break  # what is wanted is safe
        best[n] = chosen


@compiled
def _squares(x: float, y: float, z: float) -> float:
    return x * x + y * y + z * z


@compiled
def _into_points(points: Floats, x: float, y: float, z: float, keep: float) -> float:
    """How deep a place is inside the nearest hit, or what carries it: boxes stand on the ground."""
    least = keep * keep
    for k in range(points.shape[0]):
        above = max(z - points[k, 2], 0.0)
        least = min(least, _squares(x - points[k, 0], y - points[k, 1], above))
    return max(keep - np.sqrt(least), 0.0) if least < keep * keep else 0.0


@compiled
def _into_moving(
    moving: Floats, x: float, y: float, z: float, time: float, half_height: float
) -> float:
    """How deep a place is inside a moving obstacle, in the plane."""
    deepest = 0.0
    for k in range(moving.shape[0]):
        dx = x - (moving[k, 0] + time * moving[k, 3])
        dy = y - (moving[k, 1] + time * moving[k, 4])
        flat = dx * dx + dy * dy
        if flat < moving[k, 6] * moving[k, 6]:
            # A cylinder has no height (NaN): it is met at every one.
            dz = z - (moving[k, 2] + time * moving[k, 5])
            if not abs(dz) >= half_height:
                deepest = max(deepest, moving[k, 6] - np.sqrt(flat))
    return deepest


@compiled
def _read_obstacles(rows: Floats, keep: float, moving: Floats) -> int:
    """Place, velocity and reach of the obstacles in sight; return how many there are."""
    count = 0
    for k in range(rows.shape[0]):
        seen = False
        for column in range(5):
            seen |= rows[k, column] != 0.0
        if seen:
            x, y = rows[k, 0], rows[k, 1]
            scale = rows[k, 3] / max(np.sqrt(x * x + y * y), 1e-9)
            moving[count, 0] = x * scale
            moving[count, 1] = y * scale
            moving[count, 2] = np.nan if rows[k, 9] == 0.0 else rows[k, 4]
            moving[count, 3] = rows[k, 5]
            moving[count, 4] = rows[k, 6]
            moving[count, 5] = rows[k, 7]
            moving[count, 6] = (rows[k, 8] + 1.0) * 0.125 + keep
            count += 1
    return count
