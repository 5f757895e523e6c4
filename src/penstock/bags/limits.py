"""What a recording may ask for before it is refused, and the checks of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.core.memory import format_bytes
from penstock.errors import CorruptFile, LimitExceeded


@dataclass(frozen=True, slots=True)
class Limits:
    """What a bag may declare, checked before memory is allocated, and what is held of it.

    Attributes:
        record_bytes: One message or record.
        piece_bytes: What is held of a chunk: a larger one is decompressed piece by piece, and the
            wanted messages are cut out of it as they pass.
        index_bytes: The tables of chunks, and the index of one chunk; the places of the messages
            of a chunk with a larger one are found in the chunk itself.
        window_bytes: What a zstd chunk may refer back to.
        ratio: Decompressed by compressed size, for chunks above `ratio_from_bytes`. Depth
            pictures of one value compress very hard: raise it for such recordings.
        ratio_from_bytes: Chunks up to this size may have any ratio.
        topics: Topics or connections in a bag.
        chunks: Chunks in a bag.
        definition_bytes: The definition of one message type.
        nesting: Depth of messages within messages.
    """

    record_bytes: int = 256 * 10**6
    piece_bytes: int = 8 << 20
    index_bytes: int = 128 * 10**6
    window_bytes: int = 1 << 27
    ratio: int = 1000
    ratio_from_bytes: int = 16 * 10**6
    topics: int = 10_000
    chunks: int = 2_000_000
    definition_bytes: int = 10**6
    nesting: int = 32

    @classmethod
    def for_memory(cls, memory_bytes: int) -> Limits:
        """Return the limits for a process that may use so many bytes for everything.

        A reading then holds at most about a quarter of it: one message, or the pieces and the
        index; messages that the caller keeps are the caller's.
        """
        whole = cls()
        window_bytes = 1 << max(memory_bytes // 8, 1 << 23).bit_length() - 1
        return cls(
            record_bytes=min(whole.record_bytes, memory_bytes // 4),
            piece_bytes=min(whole.piece_bytes, max(memory_bytes // 32, 1 << 20)),
            index_bytes=min(whole.index_bytes, max(memory_bytes // 8, 4 << 20)),
            window_bytes=min(whole.window_bytes, window_bytes),
        )

    def check_record(self, path: Path, size_bytes: int, topic: str | None = None) -> None:
        """Refuse a record or message that is too large."""
        if size_bytes > self.record_bytes:
            what = "a record" if topic is None else f"a message of {topic}"
            raise LimitExceeded(
                f"{path}: {what} has {format_bytes(size_bytes)}, above the limit of "
                f"{format_bytes(self.record_bytes)}; give more memory (--memory, or "
                "Limits.record_bytes), or leave the topic out"
            )

    def check_ratio(self, path: Path, stored_bytes: int, size_bytes: int) -> None:
        """Refuse a chunk that grows too much when it is decompressed."""
        if size_bytes > self.ratio_from_bytes and size_bytes > stored_bytes * self.ratio:
            raise LimitExceeded(
                f"{path}: a chunk of {format_bytes(stored_bytes)} claims to hold "
                f"{format_bytes(size_bytes)}, more than {self.ratio}:1; raise Limits.ratio if it "
                "is meant"
            )

    def check_index(self, path: Path, size_bytes: int) -> None:
        """Refuse tables of chunks, connections and definitions that are too large."""
        if size_bytes > self.index_bytes:
            raise LimitExceeded(
                f"{path}: its index takes more than {format_bytes(self.index_bytes)}; give more "
                "memory (--memory, or Limits.index_bytes)"
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
