"""Work on many items in threads: order, bound, errors, and no thread left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import interrupt_often
from penstock.core import threads
from penstock.core.threads import parallel_list, parallel_map


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


class Broken(Exception):
    pass


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 120), max_size=60),
    limit_bytes=st.integers(1, 200),
    helpers=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_order_and_bound_for_any_sizes(
    sizes: list[int], limit_bytes: int, helpers: int, seed: int
) -> None:
    rng = random.Random(seed)
    pauses = [rng.choice([0, 0, 0.0005]) for _ in sizes]
    held: list[int] = []
    peak = 0

    def pairs() -> Iterator[tuple[int, int]]:
        for pair in enumerate(sizes):
            held.append(pair[1])
            yield pair

    def work(pair: tuple[int, int]) -> tuple[int, int]:
        time.sleep(pauses[pair[0]])
        return pair

    got = []
    for pair in parallel_map(
        work, pairs(), name="t", helpers=helpers, size=lambda p: p[1], limit_bytes=limit_bytes
    ):
        peak = max(peak, sum(held))
        got.append(pair)
        held.remove(pair[1])
    assert got == list(enumerate(sizes))
    # One item more than the limit is seen: the one that was pulled and waits for room.
    largest = max(sizes, default=0)
    assert peak <= max(limit_bytes, largest) + largest


def test_helpers_run_side_by_side() -> None:
    barrier = threading.Barrier(3, timeout=20)  # two helpers and the caller
    assert len(list(parallel_map(lambda _: barrier.wait(), range(3), name="t", helpers=2))) == 3


def test_the_input_is_pulled_by_the_caller_only() -> None:
    pullers = set()

    def numbers() -> Iterator[int]:
        for i in range(200):
            pullers.add(threading.current_thread())
            yield i

    assert list(parallel_map(abs, numbers(), name="t", helpers=4)) == list(range(200))
    assert pullers == {threading.current_thread()}


def test_an_endless_input_is_bounded() -> None:
    pulled = 0

    def endless() -> Iterator[int]:
        nonlocal pulled
        while True:
            pulled += 1
            yield pulled

    items = parallel_map(abs, endless(), name="t", size=lambda _: 1, limit_bytes=8)
    with closing(items):
        assert [next(items) for _ in range(100)] == list(range(1, 101))
        assert pulled <= 100 + 9


def test_nothing_taken_is_kept_alive() -> None:
    class Blob:
        pass

    refs = []
    for blob in parallel_map(
        lambda _: Blob(), range(4), name="t", helpers=2, size=lambda _: 1, limit_bytes=3
    ):
        refs.append(weakref.ref(blob))
        del blob
        if len(refs) == 4:
            deadline = time.monotonic() + 20
            while any(ref() is not None for ref in refs[:3]):
                assert time.monotonic() < deadline
                gc.collect()


def test_an_error_takes_the_place_of_its_result() -> None:
    error = Broken("third")

    def work(i: int) -> int:
        if i == 2:
            raise error
        return i

    got = []
    with pytest.raises(Broken) as caught, closing(parallel_map(work, iter(int, 1), name="t")):
        for value in parallel_map(
            work, range(10_000_000), name="t", size=lambda _: 1, limit_bytes=9
        ):
            got.append(value)
    assert caught.value is error
    assert got == [0, 1]


@pytest.mark.parametrize("error", [Broken(), KeyboardInterrupt()])
def test_an_error_of_the_caller_ends_the_helpers(error: BaseException) -> None:
    items = parallel_map(abs, iter(int, 1), name="t", size=lambda _: 1, limit_bytes=9)
    with pytest.raises(type(error)), closing(items):
        for _ in items:
            raise error


def test_stop_iteration_is_not_the_end_of_the_data() -> None:
    def work(i: int) -> int:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(parallel_map(work, range(3), name="t"))


def test_leaving_early_ends_every_thread_and_closes_the_input() -> None:
    closed = []

    def numbers() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.append(True)

    items = parallel_map(abs, numbers(), name="t", helpers=3, size=lambda _: 1, limit_bytes=6)
    assert next(items) == 0
    workers = [t for t in threading.enumerate() if t.name.startswith("penstock-t")]
    assert len(workers) == 3
    assert not any(thread.daemon for thread in workers)
    del items
    assert closed == [True]


def test_an_interrupt_while_waiting() -> None:
    main = threading.main_thread().ident
    assert main is not None
    # A shell in the background lets its programs ignore SIGINT: not what is tested here.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def work(i: int) -> None:
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.2)
        elif i == 1:
            signal.pthread_kill(main, signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            list(parallel_map(work, range(1000), name="t", helpers=1))
    finally:
        signal.signal(signal.SIGINT, before)


def test_nice_lowers_the_helpers_only() -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)

    def priority(_: int) -> tuple[bool, int]:
        time.sleep(0.002)
        own = threading.current_thread() is threading.main_thread()
        return own, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen = set(parallel_map(priority, range(40), name="t", helpers=2, nice=19))
    assert seen <= {(True, usual), (False, 19)}
    assert (False, 19) in seen


def test_where_no_thread_can_start_the_caller_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert list(parallel_map(abs, range(50), name="t")) == list(range(50))


def test_an_iterator_that_is_left_open_does_not_hold_up_the_exit() -> None:
    code = """
