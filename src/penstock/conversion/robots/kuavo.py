"""Kuavo humanoids (Leju): their topics and units, and their own Hydra settings file, unchanged.

The settings file is KuavoRosbag2Lerobot.yaml; docs/kuavo.md explains every key.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from penstock.bags import Bag
from penstock.conversion.mapping import (
    Camera,
    Mapping,
    Source,
    Vector,
    at_least,
    check_limits,
    options,
)
from penstock.conversion.robots import Robot, RobotConfig
from penstock.conversion.settings import build, load_yaml, parse_value
from penstock.errors import UsageError

SENSORS: Final = "/sensors_data_raw"
_JOINT_COMMAND: Final = "/joint_cmd"
_ARM_COMMAND: Final = "/kuavo_arm_traj"
_ARM_COMMAND_SYNCED: Final = "/kuavo_arm_traj_synced"
_WALK_COMMAND: Final = "/cmd_pose_world_synced"
_ARMS_AT: Final = {"4pro": 12, "5": 13, "5w": 4}  # among the joints, by platform
_PLATFORMS: Final = {28: "4pro", 29: "5", 20: "5w"}  # by the number of joints
_COLOR: Final = {
    "head_cam_h": "/cam_h/color/image_raw/compressed",
    "wrist_cam_l": "/cam_l/color/image_raw/compressed",
    "wrist_cam_r": "/cam_r/color/image_raw/compressed",
}
_DEPTH: Final = {
    "depth_h": "/cam_h/depth/image_raw/compressedDepth",
    "depth_l": "/cam_l/depth/image_rect_raw/compressedDepth",
    "depth_r": "/cam_r/depth/image_rect_raw/compressedDepth",
}
_NO_COMMAND: Final = 999.0  # the action of an arm while nobody commands it


@dataclass(frozen=True, slots=True)
class _Effector:
    """Where the values of an end effector are: topic, field, full scale and threshold of closed."""

    state: tuple[str, str, float, float]
    action: tuple[str, str, float, float]
    is_hand: bool = False


_EFFECTORS: Final = {
    "leju_claw": _Effector(
        ("/leju_claw_state", "data.position", 100.0, 50.0),
        ("/leju_claw_command", "data.position", 100.0, 50.0),
    ),
    "rq2f85": _Effector(
        ("/gripper/state", "position", 0.8, 0.4),
        ("/gripper/command", "position", 255.0, 70.0),
    ),
    "qiangnao": _Effector(  # the command has a field for each hand
        ("/dexhand/state", "position", 100.0, 50.0),
        ("/control_robot_hand_position", "{side}_hand_position", 100.0, 50.0),
        is_hand=True,
    ),
}


@dataclass(frozen=True, slots=True)
class RosbagSettings:
    """`rosbag.*`: where the recordings are and the dataset goes."""

    rosbag_dir: str | None = None
    num_used: int | None = at_least(1, None)
    lerobot_dir: str | None = None
    target_dir: str | None = None
    mode: Literal["normal", "resume", "merge"] = "normal"
    lerobot_dir_resume: str | None = None
    lerobot_dir_merge: tuple[str, ...] | None = None
    chunk_size: int = at_least(1, 100)

    def __post_init__(self) -> None:
        check_limits(self, "rosbag.")
        if self.mode == "resume":
            dataset = self.lerobot_dir_resume or "DATASET"
            raise UsageError(
                "rosbag.mode is 'resume': set it to normal, and add to the dataset by "
                f"`penstock convert BAGS {dataset} --append`"
            )
        if self.mode == "merge":
            raise UsageError(
                "rosbag.mode is 'merge': datasets are merged by "
                "lerobot-edit-dataset --operation.type merge, or by penstock edit"
            )


@dataclass(frozen=True, slots=True)
class Size:
    """`dataset.resize.*`: of the pictures."""

    width: int = at_least(2, 640)
    height: int = at_least(2, 480)

    def __post_init__(self) -> None:
        check_limits(self, "dataset.resize.")


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """`dataset.*`: what the dataset holds."""

    platform_type: Literal["4pro", "5", "5w"] = "4pro"
    only_arm: bool = True
    eef_type: Literal["rq2f85", "leju_claw", "qiangnao"] = "rq2f85"
    which_arm: Literal["left", "right", "both"] = "both"
    use_depth: bool = False
    depth_range: tuple[float, float] = (0, 1000)
    task_description: str | None = "Pick and Place Task"
    train_hz: int = at_least(1, 10)
    main_timeline: (
        Literal["head_cam_h", "wrist_cam_l", "wrist_cam_r", "head_cam_l", "head_cam_r"] | None
    ) = None
    main_timeline_fps: int = at_least(1, 30)
    sample_drop: int = at_least(0, 0)
    dex_dof_needed: Literal[1, 2, 6] = 1
    is_binary: bool = False
    delta_action: bool = False
    relative_start: bool = False
    resize: Size = field(default_factory=Size)

    def __post_init__(self) -> None:
        check_limits(self, "dataset.")
        if self.depth_range[0] >= self.depth_range[1]:
            raise UsageError(
                f"dataset.depth_range is {list(self.depth_range)}: give [nearest, farthest] in "
                "millimetres"
            )

    @property
    def sides(self) -> tuple[str, ...]:
        """The arms that are used."""
        return ("left", "right") if self.which_arm == "both" else (self.which_arm,)

    @property
    def oldest_s(self) -> float:
        """How old a sensor's value may be: one frame, at least 0.1 s."""
        return max(0.1, 1 / self.train_hz)

    @property
    def longest_pause_s(self) -> float:
        """Beyond this, nobody commands the arms."""
        return 0.15 * 10 / self.train_hz


