"""The planning pass: which message makes which frame, decided from the index alone.

With the clock "bag" no message is read; with "header" the messages are read for their stamps, and
nothing else of them is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

import numpy as np

from penstock.bags import Bag
from penstock.bags.transforms import is_pair
from penstock.conversion.account import Account
from penstock.conversion.align import (
    MISSING,
    SECOND_NS,
    Match,
    Ordered,
    Times,
    gaps,
    inside,
    match,
)
from penstock.conversion.episodes import find_spans, span_of, tasks_of
from penstock.conversion.mapping import (
    Camera,
    Mapping,
    Source,
    Vector,
    options,
)
from penstock.conversion.timeline import (
    Choice,
    Frames,
    Mask,
    Stamps,
    choose_timeline,
    lay_out,
    split,
)
from penstock.errors import DataError
from penstock.media.packets import KeyFrame

_UNLIMITED: Final = float(2**62)


@dataclass(slots=True)
class SourcePlan:
    """One source of a vector: its topic, and the messages of every frame.

    Attributes:
        source: What to take.
        topic: The topic chosen among those of the source.
        match: The messages.
        gap: Frames within a hole of the topic, for a source that fills or flags them.
    """

    source: Source
    topic: str
    match: Match
    gap: Mask | None = None


@dataclass(slots=True)
class CameraPlan:
    """One camera: its topic, and the picture of every frame.

    Attributes:
        camera: What is asked of it.
        topic: The topic chosen among its own.
        ordinals: The message of every frame.
        video: For packets of a video, the first that stands alone; None for pictures.
        in_file_order: The stamps of the messages rise in file order.
    """

    camera: Camera
    topic: str
    ordinals: Times
    video: KeyFrame | None = None
    in_file_order: bool = True


@dataclass(slots=True)
class Plan:
    """What one bag gives.

    Attributes:
        times: The time of every frame.
        episodes: First and one-past-last frame of each episode.
        vectors: For each feature of numbers, its sources.
        cameras: For each feature of pictures, its messages.
        flags: Frames that bridge a hole of the timeline, if they are to be flagged.
        account: Where the frames went.
        skew_ns: For each feature, the stamp of its message minus the time of the frame.
        timeline: The topic of the timeline, or "fixed rate".
        timeline_hz: Its rate.
        joints: By topic and field: the names of the numbers in the first message, where it has any.
            Later messages may have them in another order.
        tasks: What the robot does in each episode.
    """

    times: Times
    episodes: list[tuple[int, int]]
    vectors: dict[str, list[SourcePlan]]
    cameras: dict[str, CameraPlan]
    flags: Mask | None
    account: Account
    skew_ns: dict[str, Times]
    timeline: str
    timeline_hz: float
    topics: list[str] = field(default_factory=list)
    joints: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    tasks: list[str] = field(default_factory=list)

    @property
    def frames(self) -> int:
        """Number of frames of all episodes."""
        return len(self.times)

    def head(self, count: int) -> Plan:
        """Return the plan of the first frames only, for a trial."""
        keep = np.arange(min(count, self.frames))
        account = Account(frames_in=len(keep), frames_out=len(keep))
        return replace(
            self,
            times=self.times[keep],
            episodes=[(a, min(b, len(keep))) for a, b in self.episodes if a < len(keep)],
            vectors={
                name: [replace(p, match=p.match.take(keep)) for p in plans]
                for name, plans in self.vectors.items()
            },
            cameras={
                name: replace(camera, ordinals=camera.ordinals[keep])
                for name, camera in self.cameras.items()
            },
            account=account,
            skew_ns={name: skew[keep] for name, skew in self.skew_ns.items()},
        )


class Planner:
    """Makes the plan of one bag."""

    def __init__(self, bag: Bag, mapping: Mapping) -> None:
        self._bag = bag
        self._mapping = mapping
        self._account = Account()
        self._matches: dict[tuple[Any, ...], tuple[Match, list[tuple[str, Mask]]]]
        self._matches = {}
        self._stamps = Stamps(bag, mapping.clock)

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            DataError: A topic is missing, or nothing is left.
        """
        topics = dict(self._resolve())
        mapping = self._mapping
        spoken = (
            mapping.episodes and mapping.episodes.topic,
            mapping.tasks and mapping.tasks.topic,
        )
        events = {topic for topic in spoken if topic and self._stamps.count(topic)}
        self._stamps.prepare({t for chosen in topics.values() for _, t in chosen} | events)
        timeline, hz = choose_timeline(self._stamps, self._mapping, topics)
        used: dict[str, bool] = {}
        for name, feature in mapping.features.items():
            for source, topic in topics[name]:
                lasts = feature.align == "hold" and _tolerance_s(feature, source) == 0
                used[topic] = lasts and used.get(topic, True)
        frames = lay_out(self._stamps, self._mapping, timeline, hz, used, self._account)
        keep = frames.keep
        reasons: list[tuple[str, Mask]] = []
        found: dict[str, Match] = {}
        for name, feature in self._mapping.features.items():
            for place, (source, topic) in enumerate(topics[name]):
                key = f"{name}/{place}"
                if isinstance(source, Camera) and topic == timeline:
                    found[key] = _own(frames)
                elif isinstance(source, Camera) or source.flag_gaps is None:
                    found[key], why = self._match(name, feature, source, topic, frames.times)
                    reasons += why
        for reason, bad in reasons:
            self._account.drop(reason, int((keep & bad).sum()))
            keep &= ~bad
        start_ns = self._bag.start_ns if mapping.clock == "bag" else int(frames.times[0])
        spans = find_spans(self._bag, self._stamps, mapping, start_ns)
        numbers = None
        if spans is not None:
            numbers = span_of(frames.times, spans, str(self._bag.path))
            self._account.drop("outside of the episodes", int((keep & (numbers < 0)).sum()))
            keep &= numbers >= 0
            empty = len(spans) - len(np.unique(numbers[keep]))
            self._account.note("episodes without a frame", empty)
        plan = self._finish(topics, timeline, hz, frames, found, numbers)
        tasks = tasks_of(self._bag, self._stamps, mapping, plan.times, plan.episodes)
        if spans is not None and numbers is not None:
            of = numbers[keep]
            tasks = [spans[of[a]].task or t for (a, _), t in zip(plan.episodes, tasks, strict=True)]
        return replace(plan, tasks=tasks)

    def _resolve(self) -> Iterator[tuple[str, list[Choice]]]:
        """Choose the topic of every source of every feature."""
        for name, feature in self._mapping.features.items():
            sources = (feature,) if isinstance(feature, Camera) else feature.sources
            yield name, [self._choose(name, source) for source in sources]

    def _choose(self, name: str, first: Source | Camera) -> Choice:
        tried: tuple[str, ...] = ()
        for option in (first,) if isinstance(first, Camera) else options(first):
            for topic in option.topics:
                if self._stamps.count(topic):
                    return option, topic
            tried += option.topics
        raise DataError(self._stamps.absent(name, tried))

    def _match(
        self,
        name: str,
        feature: Vector | Camera,
        source: Source | Camera,
        topic: str,
        frames: Times,
    ) -> tuple[Match, list[tuple[str, Mask]]]:
        """Find the messages of a topic; return also the frames that have none, by reason."""
        tolerance_s = _tolerance_s(feature, source)
        pair = source.field if isinstance(source, Source) and is_pair(source.field) else ""
        key = (topic, pair, feature.align, tolerance_s, feature.missing)
        if key in self._matches:
            return self._matches[key]
        ordered = self._stamps.of(topic, pair)
        self._account.note(f"{topic}: duplicate stamps", ordered.duplicates)
        self._account.note(f"{topic}: stamps out of order", ordered.disordered)
        frame_ns = SECOND_NS / self._mapping.fps
        if tolerance_s is None:
            period_ns = ordered.period_ns
            tolerance_ns = max(1.5 * period_ns if period_ns < float("inf") else 0.0, frame_ns)
        else:
            tolerance_ns = tolerance_s * SECOND_NS or _UNLIMITED
        found = match(ordered, frames, feature.align, tolerance_ns)
        first_ns, last_ns = ordered.times[0], ordered.times[-1]
        slack_ns = min(tolerance_ns, frame_ns / 2)
        early, late = frames < first_ns - slack_ns, frames > last_ns + slack_ns
        # The last value of a command holds on for as long as the other topics go on.
        if feature.align == "hold" and tolerance_ns == _UNLIMITED:
            late = np.zeros(len(frames), bool)
        nothing = ~found.found & ~early & ~late
        if feature.missing == "fail" and nothing.any():
            at_s = (frames[nothing][0] - frames[0]) / SECOND_NS
            raise DataError(
                f"{self._bag.path}: {name} has no message within {tolerance_ns / SECOND_NS:g} s "
                f"of the frame at {at_s:.3f} s ({nothing.sum()} frames): set missing to drop"
            )
        if feature.missing == "hold":
            self._account.note(f"{name}: frames that hold an older value", int(nothing.sum()))
            _hold(found, nothing)
            nothing = nothing & ~found.found
        within = f"{tolerance_ns / SECOND_NS:.3g} s"
        reasons = [
            (f"before the first message of {topic}", early),
            (f"after the last message of {topic}", late),
            (f"no message of {topic} within {within}", nothing),
        ]
        self._matches[key] = (found, reasons)
        return found, reasons

    def _finish(
        self,
        topics: dict[str, list[Choice]],
        timeline: str,
        hz: float,
        frames: Frames,
        found: dict[str, Match],
        spans: Times | None,
    ) -> Plan:
        mapping, account = self._mapping, self._account
        keep = frames.keep
        times = frames.times[keep]
        account.frames_out = len(times)
        if not len(times):
            reasons = ", ".join(f"{n} x {why}" for why, n in account.dropped.most_common(3))
            raise DataError(f"{self._bag.path}: no frame is left ({reasons or 'it is empty'})")
        vectors: dict[str, list[SourcePlan]] = {}
        cameras: dict[str, CameraPlan] = {}
        taken: dict[int, Match] = {}
        skew: dict[str, Times] = {}
        for name, feature in mapping.features.items():
            if isinstance(feature, Camera):
                whole, topic = found[f"{name}/0"], topics[name][0][1]
                video = self._stamps.first_key(topic)
                ordered = video is None or self._stamps.of(topic).in_file_order
                cameras[name] = CameraPlan(feature, topic, whole.before[keep], video, ordered)
                skew[name] = whole.skew_ns[keep]
                continue
            vectors[name] = []
            # A window is the same sources once for each message in it, the oldest first.
            lags = range((feature.window or 1) - 1, -1, -1)
            for lag, (place, (source, topic)) in product(lags, enumerate(topics[name])):
                assert isinstance(source, Source)
                gap_s = source.flag_gaps or (source.fill_gaps and source.fill_gaps[0])
                holes = gaps(self._stamps.of(topic).times, gap_s * SECOND_NS) if gap_s else None
                gap = None if holes is None else inside(holes, times)
                whole = found.get(f"{name}/{place}") or _nothing(len(keep))
                part = taken.setdefault(id(whole), whole.take(keep))
                if lag:
                    pair = source.field if is_pair(source.field) else ""
                    part = _earlier(part, self._stamps.of(topic, pair), lag)
                vectors[name].append(SourcePlan(source, topic, part, gap))
                if not lag:
                    skew.setdefault(name, part.skew_ns)
        episodes = split(times, mapping, account, None if spans is None else spans[keep])
        flagged = frames.held[keep] if mapping.gap == "flag" else None
        used_topics = dict.fromkeys(
            [camera.topic for camera in cameras.values()]
            + [p.topic for plans in vectors.values() for p in plans if p.source.flag_gaps is None]
        )
        return Plan(
            times,
            episodes,
            vectors,
            cameras,
            flagged,
            account,
            skew,
            timeline or "fixed rate",
            hz,
            list(used_topics),
        )


