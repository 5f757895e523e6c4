"""What a codec is, and those that take the bytes as bytes: as they are, LZ4, zstd."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import lz4.block
import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptFile, UsageError

# The zstd of Python itself (3.14, backported before): its output can be bounded as it grows.
if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

Array = NDArray[Any]
Buffer = bytes | bytearray | memoryview

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Codec(ABC):
    """One way to turn a block of values into bytes; its fields are its settings."""

    id: ClassVar[str]
    lossy: ClassVar[bool] = False
    needs_base: ClassVar[bool] = False
    levels: ClassVar[range | None] = None  # those that there are, of codecs with a setting `level`

    def __post_init__(self) -> None:
        level = getattr(self, "level", None)
        if self.levels and (not isinstance(level, int) or level not in self.levels):
            lowest, highest = self.levels[0], self.levels[-1]
            raise UsageError(f"{self.id}: level {level!r} is not in {lowest}..{highest}")

    @abstractmethod
    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Encode a contiguous 1-D array; the result is the concatenation of the buffers."""

    @abstractmethod
    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Fill `out` from encoded bytes; raise CorruptFile if they do not fit."""

    def config(self) -> dict[str, Any]:
        """Return the JSON settings from which `from_config` rebuilds this codec."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"id": self.id} | {
            name: value.config() if isinstance(value, Codec) else value
            for name, value in settings.items()
        }


@dataclass(frozen=True)
class Layout:
    """A permutation of the axes in which an array is stored.

    Rollouts of shape [time, env, feature] compress best with time last: Layout((1, 2, 0)).
    """

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise UsageError(f"layout {self.order} is not a permutation of the axes")

    def undo(self, stored: Array) -> Array:
        """Return a view in the original order of axes."""
        view: Array = stored.transpose(np.argsort(self.order))
        return view


def bytes_of(values: Array) -> memoryview:
    """View the bytes of a contiguous array."""
    return memoryview(values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def as_unsigned(values: Array) -> Array:
    """View as unsigned words; complex numbers become pairs of words."""
    width = values.itemsize // 2 if values.dtype.kind == "c" else values.itemsize
    return values.reshape(-1).view(UNSIGNED[width])


def expect(condition: bool, message: str) -> None:
    """Say that encoded bytes make no sense."""
    if not condition:
        raise CorruptFile(message)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Lz4(Codec):
    """LZ4 block compression: fast, modest. Level 0 is the fast mode, others are smaller."""

    id = "lz4"
    levels = range(17)
    level: int = 0

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Compress; the size is not stored."""
        mode = "high_compression" if self.level else "default"
        content = bytes_of(values)
        return [lz4.block.compress(content, mode, compression=self.level, store_size=False)]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decompress into `out`."""
        bytes_of(out)[:] = unlz4(data, out.nbytes)


@dataclass(frozen=True)
class Zstd(Codec):
    """Zstandard over the bytes."""

    id = "zstd"
    levels = range(1, 23)
    level: int = 3

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Compress; the frame states its content size."""
        return [zstd.compress(bytes_of(values), self.level)]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decompress into `out`."""
        bytes_of(out)[:] = unzstd(data, out.nbytes)


@functools.cache
def compiled_kernels() -> Any:
    """Return the compiled kernels; None where numba is not installed (ten times slower)."""
    try:
        from penstock.core.kernels import series as kernels
    except ImportError:
        return None
    return kernels


def unlz4(data: Buffer, size_bytes: int) -> bytes:
    """Decompress a block that must hold `size_bytes`."""
    try:
        content: bytes = lz4.block.decompress(data, uncompressed_size=size_bytes)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise CorruptFile(f"a block is not LZ4 data ({error})") from error
    expect(len(content) == size_bytes, "an LZ4 block has the wrong length")
    return content


def unzstd(data: Buffer, size_bytes: int) -> bytes:
    """Decompress one frame that must hold `size_bytes`; never more than that is allocated."""
    decompressor = zstd.ZstdDecompressor()
    try:
        content: bytes = decompressor.decompress(data, max(size_bytes, 1))
    except (zstd.ZstdError, EOFError) as error:
        raise CorruptFile(f"a block is not zstd data ({error})") from error
    whole = decompressor.eof and not decompressor.unused_data
    expect(whole and len(content) == size_bytes, "a zstd block has the wrong length")
    return content
