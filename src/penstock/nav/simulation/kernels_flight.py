"""Compiled code of the simulator: how one drone flies. The same formulas as in drone.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.core.kernels.native import compiled
from penstock.nav.simulation.drone import (
    ARM_M,
    ATTITUDE_GAIN,
    DRAG_RATIO,
    FAST_LAG_S,
    GRAVITY,
    INERTIA,
    MASS_KG,
    MAX_THRUST_N,
    RATE_GAIN,
    ROTOR_RESPONSE,
    VELOCITY_GAIN,
)
from penstock.nav.simulation.task import PHYSICS_DT_S

_J0, _J1, _J2 = INERTIA
_R0, _R1, _R2 = ATTITUDE_GAIN
_W0, _W1, _W2 = RATE_GAIN
_DT = PHYSICS_DT_S


@compiled
def fly_fast(row: Any, wx: float, wy: float, wz: float, substeps: int) -> None:
    """Answer to a velocity command with a second-order response."""
    for axis in range(3):
        wish = wx if axis == 0 else (wy if axis == 1 else wz)
        place, speed, push = (
            np.float64(row[axis]),
            np.float64(row[3 + axis]),
            np.float64(row[6 + axis]),
        )
        for _ in range(substeps):
            push += _DT / FAST_LAG_S * (VELOCITY_GAIN * (wish - speed) - push)
            speed += push * _DT
            place += speed * _DT
        row[axis], row[3 + axis], row[6 + axis] = place, speed, push


@compiled
def _rotor(wanted: float, throttle: float) -> float:
    share = min(max(wanted * (1.0 / MAX_THRUST_N), 0.0), 1.0)
    return throttle + ROTOR_RESPONSE * (math.sqrt(share) - throttle)


@compiled
def fly_hummingbird(
    row: Any, wx: float, wy: float, wz: float, substeps: int, hold_yaw: bool
) -> None:
    """Answer to a velocity command with a Lee controller, four rotors and a rigid body."""
    px, py, pz = np.float64(row[0]), np.float64(row[1]), np.float64(row[2])
    vx, vy, vz = np.float64(row[3]), np.float64(row[4]), np.float64(row[5])
    qw, qx, qy, qz = (
        np.float64(row[9]),
        np.float64(row[10]),
        np.float64(row[11]),
        np.float64(row[12]),
    )
    p, q, r = np.float64(row[13]), np.float64(row[14]), np.float64(row[15])
    h0, h1, h2, h3 = (
        np.float64(row[16]),
        np.float64(row[17]),
        np.float64(row[18]),
        np.float64(row[19]),
    )
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
            yc, ys = np.float64(row[22]), np.float64(row[23])
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
        lift = (t0 + t1 + t2 + t3) * (1.0 / MASS_KG)
        vx += lift * cx * _DT
        vy += lift * cy * _DT
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
    row[0], row[1], row[2] = px, py, pz
    row[3], row[4], row[5] = vx, vy, vz
    row[9], row[10], row[11], row[12] = qw, qx, qy, qz
    row[13], row[14], row[15] = p, q, r
    row[16], row[17], row[18], row[19] = h0, h1, h2, h3
    ax, ay = 1 - 2 * (qy * qy + qz * qz), 2 * (qx * qy + qw * qz)
    scale = 1.0 / max(math.sqrt(ax * ax + ay * ay), 1e-6)
    row[20], row[21] = ax * scale, ay * scale
