"""Compare stated statistics with what the data say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.dataset import layout
from penstock.dataset.check.findings import Report
from penstock.dataset.layout import QUANTILES, Feature, Format
from penstock.dataset.metadata import Stats
from penstock.dataset.stats import Moments, PictureStats, VectorStats

Array = np.ndarray[Any, Any]
RECOMPUTE = "compute the statistics again"
_BASIC = ("min", "max", "mean", "std", "count")
_RISING = ("min", *QUANTILES, "max")
_NUMBERING = ("index", "episode_index", "task_index")
# Relative to the largest value: lerobot takes means in float32, and the standard deviation as a
# difference of squares.
_RANGE_ROOM, _MEAN_ROOM, _STD_ROOM = 2e-6, 2e-5, 2e-3
_BRIGHTNESS_ROOM = 0.04  # a lossy codec moves a channel's mean by less


class StatsCheck:
    """Checks the statistics of a dataset or of an episode."""

    def __init__(self, format_: Format, features: Mapping[str, Feature], report: Report) -> None:
        self._features, self._report = features, report
        self._v3 = format_.shares_files
        self._keys = layout.STATS if self._v3 else _BASIC

    def form(self, where: str, of: str, stats: Stats, frames: int) -> None:
        """Check that all are there, have their shape, are finite and in order."""
        for name, feature in self._features.items():
            if feature.has_stats and name not in stats:
                self._error(where, f"{name!r} has no statistics for {of}", f"no {name}")
            elif feature.has_stats:
                self._form_of(where, of, name, feature, stats[name], frames)
        for name in sorted(set(stats) - set(self._features)):
            what = f"there are statistics of {name!r}, which is no feature"
            self._report.warning(where, what, "none", "unknown")

    def _form_of(
        self,
        where: str,
        of: str,
        name: str,
        feature: Feature,
        stats: Mapping[str, Array],
        frames: int,
    ) -> None:
        for key in self._keys:
            what, kind = f"{name!r} has no {key} for {of}", f"no {key}"
            if key not in stats and key in _BASIC:
                self._error(where, what, kind)
            elif key not in stats:
                self._report.warning(where, what, RECOMPUTE, kind)
        for key, value in stats.items():
            said = f"{key} of {name!r}"
            if not np.isfinite(value).all():
                self._error(where, f"{said} is not finite for {of}", "not finite")
                return
            if key in self._keys and value.shape not in _shapes(feature, key):
                self._error(where, f"{said} has the shape {value.shape} for {of}", "shape")
                return
        self._check_name(where, of, name, stats)
        if "count" in stats:
            count = float(stats["count"][0])
            # Pictures are sampled, or lerobot counts their pixels as it records them; frames
            # without a usable value are not counted.
            most = frames * (math.prod(feature.shape) if feature.is_picture else 1)
            if not 0 <= count <= most or count != int(count) or (count == 0 and frames > 0):
                self._error(where, f"count of {name!r} is {count:g} for {of}", "count")
        steps = [(key, stats[key]) for key in _RISING if key in stats]
        ends = [float(np.abs(stats[key]).max()) for key in ("min", "max") if key in stats]
        room = _RANGE_ROOM * max(ends, default=1.0) + 1e-9
        for (low, first), (high, second) in pairwise(steps):
            if first.shape == second.shape and np.any(first > second + room):
                self._error(where, f"{low} of {name!r} is above {high} for {of}", "order")
        if "std" in stats and np.any(stats["std"] < 0):
            self._error(where, f"std of {name!r} is below 0 for {of}", "order")
        if feature.is_picture and not feature.is_depth:
            for key in ("min", "max", "mean"):
                if key in stats and np.any((stats[key] < -1e-6) | (stats[key] > 1 + 1e-6)):
                    self._error(where, f"{key} of {name!r} is not in 0 to 1 for {of}", "pictures")

    def _check_name(self, where: str, of: str, name: str, stats: Mapping[str, Array]) -> None:
        """Check what lerobot asks of every feature with "image" in its name, picture or not."""
        odd = [key for key, value in stats.items() if key != "count" and value.shape != (3, 1, 1)]
        if "image" not in name or not odd:
            return
        what = f"{odd[0]} of {name!r} is not of 3 channels for {of}: lerobot cannot"
        todo, kind = 'give the feature a name without "image"', f"name {name}"
        if self._v3:
            self._report.warning(where, f"{what} merge the dataset", todo, kind)
        else:
            self._report.error(where, f"{what} load the dataset", kind, todo)

    def values(self, where: str, of: str, stats: Stats, moments: Mapping[str, Moments]) -> None:
        """Compare the statistics of numbers with those of the rows."""
        for name, seen in moments.items():
            stated = stats.get(name, {})
            known = [stated[key] for key in _BASIC[:4] if key in stated]
            if not np.all(seen.count) or any(value.size != seen.dim for value in known):
                continue  # nothing to compare, or lerobot's merged statistics of a matrix
            scale = np.maximum(np.abs(seen.low), np.abs(seen.high)) + 1e-9
            for key, value, room in (
                ("min", seen.low, _RANGE_ROOM),
                ("max", seen.high, _RANGE_ROOM),
                ("mean", seen.mean, _MEAN_ROOM),
                ("std", seen.std, _STD_ROOM),
            ):
                if key not in stated:
                    continue
                off = np.abs(stated[key].reshape(-1) - value) - room * scale
                if np.any(off > 0):
                    k = int(np.argmax(off))
                    what = f"{key} of {name!r} is {stated[key].flat[k]:g} for {of}"
                    what += f"; the rows say {value[k]:g}"
                    if name in _NUMBERING:
                        what += " (lerobot's merge renumbers the rows only)"
                        todo = "nothing: no training reads it"
                        self._report.warning(where, what, todo, "statistics of the numbering")
                    else:
                        self._error(where, what, f"{key} of {name}")
            if "count" in stated and stated["count"].shape == (1,):
                count = float(stated["count"][0])
                if count not in {seen.rows, *np.unique(seen.count).tolist()}:
                    what = f"count of {name!r} is {count:g} for {of}, not {seen.rows}"
                    self._error(where, what, f"count of {name}")

    def brightness(self, where: str, of: str, name: str, stats: Stats, seen: PictureStats) -> None:
        """Compare the statistics of pictures with those of sampled pictures."""
        counted = seen.to_json()
        for key in ("mean", "std"):
            stated, value = stats.get(name, {}).get(key), np.ravel(counted[key])
            if stated is None or stated.size != 3:
                continue
            off = np.abs(stated.reshape(3) - value)
            missing = key == "std" and np.any((stated.reshape(3) == 0) & (value > 0.01))
            if off.max() <= _BRIGHTNESS_ROOM and not missing:
                continue
            k = int(off.argmax())
            what = f"{key} of {name!r} is {stated.flat[k]:.3f} in channel {k} for {of}; "
            what += f"the pictures say {value[k]:.3f}"
            if key == "mean":
                self._error(where, what, f"mean of {name}")
            else:
                todo = "normalise with ImageNet's statistics, or compute them again"
                what += " (lerobot before 0.6 writes 0)"
                self._report.warning(where, what, todo, f"std of {name}")

    def _error(self, where: str, what: str, kind: str) -> None:
        self._report.error(where, what, f"statistics: {kind}", RECOMPUTE)


def _shapes(feature: Feature, key: str) -> tuple[tuple[int, ...], ...]:
    if key == "count":
        return ((1,),)
    if feature.is_picture:
        return ((feature.picture_size[0], 1, 1), (3, 1, 1))
    # lerobot merges all but the last dimension of a matrix.
    return (feature.shape, feature.shape[-1:])


def wrong_quantiles(stated: Mapping[str, Array], seen: VectorStats) -> list[str]:
    """Return the stated quantiles that are not those of the rows, with a room of 2 % of them."""
    points = {
        name: stated[name].reshape(-1)
        for name in QUANTILES
        if name in stated and stated[name].size == seen.dim
    }
    if not points:
        return []
    values = np.array([*points.values()])
    # How far a stated quantile may be off, in units of the values.
    room = 1e-3 * (values.max(0) - values.min(0)) + 1e-6 * np.abs(values[0]) + 1e-9
    share_room = 0.02 + 1 / max(seen.rows, 1)
    wrong = []
    for name, point in points.items():
        low = seen.quantile(max(QUANTILES[name] - share_room, 0))
        high = seen.quantile(min(QUANTILES[name] + share_room, 1))
        if np.any((seen.count > 0) & ((point + room < low) | (point - room > high))):
            wrong.append(name)
    return wrong
