"""MCAP files: chunks of records, message indexes after each, and a summary at the end.

Every checksum that a file carries is verified. A file without an index (not chunked, or without
message indexes) is read once when it is opened, to find where its messages are.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from struct import pack

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from penstock.bags.chunks import SMALL_PART, Chunk, ChunkedBag, Entries, Place
from penstock.bags.limits import BadRecord, Limits, expect
from penstock.bags.mcap_records import (
    CHANNEL,
    CHUNK,
    CHUNK_INDEX,
    FOOTER,
    FOOTER_BYTES,
    HEADER,
    MAGIC,
    MESSAGE,
    MESSAGE_HEAD,
    RECORD_HEAD,
    SCHEMA,
    STATISTICS,
    ChunkHead,
    ChunkIndex,
    Registry,
    find_index,
    parse_chunk_head,
    parse_chunk_index,
    parse_entries,
    parse_statistics,
    record_at,
    walk,
)
from penstock.bags.reader import Message
from penstock.bags.source import ZSTD_MAGIC, Source, inflate, inflate_message, inflate_prefix
from penstock.errors import CorruptFile, UnknownFormat

LOOSE = "loose"  # the compression of a stretch of messages outside of chunks
_PEEK_BYTES = 64


class McapBag(ChunkedBag):
    """An MCAP file."""

    kind = "mcap"

    def __init__(self, path: Path, limits: Limits, salvage: bool = False) -> None:
        self.path, self.limits = path, limits
        self._source = Source(path)
        self.size_bytes = self._source.size_bytes
        self._connections, self._chunks = {}, []
        self.start_ns = self.end_ns = 0
        try:
            self._open(salvage)
        except BaseException:
            self.close()
            raise
        self.topics = self._make_topics(self._count_all())
        names = {chunk.compression for chunk in self._chunks}
        plain = {"none" if name in ("", LOOSE) else name for name in names}
        self.compression = "+".join(sorted(plain)) or "none"

    def _open(self, salvage: bool) -> None:
        if self._source.read(0, min(8, self.size_bytes)) != MAGIC:
            raise UnknownFormat(f"{self.path} is not an MCAP file of version 0")
        try:
            reason = ""
            data_stop = self._read_summary()
            if data_stop and not salvage:
                self._scan(data_stop, None)
        except CorruptFile as error:
            reason = str(error).removeprefix(f"{self.path}: ").partition("; pass")[0]
            if not salvage:
                raise CorruptFile(
                    f"{self.path}: {reason}; pass --salvage to read what there is"
                ) from None
        if salvage:
            self._scan(self.size_bytes, reason)

    def _scan(self, stop: int, reason: str | None) -> None:
        """Find the messages by reading everything; `reason` None if the file must be whole."""
        from penstock.bags.mcap_scan import scan

        indexed = bool(self._chunks)
        found = scan(self._source, self.limits, stop, reason)
        if indexed and not found.report and not all(chunk.indexed for chunk in found.chunks):
            found.report = found.report_as("some message indexes are damaged")
        self._connections, self._chunks = found.connections, found.chunks
        self.start_ns, self.end_ns = found.start_ns, found.end_ns
        self.salvage = found.report

    def _read_summary(self) -> int:
        """Read the index; return 0, or where the data ends if there is no index of use."""
        expect(
            self.size_bytes >= len(MAGIC) + FOOTER_BYTES,
            self.path,
            "the file is cut: it has no footer",
        )
        footer_pos = self.size_bytes - FOOTER_BYTES
        footer = self._source.read(footer_pos, FOOTER_BYTES)
        kind, start, stop = record_at(footer, 0)
        expect(
            (kind, stop) == (FOOTER, FOOTER_BYTES - 8) and footer.endswith(MAGIC),
            self.path,
            "the file is cut: it has no footer",
        )
        summary_pos = int.from_bytes(footer[start : start + 8], "little")
        crc = int.from_bytes(footer[start + 16 : start + 20], "little")
        if summary_pos == 0:
            return footer_pos
        expect(len(MAGIC) <= summary_pos <= footer_pos, self.path, "the footer is damaged")
        self.limits.check_chunk(self.path, footer_pos - summary_pos, 0)
        data = self._source.read(summary_pos, footer_pos - summary_pos, "the summary")
        expect(
            not crc or zlib.crc32(footer[: start + 16], zlib.crc32(data)) == crc,
            self.path,
            "the summary does not match its checksum",
        )
        head = self._source.read(len(MAGIC), RECORD_HEAD.size)
        expect(head[0] == HEADER, self.path, "the header is missing")
        registry, indexes, statistics = self._parse_summary(data)
        return 0 if self._use_index(registry, indexes, statistics, summary_pos) else summary_pos

    def _parse_summary(
        self, data: bytes
    ) -> tuple[Registry, list[ChunkIndex], dict[int, int] | None]:
        registry = Registry(self.limits)
        indexes: list[ChunkIndex] = []
        statistics: dict[int, int] | None = None
        view = memoryview(data)
        pos = 0
        while pos < len(data):
            kind, start, pos = record_at(data, pos)
            if pos > len(data):
                raise BadRecord("the summary is cut")
            if kind in (SCHEMA, CHANNEL):
                registry.add(kind, view[start:pos])
            elif kind == CHUNK_INDEX:
                indexes.append(parse_chunk_index(view[start:pos]))
                self.limits.check_count(self.path, "chunks", len(indexes), self.limits.chunks)
            elif kind == STATISTICS:
                statistics = parse_statistics(view[start:pos])
        return registry, indexes, statistics

    def _use_index(
        self,
        registry: Registry,
        indexes: list[ChunkIndex],
        statistics: dict[int, int] | None,
        data_stop: int,
    ) -> bool:
        """Take the index over if it names every message of the file; otherwise return False."""
        total: dict[int, int] = {}
        for index in indexes:
            for key, count in (index.counts or {}).items():
                total[key] = total.get(key, 0) + count
        if statistics is None or statistics != {k: n for k, n in total.items() if n}:
            return False
        if any(key not in registry.channels for key in total):
            return False
        self._connections = registry.channels
        for index in sorted(indexes, key=lambda index: index.pos):
            stop = index.pos + index.length + index.index_bytes
            previous = self._chunks[-1].stop if self._chunks else len(MAGIC)
            expect(
                previous <= index.pos and stop <= data_stop,
                self.path,
                f"the index names a chunk at {index.pos} that cannot be there",
            )
            counts = b"".join(pack("<II", *item) for item in (index.counts or {}).items())
            self._chunks.append(
                Chunk(
                    index.pos,
                    stop,
                    counts,
                    compression=index.compression,
                    size_bytes=index.size_bytes,
                )
            )
        used = [index for index in indexes if index.counts]
        if used:
            self.start_ns = min(index.start_ns for index in used)
            self.end_ns = max(index.end_ns for index in used)
        return True

    def _chunk_head(self, chunk: Chunk) -> ChunkHead:
        peek = self._source.read(chunk.pos, min(_PEEK_BYTES + 9, self.size_bytes - chunk.pos))
        kind, start, stop = record_at(peek, 0)
        if kind != CHUNK:
            raise BadRecord(f"there is no chunk at {chunk.pos}")
        head = parse_chunk_head(peek[start:], chunk.pos + start, stop - start)
        if chunk.usable_bytes < 0 and head.stop > chunk.stop:
            raise BadRecord(f"the chunk at {chunk.pos} is cut")
        return head

    def _memory_bytes(self, chunk: Chunk) -> int:
        return chunk.stop - chunk.pos + chunk.size_bytes

    def _load(self, chunk: Chunk) -> bytes:
        if chunk.compression == LOOSE:
            return self._source.read(chunk.pos, chunk.stop - chunk.pos, "a stretch of messages")
        head = self._chunk_head(chunk)
        stop = min(head.stop, chunk.stop)
        self.limits.check_chunk(self.path, stop - head.start, head.size_bytes)
        data = self._source.read(head.start, stop - head.start, "a chunk")
        if chunk.usable_bytes >= 0:
            return inflate_prefix(
                self.path, head.compression, data, chunk.usable_bytes, self.limits
            )
        data = inflate(self.path, head.compression, data, head.size_bytes, self.limits)
        if head.crc and isal_zlib.crc32(data) != head.crc:
            raise BadRecord(f"the chunk at {chunk.pos} does not match its checksum")
        return data

    def _find_index(self, chunk: Chunk) -> list[Place]:
        head = self._chunk_head(chunk)
        self.limits.check_record(self.path, chunk.stop - head.stop)
        data = self._source.read(head.stop, chunk.stop - head.stop, "the index of a chunk")
        return find_index(data, head.stop)

    def _parse_entries(self, found: list[tuple[int, bytes]]) -> Entries:
        return parse_entries(found)

    def _walk(self, chunk: Chunk, data: bytes, ids: Collection[int]) -> Entries:
        entries = walk(data, None).entries
        return Entries(*(column[np.isin(entries.ids, list(ids))] for column in entries))

    def _messages(
        self, data: bytes, entries: Entries, ordinals: NDArray[np.int64]
    ) -> Iterator[Message]:
        view = memoryview(data)
        head_at, head_bytes = MESSAGE_HEAD.unpack_from, MESSAGE_HEAD.size
        record_limit, small = self.limits.record_bytes, len(data) // SMALL_PART
        topics = {key: self._connections[key].topic for key in np.unique(entries.ids).tolist()}
        columns = (column.tolist() for column in (*entries, ordinals))
        for t_ns, offset, key, ordinal in zip(*columns, strict=True):
            if offset + head_bytes > len(data):
                raise BadRecord("the index names a message beyond the end of its chunk")
            kind, length, channel, _, found_ns, _ = head_at(data, offset)
            stop = offset + 9 + length
            if kind != MESSAGE or channel != key or found_ns != t_ns or stop > len(data):
                raise BadRecord(f"a message of channel {key} is not where or when the index says")
            if length > record_limit:
                self.limits.check_record(self.path, length)
            message: bytes | memoryview = view[offset + head_bytes : stop]
            if length < small:  # a view would keep the whole chunk
                message = bytes(message)
            if message[:4] == ZSTD_MAGIC and self._connections[key].encoding == "cdr":
                message = inflate_message(self.path, message, self.limits)
            yield Message(topics[key], ordinal, t_ns, message)
