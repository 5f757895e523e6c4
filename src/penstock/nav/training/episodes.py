"""How episodes end, counted: what `train/success` and its sisters mean."""

from __future__ import annotations

from collections import deque
from typing import Final

import torch
from torch import Tensor

from penstock.nav.simulation.results import Info

OUTCOMES: Final = (
    "success",
    "collision_static",
    "collision_dynamic",
    "collision_height",
    "timeout",
)
WINDOW: Final = 1000  # finished episodes that shares are over, at least

# Sums: one per outcome, then these.
_CUT, _RETURN, _LENGTH, _REWARD, _STEPS = range(len(OUTCOMES), len(OUTCOMES) + 5)


class Episodes:
    """Sums over what happened since one last asked.

    An episode has one outcome: arrived, the first kind of collision, or out of time. Episodes that
    a new map cut have none: they are counted apart.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(_STEPS + 1, dtype=torch.float64)

    def add(self, info: Info, reward: Tensor) -> None:
        """Count the episodes that ended in a step, and the reward of all."""
        self.add_reward(reward)
        if not info.finished.numel():
            return
        whole = ~info.cut[info.finished]
        ended = info.finished[whole]
        kinds = (info.reach_goal, info.collision_static, info.collision_dynamic)
        happened = torch.stack([kind[ended] for kind in (*kinds, info.collision_height)])
        rest = torch.ones_like(happened[:1])
        outcome = torch.cat((happened, rest)).int().argmax(0)  # the first that happened
        self._sums[:_CUT] += torch.bincount(outcome, minlength=len(OUTCOMES)).cpu()
        self._sums[_CUT] += info.finished.numel() - ended.numel()
        self._sums[_RETURN] += float(info.episode_return[whole].sum())
        self._sums[_LENGTH] += float(info.episode_length[whole].sum())

    def add_reward(self, reward: Tensor) -> None:
        """Count the reward of steps whose episodes somebody else counts."""
        self._sums[_REWARD] += float(reward.sum())
        self._sums[_STEPS] += reward.numel()

    def take(self) -> Tensor:
        """Return the sums and begin anew; sums of several processes may be added."""
        result = self._sums.clone()
        self._sums.zero_()
        return result

    def facts(self) -> dict[str, float]:
        """Return nothing besides the sums."""
        return {}


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
            shares = zip(OUTCOMES, (total[:_CUT] / ended).tolist(), strict=True)
            metrics |= {f"train/{name}": share for name, share in shares}
            metrics["train/return"] = float(total[_RETURN]) / ended
            metrics["train/episode_length"] = float(total[_LENGTH]) / ended
            metrics["train/episodes"] = _finished(sums)
            metrics["train/cut"] = float(sums[_CUT])
        return metrics

    def state(self) -> Tensor:
        """Return the window, [iterations, sums]."""
        none = torch.zeros(0, _STEPS + 1, dtype=torch.float64)
        return torch.cat((none, *(sums[None] for sums in self._sums)))

    def load(self, state: Tensor) -> None:
        """Go on with a window."""
        self._sums = deque(state.unbind(0))


def _finished(sums: Tensor) -> float:
    return float(sums[:_CUT].sum())
