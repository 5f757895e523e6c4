"""CompressedStorage: TorchRL's own LazyTensorStorage is the reference, answer by answer."""

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

from penstock import errors
from penstock.replay.columns import CompressedColumns
from penstock.replay.torchrl import CompressedStorage
from penstock.tensors import NAMES


def items(*batch, seed=0, names=None):
    """Data with everything in it: nested, big and small, odd types, a tree of big keys only."""
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 4, (*batch, 20, 20), dtype=torch.uint8, generator=random)
    data = TensorDict(
        {
            "pixels": pixels,
            "action": torch.randn(*batch, 3, generator=random),
            "flag": torch.rand(*batch, generator=random) > 0.5,
            "noise": torch.randn(*batch, 70, generator=random),  # big, not worth compressing
            "mask": torch.rand(*batch, 300, generator=random) > 0.9,
            "half": pixels.flatten(-2).to(torch.bfloat16),
            "wave": torch.polar(pixels.flatten(-2).float(), torch.ones(*batch, 400)),
            "next": TensorDict(
                {
                    "pixels": pixels.flip(-1),
                    "agents": TensorDict(
                        {"lidar": pixels.flatten(-2).float().unflatten(-1, (5, 80))},
                        batch_size=(*batch, 5),
                    ),
                    "only": TensorDict({"big": pixels.double()}, batch_size=batch),
                },
                batch_size=batch,
            ),
        },
        batch_size=batch,
    )
    if names:
        data.names = names
    return data


def assert_same(wanted, found):
    assert type(found) is type(wanted)
    assert found.batch_size == wanted.batch_size
    assert (found.device, found.names) == (wanted.device, wanted.names)
    assert set(found.keys(True)) == set(wanted.keys(True))
    for key in wanted.keys(True):
        one, other = wanted.get(key), found.get(key)
        if isinstance(one, torch.Tensor):
            assert (other.dtype, other.shape) == (one.dtype, one.shape), key
            assert torch.equal(one, other), key
        else:
            assert other.batch_size == one.batch_size, key


def pair(size, **options):
    return LazyTensorStorage(size, **options), CompressedStorage(size, **options)


FLAT_INDICES = {
    "int": 0,
    "negative": -1,
    "numpy int": np.int64(2),
    "all": slice(None),
    "slice": slice(2, 6),
    "steps": slice(None, None, 3),
    "tail": slice(-3, None),
    "tensor": torch.tensor([1, 2, 2, 0]),
    "negative tensor": torch.tensor([-1, 0]),
    "int32": torch.tensor([1, 2], dtype=torch.int32),
    "2-d tensor": torch.tensor([[0, 1], [2, 3]]),
    "0-d tensor": torch.tensor(3),
    "empty": torch.tensor([], dtype=torch.long),
    "list": [0, 3],
    "range": range(3),
    "numpy": np.array([1, 2]),
    "tuple": (torch.tensor([1, 2]),),
    "none": None,
    "ellipsis": ...,
}


@pytest.mark.parametrize("count", [7, 10, 25])
def test_every_index_answers_as_in_torchrl(count):
    stores = pair(10)
    for store in stores:
        buffer = ReplayBuffer(storage=store, batch_size=4)
        for part in items(count).split(5):
            buffer.extend(part.clone())
    wanted, found = stores
    assert len(found) == len(wanted) == min(count, 10)
    assert found.shape == wanted.shape
    mask = {"mask": torch.arange(len(found)) % 2 == 0}
    for index in (FLAT_INDICES | mask).values():
        assert_same(wanted.get(index), found.get(index))
        assert_same(wanted[index], found[index])
    for outside in (len(found), -len(found) - 1, torch.tensor([len(found)])):
        with pytest.raises(IndexError):
            found.get(outside)
    names = {"noise", "action", "flag"}
    assert {path[-1] for path in found.compressed_keys} == {
        "pixels",
        "mask",
        "half",
        "wave",
        "lidar",
        "big",
    }
    assert not names & {path[-1] for path in found.compressed_keys}


