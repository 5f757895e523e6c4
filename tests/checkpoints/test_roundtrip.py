"""Whole training states come back exactly, or are refused by name."""

import collections
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import errors
from penstock.checkpoints.load import load_checkpoint, load_metadata
from penstock.checkpoints.model import rng_state, set_rng_state
from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.core.extras import version_of
from penstock.tensors import DTYPE_NAMES

from .conftest import Training, assert_equal

SHAPES = [(), (0,), (1,), (3, 5), (0, 4), (2, 3, 4), (257,), (64, 129)]


def save(tmp_path, state, **options):
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        saver.save_async(state, "state.pt", **options).wait()
    return load_checkpoint(tmp_path / "state.pt")


def random_tensor(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    count = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("compress", [True, False])
def test_every_dtype_and_shape(tmp_path, compress):
    state = {
        name: [random_tensor(dtype, shape, i) for i, shape in enumerate(SHAPES)]
        for dtype, name in DTYPE_NAMES.items()
    }
    assert_equal(save(tmp_path, state, compress=compress), state)


def test_types_that_other_libraries_give_numpy(tmp_path):
    """JAX, TensorFlow and onnx bring ml_dtypes, and numpy knows bfloat16 from then on."""
    pytest.importorskip("ml_dtypes")
    state = {"weight": torch.arange(9).to(torch.bfloat16)}
    assert_equal(save(tmp_path, state), state)


def test_views_and_strange_strides(tmp_path):
    base = torch.randn(64, 130)
    state = {
        "transposed": base.t(),
        "sliced": base[3:40, ::2],
        "expanded": torch.randn(5, 1).expand(5, 7000),
        "channels_last": torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(300, dtype=torch.complex64).conj(),
        "negative": torch.randn(300, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(9)),
        "needs_grad": torch.randn(3, requires_grad=True),
    }
    loaded = save(tmp_path, state)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor.detach().resolve_conj().resolve_neg()), name
        assert loaded[name].is_contiguous()


def test_tied_tensors_are_one_again(tmp_path):
    shared = torch.randn(100, 100)
    loaded = save(tmp_path, {"a": shared, "b": {"c": shared}, "half": shared[:50]})
    assert loaded["a"] is loaded["b"]["c"]
    assert torch.equal(loaded["half"], shared[:50])
    loaded["a"].zero_()
    assert loaded["half"].any()


def test_loaded_tensors_are_fresh_memory(tmp_path):
    """optimizer.load_state_dict keeps the tensors it is given: two loads must not share them."""
    save(tmp_path, {"x": torch.ones(10_000)})
    first = load_checkpoint(tmp_path / "state.pt")["x"]
    first.zero_()
    assert load_checkpoint(tmp_path / "state.pt")["x"].all()


def test_python_values(tmp_path):
    state = {
        "scalars": [0, -1, 2**63, -(2**63), 2**200, True, False, None, "é\ud800\n", 0.1, -0.0],
        "floats": [float("nan"), float("inf"), float("-inf"), sys.float_info.min],
        "tuple": (1, (2, [3, ()])),
        3: {"int key": 1, (1, "a"): 2, None: 3, 1.5: 4},
        "!": "a key of ours",
        "ordered": collections.OrderedDict(b=1, a=2),
        "bytes": b"\x00\xff",
        "complex": 1 - 2j,
        "sizes": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "numpy": [np.float32(1.5), np.int64(-3), np.bool_(True)],
        "arrays": [np.arange(6).reshape(2, 3), np.array(1.5), np.zeros((0, 3), np.uint8)],
        "empty": [{}, [], (), set(), frozenset({1})],
    }
    loaded = save(tmp_path, state)
    arrays, wanted = loaded.pop("arrays"), state.pop("arrays")
    for one, other in zip(arrays, wanted, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    assert type(loaded["sizes"]) is torch.Size
    assert loaded["device"] == torch.device("cpu")
    assert loaded["dtype"] is torch.bfloat16
    assert [type(v) for v in loaded["numpy"]] == [type(v) for v in state["numpy"]]
    assert repr(loaded) == repr(state)


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.sampled_from(list(DTYPE_NAMES)).flatmap(
        lambda d: st.tuples(st.sampled_from(SHAPES), st.integers(0, 9)).map(
            lambda s: random_tensor(d, *s)
        )
    ),
)
trees = st.recursive(
    leaves,
    lambda child: st.one_of(
        st.lists(child, max_size=4),
        st.lists(child, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), child, max_size=4),
    ),
    max_leaves=12,
)


