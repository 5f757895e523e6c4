"""The simulator: many drones in a few worlds, both back ends behind one class."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from penstock.errors import UsageError
from penstock.nav.simulation.drone import HOVER_THROTTLE
from penstock.nav.simulation.reference import TorchBackend
from penstock.nav.simulation.results import (
    Info,
    Observation,
    Outcome,
    checked_action,
    checked_memory,
)
from penstock.nav.simulation.task import (
    DRAWS,
    RETURN,
    ROW,
    Settings,
    crossing_places,
    fresh_rows,
    training_places,
)
from penstock.nav.simulation.world import Maps, Obstacles, World, pack_rng, unpack_rng
from penstock.ui.suggestions import did_you_mean

BACKENDS = ("numba", "torch")


class Simulator:
    """Drones that fly to their targets between boxes and moving obstacles.

    All drones of a world share its obstacles and do not see each other. What `reset` and `step`
    return is overwritten by the next `step`, unless it went into the caller's own memory (`out`).
    Not for several threads at once.

    Args:
        settings: What is simulated.
        seed: Of starts and targets. Maps and moving obstacles depend on `settings.map_seed`.
        backend: "numba" (CPU, fast) or "torch" (the reference, any device).
        threads: Of the numba back end.
        device: Of the torch back end.

    Raises:
        UsageError: An unknown back end, a device it cannot use, or boxes that do not fit.

    Example:
        with Simulator(Settings(num_envs=64), seed=0) as sim:
            obs = sim.reset()
            obs, reward, terminated, truncated, info = sim.step(torch.rand(64, 3))
    """

    def __init__(
        self,
        settings: Settings,
        seed: int = 0,
        backend: str = "numba",
        threads: int = 2,
        device: str | torch.device = "cpu",
    ) -> None:
        self.settings = settings
        self.device = torch.device(device)
        if backend not in BACKENDS:
            raise UsageError(f"backend={backend!r} is unknown; {did_you_mean(backend, BACKENDS)}")
        if backend == "numba" and self.device.type != "cpu":
            raise UsageError(f"backend=numba runs on the CPU, not on {device}; use backend=torch")
        if threads < 1:
            raise UsageError(f"threads is {threads}; give at least 1")
        self.backend = backend
        count = settings.num_envs
        self._rng = np.random.default_rng(seed)
        self._world_of = np.arange(count) * settings.maps // count
        self._drones = np.bincount(self._world_of, minlength=settings.maps)
        self._number = (
            np.arange(count) - np.concatenate([[0], np.cumsum(self._drones)])[self._world_of]
        )
        self._seeds = [settings.map_seed + i for i in range(settings.maps)]
        self._maps = Maps([self._map(seed) for seed in self._seeds], settings.lidar_range_m)
        self._obstacles = Obstacles(self._seeds, settings.dynamic_obstacles, settings.period_s)
        self._active = settings.dynamic_obstacles
        self._episodes = np.zeros(settings.maps, np.int64)
        self._renewing: set[int] = set()
        self._rows = torch.zeros(count, ROW, device=self.device)
        self._progress = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._seen = self.observation_buffer()
        self._outcome = Outcome(
            reward=torch.zeros(count, device=self.device),
            terminated=torch.zeros(count, dtype=torch.bool, device=self.device),
            truncated=torch.zeros(count, dtype=torch.bool, device=self.device),
            flags=torch.zeros(count, 4, dtype=torch.bool, device=self.device),
            position=torch.zeros(count, 3, device=self.device),
        )
        self._nobody = torch.zeros(count, dtype=torch.bool, device=self.device)
        self._engine = self._make(backend, threads)
        self._engine.set_maps(self._maps)
        self._started = False

    def _make(self, backend: str, threads: int) -> Any:
        world_of = torch.from_numpy(self._world_of)
        if backend == "torch":
            return TorchBackend(self.settings, world_of, self.device)
        from penstock.nav.simulation.native import NumbaBackend  # numba takes a second to import

        return NumbaBackend(self.settings, world_of, threads)

    def _map(self, seed: int) -> World:
        return World.generate(seed, self.settings.num_obstacles)

    # ------------------------------------------------------------------ what can be asked

    @property
    def num_envs(self) -> int:
        """Number of drones."""
        return self.settings.num_envs

    @property
    def worlds(self) -> list[World]:
        """The maps as they are now."""
        return list(self._maps.worlds)

    @property
    def obstacles(self) -> Obstacles:
        """The moving obstacles as they are now."""
        return self._obstacles

    @property
    def world_of(self) -> NDArray[np.int64]:
        """World of each drone."""
        return self._world_of

    @property
    def rows(self) -> Tensor:
        """States of the drones, [n, ROW]: the columns are named in task.py."""
        return self._rows

    @property
    def progress(self) -> Tensor:
        """Steps of each drone's running episode."""
        return self._progress

    @property
    def started(self) -> bool:
        """Whether there is a state to go on from: after `reset`, or a state that was loaded."""
        return self._started

    @property
    def map_seeds(self) -> list[int]:
        """Seeds of the maps as they are now."""
        return list(self._seeds)

    @property
    def dynamic_active(self) -> int:
        """How many moving obstacles of each world are there; a curriculum raises it.

        Set to any number: it is rounded down to a multiple of 8, at most as many as the settings
        have. The others move unseen.
        """
        return self._active

    @dynamic_active.setter
    def dynamic_active(self, count: int) -> None:
        """Set how many are there."""
        self._active = max(0, min(int(count), self.settings.dynamic_obstacles)) // 8 * 8

    def observation_buffer(self, *leading: int) -> Observation:
        """Return memory for observations, [*leading, n, ...] each."""
        shapes = self.settings.shapes()
        return {
            name: torch.zeros(*leading, self.num_envs, *shape, device=self.device)
            for name, shape in shapes.items()
        }

    # ------------------------------------------------------------------ flying

    def reset(self, out: Observation | None = None) -> Observation:
        """Start all drones anew and observe. Obstacles go on from where they are.

        Args:
            out: Memory for the observation, such as a row of a rollout.
        """
        seen = self._seen if out is None else checked_memory(out, self._seen)
        self._start(np.arange(self.num_envs))
        self._started = True
        return self._observe_all(seen)

    def observe(self, out: Observation | None = None) -> Observation:
        """Return the present observation again: after `load_state_dict`, say."""
        self._check_started()
        return self._observe_all(self._seen if out is None else checked_memory(out, self._seen))

    def _observe_all(self, seen: Observation) -> Observation:
        self._engine.set_obstacles(self._obstacles, self._active)
        self._engine.observe(torch.arange(self.num_envs), self._rows, seen)
        return seen

    def step(
        self, action: Tensor, out: Observation | None = None, *, restart: bool = True
    ) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        """Fly one decision; drones whose episode ends start again at once.

        Args:
            action: Velocities in the goal frame, from 0 (full speed back) to 1, [n, 3].
            out: Memory for the observation.
            restart: If false, drones whose episode ends stay as they are, and the observation is
                their last one: the caller calls `restart`.

        Returns:
            Observation, reward, terminated, truncated, and the rest.

        Raises:
            UsageError: `reset` was not called, or the action makes no sense.
        """
        self._check_started()
        seen = self._seen if out is None else checked_memory(out, self._seen)
        action = checked_action(action, self.num_envs, self.device)
        outcome = self._outcome
        self._obstacles.advance()
        self._engine.set_obstacles(self._obstacles, self._active)
        self._engine.step(action, self._rows, self._progress, seen, outcome)
        cut = self._nobody
        if self._renewing:
            renewed = np.isin(self._world_of, list(self._renewing))
            cut = torch.from_numpy(renewed).to(self.device)
            cut &= ~(outcome.terminated | outcome.truncated)
            outcome.truncated |= cut
        done = outcome.terminated | outcome.truncated
        finished = done.nonzero()[:, 0]
        final_index = finished[outcome.truncated[finished]]
        last = final_index if final_index.numel() else slice(0)  # mostly nothing: a view is cheap
        static, dynamic, height, reached = outcome.flags.unbind(1)
        info = Info(
            collision_static=static,
            collision_dynamic=dynamic,
            collision_height=height,
            reach_goal=reached,
            cut=cut,
            position=outcome.position,
            finished=finished,
            episode_length=self._progress[finished],
            episode_return=self._rows[finished, RETURN],
            final_index=final_index,
            final={name: value[last] for name, value in seen.items()},
        )
        if finished.numel():
            self._renew(finished.cpu().numpy())
            if restart:
                self.restart(finished, seen)
        return seen, outcome.reward, outcome.terminated, outcome.truncated, info

    def restart(self, which: Tensor, out: Observation | None = None) -> Observation:
        """Start some drones anew and observe them; the others' observations are left alone.

        Args:
            which: Their numbers, int64.
            out: Memory for the observation of all drones.
        """
        self._check_started()
        seen = self._seen if out is None else checked_memory(out, self._seen)
        self._start(which.cpu().numpy())
        self._engine.set_obstacles(self._obstacles, self._active)
        self._engine.observe(which, self._rows, seen)
        return seen

    def reseed(self, seed: int) -> None:
        """Begin again: other starts and targets, the moving obstacles at their origins."""
        self._rng = np.random.default_rng(seed)
        for world, map_seed in enumerate(self._seeds):
            self._obstacles.renew(world, map_seed)
        self._started = False

    def _start(self, which: NDArray[np.int64]) -> None:
        """Put some drones at their starts; the random numbers are the same for all back ends."""
        if self.settings.evaluation:
            count = self._drones[self._world_of[which]]
            start, target = crossing_places(self._number[which], count)
        else:
            draws = self._rng.random((which.size, DRAWS), dtype=np.float32)
            start, target = training_places(draws, self.settings.crossing_share)
        rows = torch.from_numpy(fresh_rows(start, target, HOVER_THROTTLE)).to(self.device)
        index = torch.from_numpy(which).to(self.device)
        self._rows[index] = rows
        self._progress[index] = 0

    # ------------------------------------------------------------------ other maps

    def renew(self, world: int) -> None:
        """Give a world the next unused map, with the next step.

        Its drones are truncated there, with their last observations in the old map, and start
        again in the new one.

        Raises:
            UsageError: There is no such world.
        """
        if not 0 <= world < self.settings.maps:
            raise UsageError(f"world {world} is not one of {self.settings.maps}")
        self._renewing.add(world)

    def _renew(self, finished: NDArray[np.int64]) -> None:
        """Count the episodes that ended, exchange the maps that are due, and see which are next."""
        self._episodes += np.bincount(self._world_of[finished], minlength=self._episodes.size)
        for world in sorted(self._renewing):
            seed = max(self._seeds) + 1
            self._seeds[world] = seed
            self._maps.replace(world, self._map(seed))
            self._obstacles.renew(world, seed)
            self._episodes[world] = 0  # those that the new map cut are not of the new map
        if self._renewing:
            self._engine.set_maps(self._maps)
            self._renewing.clear()
        if self.settings.new_map_every:
            due = self._episodes >= self.settings.new_map_every * self._drones
            self._renewing.update(np.flatnonzero(due).tolist())

    # ------------------------------------------------------------------ checks

    def _check_started(self) -> None:
        if not self._started:
            raise UsageError("the simulator has no state yet; call reset() first")

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that the future depends on, as plain tensors and numbers."""
        obstacles = self._obstacles.state_dict()
        return {
            "rows": self._rows.detach().cpu().clone(),
            "progress": self._progress.cpu().clone(),
            "rng": torch.from_numpy(pack_rng(self._rng)),
            "seeds": torch.tensor(self._seeds, dtype=torch.int64),
            "episodes": torch.from_numpy(self._episodes.copy()),
            "renewing": torch.tensor(sorted(self._renewing), dtype=torch.int64),
            "active": self._active,
            "started": int(self._started),
            "obstacles": {name: torch.from_numpy(array) for name, array in obstacles.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, bit for bit; call `observe` for the observation.

        Raises:
            UsageError: The state is of other settings; nothing is changed.
        """
        rows, seeds = torch.as_tensor(state["rows"]), state["seeds"].tolist()
        if rows.shape != self._rows.shape or len(seeds) != self.settings.maps:
            raise UsageError(
                f"the state is of {len(rows)} drones in {len(seeds)} worlds, the simulator has "
                f"{self.num_envs} in {self.settings.maps}; give the settings it was saved with"
            )
        plain = {name: np.asarray(value) for name, value in state["obstacles"].items()}
        self._obstacles.load_state_dict(plain)
        self._rows.copy_(rows)
        self._progress.copy_(torch.as_tensor(state["progress"]))
        self._rng = unpack_rng(np.asarray(state["rng"]))
        for world, seed in enumerate(seeds):
            if seed != self._seeds[world]:
                self._maps.replace(world, self._map(seed))
        if seeds != self._seeds:
            self._engine.set_maps(self._maps)
        self._seeds = seeds
        self._episodes[...] = np.asarray(state["episodes"])
        self._renewing = set(state["renewing"].tolist())
        self._active = int(state["active"])
        self._started = bool(state["started"])

    def close(self) -> None:
        """End the threads of the back end."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
