"""Kuavo humanoids: the robot's own Hydra settings file, unchanged, as a mapping.

The settings (their file is KuavoRosbag2Lerobot.yaml; every key, with its default here):

rosbag.rosbag_dir            folder of the bags, in the order of their names
rosbag.num_used      null    use only so many, drawn without replacement (seed 42)
rosbag.lerobot_dir           the dataset goes to <rosbag_dir>/../<lerobot_dir>/lerobot
rosbag.target_dir            newer files: the dataset goes to <target_dir>/lerobot
rosbag.mode          normal  newer files: resume and merge are refused, with what to do instead
rosbag.lerobot_dir_resume    of the mode resume
rosbag.lerobot_dir_merge     of the mode merge
rosbag.chunk_size    100     frames that are put together before they are written
dataset.platform_type 4pro   4pro, 5 or 5w: where the arms are among the joints
dataset.only_arm     true    false adds the walking command and ctrl_change_cmd to the action
dataset.eef_type     rq2f85  rq2f85, leju_claw or qiangnao
dataset.which_arm    both    left, right or both; chooses the wrist cameras too
dataset.use_depth    false   depth pictures of the same cameras
dataset.depth_range  [0, 1000]  millimetres that black and white mean
dataset.task_description
dataset.train_hz     10      frames per second of the dataset
dataset.main_timeline        the camera whose pictures are the frames; null: the one with the most
dataset.main_timeline_fps 30 its rate
dataset.sample_drop  0       its pictures to leave out at both ends
dataset.dex_dof_needed 1     joints per dexterous hand: 1, 2 or 6
dataset.is_binary    false   end effectors as 0 or 1
dataset.delta_action false   arm action minus arm state
dataset.relative_start false arm state and action minus those of the first frame
dataset.resize.width/height  of the pictures
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.conversion.mapping import (
    Camera,
    Mapping,
    Source,
    Vector,
    options,
)
from penstock.conversion.settings import load_yaml, parse_value
from penstock.errors import UsageError
from penstock.ui.suggestions import did_you_mean

_ARMS_AT: Final = {"4pro": 12, "5": 13, "5w": 4}
_COLOR: Final = {
    "head_cam_h": "/cam_h/color/image_raw/compressed",
    "wrist_cam_l": "/cam_l/color/image_raw/compressed",
    "wrist_cam_r": "/cam_r/color/image_raw/compressed",
    "head_cam_l": "/zedm/zed_node/left/image_rect_color/compressed",
    "head_cam_r": "/zedm/zed_node/right/image_rect_color/compressed",
}
_DEPTH: Final = {
    "depth_h": "/cam_h/depth/image_raw/compressedDepth",
    "depth_l": "/cam_l/depth/image_rect_raw/compressedDepth",
    "depth_r": "/cam_r/depth/image_rect_raw/compressedDepth",
}
SENSORS: Final = "/sensors_data_raw"
_JOINTS: Final = {28: "4pro", 29: "5", 20: "5w"}  # the platform by its number of joints
_ARM_COMMAND: Final = "/kuavo_arm_traj"
_ARM_COMMAND_SYNCED: Final = "/kuavo_arm_traj_synced"
_NO_COMMAND: Final = 999.0  # the action of an arm while nobody commands it


@dataclass(frozen=True, slots=True)
class _Effector:
    """Where the values of an end effector are, and what full scale and "closed" mean."""

    state: tuple[str, str]
    action: tuple[str, ...]
    state_scale: tuple[float, float]
    action_scale: tuple[float, float]


# (topic, field[, field of the right side]) and (full scale, threshold)
_EFFECTORS: Final = {
    "leju_claw": _Effector(
        ("/leju_claw_state", "data.position"),
        ("/leju_claw_command", "data.position"),
        (100.0, 50.0),
        (100.0, 50.0),
    ),
    "rq2f85": _Effector(
        ("/gripper/state", "position"), ("/gripper/command", "position"), (0.8, 0.4), (255.0, 70.0)
    ),
    "qiangnao": _Effector(
        ("/dexhand/state", "position"),
        ("/control_robot_hand_position", "left_hand_position", "right_hand_position"),
        (100.0, 50.0),
        (100.0, 50.0),
    ),
}

_DEFAULTS: Final[dict[str, Any]] = {
    "rosbag.rosbag_dir": None,
    "rosbag.num_used": None,
    "rosbag.lerobot_dir": None,
    "rosbag.target_dir": None,
    "rosbag.mode": "normal",
    "rosbag.lerobot_dir_resume": None,
    "rosbag.lerobot_dir_merge": None,
    "rosbag.chunk_size": 100,
    "dataset.platform_type": "4pro",
    "dataset.only_arm": True,
    "dataset.eef_type": "rq2f85",
    "dataset.which_arm": "both",
    "dataset.use_depth": False,
    "dataset.depth_range": [0, 1000],
    "dataset.task_description": "Pick and Place Task",
    "dataset.train_hz": 10,
    "dataset.main_timeline": None,
    "dataset.main_timeline_fps": 30,
    "dataset.sample_drop": 0,
    "dataset.dex_dof_needed": 1,
    "dataset.is_binary": False,
    "dataset.delta_action": False,
    "dataset.relative_start": False,
    "dataset.resize.width": 640,
    "dataset.resize.height": 480,
}
_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "rosbag.mode": ("normal", "resume", "merge"),
    "dataset.platform_type": tuple(_ARMS_AT),
    "dataset.eef_type": tuple(_EFFECTORS),
    "dataset.which_arm": ("left", "right", "both"),
    "dataset.dex_dof_needed": (1, 2, 6),
    "dataset.main_timeline": (None, *_COLOR),
}
_AT_LEAST: Final = {
    "rosbag.num_used": 1,
    "rosbag.chunk_size": 1,
    "dataset.train_hz": 1,
    "dataset.main_timeline_fps": 1,
    "dataset.sample_drop": 0,
    "dataset.resize.width": 2,
    "dataset.resize.height": 2,
}
_FLAGS: Final = tuple(key for key, value in _DEFAULTS.items() if isinstance(value, bool))
_IGNORED: Final = ("hydra", "defaults")


@dataclass(frozen=True, slots=True)
class Kuavo:
    """The settings of one conversion.

    Attributes:
        bags: The folder of the bags, if the settings name one.
        out: Where the dataset goes, if they name that.
        num_used: How many of the bags to use; None for all.
        mapping: What the dataset holds.
    """

    bags: Path | None
    out: Path | None
    num_used: int | None
    mapping: Mapping


def load_kuavo(path: Path, overrides: Sequence[str] = ()) -> Kuavo:
    """Read the settings file of a Kuavo, with `key=value` words on top.

    Raises:
        UsageError: A key or value is wrong; says which, and what was probably meant.
    """
    settings = dict(_DEFAULTS)
    _merge(settings, load_yaml(path), str(path))
    for word in overrides:
        key, equals, text = word.partition("=")
        key = key.lstrip("+")
        if not equals:
            raise UsageError(f"{word!r} is not a setting: write key=value")
        _set(settings, key, parse_value(text), "the command")
    return from_settings(settings)


def is_kuavo(topics: Collection[str]) -> bool:
    """Tell a Kuavo by the topics that its recording speaks of: its sensors, and a command."""
    commands = (_ARM_COMMAND_SYNCED, _ARM_COMMAND, "/joint_cmd")
    return SENSORS in topics and any(command in topics for command in commands)


def guess(topics: Collection[str], joints: int, fps: int) -> Mapping:
    """Return the mapping for a recording that has these topics.

    Args:
        topics: Those with messages.
        joints: How many the robot has; tells the platform.
        fps: Frames per second.
    """
    settings = dict(_DEFAULTS)
    settings["dataset.platform_type"] = _JOINTS.get(joints, "4pro")
    settings["rosbag.chunk_size"] = 1000
    settings["dataset.train_hz"] = settings["dataset.main_timeline_fps"] = fps
    for name, effector in _EFFECTORS.items():
        if effector.state[0] in topics:
            settings["dataset.eef_type"] = name
    has = {side: _COLOR[f"wrist_cam_{side[0]}"] in topics for side in ("left", "right")}
    if has["left"] != has["right"]:
        settings["dataset.which_arm"] = "left" if has["left"] else "right"
    settings["dataset.use_depth"] = _DEPTH["depth_h"] in topics
    mapping = from_settings(settings).mapping
    features: dict[str, Vector | Camera] = {}
    for name, feature in mapping.features.items():
        if isinstance(feature, Vector):
            features[name] = _recorded(feature, topics)
        elif any(topic in topics for topic in feature.topics):
            features[name] = feature
    return replace(mapping, features=features, timeline=None)


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


def own_settings(words: Sequence[str]) -> list[str]:
    """Return the `key=value` words that are settings of the robot: their keys have a dot."""
    dotted = [word for word in words if "." in word.partition("=")[0]]
    return [word for word in dotted if not word.startswith("features.")]


def from_settings(settings: dict[str, Any]) -> Kuavo:
    """Build the conversion from all settings by their full keys."""
    bags = settings["rosbag.rosbag_dir"]
    out = settings["rosbag.lerobot_dir"]
    where = Path(bags) if bags else None
    instead = {
        "resume": "set it to normal, and add to the dataset by "
        f"`penstock convert BAGS {settings['rosbag.lerobot_dir_resume'] or 'DATASET'} --append`",
        "merge": "datasets are merged by lerobot-edit-dataset --operation.type merge",
    }
    if settings["rosbag.mode"] in instead:
        mode = settings["rosbag.mode"]
        raise UsageError(f"rosbag.mode is {mode!r}: {instead[mode]}")
    target = (
        Path(settings["rosbag.target_dir"]) / "lerobot" if settings["rosbag.target_dir"] else None
    )
    return Kuavo(
        where,
        target or (where.parent / out / "lerobot" if where and out else None),
        settings["rosbag.num_used"],
        _mapping(settings),
    )


def choose_used(bags: Sequence[Path], count: int | None) -> list[Path]:
    """Draw some of the bags as the robot's own tool does: without replacement, seed 42."""
    if count is None or count >= len(bags):
        return list(bags)
    drawn = np.random.RandomState(42).choice(len(bags), count, replace=False)
    return [bags[k] for k in drawn]


