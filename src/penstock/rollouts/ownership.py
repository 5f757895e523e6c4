"""Whose memory a batch is: finds out whether a collector reuses it, and copies if it does."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from penstock.errors import UsageError
from penstock.rollouts.tensordicts import LazyStackedTensorDict, is_tensor_collection


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in TensorDicts, dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, LazyStackedTensorDict):  # asking it for a tensor would make a new one
        for part in value.tensordicts:
            yield from tensors_in(part)
    elif is_tensor_collection(value):
        for key in value.keys():  # noqa: SIM118
            yield from tensors_in(value.get(key))
    elif isinstance(value, dict):
        for child in value.values():
            yield from tensors_in(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from tensors_in(child)


def storages_in(value: Any) -> set[int]:
    """Return the addresses of all memory that tensors look at."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)} - {0}


def moved(value: Any, device: torch.device) -> Any:
    """Return the same on another device; what is there already is not copied."""
    return _mapped(value, lambda part: part.to(device))


def cloned(value: Any) -> Any:
    """Return a copy that shares no memory."""
    return _mapped(value, lambda part: part.clone())


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor) or is_tensor_collection(value):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(child, change) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(child, change) for child in value)
    return value


class Owner:
    """Makes sure that a batch which was handed over is never written to again.

    While on trial every batch is copied, and the originals are kept to compare with: two of them
    that share memory prove that the collector reuses it. Storages are compared, not tensors: slices
    of one buffer count as shared. A collector that passed the trial is trusted, and still watched.

    Args:
        trial: How many batches are copied before a collector is trusted: one more than are ever in
            use at a time, so that memory which comes back later does no harm.
        reused: It is known to reuse its memory.

    Attributes:
        reused: Whether it does, as far as is known.
        cloned: Batches copied so far.
    """

    def __init__(self, trial: int, *, reused: bool = False) -> None:
        self._trial = trial
        self._originals: list[tuple[Any, set[int]]] = []
        self._flying: deque[list[tuple[weakref.ref[torch.Tensor], int]]] = deque(
            maxlen=max(1, trial - 1)
        )
        self.reused = reused
        self.cloned = 0

    def own(self, batch: Any, device: torch.device | None = None) -> Any:
        """Return the batch, on the device, in memory that the collector will not touch.

        Raises:
            UsageError: A trusted collector wrote into a batch that is still in use.
        """
        storages = storages_in(batch)
        trusted = not self.reused and self._trial == 0
        if trusted:
            self._check_flying(storages)
        elif not self.reused:
            self._trial -= 1
            self.reused = any(
                batch is other or storages & before for other, before in self._originals
            )
            self._originals.append((batch, storages))
            if self.reused or self._trial == 0:
                self._originals.clear()
        result = batch if device is None else moved(batch, device)
        if not trusted and storages & storages_in(result):
            result = cloned(result)
            self.cloned += 1
        if not self.reused:
            self._flying.append(
                [
                    (weakref.ref(tensor), tensor.untyped_storage().data_ptr())
                    for tensor in tensors_in(result)
                ]
            )
        return result

    def _check_flying(self, storages: set[int]) -> None:
        alive = {
            address for batch in self._flying for tensor, address in batch if tensor() is not None
        }
        if storages & alive:
            self.reused = True
            raise UsageError(
                "the collector wrote into a batch that is still in use, after it had made new ones "
                "until now; clone its batches in the collector"
            )
