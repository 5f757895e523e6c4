"""Proximal policy optimisation, whole: settings, rollouts, advantages, the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock.errors import DataError, UsageError
from penstock.nav.networks import ACTIONS, Policy, log_prob_and_entropy
from penstock.ui.suggestions import did_you_mean

AllReduce = Callable[[Tensor], None]
"""Replaces a tensor, in place, by its mean over all processes."""

_LEAST_VARIANCE = 1e-2  # of returns: constant ones must not be blown up
SCHEDULES = ("constant", "linear", "cosine")


def _told(default: Any, text: str) -> Any:
    """Make a field with a comment for `penstock train --print-config`."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class PPOSettings:
    """Settings of an update; the defaults are NavRL's."""

    gamma: float = 0.99
    lam: float = 0.95
    epochs: int = 4
    minibatches: int = 16
    clip: float = _told(0.1, "how far ratios and values may move")
    actor_weight: float = 3.0
    critic_weight: float = 1.0
    entropy_weight: float = 1e-3
    huber: float = _told(10.0, "errors of the critic beyond this count linearly")
    max_grad_norm: float = 5.0
    lr: float = 5e-4
    actor_lr: float | None = _told(None, "null: lr")
    critic_lr: float | None = None
    schedule: str = _told("constant", "constant, linear or cosine, over max_frame_num")
    lr_floor: float = _told(0.0, "share of the learning rate that is left at the end")
    value_norm_beta: float = 0.995
    # Groups of environments with one order of rows: n groups in one process give the same
    # minibatches as n processes with one group each.
    shards: int = 1

    @classmethod
    def preset(cls, name: str, **changes: Any) -> PPOSettings:
        """Return the settings that go with a preset of the policy, some changed."""
        known = {"navrl": cls(), "fast": _FAST}
        if name not in known:
            raise UsageError(f"there is no PPO preset {name!r}; {did_you_mean(name, known)}")
        names = [item.name for item in fields(cls)]
        for key in changes.keys() - set(names):
            raise UsageError(f"PPO has no setting {key!r}; {did_you_mean(key, names)}")
        return replace(known[name], **changes)

    def __post_init__(self) -> None:
        for names, fits, wanted in (
            ("actor_weight critic_weight entropy_weight value_norm_beta", lambda v: True, ""),
            ("gamma lam lr_floor", lambda v: 0.0 <= v <= 1.0, " from 0 to 1"),
            ("epochs minibatches shards", lambda v: type(v) is int and v >= 1, ", whole, above 0"),
            ("clip huber max_grad_norm lr actor_lr critic_lr", lambda v: v > 0.0, " above 0"),
        ):
            for name in names.split():
                value = getattr(self, name)
                inherited = value is None and name in ("actor_lr", "critic_lr")
                if not inherited and not (type(value) in (int, float) and fits(value)):
                    raise UsageError(f"PPO: {name} is {value!r}; give a number{wanted}")
        if self.schedule not in SCHEDULES:
            raise UsageError(
                f"there is no schedule {self.schedule!r}; {did_you_mean(self.schedule, SCHEDULES)}"
            )

    def check_rows(self, steps: int, environments: int) -> int:
        """Return how many rows of a rollout belong to a shard.

        Raises:
            UsageError: They do not divide into the minibatches.
        """
        each = environments // self.shards
        rows = steps * each
        if environments % self.shards:
            raise UsageError(
                f"{environments} environments do not divide into {self.shards} shards; choose "
                "shards that divides them"
            )
        if rows % self.minibatches:
            raise UsageError(
                f"minibatches={self.minibatches} does not divide the {rows} rows of a shard "
                f"({steps} steps x {each} environments); choose another number"
            )
        return rows

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
    encoded: Tensor | None = None
    """[T, N, ...], `Policy.encode` of the observations, if whoever flew has kept them."""
    episodes: Tensor | None = None
    """How the episodes in it ended: sums of `penstock.nav.collect.EpisodeSums`."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """What else is worth logging."""

    def check(self) -> None:
        """Look for numbers that would poison the weights: a `DataError` names the tensor."""
        for key in ("state", "lidar", "dynamic_obstacle"):
            if key in self.obs:
                require_finite(f"observation {key}", self.obs[key])
        for name in ("action", "log_prob", "value", "reward", "final_value", "last_value"):
            require_finite(name, getattr(self, name))


def require_finite(name: str, tensor: Tensor) -> None:
    """Stop at NaN or infinity: a `DataError` says where."""
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


class ValueNorm:
    """Running mean and deviation of the returns, without the bias of a start from zero.

    `beta` is the share of the past that is kept at each update.
    """

    def __init__(self, beta: float = 0.995, device: torch.device | str = "cpu") -> None:
        if not 0.0 <= beta < 1.0:
            raise UsageError(f"value norm: beta is {beta}; give a number from 0 to below 1")
        self.beta = beta
        # Mean, mean square, weight of all updates so far. Double, since variance is a difference.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    @property
    def mean_and_deviation(self) -> tuple[float, float]:
        """What values are shifted and scaled by; (0, 1) before the first update."""
        mean, square, weight = self._sums.tolist()
        if weight == 0.0:
            return 0.0, 1.0
        mean, square = mean / weight, square / weight
        return mean, float(max(square - mean * mean, _LEAST_VARIANCE) ** 0.5)

    def update(self, returns: Tensor, all_reduce: AllReduce | None = None) -> None:
        """Take in a batch of returns, with those of the other processes if there are any."""
        wide = returns.detach().double()
        batch = torch.stack((wide.mean(), wide.square().mean(), wide.new_ones(())))
        if all_reduce is not None:
            all_reduce(batch)
        self._sums.mul_(self.beta).add_(batch, alpha=1.0 - self.beta)

    def normalize(self, values: Tensor) -> Tensor:
        """Bring returns to the scale of the critic."""
        mean, deviation = self.mean_and_deviation
        return (values - mean) / deviation

    def denormalize(self, values: Tensor) -> Tensor:
        """Bring values of the critic to the scale of returns."""
        mean, deviation = self.mean_and_deviation
        return values * deviation + mean

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that changes, copied."""
        return {"sums": self._sums.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state of `state_dict`."""
        if "sums" not in state:
            raise UsageError("value norm: the state has no 'sums'; give one that it saved")
        self._sums.copy_(state["sums"])


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
    another episode, and nothing of it flows back. Arguments are as in `Batch`; termination wins
    where both are true. Returned are advantages and returns (advantage + value), [T, N] each.
    """
    shape = reward.shape
    for name, tensor, expected in (
        ("value", value, shape),
        ("terminated", terminated, shape),
        ("truncated", truncated, shape),
        ("final_value", final_value, shape),
        ("last_value", last_value, shape[1:]),
    ):
        if tensor.shape != expected:
            raise UsageError(
                f"gae: {name} has shape {list(tensor.shape)}, but reward has {list(shape)}; "
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


class Targets(NamedTuple):
    """What the update aims at: of `PPO.advantages`."""

    advantage: Tensor
    """[T, N], of mean 0 and deviation 1 over all processes."""
    returns: Tensor
    """[T, N], on the scale of the critic."""
    stats: dict[str, float]
    """explained_variance, value_mean, return_mean."""


class PPO:
    """The learner: a policy, its optimizer and the scale of its values.

    Differs from NavRL where NavRL is wrong: the pessimistic value loss is chosen per sample and not
    per minibatch, the critic has a learning rate of its own, gradients of the features are clipped
    as well, and truncated episodes are bootstrapped.

    Args:
        policy: What learns. Its parameters get gradients that live in one flat tensor: do not set
            them to None.
        settings: How it learns; None for the settings that go with the preset of the policy.
        all_reduce: Replaces a tensor in place by its mean over all processes. Every process calls
            `update` with its own part of the batch, equally large, and generators in equal state.

    Example:
        ppo = PPO(policy)
        stats = ppo.update(batch, generator, progress=frames / max_frames)
    """

    def __init__(
        self,
        policy: Policy,
        settings: PPOSettings | None = None,
        all_reduce: AllReduce | None = None,
    ) -> None:
        self.policy = policy
        self.settings = settings if settings is not None else PPOSettings.preset(policy.preset)
        self.all_reduce = all_reduce
        self.value_norm = ValueNorm(self.settings.value_norm_beta, device=policy.device)
        self.progress = 0.0
        own = {"actor": self.settings.actor_lr, "critic": self.settings.critic_lr}
        self._rates = [own.get(name) or self.settings.lr for name, _ in policy.groups()]
        groups = [
            {"params": parameters, "lr": rate, "name": name}
            for rate, (name, parameters) in zip(self._rates, policy.groups(), strict=True)
        ]
        self.optimizer = torch.optim.Adam(groups, lr=self.settings.lr, fused=True)
        # Gradients as views of one tensor: norm, clipping and exchange are one call each.
        everything = [parameter for group in groups for parameter in group["params"]]  # type: ignore[attr-defined]
        sizes = [parameter.numel() for parameter in everything]
        self._gradient = torch.zeros(sum(sizes), device=policy.device)
        for parameter, part in zip(everything, torch.split(self._gradient, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self._held: dict[str, Tensor] = {}

    @torch.no_grad()
    def advantages(self, batch: Batch) -> Targets:
        """Look at a rollout, and say what to learn from it; the value norm takes it in."""
        batch.check()
        before = self.value_norm.denormalize(batch.value)
        advantage, returns = gae(
            batch.reward,
            before,
            batch.terminated,
            batch.truncated,
            self.value_norm.denormalize(batch.final_value),
            self.value_norm.denormalize(batch.last_value),
            gamma=self.settings.gamma,
            lam=self.settings.lam,
        )
        # All moments in double and in one exchange, so that processes agree with one process.
        wide = torch.stack((advantage, returns, before, returns - before)).double().flatten(1)
        moments = torch.stack((wide.mean(1), wide.square().mean(1)))
        if self.all_reduce is not None:
            self.all_reduce(moments)
        means, squares = moments
        spread = (squares - means.square()).clamp(min=0.0)
        advantage = (advantage - means[0].float()) / (spread[0].sqrt().float() + 1e-8)
        self.value_norm.update(returns, self.all_reduce)
        stats = {
            "explained_variance": float(1.0 - spread[3] / spread[1].clamp(min=1e-12)),
            "return_mean": float(means[1]),
            "value_mean": float(means[2]),
        }
        return Targets(advantage, self.value_norm.normalize(returns), stats)

    def update(
        self,
        batch: Batch,
        generator: torch.Generator,
        progress: float = 0.0,
        on_minibatch: Callable[[], None] | None = None,
        targets: Targets | None = None,
    ) -> dict[str, float]:
        """Learn from one rollout.

        Args:
            batch: The rollout; not changed.
            generator: Order of the rows, a CPU generator.
            progress: How far training is, from 0 to 1, for the learning-rate schedule.
            on_minibatch: Called before every minibatch; what it raises ends the update there.
            targets: Of `advantages`; None computes them.

        Returns:
            Means over all minibatches: actor_loss, critic_loss, entropy, grad_norm, clip_fraction,
            approx_kl; the stats of the targets; and lr.

        Raises:
            UsageError: The rows cannot be divided as the settings ask.
            DataError: A tensor or a loss is not finite; it is named, and the weights are those
                before the minibatch in question.
        """
        settings = self.settings
        rows = settings.check_rows(*batch.reward.shape)
        targets = self.advantages(batch) if targets is None else targets
        self.progress = float(progress)
        factor = settings.lr_factor(self.progress)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        columns = (batch.log_prob, targets.advantage, targets.returns, batch.value)
        scalars = torch.cat((batch.action, torch.stack(columns, -1)), -1).flatten(0, 1)
        encoded = batch.encoded
        if encoded is None:  # a step at a time stays in the caches
            parts = ({k: v[t] for k, v in batch.obs.items()} for t in range(len(batch.reward)))
            encoded = torch.stack([self.policy.encode(part) for part in parts])
        encoded = encoded.flatten(0, 1)
        sums = torch.zeros(6, device=scalars.device)
        for _ in range(settings.epochs):
            order = self._order(rows, batch.reward.shape[1], generator).to(scalars.device)
            for chosen in order:
                if on_minibatch is not None:
                    on_minibatch()
                minibatch = self._gather("scalars", scalars, chosen)
                sums += self._step(minibatch, self._gather("encoded", encoded, chosen))
        means = sums / (settings.epochs * settings.minibatches)
        if self.all_reduce is not None:
            self.all_reduce(means)
        names = ("actor_loss", "critic_loss", "entropy", "grad_norm", "clip_fraction", "approx_kl")
        stats = dict(zip(names, means.tolist(), strict=True))
        return stats | targets.stats | {"lr": settings.lr * factor}

    def _step(self, scalars: Tensor, encoded: Tensor) -> Tensor:
        """Learn from one minibatch; return what is to be averaged."""
        settings = self.settings
        action = scalars[:, :ACTIONS]
        old_log_prob, advantage, target, old_value = scalars[:, ACTIONS:].t().contiguous()
        alpha, beta, value = self.policy.actor_critic(encoded)
        log_prob, entropy = log_prob_and_entropy(alpha, beta, action)
        log_ratio = log_prob - old_log_prob
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
        actor_loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        near = old_value + (value - old_value).clamp(-settings.clip, settings.clip)
        critic_loss = torch.maximum(
            F.huber_loss(value, target, reduction="none", delta=settings.huber),
            F.huber_loss(near, target, reduction="none", delta=settings.huber),
        ).mean()
        bonus = entropy.mean()
        loss = (
            settings.actor_weight * actor_loss
            + settings.critic_weight * critic_loss
            - settings.entropy_weight * bonus
        )
        self._gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.all_reduce is not None:
            self.all_reduce(self._gradient)
        norm = self._gradient.norm()
        # Not a number in any loss, in any process, makes the norm so: one look is enough.
        if not torch.isfinite(norm):
            self._name_culprit(actor_loss, critic_loss, bonus, norm)
        self._gradient.mul_((settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        with torch.no_grad():
            outside = ((ratio - 1.0).abs() > settings.clip).float().mean()
            kl = (ratio - 1.0 - log_ratio).mean()
            return torch.stack((actor_loss, critic_loss, bonus, norm, outside, kl))

    def _order(self, rows: int, environments: int, generator: torch.Generator) -> Tensor:
        """Row numbers [minibatches, rows of one]: the same order inside every shard."""
        order = torch.randperm(rows, generator=generator).view(self.settings.minibatches, -1)
        shards = self.settings.shards
        if shards == 1:
            return order
        width = environments // shards
        first = torch.div(order, width, rounding_mode="floor") * environments + order % width
        return torch.cat([first + shard * width for shard in range(shards)], 1)

    def _gather(self, name: str, table: Tensor, chosen: Tensor) -> Tensor:
        """Copy the chosen rows into memory that is used again: fresh megabytes cost page faults."""
        shape = (len(chosen), table.shape[1])
        held = self._held.get(name)
        if held is None or held.shape != shape or held.dtype != table.dtype:
            held = self._held[name] = table.new_empty(shape)
        return torch.index_select(table, 0, chosen, out=held)

    def _name_culprit(self, actor: Tensor, critic: Tensor, entropy: Tensor, norm: Tensor) -> None:
        losses = {"actor_loss": actor, "critic_loss": critic, "entropy": entropy}
        gradients = {
            f"gradient of {name}": parameter.grad
            for name, parameter in self.policy.named_parameters()
            if parameter.grad is not None
        }
        for name, tensor in (losses | gradients | {"grad_norm": norm}).items():
            require_finite(name, tensor.detach())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of policy, optimizer, value norm and schedule; tensors not copied."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "value_norm": self.value_norm.state_dict(),
            "progress": self.progress,
            "preset": self.policy.preset,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`, bit for bit.

        Raises:
            UsageError: The state is of another network, or lacks a part; nothing was changed.
        """
        missing = {"policy", "optimizer", "value_norm"} - set(state)
        if missing:
            raise UsageError(f"PPO: the state has no {sorted(missing)[0]!r}; give one it saved")
        if (preset := state.get("preset", self.policy.preset)) != self.policy.preset:
            raise UsageError(
                f"PPO: the state is of preset {preset!r}, the policy is {self.policy.preset!r}; "
                f"give algo={preset}, or build Policy({preset!r})"
            )
        if misfit := self.policy.misfit(state["policy"]):
            raise UsageError(
                f"PPO: the state is of another network: {misfit}; load it into the network that "
                "saved it"
            )
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.value_norm.load_state_dict(state["value_norm"])
        self.progress = float(state.get("progress", 0.0))
