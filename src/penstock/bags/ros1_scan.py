"""Salvage of ROS 1 bags that have no index, or whose index or chunks are damaged.

The file is read once from its beginning. Every chunk is decompressed and walked; of a damaged one
the messages before the damage are kept, and the search goes on with the next record that looks
like a chunk. Only where chunks lie and what they hold is remembered, never a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import pack
from typing import Final, NamedTuple

import numpy as np

from penstock.bags.chunks import Chunk, Connection, Entries
from penstock.bags.limits import BadRecord, Limits
from penstock.bags.reader import SalvageReport
from penstock.bags.ros1 import (
    CHUNK,
    CONNECTION,
    INDEX,
    MAGIC,
    MESSAGE,
    Fields,
    find_index,
    number,
    opcode,
    parse_connection,
    parse_entries,
    parse_record,
    time_ns,
)
from penstock.bags.source import Source, inflate, inflate_prefix
from penstock.errors import DataError

_WINDOW_BYTES: Final = 1 << 20
_PEEK_BYTES: Final = 4096
_KNOWN: Final = (b"none", b"lz4", b"bz2")
_CHUNK_MARK: Final = b"op=\x05"


class Walked(NamedTuple):
    """What a chunk holds: its messages, its connections, and how far it could be read."""

    entries: Entries
    connections: list[Connection]
    good_bytes: int


@dataclass
class Scan:
    """What a salvage found."""

    report: SalvageReport
    connections: dict[int, Connection] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    start_ns: int = 0
    end_ns: int = 0


def walk(data: bytes, limits: Limits) -> Walked:
    """Find the messages of a chunk by its records, up to the first that is damaged."""
    times: list[int] = []
    offsets: list[int] = []
    ids: list[int] = []
    connections: list[Connection] = []
    pos = 0
    try:
        while pos < len(data):
            fields, start, stop = parse_record(data, pos, len(data))
            if stop > len(data):
                break
            kind = opcode(fields)
            if kind == MESSAGE:
                key, t_ns = number(fields, b"conn"), time_ns(fields, b"time")
                times.append(t_ns)
                offsets.append(pos)
                ids.append(key)
            elif kind == CONNECTION:
                connections.append(parse_connection(fields, data[start:stop], limits))
            else:
                break
            pos = stop
    except BadRecord:
        pass
    columns = (np.array(column, np.int64) for column in (times, offsets, ids))
    return Walked(Entries(*columns), connections, pos)


def scan(source: Source, limits: Limits, connections: dict[int, Connection]) -> Scan:
    """Read a damaged bag from its beginning and return what it holds.

    Args:
        source: The file.
        limits: What a chunk may ask for; one that asks for more is passed over.
        connections: Those that are known from what is left of the index.
    """
    scanner = _Scanner(source, limits, connections)
    scanner.run()
    return scanner.finish()


class _Scanner:
    def __init__(self, source: Source, limits: Limits, connections: dict[int, Connection]) -> None:
        self.source, self.limits = source, limits
        self.connections = dict(connections)
        self.kept: list[Chunk] = []
        self.counts: list[dict[int, int]] = []
        self.times = [1 << 62, -1]
        self.damaged = 0
        self.skipped_bytes = 0
        # Chunks that overlap, as no recorder writes them, would have no end of work.
        self.work_bytes = 20 * source.size_bytes + 10**8

    def run(self) -> None:
        """Go through the records; where there is none, search for the next chunk."""
        pos = len(MAGIC)
        while pos < self.source.size_bytes:
            record = self._record(pos)
            if record is None:
                pos = self._search(pos)
                continue
            fields, start, stop = record
            kind = opcode(fields)
            if kind == CHUNK:
                pos = self._chunk(pos, fields, start, stop)
            elif stop > self.source.size_bytes or kind not in (2, 3, 4, 6, 7):
                pos = self._search(pos)
            else:
                if kind == CONNECTION and stop - start <= self.limits.definition_bytes * 2:
                    self._connection(fields, start, stop)
                pos = stop

    def finish(self) -> Scan:
        """Drop what belongs to no known connection, and count."""
        total = 0
        chunks = []
        for chunk, counts in zip(self.kept, self.counts, strict=True):
            known = {key: n for key, n in counts.items() if key in self.connections}
            chunk.counts = b"".join(pack("<II", key, n) for key, n in known.items())
            if known:
                chunks.append(chunk)
                total += sum(known.values())
        report = SalvageReport("", total, len(chunks), self.damaged, self.skipped_bytes)
        start_ns, end_ns = self.times if self.times[1] >= 0 else (0, 0)
        return Scan(report, self.connections, chunks, start_ns, end_ns)

    def _record(self, pos: int) -> tuple[Fields, int, int] | None:
        """Return the header of a record in the file; None if there is none."""
        size_bytes = min(_PEEK_BYTES, self.source.size_bytes - pos)
        try:
            fields, start, stop = parse_record(self.source.read(pos, size_bytes), 0, size_bytes)
        except BadRecord:
            return None
        return fields, pos + start, pos + stop

    def _connection(self, fields: Fields, start: int, stop: int) -> None:
        try:
            connection = parse_connection(
                fields, self.source.read(start, stop - start), self.limits
            )
        except BadRecord:
            return
        self._add_connection(connection)

    def _add_connection(self, connection: Connection) -> None:
        if len(self.connections) < self.limits.topics:
            self.connections.setdefault(connection.id, connection)

    def _chunk(self, pos: int, fields: Fields, start: int, stop: int) -> int:
        """Take a chunk in; return where to go on."""
        cut = stop > self.source.size_bytes
        stop = min(stop, self.source.size_bytes)
        after = None if cut else self._record(stop)
        lost = cut or (after is None and stop < self.source.size_bytes)
        compression = fields.get(b"compression", b"")
        try:
            size_bytes = number(fields, b"size")
            self.limits.check_chunk(self.source.path, stop - start, size_bytes)
            if compression not in _KNOWN:
                raise BadRecord("unknown compression")
        except DataError:
            self.damaged += 1
            return self._search(start)
        self.work_bytes -= stop - start + size_bytes
        if self.work_bytes < 0:
            raise DataError(f"{self.source.path}: too many overlapping chunks to be salvaged")
        data = self.source.read(start, stop - start)
        name = compression.decode()
        usable_bytes = -1
        try:
            plain = inflate(self.source.path, name, data, size_bytes, self.limits)
        except DataError:
            plain = inflate_prefix(self.source.path, name, data, size_bytes, self.limits)
            usable_bytes = 0
        walked = walk(plain, self.limits)
        if usable_bytes == 0 or walked.good_bytes < len(plain) or cut:
            usable_bytes = walked.good_bytes
            self.damaged += 1
        chunk = Chunk(pos, stop, b"", indexed=False, usable_bytes=usable_bytes)
        self._keep(chunk, walked)
        if lost:  # its length may be wrong: the next chunk may lie within it
            return self._search(start, start + walked.good_bytes)
        end = stop
        while (record := self._record(end)) is not None and opcode(record[0]) == INDEX:
            if record[2] > self.source.size_bytes:
                break
            end = record[2]
        if usable_bytes < 0 and self._index_agrees(stop, end, walked.entries):
            chunk.stop, chunk.indexed = end, True
        return end

    def _index_agrees(self, start: int, stop: int, walked: Entries) -> bool:
        """Tell whether the index records of a chunk name exactly its messages."""
        try:
            self.limits.check_record(self.source.path, stop - start)
            data = self.source.read(start, stop - start)
            places = find_index(data, 0)
        except DataError:
            return False
        named = parse_entries([(key, data[pos : pos + size]) for key, pos, size in places])
        order = np.argsort(named.offsets, kind="stable")
        return all(
            np.array_equal(column[order], truth)
            for column, truth in zip(named, walked, strict=True)
        )

    def _keep(self, chunk: Chunk, walked: Walked) -> None:
        for connection in walked.connections:
            self._add_connection(connection)
        entries = walked.entries
        if not len(entries.times):
            return
        keys, counts = np.unique(entries.ids, return_counts=True)
        self.kept.append(chunk)
        self.counts.append(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
        self.times = [
            min(self.times[0], int(entries.times.min())),
            max(self.times[1], int(entries.times.max())),
        ]

    def _search(self, pos: int, good_until: int = 0) -> int:
        """Return where the next chunk begins, or the end of the file."""
        at = pos + 1
        size_bytes = self.source.size_bytes
        found = size_bytes
        while at < size_bytes:
            window = self.source.read(at, min(_WINDOW_BYTES, size_bytes - at))
            mark = window.find(_CHUNK_MARK)
            while mark >= 0:
                start = self._chunk_start(at + mark)
                if start is not None and start > pos:
                    found = start
                    break
                mark = window.find(_CHUNK_MARK, mark + 1)
            if found < size_bytes or at + len(window) >= size_bytes:
                break
            at += len(window) - len(_CHUNK_MARK)
        self.skipped_bytes += max(0, found - max(pos, good_until))
        return found

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
            record = self._record(start) if start >= len(MAGIC) else None
            if record is not None:
                fields = record[0]
                if opcode(fields) == CHUNK and fields.get(b"compression") in _KNOWN:
                    return start
        return None
