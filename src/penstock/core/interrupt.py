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
from typing import TypeVar

from penstock.core.signals import ENDING, SignalGuard
from penstock.core.threads import start

R = TypeVar("R")
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
    guard = SignalGuard(None, install=False)
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
