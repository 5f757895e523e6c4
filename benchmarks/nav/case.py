"""The case `nav`: the simulator, training on it, and what the data path costs training."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks import Case, Row, Settings
from benchmarks.measure import Timing, clock, interleave, time_rows, torch_threads
from benchmarks.nav.pipeline import measure_pipeline
from benchmarks.nav.plain_torchrl import PlainLoop
from benchmarks.nav.saving import measure_saving
from benchmarks.nav.train import Training, measure_resume, measure_training
from penstock.nav.config import load_config
from penstock.nav.distributed import Group, Stop
from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import Settings as Task
from penstock.nav.train import Trainer

NUMBA = "penstock, numba, 2 threads"
ALONE = "penstock, 1 process"
TOGETHER = "penstock train, a process per core"
PEER = "TorchRL, 1 thread"
PEER_ALL = "TorchRL, a thread per core"
_ENV_BAR, _PEER_BAR = 500_000, 1.5
_DRONES = ("fast", "hummingbird")  # that of `penstock train`, and NavRL's own
_FORWARD = 0.35  # of the speed range, added to random actions: drones cross the field
_UNDER_WAY = 128  # decisions until they are all over it
_FEW = 4  # repeats below which everything is done as briefly as possible


def run(settings: Settings) -> list[Row]:
    """Measure everything about navigation."""
    brief = settings.repeats < _FEW
    envs = settings.envs
    few = max(64, envs // 4)  # where a ratio is measured and time is short
    work = settings.work / "nav"
    work.mkdir()
    skip = 1 if brief else 3
    fast = measure_training(work / "fast", "fast", 3 if brief else 12, envs=envs, skip=skip)
    navrl = measure_training(work / "navrl", "navrl", 1 if brief else 5, envs=envs, skip=skip)
    saving = measure_saving(
        work / "saving",
        envs=few if brief else envs,
        blocks=2 if brief else 6,
        length=2 if brief else 3,
    )
    return [
        *measure_environment(envs, settings.repeats * 2, _DRONES[:1] if brief else _DRONES),
        *fast.table(),
        *navrl.table(),
        *measure_peer(envs, 1 if brief else 4, fast, 1 if brief else _cores()),
        *saving.table(judged=not brief),
        measure_resume(work / "resume", envs=min(envs, 64), words=["processes=1"]),
        *measure_pipeline(
            envs=few if brief else envs,
            slow_envs=few,
            rounds=2 if brief else 3,
            length=2 if brief else 3,
        ),
    ]


def _cores() -> int:
    return os.cpu_count() or 1


# ---------------------------------------------------------------------- the environment


def measure_environment(
    envs: int, rounds: int, drones: Sequence[str] = _DRONES, steps: int = 80
) -> list[Row]:
    """Step the simulator, drones all over the field; maps stay.

    Args:
        envs: Drones.
        rounds: Turns.
        drones: Kinds of drones; the first one is judged.
        steps: Of a turn.
    """
    rows: list[Row] = []
    for drone in drones:
        words = [f"env.num_envs={envs}", f"env.drone={drone}", "env.new_map_every=0"]
        task = load_config(words).settings
        what = f"environment, {envs} drones ({drone}), {task.num_obstacles} + "
        what += f"{task.dynamic_obstacles} obstacles"
        row = _stepped(what, task, rounds, steps)
        if drone == drones[0]:
            row = replace(row, bar=f">= {_ENV_BAR:,} steps/s", met=row.value >= _ENV_BAR)
        rows.append(row)
    return rows


def _stepped(what: str, task: Task, rounds: int, steps: int) -> Row:
    actions = torch.rand(steps, task.num_envs, 3, generator=torch.Generator().manual_seed(0))
    actions[..., 0] = (actions[..., 0] + _FORWARD).clamp_(max=1.0)
    with Simulator(task, 0, threads=2) as simulator, torch_threads(1):
        simulator.reset()
        for number in range(_UNDER_WAY):
            simulator.step(actions[number % steps])

        def fly() -> None:
            for number in range(steps):
                simulator.step(actions[number])

        timing = interleave({NUMBA: lambda: clock(fly)}, rounds, "environment")[NUMBA]
    count = steps * task.num_envs
    speed = count / timing.median
    cpu_s = statistics.median(timing.cpu_s) / count * 1e6  # of a million steps
    return Row(what, NUMBA, speed, "steps/s", n=rounds, ratio=1.0, cpu_s=cpu_s)


# ---------------------------------------------------------------------- against TorchRL


def measure_peer(
    envs: int, rounds: int, train: Training | None = None, cores: int = 1
) -> list[Row]:
    """Time iterations of penstock and of a plain TorchRL loop: the same task, network and settings.

    Args:
        envs: Drones.
        rounds: Iterations of each.
        train: `penstock train` as users run it, to be listed beside them.
        cores: If there are several, TorchRL is measured with as many threads, too.
    """
    config = load_config([f"env.num_envs={envs}", "processes=1", "env_dyn.curriculum=0"])
    with torch.random.fork_rng(devices=[]):  # TorchRL draws from the global generator
        torch.manual_seed(0)
        loops = {PEER: PlainLoop(config.settings, config.steps, config.ppo)}
        if cores > 1:
            loops[PEER_ALL] = PlainLoop(config.settings, config.steps, config.ppo, threads=cores)
        trainer = Trainer(config, Group(), Stop())

        def ours() -> None:
            batch = trainer.collector.collect(trainer.dynamic_active, trainer.disturbed)
            stats = trainer.ppo.update(batch, trainer.order, trainer.progress)
            trainer.advance(batch, stats)

        def turn(action: Callable[[], object], threads: int) -> Callable[[], float]:
            def measured() -> float:
                with torch_threads(threads):
                    return clock(action)

            return measured

        turns = {ALONE: turn(ours, 1)}
        turns |= {name: turn(loop.iteration, loop.threads) for name, loop in loops.items()}
        try:
            timings = interleave(turns, rounds, "TorchRL")
        finally:
            for loop in loops.values():
                loop.close()
            trainer.collector.close()
    return _peer_rows(config.frames_per_iteration, timings, train)


def _peer_rows(frames: int, timings: dict[str, Timing], train: Training | None) -> list[Row]:
    what = f"training iteration of {frames:,} frames, algo=fast"
    rows = time_rows(what, timings, ALONE)
    alone = rows[0].value
    rounds = rows[0].n
    pairs = zip(timings[PEER].seconds, timings[ALONE].seconds, strict=True)
    gain = statistics.median(theirs / ours for theirs, ours in pairs)
    against = "against a plain TorchRL loop"
    verdict = [
        Row(
            f"{against}, one process and one thread each",
            ALONE,
            gain,
            "x TorchRL",
            n=rounds,
            bar=f">= {_PEER_BAR}",
            met=gain >= _PEER_BAR,
        )
    ]
    if train is not None:
        seconds = frames / train.frames_per_s
        rows.append(
            Row(
                what,
                TOGETHER,
                seconds * 1e3,
                "ms",
                n=len(train.rows),
                ratio=seconds * 1e3 / alone,
                cpu_s=train.cpu_s,
            )
        )
        for peer in (PEER, PEER_ALL):
            if peer in timings:
                verdict.append(
                    Row(
                        f"{against} ({peer.partition(', ')[2]})",
                        TOGETHER,
                        timings[peer].median / seconds,
                        "x TorchRL",
                        n=len(train.rows),
                        bar="reported",
                    )
                )
    return rows + verdict


CASE = Case(
    name="nav",
    claim="the original proposal: about 10,000 frames/s on a GPU, checkpoints that hold "
    "training up for less than 1 ms; the original proposal: collecting ahead is 5-15 % faster",
    peers=(
        "TorchRL Collector + GAE + ClipPPOLoss + Adam, same environment and network",
        "no checkpoints",
        "collect, then train",
    ),
    data="{envs} drones among 350 boxes and 80 moving obstacles, 32 decisions each per iteration; "
    "training in processes of its own, its first iterations left out",
    run=run,
)
