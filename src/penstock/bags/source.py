"""Bytes of a file by position, and of its chunks: decompressed within what they declare."""

from __future__ import annotations

import bz2
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import lz4.frame
from isal import isal_zlib

from penstock.bags.limits import BadRecord, Limits, expect
from penstock.core.codecs import zstd
from penstock.core.files import storage_error
from penstock.errors import CorruptFile, DataError, UnknownFormat, UsageError
from penstock.objects import ObjectPath, as_object

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
SMALL_PART: Final = 8  # a message of less than this part of what it lies in is copied out of it
_INPUT_BYTES: Final = 1 << 16
_OUTPUT_BYTES: Final = 1 << 20
_REMOTE_PAGE_BYTES: Final = 8192
_REMOTE_PAGES: Final = 256
_SMALL_BYTES: Final = 8192


class ChecksumMismatch(BadRecord):
    """The bytes of a chunk are not those that were written: any of them may be wrong."""


class Source:
    """A file that is read by position, from any thread; its end is known before it is read.

    Attributes:
        bytes_read: What was read so far.
    """

    remote: bool = False  # whether a read takes its time, so that it is worth to read ahead
    _descriptor: int | None = None  # there even if a signal comes within __init__

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            self.size_bytes = os.fstat(self._descriptor).st_size
        except FileNotFoundError:
            raise DataError(f"{path} does not exist; check the path") from None
        except OSError as error:
            raise storage_error("read", path, error) from error

    def read(self, pos: int, size_bytes: int, what: str = "a record") -> bytes:
        """Return exactly so many bytes; nothing is allocated for bytes that the file has not."""
        self._check(pos, size_bytes, what)
        assert self._descriptor is not None
        try:
            data = os.pread(self._descriptor, size_bytes, pos)
            while len(data) < size_bytes:  # a read of more than 2 GB, or an interrupted one
                more = os.pread(self._descriptor, size_bytes - len(data), pos + len(data))
                expect(bool(more), self.path, f"the file was cut while it was read, at {pos}")
                data += more
        except OSError as error:
            raise storage_error("read", self.path, error) from error
        with self._lock:
            self.bytes_read += size_bytes
        return data

    def _check(self, pos: int, size_bytes: int, what: str) -> None:
        if self._descriptor is None:
            raise UsageError(f"{self.path} was closed; read it inside of its `with` block")
        expect(
            pos >= 0 and 0 <= size_bytes <= self.size_bytes - pos,
            self.path,
            f"{what} at {pos} wants {size_bytes} bytes, but the file has {self.size_bytes}; "
            "pass --salvage to read what there is",
        )

    def peek(self, pos: int, size_bytes: int) -> bytes:
        """Return so many bytes, or as many as there are until the end of the file."""
        return self.read(pos, max(min(size_bytes, self.size_bytes - pos), 0))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()


class ObjectSource(Source):
    """An object in object storage: a range is one request, and small ones share pages.

    The heads and indexes of chunks are small and lie beside what is read next. A page is small
    against a chunk, too, so that hardly more is read than is wanted.
    """

    remote = True

    def __init__(self, path: ObjectPath) -> None:
        self.path: Any = path
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._pages: dict[int, bytes] = {}  # the oldest first
        try:
            self._file = path.open_ranges()
        except FileNotFoundError:
            raise DataError(f"{path} does not exist; check the path") from None
        self.size_bytes = self._file.size_bytes
        self._descriptor = -1

    def read(self, pos: int, size_bytes: int, what: str = "a record") -> bytes:
        """Return exactly so many bytes."""
        self._check(pos, size_bytes, what)
        if size_bytes > _SMALL_BYTES:
            return self._fetch(pos, size_bytes)
        first, last = pos // _REMOTE_PAGE_BYTES, (pos + size_bytes - 1) // _REMOTE_PAGE_BYTES
        data = b"".join(self._page(number) for number in range(first, last + 1))
        start = pos - first * _REMOTE_PAGE_BYTES
        return data[start : start + size_bytes]

    def _page(self, number: int) -> bytes:
        with self._lock:
            page = self._pages.get(number)
        if page is None:
            pos = number * _REMOTE_PAGE_BYTES
            page = self._fetch(pos, min(_REMOTE_PAGE_BYTES, self.size_bytes - pos))
            with self._lock:
                self._pages[number] = page
                if len(self._pages) > _REMOTE_PAGES:
                    del self._pages[next(iter(self._pages))]
        return page

    def _fetch(self, pos: int, size_bytes: int) -> bytes:
        data = self._file.read(pos, size_bytes)
        with self._lock:
            self.bytes_read += size_bytes
        return data

    def close(self) -> None:
        """Let the object go; safe to call twice."""
        if self._descriptor is not None:
            self._descriptor = None
            self._file.close()


