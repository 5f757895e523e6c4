"""Which numbers of a topic are worth having, and what they are to a learner: state, action, other.

Decided by the definition of the message, with tables for the types whose definition does not tell.
What is left out has a reason that a person can read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import numpy as np

from penstock.bags import Bag, Decoder, Topic
from penstock.bags.transforms import SIZE
from penstock.errors import DataError

Role = Literal["state", "action", "operator", "other"]
Data = bytes | memoryview
_Found = TypeVar("_Found")

_MOST_NUMBERS: Final = 2048
_MOST_FIELDS: Final = 16
_MOST_TRANSFORMS: Final = 8
_MOST_BYTES: Final = 256  # of a list of bytes: beyond, the other numbers only describe them
_LARGE: Final = 1 << 20  # bytes of a message: what is in it are more numbers than anyone wants
_LOOKED_AT: Final = 500  # messages of transforms
_NAMED: Final = 100  # messages of joints, to see whether they name the same
_PICTURES: Final = 10  # that a camera may begin with before there is one
_SAMPLE: Final = 20  # messages, to see whether their numbers are always as many
# In this order: the first that holds anything is the one that matters.
_FIRST_OF: Final[tuple[str, ...]] = (
    *("position", "joint_data.joint_q", "joint_q", "q", "qpos", "data.position"),
    *("positions", "joint_position", "joint_positions"),
    *("velocity", "effort", "points[0].positions", "axes", "ranges"),
    *("reference.positions", "desired.positions"),
)
# Messages of these packages are about one thing; others may hold a gripper beside the joints.
_ONE_THING: Final = re.compile(r"(sensor|trajectory|control|std|kuavo)_msgs/|foxglove\.")
_DERIVED: Final = re.compile(  # what is measured beside positions
    r"(.*\.)?(velocit\w+|speeds?|vel|accel\w*|effort\w*|torque\w*|tau\w*|current\w*|d?dq\w*|qd+|qvel|joint_(velocit|effort|torque)\w+"
    r"|temperature\w*|kp|kd|stiffness\w*|damping\w*)"
)
_FIELDS: Final = {  # where the definition holds settings and codes beside the measurement
    "NavSatFix": ("latitude", "longitude", "altitude"),
    "LocationFix": ("latitude", "longitude", "altitude"),
    "BatteryState": ("voltage", "percentage"),
    "Range": ("range",),
    "MultiDOFJointState": ("transforms",),
    "MultiDOFJointTrajectory": ("points[0].transforms",),
    "FrankaState": ("q", "dq", "tau_J", "O_T_EE"),
    "FrankaRobotState": (
        *("measured_joint_state.position", "measured_joint_state.velocity"),
        *("measured_joint_state.effort", "o_t_ee.pose"),
    ),
}
_LISTS: Final = {  # of poses: their first one, where there is nothing better
    "Path": ("poses[0].pose", "a path of many poses"),
    "PoseArray": ("poses[0]", "many poses"),
    "PosesInFrame": ("poses[0]", "many poses"),
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
_STATES: Final = re.compile(
    r"JointStates?$|Odometry|Pose|Motor|LowState|FrankaState"
    r"|(Robot|Arm|Hand|Gripper|Finger|Leg)\w*[Ss]tates?$"
)
_STATE_NAMES: Final = re.compile(
    r"joint|(?<![a-z])((robot|arm)[_/]states?|qpos|proprio\w*|obs(ervations?)?)$"
)
_SENSORS: Final = re.compile(
    r"(Imu|LaserScan|NavSatFix|LocationFix|MagneticField|Temperature|BatteryState|Range"
    r"|FluidPressure|Illuminance|RelativeHumidity)$"
)
_ACTIONS: Final = re.compile(r"(JointTrajectory(ControllerState)?|AckermannDrive(Stamped)?)$")
# Unless their name says that they were measured.
_COMMANDS: Final = re.compile(
    r"Twist(Stamped)?$|Actuator|JointJog|.*(RobotOutput|Cmds?|Commands?|Ctrl|Setpoint|Target)(Stamped)?$"
)
_ACTION_WORDS: Final = re.compile(
    r"cmd|command|target|desired|goal|traj|setpoint|equilibrium"
    r"|(?<![a-z])(actions?|act|des|refs?|references?|ctrl|set)(?![a-z])"
)
# In a message that says both what is there and what is wanted.
_WANTED: Final = re.compile(r"target|desired|des|command(ed)?|cmd|setpoint|reference|ref")
_THERE: Final = re.compile(r"actual|measured|current|feedback|state")
_ACTION_PARTS: Final = re.compile(r"(.*\.)?(actions?|control|cmd|commands?)(\..*)?")
# The arm or device that a person moves.
_OPERATOR_WORDS: Final = re.compile(
    r"leader|master|gello|teleop|spacemouse|spacenav|joystick|haptic"
    r"|(?<![a-z])(operator|human|quest|oculus|vr)(?![a-z])"
)
_OPERATORS: Final = re.compile(r"R[Cc](In|Channels)|ManualControl\w*|WirelessController")
_REPLY_WORDS: Final = re.compile(r"feedback|reached|result|(?<![a-z])(fb|status|error)(?![a-z])")
_MEASURED_WORDS: Final = re.compile(
    r"odom|state|feedback|measured|actual|estimate|sensor|local|current|filtered|gps|fix|mocap"
    r"|vicon|pose|puppet|follower|slave"
)
_BOOKKEEPING: Final = re.compile(
    r"(?<![a-z])(rewards?|done|success|terminated|truncated|episodes?|steps?|timestamp|seq)(?![a-z])"
)
_COUNTERS: Final = re.compile(
    r"(.*\.)?(\w*timestamp\w*|stamp|seq|tick|ts?|(\w+_)?time|time_\w+|n?sec|nanosec|crc\w*|\w+_dt"
    r"|(\w+_)?(reserved?|id|sequence)|sn|version|bandwidth|(min|max)_\w+|ref_(lat|lon|alt)|fan_\w+)"
    r"|(.*\.)?bms\w*\..*"
)
_CODES: Final = re.compile(
    r"(.*[._])?(mode\d?|state|status|type|kind|flags?|err(or)?|warn(ing)?|code|mask|bits|keys|brake|able"
    r"|lost|count|cmdnum|motorstate|serial_number|rssi)"
)
_STATUS: Final = re.compile(
    r"(Status(Flags)?|Flags|Mode|Report)(Stamped)?$|[/_](status|mode|flags)$"
)
_COORDINATES: Final = re.compile(r"(.*\.)?(lat|lon)(itude)?(_deg)?")
_FIXED: Final = re.compile(r"\[\d+\]")
_MOVED: Final = re.compile(r"(motor|joint|servo|actuator|finger|wheel)\w*", re.I)
_CODED: Final = ("uint8", "int8", "byte", "char")  # beside numbers with fractions
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
        partial: The fields of which each message names some joints alone, or some hold nothing.
        joints: They are one or more arms: joints, or numbers without a meaning of their own.
        commands: Further fields, which say what is wanted: an action where nothing else is one.
    """

    fields: tuple[str, ...] = ()
    role: Role = "other"
    numbers: int = 0
    reason: str = ""
    precise: bool = False
    partial: tuple[str, ...] = ()
    joints: bool = False
    commands: tuple[str, ...] = ()