@dataclass(frozen=True, slots=True)
class KuavoSettings:
    """All of the settings file."""

    rosbag: RosbagSettings = field(default_factory=RosbagSettings)
    dataset: DatasetSettings = field(default_factory=DatasetSettings)


def load_config(path: Path, words: Sequence[str] = ()) -> RobotConfig:
    """Read the settings file, with `key=value` words on top.

    Raises:
        UsageError: A key or value is wrong; says which, and what was probably meant.
    """
    content: dict[str, Any] = {
        key: value
        for key, value in load_yaml(path).items()
        if key not in ("hydra", "defaults") and value is not None
    }
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"{word!r} is not a setting: write key=value")
        *sections, name = key.lstrip("+").split(".")
        inner = content
        for section in sections:
            inner[section] = dict(inner.get(section) or {})
            inner = inner[section]
        inner[name] = parse_value(text)
    dataset = content.get("dataset")
    if isinstance(dataset, dict) and "platform_type" in dataset:
        content["dataset"] = {**dataset, "platform_type": str(dataset["platform_type"]).lower()}
    settings = build(KuavoSettings, content, str(path))
    rosbag = settings.rosbag
    bags = Path(rosbag.rosbag_dir) if rosbag.rosbag_dir else None
    out = bags.parent / rosbag.lerobot_dir / "lerobot" if bags and rosbag.lerobot_dir else None
    if rosbag.target_dir:
        out = Path(rosbag.target_dir) / "lerobot"
    return RobotConfig(to_mapping(settings), bags, out, partial(choose_used, count=rosbag.num_used))


def choose_used(bags: Sequence[Path], count: int | None) -> list[Path]:
    """Draw some of the bags as the robot's own tool does: without replacement, seed 42."""
    if count is None or count >= len(bags):
        return list(bags)
    drawn = np.random.RandomState(42).choice(len(bags), count, replace=False)
    return [bags[k] for k in drawn]


def is_recorded_in(topics: Collection[str]) -> bool:
    """Tell a Kuavo by its sensors, and a command."""
    commands = {_ARM_COMMAND_SYNCED, _ARM_COMMAND, _JOINT_COMMAND}
    return SENSORS in topics and not commands.isdisjoint(topics)


def recorded_mapping(bag: Bag, fps: int) -> Mapping:
    """Return the mapping of a recording, with pictures as they are recorded."""
    topics = {name for name, topic in bag.topics.items() if topic.count}
    first = bag.first_messages([SENSORS])[SENSORS]
    joints = len(bag.decoder(SENSORS).vector(first.data, "joint_data.joint_q"))
    has_left, has_right = (_COLOR[f"wrist_cam_{letter}"] in topics for letter in "lr")
    effectors = [name for name, it in _EFFECTORS.items() if it.state[0] in topics]
    found: dict[str, Any] = {
        "platform_type": _PLATFORMS.get(joints, "4pro"),
        "eef_type": effectors[-1] if effectors else "rq2f85",
        "which_arm": "both" if has_left == has_right else "left" if has_left else "right",
        "use_depth": _DEPTH["depth_h"] in topics,
        "train_hz": fps,
        "main_timeline_fps": fps,
    }
    mapping = to_mapping(KuavoSettings(RosbagSettings(chunk_size=1000), DatasetSettings(**found)))
    features: dict[str, Vector | Camera] = {}
    for name, feature in mapping.features.items():
        if isinstance(feature, Vector):
            features[name] = _recorded(feature, topics)
        elif not topics.isdisjoint(feature.topics):
            features[name] = replace(feature, resize=None)
    return replace(mapping, features=features)


def _recorded(vector: Vector, topics: Collection[str]) -> Vector:
    """Leave out the end effectors that a recording does not have."""
    sources: list[Source] = []
    names: list[str] = []
    at = 0
    for source in vector.sources:
        first, after = source.select or (0, 1)
        if any(topic in topics for option in options(source) for topic in option.topics):
            sources.append(source)
            names += (vector.names or ())[at : at + after - first]
        at += after - first
    return replace(vector, sources=tuple(sources), names=tuple(names))


