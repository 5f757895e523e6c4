"""The policy: features shared by a Beta actor and a critic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.nav.learning import beta as betas
from penstock.nav.learning.networks import FastEncoder, NavRLEncoder, Observation, initialise
from penstock.ui.suggestions import did_you_mean

ACTIONS = 3
PRESETS = ("fast", "navrl")
_FORWARD_BIAS = 1.0  # an untrained policy that drifts to its goal finds the first rewards sooner


class Act(NamedTuple):
    """What a policy decided for many environments."""

    action: Tensor
    """[N, 3] inside (0, 1)."""
    log_prob: Tensor
    """[N], of the whole action."""
    value: Tensor
    """[N], on the scale of the critic: see `ValueNorm`."""


class Policy(nn.Module):
    """Actor and critic on shared features.

    Args:
        preset: "navrl" for NavRL's networks, "fast" for smaller ones made for CPUs.
        seed: Seed of the initial weights. The global generator is neither used nor changed.
        bf16: Compute features in bfloat16. None chooses it where the processor has instructions
            for it; elsewhere it is many times slower than float32. Weights stay float32.

    Raises:
        UsageError: There is no such preset.

    Example:
        policy = Policy("fast", seed=0)
        action, log_prob, value = policy.act(obs, torch.Generator().manual_seed(0))
    """

    def __init__(self, preset: str = "fast", *, seed: int = 0, bf16: bool | None = None) -> None:
        super().__init__()
        if preset not in PRESETS:
            raise UsageError(
                f"there is no policy preset {preset!r}; {did_you_mean(preset, PRESETS)}"
            )
        self.preset = preset
        self.bf16 = has_bf16() if bf16 is None else bf16
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # building layers draws numbers that nobody uses
            self.encoder = FastEncoder() if preset == "fast" else NavRLEncoder()
            self.alpha = nn.Linear(self.encoder.width, ACTIONS)
            self.beta = nn.Linear(self.encoder.width, ACTIONS)
            self.critic = nn.Linear(self.encoder.width, 1)
        initialise(self.encoder, generator, orthogonal=preset == "fast")
        for head in (self.alpha, self.beta, self.critic):
            nn.init.orthogonal_(head.weight, 0.01, generator=generator)
            nn.init.zeros_(head.bias)
        if preset == "fast":
            with torch.no_grad():
                self.alpha.bias[0] = _FORWARD_BIAS
                self.beta.bias[0] = -_FORWARD_BIAS

    def forward(self, obs: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the Beta parameters [N, 3], both above 1, and the values [N]."""
        return self.decide(self.prepare(obs))

    @torch.no_grad()
    def prepare(self, obs: Observation) -> Tensor:
        """Lay out observations [N, ...] as rows for `decide`; nothing in it is learned."""
        return self.encoder.prepare(obs)

    def decide(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `forward` does, with rows from `prepare`."""
        device = self.critic.weight.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.bf16):
            features = self.encoder(rows)
        return self.heads(features.float())

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what `forward` does from features [N, width]."""
        # One product for the three heads; they are separate to have their own learning rates.
        heads = F.linear(
            features,
            torch.cat((self.alpha.weight, self.beta.weight, self.critic.weight)),
            torch.cat((self.alpha.bias, self.beta.bias, self.critic.bias)),
        )
        shapes = F.softplus(heads[:, : 2 * ACTIONS]) + (1.0 + 1e-6)
        return shapes[:, :ACTIONS], shapes[:, ACTIONS:], heads[:, 2 * ACTIONS]

    @torch.no_grad()
    def act(self, obs: Observation, generator: torch.Generator | None = None) -> Act:
        """Draw an action for every environment, without gradients.

        Args:
            obs: Observations [N, ...] by key.
            generator: Where the randomness comes from, on the device of the policy. None for the
                mean action instead: always the same, as one evaluates and flies.
        """
        return self.choose(self.prepare(obs), generator)

    @torch.no_grad()
    def choose(self, rows: Tensor, generator: torch.Generator | None = None) -> Act:
        """Do what `act` does, with rows from `prepare`."""
        alpha, beta, value = self.decide(rows)
        if generator is None:
            action = (alpha / (alpha + beta)).clamp_(betas.EDGE, 1.0 - betas.EDGE)
        else:
            action = betas.sample(alpha, beta, generator)
        return Act(action, betas.log_prob(alpha, beta, action), value)

    @torch.no_grad()
    def value(self, obs: Observation) -> Tensor:
        """Compute the values [N] alone, as at the end of a rollout."""
        value: Tensor = self(obs)[2]
        return value

    def groups(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """Yield the parameters by part: those of the features, of the actor and of the critic."""
        yield "features", list(self.encoder.parameters())
        yield "actor", [*self.alpha.parameters(), *self.beta.parameters()]
        yield "critic", list(self.critic.parameters())


def has_bf16(device: torch.device | str = "cpu") -> bool:
    """Whether a device multiplies bfloat16 itself; CPUs: AVX-512 BF16, AMX, or ARM's BF16."""
    if torch.device(device).type != "cpu":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is None:  # before torch 2.11
        return False
    known = ask()
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
