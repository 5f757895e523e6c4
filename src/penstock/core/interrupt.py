"""SIGINT and SIGTERM: work that finishes before them, that they wait for, or that they stop.

An exception that a signal handler raises may come between any two instructions of the main thread:
no code can be made safe against that. So pending work is finished first, and then exactly that
happens which would have happened without us: the user's handler, KeyboardInterrupt, or the default
action of the signal (`SignalGuard`); short work is not disturbed (`signals_postponed`); and long
work runs in a thread of its own, where no handler ever runs, and looks at a flag (`check_stop`).
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

R = TypeVar("R")
ENDING = (signal.SIGINT, signal.SIGTERM)
_RAISING = (*ENDING, *filter(None, [getattr(signal, "SIGALRM", None)]))  # timeouts raise, too
_POLL_S = 0.05  # a signal that another thread takes does not wake the main thread
_asked: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar(
    "asked_to_stop", default=None
)


@contextmanager
def signals_postponed() -> Iterator[None]:
    """Keep a block whole that an exception of a signal handler must not leave half done.

    Signals that come meanwhile are handled right after it.
    """
    guard = SignalGuard(None)
    try:
        with guard:
            guard.install(_RAISING)
            yield
    finally:
        guard.close()


def start(thread: threading.Thread) -> None:
    """Start a thread; an interrupt within `Thread.start` may leave a lock taken that it needs."""
    with signals_postponed():
        thread.start()


class SignalGuard:
    """Run `flush` when a signal comes, then chain to whatever was installed before.

    Python runs handlers between any two instructions of the main thread. Code of the main thread
    that holds a lock which `flush` needs must run inside `with guard:`, which makes a
    signal wait for the end of the block; `waiting` has those that came, with their frames.

    `flush` is called on the main thread and must not raise; a guard without only postpones.
    """

    def __init__(self, flush: Callable[[], None] | None) -> None:
        self._flush = flush
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._previous: dict[int, Any] = {}
        self._depth = 0
        self.waiting: list[tuple[int, FrameType | None]] = []
        self._closed = False

    def install(self, numbers: Iterable[int]) -> None:
        """Handle these signals (from the main thread; elsewhere nobody can)."""
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                current = signal.getsignal(number)
                # Ignored signals stay ignored; handlers that Python cannot see stay untouched.
                if current is not None and current is not signal.SIG_IGN:
                    self._previous[number] = current
                    signal.signal(number, self._handle)

    def __enter__(self) -> None:
        """Postpone signals until the end of the block (on the main thread; elsewhere a no-op)."""
        if threading.get_ident() == self._main:
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        while self._depth == 0 and self.waiting:
            self._handle(*self.waiting.pop(0))

    def close(self) -> None:
        """Put the previous handlers back, where ours are still the installed ones."""
        self._closed = True
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self._pid:
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        # A handler that somebody chained to us is still called: it only passes signals on.

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:  # a forked child has nobody to leave the block, nor to finish
            if self._depth:
                self.waiting.append((number, frame))
                return
            if self._flush is not None and not self._closed:
                self._flush()
        previous = self._previous[number]
        # While the interpreter waits for threads at its exit, an exception would be a traceback.
        leaving = not threading.main_thread().is_alive()
        if callable(previous) and not (leaving and previous is signal.default_int_handler):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def check_stop() -> None:
    """Raise KeyboardInterrupt if a signal has asked this work to stop; call it at boundaries."""
    asked = _asked.get()
    if asked is not None and asked.is_set():
        raise KeyboardInterrupt


@contextmanager
def not_stopped() -> Iterator[None]:
    """Do what is to be done although a signal has asked this work to stop."""
    token = _asked.set(None)
    try:
        yield
    finally:
        _asked.reset(token)


def interruptible(work: Callable[[], R]) -> R:
    """Do long work that calls `check_stop`; a signal ends it there, within a moment.

    The handler that was there before is called when the work has stopped, so that it ends as it
    would have without this: by KeyboardInterrupt, usually. A second signal ends the process at
    once. On another than the main thread the work is simply done.
    """
    if threading.current_thread() is not threading.main_thread() or _asked.get() is not None:
        return work()
    asked = threading.Event()
    result: list[R] = []
    failure: list[BaseException] = []

    def run() -> None:
        _asked.set(asked)
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(run,), name="penstock-work", daemon=False
    )
    guard = SignalGuard(None)
    try:
        with guard:
            guard.install(ENDING)
            start(thread)
            while thread.is_alive():
                thread.join(_POLL_S)
                if guard.waiting:
                    asked.set()
                if len(guard.waiting) > 1:  # a kill loses nothing; who is in a hurry may have it
                    signal.signal(guard.waiting[1][0], signal.SIG_DFL)
                    os.kill(os.getpid(), guard.waiting[1][0])
            if not failure or not isinstance(failure[0], KeyboardInterrupt):
                guard.waiting.clear()  # the work was faster than the signal
    except KeyboardInterrupt as stop:  # by the handler that was there before
        stop.args = stop.args or (failure[0].args if failure else ())
        raise
    finally:
        guard.close()
    if not failure:
        return result[0]
    raise failure[0]
