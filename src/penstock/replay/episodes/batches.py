"""Which frames make a batch, and their tensors: windows, n steps ahead, every key, the nesting."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.replay.episodes.schema import nested
from penstock.replay.episodes.store import Addresses, EpisodeStore
from penstock.replay.keys import KeyPath, known
from penstock.replay.priority import importance_weights

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
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


class NStep(NamedTuple):
    """How far to sum rewards: so many steps, discounted; the numbers of the keys."""

    steps: int
    gamma: float
    reward: int
    done: int

    @classmethod
    def check(
        cls, store: EpisodeStore, count: int, gamma: float, reward_path: KeyPath, done_path: KeyPath
    ) -> NStep:
        """Find the keys, and refuse those that cannot be summed."""
        paths = [column.field.path for column in store.columns]
        reward, done = known(reward_path, paths, "reward_key"), known(done_path, paths, "done_key")
        reward_field, done_field = store.columns[reward].field, store.columns[done].field
        if math.prod(done_field.shape) != 1:
            raise UsageError(f"done_key is {done_field}; it must be one value per frame")
        if reward_field.dtype.startswith("complex"):
            raise UsageError(f"reward_key is {reward_field}; it must be a real number")
        return cls(count, gamma, reward, done)


def draw(store: EpisodeStore, count: int, sequence: int | None, pad: bool) -> Draw:
    """Draw frames or windows, all alike or by their priorities, and note that they were used."""
    index, rng = store.index, store.rng
    least = sequence if sequence is not None and not pad else None  # frames that must follow
    if least is not None and least > (longest := int(index.lengths.max())):
        raise UsageError(
            f"sequence={least} is longer than every episode (the longest has {longest} "
            "frames); use a shorter one, or pad=True"
        )
    if store.priorities is not None:
        good = None if least is None else index.lengths >= least
        rows, drawn = store.priorities.draw(count, rng, good)
    elif least is not None:
        sums = np.concatenate([[0], np.cumsum(np.maximum(index.lengths - least + 1, 0))])
        at = rng.integers(0, sums[-1], count)
        rows = sums.searchsorted(at, side="right") - 1
        drawn = at - sums[rows]
    else:
        rows, drawn = index.find(rng.integers(0, index.frames, count))
    store.clock += 1
    store.used[rows] = store.clock
    if sequence is None:
        return Draw(rows, drawn, np.ones(count, np.bool_), drawn)
    lengths = index.lengths[rows]
    first = drawn if least is None else np.minimum(drawn, lengths - least)
    steps = first[:, np.newaxis] + np.arange(sequence)
    last = lengths[:, np.newaxis] - 1
    rows = np.broadcast_to(rows[:, np.newaxis], steps.shape)
    return Draw(rows, np.minimum(steps, last), steps <= last, drawn)


def read(store: EpisodeStore, rows: Ints, steps: Ints, n_step: NStep | None = None) -> Leaves:
    """Gather every key of frames, and the frames after them."""
    shape = rows.shape
    rows, steps = rows.reshape(-1), steps.reshape(-1)
    records, lengths = store.arena.addresses(store.locations[:, rows]), store.index.lengths[rows]
    leaves: Leaves = []
    after = steps + 1
    if n_step is not None:
        leaves, taken = _sum_rewards(store, records, steps, lengths, n_step, shape)
        after = steps + taken
    made = {path for path, _ in leaves}
    following = store.settings.next_paths
    if following:
        leaves.append((("next", "valid"), torch.from_numpy((after < lengths).reshape(shape))))
        after = np.concatenate([steps, np.minimum(after, lengths - 1)])
    for number, column in enumerate(store.columns):
        path, here = column.field.path, records[number]
        if path in following:
            # One call for both: they lie behind one another, and nothing is in both.
            data = store.gather(number, np.tile(here, 2), after)
            leaves.append((("next", *path), column.field.tensor(data[len(here) :], shape)))
        elif path not in made:
            data = store.gather(number, here, steps)
        if path not in made:
            leaves.append((path, column.field.tensor(data[: len(here)], shape)))
    return leaves


def _sum_rewards(
    store: EpisodeStore,
    records: Addresses,
    steps: Ints,
    lengths: Ints,
    n_step: NStep,
    shape: tuple[int, ...],
) -> tuple[Leaves, Ints]:
    """Sum the rewards of n steps, or fewer where the episode ends; return how many were taken."""
    every = steps[:, np.newaxis] + np.arange(n_step.steps)
    inside = every < lengths[:, np.newaxis]
    every = np.minimum(every, lengths[:, np.newaxis] - 1)

    def several(number: int) -> torch.Tensor:
        data = store.gather(number, np.repeat(records[number], n_step.steps), every.reshape(-1))
        return store.columns[number].field.tensor(data, every.shape)

    done = (several(n_step.done) != 0).numpy().reshape(every.shape)
    alive = inside.copy()
    alive[:, 1:] &= ~np.logical_or.accumulate(done[:, :-1], axis=1)
    taken, ended = alive.sum(axis=1), (alive & done).any(axis=1)
    rewards = several(n_step.reward)
    wide = (*every.shape, *[1] * (rewards.ndim - 2))
    # Not a product with 0: what lies beyond the end of an episode may be infinite.
    kept = np.where(alive.reshape(wide), rewards.double().numpy(), 0.0)
    factors = np.broadcast_to(n_step.gamma ** np.arange(n_step.steps), every.shape)
    summed = torch.from_numpy((kept * factors.reshape(wide)).sum(axis=1))
    kind = rewards.dtype if rewards.is_floating_point() else torch.float32
    field = store.columns[n_step.reward].field
    discount = np.where(ended, 0.0, n_step.gamma**taken).astype(np.float32)
    leaves = [
        (field.path, summed.to(kind).view(*shape, *field.shape)),
        (("discount",), torch.from_numpy(discount.reshape(shape))),
    ]
    return leaves, taken


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
    tree = store.priorities.tree
    first = drawn.rows.reshape(len(drawn.drawn), -1)[:, 0]
    entries = store.priorities.offsets[first] + drawn.drawn
    weight = importance_weights(tree.get(entries), tree.min, beta).astype(np.float32)
    ids = np.where(drawn.inside, store.index.starts[drawn.rows] + drawn.steps, -1)
    spread = np.repeat(weight, ids.size // len(weight)).reshape(ids.shape)
    return [(("index",), torch.from_numpy(ids)), (("weight",), torch.from_numpy(spread))]
