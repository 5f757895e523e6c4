"""Collecting the next rollout during the update, against one after the other, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from penstock.nav.learning.policy import Policy
from penstock.nav.learning.ppo import PPO
from penstock.nav.training.collect import SimulatorCollector
from penstock.nav.training.config import Config, load_config
from penstock.nav.training.sources import PipelinedSource, Source, SyncSource
from penstock.tools.bench import Row
from penstock.tools.bench.measure import Timing, clock, interleave, time_rows
from penstock.tools.bench.state import torch_threads

OURS = "penstock, collector=pipelined"
SYNC = "penstock, collector=sync"
_SLOW_BAR = 1.5


class Bench:
    """A learner, and drones that always begin with the same state, in the middle of their flights.

    Args:
        config: What is trained.

    Attributes:
        collect_s: Time of a rollout.
        update_s: Time of an update.
        cpu_s: Processor time per iteration of the last block.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ppo = PPO(Policy(config.preset, seed=0), config.ppo)
        self.order = torch.Generator().manual_seed(0)
        self.cpu_s = 0.0
        self._stopped = False
        self._state: list[dict[str, Any]] | None = None
        collector = self._collector()
        memory = collector.memory()
        for _ in range(2):  # the first one compiles
            self.collect_s = clock(lambda: collector.collect(self.ppo.policy, memory))
        batch = collector.collect(self.ppo.policy, memory)
        self.update_s = min(clock(lambda: self.ppo.update(batch, self.order)) for _ in range(2))
        self._state = collector.state_dict()
        collector.close()

    def _collector(self, rest_s: float = 0.0) -> SimulatorCollector:
        """Drones that rest before every step, as if they waited for a GPU or a robot."""

        def stop() -> bool:  # asked before every step
            if rest_s:
                time.sleep(rest_s)
            return self._stopped

        collector = SimulatorCollector(
            [self.config.shard_settings(0)], [0], self.config["seed"], self.config.steps, stop=stop
        )
        if self._state is not None:
            collector.load_state_dict(self._state)
        return collector

    def block(
        self,
        make: Callable[[SimulatorCollector, Policy], Source],
        length: int,
        rest_s: float = 0.0,
    ) -> float:
        """Time `length` iterations of a fresh source; return the seconds of one.

        The clock starts with the first batch in hand and stops with the next one after the last
        update in hand: so many updates, and so many batches.
        """
        self._stopped = False
        source = make(self._collector(rest_s), self.ppo.policy)
        try:
            source.updated(self.config.settings.dynamic_obstacles)
            batch = source.next()
            begin, cpu = time.perf_counter(), time.process_time()
            for _ in range(length):
                self.ppo.update(batch, self.order)
                source.updated(self.config.settings.dynamic_obstacles)
                batch = source.next()
            seconds = time.perf_counter() - begin
            self.cpu_s = (time.process_time() - cpu) / length
            return seconds / length
        finally:
            self._stopped = True  # the batch in the making is not waited for
            source.close()


def measure_pipeline(*, envs: int, slow_envs: int, rounds: int, length: int) -> list[Row]:
    """Compare both sources as they are here, and with an environment as slow as the update.

    Args:
        envs: Drones.
        slow_envs: Drones of the slow environment.
        rounds: Blocks of each source.
        length: Iterations of a block.
    """
    with torch_threads(1):
        honest = _compare(envs, rounds, length, slow=False)
        slow = _compare(slow_envs, rounds, length, slow=True)
    gain = _gain(slow)
    return [
        *time_rows(f"iteration, {envs} drones, 1 process", honest, OURS),
        Row(
            "pipelined collection on this machine",
            OURS,
            _gain(honest),
            "x sync",
            n=rounds,
            bar="reported",
        ),
        *time_rows(f"iteration, {slow_envs} drones, as slow as the update", slow, OURS),
        Row(
            "pipelined collection, environment as slow as the update",
            OURS,
            gain,
            "x sync",
            n=rounds,
            bar=f">= {_SLOW_BAR}",
            met=gain >= _SLOW_BAR,
        ),
    ]


def _gain(timings: dict[str, Timing]) -> float:
    pairs = zip(timings[SYNC].seconds, timings[OURS].seconds, strict=True)
    return statistics.median(sync / pipelined for sync, pipelined in pairs)


def _compare(envs: int, rounds: int, length: int, *, slow: bool) -> dict[str, Timing]:
    bench = Bench(load_config([f"env.num_envs={envs}", "processes=1", "env_dyn.curriculum=0"]))
    rest_s = max(0.0, bench.update_s - bench.collect_s) / bench.config.steps if slow else 0.0
    cpu_s: dict[str, list[float]] = {OURS: [], SYNC: []}

    def turn(name: str, make: Callable[[SimulatorCollector, Policy], Source]) -> float:
        seconds = bench.block(make, length, rest_s)
        cpu_s[name].append(bench.cpu_s)
        return seconds

    timings = interleave(
        {OURS: lambda: turn(OURS, PipelinedSource), SYNC: lambda: turn(SYNC, SyncSource)},
        rounds,
        "pipelined, slow environment" if slow else "pipelined",
        warm_up=False,  # `Bench` did it
    )
    for name, timing in timings.items():
        timing.cpu_s = cpu_s[name]  # of the iterations alone, without making the drones
    return timings
