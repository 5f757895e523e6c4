"""Which numbers of a topic are worth having, and what they are to a learner: state, action, other.

Decided by the definition of the message, with a table for the types whose definition does not tell.
What is left out has a reason that a person can read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from penstock.bags import Bag, Decoder, Topic
from penstock.bags.transforms import SIZE
from penstock.errors import DataError
from penstock.media.encodings import CODECS
from penstock.media.packets import KeyFrame, PacketDecoder, is_key

Role = Literal["state", "action", "other"]

MOST_NUMBERS: Final = 2048
_MOST_FIELDS: Final = 16
# In this order: the first that holds anything is the one that matters.
_FIRST_OF: Final[tuple[str, ...]] = (
    *("position", "joint_data.joint_q", "joint_q", "q", "data.position"),
    *("velocity", "effort", "points[0].positions", "axes", "ranges"),
)
_FIELDS: Final = {  # where the definition holds settings and codes beside the measurement
    "NavSatFix": ("latitude", "longitude", "altitude"),
    "LocationFix": ("latitude", "longitude", "altitude"),
    "BatteryState": ("voltage", "percentage"),
    "Range": ("range",),
    "MultiDOFJointState": ("transforms",),
    "MultiDOFJointTrajectory": ("points[0].transforms",),
}
_TRANSFORMS: Final = ("TFMessage", "tfMessage", "FrameTransforms")
_MOST_TRANSFORMS: Final = 8
_LOOKED_AT: Final = 500  # messages of transforms
_LEAST_LOOKED_AT: Final = 20
_NEVER: Final = {
    "rcl_interfaces/": "parameters and logs",
    "rosgraph_msgs/": "logs and clocks",
    "diagnostic_msgs/": "diagnostics",
    "visualization_msgs/": "drawings",
    "rosbag2_interfaces/": "events of the recorder",
    "actionlib_msgs/": "the progress of actions",
    "dynamic_reconfigure/": "parameters",
    "bond/": "signs of life",
    "map_msgs/": "a map",
    "sensor_msgs/msg/CameraInfo": "a calibration",
    "sensor_msgs/msg/PointCloud": "a point cloud",
    "nav_msgs/msg/OccupancyGrid": "a map",
    "nav_msgs/msg/Path": "a path of many poses",
    "std_msgs/msg/Header": "a stamp alone",
    "std_msgs/msg/Bool": "a single flag",
}
_STATES: Final = ("JointState", "JointStates", "Odometry")
_ACTIONS: Final = ("JointTrajectory", "AckermannDrive", "AckermannDriveStamped")
_COMMANDS: Final = ("Twist", "TwistStamped")  # unless their name says that they were measured
_ACTION_WORDS: Final = re.compile(r"(cmd|command|action|target|desired|goal|traj|setpoint)", re.I)
_MEASURED_WORDS: Final = re.compile(r"(odom|state|feedback|measured|actual|estimate|sensor)", re.I)
_SMALL: Final = re.compile(r"(uint8|int8|byte|char|octet|bool)\[")


@dataclass(frozen=True, slots=True)
class Worth:
    """What to take of a topic.

    Attributes:
        fields: The fields, in order; none if the topic is left out.
        role: What they are.
        reason: Why it is left out.
        numbers: How many they are.
    """

    fields: tuple[str, ...] = ()
    role: Role = "other"
    reason: str = ""
    numbers: int = 0


def worth_of(topic: Topic, bag: Bag) -> Worth:
    """Decide about a topic of a bag; its first message is read only where that is needed.

    Raises:
        DataError: Its messages cannot be decoded.
    """
    for kind, reason in _NEVER.items():
        if topic.type.startswith(kind):
            return Worth(reason=reason)
    if topic.name.endswith("_service_event") or "/_action/" in topic.name:
        return Worth(reason="events of a service")
    decoder = bag.decoder(topic.name)
    kind = re.split(r"[/.]", topic.type)[-1]
    if kind in _TRANSFORMS:
        return _moving_frames(topic, bag)
    leaves = decoder.fields()
    kept = {path for path, text in leaves.items() if _is_number(path, text)}
    known = _FIELDS.get(kind, ())
    if not kept and not known:
        small = any(_SMALL.match(text) for text in leaves.values())
        return Worth(reason="bytes, not numbers" if small else "no numbers")
    data = first_message(bag, topic.name)
    chosen = next(
        (path for path in _FIRST_OF if path in kept and _count(decoder, data, path)), None
    )
    fields = (chosen,) if chosen else tuple(_within(decoder, data, kept, ""))
    if known and all(_count(decoder, data, path) for path in known):
        fields = known
    numbers = sum(_count(decoder, data, path) for path in fields)
    if not numbers:
        return Worth(reason="its numbers are empty")
    if numbers > MOST_NUMBERS:
        return Worth(reason=f"{numbers} numbers are too many to guess")
    if len(fields) > _MOST_FIELDS:
        return Worth(reason=f"{len(fields)} fields are too many to guess")
    return Worth(fields, _role(topic), numbers=numbers)


def _moving_frames(topic: Topic, bag: Bag) -> Worth:
    """Take the transforms that change among the first messages, if they are few."""
    decoder = bag.decoder(topic.name)
    first: dict[str, bytes] = {}
    moving: dict[str, None] = {}
    if "static" in topic.name:
        return Worth(reason="static transforms")
    for number, message in enumerate(bag.read([topic.name])):
        for pair in decoder.transforms.pairs(message.data):
            value = decoder.vector(message.data, pair).tobytes()
            if first.setdefault(pair, value) != value:
                moving[pair] = None
        if number >= _LOOKED_AT:
            break
    if not moving:
        return Worth(reason=f"none of its {len(first)} transforms moves at first")
    if len(moving) > _MOST_TRANSFORMS:
        return Worth(reason=f"{len(moving)} moving transforms are too many to guess")
    return Worth(tuple(moving), "other", numbers=SIZE * len(moving))


def fields_at_all(topic: Topic, bag: Bag) -> tuple[str, ...]:
    """Return what of a topic that is left out could be had: numbers that are always as many.

    Raises:
        DataError: Its messages cannot be decoded.
    """
    decoder = bag.decoder(topic.name)
    sample = np.unique(np.linspace(0, topic.count - 1, _LEAST_LOOKED_AT).astype(np.int64))
    messages = [bytes(m.data) for m in bag.read([topic.name], {topic.name: sample})]
    if re.split(r"[/.]", topic.type)[-1] in _TRANSFORMS:
        return tuple(dict.fromkeys(decoder.transforms.pairs(messages[0])))[:_MOST_FIELDS]
    found = []
    if any(_SMALL.match(text) for text in decoder.fields().values()):
        return ()  # the rest describes the bytes
    for path, text in decoder.fields().items():
        if _is_number(path, text) or text == "bool":
            counts = {_count(decoder, data, path) for data in messages}
            if len(counts) == 1 and 0 < counts.pop() <= MOST_NUMBERS:
                found.append(path)
    return tuple(found[:_MOST_FIELDS])


def first_message(bag: Bag, topic: str) -> bytes | memoryview:
    """Return the first message of a topic."""
    return bag.first_messages([topic])[topic].data  # a copy: a view would keep its chunk


def first_key(bag: Bag, topic: str) -> KeyFrame:
    """Return the first packet of a video topic that stands alone, decoded for its size.

    Raises:
        DataError: It cannot, or there is none.
    """
    decoder = bag.decoder(topic)
    for message in bag.read([topic]):
        packet = decoder.image(message.data)
        if packet.encoding not in CODECS or is_key(packet.encoding, packet.data):
            try:
                packets = PacketDecoder(packet.encoding)
                pictures = packets.decode(message.ordinal, packet.data) + packets.flush()
            except DataError as error:
                raise DataError(f"{bag.path}: {topic}: {error}") from None
            if not pictures:
                continue
            frame = pictures[0][1]
            size = frame.width, frame.height
            return KeyFrame(message.ordinal, packet.encoding, *size, frame.format.name)
    raise DataError(f"{bag.path}: {topic} has no key frame: its packets cannot be decoded")


def _role(topic: Topic) -> Role:
    kind = re.split(r"[/.]", topic.type)[-1]
    measured = _MEASURED_WORDS.search(topic.name)
    if kind in _ACTIONS or _ACTION_WORDS.search(topic.name) or (kind in _COMMANDS and not measured):
        return "action"
    return (
        "state" if kind in _STATES or "Pose" in kind or "joint" in topic.name.lower() else "other"
    )


def _is_number(path: str, text: str) -> bool:
    """Tell whether a field is one to keep: no stamp, flag, covariance, or list of messages."""
    if "covariance" in path or path.startswith(("header.", "layout.")) or ".header." in path:
        return False
    if text.startswith(("time", "duration", "bool")) or _SMALL.match(text):
        return False
    return "[0]." not in path or path == "points[0].positions"


def _within(
    decoder: Decoder, data: bytes | memoryview, kept: set[str], prefix: str
) -> Iterator[str]:
    """Yield the fewest fields that hold these numbers and no others: whole sub-messages first."""
    names = dict.fromkeys(path[len(prefix) :].split(".")[0] for path in decoder.fields()
                          if path.startswith(prefix))  # fmt: skip
    for name in names:
        path = prefix + name
        if path in kept:
            if _count(decoder, data, path):
                yield path
            continue
        inside = {leaf for leaf in kept if leaf.startswith(f"{path}.")}
        if not inside:
            continue
        numbers = sum(_count(decoder, data, leaf) for leaf in inside)
        if numbers and _count(decoder, data, path) == numbers:
            yield path
        else:
            yield from _within(decoder, data, kept, f"{path}.")


def _count(decoder: Decoder, data: bytes | memoryview, path: str) -> int:
    try:
        return len(decoder.vector(data, path))
    except DataError:
        return 0
