"""A first mapping for a bag that nobody has described, and the same as a YAML file to edit."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from collections.abc import Mapping as Mapped
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal

import numpy as np

from penstock.bags import Bag
from penstock.bags.transforms import is_pair
from penstock.conversion import kuavo
from penstock.conversion.align import SECOND_NS, Times, in_order
from penstock.conversion.features import describe
from penstock.conversion.mapping import (
    GAP_FLAG,
    STAMP,
    Camera,
    Clock,
    Mapping,
    Source,
    Vector,
)
from penstock.conversion.plan import plan_bag
from penstock.conversion.worth import Worth, fields_at_all, first_key, first_message, worth_of
from penstock.errors import DataError, UsageError
from penstock.media.encodings import DEPTH_ENCODINGS
from penstock.media.images import ImageDecoder

_DEFAULT_FPS: Final = 30
_MOST_OF_A_STATE: Final = 64
_MOST_FPS: Final = 100  # without a camera
_MOST_IN_BURSTS: Final = 0.3
_FAR_CLOCK_NS: Final = 10 * SECOND_NS  # between stamp and log time of one message
_STAMPS_LOOKED_AT: Final = 500


@dataclass(frozen=True, slots=True)
class Rate:
    """How often a topic speaks.

    Attributes:
        hz: Messages per second, over all of the time from the first to the last; 0 for fewer.
        usual_hz: By the median time between two: other than `hz` for bursts, or with long gaps.
        longest_gap_s: The longest time between two messages.
        disorder: Messages whose stamp does not rise.
        in_bursts: The share of the gaps that are below a tenth of the mean one.
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


def rate_of(bag: Bag, topic: str) -> Rate:
    """Measure a topic from the index."""
    ordered = in_order(bag.times(topic))
    if len(ordered.times) < 2:
        return Rate(0.0, 0.0, 0.0, ordered.duplicates + ordered.disordered)
    steps = ordered.times[1:] - ordered.times[:-1]
    span_s = float(ordered.times[-1] - ordered.times[0]) / SECOND_NS
    return Rate(
        (len(bag.times(topic)) - 1) / span_s,
        SECOND_NS / ordered.period_ns,
        float(steps.max()) / SECOND_NS,
        ordered.duplicates + ordered.disordered,
        _in_bursts(ordered.times),
    )


def _in_bursts(times: Times) -> float:
    steps = np.diff(times)
    return float((steps < steps.mean() / 10).mean()) if len(steps) else 0.0


def guess_clock(bag: Bag, topics: Iterable[str]) -> Clock:
    """Return "header" where log times come in bursts, and the stamps of all topics are sane."""
    names = [name for name in dict.fromkeys(topics) if bag.topics[name].count]
    stamped = [name for name in names if bag.decoder(name).stamp_reader() is not None]
    bursty = [name for name in stamped if rate_of(bag, name).is_bursty]
    if not bursty:
        return "bag"
    for name, first in bag.first_messages(stamped).items():
        stamp_ns = bag.decoder(name).stamp_ns(first.data) or 0
        if abs(stamp_ns - first.t_ns) > _FAR_CLOCK_NS:
            return "bag"
    wanted = {name: np.arange(min(bag.topics[name].count, _STAMPS_LOOKED_AT)) for name in bursty}
    stamps: dict[str, list[int]] = {name: [] for name in bursty}
    for message in bag.read(bursty, wanted):
        stamps[message.topic].append(bag.decoder(message.topic).stamp_ns(message.data) or 0)
    for times in map(np.array, stamps.values()):
        if np.any(np.diff(times) <= 0) or _in_bursts(times) > _MOST_IN_BURSTS / 4:
            return "bag"
    return "header"


