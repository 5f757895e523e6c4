"""WriteQueue: in order, bounded, and every failure is told exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.writes import Write, WriteQueue
from penstock.errors import SaverClosed, StorageError, UsageError


@pytest.fixture
def queue() -> Iterator[WriteQueue]:
    made = WriteQueue("test-writer", 100, handle_signals=False)
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "test-writer"]


def writing(written: list[int], number: int) -> Callable[[], Write]:
    def write() -> dict[str, Any]:
        time.sleep(0.001)
        written.append(number)
        return {"number": number}

    return lambda: write


def failing(error: Exception) -> Callable[[], Write]:
    def write() -> dict[str, Any]:
        raise error

    return lambda: write


def finished(handle: Any) -> None:
    deadline = time.monotonic() + 20
    while not handle.done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_files_are_written_in_order(queue: WriteQueue) -> None:
    written: list[int] = []
    handles = [queue.put(Path(str(i)), 30, writing(written, i)) for i in range(20)]
    assert queue.wait(20)
    assert written == list(range(20))
    assert [handle.stats for handle in handles] == [{"number": i} for i in range(20)]
    assert (len(queue), queue.held_bytes) == (0, 0)


def test_no_more_is_held_than_allowed(queue: WriteQueue) -> None:
    gate = threading.Event()
    held = []

    def prepare() -> Write:
        held.append(queue.held_bytes)
        return lambda: {"ok": gate.wait(20)}

    def fill() -> None:
        for i in range(9):
            queue.put(Path(str(i)), 40, prepare)

    thread = threading.Thread(target=fill)
    thread.start()
    time.sleep(0.2)
    assert held == [0, 40]  # the third would make 120
    assert queue.pending(Path("0"))
    assert not queue.pending(Path("5"))
    gate.set()
    thread.join(20)
    assert max(held) <= 60
    assert len(held) == 9


def test_what_fails_is_told_once_and_the_next_goes_on(queue: WriteQueue) -> None:
    written: list[int] = []
    finished(queue.put(Path("a"), 1, failing(OSError(28, "No space left on device"))))
    with pytest.raises(StorageError, match="cannot write a: No space left on device; free"):
        queue.put(Path("b"), 1, writing(written, 1))
    queue.put(Path("b"), 1, writing(written, 2)).wait(20)
    assert written == [2]
    handle = queue.put(Path("c"), 1, failing(UsageError("its own words")))
    with pytest.raises(UsageError, match="its own words"):
        handle.wait(20)
    assert queue.wait(20)  # the handle told it
    finished(queue.put(Path("d"), 1, failing(ZeroDivisionError("a defect"))))
    with pytest.raises(StorageError, match="cannot save d: ZeroDivisionError"):
        queue.close()


def test_what_cannot_be_prepared_leaves_nothing(queue: WriteQueue) -> None:
    def prepare() -> Write:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        queue.put(Path("a"), 1, prepare)
    assert (len(queue), queue.held_bytes) == (0, 0)
    assert queue.put(Path("a"), 1, writing([], 1)).wait(20) == Path("a")


def test_closing_with_a_limit(queue: WriteQueue) -> None:
    gate = threading.Event()
    handle = queue.put(Path("a"), 1, lambda: lambda: {"ok": gate.wait(20)})
    assert queue.wait(0.05) is False
    assert queue.close(0.05) is False
    with pytest.raises(SaverClosed, match="was closed"):
        queue.put(Path("b"), 1, writing([], 1))
    gate.set()
    assert queue.close() is True
    assert handle.status == "saved"
