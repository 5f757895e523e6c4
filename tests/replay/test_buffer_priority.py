"""Prioritised sampling of episodes that come and go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.replay.episodes.buffer import DictReplayBuffer


def filled(lengths: list[int], **options: Any) -> DictReplayBuffer:
    buffer = DictReplayBuffer(100_000, ["x"], **{"priority": 1.0, "seed": 0, **options})
    for length in lengths:
        add(buffer, length)
    return buffer


def add(buffer: DictReplayBuffer, length: int) -> int:
    """Add frames that hold their own ids."""
    start = filled_frames(buffer)
    return buffer.add({"x": np.arange(start, start + length)})


def filled_frames(buffer: DictReplayBuffer) -> int:
    store = buffer._store
    return store.index.next_frame if store else 0


def test_a_batch_says_which_frames_it_holds() -> None:
    buffer = filled([10, 20])
    batch = buffer.sample(50)
    assert batch["index"].dtype == torch.int64
    assert torch.equal(batch["index"], batch["x"])
    assert torch.equal(batch["weight"], torch.ones(50))  # all alike, so far
    windows = buffer.sample(6, sequence=15, pad=True)
    assert windows["index"].shape == windows["weight"].shape == (6, 15)
    assert torch.equal(windows["index"] == -1, ~windows["mask"])
    held = windows["mask"]
    assert torch.equal(windows["index"][held], windows["x"][held])


def test_draws_follow_the_priorities() -> None:
    buffer = filled([10, 20, 5])
    wanted = np.zeros(35)
    wanted[[3, 12, 34]] = [1.0, 2.0, 5.0]
    buffer.update_priority(np.arange(35), wanted)
    counts = np.zeros(35)
    for _ in range(100):
        counts += np.bincount(buffer.sample(160)["x"].numpy(), minlength=35)
    assert counts[wanted == 0].sum() <= 5  # a frame without error keeps a tiny chance
    assert counts[[3, 12, 34]] / 16_000 == pytest.approx(wanted[[3, 12, 34]] / 8, abs=0.02)
    batch = buffer.sample(200, beta=1.0)
    best = {3: 1e-8, 12: 0.5e-8, 34: 0.2e-8}
    for frame, weight in zip(batch["x"].tolist(), batch["weight"].tolist(), strict=True):
        if frame in best:
            assert weight == pytest.approx(best[frame], rel=1e-5)


def test_alpha_softens() -> None:
    buffer = filled([2], priority=0.5)
    buffer.update_priority([0, 1], [1.0, 16.0])
    share = buffer.sample(4000)["x"].float().mean()
    assert float(share) == pytest.approx(4 / 5, abs=0.02)


def test_new_frames_get_the_largest_priority() -> None:
    buffer = filled([4])
    buffer.update_priority([0, 1, 2, 3], [0.0, 0.0, 0.0, 9.0])
    add(buffer, 1)
    counts = np.bincount(buffer.sample(2000)["x"].numpy(), minlength=5)
    assert counts[4] == pytest.approx(1000, abs=20)


def test_frames_forgotten_meanwhile_are_passed_over() -> None:
    buffer = filled([10, 10], eviction="lru")
    index = buffer.sample(16)["index"]
    buffer.remove(0)
    buffer.update_priority(index, np.full(16, 3.0))
    buffer.update_priority([-1, 3, 12, 10**12], [1.0, 1.0, 1e6, 1.0])
    assert int(buffer.sample(9)["x"].mode().values) == 12


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf, 1e300])
def test_a_bad_priority_changes_nothing(bad: float) -> None:
    buffer = filled([5])
    buffer.update_priority(np.arange(5), [1.0, 2.0, 3.0, 4.0, 5.0])
    before = buffer._store.priorities.tree.total
    with pytest.raises(UsageError, match="priority"):
        buffer.update_priority([0, 1], [7.0, bad])
    with pytest.raises(UsageError, match="3 priorities for 2 frames"):
        buffer.update_priority([0, 1], [7.0, 1.0, 1.0])
    assert buffer._store.priorities.tree.total == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_priorities_of_any_type(dtype: torch.dtype) -> None:
    buffer = DictReplayBuffer(10, ["x"], priority=1.0, seed=0)
    buffer.add({"x": np.arange(4)})
    buffer.update_priority(torch.arange(4), torch.tensor([0, 0, 8, 0], dtype=dtype))
    assert (buffer.sample(100)["x"] == 2).all()


def test_windows_are_drawn_from_long_episodes_only() -> None:
    buffer = filled([3, 30, 2, 10])
    wanted = np.full(45, 1e-3)
    wanted[:3] = 1e3  # nearly all of the mass is where no window fits
    wanted[[3 + 10, 35 + 9]] = 1.0, 3.0
    buffer.update_priority(np.arange(45), wanted)
    firsts = []
    for _ in range(40):
        batch = buffer.sample(100, sequence=5)
        assert torch.equal(batch["x"], batch["x"][:, :1] + torch.arange(5))
        firsts += batch["x"][:, 0].tolist()
    counts = np.bincount(firsts, minlength=45)
    assert counts[:3].sum() == 0
    assert counts[13] / 4000 == pytest.approx(0.25, abs=0.03)
    assert counts[40] / 4000 == pytest.approx(0.75, abs=0.03)  # moved back so that it fits


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "remove", "update"]), st.integers(1, 400)),
        min_size=30,
        max_size=30,
    )
)
def test_priorities_stay_with_their_frames(script: list[tuple[str, int]]) -> None:
    """Against a dict, while episodes come and go and the tree moves to the front now and then."""
    buffer = DictReplayBuffer(1200, ["x"], priority=1.0, seed=0)
    slow: dict[int, float] = {}
    episodes: dict[int, list[int]] = {}
    largest = 1.0
    for what, number in script:
        if what == "add":
            start = filled_frames(buffer)
            episodes[add(buffer, number)] = list(range(start, start + number))
            slow |= dict.fromkeys(range(start, start + number), largest)
        elif what == "remove" and len(episodes) > 1:
            gone = list(episodes)[number % len(episodes)]
            buffer.remove(gone)
        elif what == "update" and slow:
            frames = np.random.default_rng(number).choice(list(slow), 20)
            values = np.random.default_rng(number).random(20) * number
            buffer.update_priority(frames, values)
            for frame, value in zip(frames.tolist(), values.tolist(), strict=True):
                slow[frame] = value + 1e-8
            largest = max(largest, float(values.max()) + 1e-8)
        for gone in set(episodes) - set(buffer.episodes):
            for frame in episodes.pop(gone):
                del slow[frame]
        if slow:
            priorities = buffer._store.priorities
            assert priorities.held().tolist() == list(slow.values())
            assert priorities.tree.total == pytest.approx(sum(slow.values()))
            batch = buffer.sample(40)
            assert torch.equal(batch["index"], batch["x"])
