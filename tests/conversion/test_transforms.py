"""`/tf` by frame pair, and trajectories: from the message to the column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

import penstock
from penstock.bags import open_bag
from penstock.conversion.guess import guess_mapping, survey
from penstock.conversion.settings import from_json
from penstock.dataset.reader import Dataset
from penstock.errors import DataError, UsageError

STORE = get_typestore(Stores.ROS2_HUMBLE)
STORE1 = get_typestore(Stores.ROS1_NOETIC)
STORE1.register(
    get_types_from_msg("geometry_msgs/TransformStamped[] transforms\n", "tf2_msgs/msg/TFMessage")
)
QUIET = {"progress": "quiet", "memory": "1GB"}
FOXGLOVE = Path(__file__).parents[1] / "bags" / "foxglove.mcap"


def header(types: dict[str, Any], frame: str) -> Any:
    words = (types["builtin_interfaces/msg/Time"](1, 0), frame)
    kind = types["std_msgs/msg/Header"]
    return kind(0, *words) if "seq" in kind.__dataclass_fields__ else kind(*words)


def transform(types: dict[str, Any], parent: str, child: str, x: float) -> Any:
    return types["geometry_msgs/msg/TransformStamped"](
        header(types, parent),
        child,
        types["geometry_msgs/msg/Transform"](
            types["geometry_msgs/msg/Vector3"](x, 2.0, 3.0),
            types["geometry_msgs/msg/Quaternion"](0.0, 0.0, 0.0, 1.0),
        ),
    )


def write(path: Path, ros: int = 2) -> Path:
    """Write 5 s: odom>base in every message of /tf, map>odom in every tenth, a fixed one, too."""
    store = STORE if ros == 2 else STORE1
    types = store.types
    kind = "tf2_msgs/msg/TFMessage"
    writer = (
        Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) if ros == 2 else Writer1(path)
    )
    with writer:
        serialise = store.serialize_cdr if ros == 2 else store.serialize_ros1
        moving = writer.add_connection("/tf", kind, typestore=store)
        fixed = writer.add_connection("/tf_static", kind, typestore=store)
        message = types[kind]([transform(types, "base", "camera", 0.5)])
        writer.write(fixed, 10**9, serialise(message, kind))
        for k in range(250):
            items = [transform(types, "base", "wheel", 7.0), transform(types, "/odom", "base", k)]
            if k % 10 == 0:
                items.insert(0, transform(types, "map", "odom", -k))
            t_ns = 10**9 + k * 20_000_000
            writer.write(moving, t_ns, serialise(types[kind](items), kind))
    return path


def column(out: Path, name: str) -> np.ndarray[Any, Any]:
    return np.array([frame[name] for frame in Dataset(out).episode(0).frames()])


@pytest.mark.parametrize("ros", [1, 2])
def test_by_frame_pair(tmp_path, ros):
    bag = write(tmp_path / ("bag" if ros == 2 else "a.bag"), ros)
    features = {
        "observation.state": {"topic": "/tf", "frame": ["odom", "base"]},
        "observation.map": {"topic": "/tf", "frame": ["map", "/odom"], "align": "hold",
                            "tolerance_s": 0, "select": [0, 3]},
    }  # fmt: skip
    mapping = from_json({"fps": 50, "timeline": 50, "features": features})
    report = penstock.convert(bag, tmp_path / "out", mapping, **QUIET)
    assert report.ok, report.text()
    state, other = (column(tmp_path / "out", f"observation.{n}") for n in ("state", "map"))
    assert state[:, 0].tolist() == list(range(250))
    assert state[0, 1:].tolist() == [2, 3, 0, 0, 0, 1]
    assert other[:, 0].tolist() == [-(k // 10) * 10 for k in range(250)]
    assert Dataset(tmp_path / "out").features["observation.state"].names[0] == "base.x"


def test_the_guess_takes_what_moves(tmp_path):
    with open_bag(write(tmp_path / "bag")) as bag:
        found = survey(bag)
        assert found.numbers["/tf"].fields == ("odom>base", "map>odom")
        assert "static" in found.left_out["/tf_static"]
        assert guess_mapping(bag).features
    report = penstock.convert(tmp_path / "bag", tmp_path / "out", **QUIET)
    assert report.ok, report.text()
    assert column(tmp_path / "out", "observation.state").shape == (250, 14)


def test_the_transforms_of_foxglove(tmp_path):
    with open_bag(FOXGLOVE) as bag:
        decoder = bag.decoder("/tf")
        message = next(iter(bag.read(["/tf"])))
        (pair, *_) = decoder.transforms.pairs(message.data)
        assert len(decoder.vector(message.data, pair)) == 7
        alone = next(iter(bag.read(["/tf1"])))
        assert bag.decoder("/tf1").transforms.pairs(alone.data)


def test_mistakes_are_named(tmp_path):
    bag = write(tmp_path / "bag")
    for frame, reason in [(["odom", "bas"], "no transform odom>bas: did you mean 'odom>base'")]:
        mapping = from_json({"fps": 50, "features": {"a": {"topic": "/tf", "frame": frame}}})
        with pytest.raises(DataError, match=reason):
            penstock.convert(bag, tmp_path / "out", mapping, **QUIET)
    for frame in ("odom", ["odom"], ["odom", 3]):
        with pytest.raises(UsageError, match="give two names"):
            from_json({"fps": 50, "features": {"a": {"topic": "/tf", "frame": frame}}})


def test_trajectories_and_their_joints(tmp_path):
    """The first point; by the names of the joints, whatever their order."""
    types = STORE.types
    duration = types["builtin_interfaces/msg/Duration"](0, 0)
    empty = np.empty(0)

    def trajectory(k: int) -> Any:
        names, places = (["a", "b"], [k, -k]) if k % 2 else (["b", "a"], [-k, k])
        point = types["trajectory_msgs/msg/JointTrajectoryPoint"](
            np.array(places, float), empty, empty, empty, duration
        )
        return types["trajectory_msgs/msg/JointTrajectory"](
            header(types, "base"), names, [point, point]
        )

    def multi(k: int) -> Any:
        place = transform(types, "a", "b", k).transform
        return types["sensor_msgs/msg/MultiDOFJointState"](
            header(types, "base"), ["float"], [place], [], []
        )

    with Writer(tmp_path / "bag", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        for topic, make in (("/arm", trajectory), ("/base", multi)):
            kind = make(0).__msgtype__
            known = writer.add_connection(topic, kind, typestore=STORE)
            for k in range(50):
                writer.write(known, 10**9 + k * 10**8, STORE.serialize_cdr(make(k), kind))
    report = penstock.convert(tmp_path / "bag", tmp_path / "out", **QUIET)
    assert report.ok, report.text()
    dataset = Dataset(tmp_path / "out")
    assert dataset.features["action"].names == ["b", "a"]
    assert column(tmp_path / "out", "action").tolist() == [[-k, k] for k in range(50)]
    (name,) = {n for n in dataset.features if n.startswith("observation.")}
    assert column(tmp_path / "out", name)[:, 0].tolist() == list(range(50))
