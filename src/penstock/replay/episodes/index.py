"""Which episode a frame belongs to: look-ups of whole batches, right after any eviction.

A frame has two numbers. Its *position* counts the frames held now, from 0: what a sampler draws.
Its *id* counts every frame that was ever added: it never changes and never comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.memory import whole_number
from penstock.errors import UsageError
from penstock.replay.priority import whole_numbers

Ints = NDArray[np.int64]

_FIRST_ROWS = 16
_OWN_COLUMNS = 4


class EpisodeIndex:
    """Episodes in the order of their arrival, with look-ups in both directions.

    A *row* is the place of an episode among those held now. It is a table of int64 that grows at
    the end and shrinks at the front, in amortised O(1) per episode.

    Attributes:
        lengths: Frames of each episode, by row.
        starts: Frame id of each episode's first frame, by row.
        ids: Id of each episode, by row.
        extra: Columns of the caller [columns, rows], which travel with the rows; to be written to.
    """

    lengths: Ints
    starts: Ints
    ids: Ints
    extra: Ints
    _at: Ints

    def __init__(self, extra_columns: int = 0) -> None:
        self._end = self.next_id = self.next_frame = self.reallocations = 0
        self._show(np.zeros((_OWN_COLUMNS + extra_columns, _FIRST_ROWS), np.int64), 0, 0)

    def _show(self, table: Ints, head: int, tail: int) -> None:
        self._table, self._head, self._tail = table, head, tail
        held = table[:, head:tail]
        self.lengths, self.starts, self.ids, self._at = held[:_OWN_COLUMNS]
        self.extra = held[_OWN_COLUMNS:]

    def __len__(self) -> int:
        """Count the episodes."""
        return self._tail - self._head

    @property
    def frames(self) -> int:
        """Number of frames held."""
        return self._end - int(self._at[0]) if len(self) else 0

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return int(self._table.nbytes)

    @property
    def positions(self) -> Ints:
        """Position of each episode's first frame, by row."""
        return self._at - self._at[:1]

    def append(self, length: int, extra: Sequence[int] = ()) -> int:
        """Add an episode; return its id."""
        if length < 1:
            raise UsageError(f"an episode has at least 1 frame, not {length}")
        count, table, head, tail = len(self), self._table, self._head, self._tail
        if not count:
            self._end = 0
        if tail == table.shape[1]:
            # To twice the rows in use: so many appends pass before the next move.
            table = np.zeros((len(table), max(_FIRST_ROWS, 2 * count)), np.int64)
            table[:, :count] = self._table[:, head:tail]
            head, tail = 0, count
            self.reallocations += 1
        identity = self.next_id
        table[:, tail] = (length, self.next_frame, identity, self._end, *extra)
        self._show(table, head, tail + 1)
        self.next_id += 1
        self.next_frame += length
        self._end += length
        return identity

    def restore(
        self, ids: Ints, starts: Ints, lengths: Ints, extra: Ints, next_ids: Sequence[int]
    ) -> None:
        """Fill an empty index from saved columns and the next ids of an episode and a frame."""
        ends = np.cumsum(lengths)
        self._end = int(ends[-1:].sum())
        self.next_id, self.next_frame = map(int, next_ids)
        self._show(np.vstack([lengths, starts, ids, ends - lengths, extra]), 0, len(ids))

    def remove(self, row: int) -> None:
        """Remove the episode of a row: the first in O(1), any other by moving the later ones up."""
        if not 0 <= row < len(self):
            raise UsageError(f"row {row} is not one of {len(self)} episodes")
        if row == 0:
            self._show(self._table, self._head + 1, self._tail)
            return
        length, at = int(self.lengths[row]), self._head + row
        self._at[row + 1 :] -= length
        self._end -= length
        self._table[:, at : self._tail - 1] = self._table[:, at + 1 : self._tail]
        self._show(self._table, self._head, self._tail - 1)

    def row_of(self, episode_id: int) -> int | None:
        """Return the row of an episode, None if it is not held."""
        row = int(np.searchsorted(self.ids, episode_id))
        return row if row < len(self) and int(self.ids[row]) == episode_id else None

    def find(self, positions: ArrayLike) -> tuple[Ints, Ints]:
        """Return rows and steps of a batch of positions."""
        wanted = np.asarray(positions, np.int64)
        frames = self.frames
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= frames):
            bad = wanted[(wanted < 0) | (wanted >= frames)].flat[0]
            raise UsageError(f"frame {bad} is not one of the {frames} frames held")
        absolute = wanted + self._at[:1].sum()
        rows = self._at.searchsorted(absolute, side="right") - 1
        return rows, absolute - self._at[rows]

    def locate(self, frame_ids: ArrayLike) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """Return rows and steps of a batch of frame ids, and which of them are still held.

        Rows and steps mean nothing where a frame is not held.
        """
        wanted = np.asarray(frame_ids, np.int64)
        if not len(self):
            nothing = np.zeros_like(wanted)
            return nothing, nothing, nothing.astype(np.bool_)
        starts = self.starts
        rows = np.maximum(starts.searchsorted(wanted, side="right") - 1, 0)
        steps = wanted - starts[rows]
        return rows, steps, (steps >= 0) & (steps < self.lengths[rows])


