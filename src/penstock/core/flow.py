"""Stages that run in threads, each bounded in bytes: the one place of constant memory.

    with Flow("convert", limit_bytes=parse_bytes("64MB")) as flow:
        raw = flow.source(read(bag), name="read", size=len)
        images = flow.map(decode, raw, workers=4, name="decode", size=decoded_size)
        for image in images:
            write(image)

An item accounts for its bytes in a stage from when the stage takes it in until the consumer, done
with its result, asks for the next. The one item that a stage has pulled and that waits for its
grant is accounted for by the stage before it; where there is none, it comes on top of the limit.
A stage that is full waits; nothing is dropped.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final, Generic, Self, TypeVar

from penstock.core.memory import Budget
from penstock.errors import PenstockError, UsageError

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_LIMIT_BYTES: Final = 64 * 2**20


class Cancelled(PenstockError):
    """The flow was stopped before its end."""


@dataclass(slots=True)
class StageTiming:
    """Where the time of one stage went.

    Attributes:
        items: Items finished.
        bytes: Their sizes, added up.
        busy_s: Time in the function, added up over the workers; in a source, in its iterable.
        starved_s: Time that the stage waited for its input (always 0 in a source).
        blocked_s: Time that the stage held an item for which its budget had no room.
    """

    items: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    starved_s: float = 0.0
    blocked_s: float = 0.0


class Flow:
    """A chain of bounded stages that start, stop and fail together.

    The first error, in a source, in a function or in the `with` block, stops every stage; it is
    raised once in the consumer, as the original object, after all threads have ended. Leaving the
    block ends every thread. A thread is never interrupted inside foreign code: a call that blocks
    for ever in an iterable or function holds up the end of the block.

    Args:
        name: Names the threads and the errors.
        limit_bytes: The limit of each stage. An item larger than this passes alone.
        nice: Priority of the worker threads (Linux; 19 is the lowest, 0 leaves it alone).

    Attributes:
        budgets: The budget of each stage, in the order of their making, to be resized at will.
    """

    def __init__(
        self, name: str = "flow", limit_bytes: int = DEFAULT_LIMIT_BYTES, nice: int = 0
    ) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self.nice = nice
        self.budgets: list[Budget] = []
        self._stages: dict[str, _Stage[object, object]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._entered = False
        self._stopped = threading.Event()
        self._failed = False
        self._error: BaseException | None = None

    def source(self, items: Iterable[T], *, name: str, size: Callable[[T], int]) -> Iterator[T]:
        """Read an iterable ahead of its consumer, in a thread of its own.

        Args:
            items: What to read; a generator is closed when the flow ends.
            name: Names the stage, once in a flow.
            size: The bytes that an item accounts for (at least 1 is counted).
        """
        return self._add(_Stage(self, None, items, 1, name, size))

    def map(
        self,
        fn: Callable[[T], R],
        items: Iterable[T],
        *,
        workers: int = 1,
        name: str,
        size: Callable[[T], int],
    ) -> Iterator[R]:
        """Apply a function to each item in worker threads; the results keep the input order.

        Args:
            fn: The work. It runs in several threads at once when there are several workers.
            items: The input, often the iterator of another stage; advanced by one thread at a
                time. A generator is closed when the flow ends.
            workers: Number of threads.
            name: Names the stage, once in a flow.
            size: The bytes that an item accounts for, its result included (at least 1 is counted).
        """
        if workers < 1:
            raise UsageError(f"stage {name!r} has {workers} workers: pass at least 1")
        return self._add(_Stage(self, fn, items, workers, name, size))

    @property
    def timings(self) -> dict[str, StageTiming]:
        """A copy of the timing of each stage, by name."""
        return {name: replace(stage.timing) for name, stage in self._stages.items()}

    def cancel(self) -> None:
        """End the iteration with `Cancelled`; may be called from any thread."""
        self._fail(Cancelled(f"flow {self.name!r} was cancelled"))

    def __enter__(self) -> Self:
        if self._entered:
            raise UsageError(f"flow {self.name!r} was entered before: make a new Flow for each run")
        self._entered = True
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        earlier = self._take_error()
        self._shut_down()
        error = earlier or self._take_error()
        if error is None or isinstance(error, Cancelled):
            return
        # An error of the block itself gives way only to one that came before it, and an
        # interrupt to none.
        if exc is None or (error is earlier and isinstance(exc, Exception)):
            raise error

    def _add(self, stage: _Stage[T, R]) -> Iterator[R]:
        with self._lock:
            if stage.name in self._stages:
                raise UsageError(f"flow {self.name!r} has two stages {stage.name!r}: rename one")
            self._stages[stage.name] = stage  # type: ignore[assignment]
            self.budgets.append(stage.budget)
        return stage

    def _start(self, target: Callable[[], None], workers: int, name: str) -> None:
        """Start the threads of a stage, unless the flow has stopped."""
        if not self._entered:
            raise UsageError(f"flow {self.name!r} is not open: read its stages in `with flow:`")
        with self._lock:  # `_shut_down` joins the threads that it finds: none may come later
            for number in range(0 if self._stopped.is_set() else workers):
                thread = threading.Thread(
                    target=target, name=f"{self.name}-{name}-{number}", daemon=False
                )
                thread.start()
                self._threads.append(thread)

    def _stop(self) -> None:
        with self._lock:
            self._stopped.set()
            stages = list(self._stages.values())
        for stage in stages:
            stage.wake()

    def _fail(self, error: BaseException) -> None:
        """Stop because of an error; one that only tells of the stop is ignored."""
        with self._lock:
            echo = self._stopped.is_set() and isinstance(error, Cancelled)
            if not self._failed and not echo:
                self._failed = True
                self._error = error
        self._stop()

    def _take_error(self) -> BaseException | None:
        with self._lock:
            error, self._error = self._error, None
        return error

    def _shut_down(self) -> None:
        self._stop()
        for thread in self._threads:
            thread.join()
        for stage in reversed(self._stages.values()):  # a consumer closes before its input
            stage.drain()

    def _stop_error(self) -> BaseException:
        """What a reader of a stopped flow gets: the consumer, once, the first error."""
        error = None
        if threading.current_thread() not in self._threads:
            self._shut_down()
            error = self._take_error()
        return error or Cancelled(f"flow {self.name!r} has stopped: make a new one to read on")


class _Slot:
    """The place of one item in the output order."""

    __slots__ = ("done", "result", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.done = False
        self.result: object = None


class _Stage(Generic[T, R], Iterator[R]):
    """One stage, and the iterator over its results; for one consumer."""

    def __init__(
        self,
        flow: Flow,
        fn: Callable[[T], R] | None,
        items: Iterable[T],
        workers: int,
        name: str,
        size: Callable[[T], int],
    ) -> None:
        self.name = name
        self.budget = Budget(flow.limit_bytes)
        self.timing = StageTiming()
        self._flow = flow
        self._fn = fn
        self._input = iter(items)
        self._workers = workers
        self._size = size
        self._pulling = threading.Lock()
        self._ready = threading.Condition()  # guards the slots and the counts
        self._slots: deque[_Slot] = deque()
        self._taken_bytes = 0
        self._started = False
        self._exhausted = False
        self._finished = False

    def __next__(self) -> R:
        if self._taken_bytes:
            self.budget.release(self._taken_bytes)
            self._taken_bytes = 0
        if self._finished:
            raise StopIteration
        if not self._started:
            self._flow._start(self._work, self._workers, self.name)
            self._started = True
        with self._ready:
            while not self._flow._stopped.is_set():
                if self._slots and self._slots[0].done:
                    slot = self._slots.popleft()
                    self._taken_bytes = slot.size_bytes
                    return slot.result  # type: ignore[return-value]
                if self._exhausted and not self._slots:
                    self._finished = True
                    raise StopIteration
                self._ready.wait()
        raise self._flow._stop_error()

    def wake(self) -> None:
        """Make every waiting thread of this stage look at the flow again."""
        self.budget.wake()
        with self._ready:
            self._ready.notify_all()

    def drain(self) -> None:
        """Let go of what nobody will read; called when the threads have ended."""
        self.budget.release(self._taken_bytes + sum(slot.size_bytes for slot in self._slots))
        self._taken_bytes = 0
        self._slots.clear()
        if isinstance(self._input, Generator):
            try:
                self._input.close()
            except BaseException as error:
                self._flow._fail(error)

    def _work(self) -> None:
        if self._flow.nice and sys.platform == "linux":
            with suppress(OSError):  # not allowed here: run at the usual priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._flow.nice)
        try:
            # One call per item, so that no item or result stays alive in a waiting thread.
            while self._work_on_one():
                pass
        except StopIteration as error:
            # Raised in the consumer as it is, this would look like the end of the data.
            wrapped = RuntimeError(f"stage {self.name!r} raised StopIteration")
            wrapped.__cause__ = error
            self._flow._fail(wrapped)
        except BaseException as error:
            self._flow._fail(error)

    def _work_on_one(self) -> bool:
        """Carry one item from the input to its slot; False when there is nothing more to do."""
        with self._pulling:
            pulled = self._pull()
        if pulled is None:
            return False
        item, slot = pulled
        start_s = perf_counter()
        slot.result = item if self._fn is None else self._fn(item)
        busy_s = perf_counter() - start_s
        with self._ready:
            slot.done = True
            self.timing.items += 1
            self.timing.bytes += slot.size_bytes
            self.timing.busy_s += busy_s
            if self._slots and self._slots[0] is slot:  # the consumer waits for no other
                self._ready.notify()
        return True

    def _pull(self) -> tuple[T, _Slot] | None:
        """Take the next item in; under one lock to the end, so that grants keep the input order.

        A later item granted before an earlier one could fill the budget with results that wait
        for their turn, while the earlier one waits for the budget.
        """
        if self._exhausted or self._flow._stopped.is_set():
            return None
        start_s = perf_counter()
        try:
            item = next(self._input)
        except StopIteration:
            with self._ready:
                self._exhausted = True
                self._ready.notify_all()
            return None
        pulled_s = perf_counter()
        size_bytes = max(self._size(item), 1)
        granted = self.budget.acquire(size_bytes, self._flow._stopped.is_set)
        granted_s = perf_counter()
        slot = _Slot(size_bytes)
        with self._ready:
            if self._fn is None:
                self.timing.busy_s += pulled_s - start_s
            else:
                self.timing.starved_s += pulled_s - start_s
            self.timing.blocked_s += granted_s - pulled_s
            if granted:
                self._slots.append(slot)
        return (item, slot) if granted else None
