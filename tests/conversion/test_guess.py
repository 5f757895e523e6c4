"""What a recording that nobody has described becomes: features, and reasons for the rest."""

from __future__ import annotations

import json
import shlex
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from penstock import convert
from penstock.bags import open_bag
from penstock.cli import main
from penstock.conversion.guess import guess_mapping, survey
from penstock.conversion.map_file import to_yaml
from penstock.conversion.mapping import Mapping, Vector
from penstock.conversion.settings import load_map
from penstock.dataset.reader import Dataset
from penstock.errors import DataError, UsageError

from .maps import switched_on

STORE = get_typestore(Stores.ROS2_HUMBLE)
STORE.register(
    get_types_from_msg("float64 x\nfloat32[3] rest\nbool armed\nstring note\n", "my_msgs/msg/Arm")
)
T = STORE.types


def header():
    return T["std_msgs/msg/Header"](T["builtin_interfaces/msg/Time"](1, 0), "frame")


def xyz(kind="Vector3", n=3):
    return T[f"geometry_msgs/msg/{kind}"](*np.arange(1.0, n + 1))


def cloud():
    return T["sensor_msgs/msg/PointCloud2"](
        header(), 1, 5, [], False, 4, 20, np.zeros(20, np.uint8), True
    )


def odometry():
    pose = T["geometry_msgs/msg/Pose"](xyz("Point"), xyz("Quaternion", 4))
    twist = T["geometry_msgs/msg/Twist"](xyz(), xyz())
    covariance = np.zeros(36)
    return T["nav_msgs/msg/Odometry"](
        header(),
        "base",
        T["geometry_msgs/msg/PoseWithCovariance"](pose, covariance),
        T["geometry_msgs/msg/TwistWithCovariance"](twist, covariance),
    )


MESSAGES = {
    "/cmd_vel": lambda: T["geometry_msgs/msg/Twist"](xyz(), xyz()),
    "/odom": odometry,
    "/imu": lambda: T["sensor_msgs/msg/Imu"](
        *(header(), xyz("Quaternion", 4), np.zeros(9), xyz(), np.zeros(9), xyz(), np.zeros(9))
    ),
    "/wrench": lambda: T["geometry_msgs/msg/WrenchStamped"](
        header(), T["geometry_msgs/msg/Wrench"](xyz(), xyz())
    ),
    "/fix": lambda: T["sensor_msgs/msg/NavSatFix"](
        header(), T["sensor_msgs/msg/NavSatStatus"](0, 1), 48.1, 11.5, 500.0, np.zeros(9), 0
    ),
    "/arm": lambda: T["my_msgs/msg/Arm"](1.0, np.ones(3, np.float32), True, "text"),
    "/points": cloud,
    "/armed": lambda: T["std_msgs/msg/Bool"](True),
    "/chatter": lambda: T["std_msgs/msg/String"]("hello"),
    "/wide": lambda: T["std_msgs/msg/Float64MultiArray"](
        T["std_msgs/msg/MultiArrayLayout"]([], 0), np.zeros(5000)
    ),
    "/audio": lambda: T["std_msgs/msg/UInt8MultiArray"](
        T["std_msgs/msg/MultiArrayLayout"]([], 0), np.zeros(50, np.uint8)
    ),
}


def write(path: Path, topics: dict[str, float]) -> Path:
    """Write a bag of 3 s; each topic with its rate, 0 for a single message."""
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        for topic, hz in topics.items():
            message = MESSAGES[topic]()
            kind = message.__msgtype__
            connection = writer.add_connection(topic, kind, typestore=STORE)
            data = STORE.serialize_cdr(message, kind)
            for number in range(max(1, round(3 * hz))):
                writer.write(connection, 10**9 + round(number / (hz or 1) * 10**9), data)
    return path


def sources(mapping: Mapping) -> dict[str, list[str]]:
    return {
        name: [f"{source.topics[0]} {source.field}" for source in feature.sources]
        for name, feature in mapping.features.items()
        if isinstance(feature, Vector)
    }


def test_standard_messages(tmp_path):
    rates = dict.fromkeys(MESSAGES, 20.0) | {"/fix": 2.0, "/wrench": 0.0}
    path = write(tmp_path / "bag", rates)
    with open_bag(path) as bag:
        mapping = guess_mapping(bag)
        left_out = survey(bag).left_out
        text = to_yaml(mapping, bag)
    assert mapping.fps == 20
    assert sources(mapping) == {
        "observation.state": ["/odom pose.pose", "/odom twist.twist"],
        "action": ["/cmd_vel linear", "/cmd_vel angular"],
        "observation.imu": [
            *("/imu orientation", "/imu angular_velocity", "/imu linear_acceleration")
        ],
        "observation.fix": ["/fix latitude", "/fix longitude", "/fix altitude"],
        "observation.arm": ["/arm x", "/arm rest"],
    }
    assert mapping.features["observation.fix"].align == "hold"  # 2 Hz among 20
    assert left_out == {
        "/wrench": "it covers 0.0 of 3.0 s",
        "/points": "a point cloud",
        "/armed": "a single flag",
        "/chatter": "no numbers",
        "/wide": "5000 numbers are too many to guess",
        "/audio": "bytes, not numbers",
    }
    for topic, reason in left_out.items():
        assert f"{topic}: {reason}" in text or f"left out: {reason}" in text
    report = convert([path], tmp_path / "out", check=True)
    assert report.ok
    assert report.frames_out >= 50


def test_only_what_a_learner_cannot_use(tmp_path):
    path = write(tmp_path / "bag", {"/chatter": 5.0, "/points": 5.0})
    with pytest.raises(DataError, match=r"nothing to learn from .*/chatter: no numbers"):
        convert([path], tmp_path / "out")


def test_one_narrow_sensor_is_the_state(tmp_path):
    with open_bag(write(tmp_path / "bag", {"/imu": 50.0, "/cmd_vel": 10.0})) as bag:
        mapping = guess_mapping(bag)
    assert list(mapping.features) == ["observation.state", "action"]
    assert mapping.fps == 50
    assert (mapping.features["action"].align, mapping.features["action"].tolerance_s) == ("hold", 0)


