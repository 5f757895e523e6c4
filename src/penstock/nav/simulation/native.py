"""The back end in numba: the drones are split among a few threads, each one call of a kernel."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import MissingExtra
from penstock.nav.simulation import geometry
from penstock.nav.simulation.results import Observation, Outcome
from penstock.nav.simulation.task import Settings
from penstock.nav.simulation.world import Maps, Obstacles

try:
    from penstock.nav.simulation import kernels
except ModuleNotFoundError as error:
    raise MissingExtra("numba", "rl") from error


class NumbaBackend:
    """Moves and observes drones in compiled code on the CPU.

    The result does not depend on the number of threads: drones know nothing of each other.

    Args:
        settings: What is simulated.
        world_of: World of each drone.
        threads: How many share the drones, the caller's among them; 1 starts none.
    """

    def __init__(self, settings: Settings, world_of: Tensor, threads: int) -> None:
        self.settings = settings
        self._world_of = world_of.numpy()
        self._threads = max(1, min(threads, settings.num_envs))
        # Its threads are no daemons, and end with it even if nobody closes it.
        self._pool = (
            ThreadPoolExecutor(self._threads - 1, "penstock-nav") if self._threads > 1 else None
        )
        self._constants = _constants(settings)
        self._beams = _beams(settings)
        self._maps: Any = None
        self._scene: Any = None
        self._active = 0
        self._outcome: Outcome | None = None

    def set_maps(self, maps: Maps) -> None:
        """Take over the static maps."""
        self._maps = maps
        self._scene = None

    def set_obstacles(self, obstacles: Obstacles, active: int) -> None:
        """Take over the moving obstacles; they are read where they lie."""
        self._active = active
        if self._scene is None or self._scene.position is not obstacles.position:
            self._scene = kernels.Scene(
                self._world_of,
                self._maps.boxes,
                self._maps.starts,
                self._maps.members,
                np.empty((len(obstacles.steps), 2, obstacles.count), np.float32),
                obstacles.position,
                obstacles.velocity,
                obstacles.width,
                obstacles.height,
                obstacles.tall,
            )
        np.copyto(self._scene.flat, obstacles.position[:, :, :2].transpose(0, 2, 1))

    def observe(self, which: Tensor, rows: Tensor, seen: Observation) -> None:
        """Write the observations of some drones."""
        kernels.observe(
            which.numpy(),
            rows.numpy(),
            self._scene,
            self._active,
            self._beams,
            self._constants,
            _seen(seen),
        )

    def step(
        self, action: Tensor, rows: Tensor, progress: Tensor, seen: Observation, outcome: Outcome
    ) -> None:
        """Move, observe and judge all drones."""
        if self._outcome is not outcome:  # a view costs 3 us, and these are always the same
            self._outcome = outcome
            names = ("reward", "terminated", "truncated", "flags", "position")
            views = (getattr(outcome, name).numpy() for name in names)
            self._written: Any = kernels.Outcome(*views)
        arguments: Any = (
            action.numpy(),
            rows.numpy(),
            progress.numpy(),
            self._scene,
            self._active,
            self._beams,
            self._constants,
            _seen(seen),
            self._written,
        )
        count = self.settings.num_envs
        cuts = [count * i // self._threads for i in range(self._threads + 1)]
        if self._pool is None:
            kernels.step(0, count, *arguments)
            return
        others = [
            self._pool.submit(kernels.step, cuts[i], cuts[i + 1], *arguments)
            for i in range(1, self._threads)
        ]
        try:
            kernels.step(cuts[0], cuts[1], *arguments)
        finally:  # nobody may still write when this returns
            for other in others:
                other.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _seen(seen: Observation) -> Any:
    return kernels.Seen(
        seen["state"].numpy(),
        seen["lidar"].numpy(),
        seen["direction"].numpy(),
        seen["dynamic_obstacle"].numpy(),
    )


def _constants(settings: Settings) -> Any:
    weights = settings.weights
    constant = float(weights.constant)
    if not weights.relative:  # the kernel takes all logarithms relative to free space
        free = weights.static + (weights.dynamic if settings.dynamic_obstacles else 0.0)
        constant += free * math.log(settings.lidar_range_m)
    return kernels.Constants(
        hummingbird=settings.drone == "hummingbird",
        hold_yaw=bool(settings.hold_yaw),
        substeps=int(settings.substeps),
        steps=settings.episode_steps,
        limit=float(settings.action_limit),
        range_m=float(settings.lidar_range_m),
        dynamic=settings.dynamic_obstacles > 0,
        velocity=float(weights.velocity),
        constant=constant,
        static_weight=float(weights.static),
        dynamic_weight=float(weights.dynamic),
        smoothness=float(weights.smoothness),
        height=float(weights.height),
        collision=float(weights.collision),
        goal=float(weights.goal),
        goal_ends=bool(weights.goal_ends),
    )


def _beams(settings: Settings) -> Any:
    azimuth = torch.arange(settings.lidar_beams[0]).double().numpy()
    azimuth = azimuth * (2 * np.pi / settings.lidar_beams[0])
    slope, stretch = geometry.slopes(settings.elevations.tolist())
    return kernels.Beams(
        np.cos(azimuth),
        np.sin(azimuth),
        (1 / slope).numpy(),
        (settings.lidar_range_m / stretch).numpy(),
        np.tile(stretch.numpy(), settings.lidar_beams[0]),
    )
