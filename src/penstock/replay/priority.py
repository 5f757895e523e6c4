"""Drawing frames in proportion to their priority: a wide sum tree in one flat array.

Each node has 16 children that lie together: a million entries are 5 levels of two cache lines each,
where a binary tree walks 20 levels of scattered memory. Inner sums are always recomputed from their
children, never adjusted by differences, so that no rounding error gathers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.memory import whole_number
from penstock.errors import MissingExtra, UsageError

try:
    from penstock.core.kernels.native import compiled
except ModuleNotFoundError as error:
    raise MissingExtra("numba", "rl") from error

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_WIDTH = 16
_LARGEST = 1e290  # times any number of entries still a float


class SumTree:
    """A fixed number of priorities, drawn from in proportion; all start with 0, never drawn.

    Not for several threads at once: whoever owns it locks. The random numbers come from `seed`, or
    from the generator given to `sample`.
    """

    def __init__(self, capacity: int, seed: int | None = None) -> None:
        self.capacity = whole_number("capacity", capacity)
        self.rng = np.random.default_rng(seed)
        # Above the entries lie levels of totals over 16 each, until one is left: the root. A level
        # is padded with zeros to whole nodes, so that a node needs no look at where it ends.
        leaves = -(-self.capacity // _WIDTH) * _WIDTH
        sizes = [-(-leaves // _WIDTH)]
        while sizes[-1] > 1:
            sizes[-1] = -(-sizes[-1] // _WIDTH) * _WIDTH
            sizes.append(sizes[-1] // _WIDTH)
        self._starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        count = sum(sizes)
        self._entries = np.zeros(leaves)
        self._totals = np.zeros(count)
        self._sums = np.zeros(count)  # the running sums of the totals inside each node
        self._mins = np.full(count, np.inf)
        marks = np.zeros(count, np.int64)  # in which call a node was recomputed
        self._all = (self._entries, self._totals, self._sums, self._mins, self._starts, marks)
        self._round = 0

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._totals[-1])

    @property
    def min(self) -> float:
        """Smallest priority above 0; infinite if there is none."""
        return float(self._mins[-1])

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(array.nbytes for array in self._all)

    def get(self, indices: ArrayLike) -> Floats:
        """Return the priorities of entries."""
        where = whole_numbers("an entry", indices)
        if where.size and (int(where.min()) < 0 or int(where.max()) >= self.capacity):
            bad = where[(where < 0) | (where >= self.capacity)].flat[0]
            raise UsageError(f"entry {bad} is not one of {self.capacity}")
        return self._entries[where]

    def set(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Set the priorities of entries, one for each or one for all; all or nothing is set.

        Of an entry named twice, the last one counts.
        """
        where = np.ascontiguousarray(whole_numbers("an entry", indices)).reshape(-1)
        values = np.ascontiguousarray(priorities, np.float64).reshape(-1)
        if values.size not in (1, where.size):
            raise UsageError(f"{values.size} priorities for {where.size} entries")
        values = np.ascontiguousarray(np.broadcast_to(values, where.shape))
        # Written so that NaN, which compares false with everything, is refused as well.
        good = (where >= 0) & (where < self.capacity) & (values >= 0) & (values <= _LARGEST)
        if not good.all():
            raise UsageError(
                f"priority {values[~good][0]} of entry {where[~good][0]}: entries are 0 to "
                f"{self.capacity - 1}, priorities 0 to {_LARGEST:g}"
            )
        self._round += 1
        _set(self._all, self._round, where, values)

    def sample(self, n: int, rng: np.random.Generator | None = None) -> Ints:
        """Draw `n` entries, with replacement, each in proportion to its priority.

        One is drawn from each of `n` equal parts of the total, which spreads the draws more evenly;
        the result is in the order of the entries.
        """
        if n < 0:
            raise UsageError(f"{n} draws; give a number from 0")
        if not self.total > 0:
            raise UsageError("all priorities are 0, there is nothing to draw; set some first")
        draws = (rng or self.rng).random(n) + np.arange(n)
        return self.find(draws * (self.total / max(n, 1)))

    def find(self, sums: Floats) -> Ints:
        """Return, for each sum, the first entry up to which all priorities make more than it."""
        out = np.zeros(sums.size, np.int64)
        _find(self._entries, self._sums, self._starts, sums.copy(), out)
        return out


