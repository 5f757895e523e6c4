"""PipelinedDataCollector: collect the next batches while the learner works on this one."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from penstock.core.interrupt import start
from penstock.core.memory import whole_number
from penstock.core.threads import POLL_S
from penstock.core.writes import close_after
from penstock.errors import SaverClosed, UsageError
from penstock.rollouts.structure import is_tensor_collection
from penstock.tensors import tensor_bytes

_LOG = logging.getLogger("penstock")


class PipelinedDataCollector:
    """Iterate over a collector in a background thread, a few batches ahead of the learner.

    Collectors do not say whether they use the memory of a batch again, so each batch is copied, in
    the background, before the learner gets it: what the learner has is its own.

    Staleness is counted in policy versions: how many updates came between the start of a batch's
    collection and its hand-out. Call `advance_policy` (or `update_policy_weights_`) after each
    update; if the learner calls neither while it has a batch, asking for the next batch counts as
    one update. With one update per batch staleness is `prefetch_count` at most. The policy is not
    locked: a collector that shares its weights with the learner sees updates in mid-batch.

    Leaving a loop early keeps what was collected: the next loop goes on from there. After the
    collector has ended, or failed, the next loop starts it anew. Several loops at a time share the
    batches.

    Args:
        base_collector: Any iterable of TensorDicts (tensors, dicts, lists and tuples of them, too);
            other objects are passed on as they are. It is only ever used in one thread at a time.
        device: Where batches go, in the background; None leaves them where they are.
        prefetch_count: Batches collected or being collected ahead of the learner.
        max_bytes: Bytes of the batches ahead; a larger batch is collected alone. None for no limit.
        max_staleness: Hand out nothing older than this many versions. 0 is strictly on-policy:
            collection starts only when the learner asks. A batch that got too old, because the
            learner updated more often than before, is dropped and counted.
        policy_version: Returns the version, instead of the count kept here.

    Example:
        with PipelinedDataCollector(Collector(env, policy, frames_per_batch=4096)) as collector:
            for data in collector:
                train(data)
                collector.advance_policy()
    """

    def __init__(
        self,
        base_collector: Iterable[Any],
        device: str | torch.device | None = None,
        prefetch_count: int = 2,
        *,
        max_bytes: int | None = None,
        max_staleness: int | None = None,
        policy_version: Callable[[], int] | None = None,
    ) -> None:
        whole_number("prefetch_count", prefetch_count, 1)
        whole_number("max_bytes", 1 if max_bytes is None else max_bytes, 1)
        whole_number("max_staleness", 0 if max_staleness is None else max_staleness, 0)
        if not isinstance(base_collector, Iterable):
            raise UsageError(
                f"base_collector is a {type(base_collector).__name__}, which cannot be iterated"
            )
        self.base_collector = base_collector
        target = None if device is None else torch.device(device)
        self._prefetcher = _Prefetcher(
            base_collector, target, prefetch_count, max_bytes, max_staleness, policy_version
        )
        # The thread does not hold this object: one that is forgotten stops its thread.
        weakref.finalize(self, self._prefetcher.stop).atexit = False

    def __iter__(self) -> Iterator[Any]:
        if self._prefetcher.stopped:
            raise SaverClosed("this collector was shut down; make a new one")
        self._prefetcher.start()
        while box := self._prefetcher.take():
            yield box.pop()  # nothing here keeps it alive while the learner works

    @property
    def staleness(self) -> int:
        """Of the batch handed out last."""
        return self._prefetcher.staleness

    def advance_policy(self, versions: int = 1) -> None:
        """Say that the policy was updated."""
        whole_number("versions", versions, 0)
        self._prefetcher.advance(versions)

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Update the collector's copy of the policy, if it has one, and count the version."""
        update = getattr(self.base_collector, "update_policy_weights_", None)
        if update is not None:
            update(*args, **kwargs)
        self._prefetcher.advance(1)

    def stats(self) -> dict[str, Any]:
        """Return counts and times.

        `batches` handed out, `staleness_mean`, `staleness_max`, `dropped` (too old), `queued`,
        `queued_bytes`, `peak_bytes`, `version`, `collect_s` (time in the collector), `wait_s` (time
        the learner waited).
        """
        own = self._prefetcher
        with own.lock:
            now = {"queued": len(own.queue), "queued_bytes": own.queued_bytes()}
            mean = own.stale_sum / max(1, own.stats["batches"])
            return {**own.stats, **now, "staleness_mean": mean, "version": own.now()}

    def shutdown(self, timeout: float | None = 30.0) -> bool:
        """Stop collecting and shut the collector down, in the thread that used it.

        Args:
            timeout: How long to wait for the collector to finish its step; None for ever.

        Returns:
            False if it was still in a step: then the thread ends, and shuts the collector down, as
            soon as that step returns, and the interpreter does not exit before.
        """
        self._prefetcher.stop(shut_base=True)
        thread = self._prefetcher.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                _LOG.warning(
                    "the collector is still in a step after %s s; it ends with it", timeout
                )
                return False
        self._prefetcher.shut_down_base()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after(self.shutdown, error)

    def __reduce__(self) -> Any:
        raise UsageError("a collector belongs to its process; make a new one in the other process")


