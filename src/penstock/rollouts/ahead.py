"""The thread that runs ahead of the learner: when it may start a batch, and whose memory it is."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from penstock.core.threads import POLL_S, start
from penstock.errors import SaverClosed
from penstock.rollouts.ownership import Owner, tensors_in
from penstock.tensors import tensor_bytes


@dataclass
class Ready:
    """A batch that waits for the learner."""

    batch: Any
    nbytes: int
    version: int
    staleness: int = 0


class Ahead:
    """Runs an iterable in a thread of its own, as far ahead as it may.

    All fields are guarded by one condition; the iterable itself is used outside of it.

    Args:
        base: The iterable.
        device: Where batches go; None leaves them.
        count: Batches ahead of the learner, the one being collected included.
        max_bytes: Bytes of these batches; None for no limit.
        max_staleness: In versions; None for no limit.
        policy_version: Returns the version; None to count here.
    """

    def __init__(
        self,
        base: Iterable[Any],
        device: torch.device | None,
        count: int,
        max_bytes: int | None,
        max_staleness: int | None,
        policy_version: Callable[[], int] | None,
    ) -> None:
        self._base = base
        self._device = device
        self._count = count
        self._max_bytes = max_bytes
        self._max_staleness = max_staleness
        self._policy_version = policy_version
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # see core/threads.py
        self._thread: threading.Thread | None = None
        self._queue: deque[Ready] = deque()
        self._owner = Owner(count + 2, reused=bool(getattr(base, "return_same_td", False)))
        self._version = 0
        self._handed_at: int | None = None  # the version when the learner got its batch
        self._per_batch = 1  # updates per batch, as far as seen
        self._asking = 0
        self._last_bytes = 0
        self._error: BaseException | None = None
        self._ended = False
        self.stopped = False
        self._shuts_base = False
        self._base_shut = False
        self._shutdown_error: BaseException | None = None
        self._batches = self._dropped = 0
        self._stale_sum = self._stale_max = self._peak_bytes = 0
        self._collect_s = self._wait_s = 0.0

    # --- the learner's side ---------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, unless there is one, or what it left is not taken yet."""
        with self._lock:
            running = self._thread is not None and self._thread.is_alive()
            if running or self._queue or self._error is not None or self.stopped:
                return
            self._ended = False
            self._thread = threading.Thread(
                target=self._run,
                args=(torch.get_num_threads(),),
                name="penstock-collector",
                daemon=False,
            )
            start(self._thread)

    def take(self) -> Ready | None:
        """Wait for the next batch; None at the end of the iterable.

        Raises:
            BaseException: What the iterable raised, after the batches that came before.
        """
        begin = perf_counter()
        with self._lock:
            self._close_turn()
            self._asking += 1
            self._changed.notify_all()
            try:
                while True:
                    ready = self._next_ready()
                    if ready is not None:
                        return ready
                    if self.stopped:
                        return None
                    if self._ended:
                        error, self._error = self._error, None
                        if error is not None:
                            raise error
                        return None
                    self._changed.wait(POLL_S)
            finally:
                self._asking -= 1
                self._wait_s += perf_counter() - begin

    def advance(self, versions: int) -> None:
        """Count updates of the policy."""
        with self._lock:
            self._version += versions
            self._changed.notify_all()

    def stop(self, shut_base: bool = False) -> None:
        """Let the thread end after its step; nothing more is handed out.

        Args:
            shut_base: Let it also shut the iterable down; else somebody may still want it.
        """
        with self._lock:
            self.stopped = True
            self._shuts_base = self._shuts_base or shut_base
            self._queue.clear()
            self._changed.notify_all()

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread; False if it is still at work."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    def shut_down_base(self) -> None:
        """Call the iterable's own `shutdown`, once, if it has one.

        Raises:
            BaseException: What it raised, here or in the thread (raised once).
        """
        with self._lock:
            first, self._base_shut = not self._base_shut, True
            error, self._shutdown_error = self._shutdown_error, None
        if error is not None:
            raise error
        shutdown = getattr(self._base, "shutdown", None)
        if first and shutdown is not None:
            shutdown()

    def stats(self) -> dict[str, Any]:
        """Return counts and times."""
        with self._lock:
            return {
                "batches": self._batches,
                "staleness_mean": self._stale_sum / self._batches if self._batches else 0.0,
                "staleness_max": self._stale_max,
                "dropped": self._dropped,
                "cloned": self._owner.cloned,
                "reuses_memory": self._owner.reused,
                "queued": len(self._queue),
                "queued_bytes": self._queued_bytes(),
                "peak_bytes": self._peak_bytes,
                "version": self._now(),
                "collect_s": self._collect_s,
                "wait_s": self._wait_s,
            }

    def _close_turn(self) -> None:
        """The learner has done with its batch: see how often it updated the policy meanwhile."""
        if self._handed_at is None:
            return
        updates = self._now() - self._handed_at
        if updates == 0 and self._policy_version is None:
            self._version += 1  # it does not count its updates: one batch, one update
            updates = 1
        self._per_batch = max(self._per_batch, updates)
        self._handed_at = None

    def _next_ready(self) -> Ready | None:
        while self._queue:
            ready = self._queue.popleft()
            self._changed.notify_all()
            now = self._now()
            ready.staleness = max(0, now - ready.version)
            if self._max_staleness is not None and ready.staleness > self._max_staleness:
                self._dropped += 1
                continue
            self._handed_at = now
            self._batches += 1
            self._stale_sum += ready.staleness
            self._stale_max = max(self._stale_max, ready.staleness)
            return ready
        return None

    def _now(self) -> int:
        return self._version if self._policy_version is None else int(self._policy_version())

    def _queued_bytes(self) -> int:
        return sum(ready.nbytes for ready in self._queue)

    # --- the thread's side ----------------------------------------------------------------------

    def _may_start(self) -> bool:
        """Tell whether the next batch may be collected now; what is in hand is counted before."""
        queued = len(self._queue)
        if queued >= self._count:
            return False
        over = self._max_bytes is not None and (
            self._queued_bytes() + self._last_bytes > self._max_bytes
        )
        if queued and over:
            return False
        if self._max_staleness is None:
            return True
        # Each batch before this one, in the queue or with the learner, brings its updates.
        expected = queued * self._per_batch
        if self._handed_at is not None:
            expected += max(0, self._per_batch - (self._now() - self._handed_at))
        return expected <= self._max_staleness and (self._max_staleness > 0 or self._asking > 0)

    def _run(self, torch_threads: int) -> None:
        # The setting is the thread's own: without this, a learner that asked for few threads would
        # compete with a collector that uses all cores.
        torch.set_num_threads(torch_threads)
        iterator: Iterator[Any] | None = None
        error: BaseException | None = None
        try:
            iterator = iter(self._base)
            while self._collect(iterator):
                pass
        except BaseException as failure:
            error = failure
        try:
            if isinstance(iterator, Generator):
                iterator.close()  # in the thread that ran it
            if self._shuts_base:
                self.shut_down_base()
        except BaseException as failure:
            self._shutdown_error = failure
        with self._lock:
            self._error = error
            self._ended = True
            self._changed.notify_all()

    def _collect(self, iterator: Iterator[Any]) -> bool:
        """Collect one batch; False when there is nothing more to do."""
        version = self._wait_for_leave()
        if version is None:
            return False
        begin = perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return False
        finally:
            self._collect_s += perf_counter() - begin
        batch = self._owner.own(batch, self._device)
        ready = Ready(batch, sum(map(tensor_bytes, tensors_in(batch))), version)
        if not ready.nbytes:
            ready.nbytes = int(getattr(batch, "nbytes", 0) or 0)
        del batch
        with self._lock:
            if self.stopped:
                return False
            self._last_bytes = ready.nbytes
            self._queue.append(ready)
            self._peak_bytes = max(self._peak_bytes, self._queued_bytes())
            self._changed.notify_all()
        return True

    def _wait_for_leave(self) -> int | None:
        with self._lock:
            while not self.stopped:
                # At the end of the program nobody comes to say so: this thread must go by itself.
                if not threading.main_thread().is_alive() and not self._asking:
                    raise SaverClosed("collecting ended with the main thread; keep it alive")
                if self._may_start():
                    return self._now()
                self._changed.wait(POLL_S)
        return None
