"""The records of MCAP files: opcode, length, fields. All numbers are little-endian."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

import numpy as np

from penstock.bags.chunks import Connection, Entries, Place
from penstock.bags.limits import BadRecord, Limits

MAGIC: Final = b"\x89MCAP0\r\n"
HEADER, FOOTER, SCHEMA, CHANNEL, MESSAGE, CHUNK, MESSAGE_INDEX = range(1, 8)
CHUNK_INDEX, STATISTICS, DATA_END = 8, 11, 15
RECORD_HEAD: Final = Struct("<BQ")
MESSAGE_HEAD: Final = Struct("<BQHIQQ")  # with the head of its record
FOOTER_BYTES: Final = RECORD_HEAD.size + 20 + len(MAGIC)
_CHUNK_HEAD: Final = Struct("<QQQII")
_CHUNK_INDEX_HEAD: Final = Struct("<QQQQI")
_MAP_ENTRY: Final = np.dtype([("key", "<u2"), ("value", "<u8")])
_INDEX_ENTRY: Final = np.dtype([("time", "<u8"), ("offset", "<u8")])
_LATEST_NS: Final = 2**63 - 1


class ChunkHead(NamedTuple):
    """The head of a chunk record: where its stored data lies in the file, and what it is."""

    start: int
    stop: int
    size_bytes: int
    crc: int
    compression: str


@dataclass(frozen=True, slots=True)
class Schema:
    """A message type."""

    name: str
    encoding: str
    definition: str


class Fields:
    """Reads the fields of one record; anything that does not fit is a BadRecord."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self._data = memoryview(data)
        self._pos = 0
        self._what = what

    def numbers(self, layout: Struct) -> tuple[int, ...]:
        """Return some numbers."""
        try:
            found = layout.unpack_from(self._data, self._pos)
        except struct.error:
            raise BadRecord(f"{self._what} is cut") from None
        self._pos += layout.size
        return found

    def blob(self) -> bytes:
        """Return bytes after their length."""
        (length,) = self.numbers(_U32)
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

    def counts(self) -> dict[int, int]:
        """Return a map from channel to number."""
        data = self.blob()
        if len(data) % _MAP_ENTRY.itemsize:
            raise BadRecord(f"{self._what} holds a map of a wrong length")
        rows = np.frombuffer(data, _MAP_ENTRY)
        return dict(zip(rows["key"].tolist(), rows["value"].tolist(), strict=True))


_U16: Final = Struct("<H")
_U32: Final = Struct("<I")
_U64: Final = Struct("<Q")
_U16_U32: Final = Struct("<HI")
_TWO_U16: Final = Struct("<HH")
_TWO_U64: Final = Struct("<QQ")
_STATISTICS: Final = Struct("<QHIIIIQQ")


def parse_schema(data: bytes | memoryview, limits: Limits) -> tuple[int, Schema]:
    """Return a schema and its number."""
    fields = Fields(data, "a schema")
    (key,) = fields.numbers(_U16)
    name, encoding = fields.text(), fields.text()
    blob = fields.blob()
    if len(blob) > limits.definition_bytes:
        raise BadRecord(f"a message definition has {len(blob)} bytes, more than the limit")
    return key, Schema(name, encoding, blob.decode("utf-8", "replace"))


def parse_channel(data: bytes | memoryview, schemas: dict[int, Schema]) -> Connection:
    """Return a channel; one without a schema has the type ""."""
    fields = Fields(data, "a channel")
    key, schema_key = fields.numbers(_TWO_U16)
    topic, encoding = fields.text(), fields.text()
    schema = schemas.get(schema_key, Schema("", "", ""))
    parts = schema.name.split("/")
    kind = f"{parts[0]}/msg/{parts[1]}" if len(parts) == 2 else schema.name
    return Connection(key, topic, kind, schema.definition, encoding)


def parse_chunk_head(data: bytes, pos: int, length: int) -> ChunkHead:
    """Return the head of the chunk record at `pos`, from its first bytes after the record head.

    Args:
        data: At least the first 64 bytes of the record's content, if it has as many.
        pos: Where the content begins in the file.
        length: The length of the content.
    """
    if len(data) < _CHUNK_HEAD.size + 8:
        raise BadRecord("a chunk is cut")
    _, _, size_bytes, crc, text_bytes = _CHUNK_HEAD.unpack_from(data)
    if text_bytes > 16 or len(data) < _CHUNK_HEAD.size + text_bytes + 8:
        raise BadRecord("a chunk has no known compression")
    at = _CHUNK_HEAD.size + text_bytes
    compression = data[_CHUNK_HEAD.size : at].decode("ascii", "replace")
    (stored_bytes,) = _U64.unpack_from(data, at)
    start = pos + at + 8
    if stored_bytes != length - at - 8:
        raise BadRecord("a chunk does not fill its record")
    return ChunkHead(start, start + stored_bytes, size_bytes, crc, compression)


class ChunkIndex(NamedTuple):
    """An entry of the summary about a chunk."""

    start_ns: int
    end_ns: int
    pos: int
    length: int
    counts: dict[int, int] | None
    index_bytes: int
    compression: str
    size_bytes: int


