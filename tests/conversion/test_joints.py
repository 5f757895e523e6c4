"""Joints are taken by their names, never by their places."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer as Writer2
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from penstock import convert
from penstock.conversion import features
from penstock.conversion.settings import from_json
from penstock.errors import DataError

TYPE = "sensor_msgs/msg/JointState"
MAP = {
    "fps": 10,
    "features": {"observation.state": {"topic": "/joints", "field": "position"}},
}
VALUES = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "\n": 5.0}


def write(
    path: Path,
    orders: list[str],
    kind: str = "mcap",
    velocity: bool = False,
    nameless: bool = False,
) -> Path:
    """Write a bag of JointStates at 10 Hz; each message names its joints, a letter each."""
    if kind == "ros1":
        store, writer = get_typestore(Stores.ROS1_NOETIC), Writer1(path.with_suffix(".bag"))
        serialize = store.serialize_ros1
    else:
        store = get_typestore(Stores.ROS2_HUMBLE)
        writer = Writer2(path, version=9, storage_plugin=StoragePlugin.MCAP)
        serialize = store.serialize_cdr
    types = store.types
    with writer:
        connection = writer.add_connection("/joints", TYPE, typestore=store)
        for number, order in enumerate(orders):
            stamp = types["builtin_interfaces/msg/Time"](number // 10, number % 10 * 10**8)
            # The length of the frame's name moves what follows: CDR pads it.
            words = {"stamp": stamp, "frame_id": "f" * (number % 5)}
            if kind == "ros1":
                words["seq"] = number
            values = np.array([VALUES[joint] + number for joint in order or "abc" * nameless])
            message = types[TYPE](
                types["std_msgs/msg/Header"](**words),
                [f"joint_{joint}" for joint in order],
                values,
                values * 10 if velocity else np.empty(0),
                np.empty(0),
            )
            writer.write(connection, (number + 1) * 10**8, serialize(message, TYPE))
    return path.with_suffix(".bag") if kind == "ros1" else path


def state(out: Path) -> np.ndarray:
    files = sorted((out / "data").rglob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file)["observation.state"].to_pylist()]
    return np.array(rows).reshape(len(rows), -1)


def names(out: Path) -> object:
    return json.loads((out / "meta/info.json").read_text())["features"]["observation.state"][
        "names"
    ]


@pytest.mark.parametrize("kind", ["mcap", "ros1"])
def test_another_order_in_later_messages(tmp_path, kind):
    bag = write(tmp_path / "take", ["abc"] * 7 + ["cab"] * 6 + ["bca", "abc"] * 4, kind)
    convert([bag], tmp_path / "out", map=from_json(MAP), check=False)
    found = state(tmp_path / "out")
    assert np.array_equal(found - found[:, :1], np.tile([0.0, 1.0, 2.0], (len(found), 1)))
    assert names(tmp_path / "out") == ["joint_a", "joint_b", "joint_c"]


def test_another_order_in_later_bags(tmp_path):
    bags = [write(tmp_path / str(k), [order] * 12) for k, order in enumerate(("abc", "cab"))]
    convert(bags, tmp_path / "out", map=from_json(MAP), check=False)
    convert(
        [write(tmp_path / "2", ["bca"] * 12)], tmp_path / "out", map=from_json(MAP), append=True
    )
    found = state(tmp_path / "out")
    assert len(found) >= 33
    assert np.array_equal(found - found[:, :1], np.tile([0.0, 1.0, 2.0], (len(found), 1)))
    assert names(tmp_path / "out") == ["joint_a", "joint_b", "joint_c"]


@pytest.mark.parametrize(
    ("orders", "problem"),
    [
        (["abc"] * 8 + ["ab"] * 8, "lacks joint_c"),
        (["abc"] * 8 + ["abcd"] * 8, "has joint_d besides"),
        (["abc"] * 8 + ["abd"] * 8, "lacks joint_c and has joint_d besides"),
    ],
)
def test_other_joints_are_refused(tmp_path, orders, problem):
    with pytest.raises(DataError, match=rf"{problem}: the joints must stay"):
        convert([write(tmp_path / "take", orders)], tmp_path / "out", map=from_json(MAP))


PARTIAL = {
    "fps": 10,
    "features": {
        "observation.state": {"topic": "/joints", "field": "position", "partial": True},
    },
}


@pytest.mark.parametrize("kind", ["mcap", "ros1"])
@pytest.mark.parametrize("guessed", [True, False])
def test_an_arm_and_its_gripper_speak_by_turns(tmp_path, kind, guessed):
    """Each number is what was last said of its joint; nothing is made up before that."""
    orders = ["ab", "ba", "c", "ab", "d", *["ba", "c", "ab", "cd", ""] * 4]
    bag = write(tmp_path / "take", orders, kind)
    report = convert([bag], tmp_path / "out", map=None if guessed else from_json(PARTIAL))
    assert report.ok, report.text()
    said: dict[str, float] = {}
    rows = []
    for number, order in enumerate(orders):
        said |= {joint: VALUES[joint] + number for joint in order}
        if len(said) == 4:
            rows.append([said[joint] for joint in "abcd"])
    assert state(tmp_path / "out").tolist() == rows
    assert names(tmp_path / "out") == [f"joint_{joint}" for joint in "abcd"]


def test_a_joint_that_nobody_named_at_first_is_refused(tmp_path):
    bag = write(tmp_path / "take", ["ab", "c"] * 300 + ["d"])
    with pytest.raises(DataError, match="has joint_d besides"):
        convert([bag], tmp_path / "out", map=from_json(PARTIAL))
    with pytest.raises(DataError, match="partial: true"):
        convert([bag], tmp_path / "whole", map=from_json(MAP))
    nameless = write(tmp_path / "nameless", [""] * 10, nameless=True)
    with pytest.raises(DataError, match="drop partial"):
        convert([nameless], tmp_path / "none", map=from_json(PARTIAL))


def test_a_bag_with_other_joints_fails_alone(tmp_path):
    bags = [write(tmp_path / "1", ["abc"] * 12), write(tmp_path / "2", ["abd"] * 12)]
    report = convert(bags, tmp_path / "out", map=from_json(MAP), check=False)
    assert "lacks joint_c and has joint_d besides" in report.failed[bags[1]]
    assert len(state(tmp_path / "out")) <= 12


def test_two_fields_of_the_same_joints(tmp_path):
    sources = [{"topic": "/joints", "field": field} for field in ("position", "velocity")]
    recipe = {"fps": 10, "features": {"observation.state": {"sources": sources}}}
    bag = write(tmp_path / "take", ["ab"] * 6 + ["ba"] * 6, velocity=True)
    convert([bag], tmp_path / "out", map=from_json(recipe), check=False)
    found = state(tmp_path / "out")
    assert np.array_equal(found[:, 2:], found[:, :2] * 10)
    assert np.array_equal(found[:, 1] - found[:, 0], np.ones(len(found)))
    assert names(tmp_path / "out") == [
        *("joint_a.position", "joint_b.position"),
        *("joint_a.velocity", "joint_b.velocity"),
    ]


def test_names_of_the_mapping_stay(tmp_path):
    feature = {"topic": "/joints", "field": "position", "names": ["x", "y", "z"]}
    recipe = {"fps": 10, "features": {"observation.state": feature}}
    bag = write(tmp_path / "take", ["abc"] * 6 + ["cba"] * 6)
    convert([bag], tmp_path / "out", map=from_json(recipe), check=False)
    found = state(tmp_path / "out")
    assert np.array_equal(found - found[:, :1], np.tile([0.0, 1.0, 2.0], (len(found), 1)))
    assert names(tmp_path / "out") == ["x", "y", "z"]


def test_a_dataset_without_names_goes_on(tmp_path, monkeypatch):
    """Those of earlier versions have none."""
    with monkeypatch.context() as patch:
        patch.setattr(features, "_joint_names", lambda joints, length: None)
        convert([write(tmp_path / "1", ["abc"] * 12)], tmp_path / "out", map=from_json(MAP))
    assert names(tmp_path / "out") is None
    late = write(tmp_path / "2", ["abc"] * 6 + ["cab"] * 6)
    convert([late], tmp_path / "out", map=from_json(MAP), append=True)
    found = state(tmp_path / "out")
    assert np.array_equal(found - found[:, :1], np.tile([0.0, 1.0, 2.0], (len(found), 1)))
    assert names(tmp_path / "out") is None


TWO = [["abc"] * 12, ["cab"] * 12]


def convert_two(tmp_path: Path, features: dict, orders: list[list[str]] = TWO) -> np.ndarray:
    """Convert bags of other orders, then append the last once more; return the state."""
    recipe = from_json({"fps": 10, "features": features})
    bags = [write(tmp_path / str(k), order) for k, order in enumerate(orders)]
    convert(bags[:1], tmp_path / "out", map=recipe, check=False)
    for bag in bags[1:]:
        report = convert([bag], tmp_path / "out", map=recipe, check=False, append=True)
        assert report.ok, report.text()
    together = convert(bags, tmp_path / "together", map=recipe, check=False)
    assert together.ok, together.text()
    assert np.array_equal(state(tmp_path / "out"), state(tmp_path / "together"))
    found = state(tmp_path / "out")
    return found - np.tile(np.arange(len(found) // len(bags)), len(bags))[:, None]


def source(**words: object) -> dict:
    return {"topic": "/joints", "field": "position", **words}


@pytest.mark.parametrize(
    ("feature", "wanted"),
    [
        ({"sources": [source(select=[0, 2]), source(select=[2, 3], threshold=2.5)]}, None),
        ({"sources": [source(select=[1, 2])]}, [2.0]),
        ({"sources": [source(), source(select=[0, 1])]}, [1.0, 2.0, 3.0, 1.0]),
        ({**source(), "names": ["x", "y", "z"]}, [1.0, 2.0, 3.0]),
        ({**source(), "names": ["x", "y", "z"], "names_key": "motors"}, [1.0, 2.0, 3.0]),
    ],
)
def test_the_order_is_put_right_before_anything_is_made_of_the_numbers(tmp_path, feature, wanted):
    found = convert_two(tmp_path, {"observation.state": feature})
    if wanted is None:  # the threshold is of joint c, in every bag
        assert np.array_equal(found[:, :2], np.tile([1.0, 2.0], (len(found), 1)))
    else:
        assert np.array_equal(found, np.tile(wanted, (len(found), 1)))


@pytest.mark.parametrize(
    ("orders", "problem"),
    [
        ([""] + ["abc"] * 9, "names its joints, and the first message did not"),
        (["abc"] * 5 + [""] * 5, "names no joints|changes its shape|has 0 numbers"),
    ],
)
def test_names_that_come_and_go(tmp_path, orders, problem):
    bag = write(tmp_path / "take", orders, nameless=True)
    with pytest.raises(DataError, match=problem):
        convert([bag], tmp_path / "out", map=from_json(MAP))


def test_one_joint_by_its_place(tmp_path):
    recipe = from_json({"fps": 10, "features": {"observation.state": source(field="position[0]")}})
    convert([write(tmp_path / "1", ["abc"] * 9)], tmp_path / "out", map=recipe, check=False)
    with pytest.raises(DataError, match="another joint than before: use `select`"):
        bag = write(tmp_path / "2", ["abc"] * 5 + ["cab"] * 5)
        convert([bag], tmp_path / "other", map=recipe)


def test_hostile_names_stay_on_one_line(tmp_path):
    bags = [write(tmp_path / "1", ["abc"] * 12), write(tmp_path / "2", ["ab\n"] * 12)]
    report = convert(bags, tmp_path / "out", map=from_json(MAP), check=False)
    assert "lacks joint_c and has joint_? besides" in report.failed[bags[1]]


@pytest.mark.parametrize(
    ("kind", "definition", "field"),
    [
        ("baxter_core_msgs/msg/JointCommand", "float64[] command\nstring[] names\n", "command"),
        (
            "lab_msgs/msg/ControllerState",
            "string[] joint_names\ntrajectory_msgs/JointTrajectoryPoint feedback\n",
            "feedback.positions",
        ),
    ],
)
def test_names_stand_beside_the_numbers_or_above_them(tmp_path, kind, definition, field):
    store = get_typestore(Stores.ROS2_HUMBLE)
    store.register(get_types_from_msg(definition, kind))
    with Writer2(tmp_path / "bag", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        known = writer.add_connection("/joints", kind, typestore=store)
        for number, order in enumerate(["abc"] * 6 + ["cab"] * 6):
            values = np.array([VALUES[joint] for joint in order])
            if "." in field:
                point = store.types["trajectory_msgs/msg/JointTrajectoryPoint"]
                time = store.types["builtin_interfaces/msg/Duration"](0, 0)
                message = store.types[kind]([*order], point(values, *[np.empty(0)] * 3, time))
            else:
                message = store.types[kind](values, [*order])
            writer.write(known, (number + 1) * 10**8, store.serialize_cdr(message, kind))
    recipe = {"fps": 10, "features": {"observation.state": {"topic": "/joints", "field": field}}}
    convert([tmp_path / "bag"], tmp_path / "out", map=from_json(recipe), check=False)
    assert state(tmp_path / "out").tolist() == [[1.0, 2.0, 3.0]] * 12
    assert names(tmp_path / "out") == ["a", "b", "c"]


def test_joints_keep_their_names_beside_numbers_that_have_none(tmp_path):
    store = get_typestore(Stores.ROS2_HUMBLE)
    twist, xyz = store.types["geometry_msgs/msg/Twist"], store.types["geometry_msgs/msg/Vector3"]
    array, layout = (
        store.types[f"std_msgs/msg/{n}"] for n in ("Float64MultiArray", "MultiArrayLayout")
    )
    header = store.types["std_msgs/msg/Header"](
        store.types["builtin_interfaces/msg/Time"](0, 0), ""
    )
    messages = {
        "/joints": store.types[TYPE](
            header, ["joint_a", "joint_b"], np.ones(2), *[np.empty(0)] * 2
        ),
        "/base": twist(xyz(1.0, 2.0, 3.0), xyz(4.0, 5.0, 6.0)),
        "/numbers": array(layout([], 0), np.arange(2.0)),
    }
    with Writer2(tmp_path / "bag", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        for topic, message in messages.items():
            known = writer.add_connection(topic, message.__msgtype__, typestore=store)
            for number in range(12):
                data = store.serialize_cdr(message, message.__msgtype__)
                writer.write(known, (number + 1) * 10**8, data)
    fields = {"/joints": "position", "/base": "linear", "/numbers": "data"}
    sources = [{"topic": topic, "field": field} for topic, field in fields.items()]
    recipe = {"fps": 10, "features": {"observation.state": {"sources": sources}}}
    convert([tmp_path / "bag"], tmp_path / "out", map=from_json(recipe), check=False)
    assert names(tmp_path / "out") == [
        *("joint_a", "joint_b", "linear.x", "linear.y", "linear.z", "data[0]", "data[1]")
    ]
