"""Statistics of many short episodes at once: what `VectorStats` says of each, without a loop.

A thousand episodes of 32 frames with 160 numbers each are 160,000 small histograms one by one; as
arrays of episodes they are a few sums and a sort.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.dataset.layout import AUTO_FEATURES, QUANTILES, STATS, Feature
from penstock.dataset.stats import Stats, as_limit, usable

_SLAB_BYTES = 8 << 20  # of the numbers that are worked on at a time
EpisodeStats = dict[str, NDArray[Any]]


def episode_stats(rows: NDArray[Any], lengths: NDArray[np.int64], feature: Feature) -> EpisodeStats:
    """Return the statistics of every episode: arrays of (episodes, elements) by their name.

    NaN and infinities are left out; without a single usable value the statistics are 0.

    Args:
        rows: The frames of all episodes, one episode behind the other: (n, *shape).
        lengths: Frames of each episode, at least 1; they sum up to n.
        feature: Says the type of minimum and maximum.
    """
    dim = math.prod(feature.shape)
    flat = rows.reshape(len(rows), dim)
    slab = max(1, _SLAB_BYTES // (8 * max(1, len(rows))))
    parts = [
        _slab(flat[:, first : first + slab].astype(np.float64).T.copy(), lengths)
        for first in range(0, dim, slab)
    ]
    found = {name: np.concatenate([part[name] for part in parts]).T for name in parts[0]}
    found["count"] = lengths[:, None]
    for name in ("min", "max"):
        found[name] = as_limit(found[name], feature)
    return {name: found[name] for name in STATS}


def _slab(values: NDArray[np.float64], lengths: NDArray[np.int64]) -> EpisodeStats:
    """Return the statistics of some elements, (elements, episodes), of (elements, frames)."""
    starts = np.cumsum(lengths) - lengths
    good = usable(values)
    whole = bool(good.all())
    count = np.add.reduceat(good, starts, axis=1, dtype=np.int64)
    some, empty = np.maximum(count, 1), count == 0
    clean = values if whole else np.where(good, values, 0.0)
    mean = np.add.reduceat(clean, starts, axis=1) / some
    distance = clean - np.repeat(mean, lengths, axis=1)
    if not whole:
        distance[~good] = 0.0
    spread = np.sqrt(np.add.reduceat(distance**2, starts, axis=1) / some)
    # What is left out sorts behind everything that counts.
    above = values if whole else np.where(good, values, np.inf)
    below = values if whole else np.where(good, values, -np.inf)
    low = np.minimum.reduceat(above, starts, axis=1)
    high = np.maximum.reduceat(below, starts, axis=1)
    found = {"min": low, "max": high, "mean": mean, "std": spread}
    found |= _quantiles(above, starts, lengths, count)
    return found if whole else {k: np.where(empty, 0.0, value) for k, value in found.items()}


def _quantiles(
    values: NDArray[np.float64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    count: NDArray[np.int64],
) -> EpisodeStats:
    """Return the quantiles, interpolated like numpy's; episodes of one length are sorted as one."""
    found = np.zeros((*count.shape, len(QUANTILES)))
    shares = np.array(list(QUANTILES.values()))
    for length in np.unique(lengths).tolist():
        episodes = np.flatnonzero(lengths == length)
        frames = starts[episodes][:, None] + np.arange(length)
        ordered = np.sort(values[:, frames], axis=2)
        last = np.maximum(count[:, episodes] - 1, 0)[:, :, None]
        place = last * shares
        under = place.astype(np.int64)
        first = np.take_along_axis(ordered, under, 2)
        second = np.take_along_axis(ordered, np.minimum(under + 1, last), 2)
        with np.errstate(invalid="ignore"):  # nothing usable: inf - inf
            found[:, episodes] = first + (second - first) * (place - under)
    return {name: found[..., k] for k, name in enumerate(QUANTILES)}


