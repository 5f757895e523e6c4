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
from rosbags.typesys import Stores, get_typestore

from penstock import convert
from penstock.conversion import features
from penstock.conversion.settings import from_json
from penstock.errors import DataError

TYPE = "sensor_msgs/msg/JointState"
MAP = {
    "fps": 10,
    "features": {"observation.state": {"topic": "/joints", "field": "position"}},
}
VALUES = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}


def write(path: Path, orders: list[str], kind: str = "mcap", velocity: bool = False) -> Path:
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
            values = np.array([VALUES[joint] + number for joint in order])
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
    return np.concatenate(
        [np.stack(pq.read_table(file)["observation.state"].to_pylist()) for file in files]
    )


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
    with pytest.raises(DataError, match=rf"{problem}.*`select`"):
        convert([write(tmp_path / "take", orders)], tmp_path / "out", map=from_json(MAP))


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
