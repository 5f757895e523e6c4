"""Collecting the next rollout during the update, against one after the other, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import Row
from benchmarks.measure import Timing, clock, interleave, time_rows, torch_threads
from penstock.nav.collect import Collector, PipelinedCollector, SimulatorCollector
from penstock.nav.config import Config, load_config
from penstock.nav.networks import Policy
from penstock.nav.ppo import PPO

OURS = "penstock, collector=pipelined"
SYNC = "penstock, collector=sync"
_SLOW_BAR = 1.5


class Bench:
    """A learner, and drones that always begin with the same state, in the middle of their flights.

    Args:
        config: What is trained.

    Attributes:
        rest_s: What each step takes longer than the simulator does, as one that waits for a GPU
            or a robot.
        collect_s: Time of a rollout, without rest.
        update_s: Time of an update.
        cpu_s: Processor time per iteration of the last block.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ppo = PPO(Policy(config.preset, seed=0), config.ppo)
        self.order = torch.Generator().manual_seed(0)
        self.cpu_s = 0.0
        self.rest_s = 0.0
        self._stopped = False
        self._active = config.settings.dynamic_obstacles
        collector = self.sync()
        for _ in range(2):  # the first one compiles
            self.collect_s = clock(lambda: collector.collect(self._active, 1.0))
        batch = collector.collect(self._active, 1.0)
        self.update_s = min(clock(lambda: self.ppo.update(batch, self.order)) for _ in range(2))
        self._state = collector.state_dict()

    def sync(self) -> Collector:
        """Return a collector that flies when it is asked to."""
        return self._make(self.ppo.policy, 1)

    def pipelined(self) -> Collector:
        """Return one that flies ahead."""
        return PipelinedCollector(self.ppo.policy, self._make)

    def _make(self, policy: Policy, buffers: int) -> Collector:
        config = self.config
        return SimulatorCollector(
            policy,
            [config.shard_settings(0)],
            [0],
            config["seed"],
            config.steps,
            stop=self._stop,
            buffers=buffers,
        )

    def _stop(self) -> bool:
        """Asked before every step: there a slow environment rests."""
        if self.rest_s:
            time.sleep(self.rest_s)
        return self._stopped

    def block(self, make: Callable[[], Collector], length: int) -> float:
        """Time `length` iterations of a fresh collector; return the seconds of one.

        The clock starts with the first batch in hand and stops with the next one after the last
        update in hand: so many updates, and so many batches.
        """
        self._stopped = False
        collector = make()
        collector.load_state_dict(self._state)
        try:
            batch = collector.collect(self._active, 1.0)
            begin, cpu = time.perf_counter(), time.process_time()
            for _ in range(length):
                self.ppo.update(batch, self.order)
                batch = collector.collect(self._active, 1.0)
            seconds = time.perf_counter() - begin
            self.cpu_s = (time.process_time() - cpu) / length
            return seconds / length
        finally:
            self._stopped = True  # the batch in the making is not waited for
            collector.close()


def measure_pipeline(*, envs: int, slow_envs: int, rounds: int, length: int) -> list[Row]:
    """Compare both collectors as they are here, and with an environment as slow as the update.

    Args:
        envs: Drones.
        slow_envs: Drones of the slow environment.
        rounds: Blocks of each collector.
        length: Iterations of a block.
    """
    with torch_threads(1):
        bench = _bench(envs)
        honest = _compare(bench, rounds, length, "pipelined")
        if slow_envs != envs:
            bench = _bench(slow_envs)
        bench.rest_s = max(0.0, bench.update_s - bench.collect_s) / bench.config.steps
        slow = _compare(bench, rounds, length, "pipelined, slow environment")
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


def _bench(envs: int) -> Bench:
    return Bench(load_config([f"env.num_envs={envs}", "processes=1", "env_dyn.curriculum=0"]))


def _compare(bench: Bench, rounds: int, length: int, title: str) -> dict[str, Timing]:
    cpu_s: dict[str, list[float]] = {OURS: [], SYNC: []}

    def turn(name: str, make: Callable[[], Collector]) -> float:
        seconds = bench.block(make, length)
        cpu_s[name].append(bench.cpu_s)
        return seconds

    timings = interleave(
        {OURS: lambda: turn(OURS, bench.pipelined), SYNC: lambda: turn(SYNC, bench.sync)},
        rounds,
        title,
        warm_up=False,  # `Bench` did it
    )
    for name, timing in timings.items():
        timing.cpu_s = cpu_s[name]  # of the iterations alone
    return timings
