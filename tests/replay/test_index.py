"""The episode index against lists, and what the seed's PrefixSum gets wrong."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.replay.episodes.index import EpisodeIndex, PrefixSum

OPERATIONS = 100
RUNS = 100  # together 10,000 operations


class SeedPrefixSum:
    """The seed's class, word for word, for the tests of what it gets wrong."""

    def __init__(self, max_len: int) -> None:
        self.ar: list[int] = []
        self.prefix_sum = np.zeros(1, dtype=np.int32)
        self.max_len = max_len

    def add(self, val: int) -> None:
        self.ar.append(val)
        self.prefix_sum = np.append(self.prefix_sum, self.prefix_sum[-1] + val)

    def get_range_idx(self, idx: int) -> int:
        return bisect.bisect_right(self.prefix_sum, idx) - 1

    def get_range_relative_idx(self, idx: int, range_idx: int) -> Any:
        return idx - self.prefix_sum[range_idx]


class SlowIndex:
    """Every frame as an object of its own, in a list."""

    def __init__(self) -> None:
        self.episodes: list[tuple[int, list[int], int]] = []  # id, frame ids, extra
        self.next_id = 0
        self.next_frame = 0

    def append(self, length: int, extra: int) -> int:
        frames = list(range(self.next_frame, self.next_frame + length))
        self.episodes.append((self.next_id, frames, extra))
        self.next_frame += length
        self.next_id += 1
        return self.next_id - 1

    def frames(self) -> list[tuple[int, int, int]]:
        """(row, step, frame id) of each frame, by position."""
        return [
            (row, step, frame)
            for row, (_, frames, _) in enumerate(self.episodes)
            for step, frame in enumerate(frames)
        ]


operations = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "evict", "remove", "look up", "locate"]),
        st.integers(1, 9),
        st.integers(0, 2**31),
    ),
    min_size=OPERATIONS,
    max_size=OPERATIONS,
)


@settings(max_examples=RUNS, deadline=None)
@given(operations)
def test_the_index_equals_lists(script: list[tuple[str, int, int]]) -> None:
    index, slow = EpisodeIndex(extra_columns=1), SlowIndex()
    for what, length, number in script:
        if what == "append":
            assert index.append(length, [number]) == slow.append(length, number)
        elif what == "evict" and slow.episodes:
            assert index.ids[0] == slow.episodes.pop(0)[0]
            index.remove(0)
        elif what == "remove" and slow.episodes:
            row = number % len(slow.episodes)
            assert index.row_of(slow.episodes[row][0]) == row
            index.remove(row)
            gone = slow.episodes.pop(row)[0]
            assert index.row_of(gone) is None
        elif what == "look up":
            expected = slow.frames()
            rows, steps = index.find(np.arange(len(expected)))
            assert rows.tolist() == [row for row, _, _ in expected]
            assert steps.tolist() == [step for _, step, _ in expected]
        elif what == "locate":
            held = {frame: (row, step) for row, step, frame in slow.frames()}
            rows, steps, alive = index.locate(np.arange(-2, slow.next_frame + 2))
            for frame in range(-2, slow.next_frame + 2):
                assert bool(alive[frame + 2]) == (frame in held)
                if frame in held:
                    assert (rows[frame + 2], steps[frame + 2]) == held[frame]
        assert len(index) == len(slow.episodes)
        assert index.frames == len(slow.frames())
        assert index.ids.tolist() == [identity for identity, _, _ in slow.episodes]
        assert index.starts.tolist() == [frames[0] for _, frames, _ in slow.episodes]
        assert index.lengths.tolist() == [len(frames) for _, frames, _ in slow.episodes]
        assert index.extra[0].tolist() == [extra for _, _, extra in slow.episodes]


@settings(max_examples=RUNS, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=OPERATIONS, max_size=OPERATIONS), st.integers(30, 90))
def test_prefix_sum_equals_a_list_of_frames(lengths: list[int], max_len: int) -> None:
    sums = PrefixSum(max_len)
    held: list[int] = []
    for length in lengths:
        sums.add(length)
        held.append(length)
        while sum(held) > max_len:
            held.pop(0)
        expected = [(e, t) for e, count in enumerate(held) for t in range(count)]
        assert len(sums) == len(expected)
        assert sums.ar.tolist() == held
        assert sums.prefix_sum.tolist() == [sum(held[:k]) for k in range(len(held) + 1)]
        positions = np.arange(len(expected))
        episodes = sums.get_range_idx(positions)
        assert episodes.tolist() == [e for e, _ in expected]
        assert sums.get_range_relative_idx(positions, episodes).tolist() == [t for _, t in expected]
        assert sums.get_range_idx(len(expected) - 1) == expected[-1][0]


