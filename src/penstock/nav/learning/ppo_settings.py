"""What a PPO update is asked for, and what it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import DataError, UsageError
from penstock.ui.suggestions import did_you_mean

SCHEDULES = ("constant", "linear", "cosine")
PPO_HELP = {  # beside the settings in `penstock train --print-config`
    "huber": "errors of the critic beyond this count linearly",
    "actor_lr": "null: lr",
    "schedule": "constant, linear or cosine, over max_frame_num",
    "lr_floor": "share of the learning rate that is left at the end",
}


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class PPOSettings:
    """Settings of an update; the defaults are NavRL's.

    Raises:
        UsageError: A value is out of range.
    """

    gamma: float = 0.99
    lam: float = 0.95
    epochs: int = 4
    minibatches: int = 16
    clip: float = 0.1
    """Ratios of probabilities count up to 1 +- clip; values move by at most clip."""
    actor_weight: float = 3.0
    critic_weight: float = 1.0
    entropy_weight: float = 1e-3
    huber: float = 10.0
    """Errors of the critic beyond this count linearly."""
    max_grad_norm: float = 5.0
    """Of all gradients together."""
    lr: float = 5e-4
    actor_lr: float | None = None
    """Learning rates of the two heads; None for `lr`."""
    critic_lr: float | None = None
    schedule: str = "constant"
    lr_floor: float = 0.0
    """Share of the learning rate that is left at the end of a schedule."""
    value_norm_beta: float = 0.995
    shards: int = 1
    """Groups of environments with one order of rows: n groups in one process give the same
    minibatches as n processes with one group each."""

    @classmethod
    def preset(cls, name: str, **changes: Any) -> PPOSettings:
        """Return the settings that go with a preset of the policy, some changed.

        Raises:
            UsageError: There is no such preset or setting, or a value is out of range.
        """
        known = {"navrl": cls(), "fast": _FAST}
        if name not in known:
            raise UsageError(f"there is no PPO preset {name!r}; {did_you_mean(name, known)}")
        names = [field.name for field in fields(cls)]
        for key in changes:
            if key not in names:
                raise UsageError(f"PPO has no setting {key!r}; {did_you_mean(key, names)}")
        return replace(known[name], **changes)

    def __post_init__(self) -> None:
        rules = {
            "gamma": (0.0 <= self.gamma <= 1.0, "a number from 0 to 1"),
            "lam": (0.0 <= self.lam <= 1.0, "a number from 0 to 1"),
            "epochs": (_count(self.epochs), "a whole number, at least 1"),
            "minibatches": (_count(self.minibatches), "a whole number, at least 1"),
            "shards": (_count(self.shards), "a whole number, at least 1"),
            "clip": (self.clip > 0.0, "a number above 0"),
            "huber": (self.huber > 0.0, "a number above 0"),
            "max_grad_norm": (self.max_grad_norm > 0.0, "a number above 0"),
            "lr": (self.lr > 0.0, "a number above 0"),
            "actor_lr": (self.actor_lr is None or self.actor_lr > 0.0, "a number above 0"),
            "critic_lr": (self.critic_lr is None or self.critic_lr > 0.0, "a number above 0"),
            "lr_floor": (0.0 <= self.lr_floor <= 1.0, "a share from 0 to 1"),
        }
        for name, (fits, wanted) in rules.items():
            if not fits:
                raise UsageError(f"PPO: {name} is {getattr(self, name)!r}; give {wanted}")
        if self.schedule not in SCHEDULES:
            raise UsageError(
                f"there is no schedule {self.schedule!r}; {did_you_mean(self.schedule, SCHEDULES)}"
            )

    def lr_factor(self, progress: float) -> float:
        """Return what learning rates are multiplied by, `progress` of the way from 0 to 1."""
        left = 1.0 - min(max(progress, 0.0), 1.0)
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "cosine":
            left = 0.5 - 0.5 * math.cos(math.pi * left)
        return self.lr_floor + (1.0 - self.lr_floor) * left


_FAST = PPOSettings(
    epochs=3,
    minibatches=8,
    clip=0.2,
    actor_weight=1.0,
    critic_weight=0.5,
    max_grad_norm=1.0,
    lr=1e-3,
    schedule="linear",
    lr_floor=0.03,
)


@dataclass
class Batch:
    """A rollout of T steps in N environments, each row what happened from one observation.

    Values are as the policy gave them: on the scale of the critic.
    """

    obs: Mapping[str, Tensor]
    """[T, N, ...] by key."""
    action: Tensor
    """[T, N, 3] inside (0, 1)."""
    log_prob: Tensor
    """[T, N], as are the following."""
    value: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_value: Tensor
    """Value of the final observation of truncated episodes; 0 elsewhere."""
    last_value: Tensor
    """[N], value of the observation after the last step."""
    rows: Tensor | None = None
    """[T, N, ...], `Policy.prepare` of the observations, if whoever flew has kept them."""

    def check(self) -> None:
        """Look for numbers that would poison the weights.

        Raises:
            DataError: A tensor holds NaN or infinity; it is named.
        """
        for key in ("state", "lidar", "dynamic_obstacle"):
            if key in self.obs:
                require_finite(f"observation {key}", self.obs[key])
        for name in ("action", "log_prob", "value", "reward", "final_value", "last_value"):
            require_finite(name, getattr(self, name))


def require_finite(name: str, tensor: Tensor) -> None:
    """Stop at NaN or infinity.

    Raises:
        DataError: The tensor holds such a number.
    """
    # A sum is finite only if all its terms are, and takes a fifth of the time.
    if torch.isfinite(tensor.sum()):
        return
    bad = torch.isfinite(tensor).logical_not_()
    if count := int(bad.sum()):
        where = bad.nonzero()[0].tolist()
        value = tensor[tuple(where)].item() if where else tensor.item()
        raise DataError(
            f"{name} holds {count} values that are not finite, the first {value} at {where}; "
            "nothing was learned from it: lower the learning rate or look at the environment"
        )
