"""Statistics of a dataset that can be merged, and whose result does not depend on how they were.

Quantiles come from a sparse histogram over the bits of float32 numbers, which are ordered like the
numbers themselves: exact up to 8192 different values per element, and with more the last bits are
dropped until 8192 bins remain. A quantile then lies within one bin, so within a factor of
1 + 2 ** (bits - 23) of the true one. However the data are split and merged, the bins are the same.

A thousand episodes of 32 frames with 160 numbers each would be 160,000 small histograms:
`episode_stats` makes them a few sums and a sort.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.core.codecs import Zstd
from penstock.core.pack import Item, PackReader, PackWriter
from penstock.dataset.layout import AUTO_FEATURES, QUANTILES, STATS, Feature
from penstock.errors import CorruptFile, UsageError

MAX_BINS = 8192
Stats = dict[str, list[Any]]
EpisodeStats = dict[str, NDArray[Any]]  # of many episodes at once
_VALUES = tuple(name for name in STATS if name != "count")
_SLAB_BYTES = 8 << 20  # of the numbers of many episodes that are worked on at a time
_ARRAY_BYTES = 128  # what numpy takes for an array besides its values
_TOO_LARGE = 1e140
_LARGEST = np.float32(np.finfo(np.float32).max)


def sample_indices(frames: int, power: float = 0.6) -> NDArray[np.int64]:
    """Return the frames that picture statistics are taken from: evenly spread, ~frames^power.

    At least 100 or all, as lerobot does; its power is 0.75, which tells no more about the
    values of a pixel and is most of the work when pictures are copied and not decoded.
    """
    if frames < 1:
        return np.zeros(0, np.int64)
    count = max(min(100, frames), min(int(frames**power), 10_000))
    return np.unique(np.round(np.linspace(0, frames - 1, count)).astype(np.int64))


def picture_stride(height: int, width: int) -> int:
    """Return how many pixels apart lerobot takes those it counts: 4 at 640x480."""
    return 1 if max(height, width) < 300 else max(height, width) // 150


def usable(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell which numbers count: not NaN and infinities, nor what would become so when squared."""
    found: NDArray[np.bool_] = np.abs(values) < _TOO_LARGE
    return found


def as_limit(values: NDArray[np.float64], feature: Feature) -> NDArray[Any]:
    """Return a minimum or maximum in the type that LeRobot's records have for the feature."""
    if feature.dtype == "bool":
        return values.astype(np.bool_)
    if feature.dtype == "uint64":
        return np.clip(values, 0, 2.0**64 - 2048).astype(np.uint64)
    if "int" in feature.dtype:
        # A float64 has no 2^63 - 1; the next one above is no int64.
        return np.clip(values, -(2.0**63), 2.0**63 - 1024).astype(np.int64)
    return values


class Moments:
    """Count, mean, spread and range of every element; NaN and infinities are left out."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.rows = 0
        self.count = np.zeros(dim, np.int64)
        self.mean = np.zeros(dim)
        self.m2 = np.zeros(dim)  # the sum of squared distances from the mean
        self.low = np.full(dim, np.inf)
        self.high = np.full(dim, -np.inf)

    @property
    def std(self) -> NDArray[np.float64]:
        """The standard deviation of the population."""
        spread: NDArray[np.float64] = np.sqrt(self.m2 / np.maximum(self.count, 1))
        return spread

    @property
    def non_finite(self) -> int:
        """How many values were left out."""
        return int(self.rows * self.dim - self.count.sum())

    def add(self, rows: NDArray[Any]) -> None:
        """Add frames, shape (n, *shape of the feature)."""
        if len(rows):
            values = np.asarray(rows, np.float64).reshape(len(rows), -1)
            if values.shape[1] != self.dim:
                raise UsageError(f"{values.shape[1]} elements per frame were given, not {self.dim}")
            part = type(self)(self.dim)
            part._take(values)
            self.merge(part)

    def _take(self, values: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Count the first frames; return them without what does not count, and what does."""
        good = usable(values)
        whole = bool(good.all())
        clean = values if whole else np.where(good, values, 0.0)
        self.rows = len(values)
        self.count = np.full(self.dim, len(values)) if whole else good.sum(0)
        self.mean = clean.sum(0) / np.maximum(self.count, 1)
        distance = clean - self.mean
        self.m2 = ((distance if whole else np.where(good, distance, 0.0)) ** 2).sum(0)
        self.low = (values if whole else np.where(good, values, np.inf)).min(0)
        self.high = (values if whole else np.where(good, values, -np.inf)).max(0)
        return clean, None if whole else good

    def merge(self, *others: Self) -> None:
        """Add what others have counted: the same at once as one after the other."""
        for other in others:
            if other.dim != self.dim:
                raise UsageError(f"statistics of {other.dim} elements do not fit {self.dim}")
            total = np.maximum(self.count + other.count, 1)
            difference = other.mean - self.mean
            self.m2 = self.m2 + other.m2 + difference**2 * self.count * (other.count / total)
            self.mean = self.mean + difference * (other.count / total)
            self.rows += other.rows
            self.count = self.count + other.count
            self.low = np.minimum(self.low, other.low)
            self.high = np.maximum(self.high, other.high)


