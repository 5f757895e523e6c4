"""What replay and rollouts are measured on: flights, depth pictures, and the proposal's buffer.

All of it is synthetic and seeded. The flights follow the task of NavRL: drones among columns and
moving obstacles, 36 x 4 rays of 4 m, observations as the proposal names them.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from penstock.replay.images import compress_image_seq, decompress_image_seq

Floats = NDArray[Any]

_SIZE_M, _COLUMNS, _MOVING, _RANGE_M, _STEP_S = 20.0, 350, 80, 4.0, 0.016
_RAYS, _LAYERS = 36, 4
_MISS_M = 1e6
_NEAR = 12  # columns looked at per drone: more are never within reach at this density
_SIDE = 84


def flights(envs: int = 1024, steps: int = 32, noise_m: float = 0.0, seed: int = 0) -> TensorDict:
    """Fly drones through a forest of columns and return what a collector would, [envs, steps]."""
    rng = np.random.default_rng(seed)
    columns = rng.uniform(-_SIZE_M, _SIZE_M, (_COLUMNS, 2))
    radius = rng.uniform(0.2, 0.6, _COLUMNS)
    moving, drift = rng.uniform(-_SIZE_M, _SIZE_M, (_MOVING, 2)), rng.normal(0, 1, (_MOVING, 2))
    place, goal = rng.uniform(-_SIZE_M, _SIZE_M, (2, envs, 2))
    speed = rng.normal(0, 1, (envs, 2))
    height = 1 + rng.normal(0, 0.2, envs)
    parts: dict[str, list[Floats]] = {}
    for _ in range(steps):
        action = rng.beta(2, 2, (envs, 3))
        gap = goal - place
        distance = np.linalg.norm(gap, axis=1, keepdims=True)
        lidar = _scan(place, height, columns, radius)
        if noise_m:
            lidar = np.where(lidar > 0, lidar + rng.normal(0, noise_m, lidar.shape), 0)
        zero = np.zeros((envs, 1))
        state = [gap / distance, zero, distance, height[:, None] - 1, speed, zero]
        step = {
            "lidar": lidar[:, None],
            "state": np.concatenate(state, axis=1),
            "direction": gap / distance,
            "dynamic_obstacle": _nearest_moving(place, moving, drift),
            "action": action,
            "reward": speed.sum(axis=1, keepdims=True) * 0.1 + 1,
            "done": rng.random((envs, 1)) < 0.001,
        }
        for key, value in step.items():
            kept = value if value.dtype == bool else value.astype(np.float32)
            parts.setdefault(key, []).append(kept)
        speed = 0.9 * speed + 0.1 * (action[:, :2] * 4 - 2)
        place, moving = place + speed * _STEP_S, moving + drift * _STEP_S
    data = {key: torch.from_numpy(np.stack(values, axis=1)) for key, values in parts.items()}
    seen = {key: data.pop(key) for key in ("lidar", "state", "direction", "dynamic_obstacle")}
    nested = {
        "agents": {"observation": seen, "action": data["action"]},
        "reward": data["reward"],
        "done": data["done"],
    }
    return TensorDict(nested, batch_size=[envs, steps])


def _scan(place: Floats, height: Floats, columns: Floats, radius: Floats) -> Floats:
    """Return 4 m minus the distance of what each ray meets, 0 for nothing."""
    offset = columns[None] - place[:, None]
    near = np.argpartition((offset**2).sum(axis=2), _NEAR, axis=1)[:, :_NEAR]
    offset = np.take_along_axis(offset, near[:, :, None], axis=1)
    angle = np.arange(_RAYS) * 2 * np.pi / _RAYS
    along = np.einsum("enc,cr->enr", offset, np.stack([np.cos(angle), np.sin(angle)]))
    beside = (offset**2).sum(axis=2)[:, :, None] - along**2
    depth = radius[near][:, :, None] ** 2 - beside
    reach = np.where((depth > 0) & (along > 0), along - np.sqrt(np.maximum(depth, 0)), _MISS_M)
    flat = reach.clip(0).min(axis=1)[:, :, None]
    tilt = np.deg2rad(np.arange(-10, 30, 10))[:_LAYERS]
    slant = flat / np.cos(tilt)
    top = height[:, None, None] + slant * np.sin(tilt)
    seen = (slant < _RANGE_M) & (top >= 0) & (top <= 3)
    return np.where(seen, _RANGE_M - np.where(seen, slant, 0), 0)


def _nearest_moving(place: Floats, moving: Floats, drift: Floats) -> Floats:
    """Return the five nearest moving obstacles, ten numbers each, zeros beyond 5 m."""
    offset = moving[None] - place[:, None]
    distance = np.linalg.norm(offset, axis=2)
    near = np.argsort(distance, axis=1)[:, :5]
    offset = np.take_along_axis(offset, near[:, :, None], axis=1)
    distance = np.take_along_axis(distance, near, axis=1)[:, :, None]
    zero = np.zeros_like(distance)
    row = [offset / distance, zero, distance, zero, drift[near], zero, zero + 0.5, zero]
    return np.where(distance < 5, np.concatenate(row, axis=2), 0)


def depth_pictures(count: int, seed: int = 0, noise: float = 0.0) -> NDArray[np.uint8]:
    """Draw an episode of depth pictures: a floor that rises, boxes that pass by."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:_SIDE, 0:_SIDE]
    low = [0, 10, 5, 10, 30, -1]
    boxes = rng.uniform(low, [_SIDE, 60, 25, 40, 200, 1], (6, 6))
    out = np.empty((count, _SIDE, _SIDE), np.uint8)
    for t in range(count):
        depth = 255 - np.clip((rows - 30) * 3.5, 0, 200) + 4 * np.sin(columns / 20 + t / 30)
        for x, y, width, tall, near, pace in boxes:
            centre = (x + pace * t) % _SIDE
            inside = (abs(columns - centre) < width / 2) & (abs(rows - y) < tall / 2)
            depth = np.where(inside & (near < depth), near + 0.2 * (columns - centre), depth)
        out[t] = np.clip(depth + rng.normal(0, noise, depth.shape) if noise else depth, 0, 255)
    return out


