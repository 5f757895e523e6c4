"""Training, top to bottom: collect, advantages, update, validate, save, log.

Every process runs the loop on its shards; process 0 keeps the record. A state is taken at the end
of every iteration, so that a stop in the middle of one loses only what was half done.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from penstock.errors import DataError, PeerLost, PenstockError, UsageError
from penstock.nav.collect import (
    Collector,
    EpisodeWindow,
    PipelinedCollector,
    SimulatorCollector,
    Stopped,
)
from penstock.nav.config import VALIDATION_MAPS, Config, load_config
from penstock.nav.distributed import Group, Stop, spawn_workers
from penstock.nav.evaluation.crossing import Outcome, deterministic_pilot, fly
from penstock.nav.networks import Policy, has_bf16
from penstock.nav.ppo import PPO, Batch
from penstock.nav.recorder import FINAL, Run, RunRecorder, open_run
from penstock.ui.monitor import PerformanceMonitor

_NAMES = {"actor_loss": "loss/actor", "critic_loss": "loss/critic", "entropy": "loss/entropy"}
_LOOK_EVERY = 8  # minibatches: processes ask each other whether to stop
_FIRST_SHARE = 0.1  # of the moving obstacles: so many are there when the curriculum begins


@dataclass(frozen=True)
class Result:
    """How a training ended."""

    folder: Path
    iteration: int
    frames: int
    seconds: float
    stopped: bool
    """Somebody asked to stop before the end."""
    validation: float | None
    """Best success on validation maps."""
    summary: str
    """Where the time went, and what was saved."""
    nothing_to_do: str | None = None
    """Why a run that was gone on with had ended already."""


def start(words: Sequence[str] = (), file: str | None = None, stop: Stop | None = None) -> Result:
    """Train as key=value words and a YAML file say, in as many processes as they say.

    Raises:
        PenstockError: The settings, the state or the disk make it impossible, or a process died.
    """
    config, run, state = open_run(load_config(words, file), words)
    device = config["device"]
    if "WORLD_SIZE" in os.environ:  # torchrun, or a test, has started us
        with Group.from_environment(device) as group:
            return train(config, run, state, group, stop)
    if config.processes == 1:
        return train(config, run, state, Group(), stop)
    with spawn_workers(config.processes, _worker_main, (config, run.folder), device) as group:
        return train(config, run, state, group, stop)


def _worker_main(rank: int, address: str, config: Config, folder: Path) -> None:
    """What a process does that was started here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["PENSTOCK_PROGRESS"] = "quiet"
    run = Run(folder)
    try:
        with Group(rank, config.processes, address, config["device"]) as group:
            state = None if config["resume"] is None else run.load_state()
            train(config, run, state, group)
    except (PeerLost, UsageError) as error:  # process 0 says it
        sys.exit(error.exit_code)
    except PenstockError as error:
        sys.stderr.write(f"penstock: process {rank}: {error}\n")
        sys.exit(error.exit_code)


def train(
    config: Config,
    run: Run,
    state: dict[str, Any] | None = None,
    group: Group | None = None,
    stop: Stop | None = None,
) -> Result:
    """Train until the frames, the minutes or the iterations are used up, or somebody stops it.

    A new run must not exist; the state to go on from is of `Run.load_state`. At a number that is
    not finite the state before it is saved, and a `DataError` names it.
    """
    torch.set_num_threads(config["threads"])  # the order of sums depends on it, and so the bits
    _keep_freed_memory()
    group = Group() if group is None else group
    stop = Stop() if stop is None else stop  # one that nobody asked is false
    timer = (monitor := PerformanceMonitor(history=1000)).timer
    with ExitStack() as stack:
        trainer = Trainer(config, group, stop)
        stack.callback(trainer.collector.close)
        if state is not None:
            trainer.load(state)
        if group.is_main and config["resume"] is None:
            run.create(config)  # now: settings that are impossible must leave nothing behind
        group.barrier()  # the folder is there for all
        recorder = stack.enter_context(RunRecorder(run, trainer, monitor))
        nothing_to_do = trainer.why_done
        ppo, collector = trainer.ppo, trainer.collector
        after = trainer.state()
        stopped = aborted = False
        while not (stopped or trainer.why_done):
            before = _copied(after)
            try:
                with timer("collect"):
                    batch = collector.collect(trainer.dynamic_active, trainer.disturbed)
                with timer("update"):
                    targets = ppo.advantages(batch)
                    stats = ppo.update(
                        batch, trainer.order, trainer.progress, trainer.check_stop, targets
                    )
                with timer("other"):
                    metrics, stopped = trainer.advance(batch, stats)
                    recorder.save_rollout(batch)
                best = False
                if trainer.validation_due:
                    with timer("validation"):
                        best = trainer.validate(metrics)
                with timer("checkpoint"):
                    after = trainer.state()
                    recorder.save(after, metrics, best=best)
                recorder.log_iteration(metrics)
            except (Stopped, PeerLost, DataError) as error:
                where = recorder.save_now(before)
                if isinstance(error, DataError):
                    number = trainer.iteration + 1
                    raise DataError(f"iteration {number}: {error}; {where}") from error
                if isinstance(error, PeerLost):
                    raise
                stopped = aborted = True
        if not aborted and (stopped or config["max_iterations"]):
            recorder.save_now(after)
        if not stopped and trainer.finished:
            recorder.save_now(after, FINAL)
        recorder.close_panel(stopped=stopped)
        return Result(
            run.folder,
            trainer.iteration,
            trainer.frames,
            trainer.seconds,
            stopped,
            trainer.best,
            recorder.summary(),
            nothing_to_do,
        )


