"""The buffer against lists of dicts: every codec, mode and way to evict, 10,000 operations."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.replay.episodes.buffer import DictReplayBuffer

CODECS = ["auto", "raw", "lz4", "bits", "sparse", "zstd"]
COMBINATIONS = list(itertools.product(CODECS, ["fifo", "lru"]))
OPERATIONS, RUNS = 48, 18  # of 12 combinations: 10,368
MAX_SIZE = 40
GAMMA = 0.9
KEYS = ["obs", ("deep", "er", "state"), "reward", "done", "serial", "step"]

Frame = dict[str, Any]


def make_frame(serial: int, step: int, last: bool, rng: np.random.Generator) -> Frame:
    obs = np.zeros((10, 32), np.uint8)
    obs[serial % 10, : step % 32] = serial % 251
    obs[(serial + step) % 10] += rng.integers(0, 3, 32).astype(np.uint8)
    state = np.array([serial, np.nan, -0.0, step * 1e-3], np.float32)
    done = last or bool(rng.random() < 0.15)
    return {
        "obs": obs,
        "state": state,
        "reward": np.float64(rng.normal()),
        "done": done,
        "serial": np.int64(serial),
        "step": np.int16(step),
    }


def as_episode(frames: list[Frame], as_lists: bool) -> dict[str, Any]:
    columns: dict[str, Any] = {key: [frame[key] for frame in frames] for key in frames[0]}
    if not as_lists:
        columns = {key: torch.from_numpy(np.stack(values)) for key, values in columns.items()}
        columns["obs"] = columns["obs"].numpy()
    state = columns.pop("state")
    return {**columns, "deep": {"er": {"state": state}}}


class SlowBuffer:
    """Lists of dicts, and the rules written out."""

    def __init__(self, lru: bool) -> None:
        self.episodes: list[tuple[int, int, list[Frame]]] = []  # id, first frame id, frames
        self.used: dict[int, int] = {}
        self.lru = lru
        self.clock = self.next_id = self.next_frame = 0

    def __len__(self) -> int:
        return sum(len(frames) for _, _, frames in self.episodes)

    def add(self, frames: list[Frame]) -> int:
        while len(self) + len(frames) > MAX_SIZE:
            victims = self.episodes
            if self.lru:
                victims = sorted(self.episodes, key=lambda e: (self.used[e[0]], e[0]))
            self.episodes.remove(victims[0])
        self.clock += 1
        self.episodes.append((self.next_id, self.next_frame, frames))
        self.used[self.next_id] = self.clock
        self.next_frame += len(frames)
        self.next_id += 1
        return self.next_id - 1

    def touch(self, serials: set[int]) -> None:
        self.clock += 1
        for identity, _, frames in self.episodes:
            if int(frames[0]["serial"]) in serials:
                self.used[identity] = self.clock

    def by_serial(self, serial: int) -> list[Frame]:
        return next(f for _, _, f in self.episodes if int(f[0]["serial"]) == serial)


def plain(batch: Any) -> Any:
    """Arrays instead of tensors: looking at single elements of those takes most of the time."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    assert isinstance(batch, torch.Tensor)
    return batch.numpy()


def same(got: Any, expected: Any) -> None:
    assert got.tobytes() == expected.tobytes()


def check_frame(batch: Any, at: tuple[int, ...], frames: list[Frame], step: int) -> None:
    frame, after = frames[step], frames[min(step + 1, len(frames) - 1)]
    same(batch["obs"][at], frame["obs"])
    same(batch["deep"]["er"]["state"][at], frame["state"])
    same(batch["reward"][at], frame["reward"])
    assert bool(batch["done"][at]) == frame["done"]
    assert int(batch["step"][at]) == int(frame["step"]) == step
    same(batch["next"]["obs"][at], after["obs"])
    same(batch["next"]["deep"]["er"]["state"][at], after["state"])
    assert bool(batch["next"]["valid"][at]) == (step + 1 < len(frames))


def check_sample(buffer: DictReplayBuffer, slow: SlowBuffer, count: int) -> None:
    batch = plain(buffer.sample(count))
    assert batch["obs"].shape == (count, 10, 32)
    for k in range(count):
        check_frame(batch, (k,), slow.by_serial(int(batch["serial"][k])), int(batch["step"][k]))
    slow.touch(set(batch["serial"].tolist()))


