"""A first mapping for a bag that nobody has described."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from penstock.bags import Bag
from penstock.bags.transforms import is_pair
from penstock.conversion import robots
from penstock.conversion.align import SECOND_NS, Times, in_order
from penstock.conversion.mapping import (
    GAP_FLAG,
    STAMP,
    Camera,
    Clock,
    Kind,
    Mapping,
    Source,
    Tasks,
    Vector,
)
from penstock.conversion.timeline import first_key
from penstock.conversion.topics import (
    TopicChoice,
    choose_fields,
    first_message,
    kind_of,
    of_first_usable,
    why_never,
)
from penstock.errors import DataError, UsageError
from penstock.media.encodings import DEPTH_ENCODINGS
from penstock.media.headers import png_bits
from penstock.media.images import ImageDecoder

DEFAULT_FPS: Final = 30
_MOST_OF_A_STATE: Final = 64
_MOST_OF_HAND: Final = 4
_MOST_FPS: Final = 100  # without a camera
_MOST_IN_BURSTS: Final = 0.3
_FAR_CLOCK_NS: Final = 10 * SECOND_NS  # between stamp and log time of one message
_STAMPS_LOOKED_AT: Final = 500
_MOST_OF_A_TASK: Final = 300  # characters
_COPY: Final = re.compile(  # also of a topic that is recorded twice, once at a low rate
    r"/(compressed|compressedDepth|zstd|theora|ffmpeg)$|_throttled?(?=/|$)|^/lf(?=/)"
)
_TASK: Final = re.compile(
    r"(?<![a-z])((language_)?instructions?|prompt|task(_(description|name|instruction))?"
    r"|language(_goal)?)$"
)


@dataclass(frozen=True, slots=True)
class Rate:
    """How often a topic speaks.

    Attributes:
        hz: Messages per second, over all of the time from the first to the last; 0 for fewer.
        usual_hz: By the usual time between two: other than `hz` for bursts, or with long gaps.
        longest_gap_s: The longest time between two messages.
        disorder: Messages whose stamp does not rise.
        in_bursts: The share of the gaps that are below a tenth of the mean one, without pauses.
    """

    hz: float
    usual_hz: float
    longest_gap_s: float
    disorder: int
    in_bursts: float = 0.0

    @property
    def is_bursty(self) -> bool:
        """Whether messages were received many at once: their log times say little."""
        return self.in_bursts > _MOST_IN_BURSTS

    @property
    def frames_hz(self) -> float:
        """The rate of frames that follow it: neither pauses nor bursts change it."""
        return self.hz if self.is_bursty else self.usual_hz


def rate_of(bag: Bag, topic: str) -> Rate:
    """Measure a topic from the index."""
    times = bag.times(topic)
    ordered = in_order(times)
    if len(ordered.times) < 2:
        return Rate(0.0, 0.0, 0.0, ordered.duplicates + ordered.disordered)
    steps = ordered.times[1:] - ordered.times[:-1]
    span_s = float(ordered.times[-1] - ordered.times[0]) / SECOND_NS
    return Rate(
        (len(times) - 1) / span_s,
        SECOND_NS / _usual_step(steps),
        float(steps.max()) / SECOND_NS,
        ordered.duplicates + ordered.disordered,
        _in_bursts(np.sort(times)),
    )


def _usual_step(steps: Times) -> float:
    """Return the median, or, where hardly any step is near it (jitter), the mean without pauses."""
    median = float(np.median(steps))
    if np.mean(np.abs(steps - median) <= median / 4) >= 0.5:
        return median
    return float(np.sort(steps)[: len(steps) - len(steps) // 100].mean())


def _in_bursts(times: Times) -> float:
    steps = np.sort(np.diff(times))
    usual = steps[: -max(1, len(steps) // 100)]  # the longest are pauses
    return float((usual < usual.mean() / 10).mean()) if len(usual) else 0.0


def guess_clock(bag: Bag, topics: Iterable[str]) -> Clock:
    """Return "header" where log times come in bursts, and the stamps of all topics are sane."""
    names = [name for name in dict.fromkeys(topics) if bag.topics[name].count]
    stamped = [name for name in names if bag.decoder(name).stamp_reader() is not None]
    bursty = [name for name in stamped if rate_of(bag, name).is_bursty]
    if not bursty:
        return "bag"
    for name, first in bag.first_messages(stamped).items():
        stamp_ns = bag.decoder(name).stamp_ns(first.data) or 0
        unset = stamp_ns == 0 and name not in bursty  # such a topic is taken when recorded
        if not unset and abs(stamp_ns - first.t_ns) > _FAR_CLOCK_NS:
            return "bag"
    wanted = {name: np.arange(min(bag.topics[name].count, _STAMPS_LOOKED_AT)) for name in bursty}
    stamps: dict[str, list[int]] = {name: [] for name in bursty}
    for message in bag.read(bursty, wanted):
        stamps[message.topic].append(bag.decoder(message.topic).stamp_ns(message.data) or 0)
    for times in map(np.array, stamps.values()):
        if np.any(np.diff(times) <= 0) or _in_bursts(times) > _MOST_IN_BURSTS / 4:
            return "bag"
    return "header"


def guess_mapping(bag: Bag, found: Survey | None = None) -> Mapping:
    """Guess a mapping: that of a robot which is known, or one by the types of the messages.

    Args:
        bag: The recording.
        found: Its survey, if that was made.

    Raises:
        DataError: There is nothing in the bag that a dataset could hold.
    """
    speaking = {name for name, topic in bag.topics.items() if topic.count}
    robot = robots.recognise(speaking)
    found = found or survey(bag)
    if robot is not None:
        mapping = robot.mapping(bag, _camera_rate(bag, found.cameras))
        return replace(mapping, clock=robot.clock or guess_clock(bag, mapping.topics & speaking))
    if not found.numbers and not found.cameras:
        reasons = [f"{name}: {reason}" for name, reason in found.left_out.items()]
        few = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if reasons[3:] else "")
        raise DataError(
            f"{bag.path}: there is nothing to learn from ({few or 'no messages'}); map what you "
            "need with --map"
        )
    fps = _camera_rate(bag, found.cameras) if found.cameras else common_rate(bag, found.numbers)
    groups: dict[str, list[Source]] = {}
    commanded = any(choice.role == "action" for choice in found.numbers.values())
    has_state = any(choice.role == "state" for choice in found.numbers.values())
    for name, choice in found.numbers.items():
        narrow = not has_state and choice.numbers <= _MOST_OF_A_STATE and not choice.precise
        if choice.role == "action":
            key = "action"
        elif choice.role == "state" or narrow or (has_state and _is_gripper(name, choice)):
            key = "observation.state"
        else:
            key = free_key(groups, plain_name(name))
        groups.setdefault(key, []).extend(
            Source((name,), field, partial=field in choice.partial) for field in choice.fields
        )
        if choice.commands and not commanded:
            groups.setdefault("action", []).extend(
                Source((name,), it, partial=it in choice.partial) for it in choice.commands
            )
    features: dict[str, Vector | Camera] = {}
    for key in sorted(groups, key=lambda key: (key != "observation.state", key != "action")):
        slowest = min(rate_of(bag, source.topics[0]).hz for source in groups[key])
        pairs = any(is_pair(source.field) for source in groups[key])
        feature = holding(groups[key], pairs or slowest * 1.5 < fps)
        precise = any(found.numbers[source.topics[0]].precise for source in groups[key])
        features[key] = replace(feature, dtype="float64" if precise else None)
    for topic, camera in found.cameras.items():
        name = _camera_name(topic)
        features[free_key(features, name if camera.kind == "depth" else f"images.{name}")] = camera
    clock = guess_clock(bag, [*found.numbers, *found.cameras])
    tasks = Tasks(topic=found.task) if found.task else None
    return Mapping(fps, features, clock=clock, tasks=tasks)


def _is_gripper(name: str, choice: TopicChoice) -> bool:
    """Tell whether a topic is what is missing in the state of an arm."""
    return "gripper" in name.lower() and choice.role == "other" and choice.numbers <= _MOST_OF_HAND


def holding(sources: list[Source], slow: bool = True) -> Vector:
    """Return a feature; if it is slow, a value holds until the next, however long that takes."""
    if slow:
        return Vector(tuple(sources), align="hold", tolerance_s=0.0)
    return Vector(tuple(sources))


def free_key(taken: Container[str], name: str) -> str:
    """Return the key of an observation that no other has, and that means nothing else."""
    key, number = f"observation.{name}", 1
    while key in taken or key in ("observation.state", GAP_FLAG, STAMP):
        number += 1
        key = f"observation.{name}_{number}"
    return key


def left_out(bag: Bag, found: Survey, mapping: Mapping | None) -> dict[str, str]:
    """Return the topics with messages that no feature takes, and why."""
    used = mapping.topics if mapping else set()
    return {
        name: found.left_out.get(name, "the mapping of the robot takes others")
        for name, topic in bag.topics.items()
        if topic.count and name not in used
    }


def restrict(mapping: Mapping, topics: set[str], everywhere: set[str]) -> Mapping:
    """Leave out what comes from other topics than these, unless nothing would be left.

    Every bag must say what the robot does, or none is asked.
    """
    if mapping.tasks is not None and mapping.tasks.topic not in everywhere:
        mapping = replace(mapping, tasks=None)
    features: dict[str, Vector | Camera] = {}
    for name, feature in mapping.features.items():
        if isinstance(feature, Camera):
            if not topics.isdisjoint(feature.topics):
                features[name] = feature
            continue
        sources = tuple(source for source in feature.sources if topics & set(source.topics))
        if sources:
            features[name] = replace(feature, sources=sources)
    return replace(mapping, features=features) if features else mapping


@dataclass(slots=True)
class Survey:
    """What there is in a bag.

    Attributes:
        numbers: What to take of which topics.
        cameras: By topic.
        left_out: All other topics, and why.
        task: The topic that says what the robot does; "" for none.
    """

    numbers: dict[str, TopicChoice] = field(default_factory=dict)
    cameras: dict[str, Camera] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    task: str = ""


def survey(bag: Bag) -> Survey:
    """Look at every topic of a bag.

    Where there is nothing that a learner would choose, a path, a pose that does not move or a
    single message are better than nothing: what can be had of them is taken then.
    """
    found, poor = Survey(), dict[str, TopicChoice]()
    small = [n for n, topic in bag.topics.items() if topic.media is None and not why_never(topic)]
    with suppress(DataError):  # in one pass: they are asked for one by one below
        bag.first_messages(small)
    for name, topic in bag.topics.items():
        try:
            if topic.count and topic.media is not None:
                found.cameras[name] = describe_camera(bag, name)
                continue
            choice = choose_fields(topic, bag) if topic.count else TopicChoice(reason="no messages")
        except (DataError, UsageError) as error:
            reason = str(error).removeprefix(f"{bag.path}: ").removeprefix(f"{name}: ")
            choice = TopicChoice(reason=reason)
        if choice.reason:
            found.left_out[name] = choice.reason
            if choice.fields:
                poor[name] = choice
        else:
            found.numbers[name] = choice
    # What speaks once, or only for a while, would cost the frames in which it is silent.
    spans = {name: _span_s(bag, name) for name in [*found.numbers, *found.cameras]}
    longest = max(spans.values(), default=0.0)
    for name, span_s in spans.items():
        if span_s < longest / 2:
            found.left_out[name] = f"it covers {span_s:.1f} of {longest:.1f} s"
            found.numbers.pop(name, None)
            found.cameras.pop(name, None)
    if not spans:
        found.numbers = poor
    _choose_copies(bag, found)
    _choose_operators(found)
    found.task = next((name for name in bag.topics if _says_task(bag, name)), "")
    for name in (*found.numbers, found.task):
        found.left_out.pop(name, None)
    return found


def _choose_copies(bag: Bag, found: Survey) -> None:
    """Take a topic once that is recorded twice: a camera raw, unless it has fewer pictures so."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in [*found.cameras, *found.numbers]:
        kind = "" if name in found.cameras else bag.topics[name].type
        groups.setdefault((_COPY.sub("", name), kind), []).append(name)
    for (_, kind), names in groups.items():
        counts = {name: bag.topics[name].count for name in names}
        most = max(counts.values())
        kept = min(names, key=lambda name: (counts[name] < 0.9 * most, len(name)))
        for name in names:
            if name != kept:
                del (found.numbers if kind else found.cameras)[name]
                what = "the same as" if kind else "the pictures of"
                found.left_out[name] = f"{what} {kept} once more"


