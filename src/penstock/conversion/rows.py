"""The numbers of the frames: messages in, finished rows out, window by window.

Only messages that a frame needs are decoded. A window of frames is put together once the last
message it needs has passed, and its messages are forgotten; so the memory depends on the window,
not on the recording.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bags import Bag, Decoder, Message
from penstock.bags.transforms import is_pair
from penstock.conversion.align import rising
from penstock.conversion.features import other_joints, places_of
from penstock.conversion.mapping import GAP_FLAG, STAMP, Source, Vector
from penstock.conversion.mapping import Mapping as Settings
from penstock.conversion.plan import Plan, SourcePlan
from penstock.errors import CorruptFile, DataError

Array = NDArray[np.float64]
Ordinals = NDArray[np.int64]
Window = tuple[int, dict[str, Any]]  # frames, columns


@dataclass(slots=True)
class _Topic:
    """The decoded values of one topic that some frame still needs."""

    name: str
    decoder: Decoder
    wanted: Ordinals  # that some frame needs, rising
    paths: tuple[str, ...]
    joints: dict[str, tuple[str, ...]]  # by path
    last: dict[str, Array]  # by path, what was last said of each joint, where they come apart
    silent: set[str]  # paths that not every message has numbers for
    next_wanted: int = 0  # place in `wanted` of the next message to decode
    forgotten: int = 0  # how many of `wanted` were dropped from `values`
    lengths: dict[str, int] = field(default_factory=dict)
    values: defaultdict[str, list[Array]] = field(default_factory=lambda: defaultdict(list))

    def take(self, message: Message) -> bool:
        """Decode the message if a frame needs it."""
        if self.next_wanted >= len(self.wanted):
            return False
        if message.ordinal != self.wanted[self.next_wanted]:
            return False
        for path in self.paths:
            values = self.decoder.vector(message.data, path)
            values = self._in_order(values, path, message)
            if path in self.silent and not len(values):  # a frame needs another field of it
                self.values[path].append(np.full(self.lengths.get(path, 0), np.nan))
                continue
            if path in self.silent and path not in self.lengths:
                count = len(self.values[path])
                self.values[path] = [np.full(len(values), np.nan)] * count
            if len(values) != self.lengths.setdefault(path, len(values)):
                way = "take those that are always there with select, or leave the feature out"
                if not len(values) and not self.decoder.has_names(path):
                    way = "set partial: true of its source to pass over messages without numbers"
                raise DataError(
                    f"{self.name}: {path} has {len(values)} numbers in message {message.ordinal}, "
                    f"and {self.lengths[path]} before: the recording changes its shape; {way}"
                )
            self.values[path].append(values)
        self.next_wanted += 1
        return True

    def _in_order(self, values: Array, path: str, message: Message) -> Array:
        """Return the numbers in the order of the dataset's joints, if they are joints."""
        names, wanted = self.decoder.names(message.data, path), self.joints.get(path)
        if path in self.last and wanted is not None:
            return self._with_last(values, names, wanted, path)
        if names == wanted or (wanted is None and not _are_names(names, values)):
            return values
        where = f"{self.name}: {path} of message {message.ordinal}"
        if wanted is None:
            raise DataError(f"{where} names its joints, and the first message did not")
        if path.endswith("]"):
            raise DataError(f"{where} is another joint than before: use `select` instead of [ ]")
        if len(names) != len(values) or len(names) != len(wanted) or set(names) != set(wanted):
            raise DataError(f"{where} {other_joints(wanted, names)}")
        places = {name: place for place, name in enumerate(names)}
        return values[[places[name] for name in wanted]]

    def _with_last(
        self, values: Array, names: tuple[str, ...], wanted: tuple[str, ...], path: str
    ) -> Array:
        """Return what was last said of every joint, by this message or by one before."""
        if not len(values):
            return self.last[path]
        if not len(names) == len(set(names)) == len(values) or not set(names) <= set(wanted):
            raise DataError(f"{self.name}: {path} {other_joints(wanted, (*wanted, *names))}")
        whole: Array = self.last[path].copy()
        whole[[wanted.index(name) for name in names]] = values
        self.last[path] = whole
        return whole

    def rows(self, ordinals: Ordinals, path: str) -> Array:
        """Return the values of some messages, one row each."""
        places = np.searchsorted(self.wanted, ordinals) - self.forgotten
        first, after = int(places.min()), int(places.max()) + 1
        block = self.values[path][first:after]
        return np.stack(block)[places - first]

    def forget(self, before: int) -> None:
        """Drop what no frame needs any more: messages before an ordinal."""
        count = int(np.searchsorted(self.wanted, before)) - self.forgotten
        if count > 0:
            for values in self.values.values():
                del values[:count]
            self.forgotten += count


