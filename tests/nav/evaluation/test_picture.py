"""The picture of flights: a PNG with what flew in it; and the file for the viewer."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.errors import MissingExtra, StorageError, UsageError
from penstock.nav.evaluation import picture, rerun_file
from penstock.nav.evaluation.crossing import Flights, Outcome, fly, straight
from penstock.nav.evaluation.picture import scenery
from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import Settings

EMPTY = Settings(num_obstacles=0, dynamic_obstacles=0, drone="fast")
STEPS = 50


def flights(worlds: int = 1, kinds: tuple[Outcome, ...] = tuple(Outcome)) -> Flights:
    """Straight lines side by side, one per kind; each ends in the middle."""
    x = torch.linspace(-16, 16, len(kinds))
    path = torch.zeros(len(kinds), STEPS, 3)
    path[:, :, 0] = x[:, None]
    path[:, :, 1] = torch.linspace(24, 0, STEPS)
    return Flights(
        seeds=tuple(range(7, 7 + worlds)),
        world=torch.arange(worlds).repeat_interleave(len(kinds)),
        outcome=torch.tensor(kinds, dtype=torch.int8).repeat(worlds),
        time_s=torch.full((worlds * len(kinds),), 10.0),
        reach_goal=torch.zeros(worlds * len(kinds), dtype=torch.bool),
        path=path.repeat(worlds, 1, 1),
        decisions=0,
        interventions=0,
        period_s=0.096,
    )


def opened(data: bytes) -> Any:
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    Image.open(io.BytesIO(data)).verify()
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(
    ("worlds", "size"), [(1, (1016, 1203)), (2, (1630, 1017)), (4, (1666, 589)), (8, (1666, 1038))]
)
def test_the_size_follows_the_number_of_worlds(worlds: int, size: tuple[int, int]) -> None:
    image = opened(picture.draw(flights(worlds), EMPTY, "flights"))
    assert image.size == size


def test_paths_have_the_colours_of_their_outcomes() -> None:
    image = np.asarray(opened(picture.draw(flights(), EMPTY, "flights")).convert("RGB"), int)
    assert (image[0] == 255).all()  # white paper
    body = image[130:-90]  # neither title nor legend
    left, scale = 28, 960 / 50.0
    for kind, x in zip(Outcome, np.linspace(-16, 16, 5), strict=True):
        at = round(left + (x + 25.0) * scale)
        near = body[100:300, at - 3 : at + 4, None]
        off = np.abs(near - np.array(list(picture.COLOURS.values()))).sum(3).min(1)
        assert (off.argmin(1) == kind).all(), kind  # in every row of the path
        assert off.min(1).max() < 200
        assert np.abs(body[100:300, at + 30] - 244).max() < 20  # and the ground beside it has not


def test_boxes_and_moving_obstacles_are_drawn() -> None:
    busy = EMPTY.with_(num_obstacles=100, dynamic_obstacles=16)
    empty = np.asarray(opened(picture.draw(flights(), EMPTY, "x")).convert("RGB"), int)
    image = np.asarray(opened(picture.draw(flights(), busy, "x")).convert("RGB"), int)
    grey = (image.max(2) < 200) & (image.max(2) - image.min(2) < 30)
    none = (empty.max(2) < 200) & (empty.max(2) - empty.min(2) < 30)
    assert grey[130:-90].sum() > none[130:-90].sum() + 10_000
    blue = image[130:-90, :, 2] - image[130:-90, :, 0] > 60
    assert blue.sum() > 1000


def test_the_picture_is_the_same_every_time() -> None:
    assert picture.draw(flights(), EMPTY, "x") == picture.draw(flights(), EMPTY, "x")


def test_paths_that_leave_the_field_do_no_harm() -> None:
    far = flights()
    assert far.path is not None
    far.path *= 100
    opened(picture.draw(far, EMPTY, "a title that is far too long for the sheet " * 9, "y" * 400))


def test_paths_are_needed() -> None:
    bare = flights()
    bare.path = None
    with pytest.raises(UsageError, match="record=True"):
        picture.draw(bare, EMPTY, "x")


def test_the_scenery_is_that_of_the_flights() -> None:
    settings = Settings(
        num_envs=2, num_obstacles=30, dynamic_obstacles=8, map_seed=9, drone="fast", evaluation=True
    )
    boxes, _, track = scenery(9, settings, 3)
    with Simulator(settings, threads=1) as sim:
        sim.reset()
        assert np.array_equal(sim.worlds[0].boxes, boxes)
        for step in range(3):
            sim.step(torch.full((2, 3), 0.5))
            assert np.array_equal(sim.obstacles.position[0], track[step])


# ---------------------------------------------------------------------- the viewer


class Stream:
    """Stands in for the viewer's stream: keeps the names of what is logged."""

    def __init__(self, application: str) -> None:
        self.logged: list[str] = []

    def save(self, path: Path) -> None:
        self.path = path

    def set_time(self, timeline: str, *, duration: float) -> None:
        assert duration > 0

    def log(self, name: str, thing: Any, *, static: bool = False) -> None:
        self.logged.append(name)

    def flush(self) -> None:
        self.path.write_text("\n".join(self.logged))

    def disconnect(self) -> None:
        pass


def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("Boxes3D", "LineStrips3D", "Points3D", "Cylinders3D")
    shapes = {name: lambda *places, **how: None for name in names}
    monkeypatch.setitem(sys.modules, "rerun", SimpleNamespace(RecordingStream=Stream, **shapes))


def test_a_file_for_the_viewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_in(monkeypatch)
    busy = EMPTY.with_(num_obstacles=10, dynamic_obstacles=8, episode_seconds=1.0)
    flown = fly(straight, busy, [7, 8], 2, record=True)
    file = rerun_file.write(flown, busy, tmp_path / "a.rrd")
    logged = file.read_text().split("\n")
    assert {"world_7/boxes", "world_8/paths", "world_8/drones", "world_7/cylinders"} <= set(logged)
    assert logged.count("world_7/drones") == 5  # every second of 10 steps
    assert list(tmp_path.iterdir()) == [file]


def test_what_the_viewer_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(MissingExtra, match=r"penstock\[rerun\]"):
        rerun_file.write(flights(), EMPTY, tmp_path / "a.rrd")
    _stand_in(monkeypatch)
    with pytest.raises(StorageError, match="the folder does not exist"):
        rerun_file.write(flights(), EMPTY, tmp_path / "none" / "a.rrd")
    bare = flights()
    bare.path = None
    with pytest.raises(UsageError, match="record=True"):
        rerun_file.write(bare, EMPTY, tmp_path / "a.rrd")
