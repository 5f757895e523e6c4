"""Marks of a reviewer: an edit list in YAML, as `penstock edit DATASET apply FILE` takes it.

Every change is saved at once, in one step: a crash loses nothing and leaves no half file.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.conversion.settings import load_yaml
from penstock.core.files import publish_bytes
from penstock.dataset.edit import Edits
from penstock.errors import UsageError
from penstock.ui.suggestions import did_you_mean

_LISTS = ("delete", "keep", "trim", "split", "cut", "relabel", "drop", "rename", "codec")

_MOST_TEXT = 1000
_HEAD = re.compile(r"# (\d+) episodes, (\d+) frames")


@dataclass(frozen=True, slots=True)
class Mark:
    """What a reviewer says of one episode.

    Attributes:
        reject: It is to be deleted.
        trim: The first frame to keep, and one past the last.
        split: Frames at which a new episode begins.
        cut: Frames to take out: ranges of the first and one past the last, in order and apart.
        task: Its new task.
    """

    reject: bool = False
    trim: tuple[int, int] | None = None
    split: tuple[int, ...] = ()
    cut: tuple[tuple[int, int], ...] = ()
    task: str | None = None

    def within_trim(self, length: int) -> Mark:
        """Return it without what lies in frames that are trimmed away."""
        first, stop = self.trim or (0, length)
        cut = [(max(a, first), min(b, stop)) for a, b in self.cut]
        split = tuple(at for at in self.split if first < at < stop)
        return replace(self, split=split, cut=tuple((a, b) for a, b in cut if a < b))


def read_marks(path: Path) -> Edits:
    """Read an edit list: YAML with the names of `_LISTS`.

    Raises:
        UsageError: It cannot be read, or is none.
    """
    found = load_yaml(path)
    if not found:
        raise UsageError(f"{path} is no edit list: it needs {', '.join(_LISTS)}")
    for name in found:
        if name not in _LISTS:
            raise UsageError(f"{path}: unknown {name!r}: {did_you_mean(str(name), _LISTS)}")
    try:
        return Edits(
            delete=[int(n) for n in found.get("delete") or ()],
            keep=None if found.get("keep") is None else [int(n) for n in found["keep"]],
            trim={int(n): (int(a), int(b)) for n, (a, b) in (found.get("trim") or {}).items()},
            split={int(n): [int(f) for f in at] for n, at in (found.get("split") or {}).items()},
            cut={
                int(n): [(int(a), int(b)) for a, b in ranges]
                for n, ranges in (found.get("cut") or {}).items()
            },
            relabel={
                None if n == "all" else int(n): str(task)
                for n, task in (found.get("relabel") or {}).items()
            },
            drop=[str(name) for name in found.get("drop") or ()],
            rename={str(old): str(new) for old, new in (found.get("rename") or {}).items()},
            codec=found.get("codec"),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: a value is of the wrong kind ({error})") from error


class Marks:
    """The marks of a dataset, and their file.

    Args:
        path: The file; it need not exist.
        lengths: Frames of each episode of the dataset.

    Raises:
        UsageError: The file cannot be read, is for another dataset, or has more than marks.
    """

    def __init__(self, path: Path, lengths: list[int]) -> None:
        self.path = path
        self._lengths = lengths
        self._lock = threading.Lock()
        self._marks = self._read() if path.exists() else {}

    def of(self, episode: int) -> Mark:
        """Return the mark of an episode."""
        return self._marks.get(episode, Mark())

    def to_json(self) -> dict[str, Any]:
        """Return all marks by episode, and the file."""
        shown = {number: asdict(mark) for number, mark in self._marks.items()}
        return {"path": str(self.path), "marks": shown}

    def change(self, episode: int, values: Mapping[str, Any]) -> Mark:
        """Set marks of an episode and save the list.

        Args:
            episode: Its number.
            values: Any of reject, trim, split, cut and task; None takes one away.

        Raises:
            UsageError: A value cannot be; nothing is changed.
        """
        if not 0 <= episode < len(self._lengths):
            raise UsageError(f"there is no episode {episode}: there are {len(self._lengths)}")
        with self._lock:
            length = self._lengths[episode]
            mark = replace(self.of(episode), **_checked(values, length)).within_trim(length)
            marks = {**self._marks, episode: mark}
            marks = {n: m for n, m in sorted(marks.items()) if m != Mark()}
            publish_bytes(self.path, self._text(marks).encode())
            self._marks = marks
        return mark

    def _text(self, marks: Mapping[int, Mark]) -> str:
        """Write the list; JSON's texts are YAML's."""
        lines = [
            "# Marks of `penstock view`; carry them out: penstock edit DATASET apply THIS_FILE",
            f"# {len(self._lengths)} episodes, {sum(self._lengths)} frames",
            f"delete: {[n for n, m in marks.items() if m.reject]}",
        ]
        kept = {n: m for n, m in marks.items() if not m.reject}
        for name, values in (
            ("trim", {n: list(m.trim) for n, m in kept.items() if m.trim}),
            ("split", {n: list(m.split) for n, m in kept.items() if m.split}),
            ("cut", {n: list(m.cut) for n, m in kept.items() if m.cut}),
            ("relabel", {n: m.task for n, m in kept.items() if m.task is not None}),
        ):
            if values:
                lines += [f"{name}:", *(f"  {n}: {json.dumps(v)}" for n, v in values.items())]
        return "\n".join(lines) + "\n"

    def _read(self) -> dict[int, Mark]:
        found = read_marks(self.path)
        head = _HEAD.search(self.path.read_text(encoding="utf-8"))
        now = (len(self._lengths), sum(self._lengths))
        if head and (int(head[1]), int(head[2])) != now:
            raise UsageError(
                f"{self.path} is of {head[1]} episodes and {head[2]} frames, the dataset has "
                f"{now[0]} and {now[1]}: applied already? Remove it, or give --marks FILE"
            )
        more = found.keep is not None or found.drop or found.rename or found.codec
        if more or None in found.relabel:
            raise UsageError(f"{self.path} has more than marks: give another file by --marks FILE")
        marks: dict[int, Mark] = {}
        named = {*found.delete, *found.trim, *found.split, *found.cut, *found.relabel}
        for n in sorted(number for number in named if number is not None):
            if not 0 <= n < len(self._lengths):
                raise UsageError(f"{self.path} names episode {n}: there are {len(self._lengths)}")
            first, end = found.trim.get(n, (0, None))
            trim = (first, self._lengths[n] if end is None else end) if n in found.trim else None
            split, cut = tuple(found.split.get(n, ())), tuple(found.cut.get(n, ()))
            marks[n] = Mark(n in found.delete, trim, split, cut, found.relabel.get(n))
        return marks


def _checked(values: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return values of a request as those of a Mark."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        good = False
        if name == "reject":
            good = isinstance(value, bool)
        elif name == "trim":
            good = value is None or (_frames(value, length) and len(value) == 2)
            good = good and (value is None or value[0] < value[1])
            value = tuple(value) if good and value is not None else None
            value = None if value == (0, length) else value
        elif name == "split":
            good = value is None or _frames(value, length)
            value = tuple(sorted(set(value))) if good and value else ()
        elif name == "cut":
            ranges = value if isinstance(value, list) and len(value) <= _MOST_TEXT else []
            good = value is None or ranges == value
            good = good and all(_frames(r, length) and len(r) == 2 and r[0] < r[1] for r in ranges)
            value = _joined(ranges) if good else ()
        elif name == "task":
            good = value is None or (isinstance(value, str) and 0 < len(value) <= _MOST_TEXT)
        if not good:
            raise UsageError(f"{str(name)[:40]!r} cannot be marked as {str(value)[:80]!r}")
        found[name] = value
    return found


def _joined(ranges: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return tuple(found)


def _frames(value: Any, length: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_TEXT
        and all(type(n) is int and 0 <= n <= length for n in value)
    )
