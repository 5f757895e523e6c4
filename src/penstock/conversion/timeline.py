"""The frames themselves: which topic sets their pace, and what its holes do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags import Bag
from penstock.bags.transforms import is_pair
from penstock.conversion.account import Account
from penstock.conversion.align import (
    MISSING,
    SECOND_NS,
    Ordered,
    Slots,
    Times,
    camera_slots,
    in_order,
    rate_slots,
)
from penstock.conversion.mapping import Camera, Clock, Mapping, Source
from penstock.errors import DataError
from penstock.media.encodings import CODECS
from penstock.media.packets import KeyFrame, PacketDecoder, is_key
from penstock.ui.suggestions import did_you_mean

Mask = NDArray[np.bool_]
Choice = tuple[Source | Camera, str]  # what is taken, from which topic

# A hole is not laid out frame by frame beyond this: a clock that was set by years must not cost
# memory.
_LONGEST_HOLE_S: Final = 600
_MAX_FRAMES: Final = 20_000_000
_LOOKED_AT: Final = 500  # messages of joints that come apart


class Stamps:
    """The time stamps of a bag's topics, by the clock that was asked for."""

    def __init__(self, bag: Bag, clock: Clock) -> None:
        self._bag = bag
        self._clock = clock
        self._last: tuple[str, Ordered] | None = None
        self._headers: dict[str, Times] = {}
        self._keys: dict[str, KeyFrame] = {}
        self._pairs: dict[str, dict[str, list[int]]] = {}
        self.where = str(bag.path)

    def prepare(self, topics: Iterable[str]) -> list[str]:
        """Read the header stamps of all topics that will be asked for, in one pass.

        Returns:
            The topics whose publisher sets no stamps: their messages are taken when recorded.
        """
        if self._clock == "bag":
            return []
        names = list(topics)
        with_header = [t for t in names if self._bag.decoder(t).stamp_reader() is not None]
        self._headers = self._bag.header_stamps(with_header, keep=names)
        unset = [topic for topic, stamps in self._headers.items() if not stamps.any()]
        for topic in unset:
            del self._headers[topic]
        return unset

    def of(self, topic: str, field: str = "") -> Ordered:
        """Return the messages of a topic in order; only the last one asked for is kept.

        Those that hold a transform, if the field is one; else, if one is given, those by which
        every joint of the field was named, or, without names, those that hold numbers.
        """
        if is_pair(field):
            return self._with_pair(topic, field)
        if field:
            names, start = named_joints(self._bag, topic, field)
            whole = self.of(topic)
            there = whole.ordinals >= start
            if not names:
                there = np.isin(whole.ordinals, self._with_numbers(topic, field))
            return replace(whole, times=whole.times[there], ordinals=whole.ordinals[there])
        if self._last is None or self._last[0] != topic:
            stamps = self._headers.get(topic)
            if stamps is None:
                stamps = self._bag.times(topic)
            key = self.first_key(topic)
            if key is None:
                ordered = in_order(stamps)
            else:  # what comes before it has no picture
                ordered = in_order(stamps[key.ordinal :], reordered=True)
                ordered = replace(ordered, ordinals=ordered.ordinals + key.ordinal)
            self._last = (topic, ordered)
        return self._last[1]

    def _with_numbers(self, topic: str, field: str) -> list[int]:
        found = self._pairs.setdefault(topic, {})
        if field not in found:
            decoder = self._bag.decoder(topic)
            messages = self._bag.read([topic])
            found[field] = [m.ordinal for m in messages if len(decoder.vector(m.data, field))]
        return found[field]

    def _with_pair(self, topic: str, field: str) -> Ordered:
        if topic not in self._pairs:
            found: dict[str, list[int]] = {}
            self._pairs[topic] = found
            transforms = self._bag.decoder(topic).transforms
            for message in self._bag.read([topic]):
                for pair in transforms.pairs(message.data):
                    found.setdefault(pair, []).append(message.ordinal)
        pairs = self._pairs[topic]
        wanted = ">".join(name.lstrip("/") for name in field.split(">"))
        if wanted not in pairs:
            hint = did_you_mean(wanted, pairs)
            raise DataError(f"{self.where}: {topic} has no transform {wanted}: {hint}")
        whole = self.of(topic)
        there = np.isin(whole.ordinals, pairs[wanted])
        return replace(whole, times=whole.times[there], ordinals=whole.ordinals[there])

    def first_key(self, topic: str) -> KeyFrame | None:
        """Return the packet with which a video begins; None for topics of other kinds."""
        if self._bag.is_video(topic) and topic not in self._keys:
            self._keys[topic] = first_key(self._bag, topic)
        return self._keys.get(topic)

    def count(self, topic: str) -> int:
        """Return the number of messages of a topic; 0 if there is no such topic."""
        entry = self._bag.topics.get(topic)
        return entry.count if entry else 0

    def absent(self, name: str, tried: Sequence[str]) -> str:
        """Say that a feature has no topic, and which one was probably meant."""
        there = [topic for topic, entry in self._bag.topics.items() if entry.count]
        words = " or ".join(tried)
        if any(topic in self._bag.topics for topic in tried):
            return f"{self.where}: {words} (for {name}) has no messages"
        hint = did_you_mean(tried[0], there)
        if not hint.startswith("did you mean"):
            some = ", ".join(there[:5]) + (", …" if len(there) > 5 else "")
            hint = f"it has {some or 'none'}; another robot's bag wants a dataset of its own"
        return f"{self.where}: there is no topic {words} (for {name}): {hint}"


