"""A training state as it is at one moment.

The training thread copies the containers and the bytes of every tensor, by all the threads that
help, before the caller goes on: whatever it does afterwards, nothing of it reaches the snapshot.
Only tensors that `lazy.py` vouches for may be copied later. What needs no live object (names, the
description in JSON) is left to the thread that writes the file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from functools import cached_property
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
    flat_words,
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
_SMALL_BYTES = 256 << 10  # copied at once: as long as looking at it twice takes
SMALL_STATE_BYTES = 4 << 20
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
        clone: The copy that the walk made; None where it lies in the staging memory.
        offset: Of the copy there.
        storage: Of a CPU tensor whose bytes can be copied as they lie: keeps its memory.
        address: Of such a tensor's first byte.
        version: Torch's count of the writes to it; None for what is not counted.
        name: In the file, once the snapshot is described.
        owner: Of a tensor that is copied later: that of the optimizer.
    """

    __slots__ = (
        *("address", "clone", "dtype", "kind", "live", "name", "nbytes", "offset", "owner"),
        *("shape", "storage", "version"),
    )
    address: int
    offset: int
    name: str
    owner: torch.Tensor

    def __init__(self, kind: str, live: Any, dtype: str, nbytes: int, clone: Any = None) -> None:
        self.kind = kind
        self.live = live
        self.dtype = dtype
        self.shape = live.shape
        self.nbytes = nbytes
        self.clone = clone
        self.storage: Any = None
        self.version: int | None = None

    def in_place(self) -> bool:
        """Tell whether the elements lie in the memory of the storage: it may have been resized."""
        start: int = self.storage.data_ptr()
        end: int = start + self.storage.nbytes()
        return start <= self.address <= end - self.nbytes


