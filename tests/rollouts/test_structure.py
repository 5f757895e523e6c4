"""What a rollout may hold, and what a hostile file may claim."""

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, tensorclass

from penstock import errors
from penstock.core.pack import Item, PackWriter
from penstock.rollouts.storage import RolloutStorage

from .conftest import make_batch, same, same_values

HOSTILE = [
    "a/b",
    "a",
    "",
    "__metadata__",
    "tensor 0",
    "../../x",
    "ü\ud800",
    "a\x00b",
    " ",
    "k" * 300,
]


def test_hostile_names_survive(tmp_path):
    data = TensorDict({}, batch_size=[3, 4])
    for number, name in enumerate(HOSTILE):
        data.set(("in", name), torch.full((3, 4, 500), float(number)))
        if name:
            data.set(name, torch.full((3, 4), number))
    storage = RolloutStorage(tmp_path)
    storage.save(data, 0)
    same(data, storage.load(0))
    for number, name in enumerate(HOSTILE):
        part = storage.load(0, keys=[("in", name)], envs=1)
        assert list(part.keys(True, True)) == [("in", name)]
        assert (part["in", name] == number).all()
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_000000.pack"]


def test_dicts_come_back_as_dicts(tmp_path):
    data = {
        "obs": {"x": torch.randn(3, 4, 700), "depth": np.ones((3, 4, 9), np.uint16)},
        ("agents", "y"): torch.randn(3, 4),
        "big": np.arange(6, dtype=">i4").reshape(2, 3),
        "values": torch.randn(3),
        "note": "fünf",
        "n": 5,
        "pair": (1, None, [2.5]),
        "empty": {},
        7: torch.zeros(0, 4),
        "c": torch.randn(3, 4, dtype=torch.complex64).conj(),
    }
    storage = RolloutStorage(tmp_path)
    storage.save(data, 3)
    expected = {**data, "big": data["big"].astype(np.int32), "c": data["c"].resolve_conj()}
    same(expected, storage.load(3))
    part = storage.load(3, envs=[2, 0], steps=1)
    same(part["obs"]["x"], data["obs"]["x"][[2, 0], 1])
    same(part["obs"]["depth"], data["obs"]["depth"][[2, 0], 1])
    same(part["values"], data["values"])  # does not begin with [3, 4]: whole
    assert part["note"] == "fünf"
    same(storage.load(3, keys=[("agents", "y")]), {("agents", "y"): data["agents", "y"]})


def test_what_a_tensordict_may_hold(tmp_path):
    data = make_batch(3, 4, names=["env", "time"])
    data["text"] = "hello"
    data["number"] = NonTensorData(5, batch_size=[3, 4])
    data["labels"] = NonTensorStack(
        *[NonTensorStack(*[NonTensorData(f"{e}{t}") for t in range(4)]) for e in range(3)]
    )
    data["empty"] = torch.zeros(3, 4, 0)
    data["agents", "ids"] = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    data["more"] = TensorDict({"x": torch.randn(3, 4, 2)}, batch_size=[3, 4, 2])
    data["strided"] = torch.randn(4, 3).t()
    data["expanded"] = torch.randn(3, 4, 1).expand(3, 4, 50)
    data["learned"] = torch.nn.Parameter(torch.randn(3, 4))
    storage = RolloutStorage(tmp_path)
    storage.save(data, 0)
    loaded = storage.load(0)
    data["learned"] = data["learned"].detach()
    same(data, loaded)
    part = storage.load(0, envs=[2, 1], steps=3)
    expected = data[[2, 1]][:, 3]
    same(part["more"], expected["more"])
    assert part.names == ["env"]
    assert part["text"] == "hello"
    assert part.get("labels").tolist() == ["23", "13"]
    assert part.get("number").batch_size == (2,)


def test_lazy_stacks_and_memory_maps(tmp_path, batch):
    storage = RolloutStorage(tmp_path / "out")
    lazy = LazyStackedTensorDict(*[batch[i].clone() for i in range(6)], stack_dim=0)
    storage.save(lazy, 0)
    same_values(storage.load(0), batch)
    storage.save(batch.clone().memmap_(tmp_path / "map"), 1)
    same_values(storage.load(1), batch)


