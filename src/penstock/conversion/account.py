"""Frame accounting: every recorded frame is in the dataset, or dropped for a stated reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Account:
    """Where the frames of one bag went.

    A frame in is a message of the timeline's topic (with a fixed rate: a moment of that rate).
    `frames_in + frames_repeated == frames_out + frames_dropped`, always.

    Attributes:
        frames_in: Recorded.
        frames_out: In the dataset.
        frames_repeated: Frames of the dataset that show a recorded one again: a hole was bridged,
            or the rate is above that of the recording.
        dropped: Frames not in the dataset, by reason.
        notes: What else happened, counted: holes of the timeline, pictures that could not be
            decoded, values that are not finite, messages out of order.
    """

    frames_in: int = 0
    frames_out: int = 0
    frames_repeated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def frames_dropped(self) -> int:
        """All dropped frames."""
        return sum(self.dropped.values())

    @property
    def balanced(self) -> bool:
        """Whether every frame is accounted for."""
        return self.frames_in + self.frames_repeated == self.frames_out + self.frames_dropped

    @property
    def balance(self) -> str:
        """What became of the frames, as an equation."""
        repeated = f" + {self.frames_repeated} repeated" if self.frames_repeated else ""
        return (
            f"{self.frames_in} in{repeated} = {self.frames_out} out + {self.frames_dropped} dropped"
        )

    def drop(self, reason: str, count: int) -> None:
        """Count frames that are dropped."""
        if count:
            self.dropped[reason] += count

    def note(self, what: str, count: int = 1) -> None:
        """Count something that a reader of the report should know."""
        if count:
            self.notes[what] += count

    def add(self, other: Account) -> None:
        """Add the frames of another bag."""
        self.frames_in += other.frames_in
        self.frames_out += other.frames_out
        self.frames_repeated += other.frames_repeated
        self.dropped.update(other.dropped)
        self.notes.update(other.notes)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "frames_in": self.frames_in,
            "frames_out": self.frames_out,
            "frames_repeated": self.frames_repeated,
            "dropped": dict(sorted(self.dropped.items())),
            "notes": dict(sorted(self.notes.items())),
        }
