"""Byte planes, each compressed if that helps; and codecs around another one.

The difference to a base, and floats within a stated error, are planes unless told otherwise.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.core.codecs.base import (
    SIGNED,
    UNSIGNED,
    Array,
    Buffer,
    Codec,
    Lz4,
    as_unsigned,
    expect,
    unlz4,
    unzstd,
    zstd,
)
from penstock.core.reuse import BLOCKS
from penstock.errors import UnsupportedValue, UsageError

_LARGEST_EPSILON = 1e300  # twice that is still a number
_GRID = 1.9375  # in epsilons; under 2, to leave room for the rounding of the float type itself
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
    levels = range(23)
    inner: str = "zstd"
    level: int = 2

    def __post_init__(self) -> None:
        if self.inner not in ("zstd", "lz4"):
            raise UsageError(f"planes: unknown inner codec {self.inner!r}; use 'zstd' or 'lz4'")
        super().__post_init__()

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
        return functools.partial(zstd.compress, options=self.options(width))

    def options(self, width: int) -> dict[int, int]:
        """Return the settings of zstd for planes of words of this width."""
        # Narrow words are worth more effort: half of their bytes compress, not a quarter.
        smallest = self.level > 2 or (self.level == 2 and width <= 2)
        return _options(17 if self.level < 2 else 11 if smallest else 13)


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
        shifted = BLOCKS.array(words.shape, words.dtype)
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
        planes = [_paired(low, high, BLOCKS.array(low.shape, wide)) for low, high in pairs]
    if len(planes) == 2:
        _paired(planes[0], planes[1], out)
    else:
        out[:] = planes[0]


def _paired(low: Array, high: Array, out: Array) -> Array:
    np.copyto(out, high)
    np.left_shift(out, 8 * low.itemsize, out=out)
    return np.bitwise_or(out, low, out=out)


@dataclass(frozen=True)
class Delta(Codec):
    """The difference to a base block, as integers, with the sign in the lowest bit.

    Subtracting the bit patterns beats XOR on weights: close floats have close patterns.
    """

    id = "delta"
    needs_base = True
    inner: Codec = field(default_factory=Planes)

    def __post_init__(self) -> None:
        _check_inner(self)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Encode the difference to `base`, which must have the same size."""
        current, reference = as_unsigned(values), _reference(values, base)
        signed = SIGNED[current.itemsize]
        difference = BLOCKS.array(current.shape, current.dtype)
        difference = np.subtract(current, reference, out=difference).view(signed)
        sign = BLOCKS.array(current.shape, signed)
        np.right_shift(difference, 8 * current.itemsize - 1, out=sign)
        np.left_shift(difference, 1, out=difference)
        np.bitwise_xor(difference, sign, out=difference)
        return self.inner.encode(difference.view(current.dtype))

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decode the difference and add it to `base`."""
        target, reference = as_unsigned(out), _reference(out, base)
        self.inner.decode(data, target)
        negative = (target & target.dtype.type(1)).view(SIGNED[target.itemsize])
        np.right_shift(target, 1, out=target)
        np.bitwise_xor(target, np.negative(negative).view(target.dtype), out=target)
        np.add(target, reference, out=target)


def _reference(values: Array, base: Array | None) -> Array:
    if base is None or base.nbytes != values.nbytes:
        raise UsageError("delta: a base block of the same size is needed")
    return as_unsigned(base).view(as_unsigned(values).dtype)


@dataclass(frozen=True)
class Quantize(Codec):
    """Floats rounded to a grid of nearly 2 * epsilon: every value comes back within epsilon.

    Hazard: lossy. NaN and infinities cannot be held and are refused, as are values so large that
    the grid or the float type cannot keep the bound.
    """

    id = "quantize"
    lossy = True
    epsilon: float
    inner: Codec = field(default_factory=Planes)

    def __post_init__(self) -> None:
        if not (isinstance(self.epsilon, int | float) and 0 < self.epsilon <= _LARGEST_EPSILON):
            raise UsageError(f"quantize: epsilon must be a positive number, not {self.epsilon!r}")
        object.__setattr__(self, "epsilon", float(self.epsilon))
        _check_inner(self)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Round, check the bound on the values that will be read back, then encode."""
        if values.dtype.kind != "f":
            raise UnsupportedValue(f"quantize holds floats only, not {values.dtype}")
        if not np.isfinite(values).all():
            raise UnsupportedValue("quantize cannot hold NaN or infinity; store it losslessly")
        with np.errstate(over="ignore"):  # what is beyond the grid does not come back, below
            steps = np.rint(values.astype(np.float64) / (self.epsilon * _GRID))
        small = np.abs(steps).max(initial=0.0) < 2**15
        grid = steps.clip(-(2**31), 2**31 - 1).astype(np.int16 if small else np.int32)
        read_back = np.empty_like(values)
        self._scale(grid, read_back)
        error = np.abs(read_back.astype(np.float64) - values)
        if float(error.max(initial=0.0)) > self.epsilon:
            raise UnsupportedValue(
                f"quantize: {values.dtype} cannot keep an error of {self.epsilon:.3g} at values up "
                f"to {float(np.abs(values).max()):.3g}; use a larger epsilon"
            )
        return [struct.pack("<B", grid.itemsize), *self.inner.encode(grid)]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decode the grid and scale it."""
        expect(out.dtype.kind == "f", "a quantised block can only hold floats")
        expect(len(data) > 0 and data[0] in (2, 4), "a quantised block has no grid width")
        grid = np.empty(out.size, SIGNED[data[0]])
        self.inner.decode(data[1:], grid)
        self._scale(grid, out)

    def _scale(self, grid: Array, out: Array) -> None:
        with np.errstate(over="ignore"):  # found by the check of the bound, or by the checksum
            out[:] = grid.astype(np.float64) * (self.epsilon * _GRID)


def _check_inner(codec: Delta | Quantize) -> None:
    if isinstance(codec.inner, Delta | Quantize):
        raise UsageError(f"{codec.id}: the inner codec cannot be {codec.inner.id}; use a plain one")
