"""A ROS 2 node that flies an exported policy: odometry, lidar and obstacles in, velocity out.

    penstock export runs/x policy.onnx
    python examples/ros2_navigator.py policy.onnx      # needs rclpy, numpy and onnxruntime

Topics (remap them as usual); all are in one world frame, z = 0 is the ground:

    odom        nav_msgs/Odometry        position and heading; its twist is in the body frame
    scan        sensor_msgs/PointCloud2  points of the lidar in the body frame, x, y, z as float32
    obstacles   geometry_msgs/PoseArray  moving obstacles; orientation.x, y hold the velocity,
                                         orientation.z the width in metres, orientation.w the
                                         height (above 1 m: a cylinder from floor to ceiling)
    goal        geometry_msgs/PoseStamped  where to fly
    cmd_vel     geometry_msgs/TwistStamped  the velocity to fly, world frame

The messages are read by plain functions and `Pilot`: they need no ROS, and are tested without it.
"""

import sys
from typing import Any

import numpy as np

from penstock.nav import Navigator

STALE_S = 0.5  # older sensor data is not flown on: the drone stops


def point(message: Any) -> np.ndarray:
    """Return x, y, z of a Point or Vector3."""
    return np.array([message.x, message.y, message.z])


def turned(vectors: np.ndarray, angle: float) -> np.ndarray:
    """Return vectors [..., 3] turned around z."""
    x, y, z = np.moveaxis(np.asarray(vectors, float), -1, 0)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack((cos * x - sin * y, sin * x + cos * y, z), -1)


def rotated(vector: np.ndarray, quaternion: Any) -> np.ndarray:
    """Return a vector of the body frame in the world."""
    axis = np.array([quaternion.x, quaternion.y, quaternion.z])
    twice = 2 * np.cross(axis, vector)
    return vector + quaternion.w * twice + np.cross(axis, twice)


def cloud_points(message: Any) -> np.ndarray:
    """Return the finite points of a PointCloud2, [n, 3]."""
    offsets = {field.name: field.offset for field in message.fields}
    kind = np.dtype(
        {
            "names": ["x", "y", "z"],
            "formats": [">f4" if message.is_bigendian else "<f4"] * 3,
            "offsets": [offsets[name] for name in "xyz"],
            "itemsize": message.point_step,
        }
    )
    data, used = bytes(message.data), message.width * message.point_step
    starts = [row * message.row_step for row in range(message.height)]
    rows = [np.frombuffer(data[start : start + used], kind) for start in starts]
    cells = np.concatenate([np.zeros(0, kind), *rows])
    points = np.stack([cells[name] for name in "xyz"], -1).astype(float)
    return points[np.isfinite(points).all(1)]


def lidar(points: np.ndarray, settings: Any) -> np.ndarray:
    """Sort points of the goal frame into the beams: range minus distance, [1, 36, 4]."""
    around, high = settings.lidar_beams
    seen = np.zeros((1, around, high), np.float32)
    distance = np.linalg.norm(points, axis=1)
    near = (distance > 0.05) & (distance < settings.lidar_range_m)
    points, distance = points[near], distance[near]
    azimuth = np.arctan2(points[:, 1], points[:, 0])
    beam = np.round(azimuth / (2 * np.pi / around)).astype(int) % around
    elevation = np.arcsin(points[:, 2] / distance)
    miss = np.abs(elevation[:, None] - settings.elevations)
    level = miss.argmin(1)
    spacing = settings.elevations[1] - settings.elevations[0] if high > 1 else np.pi
    hit = miss.min(1) <= spacing / 2  # beyond the field of view nothing is seen
    closeness = (settings.lidar_range_m - distance).astype(np.float32)
    np.maximum.at(seen[0], (beam[hit], level[hit]), closeness[hit])
    return seen


def obstacle_rows(poses: Any, position: np.ndarray, angle: float, settings: Any) -> np.ndarray:
    """Return the five nearest moving obstacles as the policy sees them, [5, 10]."""
    count, width = settings.shapes()["dynamic_obstacle"]
    rows = np.zeros((count, width), np.float32)
    found = []
    for pose in poses:
        kind = pose.orientation
        tall = kind.w > 1.0
        away = turned(point(pose.position) - position, -angle)
        if tall:
            away[2] = 0.0  # it is met at every height
        flat = float(np.hypot(away[0], away[1]))
        if flat <= settings.lidar_range_m:
            velocity = turned(np.array([kind.x, kind.y, 0.0]), -angle)
            unit = away / max(float(np.linalg.norm(away)), 1e-6)
            size = np.clip(np.ceil(kind.z / 0.25) - 1, 0, 3)  # the next wider kind
            found.append((flat, [*unit, flat, away[2], *velocity, size, 0.0 if tall else 1.0]))
    for row, (_, values) in zip(rows, sorted(found, key=lambda item: item[0]), strict=False):
        row[:] = values
    return rows


