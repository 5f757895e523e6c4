"""PipelinedDataCollector: ahead of the learner, and it always ends."""

import gc
import subprocess
import sys
import threading
import time
import traceback
import weakref

import pytest
import torch

from harness import told
from penstock import errors
from penstock.rollouts.collect import PipelinedDataCollector

from .toys import Fresh, number, wait_started

pytestmark = pytest.mark.usefixtures("no_thread_survives")


def test_it_runs_ahead_and_no_further():
    base = Fresh(count=20)
    with PipelinedDataCollector(base, prefetch_count=3) as collector:
        for i, _ in enumerate(collector):
            wait_started(base, i + 4)
            time.sleep(0.003)
            assert len(base.started) == min(20, i + 4)
        assert i == 19
    assert len(base.threads) == 1
    assert threading.main_thread() not in base.threads
    assert base.shutdowns == [threading.current_thread()]  # the other thread was over


def test_bytes_are_bounded():
    base = Fresh(count=8, size=1000)
    with PipelinedDataCollector(base, prefetch_count=5, max_bytes=20_000) as collector:
        for _ in collector:
            time.sleep(0.01)
        stats = collector.stats()
    assert stats["batches"] == 8
    assert 8000 <= stats["peak_bytes"] <= 20_000
    with PipelinedDataCollector(Fresh(count=3), prefetch_count=5, max_bytes=1) as collector:
        assert len(list(collector)) == 3  # too large, but alone


def test_overlap():
    """While the learner has a batch, the collector begins those that come after it."""
    base = Fresh(count=12, delay_s=0.01)
    with PipelinedDataCollector(base) as collector:
        for done, _ in enumerate(collector, start=1):
            wait_started(base, done + 2)  # `prefetch_count` batches ahead, or all that there are


def test_the_collector_uses_as_many_cores_as_the_learner():
    """Torch keeps this setting per thread; a fresh thread would use all cores."""
    found = []

    def base():
        found.append(torch.get_num_threads())
        yield number(0)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with PipelinedDataCollector(base()) as collector:
            list(collector)
    finally:
        torch.set_num_threads(before)
    assert found == [1]


class Broken:
    def __iter__(self):
        yield number(0)
        yield number(1)
        self._fail()

    def _fail(self):
        raise ZeroDivisionError("in the simulator")


def test_an_error_comes_after_what_was_collected():
    with PipelinedDataCollector(Broken()) as collector:
        seen = []
        with pytest.raises(ZeroDivisionError, match="in the simulator") as raised:
            for batch in collector:
                seen.append(int(batch["x"][0]))
        assert seen == [0, 1]
        assert "_fail" in "".join(traceback.format_tb(raised.tb))
        with pytest.raises(ZeroDivisionError):  # the next loop starts it anew
            list(collector)


def test_leaving_a_loop_loses_nothing():
    base = Fresh(count=10)
    with PipelinedDataCollector(base) as collector:
        seen = []
        for batch in collector:
            seen.append(int(batch["x"][0]))
            if len(seen) == 3:
                break
        for batch in collector:
            seen.append(int(batch["x"][0]))
        assert seen == list(range(10))
        assert [int(batch["x"][0]) for batch in collector] == list(range(10))  # anew
    with pytest.raises(errors.SaverClosed, match="shut down"):
        list(collector)


def test_shutdown_in_the_middle():
    base = Fresh(count=10**9)
    collector = PipelinedDataCollector(base)
    for i, _ in enumerate(collector):
        if i == 2:
            assert collector.shutdown()
    assert i == 2
    assert collector.shutdown()
    assert len(base.shutdowns) == 1
    assert base.shutdowns[0] in base.threads  # the thread that used it


def test_shutdown_before_anything():
    base = Fresh()
    collector = PipelinedDataCollector(base)
    assert collector.shutdown()
    assert base.shutdowns == [threading.current_thread()]
    assert base.started == []


def test_shutdown_returns_from_a_blocked_step(caplog):
    leave = threading.Event()

    class Blocked(Fresh):
        def __iter__(self):
            yield number(0)
            leave.wait(30)
            yield number(1)

    base = Blocked()
    collector = PipelinedDataCollector(base)
    iterator = iter(collector)
    next(iterator)
    begin = time.monotonic()
    assert collector.shutdown(timeout=0.2) is False
    assert time.monotonic() - begin < 5
    assert "still in a step" in caplog.text
    assert base.shutdowns == []  # never while another thread is in it
    assert list(iterator) == []
    leave.set()
    assert collector.shutdown(timeout=20) is True
    assert len(base.shutdowns) == 1


def test_an_error_of_the_base_shutdown_is_told_once(caplog):
    class Bad(Fresh):
        def shutdown(self):
            raise OSError("simulator gone")

    collector = PipelinedDataCollector(Bad(count=10**9))
    next(iter(collector))
    with pytest.raises(OSError, match="simulator gone"):
        collector.shutdown()
    assert collector.shutdown()
    with pytest.raises(KeyError, match="mine") as raised, PipelinedDataCollector(Bad()):
        raise KeyError("mine")
    assert "simulator gone" in told(raised.value, caplog)


def test_a_forgotten_collector_stops_its_thread_and_leaves_the_base():
    base = Fresh(count=10**9)
    collector = PipelinedDataCollector(base)
    for _ in collector:
        break
    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None
    (thread,) = base.threads
    thread.join(20)
    assert not thread.is_alive()
    assert base.shutdowns == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefetch_count": 0}, "prefetch_count=0"),
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"max_staleness": -1}, "max_staleness=-1"),
        ({"base_collector": 5}, "cannot be iterated"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(errors.UsageError, match=message):
        PipelinedDataCollector(**{"base_collector": [], **arguments})


def test_what_is_no_tensordict_passes():
    with PipelinedDataCollector([None, 5, "x", (torch.ones(2),)], device="cpu") as collector:
        found = list(collector)
    assert found[:3] == [None, 5, "x"]
    assert (found[3][0] == 1).all()
    with PipelinedDataCollector([]) as collector:
        assert list(collector) == []


PROGRAM = """
import torch
from tensordict import TensorDict
from penstock.rollouts.collect import PipelinedDataCollector
def base():
    while True:
        yield TensorDict({"x": torch.zeros(5)}, batch_size=[5])
collector = PipelinedDataCollector(base())
for batch in collector:
    break
print("end", flush=True)
"""


def test_a_program_that_forgets_shutdown_ends():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False
    )
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr


INTERRUPTS = """
import random, signal, time
import torch
from tensordict import TensorDict
from penstock.rollouts.collect import PipelinedDataCollector
def base():
    while True:
        time.sleep(0.0005)
        yield TensorDict({"x": torch.zeros(5)}, batch_size=[5])
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
random.seed(0)
came = batches = 0
collector = PipelinedDataCollector(base())
while came < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.004))
        for _ in collector:
            batches += 1
    except KeyboardInterrupt:
        came += 1
signal.setitimer(signal.ITIMER_REAL, 0)
before = batches
for _ in collector:
    batches += 1
    if batches == before + 20:
        break
collector.shutdown()
print("end", flush=True)
"""


def test_interrupts_while_the_learner_waits_come_as_they_are():
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTS], capture_output=True, text=True, timeout=240, check=False
    )
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr
