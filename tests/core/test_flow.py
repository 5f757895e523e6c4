"""Stages: order, the bound in bytes, errors, and no thread left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.flow import Cancelled, Flow
from penstock.core.memory import MemoryWatch
from penstock.errors import UsageError


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll with a limit that only a hang reaches."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never became true"
        time.sleep(0.001)


def one(item: object) -> int:
    return 1


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


class Ledger:
    """Counts what is between the input and the consumer, by its own means."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0

    def read(self, sizes: list[int]) -> Iterator[int]:
        for n in sizes:
            self.largest_bytes = max(self.largest_bytes, n)
            with self.lock:
                self.live_bytes += n
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            yield n

    def done(self, n: int) -> None:
        with self.lock:
            self.live_bytes -= n


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 120), max_size=60),
    limit_bytes=st.integers(1, 200),
    workers=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_order_and_bound_for_any_sizes(
    sizes: list[int], limit_bytes: int, workers: int, seed: int
) -> None:
    rng = random.Random(seed)
    pauses = {i: rng.choice([0, 0, 0.0005]) for i in range(len(sizes))}
    ledger = Ledger()

    def work(pair: tuple[int, int]) -> tuple[int, int]:
        time.sleep(pauses[pair[0]])
        return pair

    got = []
    with Flow(limit_bytes=limit_bytes) as flow:
        pairs = enumerate(ledger.read(sizes))
        for index, n in flow.map(work, pairs, workers=workers, name="m", size=lambda p: p[1]):
            got.append((index, n))
            ledger.done(n)
    assert got == list(enumerate(sizes))
    (budget,) = flow.budgets
    assert budget.used_bytes == 0
    largest = max(sizes, default=0)
    assert budget.peak_bytes <= max(limit_bytes, largest)
    # From outside one item more is seen: the one that was pulled and waits for its grant.
    assert ledger.peak_bytes <= max(limit_bytes, largest) + largest


def test_three_chained_stages_keep_order_with_random_sleeps() -> None:
    rng = random.Random(0)
    pauses = [rng.random() * 0.004 for _ in range(150)]

    def slow(i: int) -> int:
        time.sleep(pauses[i])
        return i

    def negate(i: int) -> int:
        time.sleep(pauses[-i])
        return -i

    with Flow("chain", limit_bytes=20) as flow:
        numbers = flow.source(range(150), name="read", size=one)
        slowed = flow.map(slow, numbers, workers=4, name="slow", size=one)
        negated = flow.map(negate, slowed, workers=3, name="negate", size=one)
        assert list(negated) == [-i for i in range(150)]
        assert list(negated) == []  # an ended stage stays ended
    assert len(flow.budgets) == 3
    assert all(0 < budget.peak_bytes <= 20 for budget in flow.budgets)


def test_workers_run_side_by_side() -> None:
    together = threading.Barrier(3, timeout=20)
    with Flow() as flow:
        list(flow.map(lambda _: together.wait(), range(9), workers=3, name="m", size=one))


def test_a_generator_is_never_advanced_by_two_threads() -> None:
    def numbers() -> Iterator[int]:  # a second thread would raise "generator already executing"
        for i in range(200):
            time.sleep(0.0001)
            yield i

    with Flow() as flow:
        got = list(flow.map(lambda i: i, numbers(), workers=6, name="m", size=one))
    assert got == list(range(200))


def test_slow_consumer_keeps_the_bound_and_loses_nothing() -> None:
    ledger = Ledger()
    got = []
    with Flow(limit_bytes=50) as flow:
        items = flow.map(lambda n: n, ledger.read([10] * 40), workers=3, name="m", size=int)
        for n in items:
            if len(got) < 5:
                wait_until(lambda: ledger.live_bytes == 60)  # full, and one at the door
                time.sleep(0.005)
                assert ledger.live_bytes == 60
                assert flow.budgets[0].used_bytes == 50  # what the consumer holds included
            got.append(n)
            ledger.done(n)
    assert got == [10] * 40