class Pilot:
    """Keeps the newest messages, and answers what to fly."""

    def __init__(self, navigator: Navigator) -> None:
        self.navigator = navigator
        self.start: np.ndarray | None = None
        self.target: np.ndarray | None = None
        self.odometry: Any = None
        self.points = np.zeros((0, 3))
        self.obstacles: Any = []
        self.seen_s = {"odom": -np.inf, "scan": -np.inf}

    def on_odometry(self, message: Any, now_s: float) -> None:
        """Take in where the drone is."""
        self.odometry = message
        self.seen_s["odom"] = now_s

    def on_cloud(self, message: Any, now_s: float) -> None:
        """Take in what the lidar sees."""
        self.points = cloud_points(message)
        self.seen_s["scan"] = now_s

    def on_obstacles(self, message: Any) -> None:
        """Take in the moving obstacles."""
        self.obstacles = message.poses

    def on_goal(self, message: Any) -> None:
        """Fly there; the goal frame begins where the drone is now."""
        self.target = point(message.pose.position)
        self.start = None

    def observation(self) -> dict[str, np.ndarray]:
        """Return what the policy sees, [1, ...] each; see `penstock.nav.Navigator`."""
        settings = self.navigator.settings
        pose = self.odometry.pose.pose
        position = point(pose.position)
        if self.start is None:
            self.start = position
        way = self.target - self.start
        angle = float(np.arctan2(way[1], way[0]))
        to_target = turned(self.target - position, -angle)
        world = rotated(point(self.odometry.twist.twist.linear), pose.orientation)
        state = [
            *(to_target / max(float(np.linalg.norm(to_target)), 1e-6)),
            np.hypot(to_target[0], to_target[1]),
            to_target[2],
            *turned(world, -angle),
        ]
        level = np.array([rotated(each, pose.orientation) for each in self.points])
        scan = turned(level.reshape(-1, 3), -angle)  # body -> world -> goal frame
        return {
            "state": np.float32([state]),
            "lidar": lidar(scan, settings)[None],
            "dynamic_obstacle": obstacle_rows(self.obstacles, position, angle, settings)[None],
            "direction": np.float32([[[way[0], way[1], 0.0]]]),
        }

    def velocity(self, now_s: float) -> np.ndarray:
        """Return the velocity to fly, world frame: a stop if there is no goal, or no fresh data."""
        if self.target is None or now_s - min(self.seen_s.values()) > STALE_S:
            return np.zeros(3)
        height = [self.odometry.pose.pose.position.z]
        return self.navigator.velocity(self.observation(), height)[0]


def main(path: str) -> None:
    """Run the node until it is stopped."""
    import rclpy
    from geometry_msgs.msg import PoseArray, PoseStamped, TwistStamped
    from nav_msgs.msg import Odometry
    from rclpy.node import Node
    from rclpy.qos import qos_profile_sensor_data
    from sensor_msgs.msg import PointCloud2

    pilot = Pilot(Navigator.load(path))
    rclpy.init()
    node = Node("penstock_navigator")

    def now_s() -> float:
        return node.get_clock().now().nanoseconds * 1e-9

    sensors = qos_profile_sensor_data
    node.create_subscription(
        Odometry, "odom", lambda message: pilot.on_odometry(message, now_s()), sensors
    )
    node.create_subscription(
        PointCloud2, "scan", lambda message: pilot.on_cloud(message, now_s()), sensors
    )
    node.create_subscription(PoseArray, "obstacles", pilot.on_obstacles, sensors)
    node.create_subscription(PoseStamped, "goal", pilot.on_goal, 1)
    commands = node.create_publisher(TwistStamped, "cmd_vel", 1)

    def tick() -> None:
        command = TwistStamped()
        command.header.stamp = node.get_clock().now().to_msg()
        command.header.frame_id = "map"
        linear = command.twist.linear
        linear.x, linear.y, linear.z = (float(part) for part in pilot.velocity(now_s()))
        commands.publish(command)

    node.create_timer(pilot.navigator.settings.period_s, tick)
    try:
        rclpy.spin(node)
    finally:
        node.destroy_node()
        rclpy.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