class Snapshot:
    """A state whose containers are copied; its tensors are, once `copy` has returned.

    Args:
        state: Nested dicts, lists, tuples, sets, numbers, strings, numpy arrays and tensors.
        owned: The CPU tensors that may be copied later, by their addresses.
        clone: Copy the small tensors already in the walk. For a small state, that is faster; in
            a large one, these many small pieces would keep the allocator from giving memory back.

    Attributes:
        size_bytes: The staging memory that is needed.
        cloned_bytes: What has been copied in the walk.
        lazy: The tensors that were left to be copied later.

    Raises:
        UnsupportedValue: Something cannot be stored; it is named by its path.
    """

    def __init__(
        self, state: Any, owned: dict[int, torch.Tensor] | None = None, clone: bool = False
    ) -> None:
        self._most_cloned_bytes = SMALL_STATE_BYTES if clone else 0
        self.size_bytes = self.cloned_bytes = 0
        self.lazy: list[StagedTensor] = []
        self._now: list[StagedTensor] = []  # what is copied before `copy` returns
        self._clones: list[tuple[torch.Tensor, int, torch.Tensor]] = []  # of, at which version
        self._owned = owned or {}
        # What was met and what stands for it: by address, or by the id of an array. Both live on
        # until they are copied.
        self._known: dict[Any, tuple[Any, StagedTensor | torch.Tensor]] = {}
        self._memory: NDArray[np.uint8]  # once `copy` has begun
        self._devices: DeviceClones
        try:
            keepers: dict[type, tree.Keep] = dict.fromkeys(PLAIN_CLASSES, self._tensor)
            with torch.no_grad():
                self._state = tree.copy_containers(state, keepers, self._keep)
        except (UnsupportedValue, RuntimeError):  # of torch: a sparse tensor has no address
            tree.flatten(state, _check)  # refuses the same, and knows the path
            raise

    def copy(self, memory: NDArray[np.uint8]) -> None:
        """Copy everything but the lazy tensors, by all the threads that help.

        Args:
            memory: At least `size_bytes`.

        Raises:
            SnapshotDiscarded: Another thread kept writing a tensor meanwhile.
        """
        self._memory = memory
        for _ in range(_TRIES):
            self._copy_now()
            written = written_since(self._now)
            stale = [clone for live, version, clone in self._clones if live._version != version]
            if not written and not stale:
                break
            for staged in written:
                staged.version = staged.live._version
            self._clones = [
                (live, live._version, _renewed(clone, live)) for live, _, clone in self._clones
            ]
        else:
            named = self.description[1]
            name = next(s.name for s in named if s in written or s.clone is stale[0])
            raise SnapshotDiscarded(
                f"{name} was written by another thread in each of {_TRIES} copies; save where "
                "nothing trains, or under a lock"
            )
        for staged in self._now:
            staged.live = staged.storage = None
        self._now, self._clones = [], []
        self._known.clear()  # addresses mean nothing from here on

    @cached_property
    def description(self) -> tuple[Json, list[StagedTensor]]:
        """The state as JSON, and its tensors, which get the names that stand for them there."""
        tensors: dict[str, StagedTensor] = {}
        records: dict[int, Json] = {}

        def store(path: str, value: Any) -> Json | None:
            if not isinstance(value, StagedTensor | torch.Tensor):
                return store_torch_value(value)
            if id(value) not in records:
                staged = value if isinstance(value, StagedTensor) else _of_clone(value)
                proper = path if path and path != "__metadata__" else f"{path}tensor"
                staged.name = tree.free_name(proper, tensors)
                tensors[staged.name] = staged
                records[id(value)] = {tree.TAG: staged.kind, "v": staged.name}
            return records[id(value)]

        return tree.flatten(self._state, store), list(tensors.values())

    def name_of(self, staged: StagedTensor) -> str:
        """Return the name of a tensor in the file."""
        _ = self.description  # gives every tensor its name
        return staged.name

    def fetch(self) -> None:
        """Bring what was cloned on its device into the staging memory; in the background."""
        self._devices.fetch()

    def values(self, staged: StagedTensor) -> NDArray[Any]:
        """Return the copy of a tensor, in its shape, as pack words."""
        copy: NDArray[Any] = (
            self._memory[staged.offset : staged.offset + staged.nbytes]
            if staged.clone is None
            else flat_words(staged.clone)
        )
        return copy.view(DTYPES[staged.dtype].words).reshape(tuple(staged.shape))

    def _copy_now(self) -> None:
        base = address_of(self._memory)
        self._devices = DeviceClones()
        large: list[Chunk] = []
        for staged in self._now:
            if staged.storage is None:
                self._copy_elements(staged, staged.live)
                continue
            if not staged.in_place():
                self._refuse(staged)
            to, nbytes = base + staged.offset, staged.nbytes
            if nbytes <= _BRIEF_BYTES:
                _brief_memmove(to, staged.address, nbytes)
            else:
                large += chunks(to, staged.address, nbytes)
        if large:
            nbytes = sum(chunk[2] for chunk in large)
            parallel_list(lambda chunk: memmove(*chunk), large, name="copy", nbytes=nbytes)
        self._devices.cloned()

    def _refuse(self, staged: StagedTensor) -> NoReturn:
        name = self.name_of(staged)
        _check(name, staged.live)  # it may have given its memory up
        raise SnapshotDiscarded(
            f"{name} was given other memory by another thread; save where nothing trains, "
            "or under a lock"
        )

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
        """Stage an array; return any other value that can be stored, as it is."""
        if _check("", value) is None:
            raise UnsupportedValue(f"a {type(value)}")
        if type(value) is not np.ndarray:
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        return self._place(
            id(value), StagedTensor("ndarray", value, value.dtype.name, value.nbytes), self._now
        )

    def _tensor(self, value: torch.Tensor) -> StagedTensor | torch.Tensor:
        # Every attribute and every call counts here: the training waits, and the caches are cold.
        dtype, width = _TYPES.get(value.dtype, _UNKNOWN)
        if not width:
            raise UnsupportedValue(f"a tensor of {value.dtype}")
        address, nbytes = value.data_ptr(), value.numel() * width
        if not nbytes:
            _check("", value)
            return value.clone()
        key: Any = address
        known = self._known.get(key)
        if known is not None:
            # Tensors that are one (tied weights) are stored once, and are one again after loading.
            form = _form(value)
            if form != _form(known[0]):
                key = (address, form)
                known = self._known.get(key)
            if known is not None:
                return known[1]
        try:
            version = value._version
        except RuntimeError:  # writes to an inference tensor are not counted
            version = None
        as_it_lies = value.is_cpu and address and value.is_contiguous() and not value.is_neg()
        if not as_it_lies or (dtype in _COMPLEX and value.is_conj()):
            _check("", value)
            staged = StagedTensor("tensor", value, dtype, nbytes)
            staged.version = version
            return self._place(key, staged, self._now)
        storage = value.untyped_storage()
        if value.storage_offset() * width + nbytes > storage.nbytes():
            raise UnsupportedValue("a tensor whose memory was given up")
        owner = self._owned.get(address)
        if owner is not None and (tensor_bytes(owner) != nbytes or version is None):
            owner = None
        few = nbytes <= _SMALL_BYTES and self.cloned_bytes < self._most_cloned_bytes
        if few and owner is None and version is not None:
            # Now, while it is in the cache; into memory that the allocator has at hand.
            clone = value.clone()
            self.cloned_bytes += nbytes
            self._clones.append((value, version, clone))
            self._known[key] = (value, clone)
            return clone
        staged = StagedTensor("tensor", value, dtype, nbytes)
        staged.version, staged.address, staged.storage = version, address, storage
        if owner is None:
            return self._place(key, staged, self._now)
        staged.owner = owner
        return self._place(key, staged, self.lazy)

    def _place(self, key: Any, staged: StagedTensor, those: list[StagedTensor]) -> StagedTensor:
        """Give a tensor a place in the staging memory."""
        self._known[key] = (staged.live, staged)
        staged.offset = self.size_bytes
        self.size_bytes += staged.nbytes + -staged.nbytes % _ALIGNMENT
        those.append(staged)
        return staged


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


def written_since(tensors: Iterable[StagedTensor]) -> list[StagedTensor]:
    """Return those to which torch has counted a write since their version was noted."""
    return [t for t in tensors if t.version is not None and t.live._version != t.version]


def _renewed(clone: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Make a clone anew, in the tensor that stands in the state already."""
    again = live.clone()
    return clone.set_(again.untyped_storage(), 0, again.shape, again.stride())


def _of_clone(clone: torch.Tensor) -> StagedTensor:
    return StagedTensor("tensor", clone, DTYPE_NAMES[clone.dtype], tensor_bytes(clone), clone)


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