def named_joints(bag: Bag, topic: str, field: str) -> tuple[tuple[str, ...], int]:
    """Return all joints that the first messages name, and the message by which all were named.

    If their type has no names, the first message with numbers.
    """
    decoder, start = bag.decoder(topic), -1
    names: dict[str, None] = {}
    for message in bag.read([topic], {topic: np.arange(min(bag.topics[topic].count, _LOOKED_AT))}):
        if not len(decoder.vector(message.data, field)):
            continue
        new = [name for name in decoder.names(message.data, field) if name not in names]
        if new or start < 0:
            names |= dict.fromkeys(new)
            start = message.ordinal
    if not names and decoder.has_names(field):
        raise DataError(f"{bag.path}: {topic}: {field} does not name its numbers: drop partial")
    if start < 0:
        raise DataError(f"{bag.path}: {topic}: {field} holds no numbers in the first messages")
    return tuple(names), start


def first_key(bag: Bag, topic: str) -> KeyFrame:
    """Return the first packet of a video topic that stands alone, decoded for its size."""
    decoder = bag.decoder(topic)
    for message in bag.read([topic]):
        packet = decoder.image(message.data)
        if packet.encoding in CODECS and not is_key(packet.encoding, packet.data):
            continue
        try:
            packets = PacketDecoder(packet.encoding)
            pictures = packets.decode(message.ordinal, packet.data) + packets.flush()
        except DataError as error:
            raise DataError(f"{bag.path}: {topic}: {error}") from None
        for _, frame in pictures[:1]:
            size = frame.width, frame.height
            return KeyFrame(message.ordinal, packet.encoding, *size, frame.format.name)
    raise DataError(f"{bag.path}: {topic} has no key frame: its packets cannot be decoded")


@dataclass(slots=True)
class Frames:
    """The frames of a bag, and the ordinal that each shows (MISSING for a fixed rate).

    Those that are `held` show an older picture, because there is a hole.
    """

    times: Times
    picks: Times
    keep: Mask
    held: Mask


def choose_timeline(
    stamps: Stamps, mapping: Mapping, chosen: AnyMapping[str, Sequence[Choice]]
) -> tuple[str, float]:
    """Return the topic whose messages are the frames, and its rate; "" is a fixed rate."""
    name = mapping.timeline
    if name is None:
        cameras = [chosen[key][0][1] for key in mapping.cameras]
        if not cameras:
            return "", float(mapping.fps)
        name = max(cameras, key=stamps.count)  # of equals, the first
    elif name == "rate":
        return "", float(mapping.fps)
    elif name in chosen:
        name = chosen[name][0][1]
    elif not stamps.count(name):
        raise DataError(stamps.absent("the timeline", (name,)))
    if mapping.timeline_hz is not None:
        return name, mapping.timeline_hz
    period_ns = stamps.of(name).period_ns
    hz = SECOND_NS / period_ns if 0 < period_ns < float("inf") else float(mapping.fps)
    # A camera of 30 Hz measures as 29.98: its pictures are meant to be used one by one.
    for nominal in (float(mapping.fps), float(round(hz))):
        if nominal and abs(hz / nominal - 1) < 0.03:
            return name, nominal
    return name, hz


