"""AsyncCheckpointSaver: what the training thread sees of saving.

    training thread                  copier thread            writer thread (pipeline.py)
    save_async: freeze (freeze.py),
    copy what is not owned  ───────► copies lazy tensors ───► waits for the copy, encodes, fsyncs
    optimizer.step: barrier (helps, verifies; capture.py) ──► publishes, moves `latest`, prunes

Nothing is published before the barrier has verified the copy.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from penstock.checkpoints import folder, hooks
from penstock.checkpoints.capture import Capture, staging_bytes
from penstock.checkpoints.freeze import Owned, freeze
from penstock.checkpoints.pipeline import Pipeline
from penstock.checkpoints.publish import Job, Publisher
from penstock.checkpoints.queue import OnFull, SaveQueue
from penstock.core import tree
from penstock.core.codecs import Planes
from penstock.core.files import storage_error
from penstock.core.handle import SaveHandle, close_after, poll
from penstock.core.monitor import PerformanceMonitor
from penstock.core.signals import SignalGuard
from penstock.errors import PenstockWarning, SaverClosed, UsageError

KeepBest = int | tuple[int, Literal["max", "min"]]

_LOG = logging.getLogger("penstock")
_SIGNAL_LIMIT_S = 30.0
_HISTORY = 2000


class AsyncCheckpointSaver:
    """Save whole training states without stopping the training.

    Tensors owned by the given optimizers are copied in the background until the next step of one of
    them; everything else in a state is copied when `save_async` is called. Hand over *every*
    optimizer that trains the saved tensors, and change these only through their steps (or call
    `barrier` before); anything else is noticed, and costs that checkpoint.

    Args:
        directory: Relative paths start here; created if missing.
        max_queue_size: Saves that may be pending.
        optimizers: Whose parameters and state are captured lazily.
        modules: Whose `load_state_dict` waits for a capture to finish.
        compress: Compress by default (lossless byte planes and zstd).
        compression_level: 1 is fastest, 2 balanced, 3 and above smallest.
        delta_every: Every so many saves a full checkpoint, differences to it between; 0 or 1 means
            full ones only. A difference needs its full checkpoint beside it to be loaded.
        keep_last: Keep so many of the newest; None keeps all.
        keep_best: Keep so many of the best by `metric`, besides; (k, "min") if less is better.
        on_full: What `save_async` does when the queue is full: "wait", "skip" the new save, or
            "drop_oldest" pending one (if none can be dropped, it waits). All are counted.
        verbose: Say each save on stderr.
        max_staging_bytes: Memory for the copies of pending saves; by default one copy of the state
            (at least 64 MB). A second save waits for the first when both do not fit.
        handle_signals: Finish pending saves on SIGINT and SIGTERM, then let them take their course.

    Example:
        with AsyncCheckpointSaver("runs/x", optimizers=[optimizer]) as saver:
            saver.save_async({"model": net.state_dict(), "step": step}, "ckpt_100.pt")
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] = ".",
        max_queue_size: int = 3,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        modules: torch.nn.Module | Iterable[torch.nn.Module] = (),
        compress: bool = True,
        compression_level: int = 2,
        delta_every: int = 0,
        keep_last: int | None = None,
        keep_best: KeepBest | None = None,
        on_full: OnFull = "wait",
        verbose: bool = False,
        *,
        max_staging_bytes: int | None = None,
        handle_signals: bool = True,
    ) -> None:
        _check_natural("max_queue_size", max_queue_size, 1)
        _check_natural("delta_every", delta_every, 0)
        if keep_last is not None:
            _check_natural("keep_last", keep_last, 1)
        if on_full not in ("wait", "skip", "drop_oldest"):
            raise UsageError(f"on_full={on_full!r}: use 'wait', 'skip' or 'drop_oldest'")
        Planes(level=compression_level)  # refuses a wrong level here, not in the background
        self.directory = Path(directory).absolute()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error("create", self.directory, error) from error
        self._where = str(self.directory)
        self._compress = compress
        self._pid = os.getpid()
        self._closed = False
        self._flushing = False
        self._calls = threading.Lock()  # one save_async at a time
        self._active: Capture | None = None
        self._queue = SaveQueue(max_queue_size, max_staging_bytes, on_full)
        self._blocked: deque[tuple[str, float]] = deque(maxlen=_HISTORY)
        owners = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else [*optimizers]
        nets = [modules] if isinstance(modules, torch.nn.Module) else [*modules]
        self._owned = Owned(owners)
        self._eager: set[str] = set()  # tensors found changed past their optimizer
        self._hooks = hooks.install(self.barrier, self._owned.forget, owners, nets)
        this = weakref.ref(self)
        self._signals = SignalGuard(lambda: _flush(this), install=handle_signals)
        publisher = Publisher(compression_level, delta_every, keep_last, _checked_best(keep_best))
        self._pipeline = Pipeline(
            self._queue, publisher, self._note_torn, self._signals.nudge, verbose=verbose
        )

    def save_async(
        self,
        checkpoint: Any,
        path: str | os.PathLike[str],
        compress: bool | None = None,
        metadata: dict[str, Any] | None = None,
        metric: float | None = None,
    ) -> SaveHandle:
        """Ask for a checkpoint and return at once.

        Args:
            checkpoint: Nested dicts, lists, tuples, numbers, strings, numpy arrays and tensors.
            path: File name, relative to the saver's directory.
            compress: Overrides the saver's setting.
            metadata: Small values to keep beside the state (shown by `penstock info`).
            metric: For `keep_best`; one that is not finite counts as none.

        Returns:
            A handle; `handle.wait()` returns when this checkpoint is durable.

        Raises:
            UnsupportedValue: Something cannot be stored; nothing was written.
            StorageError: An earlier save failed in the background (raised once); this one was not
                started.
        """
        begin = time.perf_counter()
        self._check_usable()
        self.barrier()
        self._raise_failure()
        handle = SaveHandle(self._resolve(path), self.barrier)
        with self._calls:
            frozen = freeze(checkpoint, self._owned)
            notes = tree.flatten(metadata, lambda path, value: None)
            size_bytes = staging_bytes(frozen)
            if not self._queue.admit(size_bytes, handle):
                return handle
            with self._signals:
                capture = Capture(frozen, self._queue.staging(size_bytes), size_bytes)
                squeeze = self._compress if compress is None else compress
                score = float(metric) if metric is not None and math.isfinite(metric) else None
                self._active = capture
                self._pipeline.submit(Job(capture, handle, squeeze, notes, score))
                self._blocked.append(("call", time.perf_counter() - begin))
        return handle

    def barrier(self) -> None:
        """Finish the capture in flight, helping with the copy; then tensors may be changed.

        Runs by itself before each step of a hooked optimizer and each `load_state_dict`.
        """
        capture = self._active
        if capture is None or os.getpid() != self._pid:
            return
        begin = time.perf_counter()
        with self._signals:
            capture.finish()
            self._active = None
            self._blocked.append(("barrier", time.perf_counter() - begin))
            problem = self._note_torn(capture)
        if problem:
            warnings.warn(problem, PenstockWarning, stacklevel=2)

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when all saves are durable, False after `timeout` seconds.

        Raises:
            PenstockError: A save failed (each failure is raised once).
        """
        self._check_owner()
        self.barrier()
        done = poll(lambda: not len(self._queue), timeout)
        self._raise_failure()
        return done

    def shutdown(self, timeout: float | None = None) -> bool:
        """Finish all saves and release everything; safe to call twice.

        Returns:
            False if saves were still being written after `timeout` seconds (they go on, and the
            interpreter does not exit before they are done).

        Raises:
            PenstockError: A save failed and nobody has been told yet.
        """
        if os.getpid() != self._pid:
            return True
        self.barrier()
        self._closed = True
        done = poll(lambda: not len(self._queue), timeout)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if done:
            self._pipeline.close()
            self._signals.close()
            self._queue.clear_memory()
        else:
            _LOG.warning("%d checkpoint(s) still being written; they go on", len(self._queue))
        self._raise_failure()
        return done

    close = shutdown

    def latest(self) -> Path | None:
        """Return the newest durable checkpoint of the directory."""
        return folder.latest(self.directory)

    def get_stats(self) -> dict[str, Any]:
        """Return counts, sizes and times.

        `blocked` holds, in seconds, how long the training thread was held up: "call" in
        `save_async`, "barrier" before a step. What the copy costs the cores is not in it: compare
        iteration times with and without saving for that.
        """
        counts = self._queue.counts()
        blocked = PerformanceMonitor(history=_HISTORY)
        for name, blocked_s in list(self._blocked):
            blocked.record(name, blocked_s)
        raw, stored = counts["raw_bytes"], counts["stored_bytes"]
        seconds = counts["write_us"] / 1e6
        return {
            "total_saved": counts["saved"],
            "total_failed": counts["failed"],
            "total_skipped": counts["skipped"],
            "total_dropped": counts["dropped"],
            "total_discarded": counts["discarded"],
            "total_deltas": counts["deltas"],
            "queue_full": counts["queue_full"],
            "queue_size": len(self._queue),
            "staged_bytes": self._queue.staged_bytes,
            "raw_bytes": raw,
            "stored_bytes": stored,
            "compression_ratio": raw / stored if stored else 1.0,
            "write_mb_per_s": raw / 1e6 / seconds if seconds else 0.0,
            "eager_tensors": sorted(self._eager),
            "last_path": self._pipeline.last_path,
            "blocked": blocked.get_stats(),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_after(self.shutdown, error)

    def __reduce__(self) -> Any:
        raise UsageError("a saver belongs to its process; make a new one in the other process")

    def _note_torn(self, capture: Capture) -> str | None:
        """Remember torn tensors; return what to say of those that were not named before."""
        names = [name for name in capture.torn if name not in self._eager]
        if not names:
            return None
        self._eager.update(names)
        self._owned.exclude(capture.torn_addresses)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return (
            f"checkpoint discarded: {shown} changed outside the optimizer's step while being "
            "copied; copied at once from now on (or call saver.barrier() before changing it)"
        )

    def _raise_failure(self) -> None:
        failure = self._pipeline.take_failure()
        if failure is not None:
            raise failure

    def _resolve(self, path: str | os.PathLike[str]) -> str:
        # Strings and os.path: pathlib takes ten times as long, and the training waits.
        target = os.path.join(self._where, path)
        where, name = os.path.split(target)
        if name in ("", ".", "..", folder.LATEST):
            raise UsageError(f"path={str(path)!r} is no name for a checkpoint; give a file name")
        if where != self._where:
            try:
                os.makedirs(where, exist_ok=True)
            except OSError as error:
                raise storage_error("create", where, error) from error
        return target

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise SaverClosed(
                f"this saver belongs to process {self._pid}; make a new one in process "
                f"{os.getpid()}"
            )

    def _check_usable(self) -> None:
        self._check_owner()
        if self._closed:
            raise SaverClosed("this saver was shut down; make a new one")


def _flush(reference: weakref.ref[AsyncCheckpointSaver]) -> None:
    """Finish what is pending, on a signal; a second signal does not wait again."""
    saver = reference()
    if saver is None or saver._flushing or (not len(saver._queue) and saver._active is None):
        return
    saver._flushing = True
    try:
        sys.stderr.write(f"[penstock] finishing {len(saver._queue)} checkpoint(s) before the end\n")
        saver.barrier()
        poll(lambda: not len(saver._queue), _SIGNAL_LIMIT_S)
    finally:
        saver._flushing = False


def _check_natural(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise UsageError(f"{name}={value!r}: give a whole number, at least {least}")


def _checked_best(value: KeepBest | None) -> tuple[int, Literal["max", "min"]] | None:
    if value is None:
        return None
    count, direction = value if isinstance(value, tuple) else (value, "max")
    _check_natural("keep_best", count, 1)
    if direction not in ("max", "min"):
        raise UsageError(f"keep_best: {direction!r} is no direction; use 'max' or 'min'")
    return count, direction
