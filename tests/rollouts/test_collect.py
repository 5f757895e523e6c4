"""PipelinedDataCollector: ahead of the learner, never under it, and it always ends."""

import gc
import subprocess
import sys
import threading
import time
import traceback
import weakref

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from penstock import errors
from penstock.rollouts.collect import PipelinedDataCollector


@pytest.fixture(autouse=True)
def no_thread_survives():
    before = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + 20
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, set(threading.enumerate()) - before
        time.sleep(0.005)


def number(value, size=100):
    return TensorDict({"x": torch.full((size,), value)}, batch_size=[size])


class Fresh:
    """Makes new batches; notes when each was started and in which thread."""

    def __init__(self, count=10, delay_s=0.0, size=100):
        self.count, self.delay_s, self.size = count, delay_s, size
        self.started = []
        self.threads = set()
        self.shutdowns = []

    def __iter__(self):
        for i in range(self.count):
            self.started.append(i)
            self.threads.add(threading.current_thread())
            time.sleep(self.delay_s)
            yield number(i, self.size)

    def shutdown(self):
        self.shutdowns.append(threading.current_thread())


def wait_started(base, count):
    """Wait until the collector has begun so many batches (or all that it has)."""
    deadline = time.monotonic() + 20
    while len(base.started) < min(count, base.count):
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Reusing:
    """Overwrites one TensorDict, or a ring of them, or slices of one buffer."""

    def __init__(self, kind, count=20):
        self.kind, self.count = kind, count

    def __iter__(self):
        same = number(-1)
        ring = [number(-1) for _ in range(2)]
        buffer = torch.zeros(4, 100, dtype=torch.int64)
        for i in range(self.count):
            match self.kind:
                case "same":
                    batch = same
                    batch["x"].fill_(i)
                case "set":  # the same object with new tensors in it
                    batch = same
                    batch["x"] = torch.full((100,), i)
                case "tensors":  # new objects over the same memory
                    batch = TensorDict({"x": same["x"].fill_(i)}, batch_size=[100])
                case "ring":
                    batch = ring[i % 2]
                    batch["x"].fill_(i)
                case "slices":
                    buffer[i % 4].fill_(i)
                    batch = {"obs": [buffer[i % 4]]}
                case "fresh":
                    batch = number(i)
            yield batch


def values(batch):
    tensor = batch["x"] if isinstance(batch, TensorDict) else batch["obs"][0]
    return set(tensor.tolist())


@pytest.mark.parametrize("prefetch", [1, 2, 4])
@pytest.mark.parametrize("kind", ["same", "set", "tensors", "ring", "slices", "fresh"])
def test_nothing_is_overwritten_under_the_learner(kind, prefetch):
    with PipelinedDataCollector(Reusing(kind), prefetch_count=prefetch) as collector:
        kept = []
        for i, batch in enumerate(collector):
            assert values(batch) == {i}
            time.sleep(0.002)  # the collector runs ahead meanwhile
            assert values(batch) == {i}
            kept.append(batch)
        assert len(kept) == 20
        stats = collector.stats()
    assert stats["reuses_memory"] is (kind != "fresh")
    if kind != "fresh":  # even those that the learner kept
        assert [values(batch) for batch in kept] == [{i} for i in range(20)]
        assert stats["cloned"] == 20
    else:
        assert stats["cloned"] == prefetch + 2


def test_a_long_ring_is_not_overwritten_while_in_use():
    class LongRing:
        def __iter__(self):
            ring = [number(-1) for _ in range(4)]  # prefetch_count + 2
            for i in range(30):
                ring[i % 4]["x"].fill_(i)
                yield ring[i % 4]

    with PipelinedDataCollector(LongRing(), prefetch_count=2) as collector:
        for i, batch in enumerate(collector):
            time.sleep(0.002)
            assert values(batch) == {i}


def test_a_collector_that_betrays_trust_is_found_out():
    class Turncoat:
        def __iter__(self):
            for i in range(6):
                yield number(i)
            same = number(-1)
            for i in range(6, 12):
                same["x"].fill_(i)
                yield same

    with PipelinedDataCollector(Turncoat(), prefetch_count=1) as collector:
        seen = []
        with pytest.raises(errors.UsageError, match="still in use"):
            for batch in collector:
                seen.append(batch)
    assert len(seen) >= 6


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
    base = Fresh(count=12, delay_s=0.03)
    begin = time.perf_counter()
    with PipelinedDataCollector(base) as collector:
        for _ in collector:
            time.sleep(0.03)
    elapsed = time.perf_counter() - begin
    assert elapsed < 12 * 0.06 / 1.3  # 1.85x when nothing else runs


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


def test_strictly_on_policy():
    """With max_staleness=0 a batch is started only when the learner asks for it."""
    base = Fresh(count=6, delay_s=0.005)
    with PipelinedDataCollector(base, prefetch_count=3, max_staleness=0) as collector:
        for i, _ in enumerate(collector):
            time.sleep(0.02)
            assert len(base.started) == i + 1
            if i % 2:
                collector.advance_policy(3)
            assert collector.staleness == 0
        assert collector.stats()["staleness_max"] == 0
        assert collector.stats()["dropped"] == 0


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_default_staleness(prefetch, counts):
    """One update per batch, counted by the learner or not: never more than prefetch_count."""
    found = []
    base = Fresh(count=15)
    with PipelinedDataCollector(base, prefetch_count=prefetch) as collector:
        for _ in collector:
            found.append(collector.staleness)
            wait_started(base, len(found) + prefetch)
            if counts:
                collector.advance_policy()
        stats = collector.stats()
    assert max(found) == prefetch == stats["staleness_max"]
    assert stats["staleness_mean"] == sum(found) / 15
    assert found[0] == 0