class _Ready(NamedTuple):
    """A batch that waits for the learner."""

    batch: Any
    nbytes: int
    version: int


@dataclass(eq=False)
class _Prefetcher:
    """Runs an iterable in a thread of its own, as far ahead as it may.

    All fields are guarded by one lock; the iterable itself is used outside of it. Whoever waits,
    waits without the lock, in C: an interrupt of the main thread leaves nothing half done.
    """

    base: Iterable[Any]
    device: torch.device | None
    count: int
    max_bytes: int | None
    max_staleness: int | None
    policy_version: Callable[[], int] | None
    stopped: bool = False
    staleness: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._calls: SimpleQueue[None] = SimpleQueue()  # to the thread, while it waits
        self._answers: SimpleQueue[None] = SimpleQueue()  # to learners, while they wait
        self.thread: threading.Thread | None = None
        self.queue: deque[_Ready] = deque()
        self._version = 0
        self._handed_at: int | None = None  # the version when the learner got its batch
        self._per_batch = 1  # updates per batch, as far as seen
        self._askers: set[int] = set()  # threads that wait for a batch; an interrupt may leave one
        self._last_bytes = 0
        self._error: BaseException | None = None
        self._ended = False
        self._shuts_base = self._base_shut = False
        self._shutdown_error: BaseException | None = None
        names = ("batches", "staleness_max", "dropped", "peak_bytes", "collect_s", "wait_s")
        self.stats: dict[str, Any] = dict.fromkeys(names, 0)
        self.stale_sum = 0

    def start(self) -> None:
        """Start the thread, unless there is one, or what it left is not taken yet."""
        with self.lock:
            running = self.thread is not None and self.thread.is_alive()
            if running or self.queue or self._error is not None or self.stopped:
                return
            self._ended = False
            threads = (torch.get_num_threads(),)
            name = "penstock-collector"
            self.thread = threading.Thread(target=self._run, args=threads, name=name, daemon=False)
            start(self.thread)

    def take(self) -> list[Any]:
        """Wait for the next batch, alone in a list; nothing at the end of the iterable."""
        begin = perf_counter()
        with self.lock:
            self._close_turn()
            self._askers.add(threading.get_ident())
        try:
            while True:
                self._calls.put(None)
                with self.lock:
                    box = self._next_ready()
                    if box or self.stopped:
                        return box
                    if self._ended:
                        error, self._error = self._error, None
                        if error is not None:
                            raise error
                        return []
                _hear(self._answers)
        finally:
            with self.lock:
                self._askers.discard(threading.get_ident())
                self.stats["wait_s"] += perf_counter() - begin

    def advance(self, versions: int) -> None:
        """Count updates of the policy."""
        with self.lock:
            self._version += versions
        self._calls.put(None)

    def stop(self, shut_base: bool = False) -> None:
        """Let the thread end after its step; nothing more is handed out."""
        with self.lock:
            self.stopped = True
            self._shuts_base = self._shuts_base or shut_base
            self.queue.clear()
        self._calls.put(None)
        self._answers.put(None)

    def shut_down_base(self) -> None:
        """Call the iterable's own `shutdown`, once, if it has one."""
        with self.lock:
            first, self._base_shut = not self._base_shut, True
            error, self._shutdown_error = self._shutdown_error, None
        if error is not None:
            raise error
        shutdown = getattr(self.base, "shutdown", None)
        if first and shutdown is not None:
            shutdown()

    def _close_turn(self) -> None:
        """The learner has done with its batch: see how often it updated the policy meanwhile."""
        if self._handed_at is not None:
            if self.now() == self._handed_at and self.policy_version is None:
                self._version += 1  # it does not count its updates: one batch, one update
            self._per_batch = max(self._per_batch, self.now() - self._handed_at)
            self._handed_at = None

    def _next_ready(self) -> list[Any]:
        while self.queue:
            ready = self.queue.popleft()
            now = self.now()
            staleness = max(0, now - ready.version)
            if self.max_staleness is not None and staleness > self.max_staleness:
                self.stats["dropped"] += 1
                continue
            self._handed_at = now
            self.staleness = staleness
            self.stale_sum += staleness
            self.stats["batches"] += 1
            self.stats["staleness_max"] = max(self.stats["staleness_max"], staleness)
            return [ready.batch]
        return []

    def now(self) -> int:
        return self._version if self.policy_version is None else int(self.policy_version())

    def queued_bytes(self) -> int:
        return sum(ready.nbytes for ready in self.queue)

    def _may_start(self) -> bool:
        """Tell whether the next batch may be collected now; what is in hand is counted before."""
        queued, coming = len(self.queue), self.queued_bytes() + self._last_bytes
        over = queued and self.max_bytes is not None and coming > self.max_bytes
        if queued >= self.count or over or self.max_staleness is None:
            return queued < self.count and not over
        # Each batch before this one, in the queue or with the learner, brings its updates.
        expected = queued * self._per_batch
        if self._handed_at is not None:
            expected += max(0, self._per_batch - (self.now() - self._handed_at))
        return expected <= self.max_staleness and (self.max_staleness > 0 or bool(self._askers))

    def _run(self, torch_threads: int) -> None:
        # The setting is the thread's own: without this, a learner that asked for few threads would
        # compete with a collector that uses all cores.
        torch.set_num_threads(torch_threads)
        iterator: Iterator[Any] | None = None
        error: BaseException | None = None
        try:
            iterator = iter(self.base)
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
        with self.lock:
            self._error = error
            self._ended = True
        self._answers.put(None)

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
            self.stats["collect_s"] += perf_counter() - begin
        batch, nbytes = _cloned(batch, self.device)
        ready = _Ready(batch, nbytes or int(getattr(batch, "nbytes", 0) or 0), version)
        del batch
        with self.lock:
            if self.stopped:
                return False
            self._last_bytes = ready.nbytes
            self.queue.append(ready)
            self.stats["peak_bytes"] = max(self.stats["peak_bytes"], self.queued_bytes())
        self._answers.put(None)
        return True

    def _wait_for_leave(self) -> int | None:
        while True:
            with self.lock:
                if self.stopped:
                    return None
                # At the end of the program nobody comes to say so: this thread must go by itself.
                main = threading.main_thread()
                if not main.is_alive() and not self._askers - {main.ident}:
                    raise SaverClosed("collecting ended with the main thread; keep it alive")
                if self._may_start():
                    return self.now()
            _hear(self._calls)