def test_source_reads_ahead_of_the_consumer() -> None:
    read = []

    def numbers() -> Iterator[int]:
        for i in range(10):
            read.append(i)
            yield i

    with Flow() as flow:
        items = flow.source(numbers(), name="read", size=one)
        time.sleep(0.01)
        assert read == []  # nothing starts before it is asked for
        assert next(items) == 0
        wait_until(lambda: len(read) == 10)


def test_huge_item_passes_alone() -> None:
    sizes = [5, 5, 1000, 5, 2000, 3000, 5]
    with Flow(limit_bytes=10) as flow:
        for index, n in enumerate(flow.map(int, sizes, workers=3, name="m", size=int)):
            assert n == sizes[index]
            if n >= 1000:
                assert flow.budgets[0].used_bytes == n
    assert flow.budgets[0].peak_bytes == 3000


def test_items_without_size_are_bounded_too() -> None:
    with Flow(limit_bytes=4) as flow:
        items = flow.source(iter(int, 1), name="zeros", size=int)
        next(items)
        wait_until(lambda: flow.budgets[0].used_bytes == 4)


def test_nothing_taken_is_kept_alive() -> None:
    class Blob:
        pass

    def blobs() -> Iterator[Blob]:
        for _ in range(3):
            yield Blob()
        release.wait(20)

    release = threading.Event()
    with Flow() as flow:
        raw = flow.source(blobs(), name="read", size=one)
        refs = []
        for blob in flow.map(lambda b: b, raw, workers=2, name="m", size=one):
            refs.append(weakref.ref(blob))
            del blob
            if len(refs) == 3:
                # Workers wait for a fourth item by now, and hold none of the first two.
                wait_until(lambda: (gc.collect(), refs[0]() is None and refs[1]() is None)[1])
                release.set()


class Broken(Exception):
    pass


def test_error_in_source_is_raised_once_as_the_same_object() -> None:
    error = Broken()

    def numbers() -> Iterator[int]:
        yield 1
        raise error

    with Flow() as flow:
        items = flow.map(
            lambda i: i, flow.source(numbers(), name="s", size=one), name="m", size=one
        )
        with pytest.raises(Broken) as caught:
            list(items)
        assert caught.value is error
        assert not [t for t in threading.enumerate() if t.name.startswith("flow-")]
        with pytest.raises(Cancelled):  # never mistaken for the end of the data
            next(items)


def test_error_in_fn_stops_an_endless_source() -> None:
    error = Broken()
    closed = threading.Event()

    def forever() -> Iterator[int]:
        try:
            i = 0
            while True:
                yield i
                i += 1
        finally:
            closed.set()

    def fail(i: int) -> int:
        if i == 20:
            raise error
        return i

    with pytest.raises(Broken) as caught, Flow(limit_bytes=5) as flow:
        raw = flow.source(forever(), name="s", size=one)
        for _ in flow.map(fail, raw, workers=3, name="m", size=one):
            pass
    assert caught.value is error
    assert closed.is_set()
    assert [budget.used_bytes for budget in flow.budgets] == [0, 0]