def open_source(path: Path) -> Source:
    """Open a file, or an object in object storage."""
    remote = as_object(path)
    return Source(path) if remote is None else ObjectSource(remote)


class Stored(NamedTuple):
    """How the bytes of a chunk are stored.

    Attributes:
        start: Where they begin in the file.
        stop: Where they end.
        size_bytes: How many they are when decompressed.
        crc: The checksum of the decompressed bytes; 0 for none, None if it is compared later.
        compression: "none" or "", "lz4", "bz2" or "zstd".
    """

    start: int
    stop: int
    size_bytes: int
    crc: int | None = 0
    compression: str = ""


class ChunkStream:
    """The decompressed bytes of a chunk, from its beginning to its end.

    A small chunk is one piece. Of a large one a piece at a time is decompressed and held, so its
    bytes can be asked for in rising order only.

    Args:
        source: The file.
        stored: Where and how the bytes lie in it; the size is checked against the limits.
        limits: What the chunk may ask for.
        usable_bytes: Of a damaged chunk: its bytes up to the damage. The others, and the checksum,
            are then not looked at.
        careful: Decompress in small steps, to have all bytes before a damage.
    """

    def __init__(
        self,
        source: Source,
        stored: Stored,
        limits: Limits,
        usable_bytes: int = -1,
        careful: bool = False,
    ) -> None:
        limits.check_ratio(source.path, stored.stop - stored.start, stored.size_bytes)
        self._source, self._stored, self._limits = source, stored, limits
        self._data = b""
        self._first = 0  # where the piece begins in the chunk
        # The generators know nothing of this object: a circle would keep a piece of every chunk
        # that is not read to its end.
        self._crc = [0]
        pieces = _decompressed(source, stored, limits, careful or usable_bytes >= 0)
        self._pieces = _checked(source, stored, pieces, usable_bytes, self._crc)

    @property
    def crc(self) -> int:
        """The checksum of all bytes, once the end was reached, unless there is none to compare."""
        return self._crc[0]

    def window(self, offset: int, size_bytes: int) -> tuple[bytes, int]:
        """Return a piece, and where in it the bytes at an offset are; fewer at the chunk's end."""
        at = offset - self._first
        if at < 0:
            raise BadRecord("the messages of a chunk overlap")
        while at >= len(self._data):
            at -= len(self._data)
            if not self._next():
                return b"", 0
        while at + size_bytes > len(self._data):
            rest = self._data[at:]
            if not self._next():
                self._data, self._first = rest, self._first - len(rest)
                return rest, 0
            self._data, self._first = rest + self._data, self._first - len(rest)
            at = 0
        return self._data, at

    def take(self, offset: int, size_bytes: int) -> bytes | memoryview:
        """Return the bytes at an offset; they stay valid for as long as they are held."""
        piece, at = self.window(offset, 1 if size_bytes else 0)
        if at + size_bytes <= len(piece):
            view = memoryview(piece)[at : at + size_bytes]
            return bytes(view) if size_bytes * SMALL_PART < len(piece) else view
        found = bytearray(size_bytes)
        done = 0
        while True:
            part = memoryview(self._data)[at : at + size_bytes - done]
            found[done : done + len(part)] = part
            done += len(part)
            if done == size_bytes:
                return memoryview(found).toreadonly()
            at = 0
            if not self._next():
                raise BadRecord("a message goes beyond the end of its chunk")

    def reach(self, stop: int) -> None:
        """Make sure that the chunk goes as far as an offset."""
        if stop > self.reached and self.window(stop - 1, 1) == (b"", 0):
            raise BadRecord("a record goes beyond the end of its chunk")

    @property
    def reached(self) -> int:
        """The offset up to which the chunk was decompressed."""
        return self._first + len(self._data)

    def finish(self) -> None:
        """Go on to the end, for the checks of size and checksum."""
        while self._next():
            pass

    def _next(self) -> bool:
        """Hold the next piece; False at the end."""
        self._first += len(self._data)
        self._data = b""  # else two pieces are in memory
        self._data = next(self._pieces, b"")
        return bool(self._data)


