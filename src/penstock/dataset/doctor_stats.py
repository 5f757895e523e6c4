"""Compare stated statistics with what the data say."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.dataset import layout
from penstock.dataset.doctor_videos import Brightness
from penstock.dataset.findings import Report
from penstock.dataset.layout import Feature, Version
from penstock.dataset.metadata import Stats
from penstock.dataset.moments import Moments

_BASIC = ("min", "max", "mean", "std", "count")
_QUANTILES = ("min", "q01", "q10", "q50", "q90", "q99", "max")
_NUMBERING = ("index", "episode_index", "task_index")
_RECOMPUTE = "compute the statistics again"
# Relative to the largest value: lerobot takes means in float32, and the standard deviation as a
# difference of squares.
_RANGE_ROOM, _MEAN_ROOM, _STD_ROOM = 2e-6, 2e-5, 2e-3
_BRIGHTNESS_ROOM = 0.04  # a lossy codec moves a channel's mean by less


class StatsCheck:
    """Checks the statistics of a dataset or of an episode.

    Args:
        version: Of the dataset: v2.1 has no quantiles.
        features: Of the dataset.
        report: Where findings go.
    """

    def __init__(self, version: Version, features: Mapping[str, Feature], report: Report) -> None:
        self._version, self._features, self._report = version, features, report
        self._keys = layout.STATS if version == "v3.0" else _BASIC

    def form(self, where: str, of: str, stats: Stats, frames: int) -> None:
        """Check that all are there, have their shape, are finite and in order."""
        for name, feature in self._features.items():
            if not layout.has_stats(feature):
                continue
            if name not in stats:
                self._error(where, f"{name!r} has no statistics for {of}", f"no {name}")
                continue
            self._form_of(where, of, name, feature, stats[name], frames)
        for name in sorted(set(stats) - set(self._features)):
            self._report.warning(
                where, f"there are statistics of {name!r}, which is no feature", "none", "unknown"
            )

    def _form_of(
        self,
        where: str,
        of: str,
        name: str,
        feature: Feature,
        stats: Mapping[str, np.ndarray[Any, Any]],
        frames: int,
    ) -> None:
        for key in self._keys:
            if key not in stats:
                if key in _BASIC:
                    self._error(where, f"{name!r} has no {key} for {of}", f"no {key}")
                else:
                    self._report.warning(
                        where, f"{name!r} has no {key} for {of}", _RECOMPUTE, f"no {key}"
                    )
        for key, value in stats.items():
            if not np.isfinite(value).all():
                self._error(where, f"{key} of {name!r} is not finite for {of}", "not finite")
                return
            if key in self._keys and value.shape not in _shapes(feature, key):
                self._error(
                    where, f"{key} of {name!r} has the shape {value.shape} for {of}", "shape"
                )
                return
        self._check_name(where, of, name, stats)
        if "count" in stats:
            count = float(stats["count"][0])
            # Pictures are sampled, and frames without a usable value are not counted.
            if not 0 <= count <= frames or count != int(count) or (count == 0 and frames > 0):
                self._error(where, f"count of {name!r} is {count:g} for {of}", "count")
        steps = [(key, stats[key]) for key in _QUANTILES if key in stats]
        room = _RANGE_ROOM * _scale(stats) + 1e-9
        for (low, first), (high, second) in pairwise(steps):
            if first.shape == second.shape and np.any(first > second + room):
                self._error(where, f"{low} of {name!r} is above {high} for {of}", "order")
        if "std" in stats and np.any(stats["std"] < 0):
            self._error(where, f"std of {name!r} is below 0 for {of}", "order")
        if feature.is_picture and not feature.is_depth:
            for key in ("min", "max", "mean"):
                if key in stats and np.any((stats[key] < -1e-6) | (stats[key] > 1 + 1e-6)):
                    self._error(where, f"{key} of {name!r} is not in 0 to 1 for {of}", "pictures")

    def _check_name(
        self, where: str, of: str, name: str, stats: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        """Check what lerobot asks of every feature with "image" in its name, picture or not."""
        odd = [key for key, value in stats.items() if key != "count" and value.shape != (3, 1, 1)]
        if "image" not in name or not odd:
            return
        what = f"{odd[0]} of {name!r} is not of 3 channels for {of}: lerobot cannot"
        todo = 'give the feature a name without "image"'
        if self._version == "v2.1":
            self._report.error(where, f"{what} load the dataset", todo, f"name {name}")
        else:
            self._report.warning(where, f"{what} merge the dataset", todo, f"name {name}")

    def values(self, where: str, of: str, stats: Stats, moments: Mapping[str, Moments]) -> None:
        """Compare the statistics of numbers with those of the rows."""
        for name, seen in moments.items():
            stated = stats.get(name, {})
            if not np.all(seen.count) or any(
                stated[key].shape != seen.mean.shape for key in _BASIC[:4] if key in stated
            ):
                continue  # nothing to compare, or lerobot's merged statistics of a matrix
            scale = np.maximum(np.abs(seen.low), np.abs(seen.high)) + 1e-9
            for key, value, room in (
                ("min", seen.low, _RANGE_ROOM),
                ("max", seen.high, _RANGE_ROOM),
                ("mean", seen.mean, _MEAN_ROOM),
                ("std", seen.std, _STD_ROOM),
            ):
                if key in stated and np.any(np.abs(stated[key] - value) > room * scale):
                    k = int(np.argmax(np.abs(stated[key] - value) - room * scale))
                    self._differs(where, of, name, key, stated[key].flat[k], value.flat[k])
            if "count" in stated and stated["count"].shape == (1,):
                counts = {seen.rows, *np.unique(seen.count).tolist()}
                if float(stated["count"][0]) not in counts:
                    self._error(
                        where,
                        f"count of {name!r} is {stated['count'][0]:g} for {of}, not {seen.rows}",
                        f"count of {name}",
                    )

    def _differs(
        self, where: str, of: str, name: str, key: str, stated: float, seen: float
    ) -> None:
        what = f"{key} of {name!r} is {stated:g} for {of}; the rows say {seen:g}"
        if name in _NUMBERING:
            self._report.warning(
                where,
                f"{what} (lerobot's merge renumbers the rows only)",
                "nothing: no training reads it",
                "statistics of the numbering",
            )
        else:
            self._error(where, what, f"{key} of {name}")

    def brightness(self, where: str, of: str, name: str, stats: Stats, seen: Brightness) -> None:
        """Compare the statistics of pictures with those of sampled pictures."""
        stated = stats.get(name, {})
        mean, std = seen.moments()
        if "mean" in stated and stated["mean"].size == 3:
            off = np.abs(stated["mean"].reshape(3) - mean)
            if off.max() > _BRIGHTNESS_ROOM:
                k = int(off.argmax())
                self._error(
                    where,
                    f"mean of {name!r} is {stated['mean'].flat[k]:.3f} in channel {k} for {of}; "
                    f"the pictures say {mean[k]:.3f}",
                    f"mean of {name}",
                )
        if "std" in stated and stated["std"].size == 3:
            off = np.abs(stated["std"].reshape(3) - std)
            if off.max() > _BRIGHTNESS_ROOM or np.any(
                (stated["std"].reshape(3) == 0) & (std > 0.01)
            ):
                k = int(off.argmax())
                self._report.warning(
                    where,
                    f"std of {name!r} is {stated['std'].flat[k]:.3f} in channel {k} for {of}; the "
                    f"pictures say {std[k]:.3f} (lerobot before 0.6 writes 0)",
                    "normalise with ImageNet's statistics, or compute them again",
                    f"std of {name}",
                )

    def _error(self, where: str, what: str, kind: str) -> None:
        self._report.error(where, what, _RECOMPUTE, f"statistics: {kind}")


def _shapes(feature: Feature, key: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that a statistic may have."""
    if key == "count":
        return ((1,),)
    if feature.is_picture:
        channels = feature.picture_size[0]
        return ((channels, 1, 1), (3, 1, 1))
    # lerobot merges all but the last dimension of a matrix.
    return (feature.shape, feature.shape[-1:])


def _scale(stats: Mapping[str, np.ndarray[Any, Any]]) -> float:
    values = [float(np.abs(stats[key]).max()) for key in ("min", "max") if key in stats]
    return max(values, default=1.0)
