"""What a mapping can ask of a topic: joints by name, units, windows, stamps, float64, one word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

import penstock
from penstock.cli import main
from penstock.conversion.settings import from_json
from penstock.dataset.reader import Dataset
from penstock.errors import DataError, UsageError

STORE = get_typestore(Stores.ROS2_HUMBLE)
T = STORE.types
QUIET = {"progress": "quiet", "memory": "1GB"}
START_NS = 1_700_000_000 * 10**9
NAMES = ["arm_1", "arm_2", "gripper", "wheel"]


def joints(k: int, places: Any = range(4)) -> Any:
    """A JointState whose numbers tell joint and moment, in any order."""
    header = T["std_msgs/msg/Header"](T["builtin_interfaces/msg/Time"](0, 0), "")
    order = list(places)
    position = np.array([1000.0 * (p + 1) + k for p in order])
    names = [NAMES[p] for p in order]
    return T["sensor_msgs/msg/JointState"](header, names, position, -position, np.empty(0))


def fix(k: int) -> Any:
    header = T["std_msgs/msg/Header"](T["builtin_interfaces/msg/Time"](0, 0), "")
    status = T["sensor_msgs/msg/NavSatStatus"](0, 1)
    words = (48.1234567 + k * 1e-7, 11.7654321, 500.0, np.zeros(9), 0)
    return T["sensor_msgs/msg/NavSatFix"](header, status, *words)


def record(path: Path, topics: dict[str, tuple[int, Any]], seconds: float = 3.0) -> Path:
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        rows = []
        for topic, (hz, make) in topics.items():
            kind = make(0).__msgtype__
            known = writer.add_connection(topic, kind, typestore=STORE)
            for k in range(round(seconds * hz)):
                t_ns = START_NS + k * 10**9 // hz
                rows.append((t_ns, known, STORE.serialize_cdr(make(k), kind)))
        for t_ns, known, data in sorted(rows, key=lambda row: row[0]):
            writer.write(known, t_ns, data)
    return path


def convert(bag: Path, out: Path, feature: dict[str, Any], **settings: Any) -> tuple[Any, Any]:
    content = {"fps": 10, "timeline": 10, "features": {"observation.state": feature}, **settings}
    report = penstock.convert(bag, out, from_json(content), **QUIET)
    assert report.ok, report.text()
    return Dataset(out), report


def column(dataset: Dataset, name: str = "observation.state") -> np.ndarray[Any, Any]:
    return np.array([frame[name] for frame in dataset.episode(0).frames()])


@pytest.fixture
def bag(tmp_path):
    """Joints in an order that changes, and a GPS."""
    shuffled = lambda k: joints(k, np.random.default_rng(k).permutation(4) if k else range(4))  # noqa: E731
    return record(tmp_path / "bag", {"/joints": (10, shuffled), "/fix": (10, fix)})


def test_joints_by_pattern(tmp_path, bag):
    source = {"topic": "/joints", "field": "position[arm_*, wheel]"}
    dataset, _ = convert(bag, tmp_path / "out", source)
    assert dataset.features["observation.state"].names == ["arm_1", "arm_2", "wheel"]
    expected = [[1000 + k, 2000 + k, 4000 + k] for k in range(len(column(dataset)))]
    assert column(dataset).tolist() == expected


def test_exclude_scale_and_offset(tmp_path, bag):
    source = {"topic": "/joints", "field": "position", "exclude": ["arm_*"]}
    dataset, _ = convert(bag, tmp_path / "out", {**source, "scale": 0.5, "offset": -1500})
    assert dataset.features["observation.state"].names == ["gripper", "wheel"]
    assert column(dataset)[4].tolist() == [2.0, 502.0]


def test_several_fields_in_one_source(tmp_path, bag):
    source = {"topic": "/joints", "field": ["position[gripper]", "velocity[gripper]"]}
    dataset, _ = convert(bag, tmp_path / "out", source)
    assert column(dataset)[7].tolist() == [3007.0, -3007.0]
    names = dataset.features["observation.state"].names
    assert names == ["gripper.position", "gripper.velocity"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"field": "position[leg_*]"}, "no number named 'leg_\\*'"),
        ({"field": "position", "exclude": ["weel"]}, "did you mean 'wheel'"),
        ({"topic": "/fix", "field": "position_covariance[a*]"}, "use select instead of names"),
    ],
)
def test_names_that_are_not_there(tmp_path, bag, source, reason):
    with pytest.raises(DataError, match=reason):
        convert(bag, tmp_path / "out", {"topic": "/joints", **source})


def test_a_window_of_a_fast_topic(tmp_path):
    """The last messages up to the frame's own, the oldest first; at the start the first again."""
    bag = record(tmp_path / "bag", {"/fast": (100, joints), "/slow": (10, joints)})
    source = {"topic": "/fast", "field": "position[arm_1, wheel]", "align": "hold", "window": 5}
    dataset, _ = convert(bag, tmp_path / "out", source)
    rows = column(dataset)
    assert dataset.features["observation.state"].shape == (5, 2)
    assert rows.shape[1:] == (5, 2)
    for k, row in enumerate(rows):
        expected = [max(10 * k - lag, 0) + 1000 for lag in (4, 3, 2, 1, 0)]
        assert row[:, 0].tolist() == expected
        assert (row[:, 1] - row[:, 0]).tolist() == [3000.0] * 5


