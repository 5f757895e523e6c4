"""Rollouts for the learner: from the built-in simulator, and any of them ahead of time.

A collector hands out one batch after another, and knows the state from which the *next* one comes:
what a checkpoint must hold to go on bit for bit. torchrl_collector.py has the one for other
environments.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from penstock.nav.networks import ACTIONS, Act, Policy
from penstock.nav.ppo import Batch
from penstock.nav.simulation.simulator import Info, Simulator
from penstock.nav.simulation.task import Settings

_COLLISIONS = ("collision_static", "collision_dynamic", "collision_height")
OUTCOMES: Final = ("success", *_COLLISIONS, "timeout")
WINDOW: Final = 1000  # finished episodes that shares are over, at least
_CUT, _RETURN, _LENGTH, _REWARD, _STEPS = range(len(OUTCOMES), len(OUTCOMES) + 5)
SUMS: Final = _STEPS + 1


class Stopped(Exception):
    """Somebody asked to stop; what was half done is dropped."""


class Collector(Protocol):
    """What the loop asks of whoever flies."""

    def collect(self, dynamic_active: int, disturbed: float) -> Batch:
        """Return the next batch; it is valid until the one after next is asked for.

        So many moving obstacles are to be there, and such a share of the disturbances. `Stopped` is
        raised if somebody asked to stop.
        """

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state that the next batch comes from, per shard."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state."""

    def close(self) -> None:
        """Release threads."""


class SimulatorCollector:
    """Flies the drones of some shards, straight into the memory the learner reads.

    A shard has its own simulator and its own random numbers, so that a batch does not depend on how
    shards are spread over processes.

    Args:
        policy: Decides; its weights are those of the moment.
        settings: Of each shard.
        numbers: Of the shards, for their seeds.
        seed: Of the whole training.
        steps: Decisions of each drone per rollout.
        stop: Asked before every step.
        threads: Of each simulator.
        buffers: Batches that may be in use at the same time.
    """

    def __init__(
        self,
        policy: Policy,
        settings: Sequence[Settings],
        numbers: Sequence[int],
        seed: int,
        steps: int,
        *,
        stop: Callable[[], bool] = lambda: False,
        threads: int = 1,
        buffers: int = 1,
    ) -> None:
        self.policy = policy
        self.steps = steps
        self._stop = stop
        self.simulators = [
            Simulator(each, 1000 * seed + number, threads)
            for each, number in zip(settings, numbers, strict=True)
        ]
        self._generators = [
            torch.Generator(policy.device).manual_seed(1000 * seed + number) for number in numbers
        ]
        each = settings[0].num_envs
        self._parts = [slice(i * each, (i + 1) * each) for i in range(len(numbers))]
        shapes, drones = settings[0].shapes(), each * len(numbers)
        self._buffers = deque(Rollout(shapes, steps, drones) for _ in range(buffers))
        self._fresh = True

    def collect(self, dynamic_active: int, disturbed: float = 1.0) -> Batch:
        """Fly `steps` decisions with the policy: see `Collector`."""
        policy, device = self.policy, self.policy.device
        self._buffers.rotate()
        rollout = self._buffers[0]
        shards = list(zip(self.simulators, self._generators, self._parts, strict=True))
        for simulator, _, part in shards:
            simulator.dynamic_active = dynamic_active
            simulator.disturbed = disturbed
            first = rollout.observation(0, part)
            simulator.reset(first) if self._fresh else simulator.observe(first)
        self._fresh = False
        rollout.final_value.zero_()
        sums = EpisodeSums()
        for step in range(self.steps):
            if self._stop():
                raise Stopped
            for simulator, generator, part in shards:
                encoded = policy.encode(_on(device, rollout.observation(step, part)))
                act = policy.sample(encoded, generator)
                rollout.keep(act, step, part, encoded)
                _, reward, terminated, truncated, info = simulator.step(
                    act.action, rollout.observation(step + 1, part)
                )
                rollout.reward[step, part] = reward
                rollout.terminated[step, part] = terminated
                rollout.truncated[step, part] = truncated
                if info.final_index.numel():
                    value = policy.value(_on(device, info.final))
                    rollout.final_value[step, info.final_index + part.start] = value.cpu()
                sums.add(info, reward)
        seen = (rollout.observation(self.steps, part) for *_, part in shards)
        last = torch.cat([policy.value(_on(device, each)) for each in seen])
        batch = rollout.batch(last, sums, device)
        batch.facts = {"env/dynamic_active": float(self.simulators[0].dynamic_active)}
        return batch

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


