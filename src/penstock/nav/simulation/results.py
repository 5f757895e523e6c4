"""What a simulator is given and gives back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import UsageError

Observation = dict[str, Tensor]


@dataclass
class Outcome:
    """Results of a step, of all drones; overwritten by the next step.

    Attributes:
        reward: float32 [n].
        terminated: Crashed, or arrived if that ends the episode; bool [n].
        truncated: Out of time, and not terminated; bool [n].
        flags: Static collision, moving collision, too low or high, at the target; bool [n, 4].
        position: After the step, before any reset; float32 [n, 3].
    """

    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    flags: Tensor
    position: Tensor


@dataclass
class Info:
    """What happened in a step, besides observation and reward.

    Attributes:
        collision_static: A beam ended closer than 0.3 m; bool [n].
        collision_dynamic: A moving obstacle was hit; bool [n].
        collision_height: Below 0.2 m or above 4 m; bool [n].
        reach_goal: Within 0.5 m of the target, and not crashed; bool [n].
        cut: Truncated because the world gets another map, neither crashed nor out of time; bool
            [n].
        position: After the step, before any reset; float32 [n, 3].
        finished: Drones whose episode ended; int64 [k].
        episode_length: Of those, in steps; int64 [k].
        episode_return: Of those; float32 [k].
        final_index: Those that were truncated; int64 [t].
        final: Their last observations, [t, ...] each: what the value after a truncation is of,
            since the observation that `step` returned is already of the next episode.
    """

    collision_static: Tensor
    collision_dynamic: Tensor
    collision_height: Tensor
    reach_goal: Tensor
    cut: Tensor
    position: Tensor
    finished: Tensor
    episode_length: Tensor
    episode_return: Tensor
    final_index: Tensor
    final: Observation


def checked_action(action: Tensor, count: int, device: torch.device) -> Tensor:
    """Return an action as float32 [count, 3] on a device.

    Raises:
        UsageError: Its shape or a value is wrong.
    """
    if action.shape != (count, 3):
        raise UsageError(f"action is {list(action.shape)}; give [{count}, 3]")
    action = action.detach().to(device, torch.float32)
    low, high = torch.aminmax(action)
    if not (low >= 0 and high <= 1):  # NaN, too
        bad = (~((action >= 0) & (action <= 1))).nonzero()[0].tolist()
        value = float(action[bad[0], bad[1]])
        raise UsageError(f"action[{bad[0]}, {bad[1]}] is {value}; give numbers from 0 to 1")
    return action


def checked_memory(out: Observation, like: Observation) -> Observation:
    """Return memory for an observation, without anything else that may be there.

    Raises:
        UsageError: A part is missing, or not as the simulator needs it.
    """
    for name, mine in like.items():
        given = out.get(name)
        if given is None:
            raise UsageError(f"out has no {name!r}; make it with observation_buffer()")
        same = (given.shape, given.dtype, given.device) == (mine.shape, mine.dtype, mine.device)
        if not same or not given.is_contiguous():
            raise UsageError(
                f"out[{name!r}] is {given.dtype} {list(given.shape)} on {given.device}; give "
                f"contiguous {mine.dtype} {list(mine.shape)} on {mine.device}"
            )
    return {name: out[name] for name in like}
