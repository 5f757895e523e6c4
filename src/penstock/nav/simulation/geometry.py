"""Lidar against boxes and ground, in torch: every beam against every box that may be reached."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nav.simulation.world import GROUND_M

_TINY = 1e-9  # stands for a component of 0, so that nothing is divided by it
_FLAT = 1e-7  # likewise for the slope of a level beam


def cast(
    origin: Tensor,
    heading: Tensor,
    boxes: Tensor,
    around: int,
    elevations: Sequence[float],
    range_m: float,
) -> Tensor:
    """Return how far each beam reaches.

    All is computed in the horizontal distance t of a point on the beam: its height is then
    z + t * slope, and its distance t / cos(elevation). A beam that begins in a box ends at once.

    Args:
        origin: Where the lidars are, [n, 3].
        heading: Cosine and sine of their yaw, [n, 2]; beam 0 is straight ahead, then
            counter-clockwise.
        boxes: Candidates of each: x0, x1, y0, y1, height, [n, k, 5].
        around: Beams around.
        elevations: In radians.
        range_m: Distances are cut here.

    Returns:
        Distances, [n, around, elevations].
    """
    azimuth = torch.arange(around, dtype=torch.float64) * (2 * torch.pi / around)
    cosine, sine = azimuth.cos().to(origin), azimuth.sin().to(origin)
    x = _not_zero(heading[:, :1] * cosine - heading[:, 1:] * sine)[:, None, :]
    y = _not_zero(heading[:, 1:] * cosine + heading[:, :1] * sine)[:, None, :]
    slope, stretch = slopes(elevations)
    slope, stretch = slope.to(origin), stretch.to(origin)

    px, py, pz = origin[:, 0, None, None], origin[:, 1, None, None], origin[:, 2, None, None]
    a, b = (boxes[:, :, 0:1] - px) / x, (boxes[:, :, 1:2] - px) / x
    c, d = (boxes[:, :, 2:3] - py) / y, (boxes[:, :, 3:4] - py) / y
    enter = torch.maximum(torch.minimum(a, b), torch.minimum(c, d)).clamp(min=0)
    leave = torch.minimum(torch.maximum(a, b), torch.maximum(c, d))
    low, top = -pz / slope, (boxes[:, :, 4:5] - pz) / slope
    first, last = torch.minimum(low, top)[:, :, None, :], torch.maximum(low, top)[:, :, None, :]
    begin = torch.maximum(enter[..., None], first)
    hit = begin <= torch.minimum(leave[..., None], last)
    inf = torch.full_like(begin, torch.inf)
    reached = torch.where(hit, begin, inf)
    if reached.shape[1]:
        nearest = reached.amin(1)
    else:
        nearest = reached.new_full((origin.shape[0], around, slope.numel()), torch.inf)

    ground = low  # where the beam meets z = 0
    there = ground >= 0
    there = there & ((px + ground * x.transpose(1, 2)).abs() <= GROUND_M)
    there = there & ((py + ground * y.transpose(1, 2)).abs() <= GROUND_M)
    nearest = torch.where(there, torch.minimum(nearest, ground), nearest)
    return (nearest * stretch).clamp(max=range_m)


def slopes(elevations: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the slope of each elevation, never 0, and 1 / cosine."""
    angle = torch.as_tensor(elevations, dtype=torch.float64)
    slope = angle.tan()
    slope = torch.where(slope.abs() < _FLAT, torch.full_like(slope, _FLAT), slope)
    return slope, 1 / angle.cos()


def to_goal_frame(vector: Tensor, axis: Tensor) -> Tensor:
    """Rotate vectors [n, ..., 3] of the world into the frames whose x axes are `axis`, [n, 2]."""
    shape = [axis.shape[0]] + [1] * (vector.ndim - 2)
    c, s = axis[:, 0].view(shape), axis[:, 1].view(shape)
    x, y, z = vector.unbind(-1)
    return torch.stack([c * x + s * y, c * y - s * x, z], -1)


def to_world(vector: Tensor, axis: Tensor) -> Tensor:
    """Undo `to_goal_frame`."""
    return to_goal_frame(vector, axis * axis.new_tensor([1.0, -1.0]))


def _not_zero(value: Tensor) -> Tensor:
    return torch.where(value.abs() > _TINY, value, torch.full_like(value, _TINY))
