"""From frames that were drawn to tensors: every key, the next frames, n steps, the nesting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from penstock.errors import UsageError
from penstock.replay.episodes.frame_priority import FramePriorities
from penstock.replay.episodes.sampling import Ahead, Draw, discounted, look_ahead
from penstock.replay.episodes.schema import KeyPath, known, nested, show
from penstock.replay.episodes.settings import Settings
from penstock.replay.episodes.store import EpisodeStore

Ints = NDArray[np.int64]
Leaves = list[tuple[KeyPath, torch.Tensor]]


def check_free(settings: Settings, made: KeyPath) -> None:
    """Refuse to put something into a batch under a name that is one of its keys.

    Raises:
        UsageError: It is.
    """
    if any(path[0] == made[0] for path in settings.paths):
        raise UsageError(f"the key {show(made)} of the episodes is in the way of that of a batch")


def check_sample(
    settings: Settings, sequence: int | None, pad: bool, n_step: int, gamma: float, beta: float
) -> None:
    """Refuse arguments of `DictReplayBuffer.sample` that make no sense.

    Raises:
        UsageError: One does not.
    """
    if not 0 <= gamma <= 1:
        raise UsageError(f"gamma is {gamma}; give a number from 0 to 1")
    if not 0 <= beta < math.inf:
        raise UsageError(f"beta is {beta}; give a number from 0, usually up to 1")
    if pad and sequence is None:
        raise UsageError("pad=True is about windows; give their length as sequence")
    if pad:
        check_free(settings, ("mask",))
    if n_step > 1:
        check_free(settings, ("discount",))


def check_n_step(store: EpisodeStore, reward_path: KeyPath, done_path: KeyPath) -> tuple[int, int]:
    """Return the numbers of the keys that n steps need.

    Raises:
        UsageError: There are no such keys, or they are no reward and no done.
    """
    paths = [column.field.path for column in store.columns]
    reward = known(reward_path, paths, "reward_key")
    done = known(done_path, paths, "done_key")
    reward_field, done_field = store.columns[reward].field, store.columns[done].field
    if math.prod(done_field.shape) != 1:
        raise UsageError(f"done_key is {done_field}; it must be one value per frame")
    if reward_field.dtype.startswith("complex"):
        raise UsageError(f"reward_key is {reward_field}; it must be a real number")
    return reward, done


class Reader:
    """Reads frames of a store, every key of them.

    Args:
        store: Holds the episodes; it must not change meanwhile.
        settings: Say which keys have a next frame.
        rows: Of the frames' episodes.
        steps: Of the frames.
    """

    def __init__(self, store: EpisodeStore, settings: Settings, rows: Ints, steps: Ints) -> None:
        self._store = store
        self._settings = settings
        self._shape = rows.shape
        rows = rows.reshape(-1)
        self._steps = steps.reshape(-1)
        self._records = store.addresses(rows)
        self._lengths = store.index.lengths[rows]
        self._ahead: Ahead | None = None
        self._made: Leaves = []

    def look_ahead(self, count: int, gamma: float, keys: tuple[int, int]) -> None:
        """Sum the rewards of n steps; what is next is then n steps ahead.

        Args:
            count: How many steps.
            gamma: Discount per step.
            keys: What `check_n_step` returned.
        """
        reward, done = keys
        steps, lengths = self._steps, self._lengths
        every = np.minimum(steps[:, np.newaxis] + np.arange(count), lengths[:, np.newaxis] - 1)
        dones = self._several(done, every)
        ahead = look_ahead(steps, lengths, (dones != 0).numpy().reshape(-1, count))
        rewards = self._several(reward, every)
        summed = torch.from_numpy(discounted(rewards.double().numpy(), ahead.alive, gamma))
        kind = rewards.dtype if rewards.is_floating_point() else torch.float32
        field = self._store.columns[reward].field
        factor = np.where(ahead.ended, 0.0, gamma**ahead.taken).astype(np.float32)
        self._made = [
            (field.path, summed.to(kind).view(*self._shape, *field.shape)),
            (("discount",), torch.from_numpy(factor.reshape(self._shape))),
        ]
        self._ahead = ahead

    def read(self) -> Leaves:
        """Gather every key, and the next frames."""
        leaves = list(self._made)
        made = {path for path, _ in leaves}
        store, shape = self._store, self._shape
        after = self._after()
        if after is not None:
            leaves.append((("next", "valid"), torch.from_numpy(after.valid.reshape(shape))))
            both_steps = np.concatenate([self._steps, after.steps])
            both_lengths = np.tile(self._lengths, 2)
        for number, column in enumerate(store.columns):
            path, records = column.field.path, self._records[number]
            if after is not None and path in self._settings.next_paths:
                # One call for both: they lie behind one another, and nothing is in both.
                data = store.gather(number, np.tile(records, 2), both_lengths, both_steps)
                here, there = data[: len(records)], data[len(records) :]
                leaves.append((("next", *path), column.field.tensor(there, shape)))
            elif path not in made:
                here = store.gather(number, records, self._lengths, self._steps)
            if path not in made:
                leaves.append((path, column.field.tensor(here, shape)))
        return leaves

    def _after(self) -> Ahead | None:
        if self._ahead is not None or not self._settings.next_paths:
            return self._ahead if self._settings.next_paths else None
        nothing_done = np.zeros((len(self._steps), 1), np.bool_)
        return look_ahead(self._steps, self._lengths, nothing_done)

    def _several(self, number: int, steps: Ints) -> torch.Tensor:
        """Gather several frames [n, count] of one key for each frame."""
        count = steps.shape[1]
        data = self._store.gather(
            number,
            np.repeat(self._records[number], count),
            np.repeat(self._lengths, count),
            steps.reshape(-1),
        )
        return self._store.columns[number].field.tensor(data, steps.shape)


def finished(
    leaves: Leaves, shape: tuple[int, ...], device: torch.device, as_tensordict: bool
) -> Any:
    """Bring the tensors of a batch to the device, and nest them."""
    if device.type == "cuda":  # through torch's own pinned memory: it knows when that is free
        leaves = [(path, t.pin_memory().to(device, non_blocking=True)) for path, t in leaves]
    elif device.type != "cpu":
        leaves = [(path, tensor.to(device)) for path, tensor in leaves]
    batch = nested(leaves)
    if as_tensordict:
        from tensordict import TensorDict

        return TensorDict(batch, batch_size=list(shape))
    return batch


def with_priorities(
    store: EpisodeStore, priorities: FramePriorities, draw: Draw, beta: float
) -> Leaves:
    """Return the ids of a batch's frames, -1 for padding, and the weights of its draws."""
    first = draw.rows.reshape(len(draw.drawn), -1)[:, 0]
    weight = priorities.weights(store.leaves[first] + draw.drawn, beta).astype(np.float32)
    ids = np.where(draw.inside, store.index.starts[draw.rows] + draw.steps, -1)
    spread = np.repeat(weight, ids.size // len(weight)).reshape(ids.shape)
    return [(("index",), torch.from_numpy(ids)), (("weight",), torch.from_numpy(spread))]


def frame_ids(indices: ArrayLike) -> Ints:
    """Return ids of frames as an array.

    Raises:
        UsageError: They are no whole numbers.
    """
    given = indices.cpu() if isinstance(indices, torch.Tensor) else indices
    array = np.asarray(given)
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"frames are given as {array.dtype}; use their ids")
    return array.astype(np.int64, copy=False)
