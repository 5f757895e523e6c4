"""The shield in plain torch: all candidates, all steps, all points. Slow, obvious, any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from penstock.nav.shield.shield import ShieldSettings

LATE_S = 2.0
COLLISION_COST = 10.0
DEVIATION_COST = 0.3
DEPTH_COST = 20.0
_CHUNK = 128  # drones at once: 98 velocities x 149 points each


def choose(
    velocity: Tensor,
    lidar: Tensor,
    obstacles: Tensor,
    current: Tensor,
    height: Tensor | None,
    tables: Mapping[str, Tensor],
    settings: ShieldSettings,
) -> Tensor:
    """Return the number of the cheapest velocity, [N]: 0 for the wanted one, k + 1 for the table's.

    Args:
        velocity: [N, 3] wanted.
        lidar: [N, beams] as observed: range minus distance.
        obstacles: [N, M, 10] as observed.
        current: [N, 3].
        height: [N], or None.
        tables: candidates [K, 3], beams [beams, 3] and shares [steps, 2].
        settings: Radii and margins.
    """
    parts = [
        _choose(
            velocity[rows],
            lidar[rows],
            obstacles[rows],
            current[rows],
            None if height is None else height[rows],
            tables,
            settings,
        )
        for start in range(0, len(velocity), _CHUNK)
        if (rows := slice(start, start + _CHUNK))
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=velocity.device)


def _choose(
    velocity: Tensor,
    lidar: Tensor,
    obstacles: Tensor,
    current: Tensor,
    height: Tensor | None,
    tables: Mapping[str, Tensor],
    settings: ShieldSettings,
) -> Tensor:
    table, shares = tables["candidates"], tables["shares"]
    count = len(velocity)
    wanted = torch.cat((velocity[:, None], table.expand(count, *table.shape)), 1)  # [N, C, 3]

    points = (settings.lidar_range_m - lidar)[..., None] * tables["beams"]
    hit = lidar > 0.0
    keep_static = settings.radius_m + settings.static_margin_m

    place, moving, half, tall, seen = read_obstacles(obstacles)
    keep = settings.radius_m + settings.dynamic_margin_m

    first = torch.full(wanted.shape[:2], LATE_S, dtype=wanted.dtype, device=wanted.device)
    deepest = torch.zeros_like(first)
    for step in range(len(shares) - 1, -1, -1):  # backwards, so that the earliest stays
        time = (step + 1) * settings.step_s
        at = shares[step, 0] * wanted + shares[step, 1] * current[:, None]
        gap = at[:, :, None] - points[:, None]
        gap[..., 2].clamp_(min=0.0)  # boxes stand on the ground: below a hit there is no way
        away = _squares(gap).sqrt().masked_fill_(~hit[:, None], torch.inf)
        inside = (keep_static - away.amin(-1)).clamp_(min=0.0)

        gap = at[:, :, None] - (place + time * moving)[:, None]
        flat = gap[..., 0] * gap[..., 0] + gap[..., 1] * gap[..., 1]
        level = tall[:, None] | (gap[..., 2].abs() < 0.5 + keep)
        depth = ((half + keep)[:, None] - flat.sqrt()) * (level & seen[:, None])
        inside = torch.maximum(inside, torch.nn.functional.pad(depth, (0, 1)).amax(-1))

        if height is not None:
            level_z = height[:, None] + at[..., 2]
            floor = settings.floor_m + settings.static_margin_m
            ceiling = settings.ceiling_m - settings.static_margin_m
            inside = torch.maximum(inside, torch.maximum(floor - level_z, level_z - ceiling))
        first = torch.where(inside > 0.0, time, first)
        deepest = torch.maximum(deepest, inside)
    change = wanted - velocity[:, None]
    cost = COLLISION_COST * (LATE_S - first) + DEVIATION_COST * _squares(change).sqrt()
    return (cost + DEPTH_COST * deepest).argmin(1)


def _squares(vector: Tensor) -> Tensor:
    """Squared length, added in the order of the compiled one."""
    x, y, z = vector.unbind(-1)
    return x * x + y * y + z * z


def read_obstacles(obstacles: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Turn observed obstacles [N, M, 10] into what the shield looks at.

    Returns:
        Places and velocities [N, M, 3]; half widths, whether they are cylinders from floor to
        ceiling, and whether they are in sight, [N, M] each.
    """
    x, y, distance = obstacles[..., 0], obstacles[..., 1], obstacles[..., 3]
    length = (x * x + y * y).sqrt().clamp(min=1e-9)
    scale = distance / length
    place = torch.stack((x * scale, y * scale, obstacles[..., 4]), -1)
    half = (obstacles[..., 8] + 1.0) * 0.125
    tall = obstacles[..., 9] == 0.0
    seen = (obstacles[..., :5] != 0.0).any(-1)
    return place, obstacles[..., 5:8], half, tall, seen
