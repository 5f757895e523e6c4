"""Byte planes: the k-th bytes of all elements together, each compressed if that helps."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.codecs.base import (
    UNSIGNED,
    Array,
    Buffer,
    Codec,
    as_unsigned,
    check_level,
    expect,
    zstd,
)
from penstock.core.codecs.general import Lz4, unlz4, unzstd
from penstock.core.reuse import BLOCKS, SCRATCH
from penstock.errors import UsageError

_PIECES, _PIECE_BYTES = 8, 1024
_WORTH_IT = 0.99  # of a sample; less gain is not worth the time to read it back
_LITERALS = 1002  # zstd's ZSTD_c_literalCompressionMode, which Python does not name
_SKIP = 128  # look for matches only here and there: floats have none, runs of zeros are found


@dataclass(frozen=True)
class Planes(Codec):
    """Byte planes: only the exponent bytes of floats compress, so they are taken apart.

    With zstd the compressor is tuned for such planes: almost no match search, entropy coding over
    short windows. Measured on float32 weights and Adam moments this is smaller and twice as fast as
    zstd's own level 1. Levels: 1 fastest, 2 balanced, 3 and above smallest.
    """

    id = "planes"
    inner: str = "zstd"
    level: int = 2

    def __post_init__(self) -> None:
        if self.inner not in ("zstd", "lz4"):
            raise UsageError(f"planes: unknown inner codec {self.inner!r}; use 'zstd' or 'lz4'")
        check_level("planes", self.level, 0, 22)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Split into planes and compress each one that gets smaller."""
        words = as_unsigned(values)
        count, width = words.size, words.itemsize
        compress = self.compressor(width)
        # A fresh megabyte costs as much as all the work on it.
        out = BLOCKS.array((4 * width + values.nbytes,), np.uint8)
        at, lengths = 4 * width, []
        for k in range(width):
            plane = split(words, k, out[at : at + count])
            if looks_compressible(plane, compress):
                packed = np.frombuffer(compress(plane), np.uint8)
                if packed.size < count:
                    plane = out[at : at + packed.size]
                    plane[:] = packed
            at += plane.size
            lengths.append(plane.size)
        out[: 4 * width] = np.frombuffer(struct.pack(f"<{width}I", *lengths), np.uint8)
        return [out[:at].data]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Put the planes together again."""
        words = as_unsigned(out)
        at = 4 * words.itemsize
        expect(len(data) >= at, "a block of planes is too short")
        lengths = struct.unpack_from(f"<{words.itemsize}I", data)
        expect(sum(lengths) == len(data) - at, "a block of planes has the wrong length")
        planes = []
        for length in lengths:
            part: Buffer = data[at : at + length]
            if length != words.size:
                part = (unzstd if self.inner == "zstd" else unlz4)(part, words.size)
            planes.append(np.frombuffer(part, np.uint8))
            at += length
        join(planes, words)

    def compressor(self, width: int) -> Callable[[Any], bytes]:
        """Return what compresses one plane of words of this width."""
        if self.inner == "lz4":
            return lambda plane: bytes(Lz4(0).encode(plane)[0])
        # Narrow words are worth more effort: half of their bytes compress, not a quarter.
        smallest = self.level > 2 or (self.level == 2 and width <= 2)
        window_log = 17 if self.level < 2 else 11 if smallest else 13
        return functools.partial(zstd.compress, options=_options(window_log))


@functools.cache
def _options(window_log: int) -> dict[int, int]:
    parameter = zstd.CompressionParameter
    options = {
        int(parameter.strategy): int(zstd.Strategy.fast),
        int(parameter.hash_log): 6,
        int(parameter.min_match): 7,
        int(parameter.window_log): window_log,
    }
    # Skipping turns entropy coding off, unless it is asked for.
    skipping = options | {int(parameter.target_length): _SKIP, _LITERALS: 1}
    try:
        zstd.compress(b"", options=skipping)
        return skipping
    except (ValueError, zstd.ZstdError):  # a zstd that does not know it: a third slower
        return options


def split(words: Array, k: int, plane: Array) -> Array:
    """Fill `plane` with the k-th bytes of all words, and return it.

    Shift and narrow: numpy does both with SIMD, twice as fast as a strided byte copy.
    """
    if k:
        shifted = SCRATCH.array("shifted", words.size, words.dtype)
        words = np.right_shift(words, 8 * k, out=shifted)
    np.copyto(plane, words, casting="unsafe")
    return plane


def looks_compressible(plane: Array, compress: Callable[[Any], bytes]) -> bool:
    """Try a sample: mantissa bytes are noise, and most of the time would go into finding out."""
    if plane.size < 8 * _PIECES * _PIECE_BYTES:
        return True
    step = plane.size // _PIECES
    sample = plane[: step * _PIECES].reshape(_PIECES, step)[:, :_PIECE_BYTES].reshape(-1)
    return len(compress(sample)) < _WORTH_IT * sample.size


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