def test_the_seeds_example() -> None:
    sums = PrefixSum(max_len=1000)
    for length in (10, 20, 15):
        sums.add(length)
    assert sums.get_range_idx(25) == 1
    assert type(sums.get_range_idx(25)) is int
    assert sums.get_range_relative_idx(25, 1) == 15
    assert type(sums.get_range_relative_idx(25, 1)) is int
    assert sums.ar[1] == 20


def test_before_any_eviction_it_answers_as_the_seed_did() -> None:
    ours, seed = PrefixSum(10_000), SeedPrefixSum(10_000)
    for length in (3, 1, 7, 2, 40):
        ours.add(length)
        seed.add(length)
    assert ours.ar.tolist() == seed.ar
    assert ours.prefix_sum.tolist() == seed.prefix_sum.tolist()
    for idx in range(53):
        assert ours.get_range_idx(idx) == seed.get_range_idx(idx)
        episode = seed.get_range_idx(idx)
        assert ours.get_range_relative_idx(idx, episode) == seed.get_range_relative_idx(
            idx, episode
        )


def test_evicted_episodes_are_forgotten() -> None:
    """The seed's buffer drops frames, its index does not: every look-up is wrong from then on."""
    ours, seed = PrefixSum(25), SeedPrefixSum(25)
    for length in (10, 10, 10):
        ours.add(length)
        seed.add(length)
    assert ours.ar.tolist() == [10, 10]
    assert ours.get_range_idx(0) == 0  # the oldest frame that is held
    assert len(ours) == 20
    assert seed.prefix_sum[-1] == 30  # it draws from frames that are gone
    with pytest.raises(UsageError, match="frame 20 is not one of the 20 frames held"):
        ours.get_range_idx(20)


def test_counts_are_64_bit() -> None:
    ours, seed = PrefixSum(2**40), SeedPrefixSum(2**40)
    for _ in range(3):
        ours.add(2**30)
    assert ours.prefix_sum.tolist() == [0, 2**30, 2**31, 3 * 2**30]
    assert ours.get_range_idx(3 * 2**30 - 1) == 2
    assert ours.get_range_relative_idx(3 * 2**30 - 1, 2) == 2**30 - 1
    seed.prefix_sum = np.array([0, 2**31 - 1], np.int32)
    with np.errstate(over="ignore"):
        assert seed.prefix_sum[-1] + np.int32(1) < 0  # what it counts in


def test_adding_seldom_moves_the_arrays() -> None:
    """The seed copies everything on each add; 20,000 adds there are 20,000 copies."""
    sums = PrefixSum(10**9)
    for _ in range(20_000):
        sums.add(1)
    assert sums.reallocations <= 12


def test_a_full_index_moves_once_per_generation() -> None:
    sums = PrefixSum(1000)
    for _ in range(20_000):
        sums.add(1)
    assert len(sums) == 1000
    assert sums.reallocations <= 30


@pytest.mark.parametrize("bad", [0, -1, 101, 2**70, 1.5, "3", None])
def test_a_bad_length_changes_nothing(bad: Any) -> None:
    sums = PrefixSum(100)
    sums.add(60)
    with pytest.raises(UsageError):
        sums.add(bad)
    assert sums.ar.tolist() == [60]


@pytest.mark.parametrize("bad", [0, -5, 2.5, None])
def test_a_bad_max_len_is_refused(bad: Any) -> None:
    with pytest.raises(UsageError):
        PrefixSum(bad)


@pytest.mark.parametrize("bad", [-1, 30, [0, 30], np.array([0, -1]), 2**70, 1.0, np.uint64(2**63)])
def test_a_frame_out_of_range_is_refused(bad: Any) -> None:
    sums = PrefixSum(100)
    sums.add(30)
    with pytest.raises(UsageError):
        sums.get_range_idx(bad)


def test_a_frame_of_another_episode_is_refused() -> None:
    sums = PrefixSum(100)
    sums.add(10)
    sums.add(10)
    with pytest.raises(UsageError, match="frame 3 is not in episode 1"):
        sums.get_range_relative_idx(3, 1)
    with pytest.raises(UsageError):
        sums.get_range_relative_idx(np.array([3, 12]), np.array([0, 0]))


def test_an_empty_index_has_no_frames() -> None:
    sums = PrefixSum(10)
    assert sums.prefix_sum.tolist() == [0]
    with pytest.raises(UsageError, match="0 frames held"):
        sums.get_range_idx(0)
    assert sums.get_range_idx(np.zeros(0, np.int64)).tolist() == []


def test_its_arrays_cannot_be_written_to() -> None:
    sums = PrefixSum(10)
    sums.add(3)
    with pytest.raises(ValueError, match="read-only"):
        sums.ar[0] = 5
    with pytest.raises(ValueError, match="read-only"):
        sums.prefix_sum[0] = 5


def test_an_empty_index_evicts_nothing() -> None:
    index = EpisodeIndex()
    with pytest.raises(UsageError, match="row 0"):
        index.remove(0)
