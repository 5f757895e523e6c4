"""PipelinedDataCollector: nothing is overwritten under the learner."""

import time
import weakref

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from penstock.rollouts.collect import PipelinedDataCollector

from .toys import Fresh, number

pytestmark = pytest.mark.usefixtures("no_thread_survives")


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
    assert [values(batch) for batch in kept] == [{i} for i in range(20)]


@pytest.mark.parametrize("length", [4, 7])
def test_a_long_ring_is_not_overwritten(length):
    class LongRing:
        def __iter__(self):
            ring = [number(-1) for _ in range(length)]
            for i in range(30):
                ring[i % length]["x"].fill_(i)
                yield ring[i % length]

    with PipelinedDataCollector(LongRing(), prefetch_count=2) as collector:
        kept = list(collector)
    assert [values(batch) for batch in kept] == [{i} for i in range(30)]


def test_memory_that_is_used_again_only_later():
    class Turncoat:
        def __iter__(self):
            for i in range(6):
                yield number(i)
            same = number(-1)
            for i in range(6, 12):
                same["x"].fill_(i)
                yield same

    with PipelinedDataCollector(Turncoat(), prefetch_count=1) as collector:
        kept = list(collector)
    assert [values(batch) for batch in kept] == [{i} for i in range(12)]


def test_the_learner_owns_its_batch():
    """Nothing here keeps a batch alive once the learner has let go of it."""
    with PipelinedDataCollector(Fresh(count=8), prefetch_count=1) as collector:
        i = 0  # `enumerate` would keep the batch in its tuple
        for batch in collector:
            memory = weakref.ref(batch["x"])
            del batch
            i += 1  # noqa: SIM113
            time.sleep(0.005)
            assert memory() is None


@pytest.mark.parametrize("return_same_td", [True, False])
def test_a_torchrl_collector(return_same_td):
    Collector = pytest.importorskip("torchrl.collectors").Collector
    from .toy_env import Counting

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
    assert len(kept) == 8
    for batch, truth in zip(kept, expected, strict=True):
        assert torch.equal(batch["next", "observation"], truth)
    assert base.closed


def test_stacks_of_unequal_shapes():
    stack = lazy_stack([TensorDict({"a": torch.full((n,), n)}) for n in (1, 2000)])
    nested = TensorDict({"inner": stack.clone(), "b": torch.zeros(2)}, [2])
    with PipelinedDataCollector([stack, nested], max_bytes=1) as collector:
        first, second = collector
        assert collector.stats()["peak_bytes"] > 16_000
    stack[1]["a"].zero_()
    for got in (first, second["inner"]):
        assert [part["a"].tolist() for part in got.unbind(0)] == [[1], [2000] * 2000]
