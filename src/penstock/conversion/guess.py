"""A first mapping for a bag that nobody has described, and the same as a YAML file to edit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from penstock.bags import Bag, Topic
from penstock.conversion.align import SECOND_NS, in_order
from penstock.conversion.mapping import Camera, Mapping, Source, Vector
from penstock.errors import DataError

_IMAGES: Final = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")
_STATE_FIELDS: Final[tuple[str, ...]] = (
    "position",
    "joint_data.joint_q",
    "joint_q",
    "q",
    "data.position",
    "data",
)
_ACTION_WORDS: Final = re.compile(r"(cmd|command|action|target|desired|goal|traj|setpoint)", re.I)
_SMALL_TYPES: Final = ("sensor_msgs/msg/JointState", "geometry_msgs/msg/TwistStamped")
_LATCHED: Final = ("/tf", "/tf_static", "/rosout", "/parameter_events", "/diagnostics")
_DEFAULT_FPS: Final = 30


@dataclass(frozen=True, slots=True)
class Rate:
    """How often a topic speaks.

    Attributes:
        hz: Messages per second, by the median time between two; 0 for fewer than two.
        longest_gap_s: The longest time between two messages.
        disorder: Messages whose stamp does not rise.
    """

    hz: float
    longest_gap_s: float
    disorder: int


def rate_of(bag: Bag, topic: str) -> Rate:
    """Measure a topic from the index."""
    ordered = in_order(bag.times(topic))
    if len(ordered.times) < 2:
        return Rate(0.0, 0.0, ordered.duplicates + ordered.disordered)
    steps = ordered.times[1:] - ordered.times[:-1]
    return Rate(
        SECOND_NS / ordered.period_ns,
        float(steps.max()) / SECOND_NS,
        ordered.duplicates + ordered.disordered,
    )


def guess_mapping(bag: Bag) -> Mapping:
    """Guess a mapping.

    Raises:
        DataError: There is nothing in the bag that a dataset could hold.
    """
    features: dict[str, Vector | Camera] = {}
    states: list[tuple[Topic, str]] = []
    actions: list[tuple[Topic, str]] = []
    for topic, field in _numeric(bag):
        (actions if _ACTION_WORDS.search(topic.name) else states).append((topic, field))
    if states:
        features["observation.state"] = _vector(states)
    if actions:
        features["action"] = _vector(actions)
    cameras = [t for t in bag.topics.values() if t.type in _IMAGES and t.count]
    for topic in cameras:
        depth = "depth" in topic.name.lower()
        name = _camera_name(topic.name)
        key = f"observation.{name}" if depth else f"observation.images.{name}"
        while key in features:
            key += "_2"
        features[key] = Camera((topic.name,), kind="depth" if depth else "color")
    if not features:
        names = ", ".join(bag.topics) or "none"
        raise DataError(f"{bag.path}: no camera and no numbers among its topics ({names[:200]})")
    colour = [t for t in cameras if "depth" not in t.name.lower()] or cameras
    fps = _DEFAULT_FPS
    if colour:
        main = max(colour, key=lambda t: t.count)
        fps = max(round(rate_of(bag, main.name).hz), 1)
    return Mapping(fps=fps, features=features)


def _numeric(bag: Bag) -> Iterator[tuple[Topic, str]]:
    """Yield the topics that look like joints, grippers or commands, with their field."""
    for topic in bag.topics.values():
        if not topic.count or topic.type in _IMAGES or topic.name.startswith(_LATCHED):
            continue
        try:
            fields = bag.decoder(topic.name).fields()
        except DataError:
            continue
        found = next((field for field in _STATE_FIELDS if field in fields), None)
        if found is None and topic.type == "geometry_msgs/msg/TwistStamped":
            found = "twist"
        if found is not None:
            yield topic, found


def _vector(topics: list[tuple[Topic, str]]) -> Vector:
    return Vector(tuple(Source((topic.name,), field) for topic, field in topics))


def _camera_name(topic: str) -> str:
    """Name a camera by its topic, without the words that every camera has."""
    words = re.split(r"[^A-Za-z0-9]+", topic.strip("/"))
    plain = {"image", "raw", "rect", "color", "colour", "compressed", "compresseddepth", "rgb"}
    kept = [w for w in words if w and w.lower() not in plain]
    return "_".join(kept)[:60] or "camera"


def to_yaml(mapping: Mapping, bag: Bag) -> str:
    """Write a mapping as a YAML file with comments, ready to edit."""
    lines = [
        f"# Mapping of {bag.path.name}: which topics make which features.",
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
        f"codec: {mapping.codec}            # h264, av1, copy (JPEG as recorded) or png",
        f"depth_codec: {mapping.depth_codec}   # depth12 (12 bit, lossless) or grey8",
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
    return "\n".join(lines) + "\n"


def _camera_lines(camera: Camera, bag: Bag) -> list[str]:
    topic = bag.topics[camera.topics[0]]
    rate = rate_of(bag, topic.name)
    return [
        f"    topic: {json.dumps(topic.name)}    # {topic.count} pictures, {rate.hz:.1f} Hz",
        f"    kind: {camera.kind}",
        "    # resize: [640, 480]",
        "    # tolerance_s: 0.1   # how far a picture may lie from its frame",
    ]


def _vector_lines(vector: Vector, bag: Bag) -> list[str]:
    lines = [
        f"    align: {vector.align}      # nearest, hold (last one), linear or slerp",
        "    # tolerance_s: 0.1   # how far a message may lie from its frame; 0: no limit",
        "    sources:",
    ]
    for source in vector.sources:
        topic = bag.topics[source.topics[0]]
        rate = rate_of(bag, topic.name)
        others = [name for name in bag.decoder(topic.name).fields() if name != source.field]
        lines += [
            f"      - topic: {json.dumps(topic.name)}    # {topic.type}, {rate.hz:.1f} Hz",
            f"        field: {source.field}",
            "        # select: [0, 7]",
        ]
        if others:
            lines.append(f"        # other fields: {', '.join(others)[:160]}")
    return lines