def _hear(calls: SimpleQueue[None]) -> None:
    """Wait for a call, not for ever, and take all others that there are."""
    with suppress(Empty):
        calls.get(timeout=POLL_S)
        while True:
            calls.get_nowait()


def _cloned(value: Any, device: torch.device | None) -> tuple[Any, int]:
    """Return a copy that shares no memory, on a device, and its bytes; others stay as they are."""
    if isinstance(value, torch.Tensor) or is_tensor_collection(value):
        # What is on the device already is not copied by `to`; a copy there costs little.
        copy = (value if device is None else value.to(device)).clone()
        return copy, _bytes_of(copy)
    if isinstance(value, dict):
        pairs = {key: _cloned(child, device) for key, child in value.items()}
        return {key: copy for key, (copy, _) in pairs.items()}, sum(n for _, n in pairs.values())
    if type(value) in (list, tuple):
        parts = [_cloned(child, device) for child in value]
        return type(value)(copy for copy, _ in parts), sum(n for _, n in parts)
    return value, 0


def _bytes_of(value: Any) -> int:
    """Count the bytes of the tensors in one, in stacks of unequal shapes, too."""
    if isinstance(value, torch.Tensor):
        return tensor_bytes(value)
    stacked = getattr(value, "tensordicts", None)
    children = value.values() if stacked is None and is_tensor_collection(value) else stacked
    return sum(map(_bytes_of, children or ()))
