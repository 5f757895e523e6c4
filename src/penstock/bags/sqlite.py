"""ROS 2 bags in SQLite databases (.db3).

Every reading has its own connection, so that readings may run in several threads.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.idl import full_type
from penstock.bags.limits import Limits, expect
from penstock.bags.reader import (
    Bag,
    Message,
    SalvageReport,
    Selection,
    Topic,
    among,
    join_topics,
)
from penstock.bags.source import ZSTD_MAGIC, inflate_message
from penstock.bags.spool import RowStore
from penstock.errors import CorruptFile, DataError, LimitExceeded, UnknownFormat

# sqlite3 fails to decode its own message about a damaged schema.
_READ_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
_READ_BATCH: Final = 256
_NEEDED: Final = {
    "topics": {"id", "name", "type", "serialization_format"},
    "messages": {"id", "topic_id", "timestamp", "data"},
}
_FIRST_ID, _LAST_ID = -(2**63), 2**63 - 1
_MOST_KEY: Final = 2**32 - 1
_MOST_HOLES: Final = 1000
_MOST_EMPTY_IDS: Final = 1 << 40


class SqliteBag(Bag):
    """One .db3 file."""

    kind = "db3"

    def __init__(
        self, path: Path, limits: Limits, salvage: bool = False, scratch: Path | None = None
    ) -> None:
        self.path, self.limits, self._scratch = path, limits, scratch
        self.size_bytes = path.stat().st_size
        self.compression = "none"
        self.start_ns = self.end_ns = 0
        self._rows = RowStore(scratch)
        self._bytes_read = 0
        self._names: dict[int, str] = {}
        self._counts: dict[int, int] = {}
        self._salvaging = salvage
        # One above the limit is "too big", and not read.
        big = f"length(data) > {limits.record_bytes}"
        self._data_column = f"CASE WHEN {big} THEN zeroblob(1 << 31) ELSE data END"
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        if not self._salvaging:
            self._check_size()
        with closing(self._connect()) as database:
            try:
                with self._errors():
                    rows = self._topic_rows(database)
                    if not self._salvaging:
                        self._scan(database)
            except CorruptFile as error:
                if not self._salvaging:
                    raise
                raise DataError(f"{self.path}: nothing could be salvaged ({error})") from error
            if self._salvaging:
                self._salvage(database)
            self.topics = join_topics(
                Topic(name, kind, self._counts.get(key, 0), None, definition, encoding)
                for key, name, kind, encoding, definition in rows
            )
            for first in self._rows.blocks(0, min(len(self._rows), 1)):
                query = "SELECT substr(data, 1, 4) FROM messages WHERE id = ?"
                with self._errors():
                    magic = database.execute(query, first["place"].tolist()).fetchone()
                if magic == (ZSTD_MAGIC,):
                    self.compression = "zstd"

    def times(self, topic: str) -> NDArray[np.int64]:
        """Return the log times of a topic, in file order."""
        self.topic(topic)
        keys = self._keys([topic])[topic]
        blocks = [b["t_ns"][among(b["key"], keys)] for b in self._rows.blocks()]
        return np.concatenate([np.empty(0, np.int64), *blocks])

    @property
    def bytes_read(self) -> int:
        """Bytes of the messages that were fetched so far."""
        return self._bytes_read

    def close(self) -> None:
        """Let the temporary files go; the database is open for as long as it is read."""
        self._rows.close()
        super().close()

    def _read(self, selection: Selection) -> Iterator[Message]:
        return self._fetch(selection, self._data_column)

    def _has_near_heads(self, topics: Sequence[str]) -> bool:
        return self.compression == "none"

    def _read_heads(self, selection: Selection, sizes: Mapping[str, int]) -> Iterator[Message]:
        return self._fetch(selection, f"substr(data, 1, {max(sizes.values(), default=1)})")

    def _fetch(self, selection: Selection, column: str) -> Iterator[Message]:
        """Yield messages: of the rows that are wanted, one column is read."""
        keys = self._keys(selection.topics)
        query = f"SELECT id, {column} FROM messages WHERE id IN ({{}}) ORDER BY id"  # noqa: S608
        with closing(self._connect()) as database, self._errors():
            for block in self._rows.blocks():
                places, ordinals = selection.pick(block["key"], keys)
                for at in range(0, len(places), _READ_BATCH):
                    rows = block[places[at : at + _READ_BATCH]].tolist()
                    numbers = ordinals[at : at + _READ_BATCH].tolist()
                    chosen = {row[2]: (*row, n) for row, n in zip(rows, numbers, strict=True)}
                    marks = ",".join("?" * len(chosen))
                    for row_id, data in database.execute(query.format(marks), [*chosen]):
                        key, t_ns, _, ordinal = chosen[row_id]
                        if not isinstance(data, bytes):
                            raise CorruptFile(f"{self.path}: a row of messages holds no message")
                        self._bytes_read += len(data)
                        yield Message(self._names[key], ordinal, t_ns, data)

    def _keys(self, topics: Sequence[str]) -> dict[str, list[int]]:
        """Return the numbers of some topics."""
        return {t: [key for key, name in self._names.items() if name == t] for t in topics}

    def _connect(self) -> sqlite3.Connection:
        # A recorder that was killed leaves a log beside the database, which must be read with it.
        log = self.path.with_name(self.path.name + "-wal")
        immutable = "" if log.exists() and log.stat().st_size else "&immutable=1"
        with self._errors():
            database = sqlite3.connect(
                f"{self.path.resolve().as_uri()}?mode=ro{immutable}",
                uri=True,
                check_same_thread=False,
            )
            database.text_factory = lambda data: data.decode("utf-8", "replace")
            if sys.version_info >= (3, 11):  # before, only messages are limited: see _data_column
                database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self.limits.record_bytes)
            settings = ["trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0"]
            if self._salvaging:
                settings.append("writable_schema=ON")  # otherwise a cut file is refused as a whole
            for setting in settings:
                database.execute(f"PRAGMA {setting}")
        return database

    def _check_size(self) -> None:
        """Refuse a file that was cut: SQLite takes the rest of its last page for zeros."""
        with self.path.open("rb") as file:
            head = file.read(100)
        page_bytes = int.from_bytes(head[16:18], "big")
        page_bytes = 65536 if page_bytes == 1 else page_bytes
        pages = int.from_bytes(head[28:32], "big")
        valid = head[24:28] == head[92:96]  # otherwise an old writer left the count behind
        expect(
            len(head) == 100 and (not valid or pages * page_bytes <= self.size_bytes),
            self.path,
            "the file is cut; pass --salvage to read what there is",
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except _READ_ERRORS as error:
            if "too big" in str(error):
                raise LimitExceeded(
                    f"{self.path}: a message is above the limit of {self.limits.record_bytes} "
                    "bytes; raise Limits.record_bytes if it is meant"
                ) from error
            reason = " ".join(str(error).split())[:120]
            hint = "" if self._salvaging else "; pass --salvage to read what there is"
            raise CorruptFile(
                f"{self.path}: the database cannot be read ({reason}){hint}"
            ) from error

    def _topic_rows(self, database: sqlite3.Connection) -> list[tuple[int, str, str, str, str]]:
        """Return number, name, type, encoding and definition of every topic."""
        for table, needed in _NEEDED.items():
            self._check_table(database, table, needed)
        try:
            with self._errors():
                definitions = self._definitions(database)
        except CorruptFile:
            if not self._salvaging:
                raise
            definitions = {}  # the common types are known without
        rows = database.execute(
            "SELECT id, name, type, serialization_format FROM topics ORDER BY id LIMIT ?",
            [self.limits.topics + 1],
        ).fetchall()
        self.limits.check_count(self.path, "topics", len(rows), self.limits.topics)
        found = []
        for key, name, kind, encoding in rows:
            texts = all(isinstance(value, str) for value in (name, kind, encoding))
            good = isinstance(key, int) and 0 <= key <= _MOST_KEY and texts
            expect(good, self.path, "the table of topics is damaged")
            kind = full_type(kind)
            found.append((key, name, kind, encoding, definitions.get(kind, "")))
            self._names[key] = name
        return found

    def _check_table(self, database: sqlite3.Connection, table: str, needed: set[str]) -> None:
        """Make sure that it is a plain table: a view could run any query, and for ever."""
        row = database.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", [table]
        ).fetchone()
        if row is None:
            raise UnknownFormat(f"{self.path} has no table {table!r}: it is not a ROS 2 bag")
        plain = {c[1] for c in database.execute(f"PRAGMA table_xinfo({table})") if c[6] == 0}
        if "VIRTUAL" in str(row[0]).upper().split()[:3] or not needed <= plain:
            raise UnknownFormat(f"{self.path}: the table {table!r} is not that of a ROS 2 bag")

    def _definitions(self, database: sqlite3.Connection) -> dict[str, str]:
        row = database.execute(
            "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'message_definitions'"
        ).fetchone()
        if row is None:
            return {}
        self._check_table(
            database, "message_definitions", {"topic_type", "encoded_message_definition"}
        )
        found = {}
        for name, text in database.execute(
            "SELECT topic_type, encoded_message_definition FROM message_definitions LIMIT ?",
            [self.limits.topics],
        ):
            good = isinstance(name, str) and isinstance(text, str)
            expect(good, self.path, "the table of message definitions is damaged")
            if len(text) > self.limits.definition_bytes:
                raise LimitExceeded(f"{self.path}: the definition of {name[:80]} is too long")
            found[name] = text
        return found

    def _scan(self, database: sqlite3.Connection) -> None:
        """Note where the messages are; their data, which comes last in a row, is not read."""
        query = "SELECT id, topic_id, timestamp FROM messages ORDER BY id"
        for row_id, key, t_ns in database.execute(query):
            if not type(row_id) is type(key) is type(t_ns) is int:
                raise CorruptFile(
                    f"{self.path}: a row of messages holds no number where one must be"
                )
            expect(key in self._names, self.path, f"messages of the unknown topic {key}")
            self._note(row_id, key, t_ns)

    def _note(self, row_id: int, key: int, t_ns: int) -> None:
        if not self._counts:
            self.start_ns = self.end_ns = t_ns
        self._counts[key] = self._counts.get(key, 0) + 1
        self.start_ns, self.end_ns = min(self.start_ns, t_ns), max(self.end_ns, t_ns)
        self._rows.append(key, t_ns, row_id)

    def _is_message(self, key: object, t_ns: object, data: object) -> bool:
        """Tell whether the columns of a row are a message."""
        if not (key in self._names and type(t_ns) is int and isinstance(data, bytes)):
            return False
        try:
            return not data.startswith(ZSTD_MAGIC) or bool(
                inflate_message(self.path, data, self.limits)
            )
        except DataError:
            return False

    def _salvage(self, database: sqlite3.Connection) -> None:
        """Read every row, and note those that are whole.

        Where rows cannot be read, ids further and further on are tried, and then the first readable
        one is found by bisection.
        """
        query = (
            f"SELECT id, topic_id, timestamp, {self._data_column} FROM messages "  # noqa: S608
            "WHERE id >= ? ORDER BY id LIMIT ?"
        )
        self._runs = self._holes = 0
        start: int | None = _FIRST_ID
        while start is not None and self._holes < _MOST_HOLES:
            last = self._read_on(database, query, start)
            if last is None:  # the end of the table
                break
            self._holes += 1
            start = _after_hole(database, query, last)
        total = sum(self._counts.values())
        if self._holes:
            reason = "some messages cannot be read"
            if not total:
                raise DataError(f"{self.path}: nothing could be salvaged ({reason})")
            self.salvage = SalvageReport(reason, total, self._runs, self._holes, 0)

    def _read_on(self, database: sqlite3.Connection, query: str, start: int) -> int | None:
        """Take in rows until they cannot be read; return the last id, or None at the end."""
        last = max(start - 1, _FIRST_ID)
        in_run = False
        try:
            for row_id, key, t_ns, data in database.execute(query, [start, -1]):
                if type(row_id) is not int or row_id < last:
                    return last  # the table is out of order
                last = row_id
                good = self._is_message(key, t_ns, data)
                self._holes += in_run and not good
                self._runs += good and not in_run
                in_run = good
                if good:
                    self._note(row_id, key, t_ns)
        except _READ_ERRORS:
            return last
        return None


def _after_hole(database: sqlite3.Connection, query: str, last: int) -> int | None:
    """Return the first id after `last` from which rows can be read again; None if there is none."""
    low = max(last, 0)  # recorders number from 1
    step = 1
    while step <= _MOST_EMPTY_IDS and low + step < _LAST_ID:
        row = _try(database, query, low + step + 1)
        if row is None:
            return None
        if row:
            break
        step *= 2
    else:
        return None
    bad, good = low + step // 2, low + step + 1
    while good - bad > 1:
        middle = (bad + good) // 2
        if _try(database, query, middle):
            good = middle
        else:
            bad = middle
    return good


def _try(database: sqlite3.Connection, query: str, row_id: int) -> bool | None:
    """Tell whether a row can be read at an id or behind it; None if there is none."""
    try:
        row: Any = database.execute(query, [row_id, 1]).fetchone()
    except _READ_ERRORS:
        return False
    return None if row is None else True
