"""Which frames make a batch, and their tensors: windows, n steps ahead, every key, the nesting."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.replay.episodes.schema import Settings, nested
from penstock.replay.episodes.store import EpisodeStore
from penstock.replay.keys import KeyPath, known

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Leaves = list[tuple[KeyPath, torch.Tensor]]


class Draw(NamedTuple):
    """Frames that were drawn, row by row of the batch.

    The first three have the shape [batch] or [batch, sequence]; `drawn` are the steps [batch] that
    were drawn as such, which a window may have been moved back from.
    """

    rows: Ints
    steps: Ints
    inside: Bools
    drawn: Ints


class NStepTarget(NamedTuple):
    """What lies n steps ahead of frames, each array of the frames' shape."""

    steps: Ints
    valid: Bools
    taken: Ints
    ended: Bools
    alive: Bools
    """[..., n]: which of the n steps count."""


def draw(
    store: EpisodeStore, count: int, rng: np.random.Generator, sequence: int | None, pad: bool
) -> Draw:
    """Draw frames or windows, all alike or by their priorities, and note that they were used."""
    index = store.index
    least = sequence if sequence is not None and not pad else None  # frames that must follow
    if least is not None and least > (longest := int(index.lengths.max())):
        raise UsageError(
            f"sequence={least} is longer than every episode (the longest has {longest} "
            "frames); use a shorter one, or pad=True"
        )
    if store.priorities is not None:
        good = None if least is None else index.lengths >= least
        rows, drawn = store.priorities.draw(count, rng, store.priority_offsets, good)
    elif least is not None:
        sums = np.concatenate([[0], np.cumsum(np.maximum(index.lengths - least + 1, 0))])
        at = rng.integers(0, sums[-1], count)
        rows = sums.searchsorted(at, side="right") - 1
        drawn = at - sums[rows]
    else:
        rows, drawn = index.find(rng.integers(0, index.frames, count))
    store.touch(rows)
    if sequence is None:
        return Draw(rows, drawn, np.ones(count, np.bool_), drawn)
    lengths = index.lengths[rows]
    first = drawn if least is None else np.minimum(drawn, lengths - least)
    steps = first[:, np.newaxis] + np.arange(sequence)
    last = lengths[:, np.newaxis] - 1
    rows = np.broadcast_to(rows[:, np.newaxis], steps.shape)
    return Draw(rows, np.minimum(steps, last), steps <= last, drawn)


def look_ahead(steps: Ints, lengths: Ints, done: Bools) -> NStepTarget:
    """Return what lies n steps ahead of each frame, or nearer where its episode ends.

    `done` [..., n] says whether the episode is done after each of the n steps.
    """
    count = done.shape[-1]
    inside = steps[..., np.newaxis] + np.arange(count) < lengths[..., np.newaxis]
    before = np.zeros(done.shape, np.bool_)
    np.logical_or.accumulate(done[..., :-1], axis=-1, out=before[..., 1:])
    alive = inside & ~before
    taken = alive.sum(axis=-1)
    ahead = steps + taken
    ended = np.logical_or.reduce(alive & done, axis=-1)
    return NStepTarget(np.minimum(ahead, lengths - 1), ahead < lengths, taken, ended, alive)


def discounted(rewards: Floats, alive: Bools, gamma: float) -> Floats:
    """Sum rewards [..., n, *shape] over the steps that count, the k-th times gamma ** k."""
    factors = alive * gamma ** np.arange(alive.shape[-1])
    extra = rewards.ndim - alive.ndim
    # Not a product with 0: what lies beyond the end of an episode may be infinite.
    kept = np.where(alive.reshape(*alive.shape, *[1] * extra), rewards, 0.0)
    total: Floats = (kept * factors.reshape(*factors.shape, *[1] * extra)).sum(axis=alive.ndim - 1)
    return total


def n_step_keys(store: EpisodeStore, reward_path: KeyPath, done_path: KeyPath) -> tuple[int, int]:
    """Return the numbers of the keys that n steps need."""
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
    """Reads frames of a store, every key of them."""

    def __init__(self, store: EpisodeStore, settings: Settings, rows: Ints, steps: Ints) -> None:
        self._store = store
        self._settings = settings
        self._shape = rows.shape
        rows = rows.reshape(-1)
        self._steps = steps.reshape(-1)
        self._records = store.addresses(rows)
        self._lengths = store.index.lengths[rows]
        self._ahead: NStepTarget | None = None
        self._made: Leaves = []

    def look_ahead(self, count: int, gamma: float, keys: tuple[int, int]) -> None:
        """Sum the rewards of n steps; what is next is then n steps ahead."""
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
        after = self._after() if self._settings.next_paths else None
        if after is not None:
            leaves.append((("next", "valid"), torch.from_numpy(after.valid.reshape(shape))))
            both_steps = np.concatenate([self._steps, after.steps])
        for number, column in enumerate(store.columns):
            path, records = column.field.path, self._records[number]
            if after is not None and path in self._settings.next_paths:
                # One call for both: they lie behind one another, and nothing is in both.
                data = store.gather(number, np.tile(records, 2), both_steps)
                here, there = data[: len(records)], data[len(records) :]
                leaves.append((("next", *path), column.field.tensor(there, shape)))
            elif path not in made:
                here = store.gather(number, records, self._steps)
            if path not in made:
                leaves.append((path, column.field.tensor(here, shape)))
        return leaves

    def _after(self) -> NStepTarget:
        nothing_done = np.zeros((len(self._steps), 1), np.bool_)
        return self._ahead or look_ahead(self._steps, self._lengths, nothing_done)

    def _several(self, number: int, steps: Ints) -> torch.Tensor:
        """Gather several frames [n, count] of one key for each frame."""
        records = np.repeat(self._records[number], steps.shape[1])
        data = self._store.gather(number, records, steps.reshape(-1))
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


def with_priorities(store: EpisodeStore, drawn: Draw, beta: float) -> Leaves:
    """Return the ids of a batch's frames, -1 for padding, and the weights of its draws."""
    assert store.priorities is not None
    first = drawn.rows.reshape(len(drawn.drawn), -1)[:, 0]
    entries = store.priority_offsets[first] + drawn.drawn
    weight = store.priorities.weights(entries, beta).astype(np.float32)
    ids = np.where(drawn.inside, store.index.starts[drawn.rows] + drawn.steps, -1)
    spread = np.repeat(weight, ids.size // len(weight)).reshape(ids.shape)
    return [(("index",), torch.from_numpy(ids)), (("weight",), torch.from_numpy(spread))]
