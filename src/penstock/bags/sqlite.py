"""ROS 2 bags in SQLite databases (.db3).

Every reading has its own connection, so that readings may run in several threads. Messages that
were compressed one by one (zstd) are recognised by their first bytes: CDR data never begins so.
"""

from __future__ import annotations

import sqlite3
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.limits import Limits, expect
from penstock.bags.reader import Bag, Message, SalvageReport, Selection, Topic, Wanted, join_topics
from penstock.bags.source import ZSTD_MAGIC, inflate_message
from penstock.errors import CorruptFile, DataError, LimitExceeded, UnknownFormat

# sqlite3 fails to decode its own message about a damaged schema.
READ_ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
_BATCH: Final = 4096
_READ_BATCH: Final = 256
_NEEDED: Final = {
    "topics": {"id", "name", "type", "serialization_format"},
    "messages": {"id", "topic_id", "timestamp", "data"},
}


def data_column(limits: Limits) -> str:
    """Return the column of the messages in SQL; one above the limit is "too big", and not read."""
    return f"CASE WHEN length(data) > {limits.record_bytes} THEN zeroblob(1 << 31) ELSE data END"


class SqliteBag(Bag):
    """One .db3 file."""

    kind = "db3"

    def __init__(self, path: Path, limits: Limits, salvage: bool = False) -> None:
        self.path, self.limits = path, limits
        self.size_bytes = path.stat().st_size
        self.compression = "none"
        self.start_ns = self.end_ns = 0
        # The first id and the length of the runs of rows that a salvage found readable.
        self._runs: list[tuple[int, int]] | None = None
        # Topic and time of every row, in file order; None if they are too many to be held.
        self._index: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._bytes_read = 0
        self._names: dict[int, str] = {}
        self._salvaging = salvage
        if not salvage:
            self._check_size()
        with closing(self._connect()) as database:
            try:
                with self._errors():
                    rows = self._topic_rows(database, salvage)
            except CorruptFile as error:
                if not salvage:
                    raise
                text = str(error).removeprefix(f"{self.path}: ").partition("; pass")[0]
                raise DataError(f"{self.path}: nothing could be salvaged ({text})") from error
            try:
                reason = ""
                with self._errors():
                    counts = self._count(database)
            except CorruptFile as error:
                if not salvage:
                    raise
                reason, counts = str(error), {}
            if salvage:
                counts = self._salvage(database, reason, counts)
            self.topics = join_topics(
                Topic(name, kind, counts.get(key, 0), None, definition, encoding)
                for key, name, kind, encoding, definition in rows
            )
        self._detect_compression()

    def times(self, topic: str) -> NDArray[np.int64]:
        """Return the log times of a topic, in file order."""
        count = self.topic(topic).count
        ids = [key for key, name in self._names.items() if name == topic]
        if self._index is not None:
            return self._index[1][np.isin(self._index[0], ids)]
        found = np.empty(count, np.int64)
        at = 0
        for rows in self._rows(ids):
            times = self._numbers([t_ns for _, _, t_ns in rows])
            expect(at + len(times) <= count, self.path, "the database changed while it was read")
            found[at : at + len(times)] = times
            at += len(times)
        expect(at == count, self.path, "the database changed while it was read")
        return found

    @property
    def bytes_read(self) -> int:
        """Bytes of the messages that were fetched so far."""
        return self._bytes_read

    def close(self) -> None:
        """Nothing stays open between readings."""

    def _read(
        self, topics: Sequence[str], wanted: Wanted, heads: Mapping[str, int] | None = None
    ) -> Iterator[Message]:
        """Yield messages; the rows are looked at without their data, which is fetched if wanted."""
        selection = Selection(topics, wanted)
        asked = set(topics)
        ids = [key for key, name in self._names.items() if name in asked]
        query = (
            f"SELECT id, {data_column(self.limits)} FROM messages "  # noqa: S608
            "WHERE id IN ({}) ORDER BY id"
        )
        with closing(self._connect()) as database, self._errors():
            for rows in self._rows(ids):
                chosen = {}
                for row_id, key, t_ns in rows:
                    ordinal = selection.next(self._names[key])
                    if ordinal is not None:
                        chosen[row_id] = self._names[key], ordinal, t_ns
                if not chosen:
                    continue
                cursor = database.execute(query.format(",".join("?" * len(chosen))), [*chosen])
                for row_id, data in cursor:
                    topic, ordinal, t_ns = chosen[row_id]
                    if not isinstance(data, bytes) or not isinstance(t_ns, int):
                        raise CorruptFile(f"{self.path}: a row of messages holds no message")
                    self._bytes_read += len(data)
                    if data.startswith(ZSTD_MAGIC):
                        data = inflate_message(self.path, data, self.limits)
                    yield Message(topic, ordinal, t_ns, data)

    def _rows(self, ids: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
        """Yield id, topic and time of rows of messages in file order, in batches.

        The data, which comes last in a row, is not read.
        """
        where = f"topic_id IN ({','.join(map(str, ids))})"
        columns = "SELECT id, topic_id, timestamp FROM messages WHERE"
        with closing(self._connect()) as database, self._errors():
            if self._runs is None:
                cursor = database.execute(f"{columns} {where} ORDER BY id")
                while rows := cursor.fetchmany(_READ_BATCH):
                    yield rows
                return
            # The limit keeps SQLite from looking at the row behind a run, which is damaged.
            query = f"{columns} id >= ? ORDER BY id LIMIT ?"
            wanted = set(ids)
            for run in self._runs:
                cursor = database.execute(query, run)
                while rows := cursor.fetchmany(_READ_BATCH):
                    yield [row for row in rows if row[1] in wanted]

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
            if sys.version_info >= (3, 11):  # before, only messages are limited: see data_column
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
        except READ_ERRORS as error:
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

    def _topic_rows(
        self, database: sqlite3.Connection, salvage: bool
    ) -> list[tuple[int, str, str, str, str]]:
        """Return number, name, type, encoding and definition of every topic."""
        for table, needed in _NEEDED.items():
            self._check_table(database, table, needed)
        try:
            with self._errors():
                definitions = self._definitions(database)
        except CorruptFile:
            if not salvage:
                raise
            definitions = {}  # the common types are known without
        rows = database.execute(
            "SELECT id, name, type, serialization_format FROM topics ORDER BY id LIMIT ?",
            [self.limits.topics + 1],
        ).fetchall()
        self.limits.check_count(self.path, "topics", len(rows), self.limits.topics)
        found = []
        for key, name, kind, encoding in rows:
            good = isinstance(key, int) and all(isinstance(x, str) for x in (name, kind, encoding))
            expect(good, self.path, "the table of topics is damaged")
            parts = kind.split("/")
            kind = f"{parts[0]}/msg/{parts[1]}" if len(parts) == 2 else kind
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

    def _count(self, database: sqlite3.Connection) -> dict[int, int]:
        """Count the messages of each topic, and find the first and the last time."""
        counts: dict[int, int] = {}
        ends: list[int] = []
        columns: tuple[array[int], array[int]] | None = array("q"), array("q")
        cursor = database.execute("SELECT topic_id, timestamp FROM messages ORDER BY id")
        while rows := cursor.fetchmany(_BATCH):
            found = self._add(counts, ends, rows)
            if columns is not None:
                for column, numbers in zip(columns, found, strict=True):
                    column.frombytes(numbers.tobytes())
                if 16 * len(columns[0]) > self.limits.index_bytes:
                    columns = None
        self.start_ns, self.end_ns = ends or (0, 0)
        if columns is not None:
            ids, times = (np.frombuffer(column, np.int64) for column in columns)
            self._index = ids, times
        return counts

    def _add(
        self, counts: dict[int, int], ends: list[int], rows: list[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids, times = (
            self._numbers([row[0] for row in rows]),
            self._numbers([row[1] for row in rows]),
        )
        for key, count in zip(
            *(column.tolist() for column in np.unique(ids, return_counts=True)), strict=True
        ):
            expect(key in self._names, self.path, f"messages of the unknown topic {key}")
            counts[key] = counts.get(key, 0) + count
        ends[:] = [min([*ends[:1], int(times.min())]), max([*ends[1:], int(times.max())])]
        return ids, times

    def _numbers(self, values: list[Any]) -> NDArray[np.int64]:
        if not all(type(value) is int for value in values):
            raise CorruptFile(f"{self.path}: a row of messages holds no number where one must be")
        return np.array(values, np.int64)

    def _detect_compression(self) -> None:
        query = f"SELECT {data_column(self.limits)} FROM messages ORDER BY id LIMIT 1"  # noqa: S608
        with suppress(CorruptFile), closing(self._connect()) as database, self._errors():
            for (data,) in database.execute(query):
                if isinstance(data, bytes) and data.startswith(ZSTD_MAGIC):
                    self.compression = "zstd"

    def _is_message(self, topic_id: object, t_ns: object, data: object) -> bool:
        """Tell whether the columns of a row are a message."""
        if not (topic_id in self._names and type(t_ns) is int and isinstance(data, bytes)):
            return False
        try:
            return not data.startswith(ZSTD_MAGIC) or bool(
                inflate_message(self.path, data, self.limits)
            )
        except DataError:
            return False

    def _salvage(
        self, database: sqlite3.Connection, reason: str, counts: dict[int, int]
    ) -> dict[int, int]:
        """Read every row; keep to those that can be read, unless that is all of them."""
        from penstock.bags.sqlite_salvage import find_runs

        found = find_runs(database, self._is_message, data_column(self.limits))
        if not reason and found.holes == 0 and found.counts == counts:
            return counts
        reason = reason.removeprefix(f"{self.path}: ").partition("; pass")[0]
        reason = reason or "some messages cannot be read"
        if not found.runs:
            raise DataError(f"{self.path}: nothing could be salvaged ({reason})")
        self._runs, self._index = found.runs, None
        self.start_ns, self.end_ns = found.start_ns, found.end_ns
        total = sum(found.counts.values())
        self.salvage = SalvageReport(reason, total, len(found.runs), found.holes, 0)
        return found.counts