@tensorclass
class Observation:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(3), "a rollout is a TensorDict or nested dicts"),
        ({"a": {"b": object()}}, r"a\.b: .*cannot be stored without pickle"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "a is a torch.sparse_coo tensor"),
        ({"a": np.array(["x"])}, "a is an array of <U1"),
        ({"a": np.array([None])}, "a is an array of object"),
        ({"a": Observation(torch.zeros(2, 2), batch_size=[2])}, "a is a .*Observation"),
        (TensorDict({"a": torch.zeros(2, device="meta")}), "without data"),
        (
            LazyStackedTensorDict(
                TensorDict({"x": torch.zeros(2)}), TensorDict({"x": torch.zeros(3)})
            ),
            "a stack of unequal parts",
        ),
    ],
)
def test_what_cannot_be_stored_leaves_nothing(tmp_path, data, message):
    storage = RolloutStorage(tmp_path)
    with pytest.raises(errors.UsageError, match=message) as raised:
        storage.save(data, 0)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_dict_that_contains_itself(tmp_path):
    data = {}
    data["again"] = data
    with pytest.raises(errors.UnsupportedValue, match="contains itself"):
        RolloutStorage(tmp_path).save(data, 0)


def test_batches_without_two_axes(tmp_path):
    storage = RolloutStorage(tmp_path)
    flat = TensorDict({"x": torch.randn(5000, 4), "i": torch.arange(5000)}, batch_size=[5000])
    storage.save(flat, 0)
    same_values(storage.load(0), flat)
    same_values(storage.load(0, envs=slice(4000, None)), flat[4000:])
    with pytest.raises(errors.UsageError, match="has no such axis"):
        storage.load(0, steps=1)
    first = RolloutStorage(tmp_path, time_dim=0)
    first.save(flat, 1)
    same_values(storage.load(1, steps=[7, 7]), flat[[7, 7]])
    storage.save(TensorDict({"a": torch.tensor(1.0)}), 2)
    assert storage.load(2)["a"] == 1
    with pytest.raises(errors.UsageError, match="has no such axis"):
        storage.load(2, envs=0)
    storage.save(TensorDict({}, batch_size=[2, 3]), 3)
    same(storage.load(3), TensorDict({}, batch_size=[2, 3]))
    loose = TensorDict({"x": torch.randn(4, 6, 3)}, batch_size=[])
    storage.save(loose, 4)
    same_values(storage.load(4), loose)
    same(storage.load(4, envs=2, steps=slice(1, 3))["x"], loose["x"][2, 1:3])


def hostile(path, **changes):
    """A well-formed pack whose description was not made by us."""
    meta = {
        "iteration": 0,
        "batch": [2, 3],
        "env": 0,
        "time": 1,
        "data": {"kind": "dict", "v": [["x", {"kind": "tensor", "item": "x", "device": "cpu"}]]},
    }
    meta.update(changes)
    with PackWriter(path, kind="rollout", meta=meta) as writer:
        writer.write([Item("x", np.zeros((2, 3)))])


def nested(depth):
    node = {"kind": "tensor", "item": "x"}
    for _ in range(depth):
        node = {"kind": "dict", "v": [["k", node]]}
    return node


def of_td(**changes):
    node = {"kind": "tensordict", "batch_size": [2, 3], "names": None}
    return {**node, "v": [["x", {"kind": "tensor", "item": "x"}]], **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": None},
        {"batch": [2, "x"]},
        {"batch": [1, 2, 3]},
        {"env": 2},
        {"env": "x"},
        {"env": 1, "time": 1},
        {"env": True},
        {"data": None},
        {"data": {"kind": "dict", "v": []}},
        {"data": {"kind": "dict", "v": [["x", {"kind": "tensor", "item": "y"}]]}},
        {"data": {"kind": "dict", "v": [["x"]]}},
        {"data": {"kind": "dict", "v": [[{"!": "code"}, {"kind": "tensor", "item": "x"}]]}},
        {"data": {"kind": "code", "item": "x"}},
        {"data": nested(150)},
        {"data": of_td(batch_size=[7])},
        {"data": of_td(batch_size="x")},
        {"data": of_td(names=["a"])},
        {"data": of_td(names=5)},
        {"data": of_td(v=[[5, {"kind": "tensor", "item": "x"}]])},
    ],
)
def test_a_hostile_description(tmp_path, changes):
    storage = RolloutStorage(tmp_path)
    hostile(storage.path(0))
    assert storage.load(0)["x"].shape == (2, 3)
    hostile(storage.path(0), **changes)
    for part in ({}, {"envs": 1}, {"steps": [0]}, {"keys": ["x"]}):
        with pytest.raises(errors.PenstockError) as raised:
            storage.load(0, **part)
        assert "\n" not in str(raised.value)
