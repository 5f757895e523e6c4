"""How long saving holds up the training thread, and what it costs an iteration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from penstock.tools.bench import Row, Settings
from penstock.tools.bench.checkpoint.peers import (
    Clone,
    DcpAsync,
    Method,
    Penstock,
    Reused,
    SeedQueue,
    TorchSave,
)
from penstock.tools.bench.checkpoint.state import ACTIONS, OBSERVATIONS, Learner
from penstock.tools.bench.measure import Timing, clock, interleave, time_rows, torch_threads

OURS = "penstock"
SEED = "deepcopy + queue (seed)"
DCP = "DCP async_save"
REUSED = "copy_ into reused buffers"
_NO_SAVE = "no save"
_ITERATIONS = 4  # per block, so that background work after the save is seen, too


def blocked(settings: Settings) -> str:
    """Name the quantity that is measured with a phase without mutation before the step."""
    return f"blocked, {settings.phase_s * 1e3:.0f} ms before the step"


def measure_stall(learner: Learner, settings: Settings) -> list[Row]:
    """Blocked time with a phase without mutation before each step, and in a tight loop."""
    ours = Penstock(settings.work, learner)
    methods: dict[str, Method] = {
        "torch.save": TorchSave(settings.work),
        DCP: DcpAsync(settings.work),
        SEED: SeedQueue(),
        "clone (Lightning's way)": Clone(),
        REUSED: Reused(learner.state()),
        OURS: ours,
    }
    recorded: dict[str, list[float]] = {"call": [], "barrier": []}

    def turn(method: Method, phase_s: float) -> Callable[[], float]:
        def run() -> float:
            state = learner.state()
            begin = time.perf_counter()
            method.save(state)
            blocked_s = time.perf_counter() - begin
            time.sleep(phase_s)
            blocked_s += clock(method.before_step)
            if method is ours and phase_s:
                stats = ours.saver.get_stats()["blocked"]
                for part, times in recorded.items():
                    times.append(stats[part]["last"])
            learner.step()
            method.settle()
            return blocked_s

        return run

    try:
        with torch_threads(1):
            calm = interleave(
                {name: turn(method, settings.phase_s) for name, method in methods.items()},
                settings.rounds,
                "stall",
            )
            tight = interleave(
                {name: turn(methods[name], 0.0) for name in (REUSED, OURS)},
                settings.rounds,
                "tight loop",
            )
    finally:
        for method in methods.values():
            method.close()
    what = blocked(settings)
    rows = _with_bars(time_rows(what, calm, OURS))
    for part, times in recorded.items():  # a cross-check by penstock's own clock
        own = Timing(times[1:])
        who = f"penstock get_stats: {part}"
        rows.append(Row(what, who, own.median * 1e3, "ms", n=len(own.seconds), p90=own.p90 * 1e3))
    return rows + _tight_bar(time_rows("blocked, tight loop", tight, OURS))


def _with_bars(rows: list[Row]) -> list[Row]:
    bars: dict[str, tuple[str, Callable[[Row], bool]]] = {
        OURS: ("<= 0.5 ms", lambda row: row.value <= 0.5),
        SEED: (">= 80x penstock", lambda row: (row.ratio or 0) >= 80),
        DCP: (">= 100x penstock", lambda row: (row.ratio or 0) >= 100),
    }
    marked = []
    for row in rows:
        if row.who in bars:
            bar, test = bars[row.who]
            row = replace(row, bar=bar, met=test(row))
        marked.append(row)
    return marked


def _tight_bar(rows: list[Row]) -> list[Row]:
    copy = next(row for row in rows if row.who == REUSED)
    return [
        replace(row, bar="<= 1.15x of copy_", met=row.value <= 1.15 * copy.value)
        if row.who == OURS
        else row
        for row in rows
    ]


def measure_inflation(learner: Learner, settings: Settings) -> list[Row]:
    """Iteration time with and without one save, all cores at work, background work included."""
    methods: dict[str, Method | None] = {
        _NO_SAVE: None,
        "torch.save": TorchSave(settings.work),
        "deepcopy + queue + LZ4-9 (seed)": SeedQueue(settings.work),
        OURS: Penstock(settings.work, learner),
        "penstock, compress=False": Penstock(settings.work, learner, compress=False),
    }
    batch = _small_batch()
    busy = torch.randn(512, 512)
    with torch_threads(os.cpu_count() or 1):
        repeats = max(1, round(settings.phase_s / _product_s(busy)))

        def turn(method: Method | None) -> Callable[[], float]:
            def run() -> float:
                begin = time.perf_counter()
                for number in range(_ITERATIONS):
                    if method is not None and number == 0:
                        method.save(learner.state())
                    for _ in range(repeats):
                        torch.mm(busy, busy)
                    learner.backward(*batch)
                    learner.step()
                seconds = time.perf_counter() - begin
                if method is not None:
                    method.settle()
                return seconds / _ITERATIONS

            return run

        try:
            timings = interleave(
                {name: turn(method) for name, method in methods.items()},
                max(1, settings.repeats - 3),
                "iterations",
                warm_up=False,
            )
        finally:
            for method in methods.values():
                if method is not None:
                    method.close()
    base = timings[_NO_SAVE].median
    rows = time_rows(f"iteration, one save in {_ITERATIONS}, cores busy", timings, OURS)
    for name, timing in timings.items():
        if name != _NO_SAVE:
            lost = (timing.median - base) * _ITERATIONS * 1e3
            what = f"training time lost in {_ITERATIONS} iterations after a save"
            bar = "reported" if name == OURS else ""
            rows.append(Row(what, name, lost, "ms", n=len(timing.seconds), bar=bar))
    return rows


def _product_s(matrix: torch.Tensor) -> float:
    """Return the seconds of one product, the best of a few."""
    return min(clock(lambda: torch.mm(matrix, matrix)) for _ in range(20))


def _small_batch() -> tuple[Any, ...]:
    observations, actions = torch.randn(8, OBSERVATIONS), torch.randn(8, ACTIONS)
    return observations, actions, torch.full((8,), -5.0), torch.randn(8), torch.randn(8)