def guess_mapping(bag: Bag) -> Mapping:
    """Guess a mapping.

    Raises:
        DataError: There is nothing in the bag that a dataset could hold.
    """
    if kuavo.is_kuavo({name for name, topic in bag.topics.items() if topic.count}):
        return _guess_kuavo(bag)
    chosen, cameras, left_out = look(bag)
    if not chosen and not cameras:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise DataError(
            f"{bag.path}: there is nothing to learn from ({reasons[:300] or 'no messages'}); map "
            "what you need with --map"
        )
    fps = _camera_rate(bag, cameras) if cameras else _common_rate(bag, list(chosen))
    features: dict[str, Vector | Camera] = {}
    groups: dict[str, list[Source]] = {}
    states = {worth.role for worth in chosen.values()} & {"state"}
    for name, worth in chosen.items():
        narrow = not states and worth.numbers <= _MOST_OF_A_STATE
        key = "observation.state" if worth.role == "state" or narrow else ""
        key = "action" if worth.role == "action" else key or _free(groups, _plain_name(name))
        groups.setdefault(key, []).extend(Source((name,), field) for field in worth.fields)
    for key in sorted(groups, key=lambda key: (key != "observation.state", key != "action")):
        slowest = min(rate_of(bag, source.topics[0]).hz for source in groups[key])
        pairs = any(is_pair(source.field) for source in groups[key])
        features[key] = _vector(groups[key], slow=pairs or slowest * 1.5 < fps)
    for topic, camera in cameras.items():
        name = _camera_name(topic)
        features[_free(features, name if camera.kind == "depth" else f"images.{name}")] = camera
    return Mapping(fps=fps, features=features, clock=guess_clock(bag, [*chosen, *cameras]))


def _free(taken: Container[str], name: str) -> str:
    """Return the key of an observation that no other has, and that means nothing else."""
    key, number = f"observation.{name}", 1
    while key in taken or key in ("observation.state", GAP_FLAG, STAMP):
        number += 1
        key = f"observation.{name}_{number}"
    return key


def _camera(bag: Bag, topic: str) -> Camera:
    """Describe a camera by its first picture, which is decoded to see that it can be.

    Raises:
        DataError: It cannot.
    """
    if bag.topics[topic].media == "video":
        key = first_key(bag, topic)
        return _sized(topic, "color", key.width, key.height)
    image = bag.decoder(topic).image(first_message(bag, topic))
    plain = image.encoding in ("mono16", "png") and "depth" in topic.lower()
    if plain or image.encoding in DEPTH_ENCODINGS:
        kind: Literal["color", "depth"] = "depth"
        height, width = ImageDecoder().depth_mm(image).shape
    else:
        kind = "color"
        frame = ImageDecoder().color(image)
        width, height = frame.width, frame.height
    return _sized(topic, kind, width, height)


def _sized(topic: str, kind: Literal["color", "depth"], width: int, height: int) -> Camera:
    if min(width, height) < 2:
        raise DataError(f"its pictures are {width}x{height}")
    even = width // 2 * 2, height // 2 * 2
    return Camera((topic,), kind=kind, resize=None if even == (width, height) else even)


def only(mapping: Mapping, topics: set[str]) -> Mapping:
    """Leave out what comes from other topics than these, unless nothing would be left."""
    features: dict[str, Vector | Camera] = {}
    for name, feature in mapping.features.items():
        if isinstance(feature, Camera):
            if topics.intersection(feature.topics):
                features[name] = feature
            continue
        sources = tuple(s for s in feature.sources if not s.topics or topics & set(s.topics))
        if sources:
            features[name] = replace(feature, sources=sources)
    return replace(mapping, features=features) if features else mapping


def look(bag: Bag) -> tuple[dict[str, Worth], dict[str, Camera], dict[str, str]]:
    """Return what to take of which topics, the cameras, and why all others are left out."""
    chosen: dict[str, Worth] = {}
    left_out: dict[str, str] = {}
    cameras: dict[str, Camera] = {}
    for name, topic in bag.topics.items():
        found = Worth(reason="no messages")
        try:
            if topic.count and topic.media is not None:
                cameras[name] = _camera(bag, name)
                continue
            if topic.count:
                found = worth_of(topic, bag)
        except (DataError, UsageError) as error:
            reason = str(error).removeprefix(f"{bag.path}: ").removeprefix(f"{name}: ")
            found = Worth(reason=reason)
        if found.fields:
            chosen[name] = found
        else:
            left_out[name] = found.reason
    # What speaks once, or only for a while, would cost the frames in which it is silent.
    spans = {name: _span_s(bag, name) for name in [*chosen, *cameras]}
    longest = max(spans.values(), default=0.0)
    for name, span_s in spans.items():
        if span_s < longest / 2 or not span_s:
            short = f"it covers {span_s:.1f} of {longest:.1f} s"
            left_out[name] = short if longest else "a single message"
            chosen.pop(name, None)
            cameras.pop(name, None)
    return chosen, cameras, left_out


def _span_s(bag: Bag, topic: str) -> float:
    times = bag.times(topic)
    return float(times.max() - times.min()) / SECOND_NS if len(times) else 0.0


