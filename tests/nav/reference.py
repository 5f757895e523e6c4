"""The simulator's formulas once more, slow and obvious: plain torch, all drones and boxes at once.

What the compiled kernels are held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.nav.simulation.env import to_goal_frame, to_world
from penstock.nav.simulation.kernels import (
    ARM_M,
    ATTITUDE_GAIN,
    AX,
    AXIS,
    AZ,
    DIRECTION_X,
    DRAG_RATIO,
    FAST_LAG_S,
    GRAVITY,
    HEADING_X,
    HEADING_Y,
    HIGHEST,
    INERTIA,
    LOWEST,
    MASS_KG,
    MAX_THRUST_N,
    POSITION,
    QUATERNION,
    RATE_GAIN,
    RATES,
    RETURN,
    ROTOR,
    ROTOR_RESPONSE,
    TARGET_X,
    TARGET_Z,
    VELOCITY,
    VELOCITY_GAIN,
)
from penstock.nav.simulation.simulator import Observation
from penstock.nav.simulation.task import NEAREST, PHYSICS_DT_S, Settings
from penstock.nav.simulation.world import CELLS, GROUND_M, Maps, Obstacles

# Columns of a drone's row, besides those of kernels.py.
ACCELERATION = slice(AX, AZ + 1)  # of the fast drone
THROTTLE = slice(ROTOR, ROTOR + 4)
HEADING = slice(HEADING_X, HEADING_Y + 1)  # cosine and sine of the yaw
DIRECTION = slice(DIRECTION_X, DIRECTION_X + 3)  # target - start, horizontal, not normalised
TARGET = slice(TARGET_X, TARGET_Z + 1)
HEIGHTS = slice(LOWEST, HIGHEST + 1)  # lowest and highest of start and target

_TINY = 1e-9  # stands for a component of 0, so that nothing is divided by it
_FLAT = 1e-7  # likewise for the slope of a level beam


@dataclass
class Outcome:
    """Results of a step, of all drones."""

    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    flags: Tensor
    position: Tensor


def cast(
    origin: Tensor,
    heading: Tensor,
    boxes: Tensor,
    around: int,
    elevations: Sequence[float],
    range_m: float,
) -> Tensor:
    """Return how far each beam reaches.

    All is computed in the horizontal distance t of a point on the beam: its height is then
    z + t * slope, and its distance t / cos(elevation). A beam that begins in a box ends at once.

    Args:
        origin: Where the lidars are, [n, 3].
        heading: Cosine and sine of their yaw, [n, 2]; beam 0 is straight ahead, then
            counter-clockwise.
        boxes: Candidates of each: x0, x1, y0, y1, height, [n, k, 5].
        around: Beams around.
        elevations: In radians.
        range_m: Distances are cut here.

    Returns:
        Distances, [n, around, elevations].
    """
    azimuth = torch.arange(around, dtype=torch.float64) * (2 * torch.pi / around)
    cosine, sine = azimuth.cos().to(origin), azimuth.sin().to(origin)
    x = _not_zero(heading[:, :1] * cosine - heading[:, 1:] * sine)[:, None, :]
    y = _not_zero(heading[:, 1:] * cosine + heading[:, :1] * sine)[:, None, :]
    slope, stretch = slopes(elevations)
    slope, stretch = slope.to(origin), stretch.to(origin)

    px, py, pz = origin[:, 0, None, None], origin[:, 1, None, None], origin[:, 2, None, None]
    a, b = (boxes[:, :, 0:1] - px) / x, (boxes[:, :, 1:2] - px) / x
    c, d = (boxes[:, :, 2:3] - py) / y, (boxes[:, :, 3:4] - py) / y
    enter = torch.maximum(torch.minimum(a, b), torch.minimum(c, d)).clamp(min=0)
    leave = torch.minimum(torch.maximum(a, b), torch.maximum(c, d))
    low, top = -pz / slope, (boxes[:, :, 4:5] - pz) / slope
    first, last = torch.minimum(low, top)[:, :, None, :], torch.maximum(low, top)[:, :, None, :]
    begin = torch.maximum(enter[..., None], first)
    hit = begin <= torch.minimum(leave[..., None], last)
    inf = torch.full_like(begin, torch.inf)
    reached = torch.where(hit, begin, inf)
    if reached.shape[1]:
        nearest = reached.amin(1)
    else:
        nearest = reached.new_full((origin.shape[0], around, slope.numel()), torch.inf)

    ground = low  # where the beam meets z = 0
    there = ground >= 0
    there = there & ((px + ground * x.transpose(1, 2)).abs() <= GROUND_M)
    there = there & ((py + ground * y.transpose(1, 2)).abs() <= GROUND_M)
    nearest = torch.where(there, torch.minimum(nearest, ground), nearest)
    return (nearest * stretch).clamp(max=range_m)


def slopes(elevations: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the slope of each elevation, never 0, and 1 / cosine."""
    angle = torch.as_tensor(elevations, dtype=torch.float64)
    slope = angle.tan()
    slope = torch.where(slope.abs() < _FLAT, torch.full_like(slope, _FLAT), slope)
    return slope, 1 / angle.cos()