@pytest.mark.parametrize("error", [Broken(), KeyboardInterrupt()])
def test_error_in_the_consumer_stops_everything(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, Flow(limit_bytes=5) as flow:
        raw = flow.source(iter(int, 1), name="s", size=one)
        for _ in flow.map(lambda i: i, raw, workers=3, name="m", size=one):
            raise error
    assert caught.value is error


def test_error_in_size_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), Flow() as flow:
        list(flow.source([0], name="s", size=lambda n: 1 // n))


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="POSIX signals")
def test_interrupt_while_waiting_for_an_item() -> None:
    main = threading.main_thread().ident
    assert main is not None
    # A shell in the background lets its programs ignore SIGINT: not what is tested here.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def numbers() -> Iterator[int]:
        yield 1
        time.sleep(0.05)  # the consumer waits by now
        signal.pthread_kill(main, signal.SIGINT)
        for i in iter(int, 1):
            time.sleep(0.001)
            yield i

    try:
        with pytest.raises(KeyboardInterrupt), Flow(limit_bytes=2) as flow:
            for _ in flow.map(int, flow.source(numbers(), name="s", size=one), name="m", size=one):
                pass
    finally:
        signal.signal(signal.SIGINT, before)


def test_first_error_wins() -> None:
    first = Broken("first")
    first_is_out = threading.Event()

    def fail(i: int) -> int:
        if i == 1:
            raise first
        first_is_out.wait(20)
        raise Broken("second")

    with Flow() as flow:
        items = flow.map(fail, range(2), workers=2, name="m", size=one)
        herald = threading.Thread(target=lambda: (flow._stopped.wait(20), first_is_out.set()))
        herald.start()
        with pytest.raises(Broken) as caught:
            list(items)
        herald.join()
    assert caught.value is first


def test_earlier_background_error_wins_over_the_consumers() -> None:
    error = Broken("in the background")

    def numbers() -> Iterator[int]:
        yield 1
        raise error

    with pytest.raises(Broken) as caught, Flow() as flow:
        next(flow.source(numbers(), name="s", size=one))
        wait_until(flow._stopped.is_set)
        raise KeyError
    assert caught.value is error
    assert isinstance(error.__context__, KeyError)


def test_interrupt_is_never_replaced() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise Broken

    with pytest.raises(KeyboardInterrupt), Flow() as flow:
        next(flow.source(numbers(), name="s", size=one))
        wait_until(flow._stopped.is_set)
        raise KeyboardInterrupt


def test_unseen_background_error_is_raised_on_leaving() -> None:
    going = threading.Event()

    def fail(i: int) -> int:
        if i == 0:
            return i
        going.set()
        wait_until(flow._stopped.is_set)  # fails only when the block is being left
        raise Broken

    with pytest.raises(Broken), Flow() as flow:
        next(flow.map(fail, range(2), name="m", size=one))
        going.wait(20)


def test_stop_iteration_in_fn_is_not_the_end_of_the_data() -> None:
    with pytest.raises(RuntimeError, match="stage 'm' raised StopIteration"), Flow() as flow:
        list(flow.map(lambda i: next(iter(())), range(3), name="m", size=one))


@pytest.mark.parametrize("from_worker", [False, True])
def test_cancel_ends_the_iteration(from_worker: bool) -> None:
    got = []

    def work(i: int) -> int:
        if from_worker and i == 30:
            flow.cancel()
        return i

    def numbers() -> Iterator[int]:
        i = 0
        while True:
            yield i
            i += 1

    with Flow("job", limit_bytes=5) as flow:
        raw = flow.source(numbers(), name="s", size=one)
        items = flow.map(work, raw, workers=2, name="m", size=one)
        timer = threading.Timer(0.02, lambda: None if from_worker else flow.cancel())
        timer.start()
        with pytest.raises(Cancelled, match="'job' was cancelled"):
            for i in items:
                got.append(i)
        timer.join()
    assert got == list(range(len(got)))


def test_cancel_while_the_consumer_waits() -> None:
    stuck = threading.Event()

    def wait_for_stop(i: int) -> int:
        stuck.set()
        flow._stopped.wait(20)
        return i

    def cancel_when_stuck() -> None:
        stuck.wait(20)
        flow.cancel()

    with Flow() as flow:
        canceller = threading.Thread(target=cancel_when_stuck)
        canceller.start()
        with pytest.raises(Cancelled):
            next(flow.map(wait_for_stop, range(1), name="m", size=one))
        canceller.join()


def test_leaving_early_ends_every_thread_and_closes_generators() -> None:
    closed = []

    def numbers(name: str, inner: Iterator[int]) -> Iterator[int]:
        try:
            yield from inner
        finally:
            closed.append(name)

    with Flow(limit_bytes=3) as flow:
        raw = flow.source(numbers("first", iter(int, 1)), name="s", size=one)
        again = numbers("second", flow.map(int, raw, workers=2, name="m", size=one))
        items = flow.map(int, again, workers=2, name="n", size=one)
        assert next(items) == 0
        assert len([t for t in threading.enumerate() if t.name.startswith("flow-")]) == 5
        assert not any(t.daemon for t in threading.enumerate() if t.name.startswith("flow-"))
    assert sorted(closed) == ["first", "second"]
    assert [budget.used_bytes for budget in flow.budgets] == [0, 0, 0]
    with pytest.raises(Cancelled):
        next(items)


def test_error_while_closing_a_generator_is_raised() -> None:
    def numbers() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            raise Broken

    with pytest.raises(Broken), Flow(limit_bytes=3) as flow:
        next(flow.source(numbers(), name="s", size=one))


def test_a_file_stays_the_callers(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "lines")
    with open(path, "w+") as file:
        file.write("a\nb\n")
        file.seek(0)
        with Flow() as flow:
            assert list(flow.source(file, name="s", size=len)) == ["a\n", "b\n"]
        assert not file.closed


def test_wrong_calls_are_refused() -> None:
    flow = Flow()
    early = flow.source([1], name="s", size=one)
    with pytest.raises(UsageError, match="not open"):
        next(early)
    with pytest.raises(UsageError, match="two stages 's'"):
        flow.source([1], name="s", size=one)
    with pytest.raises(UsageError, match="0 workers"):
        flow.map(int, [1], workers=0, name="m", size=one)
    with flow:
        assert list(early) == [1]
    with pytest.raises(UsageError, match="entered before"):
        flow.__enter__()


def test_timings_tell_who_waits_for_whom() -> None:
    def slow_read() -> Iterator[int]:
        for i in range(10):
            time.sleep(0.01)
            yield i

    with Flow() as flow:
        raw = flow.source(slow_read(), name="read", size=lambda _: 7)
        list(flow.map(lambda i: i, raw, name="work", size=lambda _: 3))
    read, work = flow.timings["read"], flow.timings["work"]
    assert (read.items, read.bytes) == (10, 70)
    assert (work.items, work.bytes) == (10, 30)
    assert read.busy_s >= 0.09
    assert read.starved_s == 0
    assert work.starved_s >= 0.09
    assert work.starved_s > work.busy_s + work.blocked_s

    with Flow(limit_bytes=2) as flow:
        raw = flow.source(range(10), name="read", size=one)
        for _ in flow.map(lambda i: time.sleep(0.01), raw, workers=2, name="work", size=one):
            pass
    assert flow.timings["work"].busy_s >= 0.09
    assert flow.timings["read"].blocked_s > flow.timings["read"].busy_s
    flow.timings["work"].items = -1
    assert flow.timings["work"].items == 10  # a copy was given out


def test_budget_can_shrink_while_running() -> None:
    with Flow(limit_bytes=100) as flow:
        items = flow.source(range(1000), name="s", size=lambda _: 10)
        got = [next(items)]
        wait_until(lambda: flow.budgets[0].used_bytes == 100)
        flow.budgets[0].resize(20)
        for i in items:
            got.append(i)
            if i == 50:
                time.sleep(0.01)
                assert flow.budgets[0].used_bytes <= 20
    assert got == list(range(1000))


def test_memory_watch_takes_the_budgets_of_a_flow() -> None:
    with Flow(limit_bytes=1600) as flow, MemoryWatch(1, flow.budgets, interval_s=0.001):
        items = flow.source(range(5000), name="s", size=lambda _: 10)
        next(items)
        wait_until(lambda: flow.budgets[0].limit_bytes == 100)
        assert list(items) == list(range(1, 5000))


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux")
def test_nice_lowers_the_workers_only() -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)

    def priority(_: int) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with Flow(nice=19) as flow:
        assert set(flow.map(priority, range(8), workers=2, name="m", size=one)) == {19}
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual


def test_nice_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    with Flow(nice=-20) as flow:
        assert list(flow.source(range(3), name="s", size=one)) == [0, 1, 2]
