"""ROS 1 bags, format 2.0: chunks of records, an index after each chunk, a summary at the end.

A record is a header (length, then fields "name=value", each with its length) and data (length,
bytes). All numbers are little-endian.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from struct import Struct, iter_unpack
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.chunks import SMALL_PART, Chunk, ChunkedBag, Connection, Entries, Place
from penstock.bags.limits import BadRecord, Limits, expect
from penstock.bags.reader import Message
from penstock.bags.source import Source, inflate, inflate_prefix
from penstock.errors import CorruptFile, DataError, UnknownFormat

MAGIC: Final = b"#ROSBAG V2.0\n"
MESSAGE, BAG_HEADER, INDEX, CHUNK, CHUNK_INFO, CONNECTION = 2, 3, 4, 5, 6, 7

U32: Final = Struct("<I").unpack_from
_TIME_AND_LENGTH: Final = Struct("<III").unpack_from
_PEEK_BYTES: Final = 4096
_HEADER_BYTES: Final = 10**6
_INDEX_ENTRY: Final = np.dtype([("sec", "<u4"), ("nsec", "<u4"), ("offset", "<u4")])

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
        parts = inner[b"type"].decode().split("/")
        text = definition.decode("utf-8", "replace")
    except (KeyError, UnicodeDecodeError) as error:
        raise BadRecord(f"a connection record is damaged ({error!r})") from None
    kind = f"{parts[0]}/msg/{parts[1]}" if len(parts) == 2 else "/".join(parts)
    topic = re.sub("/+", "/", topic)  # as rosbags and rospy resolve it
    return Connection(number(fields, b"conn"), topic.rstrip("/") or "/", kind, text, "ros1")


def find_index(data: bytes, base: int) -> list[Place]:
    """Return where the entries of the index records after a chunk lie.

    Args:
        data: The records.
        base: Where they begin in the file.
    """
    found = []
    pos = 0
    while pos < len(data):
        fields, start, pos = parse_record(data, pos, len(data))
        if opcode(fields) != INDEX:
            continue
        size_bytes = number(fields, b"count") * _INDEX_ENTRY.itemsize
        if pos > len(data) or pos - start != size_bytes or number(fields, b"ver") != 1:
            raise BadRecord("the index of a chunk is damaged")
        found.append((number(fields, b"conn"), base + start, size_bytes))
    return found


def parse_entries(found: list[tuple[int, bytes]]) -> Entries:
    """Return the messages that index entries name, from the bytes of each connection."""
    rows = np.frombuffer(b"".join(data for _, data in found), _INDEX_ENTRY)
    counts = [len(data) // _INDEX_ENTRY.itemsize for _, data in found]
    return Entries(
        rows["sec"].astype(np.int64) * 10**9 + rows["nsec"],
        rows["offset"].astype(np.int64),
        np.repeat(np.array([key for key, _ in found], np.int64), counts),
    )


class Ros1Bag(ChunkedBag):
    """A ROS 1 bag with its index."""

    kind = "bag"

    def __init__(self, path: Path, limits: Limits, salvage: bool = False) -> None:
        self.path, self.limits = path, limits
        self._source = Source(path)
        self.size_bytes = self._source.size_bytes
        self.compression = "none"
        self._connections, self._chunks = {}, []
        self.start_ns = self.end_ns = 0
        try:
            self._open(salvage)
        except BaseException:
            self.close()
            raise

    def _open(self, salvage: bool) -> None:
        magic = self._source.read(0, min(len(MAGIC), self.size_bytes))
        if magic != MAGIC:
            version = re.match(rb"#ROSBAG V([\d.]+)", magic)
            what = f"of version {version[1].decode()}" if version else "not a ROS 1 bag"
            raise UnknownFormat(f"{self.path} is {what}; bags of version 2.0 can be read")
        try:
            self._read_index()
            reason = ""
        except CorruptFile as error:
            reason = str(error).removeprefix(f"{self.path}: ").partition("; pass")[0]
            if not salvage:
                raise CorruptFile(
                    f"{self.path}: {reason}; pass --salvage to read what there is"
                ) from None
        if salvage:
            self._scan(reason)
        self.topics = self._make_topics(self._count_all())
        if self._chunks:
            with self._named():
                fields, _, _ = self._chunk_header(self._chunks[0])
            self.compression = fields[b"compression"].decode("ascii", "replace")

    def _scan(self, reason: str) -> None:
        """Read every chunk, and keep to what can be read."""
        from penstock.bags.ros1_scan import scan

        promised = sum(self._count_all().values())
        found = scan(self._source, self.limits, self._connections)
        self._connections, self._chunks = found.connections, found.chunks
        self.start_ns, self.end_ns = found.start_ns, found.end_ns
        report = found.report
        good = all(chunk.indexed for chunk in found.chunks) and report.messages == promised
        if reason or report.damaged_chunks or report.skipped_bytes or not good:
            reason = reason or "some chunks or their indexes are damaged"
            self.salvage = replace(report, reason=reason)
            if not found.chunks:
                raise DataError(f"{self.path}: nothing could be salvaged ({reason})")

    def _read_index(self) -> None:
        peek = self._source.read(0, min(_PEEK_BYTES * 2, self.size_bytes))
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
        size_bytes = self.size_bytes - index_pos
        self.limits.check_chunk(self.path, size_bytes, 0)
        data = self._source.read(index_pos, size_bytes, "the index")
        pos = 0
        for _ in range(connections):
            fields, start, pos = self._index_record(data, pos, CONNECTION)
            connection = parse_connection(fields, data[start:pos], self.limits)
            self._connections[connection.id] = connection
        times = []
        for _ in range(chunks):
            fields, start, pos = self._index_record(data, pos, CHUNK_INFO)
            chunk = Chunk(number(fields, b"chunk_pos", 8), 0, data[start:pos])
            expect(
                len(chunk.counts) == 8 * number(fields, b"count"),
                self.path,
                "a chunk info has the wrong length",
            )
            unknown = {key for key, _ in iter_unpack("<II", chunk.counts)} - set(self._connections)
            expect(not unknown, self.path, f"the index names unknown connections {unknown}")
            self._chunks.append(chunk)
            if chunk.counts:
                times += [time_ns(fields, b"start_time"), time_ns(fields, b"end_time")]
                times = [min(times), max(times)]
        self.start_ns, self.end_ns = times or (0, 0)
        self._chunks.sort(key=lambda chunk: chunk.pos)
        stops = [chunk.pos for chunk in self._chunks[1:]] + [index_pos]
        for chunk, stop in zip(self._chunks, stops, strict=False):
            expect(len(MAGIC) <= chunk.pos < stop, self.path, "the index names a wrong chunk")
            chunk.stop = stop

    def _index_record(self, data: bytes, pos: int, kind: int) -> tuple[Fields, int, int]:
        fields, start, stop = parse_record(data, pos, len(data))
        expect(
            opcode(fields) == kind and stop <= len(data),
            self.path,
            f"the index is damaged at {pos}: a record of kind {kind} is missing",
        )
        return fields, start, stop

    def _chunk_header(self, chunk: Chunk) -> tuple[Fields, int, int]:
        """Return the header of a chunk, and where its stored data begins and ends."""
        peek = self._source.read(chunk.pos, min(_PEEK_BYTES, self.size_bytes - chunk.pos))
        fields, start, stop = parse_record(peek, 0, len(peek))
        damaged = chunk.usable_bytes >= 0
        expect(
            opcode(fields) == CHUNK
            and b"compression" in fields
            and (damaged or chunk.pos + stop <= chunk.stop),
            self.path,
            f"the chunk at {chunk.pos} is damaged; pass --salvage to read the rest",
        )
        return fields, chunk.pos + start, min(chunk.pos + stop, chunk.stop)

    def _memory_bytes(self, chunk: Chunk) -> int:
        fields, start, stop = self._chunk_header(chunk)
        return stop - start + number(fields, b"size")

    def _load(self, chunk: Chunk) -> bytes:
        fields, start, stop = self._chunk_header(chunk)
        size_bytes = number(fields, b"size")
        self.limits.check_chunk(self.path, stop - start, size_bytes)
        data = self._source.read(start, stop - start, "a chunk")
        compression = fields[b"compression"].decode("ascii", "replace")
        if chunk.usable_bytes >= 0:
            return inflate_prefix(self.path, compression, data, chunk.usable_bytes, self.limits)
        return inflate(self.path, compression, data, size_bytes, self.limits)

    def _find_index(self, chunk: Chunk) -> list[Place]:
        _, _, pos = self._chunk_header(chunk)
        self.limits.check_record(self.path, chunk.stop - pos)
        return find_index(self._source.read(pos, chunk.stop - pos, "the index of a chunk"), pos)

    def _parse_entries(self, found: list[tuple[int, bytes]]) -> Entries:
        return parse_entries(found)

    def _walk(self, chunk: Chunk, data: bytes, ids: Collection[int]) -> Entries:
        from penstock.bags.ros1_scan import walk

        entries = walk(data, self.limits).entries
        return Entries(*(column[np.isin(entries.ids, list(ids))] for column in entries))

    def _messages(
        self, data: bytes, entries: Entries, ordinals: NDArray[np.int64]
    ) -> Iterator[Message]:
        view = memoryview(data)
        # Headers of one connection differ in the time alone, which is the last field as nearly
        # all writers order them: they are recognised without parsing.
        known: dict[int, bytes] = {}
        small = len(data) // SMALL_PART
        columns = (column.tolist() for column in (*entries, ordinals))
        for t_ns, offset, key, ordinal in zip(*columns, strict=True):
            prefix = known.get(key, b"")
            start = offset + len(prefix) + 12
            if prefix and data.startswith(prefix, offset) and start <= len(data):
                sec, nsec, length = _TIME_AND_LENGTH(data, start - 12)
                found_ns, stop = sec * 10**9 + nsec, start + length
            else:
                found_ns, start, stop = self._parse_message(data, offset, key)
                if data[start - 17 : start - 12] == b"time=":
                    known[key] = data[offset : start - 12]
            if stop > len(data) or found_ns != t_ns:
                raise BadRecord(
                    f"a message of connection {key} is not where or when the index says"
                )
            message: bytes | memoryview = view[start:stop]
            if stop - start < small:  # a view would keep the whole chunk
                message = bytes(message)
            yield Message(self._connections[key].topic, ordinal, t_ns, message)

    def _parse_message(self, data: bytes, offset: int, key: int) -> tuple[int, int, int]:
        """Return the time of a message, and where its data begins and ends."""
        fields, start, stop = parse_record(data, offset, len(data))
        if opcode(fields) != MESSAGE or number(fields, b"conn") != key:
            raise BadRecord(f"the index names a message at {offset} of a chunk, which is none")
        return time_ns(fields, b"time"), start, stop
