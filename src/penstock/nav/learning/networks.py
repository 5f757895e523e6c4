"""The networks that read observations: NavRL's own, and smaller ones for CPUs.

The keys of an observation are those of the simulator: state [N, 8], lidar [N, 1, 36, 4] and
dynamic_obstacle [N, 5, 10]. An encoder works in two steps: `prepare` makes one flat row of numbers
per environment, with no parameters in it, so that an update of several epochs does that once and
gathers its minibatches from one matrix; `forward` makes features of such rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Observation = Mapping[str, Tensor]
"""Observations of many environments by key; further keys are ignored."""

LIDAR_RANGE_M = 4.0


class NavRLEncoder(nn.Module):
    """NavRL's features: three convolutions over the lidar, and all obstacles in one flat row."""

    width = 256

    def __init__(self) -> None:
        super().__init__()
        self.lidar = FoldedConvolutions()
        self.lidar_out = nn.Sequential(nn.Linear(288, 128), nn.LayerNorm(128))
        self.dynamic = nn.Sequential(*_layer(50, 128), *_layer(128, 64))
        self.trunk = nn.Sequential(*_layer(200, 256), *_layer(256, 256))

    def prepare(self, obs: Observation) -> Tensor:
        """Lay observations [N, ...] side by side, [N, 202]."""
        keys = (("lidar", 144), ("dynamic_obstacle", 50), ("state", 8))
        return torch.cat([obs[key].reshape(-1, width) for key, width in keys], -1)

    def forward(self, rows: Tensor) -> Tensor:
        """Encode prepared rows as [N, 256]."""
        lidar = self.lidar_out(self.lidar(rows[:, :144].view(-1, 36, 4)))
        dynamic = self.dynamic(rows[:, 144:194])
        features: Tensor = self.trunk(torch.cat((lidar, rows[:, 194:], dynamic), -1))
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
        rows = lidar.transpose(1, 2)
        for index, convolution in enumerate((self.first, self.second, self.third)):
            taps: Tensor = getattr(self, f"taps_{index}")
            weight, bias = convolution.weight, convolution.bias
            assert bias is not None
            outputs = taps.shape[0]
            folded = torch.einsum("oikt,vut->oviuk", weight, taps)
            folded = folded.reshape(weight.shape[0] * outputs, weight.shape[1] * 4, 5)
            rows = F.elu(
                F.conv1d(
                    rows,
                    folded,
                    bias.repeat_interleave(outputs),
                    stride=1 if index == 0 else 2,
                    padding=2,
                )
            )
        return rows.reshape(-1, 16, 2, 9).transpose(2, 3).flatten(1)


class FastEncoder(nn.Module):
    """Small features for CPUs: plain layers over the lidar, one network shared by all obstacles.

    Everything is scaled to about 1 first, and obstacles are described by where they are and how
    they move relative to the drone. They are pooled by maximum and mean, so that their order does
    not matter, and those out of sight take no part.
    """

    width = 128
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lidar = nn.Sequential(
            nn.Linear(144, 128), nn.LeakyReLU(inplace=True), nn.Linear(128, 64)
        )
        self.obstacle = nn.Sequential(
            nn.Linear(11, 32), nn.LeakyReLU(inplace=True), nn.Linear(32, 32)
        )
        self.trunk = nn.Sequential(*_layer(64 + 9 + 64, 128), *_layer(128, 128))
        scale = torch.tensor([1.0, 1.0, 1.0, 0.05, 0.5, 0.5, 0.5, 0.5])
        self.register_buffer("scale", scale, persistent=False)

    def prepare(self, obs: Observation) -> Tensor:
        """Scale observations [N, ...] to about 1, [N, 144 + 9 + 5 x 11 + 5]."""
        state = obs["state"].reshape(-1, 8)
        rows, seen = describe_obstacles(obs["dynamic_obstacle"].reshape(-1, 5, 10), state)
        return torch.cat(
            (
                obs["lidar"].reshape(-1, 144) * (1.0 / LIDAR_RANGE_M),
                state * self.scale,
                state[:, 3:4].clamp(max=4.0) * 0.25,  # near the goal the distance matters more
                rows.flatten(1),
                seen.flatten(1),
            ),
            -1,
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Encode prepared rows as [N, 128]."""
        lidar = self.lidar(rows[:, :144])
        each = self.obstacle(rows[:, 153:208].reshape(-1, 11)).view(-1, 5, 32)
        each = each * rows[:, 208:, None]
        if torch.is_grad_enabled():
            most: Tensor = _MaxPool.apply(each)  # type: ignore[no-untyped-call]
        else:  # exporters know it by this name
            most = each.amax(1)
        pooled = (F.leaky_relu(most), each.mean(1))
        joined = torch.cat((F.leaky_relu(lidar), rows[:, 144:153], *pooled), -1)
        features: Tensor = self.trunk(joined)
        return features


class _MaxPool(torch.autograd.Function):
    """The largest along the second axis; of equal ones, each gets the gradient.

    `max` looks for their places, too, and scatters gradients there: it takes twice the time.
    """

    @staticmethod
    def forward(ctx: Any, each: Tensor) -> Tensor:
        most = each.amax(1)
        ctx.save_for_backward(each, most)
        return most

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        each, most = ctx.saved_tensors
        share: Tensor = gradient.unsqueeze(1) * (each == most.unsqueeze(1))
        return share


def describe_obstacles(obstacles: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Turn observed obstacles into places and motions relative to the drone.

    Args:
        obstacles: [N, 5, 10] as observed; all zero where out of sight.
        state: [N, 8] as observed; the last three are the drone's velocity.

    Returns:
        Rows [N, 5, 11]: position (3) and relative velocity (3) scaled to about 1, closeness, rate
        of closing, time to the closest approach, width and height. And which are in sight,
        [N, 5, 1].
    """
    toward, distance = obstacles[..., :2], obstacles[..., 3:4]
    flat = toward * (distance / toward.norm(dim=-1, keepdim=True).clamp(min=1e-6))
    place = torch.cat((flat, obstacles[..., 4:5]), -1)
    motion = obstacles[..., 5:8] - state[:, None, 5:8]
    seen = (obstacles[..., :5] != 0.0).any(-1, keepdim=True).to(obstacles.dtype)
    closing = (flat * motion[..., :2]).sum(-1, keepdim=True)
    speed = motion[..., :2].square().sum(-1, keepdim=True).clamp(min=0.01)
    rows = torch.cat(
        (
            place * (1.0 / LIDAR_RANGE_M),
            motion * 0.4,
            1.0 - distance * (1.0 / LIDAR_RANGE_M),
            closing * 0.2,
            (-closing / speed).clamp(-4.0, 4.0) * 0.25,
            obstacles[..., 8:] * obstacles.new_tensor((1.0 / 3.0, 1.0)),
        ),
        -1,
    )
    return rows, seen


def _layer(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs), nn.LeakyReLU(inplace=True), nn.LayerNorm(outputs)


def initialise(module: nn.Module, generator: torch.Generator, *, orthogonal: bool) -> None:
    """Fill the parameters from one generator, whatever they held: the global one is not used.

    Args:
        module: What to fill; may have been built without memory.
        generator: Where the randomness comes from.
        orthogonal: Orthogonal weights of gain sqrt(2) and no bias; otherwise PyTorch's default.
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
