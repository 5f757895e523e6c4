"""AsyncCheckpointSaver: what the training thread sees of saving.

    training thread                              writer thread
    save_async: walk the state, copy every
    tensor into staging memory (snapshot.py) ──► encode, fsync, rename, move `latest`, prune
    goes on training                             (publish.py, folder.py)

With `lazy=True` the tensors of the given optimizers are copied later, until their next step; then
nothing is published before that step's barrier has verified the copy (lazy.py).
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.checkpoints import folder
from penstock.checkpoints.folder import Direction, RunFolder
from penstock.checkpoints.lazy import LazyCapture, OwnedTensors, install_hooks
from penstock.checkpoints.publish import NICE, Job, Publisher
from penstock.checkpoints.snapshot import Snapshot, address_of
from penstock.core import tree
from penstock.core.codecs import Planes
from penstock.core.files import make_folder
from penstock.core.memory import format_bytes, whole_number
from penstock.core.reuse import ReusedMemory
from penstock.core.writes import OnFull, SaveHandle, Write, WriteQueue, close_after
from penstock.errors import PenstockWarning, UsageError
from penstock.tensors import empty_array
from penstock.ui.monitor import PerformanceMonitor

KeepBest = int | tuple[int, Direction]

_HISTORY = 2000
_LOG = logging.getLogger("penstock")


class AsyncCheckpointSaver:
    """Save whole training states without stopping the training.

    When `save_async` returns, everything has been copied: whatever runs afterwards, the file holds
    the state of the call. Only one saver at a time writes a folder. Where another thread trains
    meanwhile, hold a lock around its step and around `save_async`: a write that is under way cannot
    be noticed.

    With `lazy=True` the call takes well under a millisecond whatever the size: tensors of the given
    `optimizers` are copied in the background until the next step of one of them. That is right only
    if nothing but these steps (and `load_state_dict`) writes these tensors between a save and the
    next step. Code that swaps weights (EMA), clips or resets them, or writes through `.data`, numpy
    or DLPack aliases in between must keep the default, or call `barrier` first. Guards notice most
    violations, and cost that checkpoint; not all of them can be noticed.

    Args:
        directory: Relative paths start here; created if missing.
        max_queue_size: Saves that may be pending.
        optimizers: With `lazy`: all that train the saved tensors.
        modules: With `lazy`: whose `load_state_dict` waits for a copy to finish.
        compress: Compress by default (lossless byte planes and zstd).
        compression_level: 1 is fastest, 2 balanced, 3 and above smallest.
        delta_every: Every so many saves a full checkpoint, differences to it between; 0 or 1 means
            full ones only. A difference needs its full checkpoint beside it to be loaded.
        keep_last: Keep so many of the newest of this run; None keeps all.
        keep_best: Keep so many of the best by `metric`, besides; (k, "min") if less is better.
        on_full: What `save_async` does when the queue is full: "wait", "skip" the new save, or
            "drop_oldest" pending one (if none can be dropped, it waits). All are counted.
        verbose: Say each save on stderr.
        lazy: Copy the optimizers' tensors in the background; see above.
        max_staging_bytes: Memory for the copies of pending saves; by default one copy of the state
            (at least 64 MB). A second save waits for the first when both do not fit.
        handle_signals: Finish pending saves on SIGINT and SIGTERM, then let them take their course.

    Example:
        with AsyncCheckpointSaver("runs/x") as saver:
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
        lazy: bool = False,
        max_staging_bytes: int | None = None,
        handle_signals: bool = True,
    ) -> None:
        whole_number("max_queue_size", max_queue_size)
        whole_number("delta_every", delta_every, 0)
        if keep_last is not None:
            whole_number("keep_last", keep_last)
        if on_full not in ("wait", "skip", "drop_oldest"):
            raise UsageError(f"on_full={on_full!r}: use 'wait', 'skip' or 'drop_oldest'")
        owners = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else [*optimizers]
        nets = [modules] if isinstance(modules, torch.nn.Module) else [*modules]
        if lazy and not owners:
            raise UsageError("lazy=True needs optimizers=[…]: only their tensors are copied later")
        Planes(level=compression_level)  # refuses a wrong level here, not in the background
        self.directory = make_folder(directory)
        self._where = str(self.directory)
        self._compress = compress
        self._verbose = verbose
        self._rules = keep_last, _checked_best(keep_best)
        self._folders: dict[str, RunFolder] = {}
        self._opening = threading.RLock()
        self._memory = ReusedMemory(max_staging_bytes or 0, allocate=_staging)
        self._max_staging_bytes = max_staging_bytes
        self._queue = queue = WriteQueue(
            "penstock-writer",
            max_staging_bytes,
            max_queue_size,
            on_full,
            "checkpoint(s)",
            handle_signals=handle_signals,
            nice=NICE,
        )
        self._publisher = Publisher(compression_level, delta_every, lambda: not queue.awaited)
        self._blocked: deque[tuple[str, float]] = deque(maxlen=_HISTORY)
        self._last_path: str | None = None
        self._active: LazyCapture | None = None
        self._eager: set[str] = set()  # tensors found changed past their optimizer
        self._owned = OwnedTensors(owners) if lazy else None
        self._hooks = install_hooks(self.barrier, owners, nets) if lazy else []

    def save_async(
        self,
        checkpoint: Any,
        path: str | os.PathLike[str],
        compress: bool | None = None,
        metadata: dict[str, Any] | None = None,
        metric: float | None = None,
    ) -> SaveHandle:
        """Copy a state and return; it is written in the background.

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
            LockHeld: Another saver writes that folder; nothing was written.
            SnapshotDiscarded: Another thread wrote the tensors while they were copied.
            StorageError: An earlier save failed in the background (raised once); this one was not
                started.
        """
        begin = time.perf_counter()
        self._queue.check_usable()
        self.barrier()
        owned = self._owned.by_address() if self._owned else None
        snapshot = Snapshot(checkpoint, owned)
        notes = tree.flatten(metadata, lambda path, value: None)
        target, file = self._resolve(path)
        score = float(metric) if metric is not None and math.isfinite(metric) else None

        def prepare() -> Write:
            if self._max_staging_bytes is None:
                self._memory.limit_bytes = max(self._memory.limit_bytes, snapshot.size_bytes)
            memory = self._memory.lease(max(snapshot.size_bytes, 1))
            capture = LazyCapture(snapshot, address_of(memory)) if snapshot.lazy else None
            snapshot.copy(memory)
            self._active = capture
            squeeze = self._compress if compress is None else compress
            job = Job(snapshot, capture, target, os.path.basename(file), squeeze, notes, score)
            self._blocked.append(("call", time.perf_counter() - begin))
            return lambda: self._publish(job)

        barrier = self.barrier if snapshot.lazy else None
        return self._queue.put(file, snapshot.size_bytes, prepare, barrier)

    def barrier(self) -> None:
        """Finish a lazy copy in flight, helping; then tensors may be changed.

        Runs by itself before each step of a hooked optimizer and each `load_state_dict`.
        """
        capture = self._active
        if capture is None or not self._queue.mine:
            return
        begin = time.perf_counter()
        with self._queue.signals:  # the writer, too, takes the lock of a verdict
            capture.barrier()
            self._active = None
            self._blocked.append(("barrier", time.perf_counter() - begin))
            problem = self._note_torn(capture) if capture.torn else None
        if problem:
            warnings.warn(f"checkpoint discarded: {problem}", PenstockWarning, stacklevel=2)

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when all saves are durable, False after `timeout` seconds.

        Raises:
            PenstockError: A save failed (each failure is raised once).
        """
        return self._queue.wait(timeout)

    def shutdown(self, timeout: float | None = None) -> bool:
        """Finish all saves and release everything; safe to call twice.

        Returns:
            False if saves were still being written after `timeout` seconds (they go on, and the
            interpreter does not exit before they are done).

        Raises:
            PenstockError: A save failed and nobody has been told yet.
        """
        try:
            return self._queue.close(timeout)
        finally:
            if self._queue.mine and not len(self._queue):
                for hook in self._hooks:
                    hook.remove()
                self._hooks = []
                self._memory.clear()
                for target in self._folders.values():
                    target.close()

    close = shutdown

    def latest(self) -> Path | None:
        """Return the newest durable checkpoint of the directory."""
        return folder.latest(self.directory)

    def get_stats(self) -> dict[str, Any]:
        """Return counts, sizes and times.

        `blocked` holds, in seconds, how long the training thread was held up: "call" in
        `save_async`, "barrier" before a step. What saving costs the cores is not in it: compare
        iteration times with and without saving for that.
        """
        counts = self._queue.counts
        blocked = PerformanceMonitor(history=_HISTORY)
        for name, blocked_s in list(self._blocked):
            blocked.record(name, blocked_s)
        raw, stored, seconds = counts["raw_bytes"], counts["stored_bytes"], counts["write_s"]
        fates = ("saved", "failed", "skipped", "dropped", "discarded")
        return {
            **{f"total_{fate}": counts[fate] for fate in fates},
            "total_deltas": counts["delta"],
            "queue_full": counts["queue_full"],
            "queue_size": len(self._queue),
            "staged_bytes": self._queue.held_bytes,
            "raw_bytes": raw,
            "stored_bytes": stored,
            "compression_ratio": raw / stored if stored else 1.0,
            "write_mb_per_s": raw / 1e6 / seconds if seconds else 0.0,
            "eager_tensors": sorted(self._eager),
            "last_path": self._last_path,
            "blocked": blocked.get_stats(),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after(self.shutdown, error)

    def __reduce__(self) -> Any:
        raise UsageError("a saver belongs to its process; make a new one in the other process")

    def _publish(self, job: Job) -> dict[str, Any]:
        """Write a job, in the background; return its sizes and times."""
        try:
            stats = self._publisher.publish(job)
        finally:
            if job.capture is not None and job.capture.torn:
                self._note_torn(job.capture)
        self._last_path = str(job.path)
        complaint = stats.pop("complaint")
        self._queue.counts.update(stats)
        stored, raw = format_bytes(stats["stored_bytes"]), format_bytes(stats["raw_bytes"])
        what = f"{job.path.name}: {stored} of {raw}{' (delta)' if stats['delta'] else ''}"

        def report() -> None:
            if complaint:
                _LOG.warning(complaint)
            if self._verbose:
                sys.stderr.write(f"[penstock] saved {what} in {stats['write_s']:.2f} s\n")

        return stats | {"report": report}

    def _note_torn(self, capture: LazyCapture) -> str | None:
        """Remember torn tensors; return what to say of those that were not named before."""
        if self._owned is not None:
            self._owned.exclude(tensor.owner for tensor in capture.torn)
        new = {capture.snapshot.name_of(tensor) for tensor in capture.torn} - self._eager
        self._eager |= new
        return capture.problem() if new else None

    def _resolve(self, path: str | os.PathLike[str]) -> tuple[RunFolder, str]:
        """Return the folder, locked for this saver, and the path of a file."""
        # Strings and os.path: pathlib takes ten times as long, and the training waits.
        file = os.path.join(self._where, path)
        where, name = os.path.split(file)
        if name.startswith(".") or name in ("", folder.LATEST):
            raise UsageError(
                f"path={str(path)!r} is no name for a checkpoint; give a file name that does not "
                'begin with "."'
            )
        target = self._folders.get(where)
        if target is None:
            with self._opening:
                made = self.directory if where == self._where else make_folder(where)
                place = os.path.realpath(made)  # one folder may go by several names
                target = self._folders.get(place) or RunFolder(Path(place), *self._rules)
                self._folders[where] = self._folders[place] = target
        return target, file


def _staging(nbytes: int) -> NDArray[np.uint8]:
    """Allocate staging memory: page-locked where a GPU copies into it."""
    if torch.cuda.is_available():
        pinned: NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
    return empty_array("uint8", (nbytes,))


def _checked_best(value: KeepBest | None) -> tuple[int, Direction] | None:
    if value is None:
        return None
    count, direction = value if isinstance(value, tuple) else (value, "max")
    whole_number("keep_best", count)
    if direction not in ("max", "min"):
        raise UsageError(f"keep_best: {direction!r} is no direction; use 'max' or 'min'")
    return count, direction
