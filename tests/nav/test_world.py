"""Maps and moving obstacles as the specification has them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.nav.simulation.world import (
    CELLS,
    Maps,
    Obstacles,
    World,
    _cut,
    _overlap,
    pack_rng,
    unpack_rng,
)


def test_a_seed_is_a_map():
    first, again, other = (World.generate(seed, 350) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first.boxes, again.boxes)
    assert first.boxes.shape != other.boxes.shape or (first.boxes != other.boxes).any()


def test_boxes_are_as_specified():
    boxes = World.generate(0, 350).boxes.astype(np.float64)
    assert boxes[:, [0, 2]].min() >= -19.9 - 1e-5
    assert boxes[:, [1, 3]].max() <= 20.0 + 1e-5
    tenths = boxes * 10
    np.testing.assert_allclose(tenths, tenths.round(), atol=1e-4)
    assert boxes[:, 4].min() >= 1.0
    assert boxes[:, 4].max() < 6.0
    # Shares of the heights: 10, 15, 20 and 55 %, over many boxes.
    heights = np.concatenate([World.generate(seed, 200).boxes[:, 4] for seed in range(6)])
    shares = np.histogram(heights, [0.95, 1.45, 1.95, 3.95, 6.0])[0] / heights.size
    np.testing.assert_allclose(shares, [0.10, 0.15, 0.20, 0.55], atol=0.06)
    area = ((boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])).sum()
    assert 0.03 < area / 2500 < 0.06


def test_boxes_are_disjoint():
    boxes = World.generate(1, 500).boxes
    for n, (x0, x1, y0, y1, _) in enumerate(boxes):
        others = np.delete(boxes, n, 0)
        over_x = np.minimum(x1, others[:, 1]) - np.maximum(x0, others[:, 0]) > 1e-4
        over_y = np.minimum(y1, others[:, 3]) - np.maximum(y0, others[:, 2]) > 1e-4
        assert not (over_x & over_y).any()


spans = st.tuples(st.integers(0, 9), st.integers(1, 6)).map(lambda s: (s[0], s[0] + s[1]))


@given(st.lists(st.tuples(spans, spans, st.integers(1, 9)), max_size=6))
@settings(max_examples=200, deadline=None)
def test_later_boxes_overwrite_heights(given_boxes):
    field = np.zeros((16, 16), int)
    rectangles = []
    for (x0, x1), (y0, y1), height in given_boxes:
        new = (x0, x1, y0, y1, height)
        field[x0:x1, y0:y1] = height
        rectangles = [
            part
            for old in rectangles
            for part in (_cut(old, new) if _overlap(old, new) else (old,))
        ] + [new]
    drawn, times = np.zeros_like(field), np.zeros_like(field)
    for x0, x1, y0, y1, height in rectangles:
        drawn[x0:x1, y0:y1] = height
        times[x0:x1, y0:y1] += 1
    np.testing.assert_array_equal(drawn, field)
    assert times.max(initial=0) <= 1


def test_no_box_is_where_a_drone_starts():
    boxes = World.generate(2, 350).boxes
    assert np.abs(boxes[:, :4]).max() < 24 - 0.3


@pytest.mark.parametrize("count", [3001, 10**9])
def test_too_many_boxes_are_refused_at_once(count):
    with pytest.raises(UsageError, match=f"num_obstacles={count} do not fit"):
        World.generate(0, count)


def test_a_crowd_that_finds_no_place_is_refused(monkeypatch):
    monkeypatch.setattr("penstock.nav.simulation.world._TRIES", 1)
    monkeypatch.setattr("penstock.nav.simulation.world._BATCH", 1)
    with pytest.raises(UsageError, match="found no place in 1 tries; give fewer"):
        World.generate(0, 2000)


def test_no_boxes_at_all():
    world = World.generate(0, 0)
    assert world.boxes.shape == (0, 5)
    starts, members = world.cells(4.0)
    assert starts.max() == 0
    assert members.size == 0


def test_a_cell_lists_every_box_in_reach():
    world = World.generate(3, 120)
    starts, members = world.cells(4.0)
    rng = np.random.default_rng(0)
    for x, y in rng.uniform(-25, 25, (500, 2)):
        cell = int(x + 25) * CELLS + int(y + 25)
        listed = set(members[starts[cell] : starts[cell + 1]].tolist())
        dx = np.maximum(np.maximum(world.boxes[:, 0] - x, x - world.boxes[:, 1]), 0)
        dy = np.maximum(np.maximum(world.boxes[:, 2] - y, y - world.boxes[:, 3]), 0)
        assert set(np.flatnonzero(dx**2 + dy**2 <= 16).tolist()) <= listed
        assert len(listed) < 60


def test_maps_of_several_worlds_lie_behind_each_other():
    worlds = [World.generate(seed, 40 + seed) for seed in range(3)]
    maps = Maps(worlds, 4.0)
    maps.replace(1, World.generate(9, 20))
    worlds[1] = maps.worlds[1]
    cells = CELLS * CELLS
    for n, world in enumerate(worlds):
        starts, members = world.cells(4.0)
        for cell in (CELLS * 20 + 20, CELLS * 30 + 11, CELLS * 12 + 40):
            at = n * cells + cell
            found = maps.boxes[maps.members[maps.starts[at] : maps.starts[at + 1]]]
            np.testing.assert_array_equal(
                found, world.boxes[members[starts[cell] : starts[cell + 1]]]
            )


def test_moving_obstacles_are_as_specified():
    crowd = Obstacles([3], 80, 0.096)
    assert sorted(set(crowd.width.tolist())) == [0.25, 0.5, 0.75, 1.0]
    assert crowd.tall.sum() == 40
    assert (crowd.origin[0, crowd.tall, 2] == 2.5).all()
    first = crowd.origin[0, :, :2]
    apart = np.sqrt(((first[:, None] - first[None]) ** 2).sum(2)) + 99 * np.eye(80)
    assert apart.min() > 1.0
    before = crowd.position.copy()
    speeds = set()
    for step in range(400):
        crowd.advance()
        moved = np.sqrt(((crowd.position - before) ** 2).sum(2)) / 0.096
        assert moved.min() > 0.49
        assert moved.max() < 1.51
        assert (crowd.position[0, crowd.tall, 2] == 2.5).all()
        if step % 20 == 0:
            speeds.add(float(moved[0, 0].round(3)))
        before = crowd.position.copy()
        assert np.abs(crowd.goal[0, :, :2] - crowd.origin[0, :, :2]).max() <= 5.0 + 1e-4
        assert np.abs(crowd.goal[..., :2]).max() <= 20
        assert crowd.goal[..., 2].min() >= 0
        assert crowd.goal[..., 2].max() <= 4.5
    assert len(speeds) > 10
    assert np.abs(crowd.position[..., :2]).max() < 20 + 2 * 1.5  # they may overshoot their goals


def test_any_first_part_has_all_kinds():
    crowd = Obstacles([0], 24, 0.1)
    for count in (8, 16, 24):
        kinds = {(float(w), bool(t)) for w, t in zip(crowd.width, crowd.tall, strict=True)}
        assert len(kinds) == 8
        assert crowd.tall[:count].sum() * 2 == count


def test_a_world_does_not_depend_on_its_neighbours():
    alone, both = Obstacles([7], 16, 0.1), Obstacles([3, 7], 16, 0.1)
    for _ in range(120):
        alone.advance()
        both.advance()
    np.testing.assert_array_equal(alone.position[0], both.position[1])
    assert (both.position[0] != both.position[1]).any()


def test_moving_obstacles_continue_bit_for_bit():
    first, second = Obstacles([1, 2], 16, 0.1), Obstacles([5, 6], 16, 0.1)
    for _ in range(33):
        first.advance()
    second.load_state_dict(first.state_dict())
    for _ in range(60):
        first.advance()
        second.advance()
    np.testing.assert_array_equal(first.position, second.position)
    with pytest.raises(UsageError, match=r"obstacles.position of the state is \[2, 16, 3\]"):
        Obstacles([1, 2], 8, 0.1).load_state_dict(first.state_dict())


def test_a_generator_is_packed_whole():
    rng = np.random.default_rng(5)
    rng.random(3, dtype=np.float32)  # leaves half a word behind
    twin = unpack_rng(pack_rng(rng))
    np.testing.assert_array_equal(rng.random(5, dtype=np.float32), twin.random(5, dtype=np.float32))
    np.testing.assert_array_equal(rng.random(5), twin.random(5))
