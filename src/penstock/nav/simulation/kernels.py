"""Compiled code of the simulator: one call moves and observes a range of drones, without the GIL.

Each sensor, each reward term and each disturbance has its place here, and only here; tests hold
them against slow and obvious code (tests/nav/reference.py). Arithmetic is in double precision,
states and observations are kept in single precision; what is observed is computed from the kept
state, so that a restored simulator observes the same bits.
"""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from penstock.core.kernels.native import compiled
from penstock.nav.simulation.task import (
    AX,
    AXIS_X,
    AXIS_Y,
    DIRECTION_X,
    DIRECTION_Y,
    HEADING_X,
    HEADING_Y,
    HIGHEST,
    LOWEST,
    PHYSICS_DT_S,
    QW,
    QX,
    QY,
    QZ,
    RATE_P,
    RATE_Q,
    RATE_R,
    RETURN,
    ROTOR,
    TARGET_X,
    TARGET_Y,
    TARGET_Z,
    VX,
    VY,
    VZ,
    Disturbances,
    Obstacle,
    Reward,
    X,
    Y,
    Z,
)
from penstock.nav.simulation.world import CELLS, GROUND_M

GRAVITY = 9.81
MASS_KG = 0.716
INERTIA = (0.007, 0.007, 0.012)
ARM_M = 0.17
MAX_THRUST_N = 838.0**2 * 8.54858e-6
DRAG_RATIO = 1.3677729e-7 / 8.54858e-6  # moment per thrust of a rotor, m
ROTOR_RESPONSE = 0.43  # share of the way to its target that a throttle goes in one physics step
VELOCITY_GAIN = 2.2
ATTITUDE_GAIN = (0.7, 0.7, 0.035)  # N m per unit of attitude error
RATE_GAIN = (0.1, 0.1, 0.025)
FAST_LAG_S = 0.12
HOVER_THROTTLE = math.sqrt(MASS_KG * GRAVITY / (4 * MAX_THRUST_N))
RADIUS_M = 0.3  # of a drone
GOAL_M = 0.5
LOW_M, HIGH_M = 0.2, 4.0  # flight levels
TOLERANCE_M = 0.2  # above and below the corridor

# Columns of what disturbs a drone: its own values of this episode, then its last actions.
LIGHTER, WIND_X, WIND_Y, DRIFT_X, DRIFT_Y, PENDING = range(6)

_J0, _J1, _J2 = INERTIA
_R0, _R1, _R2 = ATTITUDE_GAIN
_W0, _W1, _W2 = RATE_GAIN
_DT = PHYSICS_DT_S
_ASIN = math.pi / 2 - 1
_TINY = 1e-9
_DISTANCE, _RISE, _WIDTH, _FLOATS = (
    Obstacle.DISTANCE,
    Obstacle.RISE,
    Obstacle.WIDTH,
    Obstacle.FLOATS,
)
_MOTION = Obstacle.VELOCITY.start
_PLACE = Obstacle.PLACE.stop
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT = (np.uint64(30), np.uint64(27), np.uint64(31))
_LOW_16 = np.uint64(0xFFFF)
_16, _32, _48, _11 = np.uint64(16), np.uint64(32), np.uint64(48), np.uint64(11)

# Weights and strengths by their names in task.py: a new one is there for the kernels at once.
Weights: Any = namedtuple("Weights", [item.name for item in fields(Reward)])  # type: ignore[misc]
Strengths: Any = namedtuple(  # type: ignore[misc]
    "Strengths", [item.name for item in fields(Disturbances)]
)


class Constants(NamedTuple):
    """Numbers of the task."""

    hummingbird: bool
    hold_yaw: bool
    substeps: int
    steps: int
    limit: float
    range_m: float
    dynamic: bool
    free: float
    """What the logarithms of free space pay, if they are not relative to it."""
    weights: Any


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
    """Observations to write, by their names."""

    state: Any
    lidar: Any
    direction: Any
    dynamic_obstacle: Any


class Outcome(NamedTuple):
    """Results of a step to write; `flags` are static, dynamic, height, goal."""

    reward: Any
    terminated: Any
    truncated: Any
    flags: Any
    position: Any


class Trouble(NamedTuple):
    """Disturbances of each drone."""

    there: bool
    strengths: Any
    """`Strengths`."""
    own: Any
    """[n, PENDING + 3 * latency], see the columns."""
    seeds: Any
    """Of the random numbers of each episode, uint64 [n]."""


