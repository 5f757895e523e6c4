"""The codec for what sensors say over time: zeros, and values close to the one before."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import lz4.block
import numpy as np

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
    unlz4,
    unzstd,
)
from penstock.core.planes import SCRATCH, SIGNED, join, looks_compressible, split

_HEAD = struct.Struct("<I")  # how many values are not zero
_PIECE = struct.Struct("<BI")  # how the bitmap or a plane is kept, and its bytes
_AS_IT_IS, _LZ4, _ZSTD = range(3)
_VERY_SMALL = (
    8  # what LZ4 makes this many times smaller needs no entropy coder: it reads back faster
)


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
        compress = self._planes.compressor(words.itemsize)
        parts: list[Buffer] = [_HEAD.pack(count)]
        for plane in (marks, *_split(differences[:count])):
            method, data = _packed(plane, compress)
            parts += [_PIECE.pack(method, len(data)), data]
        return parts

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Add the differences up and put the zeros in again."""
        words = as_unsigned(out)
        expect(len(data) >= _HEAD.size, "a series is too short")
        (count,) = _HEAD.unpack_from(data)
        expect(count <= words.size, "a series has the wrong length")
        sizes = [-(-words.size // 8), *[count] * words.itemsize]
        pieces = []
        at = _HEAD.size
        for size in sizes:
            expect(len(data) >= at + _PIECE.size, "a series is too short")
            method, length = _PIECE.unpack_from(data, at)
            at += _PIECE.size
            pieces.append(_unpacked(method, data[at : at + length], size))
            at += length
        expect(at == len(data), "a series has the wrong length")
        differences = SCRATCH.array("differences", count, words.dtype)
        _join(pieces[1:], differences)
        expect(_put_nonzero(pieces[0], differences, words), "a series does not fit its bitmap")

    def config(self) -> Config:
        """Return the settings."""
        return {"id": self.id, "level": self.level}


def _packed(plane: Array, compress: Callable[[Array], bytes]) -> tuple[int, Buffer]:
    """Compress a plane if it gets smaller; say how."""
    fast = lz4.block.compress(bytes_of(plane), store_size=False)
    if len(fast) * _VERY_SMALL <= plane.size:
        return _LZ4, fast
    packed = compress(plane) if looks_compressible(plane, compress) else b""
    return (_ZSTD, packed) if 0 < len(packed) < plane.size else (_AS_IT_IS, plane.tobytes())


def _unpacked(method: int, data: memoryview, size: int) -> Array:
    if method == _LZ4:
        return np.frombuffer(unlz4(data, size), np.uint8)
    if method == _ZSTD:
        return np.frombuffer(unzstd(data, size), np.uint8)
    expect(method == _AS_IT_IS and len(data) == size, "a plane has the wrong length")
    return np.frombuffer(data, np.uint8)


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


def _split(words: Array) -> list[Array]:
    if (kernels := _kernels()) is None:
        return [split(words, k).copy() for k in range(words.itemsize)]
    planes = SCRATCH.array("planes", words.nbytes, np.uint8).reshape(words.itemsize, words.size)
    kernels.split_planes(words, planes)
    return list(planes)


def _join(planes: list[Array], out: Array) -> None:
    if (kernels := _kernels()) is None:
        join(planes, out)
    elif out.size:
        addresses = [plane.__array_interface__["data"][0] for plane in planes]
        kernels.join_planes(np.array(addresses, np.uint64), out)


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
