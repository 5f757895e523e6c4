"""Arrays to bytes and back: one small class per codec, rebuilt from a JSON config.

A codec works on one block: a contiguous 1-D array in, buffers out; `decode` fills memory that the
caller owns and checks every size before it allocates. All heavy calls release the GIL, and no
codec keeps state between calls, so that blocks may be coded by several threads.

    raw        the bytes as they are
    lz4, zstd  a general compressor over the bytes
    planes     the k-th bytes of all elements together, each plane compressed if that helps
    series     series.py: zeros as a bitmap, the rest as differences to the one before, in planes
    delta      zigzag integer difference to a base of the same size, then an inner codec
    quantize   bounded error: only when the user states the epsilon; then an inner codec

`Layout` is the temporal layout: a permutation of the axes, so that neighbours in time lie together.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lz4.block
import numpy as np
import zstandard
from numpy.typing import NDArray

from penstock.core.planes import SCRATCH, SIGNED, UNSIGNED, join, looks_compressible, split
from penstock.errors import CorruptFile, UnsupportedValue, UsageError

Array = NDArray[Any]
Buffer = bytes | bytearray | memoryview
Config = dict[str, Any]

_LARGEST_EPSILON = 1e300  # twice that is still a number
_GRID = 1.9375  # in epsilons; under 2, to leave room for the rounding of the float type itself


class Codec(ABC):
    """One way to turn a block of values into bytes."""

    id: ClassVar[str]
    lossy: ClassVar[bool] = False
    needs_base: ClassVar[bool] = False

    @abstractmethod
    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Encode a contiguous 1-D array; the result is the concatenation of the buffers."""

    @abstractmethod
    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Fill `out` from encoded bytes; raise CorruptFile if they do not fit."""

    def config(self) -> Config:
        """Return the JSON settings from which `from_config` rebuilds this codec."""
        return {"id": self.id}


class Raw(Codec):
    """The bytes as they are."""

    id = "raw"

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Return a view, no copy."""
        return [bytes_of(values)]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Copy."""
        target = bytes_of(out)
        expect(len(data) == len(target), "a raw block has the wrong length")
        target[:] = data


class Lz4(Codec):
    """LZ4 block compression: fast, modest."""

    id = "lz4"

    def __init__(self, level: int = 0) -> None:
        self.level = checked_level("lz4", level, 0, 16)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Compress; level 0 is the fast mode, higher levels are the slow, smaller one."""
        mode = "default" if self.level == 0 else "high_compression"
        return [
            lz4.block.compress(
                bytes_of(values), mode=mode, compression=self.level, store_size=False
            )
        ]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decompress into `out`."""
        bytes_of(out)[:] = unlz4(data, out.nbytes)

    def config(self) -> Config:
        """Return the settings."""
        return {"id": self.id, "level": self.level}


class Zstd(Codec):
    """Zstandard over the bytes."""

    id = "zstd"

    def __init__(self, level: int = 3) -> None:
        self.level = checked_level("zstd", level, 1, 22)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Compress; the frame states its content size."""
        return [zstandard.ZstdCompressor(level=self.level).compress(bytes_of(values))]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decompress into `out`."""
        bytes_of(out)[:] = unzstd(data, out.nbytes)

    def config(self) -> Config:
        """Return the settings."""
        return {"id": self.id, "level": self.level}


class Planes(Codec):
    """Byte planes: only the exponent bytes of floats compress, so they are taken apart.

    With zstd the compressor is tuned for such planes: almost no match search, entropy coding over
    short windows. Measured on float32 weights and Adam moments this is smaller and up to twice as
    fast as zstd's own level 1. Levels: 1 fastest, 2 balanced, 3 and above smallest.
    """

    id = "planes"

    def __init__(self, inner: str = "zstd", level: int = 2) -> None:
        if inner not in ("zstd", "lz4"):
            raise UsageError(f"planes: unknown inner codec {inner!r}; use 'zstd' or 'lz4'")
        self.inner = inner
        self.level = checked_level("planes", level, 0, 22)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Split into planes and compress each one that gets smaller."""
        words = as_unsigned(values)
        count, width = words.size, words.itemsize
        compress = self.compressor(width)
        out = np.empty(4 * width + values.nbytes, np.uint8)
        at, lengths = 4 * width, []
        for k in range(width):
            plane = split(words, k)
            packed = compress(plane) if looks_compressible(plane, compress) else b""
            chosen = np.frombuffer(packed, np.uint8) if 0 < len(packed) < count else plane
            out[at : at + chosen.size] = chosen
            at += chosen.size
            lengths.append(chosen.size)
        out[: 4 * width] = np.frombuffer(struct.pack(f"<{width}I", *lengths), np.uint8)
        return [out[:at].data]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Put the planes together again."""
        words = as_unsigned(out)
        head = 4 * words.itemsize
        expect(len(data) >= head, "a block of planes is too short")
        lengths = struct.unpack_from(f"<{words.itemsize}I", data)
        expect(sum(lengths) == len(data) - head, "a block of planes has the wrong length")
        planes = []
        at = head
        for length in lengths:
            planes.append(self._plane(data[at : at + length], words.size))
            at += length
        join(planes, words)

    def _plane(self, part: memoryview, count: int) -> Array:
        if len(part) == count:
            return np.frombuffer(part, np.uint8)
        if self.inner == "zstd":
            return np.frombuffer(unzstd(part, count), np.uint8)
        return np.frombuffer(unlz4(part, count), np.uint8)

    def compressor(self, width: int) -> Callable[[Any], bytes]:
        """Return what compresses one plane of words of this width."""
        if self.inner == "lz4":
            return lambda plane: bytes(Lz4(0).encode(plane)[0])
        # Narrow words are worth more effort: half of their bytes compress, not a quarter.
        narrow = width <= 2
        window_log = 17 if self.level < 2 else 14 if self.level == 2 and not narrow else 11
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            hash_log=6,
            min_match=7,
            window_log=window_log,
            write_content_size=1,
        )
        compress: Callable[[Any], bytes]
        compress = zstandard.ZstdCompressor(compression_params=parameters).compress
        return compress

    def config(self) -> Config:
        """Return the settings."""
        return {"id": self.id, "inner": self.inner, "level": self.level}


class Delta(Codec):
    """The difference to a base block, as integers, with the sign in the lowest bit.

    Subtracting the bit patterns beats XOR on weights: close floats have close patterns.
    """

    id = "delta"
    needs_base = True

    def __init__(self, inner: Codec | None = None) -> None:
        self.inner = _checked_inner("delta", inner)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Encode the difference to `base`, which must have the same size."""
        current, reference = as_unsigned(values), self._reference(values, base)
        signed = SIGNED[current.itemsize]
        difference = SCRATCH.array("difference", current.size, current.dtype)
        difference = np.subtract(current, reference, out=difference).view(signed)
        sign = SCRATCH.array("sign", current.size, signed)
        np.right_shift(difference, 8 * current.itemsize - 1, out=sign)
        np.left_shift(difference, 1, out=difference)
        np.bitwise_xor(difference, sign, out=difference)
        return self.inner.encode(difference.view(current.dtype))

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decode the difference and add it to `base`."""
        target, reference = as_unsigned(out), self._reference(out, base)
        self.inner.decode(data, target)
        negative = (target & target.dtype.type(1)).view(SIGNED[target.itemsize])
        np.right_shift(target, 1, out=target)
        np.bitwise_xor(target, np.negative(negative).view(target.dtype), out=target)
        np.add(target, reference, out=target)

    def _reference(self, values: Array, base: Array | None) -> Array:
        if base is None or base.nbytes != values.nbytes:
            raise UsageError("delta: a base block of the same size is needed")
        return as_unsigned(base).view(as_unsigned(values).dtype)

    def config(self) -> Config:
        """Return the settings."""
        return {"id": self.id, "inner": self.inner.config()}


class Quantize(Codec):
    """Floats rounded to a grid of nearly 2 * epsilon: every value comes back within epsilon.

    Hazard: lossy. NaN and infinities cannot be held and are refused, as are values so large that
    the grid or the float type cannot keep the bound.
    """

    id = "quantize"
    lossy = True

    def __init__(self, epsilon: float, inner: Codec | None = None) -> None:
        if not (isinstance(epsilon, int | float) and 0 < epsilon <= _LARGEST_EPSILON):
            raise UsageError(f"quantize: epsilon must be a positive number, not {epsilon!r}")
        self.epsilon = float(epsilon)
        self._step = self.epsilon * _GRID
        self.inner = _checked_inner("quantize", inner)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Round, check the bound on the values that will be read back, then encode."""
        if values.dtype.kind != "f":
            raise UnsupportedValue(f"quantize holds floats only, not {values.dtype}")
        if not np.isfinite(values).all():
            raise UnsupportedValue("quantize cannot hold NaN or infinity; store it losslessly")
        with np.errstate(over="ignore"):  # an infinite number of steps is refused below
            steps = np.rint(values.astype(np.float64) / self._step)
        largest = float(np.abs(steps).max(initial=0.0))
        if largest >= 2**31:
            raise UnsupportedValue(
                f"quantize: values up to {largest * self._step:.3g} do not fit a grid of "
                f"{self._step:.3g}; use a larger epsilon"
            )
        grid = steps.astype(np.int16 if largest < 2**15 else np.int32)
        error = np.abs(self._values(grid, values.dtype).astype(np.float64) - values)
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
        out[:] = self._values(grid, out.dtype)

    def _values(self, grid: Array, dtype: np.dtype[Any]) -> Array:
        with np.errstate(over="ignore"):  # found by the check of the bound, or by the checksum
            return (grid.astype(np.float64) * self._step).astype(dtype)

    def config(self) -> Config:
        """Return the settings."""
        return {"id": self.id, "epsilon": self.epsilon, "inner": self.inner.config()}


