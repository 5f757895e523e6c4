"""CompressedDataCollector: smaller in memory, exact, and decoded within a bound."""

import gc
import threading

import numpy as np
import pytest
import tensordict
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from penstock import errors
from penstock.core.extras import version_of
from penstock.rollouts.collect import PipelinedDataCollector
from penstock.rollouts.compressed import CompressedDataCollector, CompressedKey
from penstock.tensors import tensor_bytes

from .conftest import make_batch, same

EMPTY_STACKS = version_of(tensordict.__version__) >= (0, 10)  # older ones refuse them
LIDAR = ("agents", "observation", "lidar")


def compressed(batch, **options):
    (result,) = CompressedDataCollector([batch], **options)
    return result


def test_the_whole_is_exact_and_the_original_untouched():
    batch = make_batch(60, 32, names=["env", "time"])
    before = batch.clone()
    packed = compressed(batch)
    same(before, batch)
    same(before, packed.decompress())
    assert LIDAR in packed.compressed_keys
    assert ("done",) not in packed.compressed_keys  # small
    assert packed.ratio > 2
    assert packed.nbytes == pytest.approx(packed.raw_bytes / packed.ratio)
    assert packed.batch_size == (60, 32)
    assert len(packed) == 60
    assert packed.numel() == 60 * 32


def test_a_reused_batch_is_copied():
    batch = make_batch(60, 32)
    before = batch.clone()
    packed = compressed(batch)
    for tensor in batch.values(True, True):
        tensor.zero_()
    same(before, packed.decompress())


def test_noise_stays_plain():
    batch = TensorDict(
        {
            "noise": torch.randint(0, 256, (50, 20, 300), dtype=torch.uint8),
            "zeros": torch.zeros(50, 20, 300, dtype=torch.uint8),
        },
        batch_size=[50, 20],
    )
    assert compressed(batch).compressed_keys == [("zeros",)]
    asked = compressed(batch, keys=["noise"])
    assert asked.compressed_keys == [("noise",)]
    same(batch, asked.decompress())


BATCH = make_batch(24, 32, names=[None, "time"])
BATCH["label"] = "text"
BATCH["stack"] = NonTensorStack(
    *[NonTensorStack(*[NonTensorData(f"{e}.{t}") for t in range(32)]) for e in range(24)]
)
BATCH["more"] = TensorDict({"y": torch.randn(24, 32, 2, 3)}, batch_size=[24, 32, 2])
CACHES = [1, 400_000, 64 << 20]  # nothing, a few keys, all
PACKED = [compressed(BATCH, cache_bytes=size, keys=[("agents",), "half"]) for size in CACHES]


def same_but_names(one, other):
    assert one.batch_size == other.batch_size
    for key in other.keys(True, True):
        same(one.get(key), other.get(key))


@settings(max_examples=60, deadline=None)
@given(
    which=st.integers(0, 2),
    indices=st.lists(st.integers(-24 * 32, 24 * 32 - 1), max_size=40),
    form=st.sampled_from([list, torch.tensor, np.array]),
)
def test_steps(which, indices, form):
    assume(indices or EMPTY_STACKS)
    found = PACKED[which].minibatch(form(indices) if indices else indices)
    tensors = BATCH.exclude("label", "stack")
    same_but_names(found, tensors.reshape(-1)[torch.tensor(indices, dtype=torch.int64)])
    assert found["label"] == "text"
    if indices:
        expected = [f"{e}.{t}" for e, t in (divmod(i % (24 * 32), 32) for i in indices)]
        assert found.get("stack").tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    which=st.integers(0, 2),
    envs=st.one_of(
        st.lists(st.integers(-24, 23), min_size=1, max_size=40),
        st.slices(24).filter(lambda s: s.step is None or s.step > 0),
        st.integers(-24, 23),
    ),
)
def test_environments(which, envs):
    assume(EMPTY_STACKS or not isinstance(envs, slice) or range(24)[envs])
    tensors = BATCH.exclude("label", "stack")
    same_but_names(PACKED[which][envs], tensors[envs])


def test_a_key_is_decoded_once(monkeypatch):
    packed = compressed(make_batch(200, 32), keys=[LIDAR])
    decode, calls = CompressedKey.decode, []
    monkeypatch.setattr(CompressedKey, "decode", lambda key: calls.append(1) or decode(key))
    packed.minibatch([0, 5, 31])
    for _ in range(3):  # three epochs
        for _ in packed.minibatches(4):
            pass
    assert len(calls) == 1


def test_the_cache_is_bounded_and_the_oldest_makes_way():
    keys = [LIDAR, ("agents", "observation", "state")]
    batch = make_batch(100, 32)
    sizes = [tensor_bytes(batch[key]) for key in keys]
    packed = compressed(batch, keys=keys, cache_bytes=max(sizes))
    for key in keys:
        same(packed[[7]][key], batch[[7]][key])
        assert packed._cache.nbytes <= max(sizes)
    small = compressed(batch, keys=keys, cache_bytes=min(sizes) - 1)
    for indices in ([7], range(99, -1, -1)):
        for key in keys:
            same(small[list(indices)][key], batch[list(indices)][key])
    assert small._cache.nbytes == 0


