"""How long saving holds up the training thread, and what it costs an iteration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from penstock.tools.bench import Row, Settings
from penstock.tools.bench.measure import clock, interleave, time_rows
from penstock.tools.bench.peers import (
    Clone,
    DcpAsync,
    Method,
    Penstock,
    Reused,
    SeedQueue,
    TorchSave,
)
from penstock.tools.bench.state import ACTIONS, OBSERVATIONS, Learner, torch_threads

OURS = "penstock"
SEED = "deepcopy + queue (seed)"
DCP = "DCP async_save"
REUSED = "copy_ into reused buffers"
_ITERATIONS = 6  # per block, so that background work after the save is seen, too


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
    recorded: list[float] = []

    def turn(method: Method, phase_s: float) -> Callable[[], float]:
        def run() -> float:
            state = learner.state()
            blocked_s = clock(lambda: method.save(state))
            time.sleep(phase_s)
            blocked_s += clock(method.before_step)
            if method is ours and phase_s:
                stats = ours.saver.get_stats()["blocked"]
                recorded.append(stats["call"]["last"] + stats["barrier"]["last"])
            del state
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
    what = f"blocked, {settings.phase_s * 1e3:.0f} ms before the step"
    rows = _with_bars(time_rows(what, calm, OURS))
    own = sorted(recorded[1:])[len(recorded[1:]) // 2]
    rows.append(Row(what, "penstock, by its own get_stats", own * 1e3, "ms", n=len(recorded) - 1))
    return rows + _tight_bar(time_rows("blocked, tight loop", tight, OURS))


def _with_bars(rows: list[Row]) -> list[Row]:
    bars = {
        OURS: ("<= 0.5 ms", lambda row: row.value <= 0.5),
        SEED: (">= 80x penstock", lambda row: row.ratio >= 80),
        DCP: (">= 100x penstock", lambda row: row.ratio >= 100),
    }
    marked = []
    for row in rows:
        bar, test = bars.get(row.who, ("", None))
        marked.append(replace(row, bar=bar, met=bool(test(row)) if test else None))
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
    ours = Penstock(settings.work, learner)
    methods: dict[str, Method | None] = {"no save": None, SEED: SeedQueue(), OURS: ours}
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
                max(3, settings.repeats - 2),
                "iterations",
            )
        finally:
            for method in methods.values():
                if method is not None:
                    method.close()
    base = timings["no save"].median
    what = f"iteration, one save in {_ITERATIONS}, cores busy"
    rows = time_rows(what, timings, OURS)
    lost = (timings[OURS].median - base) * _ITERATIONS * 1e3
    rows.append(
        Row(
            "training time lost per save",
            OURS,
            lost,
            "ms",
            n=len(timings[OURS].seconds),
            bar="reported",
        )
    )
    return rows


def _product_s(matrix: torch.Tensor) -> float:
    """Return the seconds of one product, the best of a few."""
    return min(clock(lambda: torch.mm(matrix, matrix)) for _ in range(20))


def _small_batch() -> tuple[Any, ...]:
    observations, actions = torch.randn(8, OBSERVATIONS), torch.randn(8, ACTIONS)
    return observations, actions, torch.full((8,), -5.0), torch.randn(8), torch.randn(8)