@pytest.mark.parametrize("names", [None, ["env", "time"]])
def test_two_dimensions_of_slots(names):
    stores = pair(40, ndim=2)
    buffers = [ReplayBuffer(storage=store, batch_size=6, dim_extend=0) for store in stores]
    wanted, found = stores
    for turn in range(4):
        for buffer in buffers:
            buffer.extend(items(3, 5, seed=turn, names=names))
        assert (len(found), found.shape, found.max_size) == (len(wanted), wanted.shape, 40)
        for index in (
            0,
            -1,
            slice(None),
            slice(1, 3),
            (slice(None), 2),
            (0, 1),
            (torch.tensor([0, 2, 1]), torch.tensor([4, 3, 0])),
            torch.tensor([0, 2]),
            (slice(0, 2), slice(1, 3)),
            (torch.tensor([[0], [1]]), torch.tensor([1, 2])),
        ):
            assert_same(wanted.get(index), found.get(index))
    for buffer in buffers:
        buffer.set_rng(torch.Generator().manual_seed(1))
    assert_same(buffers[0].sample(), buffers[1].sample())
    assert_same(wanted.flatten().get(slice(None)), found.flatten().get(slice(None)))


def trajectories(count, seed=0):
    data = items(count, seed=seed)
    data["episode"] = torch.arange(count) // 7
    end = (torch.arange(count) % 7 == 6).unsqueeze(-1)
    data["next", "done"] = end
    data["next", "terminated"] = end.clone()
    return data


@pytest.mark.parametrize("options", [{"traj_key": "episode"}, {"end_key": ("next", "done")}, {}])
@pytest.mark.parametrize("count", [60, 130])
def test_slices_are_those_of_torchrl(options, count):
    samples = []
    for store in pair(100):
        buffer = TensorDictReplayBuffer(
            storage=store, sampler=SliceSampler(slice_len=4, **options), batch_size=32
        )
        for part in trajectories(count).split(30):
            buffer.extend(part.clone())
        buffer.set_rng(torch.Generator().manual_seed(3))
        samples.append([buffer.sample() for _ in range(3)])
    for wanted, found in zip(*samples, strict=True):
        assert_same(wanted, found)
        episodes = found["next", "pixels"].flip(-1)
        assert torch.equal(episodes, found["pixels"])


def test_a_sampler_decodes_only_its_batch_and_a_user_gets_everything(monkeypatch):
    buffer = TensorDictReplayBuffer(
        storage=CompressedStorage(200),
        sampler=SliceSampler(slice_len=4, traj_key="episode"),
        batch_size=16,
    )
    data = trajectories(140)
    buffer.extend(data.clone())
    decoded = []
    original = CompressedColumns.decode

    def counting(self, column, slots, out):
        decoded.append(slots.size)
        return original(self, column, slots, out)

    monkeypatch.setattr(CompressedColumns, "decode", counting)
    buffer.sample()
    assert set(decoded) == {16}
    assert len(decoded) == len(buffer.storage.compressed_keys)
    repr(buffer)
    assert len(decoded) == len(buffer.storage.compressed_keys)
    for everything in (buffer[:], buffer.storage[:], buffer.storage.get(slice(None))):
        assert torch.equal(everything["next", "only", "big"], data["next", "only", "big"])
    assert max(decoded) == 140
    assert torch.equal(buffer["pixels"], data["pixels"])


def test_as_it_stands():
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(50), batch_size=8)
    data = items(30)
    buffer.extend(data.clone())
    batch = buffer.sample()
    assert batch.batch_size == (8,)
    rows = batch["index"]
    for key in data.keys(True, True):
        assert torch.equal(batch[key], data[key][rows]), key


def test_a_batch_that_is_held_is_not_overwritten():
    buffer = ReplayBuffer(storage=CompressedStorage(200), batch_size=200)
    data = TensorDict({"pixels": torch.arange(200)[:, None].repeat(1, 400)}, batch_size=[200])
    buffer.extend(data)
    held = [buffer.sample() for _ in range(20)]
    copies = [batch.clone() for batch in held]
    for _ in range(20):
        buffer.sample()
    for batch, copy in zip(held, copies, strict=True):
        assert torch.equal(batch["pixels"], copy["pixels"])


def test_a_ring_gives_its_bytes_back():
    storage = CompressedStorage(500)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    random = np.random.default_rng(0)
    for turn in range(60):
        values = random.integers(0, 1 << (turn % 7), (100, 4000), dtype=np.uint8)
        data = TensorDict({"x": torch.from_numpy(values)}, batch_size=[100])
        buffer.extend(data)
        if turn == 10:
            first = storage.nbytes
    assert storage._columns.live_bytes <= 500 * 4000
    assert storage.nbytes <= max(first, 500 * 4000 + (24 << 20))
    assert torch.equal(storage.get(torch.arange(400, 500))["x"], data["x"])  # 60 turns: 12 rounds
    buffer.empty()
    assert len(buffer) == 0
    assert storage._columns.live_bytes == 0
    buffer.extend(data)
    assert torch.equal(buffer[:]["x"], data["x"])


