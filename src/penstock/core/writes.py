"""Files written in the background: in order, bounded in number and bytes, failures told."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.core.files import storage_error
from penstock.core.interrupt import ENDING, SignalGuard
from penstock.core.threads import BackgroundThread, poll
from penstock.errors import PenstockError, SaverClosed, SnapshotDiscarded, StorageError, UsageError

Status = Literal["pending", "saved", "failed", "skipped", "dropped", "discarded"]
OnFull = Literal["wait", "skip", "drop_oldest"]
Write = Callable[[], dict[str, Any]]
"""Writes one file, durably, and returns its sizes and times.

A function under "report" among them is called at the very end. It may print or log, which may have
to wait for the main thread; nobody waits for this file any more then.
"""

_LOG = logging.getLogger("penstock")
_SIGNAL_LIMIT_S = 30.0
_SMALLEST_LIMIT_BYTES = 64 << 20


def close_after(close: Callable[[], object], error: BaseException | None) -> None:
    """Close at the end of a `with` block, never hiding what the user's code raised in it."""
    try:
        close()
    except Exception as failure:
        if error is None:
            raise
        if hasattr(error, "add_note"):  # from Python 3.11
            error.add_note(f"penstock: {failure}")
        else:
            _LOG.error("%s", failure)


@dataclass(eq=False, repr=False)
class SaveHandle:
    """One save.

    Attributes:
        status: "pending" until it is "saved" (durable), "failed", "skipped" or "dropped" (the queue
            was full), or "discarded" (its tensors were changed while they were copied lazily).
        stats: Sizes and times, when it is saved.
    """

    _path: Path | str
    _queue: WriteQueue
    _size_bytes: int
    _barrier: Callable[[], None] | None
    _write: Write | None = None
    _ticket: threading.Lock = field(default_factory=threading.Lock)
    _reported: bool = False
    status: Status = "pending"
    stats: dict[str, Any] = field(default_factory=dict)
    error: PenstockError | None = None

    @property
    def path(self) -> Path:
        """Where the file is, or will be."""
        return Path(self._path)

    def done(self) -> bool:
        """Tell whether the fate of this save is known."""
        return self.status != "pending"

    def wait(self, timeout: float | None = None) -> Path:
        """Return the path once the file is durable.

        Raises:
            PenstockError: It was not saved; why is in the message.
        """
        if self._barrier is not None:
            self._barrier()
        if not self._queue.poll(self.done, timeout):
            raise UsageError(f"{self.path} is not saved after {timeout} s; wait longer")
        if self.error is not None:
            self._reported = True
            raise self.error
        if self.status != "saved":
            raise UsageError(f"{self.path} was {self.status}: see on_full and get_stats()")
        return self.path

    def __repr__(self) -> str:
        return f"SaveHandle({str(self.path)!r}, {self.status})"

    def _claim(self) -> bool:
        """Tell whether the caller, and nobody else, may write or drop this file."""
        return self._ticket.acquire(blocking=False)