class Rows:
    """Puts the numbers of a bag's frames together."""

    def __init__(self, bag: Bag, plan: Plan, settings: Settings) -> None:
        self._plan = plan
        self._settings = settings
        self._where = str(bag.path)
        self._topics: dict[str, _Topic] = {}
        self._oldest: dict[str, Ordinals] = {}
        self._windows = list(_windows(plan.episodes, settings.window_frames))
        for name in dict.fromkeys(source.topic for source in plan.read_sources):
            sources = [source for source in plan.read_sources if source.topic == name]
            arrays = [a for s in sources for a in (s.match.before, s.match.after)]
            unique = list({id(array): array for array in arrays}.values())
            paths = tuple(dict.fromkeys(source.source.field for source in sources))
            joints = {
                path: plan.joints[name, path] for path in paths if (name, path) in plan.joints
            }
            wanted = rising(unique[0] if len(unique) == 1 else np.concatenate(unique))
            partial = {it.source.field for it in sources if it.source.partial} & joints.keys()
            last = {path: np.full(len(joints[path]), np.nan) for path in partial}
            if partial:  # each message says something of what later frames show
                wanted = np.arange(wanted[-1] + 1)
            silent = {it.source.field for it in sources if it.source.partial} - partial
            silent |= {path for path in paths if is_pair(path)}
            decoder = bag.decoder(name)
            self._topics[name] = _Topic(name, decoder, wanted, paths, joints, last, silent)
            # For each window, the oldest message that it or a later one needs.
            oldest = np.minimum.accumulate(np.minimum.reduce(unique)[::-1])[::-1]
            self._oldest[name] = oldest[[first for _, first, _ in self._windows]]
        self._next = 0
        self._bases: dict[tuple[str, int], Array] = {}
        self._last_finite: dict[tuple[str, int], Array] = {}
        self._need = self._needed()

    @property
    def topics(self) -> list[str]:
        """The topics whose messages are wanted."""
        return list(self._topics)

    @property
    def wanted(self) -> dict[str, Ordinals]:
        """The messages that some frame needs."""
        return {name: topic.wanted for name, topic in self._topics.items()}

    def take(self, message: Message) -> Iterator[Window]:
        """Take a message in; yield the windows that it completes."""
        topic = self._topics[message.topic]
        if topic.take(message) and message.ordinal == self._need.get(message.topic):
            yield from self._complete()

    def finish(self) -> Iterator[Window]:
        """Yield what is left; every message has passed."""
        yield from self._complete()
        if self._next < len(self._windows):
            short = [t.name for t in self._topics.values() if t.next_wanted < len(t.wanted)]
            raise CorruptFile(
                f"{self._where}: messages of {', '.join(short) or 'a topic'} that the index "
                "promises are not there: pass --salvage to read what there is"
            )

    def _complete(self) -> Iterator[Window]:
        while self._next < len(self._windows) and self._is_complete():
            episode, first, after = self._windows[self._next]
            if first == self._plan.episodes[episode][0]:
                self._bases.clear()
            columns = self._columns(first, after)
            self._next += 1
            self._need = self._needed()
            self._forget()
            yield after - first, columns

    def _is_complete(self) -> bool:
        return all(
            topic.next_wanted > 0 and topic.wanted[topic.next_wanted - 1] >= self._need[name]
            for name, topic in self._topics.items()
        )

    def _needed(self) -> dict[str, int]:
        """Return the last message of each topic that the next window needs."""
        if self._next >= len(self._windows):
            return {}
        _, first, after = self._windows[self._next]
        need = dict.fromkeys(self._topics, -1)
        for plan in self._plan.read_sources:
            match = plan.match
            last = max(match.after[first:after].max(), match.before[first:after].max())
            need[plan.topic] = max(need[plan.topic], int(last))
        return need

    def _forget(self) -> None:
        for name, oldest in self._oldest.items() if self._next < len(self._windows) else ():
            self._topics[name].forget(int(oldest[self._next]))

    def _columns(self, first: int, after: int) -> dict[str, Any]:
        """Return the values of every feature for the frames [first, after)."""
        parts: dict[str, list[Array]] = {}
        for name, feature in self._settings.vectors.items():
            parts[name] = [
                self._part(name, place, plan, feature, first, after)
                for place, plan in enumerate(self._plan.vectors[name])
            ]
        columns: dict[str, Any] = {}
        for name, feature in self._settings.vectors.items():
            joined = np.concatenate(parts[name], axis=1)
            at = 0
            for plan, part in zip(self._plan.vectors[name], parts[name], strict=True):
                stop, fill = at + part.shape[1], plan.source.fill_gaps
                if plan.source.delta:
                    base = np.concatenate(parts[feature.delta_from or ""], axis=1)
                    if stop > base.shape[1]:
                        raise DataError(
                            f"{name}: {feature.delta_from} has no numbers {at} to {stop} to "
                            "subtract"
                        )
                    joined[:, at:stop] -= base[:, at:stop]
                if fill is not None and plan.gap is not None:
                    joined[plan.gap[first:after], at:stop] = fill[1]
                at = stop
            columns[name] = self._stored(name, feature, joined)
        if self._settings.stamps:
            columns[STAMP] = self._plan.times[first:after, None] / 1e9
        if self._plan.flags is not None:
            columns[GAP_FLAG] = self._plan.flags[first:after, None].astype(np.float32)
        return columns

    def _stored(self, name: str, feature: Vector, values: Array) -> NDArray[Any]:
        """Return the numbers as the dataset has them."""
        if feature.window is not None:
            values = values.reshape(len(values), feature.window, -1)
        if feature.dtype == "float64":
            return values
        with np.errstate(over="ignore", invalid="ignore"):
            stored = values.astype(np.float32)
            lost = np.abs(values - stored).max(axis=0)
            spread = np.ptp(values, axis=0)
            seen = spread > 1e-8 * np.abs(values).max(axis=0)  # beyond the noise of a resting joint
        if np.any(seen & (lost > 1e-3 * spread)):
            self._plan.account.notes[f"{name}: float32 loses what changes; set dtype: float64"] = 1
        return stored

    def _part(
        self, name: str, place: int, plan: SourcePlan, feature: Vector, first: int, after: int
    ) -> Array:
        """Return the values of one source, before differences and fillings."""
        source = plan.source
        if source.flag_gaps is not None:
            assert plan.gap is not None
            return plan.gap[first:after, None].astype(np.float64)
        topic, match = self._topics[plan.topic], plan.match
        values = self._selected(topic.rows(match.before[first:after], source.field), source, topic)
        if feature.align in ("linear", "slerp"):
            later = self._selected(
                topic.rows(match.after[first:after], source.field), source, topic
            )
            assert match.weight is not None
            weight = match.weight[first:after, None]
            blend = _slerp if feature.align == "slerp" else _lerp
            values = blend(values, later, weight)
        values = self._finite(name, place, topic.name, values)
        if source.threshold is not None:
            values = (values > source.threshold).astype(np.float64)
        else:
            values = values * source.scale + source.offset
        if source.relative_start:
            usable = np.ones(len(values), bool) if plan.gap is None else ~plan.gap[first:after]
            if (name, place) not in self._bases and usable.any():
                self._bases[name, place] = values[usable][0]
            values = values - self._bases.get((name, place), 0.0)
        return values

    def _selected(self, values: Array, source: Source, topic: _Topic) -> Array:
        if source.select is None and not source.joints and not source.exclude:
            return values
        try:
            taken = places_of(source, topic.joints.get(source.field, ()), values.shape[1])
        except DataError as error:
            raise DataError(f"{self._where}: {topic.name}: {source.field} {error}") from None
        return values[:, taken]

    def _finite(self, name: str, place: int, topic: str, values: Array) -> Array:
        """Apply the policy for NaN and infinity."""
        good = np.isfinite(values)
        policy = self._settings.nonfinite
        if not good.all():
            count = int((~good).sum())
            if policy == "fail":
                raise DataError(
                    f"{self._where}: {name} has {count} values that are not finite, from {topic}: "
                    "set nonfinite to keep or hold"
                )
            self._plan.account.note(f"{name}: values that are not finite ({policy})", count)
        if policy != "hold":
            return values
        start = self._last_finite.get((name, place))
        rows = np.where(good, np.arange(len(values))[:, None], -1)
        rows = np.maximum.accumulate(rows, axis=0)
        held = np.take_along_axis(values, np.maximum(rows, 0), axis=0)
        held = np.where(rows < 0, 0.0 if start is None else start, held)
        self._last_finite[name, place] = held[-1]
        return held


