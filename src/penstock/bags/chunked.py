"""What the chunked containers share: tables of chunks, reading by index, salvage by a scan.

A bag holds tables in arrays (`ChunkTable`), never an object per chunk or message; of a chunk it
holds one piece (`ChunkStream`). The containers say how their records look.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.bags.limits import BadRecord, Limits, expect
from penstock.bags.reader import Bag, Message, SalvageReport, Selection, Topic, Wanted, join_topics
from penstock.bags.source import (
    PLAIN,
    SMALL_PART,
    ZSTD_MAGIC,
    ChecksumMismatch,
    ChunkStream,
    Source,
    Stored,
    StoredWindow,
    inflate_message,
)
from penstock.core.threads import CORES, parallel_map
from penstock.errors import CorruptFile, DataError

LOOSE: Final = "loose"  # the compression of a stretch of messages outside of chunks
_COMPRESSIONS: Final = ("?", "", "none", "lz4", "bz2", "zstd", LOOSE)
_ROW: Final = Struct("<qqqBB")
_ROW_TYPE: Final = np.dtype("<i8,<i8,<i8,u1,u1")
_SLOT_TYPE: Final = np.dtype([("chunk", "<u4"), ("key", "<u4"), ("count", "<u4"), ("pos", "<i8")])
_ENTRY_BYTES: Final = 16
_MOST_COUNT: Final = 2**32 - 1
_AHEAD_PIECES: Final = 4
_MOST_WORKERS: Final = 8
_WINDOW_BYTES: Final = 1 << 20
_MARK_BYTES: Final = 16
_FAR_BYTES: Final = 1 << 14  # messages further apart are looked at one by one

Numbers = NDArray[np.int64]
Heads = Mapping[str, int]  # of some topics, the first bytes of each message suffice
Entries = tuple[Numbers, Numbers]  # times and offsets of messages in a chunk
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


class Chunk(NamedTuple):
    """Where a chunk lies.

    Attributes:
        pos: Where its record begins.
        stop: Where the records that belong to it end, its index records included.
        usable_bytes: Of a damaged chunk: its decompressed bytes up to the damage; otherwise -1.
        compression: How it is stored, if the index tells; otherwise "?".
        indexed: Index records follow it; otherwise its messages are found by walking it.
    """

    pos: int
    stop: int
    usable_bytes: int = -1
    compression: str = "?"
    indexed: bool = True


class Record(NamedTuple):
    """A message in a chunk: its connection and time, and offsets of the record and its data."""

    key: int
    t_ns: int
    offset: int
    start: int
    stop: int


class Tally:
    """Counts the messages of one chunk, and notes where they are unless they are too many."""

    def __init__(self, most: int, connections: int) -> None:
        self.counts: dict[int, int] = {}
        self.complete = True
        self.first_ns, self.last_ns = 1 << 62, -1
        self._most, self._connections = most, connections
        self._columns = array("q"), array("q"), array("q")

    def add(self, key: int, t_ns: int, offset: int) -> None:
        """Count a message."""
        self.counts[key] = self.counts.get(key, 0) + 1
        if len(self.counts) > self._connections:
            raise BadRecord(f"more than {self._connections} connections")
        self.first_ns, self.last_ns = min(self.first_ns, t_ns), max(self.last_ns, t_ns)
        if not self.complete:
            return
        for column, value in zip(self._columns, (key, t_ns, offset), strict=True):
            column.append(value)
        if len(self._columns[0]) > self._most:
            self.complete = False
            self._columns = array("q"), array("q"), array("q")

    def entries(self) -> Entries:
        """Return times and offsets, one connection after the other as in `keys`."""
        keys, times, offsets = (np.frombuffer(column, np.int64) for column in self._columns)
        order = np.argsort(keys, kind="stable")
        return times[order], offsets[order]

    @property
    def keys(self) -> list[int]:
        """The connections, rising."""
        return sorted(self.counts)


class ChunkTable(Sequence[Chunk]):
    """The chunks of a file in file order, and how many messages of which connection each holds.

    A slot is one connection in one chunk. The times and offsets of its messages are held, once
    they were read, if those of all messages fit into the limit.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path, self._limits = path, limits
        self._rows, self._made = bytearray(), bytearray()
        self._scanned: tuple[array[int], array[int]] | None = None
        self._frozen = self._is_scan = False
        self.slots = np.empty(0, _SLOT_TYPE)
        self._first_slot = self._first_entry = np.zeros(1, np.int64)
        self.entries: Entries | None = None
        self.loaded = np.zeros(0, bool)

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        pos, stop, usable, code, indexed = _ROW.unpack_from(self._rows, number * _ROW.size)
        return Chunk(pos, stop, usable, _COMPRESSIONS[code], bool(indexed))

    def add(self, chunk: Chunk, slots: NDArray[Any], tally: Tally | None = None) -> None:
        """Add a chunk.

        Args:
            chunk: The chunk.
            slots: Of `_SLOT_TYPE`; the numbers of the chunk are filled in.
            tally: Of a scan: where its messages are, in the order of the slots.
        """
        slots["chunk"] = len(self)
        name = chunk.compression if chunk.compression in _COMPRESSIONS else "?"
        code = _COMPRESSIONS.index(name)
        self._rows += _ROW.pack(*chunk[:3], code, chunk.indexed)
        self._made += slots.tobytes()
        self._limits.check_count(self._path, "chunks", len(self), self._limits.chunks)
        self._limits.check_index(self._path, len(self._rows) + len(self._made))
        if tally is None:
            return
        if not self._is_scan:
            self._scanned = array("q"), array("q")
            self._is_scan = True
        if self._scanned is not None:
            for held, column in zip(self._scanned, tally.entries(), strict=True):
                held.frombytes(column.tobytes())
            size_bytes = _ENTRY_BYTES * len(self._scanned[0])
            if not tally.complete or size_bytes > self._limits.index_bytes:
                self._scanned = None

    def freeze(self, known: Collection[int]) -> None:
        """Sort the chunks, and leave out the messages of connections that are not known."""
        if self._frozen:
            return
        self._frozen = True
        slots = np.frombuffer(self._made, _SLOT_TYPE).copy()
        rows = np.frombuffer(self._rows, _ROW_TYPE)
        keep = np.isin(slots["key"], np.array(list(known), np.int64)) & (slots["count"] > 0)
        order = np.argsort(rows["f0"], kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        scanned = None
        if self._scanned is not None:  # a scan finds the chunks in order
            kept = np.repeat(keep, slots["count"])
            scanned = tuple(np.frombuffer(column, np.int64)[kept] for column in self._scanned)
            del kept
        rows = rows[order]
        if not self._is_scan:  # an index does not tell everywhere where a chunk ends
            rows["f1"][:-1] = np.minimum(rows["f1"][:-1], rows["f0"][1:])
        self._rows = bytearray(rows.tobytes())
        slots = slots[keep]
        slots["chunk"] = rank[slots["chunk"]]
        self.slots = slots[np.argsort(slots["chunk"], kind="stable")]
        numbers = np.arange(len(self) + 1)
        self._first_slot = np.searchsorted(self.slots["chunk"], numbers)
        self._first_entry = np.concatenate(([0], np.cumsum(self.slots["count"], dtype=np.int64)))
        total = int(self._first_entry[-1])
        if scanned is not None:
            self.entries = scanned
        elif total * _ENTRY_BYTES <= self._limits.index_bytes:
            self.entries = np.empty(total, np.int64), np.empty(total, np.int64)
        self.loaded = np.full(len(self), scanned is not None)
        self._made, self._scanned = bytearray(), None

    @property
    def counts(self) -> dict[int, int]:
        """The number of messages of each connection."""
        keys, place = np.unique(self.slots["key"], return_inverse=True)
        counts = np.bincount(place, self.slots["count"], len(keys)).astype(np.int64)
        return dict(zip(keys.tolist(), counts.tolist(), strict=True))

    @property
    def compressions(self) -> set[str]:
        """How the chunks are stored."""
        rows = np.frombuffer(self._rows, _ROW_TYPE)
        return {_COMPRESSIONS[code] for code in np.unique(rows["f3"])}

    def chunks_of(self, keys: Collection[int]) -> Iterator[int]:
        """Yield the numbers of the chunks with messages of some connections."""
        found = np.isin(self.slots["key"], np.array(list(keys), np.int64))
        yield from map(int, np.unique(self.slots["chunk"][found]))

    def slots_of(self, number: int) -> list[tuple[int, int, int]]:
        """Return the number, connection and messages of each slot of a chunk."""
        first, stop = self._first_slot[number : number + 2].tolist()
        here = self.slots[first:stop]
        numbers = range(first, stop)
        return list(zip(numbers, here["key"].tolist(), here["count"].tolist(), strict=True))

    def held(self, slot: int) -> Entries | None:
        """Return the entries of a slot of a loaded chunk; None if they are not held."""
        if self.entries is None:
            return None
        span = slice(*self._first_entry[slot : slot + 2].tolist())
        return self.entries[0][span], self.entries[1][span]

    def hold(self, slot: int, entries: Entries) -> None:
        """Hold the entries of a slot."""
        for column, values in zip(self.held(slot) or (), entries, strict=True):
            column[:] = values

    def count_of(self, number: int) -> int:
        """Return the number of messages in a chunk."""
        first, stop = self._first_slot[number : number + 2]
        return int(self._first_entry[stop] - self._first_entry[first])


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
        self._source = Source(path)
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
            if stored.compression == "bz2":
                stream.window(0, 1)
            return item, stream

        if "bz2" not in self.compression:
            yield from map(begin, chosen)
            return
        piece_bytes = self.limits.piece_bytes
        yield from parallel_map(
            begin,
            chosen,
            name="bag",
            helpers=min(_MOST_WORKERS, CORES),
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
        size_bytes = self._chunks.count_of(number) * _ENTRY_BYTES
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


class Scanner:
    """Reads a file from its beginning, and adds its chunks to the table of the bag.

    Of a damaged chunk the messages before the damage are kept, and the search goes on with the next
    record that looks like one.

    Args:
        bag: Its table and connections are filled.
        stop: Where to stop.
        tolerant: Pass over damage; otherwise it is raised.
    """

    def __init__(self, bag: ChunkedBag, stop: int, tolerant: bool) -> None:
        self.bag, self.source, self.limits = bag, bag._source, bag.limits
        self.stop, self.tolerant = stop, tolerant
        self.first_ns, self.last_ns = 1 << 62, -1
        self.damaged = self.skipped_bytes = 0
        self.without_index = 0
        self.keys: set[int] = set()
        # Chunks that overlap, as no recorder writes them, would have no end of work.
        self._work_bytes = (20 + bag.limits.ratio) * self.source.size_bytes + 10**8

    def run(self, pos: int) -> None:
        """Go through the records from a position on."""
        while pos < self.stop:
            try:
                pos = self.record(pos)
            except CorruptFile:
                if not self.tolerant:
                    raise
                pos = self.search(pos)
        self.end()

    def chunk(self, pos: int, stored: Stored) -> int:
        """Take a chunk in; return where to go on."""
        cut = stored.stop > self.source.size_bytes
        if cut and not self.tolerant:
            raise BadRecord(f"the chunk at {pos} is cut")
        record_stop, stored = stored.stop, stored._replace(
            stop=min(stored.stop, self.source.size_bytes)
        )  # fmt: skip
        self._work_bytes -= stored.stop - stored.start + stored.size_bytes
        if self._work_bytes < 0:
            raise DataError(f"{self.source.path}: too many overlapping chunks to be salvaged")
        tally = self.new_tally()
        good_bytes, usable_bytes = 0, -1
        try:
            stream = ChunkStream(self.source, stored, self.limits, careful=self.tolerant)
            for key, t_ns, offset, _, stop in self.bag._records(stream, learn=True):
                stream.reach(stop)
                tally.add(key, t_ns, offset)
                good_bytes = stop
            stream.finish()
        except ChecksumMismatch:
            if not self.tolerant:
                raise
            self.damaged += 1
            self.skipped_bytes += stored.stop - stored.start
            return record_stop  # any of its bytes may be wrong: none is used
        except DataError:
            if not self.tolerant:
                raise
            self.damaged += 1
            usable_bytes = good_bytes
        chunk = Chunk(pos, stored.stop, usable_bytes, stored.compression or "none", False)
        if cut or (self.tolerant and not self.follows(stored.stop)):
            # Its length may be wrong: other chunks may lie within it, behind what was read.
            self.keep(chunk, tally)
            plain = stored.compression in PLAIN
            return self.search(stored.start + (good_bytes if plain else 0) - 1)
        index_stop = self.index_stop(stored.stop)
        if usable_bytes < 0 and self._agrees(stored.stop, index_stop, tally):
            chunk = chunk._replace(stop=index_stop, indexed=True)
        self.keep(chunk, tally)
        return index_stop

    def new_tally(self) -> Tally:
        """Return a tally for a chunk."""
        return Tally(self.limits.index_bytes // 64, self.limits.topics)

    def keep(self, chunk: Chunk, tally: Tally) -> None:
        """Add a chunk to the table."""
        if not tally.counts:
            return
        self.without_index += tally.complete and not chunk.indexed
        self.keys |= tally.counts.keys()
        self.first_ns = min(self.first_ns, tally.first_ns)
        self.last_ns = max(self.last_ns, tally.last_ns)
        slots = np.zeros(len(tally.counts), _SLOT_TYPE)
        slots["key"] = tally.keys
        slots["count"] = [tally.counts[key] for key in tally.keys]
        self.bag._chunks.add(chunk, slots, tally)

    def search(self, pos: int) -> int:
        """Return where the next record begins behind a position, or where the file ends."""
        at = pos + 1
        found = self.stop
        while at < self.stop and found == self.stop:
            window = self.source.peek(at, min(_WINDOW_BYTES, self.stop - at))
            found = next((p for p in self.candidates(window, at) if p > pos), self.stop)
            if at + len(window) >= self.stop:
                break
            at += len(window) - _MARK_BYTES
        self.skipped_bytes += found - pos
        return found

    def _agrees(self, start: int, stop: int, tally: Tally) -> bool:
        """Tell whether the index records of a chunk name exactly its messages."""
        if start == stop or not tally.complete:
            return False
        times, offsets = tally.entries()
        try:
            named = self.bag._index_of(start, stop)
        except DataError:
            return False
        at = 0
        for key in tally.keys:
            count = tally.counts[key]
            found = named.pop(key, (np.empty(0), np.empty(0)))
            order = np.argsort(found[1], kind="stable")
            if not np.array_equal(found[0][order], times[at : at + count]) or not np.array_equal(
                found[1][order], offsets[at : at + count]
            ):
                return False
            at += count
        return not any(len(entries[0]) for entries in named.values())

    def end(self) -> None:
        """Finish what is under way."""

    def record(self, pos: int) -> int:
        """Take one record in; return where the next one begins."""
        raise NotImplementedError

    def follows(self, pos: int) -> bool:
        """Tell whether a record begins at a position, or the file ends there."""
        raise NotImplementedError

    def index_stop(self, pos: int) -> int:
        """Return where the index records that begin at a position end."""
        raise NotImplementedError

    def candidates(self, window: bytes, at: int) -> Iterator[int]:
        """Yield the positions at which records seem to begin.

        Args:
            window: Bytes of the file.
            at: Where they begin.
        """
        raise NotImplementedError


def make_slots(
    keys: NDArray[Any], counts: NDArray[Any], places: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Return the slots of a chunk from an index; places are those of its index records.

    Raises:
        BadRecord: A number cannot be.
    """
    if len(counts) and int(counts.max()) > _MOST_COUNT:
        raise BadRecord("the index promises an impossible number of messages")
    slots = np.zeros(len(keys), _SLOT_TYPE)
    slots["key"], slots["count"] = keys, counts
    if places is not None:
        slots["pos"] = places
    return slots


def _numbered(
    entries: tuple[Numbers, Numbers, Numbers], first: int, ordinals: Numbers | None
) -> tuple[Numbers, ...]:
    """Return the wanted entries of a topic, and their ordinals."""
    if ordinals is None:
        return *entries, np.arange(first, first + len(entries[0]))
    keep = ordinals - first
    return *(column[keep] for column in entries), ordinals
