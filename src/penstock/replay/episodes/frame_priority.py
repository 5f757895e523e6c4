"""Priorities of the frames of episodes that come and go: a sum tree laid out episode by episode."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import UsageError
from penstock.replay.episodes.index import EpisodeIndex
from penstock.replay.priority import SumTree, checked_priorities, importance_weights

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

_FIRST_CAPACITY = 1024
_EPSILON = 1e-8  # so that a frame without error is still drawn now and then


class FramePriorities:
    """One priority per frame held; new frames get the largest so far.

    The frames of an episode take consecutive entries of the tree, behind those of the episode
    before; the *offset* of an episode is where they start. When the end is reached, all move to the
    front: the tree has twice the entries needed, so that this costs little per frame.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = float(alpha)
        self.largest = 1.0
        self.cursor = 0
        self.tree = SumTree(_FIRST_CAPACITY)

    def add(self, length: int, index: EpisodeIndex, offsets: Ints) -> int:
        """Make room for an episode, and return its offset; `offsets` change if all move."""
        if self.cursor + length > self.tree.capacity:
            self._move(length, index, offsets)
        start = self.cursor
        self.tree.set(np.arange(start, start + length), self.largest)
        self.cursor += length
        return start

    def remove(self, offset: int, length: int) -> None:
        """Forget the priorities of an episode."""
        self.tree.set(np.arange(offset, offset + length), 0.0)

    def update(self, entries: Ints, priorities: ArrayLike) -> None:
        """Set the priorities of frames, given by their entries."""
        raised = self.raised(priorities)
        self.tree.set(entries, raised)
        if raised.size:
            self.largest = max(self.largest, float(raised.max()))

    def raised(self, priorities: ArrayLike) -> Floats:
        """Return priorities as the tree holds them."""
        return np.asarray((checked_priorities(priorities) + _EPSILON) ** self.alpha)

    def draw(
        self, count: int, rng: np.random.Generator, offsets: Ints, good: Bools | None
    ) -> tuple[Ints, Ints]:
        """Draw frames, of the rows that are `good` (None: all); return their rows and steps."""
        drawn = self.tree.sample(count, rng)
        rows = offsets.searchsorted(drawn, side="right") - 1
        if good is not None:
            bad = np.flatnonzero(~good[rows])
            if bad.size:
                drawn[bad] = self._draw_among(bad.size, rng, offsets, good)
                rows = offsets.searchsorted(drawn, side="right") - 1
        return rows, drawn - offsets[rows]

    def weights(self, entries: Ints, beta: float) -> Floats:
        """Return the importance weights of entries."""
        return importance_weights(self.tree.get(entries), self.tree.min, beta)

    def _draw_among(self, count: int, rng: np.random.Generator, offsets: Ints, good: Bools) -> Ints:
        """Draw from some episodes only, by a running sum over all entries: exact, but linear."""
        mass = self.tree.get(np.arange(self.cursor))
        owner = np.searchsorted(offsets, np.arange(self.cursor), side="right") - 1
        mass[(owner < 0) | ~good[owner]] = 0
        sums = np.cumsum(mass)
        drawn = np.searchsorted(sums, rng.random(count) * sums[-1], side="right")
        kept: Ints = np.minimum(drawn, np.flatnonzero(mass)[-1])
        return kept

    def _move(self, length: int, index: EpisodeIndex, offsets: Ints) -> None:
        frames = index.frames
        values = self.held(index, offsets)
        self.tree = SumTree(max(_FIRST_CAPACITY, 2 * (frames + length)))
        self.tree.set(np.arange(frames), values)
        offsets[:] = index.positions
        self.cursor = frames

    def held(self, index: EpisodeIndex, offsets: Ints) -> Floats:
        """Return the entries of all frames held, by position."""
        return self.tree.get(_entries(index, offsets))

    def restore(
        self, layout: dict[str, Any], index: EpisodeIndex, offsets: Ints, values: Floats
    ) -> None:
        """Lay the tree out as it was, so that it draws the same."""
        capacity, cursor = int(layout["capacity"]), int(layout["cursor"])
        largest = float(layout["largest"])
        ends = offsets + index.lengths
        apart = (ends[:-1] <= offsets[1:]).all() and (not len(offsets) or offsets[0] >= 0)
        last = int(ends[-1]) if len(ends) else 0
        if not (apart and last <= cursor <= capacity and 0 < largest < math.inf):
            raise UsageError("the layout of the priorities makes no sense")
        self.tree = SumTree(capacity)
        self.cursor, self.largest = cursor, largest
        self.tree.set(_entries(index, offsets), values)


def _entries(index: EpisodeIndex, offsets: Ints) -> Ints:
    return np.repeat(offsets - index.positions, index.lengths) + np.arange(index.frames)
