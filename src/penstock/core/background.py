"""A thread that comes when there is work and goes when there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

_POLL_S = 0.1


class Background:
    """A non-daemon thread, started by the first `poke`, that ends by itself when idle.

    So a program that forgets to close it still ends, and never before its work is done: at exit the
    interpreter waits for the thread, which sees that the main thread is over and does not linger.

    Args:
        name: Of the thread.
        work: Does one piece of work and returns True, or returns False when there is none.
            It must not raise.
        linger_s: How long the idle thread waits for more work before it ends.
    """

    def __init__(self, name: str, work: Callable[[], bool], linger_s: float = 5.0) -> None:
        self._name = name
        self._work = work
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._pokes: SimpleQueue[None] = SimpleQueue()  # in C: the cheapest way to wake a thread
        self._thread: threading.Thread | None = None
        self._closing = False

    def poke(self) -> None:
        """Say that there is work."""
        with self._lock:
            self._pokes.put(None)
            if self._thread is None:
                self._closing = False
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=False)
                self._thread.start()

    def close(self) -> None:
        """Finish the work there is, then end the thread; safe to call twice."""
        with self._lock:
            thread = self._thread
            self._closing = True
            self._pokes.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            self._hear()
            while self._work():
                idle_since = time.monotonic()
            main_over = not threading.main_thread().is_alive()
            if self._closing or main_over or time.monotonic() - idle_since > self._linger_s:
                with self._lock:
                    if self._pokes.empty():  # nobody poked since we looked for work
                        self._thread = None
                        return
            self._hear(_POLL_S)

    def _hear(self, wait_s: float = 0.0) -> None:
        """Take all pokes there are; wait for one, if there is none."""
        with suppress(Empty):
            if wait_s:
                self._pokes.get(timeout=wait_s)
            while True:
                self._pokes.get_nowait()
