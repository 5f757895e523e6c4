"""Compiled code of the simulator: one call moves and observes a range of drones, without the GIL.

The same formulas as in geometry.py and reference.py, which are the ones to read first.
Arithmetic is in double precision, states and observations are kept in single precision; what is
observed is computed from the kept state, so that a restored simulator observes the same bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from penstock.core.kernels.native import compiled
from penstock.nav.simulation.kernels_flight import fly_fast, fly_hummingbird
from penstock.nav.simulation.world import CELLS, GROUND_M

_ASIN = math.pi / 2 - 1
_TINY = 1e-9


class Constants(NamedTuple):
    """Numbers of the task."""

    hummingbird: bool
    hold_yaw: bool
    substeps: int
    steps: int
    limit: float
    range_m: float
    dynamic: bool
    velocity: float
    constant: float
    static_weight: float
    dynamic_weight: float
    smoothness: float
    height: float
    collision: float
    goal: float
    goal_ends: bool


class Beams(NamedTuple):
    """Directions of the lidar: around, by elevation, and 1 / cosine of the elevation of each."""

    cosine: Any
    sine: Any
    inverse_slope: Any
    reach: Any
    stretch: Any


class Scene(NamedTuple):
    """What the drones fly through."""

    world_of: Any
    boxes: Any
    starts: Any
    members: Any
    flat: Any
    position: Any
    velocity: Any
    width: Any
    height: Any
    tall: Any


class Seen(NamedTuple):
    """Observations to write."""

    state: Any
    lidar: Any
    direction: Any
    dynamic: Any


class Outcome(NamedTuple):
    """Results of a step to write; `flags` are static, dynamic, height, goal."""

    reward: Any
    terminated: Any
    truncated: Any
    flags: Any
    position: Any


@compiled
def scan(
    row: Any, world: int, scene: Scene, beams: Beams, range_m: float, rays: Any, best: Any
) -> None:
    """Find the horizontal distance at which each beam ends.

    Of each box near enough, the interval of azimuths is computed, and only those beams are tested.

    Args:
        row: The drone.
        world: Its world.
        scene: What there is to hit.
        beams: The lidar.
        range_m: Its range.
        rays: Room, [4, around].
        best: Horizontal distances, [around, high]; its reach if nothing is hit.
    """
    around, high = best.shape
    px, py, pz = np.float64(row[0]), np.float64(row[1]), np.float64(row[2])
    hc, hs = np.float64(row[20]), np.float64(row[21])
    rx, ry, ix, iy = rays[0], rays[1], rays[2], rays[3]
    for i in range(around):
        x = hc * beams.cosine[i] - hs * beams.sine[i]
        y = hs * beams.cosine[i] + hc * beams.sine[i]
        x = x if abs(x) > _TINY else _TINY
        y = y if abs(y) > _TINY else _TINY
        rx[i], ry[i] = x, y
        # Not by "/", which looks for zeros and is not vectorised.
        ix[i], iy[i] = np.divide(1.0, x), np.divide(1.0, y)
    for i in range(around):
        for k in range(high):
            best[i, k] = beams.reach[k]
    for k in range(high):
        t = -pz * beams.inverse_slope[k]
        if 0.0 <= t < beams.reach[k]:
            for i in range(around):
                if abs(px + t * rx[i]) <= GROUND_M and abs(py + t * ry[i]) <= GROUND_M:
                    best[i, k] = t
    column, line = px + GROUND_M, py + GROUND_M
    if not (0.0 <= column < CELLS and 0.0 <= line < CELLS):  # NaN, too
        return
    cell = (world * CELLS + int(column)) * CELLS + int(line)
    per_radian = around / (2 * math.pi)
    for entry in range(scene.starts[cell], scene.starts[cell + 1]):
        box = scene.boxes[scene.members[entry]]
        x0, x1 = box[0] - px, box[1] - px
        y0, y1 = box[2] - py, box[3] - py
        nx, ny = max(x0, -x1, 0.0), max(y0, -y1, 0.0)
        if nx * nx + ny * ny > range_m * range_m:
            continue
        mx, my = 0.5 * (x0 + x1), 0.5 * (y0 + y1)
        away2 = mx * mx + my * my
        round2 = 0.25 * ((x1 - x0) * (x1 - x0) + (y1 - y0) * (y1 - y0))
        first, count = 0, around
        if away2 > round2:
            middle = math.atan2(hc * my - hs * mx, hc * mx + hs * my) * per_radian
            sine = math.sqrt(round2 / away2)
            # asin(s) <= s + (pi/2 - 1) s^3, for all s: its series has positive terms only.
            half = (sine + _ASIN * sine * sine * sine) * per_radian + 1e-6
            first = math.ceil(middle - half)
            count = min(math.floor(middle + half) - first + 1, around)
            if first < 0:
                first += around
        rise = np.float64(box[4]) - pz
        for number in range(count):
            i = first + number
            if i >= around:
                i -= around
            a, b = x0 * ix[i], x1 * ix[i]
            c, d = y0 * iy[i], y1 * iy[i]
            enter = max(min(a, b), min(c, d), 0.0)
            leave = min(max(a, b), max(c, d))
            if enter > leave or enter >= range_m:
                continue
            for k in range(high):
                low, top = -pz * beams.inverse_slope[k], rise * beams.inverse_slope[k]
                t = max(enter, min(low, top))
                if t <= min(leave, max(low, top)) and t < best[i, k]:
                    best[i, k] = t


@compiled
def lidar(best: Any, beams: Beams, range_m: float, out: Any) -> tuple[float, float]:
    """Write what the lidar shows.

    Returns:
        The mean logarithm of distance / range, and the smallest distance.
    """
    total = best.size
    ends, shown = best.reshape(total), out.reshape(total)
    for n in range(total):
        ends[n] = min(ends[n] * beams.stretch[n], range_m)
        shown[n] = range_m - ends[n]
    nearest, logs, scale = range_m, 0.0, 1.0 / range_m
    # One logarithm for the product of many (they were a fifth of the time), in four chains that do
    # not wait for each other. A factor is above 2^-23: 40 of them are a number still.
    for start in range(0, total, 160):
        a = b = c = d = 1.0
        stop = min(start + 160, total)
        whole = stop - (stop - start) % 4
        for n in range(start, whole, 4):
            a *= max(ends[n], 1e-6) * scale
            b *= max(ends[n + 1], 1e-6) * scale
            c *= max(ends[n + 2], 1e-6) * scale
            d *= max(ends[n + 3], 1e-6) * scale
            nearest = min(nearest, min(min(ends[n], ends[n + 1]), min(ends[n + 2], ends[n + 3])))
        for n in range(whole, stop):
            logs += math.log(max(ends[n], 1e-6) * scale)
            nearest = min(nearest, ends[n])
        logs += math.log(a) + math.log(b) + math.log(c) + math.log(d)
    return logs / total, nearest


@compiled
def moving(
    row: Any,
    world: int,
    scene: Scene,
    active: int,
    range_m: float,
    order: Any,
    away2: Any,
    out: Any,
) -> tuple[float, bool]:
    """Write the nearest moving obstacles.

    Args:
        row: The drone.
        world: Its world.
        scene: Where the obstacles are.
        active: How many of them count.
        range_m: How far they are seen.
        order: Room, [2, NEAREST]: squared distances and numbers of the nearest.
        away2: Room, for a number per obstacle.
        out: [NEAREST, 10].

    Returns:
        The mean logarithm of distance / range, and whether one is hit.
    """
    count = out.shape[0]
    out[:] = 0.0
    px, py = np.float64(row[0]), np.float64(row[1])
    found = 0
    limit = range_m * range_m
    places = scene.position[world]
    xs, ys = scene.flat[world, 0], scene.flat[world, 1]
    for j in range(active):  # vectorised: nearly all are far away
        dx, dy = xs[j] - px, ys[j] - py
        away2[j] = dx * dx + dy * dy
    for j in range(active):
        near = away2[j]
        if near > limit or (found == count and near >= order[0, count - 1]):
            continue
        at = found if found < count else count - 1
        while at > 0 and order[0, at - 1] > near:
            order[0, at], order[1, at] = order[0, at - 1], order[1, at - 1]
            at -= 1
        order[0, at], order[1, at] = near, j
        if found < count:
            found += 1
    product, hit, share = 1.0, False, 1.0 / range_m
    ux, uy = np.float64(row[22]), np.float64(row[23])
    for n in range(found):
        j = int(order[1, n])
        dx, dy = places[j, 0] - px, places[j, 1] - py
        dz = 0.0 if scene.tall[j] else np.float64(places[j, 2]) - row[2]
        flat = math.sqrt(order[0, n])
        away = math.sqrt(order[0, n] + dz * dz)
        scale = 1.0 / max(away, 1e-6)
        v = scene.velocity[world, j]
        out[n, 0] = (dx * ux + dy * uy) * scale
        out[n, 1] = (dy * ux - dx * uy) * scale
        out[n, 2] = dz * scale
        out[n, 3] = flat
        out[n, 4] = dz
        out[n, 5] = v[0] * ux + v[1] * uy
        out[n, 6] = v[1] * ux - v[0] * uy
        out[n, 7] = v[2]
        out[n, 8] = scene.width[j] * 4.0 - 1.0
        out[n, 9] = 0.0 if scene.tall[j] else 1.0
        gap = min(max(away - 0.5 * scene.width[j], 1e-6), range_m)
        product *= gap * share
        if flat <= 0.5 * scene.width[j] + 0.3 and abs(dz) <= 0.5 * scene.height[j] + 0.3:
            hit = True
    return math.log(product) / count, hit


@compiled
def look(row: Any, state: Any, direction: Any) -> float:
    """Write where the target is and how the drone moves.

    Returns:
        The distance of the target.
    """
    ux, uy = np.float64(row[22]), np.float64(row[23])
    dx, dy = np.float64(row[27]) - row[0], np.float64(row[28]) - row[1]
    dz = np.float64(row[29]) - row[2]
    flat = math.sqrt(dx * dx + dy * dy)
    away = math.sqrt(dx * dx + dy * dy + dz * dz)
    scale = 1.0 / max(away, 1e-6)
    state[0] = (dx * ux + dy * uy) * scale
    state[1] = (dy * ux - dx * uy) * scale
    state[2] = dz * scale
    state[3] = flat
    state[4] = dz
    state[5] = row[3] * ux + row[4] * uy
    state[6] = row[4] * ux - row[3] * uy
    state[7] = row[5]
    direction[0, 0], direction[0, 1], direction[0, 2] = row[24], row[25], 0.0
    return away


@compiled
def observe(
    indices: Any, rows: Any, scene: Scene, active: int, beams: Beams, c: Constants, seen: Seen
) -> None:
    """Write the observations of some drones."""
    around, high = seen.lidar.shape[2], seen.lidar.shape[3]
    rays, best = np.empty((4, around)), np.empty((around, high))
    order, away2 = np.empty((2, seen.dynamic.shape[1])), np.empty(scene.width.size)
    for e in indices:
        row, world = rows[e], scene.world_of[e]
        look(row, seen.state[e], seen.direction[e])
        scan(row, world, scene, beams, c.range_m, rays, best)
        lidar(best, beams, c.range_m, seen.lidar[e])
        moving(row, world, scene, active, c.range_m, order, away2, seen.dynamic[e])


@compiled
def step(
    first: int,
    last: int,
    action: Any,
    rows: Any,
    progress: Any,
    scene: Scene,
    active: int,
    beams: Beams,
    c: Constants,
    seen: Seen,
    outcome: Outcome,
) -> None:
    """Move, observe and judge the drones of a range."""
    around, high = seen.lidar.shape[2], seen.lidar.shape[3]
    rays, best = np.empty((4, around)), np.empty((around, high))
    order, away2 = np.empty((2, seen.dynamic.shape[1])), np.empty(scene.width.size)
    for e in range(first, last):
        row, world = rows[e], scene.world_of[e]
        ux, uy = np.float64(row[22]), np.float64(row[23])
        forward = (2.0 * action[e, 0] - 1.0) * c.limit
        side = (2.0 * action[e, 1] - 1.0) * c.limit
        up = (2.0 * action[e, 2] - 1.0) * c.limit
        ox, oy, oz = np.float64(row[3]), np.float64(row[4]), np.float64(row[5])
        wx, wy = forward * ux - side * uy, forward * uy + side * ux
        if c.hummingbird:
            fly_hummingbird(row, wx, wy, up, c.substeps, c.hold_yaw)
        else:
            fly_fast(row, wx, wy, up, c.substeps)
        progress[e] += 1
        away = look(row, seen.state[e], seen.direction[e])
        scan(row, world, scene, beams, c.range_m, rays, best)
        static_log, nearest = lidar(best, beams, c.range_m, seen.lidar[e])
        moving_log, hit = moving(
            row, world, scene, active, c.range_m, order, away2, seen.dynamic[e]
        )

        dx, dy, dz = row[27] - row[0], row[28] - row[1], row[29] - row[2]
        towards = (row[3] * dx + row[4] * dy + row[5] * dz) / max(away, 1e-6)
        jx, jy, jz = row[3] - ox, row[4] - oy, row[5] - oz
        jerk = math.sqrt(jx * jx + jy * jy + jz * jz)
        z = np.float64(row[2])
        excess = max(z - row[31] - 0.2, row[30] - 0.2 - z, 0.0)
        reward = c.velocity * towards + c.constant + c.static_weight * static_log
        reward -= c.smoothness * jerk + c.height * excess * excess
        if c.dynamic:
            reward += c.dynamic_weight * moving_log
        touched = nearest < 0.3
        outside = not (0.2 <= z <= 4.0)  # NaN, too
        crash = touched or hit or outside
        reached = away < 0.5 and not crash
        if crash:
            reward += c.collision
        if reached and c.goal_ends:
            reward += c.goal
        ended = crash or (reached and c.goal_ends)
        row[32] += reward
        outcome.reward[e] = reward
        outcome.terminated[e] = ended
        outcome.truncated[e] = progress[e] >= c.steps and not ended
        flags = outcome.flags[e]
        flags[0], flags[1], flags[2], flags[3] = touched, hit, outside, reached
        outcome.position[e] = row[:3]
