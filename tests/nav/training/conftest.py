"""Small trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SMALL = [
    "env.num_envs=32",
    "env.maps=2",
    "env.num_obstacles=40",
    "env_dyn.num_obstacles=8",
    "algo.training_frame_num=8",
    "algo.minibatches=2",
    "algo.epochs=2",
    "max_frame_num=2048",  # 8 iterations
    "eval_interval=0",
    "processes=1",
    "tensorboard=False",
    "wandb.mode=disabled",
]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Paths at which two states differ, but for the clock."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        return [
            found
            for key in left
            if key != "seconds"
            for found in differences(left[key], right[key], f"{path}/{key}")
        ]
    if isinstance(left, list | tuple):
        assert len(left) == len(right), path
        pairs = enumerate(zip(left, right, strict=True))
        return [found for i, (a, b) in pairs for found in differences(a, b, f"{path}[{i}]")]
    if isinstance(left, torch.Tensor):
        return [] if torch.equal(left, right) else [path]
    return [] if left == right else [path]
