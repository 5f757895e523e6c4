"""A training that is resumed from a checkpoint equals the uninterrupted one, bit for bit."""

import random

import numpy as np
import pytest
import torch

from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.model import rng_state, set_rng_state
from penstock.checkpoints.saver import AsyncCheckpointSaver

from .conftest import assert_equal


class Run:
    """Everything that a real run holds: network, optimizer, scheduler, EMA, three generators."""

    def __init__(self):
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.Dropout(),
            torch.nn.Linear(64, 2),
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.ema = {k: v.clone().float() for k, v in self.net.state_dict().items()}
        self.iteration = 0

    def advance(self):
        x = torch.randn(32, 16) + random.random() + np.random.rand()
        loss = self.net(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        for name, value in self.net.state_dict().items():
            self.ema[name].lerp_(value.float(), 0.1)
        self.iteration += 1

    def state(self):
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": {k: v for k, v in self.scheduler.state_dict().items() if not callable(v)},
            "ema": self.ema,
            "iteration": self.iteration,
            "rng": rng_state(),
        }

    def restore(self, state):
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.ema = state["ema"]
        self.iteration = state["iteration"]
        set_rng_state(state["rng"])


@pytest.mark.parametrize("delta_every", [0, 4])
def test_ten_and_ten_equal_twenty(tmp_path, delta_every):
    random.seed(1)
    np.random.seed(1)
    straight = Run()
    with AsyncCheckpointSaver(
        tmp_path, optimizers=[straight.optimizer], delta_every=delta_every, handle_signals=False
    ) as saver:
        for i in range(20):
            if i == 10:
                handle = saver.save_async(straight.state(), "10.pt")
            elif i < 10:
                saver.save_async(straight.state(), f"{i}.pt")
            straight.advance()
        handle.wait()
    resumed = Run()
    resumed.restore(load_checkpoint(tmp_path / "10.pt"))
    assert resumed.iteration == 10
    for _ in range(10):
        resumed.advance()
    assert_equal(resumed.state()["model"], straight.state()["model"])
    assert_equal(resumed.state()["optimizer"], straight.state()["optimizer"])
    assert_equal(resumed.ema, straight.ema)


def test_saving_changes_nothing(tmp_path):
    """With and without saves, the same training: not one generator is moved."""
    results = []
    for saving in (False, True):
        random.seed(1)
        np.random.seed(1)
        run = Run()
        with AsyncCheckpointSaver(
            tmp_path, optimizers=[run.optimizer], handle_signals=False
        ) as saver:
            for i in range(10):
                if saving:
                    saver.save_async(run.state(), f"{i}.pt")
                run.advance()
        results.append(run.state()["model"])
    assert_equal(*results)