def transitions(episodes: int, length: int, noise: float = 0.0) -> TensorDict:
    """Return episodes of depth pictures with five small keys, one behind the other."""
    rng = np.random.default_rng(1)
    count = episodes * length
    pictures = [depth_pictures(length, seed, noise) for seed in range(episodes)]
    return TensorDict(
        {
            "pixels": torch.from_numpy(np.concatenate(pictures)),
            "action": torch.from_numpy(rng.normal(size=(count, 4)).astype(np.float32)),
            "reward": torch.from_numpy(rng.normal(size=(count, 1)).astype(np.float32)),
            "done": torch.from_numpy(np.arange(count) % length == length - 1)[:, None],
            "episode": torch.arange(count) // length,
            "step": torch.arange(count) % length,
        },
        batch_size=[count],
    )


class ProposedBuffer:
    """The replay buffer of the original proposal, as it is written there: per-episode LZ4-9."""

    def __init__(self, image_shape: tuple[int, ...], dtype: Any) -> None:
        self._image_shape, self._dtype = image_shape, dtype
        self._episodes: list[bytes] = []
        self._lengths: list[int] = []
        self._prefix_sum = np.zeros(1, np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed episodes."""
        return sum(map(len, self._episodes))

    def add(self, images: NDArray[Any]) -> None:
        """Compress a whole episode."""
        self._episodes.append(compress_image_seq(images, level=9))
        self._lengths.append(len(images))
        self._prefix_sum = np.append(self._prefix_sum, self._prefix_sum[-1] + len(images))

    def sample(self, indices: NDArray[Any]) -> torch.Tensor:
        """Decompress the episode of every frame, in threads, and keep that frame."""
        with concurrent.futures.ThreadPoolExecutor() as executor:
            return torch.stack(list(executor.map(self.one, indices.tolist())))

    def one(self, index: int) -> torch.Tensor:
        """Decompress the episode of a frame and keep that frame."""
        episode = int(np.searchsorted(self._prefix_sum, index, "right")) - 1
        data, length = self._episodes[episode], self._lengths[episode]
        frames = decompress_image_seq(data, self._image_shape, length, dtype=self._dtype)
        return torch.tensor(frames[index - int(self._prefix_sum[episode])])
