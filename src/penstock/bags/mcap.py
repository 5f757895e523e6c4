"""MCAP files: chunks of records, message indexes after each, and a summary at the end.

Every checksum that a file carries is verified. A file without an index (not chunked, or without
message indexes) is read once when it is opened, to find where its messages are: messages outside of
chunks are grouped into stretches of about 1 MB, which are then read like chunks.

A record is an opcode, a length and fields; all numbers are little-endian.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from penstock.bags.chunked import ChunkedBag, Connection, HeadParser, Numbers, Record
from penstock.bags.idl import full_type
from penstock.bags.limits import BadRecord, Limits, expect
from penstock.bags.scan import Scanner
from penstock.bags.source import ChunkStream, Stored
from penstock.bags.table import LOOSE, Chunk
from penstock.errors import CorruptFile, UnknownFormat

MAGIC: Final = b"\x89MCAP0\r\n"
HEADER, FOOTER, SCHEMA, CHANNEL, MESSAGE, CHUNK, MESSAGE_INDEX = range(1, 8)
CHUNK_INDEX, STATISTICS, DATA_END = 8, 11, 15
RECORD_HEAD: Final = Struct("<BQ")
MESSAGE_HEAD: Final = Struct("<BQHIQQ")  # with the head of its record
FOOTER_BYTES: Final = RECORD_HEAD.size + 20 + len(MAGIC)
_CHUNK_HEAD: Final = Struct("<QQQII")
_MAP_ENTRY: Final = np.dtype([("key", "<u2"), ("value", "<u8")])
_INDEX_ENTRY: Final = np.dtype([("time", "<u8"), ("offset", "<u8")])
_INDEX_HEAD: Final = Struct("<BQHI")  # of a message index, with the head of its record
_LATEST_NS: Final = 2**63 - 1
_PEEK_BYTES: Final = 128
_STRETCH_BYTES: Final = 10**6
_WINDOW_BYTES: Final = 1 << 20
_COMPRESSIONS: Final = ("", "lz4", "zstd")
_TEXT_SCHEMAS: Final = ("ros1msg", "ros2msg", "ros2idl", "jsonschema", "omgidl", "")
# A chunk or message record below 1 TB: rare enough by chance to look closer at each.
_MARK: Final = re.compile(rb"[\x05\x06][\s\S]{5}\0\0\0")
_DAY_NS: Final = 86400 * 10**9


@dataclass(frozen=True, slots=True)
class Schema:
    """A message type."""

    name: str
    encoding: str
    definition: str | bytes


class Fields:
    """Reads the fields of one record; anything that does not fit is a BadRecord."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self._data = memoryview(data)
        self._pos = 0
        self._what = what

    def numbers(self, letters: str) -> tuple[int, ...]:
        """Return some numbers, by their letters of `struct`."""
        try:
            found = struct.unpack_from(f"<{letters}", self._data, self._pos)
        except struct.error:
            raise BadRecord(f"{self._what} is cut") from None
        self._pos += struct.calcsize(f"<{letters}")
        return found

    def blob(self) -> bytes:
        """Return bytes after their length."""
        (length,) = self.numbers("I")
        if length > len(self._data) - self._pos:
            raise BadRecord(f"{self._what} is cut")
        self._pos += length
        return bytes(self._data[self._pos - length : self._pos])

    def text(self) -> str:
        """Return a text."""
        try:
            return self.blob().decode()
        except UnicodeDecodeError:
            raise BadRecord(f"{self._what} holds a text that is not UTF-8") from None

    def pairs(self) -> tuple[NDArray[np.uint16], NDArray[np.uint64]]:
        """Return the keys and values of a map from channels to numbers."""
        data = self.blob()
        if len(data) % _MAP_ENTRY.itemsize:
            raise BadRecord(f"{self._what} holds a map of a wrong length")
        rows = np.frombuffer(data, _MAP_ENTRY)
        return rows["key"], rows["value"]


