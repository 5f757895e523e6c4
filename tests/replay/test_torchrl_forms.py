"""Data that is no TensorDict, keys as indices, and state dicts from and to a LazyTensorStorage."""

import copy
import io
import json
from collections import OrderedDict, namedtuple

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch.utils import _pytree as pytree
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from penstock import errors
from penstock.replay.torchrl.storage import CompressedStorage

from .torchrl_items import assert_same, items, trajectories

Pair = namedtuple("Pair", "pixels action")


@tensorclass
class Step:
    pixels: torch.Tensor
    action: torch.Tensor


def pixels(*batch):
    count = torch.Size(batch).numel() * 400
    return (torch.arange(count) // 20 % 5).to(torch.uint8).view(*batch, 20, 20)


FORMS = {
    "tensor": pixels,
    "dict": lambda *batch: {"pixels": pixels(*batch), "action": torch.ones(*batch, 2)},
    "ordered": lambda *batch: OrderedDict(
        b=pixels(*batch), a=(torch.ones(*batch, 1), [pixels(*batch)])
    ),
    "namedtuple": lambda *batch: Pair(pixels(*batch), torch.ones(*batch, 2)),
    "tensorclass": lambda *batch: Step(
        pixels=pixels(*batch), action=torch.ones(*batch, 2), batch_size=batch
    ),
}


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, Step):
        one, other = one.to_tensordict(), other.to_tensordict()
    first, second = pytree.tree_flatten(one), pytree.tree_flatten(other)
    assert first[1] == second[1]
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_form_comes_back(form, tmp_path):
    make = FORMS[form]
    buffers = [
        ReplayBuffer(storage=kind(10), batch_size=4)
        for kind in (LazyTensorStorage, CompressedStorage)
    ]
    for buffer in buffers:
        buffer.extend(make(6))
        buffer.add(make())
        buffer[torch.tensor([2, 4])] = make(2)
    theirs, ours = buffers
    assert ours.storage.compressed_keys
    for index in (torch.tensor([3, 0, 5]), torch.tensor([True, False] * 3 + [True]), [1, 2]):
        assert_equal(theirs[index], ours[index])
    assert_equal(theirs[2], pytree.tree_map(torch.clone, ours[2]) if form == "tensor" else ours[2])
    assert type(ours.sample()) is type(make())
    state = ours.state_dict() if form != "namedtuple" else None
    if form == "namedtuple":  # a class of the user, which a file cannot name
        with pytest.raises(errors.UnsupportedValue, match="Pair"):
            ours.storage.state_dict()
        return
    ours.dumps(tmp_path / "saved")
    for load in (lambda it: it.load_state_dict(state), lambda it: it.loads(tmp_path / "saved")):
        other = ReplayBuffer(storage=CompressedStorage(10), batch_size=4)
        if form == "tensorclass":  # neither can a file name this: a buffer that knows it, does
            other.extend(make(1))
        load(other)
        assert_equal(ours[torch.arange(7)], other[torch.arange(7)])


def test_a_storage_keeps_one_form():
    storage = CompressedStorage(10)
    storage.set(range(4), FORMS["dict"](4))
    for wrong in (pixels(4), items(4), FORMS["namedtuple"](4), {"pixels": pixels(4)}):
        with pytest.raises(errors.UsageError, match="the first data was a pytree"):
            storage.set(range(4), wrong)
    with pytest.raises(errors.UsageError, match="first 1 sizes must agree"):
        storage.set(range(4), {"pixels": pixels(4), "action": torch.ones(3, 2)})
    with pytest.raises(errors.UnsupportedValue, match="not float"):
        CompressedStorage(10).set(range(4), {"pixels": pixels(4), "note": 1.0})
    with pytest.raises(errors.UsageError, match="no tensors"):
        CompressedStorage(10).set(range(4), {})
    assert_equal(FORMS["dict"](4), storage.get(torch.arange(4)))


def test_a_slice_of_bare_tensors_writes_through():
    storage = CompressedStorage(6)
    storage.set(range(6), pixels(6))
    storage[:][2] = 9
    assert (storage.get(torch.tensor([2])) == 9).all()
    storage[:][0, 3] = 7  # a part of a record
    assert (storage.get(torch.tensor([0]))[0, 3] == 7).all()
    assert torch.equal(storage.get(torch.tensor([0]))[0, 4:], pixels(6)[0, 4:])
    assert type(storage[:] + 1) is torch.Tensor


@pytest.mark.parametrize("storage", [CompressedStorage, LazyTensorStorage])
def test_whatever_writes_to_a_slice_of_bare_tensors_writes_to_the_storage(storage):
    held = storage(6)
    held.set(range(6), pixels(6))
    expected = pixels(6).clone()

    def check():
        assert torch.equal(held.get(torch.arange(6)), expected)

    part = held[:]
    part += 1
    expected += 1
    check()
    held[:].fill_(4)
    expected.fill_(4)
    check()
    held[:][1:3][0] = 9
    expected[1:3][0] = 9
    check()
    held[2:].transpose(0, 1)[0, 1] = 3
    expected[2:].transpose(0, 1)[0, 1] = 3
    check()
    torch.add(held[:], 1, out=held[:])
    expected += 1
    check()
    held[:].view(-1)[5:90].copy_(torch.arange(85))
    expected.view(-1)[5:90].copy_(torch.arange(85))
    check()
    saved = io.BytesIO()
    torch.save(held[:], saved)
    saved.seek(0)
    for other in (held[:].clone(), copy.deepcopy(held[:]), torch.load(saved, weights_only=True)):
        assert torch.equal(other, expected)
        assert type(other) is torch.Tensor
        other += 1
        check()


