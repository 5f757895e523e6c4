"""The policy: encoders of observations, and a Beta actor and a critic on shared features.

An encoder works in two steps: `prepare` makes one flat row of numbers per drone, with no parameters
in it, so that an update of several epochs does that once and gathers its minibatches from one
matrix; `forward` makes features of such rows. Rows are in the precision that features are computed
in: bfloat16 where the processor has instructions for it. Weights stay in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.nav.simulation.task import NEAREST, Obstacle, State
from penstock.ui.suggestions import did_you_mean

Observation = Mapping[str, Tensor]
"""Observations of many drones by key; further keys are ignored."""

ACTIONS = 3
PRESETS = ("fast", "navrl")
EDGE = 1e-6  # samples keep this distance from 0 and 1, where densities end
LIDAR_RANGE_M = 4.0
BEAMS = (36, 4)
_LIDAR = BEAMS[0] * BEAMS[1]
_ROUND = 1024  # obstacles that are encoded at once are a multiple of this
_DESCRIBED = 11  # numbers that `describe_obstacles` gives of each
_FORWARD_BIAS = 1.0  # an untrained policy that drifts to its goal finds the first rewards sooner


class Dense(nn.Linear):
    """A linear layer in the precision of what it is given."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply."""
        return F.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


class Norm(nn.LayerNorm):
    """A layer norm in the precision of what it is given."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise."""
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class NavRLEncoder(nn.Module):
    """NavRL's features: three convolutions over the lidar, and all obstacles in one flat row."""

    width = 256
    columns = (_LIDAR, NEAREST * Obstacle.SIZE, State.SIZE)

    def __init__(self) -> None:
        super().__init__()
        self.lidar = FoldedConvolutions()
        self.lidar_out = nn.Sequential(Dense(288, 128), Norm(128))
        self.dynamic = nn.Sequential(*_layer(self.columns[1], 128), *_layer(128, 64))
        self.trunk = nn.Sequential(*_layer(128 + State.SIZE + 64, 256), *_layer(256, 256))

    def prepare(self, obs: Observation) -> Tensor:
        """Lay observations [N, ...] side by side, [N, sum of the columns]."""
        keys = ("lidar", "dynamic_obstacle", "state")
        parts = zip(keys, self.columns, strict=True)
        return torch.cat([obs[key].reshape(-1, width) for key, width in parts], -1)

    def forward(self, rows: Tensor) -> Tensor:
        """Encode prepared rows as [N, 256]."""
        lidar, obstacles, state = torch.split(rows, list(self.columns), -1)
        seen = self.lidar_out(self.lidar(lidar.view(-1, *BEAMS)))
        features: Tensor = self.trunk(torch.cat((seen, state, self.dynamic(obstacles)), -1))
        return features