def to_column(values: NDArray[Any], shape: tuple[int, ...], kind: pa.DataType) -> pa.Array:
    """Return (episodes, elements) as a column of nested lists of that shape and type."""
    nested = pa.array(np.ascontiguousarray(values).reshape(-1))
    for length in reversed(shape):
        offsets = pa.array(np.arange(0, len(nested) + 1, length, dtype=np.int32))
        nested = pa.ListArray.from_arrays(offsets, nested)
    return nested.cast(kind)


def counter_stats(
    lengths: NDArray[np.int64],
    firsts: NDArray[np.int64],
    episodes: NDArray[np.int64],
    tasks: NDArray[np.int64],
    fps: float,
) -> dict[str, EpisodeStats]:
    """Return the statistics of the five automatic features of every episode, by formula.

    Args:
        lengths: Frames of each episode.
        firsts: The number of its first frame in the dataset.
        episodes: Its number.
        tasks: The number of its task.
        fps: Frames per second.
    """
    last = lengths - 1
    spread = np.sqrt((lengths.astype(np.float64) ** 2 - 1) / 12)

    def rising(start: NDArray[Any], step: float) -> EpisodeStats:
        found = {"min": start, "max": start + last * step, "mean": start + last * step / 2}
        found |= {"std": spread * step, "count": lengths}
        return found | {name: start + last * step * share for name, share in QUANTILES.items()}

    def constant(value: NDArray[np.int64]) -> EpisodeStats:
        same = dict.fromkeys(("min", "max", "mean", *QUANTILES), value)
        return same | {"std": np.zeros(len(value)), "count": lengths}

    zero = np.zeros(len(lengths), np.int64)
    found = {
        "timestamp": rising(zero, 1 / fps),
        "frame_index": rising(zero, 1),
        "episode_index": constant(episodes),
        "index": rising(firsts, 1),
        "task_index": constant(tasks),
    }
    # The stored times are float32.
    found["timestamp"]["max"] = (last / fps).astype(np.float32)
    whole = ("min", "max", "count")
    return {
        name: {
            stat: (
                values[stat].astype(np.int64)
                if stat == "count" or (stat in whole and name != "timestamp")
                else np.asarray(values[stat], np.float64)
            )[:, None]
            for stat in STATS
        }
        for name, values in found.items()
    }


def counter_totals(
    lengths: NDArray[np.int64], tasks: NDArray[np.int64], fps: float
) -> dict[str, Stats]:
    """Return the statistics of the five automatic features over all episodes, as stats.json."""
    frames = int(lengths.sum())
    # How many episodes have a frame of each number.
    longer = np.cumsum(np.bincount(lengths, minlength=1)[::-1])[::-1][1:]
    number = np.arange(len(longer))
    kinds, places = np.unique(tasks, return_inverse=True)
    of_tasks = np.bincount(places, weights=lengths).astype(np.int64)
    episodes = np.arange(len(lengths))
    found = {
        "timestamp": _weighted((number / fps).astype(np.float32).astype(np.float64), longer),
        "frame_index": _weighted(number, longer),
        "episode_index": _weighted(episodes, lengths),
        "task_index": _weighted(kinds, of_tasks),
    }
    zero, whole = np.zeros(1, np.int64), np.array([frames])
    index = counter_stats(whole, zero, zero, zero, fps)["index"]
    found["index"] = {stat: values.item() for stat, values in index.items()}
    return {name: {stat: [found[name][stat]] for stat in STATS} for name in AUTO_FEATURES}


def _weighted(values: NDArray[Any], counts: NDArray[np.int64]) -> dict[str, Any]:
    """Return the statistics of rising values that are there so many times each."""
    total = int(counts.sum())
    ends = np.cumsum(counts)
    wide = values.astype(np.float64)
    mean = float(wide @ counts / total)
    found = {"min": values[0].item(), "max": values[-1].item(), "mean": mean, "count": total}
    found["std"] = float(np.sqrt(((wide - mean) ** 2) @ counts / total))
    for name, share in QUANTILES.items():
        place = (total - 1) * share
        below = int(place)
        ranks = np.searchsorted(ends, [below, min(below + 1, total - 1)], side="right")
        first, second = wide[ranks]
        found[name] = float(first + (second - first) * (place - below))
    return found
