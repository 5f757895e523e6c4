"""What the chunked containers share: reading by index, chunk by chunk, in file order.

A bag holds tables in arrays (`ChunkTable`), never an object per chunk or message; of a chunk it
holds one piece (`ChunkStream`). The containers say how their records look.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.bags.limits import BadRecord, Limits, expect
from penstock.bags.reader import Bag, Message, SalvageReport, Selection, Topic, among, join_topics
from penstock.bags.scan import Scanner
from penstock.bags.source import SMALL_PART, ZSTD_MAGIC, ChunkStream, Stored, open_source
from penstock.bags.spool import ROW, Rows
from penstock.bags.table import LOOSE, Chunk, ChunkTable
from penstock.core.threads import CORES, parallel_map
from penstock.errors import CorruptFile, DataError

_AHEAD_PIECES: Final = 4
_MOST_WORKERS: Final = 8
_FAR_BYTES: Final = 1 << 14  # between messages whose heads are read alone
_BLOCK_ROWS: Final = 1 << 16

# Returns the time of the message of a connection, and where its data begins and ends in the bytes.
HeadParser = Callable[[bytes, int, int], tuple[int, int, int]]
Numbers = NDArray[np.int64]
Keys = dict[str, list[int]]  # the connections of each topic


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
    """A chunk to be read, and what is wanted of it."""

    number: int
    chunk: Chunk
    stored: Stored
    selection: Selection


class ChunkedBag(Bag):
    """A bag of chunks with index records."""

    _MAGIC: bytes
    _HEAD_BYTES: int  # that the head of a message takes at most
    _ENTRY_BYTES: int  # of an index record

    def __init__(
        self, path: Path, limits: Limits, salvage: bool = False, scratch: Path | None = None
    ) -> None:
        self.path, self.limits, self._scratch = path, limits, scratch
        self._source = open_source(path)
        self.size_bytes = self._source.size_bytes
        self._connections: dict[int, Connection] = {}
        self._chunks = ChunkTable(path, limits, scratch)
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
        elif scan_stop is None:
            self._chunks.freeze()
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
        keys = self._keys([topic])[topic]
        at = 0
        with self._named():
            for rows in self._rows(self._chunks.chunks_of(keys)):
                times = rows["t_ns"][among(rows["key"], keys)]
                found[at : at + len(times)] = times
                at += len(times)
        return found

    def close(self) -> None:
        """Close the files; safe to call twice."""
        self._source.close()
        self._chunks.rows.close()
        super().close()

    def _read(self, selection: Selection) -> Iterator[Message]:
        keys = self._keys(selection.topics)
        with self._named():
            for chosen, stream in self._streams(self._chosen(selection, keys)):
                for rows, ordinals in self._picked(chosen, keys):
                    yield from self._cut(stream, rows, ordinals)
                stream.finish()
                del stream  # else two chunks are in memory while the next is loaded

    def _picked(self, chosen: _Chosen, keys: Keys) -> Iterator[tuple[Rows, Numbers]]:
        """Yield the places of the wanted messages of a chunk, and their ordinals."""
        for rows in self._rows([chosen.number]):
            places, ordinals = chosen.selection.pick(rows["key"], keys)
            yield rows[places], ordinals

    def _chosen(self, selection: Selection, keys: Keys) -> Iterator[_Chosen]:
        """Yield the chunks that hold wanted messages, with those messages."""
        topics = {key: topic for topic, own in keys.items() for key in own}
        for number in self._chunks.chunks_of(topics):
            counts: dict[str, int] = {}
            for key, count in self._chunks.slots_of(number).items():
                if key in topics:
                    counts[topics[key]] = counts.get(topics[key], 0) + count
            part = selection.part(counts)
            if part is not None:
                self._load(number)
                chunk = self._chunks[number]
                yield _Chosen(number, chunk, self._stored(chunk), part)

    def _streams(self, chosen: Iterable[_Chosen]) -> Iterator[tuple[_Chosen, ChunkStream]]:
        """Yield chunks with their decompressed bytes; slow ones are decompressed ahead."""

        def begin(item: _Chosen) -> tuple[_Chosen, ChunkStream]:
            stream = ChunkStream(self._source, item.stored, self.limits, item.chunk.usable_bytes)
            if item.stored.compression == "bz2" or self._source.remote:
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

    def _cut(self, stream: ChunkStream, rows: Rows, ordinals: Numbers) -> Iterator[Message]:
        """Yield messages by their places."""
        window, most, record_bytes = stream.window, self._HEAD_BYTES, self.limits.record_bytes
        parse, connections = self._head_parser(), self._connections
        data, first = b"", 0
        for (key, t_ns, offset), ordinal in zip(rows.tolist(), ordinals.tolist(), strict=True):
            at = offset - first
            if at + most > len(data):
                data, at = window(offset, most)
                first = offset - at
            found_ns, start, stop = parse(data, at, key)
            if found_ns != t_ns:
                raise BadRecord(f"a message of connection {key} is not when the index says")
            size_bytes, connection = stop - start, connections[key]
            message: bytes | memoryview
            if size_bytes > record_bytes:
                self.limits.check_record(self.path, size_bytes, connection.topic)
            if stop > len(data):
                message = stream.take(first + start, size_bytes)
            elif size_bytes * SMALL_PART < len(data):
                message = data[start:stop]
            else:
                message = memoryview(data)[start:stop]
            yield Message(connection.topic, ordinal, t_ns, message)

    def _has_near_heads(self, topics: Sequence[str]) -> bool:
        keys = [key for own in self._keys(topics).values() for key in own]
        chunks = (self._chunks[number] for number in self._chunks.chunks_of(keys))
        size_bytes = sum(chunk.stop - chunk.pos for chunk in chunks)
        count = sum(self.topics[topic].count for topic in topics)
        return self.compression == "none" and size_bytes > count * _FAR_BYTES

    def _read_heads(self, selection: Selection, sizes: Mapping[str, int]) -> Iterator[Message]:
        keys = self._keys(selection.topics)
        parse, most = self._head_parser(), self._HEAD_BYTES
        with self._named():
            for chosen in self._chosen(selection, keys):
                for rows, ordinals in self._picked(chosen, keys):
                    for (key, t_ns, offset), ordinal in zip(
                        rows.tolist(), ordinals.tolist(), strict=True
                    ):
                        topic = self._connections[key].topic
                        pos = chosen.stored.start + offset
                        data = self._source.peek(pos, most)
                        _, start, stop = parse(data, 0, key)
                        size_bytes = min(sizes[topic], stop - start)
                        head = data[start : start + size_bytes]
                        if len(head) < size_bytes or head[:4] == ZSTD_MAGIC:
                            self.limits.check_record(self.path, stop - start, topic)
                            head = self._source.read(pos + start, stop - start, "a message")
                        yield Message(topic, ordinal, t_ns, head)

    def _rows(self, numbers: Sequence[int]) -> Iterator[Rows]:
        """Yield the places of the messages in some chunks, by their offsets."""
        for number in numbers:
            self._load(number)
        return self._chunks.places(numbers) if numbers else iter(())

    def _load(self, number: int) -> None:
        """Find the places of the messages in a chunk, by its index or, if that is large, in it."""
        table = self._chunks
        if table.is_loaded(number):
            return
        if table.count_of(number) * ROW.itemsize > self.limits.index_bytes:
            table.load(number, self._walk(table[number]))
            return
        rows = self.index_rows(self._stored(table[number]).stop, table[number].stop)
        promised = table.slots_of(number)
        keys, counts = np.unique(rows["key"], return_counts=True)
        found = dict(zip(keys.tolist(), counts.tolist(), strict=True))
        if found.keys() - promised.keys():
            rows = rows[np.isin(rows["key"], list(promised))]
        expect(
            all(found.get(key, 0) == count for key, count in promised.items()),
            self.path,
            f"the index of the chunk at {table[number].pos} holds {len(rows)} messages instead of "
            f"{table.count_of(number)}; pass --salvage to read without it",
        )
        table.load(number, iter([rows]))

    def _walk(self, chunk: Chunk) -> Iterator[Rows]:
        """Yield the places of the messages in a chunk from its records."""
        stream = ChunkStream(self._source, self._stored(chunk), self.limits, chunk.usable_bytes)
        records = ((r.key, r.t_ns, r.offset) for r in self._records(stream))
        while rows := list(islice(records, _BLOCK_ROWS)):
            yield np.array(rows, ROW)

    def index_rows(self, start: int, stop: int) -> Rows:
        """Return the places of messages that index records in a part of the file name."""
        keys, entries = [], []
        stream, size_bytes = self._plain_stream(start, stop)
        for key, offset, length in self._index_records(stream, size_bytes):
            self.limits.check_index(self.path, length)
            entries.append(bytes(stream.take(offset, length)))
            keys.append(key)
        times, offsets = self._parse_entries(b"".join(entries))
        order = np.argsort(offsets, kind="stable")
        rows = np.empty(len(order), ROW)
        counts = [len(one) // self._ENTRY_BYTES for one in entries]
        rows["key"] = np.repeat(np.array(keys, np.int64), counts)[order]
        rows["t_ns"], rows["place"] = times[order], offsets[order]
        return rows

    def _plain_stream(self, start: int, stop: int) -> tuple[ChunkStream, int]:
        """Return the bytes of a part of the file, and their number."""
        size_bytes = max(stop - start, 0)
        stored = Stored(start, start + size_bytes, size_bytes)
        return ChunkStream(self._source, stored, self.limits), size_bytes

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

    def _keys(self, topics: Iterable[str]) -> Keys:
        """Return the connections of some topics."""
        found: Keys = {topic: [] for topic in topics}
        for key, connection in self._connections.items():
            if connection.topic in found:
                found[connection.topic].append(key)
        return found

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
        self._chunks.freeze()
        promised = sum(self._chunks.counts.values())
        self._chunks.rows.close()
        self._chunks = ChunkTable(self.path, self.limits, self._scratch)
        with self._named():
            scanner = self._scanner(stop, reason is not None)
            scanner.run(len(self._MAGIC))
        self._chunks.freeze()
        self.start_ns, self.end_ns = (
            (scanner.first_ns, scanner.last_ns) if scanner.last_ns >= 0 else (0, 0)
        )
        known = {k: n for k, n in self._chunks.counts.items() if k in self._connections}
        if reason is None:
            whole = known.keys() == self._chunks.counts.keys()
            expect(whole, self.path, "messages of connections that are not defined")
            return
        total = sum(known.values())
        if not reason and (scanner.damaged or scanner.skipped_bytes):
            reason = "some chunks are damaged"
        if not reason and promised and (total != promised or scanner.without_index):
            reason = "some indexes are damaged"
        if not reason:
            return
        if not total:
            raise DataError(f"{self.path}: nothing could be salvaged ({reason})")
        chunks = len(self._chunks.chunks_of(known))
        self.salvage = SalvageReport(reason, total, chunks, scanner.damaged, scanner.skipped_bytes)

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
    def _parse_entries(self, data: bytes | memoryview) -> tuple[Numbers, Numbers]:
        """Return the times and offsets that an index record holds."""
