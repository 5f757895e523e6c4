"""A robot is one file: the one that the documentation shows is found, and its units are right."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

import penstock
from penstock.conversion import robots
from penstock.dataset.reader import Dataset
from penstock.errors import UsageError

STORE = get_typestore(Stores.ROS2_HUMBLE)
T = STORE.types
PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"


@pytest.fixture
def my_arm(tmp_path, monkeypatch):
    """Put the robot of the documentation into the folder of robots."""
    section = PAGE.read_text(encoding="utf-8").partition("## Add a robot")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    (tmp_path / "robots").mkdir()
    (tmp_path / "robots" / "my_arm.py").write_text(code[1])
    monkeypatch.setattr(robots, "__path__", [*robots.__path__, str(tmp_path / "robots")])
    yield
    sys.modules.pop("penstock.conversion.robots.my_arm", None)


def record(path: Path, topics: tuple[str, ...]) -> Path:
    kind = "std_msgs/msg/Float64MultiArray"
    layout = T["std_msgs/msg/MultiArrayLayout"]([], 0)
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        for topic in topics:
            known = writer.add_connection(topic, kind, typestore=STORE)
            for k in range(60):
                message = T[kind](layout, np.array([90.0, float(k)]))
                writer.write(known, k * 10**9 // 30, STORE.serialize_cdr(message, kind))
    return path


def test_the_robot_of_the_documentation(tmp_path, my_arm):
    bag = record(tmp_path / "bag", ("/arm/angles", "/arm/goal"))
    report = penstock.convert(bag, tmp_path / "out", progress="quiet")
    assert report.ok
    assert report.mapping.robot_type == "my_arm"
    frame = next(iter(Dataset(tmp_path / "out").episode(0).frames(["observation.state", "action"])))
    assert np.allclose([frame["observation.state"][0], frame["action"][0]], np.pi / 2, atol=1e-4)


def test_other_robots_are_left_alone(tmp_path, my_arm):
    report = penstock.convert(
        record(tmp_path / "bag", ("/arm/angles",)), tmp_path / "out", progress="quiet"
    )
    assert report.mapping.robot_type == "unknown"


def test_kuavo_is_one_of_them():
    assert "Kuavo" in [robot.name for robot in robots.known_robots()]
    assert robots.recognise(["/sensors_data_raw", "/kuavo_arm_traj"]).name == "Kuavo"
    assert robots.recognise(["/sensors_data_raw"]) is None


def test_a_settings_file_of_no_robot_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("speed: 3\n")
    with pytest.raises(UsageError, match="unknown key 'speed'"):
        robots.load_config(path)
