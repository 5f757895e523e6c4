"""Samples of saved experience: rollouts, replay buffers, storages of TorchRL, training runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.advisor.arrays import values_of
from penstock.advisor.checkpoints import add_checkpoints
from penstock.advisor.decide import KeyMeasure, KeyPath
from penstock.advisor.sample import (
    Array,
    Rows,
    Source,
    Values,
    joined,
    nbytes,
    positions,
    some_of,
    spread,
)
from penstock.core.pack import DTYPES, Entry, PackReader
from penstock.core.reuse import ReusedMemory
from penstock.errors import CorruptFile, UsageError
from penstock.inspect import replay, run
from penstock.replay.segments import LogReader
from penstock.rollouts.file import RolloutFile
from penstock.rollouts.structure import Axes, Key

Bytes = NDArray[np.uint8]

_FILES = 16  # that a sample is taken from
_HEADERS = 500  # that are read
_RUNS = 16  # of slots, or episodes, in a segment
_EPISODE_RUNS = 4
_DESCRIPTION_BYTES = 16 << 20
_NONSENSE = (LookupError, ValueError, TypeError, AttributeError, OverflowError, MemoryError)


def rollouts_source(where: Path, budget: int) -> Source:
    """Sample a rollout, or a folder of them."""
    source = Source("rollouts", str(where))
    _add_rollouts(source, replay.rollout_files(where) or [where], budget)
    return source


def _add_rollouts(source: Source, files: Sequence[Path], budget: int) -> None:
    """Sample rollouts: a few files from the first to the last, environments from all over each."""
    headers = some_of(files, _HEADERS)
    chosen = some_of(headers, _FILES)
    share, each = budget // len(chosen), len(files) / len(chosen)
    frames = environments = disk_bytes = 0
    sizes: Counter[KeyPath] = Counter()
    memory = ReusedMemory()
    for path in headers:
        disk_bytes += path.stat().st_size
        with RolloutFile(path, memory) as file:
            axes = file.axes
            values = _values(file)
            sizes.update({one.path: one.nbytes for one in values})
            frames += math.prod(axes.batch) if axes.batch else 0
            environments += axes.batch[axes.env or 0] if len(axes.batch) == 2 else 0
            if path in chosen:
                source.take_batch(values, axes, axes.batch, share, files=each)
    scale = len(files) / len(headers)
    for key in source.keys:
        key.raw_bytes = key.memory_bytes = int(sizes[key.path] * scale)
    source.disk_bytes = int(disk_bytes * scale)
    source.frames, source.environments = int(frames * scale), int(environments * scale)


def _values(file: RolloutFile) -> list[Values]:
    return [
        Values(tuple(map(str, key)), entry.dtype, entry.shape, partial(_rows, file, key, entry))
        for key, entry in file.entries.items()
        if entry is not None
    ]


def _rows(file: RolloutFile, key: Key, entry: Entry, rows: Rows, axis: int) -> Array:
    """Read environments or steps of a tensor; rows of one that has no such axes are cut out."""
    part = {}
    if rows and file.axes.cover(entry.shape):
        part["envs" if axis == file.axes.env else "steps"] = positions(rows)
    [one] = values_of(file.read(torch.device("cpu"), [key], **part))
    return one.take(() if part else rows, axis)


def run_source(where: Path, budget: int) -> Source:
    """Sample what a training run has kept: its rollouts and its checkpoints."""
    source = Source("training run", str(where))
    files = [path for folder in run.parts(where) for path in replay.rollout_files(folder)]
    if files:
        _add_rollouts(source, files, budget * 3 // 4)
    try:
        add_checkpoints(source, where / "checkpoints", budget // 4 if files else budget)
    except UsageError:
        if not files:
            raise
    for key in source.keys:
        if files and key.writer == "checkpoint":
            key.memory_bytes = 0  # what has to fit is the experience
    return source


def replay_source(where: Path, budget: int) -> Source:
    """Sample a saved replay buffer: frames of episodes (or slots) from all over its segments."""
    from penstock.replay.keys import Field

    facts = replay.describe_replay(where)
    frames = facts["frames"]
    source = Source("replay buffer", str(where), frames, disk_bytes=facts["size_bytes"])
    with LogReader(where) as log:
        names = some_of(log.segments, _FILES) if frames else []
        read = _episode_frames if log.holder == "dict" else _slot_frames
        try:
            if frames and log.holder != "dict":
                source.slots = math.prod(log.state["dims"])
            records = log.state.get("keys") or log.state.get("columns") or []
            fields = [Field.from_config(record) for record in records]
            frame_bytes = sum(field.size for field in fields)
            for field in fields:
                size = frames * field.size
                shape = (frames, *field.shape)
                source.add_key(KeyMeasure(field.path, "replay", field.dtype, shape, size, size))
            count = max(1, budget // max(1, len(names)) // max(1, frame_bytes))
            for name in names:
                with log.open_segment(name) as segment:
                    for number, (field, key) in enumerate(zip(fields, source.keys, strict=True)):
                        taken = field.words(read(segment, number, records[number], count))
                        source.add_piece(key, taken, taken)
        except (*_NONSENSE, UsageError) as error:
            raise CorruptFile(
                f"{where} is damaged: its records make no sense ({error!r})"
            ) from error
    return source


def _episode_frames(segment: PackReader, number: int, record: dict[str, Any], count: int) -> Bytes:
    """Read about so many frames of episodes, as bytes."""
    from penstock.replay.episodes.store import Column

    column = Column.from_config(record)
    lengths, sizes = segment.read("lengths"), segment.read(f"sizes.{number}")
    records, ends = segment.read(f"records.{number}"), np.cumsum(sizes)
    chosen = some_of(range(len(lengths)), max(1, min(_RUNS, count // max(1, int(lengths.mean())))))
    run = max(1, count // len(chosen) // _EPISODE_RUNS)
    parts = []
    for episode in chosen:
        length, end = int(lengths[episode]), int(ends[episode])
        data = column.from_file(records[end - int(sizes[episode]) : end], length)
        steps = np.array(positions(spread(length, run, _EPISODE_RUNS)), np.int64)
        parts.append(np.empty((steps.size, column.field.size), np.uint8))
        column.gather(np.full(steps.size, _address(data)), steps, parts[-1])
    return np.concatenate(parts)


def _slot_frames(segment: PackReader, number: int, record: dict[str, Any], count: int) -> Bytes:
    """Read about so many slots, as bytes."""
    from penstock.replay.frames import frame_codec
    from penstock.replay.keys import Field

    size, run = Field.from_config(record).size, max(1, count // _RUNS)
    if record["codec"] is None:
        rows = segment.read(f"plain.{number}")
        chosen = joined(rows, spread(len(rows), run, _RUNS))
        return np.ascontiguousarray(chosen).reshape(-1).view(np.uint8).reshape(-1, size)
    codec = frame_codec(record["codec"])
    data, lengths = segment.read(f"data.{number}"), segment.read(f"lengths.{number}")
    good = codec.size == size and lengths.dtype == np.int64 and bool((lengths >= 0).all())
    if not good or bool((lengths > data.size).any()) or int(lengths.sum()) != data.size:
        raise ValueError("its frames do not fit their key")
    slots = positions(spread(len(lengths), run, _RUNS))
    addresses = (np.cumsum(lengths) - lengths).astype(np.uint64) + _address(data)
    out = np.empty((len(slots), size), np.uint8)
    codec.decode(addresses[slots], lengths[slots], out)
    return out


def _address(data: Bytes) -> Any:
    return np.uint64(data.__array_interface__["data"][0])


def storage_source(storage: Any, budget: int) -> Source:
    """Sample a storage of TorchRL in memory: items from all over it."""
    source = Source("TorchRL storage", slots=int(storage.max_size), frames=len(storage))
    if not source.frames:
        return source
    storage = storage.flatten() if getattr(storage, "ndim", 1) > 1 else storage
    item_bytes = sum(one.nbytes for one in values_of(storage[torch.tensor([0])]))
    rows = spread(source.frames, max(1, budget // max(1, item_bytes) // _RUNS), _RUNS)
    for one in values_of(storage[torch.tensor(positions(rows))]):
        shape = (source.frames, *one.shape[1:])
        size, items = nbytes(one.dtype, shape), one.take((), 0)
        key = source.add_key(KeyMeasure(one.path, "replay", one.dtype, shape, size, size))
        source.add_piece(key, items, items)
    return source


def memmap_source(where: Path, budget: int) -> Source:
    """Sample what `dumps` of a TorchRL storage writes: one file of plain numbers per key.

    TorchRL's own reader would unpickle what is no number.
    """
    source = Source("TorchRL storage", str(where))
    arrays = []
    try:
        source.frames = int(_json(where / "storage_metadata.json")["len"])
        lead = len(_json(where / "meta.json").get("shape") or [0])  # the batch size of all keys
        for file in sorted(where.rglob("*.memmap")):
            path = file.relative_to(where).with_suffix("").parts
            described = _json(file.with_name("meta.json")).get(path[-1])
            if described is None or file.is_symlink():
                continue
            dtype = str(described["dtype"]).removeprefix("torch.")
            shape = tuple(map(int, described["shape"]))
            if 0 < nbytes(dtype, shape) <= file.stat().st_size:
                words = np.memmap(file, DTYPES[dtype].words, "r", shape=shape)
                arrays.append((path, dtype, words.reshape(-1, *shape[lead:])))
        source.slots = min((len(words) for *_, words in arrays), default=0)
        if not 0 <= source.frames <= source.slots:
            raise ValueError(f"{source.frames} items in {source.slots} slots")
    except _NONSENSE as error:
        raise CorruptFile(f"{where} is damaged: its files make no sense ({error!r})") from error
    source.disk_bytes = sum(words.nbytes for *_, words in arrays)
    frames = source.frames
    values = [
        Values(path, dtype, (frames, *words.shape[1:]), partial(joined, words[:frames]))
        for path, dtype, words in arrays
    ]
    source.take_batch(values, Axes((), None, None), (frames,), budget, writer="replay")
    return source


def _json(path: Path) -> Any:
    with path.open("rb") as file:
        return json.loads(file.read(_DESCRIPTION_BYTES))
