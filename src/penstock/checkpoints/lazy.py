"""The sub-millisecond call: tensors that only an optimizer's step writes are copied until then.

Assumed, because it cannot be proven: between `save_async` and the next step of one of the given
optimizers (or a `load_state_dict` of theirs), nobody writes their parameters or their state, by
whatever means. The step's pre-hook is the barrier: it waits for the copy, helping, and verifies.

Two guards catch most code that breaks the assumption: torch's version counters, compared on the
training thread (an operation in flight raises them only after it has written), and samples of some
parameters. A capture that fails either is torn and never published; the tensor is named, and copied
at once from then on. Writes that leave no version (`.data`, numpy and DLPack aliases) and hit no
sampled byte, or that are undone before the barrier (an EMA swap), are not seen: such loops need the
default, `lazy=False`.

When no barrier comes for a while (a long evaluation), the background thread may settle the capture
itself: the versions and *every* byte must still be those that were copied.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch

from penstock.checkpoints.snapshot import (
    CHUNK_BYTES,
    Chunk,
    Snapshot,
    StagedTensor,
    chunks,
    memmove,
)
from penstock.tensors import PLAIN_CLASSES

SETTLE_AFTER_S = 1.0
_STRIDED = torch.strided
_SAMPLE_BYTES = 32
_MOST_SAMPLES = 4  # each is a cold page: the dearest part of a save
_memcmp = ctypes.CDLL(None).memcmp  # releases the GIL
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class OwnedTensors:
    """The tensors that only the steps of certain optimizers write: parameters and their state."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._excluded: dict[int, torch.Tensor] = {}  # kept, so that no other gets the same id

    def exclude(self, owners: Iterable[torch.Tensor]) -> None:
        """Never again take these for owned: others write them, too."""
        self._excluded.update((id(owner), owner) for owner in owners)

    def by_address(self) -> dict[int, torch.Tensor]:
        """Return the tensors as they are now, by the address of their memory."""
        found = {}
        for optimizer in self._optimizers:
            for values in (
                *(group["params"] for group in optimizer.param_groups),
                *(values.values() for values in optimizer.state.values()),
            ):
                for tensor in values:
                    if type(tensor) in PLAIN_CLASSES and tensor.layout is _STRIDED:
                        found[tensor.data_ptr()] = tensor
        for owner in self._excluded.values():
            found.pop(owner.data_ptr(), None)
        return found