@given(state=trees)
@settings(max_examples=60, deadline=None)
def test_any_nesting(tmp_path_factory, state):
    assert_equal(save(tmp_path_factory.mktemp("tree"), {"state": state}), {"state": state})


def test_names_that_collide(tmp_path):
    state = {
        "a": {"b.c": torch.ones(3)},
        "a.b": {"c": torch.zeros(3)},
        "__metadata__": torch.ones(1),
    }
    assert_equal(save(tmp_path, state), state)


def test_the_same_array_twice(tmp_path):
    array, empty = np.arange(5), torch.empty(0)
    loaded = save(tmp_path, {"a": array, "b": [array], "c": empty, "d": empty})
    assert np.array_equal(loaded["a"], array)
    assert np.array_equal(loaded["b"][0], array)
    assert loaded["c"].shape == loaded["d"].shape == (0,)


def test_a_bare_tensor(tmp_path):
    assert torch.equal(save(tmp_path, torch.arange(5)), torch.arange(5))


def test_optimizers_schedulers_and_generators(tmp_path):
    training = Training()
    schedulers = torch.optim.lr_scheduler
    if version_of(torch.__version__) >= (2, 1):
        scheduler = schedulers.OneCycleLR(training.optimizer, 0.1, total_steps=50)
    else:  # the state of its OneCycleLR holds a method, which only pickle could store
        scheduler = schedulers.CosineAnnealingLR(training.optimizer, 50)
    for _ in range(3):
        training.step()
        scheduler.step()
    state = {**training.copy(), "scheduler": scheduler.state_dict(), "rng": rng_state()}
    state["scheduler"].pop("_get_lr_called_within_step", None)
    loaded = save(tmp_path, state)
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    set_rng_state(loaded["rng"])
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    other = Training(seed=1)
    other.net.load_state_dict(loaded["model"])
    other.optimizer.load_state_dict(loaded["optimizer"])
    assert_equal(other.copy()["model"], state["model"])
    assert_equal(other.copy()["optimizer"], state["optimizer"])


def every_scheduler(optimizer):
    """Make one of each kind that torch has, but those whose state holds a function in torch 2.0."""
    kinds = torch.optim.lr_scheduler
    yield kinds.MultiStepLR(optimizer, [3, 5, 5])
    yield kinds.StepLR(optimizer, 3)
    yield kinds.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    yield kinds.CosineAnnealingWarmRestarts(optimizer, 5)
    yield kinds.SequentialLR(
        optimizer, [kinds.ConstantLR(optimizer), kinds.MultiStepLR(optimizer, [2])], [3]
    )
    yield kinds.ChainedScheduler([kinds.LinearLR(optimizer), kinds.PolynomialLR(optimizer)])
    yield torch.optim.swa_utils.SWALR(optimizer, 0.05)


def test_every_scheduler(tmp_path):
    training = Training()
    state = [scheduler.state_dict() for scheduler in every_scheduler(training.optimizer)]
    if version_of(torch.__version__) < (2, 1):
        state = state[:2]
    assert_equal(save(tmp_path, state), state)


