"""MCAP files read from their beginning: those without an index, and damaged ones.

Only where chunks lie and what they hold is remembered. Messages outside of chunks are grouped into
stretches of about 1 MB, which are then read like chunks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from struct import pack
from typing import Final

import numpy as np
from isal import isal_zlib

from penstock.bags.chunks import Chunk, Connection, Entries
from penstock.bags.limits import BadRecord, Limits
from penstock.bags.mcap_records import (
    CHANNEL,
    CHUNK,
    DATA_END,
    FOOTER,
    MAGIC,
    MESSAGE,
    MESSAGE_HEAD,
    MESSAGE_INDEX,
    RECORD_HEAD,
    SCHEMA,
    Registry,
    find_index,
    parse_chunk_head,
    parse_entries,
    record_at,
    walk,
)
from penstock.bags.reader import SalvageReport
from penstock.bags.source import Source, inflate, inflate_prefix
from penstock.errors import CorruptFile, DataError

_STRETCH_BYTES: Final = 10**6
_WINDOW_BYTES: Final = 1 << 20
_PEEK_BYTES: Final = 128
_KNOWN: Final = ("", "lz4", "zstd")
# A chunk or message record below 1 TB: rare enough by chance to look closer at each.
_MARK: Final = re.compile(rb"[\x05\x06][\s\S]{5}\0\0\0")
_DAY_NS: Final = 86400 * 10**9


@dataclass
class Scan:
    """What was found; the report is None for a file that is whole."""

    connections: dict[int, Connection]
    chunks: list[Chunk] = field(default_factory=list)
    start_ns: int = 0
    end_ns: int = 0
    report: SalvageReport | None = None
    messages: int = 0
    damaged: int = 0
    skipped_bytes: int = 0

    def report_as(self, reason: str) -> SalvageReport:
        """Make a report of what was found."""
        return SalvageReport(
            reason, self.messages, len(self.chunks), self.damaged, self.skipped_bytes
        )


def scan(source: Source, limits: Limits, stop: int, reason: str | None) -> Scan:
    """Read the data section and return where its messages are.

    Args:
        source: The file.
        limits: What a chunk may ask for.
        stop: Where the data section ends.
        reason: What is wrong with the file, to salvage it ("" if nothing is known to be):
            damage is then passed over and counted. None for a file that must be whole: damage
            is a CorruptFile.
    """
    scanner = _Scanner(source, limits, stop, reason is not None)
    scanner.run()
    found = scanner.finish()
    found.damaged, found.skipped_bytes = scanner.damaged, scanner.skipped_bytes
    if reason is None or not (reason or found.damaged or found.skipped_bytes):
        return found
    found.report = found.report_as(reason or "some chunks are damaged")
    if not found.chunks:
        raise DataError(f"{source.path}: nothing could be salvaged ({found.report.reason})")
    return found


class _Scanner:
    def __init__(self, source: Source, limits: Limits, stop: int, tolerant: bool) -> None:
        self.source, self.limits, self.stop, self.tolerant = source, limits, stop, tolerant
        self.registry = Registry(limits)
        self.kept: list[tuple[Chunk, dict[int, int]]] = []
        self.times = [1 << 62, -1]
        self.damaged = self.skipped_bytes = 0
        self.stretch: tuple[Chunk, dict[int, int]] | None = None
        # Chunks that overlap, as no recorder writes them, would have no end of work.
        self.work_bytes = 20 * source.size_bytes + 10**8

    def run(self) -> None:
        """Go through the records of the data section."""
        pos = len(MAGIC)
        while pos < self.stop:
            try:
                pos = self._record(pos)
            except CorruptFile:
                if not self.tolerant:
                    raise
                self.damaged += not self.kept or self.kept[-1][0].pos != pos
                pos = self._search(pos)
            if pos < 0:
                break

    def finish(self) -> Scan:
        """Keep what belongs to known channels."""
        found = Scan(self.registry.channels)
        for chunk, counts in self.kept:
            known = {key: n for key, n in counts.items() if key in self.registry.channels}
            if len(known) < len(counts) and not self.tolerant:
                raise CorruptFile(f"{self.source.path}: messages of channels that are not defined")
            if known:
                chunk.counts = b"".join(pack("<II", key, n) for key, n in known.items())
                found.chunks.append(chunk)
                found.messages += sum(known.values())
        if self.times[1] >= 0:
            found.start_ns, found.end_ns = self.times
        return found

    def _record(self, pos: int) -> int:
        """Take one record in; return where the next begins, -1 at the end of the data."""
        head = self.source.read(pos, min(_PEEK_BYTES, self.source.size_bytes - pos))
        kind, start, stop = record_at(head, 0)
        length = stop - start
        stop += pos
        cut = stop > self.source.size_bytes
        if kind == 0 or kind == FOOTER or (cut and kind not in (CHUNK,)):
            raise BadRecord(f"there is no record at {pos}")
        if kind == MESSAGE:
            self._message(pos, stop, head)
        elif kind == CHUNK:
            return self._chunk(pos, stop, head[start:], length)
        elif kind in (SCHEMA, CHANNEL):
            self.limits.check_record(self.source.path, length)
            self.registry.add(kind, self.source.read(pos + start, length))
        elif kind == DATA_END:
            crc = int.from_bytes(head[start : start + 4], "little")
            if crc and not self.tolerant and any(c.compression == "loose" for c, _ in self.kept):
                self._check_data(pos, crc)
            return -1
        return stop

    def _message(self, pos: int, stop: int, head: bytes) -> None:
        if stop - pos < MESSAGE_HEAD.size:
            raise BadRecord(f"the message at {pos} is cut")
        self.limits.check_record(self.source.path, stop - pos)
        _, _, key, _, t_ns, _ = MESSAGE_HEAD.unpack_from(head)
        if t_ns >= 1 << 63 or (self.tolerant and key not in self.registry.channels):
            raise BadRecord(f"the message at {pos} is damaged")
        if (
            self.stretch is None
            or self.stretch[0].stop != pos
            or stop - self.stretch[0].pos > _STRETCH_BYTES
        ):
            self.stretch = (Chunk(pos, pos, b"", indexed=False, compression="loose"), {})
            self._keep(*self.stretch)
        chunk, counts = self.stretch
        chunk.stop = stop
        chunk.size_bytes = stop - chunk.pos
        counts[key] = counts.get(key, 0) + 1
        self._note_times(t_ns, t_ns)

    def _chunk(self, pos: int, stop: int, peek: bytes, length: int) -> int:
        head = parse_chunk_head(peek, stop - length, length)
        if head.compression not in _KNOWN:
            raise BadRecord(f"the chunk at {pos} has the unknown compression {head.compression!r}")
        self.limits.check_chunk(self.source.path, head.stop - head.start, head.size_bytes)
        self.work_bytes -= head.stop - head.start + head.size_bytes
        if self.work_bytes < 0:
            raise DataError(f"{self.source.path}: too many overlapping chunks to be salvaged")
        cut = head.stop > self.source.size_bytes
        if cut and not self.tolerant:
            raise BadRecord(f"the chunk at {pos} is cut")
        data = self.source.read(
            head.start, min(head.stop, self.source.size_bytes) - head.start, "a chunk"
        )
        chunk = Chunk(pos, min(stop, self.source.size_bytes), b"", indexed=False)
        chunk.compression, chunk.size_bytes = head.compression, head.size_bytes
        try:
            plain = inflate(self.source.path, head.compression, data, head.size_bytes, self.limits)
        except DataError:
            if not self.tolerant:
                raise
            plain = inflate_prefix(
                self.source.path, head.compression, data, head.size_bytes, self.limits
            )
            chunk.usable_bytes = 0
        good = len(plain) == head.size_bytes
        if good and head.crc and isal_zlib.crc32(plain) != head.crc:
            if not self.tolerant:
                raise BadRecord(f"the chunk at {pos} does not match its checksum")
            self.damaged += 1  # any of its bytes may be wrong: none is used
            self.skipped_bytes += head.stop - head.start
            return stop
        walked = walk(plain, self.registry)
        if walked.good_bytes < len(plain) or chunk.usable_bytes == 0:
            if not self.tolerant:
                raise BadRecord(f"the chunk at {pos} holds a damaged record")
            chunk.usable_bytes = walked.good_bytes
            self.damaged += 1
        entries = walked.entries
        if len(entries.times):
            keys, counts = np.unique(entries.ids, return_counts=True)
            self._keep(chunk, dict(zip(keys.tolist(), counts.tolist(), strict=True)))
            self._note_times(int(entries.times.min()), int(entries.times.max()))
        if cut:  # its length may be wrong: other chunks may lie within it, behind what was read
            taken = 0 if head.compression else walked.good_bytes
            return self._search(head.start + taken - 1)
        if chunk.usable_bytes < 0:
            self._use_message_index(chunk, entries)
        return stop

    def _use_message_index(self, chunk: Chunk, entries: Entries) -> None:
        """Let times be read from the message indexes, where they name exactly the messages."""
        start = end = chunk.stop
        while end + RECORD_HEAD.size <= self.source.size_bytes:
            kind, _, stop = record_at(self.source.read(end, RECORD_HEAD.size), 0)
            if kind != MESSAGE_INDEX or end + stop > self.source.size_bytes:
                break
            end += stop
        if end == start or end - start > self.limits.record_bytes:
            return
        try:
            data = self.source.read(start, end - start)
            places = find_index(data, 0)
            named = parse_entries([(key, data[pos : pos + size]) for key, pos, size in places])
        except BadRecord:
            return
        order = np.argsort(named.offsets, kind="stable")
        pairs = zip(named, entries, strict=True)
        if all(np.array_equal(column[order], truth) for column, truth in pairs):
            chunk.stop, chunk.indexed = end, True

    def _keep(self, chunk: Chunk, counts: dict[int, int]) -> None:
        self.limits.check_count(self.source.path, "chunks", len(self.kept), self.limits.chunks)
        self.kept.append((chunk, counts))

    def _note_times(self, first_ns: int, last_ns: int) -> None:
        self.times = [min(self.times[0], first_ns), max(self.times[1], last_ns)]

    def _check_data(self, stop: int, crc: int) -> None:
        """Check the whole data section; writers differ in whether the magic belongs to it."""
        with_magic = isal_zlib.crc32(MAGIC)
        without = 0
        for pos in range(len(MAGIC), stop, _WINDOW_BYTES):
            window = self.source.read(pos, min(_WINDOW_BYTES, stop - pos))
            with_magic = isal_zlib.crc32(window, with_magic)
            without = isal_zlib.crc32(window, without)
        if crc not in (with_magic, without):
            raise CorruptFile(f"{self.source.path}: the data does not match its checksum")

    def _search(self, pos: int) -> int:
        """Return where the next chunk or message begins behind `pos`; -1 if there is none."""
        at = pos + 1
        found = -1
        while at < self.stop and found < 0:
            window = self.source.read(at, min(_WINDOW_BYTES, self.stop - at))
            for match in _MARK.finditer(window):
                if self._plausible(at + match.start()):
                    found = at + match.start()
                    break
            if at + len(window) >= self.stop:
                break
            at += len(window) - 8
        self.skipped_bytes += (found if found >= 0 else self.stop) - pos
        return found

    def _plausible(self, pos: int) -> bool:
        head = self.source.read(pos, min(_PEEK_BYTES, self.source.size_bytes - pos))
        try:
            kind, start, stop = record_at(head, 0)
            if pos + stop > self.source.size_bytes and kind == MESSAGE:
                return False
            if kind == CHUNK:
                chunk = parse_chunk_head(head[start:], pos + start, stop - start)
                return chunk.compression in _KNOWN
            if len(head) < MESSAGE_HEAD.size or stop - start < 22 or self.times[1] < 0:
                return False
            _, _, key, _, t_ns, _ = MESSAGE_HEAD.unpack_from(head)
        except BadRecord:
            return False
        near = self.times[0] - _DAY_NS <= t_ns <= self.times[1] + 10 * _DAY_NS
        return key in self.registry.channels and near