def _merge(settings: dict[str, Any], content: AnyMapping[str, Any], where: str) -> None:
    def walk(prefix: str, node: AnyMapping[str, Any]) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if not prefix and name in _IGNORED:
                continue
            if isinstance(value, AnyMapping) and key not in _DEFAULTS:
                if not any(known.startswith(f"{key}.") for known in _DEFAULTS):
                    sections = {known.rsplit(".", 1)[0] for known in _DEFAULTS}
                    hint = did_you_mean(key, sections)
                    raise UsageError(f"{where} has an unknown section {key!r}: {hint}")
                walk(f"{key}.", value)
            else:
                _set(settings, key, value, where)

    walk("", content)


def _set(settings: dict[str, Any], key: str, value: Any, where: str) -> None:
    if key not in _DEFAULTS:
        raise UsageError(f"{where} has an unknown key {key!r}: {did_you_mean(key, _DEFAULTS)}")
    if key == "dataset.platform_type":
        value = str(value).lower()
    problem = _problem(key, value)
    if problem:
        raise UsageError(f"{where}: {key} is {value!r}: {problem}")
    settings[key] = value


def _problem(key: str, value: Any) -> str | None:
    """Say what is wrong with a value; None if nothing is."""
    if key in _CHOICES:
        named = [choice for choice in _CHOICES[key] if choice is not None]
        return None if value in _CHOICES[key] else did_you_mean(value, named)
    if key in _FLAGS:
        return None if isinstance(value, bool) else "give true or false"
    if key in _AT_LEAST:
        if value is None and _DEFAULTS[key] is None:
            return None
        least = _AT_LEAST[key]
        whole = isinstance(value, int) and not isinstance(value, bool)
        return None if whole and value >= least else f"give a whole number, at least {least}"
    if key == "dataset.depth_range":
        pair = isinstance(value, list) and len(value) == 2
        if not pair or not all(isinstance(v, int | float) for v in value) or value[0] >= value[1]:
            return "give [nearest, farthest] in millimetres"
        return None
    if key == "rosbag.lerobot_dir_merge" and isinstance(value, list):
        return None if all(isinstance(v, str) for v in value) else "give a list of folders"
    return None if value is None or isinstance(value, str) else "give a text"


