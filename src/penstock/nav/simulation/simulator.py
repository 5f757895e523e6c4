"""The simulator: many drones in a few worlds, moved and observed by compiled code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from penstock.errors import UsageError
from penstock.nav.simulation import kernels
from penstock.nav.simulation.kernels import RETURN, ROW
from penstock.nav.simulation.task import DRAWS, Settings, crossing_places
from penstock.nav.simulation.world import Maps, Obstacles, World, pack_rng, unpack_rng

Observation = dict[str, Tensor]
_FLAT = 1e-7  # stands for the slope of a level beam, so that nothing is divided by 0


@dataclass
class Info:
    """What happened in a step, besides observation and reward."""

    collision_static: Tensor
    """A beam ended closer than 0.3 m; bool [n], as are the following."""
    collision_dynamic: Tensor
    collision_height: Tensor
    """Below 0.2 m or above 4 m."""
    reach_goal: Tensor
    """Within 0.5 m of the target, and not crashed."""
    cut: Tensor
    """Truncated because the world gets another map, neither crashed nor out of time."""
    position: Tensor
    """After the step, before any reset; float32 [n, 3]."""
    finished: Tensor
    """Drones whose episode ended; int64 [k], as is its length in steps."""
    episode_length: Tensor
    episode_return: Tensor
    final_index: Tensor
    """Drones that were truncated; int64 [t]."""
    final: Observation
    """Their last observations: the one that `step` returned is already of the next episode."""


class Simulator:
    """Drones that fly to their targets between boxes and moving obstacles.

    All drones of a world share its obstacles and do not see each other. What `reset` and `step`
    return is overwritten by the next `step`, unless it went into the caller's own memory (`out`).
    Not for several threads at once.

    Args:
        settings: What is simulated.
        seed: Of starts and targets. Maps and moving obstacles depend on `settings.map_seed`.
        threads: How many share the drones, the caller's among them. The result does not depend on
            it: drones know nothing of each other.

    Attributes:
        world_of: World of each drone.
        obstacles: The moving obstacles as they are now.
        map_seeds: Seeds of the maps as they are now.
        rows: States of the drones, [n, ROW]: the columns are named in kernels.py.
        progress: Steps of each drone's running episode.
        started: Whether there is a state to go on from: after `reset`, or one that was loaded.

    Example:
        with Simulator(Settings(num_envs=64), seed=0) as sim:
            obs = sim.reset()
            obs, reward, terminated, truncated, info = sim.step(torch.rand(64, 3))
    """

    def __init__(self, settings: Settings, seed: int = 0, threads: int = 2) -> None:
        if threads < 1:
            raise UsageError(f"threads is {threads}; give at least 1")
        self.settings = settings
        self.num_envs = count = settings.num_envs
        self._rng = np.random.default_rng(seed)
        self.world_of = np.arange(count) * settings.maps // count
        self._crowd = np.bincount(self.world_of, minlength=settings.maps)  # drones of each world
        self.map_seeds = [settings.map_seed + i for i in range(settings.maps)]
        self._maps = Maps(
            [World.generate(seed, settings.num_obstacles) for seed in self.map_seeds],
            settings.lidar_range_m,
        )
        self.obstacles = Obstacles(self.map_seeds, settings.dynamic_obstacles, settings.period_s)
        self._active = settings.dynamic_obstacles
        self._episodes = np.zeros(settings.maps, np.int64)
        self._renewing: set[int] = set()
        self.rows = torch.zeros(count, ROW)
        self.progress = torch.zeros(count, dtype=torch.int64)
        self._seen = self.observation_buffer()
        self._reward = torch.zeros(count)
        self._terminated = torch.zeros(count, dtype=torch.bool)
        self._truncated = torch.zeros(count, dtype=torch.bool)
        self._flags = torch.zeros(count, 4, dtype=torch.bool)
        self._position = torch.zeros(count, 3)
        self._everyone = np.arange(count)
        self._nobody = torch.zeros(count, dtype=torch.bool)
        self.started = False
        # What the kernels read and write; a view costs 3 us, and these are always the same.
        written = (self._reward, self._terminated, self._truncated, self._flags, self._position)
        late = settings.disturbances.latency
        self._drones: Any = kernels.Drones(
            self.rows.numpy(),
            self.progress.numpy(),
            np.zeros((count, kernels.PENDING + 3 * late), np.float32),
            np.zeros(count, np.uint64),
            np.zeros((count, kernels.FELT)),
            *(tensor.numpy() for tensor in written),
        )
        self._task = _task(settings)
        self.disturbed = 1.0
        self._set_scene()
        self._parts = np.array_split(self._everyone, min(threads, count))
        # Its threads are no daemons, start when they are needed, and end with it.
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "penstock-nav")

    def _set_scene(self) -> None:
        moving = [getattr(self.obstacles, name) for name in kernels.Scene._fields[5:]]
        maps = self._maps
        self._scene: Any = kernels.Scene(
            self._active, self.world_of, maps.boxes, maps.starts, maps.members, *moving
        )

    # ------------------------------------------------------------------ what can be asked

    @property
    def worlds(self) -> list[World]:
        """The maps as they are now."""
        return list(self._maps.worlds)

    @property
    def dynamic_active(self) -> int:
        """How many moving obstacles of each world are there; the others move unseen."""
        return self._active

    @dynamic_active.setter
    def dynamic_active(self, count: int) -> None:
        """Let so many be there, rounded down to eights, at most all."""
        self._active = max(0, min(int(count), self.settings.dynamic_obstacles)) // 8 * 8
        self._scene = self._scene._replace(active=self._active)

    @property
    def disturbed(self) -> float:
        """Which share of the disturbances there is, 0 to 1."""
        return self._share

    @disturbed.setter
    def disturbed(self, share: float) -> None:
        """Change noise at once, wind and mass with the next episodes."""
        self._share = min(max(float(share), 0.0), 1.0)
        given = self.settings.disturbances
        # Late or in time, there is nothing between: from half of the way on.
        scaled = {name: self._share * value for name, value in asdict(given).items()}
        scaled["latency"] = given.latency if self._share >= 0.5 else 0
        self._strengths: Any = kernels.Strengths(**scaled)

    def observation_buffer(self, *leading: int) -> Observation:
        """Return memory for observations, [*leading, n, ...] each."""
        return {
            name: torch.zeros(*leading, self.num_envs, *shape)
            for name, shape in self.settings.shapes().items()
        }

    # ------------------------------------------------------------------ flying

    def reset(self, out: Observation | None = None) -> Observation:
        """Start all drones anew and observe, into `out` if given; obstacles go on as they are."""
        seen = self._memory(out)
        self._start(self._everyone)
        self.started = True
        return self._observe(self._everyone, seen)

    def observe(self, out: Observation | None = None) -> Observation:
        """Return the present observation again: after `load_state_dict`, say."""
        self._check_started()
        return self._observe(self._everyone, self._memory(out))

    def _observe(self, which: NDArray[np.int64], seen: Observation) -> Observation:
        into: Any = kernels.Seen(**{name: value.numpy() for name, value in seen.items()})
        kernels.observe(which, self._drones, self._scene, self._task, self._strengths, into)
        return seen

    def step(
        self, action: Tensor, out: Observation | None = None, *, restart: bool = True
    ) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        """Fly one decision; drones whose episode ends start again at once.

        Args:
            action: Velocities in the goal frame, from 0 (full speed back) to 1, [n, 3].
            out: Memory for the observation, such as a row of a rollout.
            restart: If false, drones whose episode ends stay as they are, and the observation is
                their last one: the caller calls `restart`.

        Returns:
            Observation, reward, terminated, truncated, and the rest.
        """
        self._check_started()
        seen = self._memory(out)
        plain = _checked_action(action, self.num_envs)
        self.obstacles.advance()
        others = [self._pool.submit(self._step, part, plain, seen) for part in self._parts[1:]]
        try:
            self._step(self._parts[0], plain, seen)
        finally:  # nobody may still write when this returns
            for other in others:
                other.result()
        cut = self._nobody
        if self._renewing:
            cut = torch.from_numpy(np.isin(self.world_of, list(self._renewing)))
            cut &= ~(self._terminated | self._truncated)
            self._truncated |= cut
        drones = self._drones
        done = np.flatnonzero(drones.terminated | drones.truncated)
        finished = torch.from_numpy(done)
        final = done[drones.truncated[done]]
        final_index = torch.from_numpy(final)
        last = final_index if final.size else slice(0)  # mostly nothing: a view is cheap
        static, dynamic, height, reached = self._flags.unbind(1)
        info = Info(
            collision_static=static,
            collision_dynamic=dynamic,
            collision_height=height,
            reach_goal=reached,
            cut=cut,
            position=self._position,
            finished=finished,
            episode_length=torch.from_numpy(drones.progress[done]),
            episode_return=torch.from_numpy(drones.rows[done, RETURN]),
            final_index=final_index,
            final={name: value[last] for name, value in seen.items()},
        )
        if done.size:
            self._renew(done)
            if restart:
                self._start(done)
                self._observe(done, seen)
        return seen, self._reward, self._terminated, self._truncated, info

    def _step(self, which: NDArray[np.int64], action: Any, seen: Observation) -> None:
        """Move, observe and judge some drones."""
        kernels.move(which, action, self._drones, self._task, self._strengths)
        self._observe(which, seen)
        kernels.judge(which, self._drones, self._task)

    def restart(self, which: Tensor, out: Observation | None = None) -> Observation:
        """Start the drones of some numbers anew, and observe them alone into `out`, of all."""
        self._check_started()
        seen = self._memory(out)
        self._start(which.numpy())
        return self._observe(which.numpy(), seen)

    def reseed(self, seed: int) -> None:
        """Begin again: other starts and targets, the moving obstacles at their origins."""
        self._rng = np.random.default_rng(seed)
        for world, map_seed in enumerate(self.map_seeds):
            self.obstacles.renew(world, map_seed)
        self.started = False

    def _start(self, which: NDArray[np.int64]) -> None:
        """Put some drones at their starts."""
        if self.settings.evaluation:
            first = np.cumsum(self._crowd) - self._crowd
            world = self.world_of[which]
            places = crossing_places(which - first[world], self._crowd[world])
        else:
            draws = self._rng.random((which.size, DRAWS), dtype=np.float32)
            places = kernels.training_places(draws, self.settings.crossing_share)
        drones = self._drones
        kernels.start(which, places, drones.rows)
        drones.progress[which] = 0
        if self._task.disturbed:
            drones.seeds[which] = self._rng.integers(0, 2**63, which.size, np.uint64)
            own = self._rng.random((which.size, 3))
            kernels.begin_trouble(which, drones, self._strengths, own)

    # ------------------------------------------------------------------ other maps

    def renew(self, world: int) -> None:
        """Give a world the next unused map, with the next step.

        Its drones are truncated there, with their last observations in the old map, and start
        again in the new one.
        """
        if world not in range(self.settings.maps):
            raise UsageError(f"world {world} is not one of {self.settings.maps}")
        self._renewing.add(world)

    def _renew(self, finished: NDArray[np.int64]) -> None:
        """Count the episodes that ended, exchange the maps that are due, and see which are next."""
        self._episodes += np.bincount(self.world_of[finished], minlength=self._episodes.size)
        self.map_seeds = list(self.map_seeds)  # who asked before keeps what was
        for world in sorted(self._renewing):
            seed = max(self.map_seeds) + 1
            self._set_map(world, seed)
            self.obstacles.renew(world, seed)
            self._episodes[world] = 0  # those that the new map cut are not of the new map
        if self._renewing:
            self._set_scene()
            self._renewing.clear()
        if self.settings.new_map_every:
            due = self._episodes >= self.settings.new_map_every * self._crowd
            if due.any():
                self._renewing.update(np.flatnonzero(due).tolist())

    def _set_map(self, world: int, seed: int) -> None:
        self.map_seeds[world] = seed
        self._maps.replace(world, World.generate(seed, self.settings.num_obstacles))

    # ------------------------------------------------------------------ checks

    def _check_started(self) -> None:
        if not self.started:
            raise UsageError("the simulator has no state yet; call reset() first")

    def _memory(self, out: Observation | None) -> Observation:
        """Return memory for an observation, without anything else that may be there."""
        if out is None:
            return self._seen
        for name, mine in self._seen.items():
            given = out.get(name)
            if given is None:
                raise UsageError(f"out has no {name!r}; make it with observation_buffer()")
            same = (given.shape, given.dtype, given.device) == (mine.shape, mine.dtype, mine.device)
            if not same or not given.is_contiguous():
                raise UsageError(
                    f"out[{name!r}] is {given.dtype} {list(given.shape)} on {given.device}; give "
                    f"contiguous {mine.dtype} {list(mine.shape)} on {mine.device}"
                )
        return {name: out[name] for name in self._seen}

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that the future depends on, as plain tensors and numbers."""
        obstacles = self.obstacles.state_dict()
        state = {
            "rows": self.rows.clone(),
            "progress": self.progress.clone(),
            "rng": torch.from_numpy(pack_rng(self._rng)),
            "seeds": torch.tensor(self.map_seeds, dtype=torch.int64),
            "episodes": torch.from_numpy(self._episodes.copy()),
            "renewing": torch.tensor(sorted(self._renewing), dtype=torch.int64),
            "active": self._active,
            "started": int(self.started),
            "obstacles": {name: torch.from_numpy(array) for name, array in obstacles.items()},
        }
        if self._task.disturbed:
            state["disturbances"] = {
                "own": torch.from_numpy(self._drones.own.copy()),
                "noise": torch.from_numpy(self._drones.seeds.view(np.int64).copy()),
                "share": torch.tensor(self._share, dtype=torch.float64),
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, bit for bit; call `observe` for the observation.

        Disturbances that the state knows nothing of begin with the next episodes. Of a state of
        other settings nothing is taken: a `UsageError`.
        """
        rows, seeds = state["rows"], state["seeds"].tolist()
        if rows.shape != self.rows.shape or len(seeds) != self.settings.maps:
            raise UsageError(
                f"the state is of {len(rows)} drones in {len(seeds)} worlds, the simulator has "
                f"{self.num_envs} in {self.settings.maps}; give the settings it was saved with"
            )
        plain = {name: np.asarray(value) for name, value in state["obstacles"].items()}
        self.obstacles.load_state_dict(plain)
        self.rows.copy_(rows)
        self.progress.copy_(state["progress"])
        self._rng = unpack_rng(np.asarray(state["rng"]))
        self.map_seeds = list(self.map_seeds)
        for world, seed in enumerate(seeds):
            if seed != self.map_seeds[world]:
                self._set_map(world, seed)
        self._episodes[...] = np.asarray(state["episodes"])
        self._renewing = set(state["renewing"].tolist())
        self._active = int(state["active"])
        self._set_scene()
        self.started = bool(state["started"])
        own = self._drones.own
        own[...] = 0.0
        own[:, kernels.LIGHTER] = 1.0
        own[:, kernels.PENDING :] = 0.5
        disturbances = state.get("disturbances")
        if disturbances is not None and disturbances["own"].shape == own.shape:
            own[...] = np.asarray(disturbances["own"])
            self._drones.seeds[...] = np.asarray(disturbances["noise"]).view(np.uint64)
            self.disturbed = float(disturbances["share"])

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked_action(action: Tensor, count: int) -> NDArray[np.float32]:
    """Return an action as float32 [count, 3]."""
    if action.shape != (count, 3):
        raise UsageError(f"action is {list(action.shape)}; give [{count}, 3]")
    plain: NDArray[np.float32] = action.detach().to("cpu", torch.float32).numpy()
    if not (plain.min() >= 0 and plain.max() <= 1):  # NaN, too
        drone, axis = np.argwhere(~((plain >= 0) & (plain <= 1)))[0].tolist()
        value = float(plain[drone, axis])
        raise UsageError(f"action[{drone}, {axis}] is {value}; give numbers from 0 to 1")
    return plain


def _task(settings: Settings) -> Any:
    weights = settings.weights
    free = 0.0
    if not weights.relative:  # the kernel takes all logarithms relative to free space
        terms = weights.static + (weights.dynamic if settings.dynamic_obstacles else 0.0)
        free = terms * math.log(settings.lidar_range_m)
    plain = {
        name: value if isinstance(value, bool) else float(value)
        for name, value in asdict(weights).items()
    }
    azimuth = np.arange(settings.lidar_beams[0]) * (2 * np.pi / settings.lidar_beams[0])
    slope = np.tan(settings.elevations)
    slope = np.where(np.abs(slope) < _FLAT, _FLAT, slope)
    stretch = np.tile(1.0 / np.cos(settings.elevations), settings.lidar_beams[0])
    return kernels.Task(
        hummingbird=settings.drone == "hummingbird",
        hold_yaw=bool(settings.hold_yaw),
        disturbed=settings.disturbances.any,
        substeps=int(settings.substeps),
        steps=settings.episode_steps,
        limit=float(settings.action_limit),
        range_m=float(settings.lidar_range_m),
        dynamic=settings.dynamic_obstacles > 0,
        free=free,
        weights=kernels.Weights(**plain),
        cosine=np.cos(azimuth),
        sine=np.sin(azimuth),
        inverse_slope=1.0 / slope,
        reach=settings.lidar_range_m / stretch,
        stretch=stretch,
    )
