"""Flights as a file for the rerun viewer: worlds, moving obstacles and drones in 3-D, over time."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.files import storage_error
from penstock.errors import MissingExtra, UsageError
from penstock.nav.evaluation.crossing import Flights, Outcome
from penstock.nav.evaluation.picture import COLOURS, scenery
from penstock.nav.simulation.task import Settings

_EVERY = 2  # steps: 5 pictures a second are enough, and the file is half as large
_BOX = (150, 154, 166)
_MOVING = (74, 96, 196)


def require() -> Any:
    """Return the module of the viewer; a `MissingExtra` if it is not installed."""
    try:
        return importlib.import_module("rerun")
    except ModuleNotFoundError as error:
        raise MissingExtra("rerun-sdk", "rerun") from error


def write(flights: Flights, settings: Settings, path: str | os.PathLike[str]) -> Path:
    """Write flights, recorded with their settings, to an .rrd file; `rerun FILE` opens it."""
    viewer = require()
    if flights.path is None:
        raise UsageError("the flights have no paths; fly with record=True")
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        temporary.touch()  # fails here, in words, where the viewer's library would not say why
        stream = viewer.RecordingStream("penstock")
        stream.save(temporary)
        for world, seed in enumerate(flights.seeds):
            _world(viewer, stream, flights, settings, world, f"world_{seed}")
        stream.flush()
        stream.disconnect()
        os.replace(temporary, target)
    except OSError as error:
        raise storage_error("write", target, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _world(
    viewer: Any, stream: Any, flights: Flights, settings: Settings, world: int, name: str
) -> None:
    assert flights.path is not None
    here = flights.world == world
    path = flights.path[here].numpy()
    colours = np.array([COLOURS[Outcome(kind)] for kind in flights.outcome[here].tolist()])
    boxes, obstacles, track = scenery(flights.seeds[world], settings, path.shape[1])
    low, high, tall = boxes[:, [0, 2]], boxes[:, [1, 3]], boxes[:, 4:5]
    centre = np.concatenate([(low + high) / 2, tall / 2], 1)
    half = np.concatenate([(high - low) / 2, tall / 2], 1)
    solid = {"fill_mode": "solid"}
    solids = viewer.Boxes3D(centers=centre, half_sizes=half, colors=_BOX, **solid)
    stream.log(f"{name}/boxes", solids, static=True)
    lines = viewer.LineStrips3D(list(path), colors=colours, radii=0.02)
    stream.log(f"{name}/paths", lines, static=True)
    pole, wide = obstacles.tall, obstacles.width
    cube = np.stack([wide / 2, wide / 2, np.full_like(wide, 0.5)], 1)[~pole]
    for step in range(0, path.shape[1], _EVERY):
        stream.set_time("flight", duration=(step + 1) * flights.period_s)
        stream.log(f"{name}/drones", viewer.Points3D(path[:, step], colors=colours, radii=0.15))
        if not wide.size:
            continue
        place = track[step]
        cubes = viewer.Boxes3D(centers=place[~pole], half_sizes=cube, colors=_MOVING, **solid)
        stream.log(f"{name}/cuboids", cubes)
        poles = viewer.Cylinders3D(
            lengths=np.full(int(pole.sum()), 5.0),
            radii=wide[pole] / 2,
            centers=place[pole],
            colors=_MOVING,
            **solid,
        )
        stream.log(f"{name}/cylinders", poles)
