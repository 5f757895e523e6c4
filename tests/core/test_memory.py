"""Sizes as text, budgets in bytes, and the watch that adapts them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import memory
from penstock.core.memory import Budget, MemoryWatch, format_bytes, parse_bytes, rss_bytes
from penstock.errors import UsageError


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll with a limit that only a hang reaches."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never became true"
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        (1234, 1234),
        ("17B", 17),
        ("2kB", 2_000),
        ("2KB", 2_000),
        ("512MB", 512_000_000),
        ("0.1 GB", 100_000_000),
        ("1KiB", 1024),
        ("1.5 MiB", 1_572_864),
        (" 2gib ", 2**31),
    ],
)
def test_parse_bytes(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("bad", ["", "MB", "-1MB", "12 parsecs", "1e9", "1.5.2GB", -3, True, 1.5])
def test_parse_bytes_names_the_bad_value(bad: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(bad)  # type: ignore[arg-type]
    message = str(caught.value)
    assert repr(bad) in message
    assert "512MB" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (1_500_000_000, "1.5 GB"),
        (-2_000_000, "-2.0 MB"),
        (3 * 10**12, "3.0 TB"),
    ],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 10**12 - 10**8))
def test_format_is_parsed_back_within_its_rounding(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.051)


def test_rss_counts_children_and_ignores_vanished_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = rss_bytes(tree=False)
    assert alone == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    code = "x = bytearray(60_000_000); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert rss_bytes(tree=True) > rss_bytes(tree=False) + 60_000_000
        gone = psutil.Process(child.pid)
        child.communicate(b"\n")
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [gone])
    assert rss_bytes(tree=True) == pytest.approx(alone, rel=0.2)


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
    with MemoryWatch(interval_s=60) as watch:
        for _ in range(8999):
            watch._sample()
    assert 900 <= len(watch.samples) <= 2000
    gaps = {b - a for (_, a), (_, b) in zip(watch.samples, watch.samples[1:], strict=False)}
    assert len(gaps) == 1  # even over the whole run
    assert watch.peak_bytes == 8999


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
