"""Where the episodes of one recording begin and end, and what the robot does in each.

Both come from the recording (a topic of events, of tasks), its name or folder, or a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags import Bag
from penstock.conversion.align import SECOND_NS, Times
from penstock.conversion.mapping import Events, Mapping, TableRow
from penstock.conversion.timeline import Stamps
from penstock.errors import DataError

_END_NS: Final = 2**62
_UNIX_S: Final = 1e8  # a time in a table beyond this counts from 1970, not from the start
_REQUEST_RECEIVED: Final = 1.0
_MOST_TASK: Final = 1000  # characters


@dataclass(frozen=True, slots=True)
class Span:
    """The time of an episode, [start_ns, end_ns), and its task if that is known."""

    start_ns: int
    end_ns: int
    task: str = ""


def find_spans(bag: Bag, stamps: Stamps, mapping: Mapping, start_ns: int) -> list[Span] | None:
    """Return the times of the episodes, in order; None if all of the recording is one.

    The times of a table count from `start_ns`.
    """
    if mapping.episodes is not None:
        return list(_spans(*_events(bag, stamps, mapping.episodes)))
    rows = [row for row in mapping.table if row.start_s is not None and _is_of(row, bag.path)]
    if not any(row.start_s is not None for row in mapping.table):
        return None
    spans = [
        Span(_moment(row.start_s, start_ns, 0), _moment(row.end_s, start_ns, _END_NS), row.task)
        for row in rows
    ]
    spans.sort(key=lambda span: span.start_ns)
    # An episode without an end lasts to the next one.
    following = [*(span.start_ns for span in spans), _END_NS][1:]
    return [
        span if span.end_ns < _END_NS else Span(span.start_ns, next_ns, span.task)
        for span, next_ns in zip(spans, following, strict=False)
    ]


def span_of(times: Times, spans: list[Span], where: str) -> Times:
    """Return the number of the span that each moment lies in; -1 for none."""
    starts = np.array([span.start_ns for span in spans], np.int64)
    ends = np.array([span.end_ns for span in spans], np.int64)
    if np.any(starts[1:] < ends[:-1]):
        at = int(np.flatnonzero(starts[1:] < ends[:-1])[0])
        raise DataError(f"{where}: episodes {at} and {at + 1} of the table overlap: mend its times")
    found = np.searchsorted(starts, times, side="right") - 1
    inside = (found >= 0) & (times < ends[np.maximum(found, 0)]) if len(spans) else found >= 0
    return np.where(inside, found, -1)


def tasks_of(
    bag: Bag, stamps: Stamps, mapping: Mapping, times: Times, episodes: list[tuple[int, int]]
) -> list[str]:
    """Return the task of each episode."""
    tasks = mapping.tasks
    if tasks is not None and tasks.topic is not None:
        return _spoken(bag, stamps, mapping, times, episodes)
    task = mapping.task
    path = bag.path.absolute()
    if tasks is not None and tasks.folder:
        task = path.parent.name
    elif tasks is not None and tasks.name is not None:
        pattern = re.escape(tasks.name).replace(r"\{task\}", "(.+)").replace(r"\*", ".*?")
        match = re.fullmatch(pattern, path.name) or re.fullmatch(pattern, path.stem)
        if match is None:
            raise DataError(f"{bag.path}: its name is not like {tasks.name!r}: set tasks.name")
        task = match[1]
    if tasks is not None:
        task = task.replace("_", " ").strip()
    for row in mapping.table:
        if row.start_s is None and row.task and _is_of(row, bag.path):
            task = row.task
    return [task or mapping.task] * len(episodes)


def _spoken(
    bag: Bag, stamps: Stamps, mapping: Mapping, times: Times, episodes: list[tuple[int, int]]
) -> list[str]:
    """Return the text that was last said when each episode began, or is first said in it."""
    assert mapping.tasks is not None
    topic, field = mapping.tasks.topic or "", mapping.tasks.field
    if not stamps.count(topic):
        raise DataError(stamps.absent("the tasks", (topic,)))
    said, ordinals = stamps.of(topic).times, stamps.of(topic).ordinals
    decoder, texts = bag.decoder(topic), {}
    for message in bag.read([topic]):
        texts[message.ordinal] = decoder.text(message.data, field)[:_MOST_TASK].strip()
    found = []
    for first, after in episodes:
        at = int(np.searchsorted(said, times[first], side="right")) - 1
        if at < 0 and said[0] <= times[after - 1]:
            at = 0
        found.append((texts[int(ordinals[at])] if at >= 0 else "") or mapping.task)
    return found


def _events(bag: Bag, stamps: Stamps, events: Events) -> tuple[Times, NDArray[np.int8]]:
    """Return when something is said about episodes, and what: 1 begins one, -1 ends it."""
    topic, field = events.topic, events.field
    if not stamps.count(topic):
        raise DataError(stamps.absent("the episodes", (topic,)))
    ordered = stamps.of(topic)
    if topic.endswith("/_service_event") and not field:
        field = "info.event_type"
    if not field:
        return ordered.times, np.ones(len(ordered.times), np.int8)
    decoder = bag.decoder(topic)
    signs = np.zeros(stamps.count(topic), np.int8)
    if events.begin is not None:
        for message in bag.read([topic]):
            text = decoder.text(message.data, field)
            begins = fnmatchcase(text, events.begin)
            ends = events.end is not None and fnmatchcase(text, events.end)
            signs[message.ordinal] = 1 if begins else -1 if ends else 0
        return ordered.times, signs[ordered.ordinals]
    values = np.zeros(len(signs))
    for message in bag.read([topic]):
        numbers = decoder.vector(message.data, field)
        values[message.ordinal] = numbers[0] if len(numbers) else 0.0
    values = values[ordered.ordinals]
    if topic.endswith("/_service_event"):  # a call is seen by its caller (0) and its server (1)
        which = _REQUEST_RECEIVED if np.any(values == _REQUEST_RECEIVED) else 0.0
        return ordered.times, (values == which).astype(np.int8)
    is_set = (values > 0.5).astype(np.int8)
    return ordered.times, is_set - np.concatenate(([np.int8(0)], is_set[:-1]))


def _spans(times: Times, signs: NDArray[np.int8]) -> Iterator[Span]:
    start_ns: int | None = None
    for time_ns, sign in zip(times.tolist(), signs.tolist(), strict=True):
        if sign and start_ns is not None:
            yield Span(start_ns, time_ns)
            start_ns = None
        if sign > 0:
            start_ns = time_ns
    if start_ns is not None:
        yield Span(start_ns, _END_NS)


def _moment(seconds: float | None, start_ns: int, default_ns: int) -> int:
    if seconds is None:
        return default_ns
    return round(seconds * SECOND_NS) + (0 if seconds > _UNIX_S else start_ns)


def _is_of(row: TableRow, path: Path) -> bool:
    """Tell whether a row of a table is about a bag: by its name, without its ending, or its end."""
    if not row.bag:
        return True
    wanted, parts = Path(row.bag).parts, path.absolute().parts
    return parts[-len(wanted) :] == wanted or (*parts[:-1], path.stem)[-len(wanted) :] == wanted