def to_mapping(settings: KuavoSettings) -> Mapping:
    """Return the mapping that the settings mean."""
    asked = settings.dataset
    features: dict[str, Vector | Camera] = {
        "observation.state": _vector("state", asked),
        "action": _vector("action", asked),
    }
    for letter in ("h", *(side[0] for side in asked.sides)):
        name = "head_cam_h" if letter == "h" else f"wrist_cam_{letter}"
        same: dict[str, Any] = {
            "resize": (asked.resize.width, asked.resize.height),
            "tolerance_s": asked.oldest_s,
        }
        raw = _COLOR[name].removesuffix("/compressed")
        features[f"observation.images.{name}"] = Camera((_COLOR[name], raw), **same)
        if asked.use_depth:
            topic = _DEPTH[f"depth_{letter}"]
            features[f"observation.depth_{letter}"] = Camera(
                (topic, topic.removesuffix("/compressedDepth")),
                kind="depth",
                depth_range_mm=asked.depth_range,
                **same,
            )
    main = asked.main_timeline
    if main is not None and f"observation.images.{main}" not in features:
        used = [name.rpartition(".")[2] for name in features if ".images." in name]
        raise UsageError(
            f"dataset.main_timeline is {main!r}, and which_arm={asked.which_arm} does not use "
            f"that camera: use one of {', '.join(used)}"
        )
    return Mapping(
        fps=asked.train_hz,
        features=features,
        timeline=None if main is None else f"observation.images.{main}",
        timeline_hz=float(asked.main_timeline_fps),
        drop_ends=asked.sample_drop,
        depth_codec="grey8",
        task=asked.task_description or "Pick and Place Task",
        robot_type=f"kuavo{asked.platform_type}",
        window_frames=settings.rosbag.chunk_size,
    )


def _vector(kind: Literal["state", "action"], asked: DatasetSettings) -> Vector:
    """Build state or action: for each side its arm of 7 joints, then its end effector."""
    sources: list[Source] = []
    names: list[str] = []
    for side in asked.sides:
        arm = _arm_command if kind == "action" else _arm_state
        sources += [arm(side, asked), _effector(kind, side, asked)]
        names += [f"zarm_{side[0]}{joint}_link" for joint in range(1, 8)]
        names += _effector_names(side, asked)
    if kind == "action" and not asked.only_arm:
        commands = (_ARM_COMMAND, _ARM_COMMAND_SYNCED, _JOINT_COMMAND)
        sources += [
            Source((_WALK_COMMAND,), "twist.linear", (0, 2)),
            Source((_WALK_COMMAND,), "twist.angular", (2, 3)),
            Source(commands, flag_gaps=asked.longest_pause_s),
        ]
        names += ["cmd_pos_x", "cmd_pos_y", "cmd_pos_yaw", "ctrl_change_cmd"]
    delta = kind == "action" and asked.delta_action
    return Vector(
        tuple(sources),
        tuple(names),
        f"{kind}_names",
        tolerance_s=0.0,
        delta_from="observation.state" if delta else None,
    )


def _arm_state(side: str, asked: DatasetSettings) -> Source:
    """Return the 7 joints of an arm, in radians."""
    at = _ARMS_AT[asked.platform_type] + (0 if side == "left" else 7)
    return Source(
        (SENSORS,),
        "joint_data.joint_q",
        (at, at + 7),
        relative_start=asked.relative_start,
        tolerance_s=asked.oldest_s,
    )


def _arm_command(side: str, asked: DatasetSettings) -> Source:
    """Return the command of an arm in radians: recorded in degrees for the arms alone.

    The synced topic has no pauses; where there is neither, the command of all joints is in radians.
    """
    first = 0 if side == "left" else 7
    at = _ARMS_AT[asked.platform_type] + first
    joints = Source(
        (_JOINT_COMMAND,),
        "joint_q",
        (at, at + 7),
        relative_start=asked.relative_start,
        delta=asked.delta_action,
    )
    command = replace(
        joints,
        topics=(_ARM_COMMAND,),
        field="position",
        select=(first, first + 7),
        scale=math.pi / 180,
        fill_gaps=None if asked.only_arm else (asked.longest_pause_s, _NO_COMMAND),
        otherwise=joints,
    )
    return replace(command, topics=(_ARM_COMMAND_SYNCED,), fill_gaps=None, otherwise=command)


def _effector(kind: Literal["state", "action"], side: str, asked: DatasetSettings) -> Source:
    effector = _EFFECTORS[asked.eef_type]
    topic, path, full, closed = effector.action if kind == "action" else effector.state
    first = 0 if side == "left" or "{side}" in path else 6 if effector.is_hand else 1
    return Source(
        (topic,),
        path.format(side=side),
        (first, first + (asked.dex_dof_needed if effector.is_hand else 1)),
        scale=1.0 if asked.is_binary else 1 / full,
        threshold=closed if asked.is_binary else None,
    )


def _effector_names(side: str, asked: DatasetSettings) -> Iterator[str]:
    if not _EFFECTORS[asked.eef_type].is_hand:
        yield f"{side}_claw"
        return
    for joint in range(asked.dex_dof_needed):
        yield f"{side}_qiangnao_{joint + 1}"


ROBOT: Final = Robot("Kuavo", is_recorded_in, recorded_mapping, load_config=load_config)
