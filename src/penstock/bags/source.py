"""Bytes of a file by position, and chunks decompressed within their declared size."""

from __future__ import annotations

import bz2
import os
from pathlib import Path
from typing import Any, Final

import lz4.frame

from penstock.bags.limits import Limits, expect
from penstock.core.codecs import zstd
from penstock.core.files import storage_error
from penstock.errors import CorruptFile, DataError, UnknownFormat, UsageError

PLAIN: Final = ("none", "")
DECOMPRESSION_ERRORS: Final = (
    RuntimeError,
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    zstd.ZstdError,
)
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"  # how no CDR data begins
_PIECE_BYTES: Final = 1 << 16


class Source:
    """A file that is read by position, from any thread; its end is known before it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            self.size_bytes = os.fstat(self._descriptor).st_size
        except FileNotFoundError:
            raise DataError(f"{path} does not exist; check the path") from None
        except OSError as error:
            raise storage_error("read", path, error) from error

    def read(self, pos: int, size_bytes: int, what: str = "a record") -> bytes:
        """Return exactly so many bytes; nothing is allocated for bytes that the file has not."""
        if self._descriptor is None:
            raise UsageError(f"{self.path} was closed; read it inside of its `with` block")
        expect(
            pos >= 0 and 0 <= size_bytes <= self.size_bytes - pos,
            self.path,
            f"{what} at {pos} wants {size_bytes} bytes, but the file has {self.size_bytes}; "
            "pass --salvage to read what there is",
        )
        try:
            data = os.pread(self._descriptor, size_bytes, pos)
            while len(data) < size_bytes:  # a read of more than 2 GB, or an interrupted one
                more = os.pread(self._descriptor, size_bytes - len(data), pos + len(data))
                expect(bool(more), self.path, f"the file was cut while it was read, at {pos}")
                data += more
        except OSError as error:
            raise storage_error("read", self.path, error) from error
        return data

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()


def inflate(path: Path, compression: str, data: bytes, size_bytes: int, limits: Limits) -> bytes:
    """Return the decompressed bytes of a chunk, exactly as many as it declares.

    Args:
        path: For the errors.
        compression: "none" or "", "lz4", "bz2" or "zstd".
        data: The stored bytes.
        size_bytes: The declared size, checked against the limits before anything is allocated.
        limits: What a chunk may ask for.
    """
    limits.check_chunk(path, len(data), size_bytes)
    plain = data
    if compression not in PLAIN:
        decompressor = new_decompressor(compression)
        if decompressor is None:
            raise UnknownFormat(f"{path}: unknown compression {compression[:40]!r}")
        try:
            # One byte more than declared, so that a chunk that holds more is found out.
            plain = decompressor.decompress(data, max_length=size_bytes + 1)
        except DECOMPRESSION_ERRORS as error:
            raise CorruptFile(
                f"{path}: a {compression} chunk cannot be decompressed ({error}); pass --salvage "
                "to read the rest"
            ) from error
    expect(
        len(plain) == size_bytes,
        path,
        f"a chunk holds another number of bytes than the {size_bytes} that it declares; pass "
        "--salvage to read the rest",
    )
    return plain


def inflate_prefix(
    path: Path, compression: str, data: bytes, size_bytes: int, limits: Limits
) -> bytes:
    """Return as much of a damaged chunk as can be decompressed; possibly nothing."""
    limits.check_chunk(path, len(data), size_bytes)
    if compression in PLAIN:
        return data[:size_bytes]
    decompressor = new_decompressor(compression)
    if decompressor is None:
        return b""
    found = bytearray()
    try:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            while len(found) < size_bytes and not decompressor.eof:
                found += decompressor.decompress(piece, max_length=size_bytes - len(found))
                piece = b""
                if decompressor.needs_input:
                    break
    except DECOMPRESSION_ERRORS:
        pass
    return bytes(found)


def inflate_message(path: Path, data: bytes | memoryview, limits: Limits) -> bytes:
    """Return a message that was compressed on its own (rosbag2's compression mode "message")."""
    decompressor = zstd.ZstdDecompressor()
    most_bytes = max(limits.ratio_from_bytes, len(data) * limits.ratio)
    try:
        plain: bytes = decompressor.decompress(
            data, max_length=min(most_bytes, limits.record_bytes)
        )
    except DECOMPRESSION_ERRORS as error:
        raise CorruptFile(f"{path}: a message cannot be decompressed ({error})") from error
    if not decompressor.eof:
        raise CorruptFile(f"{path}: a compressed message is cut, or above the limits")
    return plain


def new_decompressor(compression: str) -> Any:
    """Return a decompressor with a bound on its output; None for an unknown kind."""
    match compression:
        case "lz4":
            return lz4.frame.LZ4FrameDecompressor()
        case "bz2":
            return bz2.BZ2Decompressor()
        case "zstd":
            return zstd.ZstdDecompressor()
    return None
