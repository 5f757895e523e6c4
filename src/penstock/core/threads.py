"""The two ways in which penstock uses threads: one that comes and goes, and work on many items.

An exception that a signal handler raises (KeyboardInterrupt) may come between any two instructions
of the main thread, and `threading.Condition` and `Event` are Python code: it may leave them locked,
or a waiter forgotten. So where the main thread takes part, a lock is entered itself (`with lock`,
which is safe), not by its condition, and every wait looks again after `POLL_S`.

No thread is a daemon: the interpreter waits for work that was begun. None can be started once the
interpreter is on its way out (Python refuses, or kills what it started): from then on the work is
done in the thread that asks for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from penstock.core.interrupt import start

T = TypeVar("T")
R = TypeVar("R")

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
POLL_S = 0.1
_PATIENCE_S, _PATIENCE_WAITS = 0.5, 25
INLINE_BYTES = 4 << 20  # below this, threads cost more than they bring


def poll(condition: Callable[[], bool], timeout: float | None) -> bool:
    """Wait for a condition without holding a lock, so that a signal handler may do the same."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = 0.0002
    while not condition():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.005)
    return True


def lower_priority(nice: int) -> None:
    """Let this thread yield to the others of the machine (Linux; elsewhere nothing happens)."""
    if nice and sys.platform == "linux":
        with suppress(OSError):  # not allowed here: run at the usual priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def _start(thread: threading.Thread) -> bool:
    """Start a thread; False where there can be none."""
    with suppress(RuntimeError):  # out of threads, or of memory for their stacks
        if threading.main_thread().is_alive():
            start(thread)
            return True
    return False


class BackgroundThread:
    """A thread that starts with the first `wake` and ends by itself when idle.

    So a program that forgets to close it still ends, and never before its work is done: at exit the
    interpreter waits for the thread, which sees that the main thread is over and does not linger.
    Where no thread can start, `wake` does the work itself.

    `work` does one piece of work and returns True, or returns False when there is none; it must not
    raise. The idle thread waits for more, `linger_s`, before it ends.
    """

    def __init__(
        self, name: str, work: Callable[[], bool], linger_s: float = 5.0, nice: int = 0
    ) -> None:
        self._name = name
        self._work = work
        self._linger_s = linger_s
        self._nice = nice
        self._lock = threading.RLock()
        self._wakes: SimpleQueue[None] = SimpleQueue()  # in C: the cheapest way to wake a thread
        self._thread: threading.Thread | None = None
        self._closing = False

    def wake(self) -> None:
        """Say that there is work."""
        self._wakes.put(None)
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return  # in a signal handler that interrupted `wake` or `close`, which sees to it
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._closing = False
                # Noted before it starts: an interrupt may come between the two.
                self._thread = threading.Thread(target=self._run, name=self._name)
                if not _start(self._thread):
                    self._thread = None
            inline = self._thread is None
        if inline:
            while self._work():
                pass

    def close(self) -> None:
        """Finish the work there is, then end the thread; safe to call twice."""
        nested = self._lock._is_owned()  # type: ignore[attr-defined]
        with self._lock:
            thread = self._thread
            self._closing = True
            self._wakes.put(None)
        if thread is None or thread is threading.current_thread() or not thread.ident:
            return
        if not nested:  # in a signal handler that interrupted `wake`: it ends when that has ended
            thread.join()

    def _run(self) -> None:
        lower_priority(self._nice)
        idle_since = time.monotonic()
        while True:
            self._hear()
            while self._work():
                idle_since = time.monotonic()
            main_over = not threading.main_thread().is_alive()
            ending = self._closing or main_over or time.monotonic() - idle_since > self._linger_s
            # The lock is not waited for: whoever has it may be waiting for this thread.
            if ending and self._lock.acquire(blocking=False):
                try:
                    if self._wakes.empty():  # nobody called since we looked for work
                        self._thread = None
                        return
                finally:
                    self._lock.release()
            self._hear(POLL_S)

    def _hear(self, wait_s: float = 0.0) -> None:
        """Take all calls there are; wait for one, if there is none."""
        with suppress(Empty):
            if wait_s:
                self._wakes.get(timeout=wait_s)
            while True:
                self._wakes.get_nowait()


