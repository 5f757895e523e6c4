"""The bounded queue of saves: how many, how many bytes, and what gives way when it is full."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Literal

import numpy as np
import torch

from penstock.checkpoints import cuda
from penstock.checkpoints.capture import Staging
from penstock.checkpoints.publish import Job
from penstock.core.handle import SaveHandle, poll

OnFull = Literal["wait", "skip", "drop_oldest"]
SMALLEST_LIMIT_BYTES = 64 << 20


class SaveQueue:
    """Saves between the training thread, which puts, and the writer thread, which takes.

    Args:
        max_jobs: Pending saves, the one being written included.
        max_bytes: Staging memory of all of them; None for one copy of the state (at least 64 MB).
        on_full: What gives way.

    Attributes:
        staged_bytes: What the pending saves hold.
    """

    def __init__(self, max_jobs: int, max_bytes: int | None, on_full: OnFull) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._on_full = on_full
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._pool = StagingPool()
        self._counts: Counter[str] = Counter()
        self.staged_bytes = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def admit(self, size_bytes: int, handle: SaveHandle) -> bool:
        """Make room, by the stated policy; False when this save is skipped."""
        if not self._full(size_bytes):
            return True
        self.count(queue_full=1)
        if self._on_full == "skip":
            self.count(skipped=1)
            handle.finish("skipped")
            return False
        while self._on_full == "drop_oldest" and self._full(size_bytes) and self._drop_oldest():
            pass
        return poll(lambda: not self._full(size_bytes), None)

    def staging(self, size_bytes: int) -> Staging:
        """Take memory for a capture; `remove` gives it back."""
        with self._lock:
            return self._pool.take(size_bytes)

    def put(self, job: Job) -> None:
        """Append a save."""
        with self._lock:
            self._jobs.append(job)
            self.staged_bytes += job.capture.reserved_bytes

    def first(self) -> Job | None:
        """Return the oldest save, which from now on cannot be dropped; it stays in the queue."""
        with self._lock:
            if not self._jobs:
                return None
            self._jobs[0].started = True
            return self._jobs[0]

    def remove(self, job: Job) -> None:
        """Take a save out and its memory back."""
        with self._lock:
            self._jobs.remove(job)
            self._pool.give_back(job.capture.staging)
            self.staged_bytes -= job.capture.reserved_bytes

    def count(self, **amounts: int) -> None:
        """Add to the counts."""
        with self._lock:
            self._counts.update(amounts)

    def counts(self) -> Counter[str]:
        """Return a copy of the counts."""
        with self._lock:
            return Counter(self._counts)

    def clear_memory(self) -> None:
        """Give the unused staging memory back to the system."""
        with self._lock:
            self._pool.clear()

    def _full(self, size_bytes: int) -> bool:
        limit = self._max_bytes
        if limit is None:
            limit = max(SMALLEST_LIMIT_BYTES, size_bytes)
        over = self.staged_bytes > 0 and self.staged_bytes + size_bytes > limit
        return over or len(self._jobs) >= self._max_jobs

    def _drop_oldest(self) -> bool:
        with self._lock:
            waiting = next((job for job in self._jobs if not job.started), None)
            if waiting is None:
                return False
            # Its barrier has run, so nobody copies into its memory any more.
            self._jobs.remove(waiting)
            self._pool.give_back(waiting.capture.staging)
            self.staged_bytes -= waiting.capture.reserved_bytes
            self._counts["dropped"] += 1
        waiting.handle.finish("dropped")
        return True


class StagingPool:
    """Staging memory that is kept and used again, so that a save touches no new pages.

    Not thread-safe: the queue's lock guards it.
    """

    def __init__(self) -> None:
        self._free: list[Staging] = []
        self._pinned = torch.cuda.is_available()

    def take(self, size_bytes: int) -> Staging:
        """Return memory of at least this size; what is too small is given up."""
        self._free = [staging for staging in self._free if staging.memory.nbytes >= size_bytes]
        if self._free:
            return self._free.pop()
        size_bytes = max(size_bytes, 1)
        return Staging(cuda.pinned(size_bytes) if self._pinned else np.empty(size_bytes, np.uint8))

    def give_back(self, staging: Staging) -> None:
        """Keep the memory for the next capture."""
        self._free.append(staging)

    def clear(self) -> None:
        """Give all unused memory back to the system."""
        self._free.clear()
