"""Which frames make a batch: single frames, windows inside an episode, and n steps ahead."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.replay.episodes.frame_priority import FramePriorities
from penstock.replay.episodes.index import EpisodeIndex

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class Draw(NamedTuple):
    """Frames that were drawn, row by row of the batch.

    The first three have the shape [batch] or [batch, sequence]; `drawn` are the steps [batch] that
    were drawn as such, which a window may have been moved back from.
    """

    rows: Ints
    steps: Ints
    inside: Bools
    drawn: Ints


class Ahead(NamedTuple):
    """What lies n steps ahead of frames, each array of the frames' shape."""

    steps: Ints
    valid: Bools
    taken: Ints
    ended: Bools
    alive: Bools
    """[..., n]: which of the n steps count."""


class Sampler:
    """Draws frames from an index.

    Args:
        index: The episodes.
        priorities: Draw in proportion to these; None draws all frames alike.
    """

    def __init__(self, index: EpisodeIndex, priorities: FramePriorities | None) -> None:
        self._index = index
        self._priorities = priorities
        self._cached: tuple[int, int] | None = None
        self._sums = np.zeros(0, np.int64)

    def draw(
        self,
        count: int,
        rng: np.random.Generator,
        leaves: Ints,
        sequence: int | None,
        pad: bool,
    ) -> Draw:
        """Draw a batch.

        Args:
            count: How many frames or windows.
            rng: Source of random numbers.
            leaves: Where the priorities of each episode start.
            sequence: Length of the windows; None for single frames.
            pad: A window may reach beyond the end of its episode.

        Raises:
            UsageError: There is no frame, or no episode as long as a window.
        """
        index = self._index
        if not len(index):
            raise UsageError("the buffer is empty; add an episode first")
        inner = sequence is not None and not pad
        longest = int(index.lengths.max()) if inner else 0
        if inner and sequence is not None and sequence > longest:
            raise UsageError(
                f"sequence={sequence} is longer than every episode (the longest has {longest} "
                "frames); use a shorter one, or pad=True"
            )
        if self._priorities is not None:
            good = index.lengths >= sequence if inner and sequence is not None else None
            rows, drawn = self._priorities.draw(count, rng, leaves, good)
        elif inner and sequence is not None:
            rows, drawn = self._window_starts(count, rng, sequence)
        else:
            rows, drawn = index.find(rng.integers(0, index.frames, count))
        if sequence is None:
            return Draw(rows, drawn, np.ones(count, np.bool_), drawn)
        lengths = index.lengths[rows]
        first = np.minimum(drawn, lengths - sequence) if inner else drawn
        steps = first[:, np.newaxis] + np.arange(sequence)
        last = lengths[:, np.newaxis] - 1
        rows = np.broadcast_to(rows[:, np.newaxis], steps.shape)
        return Draw(rows, np.minimum(steps, last), steps <= last, drawn)

    def _window_starts(
        self, count: int, rng: np.random.Generator, sequence: int
    ) -> tuple[Ints, Ints]:
        """Draw alike from all windows that lie inside an episode."""
        if self._cached != (self._index.version, sequence):
            windows = np.maximum(self._index.lengths - sequence + 1, 0)
            self._sums = np.concatenate([[0], np.cumsum(windows)])
            self._cached = self._index.version, sequence
        at = rng.integers(0, self._sums[-1], count)
        rows = self._sums.searchsorted(at, side="right") - 1
        return rows, at - self._sums[rows]


def look_ahead(steps: Ints, lengths: Ints, done: Bools) -> Ahead:
    """Return what lies n steps ahead of each frame, or nearer where its episode ends.

    Args:
        steps: Of the frames.
        lengths: Of their episodes.
        done: [..., n]: whether the episode is done after each of the n steps; at most the first
            n - 1 need be known (n = 1: anything).
    """
    count = done.shape[-1]
    inside = steps[..., np.newaxis] + np.arange(count) < lengths[..., np.newaxis]
    before = np.zeros(done.shape, np.bool_)
    np.logical_or.accumulate(done[..., :-1], axis=-1, out=before[..., 1:])
    alive = inside & ~before
    taken = alive.sum(axis=-1)
    ahead = steps + taken
    ended = np.logical_or.reduce(alive & done, axis=-1)
    return Ahead(np.minimum(ahead, lengths - 1), ahead < lengths, taken, ended, alive)


def discounted(rewards: Floats, alive: Bools, gamma: float) -> Floats:
    """Sum rewards [..., n, *shape] over the steps that count, the k-th times gamma ** k."""
    factors = alive * gamma ** np.arange(alive.shape[-1])
    extra = rewards.ndim - alive.ndim
    # Not a product with 0: what lies beyond the end of an episode may be infinite.
    kept = np.where(alive.reshape(*alive.shape, *[1] * extra), rewards, 0.0)
    total: Floats = (kept * factors.reshape(*factors.shape, *[1] * extra)).sum(axis=alive.ndim - 1)
    return total