import sys
from penstock.core.threads import parallel_map
items = parallel_map(abs, iter(int, 1), name="t", helpers=2, size=lambda _: 1, limit_bytes=5)
next(items)
sys.kept = items
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.mark.parametrize(("nbytes", "alone"), [(1 << 10, True), (64 << 20, False)])
def test_a_list_is_done_by_threads_when_it_is_large(nbytes: int, alone: bool) -> None:
    def work(i: int) -> int:
        time.sleep(0.005)
        threads.add(threading.current_thread())
        return -i

    threads: set[threading.Thread] = set()
    assert parallel_list(work, range(20), name="t", nbytes=nbytes) == [-i for i in range(20)]
    assert (threads == {threading.current_thread()}) is alone


def test_a_patient_caller_leaves_the_work_to_the_helpers() -> None:
    def work(item: int) -> str:
        time.sleep(0.002)
        return threading.current_thread().name

    names = list(parallel_map(work, range(40), name="idle", patient=lambda: True))
    assert threading.current_thread().name not in names
    assert len(names) == 40


def test_patience_ends_when_the_helpers_do_not_get_on() -> None:
    caller, release = threading.current_thread(), threading.Event()

    def work(item: int) -> int:
        if threading.current_thread() is not caller:
            release.wait(110)  # as if others had all the cores
        elif item == 9:
            release.set()
        return item

    items = parallel_map(work, range(10), name="starved", helpers=2, patient=lambda: True)
    assert list(items) == list(range(10))


def test_patience_ends_when_somebody_waits() -> None:
    asked: list[float] = []

    def patient() -> bool:
        asked.append(time.monotonic())
        return len(asked) < 3

    list(parallel_map(lambda item: time.sleep(0.05), range(6), name="hurried", patient=patient))
    assert len(asked) >= 3


def test_an_interrupt_at_any_moment_ends_it() -> None:
    done = interrupt_often(
        """
from contextlib import closing
from penstock.core.threads import parallel_map

def work():
    with closing(parallel_map(lambda item: time.sleep(0.0002), range(12), name="x")) as results:
        for _ in results:
            pass
"""
    )
    assert done.returncode == 0, done.stderr


def test_nobody_waits_for_helpers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_start", lambda thread: False)
    monkeypatch.setattr(threads, "_PATIENCE_S", 1000.0)
    assert list(parallel_map(str, range(9), name="alone", patient=lambda: True)) == list(
        "012345678"
    )