def kind_of(topic: Topic) -> str:
    """Return the name of a topic's type, without its package."""
    return re.split(r"[/.]", topic.type)[-1]


def why_never(topic: Topic) -> str:
    """Say why nothing is ever taken of a topic of such a type; "" where something may be."""
    if topic.name.endswith("_service_event") or "/_action/" in topic.name:
        return "events of a service"
    return next((why for pattern, why in _NEVER.items() if re.match(pattern, topic.type)), "")


def choose_fields(topic: Topic, bag: Bag) -> TopicChoice:
    """Decide about a topic of a bag; its first message is read only where that is needed."""
    if reason := why_never(topic):
        return TopicChoice(reason=reason)
    decoder, kind = bag.decoder(topic.name), kind_of(topic)
    if kind in _TRANSFORMS:
        return _moving_frames(topic, bag)
    leaves = decoder.fields()
    kept = {path for path, text in leaves.items() if _is_measured(path, text)}
    kept -= {path for path in kept if "int" in leaves[path] and _CODES.fullmatch(path)}
    known = _FIELDS.get(kind, ())
    fixed = _fixed_lists(topic, leaves, bag)
    items = {path: _of_items(path, leaves) for path in sorted(fixed)}
    measured = kept | {path for path in leaves if path.partition("[0].")[0] in fixed}
    if any(leaves[path].startswith("float") for path in measured):  # small ones are codes then
        kept = {path for path in kept if leaves[path] not in _CODED}
    small = [path for path, text in leaves.items() if _SMALL.match(text)]
    lists = [path for path in leaves if "[0]." in path and not path.startswith("layout.")]
    if not kept and not known and not fixed and kind not in _LISTS:
        if lists:
            return TopicChoice(reason="numbers in a list of messages alone")
        return TopicChoice(reason="bytes, not numbers" if small else "no numbers")

    def holding_numbers(data: Data) -> Data:
        if not any(_count(decoder, data, path) for path in (*kept, *fixed)):
            raise DataError("its numbers are empty")
        return bytes(data)

    data = first_message(bag, topic.name)
    with suppress(DataError):
        data = of_first_usable(bag, topic.name, data, holding_numbers, _NAMED)
    # A field of fixed length is one of several: position, q and velocity of an odometry.
    firsts = [path for path in _FIRST_OF if path in kept and not _FIXED.search(leaves[path])]
    one = _ONE_THING.match(topic.type) or _ACTIONS.match(kind)
    messages = [data]
    chosen = next((path for path in firsts if _count(decoder, data, path)), "")
    needed = {chosen} if chosen and one else _beside(chosen, kept)
    if len(data) <= _LARGE and not all(_count(decoder, data, path) for path in needed):
        # What is empty at first may speak later.
        messages += [bytes(each) for each in _sample(topic, bag) if len(each) <= _LARGE]

    def count_of(path: str) -> int:
        return max(_count(decoder, each, path) for each in messages)

    if kind in _LISTS:
        path, reason = _LISTS[kind]
        count = _count(decoder, data, path)
        return TopicChoice((path,) if count else (), "state", count, reason)
    large = bool(small) and len(data) > _LARGE
    large = large or any(_count(decoder, data, path) > _MOST_BYTES for path in small)
    grown = () if large else [path for path in small if "int8[]" in leaves[path]]
    if large or any(len(seen - {0}) > 1 for seen in _counts(topic, bag, grown).values()):
        return TopicChoice(reason="bytes, and numbers that describe them")
    codes = all(re.match(r"u?int", leaves[path]) for path in kept)
    if kept and codes and lists and not fixed:
        return TopicChoice(reason="a list of messages, and numbers that describe it")
    is_status = _STATUS.search(kind) or _STATUS.search(topic.name)
    if kept and codes and is_status and not fixed and not _MOVED.match(kind):
        return TopicChoice(reason="codes of a status")
    chosen = next((path for path in firsts if count_of(path)), "")
    fields = tuple(_within(decoder, count_of, _beside(chosen, kept), items))
    if chosen and (one or len(fields) > _MOST_FIELDS):
        fields = (chosen,)
    fields = tuple(path for path in known if count_of(path)) or fields
    fields = tuple(path for path in fields if not _is_unset(topic, bag, decoder, data, path))
    lists = [
        path
        for path in fields
        if any(
            f"{leaf}.".startswith(f"{path}.") and text.endswith("[]")
            for leaf, text in leaves.items()
        )
    ]
    counts = _counts(topic, bag, [it for it in lists if not decoder.names(data, it)])
    changing = {path: seen - {0} for path, seen in counts.items() if len(seen - {0}) > 1}
    fields = tuple(path for path in fields if path not in changing)
    if changing and not fields:
        path, seen = changing.popitem()
        return TopicChoice(reason=f"{path} has {min(seen)} to {max(seen)} numbers, by turns")
    numbers = sum(map(count_of, fields))
    if not numbers:
        for path in kept:
            decoder.vector(data, path)  # raises the reason, where it cannot be read
        return TopicChoice(reason="its numbers are empty")
    for count, most, what in (
        (numbers, _MOST_NUMBERS, "numbers"),
        (len(fields), _MOST_FIELDS, "fields"),
    ):
        if count > most:
            return TopicChoice(reason=f"{count} {what} are too many to guess")
    precise = any(_COORDINATES.fullmatch(path) for path in kept)
    if numbers == 1 and _BOOKKEEPING.search(topic.name.lower()):
        return TopicChoice(fields, "other", 1, "a reward or a counter, nothing to observe")
    role = _role(topic)
    wanted = _commanded({path: count_of(path) for path in fields})
    if role != "action":
        wanted |= {path for path in fields if _ACTION_PARTS.fullmatch(path)}
    commands = tuple(path for path in fields if path in wanted)
    fields = tuple(path for path in fields if path not in wanted)
    if role == "action" or not fields:
        role, fields, commands = "action", commands or fields, ()
    partial = [path for path, seen in counts.items() if {0} < seen and not decoder.has_names(path)]
    if "Joint" in kind and _come_apart(topic, bag, fields[0]):
        partial = [*fields]
    joints = re.search("Joint|Array|Float", kind) is not None
    return TopicChoice(fields, role, numbers, "", precise, tuple(partial), joints, commands)


