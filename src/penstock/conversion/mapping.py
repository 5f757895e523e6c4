"""What a dataset is made of: topics and fields to features, as data and as a YAML file.

    fps: 30
    timeline: /cam_h/color/image_raw/compressed     # or a rate: 30
    features:
      observation.state:
        topic: /joint_states
        field: position
      observation.images.head:
        topic: /cam_h/color/image_raw/compressed
        kind: color

A mapping holds no code and no path of a file; `to_json` is all of it, and a run that resumes
compares it with that of the first one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal

from penstock.conversion.align import Align
from penstock.errors import UsageError
from penstock.ui.suggestions import did_you_mean

Clock = Literal["bag", "header"]
GapPolicy = Literal["drop", "split", "hold", "flag"]
Missing = Literal["drop", "hold", "fail"]
NonFinite = Literal["keep", "hold", "fail"]
BadPictures = Literal["hold", "fail"]
Kind = Literal["color", "depth"]
Codec = Literal["h264", "av1", "copy", "png", "depth12", "grey8"]

COLOR_CODECS: Final = ("h264", "av1", "copy", "png")
DEPTH_CODECS: Final = ("depth12", "grey8")
AUTO_NAMES: Final = frozenset(
    ("timestamp", "frame_index", "episode_index", "index", "task_index", "task")
)
GAP_FLAG: Final = "observation.gap"
STAMP: Final = "observation.stamp"
# So that the datasets of earlier versions go on with the settings that they were begun with.
_ADDED_LATER: Final = frozenset(
    ("episodes", "tasks", "table", "joints", "exclude", "offset", "window", "dtype", "stamps")
) | {"partial"}
_FEATURE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def at_least(least: float, default: Any) -> Any:
    """Return a field of a dataclass whose number has a least value; see `check_limits`."""
    return field(default=default, metadata={"least": least})


def check_limits(record: Any, section: str = "") -> None:
    """Refuse numbers below the least value of their field."""
    for entry in fields(record):
        value, least = getattr(record, entry.name), entry.metadata.get("least")
        if least is not None and value is not None and value < least:
            raise UsageError(f"{section}{entry.name} is {value}: give at least {least}")


@dataclass(frozen=True, slots=True)
class Source:
    """Some numbers of one topic.

    Attributes:
        topics: Names to try; the first one that the bag has messages of is taken.
        field: Path of the field within the message, such as "position" or "joint_data.joint_q";
            "parent>child" is the transform between two frames (in a file: frame: [parent, child]).
        select: First and one-past-last place within the field; None takes all.
        joints: Only the numbers that the message names like this, such as "arm_*" (in a file:
            field: position[arm_*]).
        exclude: Not the numbers that the message names like this.
        partial: Each message names some of the joints alone: what was last said of each counts.
            Of a type without names, messages that hold no numbers are passed over.
        scale: Factor.
        offset: Added after the factor.
        threshold: Instead of a factor: 1 above this value, 0 otherwise.
        relative_start: Subtract the value of the episode's first frame.
        delta: Subtract what `Vector.delta_from` has at the same place.
        fill_gaps: (longest usual time between two messages in s, value) - frames within a longer
            hole of the topic get the value.
        flag_gaps: Instead of numbers: 1.0 within a hole of the topic longer than this many
            seconds, 0.0 elsewhere.
        tolerance_s: Instead of that of the vector.
        otherwise: What to take from a bag that has no message of any of the topics.
    """

    topics: tuple[str, ...]
    field: str = ""
    select: tuple[int, int] | None = None
    joints: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    partial: bool = False
    scale: float = 1.0
    offset: float = 0.0
    threshold: float | None = None
    relative_start: bool = False
    delta: bool = False
    fill_gaps: tuple[float, float] | None = None
    flag_gaps: float | None = None
    tolerance_s: float | None = None
    otherwise: Source | None = None


@dataclass(frozen=True, slots=True)
class Vector:
    """A feature of numbers, joined from its sources in their order.

    Attributes:
        sources: Where the numbers come from.
        names: One per number; None leaves them unnamed.
        names_key: Puts the names under a key, as {"motors": [...]}.
        align: How a frame finds its message.
        tolerance_s: How far a message may lie from its frame; None is 1.5 periods of the topic or
            one of the frames, whichever is longer; 0 is no limit within the recording.
        missing: What a frame without a message does: "drop" the frame, "hold" the last value, or
            "fail" the bag.
        delta_from: The feature that sources with `delta` are relative to.
        window: So many messages up to the one of the frame, the oldest first, for topics faster
            than the frames: rows of [window, numbers].
        dtype: "float32", or "float64" for numbers that need it, such as GPS.
    """

    sources: tuple[Source, ...]
    names: tuple[str, ...] | None = None
    names_key: str | None = None
    align: Align = "nearest"
    tolerance_s: float | None = at_least(0, None)
    missing: Missing = "drop"
    delta_from: str | None = None
    window: int | None = None
    dtype: Literal["float32", "float64"] | None = None

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of its sources, without those that stand in for them."""
        return tuple(topic for source in self.sources for topic in source.topics)