# ---------------------------------------------------------------------- flight


@compiled
def fly_fast(
    row: Any,
    wx: float,
    wy: float,
    wz: float,
    substeps: int,
    lighter: float,
    wind_x: float,
    wind_y: float,
) -> None:
    """Answer to a velocity command with a second-order response.

    Args:
        row: The drone.
        wx: Commanded velocity in the world, and so on.
        wy: Likewise.
        wz: Likewise.
        substeps: Physics steps.
        lighter: Mass that the controller believes in / mass.
        wind_x: Acceleration by wind.
        wind_y: Likewise.
    """
    for axis in range(3):
        wish = wx if axis == 0 else (wy if axis == 1 else wz)
        wind = wind_x if axis == 0 else (wind_y if axis == 1 else 0.0)
        weight = GRAVITY * (lighter - 1.0) if axis == 2 else 0.0
        place, speed = np.float64(row[X + axis]), np.float64(row[VX + axis])
        push = np.float64(row[AX + axis])
        gain = VELOCITY_GAIN * lighter
        for _ in range(substeps):
            push += _DT / FAST_LAG_S * (gain * (wish - speed) + weight - push)
            speed += (push + wind) * _DT
            place += speed * _DT
        row[X + axis], row[VX + axis], row[AX + axis] = place, speed, push


@compiled
def _rotor(wanted: float, throttle: float) -> float:
    share = min(max(wanted * (1.0 / MAX_THRUST_N), 0.0), 1.0)
    return throttle + ROTOR_RESPONSE * (math.sqrt(share) - throttle)