def parse_chunk_index(data: bytes | memoryview) -> ChunkIndex:
    """Return an entry about a chunk; its counts are None if they cannot be told from it."""
    fields = Fields(data, "a chunk index")
    start_ns, end_ns, pos, length = fields.numbers(Struct("<QQQQ"))
    offsets = fields.counts()
    (index_bytes,) = fields.numbers(_U64)
    compression = fields.text()
    _, size_bytes = fields.numbers(_TWO_U64)
    counts: dict[int, int] | None = None
    if offsets and index_bytes:
        # Each index record is 15 bytes and 16 for every message: its length tells their number,
        # unless it holds more than this version of the format knows of.
        order = sorted(offsets.items(), key=lambda item: item[1])
        stops = [offset for _, offset in order[1:]] + [pos + length + index_bytes]
        counts = {}
        for (key, offset), stop in zip(order, stops, strict=True):
            entries, rest = divmod(stop - offset - 15, 16)
            if rest or entries < 0:
                counts = None
                break
            counts[key] = entries
    return ChunkIndex(start_ns, end_ns, pos, length, counts, index_bytes, compression, size_bytes)


def parse_statistics(data: bytes | memoryview) -> dict[int, int]:
    """Return the number of messages of each channel."""
    fields = Fields(data, "the statistics")
    fields.numbers(_STATISTICS)
    return {key: count for key, count in fields.counts().items() if count}


def find_index(data: bytes, base: int) -> list[Place]:
    """Return where the entries of the message indexes after a chunk lie.

    Args:
        data: The records.
        base: Where they begin in the file.
    """
    found = []
    pos = 0
    while pos < len(data):
        kind, start, pos = record_at(data, pos)
        if pos > len(data):
            raise BadRecord("a message index is cut")
        if kind != MESSAGE_INDEX:
            continue
        key, size_bytes = Fields(memoryview(data)[start:pos], "a message index").numbers(_U16_U32)
        if size_bytes != pos - start - 6 or size_bytes % _INDEX_ENTRY.itemsize:
            raise BadRecord("a message index has a wrong length")
        found.append((key, base + start + 6, size_bytes))
    return found


def parse_entries(found: list[tuple[int, bytes]]) -> Entries:
    """Return the messages that index entries name, from the bytes of each channel."""
    rows = np.frombuffer(b"".join(data for _, data in found), _INDEX_ENTRY)
    if np.any(rows["time"] > _LATEST_NS) or np.any(rows["offset"] > _LATEST_NS):
        raise BadRecord("a message index holds an impossible time or offset")
    counts = [len(data) // _INDEX_ENTRY.itemsize for _, data in found]
    return Entries(
        rows["time"].astype(np.int64),
        rows["offset"].astype(np.int64),
        np.repeat(np.array([key for key, _ in found], np.int64), counts),
    )


def record_at(data: bytes, pos: int) -> tuple[int, int, int]:
    """Return the opcode of a record, and where its content begins and ends (maybe beyond)."""
    if len(data) - pos < RECORD_HEAD.size:
        raise BadRecord("a record is cut")
    kind, length = RECORD_HEAD.unpack_from(data, pos)
    start = pos + RECORD_HEAD.size
    return kind, start, start + length


class Registry:
    """The schemas and channels seen so far."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.schemas: dict[int, Schema] = {}
        self.channels: dict[int, Connection] = {}

    def add(self, kind: int, data: bytes | memoryview) -> None:
        """Take a schema or a channel record in; others are ignored."""
        if kind == SCHEMA:
            key, schema = parse_schema(data, self.limits)
            self.schemas.setdefault(key, schema)
        elif kind == CHANNEL:
            channel = parse_channel(data, self.schemas)
            self.channels.setdefault(channel.id, channel)
        if max(len(self.schemas), len(self.channels)) > self.limits.topics:
            raise BadRecord(f"more than {self.limits.topics} channels")


class Walked(NamedTuple):
    """The messages of a chunk, and how far it could be read."""

    entries: Entries
    good_bytes: int


def walk(data: bytes, registry: Registry | None) -> Walked:
    """Find the messages of a chunk by its records, up to the first that is damaged."""
    times: list[int] = []
    offsets: list[int] = []
    ids: list[int] = []
    pos, size_bytes = 0, len(data)
    view = memoryview(data)
    try:
        while pos < size_bytes:
            kind, start, stop = record_at(data, pos)
            if stop > size_bytes:
                break
            if kind == MESSAGE:
                if stop - pos < MESSAGE_HEAD.size:
                    break
                _, _, key, _, t_ns, _ = MESSAGE_HEAD.unpack_from(data, pos)
                if t_ns > _LATEST_NS:
                    break
                times.append(t_ns)
                offsets.append(pos)
                ids.append(key)
            elif registry is not None and kind in (SCHEMA, CHANNEL):
                registry.add(kind, view[start:stop])
            elif kind == 0:
                break
            pos = stop
    except BadRecord:
        pass
    columns = (np.array(column, np.int64) for column in (times, offsets, ids))
    return Walked(Entries(*columns), pos)
