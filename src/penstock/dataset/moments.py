"""Count, mean, spread and range of values that stream by, to check statistics against.

This is on purpose not the code that writes the statistics: a check by itself proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import Self

from penstock.dataset.layout import QUANTILES, Feature
from penstock.dataset.stats import usable

Array = np.ndarray[Any, Any]


@dataclass
class Moments:
    """Of each element of a feature, over all rows added; NaN and infinities are left out."""

    count: Array
    mean: Array
    square: Array  # the sum of squared distances from the mean
    low: Array
    high: Array
    rows: int = 0
    unusable: int = 0

    @classmethod
    def of(cls, feature: Feature) -> Self:
        """Return empty moments for a feature."""
        shape = feature.shape
        return cls(
            np.zeros(shape),
            np.zeros(shape),
            np.zeros(shape),
            np.full(shape, np.inf),
            np.full(shape, -np.inf),
        )

    def add(self, rows: Array) -> None:
        """Add rows of (n, *shape)."""
        values = rows.reshape(len(rows), *self.mean.shape).astype(np.float64)
        good = usable(values)
        self.rows += len(values)
        if not good.all():
            self.unusable += int(values.size - good.sum())
        count = good.sum(0)
        some = np.maximum(count, 1)
        mean = np.where(good, values, 0).sum(0) / some
        square = np.where(good, (np.where(good, values, 0) - mean) ** 2, 0).sum(0)
        total = self.count + count
        difference = mean - self.mean
        share = np.where(total > 0, count / np.maximum(total, 1), 0)
        self.square += square + difference**2 * self.count * share
        self.mean += difference * share
        self.count = total
        self.low = np.minimum(self.low, np.where(good, values, np.inf).min(0))
        self.high = np.maximum(self.high, np.where(good, values, -np.inf).max(0))

    @property
    def std(self) -> Array:
        """Return the standard deviation of the population."""
        spread: Array = np.sqrt(self.square / np.maximum(self.count, 1))
        return spread


@dataclass
class Shares:
    """Which share of the values lies below each stated quantile.

    A quantile is right exactly if the share below it is at most its own, and the share up to it
    at least: this needs no sorting and no memory.
    """

    points: dict[str, Array]
    room: Array  # how far a stated quantile may be off, in units of the values
    total: int = 0
    below: dict[str, Array] = field(default_factory=dict)
    up_to: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, feature: Feature, points: Mapping[str, Array]) -> Self | None:
        """Return a counter; None where the stated quantiles do not fit the feature."""
        if not points or any(point.shape != feature.shape for point in points.values()):
            return None
        span = np.max([*points.values()], 0) - np.min([*points.values()], 0)
        zeros = {name: np.zeros(feature.shape) for name in points}
        return cls(
            dict(points),
            1e-3 * span + 1e-6 * np.abs(points[next(iter(points))]) + 1e-9,
            below=dict(zeros),
            up_to={name: value.copy() for name, value in zeros.items()},
        )

    def add(self, rows: Array) -> None:
        """Add rows of (n, *shape)."""
        shape = self.room.shape
        values = rows.reshape(len(rows), *shape).astype(np.float64)
        self.total += len(values)
        for name, point in self.points.items():
            self.below[name] = self.below[name] + (values < point - self.room).sum(0)
            self.up_to[name] = self.up_to[name] + (values <= point + self.room).sum(0)

    def wrong(self) -> list[str]:
        """Return the quantiles that are not where they say, with a tolerance of 2 %."""
        if not self.total:
            return []
        room = 0.02 + 1 / self.total
        return [
            name
            for name in self.points
            if np.any(self.below[name] / self.total > QUANTILES[name] + room)
            or np.any(self.up_to[name] / self.total < QUANTILES[name] - room)
        ]
