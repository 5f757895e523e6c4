"""The navigation task: its settings, presets of rewards and disturbances, and the names of columns.

A new reward term is a weight in `Reward` and its formula in kernels.py. A new sensor is a shape in
`Settings.shapes`, its formula in kernels.py and its use in networks.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.errors import UsageError
from penstock.ui.suggestions import did_you_mean

Floats = NDArray[np.float32]

PHYSICS_DT_S = 0.016
EDGE_M = 24.0  # drones start and arrive here, outside the obstacle field
CROSSING_M = 32.0  # width of the front of drones in evaluation
MAX_SUBSTEPS = 125
RADIUS_M = 0.3  # of a drone
LOW_M, HIGH_M = 0.2, 4.0  # flight levels
NEAREST = 5  # moving obstacles that are observed
DRAWS = 7  # random numbers for one reset
POLICY_INPUTS: Final = ("state", "lidar", "dynamic_obstacle")
"""Observations that a policy looks at; the others say how to fly its action."""

# The state of a drone is one row, so that a kernel finds it in a few cache lines, and so that it
# is saved and restored whole. Kernels use the single columns, others the slices.
X, Y, Z, VX, VY, VZ, AX, AY, AZ = range(9)
QW, QX, QY, QZ, RATE_P, RATE_Q, RATE_R = range(9, 16)
ROTOR = 16  # the first of four
HEADING_X, HEADING_Y, AXIS_X, AXIS_Y, DIRECTION_X, DIRECTION_Y = range(20, 26)
TARGET_X, TARGET_Y, TARGET_Z, LOWEST, HIGHEST, RETURN = range(27, 33)
ROW = 33
POSITION = slice(X, Z + 1)
VELOCITY = slice(VX, VZ + 1)
QUATERNION = slice(QW, QZ + 1)  # w, x, y, z
RATES = slice(RATE_P, RATE_R + 1)  # body frame, rad/s
AXIS = slice(AXIS_X, AXIS_Y + 1)  # the x axis of the goal frame: unit, horizontal


class State:
    """Columns of the observation `state`, in the goal frame."""

    TOWARD = slice(0, 3)  # unit vector to the target
    DISTANCE = 3  # of the target, horizontal
    RISE = 4  # of the target above the drone
    VELOCITY = slice(5, 8)
    SIZE = 8


class Obstacle:
    """Columns of the observation `dynamic_obstacle`, of each obstacle, in the goal frame."""

    TOWARD = slice(0, 3)  # unit vector to it
    DISTANCE = 3  # horizontal
    RISE = 4  # above the drone; 0 of a cylinder
    PLACE = slice(0, 5)  # these three; all zeros for none
    VELOCITY = slice(5, 8)
    WIDTH = 8  # width / 0.25 m - 1
    FLOATS = 9  # 1 for a floating box, 0 for a cylinder from the ground on
    SIZE = 10


def is_number(value: Any) -> bool:
    """Whether something is a finite number; true and false are none."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and math.isfinite(value)


