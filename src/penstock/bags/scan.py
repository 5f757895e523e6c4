"""Recordings read from their beginning: those without an index, and damaged ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.bags.limits import BadRecord
from penstock.bags.source import PLAIN, ChecksumMismatch, ChunkStream, Stored
from penstock.bags.spool import ROW
from penstock.bags.table import Chunk
from penstock.errors import CorruptFile, DataError

if TYPE_CHECKING:
    from penstock.bags.chunked import ChunkedBag

_WINDOW_BYTES: Final = 1 << 20
_MARK_BYTES: Final = 16


class Scanner(ABC):
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
        self._counts: dict[int, int] = {}  # the messages of the chunk at hand
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
        rows = self.bag._chunks.rows
        first, good_bytes, usable_bytes = len(rows), 0, -1
        try:
            stream = ChunkStream(self.source, stored, self.limits, careful=self.tolerant)
            for key, t_ns, offset, _, stop in self.bag._records(stream, learn=True):
                stream.reach(stop)
                self.message(key, t_ns, offset)
                good_bytes = stop
            stream.finish()
        except DataError as error:
            if not self.tolerant:
                raise
            self.damaged += 1
            usable_bytes = good_bytes
            if isinstance(error, ChecksumMismatch):
                self.skipped_bytes += stored.stop - stored.start
                rows.cut(first)
                self._counts = {}
                return record_stop  # any of its bytes may be wrong: none is used
        chunk = Chunk(pos, stored.stop, usable_bytes, stored.compression or "none")
        if cut or (self.tolerant and not self.follows(stored.stop)):
            # Its length may be wrong: other chunks may lie within it, behind what was read.
            self.keep(chunk)
            plain = stored.compression in PLAIN
            return self.search(stored.start + (good_bytes if plain else 0) - 1)
        index_stop = self.index_stop(stored.stop)
        if self.tolerant and not self._agrees(stored.stop, index_stop, first):
            self.without_index += 1
        self.keep(chunk._replace(stop=index_stop))
        return index_stop

    def message(self, key: int, t_ns: int, offset: int) -> None:
        """Take a message of a chunk in."""
        self._counts[key] = self._counts.get(key, 0) + 1
        if len(self._counts) > self.limits.topics:
            raise BadRecord(f"more than {self.limits.topics} connections")
        self.first_ns, self.last_ns = min(self.first_ns, t_ns), max(self.last_ns, t_ns)
        self.bag._chunks.rows.append(key, t_ns, offset)

    def keep(self, chunk: Chunk) -> None:
        """Add the chunk of the last messages to the table."""
        if self._counts:
            keys, counts = (
                np.array(list(part)) for part in zip(*self._counts.items(), strict=True)
            )
            self.bag._chunks.add(chunk, keys, counts)
            self._counts = {}

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

    def _agrees(self, start: int, stop: int, first: int) -> bool:
        """Tell whether the index records of a chunk name exactly its messages."""
        found = len(self.bag._chunks.rows) - first
        if found * ROW.itemsize > self.limits.index_bytes:
            return True  # they are not compared
        blocks = list(self.bag._chunks.rows.blocks(first)) or [np.empty(0, ROW)]
        try:
            return np.array_equal(self.bag.index_rows(start, stop), np.concatenate(blocks))
        except DataError:
            return False

    def end(self) -> None:  # noqa: B027 - only MCAP has something to finish
        """Finish what is under way."""

    @abstractmethod
    def record(self, pos: int) -> int:
        """Take one record in; return where the next one begins."""

    @abstractmethod
    def follows(self, pos: int) -> bool:
        """Tell whether a record begins at a position, or the file ends there."""

    @abstractmethod
    def index_stop(self, pos: int) -> int:
        """Return where the index records that begin at a position end."""

    @abstractmethod
    def candidates(self, window: bytes, at: int) -> Iterator[int]:
        """Yield the positions at which records seem to begin, of bytes that begin at a position."""
