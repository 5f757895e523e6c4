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
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

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
    tensor_over,
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
_brief_memmove.restype = ctypes.c_void_p


class StagedTensor:
    """One tensor or array of a snapshot: what it is, and where its copy lies.

    Attributes:
        kind: "tensor", or "ndarray" for numpy's.
        live: What is to be copied; None once it is.
        offset: Of the copy in the staging memory.
        address: Of the live tensor, if its bytes can be copied as they lie; else 0.
        name: In the file, once the snapshot is described.
        storage: Of a tensor that is copied later: keeps its memory.
        owner: Of such a tensor: that of the optimizer.
    """

    __slots__ = (
        *("address", "dtype", "kind", "live", "name", "nbytes", "offset", "owner", "shape"),
        "storage",
    )
    name: str
    owner: torch.Tensor
    storage: torch.UntypedStorage

    def __init__(self, kind: str, live: Any, dtype: str, nbytes: int, offset: int) -> None:
        self.kind = kind
        self.live = live
        self.dtype = dtype
        self.shape = live.shape
        self.nbytes = nbytes
        self.offset = offset
        self.address = 0

    def lies_in(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether the elements lie in the memory of a storage: it may have been resized."""
        before = self.address - storage.data_ptr()
        return before >= 0 and before + self.nbytes <= storage.nbytes()


class Snapshot:
    """A state whose containers are copied; its tensors are, once `copy` has returned.

    Args:
        state: Nested dicts, lists, tuples, sets, numbers, strings, numpy arrays and tensors.
        owned: The CPU tensors that may be copied later, by their addresses.

    Attributes:
        size_bytes: The staging memory that is needed.
        lazy: The tensors that were left to be copied later.

    Raises:
        UnsupportedValue: Something cannot be stored; it is named by its path.
    """

    def __init__(self, state: Any, owned: dict[int, torch.Tensor] | None = None) -> None:
        self.size_bytes = 0
        self.lazy: list[StagedTensor] = []
        self._now: list[StagedTensor] = []  # what is copied before `copy` returns
        self._owned = owned or {}
        # By address, or by the id of an array: both live on until they are copied.
        self._known: dict[int, StagedTensor] = {}
        self._views: dict[int, list[StagedTensor]] = {}  # further ones at an address
        self._memory: NDArray[np.uint8]  # once `copy` has begun
        self._devices: DeviceClones
        self._describing = threading.Lock()
        self._described: tuple[Json, dict[str, StagedTensor]] | None = None
        try:
            keepers: dict[type, tree.Keep] = dict.fromkeys(PLAIN_CLASSES, self._tensor)
            self._state = tree.copy_containers(state, keepers, self._keep)
        except (UnsupportedValue, RuntimeError):  # of torch: a nested tensor has no shape
            tree.flatten(state, _check)  # refuses the same, and knows the path
            raise

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
        now = [staged.live for staged in self._now]
        for _ in range(_TRIES):
            before = _versions(now)
            self._copy_now()
            after = _versions(now)
            if before == after:
                break
        else:
            changes = zip(self._now, before, after, strict=True)
            changed = next(staged for staged, old, new in changes if old != new)
            self.describe()  # names it
            raise SnapshotDiscarded(
                f"{changed.name} was written by another thread in each of {_TRIES} copies; "
                "save where nothing trains, or under a lock"
            )
        for staged in self._now:
            staged.live = None
        self._now = []
        self._known.clear()  # addresses mean nothing from here on
        self._views.clear()

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
                        value.name = tree.free_name(proper, tensors)
                        tensors[value.name] = value
                        records[id(value)] = {tree.TAG: value.kind, "v": value.name}
                    return records[id(value)]

                self._described = (tree.flatten(self._state, store), tensors)
        return self._described

    def _copy_now(self) -> None:
        base = address_of(self._memory)
        self._devices = DeviceClones()
        brief_bytes = _BRIEF_BYTES if self.size_bytes > _SMALL_BYTES else _SMALL_BYTES
        large: list[Chunk] = []
        storages = []  # keep the memory until it is copied
        for staged in self._now:
            if staged.address:
                storage = staged.live.untyped_storage()
                if not staged.lies_in(storage):
                    self._refuse(staged)
                to, nbytes = base + staged.offset, staged.nbytes
                if nbytes <= brief_bytes:
                    _brief_memmove(to, staged.address, nbytes)
                else:
                    storages.append(storage)
                    large += chunks(to, staged.address, nbytes)
            elif staged.nbytes:
                self._copy_elements(staged, staged.live)
        if large:
            nbytes = sum(chunk[2] for chunk in large)
            parallel_list(lambda chunk: memmove(*chunk), large, name="copy", nbytes=nbytes)
        self._devices.cloned()

    def _refuse(self, staged: StagedTensor) -> NoReturn:
        self.describe()  # names it
        _check(staged.name, staged.live)  # it may have given its memory up
        raise SnapshotDiscarded(
            f"{staged.name} was given other memory by another thread; save where nothing trains, "
            "or under a lock"
        )

    def fetch(self) -> None:
        """Bring what was cloned on its device into the staging memory; in the background."""
        self._devices.fetch()

    def values(self, staged: StagedTensor) -> NDArray[Any]:
        """Return the copy of a tensor, in its shape, as pack words."""
        copy: NDArray[Any] = self._memory[staged.offset : staged.offset + staged.nbytes]
        return copy.view(DTYPES[staged.dtype].words).reshape(tuple(staged.shape))

    def _copy_elements(self, staged: StagedTensor, live: Any) -> None:
        """Copy what does not lie in CPU memory in its own order."""
        if isinstance(live, np.ndarray):
            self.values(staged)[...] = live
            return
        out = tensor_over(self.values(staged), staged.dtype)
        if live.is_cpu:
            out.copy_(live.detach())
        else:
            self._devices.clone(live, out)

    def _keep(self, value: Any) -> Any:
        """Stage a tensor or array; return any other value that can be stored, as it is."""
        if _check("", value) is None:
            raise UnsupportedValue(f"a {type(value)}")
        if type(value) is not np.ndarray:
            return value
        if id(value) not in self._known:
            staged = self._stage("ndarray", value, value.dtype.name, value.nbytes)
            self._known[id(value)] = staged
            self._now.append(staged)
        return self._known[id(value)]

    def _tensor(self, value: torch.Tensor) -> StagedTensor:
        # Every attribute and every call counts here: the training waits, and the caches are cold.
        dtype, width = _TYPES.get(value.dtype, _UNKNOWN)
        on_cpu = value.is_cpu
        if not width or value.layout is not _STRIDED or (not on_cpu and value.is_meta):
            raise UnsupportedValue(f"a {value.layout} tensor of {value.dtype}")
        address, nbytes = value.data_ptr(), value.numel() * width
        known = self._known.get(address)
        if known is not None:
            # Tensors that are one (tied weights) are stored once, and are one again after loading.
            other: StagedTensor
            for other in (known, *self._views.get(address, ())):
                if _same(other.live, value):
                    return other
        staged = self._stage("tensor", value, dtype, nbytes)
        if not nbytes:
            return staged
        if known is None:
            self._known[address] = staged
        else:
            self._views.setdefault(address, []).append(staged)
        if on_cpu:
            as_it_lies = value.is_contiguous() and not value.is_neg() and address
            if not as_it_lies or (dtype in _COMPLEX and value.is_conj()):
                _check("", value)
            else:
                staged.address = address
                owner = self._owned.get(address)
                if owner is not None and tensor_bytes(owner) == nbytes and not value.is_inference():
                    staged.owner, staged.storage = owner, value.untyped_storage()
                    if not staged.lies_in(staged.storage):
                        raise UnsupportedValue("a tensor whose memory was given up")
                    self.lazy.append(staged)
                    return staged
        self._now.append(staged)
        return staged

    def _stage(self, kind: str, live: Any, dtype: str, nbytes: int) -> StagedTensor:
        offset = self.size_bytes
        self.size_bytes = offset + nbytes + -nbytes % _ALIGNMENT
        return StagedTensor(kind, live, dtype, nbytes, offset)


class DeviceClones:
    """The tensors of one snapshot on a GPU: cloned on the stream that computes them.

    The clone is an operation in the order of the training's own stream: it sees exactly what was
    asked to be saved, and costs the host a launch. A side stream fetches it into pinned memory.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._events: dict[torch.device, Any] = {}

    def clone(self, live: torch.Tensor, out: torch.Tensor) -> None:
        """Clone a tensor where it is; `fetch` will put the clone into `out`."""
        try:
            copy = live.detach().clone(memory_format=torch.contiguous_format)
        except torch.cuda.OutOfMemoryError:
            out.copy_(live.detach())  # no room beside it: the caller waits for the transfer
            return
        self._pairs.append((copy, out))

    def cloned(self) -> None:
        """Mark the moment at which every clone has been asked for."""
        for device in {copy.device for copy, _ in self._pairs}:
            if device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                self._events[device] = event

    def fetch(self) -> None:
        """Copy the clones to the host and let go of them; on any thread."""
        for copy, out in self._pairs:
            event = self._events.get(copy.device)
            if event is None:
                out.copy_(copy)
                continue
            stream = torch.cuda.Stream(copy.device)  # type: ignore[no-untyped-call]
            stream.wait_event(event)
            with torch.cuda.stream(stream):
                out.copy_(copy, non_blocking=True)
            stream.synchronize()
        self._pairs.clear()
        self._events.clear()


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
        counted = (type(t) is not np.ndarray and not t.is_inference() for t in tensors)
        return [t._version if c else 0 for t, c in zip(tensors, counted, strict=True)]


def _same(one: Any, other: torch.Tensor) -> bool:
    """Tell whether two tensors that begin at one address are the same elements."""
    return isinstance(one, torch.Tensor) and _form(one) == _form(other)


def _form(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.is_conj(), t.is_neg()


def _extent(tensor: torch.Tensor) -> int:
    """Count the bytes from the first to the last element of a strided tensor."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((count - 1) * step for count, step in pairs)) * tensor.element_size()


def _check(path: str, value: Any) -> Json | None:
    """Refuse, by its path, what cannot be stored: a tensor by raising, anything else by None."""
    if isinstance(value, torch.Tensor):
        check_storable(path, value)
        if value.is_cpu and tensor_bytes(value):
            try:
                held = value.untyped_storage().nbytes()
            except RuntimeError as error:
                raise UnsupportedValue(
                    f"{path} is a tensor without memory of its own; save outside torch.func calls"
                ) from error
            if value.storage_offset() * value.element_size() + _extent(value) > held:
                raise UnsupportedValue(
                    f"{path} is a tensor whose memory was given up (its storage was resized); "
                    "gather it first"
                )
        return {}
    if type(value) is np.ndarray:
        known = DTYPES.get(value.dtype.name)
        if known is None or known.words != value.dtype:  # another byte order is another type
            raise UnsupportedValue(f"{path} is a numpy.ndarray of {value.dtype}; convert it first")
        return {}
    return store_torch_value(value)
