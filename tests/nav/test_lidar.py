"""Lidar, compiled and in the reference, against one ray and one box at a time."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.nav.simulation.kernels import ROW
from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import Settings
from penstock.nav.simulation.world import GROUND_M, Maps, Obstacles, World

from .reference import Reference

RANGE = 4.0
BACKENDS = ["compiled", "reference"]


def ray_and_box(origin, direction, box):
    """Distance to a solid box on the ground, by the book: the slabs of each axis in turn."""
    enter, leave = 0.0, math.inf
    sides = ((box[0], box[1]), (box[2], box[3]), (0.0, box[4]))
    for at, along, (low, high) in zip(origin, direction, sides, strict=True):
        if abs(along) < 1e-12:
            if not low <= at <= high:
                return math.inf
            continue
        near, far = sorted(((low - at) / along, (high - at) / along))
        enter, leave = max(enter, near), min(leave, far)
    return enter if enter <= leave else math.inf


def slow_lidar(origin, yaw, boxes, grow=0.0, beams=(36, 4), fov=(-10.0, 20.0)):
    """Every beam against every box and the ground; boxes and ground `grow` outwards."""
    out = np.zeros(beams)
    for i in range(beams[0]):
        azimuth = yaw + 2 * math.pi * i / beams[0]
        for k, degrees in enumerate(np.linspace(*fov, beams[1])):
            flat, up = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            ray = (flat * math.cos(azimuth), flat * math.sin(azimuth), up)
            best = RANGE
            for box in boxes:
                grown = (box[0] - grow, box[1] + grow, box[2] - grow, box[3] + grow, box[4] + grow)
                best = min(best, ray_and_box(origin, ray, grown))
            if up and -origin[2] / up >= 0:
                t = -origin[2] / up
                edge = max(abs(origin[0] + t * ray[0]), abs(origin[1] + t * ray[1]))
                if edge <= GROUND_M + grow:
                    best = min(best, t)
            out[i, k] = best
    return out


def scan(backend, origins, yaws, boxes, **changes):
    """What a back end's lidar measures."""
    count = len(origins)
    config = Settings(num_envs=count, dynamic_obstacles=0, lidar_range_m=RANGE, **changes)
    world = World(0, len(boxes), np.array(boxes, np.float32).reshape(-1, 5))
    rows = torch.zeros(count, ROW)
    rows[:, :3] = torch.tensor(np.array(origins))
    rows[:, 20] = torch.tensor(np.cos(yaws))
    rows[:, 21] = torch.tensor(np.sin(yaws))
    seen = {name: torch.zeros(count, *shape) for name, shape in config.shapes().items()}
    if backend == "compiled":
        with mock.patch.object(World, "generate", lambda *_: world):
            simulator = Simulator(config, threads=1)
        with simulator:
            simulator.reset()
            simulator.rows.copy_(rows)
            simulator.observe(seen)
    else:
        engine = Reference(config, torch.zeros(count, dtype=torch.int64))
        engine.set_maps(Maps([world], RANGE))
        engine.set_obstacles(Obstacles([0], 0, 0.1), 0)
        engine.observe(torch.arange(count), rows, seen)
    return RANGE - seen["lidar"][:, 0].numpy().astype(np.float64)


side = st.floats(0.125, 1.5, width=32)
offset = st.floats(-4.5, 4.5, width=32)
some_boxes = st.lists(
    st.tuples(offset, side, offset, side, st.floats(0.5, 6.0, width=32)), max_size=6
)
yaws = st.one_of(st.floats(-math.pi, math.pi), st.sampled_from([0.0, math.pi / 2, math.pi]))
place = st.floats(-15, 15, width=32)