class PrefixSum:
    """Lengths of episodes and their running sum: which episode holds the n-th frame.

    Episodes that no longer fit `max_len` frames are forgotten whole, oldest first, as a
    `DictReplayBuffer` of that size forgets them; positions count from the oldest one held.

    Args:
        max_len: The most frames to hold.

    Example:
        sums = PrefixSum(max_len=1000)
        for length in (10, 20, 15):
            sums.add(length)
        sums.get_range_idx(25)              # 1: the second episode
        sums.get_range_relative_idx(25, 1)  # 15: its sixteenth frame
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = whole_number("max_len", max_len)
        self._index = EpisodeIndex()

    def __len__(self) -> int:
        """Count the frames."""
        return self._index.frames

    @property
    def ar(self) -> Ints:
        """Length of each episode held, read-only."""
        return _read_only(self._index.lengths)

    @property
    def prefix_sum(self) -> Ints:
        """Position of each episode's first frame and, last, the number of frames; read-only."""
        return _read_only(np.append(self._index.positions, self._index.frames))

    @property
    def reallocations(self) -> int:
        """How often the arrays moved: at most about log2 of the number of episodes."""
        return self._index.reallocations

    def add(self, val: int) -> None:
        """Add an episode of `val` frames, forgetting the oldest ones that no longer fit."""
        length = whole_number("val", val)
        if length > self.max_len:
            raise UsageError(f"an episode of {length} frames; at least 1, at most {self.max_len}")
        while self._index.frames + length > self.max_len:
            self._index.remove(0)
        self._index.append(length)

    def get_range_idx(self, idx: Any) -> Any:
        """Return the number, in `ar`, of the episode that holds a frame, or each of an array."""
        positions = whole_numbers("a frame", idx)
        rows, _ = self._index.find(positions)
        return rows if positions.ndim else int(rows)

    def get_range_relative_idx(self, idx: Any, range_idx: Any) -> Any:
        """Return the step of a frame inside its episode, or of each of an array."""
        positions, given = whole_numbers("a frame", idx), whole_numbers("an episode", range_idx)
        rows, steps = self._index.find(positions)
        frames, rows, steps, given = np.broadcast_arrays(positions, rows, steps, given)
        wrong = rows != given
        if wrong.any():
            raise UsageError(
                f"frame {frames[wrong][0]} is not in episode {given[wrong][0]}; ask get_range_idx"
            )
        return steps.copy() if steps.ndim else int(steps)


def _read_only(values: Ints) -> Ints:
    view: Ints = values.view()
    view.flags.writeable = False
    return view