class VectorStats(Moments):
    """Moments and quantiles of every element of a numeric feature, over all frames."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self._shift = np.zeros(dim, np.int64)
        self._keys = [np.zeros(0, np.uint32) for _ in range(dim)]
        self._counts = [np.zeros(0, np.int64) for _ in range(dim)]

    @property
    def nbytes(self) -> int:
        """The memory that they take, about."""
        moments = (self.count, self.mean, self.m2, self.low, self.high, self._shift)
        arrays: tuple[NDArray[Any], ...] = (*self._keys, *self._counts, *moments)
        return sum(_ARRAY_BYTES + array.nbytes for array in arrays)

    def _take(self, values: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        clean, good = super()._take(values)
        keys = _ordered_bits(clean)
        for i in range(self.dim):
            column = keys[:, i] if good is None else keys[good[:, i], i]
            self._keys[i], self._counts[i] = np.unique(column, return_counts=True)
        return clean, good

    def merge(self, *others: Self) -> None:
        """Add what others have counted: the same at once as one after the other."""
        super().merge(*others)
        every = (self, *others)
        for i in range(self.dim):
            shift = max(each._shift[i] for each in every)
            keys = np.concatenate([e._keys[i] >> np.uint32(shift - e._shift[i]) for e in every])
            counts = np.concatenate([each._counts[i] for each in every])
            order = np.argsort(keys, kind="stable")
            keys, counts = _join(keys[order], counts[order])
            while len(keys) > MAX_BINS:
                shift += 1
                keys, counts = _join(keys >> np.uint32(1), counts)
            self._shift[i], self._keys[i], self._counts[i] = shift, keys, counts

    def quantile(self, share: float) -> NDArray[np.float64]:
        """Return the quantile of every element, interpolated like numpy's."""
        found = np.zeros(self.dim)
        for i in range(self.dim):
            if not self.count[i]:
                continue
            edges = np.cumsum(self._counts[i])
            place = (int(self.count[i]) - 1) * share
            below = math.floor(place)
            first = self._at(i, edges, below)
            last = self._at(i, edges, min(below + 1, int(self.count[i]) - 1))
            found[i] = first + (last - first) * (place - below)
        return found

    def to_json(self, feature: Feature) -> Stats:
        """Return them as stats.json has them; without a single usable value they are 0."""
        empty = self.count == 0
        low, high = (np.where(empty, 0, values) for values in (self.low, self.high))
        found = {"min": as_limit(low, feature), "max": as_limit(high, feature)}
        found |= {"mean": self.mean, "std": self.std}
        result: Stats = {name: _shaped(value, feature.shape) for name, value in found.items()}
        result["count"] = [self.rows]
        for name, share in QUANTILES.items():
            result[name] = _shaped(self.quantile(share), feature.shape)
        return result

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as arrays, to be stored."""
        lengths = np.array([len(keys) for keys in self._keys], np.int64)
        return {
            "rows": np.array([self.rows], np.int64),
            "count": self.count.astype(np.int64),
            "moments": np.stack([self.mean, self.m2, self.low, self.high]),
            "shift": self._shift,
            "lengths": lengths,
            # Differences of sorted keys are small numbers, which compress well.
            "keys": np.concatenate([np.diff(k, prepend=k.dtype.type(0)) for k in self._keys]),
            "counts": np.concatenate(self._counts).astype(np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Restore what `to_arrays` returned."""
        try:
            this = cls(len(arrays["count"]))
            this.rows = int(arrays["rows"][0])
            this.count = arrays["count"].astype(np.int64)
            this.mean, this.m2, this.low, this.high = arrays["moments"].astype(np.float64)
            this._shift = arrays["shift"].astype(np.int64)
            ends = np.cumsum(arrays["lengths"])[:-1]
            keys = np.split(arrays["keys"].astype(np.uint32), ends)
            this._keys = [np.cumsum(part, dtype=np.uint32) for part in keys]
            this._counts = np.split(arrays["counts"].astype(np.int64), ends)
        except (KeyError, IndexError, ValueError) as error:
            raise CorruptFile(f"stored statistics are incomplete ({error})") from error
        return this

    def _at(self, i: int, edges: NDArray[np.int64], rank: int) -> float:
        """Return the rank-th smallest value of an element, counted from 0."""
        place = int(np.searchsorted(edges, rank, side="right"))
        key, shift = int(self._keys[i][place]), int(self._shift[i])
        low = _float_of(key << shift)
        if shift == 0:
            value = low
        else:
            high = _float_of(((key + 1) << shift) - 1)
            inside = rank - (int(edges[place]) - int(self._counts[i][place]))
            value = low + (high - low) * (inside + 0.5) / int(self._counts[i][place])
        return min(max(value, float(self.low[i])), float(self.high[i]))