def _are_names(names: tuple[str, ...], values: Array) -> bool:
    return bool(names) and len(names) == len(set(names)) == len(values)


def _windows(episodes: list[tuple[int, int]], longest: int) -> Iterator[tuple[int, int, int]]:
    """Yield (episode, first frame, after last frame) of each window; none spans two episodes."""
    for number, (first, after) in enumerate(episodes):
        for start in range(first, after, longest):
            yield number, start, min(start + longest, after)


def _lerp(before: Array, after: Array, weight: Array) -> Array:
    return before + (after - before) * weight


def _slerp(before: Array, after: Array, weight: Array) -> Array:
    """Interpolate unit quaternions on the shorter way; near-equal ones linearly."""
    if before.shape[1] != 4:
        raise DataError(f"slerp needs 4 numbers per frame, not {before.shape[1]}")
    before = before / np.maximum(np.linalg.norm(before, axis=1, keepdims=True), 1e-12)
    after = after / np.maximum(np.linalg.norm(after, axis=1, keepdims=True), 1e-12)
    cosine = (before * after).sum(axis=1, keepdims=True)
    after = np.where(cosine < 0, -after, after)
    cosine = np.minimum(np.abs(cosine), 1.0)
    angle = np.arccos(cosine)
    sine = np.sin(angle)
    close = sine < 1e-6
    safe = np.where(close, 1.0, sine)
    left = np.where(close, 1 - weight, np.sin((1 - weight) * angle) / safe)
    right = np.where(close, weight, np.sin(weight * angle) / safe)
    blended = left * before + right * after
    norm = np.maximum(np.linalg.norm(blended, axis=1, keepdims=True), 1e-12)
    return np.asarray(blended / norm)