@pytest.mark.parametrize("backend", BACKENDS)
@given(boxes=some_boxes, x=place, y=place, z=st.floats(0.0625, 5.0, width=32), yaw=yaws)
@settings(max_examples=50, deadline=None)
def test_lidar_is_that_of_a_slow_loop(backend, boxes, x, y, z, yaw):
    boxes = [(x + a, x + a + w, y + b, y + b + d, h) for a, w, b, d, h in boxes]
    found = scan(backend, [(x, y, z)], [yaw], boxes)[0]
    # A beam may graze an edge: then what is right lies between slightly larger and smaller boxes.
    boxes = np.array(boxes, np.float32).astype(np.float64).reshape(-1, 5)
    near, far = (slow_lidar((x, y, z), yaw, boxes, grow) for grow in (1e-4, -1e-4))
    assert (found >= near - 2e-3).all()
    assert (found <= far + 2e-3).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_generated_map_by_its_cells(backend):
    world = World.generate(3, 350)
    rng = np.random.default_rng(0)
    origins = np.c_[rng.uniform(-25, 25, (40, 2)), rng.uniform(0.2, 4, 40)]
    # Borders of cells, where a list that is one box too short would show.
    origins[:20, :2] = np.round(origins[:20, :2])
    origins = origins.astype(np.float32)
    turns = rng.uniform(-3, 3, 40)
    found = scan(backend, origins, turns, world.boxes)
    hits = 0
    for n in range(40):
        x, y, z = map(float, origins[n])
        reach = np.abs(world.boxes[:, [0, 2]] - (x, y)).max(1) < 6  # the slow one is slow
        near, far = (slow_lidar((x, y, z), turns[n], world.boxes[reach], g) for g in (1e-4, -1e-4))
        assert (found[n] >= near - 2e-3).all()
        assert (found[n] <= far + 2e-3).all()
        hits += (near < RANGE).sum()
    assert hits > 300


@pytest.mark.parametrize("backend", BACKENDS)
def test_order_and_direction_of_the_beams(backend):
    box = [(2.0, 3.0, -0.1, 0.1, 6.0)]  # 2 m ahead of the origin, along x
    ahead = scan(backend, [(0.0, 0.0, 2.0)], [0.0], box)[0]
    assert ahead[0, 1] == pytest.approx(2.0, abs=1e-5)
    assert ahead[0, 0] == pytest.approx(2.0 / math.cos(math.radians(10)), abs=1e-5)
    assert (ahead[1:] == RANGE).all()
    # Turned to the left by 30 degrees, the box is 30 degrees to the right: beam 33.
    turned = scan(backend, [(0.0, 0.0, 2.0)], [math.radians(30)], box)[0]
    assert (turned[:, 1] < RANGE).nonzero()[0].tolist() == [33]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ground_is_seen_near_it_and_only_on_the_map(backend):
    found = scan(backend, [(0.0, 0.0, 0.5), (0.0, 0.0, 0.72), (24.9, 0.0, 0.5)], [0.0] * 3, [])
    slant = 0.5 / math.sin(math.radians(10))
    assert found[0, :, 0] == pytest.approx(slant, abs=1e-5)
    assert (found[0, :, 1:] == RANGE).all()
    assert (found[1] == RANGE).all()
    assert found[2, 0, 0] == RANGE  # ahead lies the end of the ground
    assert found[2, 18, 0] == pytest.approx(slant, abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inside_over_and_beside_a_box(backend):
    box = [(-0.5, 0.5, -0.5, 0.5, 1.0)]
    found = scan(backend, [(0.0, 0.0, 0.9), (0.0, 0.0, 1.05), (30.0, 0.0, 1.0)], [0.3] * 3, box)
    assert (found[0] == 0).all()
    assert (found[1, :, 1:] == RANGE).all()
    assert (found[1, :, 0] < 0.3).all()  # the lowest beams end on its top
    assert (found[2] == RANGE).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_beams(backend):
    box = [(1.0, 2.0, 0.5, 1.5, 3.0), (-2.0, -1.0, -1.0, 0.0, 1.0)]
    shape = {"lidar_beams": (7, 3), "lidar_fov_deg": (-30.0, 30.0)}
    found = scan(backend, [(0.1, 0.2, 1.5)], [0.7], box, **shape)[0]
    exact = slow_lidar((0.1, 0.2, 1.5), 0.7, box, beams=(7, 3), fov=(-30.0, 30.0))
    assert found == pytest.approx(exact, abs=1e-4)


def test_a_place_that_is_no_number_is_no_crash():
    found = scan("compiled", [(math.nan, 0.0, 1.0)], [0.0], [(1.0, 2.0, 0.0, 1.0, 3.0)])
    assert found.shape == (1, 36, 4)
