"""Where batches come from: collected when asked for, or during the update.

A source hands out one batch after another, and knows the state from which the *next* one comes:
what a checkpoint must hold to go on bit for bit.
"""

from __future__ import annotations

import copy
import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDict
from torch import Tensor

from penstock.core.threads import poll
from penstock.errors import PenstockError
from penstock.nav.learning.policy import Policy
from penstock.nav.learning.ppo_settings import Batch
from penstock.nav.training.collect import Stopped
from penstock.rollouts.collect import PipelinedDataCollector

Weights = dict[str, Tensor]
_WAIT_S = 60.0


class Source(Protocol):
    """What the loop asks of a source."""

    def next(self) -> Batch:
        """Return the next batch; it is valid until the one after next is asked for."""

    def updated(self, dynamic_active: int) -> None:
        """Say that the policy has changed, and how many moving obstacles are to be there.

        Called before the first batch, and after each update.
        """

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state that the next batch comes from, per shard."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state."""

    def episodes(self) -> Tensor:
        """Return the sums of `Episodes` since the last call."""

    def facts(self) -> dict[str, float]:
        """Return what else is worth logging."""

    def close(self) -> None:
        """Release threads."""


class Flyer(Protocol):
    """What a source asks of whoever flies: see `SimulatorCollector` and `PluginFlyer`."""

    dynamic_active: int
    episodes: Any

    def memory(self) -> Any:
        """Return memory for one batch."""

    def collect(self, policy: Policy, memory: Any) -> Batch:
        """Fly one batch."""

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what the next batch depends on, per shard."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from there."""

    def close(self) -> None:
        """Release threads."""


class SyncSource:
    """Collects when asked for: strictly on-policy.

    Args:
        collector: Flies the drones.
        policy: The one that learns.
    """

    def __init__(self, collector: Flyer, policy: Policy) -> None:
        self.collector = collector
        self._policy = policy
        self._memory = collector.memory()

    def next(self) -> Batch:
        """Collect a batch."""
        return self.collector.collect(self._policy, self._memory)

    def updated(self, dynamic_active: int) -> None:
        """Let so many moving obstacles be there; the policy is the one that learns."""
        self.collector.dynamic_active = dynamic_active

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of the drones."""
        return self.collector.state_dict()

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Put the drones there."""
        self.collector.load_state_dict(states)

    def episodes(self) -> Tensor:
        """Return how episodes ended."""
        sums: Tensor = self.collector.episodes.take()
        return sums

    def facts(self) -> dict[str, float]:
        """Return what the drones' own statistics say."""
        return dict(self.collector.episodes.facts())

    def close(self) -> None:
        """Release threads."""
        self.collector.close()


class PipelinedSource:
    """Collects a batch while the learner works on the one before: one update behind.

    Batch k + 1 is flown with the weights that the learner had when it was handed batch k, always:
    which weights these are does not depend on who is faster, so training is repeatable, and a
    checkpoint holds the weights and the drones that the batch in the making began with.

    Args:
        collector: Flies the drones, in the background from the first `next` on.
        policy: The one that learns; flown is a copy.
    """

    def __init__(self, collector: Flyer, policy: Policy) -> None:
        self.collector = collector
        self._policy = policy
        self._flown = copy.deepcopy(policy)
        for parameter in self._flown.parameters():
            parameter.grad = None
        self._memories = [collector.memory(), collector.memory()]
        self._orders: queue.SimpleQueue[tuple[Weights, int | None] | None] = queue.SimpleQueue()
        self._active = collector.dynamic_active
        self._begun: deque[list[dict[str, Any]]] = deque()
        self._behind: Weights | None = None
        self._ahead: PipelinedDataCollector | None = None
        self._batches: Iterator[_Made] | None = None
        self._sums: Tensor | None = None

    def next(self) -> Batch:
        """Return the batch that was collected meanwhile."""
        if self._batches is None:
            self._ahead = PipelinedDataCollector(_Stream(self._stream), prefetch_count=1)
            self._batches = iter(self._ahead)
            now = (_copied(self._policy), self._active)
            self._orders.put(now if self._behind is None else (self._behind, None))
            self._orders.put(now)
        found = next(self._batches, None)
        if found is None:
            raise Stopped
        self._begun.popleft()
        self._sums = found.sums if self._sums is None else self._sums + found.sums
        return found.batch

    def updated(self, dynamic_active: int) -> None:
        """Let the batch after the next one be flown with the weights and obstacles of now."""
        self._active = dynamic_active
        if self._batches is not None:
            self._orders.put((_copied(self._policy), dynamic_active))

    def _stream(self) -> Iterator[_Made]:
        turn = 0
        while (order := self._orders.get()) is not None:
            weights, active = order
            self._flown.load_state_dict(weights)
            if active is not None:
                self.collector.dynamic_active = active
            states = self.collector.state_dict()
            for state in states:
                state["flown"] = weights
            self._begun.append(states)
            try:
                batch = self.collector.collect(self._flown, self._memories[turn])
            except Stopped:
                return
            turn = 1 - turn
            yield _Made(batch, self.collector.episodes.take())

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what the batch in the making began with, and the weights it is flown with."""
        if self._batches is None:
            return self.collector.state_dict()
        if not poll(lambda: bool(self._begun), _WAIT_S):
            raise PenstockError(f"collection did not begin within {_WAIT_S:.0f} s")
        return self._begun[0]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Begin with a batch that was in the making."""
        if self._batches is not None:
            raise PenstockError("collection has begun; load the state before")
        self.collector.load_state_dict(states)
        self._behind = states[0].get("flown")

    def episodes(self) -> Tensor:
        """Return how episodes ended, of the batches handed out."""
        sums, self._sums = self._sums, None
        return self.collector.episodes.take() if sums is None else sums

    def facts(self) -> dict[str, float]:
        """Return how many updates behind the last batch was, and the wait for it."""
        facts: dict[str, float] = dict(self.collector.episodes.facts())
        if self._ahead is None:
            return facts
        stats = self._ahead.stats()
        return facts | {
            "pipeline/staleness": self._ahead.staleness,
            "pipeline/wait_s": stats["wait_s"],
        }

    def close(self) -> None:
        """Stop collecting."""
        self._orders.put(None)
        if self._ahead is not None:
            self._ahead.shutdown()
        self.collector.close()


@dataclass
class _Made:
    """What the pipeline passes on as it is: it looks into dicts and tuples only."""

    batch: Batch
    sums: Tensor


class _Stream:
    """An iterable that makes a new iterator each time."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def make_source(kind: str, collector: Flyer, policy: Policy) -> Source:
    """Return the source of a `collector=` setting."""
    kinds: dict[str, Any] = {"sync": SyncSource, "pipelined": PipelinedSource}
    source: Source = kinds[kind](collector, policy)
    return source


def as_tensordict(batch: Batch) -> TensorDict:
    """Return a batch with NavRL's keys, [drones, steps]; nothing is copied."""
    steps, drones = batch.reward.shape

    def turned(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1)

    return TensorDict(
        {
            "agents": {
                "observation": {name: turned(value) for name, value in batch.obs.items()},
                "action_normalized": turned(batch.action),
                "log_prob": turned(batch.log_prob),
                "reward": turned(batch.reward),
            },
            "state_value": turned(batch.value),
            "terminated": turned(batch.terminated),
            "truncated": turned(batch.truncated),
            "final_value": turned(batch.final_value),
        },
        batch_size=[drones, steps],
    )


def _copied(policy: Policy) -> Weights:
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}
