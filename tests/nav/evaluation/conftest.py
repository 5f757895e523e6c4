"""A run to evaluate: an untrained policy, saved as a training saves it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.nav.networks import Policy
from penstock.nav.simulation.task import Settings

Save = Callable[..., Path]


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small() -> Settings:
    """A few obstacles, a short flight: for what is not about flying."""
    return Settings(
        num_envs=8,
        num_obstacles=30,
        dynamic_obstacles=8,
        drone="fast",
        reward="shifted",
        episode_seconds=4.0,
        map_seed=1_000_000,
        maps=4,
    )


@pytest.fixture
def save(tmp_path: Path, small: Settings) -> Save:
    """Write a checkpoint into the run; its parts may be replaced."""

    def write(name: str = "best.pt", seed: int = 0, **parts: Any) -> Path:
        policy = Policy("fast", seed=seed)
        state = parts.get("state", {"ppo": {"policy": policy.state_dict(), "preset": "fast"}})
        metadata = parts.get(
            "metadata",
            {
                "settings": json.loads(json.dumps(asdict(small))),
                "iteration": 12,
                "frames": 3_000_000,
                "validation": 0.25,
                "map_seeds": [1_000_000, 1_000_020],
            },
        )
        with AsyncCheckpointSaver(tmp_path / "run" / "checkpoints", handle_signals=False) as saver:
            saver.save_async(state, name, metadata=metadata).wait()
        return tmp_path / "run"

    return write
