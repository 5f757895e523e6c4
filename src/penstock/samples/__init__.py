"""Synthetic recordings of a Kuavo-like robot, of any length and with any of the usual troubles.

    facts = write_sample("take.bag", seconds=10)
    facts = write_sample("long.mcap", kind="mcap", size_bytes=10**10, numbered=False)

Written as a stream: memory does not grow with the length, but for a few hundred bytes per chunk
(about 1 MB) that the writers keep for the index.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from penstock.errors import UsageError
from penstock.samples.kuavo import (
    EEF_SIZES,
    JOINTS,
    Messages,
    expected_action,
    expected_arm_traj,
    expected_eef_command,
    expected_eef_state,
    expected_pose_command,
    expected_state,
)
from penstock.samples.pictures import Pictures, read_number
from penstock.samples.writers import SampleWriter, new_writer

__all__ = [
    "TROUBLES",
    "SampleFacts",
    "expected_action",
    "expected_arm_traj",
    "expected_eef_command",
    "expected_eef_state",
    "expected_pose_command",
    "expected_state",
    "read_number",
    "write_sample",
]

START_NS: Final = 1_700_000_000 * 10**9
TROUBLES: Final = {
    "late_camera": "the last camera starts 1 s late",
    "early_end": "the last camera ends 1 s early",
    "duplicates": "every 25th message of a topic repeats the stamps of the one before",
    "jump_back": "the clock jumps back by 0.5 s in the middle",
    "jump_forward": "the clock jumps forward by 1 h in the middle",
    "camera_gap": "the main camera has a hole of 2 s in the middle",
    "state_gap": "/sensors_data_raw has a hole of 2 s in the middle",
    "missing_topic": "the command of the hands is not recorded",
    "empty_topic": "the state of the hands is recorded but has no messages",
    "bad_jpeg": "5 pictures of the main camera cannot be decoded",
    "nan": "5 states in the middle hold NaN in joint 14",
    "shape_change": "joint_q of /sensors_data_raw is 2 shorter in the second half",
    "resolution_change": "pictures of the main camera have half the size in the second half",
    "jitter": "every message comes up to 20 % of its period early or late",
    "slow_topic": "the state of the hands comes at 5 Hz",
    "header_offset": "header stamps are 50 ms before the log time",
    "unsorted": "every 7th message is 100 ms late in the file",
    "old_firmware": "joint_data has joint_current instead of joint_torque",
    "drop_frames": "every 17th picture of the main camera is missing",
}
_EEF_TOPICS: Final = {
    "leju_claw": ("/leju_claw_state", "/leju_claw_command"),
    "rq2f85": ("/gripper/state", "/gripper/command"),
    "qiangnao": ("/dexhand/state", "/control_robot_hand_position"),
}
_EEF_TYPES: Final = {
    "leju_claw": ("kuavo_msgs/msg/lejuClawState", "kuavo_msgs/msg/lejuClawCommand"),
    "rq2f85": ("sensor_msgs/msg/JointState", "sensor_msgs/msg/JointState"),
    "qiangnao": ("sensor_msgs/msg/JointState", "kuavo_msgs/msg/robotHandPosition"),
}
_COLOR_TOPICS: Final = [
    "/cam_h/color/image_raw",
    "/cam_l/color/image_raw",
    "/cam_r/color/image_raw",
    "/zedm/zed_node/left/image_rect_color",
    "/zedm/zed_node/right/image_rect_color",
]
_DEPTH_TOPICS: Final = [
    "/cam_h/depth/image_raw/compressedDepth",
    "/cam_l/depth/image_rect_raw/compressedDepth",
    "/cam_r/depth/image_rect_raw/compressedDepth",
]
# ConfigHeader of compressed_depth_image_transport: the format, and two quantisation parameters.
_DEPTH_HEADER: Final = b"\0\0\0\0" + b"\0" * 8
_BAD_PICTURES: Final = [b"", b"\xff\xd8\xff", b"\0" * 2000, b"not a picture", b"\xff\xd8" * 500]


_JPEG_FORMAT: Final = "rgb8; jpeg compressed bgr8"
_DEPTH_FORMAT: Final = "16UC1; compressedDepth png"

# Makes a message of its number, its moment in seconds, and its header stamp.
Make = Callable[[int, float, int], bytes | memoryview]


@dataclass(slots=True)
class SampleFacts:
    """What was written.

    Attributes:
        path: The file or folder.
        counts: Number of messages of each topic.
        cameras: Topics of the colour cameras, the main one first.
        depths: Topics of the depth cameras.
        start_ns: Log time at t = 0 s, and the base of every `expected_...` function.
        t_s: The last moment that was recorded, in seconds after the start.
        bad_pictures: Ordinals of the undecodable pictures of the main camera.
        affected: For each trouble with a topic of its own, that topic.
    """

    path: Path
    counts: dict[str, int]
    cameras: list[str]
    depths: list[str]
    start_ns: int = START_NS
    t_s: float = 0.0
    bad_pictures: list[int] = field(default_factory=list)
    affected: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Stream:
    """One topic: when its messages come, and how they are made from number, time and stamp."""

    topic: str
    type: str
    hz: float
    make: Make
    phase_s: float = 0.0
    start_s: float = 0.0
    stop_s: float = float("inf")
    gap_s: tuple[float, float] = (0.0, 0.0)
    skip_every: int = 0


def write_sample(
    path: Path | str,
    *,
    seconds: float = 10.0,
    kind: str = "bag",
    compression: str = "none",
    cameras: int = 3,
    width: int = 640,
    height: int = 480,
    camera_hz: float = 30,
    depth: bool = False,
    eef: str = "leju_claw",
    platform: str = "4pro",
    seed: int = 0,
    size_bytes: int | None = None,
    raw_images: bool = False,
    numbered: bool = True,
    state_hz: float = 500,
    trouble: Sequence[str] = (),
) -> SampleFacts:
    """Write a recording.

    Args:
        path: The file to make. For db3 and mcap a name without that suffix makes a ROS 2 bag
            folder with a metadata.yaml.
        seconds: Its length; ignored if `size_bytes` is given.
        kind: "bag", "db3" or "mcap".
        compression: "none"; "lz4" (bag, mcap file), "bz2" (bag), "zstd" (mcap; in a db3 of each
            message), "zstd_file" (db3 folder: the whole file).
        cameras: Number of colour cameras, 0 to 5.
        width: Of the pictures, a multiple of 16.
        height: Of the pictures, a multiple of 16.
        camera_hz: Rate of the cameras.
        depth: Add a depth camera to each of the first three.
        eef: The hands: "leju_claw", "rq2f85" or "qiangnao".
        platform: The robot: "4pro", "5" or "5w".
        seed: Of the noise and the jitter.
        size_bytes: Stop when about so many bytes were written, instead of after `seconds`.
        raw_images: Raw RGB pictures instead of JPEG.
        numbered: Write its ordinal (modulo 65536) into each picture; see `read_number`.
        state_hz: Rate of /sensors_data_raw and /joint_cmd.
        trouble: Names out of `TROUBLES`.
    """
    unknown = [name for name in trouble if name not in TROUBLES]
    if unknown or eef not in EEF_SIZES or platform not in JOINTS or not 0 <= cameras <= 5:
        raise UsageError(
            f"no such sample: trouble {unknown}, eef {eef!r}, platform {platform!r}, {cameras} "
            f"cameras; troubles are {', '.join(TROUBLES)}"
        )
    if trouble and size_bytes is not None:
        raise UsageError("a sample with trouble needs a length: pass seconds, not size_bytes")
    length_s = seconds if size_bytes is None else float("inf")
    messages = Messages(kind == "bag", platform, eef, "old_firmware" in trouble)
    pictures = Pictures(width, height, seed, numbered=numbered)
    suffix = "" if raw_images else "/compressed"
    facts = SampleFacts(
        path=Path(path),
        counts={},
        cameras=[topic + suffix for topic in _COLOR_TOPICS[:cameras]],
        depths=_DEPTH_TOPICS[: min(cameras, 3)] if depth else [],
    )
    streams = _robot_streams(messages, state_hz, length_s / 2, trouble)
    streams += _camera_streams(messages, pictures, facts, camera_hz, raw_images)
    _make_trouble(streams, facts, messages, pictures, length_s, trouble)
    facts.counts = {stream.topic: 0 for stream in streams}
    with closing(new_writer(facts.path, kind, compression, messages.store)) as writer:
        handles = [writer.add(stream.topic, stream.type) for stream in streams]
        _write(writer, handles, streams, facts, (length_s, size_bytes), seed, trouble)
    return facts


def _robot_streams(
    messages: Messages, state_hz: float, middle_s: float, trouble: Sequence[str]
) -> list[_Stream]:
    platform, eef = messages.platform, messages.eef

    def sensors(number: int, t_s: float, stamp_ns: int) -> memoryview:
        joint_q = expected_state(t_s, platform)
        if "nan" in trouble and 0 <= t_s - middle_s < 5 / state_hz:
            joint_q[14] = np.nan
        if "shape_change" in trouble and t_s >= middle_s:
            joint_q = joint_q[:-2]
        return messages.sensors(stamp_ns, number, joint_q, t_s)

    def command(number: int, t_s: float, stamp_ns: int) -> memoryview:
        return messages.joint_command(stamp_ns, number, expected_action(t_s, platform))

    def arms(number: int, t_s: float, stamp_ns: int) -> memoryview:
        return messages.joint_state(stamp_ns, number, expected_arm_traj(t_s, platform))

    def eef_state(number: int, t_s: float, stamp_ns: int) -> memoryview:
        return messages.eef_state(stamp_ns, number, expected_eef_state(t_s, eef))

    def eef_command(number: int, t_s: float, stamp_ns: int) -> memoryview:
        return messages.eef_command(stamp_ns, number, expected_eef_command(t_s, eef))

    def pose(number: int, t_s: float, stamp_ns: int) -> memoryview:
        return messages.pose_command(stamp_ns, number, expected_pose_command(t_s))

    state_topic, command_topic = _EEF_TOPICS[eef]
    state_type, command_type = _EEF_TYPES[eef]
    return [
        _Stream("/sensors_data_raw", "kuavo_msgs/msg/sensorsData", state_hz, sensors),
        _Stream("/joint_cmd", "kuavo_msgs/msg/jointCmd", state_hz, command),
        _Stream("/kuavo_arm_traj", "sensor_msgs/msg/JointState", 100, arms),
        _Stream(state_topic, state_type, 100, eef_state),
        _Stream(command_topic, command_type, 100, eef_command),
        _Stream("/cmd_pose_world_synced", "geometry_msgs/msg/TwistStamped", 50, pose),
    ]


def _camera_streams(
    messages: Messages, pictures: Pictures, facts: SampleFacts, hz: float, raw: bool
) -> list[_Stream]:
    def color(camera: int) -> Make:
        if raw:
            return lambda number, _, stamp_ns: messages.image(
                stamp_ns, number, pictures.rgb(number, camera)
            )
        return lambda number, _, stamp_ns: messages.compressed(
            stamp_ns, number, _JPEG_FORMAT, pictures.jpeg(number, camera)
        )

    def depth(camera: int) -> Make:
        return lambda number, _, stamp_ns: messages.compressed(
            stamp_ns, number, _DEPTH_FORMAT, _DEPTH_HEADER + pictures.depth_png(number, camera)
        )

    kind = "sensor_msgs/msg/Image" if raw else "sensor_msgs/msg/CompressedImage"
    streams = [
        _Stream(topic, kind, hz, color(i), phase_s=0.004 * i)
        for i, topic in enumerate(facts.cameras)
    ]
    streams += [
        _Stream(topic, "sensor_msgs/msg/CompressedImage", hz, depth(i), phase_s=0.001 + 0.004 * i)
        for i, topic in enumerate(facts.depths)
    ]
    return streams


def _make_trouble(
    streams: list[_Stream],
    facts: SampleFacts,
    messages: Messages,
    pictures: Pictures,
    length_s: float,
    trouble: Sequence[str],
) -> None:
    """Change the streams, and note in the facts which ones."""
    by_topic = {stream.topic: stream for stream in streams}
    main, last = (facts.cameras[0], facts.cameras[-1]) if facts.cameras else ("", "")
    eef_state, eef_command = _EEF_TOPICS[messages.eef]
    topics = {
        "late_camera": last,
        "early_end": last,
        "camera_gap": main,
        "drop_frames": main,
        "bad_jpeg": main,
        "resolution_change": main,
        "state_gap": "/sensors_data_raw",
        "nan": "/sensors_data_raw",
        "shape_change": "/sensors_data_raw",
        "missing_topic": eef_command,
        "empty_topic": eef_state,
        "slow_topic": eef_state,
    }
    for name in trouble:
        if name not in topics:
            continue
        facts.affected[name] = topics[name]
        if topics[name] not in by_topic:
            raise UsageError(f"trouble {name!r} needs a camera; pass cameras=1 or more")
        stream = by_topic[topics[name]]
        match name:
            case "late_camera":
                stream.start_s = 1.0
            case "early_end":
                stream.stop_s = length_s - 1.0
            case "camera_gap" | "state_gap":
                stream.gap_s = (length_s / 2 - 1.0, length_s / 2 + 1.0)
            case "drop_frames":
                stream.skip_every = 17
            case "missing_topic":
                streams.remove(stream)
            case "empty_topic":
                stream.stop_s = -1.0
            case "slow_topic":
                stream.hz = 5
            case "bad_jpeg":
                count = int(length_s * stream.hz)
                facts.bad_pictures = [(i + 1) * count // 6 for i in range(5)]
                stream.make = _with_bad_pictures(stream.make, messages, facts.bad_pictures)
            case "resolution_change":
                half = Pictures(pictures.width // 2, pictures.height // 2, 0)
                stream.make = _with_half_size(stream.make, messages, half, length_s / 2)


def _with_bad_pictures(make: Make, messages: Messages, bad: list[int]) -> Make:
    def made(number: int, t_s: float, stamp_ns: int) -> bytes | memoryview:
        if number not in bad:
            return make(number, t_s, stamp_ns)
        data = _BAD_PICTURES[bad.index(number)]
        return messages.compressed(stamp_ns, number, _JPEG_FORMAT, data)

    return made


def _with_half_size(
    make: Make,
    messages: Messages,
    half: Pictures,
    from_s: float,
) -> Make:
    def made(number: int, t_s: float, stamp_ns: int) -> bytes | memoryview:
        if t_s < from_s:
            return make(number, t_s, stamp_ns)
        return messages.compressed(stamp_ns, number, "jpeg", half.jpeg(number))

    return made


def _moments(
    stream: _Stream, index: int, length_s: float, seed: int, trouble: Sequence[str], late: bool
) -> Iterator[tuple[float, float, int]]:
    """Yield the place in the file, the moment and the index of each message of a stream.

    Of an unsorted recording this is called twice: for the messages in time, and the late ones.
    """
    rng = np.random.default_rng([seed, index])
    unsorted = "unsorted" in trouble
    number = 0
    while True:
        t_s = stream.phase_s + number / stream.hz
        if t_s >= min(length_s, stream.stop_s):
            return
        number += 1
        if "jitter" in trouble:
            t_s = max(0.0, t_s + rng.uniform(-0.2, 0.2) / stream.hz)
        if t_s < stream.start_s or stream.gap_s[0] <= t_s < stream.gap_s[1]:
            continue
        if stream.skip_every and number % stream.skip_every == 0:
            continue
        if (unsorted and number % 7 == 0) == late:
            yield t_s + 0.1 * late, t_s, index


def _write(
    writer: SampleWriter,
    handles: list[int],
    streams: list[_Stream],
    facts: SampleFacts,
    until: tuple[float, int | None],
    seed: int,
    trouble: Sequence[str],
) -> None:
    length_s, size_bytes = until
    shift_ns = 0
    if "jump_back" in trouble:
        shift_ns -= 5 * 10**8
    if "jump_forward" in trouble:
        shift_ns += 3600 * 10**9
    header_ns = -50_000_000 if "header_offset" in trouble else 0
    events = [
        _moments(stream, index, length_s, seed, trouble, late)
        for index, stream in enumerate(streams)
        for late in ([False, True] if "unsorted" in trouble else [False])
    ]
    previous_ns = dict.fromkeys(facts.counts, 0)
    for _, t_s, index in heapq.merge(*events):
        stream = streams[index]
        number = facts.counts[stream.topic]
        t_ns = START_NS + round(t_s * 1e9) + (shift_ns if t_s >= length_s / 2 else 0)
        if "duplicates" in trouble and number % 25 == 24:
            t_ns = previous_ns[stream.topic]
        previous_ns[stream.topic] = t_ns
        writer.write(handles[index], t_ns, stream.make(number, t_s, t_ns + header_ns))
        facts.counts[stream.topic] = number + 1
        facts.t_s = max(facts.t_s, t_s)
        if size_bytes is not None and writer.size_bytes >= size_bytes:
            return
