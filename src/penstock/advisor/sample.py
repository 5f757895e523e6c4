"""A sample of the user's data: blocks from everywhere, never all of it.

Data is rows along one axis (environments, frames). Runs of neighbouring rows, as long as a block of
a stored file, are taken at equal distances, each from the middle of its share of the rows; of rows
that are too large, windows in time. So a block of the sample is like a block of the file that would
be written, and data whose second half is different is seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.pack import DTYPES

Array = NDArray[Any]
Path_ = tuple[str, ...]

_BLOCK_BYTES, _BLOCK_ROWS = 512 * 1024, 128  # about those of a stored rollout
_LEAST_BLOCK_BYTES = 64 * 1024
_MOST_ROWS = 1 << 19  # small ones make many blocks, which take long to write
_RUNS = 48
_FEW_ROWS = 4
_FEWEST_STEPS = 32


class Values(Protocol):
    """An array of which rows can be read: in memory, on a device, or in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> str:
        """The name of its type, one of the pack's."""
        ...

    def take(self, rows: Sequence[slice], axis: int) -> Array:
        """Read rows along an axis, as words of the pack; () for all."""
        ...


@dataclass
class Held:
    """Values in memory, or mapped into it: pack words."""

    words: Array
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.words.shape

    def take(self, rows: Sequence[slice], axis: int) -> Array:
        """Read rows."""
        words: Array = joined(self.words, rows, axis)
        return words


@dataclass
class Sampled:
    """What was taken of one key.

    Attributes:
        words: As they would be stored: with all axes, for a batch; flat, for a state.
        frames: The same as frames [n, ...] of a replay buffer; None where that makes no sense.
    """

    words: Array
    frames: Array | None = None


@dataclass
class Key:
    """One key of the data, and the sample of it.

    Attributes:
        path: From the outside in.
        writer: Which part of penstock stores it.
        dtype: Of its elements.
        shape: Of all of it.
        raw_bytes: Stored uncompressed.
        memory_bytes: Held uncompressed.
        samples: What was taken, in the order of the source's groups.
        note: What else is to say.
        stored_ratio: Where the data lies in its final form already: how much smaller that is.
    """

    path: Path_
    writer: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    memory_bytes: int
    samples: list[Sampled] = field(default_factory=list)
    note: str = ""
    stored_ratio: float | None = None


@dataclass
class Group:
    """Samples that one file would hold together.

    Attributes:
        writer: Who writes it.
        items: Keys by their number in the source, and their words.
        axes: (leading shape, axis of environments, axis of time) of a rollout.
        files: How many files of this kind the data makes.
        meta: What the header of the file says besides.
        base: Of a checkpoint in a series that would be a difference: the number of the group of its
            keyframe.
        share: How many checkpoints of the series it stands for, where that is stored as
            differences: keyframe for keyframes, difference for differences.
    """

    writer: str
    items: list[tuple[int, Array]]
    axes: tuple[tuple[int, ...], int | None, int | None] = ((), None, None)
    files: float = 1.0
    meta: dict[str, Any] = field(default_factory=dict)
    base: int | None = None
    share: float = 0.0


@dataclass
class Source:
    """The data, as far as the measurement needs it."""

    kind: str
    where: str = ""
    frames: int = 0
    environments: int = 0
    disk_bytes: int = 0
    slots: int = 0  # of a storage of TorchRL
    delta_every: int = 0  # checkpoints per keyframe, if they are a series
    notes: list[str] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of an array of the pack's type."""
    return math.prod(shape) * DTYPES[dtype].words.itemsize


def joined(array: Any, rows: Sequence[slice], axis: int) -> Any:
    """Read rows along an axis of an array; () for all."""
    if not rows:
        return array
    places = [(*[slice(None)] * axis, some) for some in rows]
    pieces = [array[place] for place in places]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)


def spread(count: int, run: int, runs: int) -> list[slice]:
    """Return runs of rows at equal distances, each in the middle of its share of the rows."""
    if run * runs >= count:
        return [slice(0, count)]
    middles = (np.arange(runs) + 0.5) * (count / runs)
    starts = np.clip(np.floor(middles - (run - 1) / 2), 0, count - run).astype(int)
    found: list[slice] = []
    for start in starts.tolist():
        if found and start <= found[-1].stop:  # they touch: one run
            found[-1] = slice(found[-1].start, start + run)
        else:
            found.append(slice(start, start + run))
    return found


def total(rows: Sequence[slice], count: int) -> int:
    """Count the rows that slices take; () takes all."""
    return sum(some.stop - some.start for some in rows) if rows else count