@dataclass(frozen=True)
class Reward:
    """Weights of the reward terms.

    Attributes:
        velocity: Of the speed towards the target, m/s.
        constant: Added every step.
        static: Of the mean logarithm of the lidar distances.
        dynamic: Of the mean logarithm of the distances to the moving obstacles.
        smoothness: Subtracted, per m/s of change between steps.
        height: Subtracted, per square metre above or below the corridor.
        collision: Added once in a crash (static, dynamic or height); give a negative number.
        goal: Added once when the target is reached, if that ends the episode.
        relative: Take the logarithms relative to free space, so that hovering there pays 0 but
            for `constant`.
        goal_ends: Whether reaching the target ends the episode.
    """

    velocity: float = 1.0
    constant: float = 1.0
    static: float = 1.0
    dynamic: float = 1.0
    smoothness: float = 0.1
    height: float = 8.0
    collision: float = 0.0
    goal: float = 0.0
    relative: bool = False
    goal_ends: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value, flag = getattr(self, item.name), isinstance(item.default, bool)
            if not (isinstance(value, bool) if flag else is_number(value)):
                wanted = "true or false" if flag else "a number"
                raise UsageError(f"reward.{item.name}={value!r}; give {wanted}")

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return a preset: "navrl" as upstream, "shifted" where hovering pays 0 and crashing costs.

        Raises:
            UsageError: There is no such preset.
        """
        if name == "navrl":
            return cls()
        if name == "shifted":
            return cls(constant=0.0, collision=-20.0, goal=20.0, relative=True, goal_ends=True)
        raise UsageError(
            f"reward={name!r} is not a preset; {did_you_mean(name, ('navrl', 'shifted'))}"
        )


@dataclass(frozen=True)
class Disturbances:
    """What is not as the policy is told, or not as it commands. All 0: nothing of it.

    Observations are disturbed, rewards and collisions are of the true state.

    Attributes:
        range_m: Standard deviation of a lidar distance.
        dropout: Share of the beams that see nothing, drawn anew each step.
        missed: Share of the moving obstacles that are not observed in a step.
        ghosts: Chance that an obstacle that is not there is observed in a step.
        drift_m: Standard deviation of the error of the own position after one second; it walks.
        latency: Decisions by which each command is late.
        wind: Largest acceleration by a wind, m/s2; of each episode another, horizontal.
        mass: Largest share by which the drone is heavier or lighter than its controller believes.
    """

    range_m: float = 0.0
    dropout: float = 0.0
    missed: float = 0.0
    ghosts: float = 0.0
    drift_m: float = 0.0
    latency: int = 0
    wind: float = 0.0
    mass: float = 0.0

    def __post_init__(self) -> None:
        for name, most in _MOST_DISTURBED.items():
            value = getattr(self, name)
            whole = name != "latency" or type(value) is int
            if not (is_number(value) and 0 <= value <= most and whole):
                kind = "number" if name != "latency" else "whole number"
                raise UsageError(f"disturbance {name} is {value!r}; give a {kind}, 0 to {most:g}")

    @property
    def any(self) -> bool:
        """Whether there is any."""
        return any(getattr(self, item.name) for item in fields(self))


_MOST_DISTURBED: Final[Mapping[str, float]] = {
    "range_m": 1.0,
    "dropout": 1.0,
    "missed": 1.0,
    "ghosts": 1.0,
    "drift_m": 5.0,
    "latency": 4,
    "wind": 5.0,
    "mass": 0.5,
}

_SENSES = Disturbances(range_m=0.03, dropout=0.02, missed=0.05, ghosts=0.01, drift_m=0.05)
STRESS: Final[Mapping[str, Disturbances]] = {
    "none": Disturbances(),
    "sensors": _SENSES,
    "late": Disturbances(latency=1),
    "wind and mass": Disturbances(wind=0.5, mass=0.05),
    "all": replace(_SENSES, latency=1, wind=0.5, mass=0.05),
}
"""What `penstock evaluate --stress` flies: lidar noise of 3 cm, 2 % of the beams and 5 % of the
obstacles lost, 1 % ghosts, drift of 5 cm after a second; one decision late; 0.5 m/s2 and 5 %."""


@dataclass(frozen=True)
class Settings:
    """What is simulated. Checked when made: one `UsageError` names the first value that is wrong.

    Attributes:
        num_envs: Drones, over all worlds.
        num_obstacles: Static boxes of each map.
        dynamic_obstacles: Moving obstacles of each world; rounded down to a multiple of 8
            (there are 8 kinds, equally many of each).
        substeps: Physics steps of 0.016 s per decision.
        episode_seconds: After this a drone is truncated.
        lidar_range_m: How far the lidar and the view of moving obstacles reach.
        lidar_beams: Around, and from low to high.
        lidar_fov_deg: Lowest and highest elevation.
        action_limit: Largest commanded speed per axis, m/s.
        drone: "hummingbird" (rotors and Lee controller) or "fast" (a second-order response).
        hold_yaw: Let the hummingbird's controller hold the yaw of the start. Upstream asks for the
            yaw it has, so that rough commands turn the drone, and its lidar, away from the goal
            frame: by some 15 degrees in 30 s of random actions, by 1 degree in smooth flight.
        reward: Weights, or the name of a preset.
        maps: Worlds at the same time; drones are spread over them evenly.
        map_seed: Maps have the seeds `map_seed`, `map_seed` + 1 and so on.
        new_map_every: After so many episodes per drone a world gets the next unused map: its drones
            are truncated, and start again. 0 keeps the maps.
        crossing_share: Share of training episodes whose target is on the opposite edge for
            certain; the others take both edges at random, as upstream.
        evaluation: Start in a row on one edge and cross the field, 48 m.
        disturbances: Noise, latency, wind and mass.
    """

    num_envs: int = 1024
    num_obstacles: int = 350
    dynamic_obstacles: int = 80
    substeps: int = 6
    episode_seconds: float = 35.2
    lidar_range_m: float = 4.0
    lidar_beams: tuple[int, int] = (36, 4)
    lidar_fov_deg: tuple[float, float] = (-10.0, 20.0)
    action_limit: float = 2.0
    drone: str = "hummingbird"
    hold_yaw: bool = False
    reward: Reward | str = field(default_factory=Reward)
    maps: int = 1
    map_seed: int = 0
    new_map_every: int = 0
    crossing_share: float = 0.0
    evaluation: bool = False
    disturbances: Disturbances = field(default_factory=Disturbances)

    def __post_init__(self) -> None:
        _check(self)
        if isinstance(self.reward, str):
            object.__setattr__(self, "reward", Reward.preset(self.reward))
        object.__setattr__(self, "dynamic_obstacles", self.dynamic_obstacles // 8 * 8)
        for name in ("lidar_beams", "lidar_fov_deg"):  # lists come from files of settings
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make settings of plain values, as `dataclasses.asdict` gives them.

        Raises:
            UsageError: A name or a value is wrong.
        """
        given = dict(values)
        for name, kind in (("reward", Reward), ("disturbances", Disturbances)):
            if isinstance(given.get(name), dict):
                given[name] = kind(**_known(kind, given[name]))
        return cls(**_known(cls, given))

    @property
    def weights(self) -> Reward:
        """The reward as weights, whether given so or by name."""
        assert isinstance(self.reward, Reward)
        return self.reward

    @property
    def period_s(self) -> float:
        """Time between decisions."""
        return self.substeps * PHYSICS_DT_S

    @property
    def episode_steps(self) -> int:
        """Decisions in the longest episode."""
        return max(1, round(self.episode_seconds / self.period_s))

    @property
    def elevations(self) -> NDArray[np.float64]:
        """Elevations of the lidar's beams in radians, from low to high."""
        return np.radians(np.linspace(*self.lidar_fov_deg, self.lidar_beams[1]))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each observation, without the number of drones."""
        return {
            "state": (State.SIZE,),
            "lidar": (1, *self.lidar_beams),
            "direction": (1, 3),
            "dynamic_obstacle": (NEAREST, Obstacle.SIZE),
        }

    def with_(self, **changes: Any) -> Settings:
        """Return other settings, for evaluation say.

        Raises:
            UsageError: A name or a value is wrong.
        """
        return replace(self, **_known(Settings, changes))


def _known(kind: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    known = [item.name for item in fields(kind)]
    for name in given:
        if name not in known:
            raise UsageError(f"there is no setting {name!r}; {did_you_mean(name, known)}")
    return given


def _check(settings: Settings) -> None:
    least = {"num_envs": 1, "num_obstacles": 0, "dynamic_obstacles": 0, "substeps": 1}
    least |= {"maps": 1, "map_seed": 0, "new_map_every": 0}
    for name, low in least.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
            raise UsageError(f"{name} is {value!r}; give a whole number, at least {low}")
    for name in ("episode_seconds", "lidar_range_m", "action_limit"):
        value = getattr(settings, name)
        if not (is_number(value) and value > 0):
            raise UsageError(f"{name} is {value!r}; give a number above 0")
    if settings.substeps > MAX_SUBSTEPS:
        raise UsageError(f"substeps is {settings.substeps}; give at most {MAX_SUBSTEPS} (2 s)")
    if settings.lidar_range_m > 5.0:
        raise UsageError(f"lidar_range_m is {settings.lidar_range_m}; give at most 5 m")
    share = settings.crossing_share
    if not (is_number(share) and 0.0 <= share <= 1.0):
        raise UsageError(f"crossing_share is {share!r}; give 0 to 1")
    if settings.drone not in ("hummingbird", "fast"):
        hint = did_you_mean(settings.drone, ("hummingbird", "fast"))
        raise UsageError(f"drone={settings.drone!r} is unknown; {hint}")
    if settings.maps > settings.num_envs:
        raise UsageError(f"maps is {settings.maps} for {settings.num_envs} drones; give fewer maps")
    beams, view = settings.lidar_beams, settings.lidar_fov_deg
    if len(beams) != 2 or not (1 <= beams[0] <= 360 and 1 <= beams[1] <= 64):
        raise UsageError(f"lidar_beams is {beams!r}; give up to 360 around and up to 64 high")
    if len(view) != 2 or not -80 <= view[0] <= view[1] <= 80:
        raise UsageError(f"lidar_fov_deg is {view!r}; give lowest and highest, within -80 to 80")


def crossing_places(number: NDArray[np.int64], count: NDArray[np.int64]) -> Floats:
    """Return starts and targets of evaluation, [2, n, 3]: side by side, straight across.

    `number` is that of each drone inside its world, which has `count` of them.
    """
    places = np.full((2, number.size, 3), 2.0, np.float32)
    places[0, :, 0] = (number / count - 0.5) * CROSSING_M
    places[1, :, 0] = (number / np.maximum(count - 1, 1) - 0.5) * CROSSING_M
    places[0, :, 1], places[1, :, 1] = EDGE_M, -EDGE_M
    return places