def _commanded(fields: dict[str, int]) -> set[str]:
    """Return the fields that say what is wanted, of a message that says what is there as well."""
    words = {path: re.split(r"[._]", path) for path in fields}
    there = [[w for w in parts if not _THERE.fullmatch(w)] for parts in words.values()]
    wanted = {
        word
        for parts in words.values()
        for word in parts
        if _WANTED.fullmatch(word) and [w for w in parts if w != word] in there
    }
    found = {path for path, parts in words.items() if wanted.intersection(parts)}
    # "target" beside as many numbers of another name.
    alone = {path for path in fields if _WANTED.fullmatch(path)} - found
    return found | {path for path in alone if [*fields.values()].count(fields[path]) > 1}


def _come_apart(topic: Topic, bag: Bag, path: str) -> bool:
    """Tell whether the messages name other joints: of an arm and of its gripper, by turns.

    Or none at first, as a driver that waits for its robot.
    """
    decoder = bag.decoder(topic.name)
    sample = {topic.name: np.arange(min(topic.count, _NAMED))}
    named = {
        frozenset(decoder.names(m.data, path) if _count(decoder, m.data, path) else ())
        for m in bag.read([topic.name], sample)
    }
    return len(named) > 1


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
    """Return what of a topic that is left out could be had: numbers that are always as many."""
    decoder = bag.decoder(topic.name)
    if kind_of(topic) in _TRANSFORMS:
        first = first_message(bag, topic.name)
        return tuple(dict.fromkeys(decoder.transforms.pairs(first)))[:_MOST_FIELDS]
    leaves = decoder.fields()
    if any(_SMALL.match(text) for text in leaves.values()):
        return ()  # the rest describes the bytes
    paths = [path for path, text in leaves.items() if _is_number(path, text) or text == "bool"]
    if kind_of(topic) in _LISTS:
        paths = [_LISTS[kind_of(topic)][0]]
    counts = _counts(topic, bag, paths)
    always = [path for path in paths if len(counts[path]) == 1]
    return tuple(path for path in always if 0 < max(counts[path]) <= _MOST_NUMBERS)[:_MOST_FIELDS]


