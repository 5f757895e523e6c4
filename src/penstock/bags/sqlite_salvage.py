"""Salvage of damaged SQLite databases: the runs of rows that can be read."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from penstock.bags.sqlite import READ_ERRORS

_FIRST_ID: Final = -(2**63)
_LAST_ID: Final = 2**63 - 1
_MOST_HOLES: Final = 1000
_MOST_EMPTY_IDS: Final = 1 << 40

# Tells whether the topic, time and data of a row are a message.
IsMessage = Callable[[object, object, object], bool]


@dataclass
class Found:
    """The readable rows: the first id and the length of each run, and what they hold."""

    runs: list[tuple[int, int]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    start_ns: int = 0
    end_ns: int = 0
    holes: int = 0

    def add(self, topic_id: int, t_ns: int) -> None:
        """Count a row."""
        if not self.counts:
            self.start_ns = self.end_ns = t_ns
        self.counts[topic_id] = self.counts.get(topic_id, 0) + 1
        self.start_ns, self.end_ns = min(self.start_ns, t_ns), max(self.end_ns, t_ns)


def find_runs(database: sqlite3.Connection, is_message: IsMessage, data_column: str) -> Found:
    """Read all rows once and return the runs of those that are whole.

    Where rows cannot be read, ids further and further on are tried, and then the first readable
    one is found by bisection.
    """
    query = (
        f"SELECT id, topic_id, timestamp, {data_column} FROM messages "  # noqa: S608
        "WHERE id >= ? ORDER BY id LIMIT ?"
    )
    found = Found()
    start: int | None = _FIRST_ID
    while start is not None and found.holes < _MOST_HOLES:
        last = _read_on(database, query, is_message, start, found)
        if last is None:  # the end of the table
            break
        found.holes += 1
        start = _after_hole(database, query, last)
    return found


def _read_on(
    database: sqlite3.Connection, query: str, is_message: IsMessage, start: int, found: Found
) -> int | None:
    """Take in rows until they cannot be read; return the last id, or None at the end."""
    last = max(start - 1, _FIRST_ID)
    in_run = False
    try:
        for row_id, topic_id, t_ns, data in database.execute(query, [start, -1]):
            if type(row_id) is not int or row_id < last:
                return last  # the table is out of order
            last = row_id
            if not is_message(topic_id, t_ns, data):
                found.holes += in_run
                in_run = False
                continue
            if in_run:
                found.runs[-1] = (found.runs[-1][0], found.runs[-1][1] + 1)
            else:
                found.runs.append((row_id, 1))
            in_run = True
            found.add(topic_id, t_ns)
    except READ_ERRORS:
        return last
    return None


def _after_hole(database: sqlite3.Connection, query: str, last: int) -> int | None:
    """Return the first id after `last` from which rows can be read again; None if there is none."""
    low = max(last, 0)  # recorders number from 1
    step = 1
    while step <= _MOST_EMPTY_IDS and low + step < _LAST_ID:
        state = _try(database, query, low + step + 1)
        if state == "end":
            return None
        if state == "row":
            break
        step *= 2
    else:
        return None
    bad, good = low + step // 2, low + step + 1
    while good - bad > 1:
        middle = (bad + good) // 2
        if _try(database, query, middle) == "row":
            good = middle
        else:
            bad = middle
    return good


def _try(database: sqlite3.Connection, query: str, row_id: int) -> str:
    try:
        row = database.execute(query, [row_id, 1]).fetchone()
    except READ_ERRORS:
        return "error"
    return "end" if row is None else "row"
