"""Writing to a CompressedStorage: wrong data, in place, by a collector, from many threads."""

import copy
import pickle
import signal
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data import (
    Binary,
    Composite,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs import EnvBase, SerialEnv

from penstock import AsyncCheckpointSaver, RolloutStorage, errors, load_checkpoint
from penstock.replay.arena import CompressedColumns
from penstock.replay.torchrl.save import SlotTracker
from penstock.replay.torchrl.storage import CompressedStorage

from .torchrl_items import assert_same, items, pair


def change(data, key, value):
    data = data.clone()
    data[key] = value
    return data


WRONG = {
    "not a tensordict": (torch.zeros(4, 3), errors.UsageError, "first data was a TensorDict"),
    "not a tensor": ({"a": "text"}, errors.UnsupportedValue, "takes tensors.*not str"),
    "text": (
        change(items(4), "note", NonTensorData("x", batch_size=[4])),
        errors.UnsupportedValue,
        "note is not a tensor",
    ),
    "missing": (items(4).exclude(("next", "pixels")), errors.UsageError, "lacks next.pixels"),
    "missing small": (items(4).exclude("flag"), errors.UsageError, "lacks flag"),
    "shape": (
        change(items(4), "pixels", torch.zeros(4, 20, 21, dtype=torch.uint8)),
        errors.UsageError,
        r"'pixels': uint8\[20, 21\], the first data had 'pixels': uint8\[20, 20\]",
    ),
    "dtype": (
        change(items(4), "action", torch.zeros(4, 3, dtype=torch.float64)),
        errors.UsageError,
        "'action': float64",
    ),
    "sparse": (
        change(items(4), "pixels", torch.zeros(4, 20, 20, dtype=torch.uint8).to_sparse()),
        errors.UnsupportedValue,
        "sparse",
    ),
    "count": (items(3), errors.UsageError, r"does not fill \[4\] slots"),
    "ragged": (
        lazy_stack([TensorDict({"pixels": torch.zeros(n, 20)}) for n in (1, 2, 3, 4)]),
        errors.UsageError,
        "ragged",
    ),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_wrong_data_changes_nothing(what):
    data, kind, message = WRONG[what]
    storage = CompressedStorage(10)
    storage.set(range(6), items(6))
    before, revision = storage[:].clone(), storage._mutation_revision
    with pytest.raises(kind, match=message):
        storage.set(torch.arange(4), data)
    assert len(storage) == 6
    assert storage._mutation_revision == revision
    assert_same(before, storage[:])
    storage.set(torch.arange(6, 10), items(4))
    assert len(storage) == 10


def test_a_late_key_that_torch_cannot_index():
    storage = CompressedStorage(10)
    storage.set(range(4), items(4))
    data = change(items(4), "depth", torch.zeros(4, 5, dtype=torch.uint16))
    with pytest.raises(errors.UnsupportedValue, match="depth was not in the first data"):
        storage.set(torch.arange(4, 8), data)
    assert len(storage) == 4
    other = CompressedStorage(10)
    other.set(range(4), data)
    assert torch.equal(other.get(0)["depth"], torch.zeros(5, dtype=torch.uint16))


def test_wrong_settings():
    for options in ({"max_size": 0}, {"max_size": 2, "ndim": 0}, {"max_size": 2.5}):
        with pytest.raises(errors.UsageError):
            CompressedStorage(**options)
    with pytest.raises(errors.UsageError, match="needs spill_dir"):
        CompressedStorage(10, memory_bytes=1)
    with pytest.raises(errors.UsageError, match="slot 10 is not one of 10"):
        CompressedStorage(10).set(torch.tensor([10]), items(1))
    storage = CompressedStorage(10)
    with pytest.raises(RuntimeError):
        storage.get(0)
    storage.set(torch.tensor([1]), items(1), set_cursor=False)
    storage._len = 2
    with pytest.raises(errors.UsageError, match="slot 0 was never written"):
        storage.get(torch.tensor([0, 1]))


def test_writing_in_place():
    storage = CompressedStorage(20)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
    data = items(20)
    buffer.extend(data.clone())
    buffer[3:5] = items(2, seed=9)
    assert torch.equal(buffer[3:5]["pixels"], items(2, seed=9)["pixels"])
    assert torch.equal(buffer[5:]["pixels"], data["pixels"][5:])
    buffer[-1] = items(1, seed=4)[0]
    assert torch.equal(storage.get(19)["pixels"], items(1, seed=4)["pixels"][0])
    with pytest.raises(errors.UsageError, match=r"slot 20 is not one of 20"):
        storage[torch.tensor([20])] = items(1)
    with pytest.raises(errors.UsageError, match="names a slot twice"):
        storage[torch.tensor([[1, 1]])] = items(1, 2)
    storage[torch.tensor([7])] = TensorDict({"action": torch.ones(1, 3)}, batch_size=[1])
    assert torch.equal(storage.get(7)["action"], torch.ones(3))
    assert torch.equal(storage.get(7)["pixels"], data["pixels"][7])
    buffer.set_at_("action", torch.full((1, 3), 5.0), torch.tensor([8]))
    assert torch.equal(storage.get(8)["action"], torch.full((3,), 5.0))
    buffer.set_at_("pixels", torch.zeros(1, 20, 20, dtype=torch.uint8), torch.tensor([8]))
    assert not storage.get(8)["pixels"].any()
    with pytest.raises(errors.UsageError, match="pixels is compressed"):
        storage._conditional_patch_leaf("pixels")
    assert len(buffer) == 20


def test_the_same_tensordict_twice():
    """TorchRL writes "index" into what it was given: a key that comes later."""
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(20), batch_size=4)
    data = items(5)
    buffer.extend(data)
    buffer.extend(data)
    buffer.extend(items(5, seed=2))
    assert len(buffer) == 15
    assert torch.equal(buffer[:5]["pixels"], buffer[5:10]["pixels"])
    assert "index" in buffer.sample()


def test_views_that_torch_works_out_later():
    def made(count):
        values = torch.randn(count, 60, dtype=torch.complex64)
        conjugates = {"large": values.conj(), "small": values[:, :2].conj()}
        return TensorDict({**conjugates, "negated": values.conj().imag}, [count])

    theirs, ours = (
        ReplayBuffer(storage=kind(8)) for kind in (LazyTensorStorage, CompressedStorage)
    )
    for write in (
        lambda buffer, data: buffer.extend(data),
        lambda buffer, data: buffer.__setitem__(slice(1, 4), data[:3]),
        lambda buffer, data: buffer.__setitem__(0, data[0]),
        lambda buffer, data: buffer[:].set_at_("large", data["large"][:2], [2, 4]),
    ):
        data = made(5)
        for buffer in (theirs, ours):
            write(buffer, data)
        for key in ("large", "small", "negated"):
            assert torch.equal(ours[:][key], theirs[:][key])


def test_memory_mapped_data(tmp_path):
    data = items(6)
    mapped = TensorDict.load_memmap(data.memmap(tmp_path).saved_path)
    buffer = ReplayBuffer(storage=CompressedStorage(20))
    buffer.extend(mapped)
    buffer.extend(mapped[2:4])
    buffer[0] = mapped[5]
    assert (buffer[:] == data[[5, 1, 2, 3, 4, 5, 2, 3]]).all()
    assert type(buffer[torch.tensor([1])]["action"]) is torch.Tensor


@pytest.mark.parametrize("index", [[], np.zeros(0), torch.zeros(0, dtype=torch.int64), range(0)])
def test_writing_nothing(index):
    buffer = ReplayBuffer(storage=CompressedStorage(10))
    buffer.extend(items(4))
    before = buffer[:].clone()
    buffer[index] = items(0)
    assert (buffer[:] == before).all()


@pytest.mark.parametrize("index", [10, -11, [3, 12], [-13, 1]])
def test_a_slot_that_there_is_not_is_named(index):
    buffer = ReplayBuffer(storage=CompressedStorage(10))
    buffer.extend(items(4))
    wrong = index if isinstance(index, int) else max(index, key=abs)
    with pytest.raises(errors.UsageError, match=f"slot {wrong} "):
        buffer[index] = items(1)[0] if isinstance(index, int) else items(2)


def test_one_by_one_and_as_a_list():
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(20), batch_size=4)
    data = items(6)
    for k in range(3):
        buffer.add(data[k].clone())
    buffer.extend(lazy_stack([data[k].clone() for k in range(3, 6)]))
    assert torch.equal(buffer[:]["pixels"], data["pixels"])
    other = ReplayBuffer(storage=CompressedStorage(20), batch_size=4)
    other.extend([data[k] for k in range(6)])
    assert_same(data.to("cpu"), other[:])


