"""A training state as it is at one moment.

The training thread copies the containers and the bytes of every tensor, by all the threads that
help, before the caller goes on: whatever it does afterwards, nothing of it reaches the snapshot.
Only tensors that `lazy.py` vouches for may be copied later. What needs no live object (names, the
description in JSON) is left to the thread that writes the file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
_ALIGNMENT = 64
CHUNK_BYTES = 8 << 20
_BRIEF_BYTES = 128 << 10
_TRIES = 3
_STEP_BYTES = 448 << 10
# Getting the interpreter back takes longer than a small copy: this one keeps it.
_brief_memmove = ctypes.PyDLL(None).memmove
_brief_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_brief_memmove.restype = ctypes.c_void_p
# The training waits, and its caches are cold: each is mapped over all tensors, in C.
_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_storage_start = torch.UntypedStorage.data_ptr
_storage_bytes = torch.UntypedStorage.nbytes
_LOOKS: list[Callable[[torch.Tensor], Any]] = [
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.data_ptr,
    torch.Tensor.numel,
    torch.Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_contiguous,
    torch.Tensor.is_neg,
    torch.Tensor.is_conj,
    torch.Tensor.untyped_storage,
]


@dataclass(slots=True, eq=False, repr=False)
class StagedTensor:
    """One tensor or array of a snapshot: what it is, and where its copy lies.

    Attributes:
        live: What is to be copied; None once it is.
        kind: "tensor", or "ndarray" for numpy's.
        first: Whose copy stands for it: its own, or that of an earlier one which is the same
            (tied weights). Only that one has what follows.
        offset: Of the copy in the staging memory.
        storage: Of a CPU tensor whose bytes can be copied as they lie: keeps its memory.
        address: Of such a tensor's first byte.
        version: Torch's count of the writes to it; None for what is not counted.
        name: In the file, once the snapshot is described.
        owner: Of a tensor that is copied later: that of the optimizer.
    """

    live: Any
    kind: str = "tensor"
    address: int = field(init=False)
    dtype: str = field(init=False)
    first: StagedTensor = field(init=False)
    name: str = field(init=False)
    nbytes: int = field(init=False)
    offset: int = field(init=False)
    owner: torch.Tensor = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    storage: Any = field(init=False)
    version: int | None = field(init=False)

    def in_place(self) -> bool:
        """Tell whether the elements lie in the memory of the storage: it may have been resized."""
        start: int = self.storage.data_ptr()
        end: int = start + self.storage.nbytes()
        return start <= self.address <= end - self.nbytes


class Snapshot:
    """A state whose containers are copied; its tensors are, once `copy` has returned.

    The CPU tensors that are `owned`, by their addresses, may be copied later.

    Attributes:
        size_bytes: The staging memory that is needed.
        lazy: The tensors that were left to be copied later.
        devices: What was cloned on a GPU, and must be fetched.

    Raises:
        UnsupportedValue: Something cannot be stored; it is named by its path.
    """

    def __init__(self, state: Any, owned: dict[int, torch.Tensor] | None = None) -> None:
        self.size_bytes = 0
        self.lazy: list[StagedTensor] = []
        self._plain: list[StagedTensor] = []  # CPU memory that is copied as it lies
        self._others: list[StagedTensor] = []  # copied element by element, or on their device
        self._arrays: dict[int, StagedTensor] = {}
        self._memory: NDArray[np.uint8]  # this and the next once `copy` has begun
        self.devices: DeviceClones
        tensors: list[StagedTensor] = []

        def tensor(value: torch.Tensor) -> StagedTensor:
            staged = StagedTensor(value)
            tensors.append(staged)
            return staged

        def other(value: Any) -> Any:
            plain = getattr(value, "stored_as_plain", False)
            return tensor(value.as_subclass(torch.Tensor)) if plain else self._keep(value)

        try:
            keepers: dict[type, tree.Keep] = dict.fromkeys(PLAIN_CLASSES, tensor)
            self._state = tree.copy_containers(state, keepers, other)
            self._look_at(tensors, owned or {})
        except (UnsupportedValue, RuntimeError):  # of torch: a sparse tensor has no address
            tree.flatten(state, _check)  # refuses the same, and knows the path
            raise

    def copy(self, memory: NDArray[np.uint8]) -> None:
        """Copy everything but the lazy tensors into `size_bytes` of memory.

        Raises:
            SnapshotDiscarded: Another thread kept writing a tensor meanwhile.
        """
        self._memory = memory
        for _ in range(_TRIES):
            self._copy_now()
            written = [*written_since(self._plain), *written_since(self._others)]
            if not written:
                break
            for staged in written:
                staged.version = staged.live._version
        else:
            raise SnapshotDiscarded(
                f"{self.name_of(written[0])} was written by another thread in each of {_TRIES} "
                "copies; save where nothing trains, or under a lock"
            )
        for staged in (*self._plain, *self._others):
            staged.live = staged.storage = None
        self._plain, self._others = [], []
        self._arrays.clear()  # ids mean nothing from here on

    @cached_property
    def description(self) -> tuple[Json, list[StagedTensor]]:
        """The state as JSON, and its tensors, which get the names that stand for them there."""
        tensors: dict[str, StagedTensor] = {}
        records: dict[int, Json] = {}

        def store(path: str, value: Any) -> Json | None:
            if not isinstance(value, StagedTensor):
                return store_torch_value(value)
            staged = value.first
            if id(staged) not in records:
                proper = path if path and path != "__metadata__" else f"{path}tensor"
                staged.name = tree.free_name(proper, tensors)
                tensors[staged.name] = staged
                records[id(staged)] = {tree.TAG: staged.kind, "v": staged.name}
            return records[id(staged)]

        return tree.flatten(self._state, store), list(tensors.values())

    def name_of(self, staged: StagedTensor) -> str:
        """Return the name of a tensor in the file."""
        _ = self.description  # gives every tensor its name
        return staged.name

    def values(self, staged: StagedTensor) -> NDArray[Any]:
        """Return the copy of a tensor, in its shape, as pack words."""
        copy: NDArray[Any] = self._memory[staged.offset : staged.offset + staged.nbytes]
        return copy.view(DTYPES[staged.dtype].words).reshape(tuple(staged.shape))

    def _copy_now(self) -> None:
        base = address_of(self._memory)
        self.devices = DeviceClones()
        for staged in self._others:  # not in CPU memory in their own order
            if isinstance(staged.live, np.ndarray):
                self.values(staged)[...] = staged.live
                continue
            out = tensor_over(self.values(staged), staged.dtype)
            if staged.live.is_cpu:
                out.copy_(staged.live.detach())
            else:
                self.devices.clone(staged.live, out)
        large: list[tuple[int, int, int]] = []
        storages = [staged.storage for staged in self._plain]
        memory = zip(map(_storage_start, storages), map(_storage_bytes, storages), strict=True)
        for staged, (start, room) in zip(self._plain, memory, strict=True):
            to, address, nbytes = base + staged.offset, staged.address, staged.nbytes
            if not start <= address <= start + room - nbytes:
                _check(self.name_of(staged), staged.live)  # it may have given its memory up
                raise SnapshotDiscarded(
                    f"{self.name_of(staged)} was given other memory by another thread; save where "
                    "nothing trains, or under a lock"
                )
            if nbytes <= _BRIEF_BYTES:
                _brief_memmove(to, address, nbytes)
            else:
                large += chunks(to, address, nbytes)
        if large:
            nbytes = sum(chunk[2] for chunk in large)
            parallel_list(lambda chunk: memmove(*chunk), large, name="copy", nbytes=nbytes)
        self.devices.cloned()

    def _keep(self, value: Any) -> Any:
        """Stage an array; return any other value that can be stored, as it is."""
        if _check("", value) is None:
            raise UnsupportedValue(f"a {type(value)}")
        if type(value) is not np.ndarray:
            return value
        if id(value) in self._arrays:
            return self._arrays[id(value)]
        staged = self._arrays[id(value)] = StagedTensor(value, "ndarray")
        staged.dtype, staged.shape, staged.version = value.dtype.name, value.shape, None
        staged.first, staged.nbytes = staged, value.nbytes
        self._place(staged, self._others)
        return staged

    def _look_at(self, tensors: list[StagedTensor], owned: dict[int, torch.Tensor]) -> None:
        """Find out what all the tensors are, and how each is to be copied."""
        known: dict[Any, StagedTensor] = {}
        lives = [staged.live for staged in tensors]
        looks = zip(tensors, _versions(lives), *(map(look, lives) for look in _LOOKS), strict=True)
        for staged, version, kind, shape, address, count, cpu, dense, neg, conj, storage in looks:
            staged.dtype, width = _TYPES.get(kind, _UNKNOWN)
            staged.version, staged.shape, staged.address = version, shape, address
            staged.nbytes = nbytes = count * width
            staged.first = first = known.setdefault(address, staged) if nbytes else staged
            if first is not staged and (form := _form(staged.live)) != _form(first.live):
                staged.first = first = known.setdefault((address, form), staged)
            if first is not staged:
                staged.live = None
                continue
            staged.storage = storage
            if not (cpu and dense and nbytes and address) or neg or conj:
                _check("", staged.live)
                self._place(staged, self._others)
                continue
            owner = owned.get(address)
            if (
                owner is None
                or version is None
                or (owner is not staged.live and tensor_bytes(owner) != nbytes)
            ):
                self._place(staged, self._plain)
                continue
            staged.owner = owner
            if not staged.in_place():
                _check("", staged.live)
            self._place(staged, self.lazy)

    def _place(self, staged: StagedTensor, those: list[StagedTensor]) -> None:
        staged.offset = self.size_bytes
        self.size_bytes += staged.nbytes + -staged.nbytes % _ALIGNMENT
        those.append(staged)


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


def chunks(to: int, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut a copy into pieces that threads can share: to, from, number of bytes."""
    for at in range(0, nbytes, CHUNK_BYTES):
        yield to + at, start + at, min(CHUNK_BYTES, nbytes - at)


def memmove(to: int, start: int, nbytes: int) -> None:
    """Copy memory; other threads run Python meanwhile.

    In steps below the size of an L2 cache: larger ones make the C library of some processors read
    the target before it is written. Measured: a tenth less time for 200 MB.
    """
    for at in range(0, nbytes, _STEP_BYTES):
        ctypes.memmove(to + at, start + at, min(_STEP_BYTES, nbytes - at))


def address_of(memory: NDArray[Any]) -> int:
    """Return where an array that can be written lies; `ctypes.data` takes ten times as long."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # type: ignore[arg-type]


def written_since(tensors: Iterable[StagedTensor]) -> list[StagedTensor]:
    """Return those to which torch has counted a write since their version was noted."""
    return [t for t in tensors if t.version is not None and t.live._version != t.version]


def _versions(tensors: list[torch.Tensor]) -> Iterable[int | None]:
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # writes to an inference tensor are not counted
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def _form(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.is_conj(), t.is_neg()


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
            steps = zip(value.shape, value.stride(), strict=True)
            last = value.storage_offset() + sum((count - 1) * step for count, step in steps)
            if (last + 1) * value.element_size() > held:
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
