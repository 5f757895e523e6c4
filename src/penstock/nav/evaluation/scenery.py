"""What was in the worlds of some flights: made again from their seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.nav.simulation.task import Settings
from penstock.nav.simulation.world import Obstacles, World

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Scenery:
    """Boxes and moving obstacles of one world.

    Attributes:
        boxes: x0, x1, y0, y1, height; [n, 5].
        width: Of the moving obstacles, [m].
        tall: Which of them are cylinders from the ground to 5 m; the others are cuboids, 1 m high.
        track: Their places after each step, [steps, m, 3]: as `Flights.path`.
    """

    boxes: Floats
    width: Floats
    tall: NDArray[np.bool_]
    track: Floats


def scenery(seed: int, settings: Settings, steps: int) -> Scenery:
    """Make the world of a seed again, and let its obstacles move for so many steps."""
    obstacles = Obstacles([seed], settings.dynamic_obstacles, settings.period_s)
    track = np.empty((steps, obstacles.count, 3), np.float32)
    for step in range(steps):
        obstacles.advance()
        track[step] = obstacles.position[0]
    boxes = World.generate(seed, settings.num_obstacles).boxes
    return Scenery(boxes, obstacles.width, obstacles.tall, track)
