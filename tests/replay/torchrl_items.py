"""Data for the tests of CompressedStorage, and what it means to be the same."""

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage

from penstock.replay.torchrl.storage import CompressedStorage


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
    assert isinstance(found, type(wanted))  # a slice of ours also writes through
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


def trajectories(count, seed=0):
    data = items(count, seed=seed)
    data["episode"] = torch.arange(count) // 7
    end = (torch.arange(count) % 7 == 6).unsqueeze(-1)
    data["next", "done"] = end
    data["next", "terminated"] = end.clone()
    return data
