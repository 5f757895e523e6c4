"""What the chunked containers share: reading by index, chunk by chunk, in file order.

A bag holds tables in arrays (`ChunkTable`), never an object per chunk or message; of a chunk it
holds one piece (`ChunkStream`). The containers say how their records look.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.bags.limits import BadRecord, Limits, expect
from penstock.bags.reader import Bag, Message, SalvageReport, Selection, Topic, Wanted, join_topics
from penstock.bags.scan import Scanner
from penstock.bags.source import (
    PLAIN,
    SMALL_PART,
    ZSTD_MAGIC,
    ChunkStream,
    Source,
    Stored,
    StoredWindow,
    inflate_message,
    open_source,
)
from penstock.bags.table import ENTRY_BYTES, LOOSE, Chunk, ChunkTable, Entries, Numbers
from penstock.core.threads import CORES, parallel_map
from penstock.errors import CorruptFile, DataError

_AHEAD_PIECES: Final = 4
_MOST_WORKERS: Final = 8
_FAR_BYTES: Final = 1 << 14  # messages further apart are looked at one by one

Heads = Mapping[str, int]  # of some topics, the first bytes of each message suffice
# Returns the time of the message of a connection, and where its data begins and ends in the bytes.
HeadParser = Callable[[bytes, int, int], tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Connection:
    """A stream of messages as the file knows it; several may belong to one topic."""

    id: int
    topic: str
    type: str
    definition: str | bytes
    encoding: str
    schema_encoding: str = ""


class Record(NamedTuple):
    """A message in a chunk: its connection and time, and offsets of the record and its data."""

    key: int
    t_ns: int
    offset: int
    start: int
    stop: int


class _Chosen(NamedTuple):
    """A chunk to be read: its wanted messages of each topic, counted from the first one there.

    The ordinals are None for all of a topic. The entries are the messages in the order of their
    offsets (times, offsets, connections, ordinals); None if the chunk must be walked.
    """

    chunk: Chunk
    stored: Stored
    topics: dict[str, tuple[int, Numbers | None]]
    entries: tuple[Numbers, ...] | None


class ChunkedBag(Bag):
    """A bag of chunks with index records."""

    _source: Source
    _chunks: ChunkTable
    _connections: dict[int, Connection]
    _MAGIC: bytes
    _HEAD_BYTES: int  # that the head of a message takes at most
    _ENTRY: np.dtype[Any]  # of an index record

    def __init__(self, path: Path, limits: Limits, salvage: bool = False) -> None:
        self.path, self.limits = path, limits
        self._source = open_source(path)
        self.size_bytes = self._source.size_bytes
        self._connections, self._chunks = {}, ChunkTable(path, limits)
        self._definition_bytes = 0
        self.start_ns = self.end_ns = 0
        try:
            self._check_magic()
            self._open(salvage)
        except BaseException:
            self.close()
            raise

    def _open(self, salvage: bool) -> None:
        reason, scan_stop = "", None
        try:
            scan_stop = self._read_index()
            if scan_stop is not None and not salvage:
                self._scan(scan_stop, None)
        except CorruptFile as error:
            reason = str(error).removeprefix(f"{self.path}: ").partition("; pass")[0]
            if not salvage:
                raise CorruptFile(
                    f"{self.path}: {reason}; pass --salvage to read what there is"
                ) from None
        if salvage:
            self._scan(self.size_bytes, reason)
        self._chunks.freeze(self._connections)
        counts = self._chunks.counts
        self.topics = join_topics(
            Topic(
                c.topic,
                c.type,
                counts.get(c.id, 0),
                None,
                c.definition,
                c.encoding,
                schema_encoding=c.schema_encoding,
            )
            for c in self._connections.values()
        )
        names = self._chunks.compressions
        if "?" in names:  # the index of ROS 1 does not tell
            with self._named():
                names = {self._stored(self._chunks[0]).compression}
        plain = {"none" if name in ("", LOOSE) else name for name in names}
        self.compression = "+".join(sorted(plain)) or "none"

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from the file so far."""
        return self._source.bytes_read

    def times(self, topic: str) -> Numbers:
        """Return the log times of a topic, in file order."""
        found = np.empty(self.topic(topic).count, np.int64)
        ids = self._ids([topic])
        at = 0
        with self._named():
            for number in self._chunks.chunks_of(ids):
                if self._must_walk(number):
                    stream = self._stream(self._chunks[number])
                    records = (r.t_ns for r in self._records(stream) if r.key in ids)
                    times = np.fromiter(records, np.int64)
                else:
                    times = self._entries(number, ids)[0]
                expect(at + len(times) <= len(found), self.path, "the index changed while read")
                found[at : at + len(times)] = times
                at += len(times)
        expect(at == len(found), self.path, f"the index of {topic} is incomplete; pass --salvage")
        return found

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._source.close()

    def _read(
        self, topics: Sequence[str], wanted: Wanted, heads: Heads | None = None
    ) -> Iterator[Message]:
        ids, heads = self._ids(topics), heads or {}
        parse = self._head_parser()
        todo = self._chosen(ids, Selection(topics, wanted))
        with self._named():
            for chosen, stream in self._streams(todo, heads):
                if chosen.entries is None:
                    yield from self._walk(stream, chosen.topics, ids, heads)
                else:
                    yield from self._cut(stream, chosen.entries, parse, heads)
                stream.finish()
                del stream  # else two chunks are in memory while the next is loaded

    def _chosen(self, ids: dict[int, str], selection: Selection) -> Iterator[_Chosen]:
        """Yield the chunks that hold wanted messages, with those messages."""
        keys_of: dict[str, list[int]] = {}
        for key, topic in ids.items():
            keys_of.setdefault(topic, []).append(key)
        for number in self._chunks.chunks_of(ids):
            counts: dict[str, int] = {}
            for _, key, count in self._chunks.slots_of(number):
                if key in ids:
                    counts[ids[key]] = counts.get(ids[key], 0) + count
            topics = {topic: selection.take(topic, count) for topic, count in counts.items()}
            topics = {t: pick for t, pick in topics.items() if pick[1] is None or len(pick[1])}
            if not topics:
                continue
            chunk = self._chunks[number]
            entries = None
            if not self._must_walk(number):
                parts = [
                    _numbered(self._entries(number, keys_of[topic]), *pick)
                    for topic, pick in topics.items()
                ]
                entries = tuple(map(np.concatenate, zip(*parts, strict=True)))
                if len(parts) > 1:
                    order = np.argsort(entries[1], kind="stable")
                    entries = tuple(column[order] for column in entries)
            yield _Chosen(chunk, self._stored(chunk), topics, entries)

    def _streams(self, chosen: Iterable[_Chosen], heads: Heads) -> Iterator[tuple[_Chosen, Any]]:
        """Yield chunks with their decompressed bytes; slow ones are decompressed ahead."""

        def begin(item: _Chosen) -> tuple[_Chosen, Any]:
            stored = item.stored
            if (
                heads.keys() >= item.topics.keys()
                and item.entries is not None
                and stored.compression in PLAIN
                and stored.stop - stored.start > len(item.entries[0]) * _FAR_BYTES
            ):
                return item, StoredWindow(self._source, stored)
            stream = ChunkStream(self._source, stored, self.limits, item.chunk.usable_bytes)
            if stored.compression == "bz2" or self._source.remote:
                stream.window(0, 1)
            return item, stream

        if "bz2" not in self.compression and not self._source.remote:
            yield from map(begin, chosen)
            return
        piece_bytes = self.limits.piece_bytes
        yield from parallel_map(
            begin,
            chosen,
            name="bag",
            helpers=_MOST_WORKERS if self._source.remote else min(_MOST_WORKERS, CORES),
            size=lambda item: min(item.stored.size_bytes, piece_bytes) * 2,
            limit_bytes=piece_bytes * _AHEAD_PIECES,
        )

    def _cut(
        self,
        stream: ChunkStream,
        entries: tuple[Numbers, ...],
        parse: HeadParser,
        heads: Heads,
    ) -> Iterator[Message]:
        """Yield the messages that the index names."""
        window, most, record_bytes = stream.window, self._HEAD_BYTES, self.limits.record_bytes
        cdr = {key for key, c in self._connections.items() if c.encoding == "cdr"}
        for t_ns, offset, key, ordinal in zip(*(c.tolist() for c in entries), strict=True):
            data, at = window(offset, most)
            found_ns, start, stop = parse(data, at, key)
            if found_ns != t_ns:
                raise BadRecord(f"a message of connection {key} is not when the index says")
            size_bytes = stop - start
            message: bytes | memoryview
            if heads or stop > len(data) or size_bytes > record_bytes:
                message = self._data(stream, key, offset + start - at, size_bytes, heads)
            else:  # as `_data` does it, without the calls: most messages come this way
                if size_bytes * SMALL_PART < len(data):
                    message = data[start:stop]
                else:
                    message = memoryview(data)[start:stop]
                if key in cdr and data.startswith(ZSTD_MAGIC, start):
                    message = inflate_message(self.path, message, self.limits)
            yield Message(self._connections[key].topic, ordinal, t_ns, message)

    def _walk(
        self,
        stream: ChunkStream,
        topics: dict[str, tuple[int, Numbers | None]],
        ids: dict[int, str],
        heads: Heads,
    ) -> Iterator[Message]:
        """Yield the messages of a chunk that has no index."""
        turns = {
            topic: Selection([topic], {} if ordinals is None else {topic: ordinals}, first)
            for topic, (first, ordinals) in topics.items()
        }
        for key, t_ns, _, start, stop in self._records(stream):
            topic = ids.get(key)
            ordinal = turns[topic].next(topic) if topic in turns else None
            if topic is not None and ordinal is not None:
                message = self._data(stream, key, start, stop - start, heads)
                yield Message(topic, ordinal, t_ns, message)

    def _data(
        self, stream: ChunkStream, key: int, start: int, size_bytes: int, heads: Heads
    ) -> bytes | memoryview:
        """Return the bytes of a message, or its first ones."""
        connection = self._connections[key]
        most_bytes = heads.get(connection.topic, size_bytes)
        packed = False
        if connection.encoding == "cdr":
            data, at = stream.window(start, 4)
            packed = data.startswith(ZSTD_MAGIC, at)
        if most_bytes < size_bytes and not packed:
            size_bytes = most_bytes
        if size_bytes > self.limits.record_bytes:
            self.limits.check_record(self.path, size_bytes, connection.topic)
        message = stream.take(start, size_bytes)
        return inflate_message(self.path, message, self.limits) if packed else message

    def _must_walk(self, number: int) -> bool:
        """Tell whether the messages of a chunk cannot be had from an index."""
        if self._chunks.loaded[number]:
            return False
        size_bytes = self._chunks.count_of(number) * ENTRY_BYTES
        return not self._chunks[number].indexed or size_bytes > self.limits.index_bytes

    def _entries(self, number: int, keys: Collection[int]) -> tuple[Numbers, Numbers, Numbers]:
        """Return times, offsets and connections of messages of a chunk, by their offsets."""
        table = self._chunks
        if not table.loaded[number] and table.entries is not None:
            found = self._index_of(self._stored(table[number]).stop, table[number].stop)
            for slot, key, count in table.slots_of(number):
                table.hold(slot, self._promised(found, number, key, count))
            table.loaded[number] = True
        parts = []
        found = {}
        for slot, key, count in table.slots_of(number):
            if key in keys:
                held = table.held(slot)
                if held is None:
                    found = found or self._read_places(number, keys)
                    held = self._promised(found, number, key, count)
                parts.append((*held, np.full(count, key)))
        times, offsets, ids = map(np.concatenate, zip(*parts, strict=True))
        if np.any(offsets[1:] < offsets[:-1]):
            order = np.argsort(offsets, kind="stable")
            times, offsets, ids = times[order], offsets[order], ids[order]
        return times, offsets, ids

    def _promised(self, found: dict[int, Entries], number: int, key: int, count: int) -> Entries:
        """Return the entries of a connection, as many as the table promises."""
        entries = found.get(key, (np.empty(0, np.int64), np.empty(0, np.int64)))
        expect(
            len(entries[0]) == count,
            self.path,
            f"the index of the chunk at {self._chunks[number].pos} holds {len(entries[0])} "
            f"messages instead of {count}; pass --salvage to read without it",
        )
        return entries

    def _read_places(self, number: int, keys: Collection[int]) -> dict[int, Entries]:
        """Return the entries of some connections, read from their own places in the file."""
        table = self._chunks
        slots = [slot for slot in table.slots_of(number) if slot[1] in keys]
        if any(table.slots["pos"][slot] <= 0 for slot, _, _ in slots):
            numbers = {key: slot for slot, key, _ in table.slots_of(number)}
            start = self._stored(table[number]).stop
            stream, size_bytes = self._plain_stream(start, table[number].stop)
            for key, offset, _ in self._index_records(stream, size_bytes):
                if key in numbers:
                    table.slots["pos"][numbers[key]] = start + offset
        found = {}
        for slot, key, count in slots:
            pos, size_bytes = int(table.slots["pos"][slot]), count * self._ENTRY.itemsize
            if pos > 0:
                found[key] = self._parse_entries(self._source.read(pos, size_bytes, "an index"))
        return found

    def _plain_stream(self, start: int, stop: int) -> tuple[ChunkStream, int]:
        """Return the bytes of a part of the file, and their number."""
        size_bytes = max(stop - start, 0)
        stored = Stored(start, start + size_bytes, size_bytes)
        return ChunkStream(self._source, stored, self.limits), size_bytes

    def _index_of(self, start: int, stop: int) -> dict[int, Entries]:
        """Return the entries of all index records in a part of the file."""
        found: dict[int, Entries] = {}
        stream, size_bytes = self._plain_stream(start, stop)
        for key, offset, length in self._index_records(stream, size_bytes):
            self.limits.check_index(self.path, length)
            entries = self._parse_entries(stream.take(offset, length))
            if key in found:
                times, offsets = map(np.concatenate, zip(found[key], entries, strict=True))
                entries = times, offsets
            found[key] = entries
        return found

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the path to the errors of the parsers."""
        try:
            yield
        except BadRecord as error:
            raise CorruptFile(
                f"{self.path}: {error}; pass --salvage to read what there is"
            ) from None

    def _stored(self, chunk: Chunk) -> Stored:
        """Return how a chunk is stored; of a damaged one, as far as it goes."""
        if chunk.compression == LOOSE:
            return Stored(chunk.pos, chunk.stop, chunk.stop - chunk.pos)
        stored = self._stored_at(chunk.pos)
        if chunk.usable_bytes < 0 and stored.stop > chunk.stop:
            raise BadRecord(f"the chunk at {chunk.pos} is cut")
        return stored._replace(stop=min(stored.stop, chunk.stop))

    def _stream(self, chunk: Chunk) -> ChunkStream:
        return ChunkStream(self._source, self._stored(chunk), self.limits, chunk.usable_bytes)

    def _ids(self, topics: Sequence[str]) -> dict[int, str]:
        """Return the connections of some topics, with the name of each one's topic."""
        wanted = set(topics)
        return {key: c.topic for key, c in self._connections.items() if c.topic in wanted}

    def _add_connection(self, connection: Connection) -> None:
        """Take a connection in, unless it is known; all of them are bounded."""
        if connection.id in self._connections:
            return
        self._definition_bytes += len(connection.definition)
        self.limits.check_index(self.path, self._definition_bytes)
        self._connections[connection.id] = connection
        self.limits.check_count(
            self.path, "connections", len(self._connections), self.limits.topics
        )

    def _scan(self, stop: int, reason: str | None) -> None:
        """Find the messages by reading everything.

        Args:
            stop: Where to stop.
            reason: What is wrong with the file, to salvage it ("" if nothing is known to be):
                damage is then passed over and counted. None for a file that must be whole: damage
                is a CorruptFile.
        """
        self._chunks.freeze(self._connections)
        promised = sum(self._chunks.counts.values())
        indexed = len(self._chunks) > 0
        self._chunks = ChunkTable(self.path, self.limits)
        with self._named():
            scanner = self._scanner(stop, reason is not None)
            scanner.run(len(self._MAGIC))
        self.start_ns, self.end_ns = (
            (scanner.first_ns, scanner.last_ns) if scanner.last_ns >= 0 else (0, 0)
        )
        if reason is None:
            unknown = scanner.keys - set(self._connections)
            expect(not unknown, self.path, "messages of connections that are not defined")
            return
        self._chunks.freeze(self._connections)
        total = sum(self._chunks.counts.values())
        if not reason and (scanner.damaged or scanner.skipped_bytes):
            reason = "some chunks are damaged"
        if not reason and indexed and (total != promised or scanner.without_index):
            reason = "some indexes are damaged"
        if not reason:
            return
        if not total:
            raise DataError(f"{self.path}: nothing could be salvaged ({reason})")
        self.salvage = SalvageReport(
            reason,
            total,
            len(np.unique(self._chunks.slots["chunk"])),
            scanner.damaged,
            scanner.skipped_bytes,
        )

    @abstractmethod
    def _check_magic(self) -> None:
        """Raise UnknownFormat if it is another file."""

    @abstractmethod
    def _read_index(self) -> int | None:
        """Read the index; return None, or where the data ends if there is no index of use."""

    @abstractmethod
    def _scanner(self, stop: int, tolerant: bool) -> Scanner:
        """Return what scans the file."""

    @abstractmethod
    def _stored_at(self, pos: int) -> Stored:
        """Return how the chunk whose record begins at a position is stored."""

    @abstractmethod
    def _head_parser(self) -> HeadParser:
        """Return a function that parses the head of a message."""

    @abstractmethod
    def _records(self, stream: ChunkStream, learn: bool = False) -> Iterator[Record]:
        """Yield the messages of a chunk from the records themselves; learn its connections."""

    @abstractmethod
    def _index_records(
        self, stream: ChunkStream, size_bytes: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield connection, offset and length of the entries of each index record."""

    @abstractmethod
    def _parse_entries(self, data: bytes | memoryview) -> Entries:
        """Return the entries of an index record."""


def _numbered(
    entries: tuple[Numbers, Numbers, Numbers], first: int, ordinals: Numbers | None
) -> tuple[Numbers, ...]:
    """Return the wanted entries of a topic, and their ordinals."""
    if ordinals is None:
        return *entries, np.arange(first, first + len(entries[0]))
    keep = ordinals - first
    return *(column[keep] for column in entries), ordinals