def test_the_best_are_kept():
    buffer = TensorDictReplayBuffer(
        storage=CompressedStorage(5), batch_size=4, writer=TensorDictMaxValueWriter("score")
    )
    data = items(40)
    data["score"] = torch.randperm(40, generator=torch.Generator().manual_seed(0)).float()
    for part in data.split(8):
        buffer.extend(part.clone())
    kept = buffer[:]
    assert sorted(kept["score"].tolist()) == [35, 36, 37, 38, 39]
    for row in kept:
        original = data[data["score"] == row["score"]][0]
        assert torch.equal(row["pixels"], original["pixels"])


class Walk(EnvBase):
    """Counts steps; the picture shows the count."""

    def __init__(self, length):
        super().__init__()
        self.length = length
        self.observation_spec = Composite(pixels=Unbounded((20, 20), dtype=torch.uint8))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Binary(1, shape=(1,), dtype=torch.bool)
        self.count = 0

    def _look(self):
        pixels = torch.zeros(20, 20, dtype=torch.uint8)
        pixels[:, self.count % 20] = self.count
        return pixels

    def _reset(self, data=None, **_):
        self.count = 0
        return TensorDict({"pixels": self._look(), "done": torch.zeros(1, dtype=torch.bool)})

    def _step(self, data):
        self.count += 1
        done = torch.tensor([self.count >= self.length])
        return TensorDict(
            {"pixels": self._look(), "reward": torch.full((1,), float(self.count)), "done": done}
        )

    def _set_seed(self, seed):
        return seed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torchrl.collectors, of its own doing