@compiled
def fly_hummingbird(
    row: Any,
    wx: float,
    wy: float,
    wz: float,
    substeps: int,
    hold_yaw: bool,
    lighter: float,
    wind_x: float,
    wind_y: float,
) -> None:
    """Answer to a velocity command with a Lee controller, four rotors and a rigid body."""
    px, py, pz = np.float64(row[X]), np.float64(row[Y]), np.float64(row[Z])
    vx, vy, vz = np.float64(row[VX]), np.float64(row[VY]), np.float64(row[VZ])
    qw, qx = np.float64(row[QW]), np.float64(row[QX])
    qy, qz = np.float64(row[QY]), np.float64(row[QZ])
    p, q = np.float64(row[RATE_P]), np.float64(row[RATE_Q])
    r = np.float64(row[RATE_R])
    h0, h1 = np.float64(row[ROTOR]), np.float64(row[ROTOR + 1])
    h2, h3 = np.float64(row[ROTOR + 2]), np.float64(row[ROTOR + 3])
    for _ in range(substeps):
        # The axes of the body.
        ax, ay, az = 1 - 2 * (qy * qy + qz * qz), 2 * (qx * qy + qw * qz), 2 * (qx * qz - qw * qy)
        bx, by, bz = 2 * (qx * qy - qw * qz), 1 - 2 * (qx * qx + qz * qz), 2 * (qy * qz + qw * qx)
        cx, cy, cz = 2 * (qx * qz + qw * qy), 2 * (qy * qz - qw * qx), 1 - 2 * (qx * qx + qy * qy)
        # The axes it should have: thrust along the wanted acceleration, the yaw it has.
        gx, gy = VELOCITY_GAIN * (wx - vx), VELOCITY_GAIN * (wy - vy)
        gz = VELOCITY_GAIN * (wz - vz) + GRAVITY
        scale = 1.0 / max(math.sqrt(gx * gx + gy * gy + gz * gz), 1e-6)
        tx, ty, tz = gx * scale, gy * scale, gz * scale
        scale = 1.0 / max(math.sqrt(ax * ax + ay * ay), 1e-6)
        yc, ys = ax * scale, ay * scale
        if hold_yaw:
            yc, ys = np.float64(row[AXIS_X]), np.float64(row[AXIS_Y])
        sx, sy, sz = -tz * ys, tz * yc, tx * ys - ty * yc
        scale = 1.0 / max(math.sqrt(sx * sx + sy * sy + sz * sz), 1e-6)
        sx, sy, sz = sx * scale, sy * scale, sz * scale
        fx, fy, fz = sy * tz - sz * ty, sz * tx - sx * tz, sx * ty - sy * tx
        e0 = 0.5 * ((tx * bx + ty * by + tz * bz) - (sx * cx + sy * cy + sz * cz))
        e1 = 0.5 * ((fx * cx + fy * cy + fz * cz) - (tx * ax + ty * ay + tz * az))
        e2 = 0.5 * ((sx * ax + sy * ay + sz * az) - (fx * bx + fy * by + fz * bz))
        m0, m1, m2 = -_R0 * e0 - _W0 * p, -_R1 * e1 - _W1 * q, -_R2 * e2 - _W2 * r
        force = MASS_KG * (gx * cx + gy * cy + gz * cz)
        # Rotors 0 and 2 lie on the x axis, 1 and 3 on the y axis, and turn the other way.
        along = 0.5 * (force - m2 * (1.0 / DRAG_RATIO))
        beside = 0.5 * (force + m2 * (1.0 / DRAG_RATIO))
        h0 = _rotor(0.5 * (along - m1 * (1.0 / ARM_M)), h0)
        h1 = _rotor(0.5 * (beside + m0 * (1.0 / ARM_M)), h1)
        h2 = _rotor(0.5 * (along + m1 * (1.0 / ARM_M)), h2)
        h3 = _rotor(0.5 * (beside - m0 * (1.0 / ARM_M)), h3)
        t0, t1 = MAX_THRUST_N * h0 * h0, MAX_THRUST_N * h1 * h1
        t2, t3 = MAX_THRUST_N * h2 * h2, MAX_THRUST_N * h3 * h3
        lift = (t0 + t1 + t2 + t3) * (lighter / MASS_KG)
        vx += (lift * cx + wind_x) * _DT
        vy += (lift * cy + wind_y) * _DT
        vz += (lift * cz - GRAVITY) * _DT
        px += vx * _DT
        py += vy * _DT
        pz += vz * _DT
        m0, m1, m2 = ARM_M * (t1 - t3), ARM_M * (t2 - t0), DRAG_RATIO * (t1 + t3 - t0 - t2)
        dp = (m0 - (_J2 - _J1) * q * r) * (1.0 / _J0)
        dq = (m1 - (_J0 - _J2) * r * p) * (1.0 / _J1)
        dr = (m2 - (_J1 - _J0) * p * q) * (1.0 / _J2)
        p += dp * _DT
        q += dq * _DT
        r += dr * _DT
        half = 0.5 * _DT
        ow, ox, oy, oz = qw, qx, qy, qz
        qw = ow - half * (ox * p + oy * q + oz * r)
        qx = ox + half * (ow * p + oy * r - oz * q)
        qy = oy + half * (ow * q + oz * p - ox * r)
        qz = oz + half * (ow * r + ox * q - oy * p)
        scale = 1.0 / max(math.sqrt(qw * qw + qx * qx + qy * qy + qz * qz), 1e-6)
        qw, qx, qy, qz = qw * scale, qx * scale, qy * scale, qz * scale
    row[X], row[Y], row[Z] = px, py, pz
    row[VX], row[VY], row[VZ] = vx, vy, vz
    row[QW], row[QX], row[QY], row[QZ] = qw, qx, qy, qz
    row[RATE_P], row[RATE_Q], row[RATE_R] = p, q, r
    row[ROTOR], row[ROTOR + 1], row[ROTOR + 2], row[ROTOR + 3] = h0, h1, h2, h3
    ax, ay = 1 - 2 * (qy * qy + qz * qz), 2 * (qx * qy + qw * qz)
    scale = 1.0 / max(math.sqrt(ax * ax + ay * ay), 1e-6)
    row[HEADING_X], row[HEADING_Y] = ax * scale, ay * scale


# ---------------------------------------------------------------------- sensors


