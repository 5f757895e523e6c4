"""A TorchRL environment to test with."""

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase


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
