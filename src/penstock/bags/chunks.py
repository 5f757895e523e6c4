"""What the chunked containers share: reading by index, chunk by chunk, in file order."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from struct import iter_unpack
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.bags.limits import BadRecord, expect
from penstock.bags.reader import Bag, Message, Topic, join_topics
from penstock.bags.source import Source
from penstock.core.flow import Flow
from penstock.errors import CorruptFile

AHEAD_BYTES: Final = 64 * 10**6
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
    """

    pos: int
    stop: int
    counts: bytes
    indexed: bool = True
    usable_bytes: int = -1
    compression: str = "?"
    size_bytes: int = 0

    def count(self, ids: Collection[int]) -> int:
        """Return its number of messages of some connections."""
        return sum(n for key, n in iter_unpack("<II", self.counts) if key in ids)


class Entries(NamedTuple):
    """Messages in a chunk, in the order of their offsets."""

    times: NDArray[np.int64]
    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]


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

    def _read(self, topics: Sequence[str]) -> Iterator[Message]:
        ids = self._ids(topics)
        ordinals = dict.fromkeys(topics, 0)
        todo = (chunk for chunk in self._chunks if chunk.count(ids))
        with self._named():
            for chunk, data in self._loaded(todo):
                entries = self._chunk_entries(chunk, ids, data, chunk.count(ids))
                yield from self._messages(data, entries, ordinals)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the path to the errors of the parsers."""
        try:
            yield
        except BadRecord as error:
            raise CorruptFile(
                f"{self.path}: {error}; pass --salvage to read what there is"
            ) from None

    def _loaded(self, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, bytes]]:
        """Yield chunks with their decompressed bytes; slow ones are decompressed ahead."""
        if "bz2" not in self.compression:
            for chunk in chunks:
                yield chunk, self._load(chunk)
            return
        workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
        with Flow("bag", limit_bytes=AHEAD_BYTES) as flow:
            yield from flow.map(
                lambda chunk: (chunk, self._load(chunk)),
                chunks,
                workers=workers,
                name="decompress",
                size=self._memory_bytes,
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

    @abstractmethod
    def _index(self, chunk: Chunk, ids: Collection[int]) -> Entries:
        """Return the messages of some connections from the index records, in any order."""

    @abstractmethod
    def _walk(self, chunk: Chunk, data: bytes, ids: Collection[int]) -> Entries:
        """Return the messages of some connections from the records themselves."""

    @abstractmethod
    def _messages(
        self, data: bytes, entries: Entries, ordinals: dict[str, int]
    ) -> Iterator[Message]:
        """Yield the messages at the entries; count on the ordinal of each one's topic."""