class Trainer:
    """What the loop works on: the learner, who flies for it, and how far it is.

    `order` are the random numbers for the order of rows, equal in all processes; `iteration`,
    `frames` (of all drones together), `seconds` and `best`, the best success on validation maps,
    are those of all sessions.
    """

    def __init__(self, config: Config, group: Group, stop: Stop) -> None:
        self.config = config
        self.group = group
        self._stop = stop
        self._shards = group.shards(config.shards)
        seed, device = config["seed"], config["device"]
        bf16 = config["algo.bf16"]
        bf16 = has_bf16(device) if bf16 is None else bf16
        policy = Policy(config.preset, seed=seed, bf16=bf16).to(device)
        self.ppo = PPO(
            policy,
            replace(config.ppo, shards=len(self._shards)),
            group.mean_ if group.size > 1 else None,
        )
        self.order = torch.Generator().manual_seed(seed)
        self.frames_per_iteration = config.frames_per_iteration
        ahead = config["collector"] == "pipelined"
        self.collector: Collector = (
            PipelinedCollector(policy, self._collector) if ahead else self._collector(policy, 1)
        )
        self.iteration = self.frames = 0
        self.seconds = 0.0
        self.best: float | None = None
        self._since = time.monotonic()
        self._looks = 0
        self._window = EpisodeWindow()

    def _collector(self, policy: Policy, buffers: int) -> Collector:
        config = self.config
        if config.plugin is not None:
            from penstock.nav.torchrl_collector import TorchRLCollector  # TorchRL takes seconds

            seed = 1000 * config["seed"] + self.group.rank  # as shards: never another seed's
            plugin = TorchRLCollector.from_config(config, policy, seed)
            envs = plugin.plugin.num_envs
            self.frames_per_iteration = config.steps * envs * self.group.size
            return plugin
        alone = self.group.size == 1  # only then may one process stop in the middle
        return SimulatorCollector(
            policy,
            [config.shard_settings(shard) for shard in self._shards],
            self._shards,
            config["seed"],
            config.steps,
            stop=self._stop if alone else lambda: False,
            threads=config["threads"],
            buffers=buffers,
        )

    # ------------------------------------------------------------------ how far

    @property
    def progress(self) -> float:
        """How far training is, from 0 to 1: what schedules follow."""
        if self.config.max_seconds is not None:
            return min(1.0, self.seconds / self.config.max_seconds)
        return min(1.0, self.frames / self.config.max_frames)

    @property
    def finished(self) -> bool:
        """Whether the schedules are at their end."""
        return self.progress >= 1.0

    @property
    def why_done(self) -> str | None:
        """What ended the training, and which setting goes on; None while there is more to do."""
        config, most = self.config, self.config["max_iterations"]
        if self.finished and config.max_seconds is not None:
            limit, used = "max_minutes", f"{config.max_seconds / 60:g}"
        elif self.finished:
            limit, used = "max_frame_num", f"{config.max_frames}"
        elif most is not None and self.iteration >= most:
            limit, used = "max_iterations", f"{most}"
        else:
            return None
        return f"{limit}={used} is used up after iteration {self.iteration}; give a larger {limit}"

    @property
    def dynamic_active(self) -> int:
        """How many moving obstacles are there: more and more over the curriculum, by eights."""
        count = self.config.settings.dynamic_obstacles
        over: float = self.config["env_dyn.curriculum"]
        if not over:
            return count
        share = _FIRST_SHARE + (1.0 - _FIRST_SHARE) * self.progress / over
        return int(min(1.0, share) * count) // 8 * 8

    @property
    def disturbed(self) -> float:
        """Which share of the disturbances is there: more and more over their curriculum."""
        over: float = self.config["sim.curriculum"]
        return min(1.0, self.progress / over) if over else 1.0

    @property
    def validation_due(self) -> bool:
        """Whether it is time to fly validation maps."""
        interval = self.config["eval_interval"]
        return bool(interval) and self.config.plugin is None and self.iteration % interval == 0

    def check_stop(self) -> None:
        """Stop between minibatches; several processes ask each other now and then, and all stop."""
        self._looks += 1
        due = self.group.size == 1 or self._looks % _LOOK_EVERY == 0
        if due and self.group.any(bool(self._stop)):
            raise Stopped

    # ------------------------------------------------------------------ steps of the loop

    def advance(self, batch: Batch, stats: dict[str, float]) -> tuple[dict[str, float], bool]:
        """Count an iteration; return its metrics, and whether any process was asked to stop."""
        self.iteration += 1
        self.frames += self.frames_per_iteration
        now = time.monotonic()
        self.seconds += now - self._since
        self._since = now
        assert batch.episodes is not None
        clock = self.seconds if self.group.is_main else 0.0
        told = torch.tensor([float(bool(self._stop)), clock], dtype=torch.float64)
        exchanged = self.group.sum_(torch.cat((batch.episodes, told)))
        self.seconds = float(exchanged[-1])
        metrics = {_NAMES.get(name, f"train/{name}"): value for name, value in stats.items()}
        metrics |= self._window.add(exchanged[:-2]) | dict(batch.facts)
        return metrics, bool(exchanged[-2])

    def validate(self, metrics: dict[str, float]) -> bool:
        """Fly validation maps, each process some; return whether it was the best so far."""
        count, size, rank = self.config["eval_worlds"], self.group.size, self.group.rank
        own = range(rank * count // size, (rank + 1) * count // size)
        counts = torch.zeros(len(Outcome) + 1, dtype=torch.float64)
        if own:
            flights = fly(
                deterministic_pilot(self.ppo.policy),
                self.config.settings,
                [VALIDATION_MAPS + world for world in own],
                self.config["eval_drones"],
            )
            counts[:-1] = torch.bincount(flights.outcome.long(), minlength=len(Outcome))
            counts[-1] = flights.outcome.numel()
        shares = self.group.sum_(counts)[:-1] / counts[-1]
        for kind in Outcome:
            metrics[f"validation/{kind.name.lower()}"] = float(shares[kind])
        better = self.best is None or float(shares[Outcome.SUCCESS]) >= self.best
        if better:
            self.best = float(shares[Outcome.SUCCESS])
        return better

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """Return all that the future depends on; the learner's tensors are not copied."""
        own = [TensorDict(state).flatten_keys("/") for state in self.collector.state_dict()]
        shards = self.group.gather([dict(state.items()) for state in own])
        seeds = [shard["simulator/seeds"] for shard in shards if "simulator/seeds" in shard]
        return {
            "ppo": self.ppo.state_dict(),
            "shards": shards,
            "order": self.order.get_state(),
            "iteration": self.iteration,
            "frames": self.frames,
            "seconds": self.seconds,
            "best": self.best,
            "episodes": self._window.state(),
            "map_seeds": torch.cat(seeds) if seeds else torch.zeros(0, dtype=torch.int64),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state; nothing is changed by one of another network or other settings."""
        shards = state["shards"]
        if len(shards) != self.config.shards:
            raise UsageError(
                f"the checkpoint has {len(shards)} shards, and shards={self.config.shards}; give "
                f"shards={len(shards)}"
            )
        own = [TensorDict(shards[number]).unflatten_keys("/") for number in self._shards]
        if ("simulator" in own[0]) != (self.config.plugin is None):
            raise UsageError(
                "the checkpoint is of another environment than env._target_="
                f"{self.config.plugin or 'null'}; go on with the one it was trained in"
            )
        self.collector.load_state_dict([state.to_dict() for state in own])
        self.ppo.load_state_dict(state["ppo"])
        self.order.set_state(state["order"])
        self.iteration, self.frames = int(state["iteration"]), int(state["frames"])
        self.seconds, self.best = float(state["seconds"]), state["best"]
        if "episodes" in state:  # not in checkpoints of earlier versions
            self._window.load(state["episodes"])


def _keep_freed_memory() -> None:
    """Let the C library use freed megabytes again: fresh ones cost page faults.

    They were a fifth of an update. The process gets no larger than it was at its largest.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc only
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 1 << 30)
        mallopt(mmap_threshold, 1 << 25)


def _copied(value: Any) -> Any:
    """Copy a state, so that the learner may go on; `copy.deepcopy` takes ten times as long."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value