def parallel_map(
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    name: str,
    helpers: int = CORES,
    size: Callable[[T], int] | None = None,
    limit_bytes: int = 0,
    nice: int = 0,
    patient: Callable[[], bool] = lambda: False,
) -> Generator[R, None, None]:
    """Yield `work(item)` for each item, in order, while helper threads work ahead.

    The caller's thread pulls the items, and works, too, whenever it would have to wait: so nothing
    is lost where no helper can start. What `work` raises is raised in place of the item's result.
    Close the iterator (`contextlib.closing`) when you may leave it before its end; the helpers end
    with it.

    `work` must release the GIL for threads to help. `items` is advanced only as far as there is
    room: `size` tells the bytes that an item accounts for, its result included, from when it is
    pulled until the caller asks for the next, and `limit_bytes` holds for all of them together (a
    larger one passes alone). Without `size` all items are in memory anyway. `patient` tells whether
    the caller may leave the work to the helpers for a while; `nice` is added to their priority.
    """
    todo: SimpleQueue[_Task[T, R] | None] = SimpleQueue()
    pending: deque[_Task[T, R]] = deque()
    threads: list[threading.Thread] = []
    held_bytes = 0
    ended = False

    def help_once(wait_s: float | None) -> bool:
        """Do one task; one call each, so that no result stays alive in a waiting thread."""
        task = todo.get(timeout=wait_s) if wait_s is not None else todo.get_nowait()
        if task is not None:
            task.run(work)
        return task is not None

    def helper() -> None:
        lower_priority(nice)
        while True:
            with suppress(Empty):
                if not help_once(POLL_S):
                    return
            if ended or (not threading.main_thread().is_alive() and todo.empty()):
                return  # an interrupt, or an iterator that nobody closed: no word may come

    def first() -> R:
        waits = _PATIENCE_WAITS
        while not pending[0].finished:
            # Helpers that could not start, or that ended with the main thread, are not waited for.
            if waits and patient() and any(thread.is_alive() for thread in threads):
                pending[0].wait(_PATIENCE_S / _PATIENCE_WAITS)
                waits -= 1
                continue
            try:
                help_once(None)
            except Empty:
                pending[0].wait(POLL_S)
        if pending[0].error is not None:
            raise pending[0].error
        result: R = pending[0].result  # type: ignore[assignment]
        pending[0].result = None
        return result

    try:
        for item in items:
            size_bytes = max(size(item), 1) if size is not None else 0
            while pending and size is not None and held_bytes + size_bytes > limit_bytes:
                yield first()
                held_bytes -= pending.popleft().size_bytes
            held_bytes += size_bytes
            pending.append(_Task(item, size_bytes))
            todo.put(pending[-1])
            del item
            if len(threads) < min(helpers, len(pending) - 1):
                # Noted before it starts: an interrupt may come between the two.
                label = f"penstock-{name}-{len(threads)}"
                threads.append(threading.Thread(target=helper, name=label))
                if not _start(threads[-1]):
                    helpers = len(threads)
        while pending:
            yield first()
            pending.popleft()
    finally:
        ended = True
        with suppress(Empty):
            while True:
                todo.get_nowait()
        for _ in threads:
            todo.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def parallel_list(
    work: Callable[[T], R], pieces: Sequence[T], *, name: str, nbytes: int
) -> list[R]:
    """Return `work(piece)` for each piece of something in memory; threads help where that pays.

    `work` must release the GIL for that. The pieces are of about equal size, `nbytes` in all;
    threads pay from a megabyte each.
    """
    if nbytes <= INLINE_BYTES or len(pieces) < 2:
        return [work(piece) for piece in pieces]
    return list(parallel_map(work, pieces, name=name, helpers=min(4, CORES) - 1))


class _Task(Generic[T, R]):
    """One item of `parallel_map` on its way."""

    __slots__ = ("_gate", "error", "finished", "item", "result", "size_bytes")

    def __init__(self, item: T, size_bytes: int) -> None:
        self.item: T | None = item
        self.size_bytes = size_bytes
        self.finished = False
        self._gate = threading.Lock()
        self._gate.acquire()
        self.result: R | None = None
        self.error: BaseException | None = None

    def run(self, work: Callable[[T], R]) -> None:
        try:
            self.result = work(self.item)  # type: ignore[arg-type]
        except StopIteration as error:
            # Raised in the caller as it is, this would look like the end of the data.
            self.error = RuntimeError("the work raised StopIteration")
            self.error.__cause__ = error
        except BaseException as error:
            self.error = error
            if threading.current_thread() is threading.main_thread() and not isinstance(
                error, Exception
            ):
                raise  # an interrupt of the caller, which may not wait for the item's turn
        finally:
            self.item = None
            self.finished = True
            self._gate.release()

    def wait(self, seconds: float) -> None:
        if self._gate.acquire(timeout=seconds):
            self._gate.release()
