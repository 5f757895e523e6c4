"""The messages of a Kuavo-like robot, and its motion as functions of time.

The motion has a closed form, so that a test knows every value at every moment.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]

JOINTS: Final = {"4pro": 28, "5": 29, "5w": 20}
ARMS: Final = {"4pro": slice(12, 26), "5": slice(13, 27), "5w": slice(4, 18)}
EEF_SIZES: Final = {"leju_claw": 2, "rq2f85": 2, "qiangnao": 12}
COMMAND_LEAD_S: Final = 0.05

_END_EFFECTOR: Final = "string[] name\nfloat64[] position\nfloat64[] velocity\nfloat64[] effort\n"
DEFINITIONS: Final = {
    "kuavo_msgs/msg/jointData": (
        "float64[] joint_q\nfloat64[] joint_v\nfloat64[] joint_vd\nfloat64[] joint_torque\n"
    ),
    "kuavo_msgs/msg/imuData": (
        "geometry_msgs/Vector3 gyro\ngeometry_msgs/Vector3 acc\n"
        "geometry_msgs/Vector3 free_acc\ngeometry_msgs/Quaternion quat\n"
    ),
    "kuavo_msgs/msg/endEffectorData": _END_EFFECTOR,
    "kuavo_msgs/msg/sensorsData": (
        "std_msgs/Header header\n{time} sensor_time\nkuavo_msgs/jointData joint_data\n"
        "kuavo_msgs/imuData imu_data\nkuavo_msgs/endEffectorData end_effector_data\n"
    ),
    "kuavo_msgs/msg/jointCmd": (
        "std_msgs/Header header\nfloat64[] joint_q\nfloat64[] joint_v\nfloat64[] tau\n"
        "float64[] tau_max\nfloat64[] tau_ratio\nfloat64[] joint_kp\nfloat64[] joint_kd\n"
        "int32[] control_modes\n"
    ),
    "kuavo_msgs/msg/lejuClawState": (
        "std_msgs/Header header\nint8[] state\nkuavo_msgs/endEffectorData data\n"
    ),
    "kuavo_msgs/msg/lejuClawCommand": ("std_msgs/Header header\nkuavo_msgs/endEffectorData data\n"),
    "kuavo_msgs/msg/robotHandPosition": (
        "std_msgs/Header header\nuint8[] left_hand_position\nuint8[] right_hand_position\n"
    ),
}


def expected_state(t_s: ArrayLike, platform: str = "4pro") -> Vector:
    """Return joint_q of /sensors_data_raw (rad), t_s seconds after the start."""
    j = np.arange(JOINTS[platform])
    t = np.asarray(t_s, np.float64)[..., None]
    return np.asarray(0.6 * np.sin(2 * np.pi * (0.10 + 0.01 * j) * t + 0.3 * j))


def expected_action(t_s: ArrayLike, platform: str = "4pro") -> Vector:
    """Return joint_q of /joint_cmd (rad): where the joints will be a moment later."""
    return expected_state(np.asarray(t_s, np.float64) + COMMAND_LEAD_S, platform)


def expected_arm_traj(t_s: ArrayLike, platform: str = "4pro") -> Vector:
    """Return position of /kuavo_arm_traj (degrees, 14 arm joints)."""
    return np.rad2deg(expected_action(t_s, platform)[..., ARMS[platform]])


def expected_eef_state(t_s: ArrayLike, eef: str = "leju_claw") -> Vector:
    """Return the measured position of the hands: 0..100, or 0..0.8 for rq2f85."""
    i = np.arange(EEF_SIZES[eef])
    t = np.asarray(t_s, np.float64)[..., None]
    part = 0.5 + 0.5 * np.sin(2 * np.pi * 0.2 * t + 0.7 * i)
    return np.asarray(part * (0.8 if eef == "rq2f85" else 100.0))


def expected_eef_command(t_s: ArrayLike, eef: str = "leju_claw") -> Vector:
    """Return the commanded position of the hands: 0..100 (whole numbers for qiangnao), 0..255."""
    ahead = expected_eef_state(np.asarray(t_s, np.float64) + COMMAND_LEAD_S, eef)
    if eef == "rq2f85":
        return ahead / 0.8 * 255
    return np.floor(ahead) if eef == "qiangnao" else ahead


def expected_pose_command(t_s: ArrayLike) -> Vector:
    """Return linear.x, linear.y and angular.z of /cmd_pose_world_synced."""
    t = np.asarray(t_s, np.float64)
    return np.stack([0.1 * t, 0.5 * np.sin(0.3 * t), 0.2 * np.cos(0.2 * t)], axis=-1)


class Messages:
    """Makes serialised messages of a robot, in ROS 1 or in ROS 2 (CDR) encoding."""

    def __init__(self, ros1: bool, platform: str, eef: str, old_firmware: bool) -> None:
        from rosbags.typesys import Stores, get_types_from_msg, get_typestore

        self.platform, self.eef, self.old_firmware = platform, eef, old_firmware
        self.store = get_typestore(Stores.ROS1_NOETIC if ros1 else Stores.ROS2_HUMBLE)
        for name, text in DEFINITIONS.items():
            if old_firmware:
                text = text.replace("joint_torque", "joint_current")
            text = text.replace("{time}", "time" if ros1 else "builtin_interfaces/Time")
            self.store.register(get_types_from_msg(text, name))
        self._types = SimpleNamespace(
            **{name.rpartition("/")[2]: kind for name, kind in self.store.types.items()}
        )
        self._ros1 = ros1
        self._serialize: Callable[[object, str], memoryview] = (
            self.store.serialize_ros1 if ros1 else self.store.serialize_cdr
        )

    def time(self, t_ns: int) -> Any:
        """Make a time."""
        kind = self.store.types["builtin_interfaces/msg/Time"]
        return kind(sec=t_ns // 10**9, nanosec=t_ns % 10**9)

    def header(self, stamp_ns: int, number: int, frame_id: str = "") -> Any:
        """Make a header; ROS 2 headers have no number."""
        kind = self.store.types["std_msgs/msg/Header"]
        stamp = self.time(stamp_ns)
        if self._ros1:
            return kind(seq=number, stamp=stamp, frame_id=frame_id)
        return kind(stamp=stamp, frame_id=frame_id)

    def sensors(self, stamp_ns: int, number: int, joint_q: Vector, t_s: float) -> memoryview:
        """Make a sensorsData message."""
        kinds = self._types
        n = len(joint_q)
        last = "joint_current" if self.old_firmware else "joint_torque"
        joints = kinds.jointData(
            joint_q=joint_q, joint_v=np.zeros(n), joint_vd=np.zeros(n), **{last: np.full(n, 0.5)}
        )
        vector = self.store.types["geometry_msgs/msg/Vector3"]
        quaternion = self.store.types["geometry_msgs/msg/Quaternion"]
        imu = kinds.imuData(
            gyro=vector(0.01 * t_s, 0.0, 0.0),
            acc=vector(0.0, 0.0, 9.81),
            free_acc=vector(0.0, 0.0, 0.0),
            quat=quaternion(0.0, 0.0, 0.0, 1.0),
        )
        message = kinds.sensorsData(
            header=self.header(stamp_ns, number),
            sensor_time=self.time(stamp_ns),
            joint_data=joints,
            imu_data=imu,
            end_effector_data=self._end_effector(np.zeros(0), []),
        )
        return self._serialize(message, "kuavo_msgs/msg/sensorsData")

    def joint_command(self, stamp_ns: int, number: int, joint_q: Vector) -> memoryview:
        """Make a jointCmd message."""
        zeros = np.zeros(len(joint_q))
        message = self._types.jointCmd(
            header=self.header(stamp_ns, number),
            joint_q=joint_q,
            joint_v=zeros,
            tau=zeros,
            tau_max=zeros + 100,
            tau_ratio=zeros + 1,
            joint_kp=zeros,
            joint_kd=zeros,
            control_modes=np.full(len(joint_q), 2, np.int32),
        )
        return self._serialize(message, "kuavo_msgs/msg/jointCmd")

    def joint_state(self, stamp_ns: int, number: int, position: Vector) -> memoryview:
        """Make a sensor_msgs/JointState message."""
        empty = np.zeros(0)
        message = self.store.types["sensor_msgs/msg/JointState"](
            header=self.header(stamp_ns, number),
            name=[f"joint_{i}" for i in range(len(position))],
            position=position,
            velocity=empty,
            effort=empty,
        )
        return self._serialize(message, "sensor_msgs/msg/JointState")

    def eef_state(self, stamp_ns: int, number: int, position: Vector) -> memoryview:
        """Make a message of the hand's state."""
        if self.eef != "leju_claw":
            return self.joint_state(stamp_ns, number, position)
        message = self._types.lejuClawState(
            header=self.header(stamp_ns, number),
            state=np.array([1, 1], np.int8),
            data=self._end_effector(position, ["left_claw", "right_claw"]),
        )
        return self._serialize(message, "kuavo_msgs/msg/lejuClawState")

    def eef_command(self, stamp_ns: int, number: int, position: Vector) -> memoryview:
        """Make a message of the hand's command."""
        header = self.header(stamp_ns, number)
        if self.eef == "rq2f85":
            return self.joint_state(stamp_ns, number, position)
        if self.eef == "leju_claw":
            message = self._types.lejuClawCommand(
                header=header, data=self._end_effector(position, ["left_claw", "right_claw"])
            )
            return self._serialize(message, "kuavo_msgs/msg/lejuClawCommand")
        hands = position.astype(np.uint8)
        message = self._types.robotHandPosition(
            header=header, left_hand_position=hands[:6], right_hand_position=hands[6:]
        )
        return self._serialize(message, "kuavo_msgs/msg/robotHandPosition")

    def pose_command(self, stamp_ns: int, number: int, pose: Vector) -> memoryview:
        """Make a geometry_msgs/TwistStamped message."""
        types = self.store.types
        vector = types["geometry_msgs/msg/Vector3"]
        x, y, yaw = (float(value) for value in pose)
        twist = types["geometry_msgs/msg/Twist"](
            linear=vector(x, y, 0.0), angular=vector(0.0, 0.0, yaw)
        )
        message = types["geometry_msgs/msg/TwistStamped"](
            header=self.header(stamp_ns, number), twist=twist
        )
        return self._serialize(message, "geometry_msgs/msg/TwistStamped")

    def compressed(self, stamp_ns: int, number: int, text: str, data: bytes) -> memoryview:
        """Make a sensor_msgs/CompressedImage message."""
        message = self.store.types["sensor_msgs/msg/CompressedImage"](
            header=self.header(stamp_ns, number, "camera"),
            format=text,
            data=np.frombuffer(data, np.uint8),
        )
        return self._serialize(message, "sensor_msgs/msg/CompressedImage")

    def image(self, stamp_ns: int, number: int, pixels: NDArray[np.uint8]) -> memoryview:
        """Make a sensor_msgs/Image message of RGB pixels."""
        height, width, _ = pixels.shape
        message = self.store.types["sensor_msgs/msg/Image"](
            header=self.header(stamp_ns, number, "camera"),
            height=height,
            width=width,
            encoding="rgb8",
            is_bigendian=0,
            step=width * 3,
            data=pixels.reshape(-1),
        )
        return self._serialize(message, "sensor_msgs/msg/Image")

    def _end_effector(self, position: Vector, names: list[str]) -> Any:
        zeros = np.zeros(len(position))
        return self._types.endEffectorData(
            name=names, position=position, velocity=zeros, effort=zeros
        )
