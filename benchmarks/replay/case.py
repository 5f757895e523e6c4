"""The case `replay`: compressed pictures against TorchRL's storages and the proposal's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from time import process_time
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl._utils import logger
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SliceSampler
from torchrl.data.replay_buffers.storages import CompressedListStorage

from benchmarks import Case, Extra, Row, Settings
from benchmarks.experience import ProposedBuffer, transitions
from benchmarks.measure import Timing, burst, clock, interleave, judge_peers, time_rows
from benchmarks.replay.modes import measure_index, measure_modes
from penstock.replay.episodes.buffer import DictReplayBuffer
from penstock.replay.priority import SumTree
from penstock.replay.torchrl.storage import CompressedStorage

OURS = "penstock"
SB3 = "sb3-extra-buffers, zstd-3"
_BATCH, _LENGTH = 256, 500
_BURST = 20  # calls per turn: one call is shorter than the noise of the clock


def run(settings: Settings) -> list[Row]:
    """Measure everything about sampling on one set of transitions."""
    with _quiet():
        data = transitions(settings.episodes, _LENGTH)
        noisy = transitions(min(4, settings.episodes), _LENGTH, noise=1.5)
        rounds = settings.rounds
        return [
            *_random(data, rounds),
            *_with_next(data, rounds),
            *_sizes(data, noisy),
            *_slices(data, rounds),
            *_small_keys(data, rounds),
            *_seed(data, max(2, rounds // 3)),
            *_tree(settings.entries, rounds),
            *measure_modes(data, noisy, _LENGTH, settings),
            *measure_index(settings),
        ]


@contextmanager
def _quiet() -> Iterator[None]:
    """TorchRL says each storage it makes; the table is enough."""
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


def _buffer(storage: Any, data: TensorDict, sampler: Any = None) -> TensorDictReplayBuffer:
    extra = {} if sampler is None else {"sampler": sampler}
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=_BATCH, **extra)
    buffer.extend(data)
    return buffer


def _judged(what: str, timings: Mapping[str, Timing], least: Mapping[str, float]) -> list[Row]:
    return judge_peers(time_rows(what, timings, OURS), least)


def _random(data: TensorDict, rounds: int) -> list[Row]:
    count = len(data)
    turns = {
        OURS: burst(_buffer(CompressedStorage(count), data).sample, _BURST),
        "LazyTensorStorage": burst(_buffer(LazyTensorStorage(count), data).sample, _BURST),
        "CompressedListStorage": burst(_buffer(CompressedListStorage(count), data).sample, calls=2),
    }
    bars = {"LazyTensorStorage": 1.3, "CompressedListStorage": 20.0}
    what = f"random batch of {_BATCH} depth pictures and 5 small keys"
    return _judged(what, interleave(turns, rounds, "random batches"), bars)


def _with_next(data: TensorDict, rounds: int) -> list[Row]:
    """Pictures and the next ones of a batch: what SB3's buffers hand out."""
    if not _has_sb3():
        return []
    from gymnasium.spaces import Box, Discrete
    from sb3_extra_buffers.compressed import CompressedReplayBuffer

    only = data.select("pixels")
    count = len(only)
    pictures = only["pixels"].numpy().reshape(count, 1, 84, 84)
    space = Box(0, 255, pictures.shape[1:], np.uint8)
    theirs = CompressedReplayBuffer(
        *(count, space, Discrete(2), "cpu"),
        optimize_memory_usage=True,
        handle_timeout_termination=False,
        compression_method="zstd-3",  # its documents recommend it
        dtypes={"elem_type": np.uint8, "runs_type": np.uint16},
    )
    zeros = np.zeros(1)
    begin_s = process_time()
    for now, following in pairwise(pictures):
        theirs.add(now[None], following[None], zeros[None], zeros, zeros, [{}])
    added_s = process_time() - begin_s
    CompressedStorage(64).set(torch.arange(64), only[:64])  # compiles
    ours = CompressedStorage(count)
    begin_s = process_time()
    for part in only.split(32):
        ours.set(torch.arange(len(ours), len(ours) + len(part)), part)
    extended_s = process_time() - begin_s
    generator = torch.Generator().manual_seed(0)

    def pair() -> None:
        first = torch.randint(count - 1, (_BATCH,), generator=generator)
        ours.get(first), ours.get(first + 1)

    turns = {OURS: burst(pair, _BURST), SB3: burst(lambda: theirs.sample(_BATCH), 2)}
    held = sum(map(sys.getsizeof, filter(None, theirs.observations.flat)))
    size, cost = "memory per depth picture, beside SB3", "CPU per depth picture written"
    return [
        *_judged(f"pictures of {_BATCH} transitions", interleave(turns, rounds, SB3), {SB3: 1.0}),
        Row(size, OURS, ours.nbytes / count, "B", count),
        Row(size, SB3, held / count, "B", count),
        Row(cost, OURS, 1e6 * extended_s / count, "us", count),
        Row(cost, SB3, 1e6 * added_s / count, "us", count),
    ]