class FoldedConvolutions(nn.Module):
    """NavRL's three 5x3 convolutions, run along the azimuth only.

    There are just four beams above each other: as channels of a one-dimensional convolution they
    fill vector registers that one to four channels leave empty. A third more multiplications take
    two thirds of the time. The parameters are those of the two-dimensional layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, (5, 3), padding=(2, 1))
        self.second = nn.Conv2d(4, 16, (5, 3), stride=(2, 1), padding=(2, 1))
        self.third = nn.Conv2d(16, 16, (5, 3), stride=(2, 2), padding=(2, 1))
        for index, (outputs, stride) in enumerate(((4, 1), (4, 1), (2, 2))):
            # Which of the 3 vertical taps joins beam u of the input to beam v of the output.
            taps = torch.zeros(outputs, 4, 3)
            for v in range(outputs):
                for tap in range(3):
                    if 0 <= (u := v * stride + tap - 1) < 4:
                        taps[v, u, tap] = 1.0
            self.register_buffer(f"taps_{index}", taps, persistent=False)

    def forward(self, lidar: Tensor) -> Tensor:
        """Map [N, 36, 4] to [N, 288], in the order of the flattened two-dimensional result."""
        rows = lidar.transpose(1, 2).unsqueeze(2)  # channels last in memory, as it comes
        for index, convolution in enumerate((self.first, self.second, self.third)):
            taps: Tensor = getattr(self, f"taps_{index}")
            weight, bias = convolution.weight, convolution.bias
            assert bias is not None
            outputs = taps.shape[0]
            folded = torch.einsum("oikt,vut->oviuk", weight, taps)
            folded = folded.reshape(weight.shape[0] * outputs, weight.shape[1] * 4, 1, 5)
            repeated = bias.repeat_interleave(outputs).to(rows.dtype)
            stride = (1, 1 if index == 0 else 2)
            rows = F.conv2d(rows, folded.to(rows.dtype), repeated, stride, padding=(0, 2))
            rows = F.elu(rows, inplace=True)
        return rows.reshape(-1, 16, 2, 9).transpose(2, 3).flatten(1)


class FastEncoder(nn.Module):
    """Small features for CPUs: plain layers over the lidar, one network shared by all obstacles.

    Everything is scaled to about 1 first, and obstacles are described by where they are and how
    they move relative to the drone. They are pooled by maximum and mean, so that their order does
    not matter, and those out of sight take no part.
    """

    width = 128
    columns = (_LIDAR, State.SIZE + 1, NEAREST * _DESCRIBED, NEAREST)
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lidar = nn.Sequential(Dense(_LIDAR, 128), nn.LeakyReLU(inplace=True), Dense(128, 64))
        self.obstacle = nn.Sequential(
            Dense(_DESCRIBED, 32), nn.LeakyReLU(inplace=True), Dense(32, 32)
        )
        self.trunk = nn.Sequential(*_layer(64 + self.columns[1] + 64, 128), *_layer(128, 128))
        scale = torch.tensor([1.0, 1.0, 1.0, 0.05, 0.5, 0.5, 0.5, 0.5])
        self.register_buffer("scale", scale, persistent=False)

    def prepare(self, obs: Observation) -> Tensor:
        """Scale observations [N, ...] to about 1, [N, sum of the columns]."""
        state = obs["state"].reshape(-1, State.SIZE)
        obstacles = obs["dynamic_obstacle"].reshape(-1, NEAREST, Obstacle.SIZE)
        described, seen = describe_obstacles(obstacles, state)
        near = state[:, State.DISTANCE, None].clamp(max=4.0) * 0.25  # there it matters more
        return torch.cat(
            (
                obs["lidar"].reshape(-1, _LIDAR) * (1.0 / LIDAR_RANGE_M),
                state * self.scale,
                near,
                described.flatten(1),
                seen.flatten(1),
            ),
            -1,
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Encode prepared rows as [N, 128]."""
        lidar, state, obstacles, seen = torch.split(rows, list(self.columns), -1)
        # The first obstacle of all drones, then the second: pooling is along whole rows.
        every = obstacles.view(-1, NEAREST, _DESCRIBED).transpose(0, 1).reshape(-1, _DESCRIBED)
        if torch.is_grad_enabled():
            # Those out of sight are not computed, and the number of the others is rounded up: for
            # each new one the matrix library compiles its products anew.
            there = seen.t().reshape(-1).nonzero()[:, 0]
            more = min(-len(there) % _ROUND, len(every) - len(there))
            found = self.obstacle(every.index_select(0, F.pad(there, (0, more))))[: len(there)]
            most, mean = _Pool.apply(found, there, len(rows))  # type: ignore[no-untyped-call]
        else:
            each = (self.obstacle(every) * seen.t().reshape(-1, 1)).view(NEAREST, -1, 32)
            most, mean = each.amax(0), each.mean(0)
        # Contiguous: a product of bfloat16 with rows of odd length takes three times as long.
        seen_by = F.leaky_relu(self.lidar(lidar.contiguous()))
        parts = (seen_by, state, F.leaky_relu(most), mean)
        features: Tensor = self.trunk(torch.cat(parts, -1))
        return features