@pytest.mark.parametrize("ndim", [1, 2])
def test_a_collector_fills_it(ndim):
    from torchrl.collectors import Collector

    storage = CompressedStorage(600, ndim=ndim)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=12)
    env = SerialEnv(3, lambda: Walk(11))
    collector = Collector(env, frames_per_batch=60, total_frames=180, replay_buffer=buffer)
    for _ in collector:
        pass
    collector.shutdown()
    assert len(buffer) == (180 if ndim == 2 else 9)
    assert ("pixels",) in storage.compressed_keys
    assert ("next", "pixels") in storage.compressed_keys
    batch = buffer.sample().reshape(-1)
    counts = batch["next", "reward"].long().flatten()
    columns = torch.arange(len(counts)), slice(None), counts % 20
    assert torch.equal(batch["next", "pixels"][columns].long()[:, 0], counts)
    if ndim == 2:
        sampler = SliceSampler(slice_len=5, traj_key=("collector", "traj_ids"))
        slices = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=20)
        steps = slices.sample()["next", "reward"].view(4, 5)
        assert (steps.diff(dim=1) == 1).all()


def test_prefetching():
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(100), batch_size=16, prefetch=2)
    data = items(100)
    buffer.extend(data.clone())
    for _ in range(30):
        batch = buffer.sample()
        assert torch.equal(batch["pixels"], data["pixels"][batch["index"]])


def test_threads_never_see_half_a_write():
    storage = CompressedStorage(64)
    buffer = ReplayBuffer(storage=storage, batch_size=32)
    stop, wrong = threading.Event(), []

    def numbered(start):
        numbers = torch.arange(start, start + 16) % 251
        return TensorDict(
            {"n": numbers, "x": numbers.to(torch.uint8)[:, None].repeat(1, 900)}, batch_size=[16]
        )

    buffer.extend(numbered(0))
    buffer.extend(numbered(16))

    def write():
        start = 0
        while not stop.is_set():
            start += 16
            buffer.extend(numbered(start))

    def read():
        while not stop.is_set():
            batch = buffer.sample()
            if not (batch["x"].long() == batch["n"][:, None]).all():
                wrong.append(batch["n"])

    threads = [threading.Thread(target=job) for job in (write, write, read, read)]
    for thread in threads:
        thread.start()
    stop.wait(1.5)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_run_of_calls_is_that_of_torchrl(data):
    size = data.draw(st.integers(1, 12))
    stores = pair(size)
    buffers = [ReplayBuffer(storage=store, batch_size=3) for store in stores]
    for turn in range(data.draw(st.integers(1, 12))):
        call = data.draw(st.sampled_from(["extend", "add", "set", "empty", "get", "get"]))
        filled = len(stores[0])
        if call in ("extend", "add"):
            count = data.draw(st.integers(1, size)) if call == "extend" else 1
            new = items(count, seed=turn)
            for buffer in buffers:
                buffer.extend(new.clone()) if call == "extend" else buffer.add(new[0].clone())
        elif call == "set" and filled:
            rows = data.draw(st.lists(st.integers(0, filled - 1), min_size=1, unique=True))
            for store in stores:
                store[torch.tensor(rows)] = items(len(rows), seed=turn)
        elif call == "empty":
            for buffer in buffers:
                buffer.empty()
        elif filled:
            rows = data.draw(st.lists(st.integers(-filled, filled - 1), min_size=1))
            assert_same(*(store.get(torch.tensor(rows)) for store in stores))
        assert len(stores[0]) == len(stores[1])
    if len(stores[0]):
        assert_same(*(store[:] for store in stores))


