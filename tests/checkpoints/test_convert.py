"""Files of others, read and written: safetensors of every kind, torch.save, numpy, TensorDicts."""

import json
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from penstock import errors
from penstock.checkpoints.load import load_checkpoint, to_safetensors, to_torch
from penstock.checkpoints.model import rng_state, set_rng_state
from penstock.checkpoints.saver import AsyncCheckpointSaver

from .conftest import assert_equal

fp8 = pytest.param(
    {"a": torch.tensor([0.5, -3.0]).to(getattr(torch, "float8_e4m3fn", torch.half))}, id="fp8"
)


def save(folder, state, **options):
    with AsyncCheckpointSaver(folder, handle_signals=False, **options) as saver:
        return saver.save_async(state, "a.pt").wait()


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({"a": torch.randn(3, 4), "b": torch.arange(5)}, id="plain"),
        pytest.param({"a": torch.randn(7).bfloat16(), "b": torch.randn(2).half()}, id="bf16"),
        fp8,
        pytest.param({"a": torch.empty(0, 3), "b": torch.empty(2, 0)}, id="empty"),
        pytest.param({"a": torch.tensor(3.5), "b": torch.tensor(True)}, id="zero-dim"),
        pytest.param({"a": torch.tensor([True, False, True]), "b": torch.ones(3)}, id="odd-sizes"),
        pytest.param({}, id="nothing"),
    ],
)
def test_stock_safetensors(tmp_path, tensors):
    for metadata in (None, {"format": "pt", "penstockish": "a note"}):
        save_file(tensors, tmp_path / "x.safetensors", metadata)
        loaded = load_checkpoint(tmp_path / "x.safetensors")
        assert_equal(dict(sorted(loaded.items())), dict(sorted(tensors.items())))


def test_safetensors_with_unaligned_tensors(tmp_path):
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
    ).encode()
    data = b"\x07" + struct.pack("<ff", 1.5, 2.5)
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    loaded = load_checkpoint(path)
    assert loaded["a"].tolist() == [7]
    assert loaded["b"].tolist() == [1.5, 2.5]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(errors.CorruptFile, match=r"x\.safetensors"):
        load_checkpoint(path)


def test_torch_files_with_numpy(tmp_path):
    pytest.importorskip("torch", minversion="2.5")
    state = {
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "bools": np.array([True, False]),
        "f": np.float32(2.5),
        "i": np.int64(-3),
        "b": np.bool_(True),
    }
    torch.save(state, tmp_path / "x.pt")
    assert_equal(load_checkpoint(tmp_path / "x.pt"), state)
    for bad in (np.array([{}], dtype=object), np.array(["text"])):
        torch.save({"x": bad}, tmp_path / "bad.pt")
        with pytest.raises(errors.UnknownFormat, match="numpy"):
            load_checkpoint(tmp_path / "bad.pt")


def test_torch_files_with_tensordicts(tmp_path):
    pytest.importorskip("torch", "2.5")  # older ones have no list of harmless classes
    tensordict = pytest.importorskip("tensordict", minversion="0.9")
    batch = tensordict.TensorDict({"a": torch.randn(2, 3), "in": {"b": torch.ones(2)}}, [2])
    stack = tensordict.lazy_stack([batch, batch + 1])
    torch.save({"batch": batch, "stack": stack}, tmp_path / "x.pt")
    loaded = load_checkpoint(tmp_path / "x.pt")
    assert loaded["batch"].batch_size == torch.Size([2])
    assert (loaded["batch"] == batch).all()
    assert (loaded["stack"] == stack).all()
    code = (  # a program that has not imported it
        "import sys; from penstock import load_checkpoint; assert 'tensordict' not in sys.modules;"
        f"print(load_checkpoint({str(tmp_path / 'x.pt')!r})['batch']['in', 'b'].tolist())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[1.0, 1.0]\n"


def test_versions_of_modules_survive(tmp_path):
    """Without them, load_state_dict takes a BatchNorm for one of torch 0.3."""
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    loaded = load_checkpoint(save(tmp_path, {"model": state}))["model"]
    assert type(loaded) is OrderedDict
    assert loaded._metadata == state._metadata
    out = torch.load(to_torch(tmp_path, tmp_path / "out.pt"), weights_only=True)["model"]
    assert out._metadata == state._metadata


WHOLE = {
    "model": OrderedDict(w=torch.randn(3, 3), h=torch.randn(2).bfloat16()),
    "optimizers": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}],
    "array": np.arange(4, dtype=np.int16),
    "numbers": [np.float32(0.5), np.int64(7), np.bool_(True), 3, 2.5, None, "text"],
    "other": (1, {2, 3}, frozenset({4}), b"x", 1j, torch.float16, torch.device("cpu")),
}


