"""A sample of the user's data: blocks from everywhere, never all of it.

Data is rows along one axis (environments, frames). Runs of neighbouring rows, as long as a block of
a stored file, are taken at equal distances, each from the middle of its share of the rows; of rows
that are too large, windows in time. So a block of the sample is like a block of the file that would
be written, and data whose second half is different is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.advisor.decide import KeyMeasure, KeyPath, Measurements, Writer
from penstock.core.pack import DTYPES

if TYPE_CHECKING:
    from penstock.rollouts.structure import Axes

Array = NDArray[Any]
Rows = Sequence[slice]

_BLOCK_BYTES, _BLOCK_ROWS = 512 * 1024, 128  # about those of a stored rollout
_LEAST_BLOCK_BYTES = 64 * 1024
_LEAST_BYTES = 64 * 1024  # of a key
_MOST_ROWS = 1 << 19  # small ones make many blocks, which take long to write
_RUNS = 48
_FEW_ROWS = 4
_FEWEST_STEPS = 32


@dataclass(frozen=True)
class Values:
    """An array of which rows can be read: in memory, on a device, or in a file.

    `take` reads rows along an axis, as words of the pack; all for ().
    """

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]
    take: Callable[[Rows, int], Array]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return nbytes(self.dtype, self.shape)

    def some(self, budget: int) -> Array:
        """Read about so many bytes, at least 64 kB: rows from everywhere."""
        if not self.shape:
            return self.take((), 0)
        rows, _ = _choose_rows(self.shape[0], [self.nbytes], max(_LEAST_BYTES, budget))
        return self.take(rows, 0)

    def key(self, writer: Writer) -> KeyMeasure:
        """Return the key of which these are all values."""
        return KeyMeasure(self.path, writer, self.dtype, self.shape, self.nbytes, self.nbytes)


class Piece(NamedTuple):
    """What was taken of one key: words as they would be stored, and as frames of a replay buffer.

    Words have all axes, for a batch, or are flat, for a state.
    """

    key: KeyMeasure
    words: Array
    frames: Array | None = None


@dataclass(eq=False)
class Sample:
    """Pieces that one file would hold together.

    Attributes:
        axes: Of the pieces of a rollout.
        files: How many files of this kind the data makes.
        meta: What the header of the file says besides.
        base: Of a checkpoint in a series that would be a difference: its keyframe.
        share: How many checkpoints of the series it stands for, where that is stored as
            differences: keyframe for keyframes, difference for differences.
    """

    writer: Writer
    pieces: list[Piece] = field(default_factory=list)
    axes: Axes | None = None
    files: float = 1.0
    meta: dict[str, Any] = field(default_factory=dict)
    base: Sample | None = None
    share: float = 0.0


@dataclass
class Source(Measurements):
    """The data, and samples of it: what is measured."""

    samples: list[Sample] = field(default_factory=list)
    _known: dict[tuple[Writer, KeyPath], KeyMeasure] = field(default_factory=dict)

    def add_key(self, key: KeyMeasure) -> KeyMeasure:
        """Add a key, unless it is known; return the one that counts."""
        place = key.writer, key.path
        if place not in self._known:
            self._known[place] = key
            self.keys.append(key)
        return self._known[place]

    def add_piece(self, key: KeyMeasure, words: Array, frames: Array | None = None) -> None:
        """Add a piece of a key that is not written to a file to be measured."""
        key = self.add_key(key)
        if words.size:
            self.samples.append(Sample(key.writer, [Piece(key, words, frames)]))

    def take_batch(
        self,
        values: Sequence[Values],
        axes: Axes,
        lead: tuple[int, ...],
        budget: int,
        *,
        files: float = 1.0,
        writer: Writer = "rollouts",
    ) -> None:
        """Take about `budget` bytes of a batch, of which there are so many files.

        `lead` is the leading shape that makes frames: (frames,) or (environments, steps).
        """
        axis = axes.env or 0
        count = (axes.batch or lead or (1,))[axis]
        sizes = [one.nbytes for one in values if one.shape[axis : axis + 1] == (count,)]
        rows, too_large = _choose_rows(count, sizes, budget)
        batch, steps = list(axes.batch), []
        if batch:
            batch[axis] = len(positions(rows))
        if too_large > 1 and axes.env is not None and axes.time is not None:
            steps = _choose_steps(batch[axes.time], too_large)
            batch[axes.time] = len(positions(steps))
        sample = Sample(writer, axes=replace(axes, batch=tuple(batch)), files=files)
        self.samples.append(sample)
        for one in values:
            key = self.add_key(one.key(writer))
            if not one.nbytes:
                key.note = "empty"
                continue
            if batch and one.shape[: len(batch)] == axes.batch:
                words = joined(one.take(rows, axis), steps, axes.time or 0)
            elif not axis and one.shape[:1] == (count,):
                words = one.take(rows, 0)
            else:
                words = one.some(budget // len(values))
            frames = None
            if lead and one.shape[: len(lead)] == lead:
                frames = np.moveaxis(words, 0, 1) if len(lead) == 2 and axes.time == 0 else words
                frames = frames.reshape(-1, *words.shape[len(lead) :])
            sample.pieces.append(Piece(key, words, frames))

    def take_state(self, values: Sequence[Values], budget: int, meta: dict[str, Any]) -> Sample:
        """Take about `budget` bytes of a training state: of each tensor, as it lies in memory."""
        whole = sum(one.nbytes for one in values)
        # A view would keep all of it in memory. If one cannot be read, nothing is added.
        pieces = [
            one.some(budget * one.nbytes // whole).reshape(-1).copy() if one.nbytes else None
            for one in values
        ]
        sample = Sample("checkpoint", meta=meta)
        for one, words in zip(values, pieces, strict=True):
            key = self.add_key(one.key("checkpoint"))
            if words is None:
                key.note = "empty"
            else:
                sample.pieces.append(Piece(key, words))
        self.samples.append(sample)
        return sample


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of an array of the pack's type."""
    return math.prod(shape) * DTYPES[dtype].words.itemsize