def grid(steps, environments, seed):
    g = torch.Generator().manual_seed(seed)
    size = [steps, environments]
    pixels = (torch.rand(*size, 20, 20, generator=g) * 3).to(torch.uint8)
    after = {"pixels": pixels.flip(0), "reward": torch.rand(*size, 1, generator=g)}
    return TensorDict(
        {
            "pixels": pixels,
            "action": torch.rand(*size, 3, generator=g),
            "next": TensorDict(after, batch_size=size),
        },
        batch_size=size,
    )


WRITES = {
    "one record": lambda b: b.__setitem__((2, 3), grid(1, 1, 5)[0, 0]),
    "slices": lambda b: b.__setitem__((slice(1, 3), slice(0, 2)), grid(2, 2, 6)),
    "tensors": lambda b: b.__setitem__(
        (torch.tensor([1, 2]), torch.tensor([0, 4])), grid(2, 1, 7)[:, 0]
    ),
    "a number": lambda b: b.__setitem__((slice(None), 2), 0),
    "update_": lambda b: b.update_(grid(5, 8, 9)),
    "update_ of keys": lambda b: b.update_(grid(5, 8, 10), keys_to_update=["pixels"]),
    "update_ by dict": lambda b: b.update_({"pixels": grid(5, 8, 11)["pixels"]}),
    "set_": lambda b: b.set_("pixels", grid(5, 8, 12)["pixels"]),
    "set_ nested": lambda b: b.set_(("next", "pixels"), grid(5, 8, 13)["pixels"]),
    "set_at_": lambda b: b.set_at_("pixels", grid(5, 8, 14)["pixels"][2], 2),
    "set_at_ plain": lambda b: b.set_at_("action", 1.5, torch.tensor([2, 3])),
    "a row of the storage": lambda b: b.storage[1].update_(grid(1, 8, 16)[0]),
    "a wrong shape": lambda b: b.set_("pixels", torch.zeros(3)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_two_dimensions_are_written_as_by_torchrl(write):
    """By `storage[:]`, which is a view there: half of a record was written here."""
    outcomes = []
    for storage in (LazyTensorStorage(40, ndim=2), CompressedStorage(40, ndim=2)):
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
        buffer.extend(grid(8, 5, 0).clone())
        try:
            write(buffer)
            failed = False
        except RuntimeError:
            failed = True
        outcomes.append((failed, buffer[:]))
    (wanted_failed, wanted), (failed, found) = outcomes
    assert failed == wanted_failed
    assert storage.compressed_keys.keys() == {("pixels",), ("next", "pixels")}
    for key in ("pixels", "action", ("next", "pixels"), ("next", "reward")):
        assert torch.equal(found[key], wanted[key]), key


@pytest.mark.parametrize("ndim", [1, 2])
def test_each_write_counts_once_as_in_torchrl(ndim):
    """Samplers that keep something about the storage look at this number."""

    def run(storage):
        buffer = TensorDictReplayBuffer(storage=storage)
        data = TensorDict({"n": torch.arange(4), "pixels": torch.zeros(4, 300)}, [4])
        buffer.extend(data if ndim == 1 else data.reshape(2, 2))
        revisions = [storage._mutation_revision]
        for write in (
            lambda: buffer.set_at_("pixels", torch.ones(300), 1 if ndim == 1 else (1, 0)),
            lambda: buffer.set_("pixels", buffer[:]["pixels"] + 1),
            lambda: buffer.update_(buffer[:].clone()),
            lambda: buffer.__setitem__(slice(0, 1), buffer[1:2].clone()),
            lambda: buffer.load_state_dict(buffer.state_dict()),
            lambda: buffer.empty(),
        ):
            write()
            revisions.append(storage._mutation_revision)
        return revisions

    assert run(CompressedStorage(4, ndim=ndim)) == run(LazyTensorStorage(4, ndim=ndim))


def test_a_later_key_that_does_not_fit_changes_nothing():
    def some(seed, count):
        return items(count, seed=seed).select("pixels", "action").to("cpu")

    storage = CompressedStorage(10_000)
    storage.set(range(5), some(0, 5))
    huge = torch.zeros(1).expand(2, 10**11)  # 4 PB for all slots
    late = TensorDict({"huge": huge, **some(1, 2)}, batch_size=[2])
    for slots in (range(2), range(5, 7)):
        with pytest.raises(errors.UsageError, match="have them from the start"):
            storage.set(slots, late)
    assert len(storage) == 5
    assert_same(some(0, 5), storage[:])
    late = TensorDict({**some(1, 2), "a": {"b": torch.ones(2, 3)}}, batch_size=[2])
    storage.set(range(5, 7), late)
    assert storage[:]["a", "b"].sum(1).tolist() == [0, 0, 0, 0, 0, 3, 3]
    assert_same(late.to("cpu"), storage[5:7])


SELF = {
    "extend": lambda buffer: buffer.extend(buffer[:3]),
    "extend, around the end": lambda buffer: buffer.extend(buffer[:6]),
    "set": lambda buffer: buffer.storage.set(range(1, 5), buffer[:4], set_cursor=False),
    "slice": lambda buffer: buffer.storage[:].__setitem__(slice(1, 5), buffer[:4]),
    "update_": lambda buffer: buffer.storage[1:5].update_(buffer[:4]),
}


@pytest.mark.parametrize("way", SELF)
def test_a_buffer_takes_a_part_of_itself(way):
    """Its plain keys are views of the very memory that is written, the others are copies."""
    buffer, apart = (ReplayBuffer(storage=CompressedStorage(10), batch_size=4) for _ in range(2))
    data = items(7)
    buffer.extend(data)
    SELF[way](buffer)
    apart.extend(data)
    copy = data.clone()  # the same, of data that shares nothing
    {
        "extend": lambda: apart.extend(copy[:3]),
        "extend, around the end": lambda: apart.extend(copy[:6]),
    }.get(way, lambda: apart.storage.set(range(1, 5), copy[:4], set_cursor=False))()
    assert_same(buffer[:], apart[:])


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("call", ["store", "touch"])
@pytest.mark.parametrize("way", ["extend", "update_", "setitem"])
def test_an_interrupt_leaves_no_record_half_written(monkeypatch, call, point, way):
    buffer = ReplayBuffer(storage=CompressedStorage(8), batch_size=4)
    old, new = items(8), items(8, seed=1)
    buffer.extend(old)
    owner = CompressedColumns if call == "store" else SlotTracker
    original = getattr(owner, call)

    def interrupted(self, *arguments):
        if point == "before":
            signal.raise_signal(signal.SIGINT)
        original(self, *arguments)
        if point == "after":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(owner, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        if way == "extend":
            buffer.extend(new)
        elif way == "update_":
            buffer.storage[:].update_(new)
        else:
            buffer.storage[:][:] = new
    monkeypatch.undo()
    assert_same(new.to("cpu"), buffer[:])


BROKEN = {
    "dtype": {"mask": torch.zeros(2, 300)},
    "shape": {"noise": torch.zeros(2, 71)},
    "tree": {"noise": TensorDict({"y": torch.zeros(2, 70)}, [2])},
    "disk": {},
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("way", ["index", "slice", "dict", "update_", "in place"])
def test_what_fails_by_a_slice_changes_nothing(monkeypatch, way, broken):
    """A key that does not fit, or a full disk, after other keys were written already."""
    _, storage = pair(8)
    data = items(8).exclude("half", "wave")
    storage.set(range(8), data)
    new = items(2, seed=1).exclude("half", "wave").update(BROKEN[broken])

    def refuse(*_):
        raise errors.StorageError("the disk is full")

    if broken == "disk":
        monkeypatch.setattr(CompressedColumns, "store", refuse)
    try:
        if way == "update_":
            storage[1:3].update_(new)
        elif way == "in place":
            storage.set(torch.tensor([1, 2]), new, set_cursor=False)
        else:
            value = dict(new.items()) if way == "dict" else new
            storage[:][slice(1, 3) if way == "slice" else torch.tensor([1, 2])] = value
    except (errors.PenstockError, RuntimeError, TypeError):
        monkeypatch.undo()
        assert_same(data.to("cpu"), storage[:])
        return
    pixels = storage[:]["pixels"][1:3]
    assert torch.equal(pixels, new["pixels"])  # torch converts what it can
    assert torch.equal(storage[:]["action"][1:3], new["action"])


def _masked(part):
    part.masked_fill_(torch.arange(len(part)) == 2, 1)


DERIVED = {
    "zero_": lambda part: part.zero_(),
    "apply_": lambda part: part.apply_(lambda leaf: leaf.copy_(leaf.flip(0))),
    "fill_": lambda part: part.fill_("pixels", 3),
    "masked_fill_": _masked,
    "split": lambda part: part.split(4)[1].update_(items(4, seed=60)),
    "unbind": lambda part: part.unbind(0)[3].update_(items(1, seed=60)[0]),
    "view": lambda part: part.view(2, 4).update_(items(8, seed=60).view(2, 4)),
    "unsqueeze": lambda part: part.unsqueeze(0).update_(items(8, seed=60).unsqueeze(0)),
    "select": lambda part: part.select("pixels", "flag").update_(
        items(8, seed=60).select("pixels", "flag")
    ),
    "flatten_keys": lambda part: part.flatten_keys(".").update_(
        items(8, seed=60).flatten_keys(".")
    ),
    "nested": lambda part: part["next"].update_(items(8, seed=60)["next"]),
    "part of nested": lambda part: part["next"].__setitem__(slice(2, 5), items(3, seed=60)["next"]),
    "into a tensor": lambda part: part["pixels"][3].fill_(9),
    "into a nested tensor": lambda part: part["next", "pixels"][2:4, 0].add_(1),
    "out": lambda part: torch.add(part["pixels"][:2], 1, out=part["pixels"][4:6]),
    "by foreach": lambda part: torch._foreach_add_([part["pixels"], part["next", "pixels"]], 1),
}


@pytest.mark.parametrize("derived", DERIVED.values(), ids=DERIVED)
def test_what_is_derived_from_a_slice_writes_through(derived):
    """TorchRL's slices are views in all their parts: no write reaches the small keys alone."""
    reference, buffer = (ReplayBuffer(storage=storage) for storage in pair(20))
    for each in (reference, buffer):
        each.extend(items(20))
        derived(each[6:14])
    assert_same(reference[:], buffer[:])
    assert_same(reference[torch.arange(20)], buffer[torch.arange(20)])


def test_a_slice_shows_what_is_written_after_it():
    """Large keys as well as small ones; and a write to it does not bring back what was there."""
    reference, buffer = (ReplayBuffer(storage=storage) for storage in pair(20))
    parts = []
    for each in (reference, buffer):
        each.extend(items(20))
        part = each[:]
        parts.append(part)
        each.extend(items(7, seed=40))
        part["pixels"][10] = 5
        each[3:5] = items(2, seed=90)
        part["pixels"][4, 0] = 8
        part[6:9].update_(items(3, seed=70))
        part[1].zero_()
    assert_same(reference[:], buffer[:])
    assert_same(*parts)
    buffer.empty()
    assert parts[1]["pixels"].shape == (20, 20, 20)


def test_a_slice_is_data_like_any_other(tmp_path):
    """It can be stored, copied, counted and put into another buffer, and is then no slice."""
    reference, buffer = (ReplayBuffer(storage=storage) for storage in pair(20))
    for each in (reference, buffer):
        each.extend(items(20))
    part, other = buffer[4:12], ReplayBuffer(storage=CompressedStorage(20))
    other.extend(part)
    other[2:4] = buffer[:][6:8]
    assert_same(reference[6:8], other[2:4])
    assert part.bytes() == reference[4:12].bytes()
    assert type(part["pixels"].as_subclass(torch.Tensor)) is torch.Tensor
    copies = [copy.deepcopy(part), pickle.loads(pickle.dumps(part)), part.clone()]
    RolloutStorage(tmp_path / "rollouts").save(part, 0)
    copies.append(RolloutStorage(tmp_path / "rollouts").load(0))
    with AsyncCheckpointSaver(tmp_path / "saved") as saver:
        saver.save_async({"pixels": part["pixels"]}, "one.pt")
    saved = load_checkpoint(tmp_path / "saved" / "one.pt")
    assert torch.equal(saved["pixels"], reference[4:12]["pixels"])
    for each in copies:
        assert torch.equal(each["next", "pixels"], reference[4:12]["next", "pixels"])
        each["next", "pixels"].zero_()
    assert_same(reference[:], buffer[:])
