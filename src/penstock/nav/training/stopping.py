"""Stopping in good order: the first signal asks, the second insists."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody asked to stop, by SIGINT, SIGTERM or `ask`.

    As a context manager on the main thread it takes the signals: the first one only asks, so that
    the state is saved; a second one takes its course.

    Attributes:
        signal: The signal that asked, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._asked = False
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self._asked

    def __call__(self) -> bool:
        """Return whether somebody asked."""
        return self._asked

    def ask(self) -> None:
        """Ask to stop."""
        self._asked = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number in list(self._previous):
            signal.signal(number, self._previous.pop(number))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._asked = True
        signal.signal(number, self._previous.pop(number, signal.SIG_DFL))