class Rollout:
    """Memory of T steps of N drones, and of the observation after the last."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], steps: int, drones: int) -> None:
        self.obs = {name: torch.zeros(steps + 1, drones, *shape) for name, shape in shapes.items()}
        self.action = torch.zeros(steps, drones, ACTIONS)
        numbers = torch.zeros(4, steps, drones)
        self.log_prob, self.value, self.reward, self.final_value = numbers
        self.terminated, self.truncated = torch.zeros(2, steps, drones, dtype=torch.bool)
        self.encoded: Tensor | None = None

    def observation(self, step: int, part: slice) -> dict[str, Tensor]:
        """Return the memory of one step's observation of some drones."""
        return {name: value[step, part] for name, value in self.obs.items()}

    def keep(self, act: Act, step: int, part: slice, encoded: Tensor | None = None) -> None:
        """Keep what the policy decided, and perhaps its rows: they need not be made again."""
        self.action[step, part], self.log_prob[step, part], self.value[step, part] = act
        if encoded is not None:
            if self.encoded is None:
                self.encoded = encoded.new_zeros(*self.reward.shape, *encoded.shape[1:])
            self.encoded[step, part] = encoded

    def batch(self, last_value: Tensor, sums: EpisodeSums, device: torch.device) -> Batch:
        """Return the rollout as the learner takes it; on the CPU nothing is copied."""
        names = ("action", "log_prob", "value", "reward", "terminated", "truncated", "final_value")
        parts = {name: getattr(self, name).to(device) for name in names}
        return Batch(
            obs={name: value[:-1] for name, value in self.obs.items()},
            last_value=last_value,
            encoded=self.encoded,
            episodes=sums.sums,
            **parts,
        )


def _on(device: torch.device, obs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: value.to(device) for name, value in obs.items()}


class PipelinedCollector:
    """Collects a batch while the learner works on the one before: one update behind.

    Batch k + 1 is flown with the weights that the learner had when it asked for batch k, always:
    which weights these are does not depend on who is faster, so training is repeatable, and a
    checkpoint holds the weights and the drones that the batch in the making began with.

    Args:
        policy: The one that learns; flown is a copy.
        make: Makes the collector that flies, in the background from the first `collect` on, given
            that copy and the number of batches in use at the same time.
    """

    def __init__(self, policy: Policy, make: Callable[[Policy, int], Collector]) -> None:
        self._policy = policy
        self._flown = copy.deepcopy(policy)
        for parameter in self._flown.parameters():
            parameter.grad = None
        self._inner = make(self._flown, 2)
        self._thread = ThreadPoolExecutor(1, "penstock-collect")
        self._resumed: _Order | None = None
        self._ahead: Future[Batch] | None = None
        self._begun: list[dict[str, Any]] = []
        self._waited_s = 0.0

    def collect(self, dynamic_active: int, disturbed: float = 1.0) -> Batch:
        """Return the batch that was collected meanwhile; the one after the next is of now."""
        weights = self._policy.state_dict()
        now = _Order({k: v.detach().clone() for k, v in weights.items()}, dynamic_active, disturbed)
        staleness = 0 if self._ahead is None and self._resumed is None else 1
        asked_s = time.perf_counter()
        ahead = self._begin(self._resumed or now) if self._ahead is None else self._ahead
        batch = ahead.result()
        self._waited_s += time.perf_counter() - asked_s
        self._ahead = self._begin(now)
        own = {"pipeline/staleness": float(staleness), "pipeline/wait_s": self._waited_s}
        batch.facts = {**batch.facts, **own}
        return batch

    def _begin(self, order: _Order) -> Future[Batch]:
        """Fly a batch in the background, and remember what it begins with."""
        self._flown.load_state_dict(order.flown)
        share = torch.tensor(order.disturbed, dtype=torch.float64)
        own = {"flown": order.flown, "active": order.active, "disturbed": share}
        self._begun = [state | own for state in self._inner.state_dict()]
        return self._thread.submit(self._inner.collect, order.active, order.disturbed)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what the batch in the making began with, and the weights it is flown with."""
        return self._begun or self._inner.state_dict()

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Begin with a batch that was in the making."""
        self._inner.load_state_dict(states)
        first = states[0]
        if "flown" in first:
            mine = first if "active" in first else first["simulator"]  # of earlier versions
            disturbed = float(first.get("disturbed", 1.0))
            self._resumed = _Order(first["flown"], int(mine["active"]), disturbed)

    def close(self) -> None:
        """Stop collecting; a batch in the making is flown to its end, or until it may stop."""
        self._thread.shutdown()
        self._inner.close()


