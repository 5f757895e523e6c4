"""The peer of `penstock train`: the same task and network in a plain TorchRL loop.

Written as one who knows TorchRL would: values are kept from the collection, so that GAE evaluates
no observation twice; features are computed once per minibatch for actor and critic; nothing is
gathered that the loss does not read; Adam is fused; distributions do not check their arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import MissingExtra
from penstock.nav.networks import ACTIONS, EDGE, Policy
from penstock.nav.ppo import PPOSettings
from penstock.nav.simulation.env import NavigationEnv
from penstock.nav.simulation.task import Settings

try:
    from tensordict import TensorDictBase
    from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
    from torch.distributions import Beta, Independent

    with warnings.catch_warnings():  # TorchRL warns of parts of its own that it will remove
        warnings.simplefilter("ignore", DeprecationWarning)
        from torchrl.collectors import Collector
        from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator
        from torchrl.objectives import ClipPPOLoss
        from torchrl.objectives.value import GAE
except ModuleNotFoundError as error:
    raise MissingExtra("torchrl", "rl") from error

_ACTION = ("agents", "action_normalized")
_SEEN = [("agents", "observation", part) for part in ("state", "lidar", "dynamic_obstacle")]
_LOG_PROB = "action_log_prob"
_READ = [*_SEEN, _ACTION, _LOG_PROB, "advantage", "value_target", "state_value"]


class IndependentBeta(Independent):  # type: ignore[type-arg]
    """Independent Betas as NavRL has them, whose samples keep away from 0 and 1."""

    def __init__(self, alpha: Tensor, beta: Tensor) -> None:
        super().__init__(Beta(alpha, beta, validate_args=False), 1, validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw from torch's global generator: TorchRL has no other."""
        return super().rsample(torch.Size(sample_shape)).clamp(EDGE, 1.0 - EDGE)


class _Features(nn.Module):
    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.encoder, self.bf16 = policy.encoder, policy.bf16

    def forward(self, state: Tensor, lidar: Tensor, dynamic_obstacle: Tensor) -> Tensor:
        seen = {"state": state, "lidar": lidar, "dynamic_obstacle": dynamic_obstacle}
        with torch.no_grad():
            rows = self.encoder.prepare(seen)
        features: Tensor = self.encoder(rows.bfloat16() if self.bf16 else rows)
        return features.float()


class _Shapes(nn.Module):
    """Both parameters of the Betas by one product."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.linear = nn.Linear(policy.encoder.width, 2 * ACTIONS)
        with torch.no_grad():
            self.linear.weight.copy_(torch.cat((policy.alpha.weight, policy.beta.weight)))
            self.linear.bias.copy_(torch.cat((policy.alpha.bias, policy.beta.bias)))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        shapes = F.softplus(self.linear(features)) + (1.0 + 1e-6)
        return shapes[..., :ACTIONS], shapes[..., ACTIONS:]


class PlainLoop:
    """Collector, GAE, ClipPPOLoss and Adam, one iteration at a time.

    Draws from torch's global generator, as TorchRL does: fork it around the use of this class.

    Args:
        settings: What is simulated.
        steps: Decisions of each drone per iteration.
        ppo: How it learns.
        preset: Of the network; the initial weights are those of `Policy(preset, seed=seed)`.
        seed: Of the weights and of the environment.
        threads: Of the environment; those of torch are the caller's to set.
    """

    def __init__(
        self,
        settings: Settings,
        steps: int,
        ppo: PPOSettings,
        preset: str = "fast",
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        self.settings = ppo
        self.threads = threads
        self.env = NavigationEnv(settings, seed=seed, threads=threads)
        policy = Policy(preset, seed=seed)
        common = TensorDictModule(_Features(policy), in_keys=_SEEN, out_keys=["hidden"])
        actor = ProbabilisticActor(
            TensorDictModule(_Shapes(policy), in_keys=["hidden"], out_keys=["alpha", "beta"]),
            in_keys=["alpha", "beta"],
            out_keys=[_ACTION],
            distribution_class=IndependentBeta,
            return_log_prob=True,
            log_prob_key=_LOG_PROB,
        )
        critic = ValueOperator(policy.critic, in_keys=["hidden"])
        self.model = ActorValueOperator(common, actor, critic)
        # TorchRL's own advice for shared features: the critic's head reads what the actor left.
        self.loss = ClipPPOLoss(
            ProbabilisticTensorDictSequential(common, *actor),
            critic,
            clip_epsilon=ppo.clip,
            entropy_coeff=ppo.entropy_weight,
            critic_coeff=ppo.critic_weight,
            clip_value=ppo.clip,
            log_explained_variance=False,
            functional=False,
        )
        self.loss.set_keys(action=_ACTION, sample_log_prob=_LOG_PROB)
        self.gae = GAE(
            gamma=ppo.gamma, lmbda=ppo.lam, value_network=None, average_gae=True, vectorized=True
        )
        self.gae.set_keys(reward=("agents", "reward"))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=ppo.lr, fused=True)
        self.collector = Collector(
            self.env,
            self.model,
            frames_per_batch=steps * settings.num_envs,
            total_frames=-1,
            return_same_td=True,
            trust_policy=True,
            auto_register_policy_transforms=False,
        )
        self._batches: Iterator[TensorDictBase] = iter(self.collector)

    def iteration(self) -> dict[str, float]:
        """Collect a batch and learn from it; return the means of the losses."""
        return self.update(self.collect())

    def collect(self) -> TensorDictBase:
        """Return the next batch, [drones, steps]."""
        return next(self._batches)

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Learn from a batch in epochs of minibatches."""
        ppo = self.settings
        self._next_values(batch)
        self.gae(batch)
        data = batch.select(*_READ).reshape(-1)
        sums = torch.zeros(3)
        for _ in range(ppo.epochs):
            for chosen in torch.randperm(len(data)).view(ppo.minibatches, -1):
                losses = self.loss(data[chosen])
                parts = [losses[f"loss_{name}"] for name in ("objective", "critic", "entropy")]
                (ppo.actor_weight * parts[0] + parts[1] + parts[2]).backward()
                nn.utils.clip_grad_norm_(self.parameters, ppo.max_grad_norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
                sums += torch.stack(parts).detach()
        means = (sums / (ppo.epochs * ppo.minibatches)).tolist()
        return dict(zip(("actor", "critic", "entropy"), means, strict=True))

    @torch.no_grad()
    def _next_values(self, batch: TensorDictBase) -> None:
        """Values after each step: those of the next row, but where an episode or the batch ends."""
        value, after = batch["state_value"], batch["next"]
        following = torch.cat((value[:, 1:], torch.zeros_like(value[:, :1])), 1)
        ends = after["done"][..., 0].clone()
        ends[:, -1] = True
        ends &= ~after["terminated"][..., 0]  # nothing follows there
        last = after.select(*_SEEN)[ends]
        following[ends] = self.model.get_value_operator()(last)["state_value"]
        after["state_value"] = following

    def close(self) -> None:
        """End collection and close the environment."""
        self.collector.shutdown()
        if not self.env.is_closed:
            self.env.close()
