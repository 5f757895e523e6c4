"""Which numbers of a topic are worth having, and what they are to a learner: state, action, other.

Decided by the definition of the message, with tables for the types whose definition does not tell.
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

Role = Literal["state", "action", "other"]
Data = bytes | memoryview

_MOST_NUMBERS: Final = 2048
_MOST_FIELDS: Final = 16
_MOST_TRANSFORMS: Final = 8
_MOST_BYTES: Final = 256  # of a list of bytes: beyond, the other numbers only describe them
_LOOKED_AT: Final = 500  # messages of transforms
_SAMPLE: Final = 20  # messages, to see whether their numbers are always as many
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
_LISTS: Final = {  # of poses: their first one, where there is nothing better
    "Path": ("poses[0].pose", "a path of many poses"),
    "PoseArray": ("poses[0]", "many poses"),
}
_TRANSFORMS: Final = ("TFMessage", "tfMessage", "FrameTransforms")
_NEVER: Final = {
    r"rcl_interfaces/": "parameters and logs",
    r"rosgraph_msgs/": "logs and clocks",
    r"diagnostic_msgs/": "diagnostics",
    r"visualization_msgs/|foxglove\.(SceneUpdate|ImageAnnotations)": "drawings",
    r"rosbag2_interfaces/": "events of the recorder",
    r"actionlib_msgs/|action_msgs/": "the progress of actions",
    r"dynamic_reconfigure/": "parameters",
    r"bond/": "signs of life",
    r"map_msgs/": "a map",
    r".*\bCameraInfo$|.*\bCameraCalibration$": "a calibration",
    r".*\bPointCloud2?$|velodyne_msgs/|livox\w*/|ouster\w*/": "a point cloud",
    r".*\b(OccupancyGrid|GridMap|Costmap\w*|Octomap\w*)$": "a map",
    r".*\bAudio\w*$": "sound",
    r"std_msgs/msg/Header$": "a stamp alone",
    r".*\bBool(Stamped)?$": "a single flag",
}
_STATES: Final = re.compile(r"JointStates?$|Odometry|Pose|Motor|LowState")
_ACTIONS: Final = ("JointTrajectory", "AckermannDrive", "AckermannDriveStamped")
_COMMANDS: Final = ("Twist", "TwistStamped")  # unless their name says that they were measured
_ACTION_WORDS: Final = re.compile(r"(cmd|command|action|target|desired|goal|traj|setpoint)", re.I)
_MEASURED_WORDS: Final = re.compile(r"(odom|state|feedback|measured|actual|estimate|sensor)", re.I)
_COUNTERS: Final = re.compile(
    r"(.*\.)?(timestamp\w*|\w*_timestamp|stamp|seq|tick|time_\w+|n?sec|nanosec|crc\w*|reserved?)"
)
_FIXED: Final = re.compile(r"\[\d+\]")
_SMALL: Final = re.compile(r"(uint8|int8|byte|char|octet|bool)\[")


@dataclass(frozen=True, slots=True)
class TopicChoice:
    """What to take of a topic.

    Attributes:
        fields: The fields, in order; none if nothing can be had.
        role: What they are.
        numbers: How many they are.
        reason: Why it is left out where there is anything better, or at all.
        precise: They need float64, as GPS does, and a feature of their own.
    """

    fields: tuple[str, ...] = ()
    role: Role = "other"
    numbers: int = 0
    reason: str = ""
    precise: bool = False


def kind_of(topic: Topic) -> str:
    """Return the name of a topic's type, without its package."""
    return re.split(r"[/.]", topic.type)[-1]


def choose_fields(topic: Topic, bag: Bag) -> TopicChoice:
    """Decide about a topic of a bag; its first message is read only where that is needed.

    Raises:
        DataError: Its messages cannot be decoded.
    """
    for pattern, reason in _NEVER.items():
        if re.match(pattern, topic.type):
            return TopicChoice(reason=reason)
    if topic.name.endswith("_service_event") or "/_action/" in topic.name:
        return TopicChoice(reason="events of a service")
    decoder, kind = bag.decoder(topic.name), kind_of(topic)
    if kind in _TRANSFORMS:
        return _moving_frames(topic, bag)
    leaves = decoder.fields()
    kept = {path for path, text in leaves.items() if _is_measured(path, text)}
    if any(leaves[path].startswith("float") for path in kept):  # small ones are codes then
        kept = {path for path in kept if leaves[path] not in ("uint8", "int8", "byte", "char")}
    known = _FIELDS.get(kind, ())
    fixed = _fixed_lists(topic, leaves)
    small = [path for path, text in leaves.items() if _SMALL.match(text)]
    if not kept and not known and not fixed and kind not in _LISTS:
        return TopicChoice(reason="bytes, not numbers" if small else "no numbers")
    data = first_message(bag, topic.name)
    if kind in _LISTS:
        path, reason = _LISTS[kind]
        count = _count(decoder, data, path)
        return TopicChoice((path,) if count else (), "state", count, reason)
    if any(_count(decoder, data, path) > _MOST_BYTES for path in small):
        return TopicChoice(reason="bytes, and numbers that describe them")
    has_list = not fixed and any("[0]." in path for path in leaves)
    if kept and has_list and all(re.match(r"u?int", leaves[path]) for path in kept):
        return TopicChoice(reason="a list of messages, and numbers that describe it")
    # A field of fixed length is one of several: position, q and velocity of an odometry.
    firsts = [path for path in _FIRST_OF if path in kept and not _FIXED.search(leaves[path])]
    chosen = next((path for path in firsts if _count(decoder, data, path)), "")
    fields = (chosen,) if chosen else tuple(_within(decoder, data, kept, fixed))
    if known and all(_count(decoder, data, path) for path in known):
        fields = known
    numbers = sum(_count(decoder, data, path) for path in fields)
    if not numbers:
        return TopicChoice(reason="its numbers are empty")
    for count, most, what in (
        (numbers, _MOST_NUMBERS, "numbers"),
        (len(fields), _MOST_FIELDS, "fields"),
    ):
        if count > most:
            return TopicChoice(reason=f"{count} {what} are too many to guess")
    return TopicChoice(fields, _role(topic), numbers, precise="latitude" in fields)