def test_a_folder_is_mapped_from_what_its_bags_share(tmp_path):
    """A topic that only the first bag has would fail all others."""
    folder = tmp_path / "bags"
    folder.mkdir()
    common = {"/odom": 20.0, "/cmd_vel": 20.0}
    bags = [
        write(folder / "0", common | {"/imu": 20.0}),
        *(write(folder / str(number), common) for number in range(1, 4)),
        write(folder / "4", {"/odom": 20.0}),
    ]
    report = convert(bags, tmp_path / "out", check=False)
    assert list(report.failed) == [bags[4]]  # it lacks what most have
    assert len(report.bags) == 4
    late = write(folder / "5", {"/odom": 20.0, "/cmd_vel": 20.0, "/imu": 20.0, "/arm": 20.0})
    report = convert([late], tmp_path / "out", append=True, check=False)  # mapped as before
    assert report.ok and report.total_episodes == 5


def test_the_first_bag_may_lack_what_the_others_have(tmp_path):
    bags = [write(tmp_path / "0", {"/odom": 20.0})]
    bags += [write(tmp_path / str(k), {"/odom": 20.0, "/cmd_vel": 20.0}) for k in (1, 2)]
    report = convert(bags, tmp_path / "out", check=False)
    assert list(report.failed) == [bags[0]]
    assert len(report.bags) == 2


def picture(encoding: str, width: int, height: int, size: int):
    data = np.zeros(width * height * size, np.uint8)
    return T["sensor_msgs/msg/Image"](header(), height, width, encoding, 0, width * size, data)


def point():
    """A JointTrajectoryPoint as most write it: positions and velocities, nothing else."""
    return T["trajectory_msgs/msg/JointTrajectoryPoint"](
        *(np.ones(3), np.ones(3), np.empty(0), np.empty(0)),
        T["builtin_interfaces/msg/Duration"](0, 0),
    )


def test_what_is_guessed_converts(tmp_path, monkeypatch):
    """Odd names, odd sizes, empty arrays: the map is written, read, and converts as it is."""
    imu = MESSAGES["/imu"]
    odd = {
        "/odom": odometry,
        "/a/b": imu,
        "/a_b": imu,
        "/gap": imu,
        "/state": imu,
        "/😀": imu,
        "/x\nsplit_frames: 3\n#": MESSAGES["/chatter"],
        "/point": point,
        "/cam": lambda: picture("rgb8", 65, 49, 3),
        "/range": lambda: picture("16UC1", 64, 48, 2),
        "/tiny": lambda: picture("rgb8", 1, 1, 3),
        "/strange": lambda: picture("nobody_knows", 64, 48, 3),
        "/cam_once": lambda: picture("rgb8", 64, 48, 3),
    }
    monkeypatch.setitem(globals(), "MESSAGES", odd)
    path = write(tmp_path / "bag", dict.fromkeys(odd, 10.0) | {"/cam_once": 0.0})
    with open_bag(path) as bag:
        mapping = guess_mapping(bag)
        left_out = survey(bag).left_out
        (tmp_path / "map.yaml").write_text(to_yaml(mapping, bag))
    assert load_map(tmp_path / "map.yaml") == mapping
    assert {"/tiny", "/strange", "/cam_once", "/x\nsplit_frames: 3\n#"} == left_out.keys()
    assert sources(mapping)["observation.a_b"][0].startswith("/a/b ")
    assert sources(mapping)["observation.a_b_2"][0].startswith("/a_b ")
    assert mapping.features["observation.images.cam"].resize == (64, 48)
    assert mapping.features["observation.range"].kind == "depth"
    report = convert([path], tmp_path / "out", map=tmp_path / "map.yaml")
    assert report.ok, report.text()
    assert report.frames_out > 20


def test_a_dataset_that_no_recording_made_goes_on(tmp_path):
    """Its settings hold no mapping: it is guessed as for a new one."""
    bag = write(tmp_path / "bag", {"/imu": 20.0})
    convert([bag], tmp_path / "out", check=False)
    settings = tmp_path / "out/.penstock/plan.json"
    for change in ({}, {"mapping": 3}, {"mapping": {"nonsense": 1}}):
        content = json.loads(settings.read_text())
        settings.write_text(json.dumps({**content, "settings": change}))
        late = write(tmp_path / f"bag-{len(str(change))}", {"/imu": 20.0})
        assert convert([late], tmp_path / "out", append=True, check=False).total_episodes >= 1


def test_foxglove_messages_need_no_map(tmp_path):
    """Protobuf and JSON, by the schemas in the file: joints, poses, scans, pictures."""
    bag = Path(__file__).parents[1] / "bags" / "foxglove.mcap"
    report = convert([bag], tmp_path / "out")
    assert report.ok, report.text()
    features = json.loads((tmp_path / "out/meta/info.json").read_text())["features"]
    assert {"observation.state", "observation.scan", "observation.json"} <= features.keys()
    assert any(name.startswith("observation.images.") for name in features)
    with open_bag(bag) as opened:
        left_out = survey(opened).left_out
    assert "no key frame" in left_out["/video"]  # its packets are made up
    assert "/cloud" in left_out


def test_all_that_is_left_out_can_be_switched_on(tmp_path):
    """Each block of comments of the written map works by itself when its # is removed."""
    path = write(tmp_path / "bag", dict.fromkeys(MESSAGES, 20.0) | {"/fix": 2.0, "/wrench": 0.0})
    target = tmp_path / "map.yaml"
    assert main(["info", str(path), "--write-map", str(target)]) == 0
    variants = list(switched_on(target.read_text()))
    assert {"observation.armed", "observation.wrench"} <= {name for name, _ in variants}
    for number, (name, text) in enumerate(variants):
        target.write_text(text)
        report = convert([path], tmp_path / str(number), target, progress="quiet")
        assert report.ok, report.text()
        features = json.loads((tmp_path / str(number) / "meta/info.json").read_text())["features"]
        assert name in features


def test_a_map_is_written_where_nothing_can_be_guessed(tmp_path):
    path = write(tmp_path / "bag", {"/armed": 5.0, "/chatter": 5.0})
    target = tmp_path / "map.yaml"
    assert main(["info", str(path), "--write-map", str(target)]) == 0
    assert "/chatter: no numbers" in target.read_text()
    with pytest.raises(UsageError, match="list at least one"):
        load_map(target)
    ((name, text),) = switched_on(target.read_text())
    target.write_text(text)
    assert convert([path], tmp_path / "out", target, progress="quiet").ok, name


