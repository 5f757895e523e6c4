"""From frames that were drawn to tensors: every key, the next frames, n steps, the nesting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.replay.sampling import Ahead, discounted, look_ahead
from penstock.replay.schema import KeyPath, known, nested, show
from penstock.replay.settings import Settings
from penstock.replay.store import EpisodeStore

Ints = NDArray[np.int64]
Leaves = list[tuple[KeyPath, torch.Tensor]]


def check_free(settings: Settings, made: KeyPath) -> None:
    """Refuse to put something into a batch under a name that is one of its keys.

    Raises:
        UsageError: It is.
    """
    if any(path[0] == made[0] for path in settings.paths):
        raise UsageError(f"the key {show(made)} of the episodes is in the way of that of a batch")


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


def n_ahead(
    store: EpisodeStore, rows: Ints, steps: Ints, count: int, gamma: float, keys: tuple[int, int]
) -> tuple[Ahead, Leaves]:
    """Look n steps ahead; return what is there, the summed reward and the discount."""
    reward, done = keys
    reward_field, done_field = store.columns[reward].field, store.columns[done].field
    lengths = store.index.lengths[rows]
    every = np.minimum(steps[:, np.newaxis] + np.arange(count), lengths[:, np.newaxis] - 1)
    owners, flat = np.repeat(rows, count), every.reshape(-1)
    dones = done_field.tensor(store.gather(done, owners, flat))
    ahead = look_ahead(steps, lengths, (dones != 0).numpy().reshape(-1, count))
    rewards = reward_field.tensor(store.gather(reward, owners, flat))
    values = rewards.double().numpy().reshape(-1, count, *reward_field.shape)
    summed = torch.from_numpy(discounted(values, ahead.alive, gamma))
    kind = rewards.dtype if rewards.is_floating_point() else torch.float32
    factor = np.where(ahead.ended, 0.0, gamma**ahead.taken).astype(np.float32)
    made = [(reward_field.path, summed.to(kind)), (("discount",), torch.from_numpy(factor))]
    return ahead, made


def read(
    store: EpisodeStore,
    settings: Settings,
    rows: Ints,
    steps: Ints,
    ahead: Ahead | None = None,
    made: Leaves | None = None,
) -> Leaves:
    """Gather every key of some frames, and the next frames.

    Args:
        store: Holds the episodes.
        settings: Say which keys have a next frame.
        rows: Of the frames' episodes.
        steps: Of the frames.
        ahead: What is next; by default one step ahead.
        made: Keys that are there already.
    """
    leaves = list(made or ())
    skipped = {path for path, _ in leaves}
    if settings.next_paths:
        if ahead is None:
            nothing_done = np.zeros((len(rows), 1), np.bool_)
            ahead = look_ahead(steps, store.index.lengths[rows], nothing_done)
        both_rows, both_steps = np.tile(rows, 2), np.concatenate([steps, ahead.steps])
        leaves.append((("next", "valid"), torch.from_numpy(ahead.valid)))
    for number, column in enumerate(store.columns):
        path = column.field.path
        if path in settings.next_paths:
            # One call for both: they lie behind one another, and nothing is in both.
            frames = column.field.tensor(store.gather(number, both_rows, both_steps))
            leaves.append((("next", *path), frames[len(rows) :]))
            if path not in skipped:
                leaves.append((path, frames[: len(rows)]))
        elif path not in skipped:
            leaves.append((path, column.field.tensor(store.gather(number, rows, steps))))
    return leaves


def finished(
    leaves: Leaves, shape: tuple[int, ...], device: torch.device, as_tensordict: bool
) -> Any:
    """Shape the tensors of a batch, bring them to the device, and nest them."""
    ready: Leaves = []
    for path, tensor in leaves:
        shaped = tensor.view(*shape, *tensor.shape[1:])
        if device.type == "cuda":  # through torch's own pinned memory: it knows when that is free
            shaped = shaped.pin_memory().to(device, non_blocking=True)
        elif device.type != "cpu":
            shaped = shaped.to(device)
        ready.append((path, shaped))
    batch = nested(ready)
    if as_tensordict:
        from tensordict import TensorDict

        return TensorDict(batch, batch_size=list(shape))
    return batch