class PictureStats:
    """Of the channels of sampled pictures: exact histograms of their values.

    Args:
        channels: Of a picture.
        depth: Depth in millimetres, 16 bits; otherwise 8 bits, given as shares of 1.
    """

    def __init__(self, channels: int = 3, depth: bool = False) -> None:
        self.channels = channels
        self.depth = depth
        self.pictures = 0
        self.bins = np.zeros((channels, 65536 if depth else 256), np.int64)
        self.prior: Stats | None = None  # of pictures that are only known by their statistics

    @classmethod
    def of(cls, feature: Feature) -> Self:
        """Return empty statistics of a camera."""
        channels = feature.picture_size[0]
        return cls(channels, depth=channels == 1)

    def add(self, picture: NDArray[Any]) -> None:
        """Add the counted pixels of one picture: HxWxC of uint8, or HxW of uint16."""
        pixels = picture.reshape(-1, self.channels)
        for channel in range(self.channels):
            self.bins[channel] += np.bincount(pixels[:, channel], minlength=self.bins.shape[1])
        self.pictures += 1

    @property
    def nbytes(self) -> int:
        """The memory that they take, about."""
        return _ARRAY_BYTES + self.bins.nbytes

    def merge(self, *others: PictureStats) -> None:
        """Add what others have counted."""
        for other in others:
            if self.bins.shape != other.bins.shape:
                raise UsageError("statistics of pictures of another kind cannot be added")
            self.bins += other.bins
            self.pictures += other.pictures

    def to_json(self, feature: Feature | None = None) -> Stats:
        """Return them as stats.json has them, shape (channels, 1, 1)."""
        scale = 1.0 if self.depth else 1 / 255
        channels = []
        for counts in self.bins:
            used = np.flatnonzero(counts)
            channels.append(histogram_stats(used, counts[used]))
        shape = (self.channels, 1, 1)
        result: Stats = {
            name: _shaped(np.array([one[name] for one in channels]) * scale, shape)
            for name in _VALUES
        }
        result["count"] = [self.pictures]
        if self.prior is not None:
            result = join_stats(result, self.prior)
        return {name: result[name] for name in STATS}

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as arrays, to be stored."""
        arrays = {
            "pictures": np.array([self.pictures, int(self.depth)], np.int64),
            "bins": self.bins,
        }
        if self.prior is not None:
            arrays["prior"] = np.array([np.ravel(self.prior[name]) for name in _VALUES])
            arrays["prior_count"] = np.array(self.prior["count"], np.int64)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """Restore what `to_arrays` returned."""
        try:
            pictures, depth = arrays["pictures"].tolist()
            bins = arrays["bins"].astype(np.int64)
            this = cls(bins.shape[0], bool(depth))
            if bins.shape != this.bins.shape:
                raise ValueError(f"{bins.shape} bins")
            this.bins, this.pictures = bins, pictures
            if "prior" in arrays:
                shape = (this.channels, 1, 1)
                rows = zip(_VALUES, arrays["prior"], strict=True)
                this.prior = {name: _shaped(row, shape) for name, row in rows}
                this.prior["count"] = arrays["prior_count"].tolist()
        except (KeyError, IndexError, ValueError) as error:
            raise CorruptFile(f"stored statistics are incomplete ({error})") from error
        return this


AnyStats = VectorStats | PictureStats


def write_stats(path: Path, stats: Mapping[str, AnyStats]) -> None:
    """Store the state of statistics."""
    kinds = {n: "pictures" if isinstance(s, PictureStats) else "vector" for n, s in stats.items()}
    with PackWriter(path, kind="statistics", meta={"kinds": kinds}, workers=1) as pack:
        items = [
            Item(f"{name}/{part}", array, codec=Zstd(1) if array.nbytes > 4096 else None)
            for name, state in stats.items()
            for part, array in state.to_arrays().items()
        ]
        pack.write(items)


def read_stats(path: Path) -> dict[str, AnyStats]:
    """Read the state of statistics."""
    try:
        with PackReader(path) as pack:
            kinds = pack.index.meta.get("kinds", {})
            parts: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in kinds}
            for full in pack.names:
                name, _, part = full.rpartition("/")
                parts[name][part] = pack.read(full)
    except FileNotFoundError as error:
        raise CorruptFile(f"{path} is missing") from error
    except (OSError, KeyError, AttributeError) as error:
        raise CorruptFile(f"{path} is damaged ({error})") from error
    return {
        name: (PictureStats if kinds[name] == "pictures" else VectorStats).from_arrays(arrays)
        for name, arrays in parts.items()
    }


def known_picture_stats(known: Mapping[str, Any], feature: Feature, frames: int) -> Stats:
    """Read the statistics of a camera; quantiles that are not there are taken for the mean.

    lerobot counts the pixels where it encodes while it records: then all frames were seen.

    Raises:
        ValueError: They are not those of such pictures.
    """
    shape = (feature.picture_size[0], 1, 1)
    try:
        values = {name: np.array(known.get(name, known["mean"]), np.float64) for name in _VALUES}
        found: Stats = {name: _shaped(value, shape) for name, value in values.items()}
        return found | {"count": [min(int(np.ravel(known["count"])[0]), frames)]}
    except LookupError as error:
        raise ValueError(f"no {error}") from error


def join_stats(own: Stats, prior: Stats) -> Stats:
    """Join exact statistics with those of pictures that are only known by theirs.

    Mean, std, min and max are those of all pictures; quantiles are weighted means, which is an
    approximation: the true ones would need the pictures.
    """
    counts = own["count"][0], prior["count"][0]
    if not counts[0]:
        return dict(prior)
    weight = counts[1] / max(sum(counts), 1)
    a = {name: np.array(value, np.float64) for name, value in own.items()}
    b = {name: np.array(value, np.float64) for name, value in prior.items()}
    mean = a["mean"] + (b["mean"] - a["mean"]) * weight
    variance = (a["std"] ** 2 + (a["mean"] - mean) ** 2) * (1 - weight)
    variance += (b["std"] ** 2 + (b["mean"] - mean) ** 2) * weight
    joined = {"min": np.minimum(a["min"], b["min"]), "max": np.maximum(a["max"], b["max"])}
    joined |= {"mean": mean, "std": np.sqrt(variance)}
    joined |= {name: a[name] + (b[name] - a[name]) * weight for name in QUANTILES}
    return {name: value.tolist() for name, value in joined.items()} | {"count": [sum(counts)]}


def _shaped(values: NDArray[Any], shape: tuple[int, ...]) -> list[Any]:
    result: list[Any] = np.asarray(values).reshape(shape).tolist()
    return result


def _ordered_bits(values: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Turn numbers into unsigned integers of the same order."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    single = np.clip(single, -_LARGEST, _LARGEST) + np.float32(0)  # no infinity, no minus zero
    bits = single.view(np.uint32)
    negative = (bits >> np.uint32(31)).astype(bool)
    keys: NDArray[np.uint32] = np.where(negative, ~bits, bits | np.uint32(1 << 31))
    return keys


def _float_of(key: int) -> float:
    """Undo `_ordered_bits` for one key, held inside the finite numbers."""
    key = min(max(key, 0x00800000), 0xFF7FFFFF)
    bits = key ^ 0x80000000 if key >> 31 else ~key & 0xFFFFFFFF
    return float(np.uint32(bits).view(np.float32))


def _join(
    keys: NDArray[np.uint32], counts: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Add up the counts of equal keys that lie side by side."""
    if len(keys) < 2:
        return keys, counts
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[starts], np.add.reduceat(counts, starts)