class LazyCapture:
    """The tensors of a snapshot that are copied while the training goes on, by the writer thread.

    Attributes:
        verdict: Whether the copy is that of one moment; None while it is not known.
        torn: The tensors that were changed under the copy, each with its owner.
    """

    def __init__(self, snapshot: Snapshot, base_address: int) -> None:
        self.snapshot = snapshot
        self._base_address = base_address
        self._staged = [staged for staged, _ in snapshot.lazy]
        self._owners = [owner for _, owner in snapshot.lazy]
        chance = time.perf_counter_ns() * 2654435761 % 2**32
        self._sampled = _sampled(self._staged, self._owners, chance)
        self._samples = [_sample(staged, chance) for staged in self._sampled]
        self._chance = chance
        self._lock = threading.Lock()
        self._copied_at: float | None = None
        self._lost: set[int] = set()
        self._live = [staged.live for staged in self._staged]
        self._versions = [live._version for live in self._live]
        self.verdict: Literal["verified", "torn"] | None = None
        self.torn: list[tuple[StagedTensor, torch.Tensor]] = []
        # Small tensors are one piece each, and cut in no further ones: the training waits here.
        self._pieces: list[tuple[StagedTensor, Chunk]] = []
        for staged in self._staged:
            to, start, nbytes = base_address + staged.offset, staged.address, staged.nbytes
            if nbytes <= CHUNK_BYTES:
                self._pieces.append((staged, (to, start, nbytes)))
            else:
                self._pieces += [(staged, chunk) for chunk in chunks(to, start, nbytes)]
        self._todo = deque(self._pieces)
        self._done: set[Chunk] = set()
        self._busy: set[int] = set()  # the threads that copy

    @property
    def finished(self) -> bool:
        """Whether every byte is copied."""
        return len(self._done) == len(self._pieces)

    def help(self) -> None:
        """Copy until nothing is left to begin; any number of threads may."""
        self._busy.add(threading.get_ident())
        with suppress(IndexError):
            while True:
                self._copy_once(*self._todo.popleft())
        self._busy.discard(threading.get_ident())

    def finish(self) -> None:
        """Copy what is left, and wait for the other thread's last chunk."""
        me = threading.get_ident()
        interrupted = me in self._busy  # by a signal handler, which may not wait for it
        self.help()
        if interrupted:
            for piece in self._pieces:
                self._copy_once(*piece)
        while not self.finished or self._busy - {me}:
            time.sleep(0)

    def _copy_once(self, staged: StagedTensor, chunk: Chunk) -> None:
        if chunk in self._done:
            return
        if staged.has_memory():  # nothing is read from an address without a live size
            memmove(*chunk)
        else:
            self._lost.add(id(staged))
        self._done.add(chunk)

    def barrier(self) -> None:
        """Copy what is left, then verify; on the training thread, before it changes the tensors."""
        if self.verdict is None:
            self.finish()
            self._decide(self._changed())

    def settle(self) -> bool:
        """Tell whether there is a verdict; bring it about when no barrier has come for a while.

        In the background.
        """
        if self.verdict is None and self.finished:
            now = time.monotonic()
            if self._copied_at is None:
                self._copied_at = now
            orphaned = not threading.main_thread().is_alive()
            if orphaned or now - self._copied_at > SETTLE_AFTER_S:
                self._decide(self._different() | self._changed())
        return self.verdict is not None

    def _decide(self, torn: set[int]) -> None:
        """Settle the fate of this capture: the first word counts."""
        with self._lock:
            if self.verdict is None:
                pairs = zip(self._staged, self._owners, strict=True)
                self.torn = [pair for pair in pairs if id(pair[0]) in torn]
                self.verdict = "torn" if torn else "verified"

    def _changed(self) -> set[int]:
        """Return the tensors whose version or sample is another, or whose memory is gone."""
        changed = set()
        versions = [live._version for live in self._live]
        if versions != self._versions:
            pairs = zip(self._staged, versions, self._versions, strict=True)
            changed = {id(staged) for staged, now, before in pairs if now != before}
        samples = zip(self._sampled, self._samples, strict=True)
        changed |= {id(s) for s, sample in samples if _sample(s, self._chance) != sample}
        return changed | self._lost

    def _different(self) -> set[int]:
        """Return the tensors of which any byte is no longer the one that was copied."""
        different = set()
        for staged in self._staged:
            if self.verdict is not None:
                return set()  # a barrier decided meanwhile; the live tensors may change again
            if not staged.has_memory() or _memcmp(
                self._base_address + staged.offset, staged.address, staged.nbytes
            ):
                different.add(id(staged))
        return different


def _sampled(
    staged: list[StagedTensor], owners: list[torch.Tensor], chance: int
) -> list[StagedTensor]:
    """Choose a few parameters, other ones each time. Nobody but its optimizer writes its state."""
    parameters = [s for s, owner in zip(staged, owners, strict=True) if owner.requires_grad]
    if len(parameters) <= _MOST_SAMPLES:
        return parameters
    first = chance % len(parameters)
    return (parameters[first:] + parameters[:first])[:_MOST_SAMPLES]


def _sample(staged: StagedTensor, chance: int) -> bytes:
    if not staged.has_memory():
        return b""
    at = chance % max(1, staged.nbytes - _SAMPLE_BYTES + 1)
    return ctypes.string_at(staged.address + at, min(_SAMPLE_BYTES, staged.nbytes))


class Hook:
    """Calls a method that may be gone by then. Copies of it (in a deep-copied module) do nothing.

    Args:
        method: Only weakly referred to.
    """

    def __init__(self, method: Callable[[], None] | None = None) -> None:
        self._method = weakref.WeakMethod(method) if method is not None else None

    def __call__(self, *_: Any, **__: Any) -> None:
        """Call the method; return None, as step hooks must."""
        method = self._method() if self._method is not None else None
        if method is not None:
            method()

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return (Hook, ())


def install_hooks(
    barrier: Callable[[], None],
    optimizers: Iterable[torch.optim.Optimizer],
    modules: Iterable[torch.nn.Module],
) -> list[Any]:
    """Hook a barrier in before everything that changes these; return the handles to remove."""
    hook = Hook(barrier)
    handles: list[Any] = []
    for optimizer in optimizers:
        handles.append(optimizer.register_step_pre_hook(hook))
        if hasattr(optimizer, "register_load_state_dict_pre_hook"):  # from torch 2.1
            handles.append(optimizer.register_load_state_dict_pre_hook(hook))
    for module in modules:
        # Every submodule has a load_state_dict of its own.
        for part in module.modules():
            handles.append(part._register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
    return handles