def _not_zero(value: Tensor) -> Tensor:
    return torch.where(value.abs() > _TINY, value, torch.full_like(value, _TINY))


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


class Reference:
    """Moves and observes drones in torch.

    Args:
        settings: What is simulated.
        world_of: World of each drone.
    """

    def __init__(self, settings: Settings, world_of: Tensor) -> None:
        self.settings = settings
        self.world_of = world_of

    def set_maps(self, maps: Maps) -> None:
        """Take over the static maps."""
        counts = np.diff(maps.starts)
        width = int(counts.max(initial=0))
        # A last box, out of every lidar's reach, fills the lists up to equal length.
        table = np.full((counts.size, width), len(maps.boxes), np.int64)
        table[np.arange(width)[None] < counts[:, None]] = maps.members
        far = np.array([[1e6, 1e6 + 1, 1e6, 1e6 + 1, 1]], np.float32)
        self._boxes = torch.from_numpy(np.concatenate([maps.boxes, far]))
        self._table = torch.from_numpy(table)

    def set_obstacles(self, obstacles: Obstacles, active: int) -> None:
        """Take over the moving obstacles as they are now."""

        def here(array: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array))

        self._position = here(obstacles.position[:, :active])
        self._velocity = here(obstacles.velocity[:, :active])
        self._width, self._height = here(obstacles.width[:active]), here(obstacles.height[:active])
        self._tall = here(obstacles.tall[:active])

    def distances(self, rows: Tensor, which: Tensor) -> Tensor:
        """Return the lidar's distances [n, around, high] of some drones."""
        cell = (rows[:, :2] + GROUND_M).floor().nan_to_num(nan=-1.0)
        inside = ((cell >= 0) & (cell < CELLS)).all(1)
        column, line = torch.where(inside[:, None], cell, torch.zeros_like(cell)).long().unbind(1)
        # The cell of a corner is empty: the boxes end 5 m before.
        lists = self._table[(self.world_of[which] * CELLS + column) * CELLS + line]
        used = int((lists < len(self._boxes) - 1).sum(1).max()) if lists.numel() else 0
        boxes = self._boxes[lists[:, :used]]
        around, _ = self.settings.lidar_beams
        return cast(
            rows[:, POSITION],
            rows[:, HEADING],
            boxes,
            around,
            self.settings.elevations.tolist(),
            self.settings.lidar_range_m,
        )

    def _moving(self, rows: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is observed of the nearest moving obstacles, their gaps, and who is hit."""
        count, reach = rows.shape[0], self.settings.lidar_range_m
        seen = rows.new_zeros(count, NEAREST, 10)
        gaps = rows.new_full((count, NEAREST), reach)
        if not self._width.numel():
            return seen, gaps, gaps.new_zeros(count, dtype=torch.bool)
        world = self.world_of[which]
        away = self._position[world] - rows[:, None, POSITION]
        away[:, self._tall, 2] = 0
        flat, nearest = away[..., :2].norm(dim=-1).topk(NEAREST, largest=False)
        away = away.gather(1, nearest[..., None].expand(-1, -1, 3))
        velocity = self._velocity[world[:, None], nearest]
        width, height = self._width[nearest], self._height[nearest]
        distance = away.norm(dim=-1)
        axis = rows[:, AXIS]
        seen = torch.cat(
            [
                to_goal_frame(away, axis) / distance.clamp(min=1e-6)[..., None],
                flat[..., None],
                away[..., 2:],
                to_goal_frame(velocity, axis),
                (width / 0.25 - 1)[..., None],
                (height <= 1).to(rows)[..., None],
            ],
            -1,
        )
        near = flat <= reach
        seen = torch.where(near[..., None], seen, torch.zeros_like(seen))
        gaps = torch.where(near, distance - width / 2, gaps)
        hit = (flat <= width / 2 + 0.3) & (away[..., 2].abs() <= height / 2 + 0.3)
        return seen, gaps, hit.any(1)

    def observe(self, which: Tensor, rows: Tensor, seen: Observation) -> None:
        """Write the observations of some drones."""
        self._observe(which, rows, seen)

    def _observe(
        self, which: Tensor, rows: Tensor, seen: Observation
    ) -> tuple[Tensor, Tensor, Tensor]:
        mine = rows[which]
        way = mine[:, TARGET] - mine[:, POSITION]
        unit = way / way.norm(dim=1, keepdim=True).clamp(min=1e-6)
        axis = mine[:, AXIS]
        parts = [
            to_goal_frame(unit, axis),
            way[:, :2].norm(dim=1, keepdim=True),
            way[:, 2:],
            to_goal_frame(mine[:, VELOCITY], axis),
        ]
        distances = self.distances(mine, which)
        moving, gaps, hit = self._moving(mine, which)
        seen["state"][which] = torch.cat(parts, 1)
        seen["lidar"][which] = (self.settings.lidar_range_m - distances)[:, None]
        seen["direction"][which] = mine[:, None, DIRECTION]
        seen["dynamic_obstacle"][which] = moving
        return distances, gaps, hit

    def step(
        self, action: Tensor, rows: Tensor, progress: Tensor, seen: Observation, outcome: Outcome
    ) -> None:
        """Move, observe and judge all drones."""
        settings, weights = self.settings, self.settings.weights
        before = rows[:, VELOCITY].clone()
        command = to_world((2 * action - 1) * settings.action_limit, rows[:, AXIS])
        fly(rows, command, settings.substeps, settings.drone, settings.hold_yaw)
        progress += 1
        distances, gaps, hit = self._observe(self._all(rows), rows, seen)

        position, velocity = rows[:, POSITION], rows[:, VELOCITY]
        way = rows[:, TARGET] - position
        away = way.norm(dim=1)
        towards = (velocity * way).sum(1) / away.clamp(min=1e-6)
        z = position[:, 2]
        low, high = rows[:, HEIGHTS].unbind(1)
        excess = torch.maximum(z - high - 0.2, low - 0.2 - z).clamp(min=0)
        scale = settings.lidar_range_m if weights.relative else 1.0
        reach = settings.lidar_range_m
        static = (distances.clamp(1e-6, reach) / scale).log().mean((1, 2))
        reward = weights.velocity * towards + weights.constant + weights.static * static
        if settings.dynamic_obstacles:
            reward = reward + weights.dynamic * (gaps.clamp(1e-6, reach) / scale).log().mean(1)
        reward = reward - weights.smoothness * (velocity - before).norm(dim=1)
        reward = reward - weights.height * excess * excess

        touched = distances.amin((1, 2)) < 0.3
        outside = ~((z >= 0.2) & (z <= 4.0))
        crash = touched | hit | outside
        reached = (away < 0.5) & ~crash
        ended = crash | reached if weights.goal_ends else crash
        reward = reward + weights.collision * crash
        if weights.goal_ends:
            reward = reward + weights.goal * reached
        rows[:, RETURN] += reward
        outcome.reward.copy_(reward)
        outcome.terminated.copy_(ended)
        outcome.truncated.copy_((progress >= settings.episode_steps) & ~ended)
        outcome.flags.copy_(torch.stack([touched, hit, outside, reached], 1))
        outcome.position.copy_(position)

    def _all(self, rows: Tensor) -> Tensor:
        return torch.arange(rows.shape[0])