def first_message(bag: Bag, topic: str) -> Data:
    """Return the first message of a topic."""
    return bag.first_messages([topic])[topic].data  # a copy: a view would keep its chunk


def of_first_usable(
    bag: Bag, topic: str, first: Data, read: Callable[[Data], _Found], most: int = _PICTURES
) -> _Found:
    """Return what the first message holds, or the next that holds it: drivers begin with nothing.

    Raises:
        DataError: The first messages do not; why the first does not.
    """
    try:
        return read(first)
    except DataError as error:
        few = np.arange(1, min(bag.topics[topic].count, most))
        for message in bag.read([topic], {topic: few}) if len(few) else ():
            with suppress(DataError):
                return read(message.data)
        raise error


def _role(topic: Topic) -> Role:
    kind = kind_of(topic)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", topic.name).lower()
    measured = _MEASURED_WORDS.search(name) or _MEASURED_WORDS.search(kind.lower())
    if _OPERATORS.fullmatch(kind):
        return "operator"
    if _ACTIONS.match(kind):
        return "action"
    if not _SENSORS.match(kind):
        says_command = _ACTION_WORDS.search(name) or (_COMMANDS.match(kind) and not measured)
        if says_command and not _REPLY_WORDS.search(name):
            return "action"
        if _OPERATOR_WORDS.search(name) or kind == "Joy":
            return "operator"
    return "state" if _STATES.search(kind) or _STATE_NAMES.search(name) else "other"


def _is_number(path: str, text: str) -> bool:
    """Tell whether a field is one to keep: no stamp, flag, variance, or list of messages."""
    if "variance" in path or path.startswith(("header.", "layout.")) or ".header." in path:
        return False
    if text.startswith(("time", "duration", "bool")) or _SMALL.match(text):
        return False
    return "[0]." not in path or path == "points[0].positions"


def _is_measured(path: str, text: str) -> bool:
    """Tell whether a number is one that a learner could want: no counter of time or messages."""
    return _is_number(path, text) and not _COUNTERS.fullmatch(path)


