"""Which message makes which frame: pure arithmetic on time stamps in nanoseconds.

Everything here works on int64 arrays, knows no bag and decodes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

Align = Literal["nearest", "hold", "linear", "slerp"]
Times = NDArray[np.int64]

SECOND_NS: Final = 1_000_000_000
MISSING: Final = -1
_LATE_RUN: Final = 2
_LATE_NS: Final = 2 * SECOND_NS
_MOST_B_FRAMES: Final = 16


@dataclass(frozen=True, slots=True)
class Ordered:
    """The messages of one topic in the order of their stamps, which rise strictly.

    Attributes:
        times: Their stamps.
        ordinals: Their numbers within the topic, in file order.
        duplicates: Messages left out because another one has their stamp.
        disordered: Messages left out because their stamp breaks the order.
    """

    times: Times
    ordinals: Times
    duplicates: int = 0
    disordered: int = 0

    @property
    def period_ns(self) -> float:
        """The usual time between two messages; infinite when there are fewer than two."""
        return float(np.median(np.diff(self.times))) if len(self.times) > 1 else float("inf")

    @property
    def in_file_order(self) -> bool:
        """Whether the stamps rise as the messages lie in the file."""
        return bool(np.all(np.diff(self.ordinals) > 0))


def in_order(times: Times, reordered: bool = False) -> Ordered:
    """Put the messages of a topic in the order of their stamps.

    A message or two that were only written late into the file are put where they belong. For the
    rest, the most messages whose stamps rise strictly in file order are kept: one wild stamp then
    costs one message, and a clock that was set back by half a second costs half a second,
    whichever side is shorter; a filter by the running maximum would lose all that follows the
    wild stamp.

    Args:
        times: In file order.
        reordered: They are packets of a video, whose B-frames come late, however long it pauses.
    """
    times = np.asarray(times, np.int64)
    if len(times) < 2 or np.all(np.diff(times) > 0):
        return Ordered(times, np.arange(len(times), dtype=np.int64))
    late = _late(times, *((_MOST_B_FRAMES, 2**62) if reordered else (_LATE_RUN, _LATE_NS)))
    on_time = np.flatnonzero(~late)
    kept = np.concatenate([on_time[_longest_rise(times[on_time])], np.flatnonzero(late)])
    kept = kept[np.argsort(times[kept], kind="stable")]
    kept = kept[np.concatenate(([True], np.diff(times[kept]) > 0))]
    if late.any() and len(kept) < len(times):  # it was more than a few late ones
        kept = max(kept, _longest_rise(times), key=len)
    left_out = np.delete(times, kept)
    duplicates = int(np.isin(left_out, times[kept]).sum())
    return Ordered(times[kept], kept, duplicates, len(left_out) - duplicates)


def rising(ordinals: Times) -> Times:
    """Return the different ones, rising: the same array if it is so already."""
    return ordinals if np.all(np.diff(ordinals) > 0) else np.unique(ordinals)


def _late(times: Times, late_run: int, late_ns: int) -> NDArray[np.bool_]:
    """Tell the messages that are a little late in the file, a few in a row at most."""
    newest = np.maximum.accumulate(times)
    below = np.concatenate(([False], times[1:] < newest[:-1]))
    edges = np.flatnonzero(np.diff(np.concatenate(([False], below, [False])).astype(np.int8)))
    late = np.zeros(len(times), bool)
    for first, after in edges.reshape(-1, 2):
        if after - first <= late_run and newest[first] - times[first:after].min() <= late_ns:
            late[first:after] = True
    return late


def _longest_rise(times: Times) -> Times:
    """Return the positions of a longest strictly rising subsequence (patience sorting)."""
    tails: list[int] = []  # the smallest stamp that ends a rise of each length
    tail_at: list[int] = []
    before = np.full(len(times), -1, np.int64)
    for position, stamp in enumerate(times.tolist()):
        length = bisect_left(tails, stamp)
        if length:
            before[position] = tail_at[length - 1]
        if length == len(tails):
            tails.append(stamp)
            tail_at.append(position)
        elif stamp < tails[length]:  # of two equal stamps the first stays
            tails[length] = stamp
            tail_at[length] = position
    kept = np.empty(len(tails), np.int64)
    position = tail_at[-1] if tail_at else -1
    for place in range(len(tails) - 1, -1, -1):
        kept[place] = position
        position = int(before[position])
    return kept


@dataclass(frozen=True, slots=True)
class Slots:
    """The frames of a timeline, before anything is dropped.

    Attributes:
        times: When each frame is.
        picks: For a camera's timeline, the place in `Ordered` of each frame's picture, or MISSING
            in a hole of the recording; for a fixed rate, all MISSING.
        skipped: How many pictures no frame uses (a rate below that of the camera).
    """

    times: Times
    picks: Times
    skipped: int = 0


def camera_slots(stamps: Times, source_hz: float, fps: float) -> Slots:
    """Lay frames of a rate over the pictures of a camera.

    Every picture gets a place on the camera's own ideal sequence, which counts the pictures that
    the recorder missed; frame k takes the picture at place k x source_hz / fps. So jitter and a
    camera that is a little slow do no harm, a missed picture leaves a hole and not a shift, and
    any ratio of the rates comes out right on average.

    Args:
        stamps: Strictly rising.
        source_hz: The nominal rate of the camera.
        fps: The rate of the frames.
    """
    if len(stamps) == 0:
        return Slots(np.empty(0, np.int64), np.empty(0, np.int64))
    steps = np.maximum(np.rint(np.diff(stamps) * (source_hz / SECOND_NS)), 1).astype(np.int64)
    places = np.concatenate(([0], np.cumsum(steps)))
    ratio = source_hz / fps
    count = int(np.floor(places[-1] / ratio + 1e-9)) + 1
    wanted = np.arange(count) * ratio
    picks = _nearest(places, wanted)
    picks[np.abs(places[picks] - wanted) > max(ratio, 1) / 2 + 1e-9] = MISSING
    if ratio >= 1:  # a frame whose picture the one before has taken is a hole
        picks[1:][picks[1:] == picks[:-1]] = MISSING
    times = np.interp(wanted, places, stamps - stamps[0]).astype(np.int64) + stamps[0]
    times[picks >= 0] = stamps[picks[picks >= 0]]
    return Slots(times, picks, len(stamps) - len(np.unique(picks[picks >= 0])))


def _nearest(rising: Times, wanted: NDArray[np.floating[Any]]) -> Times:
    """Return the place of the value nearest to each wanted one; of two, the earlier."""
    after = np.clip(np.searchsorted(rising, wanted - 1e-9), 1, max(len(rising) - 1, 1))
    after = np.minimum(after, len(rising) - 1)
    before = np.maximum(after - 1, 0)
    closer = np.abs(rising[after] - wanted) < np.abs(rising[before] - wanted) - 1e-9
    return np.where(closer, after, before).astype(np.int64)


def rate_slots(start_ns: int, stop_ns: int, fps: float) -> Slots:
    """Lay frames of a fixed rate from one moment to another, both included."""
    count = max(int(np.floor((stop_ns - start_ns) * fps / SECOND_NS + 1e-9)) + 1, 0)
    times = start_ns + np.rint(np.arange(count) * (SECOND_NS / fps)).astype(np.int64)
    return Slots(times, np.full(count, MISSING))


@dataclass(slots=True)
class Match:
    """For each frame, the message or two messages of a topic that make its value.

    Attributes:
        before: Ordinal of the message to take, or of the earlier of two; MISSING if there is none.
        after: Ordinal of the later of two; the same array as `before` where one is enough.
        weight: Share of the later message in the value; None where one is enough.
        skew_ns: Stamp of the message minus time of the frame (of the nearer one, for two).
    """

    before: Times
    after: Times
    weight: NDArray[np.float64] | None
    skew_ns: Times = field(repr=False)

    @property
    def found(self) -> NDArray[np.bool_]:
        """The frames that have a value."""
        return np.not_equal(self.before, MISSING)

    def take(self, keep: NDArray[np.bool_] | NDArray[np.int64]) -> Match:
        """Return the match of some of the frames."""
        before, skew_ns = self.before[keep], self.skew_ns[keep]
        if self.weight is None:
            return Match(before, before, None, skew_ns)
        return Match(before, self.after[keep], self.weight[keep], skew_ns)


def match(topic: Ordered, frames: Times, how: Align, tolerance_ns: float) -> Match:
    """Find the messages of a topic that belong to each frame.

    Args:
        topic: Its messages.
        frames: The time of each frame, rising.
        how: "nearest" in either direction (of two that are equally near, the earlier);
            "hold" the last one that is not later; "linear" and "slerp" the two around the frame.
        tolerance_ns: How far a message may lie from its frame. For two messages: how far apart
            they may be at most is twice this.
    """
    count = len(topic.times)
    if count == 0:
        none = np.full(len(frames), MISSING, np.int64)
        return Match(none, none, None, np.zeros(len(frames), np.int64))
    # The first message that is later than the frame, and the last one that is not.
    right = np.searchsorted(topic.times, frames, side="right")
    left = right - 1
    earlier, later = np.maximum(left, 0), np.minimum(right, count - 1)
    back_ns = frames - topic.times[earlier]
    ahead_ns = topic.times[later] - frames
    if how == "hold":
        found = (left >= 0) & (back_ns <= tolerance_ns)
        return _one(topic, earlier, found, frames)
    if how == "nearest":
        use_later = (left < 0) | ((right < count) & (ahead_ns < back_ns))
        place = np.where(use_later, later, earlier)
        found = np.abs(topic.times[place] - frames) <= tolerance_ns
        return _one(topic, place, found, frames)
    exact = (left >= 0) & (back_ns == 0)
    later = np.where(exact, earlier, later)
    found = exact | ((left >= 0) & (right < count) & (back_ns + ahead_ns <= 2 * tolerance_ns))
    span = topic.times[later] - topic.times[earlier]
    weight = np.where(span > 0, back_ns / np.maximum(span, 1), 0.0)
    near_later = np.where(weight > 0.5, later, earlier)
    return Match(
        np.where(found, topic.ordinals[earlier], MISSING),
        np.where(found, topic.ordinals[later], MISSING),
        np.where(found, weight, 0.0),
        np.where(found, topic.times[near_later] - frames, 0),
    )


def _one(topic: Ordered, place: Times, found: NDArray[np.bool_], frames: Times) -> Match:
    ordinals = np.where(found, topic.ordinals[place], MISSING)
    skew = np.where(found, topic.times[place] - frames, 0)
    return Match(ordinals, ordinals, None, skew)


def gaps(times: Times, longer_than_ns: float) -> NDArray[np.int64]:
    """Return the holes of a topic as rows (last stamp before, first stamp after)."""
    at = np.flatnonzero(np.diff(times) > longer_than_ns)
    return np.stack([times[at], times[at + 1]], axis=1) if len(at) else np.empty((0, 2), np.int64)


def inside(holes: NDArray[np.int64], frames: Times) -> NDArray[np.bool_]:
    """Tell which frames lie strictly inside one of the holes."""
    if len(holes) == 0:
        return np.zeros(len(frames), bool)
    place = np.searchsorted(holes[:, 0], frames, side="left") - 1
    safe = np.maximum(place, 0)
    within: NDArray[np.bool_] = (frames > holes[safe, 0]) & (frames < holes[safe, 1])
    return within & (place >= 0)