def test_parts_of_bare_tensors_can_be_read():
    storage = CompressedStorage(6)
    storage.set(range(6), pixels(6))
    assert torch.equal(storage.get((slice(None), 3)), storage.get(torch.arange(6))[:, 3])


def test_a_key_in_place_of_an_index():
    storage, other = CompressedStorage(10), LazyTensorStorage(10)
    for one in (storage, other):
        one.set(range(7), items(7))
    for key in ("pixels", "action", ("next", "pixels"), ("next", "agents", "lidar")):
        assert torch.equal(storage.get(key), other.get(key))
    assert_same(other.get("next"), storage.get("next"))
    with pytest.raises(KeyError):
        storage.get("nonsense")


def test_windows_around_a_step():
    """TorchRL's sample units ask the storage for the key that ends an episode."""
    from torchrl.data.replay_buffers.sample_units import Sequence

    for kind in (LazyTensorStorage, CompressedStorage):
        buffer = TensorDictReplayBuffer(
            storage=kind(70), batch_size=8, sample_unit=Sequence(length=3, episode_boundary="pad")
        )
        buffer.extend(trajectories(70))
        batch = buffer.sample()
        assert ((batch["episode"].view(8, 3) - batch["episode"].view(8, 3)[:, :1]) == 0).all()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_numbers_that_torch_cannot_index(dtype):
    buffer = ReplayBuffer(storage=CompressedStorage(10), batch_size=4)
    buffer.extend(TensorDict({"n": torch.arange(8).to(dtype), "pixels": pixels(8)}, [8]))
    assert buffer[2]["n"].item() == 2
    assert buffer[2]["n"].dtype == dtype
    for index in (slice(None), torch.tensor([3, 1]), [3, 1]):
        wanted = torch.arange(8)[index]
        assert torch.equal(buffer[index]["n"].long(), wanted)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("count", [4, 10])
def test_state_dicts_go_both_ways(ndim, count):
    batch = (count,) if ndim == 1 else (count, 3)
    size = 10 if ndim == 1 else 30
    lazy, ours = LazyTensorStorage(size, ndim=ndim), CompressedStorage(size, ndim=ndim)
    data = items(*batch)
    lazy.set(range(count), data)
    ours.load_state_dict(lazy.state_dict())
    assert ours.compressed_keys
    assert len(ours) == len(lazy)
    assert_same(lazy.get(slice(None)), ours.get(slice(None)))
    back = LazyTensorStorage(size, ndim=ndim)
    back.load_state_dict(ours.state_dict(compressed=False))
    assert len(back) == len(lazy)
    assert (lazy.get(slice(None)) == back.get(slice(None))).all()
    back.set(range(count), items(*batch, seed=1))
    with pytest.raises(errors.UsageError, match="saved with"):
        CompressedStorage(size + 5, ndim=ndim).load_state_dict(lazy.state_dict())
    assert CompressedStorage(9).state_dict(compressed=False)["initialized"] is False


def test_a_state_that_does_not_fit_leaves_the_storage_as_it_is():
    storage, lazy = CompressedStorage(10), LazyTensorStorage(10)
    storage.set(range(4), items(4))
    before = storage.get(slice(None)).clone()
    lazy.set(range(4), TensorDict({"x": torch.zeros(4, 3)}, [4]))
    state = lazy.state_dict()
    for length in (10**9, -3):
        with pytest.raises(errors.CorruptFile, match="length"):
            storage.load_state_dict({**state, "_len": length})
    text = TensorDict({"note": ["a", "b"] * 5}, [10])
    with pytest.raises(errors.PenstockError):
        storage.load_state_dict({**state, "_storage": text.state_dict()})
    assert_same(before, storage.get(slice(None)))
    storage.load_state_dict(state)
    assert set(storage.get(slice(None)).keys()) == {"x"}


def test_dicts_may_come_in_another_order():
    storage = CompressedStorage(10)
    storage.set(range(2), {"a": pixels(2), "b": {"c": torch.ones(2), "d": torch.zeros(2)}})
    storage.set(range(2, 4), {"b": {"d": torch.zeros(2) + 4, "c": torch.ones(2)}, "a": pixels(2)})
    found = storage.get(torch.tensor([1, 3]))
    assert list(found) == ["a", "b"]
    assert found["b"]["d"].tolist() == [0.0, 4.0]


def test_a_part_of_a_slice_writes_through():
    storage, other = CompressedStorage(6), LazyTensorStorage(6)
    for one in (storage, other):
        one.set(range(6), items(6))
        one[:][1:4][0] = items(1, seed=5)[0]
        one[:][2:][1:].set_("pixels", torch.zeros(3, 20, 20, dtype=torch.uint8))
    assert_same(other.get(slice(None)), storage.get(slice(None)))


def test_a_copy_of_a_storage_that_follows_its_data():
    storage = CompressedStorage(6, device="auto")
    storage.set(range(4), items(4))
    assert (storage.get(slice(None)) == copy.deepcopy(storage).get(slice(None))).all()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["keys"][1].update(path=[*d["keys"][0]["path"], "x"]), "holds others at once"),
        (lambda d: d.update(len=-1), "makes no sense"),
        (lambda d: d.update(form=[[0, 2]]), "makes no sense"),
    ],
)
def test_hostile_descriptions(change, problem):
    storage = CompressedStorage(10)
    storage.set(range(4), items(4))
    state = storage.state_dict()
    description = json.loads(state["description"])
    change(description)
    with pytest.raises(errors.CorruptFile, match=problem):
        storage.load_state_dict({**state, "description": json.dumps(description)})
    assert len(storage) == 4
