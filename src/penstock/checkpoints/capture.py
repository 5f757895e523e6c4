"""Lazy capture: copy a training state while the training thread goes on.

Tensors that a hooked optimizer owns (parameters and their state) change only in its step, so a
background thread may copy them until then. The barrier, run by the training thread before the
step, helps to finish the copy and then verifies it. Everything else is copied at once.

Two guards catch tensors that are changed past the optimizer: torch's version counters, compared on
the training thread (an operation in flight raises them only after it has written), and a compare
of sampled pages with the live memory. A capture that fails either is torn and never published;
the tensor is named, and copied at once from then on.

When no barrier comes for a while (a long evaluation), the background thread may settle the capture
itself: the versions and *every* byte must still be those that were copied.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoints import cuda
from penstock.checkpoints.tensors import NAMES, check_storable, store_torch_value
from penstock.core import tree
from penstock.core.pack import DTYPES
from penstock.core.tree import Json

SMALL_BYTES = 16 * 1024  # copied at once: cheaper than keeping track of it
SETTLE_AFTER_S = 1.0
_CHUNK_BYTES = 4 << 20
_PAGE_BYTES = 4096
_SAMPLED_PARTS = 64
_ALIGNMENT = 64
_memcmp = ctypes.CDLL(None).memcmp  # ctypes calls release the GIL
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

Verdict = Literal["verified", "torn"]


@dataclass(slots=True)
class Part:
    """One tensor of a state: where it lies now, and where its copy goes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: torch.Tensor | NDArray[Any]
    address: int
    """Of contiguous CPU memory, else 0: such a part is copied as a whole, by torch."""
    version: int = -1
    """Of a lazy part, when the save was asked for; -1 for one that is copied at once."""
    offset: int = 0

    @property
    def lazy(self) -> bool:
        """Whether this part is copied in the background."""
        return self.version >= 0


@dataclass
class Plan:
    """A state taken apart: its description, and the tensors to copy."""

    description: Json
    parts: list[Part]
    nbytes: int


class Capture:
    """The copy of one state, in the making.

    Args:
        plan: What to copy.
        staging: Memory of at least `plan.nbytes`.
    """

    def __init__(self, plan: Plan, staging: NDArray[np.uint8]) -> None:
        self.plan = plan
        self.staging = staging
        self.base_address = staging.ctypes.data
        self.verdict: Verdict | None = None
        self.torn: list[str] = []
        self.decided = threading.Event()
        self._deciding = threading.Lock()
        self._todo: deque[tuple[Part, int, int]] = deque()
        self._done: deque[None] = deque()
        self._copied_at: float | None = None
        self._device = cuda.SideCopy()
        for part in plan.parts:
            self._begin(part)
        self._tasks = len(self._todo)

    def _begin(self, part: Part) -> None:
        if not part.nbytes:
            return
        if isinstance(part.source, torch.Tensor) and part.source.is_cuda:
            self._device.copy(part.source, self._target(part), eager=not part.lazy)
        elif not part.lazy:
            self._copy(part, 0, part.nbytes)
        elif part.address:
            for start in range(0, part.nbytes, _CHUNK_BYTES):
                self._todo.append((part, start, min(start + _CHUNK_BYTES, part.nbytes)))
        else:
            self._todo.append((part, 0, part.nbytes))

    @property
    def copied(self) -> bool:
        """Whether every byte is in the staging memory."""
        return len(self._done) == self._tasks and self._device.ready()

    def help(self) -> None:
        """Copy until nothing is left to begin. Any number of threads may help; no lock is held."""
        while True:
            try:
                part, start, stop = self._todo.popleft()
            except IndexError:
                return
            self._copy(part, start, stop)
            self._done.append(None)

    def finish(self) -> None:
        """The barrier: copy what is left, then verify. On the training thread."""
        if self.verdict is not None:
            return
        self.help()
        while len(self._done) != self._tasks:
            time.sleep(0)  # another thread is at its last chunk
        self._device.hold_back_training()
        changed = [part.name for part in self._lazy() if not _unchanged(part)]
        self.decide(changed or self._compare_pages())

    def settle(self) -> None:
        """Verify in the background, when no barrier has come for a while."""
        if not self.copied:
            return
        now = time.monotonic()
        if self._copied_at is None:
            self._copied_at = now
        orphaned = not threading.main_thread().is_alive()
        if self.verdict is None and (orphaned or now - self._copied_at > SETTLE_AFTER_S):
            changed = self._compare_all()
            changed += [part.name for part in self._lazy() if not _unchanged(part)]
            self.decide(changed)

    def decide(self, torn: list[str]) -> None:
        """Settle the fate of this capture: the first word counts."""
        with self._deciding:
            if self.verdict is None:
                self.torn = torn
                self.verdict = "torn" if torn else "verified"
                for part in self.plan.parts:
                    part.source = _NOTHING  # the live state may be freed from now on
        self.decided.set()

    def words(self, part: Part) -> NDArray[Any]:
        """Return the copy of a part, in its shape, as pack words."""
        raw = self._target(part)
        return raw.view(DTYPES[part.dtype].words).reshape(part.shape)

    def _lazy(self) -> Iterable[Part]:
        return (part for part in self.plan.parts if part.lazy)

    def _target(self, part: Part) -> NDArray[np.uint8]:
        return self.staging[part.offset : part.offset + part.nbytes]

    def _copy(self, part: Part, start: int, stop: int) -> None:
        if part.address:
            target = self.base_address + part.offset + start
            ctypes.memmove(target, part.address + start, stop - start)
        elif isinstance(part.source, torch.Tensor):
            out = torch.from_numpy(self._target(part)).view(part.source.dtype)
            out.view(part.source.shape).copy_(part.source.detach())
        else:
            self.words(part)[...] = part.source

    def _compare_pages(self) -> list[str]:
        parts = [part for part in self._lazy() if part.address]
        if len(parts) > _SAMPLED_PARTS:
            parts = random.sample(parts, _SAMPLED_PARTS)
        return [part.name for part in parts if not self._page_is_equal(part)]

    def _page_is_equal(self, part: Part) -> bool:
        size = min(_PAGE_BYTES, part.nbytes)
        at = random.randrange(part.nbytes - size + 1)  # noqa: S311
        copy = ctypes.string_at(self.base_address + part.offset + at, size)
        return copy == ctypes.string_at(part.address + at, size)

    def _compare_all(self) -> list[str]:
        changed = []
        for part in list(self._lazy()):
            source = part.source
            if self.verdict is not None or not isinstance(source, torch.Tensor):
                return []  # a barrier decided meanwhile; the live tensors may change again
            if part.address:
                same = not _memcmp(self.base_address + part.offset, part.address, part.nbytes)
            elif source.is_cuda:
                same = True
            else:
                copy = torch.from_numpy(self._target(part)).view(torch.uint8)
                live = source.detach().contiguous().view(-1).view(torch.uint8)
                same = bool(torch.equal(copy, live))
            if not same:
                changed.append(part.name)
        return changed


