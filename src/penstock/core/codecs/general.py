"""Codecs that take the bytes as bytes: as they are, LZ4, zstd."""

from __future__ import annotations

from dataclasses import dataclass

import lz4.block

from penstock.core.codecs.base import Array, Buffer, Codec, bytes_of, check_level, expect, zstd
from penstock.errors import CorruptFile


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
    level: int = 0

    def __post_init__(self) -> None:
        check_level("lz4", self.level, 0, 16)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Compress; the size is not stored."""
        mode = "default" if self.level == 0 else "high_compression"
        return [
            lz4.block.compress(
                bytes_of(values), mode=mode, compression=self.level, store_size=False
            )
        ]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decompress into `out`."""
        bytes_of(out)[:] = unlz4(data, out.nbytes)


@dataclass(frozen=True)
class Zstd(Codec):
    """Zstandard over the bytes."""

    id = "zstd"
    level: int = 3

    def __post_init__(self) -> None:
        check_level("zstd", self.level, 1, 22)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Compress; the frame states its content size."""
        return [zstd.compress(bytes_of(values), self.level)]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decompress into `out`."""
        bytes_of(out)[:] = unzstd(data, out.nbytes)


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