@dataclass(frozen=True, slots=True)
class Camera:
    """A feature of pictures.

    Attributes:
        topics: Names to try; the first one that the bag has messages of is taken.
        kind: "color" or "depth".
        resize: Width and height; None keeps those of the first picture.
        codec: Instead of the mapping's.
        depth_range_mm: What black and white mean with the codec grey8.
        align: "nearest" or "hold".
        tolerance_s: As for a vector.
        missing: As for a vector.
    """

    topics: tuple[str, ...]
    kind: Kind = "color"
    resize: tuple[int, int] | None = None
    codec: Codec | None = None
    depth_range_mm: tuple[float, float] = (0.0, 1500.0)
    align: Align = "nearest"
    tolerance_s: float | None = at_least(0, None)
    missing: Missing = "drop"


@dataclass(frozen=True, slots=True)
class Events:
    """A topic that tells where episodes begin; what lies outside of them is left out.

    Attributes:
        topic: Its name. That of a recorded service (".../_service_event") begins one by each call.
        field: A flag or number: an episode lasts for as long as it is above 0.5. A text: see
            `begin`. None: each message begins an episode, which lasts to the next.
        begin: Texts that begin an episode, such as "start*".
        end: Texts that end it; None lets it last to the next.
    """

    topic: str
    field: str = ""
    begin: str | None = None
    end: str | None = None