def _mapping(settings: dict[str, Any]) -> Mapping:
    def get(name: str) -> Any:
        return settings[f"dataset.{name}"]

    resize = (int(get("resize.width")), int(get("resize.height")))
    sides = ("left", "right") if get("which_arm") == "both" else (get("which_arm"),)
    features: dict[str, Vector | Camera] = {
        "observation.state": _vector("state", sides, get),
        "action": _vector("action", sides, get),
    }
    letters = ["h", *(side[0] for side in sides)]
    for letter in letters:
        name = "head_cam_h" if letter == "h" else f"wrist_cam_{letter}"
        features[f"observation.images.{name}"] = Camera(
            (_COLOR[name], _COLOR[name].removesuffix("/compressed")),
            resize=resize,
            tolerance_s=_tolerance_s(get),
        )
        if get("use_depth"):
            low, high = get("depth_range")
            features[f"observation.depth_{letter}"] = Camera(
                (
                    _DEPTH[f"depth_{letter}"],
                    _DEPTH[f"depth_{letter}"].removesuffix("/compressedDepth"),
                ),
                kind="depth",
                resize=resize,
                depth_range_mm=(float(low), float(high)),
                tolerance_s=_tolerance_s(get),
            )
    main = get("main_timeline")
    if main is not None and f"observation.images.{main}" not in features:
        used = [name.rpartition(".")[2] for name in features if ".images." in name]
        raise UsageError(
            f"dataset.main_timeline is {main!r}, and which_arm={get('which_arm')} does not use "
            f"that camera: use one of {', '.join(used)}"
        )
    return Mapping(
        fps=get("train_hz"),
        features=features,
        timeline=None if main is None else f"observation.images.{main}",
        timeline_hz=float(get("main_timeline_fps")),
        drop_ends=get("sample_drop"),
        depth_codec="grey8",
        task=get("task_description") or "Pick and Place Task",
        robot_type=f"kuavo{get('platform_type')}",
        window_frames=settings["rosbag.chunk_size"],
    )


