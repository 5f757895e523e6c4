"""Compiled code of the simulator: drones moved, observed and judged, without the GIL.

Each sensor, each reward term and each disturbance has its place here, and only here; tests hold
them against slow and obvious code (tests/nav/reference.py). Arithmetic is in double precision,
states and observations are kept in single precision; what is observed is computed from the kept
state, so that a restored simulator observes the same bits.

Loops over drones take numbers out of arrays, not rows: a view counts references, which costs more
than what is done with it.
"""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.core.kernels import native
from penstock.nav.simulation.task import (
    EDGE_M,
    HIGH_M,
    LOW_M,
    PHYSICS_DT_S,
    RADIUS_M,
    Disturbances,
    Obstacle,
    Reward,
)
from penstock.nav.simulation.world import CELLS, GROUND_M

compiled = partial(native.compiled, error_model="numpy")
Vector = tuple[float, float, float]

# The state of a drone is one row, so that a kernel finds it in a few cache lines, and so that it
# is saved and restored whole. Kernels use the single columns, others the slices.
X, Y, Z, VX, VY, VZ, AX, AY, AZ = range(9)
QW, QX, QY, QZ, RATE_P, RATE_Q, RATE_R = range(9, 16)
ROTOR = 16  # the first of four
HEADING_X, HEADING_Y, AXIS_X, AXIS_Y, DIRECTION_X, DIRECTION_Y = range(20, 26)
TARGET_X, TARGET_Y, TARGET_Z, LOWEST, HIGHEST, RETURN = range(27, 33)
ROW = 33
POSITION = slice(X, Z + 1)
VELOCITY = slice(VX, VZ + 1)
QUATERNION = slice(QW, QZ + 1)  # w, x, y, z
RATES = slice(RATE_P, RATE_R + 1)  # body frame, rad/s
AXIS = slice(AXIS_X, AXIS_Y + 1)  # the x axis of the goal frame: unit, horizontal

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
GOAL_M = 0.5
TOLERANCE_M = 0.2  # above and below the corridor

# Columns of what a drone truly senses: what rewards and collisions are of.
STATIC_LOG, NEAREST_M, MOVING_LOG, HIT, DELTA_V = range(5)
FELT = 5

# Columns of what disturbs a drone: its own values of this episode, then its last actions.
LIGHTER, WIND_X, WIND_Y, DRIFT_X, DRIFT_Y, PENDING = range(6)

_J0, _J1, _J2 = INERTIA
_R0, _R1, _R2 = ATTITUDE_GAIN
_W0, _W1, _W2 = RATE_GAIN
_DT = PHYSICS_DT_S
_ASIN = math.pi / 2 - 1
_TINY = 1e-9
_DISTANCE, _RISE = Obstacle.DISTANCE, Obstacle.RISE
_WIDTH, _FLOATS = Obstacle.WIDTH, Obstacle.FLOATS
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


class Task(NamedTuple):
    """Numbers of the task, and the directions of the lidar."""

    hummingbird: bool
    hold_yaw: bool
    disturbed: bool
    substeps: int
    steps: int
    limit: float
    range_m: float
    dynamic: bool
    free: float
    """What the logarithms of free space pay, if they are not relative to it."""
    weights: Any
    cosine: Any
    """Of each azimuth, as is the sine."""
    sine: Any
    inverse_slope: Any
    """Of each elevation."""
    reach: Any
    """Horizontal, of each beam."""
    stretch: Any
    """1 / cosine of the elevation of each beam."""


class Scene(NamedTuple):
    """What the drones fly through; of the moving obstacles the first `active` are there."""

    active: int
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


class Drones(NamedTuple):
    """What is known of each drone, and the results of a step."""

    rows: Any
    progress: Any
    own: Any
    """Its disturbances, [n, PENDING + 3 * latency], see the columns."""
    seeds: Any
    """Of the random numbers of its episode, uint64 [n]."""
    felt: Any
    """[n, FELT], see the columns."""
    reward: Any
    terminated: Any
    truncated: Any
    flags: Any
    """Static, dynamic, height, goal."""
    position: Any