@dataclass(frozen=True, slots=True)
class Tasks:
    """What the robot does, in words, by bag or by episode; one of these.

    Attributes:
        topic: The text last said there when an episode begins, or first said in it.
        field: Of its messages.
        name: What the name of the bag is like, such as "{task}_*"; "_" becomes a space.
        folder: The name of the folder that the bag lies in; "_" becomes a space.
    """

    topic: str | None = None
    field: str = "data"
    name: str | None = None
    folder: bool = False


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table of episodes and tasks.

    Attributes:
        bag: The name of the bag, with or without its ending or folders; "" for any.
        start_s: When an episode begins, from the start of the recording, or from 1970.
        end_s: When it ends; None for the start of the next.
        task: What the robot does; "" leaves that to the rest of the mapping.
    """

    bag: str = ""
    start_s: float | None = None
    end_s: float | None = None
    task: str = ""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Everything that decides what the dataset holds.

    Attributes:
        fps: Frames per second of the dataset.
        features: By name, in the order of the dataset.
        timeline: The topic whose messages are the frames; None takes the camera with the most
            pictures, or a fixed rate where there is no camera; "rate" is a fixed rate, `fps`.
        timeline_hz: Nominal rate of that topic; None measures it.
        clock: "bag" (when the recorder received a message) or "header" (its stamp).
        gap: What a hole of the timeline longer than `hold_s` does: "drop" its frames, "split" the
            episode, "hold" the last picture, or hold and "flag" it in `observation.gap`.
        hold_s: A hole of the timeline up to this is bridged by the last picture.
        drop_ends: Messages of the timeline to leave out at both ends.
        split_frames: Longest episode; a longer one is split.
        codec: For colour pictures: h264, av1, copy or png.
        depth_codec: For depth pictures: depth12 or grey8.
        task: What the robot does, for the learner.
        episodes: The topic that tells where episodes begin; None for one per bag.
        tasks: Where the task of each bag or episode comes from; None for `task`.
        table: Episodes and tasks by bag.
        robot_type: Name of the robot.
        stamps: Adds the feature `observation.stamp`: when each frame was recorded, in seconds from
            1970, beside the nominal `timestamp`.
        window_frames: Frames that are put together before they are written.
        nonfinite: What NaN and infinity do: "keep" them and say so, "hold" the last finite value
            of the field, or "fail" the bag.
        bad_pictures: What a picture that cannot be decoded does: "hold" the one before, or "fail"
            the bag.
    """

    fps: int
    features: dict[str, Vector | Camera]
    timeline: str | None = None
    timeline_hz: float | None = at_least(1e-3, None)
    clock: Clock = "bag"
    gap: GapPolicy = "drop"
    hold_s: float = at_least(0, 0.2)
    drop_ends: int = at_least(0, 0)
    split_frames: int | None = at_least(1, None)
    codec: Codec = "h264"
    depth_codec: Codec = "depth12"
    task: str = "task"
    episodes: Events | None = None
    tasks: Tasks | None = None
    table: tuple[TableRow, ...] = ()
    robot_type: str = "unknown"
    stamps: bool = False
    window_frames: int = at_least(1, 1000)
    nonfinite: NonFinite = "keep"
    bad_pictures: BadPictures = "hold"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def vectors(self) -> dict[str, Vector]:
        """The features of numbers."""
        return {k: v for k, v in self.features.items() if isinstance(v, Vector)}

    @property
    def cameras(self) -> dict[str, Camera]:
        """The features of pictures."""
        return {k: v for k, v in self.features.items() if isinstance(v, Camera)}

    @property
    def topics(self) -> set[str]:
        """All topics that it names."""
        named = {topic for feature in self.features.values() for topic in feature.topics}
        told = [part.topic for part in (self.episodes, self.tasks) if part and part.topic]
        return named | set(told)

    def codec_of(self, camera: Camera) -> Codec:
        """Return the codec of a camera: its own, or that of its kind."""
        if camera.codec is not None:
            return camera.codec
        return self.depth_codec if camera.kind == "depth" else self.codec

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values; what was added later only where it is used."""
        content: dict[str, Any] = _plain(asdict(self))
        for name, feature in self.features.items():
            content["features"][name]["feature"] = (
                "camera" if isinstance(feature, Camera) else "vector"
            )
        return content


def options(source: Source) -> Iterator[Source]:
    """Yield a source and those that stand in for it, in the order they are tried."""
    option: Source | None = source
    while option is not None:
        yield option
        option = option.otherwise


def _check(mapping: Mapping) -> None:
    if mapping.fps < 1:
        raise UsageError(f"fps is {mapping.fps}: give at least 1")
    check_limits(mapping)
    for key, codec, codecs in (
        ("codec", mapping.codec, COLOR_CODECS),
        ("depth_codec", mapping.depth_codec, DEPTH_CODECS),
    ):
        if codec not in codecs:
            raise UsageError(f"{key} is {codec!r}: {did_you_mean(codec, codecs)}")
    if mapping.episodes is not None and any(row.start_s is not None for row in mapping.table):
        raise UsageError("episodes and a table with times exclude each other: choose one")
    events = mapping.episodes
    if events and (events.begin or events.end) and not (events.begin and events.field):
        raise UsageError("episodes: begin and end are texts of a field: give field and begin")
    if mapping.tasks is not None:
        ways = (mapping.tasks.topic, mapping.tasks.name, mapping.tasks.folder or None)
        if sum(way is not None for way in ways) != 1:
            raise UsageError("tasks: give one of topic, name and folder")
        if mapping.tasks.name is not None and mapping.tasks.name.count("{task}") != 1:
            raise UsageError(f"tasks: name is {mapping.tasks.name!r}: put {{task}} into it, once")
    for name, feature in mapping.features.items():
        _check_feature(mapping, name, feature)


def _check_feature(mapping: Mapping, name: str, feature: Vector | Camera) -> None:
    where = f"feature {name!r}"
    if not _FEATURE_NAME.fullmatch(name) or ".." in name:
        raise UsageError(f"{where}: use letters, digits, '_', '-' and single '.', 100 at most")
    if name in AUTO_NAMES or name in (GAP_FLAG, STAMP):
        raise UsageError(f"{where}: this name is made by penstock itself; choose another")
    check_limits(feature, f"{where}: ")
    if isinstance(feature, Camera):
        codecs = DEPTH_CODECS if feature.kind == "depth" else COLOR_CODECS
        codec = mapping.codec_of(feature)
        if codec not in codecs:
            raise UsageError(f"{where}: codec {codec!r}: {did_you_mean(codec, codecs)}")
        if feature.align not in ("nearest", "hold"):
            raise UsageError(f"{where}: pictures cannot be aligned {feature.align!r}: use nearest")
        if feature.resize and not all(2 <= side <= 16384 for side in feature.resize):
            raise UsageError(f"{where}: resize is {list(feature.resize)}: give 2 to 16384")
        if codec == "copy" and feature.resize:
            raise UsageError(
                f"{where}: codec copy keeps the recorded pictures: drop resize, or use h264"
            )
        low, high = feature.depth_range_mm
        if not low < high:
            raise UsageError(f"{where}: depth_range_mm is [{low}, {high}]: give [low, high]")
        return
    for source in (option for first in feature.sources for option in options(first)):
        if not source.topics:
            raise UsageError(f"{where}: a source has no topic: add it")
        if source.select is not None and not 0 <= source.select[0] < source.select[1]:
            raise UsageError(f"{where}: select is {list(source.select)}: give [first, after last]")
        if source.delta and feature.delta_from not in mapping.features:
            raise UsageError(
                f"{where}: delta_from is {feature.delta_from!r}: "
                f"{did_you_mean(feature.delta_from, mapping.vectors)}"
            )
        moved = source.relative_start or source.delta or source.fill_gaps or source.flag_gaps
        if feature.window is not None and moved:
            raise UsageError(f"{where}: a window takes numbers as they are: drop the other keys")
    if feature.window is not None and not 1 <= feature.window <= 10_000:
        raise UsageError(f"{where}: window is {feature.window}: give 1 to 10000 messages")
    if feature.window is not None and feature.align not in ("nearest", "hold"):
        raise UsageError(f"{where}: a window cannot be aligned {feature.align!r}: use hold")
    if feature.align == "slerp" and len(feature.sources) != 1:
        raise UsageError(f"{where}: slerp takes one source of quaternions: split the feature")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _plain(entry) for key, entry in value.items() if entry or key not in _ADDED_LATER
        }
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
