"""Byte planes and differences in numpy: the kernels under codecs.py, and their scratch memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import zstandard
from numpy.typing import NDArray

Array = NDArray[Any]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class _Memory:
    """What one thread has; its heir, when it ends, is whichever thread starts next."""

    def __init__(self, idle: deque[_Memory]) -> None:
        self.buffers: dict[str, NDArray[np.uint8]] = {}
        self.zstd = zstandard.ZstdDecompressor()  # its tables are memory of that kind, too
        self.idle = idle


class _Lease:
    """Ends with its thread, and gives the memory back then."""

    def __init__(self, idle: deque[_Memory]) -> None:
        try:
            self.memory = idle.pop()
        except IndexError:
            self.memory = _Memory(idle)

    def __del__(self) -> None:
        self.memory.idle.append(self.memory)


class Scratch(threading.local):
    """Memory that each thread keeps between blocks, and passes on when it ends.

    Fresh temporaries of a megabyte are mapped, touched and unmapped for every block: measured, that
    took five times as long as the work on them. What it holds means nothing after the call.
    """

    _idle: ClassVar[deque[_Memory]] = deque(maxlen=8)

    def __init__(self) -> None:
        self._lease = _Lease(self._idle)

    @property
    def zstd(self) -> zstandard.ZstdDecompressor:
        """A decompressor for this thread alone."""
        return self._lease.memory.zstd

    def array(self, role: str, count: int, dtype: Any) -> Array:
        """Return an array of this role; it is valid until the same thread asks for it again."""
        nbytes = count * np.dtype(dtype).itemsize
        if nbytes > _MOST_SCRATCH_BYTES:
            return np.empty(count, dtype)
        buffers = self._lease.memory.buffers
        buffer = buffers.get(role)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = buffers[role] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype)


_MOST_SCRATCH_BYTES = 4 << 20
_PIECES, _PIECE_BYTES = 8, 2048
SCRATCH = Scratch()


def split(words: Array, k: int) -> Array:
    """Return the k-th bytes of all words, in scratch memory.

    Shift and narrow: numpy does both with SIMD, twice as fast as a strided byte copy.
    """
    plane = SCRATCH.array("plane", words.size, np.uint8)
    if k:
        shifted = SCRATCH.array("shifted", words.size, words.dtype)
        words = np.right_shift(words, 8 * k, out=shifted)
    np.copyto(plane, words, casting="unsafe")
    return plane


def looks_compressible(plane: Array, compress: Callable[[Any], bytes]) -> bool:
    """Try a sample: mantissa bytes are noise, and most of the time would go into finding out."""
    if plane.size < 4 * _PIECES * _PIECE_BYTES:
        return True
    step = plane.size // _PIECES
    sample = plane[: step * _PIECES].reshape(_PIECES, step)[:, :_PIECE_BYTES].reshape(-1)
    return len(compress(sample)) < sample.size


def join(planes: list[Array], out: Array) -> None:
    """Join byte planes pairwise into ever wider words (SIMD), the last pair straight into `out`."""
    while len(planes) > 2:
        wide = UNSIGNED[2 * planes[0].itemsize]
        pairs = zip(planes[::2], planes[1::2], strict=True)
        planes = [
            _paired(low, high, SCRATCH.array(f"pair {i} {low.itemsize}", low.size, wide))
            for i, (low, high) in enumerate(pairs)
        ]
    if len(planes) == 2:
        _paired(planes[0], planes[1], out)
    else:
        out[:] = planes[0]


def _paired(low: Array, high: Array, out: Array) -> Array:
    np.copyto(out, high)
    np.left_shift(out, 8 * low.itemsize, out=out)
    return np.bitwise_or(out, low, out=out)