@compiled
def _angle(y: float, x: float) -> float:
    """The angle of a vector, to 1e-3: an interval of beams needs no more, and it is 5 x faster."""
    ax, ay = abs(x), abs(y)
    small = min(ax, ay) / max(max(ax, ay), _TINY)
    s = small * small
    angle = ((-0.0464964749 * s + 0.15931422) * s - 0.327622764) * s * small + small
    if ay > ax:
        angle = 0.5 * math.pi - angle
    if x < 0.0:
        angle = math.pi - angle
    return -angle if y < 0.0 else angle


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
        rays: Room, [6, beams].
        best: Horizontal distances, [around, high]; its reach if nothing is hit.
    """
    around, high = best.shape
    px, py, pz = np.float64(row[X]), np.float64(row[Y]), np.float64(row[Z])
    hc, hs = np.float64(row[HEADING_X]), np.float64(row[HEADING_Y])
    rx, ry, ix, iy, first, last = rays[0], rays[1], rays[2], rays[3], rays[4], rays[5]
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
        start, count = 0, around
        if away2 > round2:
            middle = _angle(hc * my - hs * mx, hc * mx + hs * my) * per_radian
            sine = math.sqrt(round2 / away2)
            # asin(s) <= s + (pi/2 - 1) s^3, for all s: its series has positive terms only.
            half = (sine + _ASIN * sine * sine * sine + 1e-3) * per_radian
            start = math.ceil(middle - half)
            count = min(math.floor(middle + half) - start + 1, around)
            if start < 0:
                start += around
        rise = np.float64(box[4]) - pz
        for k in range(high):
            low, top = -pz * beams.inverse_slope[k], rise * beams.inverse_slope[k]
            first[k], last[k] = min(low, top), max(low, top)
        for number in range(count):
            i = start + number
            if i >= around:
                i -= around
            a, b = x0 * ix[i], x1 * ix[i]
            c, d = y0 * iy[i], y1 * iy[i]
            enter = max(min(a, b), min(c, d), 0.0)
            leave = min(max(a, b), max(c, d))
            if enter > leave or enter >= range_m:
                continue
            for k in range(high):
                t = max(enter, first[k])
                if t <= min(leave, last[k]) and t < best[i, k]:
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
    px, py = np.float64(row[X]), np.float64(row[Y])
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
    ux, uy = np.float64(row[AXIS_X]), np.float64(row[AXIS_Y])
    for n in range(found):
        j = int(order[1, n])
        dx, dy = places[j, 0] - px, places[j, 1] - py
        dz = 0.0 if scene.tall[j] else np.float64(places[j, 2]) - row[Z]
        flat = math.sqrt(order[0, n])
        away = math.sqrt(order[0, n] + dz * dz)
        scale = 1.0 / max(away, 1e-6)
        v = scene.velocity[world, j]
        out[n, 0] = (dx * ux + dy * uy) * scale
        out[n, 1] = (dy * ux - dx * uy) * scale
        out[n, 2] = dz * scale
        out[n, _DISTANCE] = flat
        out[n, _RISE] = dz
        out[n, _MOTION] = v[0] * ux + v[1] * uy
        out[n, _MOTION + 1] = v[1] * ux - v[0] * uy
        out[n, _MOTION + 2] = v[2]
        out[n, _WIDTH] = scene.width[j] * 4.0 - 1.0
        out[n, _FLOATS] = 0.0 if scene.tall[j] else 1.0
        gap = min(max(away - 0.5 * scene.width[j], 1e-6), range_m)
        product *= gap * share
        beside = flat <= 0.5 * scene.width[j] + RADIUS_M
        if beside and abs(dz) <= 0.5 * scene.height[j] + RADIUS_M:
            hit = True
    return math.log(product) / count, hit


@compiled
def look(row: Any, drift_x: float, drift_y: float, state: Any, direction: Any) -> None:
    """Write where the target seems to be, and how the drone moves."""
    ux, uy = np.float64(row[AXIS_X]), np.float64(row[AXIS_Y])
    dx = np.float64(row[TARGET_X]) - row[X] - drift_x
    dy = np.float64(row[TARGET_Y]) - row[Y] - drift_y
    dz = np.float64(row[TARGET_Z]) - row[Z]
    scale = 1.0 / max(math.sqrt(dx * dx + dy * dy + dz * dz), 1e-6)
    state[0] = (dx * ux + dy * uy) * scale
    state[1] = (dy * ux - dx * uy) * scale
    state[2] = dz * scale
    state[3] = math.sqrt(dx * dx + dy * dy)
    state[4] = dz
    state[5] = row[VX] * ux + row[VY] * uy
    state[6] = row[VY] * ux - row[VX] * uy
    state[7] = row[VZ]
    direction[0, 0], direction[0, 1], direction[0, 2] = row[DIRECTION_X], row[DIRECTION_Y], 0.0


# ---------------------------------------------------------------------- disturbances


@compiled
def _hash(seed: Any, step: int, number: int) -> Any:
    """64 random bits for a number of a step of an episode: nothing is kept between draws."""
    x = seed + np.uint64(step * 1024 + number) * _MIX
    x = (x ^ (x >> _SHIFT[0])) * _MIX_1
    x = (x ^ (x >> _SHIFT[1])) * _MIX_2
    return x ^ (x >> _SHIFT[2])


@compiled
def _uniform(seed: Any, step: int, number: int) -> float:
    return float(_hash(seed, step, number) >> _11) * (1.0 / 9007199254740992.0)


@compiled
def _normal(bits: Any) -> float:
    """About normal, from 48 bits: a sum of three."""
    total = float(bits & _LOW_16) + float((bits >> _16) & _LOW_16) + float((bits >> _32) & _LOW_16)
    return (total * (1.0 / 65536.0) - 1.5) * 2.0


@compiled
def disturb(
    seed: Any, step: int, strengths: Any, range_m: float, shown: Any, obstacles: Any
) -> None:
    """Disturb an observation of lidar and moving obstacles."""
    flat = shown.reshape(shown.size)
    if strengths.range_m > 0.0 or strengths.dropout > 0.0:
        for n in range(flat.size):
            if flat[n] > 0.0:
                bits = _hash(seed, step, n)
                noisy = flat[n] + strengths.range_m * _normal(bits)
                lost = float(bits >> _48) * (1.0 / 65536.0) < strengths.dropout
                flat[n] = 0.0 if lost else min(max(noisy, 0.0), range_m)
    base = flat.size
    kept = 0
    for n in range(obstacles.shape[0]):
        there = False
        for column in range(_PLACE):
            there |= obstacles[n, column] != 0.0
        if there and _uniform(seed, step, base + n) >= strengths.missed:
            if kept < n:
                obstacles[kept] = obstacles[n]
            kept += 1
    obstacles[kept:] = 0.0
    if kept < obstacles.shape[0] and _uniform(seed, step, base + 50) < strengths.ghosts:
        angle = 2 * math.pi * _uniform(seed, step, base + 51)
        away = 0.5 + (range_m - 0.5) * _uniform(seed, step, base + 52)
        ghost = obstacles[kept]
        ghost[0], ghost[1], ghost[_DISTANCE] = math.cos(angle), math.sin(angle), away
        for axis in range(2):
            ghost[_MOTION + axis] = 2.0 * _uniform(seed, step, base + 53 + axis) - 1.0
        ghost[_WIDTH] = math.floor(4.0 * _uniform(seed, step, base + 55))


@compiled
def begin_trouble(which: Any, trouble: Trouble, draws: Any) -> None:
    """Draw what disturbs some drones in their next episodes; `draws` are uniform, [n, 3]."""
    for n in range(which.size):
        own, u = trouble.own[which[n]], draws[n]
        angle, force = 2 * math.pi * u[0], trouble.strengths.wind * math.sqrt(u[1])
        own[LIGHTER] = 1.0 / (1.0 + trouble.strengths.mass * (2.0 * u[2] - 1.0))
        own[WIND_X], own[WIND_Y] = force * math.cos(angle), force * math.sin(angle)
        own[DRIFT_X] = own[DRIFT_Y] = 0.0
        own[PENDING:] = 0.5  # nothing was commanded yet


# ---------------------------------------------------------------------- a step of everything


@compiled
def _observe(
    e: int,
    row: Any,
    step: int,
    scene: Scene,
    active: int,
    beams: Beams,
    c: Constants,
    seen: Seen,
    trouble: Trouble,
    rays: Any,
    best: Any,
    order: Any,
    away2: Any,
) -> tuple[float, float, float, bool]:
    """Write the observation of a drone; return what its true state says for the reward."""
    world = scene.world_of[e]
    drift_x = drift_y = 0.0
    if trouble.there:
        drift_x, drift_y = trouble.own[e, DRIFT_X], trouble.own[e, DRIFT_Y]
    look(row, drift_x, drift_y, seen.state[e], seen.direction[e])
    scan(row, world, scene, beams, c.range_m, rays, best)
    static_log, nearest = lidar(best, beams, c.range_m, seen.lidar[e])
    obstacles = seen.dynamic_obstacle[e]
    moving_log, hit = moving(row, world, scene, active, c.range_m, order, away2, obstacles)
    if trouble.there:
        disturb(trouble.seeds[e], step, trouble.strengths, c.range_m, seen.lidar[e], obstacles)
    return static_log, nearest, moving_log, hit


@compiled
def observe(
    indices: Any,
    rows: Any,
    progress: Any,
    scene: Scene,
    active: int,
    beams: Beams,
    c: Constants,
    seen: Seen,
    trouble: Trouble,
) -> None:
    """Write the observations of some drones."""
    around, high = seen.lidar.shape[2], seen.lidar.shape[3]
    rays, best = np.empty((6, max(around, high))), np.empty((around, high))
    order, away2 = np.empty((2, seen.dynamic_obstacle.shape[1])), np.empty(scene.width.size)
    room = (rays, best, order, away2)
    for e in indices:
        _observe(e, rows[e], progress[e], scene, active, beams, c, seen, trouble, *room)


@compiled
def step(
    begin: int,
    end: int,
    action: Any,
    rows: Any,
    progress: Any,
    scene: Scene,
    active: int,
    beams: Beams,
    c: Constants,
    seen: Seen,
    trouble: Trouble,
    outcome: Outcome,
) -> None:
    """Move, observe and judge the drones of a range."""
    around, high = seen.lidar.shape[2], seen.lidar.shape[3]
    rays, best = np.empty((6, max(around, high))), np.empty((around, high))
    order, away2 = np.empty((2, seen.dynamic_obstacle.shape[1])), np.empty(scene.width.size)
    room = (rays, best, order, away2)
    w = c.weights
    walk = math.sqrt(_DT * c.substeps)
    command = np.empty(3)
    for e in range(begin, end):
        row = rows[e]
        ux, uy = np.float64(row[AXIS_X]), np.float64(row[AXIS_Y])
        lighter, wind_x, wind_y = 1.0, 0.0, 0.0
        command[:] = action[e]
        if trouble.there:
            own = trouble.own[e]
            lighter, wind_x, wind_y = own[LIGHTER], own[WIND_X], own[WIND_Y]
            _delay(own, trouble.strengths.latency, command)
            for axis in range(2):  # numbers 1000 and 1001 of the step before: no beam has them
                walked = _normal(_hash(trouble.seeds[e], progress[e], 1000 + axis))
                own[DRIFT_X + axis] += trouble.strengths.drift_m * walk * walked
        forward = (2.0 * command[0] - 1.0) * c.limit
        side = (2.0 * command[1] - 1.0) * c.limit
        up = (2.0 * command[2] - 1.0) * c.limit
        ox, oy, oz = np.float64(row[VX]), np.float64(row[VY]), np.float64(row[VZ])
        wx, wy = forward * ux - side * uy, forward * uy + side * ux
        if c.hummingbird:
            fly_hummingbird(row, wx, wy, up, c.substeps, c.hold_yaw, lighter, wind_x, wind_y)
        else:
            fly_fast(row, wx, wy, up, c.substeps, lighter, wind_x, wind_y)
        progress[e] += 1
        static_log, nearest, moving_log, hit = _observe(
            e, row, progress[e], scene, active, beams, c, seen, trouble, *room
        )

        dx, dy, dz = row[TARGET_X] - row[X], row[TARGET_Y] - row[Y], row[TARGET_Z] - row[Z]
        away = math.sqrt(np.float64(dx) * dx + np.float64(dy) * dy + np.float64(dz) * dz)
        z = np.float64(row[Z])
        touched = nearest < RADIUS_M
        outside = not (LOW_M <= z <= HIGH_M)  # NaN, too
        crash = touched or hit or outside
        reached = away < GOAL_M and not crash

        # The reward, term by term.
        towards = (row[VX] * dx + row[VY] * dy + row[VZ] * dz) / max(away, 1e-6)
        reward = w.velocity * towards + w.constant + c.free + w.static * static_log
        if c.dynamic:
            reward += w.dynamic * moving_log
        jx, jy, jz = row[VX] - ox, row[VY] - oy, row[VZ] - oz
        reward -= w.smoothness * math.sqrt(jx * jx + jy * jy + jz * jz)
        excess = max(z - row[HIGHEST] - TOLERANCE_M, row[LOWEST] - TOLERANCE_M - z, 0.0)
        reward -= w.height * excess * excess
        if crash:
            reward += w.collision
        if reached and w.goal_ends:
            reward += w.goal

        ended = crash or (reached and w.goal_ends)
        row[RETURN] += reward
        outcome.reward[e] = reward
        outcome.terminated[e] = ended
        outcome.truncated[e] = progress[e] >= c.steps and not ended
        flags = outcome.flags[e]
        flags[0], flags[1], flags[2], flags[3] = touched, hit, outside, reached
        outcome.position[e] = row[: Z + 1]


@compiled
def _delay(own: Any, latency: int, command: Any) -> None:
    """Put a command behind those that are still to be flown, and take the one that is due."""
    for axis in range(3):
        for late in range(latency):
            at = PENDING + 3 * (latency - 1 - late) + axis
            command[axis], own[at] = own[at], command[axis]