class _Pool(torch.autograd.Function):
    """Maximum and mean of each drone's obstacles, zeros for those out of sight.

    Of equal ones, each gets the gradient of the maximum. By torch's own backward, which scatters to
    all places, it took a tenth of an update.
    """

    @staticmethod
    def forward(ctx: Any, found: Tensor, there: Tensor, drones: int) -> tuple[Tensor, Tensor]:
        every = found.new_zeros(NEAREST * drones, found.shape[1]).index_copy_(0, there, found)
        each = every.view(NEAREST, drones, -1)
        most, drone = each.amax(0), there % drones
        ctx.save_for_backward(found, drone, most)
        return most, each.mean(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        found, drone, most = ctx.saved_tensors
        of_most, of_mean = (gradient.index_select(0, drone) for gradient in gradients)
        below = found - most.index_select(0, drone)
        # What relu's backward does; `==` and `where` take ten times as long on bfloat16.
        share = torch.ops.aten.threshold_backward(of_most, below, -1e-30)
        return of_mean.div_(NEAREST).add_(share), None, None


def describe_obstacles(obstacles: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Turn observed obstacles into places and motions relative to the drone.

    Returned are rows [N, 5, 11], scaled to about 1: position (3), relative velocity (3), closeness,
    rate of closing, time to the closest approach, width, height; and which are seen, [N, 5, 1].
    """
    toward = obstacles[..., Obstacle.TOWARD][..., :2]
    distance = obstacles[..., Obstacle.DISTANCE, None]
    flat = toward * (distance / toward.norm(dim=-1, keepdim=True).clamp(min=1e-6))
    place = torch.cat((flat, obstacles[..., Obstacle.RISE, None]), -1)
    motion = obstacles[..., Obstacle.VELOCITY] - state[:, None, State.VELOCITY]
    seen = (obstacles[..., Obstacle.PLACE] != 0.0).any(-1, keepdim=True).to(obstacles.dtype)
    closing = (flat * motion[..., :2]).sum(-1, keepdim=True)
    speed = motion[..., :2].square().sum(-1, keepdim=True).clamp(min=0.01)
    rows = torch.cat(
        (
            place * (1.0 / LIDAR_RANGE_M),
            motion * 0.4,
            1.0 - distance * (1.0 / LIDAR_RANGE_M),
            closing * 0.2,
            (-closing / speed).clamp(-4.0, 4.0) * 0.25,
            obstacles[..., Obstacle.WIDTH, None] * (1.0 / 3.0),
            obstacles[..., Obstacle.FLOATS, None],
        ),
        -1,
    )
    return rows, seen


def _layer(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return Dense(inputs, outputs), nn.LeakyReLU(inplace=True), Norm(outputs)


def initialise(module: nn.Module, generator: torch.Generator, *, orthogonal: bool) -> None:
    """Fill the parameters from one generator, whatever they held: the global one is not used.

    Weights are `orthogonal`, of gain sqrt(2), with no bias; otherwise as PyTorch's default.
    """
    for layer in module.modules():
        if isinstance(layer, nn.LayerNorm):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear | nn.Conv2d):
            assert layer.bias is not None
            if orthogonal:
                nn.init.orthogonal_(layer.weight, 2.0**0.5, generator=generator)
                nn.init.zeros_(layer.bias)
            else:
                nn.init.kaiming_uniform_(layer.weight, 5.0**0.5, generator=generator)
                bound = layer.weight[0].numel() ** -0.5
                nn.init.uniform_(layer.bias, -bound, bound, generator=generator)


# ---------------------------------------------------------------------- the policy


class Act(NamedTuple):
    """What a policy decided for many drones."""

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

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.critic.weight.device

    def forward(self, obs: Observation) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the Beta parameters [N, 3], both above 1, and the values [N]."""
        return self.actor_critic(self.encode(obs))

    @torch.no_grad()
    def encode(self, obs: Observation) -> Tensor:
        """Lay out observations [N, ...] as rows for `actor_critic`; nothing in it is learned."""
        rows = self.encoder.prepare(obs)
        return rows.bfloat16() if self.bf16 else rows

    def actor_critic(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `forward` does, with rows from `encode`."""
        features = self.encoder(rows).float()
        # One product for the three heads; they are separate to have their own learning rates.
        heads = F.linear(
            features,
            torch.cat((self.alpha.weight, self.beta.weight, self.critic.weight)),
            torch.cat((self.alpha.bias, self.beta.bias, self.critic.bias)),
        )
        shapes = F.softplus(heads[:, : 2 * ACTIONS]) + (1.0 + 1e-6)
        return shapes[:, :ACTIONS], shapes[:, ACTIONS:], heads[:, 2 * ACTIONS]

    def act(self, obs: Observation, generator: torch.Generator | None = None) -> Act:
        """Draw an action for every drone, without gradients.

        Without a generator, on the device of the policy, it is the mean action: always the same.
        """
        return self.sample(self.encode(obs), generator)

    @torch.no_grad()
    def sample(self, rows: Tensor, generator: torch.Generator | None = None) -> Act:
        """Do what `act` does, with rows from `encode`."""
        alpha, beta, value = self.actor_critic(rows)
        if generator is None:
            action = (alpha / (alpha + beta)).clamp_(EDGE, 1.0 - EDGE)
        else:
            action = sample_beta(alpha, beta, generator)
        return Act(action, beta_log_prob(alpha, beta, action), value)

    @torch.no_grad()
    def value(self, obs: Observation) -> Tensor:
        """Compute the values [N] alone, as at the end of a rollout."""
        value: Tensor = self(obs)[2]
        return value

    def misfit(self, weights: Mapping[str, Any]) -> str | None:
        """Return which tensor of a state dict is not of this network; None if all are."""
        own = self.state_dict()
        for name in sorted(own.keys() | weights.keys()):
            tensors = weights.get(name), own.get(name)
            there, here = (list(t.shape) if isinstance(t, Tensor) else "missing" for t in tensors)
            if there != here:
                return f"{name} is {there} there, {here} here"
        return None

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


# ---------------------------------------------------------------------- the Beta distribution


def sample_beta(alpha: Tensor, beta: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw from Beta(alpha, beta), reproducibly: the same generator state gives the same bits.

    Two Gamma draws in one call; `torch.distributions` would draw the same way, but only from the
    global generator. The draw is serial on the CPU, so the number of threads does not matter.
    """
    with torch.no_grad():
        both = torch._standard_gamma(torch.stack((alpha, beta)), generator=generator)
        return both[0].div_(both[0] + both[1]).clamp_(EDGE, 1.0 - EDGE)


def beta_log_prob(alpha: Tensor, beta: Tensor, action: Tensor) -> Tensor:
    """Log density of independent Betas, summed over the last axis; without gradients."""
    with torch.no_grad():
        upper, lower, total = torch.lgamma(torch.stack((alpha, beta, alpha + beta)))
        inside = (alpha - 1.0) * action.log() + (beta - 1.0) * torch.log1p(-action)
        density: Tensor = (inside + total - upper - lower).sum(-1)
        return density


def log_prob_and_entropy(alpha: Tensor, beta: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Log density of `action` and entropy, both summed over the last axis, differentiable.

    No gradient flows to the action.
    """
    result: tuple[Tensor, Tensor] = _LogProbAndEntropy.apply(alpha, beta, action)  # type: ignore[no-untyped-call]
    return result


class _LogProbAndEntropy(torch.autograd.Function):
    """The gamma functions are the whole cost: each is evaluated once, for results and gradients."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, beta: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        stacked = torch.stack((alpha, beta, alpha + beta))
        gamma_a, gamma_b, gamma_s = torch.lgamma(stacked)
        psi_a, psi_b, psi_s = torch.digamma(stacked)
        log_action, log_rest = action.log(), torch.log1p(-action)
        norm = gamma_s - gamma_a - gamma_b
        above_a, above_b = alpha - 1.0, beta - 1.0
        log_prob = above_a * log_action + above_b * log_rest + norm
        entropy = (above_a + above_b) * psi_s - norm - above_a * psi_a - above_b * psi_b
        if any(ctx.needs_input_grad[:2]):
            tri_a, tri_b, tri_s = torch.polygamma(1, stacked)
            shared = (above_a + above_b) * tri_s
            ctx.save_for_backward(
                log_action + psi_s - psi_a,
                log_rest + psi_s - psi_b,
                shared - above_a * tri_a,
                shared - above_b * tri_b,
            )
        return log_prob.sum(-1), entropy.sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        density_a, density_b, entropy_a, entropy_b = ctx.saved_tensors
        density, entropy = grads[0].unsqueeze(-1), grads[1].unsqueeze(-1)
        return (
            density * density_a + entropy * entropy_a,
            density * density_b + entropy * entropy_b,
            None,
        )