def check_windows(buffer: DictReplayBuffer, slow: SlowBuffer, length: int, pad: bool) -> None:
    longest = max(len(frames) for _, _, frames in slow.episodes)
    if not pad and length > longest:
        with pytest.raises(UsageError, match="longer than every episode"):
            buffer.sample(4, sequence=length)
        return
    batch = plain(buffer.sample(4, sequence=length, pad=pad))
    assert batch["obs"].shape == (4, length, 10, 32)
    assert ("mask" in batch) == pad
    for k in range(4):
        frames = slow.by_serial(int(batch["serial"][k, 0]))
        start = int(batch["step"][k, 0])
        assert pad or start + length <= len(frames)
        for t in range(length):
            check_frame(batch, (k, t), frames, min(start + t, len(frames) - 1))
            assert not pad or bool(batch["mask"][k, t]) == (start + t < len(frames))
    slow.touch(set(batch["serial"][:, 0].tolist()))


def check_n_step(buffer: DictReplayBuffer, slow: SlowBuffer, count: int) -> None:
    batch = plain(buffer.sample(4, n_step=count, gamma=GAMMA))
    for k in range(4):
        frames, step = slow.by_serial(int(batch["serial"][k])), int(batch["step"][k])
        total, taken, ended = 0.0, 0, False
        while taken < count and step + taken < len(frames) and not ended:
            total += GAMMA**taken * frames[step + taken]["reward"]
            ended = frames[step + taken]["done"]
            taken += 1
        assert float(batch["reward"][k]) == pytest.approx(total, rel=1e-12)
        if count > 1:
            expected = 0.0 if ended else GAMMA**taken
            assert float(batch["discount"][k]) == pytest.approx(expected, rel=1e-6)
        ahead = min(step + taken, len(frames) - 1)
        same(batch["next"]["obs"][k], frames[ahead]["obs"])
        assert bool(batch["next"]["valid"][k]) == (step + taken < len(frames))
        same(batch["obs"][k], frames[step]["obs"])
    slow.touch(set(batch["serial"].tolist()))


def check_everything(buffer: DictReplayBuffer, slow: SlowBuffer) -> None:
    ids, expected = [], []
    for _, first, frames in slow.episodes:
        for step in range(len(frames)):
            ids.append(first + step)
            expected.append((frames, step))
    batch = plain(buffer.get(ids))
    for k, (frames, step) in enumerate(expected):
        check_frame(batch, (k,), frames, step)
    gone = sorted(set(range(-1, slow.next_frame + 1)) - set(ids))
    with pytest.raises(UsageError, match="is not held"):
        buffer.get([*ids[:2], gone[-2]])


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "sample", "windows", "n step", "remove", "get"]),
        st.integers(1, 12),
        st.integers(0, 2**31),
    ),
    min_size=OPERATIONS,
    max_size=OPERATIONS,
)


@pytest.mark.parametrize(("codec", "eviction"), COMBINATIONS)
def test_the_buffer_equals_lists(codec: str, eviction: str) -> None:
    @settings(max_examples=RUNS, deadline=None)
    @given(operations)
    def run(script: list[tuple[str, int, int]]) -> None:
        buffer = DictReplayBuffer(
            MAX_SIZE,
            KEYS,
            codecs={"obs": codec, "serial": "auto"},
            eviction=eviction,
            next_keys=["obs", ("deep", "er", "state")],
            seed=0,
        )
        slow = SlowBuffer(lru=eviction == "lru")
        for serial, (what, size, number) in enumerate(script):
            if what == "add":
                rng = np.random.default_rng(number)
                frames = [make_frame(serial, t, t == size - 1, rng) for t in range(size)]
                assert buffer.add(as_episode(frames, number % 2 == 0)) == slow.add(frames)
            elif not slow.episodes:
                with pytest.raises(UsageError, match="empty"):
                    buffer.sample(3)
            elif what == "sample":
                check_sample(buffer, slow, size)
            elif what == "windows":
                check_windows(buffer, slow, size, number % 2 == 0)
            elif what == "n step":
                check_n_step(buffer, slow, 1 + size % 5)
            elif what == "get":
                check_everything(buffer, slow)
            else:
                at = number % len(slow.episodes)
                buffer.remove(slow.episodes.pop(at)[0])
            assert len(buffer) == len(slow)
            assert buffer.episodes == [identity for identity, _, _ in slow.episodes]
        if buffer.codecs and codec != "auto":
            assert buffer.codecs["obs"] == codec

    run()
