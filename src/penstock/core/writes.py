"""Files written in the background: bounded in bytes, in order, and told when they fail."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.background import Background
from penstock.core.files import storage_error
from penstock.core.handle import SaveHandle, poll
from penstock.core.signals import SignalGuard
from penstock.errors import PenstockError, SaverClosed, StorageError

_LOG = logging.getLogger("penstock")
_SIGNAL_LIMIT_S = 30.0

Write = Callable[[], dict[str, Any]]
"""Writes one file, durably, and returns its sizes and times."""


@dataclass
class _Job:
    handle: SaveHandle
    write: Write | None
    size_bytes: int


class WriteQueue:
    """Writes files one after another in a thread that comes and goes.

    A program that forgets `close` still ends, and not before everything is written. On SIGINT and
    SIGTERM the pending files are finished first; then the signal takes its course.

    Args:
        name: Of the thread.
        max_bytes: What the waiting files may hold in memory; a larger one passes alone.
        what: What the files are, for messages.
        handle_signals: Finish pending files on SIGINT and SIGTERM.

    Example:
        queue = WriteQueue("writer", 64 << 20)
        handle = queue.put(path, size_bytes, prepare)
    """

    def __init__(
        self, name: str, max_bytes: int, what: str = "file(s)", *, handle_signals: bool = True
    ) -> None:
        self._max_bytes = max_bytes
        self._what = what
        self._pid = os.getpid()
        self._calls = threading.Lock()  # one `put` at a time
        self._lock = threading.Lock()  # guards the jobs and what they hold
        self._jobs: deque[_Job] = deque()
        self._failures: deque[SaveHandle] = deque()
        self._held_bytes = 0
        self._closed = False
        self._flushing = False
        this = weakref.ref(self)
        self._signals = SignalGuard(lambda: _flush(this), install=handle_signals)
        self._background = Background(name, self._write_one)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def held_bytes(self) -> int:
        """What the pending files hold in memory."""
        return self._held_bytes

    def put(self, path: Path, size_bytes: int, prepare: Callable[[], Write]) -> SaveHandle:
        """Wait for room, prepare a file (the copy of its data), and return before it is written.

        Args:
            path: Where it will be.
            size_bytes: What it holds in memory until it is written.
            prepare: Called here, once there is room; returns what the thread has to do.

        Raises:
            SaverClosed: The queue was closed, or belongs to another process.
            PenstockError: An earlier file failed (raised once); this one was not started.
        """
        self._check_usable()
        self.raise_failure()
        with self._calls:
            # Polled, not a condition: a signal handler may run here, and must be able to wait, too.
            poll(lambda: self._fits(size_bytes), None)
            job = _Job(SaveHandle(str(path), _nothing), prepare(), size_bytes)
            with self._signals:
                with self._lock:
                    self._jobs.append(job)
                    self._held_bytes += size_bytes
                self._background.poke()
        return job.handle

    def pending(self, path: Path) -> bool:
        """Tell whether a file waits to be written."""
        with self._signals, self._lock:
            return any(job.handle.path == path for job in self._jobs)

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when everything is written, False after `timeout` seconds.

        Raises:
            PenstockError: A file failed (each failure is raised once).
        """
        done = poll(lambda: not self._jobs, timeout)
        self.raise_failure()
        return done

    def close(self, timeout: float | None = None) -> bool:
        """Write what is pending and end the thread; safe to call twice.

        Returns:
            False if files were still being written after `timeout` seconds; they go on.

        Raises:
            PenstockError: A file failed and nobody has been told yet.
        """
        if os.getpid() != self._pid:
            return True
        self._closed = True
        done = poll(lambda: not self._jobs, timeout)
        if done:
            self._background.close()
            self._signals.close()
        else:
            _LOG.warning("%d %s still being written; they go on", len(self._jobs), self._what)
        self.raise_failure()
        return done

    def raise_failure(self) -> None:
        """Raise a failure that nobody has been told of."""
        while self._failures:
            handle = self._failures.popleft()
            if not handle.reported and handle.error is not None:
                handle.reported = True
                raise handle.error

    def _fits(self, size_bytes: int) -> bool:
        return not self._jobs or self._held_bytes + size_bytes <= self._max_bytes

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise SaverClosed(
                f"this writer belongs to process {self._pid}; make a new one in process "
                f"{os.getpid()}"
            )
        if self._closed:
            raise SaverClosed("this writer was closed; make a new one")

    def _write_one(self) -> bool:
        self._signals.nudge()
        with self._lock:
            job = self._jobs[0] if self._jobs else None
        if job is None:
            return False
        error: PenstockError | None = None
        try:
            assert job.write is not None
            job.handle.stats = job.write()
        except PenstockError as failure:
            error = failure
        except OSError as failure:
            error = storage_error("write", job.handle.path, failure)
        except Exception as failure:  # a defect of ours must reach the caller, too
            _LOG.exception("saving %s failed", job.handle.path)
            error = StorageError(f"cannot save {job.handle.path}: {failure!r}")
            error.__cause__ = failure
        job.write = None  # lets go of the data before anyone is told
        if error is not None:
            _LOG.error("%s", error)
        job.handle.finish("saved" if error is None else "failed", error)
        if error is not None:
            self._failures.append(job.handle)
        with self._lock:
            self._jobs.remove(job)
            self._held_bytes -= job.size_bytes
        return True


def _nothing() -> None:
    """There is no capture to finish before a wait: the data was copied at the call."""


def _flush(reference: weakref.ref[WriteQueue]) -> None:
    """Finish what is pending, on a signal; a second signal does not wait again."""
    queue = reference()
    if queue is None or queue._flushing or not len(queue):
        return
    queue._flushing = True
    try:
        sys.stderr.write(f"[penstock] finishing {len(queue)} {queue._what} before the end\n")
        poll(lambda: not len(queue), _SIGNAL_LIMIT_S)
    finally:
        queue._flushing = False