def bursts(path: Path, shift_s: float | None = 0.0, command: bool = False) -> Path:
    """Write 4 s of joints at 500 Hz that arrive 20 at once; None for stamps of zero.

    A command has no stamps at all, as many publishers send them.
    """
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        if command:
            kind = "geometry_msgs/msg/TwistStamped"
            known = writer.add_connection("/cmd_vel", kind, typestore=STORE)
            unset = T["std_msgs/msg/Header"](T["builtin_interfaces/msg/Time"](0, 0), "")
            for k in range(40):
                twist = T["geometry_msgs/msg/Twist"](xyz(), xyz())
                data = STORE.serialize_cdr(T[kind](unset, twist), kind)
                writer.write(known, 10**18 + k * 100_000_000, data)
        kind = "sensor_msgs/msg/JointState"
        known = writer.add_connection("/joints", kind, typestore=STORE)
        for k in range(2000):
            true_ns = 10**18 + k * 2_000_000
            stamp_ns = 0 if shift_s is None else true_ns + round(shift_s * 1e9)
            stamp = T["builtin_interfaces/msg/Time"](*divmod(stamp_ns, 10**9))
            message = T[kind](
                T["std_msgs/msg/Header"](stamp, ""), ["a"], np.array([k * 1.0]), *[np.empty(0)] * 2
            )
            t_ns = 10**18 + (k // 20 + 1) * 40_000_000 + k % 20 * 20_000
            writer.write(known, t_ns, STORE.serialize_cdr(message, kind))
    return path


def test_the_clock_is_chosen_where_messages_come_in_bursts(tmp_path, capsys):
    path = bursts(tmp_path / "bag")
    with open_bag(path) as bag:
        assert guess_mapping(bag).clock == "header"
    assert main(["info", str(path)]) == 0
    said = capsys.readouterr().out
    assert "came in bursts" in said
    assert "by header stamps" in said
    report = convert([path], tmp_path / "out", progress="quiet")
    assert report.ok
    values = [f["observation.state"] for f in Dataset(tmp_path / "out").episode(0).frames()]
    assert set(np.diff(np.array(values))) == {5.0}  # 500 Hz at 100 fps: every fifth


def test_a_publisher_without_stamps_does_not_decide_for_all(tmp_path):
    path = bursts(tmp_path / "bag", command=True)
    report = convert([path], tmp_path / "out", progress="quiet")
    assert report.ok
    assert report.mapping.clock == "header"
    assert any("not set" in note and "/cmd_vel" in note for note in report.account.notes)
    values = [f["observation.state"] for f in Dataset(tmp_path / "out").episode(0).frames()]
    assert len(values) > 300
    assert set(np.diff(np.array(values))) == {5.0}


@pytest.mark.parametrize("shift_s", [None, 3600.0])
def test_stamps_that_are_not_sane_are_left_alone(tmp_path, shift_s):
    with open_bag(bursts(tmp_path / "bag", shift_s)) as bag:
        assert guess_mapping(bag).clock == "bag"


@pytest.mark.parametrize(
    ("message", "steps_ms", "fps"),
    [
        ("/odom", [20] * 100 + [60_000] + [20] * 100, 50),  # nobody moved for a minute
        ("/cam", [50] * 100 + [60_000] + [50] * 100, 20),
        ("/cam", [1, 1, 98] * 40, 30),  # three pictures at once
        ("/cam", [20, 30, 40, 60, 100] * 60, 20),  # of a bad network
    ],
)
def test_neither_pauses_nor_bursts_change_the_rate(tmp_path, capsys, message, steps_ms, fps):
    made = odometry() if message == "/odom" else picture("rgb8", 16, 16, 3)
    with Writer(tmp_path / "bag", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        known = writer.add_connection(message, made.__msgtype__, typestore=STORE)
        data = STORE.serialize_cdr(made, made.__msgtype__)
        for t_ms in np.cumsum([1, *steps_ms]).tolist():
            writer.write(known, t_ms * 10**6, data)
    assert main(["info", str(tmp_path / "bag")]) == 0
    said = capsys.readouterr().out
    assert f"guess at {fps} fps" in said
    assert ("came in bursts" in said) == (1 in steps_ms)


def test_a_clock_that_was_set_in_between(tmp_path):
    """A robot that boots in 1970: without a camera, the message says what to do."""
    rows = [("/joint_states", k / 50, joint_state(k / 50, ["a"])) for k in range(10)]
    rows += [(topic, second + 1.6e9, content) for topic, second, content in rows]
    bag = record_all(tmp_path / "bag", rows)
    with pytest.raises(DataError, match="timeline=/topic"):
        convert([bag], tmp_path / "out")
    report = convert([bag], tmp_path / "out", timeline="/joint_states")
    assert report.ok and report.frames_out == 20


def test_log_times_that_are_all_the_same_have_a_way_out(tmp_path):
    with Writer(tmp_path / "bag", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        known = writer.add_connection("/cam", "sensor_msgs/msg/Image", typestore=STORE)
        for k in range(20):
            image = picture("rgb8", 16, 16, 3)
            image.header.stamp.nanosec = k * 50_000_000
            writer.write(known, 0, STORE.serialize_cdr(image, "sensor_msgs/msg/Image"))
    report = convert([tmp_path / "bag"], tmp_path / "out")
    assert "clock=header fps=" in report.text()
    report = convert([tmp_path / "bag"], tmp_path / "new", clock="header", fps=20)
    assert report.frames_out == 20


def test_info_fits_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    name = "/robot/left_arm/a_very_long_name_of_a_topic/with/many/parts/state"
    with Writer(Path("bag"), version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        for topic in (name, "/b"):
            message = MESSAGES["/odom"]()
            known = writer.add_connection(topic, message.__msgtype__, typestore=STORE)
            for k in range(30):
                data = STORE.serialize_cdr(message, message.__msgtype__)
                writer.write(known, 10**9 + k * 10**8, data)
    assert main(["info", "bag"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("…" in line for line in lines)


def pose_list(kind: str, count: int = 3):
    header = T["std_msgs/msg/Header"](T["builtin_interfaces/msg/Time"](0, 0), "map")
    poses = [
        T["geometry_msgs/msg/Pose"](
            T["geometry_msgs/msg/Point"](float(k), 1.0, 2.0),
            T["geometry_msgs/msg/Quaternion"](0.0, 0.0, 0.0, 1.0),
        )
        for k in range(count)
    ]
    if kind == "nav_msgs/msg/Path":
        poses = [T["geometry_msgs/msg/PoseStamped"](header, pose) for pose in poses]
    return T[kind](header, poses)


@pytest.mark.parametrize("kind", ["nav_msgs/msg/Path", "geometry_msgs/msg/PoseArray"])
def test_the_first_of_many_poses_is_better_than_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(MESSAGES, "/poses", lambda: pose_list(kind))
    with open_bag(write(tmp_path / "bag", {"/poses": 10.0, "/odom": 10.0})) as bag:
        assert "many poses" in survey(bag).left_out["/poses"]  # there is something better
    report = convert([write(tmp_path / "alone", {"/poses": 10.0})], tmp_path / "out")
    assert report.ok
    assert sources(report.mapping) == {
        "observation.state": [f"/poses poses[0]{'.pose' if 'Path' in kind else ''}"]
    }


def test_single_messages_are_one_frame_of_what_was_said(tmp_path):
    path = write(tmp_path / "bag", {"/odom": 0.0, "/cmd_vel": 0.0})
    report = convert([path], tmp_path / "out")
    assert report.ok
    assert (report.frames_out, report.total_frames) == (1, 1)
    assert "single frame" in report.text()
    assert set(report.mapping.features) == {"observation.state", "action"}


def test_flags_bytes_and_clouds_are_never_better_than_nothing(tmp_path):
    for number, hz in enumerate((0.0, 5.0)):
        bag = write(tmp_path / str(number), dict.fromkeys(("/armed", "/audio", "/points"), hz))
        with pytest.raises(DataError, match="nothing to learn from"):
            convert([bag], tmp_path / "out")


def test_the_motors_of_a_robot_are_taken_together(tmp_path):
    """A list of messages whose length the definition tells, as Unitree's LowState has."""
    from mcap.writer import Writer as McapWriter

    definition = (
        "uint32 tick\nMotorState[3] motors\nuint8[2] crc\n"
        + "=" * 80
        + "\nMSG: robot_msgs/MotorState\nfloat32 q\nfloat32 dq\n"
    )
    with (tmp_path / "bag.mcap").open("wb") as file:
        writer = McapWriter(file)
        writer.start()
        schema = writer.register_schema("robot_msgs/msg/LowState", "ros2msg", definition.encode())
        channel = writer.register_channel("/lowstate", "cdr", schema)
        for k in range(20):
            body = struct.pack("<I6f2B", k, *(float(n + k) for n in range(6)), 1, 2)
            writer.add_message(channel, k * 10**7, b"\0\1\0\0" + body, k * 10**7)
        writer.finish()
    report = convert([tmp_path / "bag.mcap"], tmp_path / "out")
    assert report.ok, report.text()
    assert sources(report.mapping) == {"observation.state": ["/lowstate motors.q"]}
    frames = list(Dataset(tmp_path / "out").episode(0).frames())
    assert [frame["observation.state"].tolist() for frame in frames] == [
        [k, k + 2, k + 4] for k in range(20)
    ]


def test_counters_codes_and_lists_are_no_state(tmp_path, monkeypatch):
    """As PX4 and detectors send them; and GPS keeps its digits."""
    odometry = "uint64 timestamp\nuint8 frame\nfloat32[3] position\nfloat32[4] q\nfloat32[3] v\n"
    STORE.register(get_types_from_msg(odometry, "px4_msgs/msg/VehicleOdometry"))
    STORE.register(get_types_from_msg("string label\nfloat32 score\n", "my_msgs/msg/Thing"))
    STORE.register(get_types_from_msg("uint32 n\nmy_msgs/Thing[] found\n", "my_msgs/msg/Things"))
    numbers = (np.ones(n, np.float32) for n in (3, 4, 3))
    vehicle = T["px4_msgs/msg/VehicleOdometry"](5, 1, *numbers)
    things = T["my_msgs/msg/Things"](1, [T["my_msgs/msg/Thing"]("cup", 0.5)])
    monkeypatch.setitem(MESSAGES, "/vehicle", lambda: vehicle)
    monkeypatch.setitem(MESSAGES, "/things", lambda: things)
    bag = write(tmp_path / "bag", dict.fromkeys(("/vehicle", "/things", "/fix"), 10.0))
    report = convert([bag], tmp_path / "out")
    assert report.ok
    assert sources(report.mapping) == {
        "observation.state": ["/vehicle position", "/vehicle q", "/vehicle v"],
        "observation.fix": ["/fix latitude", "/fix longitude", "/fix altitude"],
    }
    assert report.mapping.features["observation.fix"].dtype == "float64"


def message(kind: str, definition: str, **values):
    """Make a message of a type; what is not given is 1."""
    if kind not in T:
        STORE.register(get_types_from_msg(definition, kind))

    def build(kind):
        fields = {}
        for name, (node, detail) in STORE.fielddefs[kind][1]:
            one = detail[0] if int(node) in (3, 4) else (node, detail)
            value = build(one[1]) if int(one[0]) == 2 else "text" if one[1][0] == "string" else 1
            if int(node) in (3, 4):
                many = [value] * (detail[1] or 3)
                value = many if int(one[0]) == 2 or value == "text" else np.array(many, one[1][0])
            fields[name] = value
        return T[kind](**fields)

    made = build(kind)
    for name, value in values.items():
        setattr(made, name, value)
    return lambda: made


TRAJECTORY_STATE = "".join(
    f"trajectory_msgs/JointTrajectoryPoint {name}\n"
    for name in ("reference", "desired", "actual", "error")
)
ROBOTS = {
    "arms that lead others give the action": (
        {
            "/follower_left/joint_states": ("sensor_msgs/msg/JointState", ""),
            "/leader_left/joint_states": ("sensor_msgs/msg/JointState", ""),
        },
        {
            "observation.state": ["/follower_left/joint_states position"],
            "action": ["/leader_left/joint_states position"],
        },
    ),
    "a controller says what is wanted beside what is there": (
        {"/arm/state": ("control_msgs/msg/JointTrajectoryControllerState", TRAJECTORY_STATE)},
        {"action": ["/arm/state reference.positions"]},
    ),
    "a velocity that was measured is no command": (
        {
            "/mavros/local_position/velocity_local": ("geometry_msgs/msg/TwistStamped", ""),
            "/mavros/setpoint_velocity/cmd_vel": ("geometry_msgs/msg/TwistStamped", ""),
        },
        {
            "observation.state": ["/mavros/local_position/velocity_local twist"],
            "action": ["/mavros/setpoint_velocity/cmd_vel twist"],
        },
    ),
    "motors that are driven are commands, and variances no state": (
        {
            "/fmu/out/actuator_motors": (
                "px4_msgs/msg/ActuatorMotors",
                "uint64 timestamp\nfloat32[12] control\n",
            ),
            "/hand/all": ("hand_msgs/msg/ActuatorStates", "float32[2] current\n"),
            "/fmu/out/local": (
                "px4_msgs/msg/LocalPose",
                "uint64 timestamp\nfloat32[3] position\nfloat32[3] position_variance\n",
            ),
        },
        {
            "observation.state": ["/fmu/out/local position"],
            "observation.hand_all": ["/hand/all current"],
            "action": ["/fmu/out/actuator_motors control"],
        },
    ),
    "lists of whole numbers": (
        {"/skin": ("std_msgs/msg/UInt16MultiArray", "")},
        {"observation.state": ["/skin data"]},
    ),
    "a quadruped, with all that its makers added": (
        {
            "/lowstate": (
                "robot_msgs/msg/LowState",
                "uint8[2] head\nuint8 level_flag\nuint32[2] sn\nuint32[2] version\n"
                "uint16 bandwidth\nrobot_msgs/Motor[2] motor_state\nint16[4] foot_force\n"
                "uint32 tick\nuint8[40] wireless_remote\nfloat32 power_v\nuint32 crc\n",
            ),
            "/lowcmd": (
                "robot_msgs/msg/LowCmd",
                "uint8[2] head\nuint8 level_flag\nuint32[2] sn\n"
                "robot_msgs/Motor[2] motor_cmd\nuint8 gpio\nuint32 crc\n",
            ),
        },
        {
            "observation.state": [
                "/lowstate motor_state.q",
                "/lowstate foot_force",
                "/lowstate power_v",
            ],
            "action": ["/lowcmd motor_cmd.q"],
        },
    ),
    "commands under short names, and a motor driver that answers": (
        {
            "/robot/q_des": ("std_msgs/msg/Float64MultiArray", ""),
            "/robot/q": ("std_msgs/msg/Float64MultiArray", ""),
            "/leftArm/ctrl": ("std_msgs/msg/Float64MultiArray", ""),
            "/grip/cmd/feedback": ("std_msgs/msg/Float64", ""),
            "/battery/fraction": ("std_msgs/msg/Float32", ""),
            "/reward": ("std_msgs/msg/Float32", ""),
            "/step": ("std_msgs/msg/Int32", ""),
        },
        {
            "observation.state": [
                *("/robot/q data", "/grip/cmd/feedback data", "/battery/fraction data")
            ],
            "action": ["/robot/q_des data", "/leftArm/ctrl data"],
        },
    ),
    "a person moves another arm, and the base by commands": (
        {
            "/teleop/joint_states": ("sensor_msgs/msg/JointState", ""),
            "/robot/joint_states": ("sensor_msgs/msg/JointState", ""),
            "/cmd_vel": ("geometry_msgs/msg/Twist", ""),
        },
        {
            "observation.state": ["/robot/joint_states position"],
            "action": ["/teleop/joint_states position", "/cmd_vel linear", "/cmd_vel angular"],
        },
    ),
    "what a person moves is not needed beside the commands": (
        {
            "/leader/joint_states": ("sensor_msgs/msg/JointState", ""),
            "/follower/joint_states": ("sensor_msgs/msg/JointState", ""),
            "/follower/joint_commands": ("sensor_msgs/msg/JointState", ""),
            "/quest/left/pose": ("geometry_msgs/msg/PoseStamped", ""),
            "/joy": ("sensor_msgs/msg/Joy", ""),
        },
        {
            "observation.state": ["/follower/joint_states position"],
            "action": ["/follower/joint_commands position"],
        },
    ),
    "a gripper of Robotiq, whose words are those of its makers": (
        {"/gripper": ("robotiq_msgs/msg/Robotiq2FGripperRobotOutput", "uint8 r_act\nuint8 r_pr\n")},
        {"action": ["/gripper r_act", "/gripper r_pr"]},
    ),
    "a joystick, where nothing else commands": (
        {
            "/joy": ("sensor_msgs/msg/Joy", ""),
            "/tcp": ("geometry_msgs/msg/PoseStamped", ""),
        },
        {"observation.state": ["/tcp pose"], "action": ["/joy axes"]},
    ),
    "a gripper beside the joints, without what is derived, and no modes": (
        {
            "/arm/state": (
                "lab_msgs/msg/ArmState",
                "uint32 mode\nfloat64[] q\nfloat64[] dq\nfloat64[] tau_ext\nfloat64 width\n",
            ),
            "/arm/cmd": ("lab_msgs/msg/ArmCommand", "float64[] q\nfloat64 gripper\n"),
            "/arm/mode": ("lab_msgs/msg/Mode", "uint32 mode\nbool armed\n"),
        },
        {
            "observation.state": ["/arm/state q", "/arm/state width"],
            "action": ["/arm/cmd q", "/arm/cmd gripper"],
        },
    ),
    "a hand, whose motors are a list of any length": (
        {"/hand/state": ("lab_msgs/msg/HandState", "robot_msgs/Motor[] motor_state\nfloat32 v\n")},
        {"observation.state": ["/hand/state motor_state.q", "/hand/state v"]},
    ),
    "lists of motors alone, and a low-level command under the name of a library": (
        {
            "/inspire/state": ("robot_msgs/msg/MotorStates", "robot_msgs/Motor[] states\n"),
            "/arm_sdk": ("robot_msgs/msg/MotorCmd", "robot_msgs/Motor[2] all\nuint32 reserve\n"),
            "/remote": ("robot_msgs/msg/WirelessController", "float32 lx\nuint16 keys\n"),
        },
        {"observation.state": ["/inspire/state states.q"], "action": ["/arm_sdk all.q"]},
    ),
    "a message of what is there and what is wanted": (
        {
            "/rtde": (
                "lab_msgs/msg/Rtde",
                "float64[6] actual_q\nfloat64[6] target_q\nfloat64[6] target_qdd\n"
                "float64[3] goal_of_the_game\nint32 robot_mode\nuint32 runtime_state\n",
            )
        },
        {
            "observation.state": ["/rtde actual_q", "/rtde goal_of_the_game"],
            "action": ["/rtde target_q", "/rtde target_qdd"],
        },
    ),
    "what a person moves says its status, and a gripper beside an arm": (
        {
            "/arm_master_l_status": ("arx_msgs/msg/RobotStatus", "float64 ts\nfloat64[7] pos\n"),
            "/arm_slave_l_status": ("arx_msgs/msg/RobotStatus", ""),
            "/left/eef_pose": ("geometry_msgs/msg/PoseStamped", ""),
            "/left/gripper_width": ("std_msgs/msg/Float32", ""),
            "/flight_status": ("std_msgs/msg/UInt8", ""),
            "/piper": ("lab_msgs/msg/PosCmd", "float64 x\nint32 mode1\n"),
        },
        {
            "observation.state": ["/left/eef_pose pose", "/left/gripper_width data"],
            "observation.arm_slave_l_status": ["/arm_slave_l_status pos"],
            "action": ["/piper x"],
        },
    ),
    "a state by the name of its topic": (
        {
            "/robot/state": ("lab_msgs/msg/Schema", "float32 t\nfloat32[3] x\n"),
            "/speed": ("std_msgs/msg/Float64", ""),
            "/joint_states": ("sensor_msgs/msg/JointState", ""),
        },
        {
            "observation.state": ["/robot/state x", "/joint_states position"],
            "observation.speed": ["/speed data"],
        },
    ),
    "a target of as many numbers": (
        {"/arm": ("lab_msgs/msg/Arm3", "float64[3] joints\nfloat64[3] target\nfloat64[2] goal\n")},
        {"observation.state": ["/arm joints", "/arm goal"], "action": ["/arm target"]},
    ),
    "a controller of a kind of its own": (
        {
            "/arm/ctrl": (
                "lab_msgs/msg/Arm2",
                "float64[7] q_ref\nfloat64[7] q\nfloat64[7] q_error\n",
            )
        },
        {"action": ["/arm/ctrl q_ref"]},
    ),
    "a command beside what is there, in parts of one message": (
        {
            "/arms": (
                "lab_msgs/msg/Both",
                "lab_msgs/CarControl left\nlab_msgs/CarControl right\nlab_msgs/CarControl cmd\n",
            )
        },
        {"observation.state": ["/arms left", "/arms right"], "action": ["/arms cmd"]},
    ),
    "what a car was told, beside the command itself": (
        {
            "/car/control_cmd": ("lab_msgs/msg/CarControl", "float32 throttle\nfloat32 steer\n"),
            "/car/status": (
                "lab_msgs/msg/CarStatus",
                "float32 speed\nlab_msgs/CarControl control\n",
            ),
        },
        {
            "observation.state": ["/car/status speed"],
            "action": ["/car/control_cmd throttle", "/car/control_cmd steer"],
        },
    ),
    "a follower's pose as a Twist, an angle to set, and an autopilot's setpoints": (
        {
            "/puppet/end_pose_euler": ("geometry_msgs/msg/Twist", ""),
            "/hand/set_angle": ("std_msgs/msg/Float32MultiArray", ""),
            "/manual_control_setpoint": ("px4_msgs/msg/ManualControlSetpoint", "float32 roll\n"),
            "/timesync": ("px4_msgs/msg/TimesyncStatus", "uint64 timestamp\nint64 offset\n"),
            "/arm/report": (
                "xarm_msgs/msg/RobotMsg",
                "int16 state\nint16 cmdnum\nint16 mt_able\nint16 err\nfloat32[7] angle\n"
                "float32 max_angle\nuint32 set_id\n",
            ),
        },
        {
            "observation.state": [
                *("/puppet/end_pose_euler linear", "/puppet/end_pose_euler angular"),
                "/arm/report angle",
            ],
            "action": ["/hand/set_angle data"],
        },
    ),
    "a Franka of these days": (
        {
            "/robot_state": (
                "franka_msgs/msg/FrankaRobotState",
                "sensor_msgs/JointState measured_joint_state\n"
                "sensor_msgs/JointState desired_joint_state\ngeometry_msgs/PoseStamped o_t_ee\n",
            )
        },
        {
            "observation.state": [
                "/robot_state measured_joint_state.position",
                "/robot_state measured_joint_state.velocity",
                "/robot_state measured_joint_state.effort",
                "/robot_state o_t_ee.pose",
            ]
        },
    ),
    "a Franka": (
        {
            "/franka_states": (
                "franka_msgs/msg/FrankaState",
                "float64[7] q\nfloat64[7] q_d\nfloat64[7] dq\nfloat64[7] tau_J\n"
                "float64[16] O_T_EE\nfloat64[42] zero_jacobian\nfloat64 time\n",
            ),
            "/equilibrium_pose": ("geometry_msgs/msg/PoseStamped", ""),
        },
        {
            "observation.state": [f"/franka_states {n}" for n in ("q", "dq", "tau_J", "O_T_EE")],
            "action": ["/equilibrium_pose pose"],
        },
    ),
}


@pytest.mark.parametrize("what", ROBOTS)
def test_roles_of_real_robots(tmp_path, monkeypatch, what):
    topics, expected = ROBOTS[what]
    if "robot_msgs/msg/Motor" not in T:
        motor = "uint8 mode\nfloat32 q\nfloat32 dq\n"
        STORE.register(get_types_from_msg(motor, "robot_msgs/msg/Motor"))
        control = "float32 throttle\nfloat32 steer\n"
        STORE.register(get_types_from_msg(control, "lab_msgs/msg/CarControl"))
    for name, (kind, definition) in topics.items():
        monkeypatch.setitem(MESSAGES, name, message(kind, definition))
    with open_bag(write(tmp_path / "bag", dict.fromkeys(topics, 10.0))) as bag:
        assert sources(guess_mapping(bag)) == expected


def test_what_a_message_does_not_use_is_left_out(tmp_path, monkeypatch):
    """PX4 leaves NaN in what it does not control; an IMU says -1 of what it does not measure."""
    setpoint = "float32[3] position\nfloat32[3] velocity\nfloat32 yaw\n"
    unset = np.full(3, np.nan, np.float32)
    made = message("px4_msgs/msg/TrajectorySetpoint", setpoint, velocity=unset)
    imu = MESSAGES["/imu"]()
    empty = message("lab_msgs/msg/Odd", "float64 x\nfloat64[] x_covariance\n")()
    empty.x_covariance = np.empty(0)
    imu.orientation_covariance = np.array([-1.0] + [0.0] * 8)
    monkeypatch.setitem(MESSAGES, "/fmu/in/trajectory_setpoint", made)
    monkeypatch.setitem(MESSAGES, "/imu", lambda: imu)
    monkeypatch.setitem(MESSAGES, "/odd", lambda: empty)
    topics = dict.fromkeys(("/fmu/in/trajectory_setpoint", "/imu", "/odd"), 10.0)
    with open_bag(write(tmp_path / "bag", topics)) as bag:
        found = sources(guess_mapping(bag))
    assert found["action"] == [f"/fmu/in/trajectory_setpoint {it}" for it in ("position", "yaw")]
    assert found["observation.state"] == [
        *("/imu angular_velocity", "/imu linear_acceleration", "/odd x")
    ]


def record_all(path: Path, messages: list[tuple[str, float, object]]) -> Path:
    """Write messages: topic, seconds, content."""
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        known = {}
        for topic, second, content in messages:
            kind = content.__msgtype__
            if topic not in known:
                known[topic] = writer.add_connection(topic, kind, typestore=STORE)
            data = STORE.serialize_cdr(content, kind)
            writer.write(known[topic], 10**9 + round(second * 10**9), data)
    return path


def header_at(second: float) -> object:
    """Return a header of that moment."""
    whole, rest = divmod(10**9 + round(second * 10**9), 10**9)
    return T["std_msgs/msg/Header"](T["builtin_interfaces/msg/Time"](whole, rest), "")


def joint_state(second: float, names: list[str]) -> object:
    none = np.empty(0)
    return T["sensor_msgs/msg/JointState"](
        header_at(second), names, np.arange(len(names)) + second, none, none
    )


def raw_picture(second: float, empty: bool = False) -> object:
    data = np.full(0 if empty else 48 * 48 * 3, 90, np.uint8)
    size = 0 if empty else 48
    return T["sensor_msgs/msg/Image"](header_at(second), size, size, "rgb8", 0, size * 3, data)


def packed_picture(second: float) -> object:
    codec = av.CodecContext.create("mjpeg", "w")
    codec.width = codec.height = 48
    codec.pix_fmt, codec.time_base = "yuvj420p", Fraction(1, 30)
    frame = av.VideoFrame.from_ndarray(np.full((48, 48, 3), 90, np.uint8)).reformat(
        format="yuvj420p"
    )
    data = np.frombuffer(b"".join(map(bytes, codec.encode(frame))), np.uint8)
    return T["sensor_msgs/msg/CompressedImage"](header_at(second), "jpeg", data)


def test_drivers_that_begin_with_nothing(tmp_path):
    bag = record_all(
        tmp_path / "bag",
        [
            ("/joint_states", k / 50, joint_state(k / 50, ["a", "b"] if k > 4 else []))
            for k in range(100)
        ]
        + [("/cam", k / 30, raw_picture(k / 30, empty=k < 2)) for k in range(60)],
    )
    report = convert([bag], tmp_path / "out")
    assert report.ok
    assert list(report.mapping.features) == ["observation.state", "observation.images.cam"]
    assert report.dropped == {"before the first message of /joint_states": 3}
    frame = next(iter(Dataset(tmp_path / "out").episode(0).frames(["observation.state"])))
    assert np.allclose(frame["observation.state"], [0.1, 1.1])


def test_messages_without_numbers_say_nothing(tmp_path):
    """A policy that waits, a driver that gives efforts alone by turns, one of two commands."""
    message("lab_msgs/msg/Arm4", "float64[] q\nfloat64 width\nfloat64[] force\n")
    none, rows = np.empty(0), []
    for k in range(60):
        layout = T["std_msgs/msg/MultiArrayLayout"]([], 0)
        numbers = np.array([k, 1.0]) if k > 20 else none
        rows.append(("/policy/cmd", k / 20, T["std_msgs/msg/Float64MultiArray"](layout, numbers)))
        joints = joint_state(k / 20, ["a", "b"])
        if k % 4 == 1:
            joints.position, joints.effort = none, np.ones(2)
        rows.append(("/joint_states", k / 20, joints))
        q, force = (np.full(2, k), none) if k % 2 else (none, np.full(3, k))
        rows.append(("/gripper/arm", k / 20, T["lab_msgs/msg/Arm4"](q * 1.0, 0.5, force * 1.0)))
    report = convert([record_all(tmp_path / "bag", rows)], tmp_path / "out")
    assert report.ok, report.text()
    assert sources(report.mapping) == {
        "observation.state": ["/joint_states position"],
        "action": ["/policy/cmd data"],
        "observation.gripper_arm": [f"/gripper/arm {name}" for name in ("q", "width", "force")],
    }
    frames = list(Dataset(tmp_path / "out").episode(0).frames())
    assert len(frames) > 35
    for frame in frames:
        k = round(frame["action"][0])
        assert frame["observation.state"] == pytest.approx([k / 20, 1 + k / 20], abs=0.051)
        q, width, force = np.split(frame["observation.gripper_arm"], [2, 3])
        assert max(*abs(q - k), *abs(force - k)) <= 1 and width == 0.5


def test_many_topics_are_looked_at_in_one_pass(tmp_path, monkeypatch):
    topics = {f"/sensor_{number}": 20.0 for number in range(60)}
    for name in topics:
        monkeypatch.setitem(MESSAGES, name, message("std_msgs/msg/Float64", ""))
    with open_bag(write(tmp_path / "bag", topics)) as bag:
        opened_bytes = bag.bytes_read
        assert len(survey(bag).numbers) == len(topics)
        assert bag.bytes_read - opened_bytes < 3 * bag.size_bytes


def test_the_pictures_of_a_camera_are_taken_once(tmp_path):
    raw, packed = "/cam/image_raw", "/cam/image_raw/compressed"
    both = [(raw, k / 30, raw_picture(k / 30)) for k in range(60)]
    both += [(packed, k / 30, packed_picture(k / 30)) for k in range(60)]
    with open_bag(record_all(tmp_path / "bag", both)) as bag:
        found = survey(bag)
    assert list(found.cameras) == [raw]
    assert "once more" in found.left_out[packed]
    some = [it for it in both if it[0] == packed or it[1] < 1]  # the raw ones ended early
    with open_bag(record_all(tmp_path / "some", some)) as bag:
        assert list(survey(bag).cameras) == [packed]


def test_numbers_that_were_recorded_twice_are_taken_once(tmp_path, monkeypatch):
    for name in ("/odom", "/odom_throttle", "/lf/odom", "/left/odom"):
        monkeypatch.setitem(MESSAGES, name, odometry)
    rates = {"/odom_throttle": 5.0, "/lf/odom": 5.0, "/odom": 20.0, "/left/odom": 20.0}
    with open_bag(write(tmp_path / "bag", rates)) as bag:
        found = survey(bag)
    assert list(found.numbers) == ["/odom", "/left/odom"]
    assert "once more" in found.left_out["/lf/odom"]


def test_a_scan_that_changes_its_length_is_left_out(tmp_path, monkeypatch):
    """As cheap lidars have it; and of a message the numbers that do not."""
    scan = "sensor_msgs/msg/LaserScan"
    message("lab_msgs/msg/Taxels", "float32[] taxels\nfloat32[3] force\n")
    rows = [("/joint_states", k / 20, joint_state(k / 20, ["a", "b"])) for k in range(40)]
    for k in range(40):
        ranges = np.ones(360 + k % 3, np.float32)
        rows.append(("/scan", k / 20, message(scan, "", ranges=ranges, header=header())()))
        skin = T["lab_msgs/msg/Taxels"](np.ones(5 + k % 2, np.float32), np.ones(3, np.float32))
        rows.append(("/skin", k / 20, skin))
    bag = record_all(tmp_path / "bag", rows)
    with open_bag(bag) as opened:
        assert "360 to 362 numbers" in survey(opened).left_out["/scan"]
    report = convert([bag], tmp_path / "out")
    assert report.ok
    assert sources(report.mapping) == {
        "observation.state": ["/joint_states position"],
        "observation.skin": ["/skin force"],
    }


def test_bytes_that_are_few_at_first_are_bytes(tmp_path):
    kind = "event_msgs/msg/Packet"
    STORE.register(get_types_from_msg("uint32 height\nuint8[] events\n", kind))
    events = [("/events", k / 20, T[kind](480, np.zeros(k * 9, np.uint8))) for k in range(40)]
    with (
        open_bag(record_all(tmp_path / "bag", events)) as bag,
        pytest.raises(DataError, match="bytes, and numbers that describe them"),
    ):
        guess_mapping(bag)


def test_the_task_is_what_the_recording_says(tmp_path):
    says = T["std_msgs/msg/String"]
    states = [("/joint_states", k / 50, joint_state(k / 50, ["a"])) for k in range(100)]
    told = [("/language_instruction", 0.1, says("pick the cup")), ("/log", 0.1, says("hello"))]
    report = convert([record_all(tmp_path / "bag", told + states)], tmp_path / "out")
    assert report.ok
    assert [episode.tasks for episode in Dataset(tmp_path / "out").episodes] == [("pick the cup",)]
    assert report.left_out == ("/log",)
    odd = [("/task", 0.1, says('{"state": "running"}'))]
    with open_bag(record_all(tmp_path / "odd", odd + states)) as bag:
        assert guess_mapping(bag).tasks is None
    silent = record_all(tmp_path / "silent", states)  # not all of them say it: nobody is asked
    report = convert([tmp_path / "bag", silent], tmp_path / "both")
    assert report.ok
    assert report.mapping.tasks is None


def test_messages_that_were_all_received_at_one_time(tmp_path):
    """Bursts whose log times are equal are bursts as well: no stamp is a duplicate."""
    states = [("/joint_states", k // 10 / 10, joint_state(k / 100, ["a"])) for k in range(200)]
    report = convert([record_all(tmp_path / "bag", states)], tmp_path / "out")
    assert report.ok
    assert report.mapping.clock == "header"
    assert (report.frames_out, report.mapping.fps) == (200, 100)


@pytest.mark.parametrize("name", ["latitude", "lat", "latitude_deg"])
def test_coordinates_keep_their_digits(tmp_path, monkeypatch, name):
    kind = f"gps_msgs/msg/Global{name.title().replace('_', '')}"
    made = message(kind, f"float64 {name}\nfloat64 {name.replace('lat', 'lon')}\nfloat32 alt\n")
    monkeypatch.setitem(MESSAGES, "/global", made)
    with open_bag(write(tmp_path / "bag", {"/global": 10.0, "/odom": 10.0})) as bag:
        assert guess_mapping(bag).features["observation.global"].dtype == "float64"


@pytest.mark.parametrize(
    ("topic", "text", "dtype", "kind"),
    [
        ("/aligned", "16UC1; png compressed ", "u2", "depth"),  # its format says so
        ("/depth", "png", "u2", "depth"),
        ("/infrared", "mono16; png compressed ", "u2", "color"),
        ("/depth/colorized", "png", "u1", "color"),
    ],
)
def test_which_pictures_are_distances(tmp_path, monkeypatch, topic, text, dtype, kind):
    codec = av.CodecContext.create("png", "w")
    codec.width, codec.height, codec.time_base = 32, 16, Fraction(1, 10)
    codec.pix_fmt = "gray16be" if dtype == "u2" else "gray"
    frame = av.VideoFrame.from_ndarray(np.full((16, 32), 99, dtype), codec.pix_fmt)
    png = b"".join(bytes(packet) for packet in [*codec.encode(frame), *codec.encode(None)])
    image = T["sensor_msgs/msg/CompressedImage"](header(), text, np.frombuffer(png, np.uint8))
    monkeypatch.setitem(MESSAGES, topic, lambda: image)
    with open_bag(write(tmp_path / "bag", {topic: 10.0})) as bag:
        (camera,) = guess_mapping(bag).features.values()
    assert camera.kind == kind


def test_what_is_left_out_is_said(tmp_path, capsys, monkeypatch):
    """Whoever reads no manual learns that a topic is not in the dataset, and why."""
    monkeypatch.setenv("COLUMNS", "80")
    path = write(tmp_path / "bag", {"/odom": 10.0, "/points": 10.0, "/armed": 10.0})
    assert main(["info", str(path)]) == 0
    said = capsys.readouterr().out
    assert "/points   a point cloud" in said
    assert "/armed    a single flag" in said
    assert main(["convert", str(path), str(tmp_path / "out")]) == 0
    assert "left out:     /points, /armed: penstock info" in capsys.readouterr().out
    words = ["--set", "features.action.topic=/armed", "--set", "features.action.field=data"]
    assert main(["convert", str(path), str(tmp_path / "other"), *words]) == 0
    assert "left out:     /points: penstock info" in capsys.readouterr().out
    nothing = write(tmp_path / "nothing", {"/points": 10.0})
    assert main(["info", str(nothing)]) == 0
    assert "a point cloud" in capsys.readouterr().out


def test_what_cannot_be_read_says_why(tmp_path):
    from mcap.writer import Writer as McapWriter

    with (tmp_path / "bag.mcap").open("wb") as file:
        writer = McapWriter(file)
        writer.start()
        definition = b"wstring label\nfloat64[2] q\n"
        schema = writer.register_schema("my_msgs/msg/Wide", "ros2msg", definition)
        channel = writer.register_channel("/wide", "cdr", schema)
        writer.add_message(channel, 0, b"\0\1\0\0" + bytes(24), 0)
        writer.finish()
    with open_bag(tmp_path / "bag.mcap") as bag:
        assert "wstring cannot be read" in survey(bag).left_out["/wide"]


def test_the_report_fits_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "a folder with a long name and spaces"
    report = convert([write(tmp_path / "bag", {"/odom": 20.0, "/cmd_vel": 5.0})], out, check=True)
    lines = report.text().splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80
    # What is said next can be pasted into a shell.
    words = shlex.split(report.text()[report.text().index("lerobot-train") :])
    assert words[0] == "lerobot-train"
    assert f"--dataset.root={out}" in words