class WriteQueue:
    """Writes files one after another in a thread that comes and goes.

    A program that forgets `close` still ends, and not before everything is written.

    Args:
        max_bytes: What the pending files may hold in memory; a larger one passes alone. None for as
            much as the file at hand (at least 64 MB).
        max_files: How many may be pending, the one being written included.
        on_full: What `put` does when there is no room: as `AsyncCheckpointSaver`'s.
        what: What the files are, for messages.
        handle_signals: Finish pending files before SIGINT and SIGTERM take their course.

    Attributes:
        signals: Postpones signals while it is entered.
        counts: How many files were saved, failed, and so on; others may add their own sums.
    """

    def __init__(
        self,
        name: str,
        max_bytes: int | None,
        max_files: int | None = None,
        on_full: OnFull = "wait",
        what: str = "file(s)",
        *,
        handle_signals: bool = True,
        nice: int = 0,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._on_full = on_full
        self._what = what
        self._pid = os.getpid()
        # One `put` at a time; a user's signal handler may save while `put` waits for room.
        self._puts = threading.RLock()
        # No lock guards these, only their own atomic calls: a signal handler may wait for the
        # writer, which must not wait for a lock of the interrupted code.
        self._pending: deque[SaveHandle] = deque()
        self._failures: deque[SaveHandle] = deque()
        self.counts: Counter[str] = Counter()  # each is counted up by one thread
        self._closed = False
        self._flushing = False
        self._waiting: deque[None] = deque()  # one for each who waits
        this = weakref.ref(self)
        self.signals = SignalGuard(lambda: _flush(this))
        if handle_signals:
            self.signals.install(ENDING)
        self._thread = BackgroundThread(name, self._write_one, nice=nice)

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def held_bytes(self) -> int:
        """What the pending files hold in memory."""
        return sum(save._size_bytes for save in list(self._pending))

    def put(
        self,
        path: Path | str,
        size_bytes: int,
        prepare: Callable[[], Write],
        barrier: Callable[[], None] | None = None,
    ) -> SaveHandle:
        """Wait for room, prepare a file (the copy of its data), and return before it is written.

        `prepare` is called here, once there is room, and returns what the thread has to do.
        `barrier` is what a wait for this file must call first.

        Raises:
            SaverClosed: The queue was closed, or belongs to another process.
            PenstockError: An earlier file failed (raised once); this one was not started.
        """
        self.check_usable()
        self.raise_failure()
        save = SaveHandle(path, self, size_bytes, barrier)
        with self._puts:
            if not self._make_room(save):
                return save
            with self.signals:
                save._write = prepare()
                self._pending.append(save)
                if self._closed and save._claim():  # by a signal handler, or another thread
                    self._pending.remove(save)
                    self.check_usable()
                self._thread.wake()
        return save

    def pending(self, path: Path) -> bool:
        """Tell whether a file waits to be written."""
        return any(save.path == path for save in list(self._pending))

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when everything is written, False after `timeout` seconds.

        Raises:
            PenstockError: A file failed (each failure is raised once).
        """
        self.check_owner()
        done = self._drain(timeout)
        self.raise_failure()
        return done

    def close(self, timeout: float | None = None) -> bool:
        """Write what is pending and end the thread; safe to call twice. Else as `wait`."""
        if not self.mine:
            return True
        self._closed = True
        done = self._drain(timeout)
        if done:
            self._thread.close()
            self.signals.close()
        else:
            _LOG.warning("%d %s still being written; they go on", len(self), self._what)
        self.raise_failure()
        return done

    def raise_failure(self) -> None:
        """Raise a failure that nobody has been told of."""
        while self._failures:
            save = self._failures.popleft()
            if not save._reported and save.error is not None:
                save._reported = True
                raise save.error

    def poll(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for the writer; polled, so that a signal handler may wait, too."""
        self._waiting.append(None)
        try:
            return poll(condition, timeout)
        finally:
            self._waiting.pop()

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for a file, or for room."""
        return bool(self._waiting) or self._closed

    @property
    def mine(self) -> bool:
        """Whether this is the process that made the queue."""
        return os.getpid() == self._pid

    def check_owner(self) -> None:
        """Refuse another process than the one that made the queue."""
        if not self.mine:
            raise SaverClosed(
                f"this writer belongs to process {self._pid}; make a new one in process "
                f"{os.getpid()}"
            )

    def check_usable(self) -> None:
        """Refuse a closed queue, another process, and an interpreter that is nearly gone."""
        self.check_owner()
        if self._closed:
            raise SaverClosed("this writer was closed; make a new one")
        if sys.is_finalizing():  # after all `atexit` functions: modules are being taken apart
            raise SaverClosed("it is too late to write a file: the interpreter is at its end")

    def _make_room(self, save: SaveHandle) -> bool:
        """Make room, by the stated policy; False when this file is skipped."""
        if not self._full(save):
            return True
        self.counts["queue_full"] += 1
        if self._on_full == "skip":
            self._settle(save, "skipped")
            return False
        while self._on_full == "drop_oldest" and self._full(save) and (oldest := self._claimed()):
            self._pending.remove(oldest)
            self._settle(oldest, "dropped")
        return self.poll(lambda: not self._full(save), None)

    def _full(self, save: SaveHandle) -> bool:
        limit = self._max_bytes
        if limit is None:
            limit = max(_SMALLEST_LIMIT_BYTES, save._size_bytes)
        over = bool(self._pending) and self.held_bytes + save._size_bytes > limit
        return over or (self._max_files is not None and len(self) >= self._max_files)

    def _claimed(self) -> SaveHandle | None:
        """Claim the oldest file that nobody has claimed."""
        return next((save for save in list(self._pending) if save._claim()), None)

    def _drain(self, timeout: float | None) -> bool:
        """Wait until nothing is pending; a background error does not end the wait."""
        for save in list(self._pending):
            if save._barrier is not None:
                save._barrier()
        if self._pending:
            self._thread.wake()  # an interrupt may have come between `append` and `wake`
        return self.poll(lambda: not self._pending, timeout)

    def _settle(self, save: SaveHandle, status: Status, error: PenstockError | None = None) -> None:
        save._write = None  # lets go of the data before anyone is told
        self.counts[status] += 1
        save.error = error
        save.status = status  # last, for it is what others look at

    def _write_one(self) -> bool:
        save = self._claimed()
        if save is None:
            return False
        error: PenstockError | None = None
        try:
            assert save._write is not None
            save.stats = save._write()
        except PenstockError as failure:
            error = failure
        except OSError as failure:
            error = storage_error("write", save.path, failure)
        except Exception as failure:  # a defect of ours must reach the caller, too
            error = StorageError(f"cannot save {save.path}: {failure!r}")
            error.__cause__ = failure
        report = save.stats.pop("report", None)
        failed = error is not None and not isinstance(error, SnapshotDiscarded)
        self._settle(save, "failed" if failed else "discarded" if error else "saved", error)
        if failed:
            self._failures.append(save)  # last: whoever finds it must find the error in it
        self._pending.remove(save)
        # Last: the main thread may be in a signal handler that waits for the queue, and may hold
        # the lock of the log or of stderr. What goes wrong in them is none of our business.
        with suppress(Exception):
            if error is not None:
                _LOG.log(logging.ERROR if failed else logging.WARNING, "%s", error)
            if report is not None:
                report()
        return True


def _flush(reference: weakref.ref[WriteQueue]) -> None:
    """Finish what is pending, on a signal; a second signal does not wait again."""
    queue = reference()
    if queue is None or queue._flushing or not len(queue):
        return
    queue._flushing = True
    try:
        _say(f"finishing {len(queue)} {queue._what} before the end")
        if not queue._drain(_SIGNAL_LIMIT_S):
            _say(f"{len(queue)} {queue._what} not written after {_SIGNAL_LIMIT_S:.0f} s: given up")
        for save in list(queue._failures):
            if not save._reported:
                _say(str(save.error))
    finally:
        queue._flushing = False


def _say(text: str) -> None:
    """Write a line to stderr itself: the signal may have come in the middle of a `print` to it."""
    with suppress(OSError):
        os.write(2, f"[penstock] {text}\n".encode(errors="replace"))