def joined(array: Array, rows: Rows, axis: int = 0) -> Array:
    """Read rows along an axis of an array; all for ()."""
    before = (slice(None),) * axis
    pieces = [array[before + (some,)] for some in rows] or [array]  # noqa: RUF005
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)


def spread(count: int, run: int, runs: int) -> list[slice]:
    """Return runs of rows at equal distances, each in the middle of its share of the rows."""
    if run * runs >= count:
        return [slice(0, count)]
    starts = np.floor((np.arange(runs) + 0.5) * (count / runs) - (run - 1) / 2).astype(int)
    return [slice(start, start + run) for start in starts.tolist()]


def positions(rows: Rows) -> list[int]:
    """Return the numbers of rows, one by one."""
    return [position for some in rows for position in range(some.start, some.stop)]


def some_of(items: Sequence[Any], most: int) -> list[Any]:
    """Return up to so many items, at equal distances."""
    return [items[position] for position in positions(spread(len(items), 1, most))]


def _choose_rows(count: int, sizes: Sequence[int], budget: int) -> tuple[list[slice], int]:
    """Return rows of about `budget` bytes, given the bytes of each key that has these rows.

    And how many times too large they are still (1: they fit).
    """
    whole = sum(sizes)
    if not whole or (count <= _MOST_ROWS and whole <= budget):
        return [slice(0, count)], 1
    row = max(1.0, max(sizes) / count)
    block = min(max(_BLOCK_ROWS, int(_LEAST_BLOCK_BYTES // row)), max(1, int(_BLOCK_BYTES // row)))
    affordable = min(_MOST_ROWS, budget * count // whole)
    if affordable >= _FEW_ROWS:
        run = max(1, min(block, affordable // min(_RUNS, affordable)))
        return spread(count, run, max(1, affordable // run)), 1
    few = min(_FEW_ROWS, count)
    return spread(count, 1, few), math.ceil(few * whole / count / budget)


def _choose_steps(count: int, too_large: int) -> list[slice]:
    """Choose windows in time of rows that are so many times too large."""
    affordable = max(1, count // too_large)
    runs = max(1, min(_RUNS, affordable // _FEWEST_STEPS))
    return spread(count, max(1, affordable // runs), runs)


def thinned(arrays: Sequence[Array], most_bytes: int) -> Array:
    """Return about so many bytes of rows of arrays, runs from everywhere."""
    parts = []
    for array in arrays:
        count = max(1, most_bytes // len(arrays) // max(1, array[0].nbytes))
        run = max(1, count // _RUNS)
        parts.append(joined(array, spread(len(array), run, max(1, count // run))))
    return np.ascontiguousarray(np.concatenate(parts))
