"""The proposal's replay buffer in all its modes: per episode or per frame, threads or none."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import lz4.frame
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from benchmarks import Row, Settings
from benchmarks.experience import ProposedBuffer
from benchmarks.lz4_levels import measure_lz4
from benchmarks.measure import burst, clock, interleave, time_rows
from penstock.replay.episodes.index import PrefixSum
from penstock.replay.images import compress_image
from penstock.replay.torchrl.storage import CompressedStorage

OURS = "penstock"
EPISODE, FRAME = "proposal, per episode", "proposal, per frame"
_BATCHES = (256, 64, 32)  # the usual one, and the limits that the proposal gives for threads
_FRAMES = 500  # compressed one by one, for the size
_MANY = 1_000_000
_EPISODES = (1_000, 100_000)

Pictures = NDArray[np.uint8]
Turn = Callable[[], float]


class FrameBuffer:
    """Every frame an LZ4 frame of level 9: the proposal's `compress_epi=False`."""

    def __init__(self, pictures: Pictures) -> None:
        self._shape = pictures.shape[1:]
        self._frames = [compress_image(picture, level=9) for picture in pictures]

    def one(self, index: int) -> torch.Tensor:
        """Decompress one frame."""
        data = bytearray(lz4.frame.decompress(self._frames[index]))
        return torch.frombuffer(data, dtype=torch.uint8).view(self._shape)

    def sample(self, indices: NDArray[Any], threads: bool) -> torch.Tensor:
        """Decompress the frames of a batch."""
        return stack(self.one, indices, threads)

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return sum(map(len, self._frames))


def stack(one: Callable[[int], torch.Tensor], indices: NDArray[Any], threads: bool) -> torch.Tensor:
    """Put a batch together as the proposal does: in a pool of threads made for it, or in a loop."""
    if not threads:
        return torch.stack([one(index) for index in indices.tolist()])
    with ThreadPoolExecutor() as executor:
        return torch.stack(list(executor.map(one, indices.tolist())))


def measure_modes(
    data: TensorDict, noisy: TensorDict, length: int, settings: Settings
) -> list[Row]:
    """Measure batches and sizes of both modes, with and without threads."""
    pictures = data["pixels"].numpy()
    rng = np.random.default_rng(0)
    episodes = ProposedBuffer(pictures.shape[1:], np.uint8)
    for episode in pictures.reshape(-1, length, *pictures.shape[1:])[:4]:
        episodes.add(episode)
    count = min(4 * length, len(pictures))
    frames = FrameBuffer(pictures[:count])
    rows = []
    for batch in _BATCHES:
        turns = {}
        for name, one in ((EPISODE, episodes.one), (FRAME, frames.one)):
            for threads in (False, True):
                who = f"{name}, {'threads' if threads else 'one thread'}"
                turns[who] = _turn(one, rng, count, batch, threads)
        timings = interleave(turns, 2, f"the proposal's modes, {batch}")
        rows += time_rows(f"proposal's buffer, batch of {batch}", timings, f"{FRAME}, one thread")
        slower = timings[f"{EPISODE}, threads"].median / timings[f"{FRAME}, one thread"].median
        rows.append(Row(f"per episode against per frame, batch of {batch}", "time", slower, "x"))
        for name in (EPISODE, FRAME):
            pair = [timings[f"{name}, {how}"].median for how in ("one thread", "threads")]
            gain = pair[0] / pair[1]
            rows.append(Row(f"speed-up by threads, batch of {batch}", name, gain, "x", n=2))
    for name, source in (("depth", data), ("noisy depth", noisy)):
        rows += _sizes(name, source["pixels"].numpy(), length)
    speeds = measure_lz4("depth pictures", pictures.tobytes(), 2, levels=(0, 9))
    return rows + [row for row in speeds if row.unit == "MB/s"]


def _turn(
    one: Callable[[int], torch.Tensor],
    rng: np.random.Generator,
    count: int,
    batch: int,
    threads: bool,
) -> Turn:
    return lambda: clock(lambda: stack(one, rng.integers(0, count, batch), threads))


def _sizes(name: str, pictures: Pictures, length: int) -> list[Row]:
    whole = ProposedBuffer(pictures.shape[1:], np.uint8)
    whole.add(pictures[:length])
    few = pictures[:_FRAMES]
    storage = CompressedStorage(len(few))
    tensors = TensorDict({"pixels": torch.from_numpy(few)}, batch_size=[len(few)])
    storage.set(torch.arange(len(few)), tensors)
    raw = pictures[0].nbytes
    held = {
        EPISODE: whole.nbytes / length,
        FRAME: FrameBuffer(few).nbytes / len(few),
        OURS: storage.nbytes / len(few),
    }
    gain = held[FRAME] / held[EPISODE]
    rows = [Row(f"per episode against per frame, {name} pictures", "size", gain, "x smaller")]
    for who, size in held.items():
        saved = 100 * (1 - size / raw)
        rows.append(Row(f"compression, {name} pictures", who, raw / size, "x smaller"))
        rows.append(Row(f"memory saved, {name} pictures", who, saved, "%"))
    for who, size in ({"as they are": raw} | held).items():
        what = f"memory of {_MANY:,} {name} pictures (scaled)"
        rows.append(Row(what, who, size * _MANY / 1e9, "GB"))
    return sorted(rows, key=lambda row: row.what)


# ---------------------------------------------------------------------- the index of episodes


class ProposedPrefixSum:
    """The proposal's index, as it is written there, of episodes that are added already."""

    def __init__(self, prefix_sum: NDArray[np.int32]) -> None:
        self.prefix_sum = prefix_sum

    def get_range_idx(self, idx: int) -> int:
        """Say which episode a frame belongs to."""
        return bisect.bisect_right(self.prefix_sum, idx) - 1


def measure_index(settings: Settings) -> list[Row]:
    """Measure look-ups among few and many episodes, and make the proposal's example."""
    rng = np.random.default_rng(0)
    rows = []
    found: dict[str, list[float]] = {OURS: [], "proposal": []}
    for episodes in _EPISODES:
        ours = PrefixSum(episodes * 10)
        for _ in range(episodes):
            ours.add(10)
        theirs = ProposedPrefixSum(np.arange(episodes + 1, dtype=np.int32) * 10)
        wanted = rng.integers(0, episodes * 10, 256)
        numbers = wanted.tolist()
        timings = interleave(
            {
                OURS: burst(lambda: ours.get_range_idx(wanted), 50),  # noqa: B023  used at once
                "proposal": burst(
                    lambda: [theirs.get_range_idx(number) for number in numbers],  # noqa: B023
                    2,
                ),
            },
            max(3, settings.rounds // 2),
            f"index of {episodes:,}",
        )
        for who, timing in timings.items():
            found[who].append(timing.median)
        rows += time_rows(f"look-up of 256 frames among {episodes:,} episodes", timings, OURS)
    few, many = _EPISODES
    what = f"look-up among {many:,} episodes against {few:,}"
    rows += [Row(what, who, slow / quick, "x the time") for who, (quick, slow) in found.items()]
    example = PrefixSum(1000)
    for frames in (10, 20, 15):
        example.add(frames)
    episode = example.get_range_idx(25)
    starts = [start for start, _ in pairwise(example.prefix_sum.tolist())]
    what = "episodes of 10, 20 and 15 frames, frame 25"
    rows.append(Row(what, "its episode", episode, "(from 0)"))
    rows.append(Row(what, "its step", 25 - starts[episode], "(from 0)"))
    return rows