def _common_rate(bag: Bag, topics: list[str]) -> int:
    """Return the rate of the topic that speaks most, for a dataset without pictures."""
    return int(min(max(round(max(rate_of(bag, name).hz for name in topics)), 1), _MOST_FPS))


def _camera_rate(bag: Bag, cameras: Mapped[str, Camera]) -> int:
    """Return the rate of the camera with the most pictures."""
    colour = [name for name, camera in cameras.items() if camera.kind == "color"] or [*cameras]
    if not colour:
        return _DEFAULT_FPS
    main = max(colour, key=lambda name: bag.topics[name].count)
    return max(round(rate_of(bag, main).usual_hz), 1)


def _guess_kuavo(bag: Bag) -> Mapping:
    """Use the profile of the robot, with pictures as they are recorded."""
    joints = 0
    for message in bag.read([kuavo.SENSORS]):
        joints = len(bag.decoder(kuavo.SENSORS).vector(message.data, "joint_data.joint_q"))
        break
    present = {name for name, topic in bag.topics.items() if topic.count}
    mapping = kuavo.guess(present, joints, _camera_rate(bag, look(bag)[1]))
    features = {
        name: replace(f, resize=None) if isinstance(f, Camera) else f
        for name, f in mapping.features.items()
    }
    used = [name for feature in features.values() for name in _topics(feature)]
    clock = guess_clock(bag, [name for name in used if name in present])
    return replace(mapping, features=features, clock=clock)


def _vector(sources: list[Source], slow: bool) -> Vector:
    if slow:  # it holds until the next message, however long that takes
        return Vector(tuple(sources), align="hold", tolerance_s=0.0)
    return Vector(tuple(sources))


def _plain_name(topic: str) -> str:
    return "_".join(re.findall(r"[A-Za-z0-9]+", topic))[:60] or "topic"


def _camera_name(topic: str) -> str:
    """Name a camera by its topic, without the words that every camera has."""
    words = re.split(r"[^A-Za-z0-9]+", topic.strip("/"))
    plain = {"image", "raw", "rect", "color", "colour", "compressed", "compresseddepth", "rgb"}
    kept = [w for w in words if w and w.lower() not in plain]
    return "_".join(kept)[:60] or "camera"


def to_yaml(mapping: Mapping | None, bag: Bag) -> str:
    """Write a mapping as a YAML file with comments, ready to edit.

    Args:
        mapping: The guess; None if there was nothing to guess.
        bag: What it is of. All that is left out follows as comments that can be switched on.
    """
    speaking = [name for name, topic in bag.topics.items() if topic.count]
    mapping = mapping or Mapping(_common_rate(bag, speaking) if speaking else _DEFAULT_FPS, {})
    lines = [
        f"# Mapping of {_comment(bag.path.name)}: which topics make which features.",
        "# Use it with: penstock convert BAGS OUT --map THIS_FILE",
        "",
        f"fps: {mapping.fps}                # frames per second of the dataset",
        f"task: {json.dumps(mapping.task)}           # what the robot does, for the learner",
        f"robot_type: {json.dumps(mapping.robot_type)}",
        "# timeline: /topic     # its messages are the frames; default: the camera with the most"
        " pictures; a number is a fixed rate",
        f"clock: {mapping.clock}             # bag (when recorded) or header (the message's stamp)",
        f"gap: {mapping.gap}              # a hole of the timeline: drop, split, hold or flag",
        f"hold_s: {mapping.hold_s}            # holes up to this many seconds show the last one",
        f"codec: {mapping.codec}            # h264, av1, copy (JPEG, video as recorded) or png",
        f"depth_codec: {mapping.depth_codec}   # depth12 (12 bit, lossless) or grey8",
        *([f"timeline: {json.dumps(mapping.timeline)}"] if mapping.timeline else []),
        *([f"timeline_hz: {mapping.timeline_hz}"] if mapping.timeline_hz else []),
        "# split_frames: 1000  # longest episode",
        "",
        "features:",
    ]
    for name, feature in mapping.features.items():
        lines.append(f"  {name}:")
        if isinstance(feature, Camera):
            lines += _camera_lines(feature, bag)
        else:
            lines += _vector_lines(feature, bag)
    used = {name for f in mapping.features.values() for name in _topics(f)}
    reasons = {name: why for name, why in look(bag)[2].items() if name not in used}
    never = []
    if not mapping.features:
        lines.append("  # nothing was found that a learner would want: switch on what you need")
    for name, why in reasons.items():
        extra = _switchable(name, bag, mapping)
        if extra is None:
            never.append(f"#   {name}: {why}")
            continue
        key = _free(mapping.features, _plain_name(name))
        block = [f"{key}:    # left out: {_comment(why)}; remove the # to take it"]
        if isinstance(extra, Camera):
            described = _camera_lines(extra, bag)
        else:
            described = _vector_lines(extra, bag)
        lines += [f"  # {line}" for line in (*block, *(line[2:] for line in described))]
    if never:
        lines += ["", "# Cannot be taken:", *map(_comment, never)]
    return "\n".join(lines) + "\n"


