"""Samples of what penstock has saved: rollouts, replay buffers, runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.advisor.arrays import leaves_of
from penstock.advisor.sample import (
    Held,
    Key,
    Sampled,
    Source,
    Values,
    batch_group,
    choose_rows,
    choose_steps,
    nbytes,
    spread,
    total,
)
from penstock.advisor.states import add_checkpoints
from penstock.core.files import storage_error
from penstock.core.pack import DTYPES, PackReader
from penstock.errors import CorruptFile, UsageError
from penstock.inspect import replay

Array = NDArray[Any]

_FILES = 16  # that a sample is taken from
_HEADERS = 500  # that are read
_DEEPEST = 64
_DESCRIPTION_BYTES = 16 << 20


def rollout_source(where: Path, budget: int) -> Source:
    """Sample a folder of rollouts, or one."""
    source = Source("rollouts", str(where))
    add_rollouts(source, _rollout_files(where), budget)
    return source


def _rollout_files(where: Path) -> list[Path]:
    return sorted(where.glob(replay.ROLLOUTS)) if where.is_dir() else [where]


def _some(files: Sequence[Path], most: int) -> list[Path]:
    return [files[k] for part in spread(len(files), 1, most) for k in range(part.start, part.stop)]


def add_rollouts(source: Source, files: Sequence[Path], budget: int) -> None:
    """Sample rollouts: a few files from the first to the last, environments from all over each."""
    headers = _some(files, _HEADERS)
    frames = rows = 0
    sizes: dict[str, int] = {}
    for path in headers:
        try:
            with PackReader(path) as pack:
                batch = pack.index.meta.get("batch") or []
                frames += math.prod(batch) if batch else 0
                rows += batch[0] if len(batch) == 2 else 0
                for entry in pack.index.entries.values():
                    sizes[entry.name] = sizes.get(entry.name, 0) + entry.nbytes
        except OSError as error:
            raise storage_error("read", path, error) from error
        except TypeError as error:
            raise CorruptFile(f"{path} is damaged: its axes make no sense") from error
        source.disk_bytes += path.stat().st_size
    scale = len(files) / max(1, len(headers))
    chosen = _some(files, _FILES)
    taken: dict[tuple[str, ...], int] = {}
    for path in chosen:
        _add_rollout(source, path, budget // len(chosen), len(files) / len(chosen), taken)
    for key in source.keys:
        item = "/".join(key.path)
        size = int(sizes.get(item, 0) * scale) or taken.get(key.path, 0) * len(files) // len(chosen)
        if key.path in taken:
            key.raw_bytes = key.memory_bytes = size
    source.disk_bytes = int(source.disk_bytes * scale)
    source.frames += int(frames * scale)
    source.environments += int(rows * scale)


def _add_rollout(
    source: Source, path: Path, budget: int, files: float, taken: dict[tuple[str, ...], int]
) -> None:
    import torch

    from penstock.core.reuse import ReusedMemory
    from penstock.rollouts.file import RolloutFile

    with PackReader(path) as pack:
        whole = sum(entry.nbytes for entry in pack.index.entries.values())
        entries = {name: entry.nbytes for name, entry in pack.index.entries.items()}
    with RolloutFile(path, ReusedMemory()) as file:
        axes = file.axes
        part: dict[str, Any] = {}
        if whole > budget and axes.batch and 0 not in axes.batch:
            axis = axes.env if axes.env is not None else axes.time
            assert axis is not None
            count = axes.batch[axis]
            rows, too_large = choose_rows(
                count, whole / count, max(entries.values()) / count, budget
            )
            name = "envs" if axes.env is not None else "steps"
            part[name] = _positions(rows)
            if too_large > 1 and name == "envs" and axes.time is not None:
                part["steps"] = _positions(choose_steps(axes.batch[axes.time], too_large))
        data = file.read(torch.device("cpu"), **part)
    leaves = leaves_of(data)
    shape = list(axes.batch)
    for name, axis in (("envs", axes.env), ("steps", axes.time)):
        if name in part and axis is not None:
            shape[axis] = len(part[name])
    lead = tuple(shape)
    batch_group(source, leaves, (lead, axes.env, axes.time), lead, whole, files=files)
    for key, _ in leaves:
        taken[key] = taken.get(key, 0) + entries.get("/".join(key), 0)


def _positions(rows: Sequence[slice]) -> list[int]:
    return [position for some in rows for position in range(some.start, some.stop)]


def run_source(where: Path, budget: int) -> Source:
    """Sample what a training run has kept: its rollouts and its checkpoints."""
    source = Source("training run", str(where))
    files = [path for part in _run_rollouts(where) for path in _rollout_files(part)]
    if files:
        add_rollouts(source, files, budget * 3 // 4)
    try:
        add_checkpoints(source, where / "checkpoints", budget // 4 if files else budget)
    except UsageError:
        if not files:
            raise
    if files:
        for key in source.keys:
            if key.writer == "checkpoint":
                key.memory_bytes = 0  # what has to fit is the experience
    return source


def _run_rollouts(where: Path) -> list[Path]:
    rollouts = where / "rollouts"
    return [part for part in (rollouts, *sorted(rollouts.glob("rank_*"))) if part.is_dir()]


def replay_source(where: Path, budget: int) -> Source:
    """Sample a saved replay buffer: frames of episodes (or slots) from all over its segments."""
    from penstock.replay.segments import SegmentLog

    facts = replay.describe_replay(where)
    source = Source("replay buffer", str(where), facts["frames"], disk_bytes=facts["size_bytes"])
    if not facts["frames"]:
        return source
    with SegmentLog.read(where) as log:
        if log.holder != "dict":
            source.slots = math.prod(log.state["dims"])
        records = list(log.state.get("keys") or log.state.get("columns") or [])
        for record, known in zip(records, facts["keys"], strict=True):
            size = facts["frames"] * known["frame_bytes"]
            shape = (facts["frames"], *known["shape"])
            path = tuple(map(str, record["path"]))
            source.keys.append(Key(path, "replay", known["dtype"], shape, size, size))
        names = [log.segments[k] for part in spread(len(log.segments), 1, _FILES)
                 for k in range(part.start, part.stop)]  # fmt: skip
        for name in names:
            with log.open_segment(name) as segment:
                try:
                    _add_segment(source, segment, records, log.holder, budget // len(names))
                except (LookupError, ValueError, TypeError, AttributeError) as error:
                    raise CorruptFile(
                        f"{segment.path} is damaged: its records make no sense ({error!r})"
                    ) from error
    return source


def storage_source(storage: Any, budget: int) -> Source:
    """Sample a storage of TorchRL in memory: items from all over it."""
    import torch

    source = Source("TorchRL storage", slots=int(storage.max_size), frames=len(storage))
    if source.frames:
        storage = storage.flatten() if getattr(storage, "ndim", 1) > 1 else storage
        one = leaves_of(storage[torch.tensor([0])])
        rows = _rows(source, budget, sum(nbytes(leaf.dtype, leaf.shape) for _, leaf in one))
        _add_items(source, leaves_of(storage[torch.tensor(_positions(rows))]), ())
    return source


def memmap_source(where: Path, budget: int) -> Source:
    """Sample what `dumps` of a TorchRL storage writes: one file of plain numbers per key.

    Raises:
        CorruptFile: Its description makes no sense.
    """
    source = Source("TorchRL storage", str(where))
    try:
        source.frames = int(_json(where / "storage_metadata.json")["len"])
        lead = len(_json(where / "meta.json").get("shape") or [0])  # the batch size of all keys
        leaves = list(_memmaps(where, (), lead))
        source.slots = min((leaf.shape[0] for _, leaf in leaves), default=0)
        if not 0 <= source.frames <= source.slots:
            raise ValueError(f"{source.frames} items in {source.slots} slots")
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{where} is damaged: its files make no sense ({error!r})") from error
    source.disk_bytes = sum(leaf.words.nbytes for _, leaf in leaves)
    if source.frames:
        rows = _rows(source, budget, source.disk_bytes // source.slots)
        _add_items(source, list(leaves), rows)
    return source


def _memmaps(
    folder: Path, path: tuple[str, ...], lead: int
) -> Iterator[tuple[tuple[str, ...], Held]]:
    """Yield the arrays of a folder: its files say which there are, its description of what."""
    described = _json(folder / "meta.json")
    for part in sorted(folder.iterdir()):
        if part.is_symlink() or len(path) > _DEEPEST:
            continue
        if part.is_dir() and (part / "meta.json").is_file():
            yield from _memmaps(part, (*path, part.name), lead)
        elif part.suffix == ".memmap" and part.stem in described:
            dtype = str(described[part.stem]["dtype"]).removeprefix("torch.")
            shape = tuple(map(int, described[part.stem]["shape"]))
            if 0 < nbytes(dtype, shape) <= part.stat().st_size:
                words = np.memmap(part, DTYPES[dtype].words, "r", shape=shape)
                yield (*path, part.stem), Held(words.reshape(-1, *shape[lead:]), dtype)


def _json(path: Path) -> Any:
    with path.open("rb") as file:
        return json.loads(file.read(_DESCRIPTION_BYTES))


def _rows(source: Source, budget: int, item_bytes: int) -> list[slice]:
    return spread(source.frames, max(1, budget // max(1, item_bytes) // 16), 16)


def _add_items(source: Source, leaves: Sequence[tuple[Any, Values]], rows: Sequence[slice]) -> None:
    """Add items of a storage, each the whole content of one slot."""
    for path, leaf in leaves:
        shape = (source.frames, *leaf.shape[1:])
        size = nbytes(leaf.dtype, shape)
        items = leaf.take(rows, 0)
        source.keys.append(
            Key(path, "replay", leaf.dtype, shape, size, size, [Sampled(items, items)])
        )


def _add_segment(
    source: Source, segment: PackReader, records: list[dict[str, Any]], holder: str, budget: int
) -> None:
    frame_bytes = sum(key.raw_bytes for key in source.keys) / max(1, source.frames)
    for number, record in enumerate(records):
        key = source.keys[number]
        want = max(1, int(budget // frame_bytes))
        if holder == "dict":
            data = _episode_frames(segment, number, record, want)
        else:
            data = _slot_frames(segment, number, record, want)
        words = DTYPES[key.dtype].words
        frames = np.ascontiguousarray(data).view(words).reshape(-1, *key.shape[1:])
        key.samples.append(Sampled(frames, frames))


def _episode_frames(
    segment: PackReader, number: int, record: dict[str, Any], want: int
) -> NDArray[np.uint8]:
    from penstock.replay.episodes.store import Column

    column = Column.from_config(record)
    lengths, sizes = segment.read("lengths"), segment.read(f"sizes.{number}")
    ends = np.cumsum(sizes)
    mean = max(1, int(lengths.mean()))
    episodes = _positions(spread(len(lengths), 1, max(1, min(16, want // mean))))
    each = max(1, want // len(episodes))
    out = []
    for episode in episodes:
        start, stop = int(ends[episode] - sizes[episode]), int(ends[episode])
        length = int(lengths[episode])
        data = column.from_file(segment.read_rows(f"records.{number}", start, stop), length)
        steps = np.array(_positions(spread(length, max(1, each // 4), 4)), np.int64)
        frames = np.empty((steps.size, column.field.size), np.uint8)
        address = np.full(steps.size, data.__array_interface__["data"][0], np.uint64)
        column.gather(address, steps, frames)
        out.append(frames)
    return np.concatenate(out)


def _slot_frames(
    segment: PackReader, number: int, record: dict[str, Any], want: int
) -> NDArray[np.uint8]:
    from penstock.replay.frames import frame_codec

    if record["codec"] is None:
        name = f"plain.{number}"
        rows = spread(segment.entry(name).shape[0], max(1, want // 16), 16)
        parts = [segment.read_rows(name, some.start, some.stop) for some in rows]
        return np.concatenate(parts)
    codec = frame_codec(record["codec"])
    lengths = segment.read(f"lengths.{number}")
    ends = np.cumsum(lengths)
    rows = spread(len(lengths), max(1, want // 16), 16)
    out = np.empty((total(rows, 0), codec.size), np.uint8)
    filled = 0
    for some in rows:
        part = lengths[some]
        first = int(ends[some.start] - lengths[some.start])
        data = segment.read_rows(f"data.{number}", first, int(ends[some.stop - 1]))
        at = (np.cumsum(part) - part).astype(np.uint64)
        at += np.uint64(data.__array_interface__["data"][0])
        codec.decode(at, part, out[filled : filled + len(part)])
        filled += len(part)
    return out
