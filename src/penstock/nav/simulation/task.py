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
    """Weights of the reward terms; see `judge` in kernels.py."""

    velocity: float = 1.0  # of the speed towards the target, m/s
    constant: float = 1.0  # added every step
    static: float = 1.0  # of the mean logarithm of the lidar distances
    dynamic: float = 1.0  # of the mean logarithm of the distances to the moving obstacles
    smoothness: float = 0.1  # subtracted, per m/s of change between steps
    height: float = 8.0  # subtracted, per square metre above or below the corridor
    collision: float = 0.0  # added once in a crash (static, dynamic or height): a negative number
    goal: float = 0.0  # added once when the target is reached, if that ends the episode
    relative: bool = False  # logarithms relative to free space: hovering there pays `constant`
    goal_ends: bool = False  # whether reaching the target ends the episode

    def __post_init__(self) -> None:
        for item in fields(self):
            value, flag = getattr(self, item.name), isinstance(item.default, bool)
            if not (isinstance(value, bool) if flag else is_number(value)):
                wanted = "true or false" if flag else "a number"
                raise UsageError(f"reward.{item.name}={value!r}; give {wanted}")

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return a preset: "navrl" as upstream, "shifted" where hovering pays 0, crashing costs."""
        if name == "navrl":
            return cls()
        if name == "shifted":
            return cls(constant=0.0, collision=-20.0, goal=20.0, relative=True, goal_ends=True)
        raise UsageError(
            f"reward={name!r} is not a preset; {did_you_mean(name, ('navrl', 'shifted'))}"
        )


def _up_to(most: float) -> Any:
    return field(default=0 if isinstance(most, int) else 0.0, metadata={"most": most})


@dataclass(frozen=True)
class Disturbances:
    """What is not as the policy is told, or not as it commands. All 0: nothing of it.

    Observations are disturbed, rewards and collisions are of the true state.
    """

    range_m: float = _up_to(1.0)  # standard deviation of a lidar distance
    dropout: float = _up_to(1.0)  # share of the beams that see nothing, drawn anew each step
    missed: float = _up_to(1.0)  # share of the moving obstacles that are not observed in a step
    ghosts: float = _up_to(1.0)  # chance that one that is not there is observed in a step
    drift_m: float = _up_to(5.0)  # standard deviation of the own position after 1 s; it walks
    latency: int = _up_to(4)  # decisions by which each command is late
    wind: float = _up_to(5.0)  # largest acceleration, m/s2; of each episode another, horizontal
    mass: float = _up_to(0.5)  # largest share that the drone is off what its controller believes

    def __post_init__(self) -> None:
        for item in fields(self):
            value, most = getattr(self, item.name), item.metadata["most"]
            whole = isinstance(most, int)
            fits = type(value) is int if whole else is_number(value)
            if not (fits and 0 <= value <= most):
                kind = "a whole number" if whole else "a number"
                raise UsageError(
                    f"disturbance {item.name} is {value!r}; give {kind}, 0 to {most:g}"
                )

    @property
    def any(self) -> bool:
        """Whether there is any."""
        return any(getattr(self, item.name) for item in fields(self))


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

    Lists are taken for tuples, a name of a preset for the reward.
    """

    num_envs: int = 1024  # drones, over all worlds
    num_obstacles: int = 350  # static boxes of each map
    dynamic_obstacles: int = 80  # of each world; rounded down to 8 kinds, equally many of each
    substeps: int = 6  # physics steps of 0.016 s per decision
    episode_seconds: float = 35.2  # after this a drone is truncated
    lidar_range_m: float = 4.0  # how far the lidar and the view of moving obstacles reach
    lidar_beams: tuple[int, int] = (36, 4)  # around, and from low to high
    lidar_fov_deg: tuple[float, float] = (-10.0, 20.0)  # lowest and highest elevation
    action_limit: float = 2.0  # largest commanded speed per axis, m/s
    drone: str = "hummingbird"  # rotors and Lee controller; "fast" is a second-order response
    # Upstream's controller asks for the yaw that the hummingbird has, so that rough commands turn
    # it, and its lidar, away from the goal frame: by some 15 degrees in 30 s of random actions, by
    # 1 degree in smooth flight. With this it holds the yaw of the start.
    hold_yaw: bool = False
    reward: Reward | str = field(default_factory=Reward)
    maps: int = 1  # worlds at the same time; drones are spread over them evenly
    map_seed: int = 0  # maps have the seeds map_seed, map_seed + 1 and so on
    # After so many episodes per drone a world gets the next unused map: its drones are truncated,
    # and start again. 0 keeps the maps.
    new_map_every: int = 0
    # Share of training episodes whose target is on the opposite edge for certain; the others take
    # both edges at random, as upstream.
    crossing_share: float = 0.0
    evaluation: bool = False  # start in a row on one edge and cross the field, 48 m
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
        """Make settings of plain values, as `dataclasses.asdict` gives them."""
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
        """Return other settings, for evaluation say."""
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
