"""Batches as simulators make them, and exact equality."""

import contextlib
import gc
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

with (
    warnings.catch_warnings(),  # TorchRL warns of its own deprecated classes when it is imported
    contextlib.suppress(ModuleNotFoundError),
):
    warnings.simplefilter("ignore")
    import torchrl.collectors
    import torchrl.data
    import torchrl.envs  # noqa: F401

from penstock.core.extras import installed, version_of


def make_batch(envs=6, steps=8, seed=0, names=None):
    """A NavRL-like batch: mostly zero lidar, slow state, flags; nested, with odd dtypes."""
    rng = np.random.default_rng(seed)
    lidar = np.cumsum(rng.normal(0, 0.01, (envs, steps, 1, 36, 4)), axis=1) + 2
    lidar = np.where(rng.random((envs, 1, 1, 36, 4)) < 0.6, 0, lidar).astype(np.float32)
    state = np.cumsum(rng.normal(0, 0.1, (envs, steps, 8)), axis=1).astype(np.float32)
    return TensorDict(
        {
            "agents": {
                "observation": {"lidar": torch.from_numpy(lidar), "state": torch.from_numpy(state)}
            },
            "action": torch.from_numpy(rng.normal(size=(envs, steps, 3)).astype(np.float32)),
            "half": torch.from_numpy(rng.normal(size=(envs, steps, 5))).bfloat16(),
            "count": torch.arange(envs * steps).reshape(envs, steps),
            "done": torch.from_numpy(rng.random((envs, steps, 1)) < 0.1),
        },
        batch_size=[envs, steps],
        names=names,
    )


def same(one, other):
    """Exact equality of nested batches: containers, key order, dtypes, shapes, bits."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.numel():
            # Copied into fresh memory: an axis of length 1 may have any stride.
            fresh = [torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for t in (one, other)]
            flat = [t.reshape(-1).view(torch.uint8) for t in fresh]
            assert torch.equal(*flat)
    elif isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, NonTensorData | NonTensorStack):
        assert type(one) is type(other)
        assert one.tolist() == other.tolist()
        assert one.batch_size == other.batch_size
    elif isinstance(one, TensorDictBase):
        assert isinstance(other, TensorDictBase)
        assert one.batch_size == other.batch_size
        assert one.names == other.names
        assert list(one.keys()) == list(other.keys())
        for key in one.keys():  # noqa: SIM118
            same(one.get(key), other.get(key))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    else:
        assert type(one) is type(other)
        assert one == other


@pytest.fixture
def batch():
    return make_batch()


@pytest.fixture
def no_thread_survives():
    before = set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + 20
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, set(threading.enumerate()) - before
        time.sleep(0.005)


def same_values(one, other):
    assert one.batch_size == other.batch_size
    if version_of(installed("tensordict")) >= (0, 14):  # before, a mask took the names away
        assert one.names == other.names
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        same(one[key], other[key])
