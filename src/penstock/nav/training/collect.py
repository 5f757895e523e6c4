"""Rollouts from the built-in simulator, written straight into the memory the learner reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.nav.learning.policy import Policy
from penstock.nav.learning.ppo_settings import Batch
from penstock.nav.simulation.results import Observation
from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import Settings
from penstock.nav.training.episodes import Episodes


class Stopped(Exception):
    """Somebody asked to stop; what was half done is dropped."""


@dataclass
class Memory:
    """Where one rollout goes: T steps of N drones, and the observation after the last."""

    obs: Observation
    action: Tensor
    numbers: Tensor
    """log_prob, value, reward and final_value, [4, T, N]."""
    flags: Tensor
    """terminated and truncated, [2, T, N]."""
    rows: Tensor | None = None
    """[T, N, ...], observations as the networks take them; made with the first one."""

    @classmethod
    def make(cls, settings: Settings, steps: int, drones: int, device: torch.device) -> Memory:
        """Allocate it."""
        obs = {
            name: torch.zeros(steps + 1, drones, *shape, device=device)
            for name, shape in settings.shapes().items()
        }
        return cls(
            obs,
            torch.zeros(steps, drones, 3, device=device),
            torch.zeros(4, steps, drones, device=device),
            torch.zeros(2, steps, drones, dtype=torch.bool, device=device),
        )

    def row(self, step: int, part: slice) -> Observation:
        """Return the memory of one step's observation of some drones."""
        return {name: value[step, part] for name, value in self.obs.items()}

    def batch(self, last_value: Tensor) -> Batch:
        """Return the rollout as the learner takes it; nothing is copied."""
        log_prob, value, reward, final_value = self.numbers
        terminated, truncated = self.flags
        obs = {name: value[:-1] for name, value in self.obs.items()}
        return Batch(
            obs,
            self.action,
            log_prob,
            value,
            reward,
            terminated,
            truncated,
            final_value,
            last_value,
            self.rows,
        )

    def keep(self, rows: Tensor, step: int, part: slice) -> None:
        """Keep observations as the networks take them: the learner need not make them again."""
        if self.rows is None or self.rows.shape[2:] != rows.shape[1:]:
            self.rows = rows.new_zeros(*self.numbers.shape[1:], *rows.shape[1:])
        self.rows[step, part] = rows


class SimulatorCollector:
    """Flies the drones of some shards.

    A shard has its own simulator and its own random numbers, so that a batch does not depend on how
    shards are spread over processes.

    Args:
        settings: Of each shard.
        numbers: Numbers of the shards, for their seeds.
        seed: Of the whole training.
        steps: Decisions of each drone per rollout.
        stop: Asked before every step.
        backend: Of the simulators.
        threads: Of each simulator.
        device: Where rollouts are.
    """

    def __init__(
        self,
        settings: Sequence[Settings],
        numbers: Sequence[int],
        seed: int,
        steps: int,
        *,
        stop: Callable[[], bool] = lambda: False,
        backend: str = "numba",
        threads: int = 1,
        device: str | torch.device = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.steps = steps
        self.settings = settings[0]
        self.episodes = Episodes()
        self._stop = stop
        self.simulators = [
            Simulator(each, 1000 * seed + number, backend, threads, device)
            for each, number in zip(settings, numbers, strict=True)
        ]
        self._generators = [
            torch.Generator(self.device).manual_seed(1000 * seed + number) for number in numbers
        ]
        width = settings[0].num_envs
        self._parts = [slice(i * width, (i + 1) * width) for i in range(len(numbers))]
        self._fresh = True

    @property
    def drones(self) -> int:
        """Drones of all shards of this process."""
        return sum(simulator.num_envs for simulator in self.simulators)

    def memory(self) -> Memory:
        """Allocate memory for a rollout."""
        return Memory.make(self.settings, self.steps, self.drones, self.device)

    @property
    def dynamic_active(self) -> int:
        """Moving obstacles that are there, in every world."""
        return self.simulators[0].dynamic_active

    @dynamic_active.setter
    def dynamic_active(self, count: int) -> None:
        """Set how many are there."""
        for simulator in self.simulators:
            simulator.dynamic_active = count

    def collect(self, policy: Policy, memory: Memory) -> Batch:
        """Fly `steps` decisions with a policy.

        Raises:
            Stopped: Somebody asked to.
        """
        shards = list(zip(self.simulators, self._generators, self._parts, strict=True))
        for simulator, _, part in shards:
            first = memory.row(0, part)
            simulator.reset(first) if self._fresh else simulator.observe(first)
        self._fresh = False
        memory.numbers[3].zero_()
        for step in range(self.steps):
            if self._stop():
                raise Stopped
            for simulator, generator, part in shards:
                rows = policy.prepare(memory.row(step, part))
                memory.keep(rows, step, part)
                act = policy.choose(rows, generator)
                _, reward, terminated, truncated, info = simulator.step(
                    act.action, memory.row(step + 1, part)
                )
                memory.action[step, part] = act.action
                memory.numbers[0, step, part] = act.log_prob
                memory.numbers[1, step, part] = act.value
                memory.numbers[2, step, part] = reward
                memory.flags[0, step, part] = terminated
                memory.flags[1, step, part] = truncated
                if info.final_index.numel():
                    index = info.final_index + part.start
                    memory.numbers[3, step, index] = policy.value(info.final)
                self.episodes.add(info, reward)
        last = [policy.value(memory.row(self.steps, part)) for _, _, part in shards]
        return memory.batch(torch.cat(last))

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what the next rollout depends on besides the policy, per shard."""
        return [
            {"simulator": simulator.state_dict(), "generator": generator.get_state()}
            for simulator, generator in zip(self.simulators, self._generators, strict=True)
        ]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from there, bit for bit."""
        for state, simulator, generator in zip(
            states, self.simulators, self._generators, strict=True
        ):
            simulator.load_state_dict(state["simulator"])
            generator.set_state(state["generator"])
        self._fresh = not self.simulators[0].started

    def close(self) -> None:
        """End the threads of the simulators."""
        for simulator in self.simulators:
            simulator.close()
