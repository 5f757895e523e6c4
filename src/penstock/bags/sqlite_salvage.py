"""Salvage of damaged SQLite databases: the runs of rows that can be read."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import Final

_FIRST_ID: Final = -(2**63)
_LAST_ID: Final = 2**63 - 1
_MOST_HOLES: Final = 10_000
_MOST_EMPTY_IDS: Final = 1 << 40
_QUERY: Final = (
    "SELECT id, topic_id, timestamp, data FROM messages WHERE id >= ? ORDER BY id LIMIT ?"
)


@dataclass
class Found:
    """The readable rows: runs of ids, both ends included, and what they hold."""

    runs: list[tuple[int, int]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    start_ns: int = 0
    end_ns: int = 0
    holes: int = 0


def find_runs(database: sqlite3.Connection, topic_ids: set[int]) -> Found:
    """Read all rows once and return the runs of those that are whole.

    Where rows cannot be read, ids further and further on are tried, and then the first readable
    one is found by bisection.
    """
    found = Found()
    start: int | None = _FIRST_ID
    while start is not None and found.holes < _MOST_HOLES:
        last = _read_run(database, topic_ids, start, found)
        if last is None:  # the end of the table
            break
        found.holes += 1
        start = _after_hole(database, last)
    if found.counts:
        return found
    return Found(holes=found.holes)


def _read_run(
    database: sqlite3.Connection, topic_ids: set[int], start: int, found: Found
) -> int | None:
    """Take in rows up to a damaged one; return the id to go on after, or None at the end."""
    first: int | None = None
    last = start - 1 if start > _FIRST_ID else start
    try:
        for row_id, topic_id, t_ns, data in database.execute(_QUERY, [start, -1]):
            good = type(t_ns) is int and isinstance(data, bytes) and topic_id in topic_ids
            if not good:
                _end_run(found, first, last)
                return int(row_id) if isinstance(row_id, int) else None
            first = row_id if first is None else first
            last = row_id
            if not found.counts:
                found.start_ns = found.end_ns = t_ns
            found.counts[topic_id] = found.counts.get(topic_id, 0) + 1
            found.start_ns, found.end_ns = min(found.start_ns, t_ns), max(found.end_ns, t_ns)
    except sqlite3.Error:
        _end_run(found, first, last)
        return last
    _end_run(found, first, last)
    return None


def _end_run(found: Found, first: int | None, last: int) -> None:
    if first is not None:
        found.runs.append((first, last))


def _after_hole(database: sqlite3.Connection, last: int) -> int | None:
    """Return the first id after `last` from which rows can be read again; None if there is none."""
    low = max(last, 0)  # recorders number from 1
    step = 1
    while step <= _MOST_EMPTY_IDS and low + step < _LAST_ID:
        state = _try(database, low + step + 1)
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
        if _try(database, middle) == "row":
            good = middle
        else:
            bad = middle
    return good


def _try(database: sqlite3.Connection, row_id: int) -> str:
    try:
        row = database.execute(_QUERY, [row_id, 1]).fetchone()
    except sqlite3.Error:
        return "error"
    return "end" if row is None else "row"