def choose_rows(
    count: int, row_bytes: float, largest_bytes: float, budget: int
) -> tuple[list[slice], int]:
    """Choose rows of a batch for a sample of about `budget` bytes.

    Args:
        count: Rows there are.
        row_bytes: Of all keys together.
        largest_bytes: Of the largest key alone.
        budget: Bytes to take.

    Returns:
        The rows, and how many times too large they are still (1: they fit).
    """
    if count <= _MOST_ROWS and count * row_bytes <= budget:
        return [slice(0, count)], 1
    row = max(1.0, largest_bytes)
    block = min(max(_BLOCK_ROWS, int(_LEAST_BLOCK_BYTES // row)), max(1, int(_BLOCK_BYTES // row)))
    affordable = int(min(_MOST_ROWS, budget // row_bytes))
    if affordable >= _FEW_ROWS:
        run = max(1, min(block, affordable // min(_RUNS, affordable)))
        return spread(count, run, max(1, affordable // run)), 1
    rows = spread(count, 1, min(_FEW_ROWS, count))
    return rows, math.ceil(total(rows, count) * row_bytes / budget)


def choose_steps(count: int, too_large: int) -> list[slice]:
    """Choose windows in time of rows that are so many times too large."""
    if too_large <= 1:
        return []
    affordable = max(1, count // too_large)
    runs = max(1, min(_RUNS, affordable // _FEWEST_STEPS))
    return spread(count, max(1, affordable // runs), runs)


def batch_group(
    source: Source,
    leaves: Sequence[tuple[Path_, Values]],
    axes: tuple[tuple[int, ...], int | None, int | None],
    lead: tuple[int, ...],
    budget: int,
    *,
    files: float = 1.0,
    scale: float = 1.0,
    writer: str = "rollouts",
) -> None:
    """Take a sample of one batch and add it to a source.

    Args:
        source: Gets the keys (those it knows by their path grow) and a group.
        leaves: The keys of the batch.
        axes: (leading shape, axis of environments, axis of time).
        lead: The leading shape that makes frames: (frames,) or (environments, steps).
        budget: Bytes to take.
        files: How many such batches there are.
        scale: How much data this batch stands for, beside itself.
        writer: Who would store it.
    """
    known = {key.path: number for number, key in enumerate(source.keys)}
    axis = axes[1] or 0
    count = axes[0][axis] if axes[0] else (lead[0] if lead else 1)
    rows, too_large = _rows_for(leaves, count, axis, budget)
    steps = []
    if too_large > 1 and axes[2] is not None:
        steps = choose_steps(axes[0][axes[2]], too_large)
    group = Group(writer, [], (_cut(axes, rows, steps), axes[1], axes[2]), files)
    odd_budget = max(1 << 16, budget // max(1, len(leaves)))
    for path, values in leaves:
        size = nbytes(values.dtype, values.shape)
        if path not in known:
            known[path] = len(source.keys)
            source.keys.append(Key(path, writer, values.dtype, values.shape, 0, 0))
        key = source.keys[known[path]]
        key.raw_bytes += int(size * scale)
        key.memory_bytes += int(size * scale)
        if not size:
            key.note = "empty"
            continue
        covered = bool(axes[0]) and values.shape[: len(axes[0])] == axes[0]
        if covered:
            words = values.take(rows, axis)
            words = joined(words, steps, axes[2]) if steps and axes[2] is not None else words
        elif len(values.shape) and values.shape[0] == count and not axis:
            words = values.take(rows, 0)
        elif values.shape:
            own, _ = choose_rows(
                values.shape[0], size / values.shape[0], size / values.shape[0], odd_budget
            )
            words = values.take(own, 0)
        else:
            words = values.take((), 0)
        frames = None
        if lead and values.shape[: len(lead)] == lead and size:
            first = axes[2] if len(lead) == 2 and axes[2] is not None else 0
            frames = np.moveaxis(words, first, 1) if first == 0 and len(lead) == 2 else words
            frames = frames.reshape(-1, *words.shape[len(lead) :])
        group.items.append((known[path], words))
        key.samples.append(Sampled(words, frames))
    source.groups.append(group)


def _rows_for(
    leaves: Sequence[tuple[Path_, Values]], count: int, axis: int, budget: int
) -> tuple[list[slice], int]:
    sizes = [
        nbytes(values.dtype, values.shape) / count
        for _, values in leaves
        if count and len(values.shape) > axis and values.shape[axis] == count
    ]
    if not sizes or not sum(sizes):
        return [slice(0, count)], 1
    return choose_rows(count, sum(sizes), max(sizes), budget)


def _cut(
    axes: tuple[tuple[int, ...], int | None, int | None],
    rows: Sequence[slice],
    steps: Sequence[slice],
) -> tuple[int, ...]:
    """Return the leading shape of the sample."""
    shape = list(axes[0])
    if shape:
        shape[axes[1] or 0] = total(rows, shape[axes[1] or 0])
    if steps and axes[2] is not None:
        shape[axes[2]] = total(steps, shape[axes[2]])
    return tuple(shape)


def state_group(
    source: Source,
    leaves: Sequence[tuple[Path_, Values]],
    budget: int,
    *,
    meta: dict[str, Any] | None = None,
) -> Group:
    """Take a sample of a training state: pieces of each tensor, as they lie in memory.

    Args:
        source: Gets the keys, or more samples of those it has, and a group.
        leaves: The tensors.
        budget: Bytes to take.
        meta: What the header of its file says besides.

    Returns:
        The group.
    """
    whole = sum(nbytes(values.dtype, values.shape) for _, values in leaves)
    pieces = [_piece(values, whole, budget) for _, values in leaves]
    known = {k.path: number for number, k in enumerate(source.keys) if k.writer == "checkpoint"}
    group = Group("checkpoint", [], meta=meta or {})
    for (path, values), words in zip(leaves, pieces, strict=True):
        if path not in known:
            known[path] = len(source.keys)
            size = nbytes(values.dtype, values.shape)
            source.keys.append(Key(path, "checkpoint", values.dtype, values.shape, size, size))
        key = source.keys[known[path]]
        if words is None:
            key.note = "empty"
        else:
            group.items.append((known[path], words))
            key.samples.append(Sampled(words))
    source.groups.append(group)
    return group


def _piece(values: Values, whole: int, budget: int) -> Array | None:
    """Take a tensor's share of a sample, from all over it; None if it is empty."""
    size = nbytes(values.dtype, values.shape)
    if not size:
        return None
    share = max(1 << 16, int(budget * size / whole)) if whole > budget else size
    rows: list[slice] = []
    if share < size and values.shape[0] > 1:
        row = size / values.shape[0]
        run = max(1, int((256 << 10) // row))
        rows = spread(values.shape[0], run, max(1, int(share // (run * row))))
    # A view would keep all of it in memory.
    taken: Array = values.take(rows, 0).reshape(-1).copy()
    return taken