def test_true_stamps(tmp_path):
    """Of a timeline with jitter, beside k / fps."""
    bag = record(tmp_path / "bag", {"/joints": (30, joints)})
    dataset, _ = convert(
        bag, tmp_path / "out", {"topic": "/joints", "field": "position"}, stamps=True, fps=30,
        timeline="/joints",
    )  # fmt: skip
    stamps = column(dataset, "observation.stamp").reshape(-1)
    assert np.allclose(stamps, START_NS / 1e9 + np.arange(90) / 30, atol=1e-6)
    assert dataset.features["observation.stamp"].dtype == "float64"


def test_precision(tmp_path, bag):
    """A metre of GPS is the fifth digit of a degree: float32 loses it, and says so."""
    source = {"topic": "/fix", "field": "latitude"}
    _, report = convert(bag, tmp_path / "single", source)
    assert any("dtype: float64" in note for note in report.account.notes)
    dataset, report = convert(bag, tmp_path / "double", {**source, "dtype": "float64"})
    assert "dtype" not in report.text()
    got = column(dataset).reshape(-1)
    assert got.tolist() == [48.1234567 + k * 1e-7 for k in range(len(got))]
    assert dataset.features["observation.state"].dtype == "float64"
    _, report = convert(bag, tmp_path / "joints", {"topic": "/joints", "field": "position"})
    assert "dtype" not in report.text()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--set", "features.action.topic=/other"], ["a"]),
        (["features.action={topic: /joints, field: 'velocity[arm_1]'}"], ["arm_1"]),
        (["--set", "features.action.exclude=[arm_*, wheel]"], ["gripper"]),
    ],
)
def test_one_word_on_the_command_line(tmp_path, words, names):
    other = lambda k: T["sensor_msgs/msg/JointState"](  # noqa: E731
        joints(k).header, ["a"], np.array([k * 1.0]), np.empty(0), np.empty(0)
    )
    bag = record(
        tmp_path / "bag", {"/joints": (10, joints), "/cmd": (10, joints), "/other": (10, other)}
    )
    assert main(["convert", str(bag), str(tmp_path / "out"), *words]) == 0
    assert Dataset(tmp_path / "out").features["action"].names == names


def test_a_feature_is_left_out_by_a_word(tmp_path, bag):
    assert main(["convert", str(bag), str(tmp_path / "out"), "features.observation.fix=null"]) == 0
    assert "observation.fix" not in Dataset(tmp_path / "out").features


@pytest.mark.parametrize(
    ("feature", "reason"),
    [
        ({"window": 0}, "give 1 to 10000"),
        ({"window": 3, "align": "linear"}, "cannot be aligned 'linear'"),
        ({"window": 3, "relative_start": True}, "takes numbers as they are"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"exclude": 3}, "give a list of names"),
    ],
)
def test_mistakes_are_named(feature, reason):
    with pytest.raises(UsageError, match=reason):
        from_json({"fps": 10, "features": {"a": {"topic": "/a", "field": "b", **feature}}})


def test_words_that_have_no_place(tmp_path, bag, capsys):
    for words in (["--set", "features"], ["--set", "features.observation.state.topik=/a"]):
        assert main(["convert", str(bag), str(tmp_path / "out"), *words]) == 2
