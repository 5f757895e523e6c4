"""CompressedLidarTransform: in and out of TorchRL's buffers, exact or within the bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

pytest.importorskip("torchrl", reason="CompressedLidarTransform is a plug-in of TorchRL")
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import Compose, TransformedEnv

from penstock import errors
from penstock.rollouts.transform import CompressedLidarTransform

from .conftest import make_batch, same
from .toy_env import Counting

LIDAR = ("agents", "observation", "lidar")
PACKED = ("agents", "observation", "lidar_compressed")


def stored_bytes(packed, key=PACKED):
    return sum(len(part.data) for part in packed.get(key).tensordicts)


@pytest.mark.parametrize("level", [1, 9, 16])
def test_there_and_back(level):
    batch = make_batch(20, 32)
    transform = CompressedLidarTransform([LIDAR, "half", "count", "done"], compression_level=level)
    before = batch.clone()
    packed = transform.compress(batch)
    same(before, batch)
    assert LIDAR not in packed.keys(True, True)
    assert PACKED in packed.keys(True, True)
    assert stored_bytes(packed) < batch[LIDAR].nbytes / 2
    back = transform.decompress(packed)
    assert set(back.keys(True, True)) == set(batch.keys(True, True))
    assert back.batch_size == batch.batch_size
    for key in batch.keys(True, True):
        same(back[key], batch[key])
    for key in batch.keys(True, True):
        same(transform(transform.inv(batch))[key], batch[key])


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("appended", [True, False])
def test_in_a_replay_buffer(storage, kind, appended):
    transform = CompressedLidarTransform([LIDAR])
    flat = make_batch(10, 8).reshape(-1)
    options = {"storage": storage(200), "batch_size": 32}
    buffer = kind(**options) if appended else kind(**options, transform=transform)
    if appended:
        buffer.append_transform(transform)
    buffer.extend(flat)
    buffer.add(flat[5])
    for item in range(3):
        assert isinstance(buffer._storage.get(item).get(PACKED), NonTensorData)
    for _ in range(5):
        sample = buffer.sample()
        assert PACKED not in sample.keys(True, True)
        same(sample[LIDAR], flat[sample["count"]][LIDAR])
        same(
            sample["agents", "observation", "state"],
            flat[sample["count"]]["agents", "observation", "state"],
        )


def test_rows_of_time_in_a_replay_buffer():
    batch = make_batch(12, 16)
    buffer = ReplayBuffer(
        storage=ListStorage(20), batch_size=5, transform=CompressedLidarTransform([LIDAR])
    )
    buffer.extend(batch)
    for _ in range(5):
        sample = buffer.sample()
        assert sample.batch_size == (5, 16)
        same(sample[LIDAR], batch[sample["count"][:, 0] // 16][LIDAR])


@pytest.mark.parametrize("out_keys", [None, ["packed"]])
def test_agents_have_a_batch_axis_of_their_own(out_keys):
    key, states = ("agents", "lidar"), torch.arange(36.0).reshape(12, 3)
    agents = TensorDict({"lidar": torch.randn(12, 3, 36), "state": states}, [12, 3])
    batch = TensorDict({"agents": agents, "count": torch.arange(12)}, [12])
    transform = CompressedLidarTransform([key], out_keys)
    back = transform.decompress(transform.compress(batch))
    assert back["agents"].batch_size == (12, 3)
    same(back[key], batch[key])
    buffer = ReplayBuffer(storage=ListStorage(20), batch_size=5, transform=transform)
    buffer.extend(batch)
    for _ in range(5):
        sample = buffer.sample()
        same(sample[key], batch[key][sample["count"]])


def test_an_empty_batch_is_refused(batch):
    with pytest.raises(errors.UsageError, match="is empty"):
        CompressedLidarTransform([LIDAR]).compress(batch[:0])


def test_equal_items():
    """TorchRL merges equal items of a stack into one: they come apart again."""
    batch = TensorDict({"x": torch.zeros(5, 40)}, batch_size=[5])
    transform = CompressedLidarTransform(["x"])
    packed = transform.compress(batch)
    assert {len(part.data) for part in packed.get("x_compressed").tensordicts} == {
        len(packed.get("x_compressed")[0].data)
    }
    merged = torch.stack([packed[i] for i in (0, 1, 0)])
    same(transform(merged)["x"], torch.zeros(3, 40))
    one = TensorDict({"x": torch.arange(4.0)})
    same(transform(transform.compress(one))["x"], torch.arange(4.0))


@settings(max_examples=60, deadline=None)
@given(
    epsilon=st.sampled_from([1e-4, 0.005, 0.3]),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    batch_dims=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_the_bound_is_kept(epsilon, shape, batch_dims, dtype, seed):
    batch_dims = min(batch_dims, len(shape))
    values = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * 5
    data = TensorDict({"x": values}, batch_size=shape[:batch_dims])
    transform = CompressedLidarTransform(["x"], ["y"], epsilon=epsilon)
    if batch_dims and shape[0] == 0:
        return
    back = transform(transform.compress(data))["x"]
    assert (back.dtype, back.shape) == (dtype, values.shape)
    assert not values.numel() or (back - values).abs().max() <= epsilon


def test_a_bound_saves_more():
    batch = make_batch(20, 32)
    exact = stored_bytes(CompressedLidarTransform([LIDAR]).compress(batch))
    rough = stored_bytes(CompressedLidarTransform([LIDAR], epsilon=0.005).compress(batch))
    assert rough < exact / 1.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bound_cannot_hold_everything(bad):
    data = TensorDict({"x": torch.tensor([[1.0, bad]])}, batch_size=[1])
    with pytest.raises(errors.UnsupportedValue, match="NaN or infinity"):
        CompressedLidarTransform(["x"], epsilon=0.1).compress(data)
    exact = CompressedLidarTransform(["x"])
    same(exact(exact.compress(data))["x"], data["x"])
    whole = TensorDict({"x": torch.ones(1, 2, dtype=torch.int32)}, batch_size=[1])
    with pytest.raises(errors.UnsupportedValue, match="epsilon is for float"):
        CompressedLidarTransform(["x"], epsilon=0.1).compress(whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_keys": "x"}, "give lists of keys"),
        ({"in_keys": []}, "give lists of keys"),
        ({"in_keys": ["x"], "out_keys": ["x"]}, "give one other name"),
        ({"in_keys": ["x"], "out_keys": ["y", "z"]}, "give one other name"),
        ({"in_keys": ["x"], "epsilon": -1}, "epsilon must be a positive number"),
        ({"in_keys": ["x"], "compression_level": 17}, "compression_level=17"),
        ({"in_keys": ["x"], "compression_level": 0}, "compresses nothing"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(errors.UsageError, match=message):
        CompressedLidarTransform(**arguments)


def test_missing_and_damaged_data(batch):
    transform = CompressedLidarTransform([LIDAR])
    with pytest.raises(errors.UsageError, match="no tensor 'lidr' to compress"):
        CompressedLidarTransform(["lidr"]).compress(batch)
    with pytest.raises(errors.UsageError, match="holds no compressed data"):
        transform(batch)
    packed = transform.compress(batch)
    with pytest.raises(errors.UsageError, match="was reshaped"):
        transform(packed.reshape(-1))
    good = packed.get(PACKED).tensordicts[0].data
    one = packed[0].clone()
    silent = 0
    for bit in range(0, 8 * len(good), 7):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        one.set(PACKED, NonTensorData(bytes(data), batch_size=[8]))
        try:
            found = transform(one)[LIDAR]
        except (errors.CorruptFile, errors.UsageError):
            continue
        silent += not torch.equal(found, batch[0][LIDAR])
    assert silent == 0
    for cut in range(0, len(good), 50):
        one.set(PACKED, NonTensorData(good[:cut], batch_size=[8]))
        with pytest.raises((errors.CorruptFile, errors.UsageError)):
            transform(one)
    other = CompressedLidarTransform([LIDAR], epsilon=0.1)
    with pytest.raises(errors.CorruptFile):
        other(packed)
    stack = NonTensorStack(*[NonTensorData(5) for _ in range(6)])
    with pytest.raises(errors.CorruptFile, match="too short"):
        transform(TensorDict({"agents": {"observation": {"lidar_compressed": stack}}}, [6]))


def test_an_environment_is_refused():
    with pytest.raises(errors.UsageError, match="not into an environment"):
        TransformedEnv(Counting(), CompressedLidarTransform(["observation"]))
    env = TransformedEnv(Counting(), Compose())
    with pytest.raises(errors.UsageError, match="not into an environment"):
        env.append_transform(CompressedLidarTransform(["observation"]))
        env.observation_spec  # noqa: B018
