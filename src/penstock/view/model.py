"""What the viewer shows, whatever it comes from: episodes with cameras, curves and events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError

MOST_EVENTS = 2000  # of an episode
MOST_POINTS = 1500  # of a curve
_LATE = 0.5  # of a period: a frame that comes later than this


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the list of episodes.

    Attributes:
        index: The number of the episode.
        task: What is done in it, or the name of the recording.
        size: What the list sorts by as its length: frames, or bytes of a recording.
        seconds: Its length; None where that is not known before it is opened.
    """

    index: int
    task: str
    size: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Camera:
    """A camera of an episode.

    Attributes:
        name: Of the feature or topic.
        mode: "video" if a browser may play the file itself, "frames" for JPEGs one by one.
        origin: "dataset" or "recording".
        count: How many frames it has.
        fps: Frames per second; None if every frame has a time of its own.
        from_s: Where the episode begins in the video file, or in the recording.
        depth_mm: The range that its false colours show; None for a camera of colours.
        file: What tells its video file from others: the next episode may lie in the same.
    """

    name: str
    mode: Literal["video", "frames"]
    origin: str
    count: int
    fps: float | None = None
    from_s: float = 0.0
    depth_mm: tuple[int, int] | None = None
    file: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Numbers over the time of an episode.

    Attributes:
        name: Of the feature, or topic and field.
        origin: "dataset" or "recording".
        labels: Of its elements; () if they are not known before it is read.
        under: The number of the curve that this one is drawn over: the state under the action.
    """

    name: str
    origin: str
    labels: tuple[str, ...] = ()
    under: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something at a moment of an episode that is worth a look.

    Attributes:
        t_s: When, in seconds from the start of the episode.
        kind: "dropped", "repeated" or "late".
        text: What, in words.
    """

    t_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Points:
    """A curve as it is drawn.

    Attributes:
        t_s: The time of each point.
        low: (points, elements): the values, or the least of those that fall into one point.
        high: The greatest of them.
        labels: Of the elements.
    """

    t_s: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    labels: tuple[str, ...]


class EpisodeView(ABC):
    """One episode, opened to be looked at; its methods may be called from any thread.

    Attributes:
        seconds: Its length.
        frames: Number of frames; 0 for a recording, which has no common ones.
        fps: Frames per second that a step goes by.
        task: What is done in it.
        notes: Lines to show beside it.
        cameras: Its cameras.
        curves: Its curves.
    """

    seconds: float
    frames: int
    fps: float
    task: str
    notes: Sequence[str]
    cameras: Sequence[Camera]
    curves: Sequence[Curve]

    @abstractmethod
    def video(self, camera: int) -> Path | BinaryIO:
        """Return the video file of a camera whose mode is "video"; an open one is the caller's."""

    @abstractmethod
    def picture(self, camera: int, frame: int, width: int) -> bytes:
        """Return a frame as JPEG, about so wide at the most."""

    @abstractmethod
    def times(self, camera: int) -> NDArray[np.float64]:
        """Return when the frames of a camera were, in seconds from the start of the episode."""

    @abstractmethod
    def points(self, curve: int, most: int = MOST_POINTS) -> Points:
        """Return a curve, of so many points at the most."""

    @abstractmethod
    def events(self) -> list[Event]:
        """Return the moments worth a look, in order."""

    def to_json(self) -> dict[str, Any]:
        """Return what the page needs to lay it out."""
        return {
            "seconds": self.seconds,
            "frames": self.frames,
            "fps": self.fps,
            "task": self.task,
            "notes": list(self.notes),
            "cameras": [asdict(camera) for camera in self.cameras],
            "curves": [asdict(curve) for curve in self.curves],
        }


class Source(ABC):
    """Something that has episodes.

    Attributes:
        kind: In words.
        path: Where it is.
        rows: Its episodes.
        can_mark: Whether episodes can be rejected: those of a dataset.
        can_check: Whether `penstock doctor` can read it.
    """

    kind: str
    path: str
    rows: Sequence[Row]
    can_mark: bool = False
    can_check: bool = True

    @abstractmethod
    def open(self, index: int) -> EpisodeView:
        """Open an episode.

        Raises:
            UsageError: There is none of that number.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing open
        """Let go of what is open."""


def pick(items: Sequence[Any], number: int, what: str) -> Any:
    """Return an item by its number; the number comes from a request."""
    if not 0 <= number < len(items):
        raise UsageError(f"there is no {what} {number}: there are {len(items)}")
    return items[number]


def thin(t_s: NDArray[Any], values: NDArray[Any], labels: tuple[str, ...], most: int) -> Points:
    """Make a curve of few points, of which each keeps the least and the greatest value."""
    low = high = np.asarray(values, np.float32).reshape(len(t_s), -1)
    t_s = np.asarray(t_s, np.float32)
    if len(t_s) > most:
        starts = np.linspace(0, len(t_s), most, endpoint=False).astype(np.int64)
        low = np.fmin.reduceat(low, starts, axis=0)
        high = np.fmax.reduceat(high, starts, axis=0)
        t_s = t_s[starts]
    return Points(t_s, low, high, labels)


def time_events(t_s: NDArray[np.float64], name: str) -> list[Event]:
    """Tell from the times of a camera's frames which were lost, sent twice or late."""
    if len(t_s) < 3:
        return []
    steps = np.diff(t_s)
    usual = float(np.median(steps))
    if usual <= 0:
        return []
    found = []
    for k in np.flatnonzero(np.abs(steps - usual) > _LATE * usual)[:MOST_EVENTS].tolist():
        step = float(steps[k])
        if step < _LATE * usual:
            kind, text = "repeated", f"{step * 1000:.0f} ms after the one before"
        elif step >= 1.75 * usual:
            kind, text = "dropped", f"{round(step / usual) - 1} missing, {step * 1000:.0f} ms gap"
        else:
            kind, text = "late", f"{(step - usual) * 1000:.0f} ms late"
        found.append(Event(round(float(t_s[k + 1]), 4), kind, f"{name}: {text}"))
    return found
