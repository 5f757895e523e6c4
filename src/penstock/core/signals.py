"""Finish pending work before SIGINT or SIGTERM takes its course; postpone them for a moment.

The handler of a `SignalGuard` calls back, then does exactly what would have happened without it:
the user's handler, KeyboardInterrupt, or the default action of the signal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)
_RAISING = (*ENDING, *filter(None, [getattr(signal, "SIGALRM", None)]))  # timeouts raise, too


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

    Attributes:
        waiting: The signals that came within the block, with their frames.
    """

    def __init__(self, flush: Callable[[], None] | None, *, install: bool = True) -> None:
        self._flush = flush
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._previous: dict[int, Any] = {}
        self._depth = 0
        self.waiting: list[tuple[int, FrameType | None]] = []
        self._closed = False
        if install and threading.current_thread() is threading.main_thread():
            self.install(ENDING)

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
        if self._depth and os.getpid() == self._pid:  # a forked child has nobody to leave the block
            self.waiting.append((number, frame))
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