def test_more_than_it_holds_at_once():
    wanted = items(25)
    for size in (10, 3):
        storage = CompressedStorage(size)
        ReplayBuffer(storage=storage, batch_size=4).extend(wanted)
        rows = torch.tensor(list(range(25 - size, 25)))
        found = storage.get(rows % size)
        assert torch.equal(found["pixels"], wanted["pixels"][rows])
        assert torch.equal(found["action"], wanted["action"][rows])


@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
@pytest.mark.parametrize("codec", ["auto", "lz4", "zstd", "raw", "sparse", "bits"])
def test_every_bit_of_every_type(dtype, codec):
    raw = np.random.default_rng(0).integers(0, 256, (12, 80 * 16), dtype=np.uint8)
    raw[:, 100:] = 0
    if dtype is torch.bool:
        raw &= 1
    whole = torch.from_numpy(raw).view(dtype)
    parts = {"x": whole, "small": whole[:, :3].clone(), "one": whole[:, 0].clone()}
    widths = {"x": raw.shape[1], "small": 3 * dtype.itemsize, "one": dtype.itemsize, "none": 0}
    parts["none"] = whole[:, :0].clone()
    storage = CompressedStorage(12, codecs={"x": codec})
    ReplayBuffer(storage=storage, batch_size=4).extend(TensorDict(parts, batch_size=[12]))
    not_indexed = dtype in (torch.uint16, torch.uint32, torch.uint64)
    assert (("x",) in storage.compressed_keys) == (codec != "raw" or not_indexed)
    for rows in (torch.arange(12), torch.arange(1200) % 12):  # the latter in reused memory
        found = storage.get(rows)
        for key, tensor in parts.items():
            assert (found[key].dtype, found[key].shape[1:]) == (dtype, tensor.shape[1:])
            content = found[key].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert content == raw[rows.numpy(), : widths[key]].tobytes(), key


def test_codecs_by_key():
    storage = CompressedStorage(20, codecs={"pixels": "raw", ("next", "pixels"): "zstd"})
    ReplayBuffer(storage=storage, batch_size=2).extend(items(20))
    assert ("pixels",) not in storage.compressed_keys
    assert storage.compressed_keys["next", "pixels"] == "zstd"
    assert "mask" in {path[0] for path in storage.compressed_keys}  # the rest is chosen
    for wrong in ({"pixel": "lz4"}, {("next", "pixel"): "lz4"}):
        storage = CompressedStorage(20, codecs=wrong)
        with pytest.raises(errors.UsageError, match=r"did you mean '(next\.)?pixels'"):
            storage.set(range(20), items(20))
        assert len(storage) == 0
    with pytest.raises(errors.UsageError, match="no codec 'lz5'"):
        CompressedStorage(20, codecs="lz5").set(range(3), items(3))


def test_beyond_memory(tmp_path):
    storage = CompressedStorage(4000, memory_bytes=8 << 20, spill_dir=tmp_path)
    buffer = ReplayBuffer(storage=storage, batch_size=64)
    noise = torch.randint(0, 256, (4000, 8000), dtype=torch.uint8)
    for part in TensorDict({"x": noise}, batch_size=[4000]).split(200):
        buffer.extend(part)
    assert storage._columns.spilled_bytes > 16 << 20
    assert storage.nbytes < 20 << 20
    assert list(tmp_path.iterdir()) == []  # the files have no names
    rows = torch.randint(0, 4000, (300,))
    assert torch.equal(storage.get(rows)["x"], noise[rows])


def change(data, key, value):
    data = data.clone()
    data[key] = value
    return data


WRONG = {
    "not a tensordict": (torch.zeros(4, 3), errors.UnsupportedValue, "takes TensorDicts"),
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
        r"pixels is torch.uint8 \[20, 21\], the first data was torch.uint8 \[20, 20\]",
    ),
    "dtype": (
        change(items(4), "action", torch.zeros(4, 3, dtype=torch.float64)),
        errors.UsageError,
        "action is torch.float64",
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
    with pytest.raises(KeyError):  # it would change a copy: refused, not lost
        buffer.set_at_("pixels", torch.zeros(1, 20, 20, dtype=torch.uint8), torch.tensor([8]))
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