def histogram_stats(values: NDArray[Any], counts: NDArray[np.int64]) -> dict[str, Any]:
    """Return the statistics of rising values that are there so many times each; 0 for none."""
    if not len(values):
        return dict.fromkeys(STATS, 0)
    total, ends = int(counts.sum()), np.cumsum(counts)
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


def counter_stats(
    lengths: NDArray[np.int64],
    firsts: NDArray[np.int64],
    episodes: NDArray[np.int64],
    tasks: NDArray[np.int64],
    fps: float,
) -> dict[str, EpisodeStats]:
    """Return the statistics of the five automatic features of every episode, by formula."""
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

    def kind(name: str, stat: str) -> type:
        whole = ("count",) if name == "timestamp" else ("min", "max", "count")
        return np.int64 if stat in whole else np.float64

    return {
        name: {stat: np.asarray(values[stat], kind(name, stat))[:, None] for stat in STATS}
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
        "timestamp": histogram_stats((number / fps).astype(np.float32).astype(np.float64), longer),
        "frame_index": histogram_stats(number, longer),
        "episode_index": histogram_stats(episodes, lengths),
        "task_index": histogram_stats(kinds, of_tasks),
    }
    zero, whole = np.zeros(1, np.int64), np.array([frames])
    index = counter_stats(whole, zero, zero, zero, fps)["index"]
    found["index"] = {stat: values.item() for stat, values in index.items()}
    return {name: {stat: [found[name][stat]] for stat in STATS} for name in AUTO_FEATURES}
