"""The thread that comes and goes: nothing lost, nobody kept waiting."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from penstock.core.threads import BackgroundThread


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll with a limit that only a hang reaches."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never became true"
        time.sleep(0.001)


class Counter:
    """Work that can be counted; each piece notes its thread."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.todo: deque[int] = deque()
        self.done: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.delay_s = delay_s

    def __call__(self) -> bool:
        try:
            piece = self.todo.popleft()
        except IndexError:
            return False
        time.sleep(self.delay_s)
        self.done.append(piece)
        self.threads.add(threading.current_thread())
        return True


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) == before)


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_nothing_runs_before_the_first_wake() -> None:
    background = BackgroundThread("quiet", Counter())
    assert not named("quiet")
    background.close()
    background.close()


def test_work_is_done_in_order_by_a_non_daemon_thread() -> None:
    work = Counter()
    background = BackgroundThread("worker", work)
    work.todo.extend(range(100))
    background.wake()
    (thread,) = named("worker")
    assert not thread.daemon
    wait_until(lambda: len(work.done) == 100)
    assert work.done == list(range(100))
    assert work.threads == {thread}
    background.close()
    assert not thread.is_alive()


def test_the_thread_ends_when_idle_and_comes_back() -> None:
    work = Counter()
    background = BackgroundThread("short", work, linger_s=0.05)
    for round_ in range(3):
        work.todo.append(round_)
        background.wake()
        wait_until(lambda: not named("short"))
        assert work.done == list(range(round_ + 1))
    assert len(work.threads) == 3


def test_the_thread_lingers_for_more_work() -> None:
    work = Counter()
    background = BackgroundThread("patient", work, linger_s=30)
    for piece in range(3):
        work.todo.append(piece)
        background.wake()
        wait_until(lambda count=piece + 1: len(work.done) == count)  # type: ignore[misc]
    assert len(work.threads) == 1
    began = time.monotonic()
    background.close()  # must not wait for the linger time
    assert time.monotonic() - began < 10


def test_close_finishes_the_work_first() -> None:
    work = Counter(delay_s=0.002)
    background = BackgroundThread("closing", work)
    work.todo.extend(range(50))
    background.wake()
    background.close()
    assert work.done == list(range(50))
    assert not named("closing")
    background.close()
    work.todo.append(50)
    background.wake()
    background.close()
    assert work.done[-1] == 50


def test_close_from_the_thread_itself_does_not_hang() -> None:
    done = threading.Event()

    def work() -> bool:
        if done.is_set():
            return False
        background.close()
        done.set()
        return True

    background = BackgroundThread("self", work)
    background.wake()
    assert done.wait(20)
    wait_until(lambda: not named("self"))


@pytest.mark.parametrize("linger_s", [0.0, 5.0])
def test_nothing_is_lost_in_quick_wakes(linger_s: float) -> None:
    # With no linger the thread ends between almost any two pokes: every end races with a poke.
    work = Counter()
    background = BackgroundThread("busy", work, linger_s=linger_s)

    def poker(first: int) -> None:
        for piece in range(first, first + 500):
            work.todo.append(piece)
            background.wake()
            if piece % 7 == 0:
                time.sleep(0.0002)

    pokers = [threading.Thread(target=poker, args=(500 * k,)) for k in range(4)]
    for thread in pokers:
        thread.start()
    for thread in pokers:
        thread.join()
    wait_until(lambda: len(work.done) == 2000)  # without a further poke
    assert sorted(work.done) == list(range(2000))
    background.close()


def test_one_thread_at_a_time() -> None:
    running = threading.Semaphore(1)
    todo: deque[int] = deque()
    clashes: list[int] = []

    def work() -> bool:
        if not todo:
            return False
        if not running.acquire(blocking=False):
            clashes.append(1)
            return False
        todo.popleft()
        time.sleep(0.0005)
        running.release()
        return True

    background = BackgroundThread("single", work, linger_s=0.0)
    for piece in range(300):
        todo.append(piece)
        background.wake()
    wait_until(lambda: not todo)
    background.close()
    assert not clashes


EXIT = """
import sys, time
from penstock.core.threads import BackgroundThread
todo = list(range(20))
def work():
    if not todo:
        return False
    time.sleep(0.02)
    print(todo.pop(0), flush=True)
    return True
background = BackgroundThread("late", work, linger_s=60)
background.wake()
if sys.argv[1] == "error":
    raise RuntimeError("on purpose")
if sys.argv[1] == "exit":
    sys.exit(3)
"""


@pytest.mark.parametrize(("way", "code"), [("end", 0), ("error", 1), ("exit", 3)])
def test_the_process_waits_for_the_work_but_not_for_the_linger(way: str, code: int) -> None:
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", EXIT, way], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == code
    assert result.stdout.split() == [str(n) for n in range(20)]
    assert time.monotonic() - began < 30
