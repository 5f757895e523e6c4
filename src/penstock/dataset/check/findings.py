"""What a check of a dataset found, and what it covered."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Literal

Severity = Literal["error", "warning", "note"]
AGAIN = "copy it again, or convert the recordings again"
_MAX_ALIKE = 5  # findings of one kind in one file that are worth reading one by one


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        where: The file, by its path in the dataset.
        what: What is wrong with it.
        todo: What to do about it.
        severity: "error" if the data cannot be trusted or lerobot cannot read them; "warning" if
            they can be used, knowing this; "note" for what a trainer may want to look at.
    """

    where: str
    what: str
    todo: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.what}; {self.todo}"


@dataclass
class Checkup:
    """The result of a check.

    Attributes:
        findings: What is wrong, in the order it was found.
        checked: How many of each kind were looked at: files, rows, frames decoded, ….
        notes: What is right, and may still spoil a training.
    """

    findings: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    notes: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings are allowed."""
        return not self.errors

    @property
    def errors(self) -> list[Finding]:
        """Return the findings that are errors."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[Finding]:
        """Return the findings that are warnings."""
        return [finding for finding in self.findings if finding.severity == "warning"]


class Report:
    """Collects findings from several threads; many of one kind become a few and a count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._so_far = Checkup()
        self._alike: dict[tuple[str, str, str], list[int]] = {}  # [how many, place of the last]

    def error(self, where: str, what: str, kind: str = "", todo: str = AGAIN) -> None:
        """Add an error; those of one kind in one file are only counted after the first few."""
        self._add(Finding(where, what, todo, "error"), kind, _MAX_ALIKE)

    def warning(self, where: str, what: str, todo: str, kind: str = "") -> None:
        """Add a warning; those of one kind in one file are only counted after the first."""
        self._add(Finding(where, what, todo, "warning"), kind, 1)

    def note(self, where: str, what: str, todo: str) -> None:
        """Add what is not wrong, but worth a look."""
        with self._lock:
            self._so_far.notes.append(Finding(where, what, todo, "note"))

    def count(self, name: str, n: int = 1) -> None:
        """Say that n more of a kind were checked."""
        with self._lock:
            self._so_far.checked[name] = self._so_far.checked.get(name, 0) + n

    def checkup(self) -> Checkup:
        """Return everything, at the end."""
        findings = self._so_far.findings
        for (_, severity, _), (count, last) in self._alike.items():
            more = count - (_MAX_ALIKE if severity == "error" else 1)
            if more > 0:
                what = f"{findings[last].what} (and {more} more like it)"
                findings[last] = replace(findings[last], what=what)
        return self._so_far

    def _add(self, finding: Finding, kind: str, most: int) -> None:
        with self._lock:
            if kind:
                alike = self._alike.setdefault((finding.where, finding.severity, kind), [0, 0])
                alike[0] += 1
                if alike[0] > most:
                    return
                alike[1] = len(self._so_far.findings)
            self._so_far.findings.append(finding)
