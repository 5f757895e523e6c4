"""The list of episodes: filtered, sorted, and given a page at a time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from penstock.core.interrupt import start
from penstock.errors import UsageError
from penstock.view.marks import Mark, Marks
from penstock.view.model import Row

Order = Literal["index", "length", "task", "findings"]
Which = Literal["all", "found", "marked", "rejected", "unmarked"]
_MOST_ROWS = 500  # of a page
_EPISODES = re.compile(r"\bepisodes? (\d+)")


@dataclass
class Findings:
    """What `doctor` says of a dataset.

    Attributes:
        state: "none", "running", "done", "failed", or "absent": it is not run for such a dataset.
        general: What is of no one episode.
        of: By episode.
    """

    state: str = "none"
    general: list[str] = field(default_factory=list)
    of: dict[int, list[str]] = field(default_factory=dict)


class Check:
    """Runs `penstock doctor --quick` beside the server, in a process of its own."""

    def __init__(self, path: str | None) -> None:
        self.findings = Findings()
        self._path = path
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start it, unless it has been."""
        with self._lock:
            if self._thread is not None:
                return
            if self._path is None:
                self.findings = Findings("absent", ["not here: run penstock doctor on it"])
                return
            self.findings = Findings("running")
            command = [sys.executable, "-m", "penstock", "doctor", self._path, "--quick", "--json"]
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self._thread = threading.Thread(target=self._run, name="penstock-check", daemon=False)
            start(self._thread)

    def _run(self) -> None:
        assert self._process is not None and self._path is not None
        own = re.compile(rf"{re.escape(self._path)}(/|: )")
        output, _ = self._process.communicate()
        try:
            found = json.loads(output)
            said = [f"{one['path']}: {one['problem']}" for one in found["findings"]]
            said += [note for note in found["notes"] if ": checked " not in note]
        except (ValueError, KeyError, TypeError):
            self.findings = Findings("failed", ["doctor could not be run"])
            return
        self.findings = sort_findings([own.sub("", text) for text in said])

    def close(self) -> None:
        """Stop it."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
            if self._thread is not None:
                self._thread.join()


def sort_findings(said: Sequence[str]) -> Findings:
    """Tell which episodes findings are about: those that they name."""
    findings = Findings("done")
    for text in said:
        numbers = [int(number) for number in _EPISODES.findall(text)]
        for number in dict.fromkeys(numbers):
            findings.of.setdefault(number, []).append(text)
        if not numbers:
            findings.general.append(text)
    return findings


def page(
    rows: Sequence[Row],
    marks: Marks | None,
    findings: Findings,
    *,
    text: str = "",
    order: str = "index",
    down: bool = False,
    which: str = "all",
    first: int = 0,
    count: int = 200,
) -> dict[str, Any]:
    """Return some lines of the list as JSON values, and how many there are in all.

    Args:
        rows: All episodes.
        marks: Those of the reviewer; None for recordings.
        findings: Those of doctor.
        text: Only episodes whose task has it, or of this number.
        order: What to sort by.
        down: The greatest first.
        which: All, or only those with findings or marks.
        first: The first line of the page.
        count: How many.
    """
    if order not in get_args(Order) or which not in get_args(Which):
        raise UsageError(f"cannot list by {order[:40]!r}, {which[:40]!r}")
    lowered = text.lower().strip()
    chosen = [
        row
        for row in rows
        if (not lowered or lowered in row.task.lower() or lowered == str(row.index))
        and _is_wanted(row.index, which, marks, findings)
    ]
    keys: dict[str, Any] = {
        "length": lambda row: row.size,
        "task": lambda row: row.task.lower(),
        "findings": lambda row: len(findings.of.get(row.index, ())),
    }
    if order in keys:
        chosen.sort(key=keys[order], reverse=down)
    elif down:
        chosen.reverse()
    first = max(0, first)
    part = chosen[first : first + min(max(count, 0), _MOST_ROWS)]
    lines = []
    for row in part:
        mark = marks.of(row.index) if marks else None
        changed = mark is not None and bool(mark.trim or mark.split or mark.cut or mark.task)
        lines.append(
            {
                "index": row.index,
                "task": mark.task if mark and mark.task else row.task,
                "size": row.size,
                "seconds": row.seconds,
                "findings": len(findings.of.get(row.index, ())),
                "mark": "reject" if mark and mark.reject else "edit" if changed else "",
            }
        )
    return {"total": len(chosen), "of": len(rows), "first": first, "rows": lines}


def _is_wanted(index: int, which: str, marks: Marks | None, findings: Findings) -> bool:
    if which == "all":
        return True
    if which == "found":
        return index in findings.of
    mark = marks.of(index) if marks else Mark()
    if which == "rejected":
        return mark.reject
    return (mark != Mark()) == (which == "marked")