@pytest.mark.parametrize("limit", [1, 2])
def test_limited_staleness(limit):
    base = Fresh(count=15)
    with PipelinedDataCollector(base, prefetch_count=5, max_staleness=limit) as collector:
        found = []
        for _ in collector:
            found.append(collector.staleness)
            wait_started(base, len(found) + limit)
        assert max(found) == limit
        assert collector.stats()["dropped"] == 0
        assert len(found) == 15


def test_a_batch_that_got_too_old_is_dropped():
    """The learner updates more often than it did: nothing over the limit is handed out."""
    base = Fresh(count=12)
    with PipelinedDataCollector(base, prefetch_count=2, max_staleness=1) as collector:
        seen = []
        for batch in collector:
            assert collector.staleness <= 1
            seen.append(int(batch["x"][0]))
            if len(seen) <= 4:  # afterwards nothing is started any more while the learner works
                wait_started(base, len(seen) + 1)
            collector.advance_policy(1 if len(seen) < 4 else 4)
        stats = collector.stats()
    assert stats["dropped"] >= 1
    assert stats["dropped"] + len(seen) == 12
    assert stats["dropped"] <= 2  # it learns how many updates a batch brings


def test_a_version_from_outside():
    version = [10]
    base = Fresh(count=4)
    with PipelinedDataCollector(
        base, prefetch_count=1, policy_version=lambda: version[0]
    ) as collector:
        found = []
        for _ in collector:
            wait_started(base, len(found) + 2)
            version[0] += 5
            found.append(collector.staleness)
        assert collector.stats()["version"] == 30
    assert found == [0, 5, 5, 5]


def test_policy_weights_are_passed_on():
    class WithPolicy(Fresh):
        def update_policy_weights_(self, *args, **kwargs):
            self.updates = [*getattr(self, "updates", []), (args, kwargs)]

    base = WithPolicy(count=2)
    with PipelinedDataCollector(base) as collector:
        for _ in collector:
            collector.update_policy_weights_("w", model_id="x")
        assert collector.stats()["version"] == 2
    assert base.updates == [(("w",), {"model_id": "x"})] * 2
    with PipelinedDataCollector([number(1)]) as collector:
        collector.update_policy_weights_()
        assert collector.stats()["version"] == 1


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


def test_an_error_of_the_base_shutdown_is_told_once():
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
    assert "simulator gone" in raised.value.__notes__[0]


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


def test_the_learner_owns_its_batch():
    """Nothing here keeps a batch alive once the learner has let go of it."""
    with PipelinedDataCollector(Fresh(count=8), prefetch_count=1) as collector:
        i = 0  # `enumerate` would keep the batch in its tuple
        for batch in collector:
            memory = weakref.ref(batch["x"])
            del batch
            i += 1  # noqa: SIM113
            if i > 4:  # past the trial, whose originals are kept
                time.sleep(0.005)
                assert memory() is None


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
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr


class Counting(EnvBase):
    """An environment whose observation is the number of its steps."""

    def __init__(self):
        super().__init__(batch_size=[3])
        self.observation_spec = Composite(observation=Unbounded((3, 50)), shape=[3])
        self.action_spec = Bounded(-1, 1, (3, 1))
        self.reward_spec = Unbounded((3, 1))
        self.count = 0

    def _reset(self, tensordict=None):
        return self._state(done=False)

    def _step(self, tensordict):
        self.count += 1
        out = self._state(done=False)
        out["reward"] = torch.full((3, 1), float(self.count))
        return out

    def _state(self, done):
        return TensorDict(
            {
                "observation": torch.full((3, 50), float(self.count)),
                "done": torch.full((3, 1), done),
                "terminated": torch.full((3, 1), done),
            },
            batch_size=[3],
        )

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("return_same_td", [True, False])
def test_a_torchrl_collector(return_same_td):
    def make():
        return Collector(
            Counting(),
            None,
            frames_per_batch=12,
            total_frames=12 * 8,
            return_same_td=return_same_td,
        )

    plain = make()
    expected = [batch["next", "observation"].clone() for batch in plain]
    plain.shutdown()
    base = make()
    with PipelinedDataCollector(base, device="cpu") as collector:
        kept = []
        for i, batch in enumerate(collector):
            time.sleep(0.01)
            assert torch.equal(batch["next", "observation"], expected[i])
            kept.append(batch)
        stats = collector.stats()
    assert len(kept) == 8
    assert stats["reuses_memory"] is return_same_td
    assert stats["cloned"] == (8 if return_same_td else 4)
    for batch, truth in zip(kept, expected, strict=True):
        assert torch.equal(batch["next", "observation"], truth)
    assert base.closed
