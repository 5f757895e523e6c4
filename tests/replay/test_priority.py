"""The sum tree against a plain array, and draws against the proportions they should have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.replay.priority import SumTree, importance_weights

priorities = st.one_of(st.just(0.0), st.floats(0, 1e6), st.floats(0, 1e-300), st.floats(0, 1e280))


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, float]]]]:
    capacity = draw(st.sampled_from([1, 2, 15, 16, 17, 255, 256, 257, 4096, 4097]))
    entry = st.tuples(st.integers(0, capacity - 1), priorities)
    batches = st.lists(st.lists(entry, max_size=40), min_size=1, max_size=20)
    return capacity, draw(batches)


@settings(max_examples=200, deadline=None)
@given(histories(), st.integers(0, 2**32), st.booleans())
def test_the_tree_equals_an_array(
    history: tuple[int, list[list[tuple[int, float]]]], seed: int, stratified: bool
) -> None:
    capacity, batches = history
    tree, slow = SumTree(capacity, seed), np.zeros(capacity)
    for batch in batches:
        for index, priority in batch:  # one by one: the last of an entry counts
            slow[index] = priority
        tree.set([index for index, _ in batch], [priority for _, priority in batch])
        assert np.array_equal(tree.get(np.arange(capacity)), slow)
        assert tree.total == pytest.approx(slow.sum(), rel=1e-12, abs=0)
        positive = slow[slow > 0]
        assert tree.min == (positive.min() if positive.size else np.inf)
        if positive.size:
            points = np.random.default_rng(seed).random(50) * tree.total
            drawn = tree.sample(50) if stratified else tree.find(points)
            assert (slow[drawn] > 0).all()
            assert ((drawn >= 0) & (drawn < capacity)).all()
        else:
            with pytest.raises(UsageError, match="nothing to draw"):
                tree.sample(1)


@pytest.mark.parametrize("capacity", [5, 16, 17, 300, 5000])
def test_each_draw_is_the_entry_that_a_running_sum_gives(capacity: int) -> None:
    """With whole numbers every sum is exact, so that each draw can be checked on its own."""
    rng = np.random.default_rng(capacity)
    tree, values = SumTree(capacity), rng.integers(0, 4, capacity).astype(float)
    values[-1] = 1
    tree.set(np.arange(capacity), values)
    points = np.random.default_rng(1).random(2000) * values.sum()
    drawn = tree.find(points)
    assert drawn.tolist() == np.searchsorted(np.cumsum(values), points, side="right").tolist()


@pytest.mark.parametrize("stratified", [True, False])
def test_draws_are_in_proportion(stratified: bool) -> None:
    values = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.5] * 50)
    tree = SumTree(values.size, seed=3)
    tree.set(np.arange(values.size), values)
    counts, rng = np.zeros(values.size), np.random.default_rng(4)
    for _ in range(400):
        drawn = tree.sample(256) if stratified else tree.find(rng.random(256) * tree.total)
        counts += np.bincount(drawn, minlength=values.size)
    expected = values / values.sum() * counts.sum()
    held = expected > 0
    chi_squared = ((counts - expected)[held] ** 2 / expected[held]).sum()
    assert counts[~held].sum() == 0
    assert chi_squared < 300  # 199 degrees of freedom: 300 has a chance of 1 in 200,000


def test_stratified_draws_take_one_from_each_part() -> None:
    tree = SumTree(100, seed=0)
    tree.set(np.arange(100), 1.0)
    assert tree.sample(100).tolist() == list(range(100))


def test_the_same_seed_draws_the_same() -> None:
    trees = [SumTree(1000, seed=5) for _ in range(2)]
    for tree in trees:
        tree.set(np.arange(1000), np.arange(1000) + 1.0)
    assert trees[0].sample(64).tolist() == trees[1].sample(64).tolist()
    assert trees[0].sample(64).tolist() == trees[1].sample(64).tolist()


def test_no_error_gathers_over_a_million_updates() -> None:
    tree, rng = SumTree(4096, seed=0), np.random.default_rng(0)
    for _ in range(1000):
        tree.set(rng.integers(0, 4096, 1000), rng.random(1000) * 10.0 ** rng.integers(-8, 8, 1000))
    fresh = SumTree(4096)
    fresh.set(np.arange(4096), tree.get(np.arange(4096)))
    assert tree.total == fresh.total


def test_a_rest_from_rounding_ends_at_the_last_entry() -> None:
    class Last:
        """A generator whose numbers are as large as they can be."""

        def random(self, n: int) -> Any:
            return np.full(n, np.nextafter(1.0, 0.0))

    rng = np.random.default_rng(0)
    tree = SumTree(5000)
    values = rng.random(5000) * 10.0 ** rng.integers(-12, 3, 5000)
    values[4000:] = 0
    tree.set(np.arange(5000), values)
    assert (tree.get(tree.sample(8, Last())) > 0).all()  # type: ignore[arg-type]
    assert (tree.get(tree.find(Last().random(8) * tree.total)) > 0).all()


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf, -np.inf, 1e300])
def test_a_bad_priority_changes_nothing(bad: float) -> None:
    tree = SumTree(10)
    tree.set([1, 2], [1.0, 2.0])
    with pytest.raises(UsageError, match="priority"):
        tree.set([1, 2, 3], [5.0, bad, 1.0])
    assert tree.get([1, 2, 3]).tolist() == [1.0, 2.0, 0.0]
    assert tree.total == 3.0


@pytest.mark.parametrize("bad", [[-1], [10], [0, 10], [1.0], 10, 2**70])
def test_a_bad_entry_changes_nothing(bad: Any) -> None:
    tree = SumTree(10)
    with pytest.raises(UsageError):
        tree.set(bad, 1.0)
    with pytest.raises(UsageError):
        tree.get(bad)
    assert tree.total == 0.0


def test_one_priority_for_each_entry() -> None:
    with pytest.raises(UsageError, match="3 priorities for 2 entries"):
        SumTree(10).set([1, 2], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("bad", [0, -1, 1.5, None, True])
def test_a_bad_capacity_is_refused(bad: Any) -> None:
    with pytest.raises(UsageError, match="capacity"):
        SumTree(bad)


def test_nothing_asked_for_is_nothing() -> None:
    tree = SumTree(4)
    tree.set([], [])
    tree.set([0], [1.0])
    assert tree.sample(0).tolist() == []
    with pytest.raises(UsageError, match="-1 draws"):
        tree.sample(-1)


def test_weights_undo_the_bias() -> None:
    values = np.array([1.0, 2.0, 4.0])
    assert importance_weights(values, 1.0, 1.0).tolist() == [1.0, 0.5, 0.25]
    assert importance_weights(values, 1.0, 0.0).tolist() == [1.0, 1.0, 1.0]
    # Draws in proportion to p, weighted by 1/p, count every entry alike.
    assert np.ptp(values * importance_weights(values, 1.0, 1.0)) == 0
    for bad in (-0.1, np.nan, np.inf):
        with pytest.raises(UsageError, match="beta"):
            importance_weights(values, 1.0, bad)
