"""How a drone answers to a velocity command: in torch, for any number of drones.

Hummingbird: the Lee controller of OmniDrones without a position error (the yaw is held), mixer,
rotors with a lag, rigid body; semi-implicit Euler at 62.5 Hz. Fast: a second-order response with
the same time constants.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.nav.simulation.task import (
    ACCELERATION,
    AXIS,
    HEADING,
    PHYSICS_DT_S,
    POSITION,
    QUATERNION,
    RATES,
    THROTTLE,
    VELOCITY,
)

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


def fly(rows: Tensor, command: Tensor, substeps: int, drone: str, hold_yaw: bool = False) -> None:
    """Move drones under a velocity command.

    Args:
        rows: States, [n, ROW]; changed.
        command: Velocities in the world, [n, 3].
        substeps: Physics steps.
        drone: "hummingbird" or "fast".
        hold_yaw: Steer the hummingbird back to the yaw of its goal frame.
    """
    if drone == "fast":
        _fly_fast(rows, command, substeps)
    else:
        _fly_hummingbird(rows, command, substeps, hold_yaw)


def _fly_fast(rows: Tensor, command: Tensor, substeps: int) -> None:
    position, velocity = rows[:, POSITION], rows[:, VELOCITY]
    acceleration = rows[:, ACCELERATION]
    for _ in range(substeps):
        wanted = VELOCITY_GAIN * (command - velocity)
        acceleration += PHYSICS_DT_S / FAST_LAG_S * (wanted - acceleration)
        velocity += acceleration * PHYSICS_DT_S
        position += velocity * PHYSICS_DT_S


def _fly_hummingbird(rows: Tensor, command: Tensor, substeps: int, hold_yaw: bool) -> None:
    position, velocity = rows[:, POSITION], rows[:, VELOCITY]
    quaternion, rates, throttle = rows[:, QUATERNION], rows[:, RATES], rows[:, THROTTLE]
    gravity = command.new_tensor([0.0, 0.0, GRAVITY])
    inertia = command.new_tensor(INERTIA)
    attitude_gain, rate_gain = command.new_tensor(ATTITUDE_GAIN), command.new_tensor(RATE_GAIN)
    for _ in range(substeps):
        body = rotation(quaternion)
        wanted = VELOCITY_GAIN * (command - velocity) + gravity
        ahead = torch.nn.functional.pad(rows[:, AXIS] if hold_yaw else body[:, :2, 0], (0, 1))
        error = _attitude_error(body, wanted, ahead)
        moment = -attitude_gain * error - rate_gain * rates
        force = MASS_KG * (wanted * body[:, :, 2]).sum(1)
        share = (_mix(force, moment) / MAX_THRUST_N).clamp(0, 1)
        throttle += ROTOR_RESPONSE * (share.sqrt() - throttle)
        thrust = MAX_THRUST_N * throttle * throttle
        lift = thrust.sum(1, keepdim=True) / MASS_KG
        velocity += (lift * body[:, :, 2] - gravity) * PHYSICS_DT_S
        position += velocity * PHYSICS_DT_S
        t0, t1, t2, t3 = thrust.unbind(1)
        moment = torch.stack(
            [ARM_M * (t1 - t3), ARM_M * (t2 - t0), DRAG_RATIO * (t1 + t3 - t0 - t2)], 1
        )
        gyration = torch.linalg.cross(rates, inertia * rates)
        rates += (moment - gyration) / inertia * PHYSICS_DT_S
        quaternion += 0.5 * PHYSICS_DT_S * _spin(quaternion, rates)
        quaternion /= quaternion.norm(dim=1, keepdim=True).clamp(min=1e-6)
    ahead = rotation(quaternion)[:, :2, 0]
    rows[:, HEADING] = ahead / ahead.norm(dim=1, keepdim=True).clamp(min=1e-6)


def rotation(quaternion: Tensor) -> Tensor:
    """Return rotation matrices [n, 3, 3] whose columns are the axes of the body."""
    w, x, y, z = quaternion.unbind(1)
    entries = [
        *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    ]
    return torch.stack(entries, 1).view(-1, 3, 3)


def _attitude_error(body: Tensor, wanted: Tensor, ahead: Tensor) -> Tensor:
    """Compare with the attitude whose thrust is along `wanted` and whose yaw is that of `ahead`."""
    up = wanted / wanted.norm(dim=1, keepdim=True).clamp(min=1e-6)
    ahead = ahead / ahead.norm(dim=1, keepdim=True).clamp(min=1e-6)
    side = torch.linalg.cross(up, ahead)
    side = side / side.norm(dim=1, keepdim=True).clamp(min=1e-6)
    desired = torch.stack([torch.linalg.cross(side, up), side, up], 2)
    mixed = desired.transpose(1, 2) @ body
    error = 0.5 * (mixed - mixed.transpose(1, 2))
    return torch.stack([error[:, 2, 1], error[:, 0, 2], error[:, 1, 0]], 1)


def _mix(force: Tensor, moment: Tensor) -> Tensor:
    """Spread force and moment over the rotors: 0 and 2 on the x axis, 1 and 3 on the y axis."""
    roll, pitch, yaw = moment.unbind(1)
    along = 0.5 * (force - yaw / DRAG_RATIO)
    beside = 0.5 * (force + yaw / DRAG_RATIO)
    parts = [along - pitch / ARM_M, beside + roll / ARM_M]
    parts += [along + pitch / ARM_M, beside - roll / ARM_M]
    return 0.5 * torch.stack(parts, 1)


def _spin(quaternion: Tensor, rates: Tensor) -> Tensor:
    """Multiply a quaternion with pure rates in the body frame."""
    w, x, y, z = quaternion.unbind(1)
    p, q, r = rates.unbind(1)
    parts = [-(x * p + y * q + z * r), w * p + y * r - z * q]
    parts += [w * q + z * p - x * r, w * r + x * q - y * p]
    return torch.stack(parts, 1)