class Seen(NamedTuple):
    """Observations to write, by their names."""

    state: Any
    lidar: Any
    direction: Any
    dynamic_obstacle: Any


# ---------------------------------------------------------------------- starts


@compiled
def training_places(draws: Any, crossing_share: float) -> Any:
    """Turn uniform random numbers [n, DRAWS] into starts and targets on the edges, [2, n, 3]."""
    places = np.empty((2, len(draws), 3), np.float32)
    for n in range(len(draws)):
        edge = int(4 * draws[n, 0])
        opposite = draws[n, 6] < crossing_share
        for end in range(2):
            if end:
                edge = edge ^ 1 if opposite else int(4 * draws[n, 3])
            along = EDGE_M * (2 * np.float64(draws[n, 3 * end + 1]) - 1)
            beside = EDGE_M if edge % 2 == 0 else -EDGE_M
            free_x = edge < 2  # edges are y = +24, y = -24, x = +24, x = -24
            places[end, n, 0] = along if free_x else beside
            places[end, n, 1] = beside if free_x else along
            places[end, n, 2] = 0.5 + 2.0 * np.float64(draws[n, 3 * end + 2])
    return places


@compiled
def start(which: Any, places: Any, rows: Any) -> None:
    """Put drones at their starts, at rest and with their targets ahead; places are [2, n, 3]."""
    for n in range(which.size):
        e = which[n]
        for column in range(ROW):
            rows[e, column] = 0.0
        for axis in range(3):
            rows[e, X + axis], rows[e, TARGET_X + axis] = places[0, n, axis], places[1, n, axis]
        dx = np.float64(places[1, n, 0]) - places[0, n, 0]
        dy = np.float64(places[1, n, 1]) - places[0, n, 1]
        rows[e, DIRECTION_X], rows[e, DIRECTION_Y] = dx, dy
        length = math.sqrt(dx * dx + dy * dy)
        ux, uy = (dx / length, dy / length) if length >= 1e-6 else (1.0, 0.0)
        rows[e, HEADING_X], rows[e, HEADING_Y] = ux, uy
        rows[e, AXIS_X], rows[e, AXIS_Y] = ux, uy
        # Half the yaw: of the two roots, the one with w >= 0.
        rows[e, QW] = math.sqrt(max(0.5 * (1.0 + ux), 0.0))
        rows[e, QZ] = math.copysign(math.sqrt(max(0.5 * (1.0 - ux), 0.0)), uy)
        for rotor in range(4):
            rows[e, ROTOR + rotor] = HOVER_THROTTLE
        low, high = places[0, n, 2], places[1, n, 2]
        rows[e, LOWEST], rows[e, HIGHEST] = min(low, high), max(low, high)


# ---------------------------------------------------------------------- flight


@compiled
def fly_fast(row: Any, wish: Vector, substeps: int, lighter: float, wind: Vector) -> None:
    """Answer to a velocity command in the world with a second-order response.

    `lighter` is the mass that the controller believes in / mass; wind accelerates.
    """
    for axis in range(3):
        weight = GRAVITY * (lighter - 1.0) if axis == 2 else 0.0
        place, speed = np.float64(row[X + axis]), np.float64(row[VX + axis])
        push = np.float64(row[AX + axis])
        gain = VELOCITY_GAIN * lighter
        for _ in range(substeps):
            push += _DT / FAST_LAG_S * (gain * (wish[axis] - speed) + weight - push)
            speed += (push + wind[axis]) * _DT
            place += speed * _DT
        row[X + axis], row[VX + axis], row[AX + axis] = place, speed, push


