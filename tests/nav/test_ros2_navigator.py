"""The ROS 2 example, without ROS: real message types, and the simulator as the judge."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rosbags.typesys import Stores, get_typestore

from penstock.nav import Navigator
from penstock.nav.shield import Shield
from penstock.nav.simulation.kernels import POSITION, TARGET_X, TARGET_Z, VELOCITY
from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import Settings

FILE = Path(__file__).parents[2] / "examples/ros2_navigator.py"
TYPES = get_typestore(Stores.ROS2_HUMBLE).types
SETTINGS = Settings(num_envs=1, num_obstacles=0, dynamic_obstacles=80, drone="fast")


@pytest.fixture(scope="module")
def node() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ros2_navigator", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(name: str, *values: Any, **fields: Any) -> Any:
    return TYPES[name](*values, **fields)


def stamped() -> Any:
    return make("std_msgs/msg/Header", make("builtin_interfaces/msg/Time", 0, 0), "map")


def pose(place: Any, turn: Any = (0.0, 0.0, 0.0, 1.0)) -> Any:
    where = make("geometry_msgs/msg/Point", *map(float, place))
    return make(
        "geometry_msgs/msg/Pose", where, make("geometry_msgs/msg/Quaternion", *map(float, turn))
    )


def odometry(place: Any, velocity: Any, yaw: float = 0.0) -> Any:
    """As a robot says it: the twist is in the body frame."""
    turn = (0.0, 0.0, np.sin(yaw / 2), np.cos(yaw / 2))
    cos, sin = np.cos(yaw), np.sin(yaw)
    x, y, z = velocity
    body = make("geometry_msgs/msg/Vector3", cos * x + sin * y, cos * y - sin * x, float(z))
    still = make("geometry_msgs/msg/Vector3", 0.0, 0.0, 0.0)
    zeros = np.zeros(36)
    return make(
        "nav_msgs/msg/Odometry",
        stamped(),
        "base",
        make("geometry_msgs/msg/PoseWithCovariance", pose(place, turn), zeros),
        make(
            "geometry_msgs/msg/TwistWithCovariance",
            make("geometry_msgs/msg/Twist", body, still),
            zeros,
        ),
    )


def cloud(points: Any, extra: int = 4) -> Any:
    """Points with an intensity behind each, as lidars send them."""
    rows = np.zeros((len(points), 3 + extra // 4), np.float32)
    rows[:, :3] = points
    field = [make("sensor_msgs/msg/PointField", name, 4 * i, 7, 1) for i, name in enumerate("xyz")]
    data = np.frombuffer(rows.tobytes(), np.uint8)
    return make(
        "sensor_msgs/msg/PointCloud2",
        stamped(),
        1,
        len(rows),
        field,
        False,
        12 + extra,
        len(data),
        data,
        False,
    )


def goal(place: Any) -> Any:
    return make("geometry_msgs/msg/PoseStamped", stamped(), pose(place))


def poses(rows: list[Any]) -> Any:
    return make("geometry_msgs/msg/PoseArray", stamped(), rows)


def forward(seen: dict[str, Any]) -> Any:
    """A policy: full speed ahead."""
    return np.float32([[1.0, 0.5, 0.5]]).repeat(len(seen["state"]), 0)


def pilot(node: ModuleType) -> Any:
    return node.Pilot(Navigator(forward, SETTINGS, Shield.for_task(SETTINGS, backend="numpy")))


@pytest.mark.parametrize("yaw", [0.0, 2.0])
def test_observations_are_those_of_the_simulator(node: ModuleType, yaw: float) -> None:
    torch = pytest.importorskip("torch")
    compared = 0
    with Simulator(SETTINGS, seed=3) as sim:
        sim.reset()
        flier = pilot(node)
        flier.on_goal(goal(sim.rows[0, TARGET_X : TARGET_Z + 1].tolist()))
        flier.start = sim.rows[0, POSITION].numpy().astype(float)
        for _ in range(120):
            obs, _, terminated, _, _ = sim.step(torch.tensor([[0.9, 0.5, 0.5]]), restart=False)
            if terminated.any():
                break
            place = sim.rows[0, POSITION].tolist()
            flier.on_odometry(odometry(place, sim.rows[0, VELOCITY].tolist(), yaw), 0.0)
            crowd, said = sim.obstacles, []
            for k in range(SETTINGS.dynamic_obstacles):
                velocity = crowd.velocity[0, k]
                turn = (velocity[0], velocity[1], crowd.width[k], crowd.height[k])
                said.append(pose(crowd.position[0, k], turn))
            flier.on_obstacles(poses(said))
            seen = flier.observation()
            assert np.abs(seen["state"] - obs["state"].numpy()).max() < 1e-3
            assert np.abs(seen["direction"] - obs["direction"].numpy()).max() < 1e-3
            theirs = obs["dynamic_obstacle"].numpy().copy()
            theirs[..., 7] = 0.0  # the message has no velocity upwards
            assert np.abs(seen["dynamic_obstacle"] - theirs).max() < 2e-3
            compared += int((theirs != 0).any())
    assert compared > 5


def test_points_are_sorted_into_beams(node: ModuleType) -> None:
    flier = pilot(node)
    flier.on_goal(goal((0.0, 10.0, 2.0)))
    yaw = 0.7
    flier.on_odometry(odometry((0.0, 0.0, 2.0), (0.0, 0.0, 0.0), yaw), 0.0)

    def body(x: float, y: float, z: float) -> list[float]:
        return [np.cos(yaw) * x + np.sin(yaw) * y, np.cos(yaw) * y - np.sin(yaw) * x, z]

    up = np.tan(np.radians(20.0))
    flier.on_cloud(
        cloud(
            [
                body(0.0, 3.0, 0.0),  # ahead, level
                body(0.0, 2.0, 0.0),  # nearer
                body(-1.0, 0.0, up),  # to the left, 20 degrees up
                body(0.0, 9.0, 0.0),  # too far
                body(0.0, 0.5, 3.0),  # above the field of view
                [np.nan, 0.0, 0.0],
            ]
        ),
        0.0,
    )
    beams = flier.observation()["lidar"][0, 0]
    assert beams.shape == (36, 4)
    assert beams[0, 1] == pytest.approx(2.0, abs=1e-5)
    assert beams[9, 3] == pytest.approx(4.0 - np.hypot(1.0, up), abs=1e-5)
    assert np.count_nonzero(beams) == 2
    flier.on_cloud(cloud(np.zeros((0, 3))), 0.0)
    assert np.count_nonzero(flier.observation()["lidar"]) == 0


def test_it_flies_to_the_goal_and_stops_without_data(node: ModuleType) -> None:
    flier = pilot(node)
    assert flier.velocity(0.0).tolist() == [0, 0, 0]
    flier.on_odometry(odometry((0.0, 0.0, 2.0), (0.0, 0.0, 0.0)), 1.0)
    flier.on_cloud(cloud(np.zeros((0, 3))), 1.0)
    assert flier.velocity(1.1).tolist() == [0, 0, 0]  # no goal yet
    flier.on_goal(goal((0.0, -20.0, 2.0)))
    assert flier.velocity(1.1) == pytest.approx([0.0, -2.0, 0.0], abs=1e-5)
    assert flier.velocity(2.0).tolist() == [0, 0, 0]  # the data is old
    wall = [[x, -1.0, z] for x in np.linspace(-1.5, 1.5, 60) for z in (-0.2, 0.0, 0.2)]
    flier.on_odometry(odometry((0.0, 0.0, 2.0), (0.0, 0.0, 0.0)), 2.0)
    flier.on_cloud(cloud(wall), 2.0)
    assert flier.velocity(2.1)[1] > -1.0  # the shield sees it
    assert flier.navigator.interventions == 1
