"""Finish pending work before SIGINT or SIGTERM takes its course.

The handler calls back, then does exactly what would have happened without it: the user's handler,
KeyboardInterrupt, or the default action of the signal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalGuard:
    """Run `flush` when a signal comes, then chain to whatever was installed before.

    Python runs handlers between any two instructions of the main thread. Code of the main thread
    that holds a lock which `flush` needs must run inside `with guard:`, which makes a
    signal wait for the end of the block.

    Args:
        flush: Finishes the pending work; called on the main thread, must not raise.
        install: False for a guard that handles nothing.
    """

    def __init__(self, flush: Callable[[], None], *, install: bool = True) -> None:
        self._flush = flush
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._previous: dict[int, Any] = {}
        self._depth = 0
        self._waiting: tuple[int, FrameType | None] | None = None
        self._closed = False
        if install and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
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
        if self._depth == 0 and self._waiting is not None:
            (number, frame), self._waiting = self._waiting, None
            self._handle(number, frame)

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
        if self._depth:
            self._waiting = (number, frame)
            return
        if not self._closed and os.getpid() == self._pid:
            self._flush()
        previous = self._previous[number]
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