def _fixed_lists(topic: Topic, leaves: dict[str, str], bag: Bag) -> set[str]:
    """Return the lists of messages that are always as long: the motors of a robot."""
    text = topic.definition if isinstance(topic.definition, str) else ""
    fixed = set()
    for path in {path.partition("[0].")[0] for path in leaves if "[0]." in path}:
        written = re.search(rf"^\s*(\S+)\[(\d*)\]\s+{re.escape(path)}\b", text, re.M)
        kind = written[1].rpartition("/")[2] if written else ""
        moved = _MOVED.fullmatch(path) or _MOVED.fullmatch(kind)
        if (written and written[2]) or (moved and _is_always_as_long(topic, bag, path)):
            fixed.add(path)
    return fixed


def _of_items(path: str, leaves: dict[str, str]) -> tuple[str, ...]:
    """Return what to take of the items of a list: where its motors are, or all they measure."""
    inside = {
        leaf.removeprefix(f"{path}[0]."): text
        for leaf, text in leaves.items()
        if leaf.startswith(f"{path}[0].")
    }
    kept = {leaf for leaf, text in inside.items() if _is_measured(leaf, text)}
    kept -= {leaf for leaf in kept if "int" in inside[leaf] and _CODES.fullmatch(leaf)}
    if any(inside[leaf].startswith("float") for leaf in kept):
        kept = {leaf for leaf in kept if inside[leaf] not in _CODED}
    chosen = next((leaf for leaf in _FIRST_OF if leaf in kept), "")
    kept = {chosen} if chosen else kept
    if len(kept) == len(inside):
        return (path,)
    return tuple(f"{path}.{leaf}" for leaf in inside if leaf in kept)


def _is_always_as_long(topic: Topic, bag: Bag, path: str) -> bool:
    counts = _counts(topic, bag, [path])[path]
    return len(counts) == 1 and 0 not in counts


def _counts(topic: Topic, bag: Bag, paths: Sequence[str]) -> dict[str, set[int]]:
    """Return how many numbers some messages have at each path."""
    decoder = bag.decoder(topic.name)
    counts: dict[str, set[int]] = {path: set() for path in paths}
    for data in _sample(topic, bag) if paths else ():
        for path, seen in counts.items():
            # A list of 100 MB would be 800 MB of numbers, to be counted.
            seen.add(len(data) if len(data) > _LARGE else _count(decoder, data, path))
    return counts


def _beside(chosen: str, kept: set[str]) -> set[str]:
    """Return the numbers that are taken beside positions: a gripper, but not what moves along."""
    if not chosen:
        return kept
    return {path for path in kept if path == chosen or not _DERIVED.fullmatch(path)}


def _is_unset(topic: Topic, bag: Bag, decoder: Decoder, data: Data, path: str) -> bool:
    """Tell whether a field is not used: a covariance of -1 says so, and NaN in all messages."""
    variance = f"{path}_covariance"
    if variance in decoder.fields() and decoder.vector(data, variance)[:1].tolist() == [-1]:
        return True
    if not np.isnan(decoder.vector(data, path)).all():
        return False
    return all(np.isnan(decoder.vector(each, path)).all() for each in _sample(topic, bag))


def _sample(topic: Topic, bag: Bag) -> Iterator[Data]:
    """Yield some messages of a topic, from its first to its last."""
    places = np.unique(np.linspace(0, topic.count - 1, _SAMPLE).astype(np.int64))
    return (message.data for message in bag.read([topic.name], {topic.name: places}))


def _within(
    decoder: Decoder,
    count_of: Callable[[str], int],
    kept: set[str],
    lists: dict[str, tuple[str, ...]],
    prefix: str = "",
) -> Iterator[str]:
    """Yield the fewest fields that hold these numbers and no others: whole sub-messages first."""
    leaves = [path for path in decoder.fields() if path.startswith(prefix)]
    for name in dict.fromkeys(path[len(prefix) :].split(".")[0] for path in leaves):
        path = (prefix + name).removesuffix("[0]")
        if path in kept or path in lists:
            yield from (one for one in lists.get(path, (path,)) if count_of(one))
            continue
        inside = {leaf for leaf in kept if leaf.startswith(f"{path}.")}
        if not inside:
            continue
        numbers = sum(map(count_of, inside))
        if numbers and count_of(path) == numbers:
            yield path
        else:
            yield from _within(decoder, count_of, kept, lists, f"{path}.")


def _count(decoder: Decoder, data: Data, path: str) -> int:
    try:
        return len(decoder.vector(data, path))
    except DataError:
        return 0