def _choose_operators(found: Survey) -> None:
    """Take what a person moves for the action, unless the commands that it gives are there."""
    commands = [choice for choice in found.numbers.values() if choice.role == "action"]
    for name, choice in list(found.numbers.items()):
        if choice.role != "operator":
            continue
        # Arms that lead may give but a part of the commands: as many numbers are the same ones.
        same = [it for it in commands if it.numbers == choice.numbers or not choice.joints]
        if same:
            del found.numbers[name]
            found.left_out[name] = "what a person moves; the commands are there"
        else:
            found.numbers[name] = replace(choice, role="action")


def _says_task(bag: Bag, name: str) -> bool:
    """Tell whether a topic says in words what the robot does."""
    topic = bag.topics[name]
    if not topic.count or kind_of(topic) != "String" or not _TASK.search(name.lower()):
        return False
    try:
        text = bag.decoder(name).text(first_message(bag, name), "data").strip()
    except DataError:
        return False
    return 0 < len(text) <= _MOST_OF_A_TASK and text[0] not in "{[<"


def _span_s(bag: Bag, topic: str) -> float:
    times = bag.times(topic)
    return float(times.max() - times.min()) / SECOND_NS if len(times) else 0.0


def describe_camera(bag: Bag, topic: str) -> Camera:
    """Describe a camera by its first picture, which is decoded to see that it can be."""
    kind: Kind = "color"
    if bag.is_video(topic):
        key = first_key(bag, topic)
        width, height = key.width, key.height
    else:
        kind, width, height = of_first_usable(
            bag, topic, first_message(bag, topic), lambda data: _picture(bag, topic, data)
        )
    if min(width, height) < 2:
        raise DataError(f"its pictures are {width}x{height}")
    even = width // 2 * 2, height // 2 * 2
    return Camera((topic,), kind=kind, resize=None if even == (width, height) else even)


