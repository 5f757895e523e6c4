"""A training state that is real: actor and critic trained by clipped PPO with Adam."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from penstock.ui.progress import Progress

OBSERVATIONS, ACTIONS = 12, 4
_MINIBATCH = 24
_EPOCHS, _MINIBATCHES = 2, 2  # so that ratios differ from 1 and clipping is at work
_CLIP, _MAX_NORM, _LEARNING_RATE = 0.2, 0.5, 3e-4


def build_mlp(outputs: int, hidden: int, layers: int) -> nn.Sequential:
    """Build a network of `layers` hidden layers."""
    widths = [OBSERVATIONS, *[hidden] * layers]
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(hidden, outputs))


class Learner:
    """A Gaussian policy and a value network that learn to imitate a fixed teacher.

    Observations are random, the reward is the closeness to the teacher's action. All randomness
    comes from torch's global generator, so that saving it makes a run resumable bit by bit.

    Args:
        hidden: Width of both networks.
        layers: Hidden layers of both networks.
        seed: Of the global generator.
    """

    def __init__(self, hidden: int = 2048, layers: int = 3, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = nn.ModuleDict(
            {
                "actor": build_mlp(ACTIONS, hidden, layers),
                "critic": build_mlp(1, hidden, layers),
            }
        )
        self.log_std = nn.Parameter(torch.full((ACTIONS,), -0.5))
        self.net.register_parameter("log_std", self.log_std)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=_LEARNING_RATE)
        self.teacher = torch.randn(OBSERVATIONS, ACTIONS) / OBSERVATIONS**0.5
        self.steps = 0

    def state(self) -> dict[str, Any]:
        """Return the live state, as it is handed to a saver."""
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "teacher": self.teacher,
            "steps": self.steps,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.teacher = state["teacher"]
        self.steps = state["steps"]

    def iterate(self) -> float:
        """Collect a batch, make its optimizer steps, and return the mean reward."""
        with torch.no_grad():
            observations = torch.randn(_MINIBATCH * _MINIBATCHES, OBSERVATIONS)
            policy = self._policy(observations)
            actions = policy.sample()  # type: ignore[no-untyped-call]
            old = policy.log_prob(actions).sum(-1)  # type: ignore[no-untyped-call]
            reward = -(actions - observations @ self.teacher).square().mean(-1)
            advantage = reward - self.net["critic"](observations).squeeze(-1)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(_EPOCHS):
            for rows in torch.randperm(len(observations)).view(-1, _MINIBATCH):
                self.backward(
                    observations[rows], actions[rows], old[rows], advantage[rows], reward[rows]
                )
                self.step()
        return float(reward.mean())

    def backward(
        self,
        observations: torch.Tensor,
        actions: torch.Tensor,
        old: torch.Tensor,
        advantage: torch.Tensor,
        reward: torch.Tensor,
    ) -> None:
        """Compute the gradients of one minibatch."""
        policy = self._policy(observations)
        new = policy.log_prob(actions).sum(-1)  # type: ignore[no-untyped-call]
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        actor_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        critic_loss = (self.net["critic"](observations).squeeze(-1) - reward).square().mean()
        entropy = policy.entropy().sum(-1).mean()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        loss = actor_loss + 0.5 * critic_loss - 0.001 * entropy
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), _MAX_NORM)

    def step(self) -> None:
        """Make one optimizer step with the gradients that are there."""
        self.optimizer.step()
        self.steps += 1

    def _policy(self, observations: torch.Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.net["actor"](observations), self.log_std.exp())


def trained(hidden: int, steps: int) -> Learner:
    """Return a learner after so many real steps."""
    learner = Learner(hidden)
    with Progress(steps, "train", "steps") as progress:
        while learner.steps < steps:
            learner.iterate()
            progress.update(min(learner.steps, steps))
    return learner


def tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a state."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors(value)


def map_tensors(state: Any, change: Any) -> Any:
    """Rebuild a state with every tensor changed."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, dict):
        return {key: map_tensors(value, change) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map_tensors(value, change) for value in state)
    return state


def nbytes(state: Any) -> int:
    """Return the size of a state's tensors."""
    return sum(tensor.nbytes for tensor in tensors(state))
