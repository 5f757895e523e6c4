"""A small network in training, and savers that are always shut down."""

import numpy as np
import pytest
import torch

from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.core.extras import version_of


def needs_torch(version, what):
    """Mark what older versions of torch cannot do."""
    old = version_of(torch.__version__) < version_of(version)
    return pytest.mark.skipif(old, reason=f"{what} needs torch {version}")


FUSED = needs_torch("2.4", "fused Adam on the CPU")


class Training:
    """A network, its optimizer and a deterministic step."""

    def __init__(self, width=96, seed=0, optimizer=torch.optim.Adam, **options):
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 4),
        )
        self.optimizer = optimizer(self.net.parameters(), lr=1e-3, **options)
        self.steps = 0

    def step(self):
        loss = self.net(torch.randn(16, 32)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def state(self):
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }

    def copy(self):
        """What a save at this moment must hold."""
        return clone(self.state())


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: clone(child) for key, child in value.items()}
    if isinstance(value, list):
        return [clone(child) for child in value]
    return value


def assert_equal(one, other):
    """Exact equality of nested state: types, dtypes, shapes, bits."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        assert torch.equal(*flat) if one.numel() else True
    elif isinstance(one, np.ndarray):
        assert (type(other), other.dtype, other.shape) == (np.ndarray, one.dtype, one.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert type(one) is type(other)
        assert one == other or (one != one and other != other)


@pytest.fixture
def training():
    made = Training()
    made.step()
    return made


@pytest.fixture
def saver(tmp_path, training):
    made = AsyncCheckpointSaver(
        tmp_path,
        optimizers=[training.optimizer],
        modules=[training.net],
        lazy=True,
        handle_signals=False,
    )
    yield made
    made.shutdown()
