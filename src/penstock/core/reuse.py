"""Memory that is used again: fresh megabytes cost more than the work on them."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64
_SMALLEST_BYTES = 64 * 1024  # below this the allocator does not map fresh pages
_MOST_IDLE = 32


class ReusedMemory:
    """Hands out arrays whose memory comes back by itself when nobody looks at it any more.

    The memory of an array is given again only after the array, all its views and all torch tensors
    over it are gone: whoever keeps a batch only makes the next one cost an allocation. Idle memory
    is kept up to `limit_bytes`; beyond it the oldest is freed.
    """

    def __init__(
        self,
        limit_bytes: int = 256 << 20,
        allocate: Callable[[int], NDArray[np.uint8]] = lambda nbytes: np.empty(nbytes, np.uint8),
    ) -> None:
        self.limit_bytes = limit_bytes
        self._allocate = allocate
        # An array may go anywhere, in any thread, even within `array`: no lock, only atomic calls
        # of the deque and the dict.
        self._idle: deque[NDArray[np.uint8]] = deque()
        self._leases: dict[int, tuple[Any, NDArray[np.uint8]]] = {}

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
        shaped: NDArray[Any] = self.lease(nbytes).view(kind).reshape(tuple(shape))
        return shaped

    def lease(self, nbytes: int) -> NDArray[np.uint8]:
        """Return so many bytes, with unknown content."""
        block = self._take(nbytes)
        # Through a memoryview: numpy then keeps this very array as the base of every view of it.
        leased: NDArray[np.uint8] = np.frombuffer(memoryview(block), np.uint8, nbytes)  # type: ignore[arg-type]
        lease = weakref.ref(leased, self._give_back)
        self._leases[id(lease)] = (lease, block)
        return leased

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        for _ in range(len(self._idle)):
            try:
                block = self._idle.popleft()
            except IndexError:
                break
            if nbytes <= block.nbytes <= 2 * nbytes + _SMALLEST_BYTES:
                return block
            self._idle.append(block)
        self._free(nbytes)
        return self._allocate(nbytes + -nbytes % _ALIGNMENT)

    def clear(self) -> None:
        """Free what is idle."""
        self._idle.clear()

    def _give_back(self, lease: Any) -> None:
        _, block = self._leases.pop(id(lease))
        self._free(block.nbytes)
        if block.nbytes <= self.limit_bytes:
            self._idle.append(block)

    def _free(self, wanted_bytes: int) -> None:
        """Free the oldest idle memory, until so much more would stay within the limit."""
        with suppress(IndexError):
            while self._idle and (
                len(self._idle) >= _MOST_IDLE or self.idle_bytes + wanted_bytes > self.limit_bytes
            ):
                self._idle.popleft()


BLOCKS = ReusedMemory(32 << 20)
"""For the blocks of packs, and for what is needed while one is encoded or decoded.

Fresh temporaries of a megabyte are mapped, touched and unmapped for every block: measured, that
took five times as long as the work on them.
"""
