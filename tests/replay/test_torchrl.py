"""CompressedStorage: TorchRL's own LazyTensorStorage is the reference, answer by answer."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)

from penstock import errors
from penstock.replay.arena import CompressedColumns
from penstock.replay.torchrl.storage import CompressedStorage
from penstock.tensors import DTYPE_NAMES

from .torchrl_items import assert_same, items, pair, trajectories

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
    assert storage._columns.arena.live_bytes <= 500 * 4000
    assert storage.nbytes <= max(first, 500 * 4000 + (24 << 20))
    assert torch.equal(storage.get(torch.arange(400, 500))["x"], data["x"])  # 60 turns: 12 rounds
    buffer.empty()
    assert len(buffer) == 0
    assert storage._columns.arena.live_bytes == 0
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


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES), ids=str)
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
    for wrong in ("lz5", {"pixels": "lz5"}):
        with pytest.raises(errors.UsageError, match="no codec 'lz5'; did you mean 'lz4'"):
            CompressedStorage(20, codecs=wrong)


def test_beyond_memory(tmp_path):
    storage = CompressedStorage(4000, memory_bytes="8MB", spill_dir=tmp_path)
    buffer = ReplayBuffer(storage=storage, batch_size=64)
    noise = torch.randint(0, 256, (4000, 8000), dtype=torch.uint8)
    for part in TensorDict({"x": noise}, batch_size=[4000]).split(200):
        buffer.extend(part)
    assert storage._columns.arena.spilled_bytes > 16 << 20
    assert storage.nbytes < 20 << 20
    assert list(tmp_path.iterdir()) == []  # the files have no names
    rows = torch.randint(0, 4000, (300,))
    assert torch.equal(storage.get(rows)["x"], noise[rows])
