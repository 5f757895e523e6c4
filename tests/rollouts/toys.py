"""Collectors and an environment to test with."""

import threading
import time

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase


def number(value, size=100):
    return TensorDict({"x": torch.full((size,), value)}, batch_size=[size])


class Fresh:
    """Makes new batches; notes when each was started and in which thread."""

    def __init__(self, count=10, delay_s=0.0, size=100):
        self.count, self.delay_s, self.size = count, delay_s, size
        self.started = []
        self.threads = set()
        self.shutdowns = []

    def __iter__(self):
        for i in range(self.count):
            self.started.append(i)
            self.threads.add(threading.current_thread())
            time.sleep(self.delay_s)
            yield number(i, self.size)

    def shutdown(self):
        self.shutdowns.append(threading.current_thread())


def wait_started(base, count):
    """Wait until the collector has begun so many batches (or all that it has)."""
    deadline = time.monotonic() + 20
    while len(base.started) < min(count, base.count):
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Counting(EnvBase):
    """An environment whose observation is the number of its steps."""

    def __init__(self):
        super().__init__(batch_size=[3])
        self.observation_spec = Composite(observation=Unbounded((3, 50)), shape=[3])
        self.action_spec = Bounded(-1, 1, (3, 1))
        self.reward_spec = Unbounded((3, 1))
        self.count = 0

    def _reset(self, tensordict=None):
        return self._state(done=False)

    def _step(self, tensordict):
        self.count += 1
        out = self._state(done=False)
        out["reward"] = torch.full((3, 1), float(self.count))
        return out

    def _state(self, done):
        return TensorDict(
            {
                "observation": torch.full((3, 50), float(self.count)),
                "done": torch.full((3, 1), done),
                "terminated": torch.full((3, 1), done),
            },
            batch_size=[3],
        )

    def _set_seed(self, seed):
        pass
