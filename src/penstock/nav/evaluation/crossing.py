"""Crossings: drones fly straight across worlds that they have not seen, and nothing is drawn.

Worlds are flown in groups, side by side. The groups depend on the seeds and the number of drones
alone, so that results are the same bits however many threads share them: how torch rounds depends
on the size of a batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.nav.networks import Policy
from penstock.nav.shield import Shield
from penstock.nav.simulation.kernels import POSITION, Z
from penstock.nav.simulation.simulator import Info, Observation, Simulator
from penstock.nav.simulation.task import Settings, State
from penstock.ui.progress import Progress

Pilot = Callable[[Observation], Tensor]
"""Observations [n, ...] -> actions [n, 3] in (0, 1), goal frame, as `Simulator.step` takes them."""

FIRST_WORLD = 300_000  # of the test worlds: nothing is trained or chosen on them
_GROUP = 1024  # drones flown together: fewer waste time on calls, more on caches
_BRAKE_M = 1.0  # within this distance `straight` slows down


class Outcome(IntEnum):
    """How a flight ended: the first of these that happened."""

    SUCCESS = 0
    STATIC = 1
    DYNAMIC = 2
    HEIGHT = 3
    TIMEOUT = 4


@dataclass
class Flights:
    """Crossings of several worlds, world after world."""

    seeds: tuple[int, ...]
    """Map seeds of the worlds."""
    world: Tensor
    """World of each drone, an index into `seeds`; int64 [n]."""
    outcome: Tensor
    """An `Outcome` of each drone; int8 [n]."""
    time_s: Tensor
    """To the goal, or to the end; float32 [n]."""
    reach_goal: Tensor
    """NavRL's own measure: at the target in the last step of the episode, which goes on after the
    target was reached; bool [n]."""
    path: Tensor | None
    """Positions after each step, float32 [n, steps, 3], up to the outcome; None: not recorded."""
    decisions: int
    """Velocities that the shield looked at; 0 without one."""
    interventions: int
    """How many of them it exchanged."""
    period_s: float
    """Time between steps."""


def straight(obs: Observation) -> Tensor:
    """Be the pilot that looks at nothing: full speed at the target, slower in the last metre."""
    state = obs["state"]
    toward = state[:, State.TOWARD]
    way = toward / toward.abs().amax(1, keepdim=True).clamp(min=1e-6)
    distance = torch.hypot(state[:, State.DISTANCE, None], state[:, State.RISE, None])
    speed = (distance / _BRAKE_M).clamp(max=1.0)
    return (0.5 + 0.5 * way * speed).clamp(0.0, 1.0)


def deterministic_pilot(policy: Policy) -> Pilot:
    """Return the pilot that always takes the mean action of a policy, wherever that computes."""

    @torch.no_grad()
    def pilot(obs: Observation) -> Tensor:
        device = policy.device
        alpha, beta, _ = policy({name: value.to(device) for name, value in obs.items()})
        mean: Tensor = alpha / (alpha + beta)
        return mean.to(obs["state"].device)

    return pilot


def fly(
    pilot: Pilot,
    settings: Settings,
    seeds: Sequence[int],
    drones: int,
    *,
    shield: Shield | None = None,
    record: bool = False,
    threads: int = 1,
    progress: Progress | None = None,
) -> Flights:
    """Cross worlds, each with a row of drones side by side.

    The first outcome of a drone counts; one that crashes after it reached its target stays a
    success (and is none by `reach_goal`). Repeating gives the same bits.

    Args:
        pilot: Decides; called with the drones that are still in the air, from several threads.
        settings: Obstacles, drone and period; numbers of drones, maps and seeds are replaced.
        seeds: Map seeds, one per world; consecutive ones are flown side by side.
        drones: Per world.
        shield: Filters what the pilot decides until the outcome is known (beyond the target there
            is open ground). Its counters count on.
        record: Keep the paths.
        threads: Groups of worlds flown at the same time; there are at least two groups.
        progress: Advanced by `settings.episode_steps` for each world.
    """
    seeds = tuple(int(seed) for seed in seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"the map seeds are {list(seeds)}; give at least one, none of them twice")
    if drones < 1 or threads < 1:
        raise UsageError(f"drones is {drones} and threads {threads}; give at least 1 of each")
    weights = replace(settings.weights, goal_ends=False)
    base = settings.with_(new_map_every=0, evaluation=True, reward=weights)
    crossings = [
        _Crossing(
            base.with_(num_envs=len(group) * drones, maps=len(group), map_seed=group[0]),
            pilot,
            shield,
            record,
        )
        for group in _groups(seeds, drones)
    ]

    stop = threading.Event()
    with _one_thread(), ThreadPoolExecutor(threads, "penstock-fly") as pool:
        try:
            list(pool.map(lambda crossing: crossing.fly(progress, stop), crossings))
        finally:
            stop.set()  # an error, or Ctrl-C: the others need not finish
    shields = [crossing.shield for crossing in crossings if crossing.shield is not None]
    decisions = sum(each.decisions for each in shields)
    interventions = sum(each.interventions for each in shields)
    if shield is not None:
        shield.decisions += decisions
        shield.interventions += interventions
    return Flights(
        seeds=seeds,
        world=torch.arange(len(seeds)).repeat_interleave(drones),
        outcome=torch.cat([crossing.outcome for crossing in crossings]),
        time_s=torch.cat([crossing.time_s for crossing in crossings]),
        reach_goal=torch.cat([crossing.reach_goal for crossing in crossings]),
        path=torch.cat([crossing.path for crossing in crossings]) if record else None,
        decisions=decisions,
        interventions=interventions,
        period_s=base.period_s,
    )


def _groups(seeds: Sequence[int], drones: int) -> list[list[int]]:
    """Split seeds into runs of consecutive ones: at least two, if there are as many worlds."""
    size = max(1, min(-(-len(seeds) // 2), _GROUP // drones))
    groups: list[list[int]] = []
    for seed in seeds:
        if groups and seed == groups[-1][-1] + 1 and len(groups[-1]) < size:
            groups[-1].append(seed)
        else:
            groups.append([seed])
    return groups


class _Crossing:
    """The flights of one group of worlds."""

    def __init__(
        self, settings: Settings, pilot: Pilot, shield: Shield | None, record: bool
    ) -> None:
        count, steps = settings.num_envs, settings.episode_steps
        self._settings = settings
        self._pilot = pilot
        # Its own counters: threads that share them would lose some.
        self.shield = shield and Shield(None, shield.backend, shield.settings)
        self._record = record
        self.outcome = torch.full((count,), Outcome.TIMEOUT, dtype=torch.int8)
        self.time_s = torch.full((count,), steps * settings.period_s)
        self.reach_goal = torch.zeros(count, dtype=torch.bool)
        self.path = torch.empty(count, steps if record else 0, 3)
        self._open = torch.ones(count, dtype=torch.bool)  # not decided yet
        self._up = torch.ones(count, dtype=torch.bool)  # not crashed yet

    @torch.no_grad()
    def fly(self, progress: Progress | None, stop: threading.Event) -> None:
        steps = self._settings.episode_steps
        with Simulator(self._settings, threads=1) as sim:
            obs = sim.reset()
            place = sim.rows[:, POSITION].clone()
            for step in range(steps):
                if stop.is_set():
                    return
                action = self._decide(obs, sim.rows[:, Z])
                obs, _, _, _, info = sim.step(action, restart=False)
                torch.where(self._open[:, None], info.position, place, out=place)
                self._judge(info, (step + 1) * self._settings.period_s)
                if self._record:
                    self.path[:, step] = place
                flying = bool(self._up.any())
                if progress is not None:
                    progress.advance((1 if flying else steps - step) * self._settings.maps)
                if not flying:
                    self.path[:, step:] = place[:, None]
                    return
            self.reach_goal = info.reach_goal & self._up

    def _decide(self, obs: Observation, height: Tensor) -> Tensor:
        """Ask pilot and shield about the drones in the air; the wrecks stand still."""
        up = self._up.nonzero()[:, 0]
        seen = {name: value[up] for name, value in obs.items()}
        wanted = self._pilot(seen)
        if self.shield is not None:
            due = self._open[up].nonzero()[:, 0]
            if due.numel():
                limit = self._settings.action_limit
                ahead = {name: value[due] for name, value in seen.items()}
                velocity, changed = self.shield.filter(
                    (wanted[due] * 2.0 - 1.0) * limit,
                    ahead,
                    ahead["state"][:, State.VELOCITY],
                    height[up[due]],
                )
                safe = (velocity / (2.0 * limit) + 0.5).clamp(0.0, 1.0)
                wanted = wanted.index_copy(0, due[changed], safe[changed])
        action = torch.full((self._up.numel(), 3), 0.5)
        action[up] = wanted
        return action

    def _judge(self, info: Info, now_s: float) -> None:
        crashed = torch.zeros_like(self._up)
        for outcome, happened in (
            (Outcome.STATIC, info.collision_static),
            (Outcome.DYNAMIC, info.collision_dynamic),
            (Outcome.HEIGHT, info.collision_height),
            (Outcome.SUCCESS, info.reach_goal),
        ):
            first = happened & self._open
            self.outcome[first] = outcome
            self.time_s[first] = now_s
            self._open &= ~first
            if outcome is not Outcome.SUCCESS:
                crashed |= happened
        self._up &= ~crashed


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute in the calling threads only: such small batches are not worth sharing.

    It is also what makes results independent of how many threads torch had.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
