"""The shield, compiled: the same arithmetic in the same order, without work that cannot matter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.core.kernels.native import compiled
from penstock.nav.shield.shield import (
    COLLISION_COST,
    DEPTH_COST,
    DEVIATION_COST,
    LATE_S,
    Floats,
    Rules,
)


@compiled
def choose(
    velocity: Floats,
    lidar: Floats,
    obstacles: Floats,
    current: Floats,
    height: Floats,
    rules: Rules,
    best: NDArray[np.int64],
) -> None:
    """Do what `choose_in_numpy` does."""
    candidates, beams, shares, times = rules.candidates, rules.beams, rules.shares, rules.times
    keep, steps = rules.keep_static, len(shares)
    points = np.empty((len(beams), 3))
    fastest = 0.0
    for c in range(len(candidates)):
        fastest = max(fastest, _squares(candidates[c, 0], candidates[c, 1], candidates[c, 2]))
    for n in range(len(velocity)):
        vx, vy, vz = velocity[n, 0], velocity[n, 1], velocity[n, 2]
        cx, cy, cz = current[n, 0], current[n, 1], current[n, 2]
        # No candidate gets farther than this, so hits beyond need no look. A little is added, lest
        # rounding makes a difference to the other back end.
        wanted = np.sqrt(max(fastest, _squares(vx, vy, vz)))
        now = np.sqrt(_squares(cx, cy, cz))
        reach = keep + 1e-6 + (shares[steps - 1, 0] * wanted + shares[steps - 1, 1] * now)
        count = 0
        for k in range(len(beams)):
            if lidar[n, k] > 0.0:
                distance = rules.range_m - lidar[n, k]
                if distance * np.sqrt(_squares(beams[k, 0], beams[k, 1], 0.0)) < reach:
                    for axis in range(3):
                        points[count, axis] = distance * beams[k, axis]
                    count += 1
        seen = 0  # the nearest come first, so that those out of sight are mostly at the end
        for k in range(obstacles.shape[1]):
            if not np.isnan(obstacles[n, k, 0]):
                seen = k + 1
        moving, level = obstacles[n, :seen], height[n]
        cheapest = np.inf
        for c in range(len(candidates) + 1):
            if c:
                wx, wy, wz = candidates[c - 1, 0], candidates[c - 1, 1], candidates[c - 1, 2]
            else:
                wx, wy, wz = vx, vy, vz
            cost = DEVIATION_COST * np.sqrt(_squares(wx - vx, wy - vy, wz - vz))
            deepest = 0.0
            if cost < cheapest:
                for step in range(steps):
                    x = shares[step, 0] * wx + shares[step, 1] * cx
                    y = shares[step, 0] * wy + shares[step, 1] * cy
                    z = shares[step, 0] * wz + shares[step, 1] * cz
                    inside = _into_points(points[:count], x, y, z, keep)
                    inside = max(
                        inside, _into_moving(moving, x, y, z, times[step], rules.keep_dynamic)
                    )
                    if level + z < rules.floor:  # never of NaN
                        inside = max(inside, rules.floor - (level + z))
                    if level + z > rules.ceiling:
                        inside = max(inside, level + z - rules.ceiling)
                    if inside > 0.0:
                        if deepest == 0.0:
                            cost = COLLISION_COST * (LATE_S - times[step]) + cost
                        deepest = max(deepest, inside)
                        if cost + DEPTH_COST * deepest >= cheapest:
                            break
                cost = cost + DEPTH_COST * deepest
                if cost < cheapest:
                    cheapest = cost
                    best[n] = c
            if cheapest == 0.0:
                break  # what is wanted is safe


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
def _into_moving(moving: Floats, x: float, y: float, z: float, time: float, keep: float) -> float:
    """How deep a place is inside a moving obstacle, in the plane; NaN is inside of nothing."""
    deepest = 0.0
    for k in range(moving.shape[0]):
        reach = moving[k, 6] + keep
        dx = x - (moving[k, 0] + time * moving[k, 3])
        dy = y - (moving[k, 1] + time * moving[k, 4])
        flat = dx * dx + dy * dy
        if flat < reach * reach:
            dz = z - (moving[k, 2] + time * moving[k, 5])
            if not abs(dz) >= 0.5 + keep:
                deepest = max(deepest, reach - np.sqrt(flat))
    return deepest
