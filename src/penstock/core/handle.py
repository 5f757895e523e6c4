"""What a save gives back: what became of it; and how to wait for it, and to close after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from penstock.errors import PenstockError, SnapshotDiscarded, UsageError

Status = Literal["pending", "saved", "failed", "skipped", "dropped", "discarded"]


def close_after(close: Callable[[], object], error: BaseException | None) -> None:
    """Close at the end of a `with` block, never hiding what the user's code raised in it."""
    try:
        close()
    except Exception as failure:
        if error is None:
            raise
        error.add_note(f"penstock: {failure}")


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


class SaveHandle:
    """One save.

    Attributes:
        status: "pending" until it is "saved" (durable), "failed", "skipped" or "dropped" (the queue
            was full), or "discarded" (its tensors were changed while they were copied).
        stats: Sizes and times, when it is saved.
    """

    def __init__(self, path: str, barrier: Callable[[], None]) -> None:
        self._path = path
        self.status: Status = "pending"
        self.stats: dict[str, Any] = {}
        self.error: PenstockError | None = None
        self.reported = False
        self._barrier = barrier

    @property
    def path(self) -> Path:
        """Where the checkpoint is, or will be."""
        return Path(self._path)

    def done(self) -> bool:
        """Tell whether the fate of this save is known."""
        return self.status != "pending"

    def wait(self, timeout: float | None = None) -> Path:
        """Return the path once the checkpoint is durable.

        Raises:
            PenstockError: It was not saved; why is in the message.
        """
        self._barrier()
        if not poll(self.done, timeout):
            raise UsageError(f"{self.path} is not saved after {timeout} s; wait longer")
        if self.error is not None:
            self.reported = True
            raise self.error
        if self.status != "saved":
            kind = SnapshotDiscarded if self.status == "discarded" else UsageError
            raise kind(f"{self.path} was {self.status}: see on_full and get_stats()")
        return self.path

    def finish(self, status: Status, error: PenstockError | None = None) -> None:
        """Settle the fate of this save; the status comes last, for it is what others look at."""
        self.error = error
        self.status = status

    def __repr__(self) -> str:
        return f"SaveHandle({str(self.path)!r}, {self.status})"
