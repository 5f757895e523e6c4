"""The case `pipeline`: collecting the next batch while this one trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict

from benchmarks import Case, Row, Settings
from benchmarks.measure import clock, interleave, judge_peers, time_rows, torch_threads
from benchmarks.pipeline.collecting import (
    compute_gains,
    measure_alive,
    measure_parallel,
    measure_same_td,
)
from penstock.rollouts.collect import PipelinedDataCollector

OURS = "penstock"
SERIAL = "one after the other"
_SLEEP_S = 0.05


def run(settings: Settings) -> list[Row]:
    """Measure a collector and a learner of equal cost: waiting, and working."""
    return [
        *_compare("waiting (a GPU, a robot)", lambda: time.sleep(_SLEEP_S), settings, bar=1.7),
        *_compare("working (both on the CPU)", _work, settings, bar=None),
        *measure_alive(settings.batches),
        *measure_same_td(),
        *measure_parallel(settings),
        *compute_gains(),
    ]


def _work() -> None:
    """Multiply for a while, on one core."""
    matrix = torch.full((400, 400), 0.01)
    for _ in range(25):
        matrix = (matrix @ matrix).clamp_(-1, 1)


def _batches(count: int, effort: Callable[[], object]) -> Iterator[TensorDict]:
    for number in range(count):
        effort()
        yield TensorDict({"number": torch.full((64,), number)}, batch_size=[64])


def _compare(
    name: str, effort: Callable[[], object], settings: Settings, bar: float | None
) -> list[Row]:
    def serial() -> None:
        for _ in _batches(settings.batches, effort):
            effort()

    def pipelined() -> None:
        with PipelinedDataCollector(_batches(settings.batches, effort)) as collector:
            for _ in collector:
                effort()

    with torch_threads(1):
        turns = {OURS: lambda: clock(pipelined), SERIAL: lambda: clock(serial)}
        timings = interleave(turns, settings.repeats, name)
    rows = time_rows(f"{settings.batches} batches, collector and learner {name}", timings, OURS)
    gain = timings[SERIAL].median / timings[OURS].median
    rows.append(Row(f"collecting ahead, {name}", OURS, 100 * (gain - 1), "% faster", rows[0].n))
    return rows if bar is None else judge_peers(rows, {SERIAL: bar})


CASE = Case(
    name="pipeline",
    claim="the original proposal: collecting ahead makes training 5-15 % faster; "
    "return_same_td=False doubles memory; 1024 environments at once are 1000x one",
    peers=("collect, then train (SyncDataCollector's way)", "TorchRL Collector's return_same_td"),
    data="{batches} batches; collector and learner take equally long, 1 torch thread each; drones "
    "among 350 boxes and 80 moving obstacles",
    run=run,
)