def _sizes(data: TensorDict, noisy: TensorDict) -> list[Row]:
    rows = []
    for name, pictures in (("depth", data), ("noisy depth", noisy)):
        only = pictures.select("pixels")
        count, raw = len(only), only["pixels"][0].numel()
        storage = CompressedStorage(count)
        _buffer(storage, only)
        hard = CompressedStorage(count, codecs="lz4hc")
        _buffer(hard, only)
        listed = CompressedListStorage(count)
        _buffer(listed, only[:500])
        held = storage.nbytes / count
        peer = listed.bytes() / 500
        what = f"memory per {name} picture"
        strict = name == "depth"
        rows += [
            Row(what, OURS, held, "B", count, ratio=1.0),
            Row(what, f"{OURS}, lz4hc", hard.nbytes / count, "B", count),
            Row(
                what,
                "LazyTensorStorage",
                raw,
                "B",
                count,
                ratio=raw / held,
                bar=">= 3 x penstock" if strict else "",
                met=raw / held >= 3 if strict else None,
            ),
            Row(
                what,
                "CompressedListStorage",
                peer,
                "B",
                500,
                ratio=peer / held,
                bar=">= 1 x penstock",
                met=peer >= held,
            ),
        ]
    return rows


def _slices(data: TensorDict, rounds: int) -> list[Row]:
    count = len(data)

    def sampler() -> SliceSampler:
        return SliceSampler(slice_len=16, traj_key="episode")

    turns = {
        OURS: burst(_buffer(CompressedStorage(count), data, sampler()).sample, _BURST),
        "LazyTensorStorage": burst(
            _buffer(LazyTensorStorage(count), data, sampler()).sample, _BURST
        ),
    }
    bars = {"LazyTensorStorage": 1.2}
    what = f"SliceSampler(16), batch of {_BATCH}"
    return _judged(what, interleave(turns, rounds, "slices"), bars)


def _small_keys(data: TensorDict, rounds: int) -> list[Row]:
    small = data.exclude("pixels")
    count = len(small)
    turns = {
        OURS: burst(_buffer(CompressedStorage(count), small).sample, 100),
        "LazyTensorStorage": burst(_buffer(LazyTensorStorage(count), small).sample, 100),
    }
    # "No slower" within what two runs of the same code differ by.
    bars = {"LazyTensorStorage": 0.95}
    return _judged("5 small keys only", interleave(turns, rounds, "small keys"), bars)


def _seed(data: TensorDict, rounds: int) -> list[Row]:
    pictures = data["pixels"].numpy().reshape(-1, _LENGTH, 84, 84)
    theirs = ProposedBuffer((84, 84), np.uint8)
    ours = DictReplayBuffer(len(data), ["pixels"], img_compressed=True, seed=0)
    for episode in pictures:
        theirs.add(episode)
        ours.add({"pixels": episode})
    rng = np.random.default_rng(0)
    turns = {
        OURS: burst(lambda: ours.sample(_BATCH), _BURST),
        "proposal, per episode": lambda: clock(
            lambda: theirs.sample(rng.integers(0, len(data), _BATCH))
        ),
    }
    what = f"DictReplayBuffer, batch of {_BATCH} depth pictures"
    timings = interleave(turns, rounds, "the proposal's buffer")
    rows = _judged(what, timings, {"proposal, per episode": 500.0})
    size = "memory per depth picture, DictReplayBuffer"
    count = len(data)
    rows.append(Row(size, OURS, ours.nbytes / count, "B", count, ratio=1.0))
    rows.append(
        Row(
            size,
            "proposal, per episode",
            theirs.nbytes / count,
            "B",
            ratio=theirs.nbytes / ours.nbytes,
        )
    )
    return rows


def _has_sb3() -> bool:
    return importlib.util.find_spec("sb3_extra_buffers") is not None


def _has_cpprb() -> bool:
    return importlib.util.find_spec("cpprb") is not None


def _tree(entries: int, rounds: int) -> list[Row]:
    rng = np.random.default_rng(0)
    priorities = rng.random(entries) + 1e-3
    tree = SumTree(entries, seed=0)
    tree.set(np.arange(entries), priorities)

    def ours() -> None:
        tree.set(tree.sample(_BATCH), rng.random(_BATCH))

    turns = {OURS: burst(ours, 100)}
    if _has_cpprb():
        from cpprb import PrioritizedReplayBuffer

        theirs = PrioritizedReplayBuffer(entries, {"x": {}}, alpha=1.0)
        theirs.add(x=np.zeros(entries), priorities=priorities)

        def peer() -> None:
            found = theirs.sample(_BATCH, beta=0.4)
            theirs.update_priorities(found["indexes"], rng.random(_BATCH))

        turns["cpprb"] = burst(peer, 100)
    what = f"sum tree of {entries:,}, sample and update {_BATCH}"
    return _judged(what, interleave(turns, rounds, "sum tree"), {"cpprb": 2.0})


CASE = Case(
    name="replay",
    claim="the original proposal: LZ4 makes pictures 2-10x smaller; decompressing whole "
    "episodes in threads takes 15 ms a batch; O(log N) look-up of episodes",
    peers=(
        "TorchRL LazyTensorStorage",
        "TorchRL CompressedListStorage",
        "per-episode LZ4-9 in a thread pool (proposal)",
        "sb3-extra-buffers",
        "cpprb",
    ),
    data=f"{{episodes}} episodes of {_LENGTH} depth pictures, 84 x 84 bytes, with 5 small keys; "
    f"batches of {_BATCH}, {{rounds}} rounds",
    run=run,
    extras=(
        Extra("sb3-extra-buffers", "pip install penstock[bench]", _has_sb3),
        Extra("cpprb", "pip install penstock[bench]", _has_cpprb),
    ),
)
