"""How long saving holds up the training thread, and what it costs an iteration."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks import Row, Settings
from benchmarks.checkpoint.peers import (
    Clone,
    DcpAsync,
    Method,
    Penstock,
    ProposedQueue,
    Reused,
    TorchSave,
)
from benchmarks.checkpoint.state import ACTIONS, OBSERVATIONS, Learner
from benchmarks.measure import clock, find_row, interleave, time_rows, torch_threads
from penstock.checkpoints.saver import AsyncCheckpointSaver

OURS = "penstock"
LAZY = "penstock, lazy=True"
PROPOSED = "deepcopy + queue (proposal)"
DCP = "DCP async_save"
STAGED = "DCP async_save, DefaultStager"
REUSED = "copy_ into reused buffers"
TORCH = "torch.save"
_NO_SAVE = "no save"
_ITERATIONS = 4  # per block, so that background work after the save is seen, too
_SMALL_HIDDEN = 200  # 2.0 MB with Adam's moments
_CROWD = 500


def blocked(settings: Settings) -> str:
    """Name the quantity that is measured with a phase without mutation before the step."""
    return f"blocked, {settings.phase_s * 1e3:.0f} ms before the step"


def measure_stall(learner: Learner, settings: Settings) -> list[Row]:
    """Time in which the training thread does nothing but save, by each way."""
    methods: dict[str, Method] = {
        TORCH: TorchSave(settings.work),
        DCP: DcpAsync(settings.work),
        STAGED: DcpAsync(settings.work, staged=True),
        PROPOSED: ProposedQueue(),
        "clone (Lightning's way)": Clone(),
        REUSED: Reused(learner.state()),
        OURS: Penstock(settings.work, learner),
        LAZY: Penstock(settings.work, learner, lazy=True),
    }

    def turn(method: Method) -> Callable[[], float]:
        def run() -> float:
            state = learner.state()
            blocked_s = clock(lambda: method.save(state))
            time.sleep(settings.phase_s)
            blocked_s += clock(method.before_step)
            learner.step()
            method.settle()
            return blocked_s

        return run

    try:
        with torch_threads(1):
            timings = interleave(
                {name: turn(method) for name, method in methods.items()}, settings.rounds, "stall"
            )
    finally:
        for method in methods.values():
            method.close()
    what = blocked(settings)
    rows = time_rows(what, timings, OURS)
    copy, queue = (find_row(rows, what, who).value for who in (REUSED, PROPOSED))
    bars: Mapping[str, tuple[str, Callable[[float], bool]]] = {
        OURS: ("<= 0.9x copy_, <= 1/4 deepcopy", lambda ms: ms <= 0.9 * copy and ms <= queue / 4),
        LAZY: ("<= 0.6 ms", lambda ms: ms <= 0.6),
    }
    return [
        replace(row, bar=bars[row.who][0], met=bars[row.who][1](row.value))
        if row.who in bars
        else row
        for row in rows
    ]


def measure_small(settings: Settings) -> list[Row]:
    """The call for a policy of a few MB, its outliers, and what a crowded folder changes."""
    learner = Learner(_SMALL_HIDDEN)
    learner.iterate()
    state = learner.state()
    with AsyncCheckpointSaver(settings.work / "source", handle_signals=False) as saver:
        one = saver.save_async(state, "one.pt").wait()
    crowd = settings.work / "crowded"
    crowd.mkdir()
    for number in range(_CROWD):
        shutil.copy(one, crowd / f"{number}.pt")
    savers = {
        name: AsyncCheckpointSaver(folder, keep_last=3, handle_signals=False)
        for name, folder in (("empty folder", settings.work / "empty"), (f"{_CROWD} files", crowd))
    }
    calls: dict[str, list[float]] = {name: [] for name in savers}
    cpus: dict[str, list[float]] = {name: [] for name in savers}

    def turn(name: str) -> Callable[[], float]:
        def run() -> float:
            learner.iterate()  # the caches are those of a training
            state = learner.state()
            begin, cpu_s = time.perf_counter(), time.process_time()
            calls[name].append(clock(lambda: savers[name].save_async(state, "next.pt")))
            savers[name].wait()
            cpus[name].append(time.process_time() - cpu_s)
            return time.perf_counter() - begin

        return run

    try:
        whole = interleave({name: turn(name) for name in savers}, 10 * settings.rounds, "folders")
    finally:
        for saver in savers.values():
            saver.shutdown()
    empty, crowded = savers
    rows = time_rows("small save, until durable", whole, empty)
    ratio = statistics.median(cpus[crowded]) / statistics.median(cpus[empty])
    row = Row("small save, CPU of call and background", crowded, ratio, "x empty")
    rows.append(replace(row, bar="<= 1.2x of an empty folder", met=ratio <= 1.2))
    medians = {name: statistics.median(times) * 1e3 for name, times in calls.items()}
    for name, times in calls.items():
        ordered = sorted(times)
        p99 = ordered[int(0.99 * len(ordered))] * 1e3
        limit = 1.2 * medians[empty] if name == crowded else 0.5
        met = medians[name] <= limit and p99 <= 5 * medians[name]
        bar = f"median <= {limit:.2f} ms, p99 <= 5x median"
        row = Row("small save, call", name, medians[name], "ms", n=len(times), p90=p99)
        rows.append(replace(row, bar=bar + f" (p99 {p99:.2f} ms)", met=met))
    return rows


def measure_inflation(learner: Learner, settings: Settings) -> list[Row]:
    """Iteration time with and without one save, all cores at work, background work included."""
    methods: dict[str, Method | None] = {
        _NO_SAVE: None,
        TORCH: TorchSave(settings.work),
        STAGED: DcpAsync(settings.work, staged=True),
        "deepcopy + queue + LZ4-9 (proposal)": ProposedQueue(settings.work),
        OURS: Penstock(settings.work, learner),
        LAZY: Penstock(settings.work, learner, lazy=True),
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
                settings.repeats,
                "iterations",
            )
        finally:
            for method in methods.values():
                if method is not None:
                    method.close()
    base = timings[_NO_SAVE].median
    rows = time_rows(f"iteration, one save in {_ITERATIONS}, cores busy", timings, OURS)
    lost_ms = {
        name: (timing.median - base) * _ITERATIONS * 1e3
        for name, timing in timings.items()
        if name != _NO_SAVE
    }
    for name, lost in lost_ms.items():
        what = f"training time lost in {_ITERATIONS} iterations after a save"
        row = Row(what, name, lost, "ms", n=len(timings[name].seconds))
        if name == OURS:
            met = lost <= lost_ms[TORCH] and lost <= lost_ms[STAGED]
            row = replace(row, bar="<= torch.save's and DCP's", met=met)
        rows.append(row)
    return rows


def _product_s(matrix: torch.Tensor) -> float:
    """Return the seconds of one product, the best of a few."""
    return min(clock(lambda: torch.mm(matrix, matrix)) for _ in range(20))


def _small_batch() -> tuple[Any, ...]:
    observations, actions = torch.randn(8, OBSERVATIONS), torch.randn(8, ACTIONS)
    return observations, actions, torch.full((8,), -5.0), torch.randn(8), torch.randn(8)
