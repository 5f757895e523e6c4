"""The sub-millisecond call: tensors that only an optimizer's step writes are copied until then.

What `AsyncCheckpointSaver` says of `lazy=True` is assumed, because it cannot be proven. The step's
pre-hook is the barrier: it waits for the copy, helping, and verifies.

Two guards catch most code that breaks the assumption: torch's version counters, compared on the
training thread (an operation in flight raises them only after it has written), and samples of some
parameters. A capture that fails either is torn and never published; the tensor is named, and copied
at once from then on. Writes that leave no version and hit no sampled byte, or that are undone
before the barrier, are not seen.

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
from itertools import chain, islice
from typing import Any, Literal

import torch

from penstock.checkpoints.snapshot import Snapshot, StagedTensor, chunks, memmove, written_since
from penstock.tensors import PLAIN_CLASSES

SETTLE_AFTER_S = 1.0
_STRIDED = torch.strided
_version = torch.Tensor._version.__get__  # type: ignore[attr-defined]
_data_ptr = torch.Tensor.data_ptr
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
        owned: dict[int, torch.Tensor] = {}
        for optimizer in self._optimizers:
            tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            tensors += chain.from_iterable(state.values() for state in optimizer.state.values())
            plain = [t for t in tensors if type(t) in PLAIN_CLASSES and t.layout is _STRIDED]
            owned.update(zip(map(_data_ptr, plain), plain, strict=True))
        for excluded in self._excluded.values():
            owned.pop(excluded.data_ptr(), None)
        return owned


class LazyCapture:
    """The tensors of a snapshot that are copied while the training goes on, by the writer thread.

    Attributes:
        verdict: Whether the copy is that of one moment; None while it is not known.
        torn: The tensors that were changed under the copy.
    """

    def __init__(self, snapshot: Snapshot, base_address: int) -> None:
        self.snapshot = snapshot
        self.verdict: Literal["verified", "torn"] | None = None
        self.torn: list[StagedTensor] = []
        self._base_address = base_address
        self._tensors = snapshot.lazy
        # Beside each other: caches are cold.
        self._lives = [tensor.live for tensor in self._tensors]
        self._versions = [tensor.version for tensor in self._tensors]
        self._begun_s = time.monotonic()
        self._chance = time.perf_counter_ns() * 2654435761 % 2**32
        self._samples = {tensor: self._sample(tensor) for tensor in self._choose()}
        self._lost: list[StagedTensor] = []
        self._lock = threading.Lock()
        self._todo = deque(self._tensors)
        self._busy: set[int] = set()  # the threads that copy

    def help(self) -> None:
        """Copy until nothing is left to begin; any number of threads may."""
        self._busy.add(threading.get_ident())
        with suppress(IndexError):
            while True:
                self._copy(self._todo.popleft())
        self._busy.discard(threading.get_ident())

    def finish(self) -> None:
        """Copy what is left, and wait for the other thread's last tensor."""
        me = threading.get_ident()
        if me in self._busy:  # in a signal handler that interrupted it, and cannot wait for it
            for tensor in self._tensors:
                self._copy(tensor)
        self.help()
        while self._todo or self._busy - {me}:
            time.sleep(0)

    def _copy(self, tensor: StagedTensor) -> None:
        to = self._base_address + tensor.offset
        for chunk in chunks(to, tensor.address, tensor.nbytes):
            if not tensor.in_place():  # nothing is read without a live size
                self._lost.append(tensor)
                return
            memmove(*chunk)

    def barrier(self) -> None:
        """Copy what is left, then verify; on the training thread, before it changes the tensors."""
        if self.verdict is None:
            self.finish()
            self._decide(self._changed())

    def settle(self) -> bool:
        """Tell whether there is a verdict; bring it about when no barrier has come for a while.

        In the background, after `finish`.
        """
        orphaned = not threading.main_thread().is_alive()
        late = time.monotonic() - self._begun_s > SETTLE_AFTER_S
        if self.verdict is None and (orphaned or late):
            self._decide(self._different() + self._changed())
        return self.verdict is not None

    def problem(self) -> str:
        """Say which tensors were changed under the copy."""
        names = [self.snapshot.name_of(tensor) for tensor in self.torn]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return (
            f"{shown} changed outside the optimizer's step while being copied; copied at once from "
            "now on (or save with lazy=False)"
        )

    def _decide(self, torn: list[StagedTensor]) -> None:
        """Settle the fate of this capture: the first word counts."""
        with self._lock:
            if self.verdict is None:
                self.torn = list(dict.fromkeys(torn))
                self.verdict = "torn" if torn else "verified"

    def _changed(self) -> list[StagedTensor]:
        """Return the tensors whose version or sample is another, or whose memory is gone."""
        samples = self._samples.items()
        changed = [tensor for tensor, before in samples if self._sample(tensor) != before]
        if list(map(_version, self._lives)) != self._versions:
            changed += written_since(self._tensors)
        return changed + self._lost

    def _different(self) -> list[StagedTensor]:
        """Return the tensors of which any byte is no longer the one that was copied."""
        different = []
        for tensor in self._tensors:
            if self.verdict is not None:
                return []  # a barrier decided meanwhile; the live tensors may change again
            copy = self._base_address + tensor.offset
            if not tensor.in_place() or _memcmp(copy, tensor.address, tensor.nbytes):
                different.append(tensor)
        return different

    def _choose(self) -> list[StagedTensor]:
        """Choose a few parameters, others each time. Nobody but its optimizer writes its state."""
        first = self._chance % max(1, len(self._tensors))
        around = chain(self._tensors[first:], self._tensors[:first])
        return list(islice((t for t in around if t.owner.requires_grad), _MOST_SAMPLES))

    def _sample(self, tensor: StagedTensor) -> bytes:
        """Read a few bytes of a tensor, at a place that is another in each capture."""
        if not tensor.in_place():
            return b""
        at = self._chance % max(1, tensor.nbytes - _SAMPLE_BYTES + 1)
        return ctypes.string_at(tensor.address + at, min(_SAMPLE_BYTES, tensor.nbytes))


class Hook:
    """Calls a method that may be gone by then; its copies (in a deep-copied module) do nothing."""

    def __init__(self, method: Callable[[], None] | None = None) -> None:
        self._method = weakref.WeakMethod(method) if method is not None else None

    def __call__(self, *_: Any, **__: Any) -> None:
        """Call the method; return None, as step hooks must."""
        method = self._method() if self._method is not None else None
        if method is not None:
            method()

    def __reduce__(self) -> Any:  # of copies, too
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
    # Every submodule has a load_state_dict of its own.
    parts: list[Any] = [part for module in modules for part in module.modules()]
    return handles + [part._register_load_state_dict_pre_hook(hook) for part in parts]
