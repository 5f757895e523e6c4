"""What a recording may ask for before it is refused, and the checks of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.core.memory import format_bytes
from penstock.errors import CorruptFile, LimitExceeded


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes that a bag may declare; checked before memory is allocated.

    Attributes:
        record_bytes: One message or record.
        chunk_bytes: One chunk, decompressed.
        ratio: Decompressed by compressed size, for chunks above `ratio_from_bytes`. Depth
            pictures of one value compress very hard: raise it for such recordings.
        ratio_from_bytes: Chunks up to this size may have any ratio.
        topics: Topics or connections in a bag.
        chunks: Chunks in a bag.
        definition_bytes: The definition of one message type.
        nesting: Depth of messages within messages.
    """

    record_bytes: int = 256 * 10**6
    chunk_bytes: int = 10**9
    ratio: int = 1000
    ratio_from_bytes: int = 16 * 10**6
    topics: int = 10_000
    chunks: int = 2_000_000
    definition_bytes: int = 10**6
    nesting: int = 32

    def check_record(self, path: Path, size_bytes: int) -> None:
        """Refuse a record or message that is too large."""
        if size_bytes > self.record_bytes:
            raise LimitExceeded(
                f"{path}: a record of {format_bytes(size_bytes)} is above the limit of "
                f"{format_bytes(self.record_bytes)}; raise Limits.record_bytes if it is meant"
            )

    def check_chunk(self, path: Path, stored_bytes: int, size_bytes: int) -> None:
        """Refuse a chunk that is too large, or that grows too much when it is decompressed."""
        if max(size_bytes, stored_bytes) > self.chunk_bytes:
            raise LimitExceeded(
                f"{path}: a chunk of {format_bytes(max(size_bytes, stored_bytes))} is above the "
                f"limit of {format_bytes(self.chunk_bytes)}; raise Limits.chunk_bytes if it is "
                "meant"
            )
        if size_bytes > self.ratio_from_bytes and size_bytes > stored_bytes * self.ratio:
            raise LimitExceeded(
                f"{path}: a chunk of {format_bytes(stored_bytes)} claims to hold "
                f"{format_bytes(size_bytes)}, more than {self.ratio}:1; raise Limits.ratio if it "
                "is meant"
            )

    def check_count(self, path: Path, what: str, count: int, limit: int) -> None:
        """Refuse more items than the limit."""
        if count > limit:
            raise LimitExceeded(f"{path}: {count} {what} are above the limit of {limit}")


class BadRecord(CorruptFile):
    """Bytes that are no record; raised by parsers that do not know the path.

    The container that called the parser raises it again as a CorruptFile with the path.
    """


def expect(condition: bool, path: Path, message: str) -> None:
    """Raise CorruptFile with the path unless the condition holds."""
    if not condition:
        raise CorruptFile(f"{path}: {message}")