def record_at(data: bytes, pos: int) -> tuple[int, int, int]:
    """Return the opcode of a record, and where its content begins and ends (maybe beyond)."""
    if len(data) - pos < RECORD_HEAD.size:
        raise BadRecord("a record is cut")
    kind, length = RECORD_HEAD.unpack_from(data, pos)
    start = pos + RECORD_HEAD.size
    return kind, start, start + length


def parse_schema(data: bytes | memoryview, limits: Limits) -> tuple[int, Schema]:
    """Return a schema and its number."""
    fields = Fields(data, "a schema")
    (key,) = fields.numbers("H")
    name, encoding = fields.text(), fields.text()
    blob = fields.blob()
    if len(blob) > limits.definition_bytes:
        raise BadRecord(f"a message definition has {len(blob)} bytes, more than the limit")
    text = encoding in _TEXT_SCHEMAS
    return key, Schema(name, encoding, blob.decode("utf-8", "replace") if text else blob)


def parse_channel(data: bytes | memoryview, schemas: dict[int, Schema]) -> Connection:
    """Return a channel; one without a schema has the type ""."""
    fields = Fields(data, "a channel")
    key, schema_key = fields.numbers("HH")
    topic, encoding = fields.text(), fields.text()
    schema = schemas.get(schema_key, Schema("", "", ""))
    kind = full_type(schema.name)
    return Connection(key, topic, kind, schema.definition, encoding, schema.encoding)


def parse_chunk_head(data: bytes, pos: int) -> Stored:
    """Return how a chunk is stored, from the first bytes of its record, which begins at `pos`."""
    kind, start, stop = record_at(data, 0)
    if kind != CHUNK:
        raise BadRecord(f"there is no chunk at {pos}")
    if len(data) < start + _CHUNK_HEAD.size + 8:
        raise BadRecord("a chunk is cut")
    _, _, size_bytes, crc, text_bytes = _CHUNK_HEAD.unpack_from(data, start)
    at = start + _CHUNK_HEAD.size + text_bytes
    if text_bytes > 16 or len(data) < at + 8:
        raise BadRecord("a chunk has no known compression")
    compression = data[at - text_bytes : at].decode("ascii", "replace")
    (stored_bytes,) = struct.unpack_from("<Q", data, at)
    if stored_bytes != stop - at - 8 or size_bytes > _LATEST_NS:
        raise BadRecord("a chunk does not fill its record")
    return Stored(pos + at + 8, pos + stop, size_bytes, crc, compression)


class ChunkIndex(NamedTuple):
    """An entry of the summary about a chunk, with the messages of its channels."""

    start_ns: int
    end_ns: int
    pos: int
    stop: int
    keys: NDArray[np.int64]
    counts: NDArray[np.int64] | None
    compression: str


def parse_chunk_index(data: bytes | memoryview) -> ChunkIndex:
    """Return an entry about a chunk; its counts are None if they cannot be told from it."""
    fields = Fields(data, "a chunk index")
    start_ns, end_ns, pos, length = fields.numbers("QQQQ")
    keys, values = fields.pairs()
    (index_bytes,) = fields.numbers("Q")
    compression = fields.text()
    fields.numbers("QQ")
    stop = pos + length + index_bytes
    if max(end_ns, stop, *values.tolist()) > _LATEST_NS:
        raise BadRecord("a chunk index holds an impossible number")
    order = np.argsort(values, kind="stable")
    places = values[order].astype(np.int64)
    counts: NDArray[np.int64] | None = None
    if len(places) and index_bytes:
        # Each index record is 15 bytes and 16 for every message: its length tells their number,
        # unless it holds more than this version of the format knows of.
        counts, rest = np.divmod(np.diff(places, append=stop) - _INDEX_HEAD.size, 16)
        if np.any(rest) or np.any(counts < 0):
            counts = None
    found = keys[order].astype(np.int64)
    return ChunkIndex(start_ns, end_ns, pos, stop, found, counts, compression)


