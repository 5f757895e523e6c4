"""ROS 1 bags, format 2.0: chunks of records, an index after each chunk, a summary at the end.

A record is a header (length, then fields "name=value", each with its length) and data (length,
bytes). All numbers are little-endian.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from struct import Struct
from typing import Final

import numpy as np

from penstock.bags.chunked import ChunkedBag, Connection, HeadParser, Numbers, Record
from penstock.bags.idl import full_type
from penstock.bags.limits import BadRecord, Limits, expect
from penstock.bags.scan import Scanner
from penstock.bags.source import ChunkStream, Stored
from penstock.bags.table import Chunk
from penstock.errors import UnknownFormat

MAGIC: Final = b"#ROSBAG V2.0\n"
MESSAGE, BAG_HEADER, INDEX, CHUNK, CHUNK_INFO, CONNECTION = 2, 3, 4, 5, 6, 7

U32: Final = Struct("<I").unpack_from
_TIME_AND_LENGTH: Final = Struct("<III").unpack_from
_PEEK_BYTES: Final = 4096
_CHUNK_HEAD_BYTES: Final = 256
_COMPRESSIONS: Final = (b"none", b"lz4", b"bz2")
_CHUNK_MARK: Final = b"op=\x05"
_INDEX_ENTRY: Final = np.dtype([("sec", "<u4"), ("nsec", "<u4"), ("offset", "<u4")])
_COUNT: Final = np.dtype([("key", "<u4"), ("count", "<u4")])

Fields = dict[bytes, bytes]


def parse_fields(data: bytes, pos: int, stop: int) -> Fields:
    """Return the fields of a record header."""
    fields: Fields = {}
    while pos < stop:
        if stop - pos < 4:
            raise BadRecord("a header ends within a field")
        (length,) = U32(data, pos)
        pos += 4
        equals = data.find(b"=", pos, pos + length)
        if length > stop - pos or equals < 0:
            raise BadRecord("a header field is damaged")
        fields[data[pos:equals]] = data[equals + 1 : pos + length]
        pos += length
    return fields


def parse_record(data: bytes, pos: int, stop: int) -> tuple[Fields, int, int]:
    """Return the header of the record at a position, and where its data begins and ends.

    The data may end beyond `stop`: the caller knows whether that is an error.
    """
    if stop - pos < 4:
        raise BadRecord("a record is cut")
    (length,) = U32(data, pos)
    header_stop = pos + 4 + length
    if header_stop + 4 > stop:
        raise BadRecord("a record header is cut or too long")
    fields = parse_fields(data, pos + 4, header_stop)
    (size_bytes,) = U32(data, header_stop)
    return fields, header_stop + 4, header_stop + 4 + size_bytes


def number(fields: Fields, name: bytes, size_bytes: int = 4) -> int:
    """Return a number of a header."""
    value = fields.get(name, b"")
    if len(value) != size_bytes:
        raise BadRecord(f"a header has no field {name.decode()!r} of {size_bytes} bytes")
    return int.from_bytes(value, "little")


def opcode(fields: Fields) -> int:
    """Return the kind of a record; -1 if it has none."""
    value = fields.get(b"op", b"")
    return value[0] if len(value) == 1 else -1


def time_ns(fields: Fields, name: bytes) -> int:
    """Return a time of a header."""
    value = number(fields, name, 8)
    return (value & 0xFFFFFFFF) * 10**9 + (value >> 32)


def parse_connection(fields: Fields, data: bytes, limits: Limits) -> Connection:
    """Return the connection of a connection record."""
    inner = parse_fields(data, 0, len(data))
    definition = inner.get(b"message_definition", b"")
    if len(definition) > limits.definition_bytes:
        raise BadRecord(f"a message definition has {len(definition)} bytes, more than the limit")
    try:
        topic = fields[b"topic"].decode()
        kind = full_type(inner[b"type"].decode())
        text = definition.decode("utf-8", "replace")
    except (KeyError, UnicodeDecodeError) as error:
        raise BadRecord(f"a connection record is damaged ({error!r})") from None
    topic = re.sub("/+", "/", topic)  # as rosbags and rospy resolve it
    return Connection(number(fields, b"conn"), topic.rstrip("/") or "/", kind, text, "ros1")


def parse_chunk(fields: Fields, start: int, stop: int) -> Stored:
    """Return how a chunk is stored whose data lies there."""
    name = fields.get(b"compression", b"?").decode("ascii", "replace")
    return Stored(start, stop, number(fields, b"size"), 0, name)


class Ros1Bag(ChunkedBag):
    """A ROS 1 bag with its index."""

    kind = "bag"
    _MAGIC = MAGIC
    _HEAD_BYTES = 512
    _ENTRY_BYTES = _INDEX_ENTRY.itemsize

    def _check_magic(self) -> None:
        magic = self._source.peek(0, len(MAGIC))
        if magic != MAGIC:
            version = re.match(rb"#ROSBAG V([\d.]+)", magic)
            what = f"of version {version[1].decode()}" if version else "not a ROS 1 bag"
            raise UnknownFormat(f"{self.path} is {what}; bags of version 2.0 can be read")

    def _read_index(self) -> int | None:
        peek = self._source.peek(0, _PEEK_BYTES * 2)
        fields, _, _ = parse_record(peek, len(MAGIC), len(peek))
        if opcode(fields) != BAG_HEADER:
            raise BadRecord("the bag header is missing")
        if fields.get(b"encryptor"):
            raise UnknownFormat(f"{self.path} is encrypted; only plain bags can be read")
        index_pos = number(fields, b"index_pos", 8)
        connections, chunks = number(fields, b"conn_count"), number(fields, b"chunk_count")
        if index_pos == 0:
            raise BadRecord("the bag has no index: the recording did not end properly")
        if index_pos > self.size_bytes:
            raise BadRecord("the file is cut: its index is missing")
        self.limits.check_count(self.path, "connections", connections, self.limits.topics)
        self.limits.check_count(self.path, "chunks", chunks, self.limits.chunks)
        stream, _ = self._plain_stream(index_pos, self.size_bytes)
        pos = 0
        for _ in range(connections):
            fields, start, pos = self._index_record(stream, pos, CONNECTION)
            data = bytes(stream.take(start, pos - start))
            self._add_connection(parse_connection(fields, data, self.limits))
        times: list[int] = []
        for _ in range(chunks):
            fields, start, pos = self._index_record(stream, pos, CHUNK_INFO)
            expect(
                pos - start == _COUNT.itemsize * number(fields, b"count"),
                self.path,
                "a chunk info has the wrong length",
            )
            counts = np.frombuffer(stream.take(start, pos - start), _COUNT)
            unknown = set(counts["key"].tolist()) - set(self._connections)
            expect(not unknown, self.path, f"the index names unknown connections {unknown}")
            chunk = Chunk(number(fields, b"chunk_pos", 8), index_pos)
            expect(len(MAGIC) <= chunk.pos < index_pos, self.path, "the index names a wrong chunk")
            self._chunks.add(chunk, counts["key"], counts["count"])
            if len(counts):
                times += [time_ns(fields, b"start_time"), time_ns(fields, b"end_time")]
                times = [min(times), max(times)]
        self.start_ns, self.end_ns = times or (0, 0)
        return None

    def _index_record(self, stream: ChunkStream, pos: int, kind: int) -> tuple[Fields, int, int]:
        """Return the header of an index record, and the offsets of its data."""
        fields, start, stop = _record_in(stream, pos)
        expect(
            opcode(fields) == kind,
            self.path,
            f"the index is damaged at {pos}: a record of kind {kind} is missing",
        )
        self.limits.check_record(self.path, stop - start)
        return fields, start, stop

    def _stored_at(self, pos: int) -> Stored:
        peek = self._source.peek(pos, _CHUNK_HEAD_BYTES)
        fields, start, stop = parse_record(peek, 0, len(peek))
        if opcode(fields) != CHUNK:
            raise BadRecord(f"the chunk at {pos} is damaged")
        return parse_chunk(fields, pos + start, pos + stop)

    def _head_parser(self) -> HeadParser:
        # Headers of one connection differ in the time alone, which is the last field as nearly
        # all writers order them: they are recognised without parsing.
        known: dict[int, bytes] = {}

        def parse(data: bytes, at: int, key: int) -> tuple[int, int, int]:
            prefix = known.get(key, b"")
            start = at + len(prefix) + 12
            if prefix and data.startswith(prefix, at) and start <= len(data):
                sec, nsec, length = _TIME_AND_LENGTH(data, start - 12)
                return sec * 10**9 + nsec, start, start + length
            fields, start, stop = parse_record(data, at, len(data))
            if opcode(fields) != MESSAGE or number(fields, b"conn") != key:
                raise BadRecord(f"the index names a message of connection {key}, which is none")
            if data[start - 17 : start - 12] == b"time=":
                known[key] = data[at : start - 12]
            return time_ns(fields, b"time"), start, stop

        return parse

    def _records(self, stream: ChunkStream, learn: bool = False) -> Iterator[Record]:
        offset = 0
        while stream.window(offset, 1)[0]:
            fields, start, stop = _record_in(stream, offset)
            kind = opcode(fields)
            if kind == MESSAGE:
                t_ns = time_ns(fields, b"time")
                yield Record(number(fields, b"conn"), t_ns, offset, start, stop)
            elif kind != CONNECTION:
                raise BadRecord(f"a chunk holds a record of kind {kind}")
            elif learn and stop - start <= self.limits.definition_bytes * 2:
                data = bytes(stream.take(start, stop - start))
                self._add_connection(parse_connection(fields, data, self.limits))
            offset = stop

    def _index_records(
        self, stream: ChunkStream, size_bytes: int
    ) -> Iterator[tuple[int, int, int]]:
        pos = 0
        while pos < size_bytes:
            fields, start, pos = _record_in(stream, pos)
            if opcode(fields) != INDEX:
                continue
            length = number(fields, b"count") * _INDEX_ENTRY.itemsize
            if pos > size_bytes or pos - start != length or number(fields, b"ver") != 1:
                raise BadRecord("the index of a chunk is damaged")
            yield number(fields, b"conn"), start, length

    def _parse_entries(self, data: bytes | memoryview) -> tuple[Numbers, Numbers]:
        rows = np.frombuffer(data, _INDEX_ENTRY)
        return rows["sec"].astype(np.int64) * 10**9 + rows["nsec"], rows["offset"].astype(np.int64)

    def _scanner(self, stop: int, tolerant: bool) -> Scanner:
        return _Ros1Scanner(self, stop, tolerant)


class _Ros1Scanner(Scanner):
    def record(self, pos: int) -> int:
        fields, start, stop = self._head(pos)
        kind = opcode(fields)
        if kind == CHUNK:
            if fields.get(b"compression") not in _COMPRESSIONS:
                raise BadRecord(f"the chunk at {pos} has an unknown compression")
            return self.chunk(pos, parse_chunk(fields, start, stop))
        if stop > self.source.size_bytes or not MESSAGE <= kind <= CONNECTION:
            raise BadRecord(f"there is no record at {pos}")
        if kind == CONNECTION and stop - start <= self.limits.definition_bytes * 2:
            data = self.source.read(start, stop - start)
            self.bag._add_connection(parse_connection(fields, data, self.limits))
        return stop

    def follows(self, pos: int) -> bool:
        try:
            return pos == self.source.size_bytes or bool(self._head(pos))
        except BadRecord:
            return False

    def index_stop(self, pos: int) -> int:
        try:
            while True:
                fields, _, stop = self._head(pos)
                if opcode(fields) != INDEX or stop > self.source.size_bytes:
                    return pos
                pos = stop
        except BadRecord:
            return pos

    def candidates(self, window: bytes, at: int) -> Iterator[int]:
        mark = window.find(_CHUNK_MARK)
        while mark >= 0:
            start = self._chunk_start(at + mark)
            if start is not None:
                yield start
            mark = window.find(_CHUNK_MARK, mark + 1)

    def _head(self, pos: int) -> tuple[Fields, int, int]:
        """Return the header of a record in the file, and where its data begins and ends."""
        peek = self.source.peek(pos, _PEEK_BYTES)
        fields, start, stop = parse_record(peek, 0, len(peek))
        return fields, pos + start, pos + stop

    def _chunk_start(self, mark: int) -> int | None:
        """Return the beginning of the chunk record whose kind stands at `mark`, if it is one."""
        low = max(len(MAGIC), mark - 64)
        before = self.source.read(low, mark - low)
        # The field of the kind comes first, or after "compression=..." or "size=....".
        candidates = [mark - 8]
        for name in (b"compression=", b"size="):
            hit = before.rfind(name)
            if hit >= 8:
                candidates.append(low + hit - 8)
        for start in candidates:
            try:
                fields, _, _ = self._head(max(start, len(MAGIC)))
            except BadRecord:
                continue
            if opcode(fields) == CHUNK and fields.get(b"compression") in _COMPRESSIONS:
                return max(start, len(MAGIC))
        return None


def _record_in(stream: ChunkStream, offset: int) -> tuple[Fields, int, int]:
    """Return the header of a record in a chunk, and the offsets of its data."""
    data, at = stream.window(offset, _PEEK_BYTES)
    fields, start, stop = parse_record(data, at, len(data))
    return fields, offset + start - at, offset + stop - at
