"""What collecting many environments at once brings, and how many batches are alive meanwhile."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from benchmarks import Row, Settings
from benchmarks.measure import clock, interleave
from penstock.rollouts.collect import PipelinedDataCollector

OURS = "penstock"
_DRONES = (1, 100, 1024)
_STEPS = {1: 200, 100: 40, 1024: 10}  # of a turn
_ENVS, _TIME = 16, 4
_PREFETCH = 2
_LEARN_S = 0.01


def measure_parallel(settings: Settings) -> list[Row]:
    """Step one, a hundred and a thousand drones at a time."""
    from penstock.nav.simulation.simulator import Simulator  # the rest does without nav/
    from penstock.nav.simulation.task import Settings as Task

    simulators = {}
    turns = {}
    for count in _DRONES:
        task = Task(num_envs=count, new_map_every=0)
        simulators[count] = simulator = Simulator(task, 0, threads=2)
        simulator.reset()
        action = torch.full((count, 3), 0.6)

        def turn(
            simulator: Simulator = simulator, action: torch.Tensor = action, count: int = count
        ) -> float:
            steps = _STEPS[count]

            def fly() -> None:
                for _ in range(steps):
                    simulator.step(action)

            return clock(fly) / (steps * count)

        turns[f"{count} at once"] = turn
    try:
        timings = interleave(turns, max(3, settings.repeats), "drones at once")
    finally:
        for simulator in simulators.values():
            simulator.close()
    speed = {who: 1 / timing.median for who, timing in timings.items()}
    alone = speed[f"{_DRONES[0]} at once"]
    n = max(3, settings.repeats)
    rows = [Row("steps of drones", who, value, "steps/s", n=n) for who, value in speed.items()]
    what = "drones at once against one by one"
    rows += [Row(what, who, value / alone, "x", n=n) for who, value in speed.items()]
    few, all_of_them = (speed[f"{count} at once"] for count in _DRONES[1:])
    what = f"speed of {_DRONES[1]} drones at once, of that of {_DRONES[2]}"
    return [*rows, Row(what, OURS, 100 * few / all_of_them, "%", n=n)]


def measure_same_td() -> list[Row]:
    """Hold two batches of a TorchRL collector and count the memory under them."""
    rows = []
    for same in (True, False):
        first, second = _two_batches(same)
        held = _storages(first) | _storages(second)
        share = sum(held.values()) / sum(_storages(second).values())
        what = "memory of two batches held, return_same_td"
        rows.append(Row(what, str(same), share, "x batch", n=2))
        objects = len({id(first), id(second)})
        rows.append(
            Row("objects behind two batches, return_same_td", str(same), objects, "objects")
        )
    return rows


def _two_batches(same: bool) -> tuple[TensorDictBase, TensorDictBase]:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", DeprecationWarning)  # of parts that TorchRL will remove
        from torchrl.collectors import Collector

        from penstock.nav.simulation.env import NavigationEnv

        env = NavigationEnv(num_envs=_ENVS, threads=1)
        collector = Collector(
            env, frames_per_batch=_ENVS * _TIME, total_frames=-1, return_same_td=same
        )
        try:
            batches = iter(collector)
            return next(batches), next(batches)
        finally:
            collector.shutdown()
            if not env.is_closed:
                env.close()


def _storages(batch: TensorDictBase) -> dict[int, int]:
    found: dict[int, int] = {}
    for key in batch.keys(True, True):
        storage = batch[key].untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def measure_alive(batches: int) -> list[Row]:
    """Count the batches alive at a time, with and without collecting ahead."""
    rows = []
    for who, ahead in ((OURS, True), ("one after the other", False)):
        alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        most = 0

        def source(alive: Any = alive) -> Iterator[TensorDict]:
            for number in range(max(batches, 12)):
                tensor = torch.full((64,), number)
                alive.add(tensor)
                yield TensorDict({"number": tensor}, batch_size=[64])
                del tensor

        if ahead:
            with PipelinedDataCollector(source(), prefetch_count=_PREFETCH) as collector:
                for _ in collector:
                    time.sleep(_LEARN_S)  # so that the collector gets ahead
                    # The learner's own, the copies that wait for it, and what they are copied from.
                    most = max(most, 1 + collector.stats()["queued"] + len(alive))
        else:
            for _ in source():
                most = max(most, len(alive))
        rows.append(Row(f"batches alive, {_PREFETCH} ahead", who, most, "x batch"))
    return rows


def compute_gains() -> list[Row]:
    """Work out the proposal's sums: a million frames, and all its gains together."""
    minutes = "1,000,000 frames at 10,000 frames/s (computed)"
    faster = "100 minutes with more speed (computed)"
    together = "gains of checkpoints, pipeline and compression together (computed)"
    low, middle, high = (
        100 * (math.prod(1 + gain / 100 for gain in gains) - 1)
        for gains in ((5, 10, 5), (7.5, 12.5, 7.5), (10, 15, 10))
    )
    return [
        Row(minutes, "training", 1e6 / 10_000 / 60, "min"),
        Row(faster, "+5 %", 100 / 1.05, "min"),
        Row(faster, "+15 %", 100 / 1.15, "min"),
        Row(faster, "+25 %", 100 / 1.25, "min"),
        Row(together, "the least of each", low, "%"),
        Row(together, "the middle of each", middle, "%"),
        Row(together, "the most of each", high, "%"),
    ]
