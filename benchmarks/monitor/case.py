"""The case `monitor`: what watching costs, and whether it grows."""

from __future__ import annotations

import contextlib
import inspect
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import Case, Row, Settings
from benchmarks.measure import burst, interleave, judge_peers, time_rows
from penstock.ui import monitor
from penstock.ui.monitor import PerformanceMonitor

OURS, PROPOSED, BARE = "penstock", "lists (proposal)", "perf_counter twice"
_NAMES = ("policy_training", "evaluation", "checkpoint_save")
_BURST = 5_000
_WINDOW = 100
_FULL, _LONG = 10_000, 100_000  # timings of each name: penstock's history, and beyond it
_MEMORY_BAR_MB = 2.0
_SAMPLE_MS = (5.23, 45.67)  # data_collection and training in the proposal's sample output
_FRAMES = 1024 * 32


class ProposedMonitor:
    """The monitor of the original proposal: every timing in a list for ever."""

    def __init__(self) -> None:
        self.timings: defaultdict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Time a block."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name].append(time.perf_counter() - start_s)

    def get_stats(self, window: int | None = None) -> dict[str, dict[str, float]]:
        """Return mean, deviation, min and max of each name."""
        stats = {}
        for name, times in self.timings.items():
            kept = np.array(times[-window:] if window else times)
            stats[name] = {
                "mean": float(kept.mean()),
                "std": float(kept.std()),
                "min": float(kept.min()),
                "max": float(kept.max()),
            }
        return stats

    def get_summary(self, window: int | None = None) -> str:
        """Return the table."""
        lines = ["=== Performance Summary ==="]
        for name, stats in self.get_stats(window).items():
            ms = {key: value * 1e3 for key, value in stats.items()}
            lines.append(
                f"{name:<25}: {ms['mean']:7.2f} ms (±{ms['std']:6.2f} ms) "
                f"[{ms['min']:6.2f}, {ms['max']:6.2f}]"
            )
        return "\n".join(lines)


def run(settings: Settings) -> list[Row]:
    """Measure timers, statistics and memory."""
    implied = _FRAMES / (sum(_SAMPLE_MS) / 1e3)
    code = len(inspect.getsource(monitor).splitlines())
    return [
        *_timers(settings),
        *_statistics(settings),
        *_memory(),
        Row(
            "speed that the proposal's sample output means (computed)",
            PROPOSED,
            implied,
            "frames/s",
        ),
        Row("lines of code", "penstock core/monitor.py", code, "lines"),
    ]


def _timers(settings: Settings) -> list[Row]:
    ours, theirs = PerformanceMonitor(), ProposedMonitor()

    def timed(watch: Any) -> Callable[[], None]:
        def action() -> None:
            with watch.timer("x"):
                pass

        return action

    def bare() -> None:
        start_s = time.perf_counter()
        _ = time.perf_counter() - start_s

    turns = {OURS: timed(ours), PROPOSED: timed(theirs), BARE: bare}
    timings = interleave(
        {who: burst(action, _BURST) for who, action in turns.items()}, settings.rounds, "timers"
    )
    rows = judge_peers(time_rows("an empty timer", timings, OURS, scale=1e6), {PROPOSED: 1.0})
    rows = [replace(row, cpu_s=None) for row in rows]  # it is of thousands of calls
    # In the proposal's unit, beside its sample output.
    found = [Row("an empty timer, in ms", row.who, row.value / 1e3, "ms", row.n) for row in rows]
    return rows + found


def _filled(watch: Any, count: int) -> Any:
    """Give a monitor timings as it would keep them."""
    for name in _NAMES:
        if isinstance(watch, ProposedMonitor):
            for k in range(count):
                watch.timings[name].append(0.045 + k * 1e-9)
        else:
            for k in range(count):
                watch.record(name, 0.045 + k * 1e-9)
    return watch


def _statistics(settings: Settings) -> list[Row]:
    full = {OURS: _filled(PerformanceMonitor(), _FULL), PROPOSED: _filled(ProposedMonitor(), _FULL)}
    long = {OURS: _filled(PerformanceMonitor(), _LONG), PROPOSED: _filled(ProposedMonitor(), _LONG)}
    rounds = max(2, settings.rounds // 2)

    def compare(what: str, kept: dict[str, Any], ask: Callable[[Any], object]) -> list[Row]:
        turns = {
            who: burst(lambda watch=watch: ask(watch), 2)  # type: ignore[misc]
            for who, watch in kept.items()
        }
        return time_rows(what, interleave(turns, rounds, what), OURS)

    names = f"{len(_NAMES)} names"
    return [
        *compare(
            f"get_summary(window={_WINDOW}), {names} of {_FULL:,} timings",
            full,
            lambda watch: watch.get_summary(window=_WINDOW),
        ),
        *compare(
            f"get_stats(), {names} of {_FULL:,} timings", full, lambda watch: watch.get_stats()
        ),
        *compare(
            f"get_stats(), {names} after {_LONG:,} timings", long, lambda watch: watch.get_stats()
        ),
    ]


def _memory() -> list[Row]:
    """Count what a monitor holds after few and many timings; allocations, not resident pages."""
    rows = []
    for count in (_FULL, _LONG):
        for who, make in ((OURS, PerformanceMonitor), (PROPOSED, ProposedMonitor)):
            tracemalloc.start()
            try:
                kept = _filled(make(), count)
                held = tracemalloc.get_traced_memory()[0] / 1e6
            finally:
                tracemalloc.stop()
            del kept
            judged = who == OURS and count == _LONG
            rows.append(
                Row(
                    f"memory, {len(_NAMES)} names after {count:,} timings",
                    who,
                    held,
                    "MB",
                    bar=f"<= {_MEMORY_BAR_MB:g} MB" if judged else "",
                    met=held <= _MEMORY_BAR_MB if judged else None,
                )
            )
    return rows


CASE = Case(
    name="monitor",
    claim="the original proposal: timers and their summary are there for free "
    "(sample output: policy_training 45.23 ms, checkpoint_save 0.85 ms)",
    peers=("lists that grow (proposal)", "time.perf_counter, called twice"),
    data=f"empty blocks; {len(_NAMES)} names of {_FULL:,} and {_LONG:,} timings each",
    run=run,
)