class McapBag(ChunkedBag):
    """An MCAP file."""

    kind = "mcap"
    _MAGIC = MAGIC
    _HEAD_BYTES = MESSAGE_HEAD.size
    _ENTRY_BYTES = _INDEX_ENTRY.itemsize

    def _check_magic(self) -> None:
        self._schemas: dict[int, Schema] = {}
        if self._source.peek(0, len(MAGIC)) != MAGIC:
            raise UnknownFormat(f"{self.path} is not an MCAP file of version 0")

    def _read_index(self) -> int | None:
        cut = "the file is cut: it has no footer"
        expect(self.size_bytes >= len(MAGIC) + FOOTER_BYTES, self.path, cut)
        footer_pos = self.size_bytes - FOOTER_BYTES
        footer = self._source.read(footer_pos, FOOTER_BYTES)
        kind, start, stop = record_at(footer, 0)
        whole = (kind, stop) == (FOOTER, FOOTER_BYTES - 8) and footer.endswith(MAGIC)
        expect(whole, self.path, cut)
        summary_pos = int.from_bytes(footer[start : start + 8], "little")
        crc = int.from_bytes(footer[start + 16 : start + 20], "little")
        if summary_pos == 0:
            return footer_pos
        expect(len(MAGIC) <= summary_pos <= footer_pos, self.path, "the footer is damaged")
        head = self._source.read(len(MAGIC), RECORD_HEAD.size)
        expect(head[0] == HEADER, self.path, "the header is missing")
        summary = Stored(summary_pos, footer_pos, footer_pos - summary_pos, None)
        stream = ChunkStream(self._source, summary, self.limits)
        complete = self._read_summary(stream, summary_pos)
        expect(
            not crc or zlib.crc32(footer[: start + 16], stream.crc) == crc,
            self.path,
            "the summary does not match its checksum",
        )
        return None if complete else summary_pos

    def _read_summary(self, stream: ChunkStream, data_stop: int) -> bool:
        """Fill the table; tell whether the index names every message of the file."""
        statistics: dict[int, int] | None = None
        total: dict[int, int] = {}
        complete = True
        times: list[int] = []
        for kind, start, stop in _records_in(stream):
            if kind in (SCHEMA, CHANNEL, STATISTICS, CHUNK_INDEX):
                self.limits.check_record(self.path, stop - start)
            if kind in (SCHEMA, CHANNEL):
                self._learn(kind, stream.take(start, stop - start))
            elif kind == STATISTICS:
                fields = Fields(stream.take(start, stop - start), "the statistics")
                fields.numbers("QHIIIIQQ")
                keys, counts = fields.pairs()
                pairs = zip(keys.tolist(), counts.tolist(), strict=True)
                statistics = {key: count for key, count in pairs if count}
            elif kind == CHUNK_INDEX:
                index = parse_chunk_index(stream.take(start, stop - start))
                expect(
                    len(MAGIC) <= index.pos and index.stop <= data_stop,
                    self.path,
                    f"the index names a chunk at {index.pos} that cannot be there",
                )
                if index.counts is None:
                    complete = complete and not len(index.keys)
                    continue
                chunk = Chunk(index.pos, index.stop, -1, index.compression)
                self._chunks.add(chunk, index.keys, index.counts)
                for key, count in zip(index.keys.tolist(), index.counts.tolist(), strict=True):
                    total[key] = total.get(key, 0) + count
                times += [index.start_ns, index.end_ns]
                times = [min(times), max(times)]
        self.start_ns, self.end_ns = times or (0, 0)
        total = {key: count for key, count in total.items() if count}
        return complete and statistics == total and total.keys() <= self._connections.keys()

    def _learn(self, kind: int, data: bytes | memoryview) -> None:
        """Take a schema or a channel in."""
        if kind == CHANNEL:
            self._add_connection(parse_channel(data, self._schemas))
            return
        key, schema = parse_schema(data, self.limits)
        if key not in self._schemas:
            self._definition_bytes += len(schema.definition)
            self.limits.check_index(self.path, self._definition_bytes)
            self._schemas[key] = schema

    def _stored_at(self, pos: int) -> Stored:
        return parse_chunk_head(self._source.peek(pos, _PEEK_BYTES), pos)

    def _head_parser(self) -> HeadParser:
        unpack, head_bytes = MESSAGE_HEAD.unpack_from, MESSAGE_HEAD.size

        def parse(data: bytes, at: int, key: int) -> tuple[int, int, int]:
            if at + head_bytes > len(data):
                raise BadRecord("the index names a message beyond the end of its chunk")
            kind, length, channel, _, t_ns, _ = unpack(data, at)
            stop = at + 9 + length
            if kind != MESSAGE or channel != key or stop < at + head_bytes:
                raise BadRecord(f"a message of channel {key} is not where the index says")
            return t_ns, at + head_bytes, stop

        return parse

    def _records(self, stream: ChunkStream, learn: bool = False) -> Iterator[Record]:
        head_bytes = MESSAGE_HEAD.size
        for kind, start, stop in _records_in(stream):
            if kind == MESSAGE:
                data, at = stream.window(start - RECORD_HEAD.size, head_bytes)
                if at + head_bytes > len(data) or stop - start + RECORD_HEAD.size < head_bytes:
                    raise BadRecord("a message is cut")
                _, _, key, _, t_ns, _ = MESSAGE_HEAD.unpack_from(data, at)
                if t_ns > _LATEST_NS:
                    raise BadRecord("a message has an impossible time")
                offset = start - RECORD_HEAD.size
                yield Record(key, t_ns, offset, offset + head_bytes, stop)
            elif kind == 0:
                raise BadRecord("a chunk holds a record of no kind")
            elif learn and kind in (SCHEMA, CHANNEL):
                self.limits.check_record(self.path, stop - start)
                self._learn(kind, stream.take(start, stop - start))

    def _index_records(
        self, stream: ChunkStream, size_bytes: int
    ) -> Iterator[tuple[int, int, int]]:
        for kind, start, stop in _records_in(stream):
            if kind != MESSAGE_INDEX:
                continue
            data, at = stream.window(start - RECORD_HEAD.size, _INDEX_HEAD.size)
            if stop > size_bytes or at + _INDEX_HEAD.size > len(data):
                raise BadRecord("a message index is cut")
            _, _, key, length = _INDEX_HEAD.unpack_from(data, at)
            if length != stop - start - 6 or length % _INDEX_ENTRY.itemsize:
                raise BadRecord("a message index has a wrong length")
            yield key, start + 6, length

    def _parse_entries(self, data: bytes | memoryview) -> tuple[Numbers, Numbers]:
        rows = np.frombuffer(data, _INDEX_ENTRY)
        if np.any(rows["time"] > _LATEST_NS) or np.any(rows["offset"] > _LATEST_NS):
            raise BadRecord("a message index holds an impossible time or offset")
        return rows["time"].astype(np.int64), rows["offset"].astype(np.int64)

    def _scanner(self, stop: int, tolerant: bool) -> Scanner:
        # The summary may be what is damaged, and the data section defines all channels again.
        self._schemas, self._connections, self._definition_bytes = {}, {}, 0
        return _McapScanner(self, stop, tolerant)