def lay_out(
    stamps: Stamps,
    mapping: Mapping,
    timeline: str,
    hz: float,
    topics: AnyMapping[str, bool],
    account: Account,
) -> Frames:
    """Lay out the frames, bridge the holes, and count what the timeline's topic loses.

    `topics` says of each whether what it last said holds on for ever.
    """
    if not timeline:
        slots = _fixed_rate(stamps, mapping, topics)
        account.frames_in = len(slots.times)
        nothing = np.zeros(len(slots.times), bool)
        return Frames(slots.times, slots.picks, ~nothing, nothing)
    topic = stamps.of(timeline)
    account.frames_in = stamps.count(timeline)
    key = stamps.first_key(timeline)
    account.drop("before the first key frame", key.ordinal if key else 0)
    account.drop("duplicate stamp", topic.duplicates)
    account.drop("stamp out of order", topic.disordered)
    times, ends = topic.times, mapping.drop_ends
    if len(times) <= 2 * ends:
        raise DataError(
            f"{stamps.where}: {timeline} has {len(times)} usable messages, and drop_ends takes "
            f"{2 * ends} of them: nothing is left"
        )
    account.drop("start or end left out (drop_ends)", 2 * ends)
    times = times[ends : len(times) - ends]
    shortened = _without_years(times)
    _check_span(stamps.where, int(shortened[-1] - shortened[0]), max(mapping.fps, hz))
    slots = camera_slots(shortened, hz, mapping.fps)
    account.drop("not needed at this rate", slots.skipped)
    before = np.maximum.accumulate(np.maximum(slots.picks, 0))
    slots = replace(slots, times=slots.times + (times - shortened)[before])
    keep, held = _bridge(slots, mapping, account)
    shown = slots.picks[slots.picks != MISSING]
    account.frames_repeated = len(shown) - len(np.unique(shown))
    ordinals = np.where(slots.picks >= 0, topic.ordinals[slots.picks + ends], MISSING)
    return Frames(slots.times, ordinals, keep, held)


def _fixed_rate(stamps: Stamps, mapping: Mapping, topics: AnyMapping[str, bool]) -> Slots:
    """Lay frames over the time in which every topic speaks, or what it said holds on."""
    spans = {topic: stamps.of(topic).times[[0, -1]] for topic in topics}
    start_ns = int(max(span[0] for span in spans.values()))
    ends = [span[1] for topic, span in spans.items() if not topics[topic]]
    stop_ns = int(min(ends) if ends else max(span[1] for span in spans.values()))
    if stop_ns < start_ns or (stop_ns == start_ns and ends):
        raise DataError(
            f"{stamps.where}: there is no time in which all of {', '.join(topics)[:200]} speak: "
            "map topics that overlap, with more than one message each, or align: hold"
        )
    _check_span(stamps.where, stop_ns - start_ns, mapping.fps)
    return rate_slots(start_ns, stop_ns, mapping.fps)


def _check_span(where: str, span_ns: int, hz: float) -> None:
    if span_ns / SECOND_NS * hz > _MAX_FRAMES:
        raise DataError(
            f"{where}: its stamps span {span_ns // SECOND_NS} s, more than {_MAX_FRAMES} frames: "
            "the clock was set in between? Let a topic give the frames: timeline=/topic"
        )


def _without_years(times: Times) -> Times:
    """Shorten holes that no recording has, so that laying out frames stays bounded."""
    steps = np.diff(times)
    longest_ns = _LONGEST_HOLE_S * SECOND_NS
    if len(steps) == 0 or steps.max() <= longest_ns:
        return times
    return np.concatenate(([times[0]], times[0] + np.cumsum(np.minimum(steps, longest_ns))))


def _bridge(slots: Slots, mapping: Mapping, account: Account) -> tuple[Mask, Mask]:
    """Apply the gap policy to the holes: return the frames to keep, and those that are held."""
    hole = slots.picks == MISSING
    keep, held = ~hole, np.zeros(len(hole), bool)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], hole, [False])).astype(np.int8)))
    for first, after in edges.reshape(-1, 2):
        length_ns = slots.times[min(after, len(hole) - 1)] - slots.times[first - 1]
        account.note("holes of the timeline")
        if mapping.gap in ("hold", "flag") or not _is_long(length_ns, mapping):
            slots.picks[first:after] = slots.picks[first - 1]
            keep[first:after] = held[first:after] = True
    return keep, held


def _is_long(step_ns: int, mapping: Mapping) -> bool:
    """Tell whether the time between two frames is a gap: beyond jitter, and what is held."""
    return bool(step_ns > (mapping.hold_s + 1.6 / mapping.fps) * SECOND_NS)


def split(
    times: Times, mapping: Mapping, account: Account, spans: Times | None = None
) -> list[tuple[int, int]]:
    """Cut the frames into episodes: where their span changes, at gaps, at the longest length."""
    edges = set() if spans is None else {*(np.flatnonzero(np.diff(spans)) + 1).tolist()}
    jumps = [k + 1 for k, step in enumerate(np.diff(times)) if _is_long(int(step), mapping)]
    if mapping.gap == "split":
        edges.update(jumps)
    account.note("jumps in time within an episode", len(set(jumps) - edges))
    episodes = []
    for first, after in pairwise([0, *sorted(edges), len(times)]):
        step = mapping.split_frames or after - first
        episodes += [(start, min(start + step, after)) for start in range(first, after, step)]
    return episodes