class Custom:
    """Something only pickle could store."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Custom(), ["state.deep.1", "Custom"]),
        (lambda: 0, ["state.deep.1", "function"]),
        (torch.randn(3, 3).to_sparse(), ["state.deep.1", "sparse"]),
        (torch.empty(3, device="meta"), ["state.deep.1", "meta"]),
        (np.array(["text"]), ["state.deep.1", "ndarray"]),
        (np.array([1.0], ">f8"), ["state.deep.1", "ndarray of >f8"]),
        (np.array(["2026-01-01"], "M8[D]"), ["state.deep.1", "datetime64[D]"]),
        (torch.nn.Linear(2, 2), ["state.deep.1", "Linear"]),
        (collections.defaultdict(int), ["state.deep.1", "defaultdict"]),
        ({torch.float32: 1}, ["state.deep.1", "dtype"]),
        ({(1, Custom()): 1}, ["state.deep.1", "Custom"]),
        (np.datetime64("2026-01-01"), ["state.deep.1", "datetime64"]),
        ({1, (2, Custom())}, ["state.deep.1"]),
    ],
)
def test_refused_by_name_before_anything_is_written(tmp_path, value, words):
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        with pytest.raises(errors.UnsupportedValue) as caught:
            saver.save_async({"state": {"deep": [1, value]}}, "x.pt")
        for word in words:
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []
        saver.save_async({"ok": 1}, "x.pt").wait()  # the saver goes on


def test_a_state_that_contains_itself(tmp_path):
    loop = []
    loop.append(loop)
    with (
        AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver,
        pytest.raises(errors.UnsupportedValue, match="contains itself"),
    ):
        saver.save_async({"loop": loop}, "x.pt")


def test_only_a_part(tmp_path):
    state = {
        "model": {
            "actor.0.weight": torch.randn(300, 300),
            "critic.0.weight": torch.randn(300, 300),
        },
        "step": 7,
        "list": [torch.ones(3), torch.zeros(3)],
    }
    save(tmp_path, state)
    path = tmp_path / "state.pt"
    part = load_checkpoint(path, only="model.actor.*")
    assert list(part) == ["model"]
    assert list(part["model"]) == ["actor.0.weight"]
    assert torch.equal(part["model"]["actor.0.weight"], state["model"]["actor.0.weight"])
    assert load_checkpoint(path, only="step") == {"step": 7}
    assert load_checkpoint(path, only="list.1")["list"][0] is None
    with pytest.raises(errors.UsageError, match="nothing matches"):
        load_checkpoint(path, only="model.nobody.*")


def test_only_a_part_reads_only_that_part(tmp_path):
    """Damage in what is not asked for does not matter, and proves that it is not read."""
    save(tmp_path, {"a": torch.randn(200_000), "b": torch.randn(200_000)})
    path = tmp_path / "state.pt"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    load_checkpoint(path, only="a")
    with pytest.raises(errors.CorruptFile, match="'b'"):
        load_checkpoint(path)


def test_metadata(tmp_path):
    save(tmp_path, {"x": 1}, metadata={"note": "hello", "values": (1, 2.5)})
    assert load_metadata(tmp_path / "state.pt") == {"note": "hello", "values": (1, 2.5)}
    assert load_metadata(tmp_path) == {"note": "hello", "values": (1, 2.5)}


def test_stock_safetensors_opens_what_we_write(tmp_path):
    from safetensors.torch import load_file

    state = {"w": torch.randn(500, 50), "half": torch.randn(999).bfloat16(), "n": torch.tensor(3)}
    save(tmp_path, state, compress=False)
    plain = load_file(tmp_path / "state.pt")
    assert_equal({name: plain[name] for name in state}, state)
    save(tmp_path, state)
    assert set(load_file(tmp_path / "state.pt")) == set(state)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with (
        AsyncCheckpointSaver(tmp_path) as saver,
        pytest.raises(errors.UnsupportedValue, match=r"model\.parts is a nested tensor"),
    ):
        saver.save_async({"model": {"parts": nested}}, "a.pt")


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_tensors_of_function_transforms_are_refused_by_name(tmp_path, transform):
    """Inside `torch.func.grad` and `vmap` a tensor stands for others and has no memory."""
    with AsyncCheckpointSaver(tmp_path) as saver:

        def loss(weight):
            with pytest.raises(errors.UnsupportedValue, match=r"model\.weight"):
                saver.save_async({"model": {"weight": weight}}, "a.pt")
            return weight.sum()

        getattr(torch.func, transform)(loss)(torch.ones(3, 4))
        assert not list(tmp_path.glob("*.pt"))