@compiled
def _rotor(wanted: float, throttle: float) -> float:
    share = min(max(wanted * (1.0 / MAX_THRUST_N), 0.0), 1.0)
    return throttle + ROTOR_RESPONSE * (math.sqrt(share) - throttle)


@compiled
def fly_hummingbird(
    row: Any, wish: Vector, substeps: int, lighter: float, wind: Vector, hold_yaw: bool
) -> None:
    """Do the same with a Lee controller, four rotors and a rigid body."""
    wx, wy, wz = wish
    wind_x, wind_y, _ = wind
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
def scan(drone: Any, boxes: Any, members: Any, span: Any, task: Task, rays: Any, ends: Any) -> None:
    """Find the horizontal distance at which each beam ends: its reach if nothing is hit.

    The drone is its position, and cosine and sine of its yaw; the span of members are the boxes
    that may be in reach. Of each of them the interval of azimuths is computed, and only those beams
    are tested. Written is `ends`, [around x high]; `rays` is room, [4, around].
    """
    px, py, pz, hc, hs = drone
    begin, end = span
    around, high = task.cosine.size, task.inverse_slope.size
    for i in range(around):
        x = hc * task.cosine[i] - hs * task.sine[i]
        y = hs * task.cosine[i] + hc * task.sine[i]
        x = x if abs(x) > _TINY else _TINY
        y = y if abs(y) > _TINY else _TINY
        rays[0, i], rays[1, i], rays[2, i], rays[3, i] = x, y, 1.0 / x, 1.0 / y
    for n in range(task.reach.size):
        ends[n] = task.reach[n]
    for k in range(high):
        t = -pz * task.inverse_slope[k]
        if 0.0 <= t < task.reach[k]:
            for i in range(around):
                if abs(px + t * rays[0, i]) <= GROUND_M and abs(py + t * rays[1, i]) <= GROUND_M:
                    ends[i * high + k] = t
    per_radian = around / (2 * math.pi)
    for entry in range(begin, end):
        number = members[entry]
        x0, x1 = boxes[number, 0] - px, boxes[number, 1] - px
        y0, y1 = boxes[number, 2] - py, boxes[number, 3] - py
        nx, ny = max(x0, -x1, 0.0), max(y0, -y1, 0.0)
        if nx * nx + ny * ny > task.range_m * task.range_m:
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
        rise = boxes[number, 4] - pz
        for turn in range(count):
            i = start + turn
            if i >= around:
                i -= around
            a, b = x0 * rays[2, i], x1 * rays[2, i]
            c, d = y0 * rays[3, i], y1 * rays[3, i]
            enter = max(min(a, b), min(c, d), 0.0)
            leave = min(max(a, b), max(c, d))
            if enter > leave or enter >= task.range_m:
                continue
            for k in range(high):
                low, top = -pz * task.inverse_slope[k], rise * task.inverse_slope[k]
                t = max(enter, min(low, top))
                if t <= min(leave, max(low, top)) and t < ends[i * high + k]:
                    ends[i * high + k] = t


