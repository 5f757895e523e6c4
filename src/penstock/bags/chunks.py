"""What the chunked containers share: reading by index, chunk by chunk, in file order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct, iter_unpack
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.bags.limits import BadRecord, expect
from penstock.bags.reader import Bag, Message, Topic, Wanted, join_topics
from penstock.bags.source import Source
from penstock.core.threads import CORES, parallel_map
from penstock.errors import CorruptFile

# Connection, position and length of the index entries of one connection in one chunk.
Place = tuple[int, int, int]

_PLACE: Final = Struct("<IQI")
AHEAD_BYTES: Final = 64 * 10**6
SMALL_PART: Final = 8  # a message of less than this part of its chunk is copied out of it
_MOST_WORKERS: Final = 8


@dataclass(frozen=True, slots=True)
class Connection:
    """A stream of messages as the file knows it; several may belong to one topic."""

    id: int
    topic: str
    type: str
    definition: str
    encoding: str


@dataclass(slots=True)
class Chunk:
    """Where a chunk lies, and how many messages of which connection it holds.

    Attributes:
        pos: Where its record begins.
        stop: Where the records that belong to it end, its index records included.
        counts: Pairs of connection and number of messages, packed as 32-bit numbers: a long
            bag has many chunks, and dicts would need ten times the memory.
        indexed: Index records follow it; otherwise its messages are found by walking it.
        usable_bytes: Of a damaged chunk: its decompressed bytes up to the damage; otherwise -1.
        compression: How it is stored, if the index tells; otherwise "?".
        size_bytes: Its decompressed size, if the index tells; otherwise 0.
        places: Once they were looked up: connection, position and length of its index entries,
            packed; so that the index of the next topic is read without a search.
    """

    pos: int
    stop: int
    counts: bytes
    indexed: bool = True
    usable_bytes: int = -1
    compression: str = "?"
    size_bytes: int = 0
    places: bytes | None = None

    def count(self, ids: Collection[int]) -> int:
        """Return its number of messages of some connections."""
        return sum(n for key, n in iter_unpack("<II", self.counts) if key in ids)


class Entries(NamedTuple):
    """Messages in a chunk, in the order of their offsets."""

    times: NDArray[np.int64]
    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]


_Found = tuple[Entries, NDArray[np.int64]]  # messages of a chunk, and their ordinals
_Todo = tuple[Chunk, _Found | None]


class _Counter:
    """Numbers the messages of each topic, and keeps those that are wanted."""

    def __init__(self, ids: dict[int, str], wanted: Wanted) -> None:
        self._wanted = wanted
        self._next = dict.fromkeys(ids.values(), 0)
        self._done = dict.fromkeys(wanted, 0)  # how many of the wanted were taken
        self._ids: dict[str, list[int]] = {topic: [] for topic in self._next}
        for key, topic in ids.items():
            self._ids[topic].append(key)

    def take(self, entries: Entries) -> _Found:
        """Number the next messages, which are in file order."""
        ordinals = np.empty(len(entries.times), np.int64)
        kept = []
        for topic, keys in self._ids.items():
            match = entries.ids == keys[0] if len(keys) == 1 else np.isin(entries.ids, keys)
            here = match.nonzero()[0]
            if not len(here):
                continue
            first = self._next[topic]
            after = self._next[topic] = first + len(here)
            ordinals[here] = np.arange(first, after)
            wanted = self._wanted.get(topic)
            if wanted is not None:
                start = self._done[topic]
                ahead = wanted[start : start + len(here)]
                count = int(ahead.searchsorted(after))
                self._done[topic] = start + count
                here = here[ahead[:count] - first]
            kept.append(here)
        keep = np.sort(np.concatenate(kept)) if kept else np.empty(0, np.int64)
        if len(keep) == len(ordinals):
            return entries, ordinals
        return Entries(*(column[keep] for column in entries)), ordinals[keep]


class ChunkedBag(Bag):
    """A bag of chunks with index records."""

    _source: Source
    _chunks: list[Chunk]
    _connections: dict[int, Connection]

    def times(self, topic: str) -> NDArray[np.int64]:
        """Return the log times of a topic, in file order."""
        found = np.empty(self.topic(topic).count, np.int64)
        ids = self._ids([topic])
        at = 0
        with self._named():
            for chunk in self._chunks:
                count = chunk.count(ids)
                if count:
                    found[at : at + count] = self._chunk_entries(chunk, ids, None, count).times
                    at += count
        return found

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._source.close()

    def _read(self, topics: Sequence[str], wanted: Wanted) -> Iterator[Message]:
        ids = self._ids(topics)
        counter = _Counter(ids, wanted)
        with self._named():
            for (chunk, found), data in self._loaded(self._todo(ids, counter)):
                if found is None:  # there is no index: its messages are known only now
                    count = chunk.count(ids)
                    found = counter.take(self._chunk_entries(chunk, ids, data, count))
                yield from self._messages(data, *found)
                del data  # else two chunks are in memory while the next is loaded

    def _todo(self, ids: dict[int, str], counter: _Counter) -> Iterator[_Todo]:
        """Yield the chunks that hold wanted messages, with those messages."""
        for chunk in self._chunks:
            count = chunk.count(ids)
            if count and not chunk.indexed:
                yield chunk, None
            elif count:
                found = counter.take(self._chunk_entries(chunk, ids, None, count))
                if len(found[0].times):
                    yield chunk, found

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the path to the errors of the parsers."""
        try:
            yield
        except BadRecord as error:
            raise CorruptFile(
                f"{self.path}: {error}; pass --salvage to read what there is"
            ) from None

    def _loaded(self, todo: Iterable[_Todo]) -> Iterator[tuple[_Todo, bytes]]:
        """Yield chunks with their decompressed bytes; slow ones are decompressed ahead."""
        if "bz2" not in self.compression:
            for item in todo:
                yield item, self._load(item[0])
            return
        yield from parallel_map(
            lambda item: (item, self._load(item[0])),
            todo,
            name="bag",
            helpers=min(_MOST_WORKERS, CORES),
            size=lambda item: self._memory_bytes(item[0]),
            limit_bytes=AHEAD_BYTES,
        )

    def _chunk_entries(
        self, chunk: Chunk, ids: dict[int, str], data: bytes | None, count: int
    ) -> Entries:
        """Return the messages of some connections in file order, as many as were promised."""
        if chunk.indexed:
            entries = self._index(chunk, ids)
        else:
            entries = self._walk(chunk, self._load(chunk) if data is None else data, ids)
        expect(
            len(entries.times) == count,
            self.path,
            f"the index of the chunk at {chunk.pos} holds {len(entries.times)} messages instead "
            f"of {count}; pass --salvage to read without it",
        )
        if np.any(entries.offsets[1:] < entries.offsets[:-1]):
            order = np.argsort(entries.offsets, kind="stable")
            entries = Entries(*(column[order] for column in entries))
        return entries

    def _ids(self, topics: Sequence[str]) -> dict[int, str]:
        """Return the connections of some topics, with the name of each one's topic."""
        wanted = set(topics)
        return {
            key: connection.topic
            for key, connection in self._connections.items()
            if connection.topic in wanted
        }

    def _make_topics(self, counts: dict[int, int]) -> dict[str, Topic]:
        """Join the connections of each topic."""
        return join_topics(
            Topic(c.topic, c.type, counts.get(c.id, 0), None, c.definition, c.encoding)
            for c in self._connections.values()
        )

    def _count_all(self) -> dict[int, int]:
        """Add up the counts of all chunks."""
        counts: dict[int, int] = {}
        for chunk in self._chunks:
            for key, count in iter_unpack("<II", chunk.counts):
                counts[key] = counts.get(key, 0) + count
        return counts

    @abstractmethod
    def _memory_bytes(self, chunk: Chunk) -> int:
        """Return what a chunk occupies, stored and decompressed."""

    @abstractmethod
    def _load(self, chunk: Chunk) -> bytes:
        """Return the decompressed bytes of a chunk."""

    def _index(self, chunk: Chunk, ids: Collection[int]) -> Entries:
        """Return the messages of some connections from the index records, in any order."""
        if chunk.places is None:
            found = self._find_index(chunk)
            chunk.places = b"".join(_PLACE.pack(*place) for place in found)
        return self._parse_entries(
            [
                (key, self._source.read(pos, size_bytes, "an index"))
                for key, pos, size_bytes in _PLACE.iter_unpack(chunk.places)
                if key in ids
            ]
        )

    @abstractmethod
    def _find_index(self, chunk: Chunk) -> list[Place]:
        """Return where in the file the index entries of each connection lie."""

    @abstractmethod
    def _parse_entries(self, found: list[tuple[int, bytes]]) -> Entries:
        """Return the index entries of some connections."""

    @abstractmethod
    def _walk(self, chunk: Chunk, data: bytes, ids: Collection[int]) -> Entries:
        """Return the messages of some connections from the records themselves."""

    @abstractmethod
    def _messages(
        self, data: bytes, entries: Entries, ordinals: NDArray[np.int64]
    ) -> Iterator[Message]:
        """Yield the messages at the entries; count on the ordinal of each one's topic."""
