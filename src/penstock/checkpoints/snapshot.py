"""A training state as it is at one moment.

One walk turns the state into its description (`core/tree.py`) and stages each tensor it meets. Then
the bytes of every tensor are copied into staging memory, by all the threads that help, before the
caller goes on: whatever it does afterwards, nothing of it reaches the snapshot. Only tensors that
`lazy.py` vouches for may be copied later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoints.devices import DeviceClones
from penstock.core import tree
from penstock.core.pack import DTYPES
from penstock.core.threads import parallel_list
from penstock.core.tree import Json
from penstock.errors import SnapshotDiscarded, UnsupportedValue
from penstock.tensors import DTYPE_NAMES, check_storable, store_torch_value, tensor_bytes

_ALIGNMENT = 64
_CHUNK_BYTES = 8 << 20
_BRIEF_BYTES = 128 << 10
_TRIES = 3
memmove = ctypes.memmove  # lets other threads run Python meanwhile, ...
# ... and this one does not: getting the interpreter back takes longer than a small copy.
_brief_memmove = ctypes.PyDLL(None).memmove
_brief_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_brief_memmove.restype = ctypes.c_void_p


class StagedTensor:
    """One tensor or array of a snapshot: what it is, and where its copy lies.

    Attributes:
        name: In the file.
        live: What to copy; None once that is done.
        address: Of `live`, if its bytes can be copied as they lie; else 0.
        offset: Of the copy in the staging memory.
        record: What stands for it in the description.
    """

    __slots__ = ("address", "dtype", "live", "name", "nbytes", "offset", "record", "shape")

    def __init__(
        self, name: str, live: Any, dtype: str, nbytes: int, offset: int, record: Json
    ) -> None:
        self.name = name
        self.live = live
        self.dtype = dtype
        self.shape = live.shape
        self.nbytes = nbytes
        self.address = 0
        self.offset = offset
        self.record = record


class Snapshot:
    """A state whose containers are copied; its tensors are, once `copy` has returned.

    Args:
        state: Nested dicts, lists, tuples, sets, numbers, strings, numpy arrays and tensors.
        owned: The contiguous CPU tensors that may be copied later, by their addresses.

    Attributes:
        description: The state as JSON, with the names of its tensors in their places.
        size_bytes: The staging memory that is needed.
        nbytes: Of all tensors.
        lazy: The tensors that were left to be copied later, each with its owner.

    Raises:
        UnsupportedValue: Something cannot be stored; it is named by its path.
    """

    def __init__(self, state: Any, owned: dict[int, torch.Tensor] | None = None) -> None:
        self.size_bytes = 0
        self.nbytes = 0
        self.tensors: dict[str, StagedTensor] = {}
        self.lazy: list[tuple[StagedTensor, torch.Tensor]] = []
        self._owned = owned or {}
        self._known: dict[Any, StagedTensor] = {}
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._devices = DeviceClones()
        self.description: Json = tree.flatten(state, self._store)

    def copy(self, memory: NDArray[np.uint8]) -> None:
        """Copy everything but the lazy tensors, by all the threads that help.

        Args:
            memory: At least `size_bytes`.

        Raises:
            SnapshotDiscarded: Another thread kept writing a tensor meanwhile.
        """
        self._memory = memory
        later = {staged.name for staged, _ in self.lazy}
        now = [staged for staged in self.tensors.values() if staged.name not in later]
        counted = [
            staged
            for staged in now
            if isinstance(staged.live, torch.Tensor) and not staged.live.is_inference()
        ]
        for _ in range(_TRIES):
            versions = [staged.live._version for staged in counted]
            self._copy_now(now)
            pairs = zip(counted, versions, strict=True)
            changed = [staged for staged, version in pairs if staged.live._version != version]
            if not changed:
                break
        else:
            raise SnapshotDiscarded(
                f"{changed[0].name} was written by another thread in each of {_TRIES} copies; "
                "save where nothing trains, or under a lock"
            )
        for staged in now:
            staged.live = None
        self._known.clear()  # addresses mean nothing from here on

    def _copy_now(self, tensors: list[StagedTensor]) -> None:
        base = self._memory.ctypes.data
        self._devices = DeviceClones()
        large: list[Chunk] = []
        for staged in tensors:
            if staged.address and staged.nbytes <= _BRIEF_BYTES:
                _brief_memmove(base + staged.offset, staged.address, staged.nbytes)
            elif staged.address:
                large += chunks(base + staged.offset, staged.address, staged.nbytes)
            elif staged.nbytes:
                self._copy_elements(staged)
        nbytes = sum(chunk[2] for chunk in large)
        parallel_list(lambda chunk: memmove(*chunk), large, name="copy", nbytes=nbytes)
        self._devices.cloned()

    def fetch(self) -> None:
        """Bring what was cloned on its device into the staging memory; in the background."""
        self._devices.fetch()

    def values(self, staged: StagedTensor) -> NDArray[Any]:
        """Return the copy of a tensor, in its shape, as pack words."""
        words: NDArray[Any] = self._target(staged).view(DTYPES[staged.dtype].words)
        return words.reshape(tuple(staged.shape))

    def _target(self, staged: StagedTensor) -> NDArray[np.uint8]:
        return self._memory[staged.offset : staged.offset + staged.nbytes]

    def _copy_elements(self, staged: StagedTensor) -> None:
        """Copy what does not lie in CPU memory in its own order."""
        live = staged.live
        if isinstance(live, np.ndarray):
            self.values(staged)[...] = live
            return
        out = torch.from_numpy(self._target(staged)).view(live.dtype).view(live.shape)
        if live.is_cpu:
            out.copy_(live.detach())
        else:
            self._devices.clone(live, out)

    def _store(self, path: str, value: Any) -> Json | None:
        """Stage a tensor or array and return its record; None for what cannot be stored."""
        if isinstance(value, torch.Tensor):
            return self._tensor(path, value).record
        if type(value) is np.ndarray and _storable(value):
            key = ("ndarray", id(value))  # it lives on in the state during the walk
            if key not in self._known:
                self._known[key] = self._stage(
                    "ndarray", path, value, value.dtype.name, value.nbytes
                )
            return self._known[key].record
        return store_torch_value(value)

    def _tensor(self, path: str, value: torch.Tensor) -> StagedTensor:
        check_storable(path, value)
        dtype = DTYPE_NAMES[value.dtype]
        nbytes, address = tensor_bytes(value), value.data_ptr()
        # Tensors that are one (tied weights) are stored once, and are one again after loading.
        mirrored = value.is_conj() or value.is_neg()
        sign = (value.is_conj(), value.is_neg()) if mirrored else None
        identity = (address, value.shape, value.stride(), dtype, value.get_device(), sign)
        known = self._known.get(identity) if nbytes else None
        if known is not None:
            return known
        staged = self._known[identity] = self._stage("tensor", path, value, dtype, nbytes)
        if not value.is_cpu or not nbytes:
            return staged
        if not has_memory(value):
            raise UnsupportedValue(
                f"{path} is a tensor whose memory was given up (its storage was resized); gather "
                "it first"
            )
        if value.is_contiguous() and not mirrored:
            staged.address = address
            owner = self._owned.get(address)
            if owner is not None and tensor_bytes(owner) == nbytes:
                # The owner may be given other memory; what it has now must stay until it is copied.
                staged.live = owner.detach()
                self.lazy.append((staged, owner))
        return staged

    def _stage(self, kind: str, path: str, live: Any, dtype: str, nbytes: int) -> StagedTensor:
        name = first = path if path and path != "__metadata__" else f"{path}tensor"
        number = 1
        while name in self.tensors:  # {"a.b": …, "a": {"b": …}}
            number += 1
            name = f"{first}#{number}"
        record = {tree.TAG: kind, "v": name}
        staged = StagedTensor(name, live, dtype, nbytes, self.size_bytes, record)
        self.tensors[name] = staged
        self.size_bytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes += nbytes
        return staged


Chunk = tuple[int, int, int]
"""To, from, number of bytes."""


def chunks(to: int, start: int, nbytes: int) -> Iterator[Chunk]:
    """Cut a copy into pieces that threads can share."""
    for at in range(0, nbytes, _CHUNK_BYTES):
        yield to + at, start + at, min(_CHUNK_BYTES, nbytes - at)


def has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether the memory of a strided CPU tensor is really there: storages can be resized."""
    if tensor.is_contiguous():
        end = tensor.storage_offset() * tensor.element_size() + tensor_bytes(tensor)
        return end <= tensor.untyped_storage().nbytes()
    last = tensor.storage_offset() + sum(
        (count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _storable(value: NDArray[Any]) -> bool:
    """Tell whether a numpy array can be stored: of a known type, and of native byte order."""
    known = DTYPES.get(value.dtype.name)
    return known is not None and known.words == value.dtype
