"""Budgets in bytes, and the watch that adapts them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from penstock.conversion import budget as memory
from penstock.conversion.budget import Budget, MemoryWatch
from penstock.errors import UsageError


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll with a limit that only a hang reaches."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never became true"
        time.sleep(0.001)


def test_budget_blocks_until_there_is_room() -> None:
    budget = Budget(100)
    assert budget.acquire(70)
    granted = threading.Event()

    def take() -> None:
        budget.acquire(50)
        granted.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not granted.wait(0.05)
    budget.release(20)
    thread.join(20)
    assert granted.is_set()
    assert (budget.used_bytes, budget.peak_bytes, budget.limit_bytes) == (100, 100, 100)


def test_larger_than_the_limit_is_granted_only_alone() -> None:
    budget = Budget(10)
    budget.acquire(1)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(budget.acquire(1000)))
    thread.start()
    thread.join(0.05)
    assert answers == []
    budget.release(1)
    thread.join(20)
    assert answers == [True]
    assert budget.used_bytes == 1000


def test_grants_keep_the_order_of_the_requests() -> None:
    budget = Budget(10)
    budget.acquire(10)
    order: list[int] = []
    threads = []
    for n in (9, 1, 2):  # the small ones would fit first
        thread = threading.Thread(target=lambda n=n: (budget.acquire(n), order.append(n)))
        thread.start()
        threads.append(thread)
        wait_until(lambda: len(budget._waiting) == len(threads))
    budget.release(5)
    time.sleep(0.02)
    assert order == []  # 1 would fit, but 9 came first
    assert not budget.acquire(1, cancelled=lambda: True)  # nor does a newcomer pass the line
    budget.release(5)
    wait_until(lambda: sorted(order) == [1, 9])
    budget.release(9)
    for thread in threads:
        thread.join(20)
    assert order[-1] == 2


def test_a_cancelled_request_leaves_the_line() -> None:
    budget = Budget(10)
    budget.acquire(10)
    cancelled = threading.Event()
    answers: list[bool] = []
    first = threading.Thread(target=lambda: answers.append(budget.acquire(10, cancelled.is_set)))
    first.start()
    wait_until(lambda: len(budget._waiting) == 1)
    second = threading.Thread(target=lambda: budget.acquire(5))
    second.start()
    wait_until(lambda: len(budget._waiting) == 2)
    cancelled.set()  # no wake: the waiter must look by itself
    first.join(20)
    assert answers == [False]
    budget.release(5)
    second.join(20)
    assert budget.used_bytes == 10


def test_resize_wakes_waiters() -> None:
    budget = Budget(10)
    budget.acquire(10)
    thread = threading.Thread(target=lambda: budget.acquire(10))
    thread.start()
    wait_until(lambda: len(budget._waiting) == 1)
    budget.resize(20)
    thread.join(20)
    assert budget.used_bytes == 20


def test_grant_gives_back_after_an_error() -> None:
    budget = Budget(10)
    with pytest.raises(KeyError), budget.grant(7):
        assert budget.used_bytes == 7
        raise KeyError
    assert budget.used_bytes == 0
    assert budget.peak_bytes == 7


def test_wrong_calls_are_refused() -> None:
    budget = Budget(10)
    for call in (
        lambda: budget.acquire(-1),
        lambda: budget.release(1),
        lambda: budget.resize(0),
        lambda: Budget(0),
        lambda: MemoryWatch(limit_bytes=0),
    ):
        with pytest.raises(UsageError):
            call()
    assert budget.used_bytes == 0
    assert budget.limit_bytes == 10


def test_many_threads_never_exceed_the_limit() -> None:
    budget = Budget(100)
    sizes = [1 + 7 * i % 60 for i in range(40)]

    def work() -> None:
        for n in sizes:
            with budget.grant(n):
                assert budget.used_bytes <= 100

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert budget.used_bytes == 0
    assert 60 <= budget.peak_bytes <= 100


def test_watch_measures_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with MemoryWatch(interval_s=0.001) as watch:
        wait_until(lambda: len(watch.samples) >= 5)
    assert set(threading.enumerate()) == before
    times = [t for t, _ in watch.samples]
    assert times == sorted(times)
    assert watch.peak_bytes == max(size for _, size in watch.samples)
    assert watch.peak_bytes > 1_000_000


def test_watch_stops_at_once() -> None:
    start_s = time.monotonic()
    with MemoryWatch(interval_s=60) as watch:
        pass
    assert time.monotonic() - start_s < 20
    assert watch.peak_bytes > 0


def test_watch_halves_and_grows_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    rss = 95
    monkeypatch.setattr(memory, "rss_bytes", lambda tree: rss)
    budgets: list[Budget] = []
    with MemoryWatch(limit_bytes=100, budgets=budgets, interval_s=0.001):
        late = Budget(1600)
        budgets.append(late)
        seen = []
        real_resize = late.resize
        monkeypatch.setattr(late, "resize", lambda n: (seen.append(n), real_resize(n)))
        wait_until(lambda: late.limit_bytes == 100)
        time.sleep(0.01)
        assert late.limit_bytes == 100  # 1/16 is the floor
        rss = 80
        time.sleep(0.01)
        assert late.limit_bytes == 100  # between the marks nothing changes
        rss = 60
        wait_until(lambda: late.limit_bytes == 1600)
        growth = [b / a for a, b in itertools.pairwise(seen) if b > a]
        assert all(step < 1.27 for step in growth)
        rss = 95
        wait_until(lambda: late.limit_bytes == 100)
    assert late.limit_bytes == 1600


def test_watch_thins_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter(range(10_000))
    monkeypatch.setattr(memory, "rss_bytes", lambda tree: next(sizes))
    monkeypatch.setattr(memory, "highest_rss_bytes", lambda: 0)
    with MemoryWatch(interval_s=60) as watch:
        for _ in range(8999):
            watch._sample()
    assert 900 <= len(watch.samples) <= 2000
    gaps = {b - a for (_, a), (_, b) in zip(watch.samples, watch.samples[1:], strict=False)}
    assert len(gaps) == 1  # even over the whole run
    assert watch.peak_bytes == 8999


def test_a_peak_between_two_samples_counts() -> None:
    with MemoryWatch(interval_s=60) as watch:
        spike = bytearray(300 << 20)
        spike[:] = b"x" * len(spike)
        del spike
    assert watch.peak_bytes > 300 << 20


def test_watch_error_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = OSError("no /proc")

    def fail_in_the_background(tree: bool) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise failure
        return 1

    monkeypatch.setattr(memory, "rss_bytes", fail_in_the_background)
    with pytest.raises(OSError, match="no /proc") as caught, MemoryWatch(interval_s=0) as watch:
        watch._thread.join(20)
    assert caught.value is failure
    watch.close()  # raised once
    with pytest.raises(KeyError), MemoryWatch(interval_s=0) as watch:  # the block's own error
        watch._thread.join(20)
        raise KeyError