_NOTHING: NDArray[Any] = np.empty(0, np.uint8)


def _unchanged(part: Part) -> bool:
    source = part.source
    return not isinstance(source, torch.Tensor) or source._version == part.version


class Planner:
    """Take states apart, knowing which tensors may be copied lazily.

    Args:
        optimizers: Their parameters and state are copied lazily; nobody else may change these
            between a save and the next step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.eager: set[str] = set()

    def plan(self, state: Any) -> Plan:
        """Take a state apart; nothing is copied yet.

        Raises:
            UnsupportedValue: Something in the state cannot be stored; it is named by its path.
        """
        return _Planning(self._owned(), self.eager).run(state)

    def _owned(self) -> dict[int, int]:
        """Map the address of each optimizer-owned tensor to its size."""
        owned: dict[int, int] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    owned[tensor.data_ptr()] = tensor.nbytes
            for values in optimizer.state.values():
                for tensor in values.values() if isinstance(values, dict) else ():
                    if isinstance(tensor, torch.Tensor) and tensor.nbytes >= SMALL_BYTES:
                        owned[tensor.data_ptr()] = tensor.nbytes
        return owned


class _Planning:
    """One run of the planner."""

    def __init__(self, owned: dict[int, int], eager: set[str]) -> None:
        self._owned = owned
        self._eager = eager
        self._parts: dict[str, Part] = {}
        self._seen: dict[Any, str] = {}
        self._at = 0

    def run(self, state: Any) -> Plan:
        description = tree.flatten(state, self._store)
        return Plan(description, list(self._parts.values()), self._at)

    def _store(self, path: str, value: Any) -> Json | None:
        if isinstance(value, torch.Tensor):
            return {tree.TAG: "tensor", "v": self._tensor(path, value)}
        if isinstance(value, np.ndarray):
            name = value.dtype.name
            if type(value) is not np.ndarray or DTYPES.get(name) is None:
                return None
            if value.dtype != DTYPES[name].words:  # foreign byte order
                return None
            part = Part(self._unique(path), name, value.shape, value.nbytes, value, 0)
            return {tree.TAG: "ndarray", "v": self._add(part)}
        return store_torch_value(value)

    def _tensor(self, path: str, tensor: torch.Tensor) -> str:
        check_storable(path, tensor)
        shape, address, nbytes = tuple(tensor.shape), tensor.data_ptr(), tensor.nbytes
        # Tensors that are one (tied weights) are stored once, and are one again after loading.
        key = (address, tensor.dtype, shape, tensor.stride(), tensor.device)
        if address and key in self._seen:
            return self._seen[key]
        contiguous = tensor.is_contiguous() and tensor.device.type == "cpu"
        if contiguous and (tensor.is_conj() or tensor.is_neg()):
            contiguous = False
        part = Part(
            self._unique(path),
            NAMES[tensor.dtype],
            shape,
            nbytes,
            tensor,
            address if contiguous else 0,
        )
        may_wait = nbytes >= SMALL_BYTES and self._owned.get(address) == nbytes
        if may_wait and part.name not in self._eager and not tensor.is_inference():
            part.version = tensor._version
        self._seen[key] = part.name
        return self._add(part)

    def _add(self, part: Part) -> str:
        part.offset = self._at
        self._at += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._parts[part.name] = part
        return part.name

    def _unique(self, path: str) -> str:
        name = path if path and path != "__metadata__" else f"{path}tensor"
        if name not in self._parts:
            return name
        number = 2
        while f"{name}#{number}" in self._parts:
            number += 1
        return f"{name}#{number}"