def _checked(
    source: Source, stored: Stored, pieces: Iterator[bytes], usable_bytes: int, crc: list[int]
) -> Iterator[bytes]:
    """Pass the pieces on, and hold their sum to what the chunk declares."""
    size_bytes = 0
    if usable_bytes >= 0:
        for piece in pieces:
            left = usable_bytes - size_bytes
            size_bytes += len(piece)
            yield piece[:left]
            if size_bytes >= usable_bytes:
                return
        return
    wrong = (
        f"{source.path}: a chunk holds another number of bytes than the "
        f"{stored.size_bytes} that it declares; pass --salvage to read the rest"
    )
    for piece in pieces:
        size_bytes += len(piece)
        if size_bytes > stored.size_bytes:
            raise CorruptFile(wrong)
        if stored.crc != 0:
            crc[0] = isal_zlib.crc32(piece, crc[0])
        if stored.crc and size_bytes == stored.size_bytes and crc[0] != stored.crc:
            raise ChecksumMismatch("a chunk does not match its checksum")
        yield piece
    if size_bytes < stored.size_bytes:
        raise CorruptFile(wrong)


def _decompressed(source: Source, stored: Stored, limits: Limits, careful: bool) -> Iterator[bytes]:
    start, stop, size_bytes, _, compression = stored
    piece_bytes = min(_OUTPUT_BYTES, limits.piece_bytes)
    small = max(stop - start, size_bytes) <= limits.piece_bytes
    if compression in PLAIN:
        if careful:
            stop = min(stop, start + size_bytes)
        step = max(stop - start, 1) if small else piece_bytes
        for pos in range(start, stop, step):
            yield source.read(pos, min(step, stop - pos), "a chunk")
        return
    decompressor = new_decompressor(compression, limits)
    if decompressor is None:
        raise UnknownFormat(f"{source.path}: unknown compression {compression[:40]!r}")
    small = small and not careful
    # One byte more than declared, so that a chunk that holds more is found out.
    most_bytes = size_bytes + 1 if small else piece_bytes
    pos = start
    while not decompressor.eof:
        data = b""
        if decompressor.needs_input and pos < stop:
            step = stop - pos if small else min(_INPUT_BYTES, stop - pos)
            data = source.read(pos, step, "a chunk")
            pos += step
        try:
            piece = decompressor.decompress(data, max_length=most_bytes)
        except DECOMPRESSION_ERRORS as error:
            raise CorruptFile(
                f"{source.path}: a {compression} chunk cannot be decompressed ({error}); "
                "pass --salvage to read the rest"
            ) from error
        if piece:
            yield piece
        elif not data and (pos == stop or not decompressor.needs_input):
            return  # it is cut


def inflate_message(path: Path, data: bytes | memoryview, limits: Limits) -> bytes:
    """Return a message that was compressed on its own (rosbag2's compression mode "message")."""
    decompressor = new_decompressor("zstd", limits)
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


def new_decompressor(compression: str, limits: Limits) -> Any:
    """Return a decompressor with a bound on its output; None for an unknown kind."""
    match compression:
        case "lz4":
            return lz4.frame.LZ4FrameDecompressor()
        case "bz2":
            return bz2.BZ2Decompressor()
        case "zstd":
            window = zstd.DecompressionParameter.window_log_max
            return zstd.ZstdDecompressor(options={window: limits.window_bytes.bit_length() - 1})
    return None
