"""Long work that SIGINT and SIGTERM stop at its next boundary, never in the middle of something.

An exception that a signal handler raises may come between any two instructions: no code can be made
safe against that. So the work runs in a thread of its own, where no handler ever runs; the main
thread waits, and its handler only sets a flag, which the work looks at (`check_stop`).
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from penstock.core.threads import start

R = TypeVar("R")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.05  # a signal that another thread takes does not wake the main thread
_asked: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar(
    "asked_to_stop", default=None
)


def check_stop() -> None:
    """Raise KeyboardInterrupt if a signal has asked this work to stop; call it at boundaries."""
    asked = _asked.get()
    if asked is not None and asked.is_set():
        raise KeyboardInterrupt


def interruptible(work: Callable[[], R]) -> R:
    """Do long work that calls `check_stop`; a signal ends it there, within a moment.

    The handler that was there before is called when the work has stopped, so that it ends as it
    would have without this: by KeyboardInterrupt, usually. A second signal ends the process at
    once. On another than the main thread the work is simply done.

    Raises:
        BaseException: Whatever the work raises.
    """
    if threading.current_thread() is not threading.main_thread() or _asked.get() is not None:
        return work()
    asked, came = threading.Event(), list[int]()
    result: list[R] = []
    failure: list[BaseException] = []

    def run() -> None:
        _asked.set(asked)
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    def handle(number: int, _: FrameType | None) -> None:
        if came:  # nothing is lost by a kill, whoever is in a hurry may have it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        came.append(number)
        asked.set()

    before = {}
    for number in _SIGNALS:
        if callable(signal.getsignal(number)) or signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, handle)
    try:
        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(run,), name="penstock-work", daemon=False
        )
        start(thread)
        while thread.is_alive():
            thread.join(_POLL_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not failure:
        return result[0]
    if came and isinstance(failure[0], KeyboardInterrupt):
        try:
            signal.raise_signal(came[0])
        except KeyboardInterrupt as stop:
            stop.args = stop.args or failure[0].args
            raise
    raise failure[0]