def plan_bag(bag: Bag, mapping: Mapping) -> Plan:
    """Plan one bag; see `Planner.plan`."""
    return Planner(bag, mapping).plan()


def _tolerance_s(feature: Vector | Camera, source: Source | Camera) -> float | None:
    return feature.tolerance_s if source.tolerance_s is None else source.tolerance_s


def _own(frames: Frames) -> Match:
    """The timeline's camera: its pictures are the frames."""
    count = len(frames.picks)
    return Match(frames.picks, frames.picks, np.zeros(count), np.zeros(count, np.int64))


def _hold(found: Match, nothing: Mask) -> None:
    """Give frames without a message that of the frame before them."""
    places = np.where(found.found, np.arange(len(nothing)), 0)
    before = np.maximum.accumulate(places)
    held = nothing & found.found[before]
    for array in (found.before, found.after, found.weight, found.skew_ns):
        array[held] = array[before[held]]


def _earlier(found: Match, ordered: Ordered, lag: int) -> Match:
    """Return the messages that lie so many before those found; the first one at the beginning."""
    order = np.argsort(ordered.ordinals)
    places = order[np.searchsorted(ordered.ordinals[order], found.before)]
    before = ordered.ordinals[np.maximum(places - lag, 0)]
    return Match(before, before, found.weight, found.skew_ns)


def _nothing(count: int) -> Match:
    none = np.full(count, MISSING, np.int64)
    return Match(none, none, np.zeros(count), np.zeros(count, np.int64))


def summary(plan: Plan) -> dict[str, Any]:
    """Return what a report says about the time errors of a plan."""
    facts = {}
    for name, skew in plan.skew_ns.items():
        size_ms = np.abs(skew) / 1e6
        facts[name] = {
            "p50_ms": float(np.percentile(size_ms, 50)),
            "p95_ms": float(np.percentile(size_ms, 95)),
            "max_ms": float(size_ms.max()),
        }
    return facts