@dataclass(frozen=True)
class Layout:
    """A permutation of the axes in which an array is stored.

    Rollouts of shape [time, env, feature] compress best with time last: Layout((1, 2, 0)).
    """

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise UsageError(f"layout {self.order} is not a permutation of the axes")

    def apply(self, array: Array) -> Array:
        """Return the array as it is stored, contiguous."""
        return np.asarray(array.transpose(self.order), order="C")

    def undo(self, stored: Array) -> Array:
        """Return a view in the original order of axes."""
        return stored.transpose(np.argsort(self.order))

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the stored array."""
        return tuple(shape[axis] for axis in self.order)


def from_config(config: Mapping[str, Any]) -> Codec:
    """Rebuild a codec from its JSON settings; anything unexpected is a CorruptFile."""
    try:
        settings = dict(config)
        kind = settings.pop("id", None)
        if kind in ("delta", "quantize"):
            settings["inner"] = from_config(settings["inner"])
        match kind:
            case "raw":
                return Raw(**settings)
            case "lz4":
                return Lz4(**settings)
            case "zstd":
                return Zstd(**settings)
            case "planes":
                return Planes(**settings)
            case "series":
                from penstock.core.series import Series

                return Series(**settings)
            case "delta":
                return Delta(**settings)
            case "quantize":
                return Quantize(**settings)
    except RecursionError:
        raise CorruptFile("codec settings are nested too deep") from None
    except (TypeError, ValueError, KeyError, UsageError) as error:
        raise CorruptFile(f"codec settings {config!r} make no sense ({error})") from error
    raise CorruptFile(f"unknown codec {kind!r}; a newer penstock may have written this file")


def bytes_of(values: Array) -> memoryview:
    """View the bytes of a contiguous array."""
    return memoryview(_bytes_array(values))  # type: ignore[arg-type]


def _bytes_array(values: Array) -> NDArray[np.uint8]:
    return values.reshape(-1).view(np.uint8)


def as_unsigned(values: Array) -> Array:
    """View as unsigned words; complex numbers become pairs of words."""
    width = values.itemsize // 2 if values.dtype.kind == "c" else values.itemsize
    return values.reshape(-1).view(UNSIGNED[width])


def unlz4(data: Buffer, size_bytes: int) -> bytes:
    """Decompress a block that must hold `size_bytes`."""
    try:
        content: bytes = lz4.block.decompress(data, uncompressed_size=size_bytes)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise CorruptFile(f"a block is not LZ4 data ({error})") from error
    expect(len(content) == size_bytes, "an LZ4 block has the wrong length")
    return content


def unzstd(data: Buffer, size_bytes: int) -> bytes:
    """Decompress a frame that must hold `size_bytes`."""
    try:
        # The frame states its size: an allocation is made only when it is the expected one.
        expect(
            zstandard.frame_content_size(data) == size_bytes, "a zstd block has the wrong length"
        )
        content: bytes = SCRATCH.zstd.decompress(data)
        return content
    except zstandard.ZstdError as error:
        raise CorruptFile(f"a block is not zstd data ({error})") from error


def expect(condition: bool, message: str) -> None:
    """Say that encoded bytes make no sense."""
    if not condition:
        raise CorruptFile(message)


def _checked_inner(codec: str, inner: Codec | None) -> Codec:
    if isinstance(inner, Delta | Quantize):
        raise UsageError(f"{codec}: the inner codec cannot be {inner.id}; use a plain one")
    return inner or Planes()


def checked_level(codec: str, level: int, lowest: int, highest: int) -> int:
    """Refuse a level that a codec does not have."""
    if not isinstance(level, int) or not lowest <= level <= highest:
        raise UsageError(f"{codec}: level {level!r} is not in {lowest}..{highest}")
    return level
