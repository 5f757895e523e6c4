"""Timing: methods take turns in one run, so that noise and load hit them alike."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import Row
from penstock.errors import PenstockError
from penstock.ui.progress import Progress


@dataclass
class Timing:
    """The measurements of one method: seconds, and processor seconds of the whole turn."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def p90(self) -> float:
        """The 90th percentile, in seconds."""
        if len(self.seconds) < 2:
            return self.seconds[0]
        return statistics.quantiles(self.seconds, n=10, method="inclusive")[-1]


def interleave(
    turns: Mapping[str, Callable[[], float]], rounds: int, title: str, warm_up: bool = True
) -> dict[str, Timing]:
    """Let each method have its turn, round after round, each round starting with another one.

    Args:
        turns: Each makes one measurement and returns the seconds that count; what it does besides
            (preparing, waiting for background work) is not in them.
        rounds: How many measurements of each.
        title: For the progress bar.
        warm_up: Whether a first round is run and forgotten.
    """
    timings = {name: Timing() for name in turns}
    names = list(turns)
    first = -1 if warm_up else 0
    with Progress((rounds - first) * len(names), title, "turns") as progress:
        for number in range(first, rounds):
            start = number % len(names)
            for name in names[start:] + names[:start]:
                cpu = time.process_time()
                seconds = turns[name]()
                if number >= 0:
                    timings[name].seconds.append(seconds)
                    timings[name].cpu_s.append(time.process_time() - cpu)
                progress.advance()
    return timings


def clock(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def time_rows(what: str, timings: Mapping[str, Timing], ours: str, scale: float = 1e3) -> list[Row]:
    """Lay out timings as rows, in milliseconds by default, with the ratio to `ours`."""
    unit = {1e6: "us", 1e3: "ms", 1.0: "s"}[scale]
    reference = timings[ours].median
    return [
        Row(
            what,
            name,
            timing.median * scale,
            unit,
            n=len(timing.seconds),
            p90=timing.p90 * scale,
            ratio=timing.median / reference,
            cpu_s=statistics.median(timing.cpu_s),
        )
        for name, timing in timings.items()
    ]


def judge_peers(rows: Iterable[Row], least: Mapping[str, float]) -> list[Row]:
    """Say of peers whether they take at least so many times as long as penstock.

    Args:
        rows: Of `time_rows`.
        least: The bar of each peer that has one.
    """
    return [
        replace(
            row, bar=f">= {least[row.who]:g} x penstock", met=(row.ratio or 0) >= least[row.who]
        )
        if row.who in least
        else row
        for row in rows
    ]


def find_row(rows: Iterable[Row], what: str, who: str) -> Row:
    """Return a row that is there, to compute another figure from it."""
    return next(row for row in rows if row.what == what and row.who == who)


def burst(action: Callable[[], object], calls: int) -> Callable[[], float]:
    """Make a turn of many calls, where one is shorter than the noise of the clock."""

    def turn() -> float:
        def work() -> None:
            for _ in range(calls):
                action()

        return clock(work) / calls

    return turn


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads inside the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_bytes() -> int:
    """Return the highest resident size of this process since the kernel was told to forget it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise PenstockError("this system does not tell the peak memory of a process")


def environment() -> dict[str, str]:
    """Return the environment of a process that runs a module of the benchmarks, wherever it is."""
    root = str(Path(__file__).parent.parent)
    before = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, before)))}
