"""Proximal policy optimisation: one update from one rollout, in one flat loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from penstock.errors import UsageError
from penstock.nav.learning.beta import log_prob_and_entropy
from penstock.nav.learning.gae import gae
from penstock.nav.learning.policy import ACTIONS, Policy
from penstock.nav.learning.ppo_settings import Batch, PPOSettings, require_finite
from penstock.nav.learning.value_norm import AllReduce, ValueNorm

__all__ = ["PPO", "AllReduce", "Batch", "PPOSettings"]


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
        device = policy.critic.weight.device
        self.value_norm = ValueNorm(self.settings.value_norm_beta, device=device)
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
        self._gradient = torch.zeros(sum(sizes), device=device)
        for parameter, part in zip(everything, torch.split(self._gradient, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self._held: dict[int, Tensor] = {}

    def update(
        self,
        batch: Batch,
        generator: torch.Generator,
        progress: float = 0.0,
        on_minibatch: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """Learn from one rollout.

        Args:
            batch: The rollout; not changed.
            generator: Order of the rows, a CPU generator.
            progress: How far training is, from 0 to 1, for the learning-rate schedule.
            on_minibatch: Called before every minibatch; what it raises ends the update there.

        Returns:
            Means over all minibatches: actor_loss, critic_loss, entropy, grad_norm, clip_fraction,
            approx_kl; and of the batch explained_variance, value_mean, return_mean, and lr.

        Raises:
            UsageError: The rows cannot be divided as the settings ask.
            DataError: A tensor or a loss is not finite; it is named, and the weights are those
                before the minibatch in question.
        """
        settings = self.settings
        rows = self._rows(batch)
        batch.check()
        self.progress = float(progress)
        factor = settings.lr_factor(self.progress)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        small, stats = self._targets(batch)
        table = self._table(batch).flatten(0, 1)
        small = small.flatten(0, 1)
        sums = torch.zeros(6, device=small.device)
        for _ in range(settings.epochs):
            order = self._order(rows, batch.reward.shape[1], generator).to(small.device)
            for chosen in order:
                if on_minibatch is not None:
                    on_minibatch()
                sums += self._step(self._gather(0, small, chosen), self._gather(1, table, chosen))
        means = sums / (settings.epochs * settings.minibatches)
        if self.all_reduce is not None:
            self.all_reduce(means)
        names = (
            "actor_loss",
            "critic_loss",
            "entropy",
            "grad_norm",
            "clip_fraction",
            "approx_kl",
        )
        return dict(zip(names, means.tolist(), strict=True)) | stats | {"lr": settings.lr * factor}

    def _step(self, small: Tensor, rows: Tensor) -> Tensor:
        """Learn from one minibatch; return what is to be averaged."""
        settings = self.settings
        action = small[:, :ACTIONS]
        old_log_prob, advantage, target, old_value = small[:, ACTIONS:].t().contiguous()
        alpha, beta, value = self.policy.decide(rows)
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

    @torch.no_grad()
    def _targets(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Action, log density, advantage, return and value side by side, [T, N, 7]; and stats."""
        settings = self.settings
        before = self.value_norm.denormalize(batch.value)
        advantage, returns = gae(
            batch.reward,
            before,
            batch.terminated,
            batch.truncated,
            self.value_norm.denormalize(batch.final_value),
            self.value_norm.denormalize(batch.last_value),
            gamma=settings.gamma,
            lam=settings.lam,
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
        columns = (batch.log_prob, advantage, self.value_norm.normalize(returns), batch.value)
        small = torch.cat((batch.action, torch.stack(columns, -1)), -1)
        stats = {
            "explained_variance": float(1.0 - spread[3] / spread[1].clamp(min=1e-12)),
            "return_mean": float(means[1]),
            "value_mean": float(means[2]),
        }
        return small, stats

    def _rows(self, batch: Batch) -> int:
        steps, environments = batch.reward.shape
        settings = self.settings
        if environments % settings.shards:
            raise UsageError(
                f"PPO: {environments} environments do not divide into {settings.shards} shards; "
                "choose shards that divides them"
            )
        rows = steps * environments // settings.shards
        if rows % settings.minibatches:
            raise UsageError(
                f"PPO: {rows} rows ({steps} steps x {environments} environments / "
                f"{settings.shards} shards) do not divide into {settings.minibatches} minibatches; "
                "choose minibatches that divides them"
            )
        return rows

    def _order(self, rows: int, environments: int, generator: torch.Generator) -> Tensor:
        """Row numbers [minibatches, rows of one]: the same order inside every shard."""
        order = torch.randperm(rows, generator=generator).view(self.settings.minibatches, -1)
        shards = self.settings.shards
        if shards == 1:
            return order
        width = environments // shards
        first = torch.div(order, width, rounding_mode="floor") * environments + order % width
        return torch.cat([first + shard * width for shard in range(shards)], 1)

    def _table(self, batch: Batch) -> Tensor:
        """All observations as rows of one matrix [T, N, width]: a minibatch is one gather."""
        if batch.rows is not None:
            return batch.rows
        steps = range(len(batch.reward))  # a step at a time stays in the caches
        return torch.stack(
            [self.policy.prepare({k: v[t] for k, v in batch.obs.items()}) for t in steps]
        )

    def _gather(self, which: int, table: Tensor, chosen: Tensor) -> Tensor:
        """Copy the chosen rows into memory that is used again: fresh megabytes cost page faults."""
        shape = (len(chosen), table.shape[1])
        held = self._held.get(which)
        if held is None or held.shape != shape:
            held = self._held[which] = table.new_empty(shape)
        return torch.index_select(table, 0, chosen, out=held)

    def _name_culprit(self, actor: Tensor, critic: Tensor, entropy: Tensor, norm: Tensor) -> None:
        for name, tensor in (
            ("actor_loss", actor),
            ("critic_loss", critic),
            ("entropy", entropy),
            *((f"gradient of {name}", p.grad) for name, p in self.policy.named_parameters()),
            ("grad_norm", norm),
        ):
            if tensor is not None:
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
                f"build Policy({preset!r})"
            )
        own = self.policy.state_dict()
        for name in sorted(own.keys() | state["policy"].keys()):
            have, given = own.get(name), state["policy"].get(name)
            if have is None or given is None or have.shape != given.shape:
                shapes = [None if x is None else list(x.shape) for x in (have, given)]
                raise UsageError(
                    f"PPO: the state is of another network: {name} is {shapes[1]} there and "
                    f"{shapes[0]} here; load it into the network that saved it"
                )
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.value_norm.load_state_dict(state["value_norm"])
        self.progress = float(state.get("progress", 0.0))