class _Order(NamedTuple):
    """What a batch is flown with."""

    flown: dict[str, Tensor]
    active: int
    disturbed: float


# ---------------------------------------------------------------------- how episodes end


class EpisodeSums:
    """Sums over the episodes that ended in a batch, and over its rewards.

    An episode has one outcome: arrived, the first kind of collision, or out of time. Episodes that
    a new map cut have none: they are counted apart.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(SUMS, dtype=torch.float64)

    def add(self, info: Info, reward: Tensor) -> None:
        """Count the episodes that ended in a step, and the reward of all."""
        self.add_reward(reward)
        if not info.finished.numel():
            return
        whole = ~info.cut[info.finished]
        ended = info.finished[whole]
        kinds = (info.reach_goal, *(getattr(info, name) for name in _COLLISIONS))
        happened = torch.stack([kind[ended] for kind in kinds])
        rest = torch.ones_like(happened[:1])
        outcome = torch.cat((happened, rest)).int().argmax(0)  # the first that happened
        self.sums[:_CUT] += torch.bincount(outcome, minlength=len(OUTCOMES))
        self.sums[_CUT] += info.finished.numel() - ended.numel()
        self.sums[_RETURN] += float(info.episode_return[whole].sum())
        self.sums[_LENGTH] += float(info.episode_length[whole].sum())

    def add_reward(self, reward: Tensor) -> None:
        """Count the reward of steps whose episodes somebody else counts."""
        self.sums[_REWARD] += float(reward.sum())
        self.sums[_STEPS] += reward.numel()


class EpisodeWindow:
    """The last finished episodes of all drones, over as many iterations as it takes."""

    def __init__(self) -> None:
        self._sums: deque[Tensor] = deque()

    def add(self, sums: Tensor) -> dict[str, float]:
        """Take in the sums of an iteration; return its metrics.

        The shares of the outcomes are over the window, and their sum is 1. So are return and
        length; `train/episodes`, `train/cut` and `train/reward` are of the iteration.
        """
        metrics = {"train/reward": float(sums[_REWARD] / sums[_STEPS].clamp(min=1.0))}
        if self._sums and not _finished(sums):  # so that the window has at most WINDOW entries
            self._sums[-1] = self._sums[-1] + sums
        else:
            self._sums.append(sums.clone())
        while _finished(sum(self._sums) - self._sums[0]) >= WINDOW:
            self._sums.popleft()
        total: Tensor = sum(self._sums)  # type: ignore[assignment]
        ended = _finished(total)
        if ended:
            shares = (total[:_CUT] / ended).tolist()
            metrics |= {f"train/{k}": v for k, v in zip(OUTCOMES, shares, strict=True)}
            metrics["train/return"] = float(total[_RETURN]) / ended
            metrics["train/episode_length"] = float(total[_LENGTH]) / ended
            metrics["train/episodes"] = _finished(sums)
            metrics["train/cut"] = float(sums[_CUT])
        return metrics

    def state(self) -> Tensor:
        """Return the window, [iterations, sums]."""
        none = torch.zeros(0, SUMS, dtype=torch.float64)
        return torch.cat((none, *(sums[None] for sums in self._sums)))

    def load(self, state: Tensor) -> None:
        """Go on with a window."""
        self._sums = deque(state.unbind(0))


def _finished(sums: Tensor) -> float:
    return float(sums[:_CUT].sum())


# ---------------------------------------------------------------------- for others


def as_tensordict(batch: Batch) -> TensorDict:
    """Return a batch with NavRL's keys, [drones, steps]; nothing is copied."""
    agents = {
        "observation": dict(batch.obs),
        "action_normalized": batch.action,
        "log_prob": batch.log_prob,
        "reward": batch.reward,
    }
    parts = {
        "agents": agents,
        "state_value": batch.value,
        "terminated": batch.terminated,
        "truncated": batch.truncated,
        "final_value": batch.final_value,
    }
    return TensorDict(parts, batch_size=batch.reward.shape).transpose(0, 1)
