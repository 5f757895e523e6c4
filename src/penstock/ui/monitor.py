"""Where the time goes: named timers, their statistics, and sinks that keep the numbers."""

from __future__ import annotations

import importlib
import json
import math
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter, sleep, time
from typing import Any, Protocol

import numpy as np

from penstock.core.files import storage_error
from penstock.errors import MissingExtra, UsageError
from penstock.ui.report import text_table


class Sink(Protocol):
    """Something that keeps metrics."""

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the metrics of one step."""

    def close(self) -> None:
        """Finish what was written; calling it again does nothing."""


class PerformanceMonitor:
    """Times named pieces of work, from any number of threads.

    A timer may be nested, in others and in itself; each one then counts its whole length, so the
    shares of nested names overlap. Work that ends with an exception is timed as well.

    Args:
        history: How many of the last timings of each name are kept; statistics are over these.
        sinks: Where `log` writes to.

    Example:
        >>> monitor = PerformanceMonitor()
        >>> with monitor.timer("rollout"):
        ...     steps = sum(range(1000))
        >>> monitor.get_stats()["rollout"]["count"]
        1
    """

    def __init__(self, history: int = 10_000, sinks: Sequence[Sink] = ()) -> None:
        if history < 1:
            raise UsageError(f"a history of {history} timings keeps nothing: pass at least 1")
        self.history = history
        self.sinks = tuple(sinks)
        self._lock = threading.Lock()  # guards the dict; appending to a deque is atomic
        self._timings: dict[str, deque[float]] = {}

    def timer(self, name: str) -> _Timer:
        """Return a context manager that records how long its block took."""
        return _Timer(self._timings.get(name) or self._series(name))

    def record(self, name: str, seconds: float) -> None:
        """Add a time that was measured elsewhere."""
        self._series(name).append(seconds)

    def reset(self) -> None:
        """Forget all timings; a timer that is running now is forgotten with them."""
        with self._lock:
            self._timings = {}

    def get_stats(self, window: int | None = None) -> dict[str, dict[str, float]]:
        """Return the statistics of each name, all times in seconds.

        Args:
            window: Use only the last so many timings of each name; None uses all that are kept.

        Returns:
            By name: mean, std (of the population), min, max, count, total, last, p50, p90, p99
            (interpolated as numpy does), and share, the part of the time of all names together.
        """
        if window is not None and window < 1:
            raise UsageError(f"a window of {window} timings is empty: pass at least 1, or None")
        with self._lock:
            series = dict(self._timings)
        # copy() is one atomic step; iterating over a deque that grows is an error.
        kept = {name: list(times.copy())[-(window or 0) :] for name, times in series.items()}
        total_s = sum(math.fsum(times) for times in kept.values())
        return {name: _stats(times, total_s) for name, times in kept.items() if times}

    def get_summary(self, window: int | None = None) -> str:
        """Return a table in milliseconds: mean, deviation, extremes, p50, p99 and share."""
        title = "Performance Summary, ms"
        columns = ("timer", "mean", "±", "min", "max", "p50", "p99", "share")
        rows = [
            (
                name,
                *(f"{1e3 * stats[key]:.2f}" for key in ("mean", "std", "min", "max", "p50", "p99")),
                f"{stats['share']:.1%}",
            )
            for name, stats in self.get_stats(window).items()
        ]
        return f"{title}\n{text_table(columns, rows)}" if rows else title

    def log(self, step: int, window: int | None = None) -> None:
        """Write the mean of each name, in seconds, as ``perf/<name>`` to all sinks."""
        metrics = {f"perf/{name}": stats["mean"] for name, stats in self.get_stats(window).items()}
        for sink in self.sinks:
            sink.write(metrics, step)

    def _series(self, name: str) -> deque[float]:
        with self._lock:
            return self._timings.setdefault(name, deque(maxlen=self.history))


class _Timer:
    """One timer; a stack of starts, so that the same object may be entered inside itself."""

    __slots__ = ("_starts_s", "_times")

    def __init__(self, times: deque[float]) -> None:
        self._times = times
        self._starts_s: list[float] = []

    def __enter__(self) -> None:
        self._starts_s.append(perf_counter())

    def __exit__(self, *exc_info: object) -> None:
        self._times.append(perf_counter() - self._starts_s.pop())


class JsonlSink:
    """Appends one JSON object per step to a text file, where it is when `write` returns.

    Args:
        path: The file; its folder is made when missing. What is there already is kept.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: what a full disk refuses must not be tried again when it is closed.
        self._file = self.path.open("ab", buffering=0)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Append ``{"step": …, <metrics>}``; NaN and infinities, unknown to JSON, become null."""
        row = {name: float(v) if math.isfinite(v) else None for name, v in metrics.items()}
        rest = memoryview(f"{json.dumps({'step': step, **row}, allow_nan=False)}\n".encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise storage_error("write", self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Writes scalars for TensorBoard.

    Args:
        log_dir_or_writer: A folder, or a ``SummaryWriter`` that stays the caller's to close.
        purge_step: Of a folder that is gone on with: points from this step on do not count.
    """

    def __init__(
        self, log_dir_or_writer: str | os.PathLike[str] | Any, purge_step: int | None = None
    ) -> None:
        self._own = isinstance(log_dir_or_writer, str | os.PathLike)
        self._writer: Any = log_dir_or_writer
        if self._own:
            module = _import("torch.utils.tensorboard", "tensorboard", "rl")
            # Files are read by their names, and these begin with the second they are made in.
            now_s = time()
            if any(Path(log_dir_or_writer).glob(f"events.out.tfevents.{int(now_s)}.*")):
                sleep(1.01 - now_s % 1)
            self._writer = module.SummaryWriter(os.fspath(log_dir_or_writer), purge_step=purge_step)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one scalar per metric; with a folder, they are there when this returns."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        if self._own:
            self._writer.flush()

    def close(self) -> None:
        """Flush, and close a writer that was made here."""
        (self._writer.close if self._own else self._writer.flush)()


class WandbSink:
    """Logs to Weights & Biases.

    Args:
        run: The run to log to, which stays the caller's to finish; None starts one.
    """

    def __init__(self, run: Any = None) -> None:
        self._own = run is None
        self._run: Any = _import("wandb", "wandb", "wandb").init() if self._own else run

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Log all metrics of one step together."""
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish a run that was started here, once."""
        if self._own:
            self._own = False
            self._run.finish()


def _import(module: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(package, extra) from error


def _stats(times: list[float], total_s: float) -> dict[str, float]:
    sum_s = math.fsum(times)
    p50, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    spread = {"std": float(np.std(times)), "min": min(times), "max": max(times)}
    sums = {"count": len(times), "total": sum_s, "last": times[-1]}
    quantiles = {"p50": p50, "p90": p90, "p99": p99}
    share = sum_s / total_s if total_s else 0.0
    return {"mean": sum_s / len(times), **spread, **sums, **quantiles, "share": share}
