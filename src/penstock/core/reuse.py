"""Memory for batches that is used again: fresh megabytes cost more than the work on them."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64
_SMALLEST_BYTES = 64 * 1024  # below this the allocator does not map fresh pages
_MOST_IDLE = 16


class ReusedMemory:
    """Hands out arrays whose memory comes back by itself when nobody looks at it any more.

    The memory of an array is given again only after the array, all its views and all torch tensors
    over it are gone: whoever keeps a batch only makes the next one cost an allocation.

    Args:
        limit_bytes: Idle memory to keep; what comes back beyond it is freed.

    Example:
        memory = ReusedMemory()
        batch = torch.from_numpy(memory.array((256, 84, 84), np.uint8))
    """

    def __init__(self, limit_bytes: int = 256 << 20) -> None:
        self._limit_bytes = limit_bytes
        # A finaliser may run anywhere, in any thread, even within `array`: no lock, only the
        # deque's own atomic calls.
        self._idle: deque[NDArray[np.uint8]] = deque()

    @property
    def idle_bytes(self) -> int:
        """Memory that waits to be used."""
        return sum(block.nbytes for block in list(self._idle))

    def array(self, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        """Return an array with unknown content."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes < _SMALLEST_BYTES:
            return np.empty(tuple(shape), kind)
        block = self._take(nbytes)
        # Through a memoryview: numpy then keeps this very array as the base of every view of it.
        leased: NDArray[np.uint8] = np.frombuffer(memoryview(block), np.uint8, nbytes)  # type: ignore[arg-type]
        weakref.finalize(leased, self._give_back, block).atexit = False
        shaped: NDArray[Any] = leased.view(kind).reshape(tuple(shape))
        return shaped

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        for _ in range(len(self._idle)):
            try:
                block = self._idle.popleft()
            except IndexError:
                break
            if nbytes <= block.nbytes <= 2 * nbytes + _SMALLEST_BYTES:
                return block
            self._idle.append(block)
        return np.empty(nbytes + -nbytes % _ALIGNMENT, np.uint8)

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        if len(self._idle) < _MOST_IDLE and self.idle_bytes + block.nbytes <= self._limit_bytes:
            self._idle.append(block)