def _picture(bag: Bag, topic: str, data: bytes | memoryview) -> tuple[Kind, int, int]:
    """Return what a message shows, its width and its height."""
    image = bag.decoder(topic).image(data)
    # 16 bits of grey may be either; 8 bits are a picture of distances for people.
    deep = image.encoding == "png" and png_bits(image.data) == 16
    grey = deep or image.encoding == "mono16"
    if "confidence" in topic.lower() and (grey or image.encoding in DEPTH_ENCODINGS):
        raise DataError("how sure the camera is, not what it sees")
    if (grey and "depth" in topic.lower()) or image.encoding in DEPTH_ENCODINGS:
        height, width = ImageDecoder().depth_mm(image).shape
        return "depth", width, height
    frame = ImageDecoder().color(image)
    return "color", frame.width, frame.height


def common_rate(bag: Bag, topics: Iterable[str]) -> int:
    """Return the rate of the topic that speaks most, for a dataset without pictures."""
    fastest = max((rate_of(bag, name).frames_hz for name in topics), default=DEFAULT_FPS)
    return int(min(max(round(fastest), 1), _MOST_FPS))


def _camera_rate(bag: Bag, cameras: dict[str, Camera]) -> int:
    """Return the rate of the camera with the most pictures."""
    colour = [name for name, camera in cameras.items() if camera.kind == "color"] or [*cameras]
    if not colour:
        return DEFAULT_FPS
    main = max(colour, key=lambda name: bag.topics[name].count)
    return max(round(rate_of(bag, main).frames_hz), 1)


def plain_name(topic: str) -> str:
    """Return the letters and digits of a topic, for the name of a feature."""
    return "_".join(re.findall(r"[A-Za-z0-9]+", topic))[:60] or "topic"


def _camera_name(topic: str) -> str:
    """Name a camera by its topic, without the words that every camera has."""
    plain = {"image", "raw", "rect", "color", "colour", "compressed", "compresseddepth", "rgb"}
    kept = [word for word in re.findall(r"[A-Za-z0-9]+", topic) if word.lower() not in plain]
    return "_".join(kept)[:60] or "camera"
