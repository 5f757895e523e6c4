"""Lazy capture: copy a training state while the training thread goes on.

Tensors that a hooked optimizer owns (parameters and their state) change only in its step, so a
background thread may copy them until then. The barrier, run by the training thread before the
step, helps to finish the copy and then verifies it. Everything else is copied at once.

Two guards catch tensors that are changed past the optimizer: torch's version counters, compared on
the training thread (an operation in flight raises them only after it has written), and samples of
the parameters, taken when the save was asked for. A capture that fails either is torn and never
published; the tensor is named, and copied at once from then on.

When no barrier comes for a while (a long evaluation), the background thread may settle the capture
itself: the versions and *every* byte must still be those that were copied.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoints import cuda
from penstock.checkpoints.freeze import Frozen, version_of
from penstock.core import tree
from penstock.core.pack import DTYPES
from penstock.core.tree import Json
from penstock.tensors import NAMES, store_torch_value

SETTLE_AFTER_S = 1.0
_CHUNK_BYTES = 4 << 20
_ALIGNMENT = 64
_memcmp = ctypes.CDLL(None).memcmp  # releases the GIL
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

Source = torch.Tensor | NDArray[Any]


class Part:
    """One tensor of a state: where it lies now, and where its copy goes.

    Attributes:
        source: The live tensor, until the copy is verified.
        address: Of contiguous CPU memory, else 0: such a part is copied as a whole, by torch.
        offset: Of the copy in the staging memory.
    """

    __slots__ = ("address", "dtype", "name", "nbytes", "offset", "shape", "source")

    def __init__(self, name: str, source: Source, offset: int) -> None:
        self.name = name
        self.source = source
        self.shape = tuple(source.shape)
        self.nbytes = source.nbytes
        self.offset = offset
        if isinstance(source, torch.Tensor):
            self.dtype = NAMES[source.dtype]
            self.address = _address(source)
        else:
            self.dtype = source.dtype.name
            self.address = 0

    @property
    def words(self) -> np.dtype[Any]:
        """The numpy type in which the elements are handled."""
        return DTYPES[self.dtype].words


class Staging:
    """Memory for a copy, and its address."""

    __slots__ = ("address", "memory")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.address = memory.ctypes.data


class Capture:
    """The copy of one state, in the making.

    Attributes:
        nbytes: Of what is copied (known when `copied`).
        description, parts: What the state looks like (known when `copied`).
        verdict: Whether the copy is that of one moment; None while it is not known.
        failure: What went wrong in the copy, if anything did.

    Args:
        frozen: The state; what is not owned is copied here, at once.
        staging: Memory.
        reserved_bytes: How much of it is for this capture: at least `staging_bytes(frozen)`.
    """

    def __init__(self, frozen: Frozen, staging: Staging, reserved_bytes: int) -> None:
        self.staging = staging
        self.nbytes = 0
        self.description: Json = None
        self.parts: list[Part] = []
        self.verdict: Literal["verified", "torn"] | None = None
        self.failure: Exception | None = None
        self.torn: list[str] = []
        self.torn_addresses: list[int] = []
        self._frozen = frozen
        self._base_address = staging.address
        self.reserved_bytes = reserved_bytes
        self._device = cuda.SideCopy()
        self._at = 0
        self._early: dict[int, Part] = {}
        for source in frozen.eager:
            part = self._place("", source)
            self._early[id(source)] = part
            self._copy(part, 0, part.nbytes)
        self._lock = threading.Lock()  # the plan, and the verdict
        self._planned = False
        self._lazy: list[Part] = []
        self._owners: list[torch.Tensor] = []  # of the lazy parts: a view may hide its version
        self._versions: list[int] = []
        self._lost: list[Part] = []
        self._todo: deque[tuple[Part, int, int]] = deque()
        self._done: deque[None] = deque()
        self._tasks = 0
        self._copied_at: float | None = None

    @property
    def copied(self) -> bool:
        """Whether every byte is in the staging memory."""
        return self._planned and len(self._done) == self._tasks and self._device.ready()

    def help(self) -> None:
        """Copy until nothing is left to begin. Any number of threads may help."""
        self._plan()
        while True:
            try:
                part, start, stop = self._todo.popleft()
            except IndexError:
                return
            try:
                self._copy(part, start, stop)
            except Exception as error:  # the thread that helps may be the training one
                self.failure = error
            self._done.append(None)

    def finish(self) -> None:
        """The barrier: copy what is left, then verify. On the training thread."""
        if self.verdict is not None:
            return
        self.help()
        while len(self._done) != self._tasks:
            time.sleep(0)  # another thread is at its last chunk
        self._device.hold_back_training()
        self._decide(self._lost or self._changed_versions() or self._changed_samples())

    def settle(self) -> bool:
        """Tell whether there is a verdict; bring it about when no barrier has come for a while.

        In the background.
        """
        if self.verdict is None and self.copied:
            now = time.monotonic()
            if self._copied_at is None:
                self._copied_at = now
            orphaned = not threading.main_thread().is_alive()
            if orphaned or now - self._copied_at > SETTLE_AFTER_S:
                changed = self._lost or self._compare_all() or self._changed_versions()
                self._decide(changed or self._changed_samples())
        return self.verdict is not None

    def values(self, part: Part) -> NDArray[Any]:
        """Return the copy of a part, in its shape, as pack words."""
        return self._target(part).view(part.words).reshape(part.shape)

    def _decide(self, torn: list[Part]) -> None:
        """Settle the fate of this capture: the first word counts."""
        with self._lock:
            if self.verdict is None:
                self.torn = [part.name for part in torn]
                self.torn_addresses = [part.address for part in torn]
                self.verdict = "torn" if torn else "verified"

    def _plan(self) -> None:
        """Name the tensors and lay out the lazy ones; done once, by whoever comes first."""
        if self._planned:
            return
        with self._lock:
            if not self._planned:
                try:
                    self.description = _Naming(self).run(self._frozen.tree)
                except Exception as error:  # told to the caller by the writer, not in a step
                    self.failure = error
                self._tasks = len(self._todo)
                self._planned = True

    def adopt(self, name: str, source: Source) -> Part:
        """Make a tensor of the state a part of this capture (while planning)."""
        part = self._early.get(id(source))
        if part is not None:
            part.name = name
        else:
            assert isinstance(source, torch.Tensor)
            part = self._place(name, source)
            known = self._frozen.owned.by_address.get(source.data_ptr())
            if known is None:
                self._lost.append(part)  # it was given other memory since
            else:
                self._lazy.append(part)
                self._owners.append(self._frozen.owned.tensors[known[0]])
                self._versions.append(self._frozen.versions[known[0]])
                self._begin(part)
        self.parts.append(part)
        return part

    def _place(self, name: str, source: Source) -> Part:
        part = Part(name, source, self._at)
        self._at += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes += part.nbytes
        return part

    def _begin(self, part: Part) -> None:
        if isinstance(part.source, torch.Tensor) and part.source.is_cuda:
            self._device.copy(part.source, self._target(part), eager=False)
        elif part.address:
            for start in range(0, part.nbytes, _CHUNK_BYTES):
                self._todo.append((part, start, min(start + _CHUNK_BYTES, part.nbytes)))
        elif part.nbytes:
            self._todo.append((part, 0, part.nbytes))

    def _target(self, part: Part) -> NDArray[np.uint8]:
        return self.staging.memory[part.offset : part.offset + part.nbytes]

    def _copy(self, part: Part, start: int, stop: int) -> None:
        source = part.source
        if part.address:
            to = self._base_address + part.offset + start
            ctypes.memmove(to, part.address + start, stop - start)
        elif isinstance(source, np.ndarray):
            self.values(part)[...] = source
        elif isinstance(source, torch.Tensor) and source.is_cuda:
            self._device.copy(source, self._target(part), eager=True)
        elif isinstance(source, torch.Tensor) and part.nbytes:
            out = torch.from_numpy(self._target(part)).view(source.dtype)
            out.view(source.shape).copy_(source.detach())

    def _changed_versions(self) -> list[Part]:
        versions = list(map(version_of, self._owners))
        if versions == self._versions:
            return []
        pairs = zip(self._lazy, versions, self._versions, strict=True)
        return [part for part, now, before in pairs if now != before]

    def _changed_samples(self) -> list[Part]:
        changed = {tensor.data_ptr() for tensor in self._frozen.samples.changed()}
        return [part for part in self._lazy if part.address in changed] if changed else []

    def _compare_all(self) -> list[Part]:
        changed = []
        for part in self._lazy:
            source = part.source
            if self.verdict is not None:
                return []  # a barrier decided meanwhile; the live tensors may change again
            if part.address:
                same = not _memcmp(self._base_address + part.offset, part.address, part.nbytes)
            elif isinstance(source, torch.Tensor) and source.is_cpu and part.nbytes:
                copy = torch.from_numpy(self._target(part))
                live = source.detach().contiguous().view(-1).view(torch.uint8)
                same = torch.equal(copy, live)
            else:
                same = True
            if not same:
                changed.append(part)
        return changed


def staging_bytes(frozen: Frozen) -> int:
    """Return an upper bound of the memory that a capture needs; what is not used is not touched."""
    arrays = len(frozen.eager) + len(frozen.owned.tensors)
    return frozen.eager_bytes + frozen.owned.nbytes + arrays * _ALIGNMENT


def _address(tensor: torch.Tensor) -> int:
    """Return where the bytes of a tensor lie, if they can be copied as they lie; else 0."""
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor.data_ptr()
    return 0


class _Naming:
    """Describe a frozen state, giving every tensor its name."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._names: set[str] = set()
        self._known: dict[Any, str] = {}

    def run(self, state: Any) -> Json:
        return tree.flatten(state, self._store)

    def _store(self, path: str, value: Any) -> Json | None:
        if isinstance(value, torch.Tensor):
            # Tensors that are one (tied weights) are stored once, and are one again after loading.
            identity: Any = id(value)
            if value.nbytes:
                layout = (value.shape, value.stride(), value.dtype, value.device)
                identity = (value.data_ptr(), *layout)
            return {tree.TAG: "tensor", "v": self._name(path, value, identity)}
        if isinstance(value, np.ndarray):
            return {tree.TAG: "ndarray", "v": self._name(path, value, id(value))}
        return store_torch_value(value)

    def _name(self, path: str, value: Source, identity: Any) -> str:
        if identity not in self._known:
            self._known[identity] = self._capture.adopt(self._unique(path), value).name
        return self._known[identity]

    def _unique(self, path: str) -> str:
        name = path if path and path != "__metadata__" else f"{path}tensor"
        number = 1
        while name in self._names:
            number += 1
            name = f"{path}#{number}"
        self._names.add(name)
        return name
