"""The journal of a dataset: one line per event, each with its checksum, appended and synced.

An episode is committed when its line is on the disk; one line may commit many episodes. A torn last
line never was: it is cut off.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isal import isal_zlib
from typing_extensions import Self

from penstock.core.files import publish_bytes, storage_error, write_all
from penstock.errors import CorruptFile, DataError

Record = dict[str, Any]


@dataclass
class Base:
    """What was in the dataset before the first line; none of it is ever touched.

    Attributes:
        episodes: How many.
        frames: How many.
        tasks: Their texts, by number.
        next_file: Number of the next new file: "data", "episodes", "videos/<key>".
        info: The info.json found; None for a dataset of our own.
        sizes: Of the .jsonl files of v2.1, in bytes.
        stats: Name of the statistics pack.
    """

    episodes: int = 0
    frames: int = 0
    tasks: list[str] = field(default_factory=list)
    next_file: dict[str, int] = field(default_factory=dict)
    info: dict[str, Any] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    stats: str | None = None

    def to_record(self) -> Record:
        """Return the first line of a journal."""
        return {"kind": "base", **asdict(self)}

    @classmethod
    def from_record(cls, record: Record) -> Self:
        """Read the first line of a journal."""
        values = {name: value for name, value in record.items() if name != "kind"}
        try:
            return cls(**values)
        except TypeError as error:
            raise CorruptFile(f"the journal begins with an unknown line ({error})") from error


def episodes_of(record: Record) -> int:
    """Return how many episodes a line commits: one, or as many as it has `lengths`."""
    return len(record["lengths"]) if "lengths" in record else 1


class Journal:
    """The file. Opening it reads and verifies every line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self._size = 0

    @classmethod
    def create(cls, path: Path, records: list[Record]) -> Self:
        """Publish a journal with its first lines."""
        data = b"".join(_line(record) for record in records)
        publish_bytes(path, data)
        this = cls(path)
        this.records = list(records)
        this._size = len(data)
        return this

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a journal; a torn end is cut off, anything else that is wrong is an error."""
        this = cls(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror})") from error
        at = 0
        for number, line in enumerate(data.splitlines(keepends=True)):
            record = _parse(line)
            if record is None:
                if at + len(line) < len(data):
                    raise CorruptFile(f"{path} is damaged: line {number + 1} fails its checksum")
                break
            this.records.append(record)
            at += len(line)
        this._size = at
        if at < len(data):
            this.truncate(at)
        return this

    @property
    def size_bytes(self) -> int:
        """Bytes of all whole lines."""
        return self._size

    def append(self, record: Record) -> None:
        """Add a line, durably; on an error the file is as before."""
        line = _line(record)
        try:
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(self._size)
                write_all(file, line)
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, self._size)
            raise storage_error("write", self.path, error) from error
        self._size += len(line)
        self.records.append(record)

    def truncate(self, size: int) -> None:
        """Cut the file off, durably."""
        try:
            with open(self.path, "r+b", buffering=0) as file:
                file.truncate(size)
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error("write", self.path, error) from error
        self._size = size


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (isal_zlib.crc32(text), text)


def _parse(line: bytes) -> Record | None:
    """Return the record of a line; None if it is not whole."""
    crc, space, text = line.partition(b" ")
    if not space or not text.endswith(b"\n") or crc != b"%08x" % isal_zlib.crc32(text[:-1]):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