def test_to_torch_is_read_without_trust(tmp_path):
    recent = hasattr(torch.serialization, "safe_globals")  # older ones refuse sets
    save(tmp_path, {key: value for key, value in WHOLE.items() if recent or key != "other"})
    out = torch.load(to_torch(tmp_path, tmp_path / "out.pt"), weights_only=True)
    assert torch.equal(out["model"]["w"], WHOLE["model"]["w"])
    assert out["model"]["h"].dtype == torch.bfloat16
    assert out["optimizers"][0]["state"][0]["step"] == 3
    assert torch.equal(out["array"], torch.arange(4, dtype=torch.int16))
    assert out["numbers"] == [0.5, 7, True, 3, 2.5, None, "text"]
    if recent:
        assert out["other"][:5] == (1, {2, 3}, {4}, b"x", 1j)


def test_to_torch_of_random_states(tmp_path):
    save(tmp_path, rng_state())
    expected = np.random.rand(), torch.rand(1)
    out = torch.load(to_torch(tmp_path, tmp_path / "out.pt"), weights_only=True)
    set_rng_state(out)
    assert (np.random.rand(), torch.rand(1)) == expected


def test_to_safetensors_is_read_by_the_stock_library(tmp_path):
    save(tmp_path, WHOLE)
    out = to_safetensors(tmp_path, tmp_path / "out.safetensors")
    with safe_open(out, "pt") as file:
        assert sorted(file.keys()) == [
            "array",
            "model.h",
            "model.w",
            "optimizers.0.state.0.step",
        ]
        assert torch.equal(file.get_tensor("model.w"), WHOLE["model"]["w"])
        notes = file.metadata()
    assert json.loads(notes["optimizers.0.param_groups"]) == [{"lr": 0.1}]
    assert json.loads(notes["numbers"])[3:] == [3, 2.5, None, "text"]
    assert torch.equal(load_checkpoint(out)["model.w"], WHOLE["model"]["w"])


def test_to_safetensors_keeps_tensors_of_equal_names_apart(tmp_path):
    shared = torch.ones(3)
    save(tmp_path, {"a.b": torch.zeros(2), "a": {"b": shared}, "tied": shared})
    out = load_checkpoint(to_safetensors(tmp_path, tmp_path / "out.safetensors"))
    assert sorted(tensor.sum().item() for tensor in out.values()) == [0, 3, 3]
    array = np.ones(2)  # nor do two names of one array stop it
    save(tmp_path / "arrays", {"a": array, "b": array})
    out = load_checkpoint(to_safetensors(tmp_path / "arrays", tmp_path / "arrays.safetensors"))
    assert [tensor.sum().item() for tensor in out.values()] == [2, 2]
    save(tmp_path / "none", {"x": 1})
    with pytest.raises(errors.UsageError, match="no tensor"):
        to_safetensors(tmp_path / "none", tmp_path / "none.safetensors")


def test_what_else_a_training_keeps_survives_every_conversion(tmp_path):
    """Counters (MultiStepLR has one) and deques, of the last rewards, with tensors in them."""
    state = {"seen": Counter({3: 2, 5: 1}), "last": deque([1.5, torch.ones(2)], maxlen=9)}
    path = save(tmp_path, state)
    plain = torch.load(to_torch(path, tmp_path / "x.pt"), weights_only=True)
    assert plain["seen"] == state["seen"]
    assert plain["last"][0] == 1.5
    assert torch.equal(plain["last"][1], torch.ones(2))
    tensors = load_checkpoint(to_safetensors(path, tmp_path / "x.safetensors"))
    assert list(tensors) == ["last.1"]