def _switchable(name: str, bag: Bag, mapping: Mapping) -> Vector | Camera | None:
    """Return a feature of a topic that is left out, if it can be converted with the others."""
    topic = bag.topics[name]
    if not topic.count:
        return None
    feature: Vector | Camera
    try:
        if topic.media is not None:
            feature = replace(_camera(bag, name), align="hold", tolerance_s=0.0)
        else:
            fields = fields_at_all(topic, bag)
            if not fields:
                return None
            feature = _vector([Source((name,), field) for field in fields], slow=True)
        whole = replace(mapping, features={**mapping.features, "observation.it": feature})
        describe(bag, whole, plan_bag(bag, whole))
    except (DataError, UsageError):
        return None
    return feature


def _topics(feature: Vector | Camera) -> Iterator[str]:
    for source in [feature] if isinstance(feature, Camera) else feature.sources:
        yield from source.topics


def _camera_lines(camera: Camera, bag: Bag) -> list[str]:
    lines = [_topic_line(camera.topics, bag, "    "), f"    kind: {camera.kind}"]
    lines += _other_keys(asdict(camera), Camera, ("topics", "kind"), "    ")
    if camera.resize is None:
        lines.append("    # resize: [640, 480]")
    return lines


def _vector_lines(vector: Vector, bag: Bag) -> list[str]:
    lines = [f"    align: {vector.align}      # nearest, hold (last one), linear or slerp"]
    lines += _other_keys(asdict(vector), Vector, ("sources", "align"), "    ")
    if vector.tolerance_s is None:
        lines.append(
            "    # tolerance_s: 0.1   # how far a message may lie from its frame; 0: no limit"
        )
    lines.append("    sources:")
    for source in vector.sources:
        lines += _source_lines(source, bag, "      - ")
    return lines


def _source_lines(source: Source, bag: Bag, lead: str) -> list[str]:
    indent = " " * len(lead)
    topic = _present(source.topics, bag)
    lines = [_topic_line(source.topics, bag, lead)]
    lines += _other_keys(asdict(source), Source, ("topics", "otherwise"), indent)
    if topic in bag.topics:
        fields = bag.decoder(topic).fields()
        others = [f for f in fields if f != source.field and not f.startswith("header.")]
        if others:
            lines.append(_comment(f"{indent}# its fields: {', '.join(others)[:120]}"))
    if source.otherwise is not None:
        lines.append(f"{indent}otherwise:    # in bags without that topic")
        lines += _source_lines(source.otherwise, bag, indent + "  ")
    return lines


def _other_keys(
    values: dict[str, Any], kind: type, skip: tuple[str, ...], indent: str
) -> list[str]:
    """Return the keys whose values are not the default ones."""
    defaults = {f.name: f.default for f in fields(kind)}
    return [
        f"{indent}{key}: {json.dumps(value)}"
        for key, value in values.items()
        if key not in skip and value != defaults[key] and value is not None
    ]


def _present(topics: Sequence[str], bag: Bag) -> str:
    return next((name for name in topics if name in bag.topics), topics[0])


def _topic_line(topics: Sequence[str], bag: Bag, lead: str) -> str:
    key, names = ("topic", json.dumps(topics[0], ensure_ascii=False))
    if len(topics) > 1:
        key, names = "topics", json.dumps(list(topics), ensure_ascii=False)
    return f"{lead}{key}: {names}    # {_about(bag, _present(topics, bag))}"


def _about(bag: Bag, topic: str) -> str:
    entry = bag.topics.get(topic)
    if entry is None or not entry.count:
        return "not in this bag"
    return _comment(f"{entry.type}, {entry.count} messages, {rate_of(bag, topic).hz:.1f} Hz")


def _comment(text: str) -> str:
    """Keep what a recording says on the line of its comment."""
    return "".join(c if c.isprintable() else "?" for c in text)