@compiled
def lidar(ends: Any, task: Task, shown: Any, e: int) -> tuple[float, float]:
    """Write what the lidar shows; return the mean log of distance / range, and the smallest.

    `ends` is of `scan`, with room up to a multiple of 4, and is overwritten; written is shown[e].
    """
    range_m = task.range_m
    total, scale = shown.shape[1], 1.0 / range_m
    for n in range(total):
        distance = min(ends[n] * task.stretch[n], range_m)
        shown[e, n] = range_m - distance
        ends[n] = max(distance, 1e-6) * scale
    for n in range(total, ends.size):
        ends[n] = 1.0
    nearest, logs = 1.0, 0.0
    # One logarithm for the product of many (they were a fifth of the time), in four chains that do
    # not wait for each other. A factor is above 2^-23: 40 of them are a number still.
    for start in range(0, ends.size // 4, 40):
        a = b = c = d = 1.0
        for n in range(start, min(start + 40, ends.size // 4)):
            w, x, y, z = ends[4 * n], ends[4 * n + 1], ends[4 * n + 2], ends[4 * n + 3]
            a, b, c, d = a * w, b * x, c * y, d * z
            nearest = min(nearest, min(min(w, x), min(y, z)))
        product = a * b * c * d
        if product > 1e-290:
            logs += math.log(product)
        else:
            logs += math.log(a) + math.log(b) + math.log(c) + math.log(d)
    return logs / total, nearest * range_m


@compiled
def moving(
    drone: Any, world: int, scene: Scene, range_m: float, away2: Any, near: Any, out: Any, e: int
) -> tuple[float, bool]:
    """Write the nearest moving obstacles, out[e] = [NEAREST, 10].

    The drone is its position, and the axis of its goal frame. There is room in `away2` and `near`
    for the squared distance and the number of each obstacle, and one more. Returned are the mean
    logarithm of distance / range, and whether one is hit.
    """
    count = out.shape[1]
    px, py, pz, ux, uy = drone
    limit = range_m * range_m
    for j in range(scene.active):  # vectorised: nearly all are far away
        dx, dy = scene.flat[world, 0, j] - px, scene.flat[world, 1, j] - py
        away2[j] = dx * dx + dy * dy
    there = 0
    for j in range(scene.active):  # without a branch, which would be guessed wrong where it matters
        near[there] = j
        there += away2[j] <= limit
    found = min(there, count)
    product, hit, share = 1.0, False, 1.0 / range_m
    for n in range(found):
        for other in range(n + 1, there):  # the next nearest; of equal ones, the first
            if away2[near[other]] < away2[near[n]]:
                near[n], near[other] = near[other], near[n]
        j = near[n]
        dx, dy = scene.position[world, j, 0] - px, scene.position[world, j, 1] - py
        dz = 0.0 if scene.tall[j] else scene.position[world, j, 2] - pz
        vx, vy = scene.velocity[world, j, 0], scene.velocity[world, j, 1]
        flat, away = math.sqrt(away2[j]), math.sqrt(away2[j] + dz * dz)
        scale = 1.0 / max(away, 1e-6)
        out[e, n, 0] = (dx * ux + dy * uy) * scale
        out[e, n, 1] = (dy * ux - dx * uy) * scale
        out[e, n, 2] = dz * scale
        out[e, n, _DISTANCE] = flat
        out[e, n, _RISE] = dz
        out[e, n, _MOTION] = vx * ux + vy * uy
        out[e, n, _MOTION + 1] = vy * ux - vx * uy
        out[e, n, _MOTION + 2] = scene.velocity[world, j, 2]
        out[e, n, _WIDTH] = scene.width[j] * 4.0 - 1.0
        out[e, n, _FLOATS] = 0.0 if scene.tall[j] else 1.0
        product *= min(max(away - 0.5 * scene.width[j], 1e-6), range_m) * share
        beside = flat <= 0.5 * scene.width[j] + RADIUS_M
        if beside and abs(dz) <= 0.5 * scene.height[j] + RADIUS_M:
            hit = True
    for n in range(found, count):
        for column in range(out.shape[2]):
            out[e, n, column] = 0.0
    return math.log(product) / count, hit


@compiled
def look(rows: Any, e: int, drift_x: float, drift_y: float, state: Any, direction: Any) -> None:
    """Write where the target seems to be, and how the drone moves."""
    ux, uy = np.float64(rows[e, AXIS_X]), np.float64(rows[e, AXIS_Y])
    vx, vy = rows[e, VX], rows[e, VY]
    dx = np.float64(rows[e, TARGET_X]) - rows[e, X] - drift_x
    dy = np.float64(rows[e, TARGET_Y]) - rows[e, Y] - drift_y
    dz = np.float64(rows[e, TARGET_Z]) - rows[e, Z]
    scale = 1.0 / max(math.sqrt(dx * dx + dy * dy + dz * dz), 1e-6)
    state[e, 0] = (dx * ux + dy * uy) * scale
    state[e, 1] = (dy * ux - dx * uy) * scale
    state[e, 2] = dz * scale
    state[e, 3] = math.sqrt(dx * dx + dy * dy)
    state[e, 4] = dz
    state[e, 5], state[e, 6], state[e, 7] = vx * ux + vy * uy, vy * ux - vx * uy, rows[e, VZ]
    direction[e, 0, 0], direction[e, 0, 1] = rows[e, DIRECTION_X], rows[e, DIRECTION_Y]
    direction[e, 0, 2] = 0.0


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
    seed: Any, step: int, strengths: Any, range_m: float, flat: Any, obstacles: Any
) -> None:
    """Disturb an observation of the lidar, as one row, and of moving obstacles."""
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
def begin_trouble(which: Any, drones: Drones, strengths: Any, draws: Any) -> None:
    """Draw what disturbs some drones in their next episodes; `draws` are uniform, [n, 3]."""
    for n in range(which.size):
        own, u = drones.own[which[n]], draws[n]
        angle, force = 2 * math.pi * u[0], strengths.wind * math.sqrt(u[1])
        own[LIGHTER] = 1.0 / (1.0 + strengths.mass * (2.0 * u[2] - 1.0))
        own[WIND_X], own[WIND_Y] = force * math.cos(angle), force * math.sin(angle)
        own[DRIFT_X] = own[DRIFT_Y] = 0.0
        own[PENDING:] = 0.5  # nothing was commanded yet


# ---------------------------------------------------------------------- a step of everything


@compiled
def move(which: Any, action: Any, drones: Drones, task: Task, strengths: Any) -> None:
    """Fly the commands."""
    progress, felt = drones.progress, drones.felt
    walk = math.sqrt(_DT * task.substeps)
    lighter, wind = 1.0, (0.0, 0.0, 0.0)
    command = np.empty(3)
    for e in which:
        row = drones.rows[e]
        for axis in range(3):
            command[axis] = action[e, axis]
        if task.disturbed:
            own = drones.own[e]
            lighter, wind = own[LIGHTER], (own[WIND_X], own[WIND_Y], 0.0)
            _delay(own, strengths.latency, command)
            for axis in range(2):  # numbers 1000 and 1001 of the step before: no beam has them
                walked = _normal(_hash(drones.seeds[e], progress[e], 1000 + axis))
                own[DRIFT_X + axis] += strengths.drift_m * walk * walked
        forward = (2.0 * command[0] - 1.0) * task.limit
        side = (2.0 * command[1] - 1.0) * task.limit
        up = (2.0 * command[2] - 1.0) * task.limit
        ux, uy = np.float64(row[AXIS_X]), np.float64(row[AXIS_Y])
        wish = (forward * ux - side * uy, forward * uy + side * ux, up)
        ox, oy, oz = row[VX], row[VY], row[VZ]
        if task.hummingbird:
            fly_hummingbird(row, wish, task.substeps, lighter, wind, task.hold_yaw)
        else:
            fly_fast(row, wish, task.substeps, lighter, wind)
        jx, jy, jz = np.float64(row[VX] - ox), np.float64(row[VY] - oy), np.float64(row[VZ] - oz)
        felt[e, DELTA_V] = math.sqrt(jx * jx + jy * jy + jz * jz)
        progress[e] += 1


@compiled
def observe(
    which: Any, drones: Drones, scene: Scene, task: Task, strengths: Any, seen: Seen
) -> None:
    """Write the observations of some drones, and what they truly feel, for the reward."""
    rows, felt, progress = drones.rows, drones.felt, drones.progress
    around, high = seen.lidar.shape[2], seen.lidar.shape[3]
    shown = seen.lidar.reshape(seen.lidar.shape[0], around * high)
    rays, ends = np.empty((4, around)), np.empty((around * high + 3) // 4 * 4)
    away2, near = np.empty(scene.width.size), np.empty(scene.width.size + 1, np.int64)
    for e in which:
        world = scene.world_of[e]
        drift_x = drift_y = 0.0
        if task.disturbed:
            drift_x, drift_y = drones.own[e, DRIFT_X], drones.own[e, DRIFT_Y]
        look(rows, e, drift_x, drift_y, seen.state, seen.direction)
        px, py, pz = np.float64(rows[e, X]), np.float64(rows[e, Y]), np.float64(rows[e, Z])
        column, line, span = px + GROUND_M, py + GROUND_M, (0, 0)
        if 0.0 <= column < CELLS and 0.0 <= line < CELLS:  # not NaN, too
            cell = (world * CELLS + int(column)) * CELLS + int(line)
            span = (scene.starts[cell], scene.starts[cell + 1])
        drone = (px, py, pz, np.float64(rows[e, HEADING_X]), np.float64(rows[e, HEADING_Y]))
        scan(drone, scene.boxes, scene.members, span, task, rays, ends)
        felt[e, STATIC_LOG], felt[e, NEAREST_M] = lidar(ends, task, shown, e)
        drone = (px, py, pz, np.float64(rows[e, AXIS_X]), np.float64(rows[e, AXIS_Y]))
        obstacles = seen.dynamic_obstacle
        felt[e, MOVING_LOG], felt[e, HIT] = moving(
            drone, world, scene, task.range_m, away2, near, obstacles, e
        )
        if task.disturbed:
            seed, step = drones.seeds[e], progress[e]
            disturb(seed, step, strengths, task.range_m, shown[e], obstacles[e])


@compiled
def judge(which: Any, drones: Drones, task: Task) -> None:
    """Write reward and outcome."""
    w, felt, flags = task.weights, drones.felt, drones.flags
    for e in which:
        row = drones.rows[e]
        dx, dy, dz = row[TARGET_X] - row[X], row[TARGET_Y] - row[Y], row[TARGET_Z] - row[Z]
        away = math.sqrt(np.float64(dx) * dx + np.float64(dy) * dy + np.float64(dz) * dz)
        z = np.float64(row[Z])
        touched = felt[e, NEAREST_M] < RADIUS_M
        hit = felt[e, HIT] > 0.0
        outside = not (LOW_M <= z <= HIGH_M)  # NaN, too
        crash = touched or hit or outside
        reached = away < GOAL_M and not crash

        # The reward, term by term.
        towards = (row[VX] * dx + row[VY] * dy + row[VZ] * dz) / max(away, 1e-6)
        reward = w.velocity * towards + w.constant + task.free + w.static * felt[e, STATIC_LOG]
        if task.dynamic:
            reward += w.dynamic * felt[e, MOVING_LOG]
        reward -= w.smoothness * felt[e, DELTA_V]
        excess = max(z - row[HIGHEST] - TOLERANCE_M, row[LOWEST] - TOLERANCE_M - z, 0.0)
        reward -= w.height * excess * excess
        if crash:
            reward += w.collision
        if reached and w.goal_ends:
            reward += w.goal

        ended = crash or (reached and w.goal_ends)
        row[RETURN] += reward
        drones.reward[e] = reward
        drones.terminated[e] = ended
        drones.truncated[e] = drones.progress[e] >= task.steps and not ended
        flags[e, 0], flags[e, 1], flags[e, 2], flags[e, 3] = touched, hit, outside, reached
        for axis in range(3):
            drones.position[e, axis] = row[X + axis]


@compiled
def _delay(own: Any, latency: int, command: Any) -> None:
    """Put a command behind those that are still to be flown, and take the one that is due."""
    for axis in range(3):
        for late in range(latency):
            at = PENDING + 3 * (latency - 1 - late) + axis
            command[axis], own[at] = own[at], command[axis]
