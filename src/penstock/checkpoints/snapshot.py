"""A training state as it is at one moment.

The training thread copies the containers and the bytes of every tensor, by all the threads that
help, before the caller goes on: whatever it does afterwards, nothing of it reaches the snapshot.
Only tensors that `lazy.py` vouches for may be copied later. What needs no live object (names, the
description in JSON) is left to the thread that writes the file.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoints.devices import DeviceClones
from penstock.core import tree
from penstock.core.pack import DTYPES
from penstock.core.threads import parallel_list
from penstock.core.tree import Json
from penstock.errors import SnapshotDiscarded, UnsupportedValue
from penstock.tensors import (
    DTYPE_NAMES,
    PLAIN_CLASSES,
    check_storable,
    store_torch_value,
    tensor_bytes,
)

_TYPES = {dtype: (name, DTYPES[name].words.itemsize) for dtype, name in DTYPE_NAMES.items()}
_UNKNOWN = ("", 0)
_COMPLEX = ("complex64", "complex128")
_STRIDED = torch.strided
_ALIGNMENT = 64
CHUNK_BYTES = 8 << 20
_BRIEF_BYTES = 128 << 10
_SMALL_BYTES = 4 << 20  # a state that is copied within a millisecond, by one thread
_TRIES = 3
memmove = ctypes.memmove  # lets other threads run Python meanwhile, ...
# ... and this one does not: getting the interpreter back takes longer than a small copy.
_brief_memmove = ctypes.PyDLL(None).memmove
_brief_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_brief_memmove.restype = None


class StagedTensor:
    """One tensor or array of a snapshot: what it is, and where its copy lies.

    Attributes:
        kind: "tensor", or "ndarray" for numpy's.
        offset: Of the copy in the staging memory.
        address: Of the live tensor, if its bytes can be copied as they lie; else 0.
    """

    __slots__ = ("address", "dtype", "kind", "nbytes", "offset", "shape")

    def __init__(
        self, kind: str, dtype: str, shape: tuple[int, ...], nbytes: int, offset: int, address: int
    ) -> None:
        self.kind = kind
        self.dtype = dtype
        self.shape = shape
        self.nbytes = nbytes
        self.offset = offset
        self.address = address


class LazyTensor(NamedTuple):
    """A tensor that is left to be copied later; `storage` keeps its memory."""

    staged: StagedTensor
    live: torch.Tensor
    storage: torch.UntypedStorage
    owner: torch.Tensor

    def has_memory(self) -> bool:
        """Tell whether the elements still lie in the memory that is kept: it may be resized."""
        before = self.staged.address - self.storage.data_ptr()
        return before >= 0 and before + self.staged.nbytes <= self.storage.nbytes()


class Plan(NamedTuple):
    """Where the tensors of a snapshot lie and go; the next save is mostly one of the same.

    Attributes:
        staged: For each tensor of the state, in order; those that are one have one.
        size_bytes: Of them all in the staging memory.
    """

    staged: list[StagedTensor]
    size_bytes: int


class _ChangedError(Exception):
    """A state is not the one that was planned for."""


class Snapshot:
    """A state whose containers are copied; its tensors are, once `copy` has returned.

    Args:
        state: Nested dicts, lists, tuples, sets, numbers, strings, numpy arrays and tensors.
        owned: The CPU tensors that may be copied later, by their addresses.
        last: The plan of the snapshot before. If every tensor is still what and where it was, it
            is this one's, too, in half the time.

    Attributes:
        size_bytes: The staging memory that is needed.
        lazy: The tensors that were left to be copied later.
        plan: For the next snapshot; None if its tensors must be looked at one by one.

    Raises:
        UnsupportedValue: Something cannot be stored; it is named by its path.
    """

    def __init__(
        self, state: Any, owned: dict[int, torch.Tensor] | None = None, last: Plan | None = None
    ) -> None:
        self.lazy: list[LazyTensor] = []
        self._now: dict[StagedTensor, Any]  # with what is copied before `copy` returns
        self._known: dict[Any, StagedTensor] = {}
        self._memory: NDArray[np.uint8]  # once `copy` has begun
        self._devices: DeviceClones
        self._describing = threading.Lock()
        self._described: tuple[Json, dict[str, StagedTensor]] | None = None
        try:
            if last is None or not self._follow(state, last):
                self._look(state)
        except (UnsupportedValue, RuntimeError):  # of torch: a nested tensor has no shape
            tree.flatten(state, _check)  # refuses the same, and knows the path
            raise
        if owned:
            self._leave(owned)

    def _look(self, state: Any) -> None:
        """Take a state, and plan for the next one."""
        found: list[StagedTensor] = []

        def tensor(value: torch.Tensor) -> StagedTensor:
            found.append(self._tensor(value))
            return found[-1]

        self.size_bytes, self._now = 0, {}
        tensors_bytes = self._take(state, tensor)
        plain = all(staged.address and staged.dtype not in _COMPLEX for staged in found)
        self.plan = Plan(found, tensors_bytes) if plain else None

    def _follow(self, state: Any, plan: Plan) -> bool:
        """Take a state that is as planned; tell whether it is."""
        expected = iter(plan.staged)
        now = self._now = {}

        # Every attribute and every call counts here: the training waits, and the caches are cold.
        def tensor(value: torch.Tensor) -> StagedTensor:
            staged = next(expected, None)
            if (
                staged is None
                or value.data_ptr() != staged.address
                or value.shape != staged.shape
                or _TYPES.get(value.dtype, _UNKNOWN)[0] != staged.dtype
                or not value.is_cpu
                or not value.is_contiguous()
                or value.is_neg()
                or value.layout is not _STRIDED
            ):
                raise _ChangedError
            now[staged] = value
            return staged

        self.size_bytes, self.plan = plan.size_bytes, plan
        try:
            self._take(state, tensor)
        except (_ChangedError, RuntimeError):
            return False
        return next(expected, None) is None

    def _take(self, state: Any, tensor: tree.Keep) -> int:
        """Copy the containers; return the bytes of the tensors.

        Numpy's arrays come behind them in the staging memory: they are others in each call.
        """
        self._arrays: dict[int, tuple[StagedTensor, NDArray[Any]]] = {}  # by id
        keepers: dict[type, tree.Keep] = dict.fromkeys(PLAIN_CLASSES, tensor)
        self._state = tree.copy_containers(state, keepers, self._keep)
        tensors_bytes = self.size_bytes
        for staged, array in self._arrays.values():
            staged.offset = self._room(staged.nbytes)
            self._now[staged] = array
        self._arrays = {}
        return tensors_bytes

    def _leave(self, owned: dict[int, torch.Tensor]) -> None:
        """Set the tensors aside that may be copied later."""
        for staged, live in list(self._now.items()):
            owner = owned.get(staged.address) if staged.address else None
            if owner is None or tensor_bytes(owner) != staged.nbytes or live.is_inference():
                continue
            lazy = LazyTensor(staged, live, live.untyped_storage(), owner)
            if not lazy.has_memory():
                self._refuse(staged, live)
            self.lazy.append(lazy)
            del self._now[staged]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(staged.nbytes for staged in self.describe()[1].values())

    def copy(self, memory: NDArray[np.uint8]) -> None:
        """Copy everything but the lazy tensors, by all the threads that help.

        Args:
            memory: At least `size_bytes`.

        Raises:
            SnapshotDiscarded: Another thread kept writing a tensor meanwhile.
        """
        self._memory = memory
        now = list(self._now.values())
        for _ in range(_TRIES):
            before = _versions(now)
            self._copy_now()
            after = _versions(now)
            if before == after:
                break
        else:
            changes = zip(self._now, before, after, strict=True)
            changed = next(staged for staged, old, new in changes if old != new)
            raise SnapshotDiscarded(
                f"{self.name(changed)} was written by another thread in each of {_TRIES} copies; "
                "save where nothing trains, or under a lock"
            )
        self._now = {}

    def describe(self) -> tuple[Json, dict[str, StagedTensor]]:
        """Return the state as JSON, and its tensors under the names that stand for them there."""
        with self._describing:
            if self._described is None:
                tensors: dict[str, StagedTensor] = {}
                records: dict[int, Json] = {}

                def store(path: str, value: Any) -> Json | None:
                    if type(value) is not StagedTensor:
                        return store_torch_value(value)
                    if id(value) not in records:
                        proper = path if path and path != "__metadata__" else f"{path}tensor"
                        name = tree.free_name(proper, tensors)
                        tensors[name] = value
                        records[id(value)] = {tree.TAG: value.kind, "v": name}
                    return records[id(value)]

                self._described = (tree.flatten(self._state, store), tensors)
        return self._described

    def name(self, staged: StagedTensor) -> str:
        """Return the name of a tensor in the file."""
        return next(name for name, other in self.describe()[1].items() if other is staged)

    def _copy_now(self) -> None:
        base = address_of(self._memory)
        self._devices = DeviceClones()
        brief_bytes = _BRIEF_BYTES if self.size_bytes > _SMALL_BYTES else _SMALL_BYTES
        large: list[Chunk] = []
        storages = []  # keep the memory until it is copied
        for staged, live in self._now.items():
            if address := staged.address:
                storage, nbytes = live.untyped_storage(), staged.nbytes
                start = storage.data_ptr()
                if address < start or address + nbytes > start + storage.nbytes():
                    self._refuse(staged, live)
                if nbytes <= brief_bytes:
                    _brief_memmove(base + staged.offset, address, nbytes)
                else:
                    storages.append(storage)
                    large += chunks(base + staged.offset, address, nbytes)
            elif staged.nbytes:
                self._copy_elements(staged, live)
        if large:
            nbytes = sum(chunk[2] for chunk in large)
            parallel_list(lambda chunk: memmove(*chunk), large, name="copy", nbytes=nbytes)
        self._devices.cloned()

    def _refuse(self, staged: StagedTensor, live: torch.Tensor) -> NoReturn:
        name = self.name(staged)
        _check(name, live)  # it may have given its memory up
        raise SnapshotDiscarded(
            f"{name} was given other memory by another thread; save where nothing trains, or under "
            "a lock"
        )

    def fetch(self) -> None:
        """Bring what was cloned on its device into the staging memory; in the background."""
        self._devices.fetch()

    def values(self, staged: StagedTensor) -> NDArray[Any]:
        """Return the copy of a tensor, in its shape, as pack words."""
        words: NDArray[Any] = self._target(staged).view(DTYPES[staged.dtype].words)
        return words.reshape(tuple(staged.shape))

    def _target(self, staged: StagedTensor) -> NDArray[np.uint8]:
        return self._memory[staged.offset : staged.offset + staged.nbytes]

    def _copy_elements(self, staged: StagedTensor, live: Any) -> None:
        """Copy what does not lie in CPU memory in its own order."""
        if isinstance(live, np.ndarray):
            self.values(staged)[...] = live
            return
        out = torch.from_numpy(self._target(staged)).view(live.dtype).view(live.shape)
        if live.is_cpu:
            if not _has_memory(live):
                self._refuse(staged, live)
            out.copy_(live.detach())
        else:
            self._devices.clone(live, out)

    def _keep(self, value: Any) -> Any:
        """Stage a tensor or array; return any other value that can be stored, as it is."""
        if _check("", value) is None:
            raise UnsupportedValue(f"a {type(value)}")
        if type(value) is not np.ndarray:
            return value
        if id(value) not in self._arrays:
            dtype, nbytes = value.dtype.name, value.nbytes
            staged = StagedTensor("ndarray", dtype, value.shape, nbytes, 0, 0)
            self._arrays[id(value)] = (staged, value)
        return self._arrays[id(value)][0]

    def _tensor(self, value: torch.Tensor) -> StagedTensor:
        dtype, width = _TYPES.get(value.dtype, _UNKNOWN)
        on_cpu, neg, conj = value.is_cpu, value.is_neg(), value.is_conj()
        if not width or value.layout is not _STRIDED or (not on_cpu and value.is_meta):
            raise UnsupportedValue(f"a {value.layout} tensor of {value.dtype}")
        address, shape, nbytes = value.data_ptr(), value.shape, value.numel() * width
        # Tensors that are one (tied weights) are stored once, and are one again after loading.
        same = (address, dtype, shape, value.stride(), value.device, neg, conj)
        if nbytes and same in self._known:
            return self._known[same]
        as_it_lies = on_cpu and value.is_contiguous() and not neg and not conj
        offset = self._room(nbytes)
        staged = StagedTensor("tensor", dtype, shape, nbytes, offset, address if as_it_lies else 0)
        if nbytes:
            self._known[same] = staged
            self._now[staged] = value
        return staged

    def _room(self, nbytes: int) -> int:
        """Return an offset in the staging memory."""
        offset = self.size_bytes
        self.size_bytes = offset + nbytes + -nbytes % _ALIGNMENT
        return offset


Chunk = tuple[int, int, int]
"""To, from, number of bytes."""


def chunks(to: int, start: int, nbytes: int) -> Iterator[Chunk]:
    """Cut a copy into pieces that threads can share."""
    for at in range(0, nbytes, CHUNK_BYTES):
        yield to + at, start + at, min(CHUNK_BYTES, nbytes - at)


def address_of(memory: NDArray[Any]) -> int:
    """Return where an array lies; `ctypes.data` takes ten times as long."""
    address: int = memory.__array_interface__["data"][0]
    return address


def _versions(tensors: list[Any]) -> list[int]:
    """Return torch's count of the writes to each tensor; 0 for what it does not count."""
    try:
        return [tensor._version for tensor in tensors]
    except (AttributeError, RuntimeError):  # an array, an inference tensor
        return [
            0 if isinstance(tensor, np.ndarray) or tensor.is_inference() else tensor._version
            for tensor in tensors
        ]


def _has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether all elements lie in the tensor's storage: it may have been resized."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((count - 1) * step for count, step in pairs)
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _check(path: str, value: Any) -> Json | None:
    """Refuse, by its path, what cannot be stored: a tensor by raising, anything else by None."""
    if isinstance(value, torch.Tensor):
        check_storable(path, value)
        if value.is_cpu and tensor_bytes(value) and not _has_memory(value):
            raise UnsupportedValue(
                f"{path} is a tensor whose memory was given up (its storage was resized); "
                "gather it first"
            )
        return {}
    if type(value) is np.ndarray:
        known = DTYPES.get(value.dtype.name)  # of a known type, and of native byte order
        return {} if known is not None and known.words == value.dtype else None
    return store_torch_value(value)
