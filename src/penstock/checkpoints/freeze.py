"""What must happen to a state before `save_async` returns: as little as possible.

Containers are copied; tensors that belong to a hooked optimizer stay references with their version
counters noted; all other arrays are listed, to be copied at once. Names, checks of layout and the
JSON description are left to the background, for every microsecond here holds up the training.
"""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core import tree
from penstock.core.pack import DTYPES
from penstock.errors import UnsupportedValue
from penstock.tensors import NAMES, check_storable, store_torch_value

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
version_of = attrgetter("_version")  # in C: a third faster than a comprehension
_LARGE_BYTES = 1 << 20
_SAMPLE_BYTES = 32
_MOST_SAMPLES = 4  # each is a cold page: the dearest part of a save
_KEYS = frozenset({int, float, str, bool, type(None), complex, bytes})
_IMMUTABLE = _KEYS | {torch.Size, torch.dtype, torch.device}


class Owned:
    """The tensors that only the steps of certain optimizers change: parameters and their state.

    They are listed when the optimizers grow, are loaded, or seem to have got new tensors; on other
    saves a look-up by address is all it takes.

    Attributes:
        tensors: What is owned.
        ids: Of these.
        by_address: The address of each → its position in `tensors`, and its size.
        sampled: The parameters of which samples are taken, with the bytes to choose from.
        nbytes: Of all of them.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._signature: list[int] = []
        self._excluded: set[int] = set()
        self._storages: list[torch.UntypedStorage] = []
        self.tensors: list[torch.Tensor] = []
        self.ids: set[int] = set()
        self.by_address: dict[int, tuple[int, int]] = {}
        self.sampled: list[tuple[torch.Tensor, int]] = []
        self.nbytes = 0

    def exclude(self, addresses: Iterable[int]) -> None:
        """Never again take the tensors at these addresses for owned: others change them, too."""
        self._excluded.update(addresses)
        self.forget()

    def forget(self) -> None:
        """List the tensors anew at the next save."""
        self._signature = []

    def refresh(self) -> None:
        """List the tensors anew, if the optimizers have grown or were told to have changed."""
        signature = [size for o in self._optimizers for size in (len(o.param_groups), len(o.state))]
        if signature == self._signature:
            return
        self._signature = signature
        tensors = [
            tensor
            for optimizer in self._optimizers
            for values in (
                *(group["params"] for group in optimizer.param_groups),
                *(values.values() for values in optimizer.state.values()),
            )
            for tensor in values
            if type(tensor) in _TENSORS and tensor.dtype in NAMES and tensor.numel()
        ]
        usable = {
            tensor.data_ptr(): tensor
            for tensor in tensors
            if not tensor.is_inference() and tensor.data_ptr() not in self._excluded
        }
        self.tensors = list(usable.values())
        # Pinned: a tensor that is given other memory in the middle of a copy must not free this.
        self._storages = [tensor.untyped_storage() for tensor in self.tensors]
        self.ids = {id(tensor) for tensor in self.tensors}
        self.by_address = {
            address: (i, tensor.nbytes) for i, (address, tensor) in enumerate(usable.items())
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        parameters = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        self.sampled = [
            (tensor, tensor.nbytes - _SAMPLE_BYTES)
            for tensor in self.tensors
            if id(tensor) in parameters and tensor.is_cpu and tensor.is_contiguous()
        ]


class Samples:
    """A few bytes of each parameter, to notice writes that leave no version (`p.data.add_`).

    Such writes as a rule change every element, and every parameter. Of many parameters only some
    are sampled, other ones each time. Optimizer state is not: nobody but its optimizer writes it.
    """

    def __init__(self, parameters: list[tuple[torch.Tensor, int]]) -> None:
        # Not the random module: a save must not move the generators of the training.
        chance = time.perf_counter_ns() * 2654435761 % 2**32 / 2**32
        if len(parameters) > _MOST_SAMPLES:
            start = int(chance * len(parameters))
            parameters = (parameters[start:] + parameters[:start])[:_MOST_SAMPLES]
        self._chance = chance
        self._parameters = parameters
        self._bytes = self._take()

    def changed(self) -> list[torch.Tensor]:
        """Return the parameters whose samples are no longer what they were."""
        now = self._take()
        if now == self._bytes:
            return []
        pairs = zip(self._parameters, now, self._bytes, strict=True)
        return [parameter for (parameter, _), one, other in pairs if one != other]

    def _take(self) -> list[bytes]:
        read, chance = ctypes.string_at, self._chance
        return [
            read(tensor.data_ptr() + int(chance * room), _SAMPLE_BYTES)
            if room > 0
            else read(tensor.data_ptr(), _SAMPLE_BYTES + room)
            for tensor, room in self._parameters
        ]


@dataclass
class Frozen:
    """A state that later changes of the training do not reach, once `eager` is copied.

    Attributes:
        tree: The containers copied, the arrays by reference.
        eager: The arrays to copy before the training goes on.
        eager_bytes: Their size.
        owned: The tensors that may be copied later.
        versions: Their versions, …
        samples: … and samples of the parameters, when the state was frozen.
    """

    tree: Any
    eager: list[torch.Tensor | NDArray[Any]]
    eager_bytes: int
    owned: Owned
    versions: list[int]
    samples: Samples


def freeze(state: Any, owned: Owned) -> Frozen:
    """Freeze a state.

    Raises:
        UnsupportedValue: Something cannot be stored; it is named by its path.
    """
    owned.refresh()
    freezing = _Freezing(owned)
    # Before anything else: what changes from here on is noticed.
    versions = list(map(version_of, owned.tensors))
    samples = Samples(owned.sampled)
    try:
        copy = freezing.walk(state, tree.MAX_DEPTH)
    except (_Refused, RuntimeError):  # torch's own: a sparse tensor has no address
        _refuse_by_name(state)
        raise
    eager_bytes = sum(array.nbytes for array in freezing.eager)
    if eager_bytes > _LARGE_BYTES:
        owned.forget()  # much that is not owned: the optimizers may have got new tensors
    return Frozen(copy, freezing.eager, eager_bytes, owned, versions, samples)


def storable_array(value: Any) -> bool | None:
    """True for a numpy array that a pack can hold, else None."""
    if type(value) is np.ndarray:
        known = DTYPES.get(value.dtype.name)
        if known is not None and known.words == value.dtype:  # not of foreign byte order
            return True
    return None


def _refuse_by_name(state: Any) -> None:
    """Raise UnsupportedValue with the path of what cannot be stored."""

    def store(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            check_storable(path, value)
            return True
        return storable_array(value) or store_torch_value(value)

    tree.flatten(state, store)


def _check_keys(value: dict[Any, Any]) -> None:
    try:
        tree.flatten(list(value), lambda path, key: None)
    except UnsupportedValue:
        raise _Refused from None


class _Refused(Exception):
    pass


class _Freezing:
    """One walk through a state; a hot path, for it holds up the training."""

    def __init__(self, owned: Owned) -> None:
        self._owned = owned
        self.eager: list[torch.Tensor | NDArray[Any]] = []

    def walk(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if kind in _TENSORS:
            self._tensor(value)
            return value
        if not depth:
            raise _Refused
        if kind is dict or kind is OrderedDict:
            return self._dict(value, depth)
        if kind is list or kind is tuple:
            # A generator's state is a long tuple of numbers: looked at as a whole.
            if len(value) > 8 and set(map(type, value)) <= _IMMUTABLE:
                return kind(value)
            return kind([self.walk(item, depth - 1) for item in value])
        if (kind is set or kind is frozenset) and set(map(type, value)) <= _IMMUTABLE:
            return kind(value)
        if kind is bytearray:
            return bytearray(value)
        if storable_array(value):
            self.eager.append(value)
            return value
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return value
        raise _Refused

    def _dict(self, value: dict[Any, Any], depth: int) -> dict[Any, Any]:
        owned = self._owned.ids
        if not _KEYS.issuperset(map(type, value)):
            _check_keys(value)
        copy = type(value)()
        for key, child in value.items():
            kind = type(child)
            if kind is torch.Tensor:
                self._tensor(child)
            elif kind is dict and owned.issuperset(map(id, child.values())):
                child = child.copy()  # the state of one parameter: nothing but owned tensors
            elif kind not in _IMMUTABLE:
                child = self.walk(child, depth - 1)
            copy[key] = child
        return copy

    def _tensor(self, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        known = self._owned.by_address.get(address)
        # A view of all of an owned tensor, as a state dict holds it, may wait as well; but the
        # owner may have moved to other memory since it was listed.
        if (
            known is not None
            and known[1] == tensor.nbytes
            and self._owned.tensors[known[0]].data_ptr() == address
        ):
            return
        if known is not None:
            self._owned.forget()
        if tensor.dtype in NAMES and tensor.layout is torch.strided and not tensor.is_meta:
            self.eager.append(tensor)
        else:
            raise _Refused