def test_batches_share_a_cache_and_leave_it_when_they_go():
    limit = 2 * tensor_bytes(make_batch(60, 32)[LIDAR])
    collector = CompressedDataCollector(
        [make_batch(60, 32, i) for i in range(3)], cache_bytes=limit
    )
    batches = list(collector)
    for _ in range(2):
        for i, packed in enumerate(batches):
            same_but_names(packed[[7]], make_batch(60, 32, i)[[7]])
    assert 0 < collector._cache.nbytes <= limit
    del batches, packed
    gc.collect()
    assert collector._cache.nbytes == 0


def test_minibatches_cover_everything_once():
    packed = compressed(make_batch(30, 10))
    generator = torch.Generator().manual_seed(3)
    parts = list(packed.minibatches(7, generator))
    assert [len(part) for part in parts] == [43] * 6 + [42]
    seen = torch.cat([part["count"] for part in parts])
    assert sorted(seen.tolist()) == list(range(300))
    again = list(packed.minibatches(7, torch.Generator().manual_seed(3)))
    for one, other in zip(parts, again, strict=True):
        same(one, other)
    assert not torch.equal(seen, torch.arange(300))


def test_one_key():
    batch = make_batch(60, 32)
    packed = compressed(batch)
    same(packed[LIDAR], batch[LIDAR])
    same(packed["done"], batch["done"])
    packed["done"].fill_(True)
    same(packed["done"], batch["done"])
    with pytest.raises(errors.UsageError, match="did you mean 'done'"):
        packed["dnoe"]


def test_flat_batches():
    batch = make_batch(20, 16)
    flat = batch.reshape(-1)
    packed = compressed(flat, keys=[("agents",)])  # every step for itself
    assert packed.batch_size == (320,)
    same_but_names(packed.decompress(), flat)
    same_but_names(packed.minibatch([3, 319]), flat[[3, 319]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression_level": 0}, "compresses nothing"),
        ({"compression_level": 99}, "compression_level=99"),
        ({"cache_bytes": 0}, "cache_bytes=0"),
        ({"keys": "lidar"}, 'give "auto" or a list'),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(errors.UsageError, match=message):
        CompressedDataCollector([], **options)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (TensorDict({"x": torch.zeros(3)}), "cannot be compressed by environment"),
        (TensorDict({"x": torch.zeros(0, 3)}, batch_size=[0, 3]), "cannot be compressed"),
        (
            TensorDict({"x": torch.zeros(3, 2).to_sparse()}, batch_size=[3]),
            "x is a torch.sparse",
        ),
        (
            lazy_stack([TensorDict({"x": torch.zeros(n)}) for n in (2, 3)]),
            "a stack of unequal parts",
        ),
        ({"x": torch.zeros(3)}, "yields dict, not TensorDicts"),
        (None, "yields NoneType"),
    ],
)
def test_wrong_batches(batch, message):
    with pytest.raises(errors.UsageError, match=message):
        compressed(batch)


def test_wrong_indices(batch):
    packed = compressed(batch, keys=["action"])
    for indices, message in [
        ([48], "indices: index 48 is out of bounds .* axis of 48"),
        (3, "give a list"),
        (["a"], "whole numbers"),
        ([[1]], "whole numbers"),
    ]:
        with pytest.raises(errors.UsageError, match=message):
            packed.minibatch(indices)
    with pytest.raises(errors.UsageError, match=r"index: index 6 is out of bounds .* axis of 6"):
        packed[6]
    with pytest.raises(errors.UsageError, match="count=0"):
        next(packed.minibatches(0))
    with pytest.raises(errors.UsageError, match="did you mean 'action'"):
        compressed(batch, keys=["actoin"])


def test_threads_share_a_batch():
    batch = make_batch(60, 32)
    packed = compressed(batch, cache_bytes=600_000)
    flat = batch.reshape(-1)
    failures = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(10):
            indices = torch.randint(0, 60 * 32, (40,), generator=generator)
            if not torch.equal(packed.minibatch(indices)[LIDAR], flat[indices][LIDAR]):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_torchrl_collector_compressed_in_the_background():
    Collector = pytest.importorskip("torchrl.collectors").Collector
    from .toy_env import Counting

    def make():
        return Collector(
            Counting(), None, frames_per_batch=30, total_frames=120, return_same_td=True
        )

    plain = make()
    expected = [batch.clone() for batch in plain]
    plain.shutdown()
    base = make()
    inner = CompressedDataCollector(base, keys=["observation", ("next", "observation")])
    with PipelinedDataCollector(inner) as collector:
        found = list(collector)
        assert collector.stats()["peak_bytes"] > 0
    assert base.closed
    assert len(found) == 4
    for packed, truth in zip(found, expected, strict=True):
        for key in ("observation", ("next", "observation"), ("next", "reward")):
            same(packed.decompress()[key], truth[key])
    with CompressedDataCollector([1]):
        pass  # nothing to shut down