class _McapScanner(Scanner):
    bag: McapBag
    _stretch: Chunk | None = None
    _loose = False

    def end(self) -> None:
        if self._stretch is not None:
            self.keep(self._stretch)
            self._stretch = None

    def record(self, pos: int) -> int:
        head = self.source.peek(pos, _PEEK_BYTES)
        kind, start, stop = record_at(head, 0)
        if kind == MESSAGE and pos + stop <= self.source.size_bytes:
            return self._message(pos, pos + stop, head)
        self.end()
        if kind == CHUNK:
            stored = parse_chunk_head(head, pos)
            if stored.compression not in _COMPRESSIONS:
                raise BadRecord(f"the chunk at {pos} has an unknown compression")
            return self.chunk(pos, stored)
        if kind in (0, FOOTER) or pos + stop > self.source.size_bytes:
            raise BadRecord(f"there is no record at {pos}")
        if kind in (SCHEMA, CHANNEL):
            self.limits.check_record(self.source.path, stop - start)
            self.bag._learn(kind, self.source.read(pos + start, stop - start))
        elif kind == DATA_END:
            crc = int.from_bytes(head[start : start + 4], "little")
            if crc and not self.tolerant and self._loose:
                self._check_data(pos, crc)
            return self.stop
        return pos + stop

    def follows(self, pos: int) -> bool:
        return True

    def index_stop(self, pos: int) -> int:
        while pos + RECORD_HEAD.size <= self.source.size_bytes:
            kind, _, stop = record_at(self.source.read(pos, RECORD_HEAD.size), 0)
            if kind != MESSAGE_INDEX or pos + stop > self.source.size_bytes:
                break
            pos += stop
        return pos

    def candidates(self, window: bytes, at: int) -> Iterator[int]:
        for match in _MARK.finditer(window):
            if self._plausible(at + match.start()):
                yield at + match.start()

    def _message(self, pos: int, stop: int, head: bytes) -> int:
        """Add a message outside of chunks to its stretch."""
        if stop - pos < MESSAGE_HEAD.size:
            raise BadRecord(f"the message at {pos} is cut")
        _, _, key, _, t_ns, _ = MESSAGE_HEAD.unpack_from(head)
        if t_ns > _LATEST_NS or (self.tolerant and key not in self.bag._connections):
            raise BadRecord(f"the message at {pos} is damaged")
        chunk = self._stretch or Chunk(pos, -1)
        if chunk.stop != pos or stop - chunk.pos > _STRETCH_BYTES:
            self.end()
            chunk = Chunk(pos, stop, -1, LOOSE)
            self._loose = True
        self.message(key, t_ns, pos - chunk.pos)
        self._stretch = chunk._replace(stop=stop)
        return stop

    def _check_data(self, stop: int, crc: int) -> None:
        """Check the whole data section; writers differ in whether the magic belongs to it."""
        with_magic = isal_zlib.crc32(MAGIC)
        without = 0
        for pos in range(len(MAGIC), stop, _WINDOW_BYTES):
            window = self.source.read(pos, min(_WINDOW_BYTES, stop - pos))
            with_magic = isal_zlib.crc32(window, with_magic)
            without = isal_zlib.crc32(window, without)
        if crc not in (with_magic, without):
            raise CorruptFile(f"{self.source.path}: the data does not match its checksum")

    def _plausible(self, pos: int) -> bool:
        head = self.source.peek(pos, _PEEK_BYTES)
        try:
            kind, start, stop = record_at(head, 0)
            if kind == CHUNK:
                return parse_chunk_head(head, pos).compression in _COMPRESSIONS
            if pos + stop > self.source.size_bytes or stop - start < 22 or self.last_ns < 0:
                return False
            _, _, key, _, t_ns, _ = MESSAGE_HEAD.unpack_from(head)
        except (BadRecord, struct.error):
            return False
        near = self.first_ns - _DAY_NS <= t_ns <= self.last_ns + 10 * _DAY_NS
        return key in self.bag._connections and near


def _records_in(stream: ChunkStream) -> Iterator[tuple[int, int, int]]:
    """Yield the opcode of each record, and the offsets between which its content lies."""
    offset = 0
    while True:
        data, at = stream.window(offset, MESSAGE_HEAD.size)
        if at == len(data):
            if offset > stream.reached:
                raise BadRecord("a record is cut")
            return
        kind, start, stop = record_at(data, at)
        yield kind, offset + start - at, offset + stop - at
        offset += stop - at
