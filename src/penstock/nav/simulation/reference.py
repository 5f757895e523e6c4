"""The back end in torch: plain vectorised code for any device, the one to believe."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.nav.simulation import geometry
from penstock.nav.simulation.drone import fly
from penstock.nav.simulation.results import Observation, Outcome
from penstock.nav.simulation.task import (
    AXIS,
    DIRECTION,
    HEADING,
    HEIGHTS,
    NEAREST,
    POSITION,
    RETURN,
    TARGET,
    VELOCITY,
    Settings,
)
from penstock.nav.simulation.world import CELLS, GROUND_M, Maps, Obstacles


class TorchBackend:
    """Moves and observes drones in torch.

    Args:
        settings: What is simulated.
        world_of: World of each drone.
        device: Where.
    """

    def __init__(self, settings: Settings, world_of: Tensor, device: torch.device) -> None:
        self.settings = settings
        self.world_of = world_of.to(device)
        self.device = device

    def set_maps(self, maps: Maps) -> None:
        """Take over the static maps."""
        counts = np.diff(maps.starts)
        width = int(counts.max(initial=0))
        # A last box, out of every lidar's reach, fills the lists up to equal length.
        table = np.full((counts.size, width), len(maps.boxes), np.int64)
        table[np.arange(width)[None] < counts[:, None]] = maps.members
        far = np.array([[1e6, 1e6 + 1, 1e6, 1e6 + 1, 1]], np.float32)
        self._boxes = torch.from_numpy(np.concatenate([maps.boxes, far])).to(self.device)
        self._table = torch.from_numpy(table).to(self.device)

    def set_obstacles(self, obstacles: Obstacles, active: int) -> None:
        """Take over the moving obstacles as they are now."""

        def here(array: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

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
        return geometry.cast(
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
                geometry.to_goal_frame(away, axis) / distance.clamp(min=1e-6)[..., None],
                flat[..., None],
                away[..., 2:],
                geometry.to_goal_frame(velocity, axis),
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
        self._observe(which.to(self.device), rows, seen)

    def _observe(
        self, which: Tensor, rows: Tensor, seen: Observation
    ) -> tuple[Tensor, Tensor, Tensor]:
        mine = rows[which]
        way = mine[:, TARGET] - mine[:, POSITION]
        unit = way / way.norm(dim=1, keepdim=True).clamp(min=1e-6)
        axis = mine[:, AXIS]
        parts = [
            geometry.to_goal_frame(unit, axis),
            way[:, :2].norm(dim=1, keepdim=True),
            way[:, 2:],
            geometry.to_goal_frame(mine[:, VELOCITY], axis),
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
        command = geometry.to_world((2 * action - 1) * settings.action_limit, rows[:, AXIS])
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
        return torch.arange(rows.shape[0], device=self.device)

    def close(self) -> None:
        """Nothing to close."""
