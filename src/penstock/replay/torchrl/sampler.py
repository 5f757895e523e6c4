"""PrioritySampler: prioritised replay for TorchRL, over our own sum tree.

TorchRL's PrioritizedSampler needs a compiled extension that must match the version of torch. This
is a subclass of it, because replay buffers ask for one; it replaces all that touches the extension.
"""

from __future__ import annotations

import json
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.extras import needs_torchrl
from penstock.core.files import make_folder
from penstock.core.pack import Item, PackWriter
from penstock.errors import PenstockWarning, UsageError

with needs_torchrl("PrioritySampler"):
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler, PrioritizedSliceSampler
    from torchrl.data.replay_buffers.storages import Storage

from penstock.replay.priority import (
    SumTree,
    as_floats,
    checked_priorities,
    importance_weights,
)
from penstock.replay.segments import open_pack, taking_in

KIND = "replay-sampler"
_FILE = "sampler.pack"
_REDUCTIONS = ("max", "min", "median", "mean")


class EmptyStorage(UsageError, RuntimeError):
    """There is nothing to sample; TorchRL's samplers raise a RuntimeError."""


class PrioritySampler(PrioritizedSampler):  # type: ignore[misc]
    """Draws slots in proportion to (priority + eps) ** alpha.

    New items get the largest priority seen so far. Use it with `TensorDictReplayBuffer`, whose
    `update_tensordict_priority` reads the key named by `priority_key`; the weights that correct the
    bias arrive in each batch as "priority_weight", the largest possible one being 1.

    Args:
        max_capacity: Slots of the storage.
        alpha: 0 draws uniformly, 1 in full proportion.
        beta: How far the weights correct the bias: 0 not at all, 1 in full.
        eps: Added to each priority, so that none is 0.
        dtype: Of the weights; priorities are always kept as float64.
        reduction: How the priorities of a stored trajectory become one: "max", "min", "median" or
            "mean".
        max_priority_within_buffer: New items get the largest priority that is in the buffer now,
            not the largest that was ever seen; after its item was written over, that is 1 until the
            next update, as in TorchRL.
        seed: Of its own random numbers; `buffer.set_rng` takes precedence.

    Example:
        buffer = TensorDictReplayBuffer(
            storage=CompressedStorage(1_000_000),
            sampler=PrioritySampler(1_000_000, alpha=0.7, beta=0.5),
            priority_key="td_error",
            batch_size=256,
        )
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float = 0.7,
        beta: float = 0.5,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        *,
        seed: int | None = None,
    ) -> None:
        if reduction not in _REDUCTIONS:
            raise UsageError(f"reduction is {reduction!r}; use one of {', '.join(_REDUCTIONS)}")
        # Not super().__init__: it would ask for the extension, and complain that it is missing.
        self._max_capacity = max_capacity
        self._alpha, self._beta, self._eps = _checked(alpha, beta, eps)
        self.reduction = reduction
        self.dtype = _weight_dtype(dtype)
        self._max_priority_within_buffer = max_priority_within_buffer
        self._device = None
        self._generator = np.random.default_rng(seed)
        self._init()

    # As code written for TorchRL's sampler may look at them.
    _sum_tree = property(lambda self: SegmentTree(self._tree, self.dtype, "total"))
    _min_tree = property(lambda self: SegmentTree(self._tree, self.dtype, "min"))

    def _init(self) -> None:
        self._tree = SumTree(self._max_capacity)
        self._max_priority: Any = None  # a property of the parent: None reads as (None, None)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw slots, with replacement; called by the buffer."""
        length = len(storage)
        if length == 0:
            raise EmptyStorage("cannot sample from an empty storage; add something first")
        if not self._tree.total > 0:
            raise UsageError("no slot has a priority yet; was this storage filled by other means?")
        if self._rng is None:
            draws = self._generator.random(batch_size)
        else:
            draws = torch.rand(batch_size, generator=self._rng, dtype=torch.float64).numpy()
        slots = self._tree.find(draws * self._tree.total)
        if batch_size and int(slots.max()) >= length:
            raise UsageError(
                f"slot {int(slots.max())} has a priority, the storage has only {length}; "
                "empty the whole buffer, not the storage alone"
            )
        weights = importance_weights(self._tree.get(slots), self._tree.min, self._beta)
        index: Any = torch.from_numpy(slots)
        if storage.ndim > 1:
            index = tuple(map(torch.from_numpy, np.unravel_index(slots, tuple(storage.shape))))
        return index, {"priority_weight": torch.from_numpy(weights).to(self.dtype)}

    @torch.no_grad()
    def update_priority(
        self,
        index: int | torch.Tensor,
        priority: float | torch.Tensor,
        *,
        storage: Storage | None = None,
    ) -> None:
        """Set the priorities of slots; slots of -1, which were not stored, are left out.

        Args:
            index: Slots; with several dimensions, one row of coordinates each.
            priority: One per slot, or one for all. If one is no number from 0, nothing is changed.
            storage: Needed if it has several dimensions.
        """
        slots = np.asarray(torch.as_tensor(index).cpu(), np.int64)
        if slots.ndim > 1:
            if storage is None:
                raise UsageError("slots with coordinates need the storage: give storage=")
            coordinates = slots.reshape(-1, slots.shape[-1])
            known = (coordinates >= 0).all(1)
            shape = tuple(storage.shape)
            slots = np.full(len(coordinates), -1, np.int64)
            slots[known] = np.ravel_multi_index(tuple(coordinates[known].T), shape)
        slots = slots.reshape(-1)
        values = checked_priorities(priority)
        if values.size not in (1, slots.size):
            raise UsageError(f"{values.size} priorities for {slots.size} slots; give one for each")
        known = slots >= 0
        slots, values = slots[known], np.broadcast_to(values, slots.shape)[known]
        if not slots.size:
            return
        self._tree.set(slots, (values + self._eps) ** self._alpha)
        largest, at = self._max_priority
        within = self._max_priority_within_buffer and self._alpha
        twice = within and np.unique(slots).size < slots.size  # the last value of a slot counts
        if (largest is None or values.max() > largest) and not twice:
            self._max_priority = (float(values.max()), int(slots[values.argmax()]))
        elif within and (twice or (slots == at).any()):
            kept = self._priorities()
            largest = max(0.0, float(kept.max()) ** (1 / self._alpha) - self._eps)
            self._max_priority = (largest, int(kept.argmax()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, and the priorities as one tensor."""
        numbers = {"alpha": self._alpha, "beta": self._beta, "eps": self._eps}
        rng = json.dumps(self._generator.bit_generator.state)
        priorities = torch.from_numpy(self._priorities())
        return {**numbers, "largest": [*self._max_priority], "rng": rng, "priorities": priorities}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, or raise and change nothing."""
        with taking_in("this state"):
            priorities = as_floats(state_dict["priorities"])
        if priorities.shape != (self._max_capacity,):
            raise UsageError(
                f"it was saved with {priorities.size} slots, this sampler has {self._max_capacity}"
            )
        with taking_in("this state", UsageError):
            alpha, beta, eps = _checked(*(state_dict[name] for name in ("alpha", "beta", "eps")))
            largest, at = state_dict["largest"]
            known = None if largest is None else (float(largest), int(at))
            generator = np.random.default_rng()
            generator.bit_generator.state = json.loads(state_dict["rng"])
            tree = SumTree(self._max_capacity)
            written = np.flatnonzero(priorities)
            tree.set(written, priorities[written])
        self._alpha, self._beta, self._eps = alpha, beta, eps
        self._max_priority = known
        self._tree, self._generator = tree, generator

    def dumps(self, path: str | PathLike[str]) -> None:
        """Save into a folder, atomically."""
        state = self.state_dict()
        priorities = Item("priorities", state.pop("priorities").numpy())
        with PackWriter(make_folder(path) / _FILE, kind=KIND, meta=state) as pack:
            pack.write([priorities])

    def loads(self, path: str | PathLike[str]) -> None:
        """Load what `dumps` saved, or raise and change nothing."""
        with open_pack(Path(path) / _FILE, KIND, "saved sampler") as pack:
            with taking_in(pack.path, UsageError):
                priorities = pack.read("priorities")
            self.load_state_dict({**pack.index.meta, "priorities": priorities})

    def _priorities(self) -> NDArray[np.float64]:
        return self._tree.get(np.arange(self._max_capacity))

    def _retransform_priority_trees(self, old_alpha: float, new_alpha: float) -> None:
        """Follow a change of `alpha`: the tree holds (priority + eps) ** alpha."""
        values = self._priorities()
        written = np.flatnonzero(values)
        if not written.size:
            return
        if old_alpha == 0:
            warnings.warn(
                "alpha was changed away from 0, with which no priorities are kept: items are drawn "
                "alike until their priority is updated; start with a small number instead",
                PenstockWarning,
                stacklevel=3,
            )
            return
        self._tree.set(written, values[written] ** (new_alpha / old_alpha))


class PrioritySliceSampler(PrioritizedSliceSampler):  # type: ignore[misc]
    """Draws slices of trajectories, by the priorities of their first steps.

    It is TorchRL's PrioritizedSliceSampler, with all its arguments, over our own trees: its own
    ones need a compiled extension that must match the version of torch.

    Example:
        sampler = PrioritySliceSampler(1_000_000, alpha=0.7, beta=0.5, slice_len=16)
    """

    def _init(self) -> None:
        _weight_dtype(self.dtype)
        self._sum_tree = SegmentTree(SumTree(self._max_capacity), self.dtype, "total")
        self._min_tree = SegmentTree(SumTree(self._max_capacity), self.dtype, "min")
        self._max_priority: Any = None


class SegmentTree:
    """A SumTree as the samplers of TorchRL use theirs."""

    def __init__(self, tree: SumTree, dtype: torch.dtype, query: str) -> None:
        self._tree = tree
        self._dtype = np.float32 if dtype == torch.float32 else np.float64
        self._query = query

    def __len__(self) -> int:
        return self._tree.capacity

    def __getitem__(self, index: Any) -> Any:
        values = self._tree.get(np.asarray(index, np.int64)).astype(self._dtype)
        return values.item() if isinstance(index, int) else values

    def __setitem__(self, index: Any, value: Any) -> None:
        self._tree.set(np.asarray(index, np.int64), as_floats(value))

    def query(self, start: int, stop: int) -> float:
        """Answer for all entries; those that were never set do not count."""
        value: float = getattr(self._tree, self._query)
        return value

    def scan_lower_bound(self, sums: Any) -> torch.Tensor:
        """Find entries by their running sums."""
        return torch.from_numpy(self._tree.find(as_floats(sums).reshape(-1)))


def _checked(*settings: float) -> list[float]:
    for name, value in zip(("alpha", "beta", "eps"), settings, strict=True):
        if not (np.isfinite(value) and value >= 0):
            raise UsageError(f"{name} is {value}; give a number from 0")
    return list(map(float, settings))


def _weight_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float32, torch.float64):
        raise UsageError(f"dtype is {dtype}; use torch.float32 or torch.float64")
    return dtype
