"""Which message makes which frame of one bag: decided from stamps, before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import numpy as np

from penstock.bags import Bag
from penstock.bags.transforms import is_pair
from penstock.conversion.account import Account
from penstock.conversion.align import MISSING, SECOND_NS, Match, Ordered, Times, gaps, inside, match
from penstock.conversion.episodes import find_spans, span_of, tasks_of
from penstock.conversion.mapping import Camera, Mapping, Source, Vector, options
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
    """One source of a vector: its topic, the messages of every frame, and which are in a hole."""

    source: Source
    topic: str
    match: Match
    gap: Mask | None = None


@dataclass(slots=True)
class CameraPlan:
    """One camera: its topic, and the message of every frame; of a video, the first key frame."""

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
        tasks: What the robot does in each episode.
        vectors: For each feature of numbers, its sources.
        cameras: For each feature of pictures, its messages.
        flags: Frames that bridge a hole of the timeline, if they are to be flagged.
        account: Where the frames went.
        skew_ns: For each feature, the stamp of its message minus the time of the frame.
        timeline: What the frames follow, in words.
        joints: By topic and field: the names of the numbers in the first message, where it has any.
            Later messages may have them in another order.
    """

    times: Times
    episodes: list[tuple[int, int]]
    tasks: list[str]
    vectors: dict[str, list[SourcePlan]]
    cameras: dict[str, CameraPlan]
    flags: Mask | None
    account: Account
    skew_ns: dict[str, Times]
    timeline: str
    joints: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    @property
    def read_sources(self) -> list[SourcePlan]:
        """The sources of numbers whose messages are read."""
        plans = (plan for plans in self.vectors.values() for plan in plans)
        return [plan for plan in plans if plan.source.flag_gaps is None]

    @property
    def topics(self) -> list[str]:
        """The topics that are read."""
        used: list[CameraPlan | SourcePlan] = [*self.cameras.values(), *self.read_sources]
        return list(dict.fromkeys(plan.topic for plan in used))

    def take_skews(
        self, samples: int
    ) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
        """Return how far the messages of each feature are from their frames, and a sample of that.

        The plan forgets it: it is of no use to those who read the messages.
        """
        facts, sampled = {}, {}
        for name, skew in self.skew_ns.items():
            middle, most, worst = np.percentile(np.abs(skew) / 1e6, (50, 95, 100)).tolist()
            facts[name] = {"p50_ms": middle, "p95_ms": most, "max_ms": worst}
            sampled[name] = (skew[:: -(-len(skew) // samples)] / 1e6).tolist()
        self.skew_ns.clear()
        for source in (source for sources in self.vectors.values() for source in sources):
            source.match.skew_ns = np.empty(0, np.int64)
        return facts, sampled


def plan_bag(bag: Bag, mapping: Mapping, most_frames: int | None = None) -> Plan:
    """Plan one bag; for a trial, only its first frames."""
    return _Planner(bag, mapping).plan(most_frames)


class _Planner:
    """Makes the plan of one bag."""

    def __init__(self, bag: Bag, mapping: Mapping) -> None:
        self._bag = bag
        self._mapping = mapping
        self._account = Account()
        self._stamps = Stamps(bag, mapping.clock)
        self._matches: dict[tuple[Any, ...], Match] = {}
        self._topics: dict[str, list[Choice]] = {
            name: [
                self._choose(name, source)
                for source in ((feature,) if isinstance(feature, Camera) else feature.sources)
            ]
            for name, feature in mapping.features.items()
        }

    def plan(self, most_frames: int | None) -> Plan:
        mapping, account, stamps = self._mapping, self._account, self._stamps
        used: dict[str, bool] = {}  # topics, and whether what they last said holds on
        for name, feature in mapping.features.items():
            for source, topic in self._topics[name]:
                lasts = feature.align == "hold" and _tolerance_s(feature, source) == 0
                used[topic] = lasts and used.get(topic, True)
        parts = (mapping.episodes, mapping.tasks)
        spoken = [it.topic for it in parts if it and it.topic and stamps.count(it.topic)]
        for topic in stamps.prepare([*used, *spoken]):
            account.note(f"{topic}: header stamps are not set; taken when recorded")
        timeline, hz = choose_timeline(stamps, mapping, self._topics)
        frames = lay_out(stamps, mapping, timeline, hz, used, account)
        keep = frames.keep
        for name, feature in mapping.features.items():
            for source, topic in self._topics[name]:
                if isinstance(source, Camera) and topic == timeline:
                    count = len(frames.picks)
                    own = Match(frames.picks, frames.picks, None, np.zeros(count, np.int64))
                    self._matches[_key(feature, source, topic)] = own
                elif isinstance(source, Camera) or source.flag_gaps is None:
                    self._find(name, feature, source, topic, frames)
        start_ns = self._bag.start_ns if mapping.clock == "bag" else int(frames.times[0])
        spans = find_spans(self._bag, stamps, mapping, start_ns)
        numbers: Times | None = None
        if spans is not None:
            numbers = span_of(frames.times, spans, str(self._bag.path))
            account.drop("outside of the episodes", int((keep & (numbers < 0)).sum()))
            keep &= numbers >= 0
            numbers = numbers[keep]
            account.note("episodes without a frame", len(spans) - len(np.unique(numbers)))
        if most_frames is not None:
            keep[np.flatnonzero(keep)[most_frames:]] = False
            account.frames_in, account.frames_repeated = int(keep.sum()), 0
            account.dropped.clear()
        times = frames.times[keep]
        account.frames_out = len(times)
        if not len(times):
            reasons = ", ".join(f"{n} x {why}" for why, n in account.dropped.most_common(3))
            raise DataError(
                f"{self._bag.path}: no frame is left ({reasons or 'it is empty'}): topics of other "
                "times, or of another clock, do not belong into one dataset"
            )
        assert account.balanced, f"{account.balance} frames"
        episodes = split(
            times, mapping, account, None if numbers is None else numbers[: len(times)]
        )
        tasks = tasks_of(self._bag, stamps, mapping, times, episodes)
        if spans is not None and numbers is not None:
            firsts = numbers[[first for first, _ in episodes]].tolist()
            tasks = [spans[span].task or task for span, task in zip(firsts, tasks, strict=True)]
        vectors, cameras, skew = self._take(keep, times)
        return Plan(
            times,
            episodes,
            tasks,
            vectors,
            cameras,
            frames.held[keep] if mapping.gap == "flag" else None,
            account,
            skew,
            f"{timeline or 'fixed rate'} at {hz:g} Hz",
        )

    def _choose(self, name: str, first: Source | Camera) -> Choice:
        """Choose the topic of a source, or of one that stands in for it."""
        tried: list[str] = []
        for option in (first,) if isinstance(first, Camera) else options(first):
            for topic in option.topics:
                if self._stamps.count(topic):
                    return option, topic
            tried += option.topics
        raise DataError(self._stamps.absent(name, tried))

    def _find(
        self,
        name: str,
        feature: Vector | Camera,
        source: Source | Camera,
        topic: str,
        frames: Frames,
    ) -> None:
        """Find the messages of a topic; drop the frames that have none, by reason."""
        key = _key(feature, source, topic)
        if key in self._matches:
            return
        ordered, times = self._stamps.of(topic, _some(source)), frames.times
        self._account.note(f"{topic}: duplicate stamps", ordered.duplicates)
        self._account.note(f"{topic}: stamps out of order", ordered.disordered)
        frame_ns = SECOND_NS / self._mapping.fps
        tolerance_s = _tolerance_s(feature, source)
        if tolerance_s is None:
            period_ns = ordered.period_ns
            tolerance_ns = max(1.5 * period_ns if period_ns < float("inf") else 0.0, frame_ns)
        else:
            tolerance_ns = tolerance_s * SECOND_NS or _UNLIMITED
        found = match(ordered, times, feature.align, tolerance_ns)
        slack_ns = min(tolerance_ns, frame_ns / 2)
        early = times < ordered.times[0] - (0 if feature.align == "hold" else slack_ns)
        late = times > ordered.times[-1] + slack_ns
        # The last value of a command holds on for as long as the other topics go on.
        if feature.align == "hold" and tolerance_ns == _UNLIMITED:
            late = np.zeros(len(times), bool)
        nothing = ~found.found & ~early & ~late
        within = f"{tolerance_ns / SECOND_NS:.3g} s"
        if feature.missing == "fail" and nothing.any():
            at_s = (times[nothing][0] - times[0]) / SECOND_NS
            raise DataError(
                f"{self._bag.path}: {name} has no message within {within} of the frame at "
                f"{at_s:.3f} s ({nothing.sum()} frames): set missing to drop"
            )
        if feature.missing == "hold":
            self._account.note(f"{name}: frames that hold an older value", int(nothing.sum()))
            _hold(found, nothing)
            nothing = nothing & ~found.found
        for reason, bad in (
            (f"before the first message of {topic}", early),
            (f"after the last message of {topic}", late),
            (f"no message of {topic} within {within}", nothing),
        ):
            self._account.drop(reason, int((frames.keep & bad).sum()))
            frames.keep &= ~bad
        self._matches[key] = found

    def _take(
        self, keep: Mask, times: Times
    ) -> tuple[dict[str, list[SourcePlan]], dict[str, CameraPlan], dict[str, Times]]:
        """Return the messages of the frames that are kept, and their skews."""
        vectors: dict[str, list[SourcePlan]] = {}
        cameras: dict[str, CameraPlan] = {}
        skew: dict[str, Times] = {}
        taken: dict[tuple[Any, ...], Match] = {}
        for name, feature in self._mapping.features.items():
            if isinstance(feature, Camera):
                topic = self._topics[name][0][1]
                whole = self._matches[_key(feature, feature, topic)]
                video = self._stamps.first_key(topic)
                ordered = video is None or self._stamps.of(topic).in_file_order
                cameras[name] = CameraPlan(feature, topic, whole.before[keep], video, ordered)
                skew[name] = whole.skew_ns[keep]
                continue
            vectors[name] = []
            # A window is the same sources once for each message in it, the oldest first.
            lags = range((feature.window or 1) - 1, -1, -1)
            for lag, (source, topic) in product(lags, self._topics[name]):
                assert isinstance(source, Source)
                gap_s = source.flag_gaps or (source.fill_gaps and source.fill_gaps[0])
                holes = gaps(self._stamps.of(topic).times, gap_s * SECOND_NS) if gap_s else None
                key = _key(feature, source, topic)
                if key not in taken:
                    taken[key] = self._matches.pop(key, _nothing(keep)).take(keep)
                part = taken[key]
                if lag:
                    part = _earlier(part, self._stamps.of(topic, _some(source)), lag)
                else:
                    skew.setdefault(name, part.skew_ns)
                gap = None if holes is None else inside(holes, times)
                vectors[name].append(SourcePlan(source, topic, part, gap))
        return vectors, cameras, skew


def _key(feature: Vector | Camera, source: Source | Camera, topic: str) -> tuple[Any, ...]:
    """Return what decides which messages a source takes."""
    kind = "camera" if isinstance(source, Camera) else source.flag_gaps is not None
    tolerance_s = _tolerance_s(feature, source)
    return topic, _some(source), feature.align, tolerance_s, feature.missing, kind


def _some(source: Source | Camera) -> str:
    """Return the field that not every message holds, or holds in part."""
    if isinstance(source, Camera) or not (source.partial or is_pair(source.field)):
        return ""
    return source.field


def _tolerance_s(feature: Vector | Camera, source: Source | Camera) -> float | None:
    return feature.tolerance_s if source.tolerance_s is None else source.tolerance_s


def _hold(found: Match, nothing: Mask) -> None:
    """Give frames without a message that of the frame before them."""
    places = np.where(found.found, np.arange(len(nothing)), 0)
    before = np.maximum.accumulate(places)
    held = nothing & found.found[before]
    for array in (found.before, found.after, found.weight, found.skew_ns):
        if array is not None:
            array[held] = array[before[held]]


def _earlier(found: Match, ordered: Ordered, lag: int) -> Match:
    """Return the messages that lie so many before those found; the first one at the beginning."""
    order = np.argsort(ordered.ordinals)
    places = order[np.searchsorted(ordered.ordinals[order], found.before)]
    before = ordered.ordinals[np.maximum(places - lag, 0)]
    return Match(before, before, None, found.skew_ns)


def _nothing(keep: Mask) -> Match:
    none = np.full(len(keep), MISSING, np.int64)
    return Match(none, none, None, np.zeros(len(keep), np.int64))