def _moving_frames(topic: Topic, bag: Bag) -> TopicChoice:
    """Take the transforms that change among the first messages, if they are few."""
    decoder = bag.decoder(topic.name)
    first: dict[str, bytes] = {}
    moving: dict[str, None] = {}
    for number, message in enumerate(bag.read([topic.name])):
        for pair in decoder.transforms.pairs(message.data):
            value = decoder.vector(message.data, pair).tobytes()
            if first.setdefault(pair, value) != value:
                moving[pair] = None
        if number >= _LOOKED_AT:
            break
    if "static" in topic.name:
        reason = "static transforms"
    else:
        reason = "" if moving else f"none of its {len(first)} transforms moves at first"
    taken = tuple(moving or first)
    if len(taken) > _MOST_TRANSFORMS:
        return TopicChoice(reason=reason or f"{len(taken)} moving transforms are too many to guess")
    return TopicChoice(taken, "other", SIZE * len(taken), reason)


def possible_fields(topic: Topic, bag: Bag) -> tuple[str, ...]:
    """Return what of a topic that is left out could be had: numbers that are always as many.

    Raises:
        DataError: Its messages cannot be decoded.
    """
    decoder = bag.decoder(topic.name)
    sample = np.unique(np.linspace(0, topic.count - 1, _SAMPLE).astype(np.int64))
    messages = [bytes(m.data) for m in bag.read([topic.name], {topic.name: sample})]
    if kind_of(topic) in _TRANSFORMS:
        return tuple(dict.fromkeys(decoder.transforms.pairs(messages[0])))[:_MOST_FIELDS]
    leaves = decoder.fields()
    if any(_SMALL.match(text) for text in leaves.values()):
        return ()  # the rest describes the bytes
    paths = [path for path, text in leaves.items() if _is_number(path, text) or text == "bool"]
    if kind_of(topic) in _LISTS:
        paths = [_LISTS[kind_of(topic)][0]]
    found = []
    for path in paths:
        counts = {_count(decoder, data, path) for data in messages}
        if len(counts) == 1 and 0 < counts.pop() <= _MOST_NUMBERS:
            found.append(path)
    return tuple(found[:_MOST_FIELDS])


def first_message(bag: Bag, topic: str) -> Data:
    """Return the first message of a topic."""
    return bag.first_messages([topic])[topic].data  # a copy: a view would keep its chunk


def _role(topic: Topic) -> Role:
    kind, name = kind_of(topic), topic.name
    commanded = kind in _COMMANDS and not _MEASURED_WORDS.search(name)
    if kind in _ACTIONS or _ACTION_WORDS.search(name) or commanded:
        return "action"
    return "state" if _STATES.search(kind) or "joint" in name.lower() else "other"


def _is_number(path: str, text: str) -> bool:
    """Tell whether a field is one to keep: no stamp, flag, covariance, or list of messages."""
    if "covariance" in path or path.startswith(("header.", "layout.")) or ".header." in path:
        return False
    if text.startswith(("time", "duration", "bool")) or _SMALL.match(text):
        return False
    return "[0]." not in path or path == "points[0].positions"


def _is_measured(path: str, text: str) -> bool:
    """Tell whether a number is one that a learner could want: no counter of time or messages."""
    return _is_number(path, text) and not _COUNTERS.fullmatch(path)


def _fixed_lists(topic: Topic, leaves: dict[str, str]) -> set[str]:
    """Return the lists of messages whose length the definition tells: the motors of a robot."""
    lists = {path.partition("[0].")[0] for path in leaves if "[0]." in path}
    text = topic.definition if isinstance(topic.definition, str) else ""
    return {path for path in lists if re.search(rf"\[\d+\]\s+{re.escape(path)}\b", text)}


def _within(
    decoder: Decoder, data: Data, kept: set[str], lists: set[str], prefix: str = ""
) -> Iterator[str]:
    """Yield the fewest fields that hold these numbers and no others: whole sub-messages first."""
    leaves = [path for path in decoder.fields() if path.startswith(prefix)]
    for name in dict.fromkeys(path[len(prefix) :].split(".")[0] for path in leaves):
        path = (prefix + name).removesuffix("[0]")
        if path in kept or path in lists:
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
            yield from _within(decoder, data, kept, lists, f"{path}.")


def _count(decoder: Decoder, data: Data, path: str) -> int:
    try:
        return len(decoder.vector(data, path))
    except DataError:
        return 0
