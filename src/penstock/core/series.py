"""The codec for what sensors say over time: zeros, and values close to the one before."""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np
import zstandard

from penstock.core.codecs import (
    Array,
    Buffer,
    Codec,
    Config,
    Planes,
    as_unsigned,
    bytes_of,
    checked_level,
    expect,
    unzstd,
)
from penstock.core.planes import SCRATCH, SIGNED

_HEAD = struct.Struct("<II")  # how many values are not zero, how many bytes the bitmap takes


class Series(Codec):
    """Zeros as a bitmap, the rest as zigzag differences in byte planes; time must come last.

    Of 36 x 4 lidar rays most see nothing, and the others change little from step to step: the
    bitmap takes out the zeros, the differences make the upper bytes compressible. Any data comes
    back exactly, bit for bit; what is not of this kind only compresses as with `Planes`.

    Args:
        level: Of `Planes`: 1 fastest, 2 balanced, 3 and above smallest.
    """

    id = "series"

    def __init__(self, level: int = 2) -> None:
        self.level = checked_level("series", level, 0, 22)
        self._planes = Planes(level=self.level)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Take out the zeros and encode the differences between the rest."""
        words = as_unsigned(values)
        marks = SCRATCH.array("marks", -(-words.size // 8), np.uint8)
        differences = SCRATCH.array("differences", words.size, words.dtype)
        count = _take_nonzero(words, marks, differences)
        packed = zstandard.ZstdCompressor(level=1).compress(bytes_of(marks))
        bitmap = packed if len(packed) < marks.size else marks.tobytes()
        rest = self._planes.encode(differences[:count]) if count else []
        return [_HEAD.pack(count, len(bitmap)), bitmap, *rest]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Add the differences up and put the zeros in again."""
        words = as_unsigned(out)
        expect(len(data) >= _HEAD.size, "a series is too short")
        count, length = _HEAD.unpack_from(data)
        start = _HEAD.size + length
        expect(count <= words.size and start <= len(data), "a series has the wrong length")
        bitmap: Buffer = data[_HEAD.size : start]
        size = -(-words.size // 8)
        if length != size:
            bitmap = unzstd(bitmap, size)
        differences = SCRATCH.array("differences", count, words.dtype)
        if count:
            self._planes.decode(data[start:], differences)
        else:
            expect(start == len(data), "a series has the wrong length")
        marks = np.frombuffer(bitmap, np.uint8)
        expect(_put_nonzero(marks, differences, words), "a series does not fit its bitmap")

    def config(self) -> Config:
        """Return the settings."""
        return {"id": self.id, "level": self.level}


@functools.cache
def _kernels() -> Any:
    """Return the compiled kernels; None where numba is not installed (ten times slower)."""
    try:
        from penstock.core import kernels
    except ImportError:
        return None
    return kernels


def _take_nonzero(words: Array, marks: Array, differences: Array) -> int:
    if (kernels := _kernels()) is not None:
        return int(kernels.take_nonzero(words, marks, differences))
    return take_nonzero(words, marks, differences)


def _put_nonzero(marks: Array, differences: Array, out: Array) -> bool:
    if (kernels := _kernels()) is not None:
        return bool(kernels.put_nonzero(marks, differences, out))
    return put_nonzero(marks, differences, out)


def take_nonzero(words: Array, marks: Array, differences: Array) -> int:
    """Do in numpy what the kernel of this name does."""
    present = words != 0
    marks[:] = np.packbits(present, bitorder="little")
    kept = words[present]
    gaps = np.diff(kept, prepend=kept.dtype.type(0)).view(SIGNED[kept.itemsize])
    differences[: kept.size] = ((gaps << 1) ^ (gaps >> (8 * kept.itemsize - 1))).view(kept.dtype)
    return int(kept.size)


def put_nonzero(marks: Array, differences: Array, out: Array) -> bool:
    """Do in numpy what the kernel of this name does."""
    bits = np.unpackbits(marks, bitorder="little")
    present = bits[: out.size].view(bool)
    if bits[out.size :].any() or int(np.count_nonzero(present)) != differences.size:
        return False
    one = differences.dtype.type(1)
    gaps = (differences >> one) ^ (~(differences & one) + one)
    out[:] = 0
    out[present] = np.cumsum(gaps, dtype=differences.dtype)
    return True
