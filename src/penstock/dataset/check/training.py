"""What a trainer would want to know of sound data: notes, nothing that is wrong.

Numbers that never change, actions that are no commands, joints at their limits, jumps, episodes
that are too short, cameras that are black or stand still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from penstock.dataset import layout
from penstock.dataset.check.findings import Report
from penstock.dataset.layout import Feature
from penstock.dataset.metadata import EpisodeRecord, Stats
from penstock.dataset.stats import Moments

Array = np.ndarray[Any, Any]

_ACTION, _STATE = "action", "observation.state"
_MOST_LAG: Final = 10  # frames
_MOST_COMPARED: Final = 20_000  # rows
_FEWEST_EPISODES: Final = 5
_DARK: Final = 0.06  # of full brightness
_STEPS: Final = ("min", "q01", "q10", "q50", "q90", "q99", "max")


class TrainingCheck:
    """Watches rows pass by, and says at the end what a trainer should look at."""

    def __init__(self, features: Mapping[str, Feature], report: Report) -> None:
        self._features, self._report = features, report
        self._errors = np.zeros(2 * _MOST_LAG + 1)  # of the action against the state, by lag
        self._equal, self._compared = True, 0
        self._before: dict[str, Array] = {}
        self._steps: dict[str, Array] = {}  # the largest from frame to frame
        self._dark: Counter[str] = Counter()
        both = [features[name].shape for name in (_ACTION, _STATE) if name in features]
        self._comparable = len(both) == 2 and both[0] == both[1] and len(both[0]) == 1

    def rows(self, batch: Mapping[str, Array], begins: bool) -> None:
        """Take some rows of an episode, in order; the first ones begin it."""
        if begins:
            self._before.clear()
        for name, feature in self._features.items():
            if name in layout.AUTO_FEATURES or feature.is_picture or name not in batch:
                continue
            if feature.dtype not in ("float32", "float64"):
                continue
            values = batch[name].reshape(len(batch[name]), -1).astype(np.float64)
            if name in self._before:
                values = np.concatenate([self._before[name], values])
            if len(values) > 1:
                with np.errstate(invalid="ignore"):  # from infinity to infinity
                    step = np.abs(np.diff(values, axis=0))
                step = np.where(np.isfinite(step), step, 0).max(axis=0)
                self._steps[name] = np.maximum(self._steps.get(name, 0.0), step)
            self._before[name] = values[-1:]
        if self._comparable and _ACTION in batch and _STATE in batch:
            self._compare(batch[_ACTION].astype(np.float64), batch[_STATE].astype(np.float64))

    def pictures(self, stats: Stats) -> None:
        """Take the statistics of the pictures of an episode."""
        for name, feature in self._features.items():
            if feature.is_picture and not feature.is_depth and "max" in stats.get(name, {}):
                self._dark[name] += bool(np.max(stats[name]["max"]) < _DARK)

    def finish(
        self, records: Sequence[EpisodeRecord], totals: Mapping[str, Moments], stats: Stats
    ) -> None:
        """Say what was seen."""
        for name, moments in totals.items():
            if name in self._features and name not in layout.AUTO_FEATURES:
                self._range(name, moments, stats.get(name, {}))
        if self._compared > 2 * _MOST_LAG:
            self._say_lag()
        for name, count in self._dark.items():
            if count:
                self._note(f"{name} is black in {count} of {len(records)} episodes", "look at it")
        lengths = np.array([record.length for record in records])
        if len(lengths) >= _FEWEST_EPISODES:
            short = [r.index for r in records if r.length < np.median(lengths) / 5]
            if short:
                self._note(
                    f"{len(short)} episodes are far shorter than the rest (the first is "
                    f"{short[0]}, with {records[short[0]].length} frames)",
                    "leave them out if they were cut off",
                )

    def _range(self, name: str, moments: Moments, stats: Mapping[str, Array]) -> None:
        low, high = moments.low.reshape(-1), moments.high.reshape(-1)
        span = high - low
        seen = np.isfinite(span)
        still = seen & (span == 0)
        if still.any() and moments.rows > 1:
            self._note(
                f"{self._of(name, still)} never changes", "leave it out, or check its source"
            )
        # lerobot counts all rows of a matrix as one: nothing to compare its elements with.
        points = [stats[k].reshape(-1) for k in _STEPS if k in stats and stats[k].size == len(low)]
        if len(points) != len(_STEPS) or moments.rows < 2 * _MOST_LAG:
            return
        moving = seen & (span > 0)
        near = 1e-6 * span
        at_end = [(np.abs(p - low) <= near) | (np.abs(p - high) <= near) for p in points]
        many = moving & ~np.all(at_end, axis=0)  # not a switch with two positions
        limit = many & ((np.abs(points[4] - high) <= near) | (np.abs(points[2] - low) <= near))
        if limit.any():
            self._note(
                f"{self._of(name, limit)} is at its limit in a tenth of the frames or more",
                "check whether it is saturated",
            )
        jumps = many & (self._steps.get(name, np.zeros(len(span))) > 0.7 * span)
        if jumps.any():
            self._note(
                f"{self._of(name, jumps)} jumps by most of its range from one frame to the next",
                "check for outliers, wrapped angles or cuts",
            )

    def _compare(self, action: Array, state: Array) -> None:
        if self._compared > _MOST_COMPARED or len(action) <= 4 * _MOST_LAG:
            return
        self._equal = self._equal and bool(np.allclose(action, state, atol=1e-6, equal_nan=True))
        middle = slice(_MOST_LAG, len(action) - _MOST_LAG)
        count = len(action) - 2 * _MOST_LAG
        for place, lag in enumerate(range(-_MOST_LAG, _MOST_LAG + 1)):
            shifted = state[_MOST_LAG + lag : _MOST_LAG + lag + count]
            self._errors[place] += np.nansum(np.abs(action[middle] - shifted))
        self._compared += count

    def _say_lag(self) -> None:
        best = int(np.argmin(self._errors))
        lag = best - _MOST_LAG
        if self._equal:
            self._note(
                "the action is the state of the same frame", "a policy learns to stand still"
            )
        elif lag < 0 and self._errors[best] < 0.5 * self._errors[_MOST_LAG]:
            self._note(
                f"the action follows the state by {-lag} frames: commands should come before",
                "check clocks and topics, or set clock: header",
            )

    def _of(self, name: str, which: Array) -> str:
        """Name a feature, and those of its numbers that are meant."""
        places = np.flatnonzero(which)
        if len(places) == len(which):
            return name
        names: Any = self._features[name].names
        names = next(iter(names.values()), None) if isinstance(names, dict) else names
        known = isinstance(names, list) and len(names) == len(which)
        shown = [str(names[p]) if known else str(p) for p in places[:4]]
        more = f" and {len(places) - 4} more" if len(places) > 4 else ""
        return f"{name} [{', '.join(shown)}{more}]"

    def _note(self, what: str, todo: str) -> None:
        self._report.note(layout.INFO_PATH, what, todo)