def whole_numbers(what: str, values: Any) -> Ints:
    """Return an array, a tensor or a list of whole numbers as an array."""
    array = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"{what} is given as {array.dtype}; use whole numbers")
    return array.astype(np.int64, copy=False)


def as_floats(values: Any) -> Floats:
    """Return numbers, or a tensor of any type, as an array."""
    if hasattr(values, "double"):
        values = values.detach().cpu().double()  # numpy has no bfloat16
    return np.asarray(values, np.float64)


def checked_priorities(priorities: Any) -> Floats:
    """Return priorities as a flat array, and refuse what is negative or not finite."""
    values = as_floats(priorities).reshape(-1)
    good = (values >= 0) & np.isfinite(values)
    if not good.all():
        raise UsageError(
            f"priority {values[~good][0]} is not a number from 0; give its absolute value"
        )
    return values


def importance_weights(priorities: ArrayLike, smallest: float, beta: float) -> Floats:
    """Return the weights that undo the bias of prioritised draws, the largest possible one is 1."""
    if not (np.isfinite(beta) and beta >= 0):
        raise UsageError(f"beta is {beta}; give a number from 0, usually up to 1")
    weights: Floats = (np.asarray(priorities, np.float64) / smallest) ** -beta
    return weights


@compiled
def _set(arrays: Any, mark: int, indices: Ints, values: Floats) -> None:
    """Write entries, then recompute each touched node once, level by level."""
    entries, totals, sums, mins, starts, marks = arrays
    for k in range(indices.size):
        entries[indices[k]] = values[k]
    nodes = np.empty(indices.size, np.int64)
    count = 0
    for k in range(indices.size):
        node = indices[k] // _WIDTH
        if marks[node] != mark:
            marks[node] = mark
            nodes[count] = node
            count += 1
    for k in range(count):
        total, least = 0.0, np.inf
        for child in range(nodes[k] * _WIDTH, nodes[k] * _WIDTH + _WIDTH):
            value = entries[child]
            total += value
            least = min(least, value if value > 0.0 else np.inf)
        totals[nodes[k]] = total
        mins[nodes[k]] = least
    for level in range(starts.size - 1):
        at, above = starts[level], starts[level + 1]
        kept = 0
        for k in range(count):
            node = nodes[k] // _WIDTH
            if marks[above + node] == mark:
                continue
            marks[above + node] = mark
            nodes[kept] = node
            kept += 1
            total, least = 0.0, np.inf
            for child in range(at + node * _WIDTH, at + node * _WIDTH + _WIDTH):
                total += totals[child]
                sums[child] = total
                least = min(least, mins[child])
            totals[above + node] = total
            mins[above + node] = least
        count = kept


@compiled
def _find(entries: Floats, sums: Floats, starts: Ints, left: Floats, nodes: Ints) -> None:
    """Walk down from the root: all draws one level at a time, so that their misses overlap."""
    for level in range(starts.size - 2, -1, -1):
        at = starts[level]
        for k in range(left.size):
            first = at + nodes[k] * _WIDTH
            rest = left[k]
            chosen = 0
            for child in range(first, first + _WIDTH):
                chosen += sums[child] <= rest
            if chosen == _WIDTH:
                # Rounding left a rest after the last one: then the last one above 0 is meant.
                chosen = 0
                whole = sums[first + _WIDTH - 1]
                for child in range(first, first + _WIDTH):
                    chosen += sums[child] < whole
            if chosen:
                left[k] = rest - sums[first + chosen - 1]
            nodes[k] = nodes[k] * _WIDTH + chosen
    for k in range(left.size):
        first = nodes[k] * _WIDTH
        rest = left[k]
        chosen = last = 0
        total = 0.0
        for child in range(_WIDTH):
            value = entries[first + child]
            total += value
            chosen += total <= rest
            if value > 0.0:
                last = child
        nodes[k] = first + (chosen if chosen < last else last)
