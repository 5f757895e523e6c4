"""Finish pending work before SIGINT or SIGTERM takes its course; postpone them for a moment.

The handler of a `SignalGuard` calls back, then does exactly what would have happened without it:
the user's handler, KeyboardInterrupt, or the default action of the signal.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

_ENDING = (signal.SIGINT, signal.SIGTERM)
_RAISING = (*_ENDING, *filter(None, [getattr(signal, "SIGALRM", None)]))  # timeouts raise, too


@contextmanager
def signals_postponed() -> Iterator[None]:
    """Keep a block whole that an exception of a signal handler must not leave half done.

    Signals that come meanwhile are handled right after it.
    """
    guard = SignalGuard(None, install=False)
    try:
        with guard:
            guard.install(_RAISING)
            yield
    finally:
        guard.close()


class SignalGuard:
    """Run `flush` when a signal comes, then chain to whatever was installed before.

    Python runs handlers between any two instructions of the main thread. Code of the main thread
    that holds a lock which `flush` needs must run inside `with guard:`, which makes a
    signal wait for the end of the block.

    Args:
        flush: Finishes the pending work; called on the main thread, must not raise. None for a
            guard that only postpones.
        install: False for a guard that handles nothing yet.
    """

    def __init__(self, flush: Callable[[], None] | None, *, install: bool = True) -> None:
        self._flush = flush
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._previous: dict[int, Any] = {}
        self._depth = 0
        self._waiting: list[tuple[int, FrameType | None]] = []
        self._closed = False
        self._handled = self._handled_before = 0
        self._arrivals: _Arrivals | None = None
        if install and threading.current_thread() is threading.main_thread():
            self.install(_ENDING)
            self._arrivals = _Arrivals()

    def install(self, numbers: Iterable[int]) -> None:
        """Handle these signals (from the main thread; elsewhere nobody can)."""
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                current = signal.getsignal(number)
                # Ignored signals stay ignored; handlers that Python cannot see stay untouched.
                if current is not None and current is not signal.SIG_IGN:
                    self._previous[number] = current
                    signal.signal(number, self._handle)

    def nudge(self) -> None:
        """Interrupt the main thread if a signal came that it has not handled yet.

        For the background threads to call while they are at work. A signal that comes just before
        the main thread enters a blocking call does not interrupt it, and Python would run the
        handler only afterwards; threads that compete for the interpreter make that likely.
        """
        if self._arrivals is None or self._closed or os.getpid() != self._pid:
            return
        handled, before = self._handled, self._handled_before
        self._handled_before = handled
        for number in self._arrivals.take():
            if number in self._previous and handled == before and self._main is not None:
                signal.pthread_kill(self._main, number)

    def __enter__(self) -> None:
        """Postpone signals until the end of the block (on the main thread; elsewhere a no-op)."""
        if threading.get_ident() == self._main:
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != self._main:
            return
        self._depth -= 1
        while self._depth == 0 and self._waiting:
            self._handle(*self._waiting.pop(0))

    def close(self) -> None:
        """Put the previous handlers back, where ours are still the installed ones."""
        self._closed = True
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self._pid:
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None
        # A handler that somebody chained to us is still called: it only passes signals on.

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled += 1
        if self._depth and os.getpid() == self._pid:  # a forked child has nobody to leave the block
            self._waiting.append((number, frame))
            return
        if self._flush is not None and not self._closed and os.getpid() == self._pid:
            self._flush()
        previous = self._previous[number]
        # While the interpreter waits for threads at its exit, an exception would be a traceback.
        leaving = not threading.main_thread().is_alive()
        if callable(previous) and not (leaving and previous is signal.default_int_handler):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class _Arrivals:
    """The numbers of the signals that came, from Python's wake-up descriptor.

    There is one such descriptor in a process. If somebody (asyncio) uses it already, it is left
    alone, and nothing ever arrives here.
    """

    open: ClassVar[weakref.WeakSet[_Arrivals]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        other = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._ours = other == -1
        if not self._ours:
            signal.set_wakeup_fd(other)
        self.open.add(self)

    def take(self) -> set[int]:
        try:
            return set(os.read(self._read, 4096)) if self._read >= 0 else set()
        except BlockingIOError:
            return set()

    def close(self) -> None:
        if self._read < 0:
            return
        if self._ours:
            current = signal.set_wakeup_fd(-1)
            if current != self._write:
                signal.set_wakeup_fd(current)
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1


def _close_in_child() -> None:
    """Let no forked child report its signals to the parent."""
    if threading.current_thread() is threading.main_thread():
        for arrivals in list(_Arrivals.open):
            arrivals.close()


os.register_at_fork(after_in_child=_close_in_child)