def _vector(kind: str, sides: Sequence[str], get: Any) -> Vector:
    """Build state or action: for each side its arm of 7 joints, then its end effector."""
    is_action = kind == "action"
    sources: list[Source] = []
    names: list[str] = []
    for side in sides:
        sources.append(_arm(side, is_action, get))
        names += [f"zarm_{side[0]}{joint}_link" for joint in range(1, 8)]
        sources.append(_effector(side, is_action, get))
        if get("eef_type") == "qiangnao":
            names += [f"{side}_qiangnao_{joint + 1}" for joint in range(get("dex_dof_needed"))]
        else:
            names.append(f"{side}_claw")
    if is_action and not get("only_arm"):
        walk = ("/cmd_pose_world_synced",)
        sources += [
            Source(walk, "twist.linear", (0, 2)),
            Source(walk, "twist.angular", (2, 3)),
            Source(
                (_ARM_COMMAND, _ARM_COMMAND_SYNCED, "/joint_cmd"), flag_gaps=_longest_pause_s(get)
            ),
        ]
        names += ["cmd_pos_x", "cmd_pos_y", "cmd_pos_yaw", "ctrl_change_cmd"]
    delta = is_action and get("delta_action")
    return Vector(
        tuple(sources),
        tuple(names),
        f"{kind}_names",
        tolerance_s=0.0,
        delta_from="observation.state" if delta else None,
    )


def _arm(side: str, is_action: bool, get: Any) -> Source:
    """Return the 7 joints of an arm, in radians."""
    offset = 0 if side == "left" else 7
    at = _ARMS_AT[get("platform_type")] + offset
    relative = get("relative_start")
    if not is_action:
        return Source(
            (SENSORS,),
            "joint_data.joint_q",
            (at, at + 7),
            relative_start=relative,
            tolerance_s=_tolerance_s(get),
        )
    change = {"relative_start": relative, "delta": get("delta_action")}
    joints = Source(("/joint_cmd",), "joint_q", (at, at + 7), **change)
    # The arm command is in degrees, and of the arms only. The synced one has no pauses.
    degrees = {"select": (offset, offset + 7), "scale": math.pi / 180, **change}
    fill = None if get("only_arm") else (_longest_pause_s(get), _NO_COMMAND)
    command = Source((_ARM_COMMAND,), "position", fill_gaps=fill, otherwise=joints, **degrees)
    return Source((_ARM_COMMAND_SYNCED,), "position", otherwise=command, **degrees)


def _tolerance_s(get: Any) -> float:
    """How old a sensor's value may be: one frame, at least 0.1 s."""
    return max(0.1, 1 / float(get("train_hz")))


def _longest_pause_s(get: Any) -> float:
    return 0.15 * 10 / float(get("train_hz"))


def _effector(side: str, is_action: bool, get: Any) -> Source:
    effector = _EFFECTORS[get("eef_type")]
    topic, *paths = effector.action if is_action else effector.state
    full, closed = effector.action_scale if is_action else effector.state_scale
    hand = get("eef_type") == "qiangnao"
    width = get("dex_dof_needed") if hand else 1
    first = 0 if side == "left" else (6 if hand else 1)
    field = paths[0]
    if len(paths) == 2:  # one field per hand
        field, first = paths[side == "right"], 0
    return Source(
        (topic,),
        field,
        (first, first + width),
        scale=1.0 if get("is_binary") else 1 / full,
        threshold=closed if get("is_binary") else None,
    )
