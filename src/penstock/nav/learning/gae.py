"""Advantages over a rollout, right at the end of an episode whichever way it ended."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import UsageError


def gae(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    last_value: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, over all environments at once.

    After a termination nothing follows. After a truncation the episode would have gone on, so the
    value of its final observation stands for the rest. In both cases the next row belongs to
    another episode, and nothing of it flows back.

    Args:
        reward: [T, N], what each step paid.
        value: [T, N], the value of the observation before each step.
        terminated: [T, N] bool, the episode is over; it wins where both are true.
        truncated: [T, N] bool, the episode was cut off.
        final_value: [T, N], the value of the last observation of the episode where `truncated`;
            anything finite elsewhere.
        last_value: [N], the value of the observation after the last step.
        gamma: Discount per step.
        lam: How far advantages look ahead, from 0 (one step) to 1 (all).

    Returns:
        Advantages and returns (advantage + value), [T, N] each.

    Raises:
        UsageError: Shapes do not fit together.
    """
    for name, tensor in (
        ("value", value),
        ("terminated", terminated),
        ("truncated", truncated),
        ("final_value", final_value),
        ("last_value", last_value),
    ):
        expected = reward.shape[1:] if name == "last_value" else reward.shape
        if tensor.shape != expected:
            raise UsageError(
                f"gae: {name} has shape {list(tensor.shape)}, but reward has {list(reward.shape)}; "
                f"give {list(expected)}"
            )
    following = torch.cat((value[1:], last_value.unsqueeze(0)))
    following = torch.where(truncated, final_value, following).masked_fill_(terminated, 0.0)
    delta = torch.add(reward, following, alpha=gamma).sub_(value)
    carry = (terminated | truncated).logical_not().to(reward.dtype).mul_(gamma * lam)
    advantage = delta
    for step in range(len(reward) - 2, -1, -1):
        advantage[step].addcmul_(carry[step], advantage[step + 1])
    return advantage, advantage + value
