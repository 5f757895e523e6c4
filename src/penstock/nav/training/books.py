"""What is kept of a training: checkpoints, rollouts, metrics, and what the terminal shows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from typing_extensions import Self

from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.core.files import FolderLock
from penstock.core.memory import format_bytes, rss_bytes
from penstock.nav.learning.ppo import PPO
from penstock.nav.learning.ppo_settings import Batch
from penstock.nav.training.config import Config, write_config
from penstock.nav.training.group import Group
from penstock.nav.training.log import MetricsLog
from penstock.nav.training.panel import Panel
from penstock.nav.training.runs import BEST, FINAL, Run, metadata
from penstock.nav.training.sources import as_tensordict
from penstock.rollouts.storage import RolloutStorage
from penstock.ui.monitor import PerformanceMonitor

_SHOWN_WINDOW = 20  # iterations that shares of time are over


@dataclass(frozen=True)
class Place:
    """Where a run is."""

    iteration: int
    frames: int
    frames_per_iteration: int


class Books:
    """The books of one process; all but process 0 keep rollouts only.

    Args:
        config: Says what is kept.
        run: Where.
        ppo: The learner; its optimizer's steps finish the captures of checkpoints.
        monitor: The timers of the loop.
        group: The processes.
        place: Where the run goes on from.

    Attributes:
        run: Where.
        saver: Writes the checkpoints; of process 0 only.
    """

    saver: AsyncCheckpointSaver

    def __init__(
        self,
        config: Config,
        run: Run,
        ppo: PPO,
        monitor: PerformanceMonitor,
        group: Group,
        place: Place,
    ) -> None:
        self.run = run
        self._config = config
        self._monitor = monitor
        self._leads = group.leads
        self._stack = ExitStack()
        self._rollouts: RolloutStorage | None = None
        self._told_s = time.perf_counter()
        self._validated: dict[str, float] = {}
        self._frames_per_iteration = place.frames_per_iteration
        with ExitStack() as stack:
            if config["rollout_save_interval"]:
                folder = run.rollouts if group.leads else run.rollouts / f"rank_{group.rank}"
                self._rollouts = stack.enter_context(
                    RolloutStorage(
                        folder,
                        config["rollout_compression_level"],
                        keep_last=config["rollout_keep"],
                        background=True,
                        handle_signals=False,
                    )
                )
            if group.leads:
                stack.enter_context(FolderLock(run.folder))
                if config["resume"] is not None:
                    write_config(config, run.config, place.iteration)
                self.saver = stack.enter_context(_saver(config, run, ppo))
                self._log = MetricsLog(config, run, place.iteration, place.frames)
                stack.callback(self._log.close)
                self._panel = stack.enter_context(
                    Panel(
                        config.max_frames,
                        f"training {run.folder.name}",
                        initial_frames=place.frames,
                    )
                )
                resumed = f", resumed after iteration {place.iteration}" if place.iteration else ""
                self._panel.note(
                    f"{place.frames_per_iteration} frames per iteration, {group.size} "
                    f"process{'es' if group.size > 1 else ''}, {run.folder}{resumed}"
                )
                for note in config.notes:
                    self._panel.note(note)
            self._stack = stack.pop_all()

    def save(self, state: Mapping[str, Any], metrics: Mapping[str, float], *, best: bool) -> None:
        """Ask for a checkpoint if it is time for one; it is written in the background."""
        iteration = state["iteration"]
        interval = self._config["save_interval"]
        if not self._leads:
            return
        if best:
            score = metrics["validation/success"]
            self._save(state, BEST, metric=score)
            self._panel.note(f"iteration {iteration}: best on validation maps, {score:.1%}")
        if interval and iteration % interval == 0:
            self._save(state, f"checkpoint_{iteration:06d}.pt")

    def save_now(self, state: Mapping[str, Any], name: str | None = None) -> str:
        """Save a state and wait until it is durable; return where it is."""
        if not self._leads:
            return "process 0 saved the state before it"
        handle = self._save(state, name or f"checkpoint_{state['iteration']:06d}.pt")
        handle.wait()
        return f"the state before it is in {handle.path}"

    def save_final(self, state: Mapping[str, Any]) -> None:
        """Save the state at the end of training."""
        self.save_now(state, FINAL)

    def _save(self, state: Mapping[str, Any], name: str, metric: float | None = None) -> Any:
        notes = metadata(
            self._config, state["iteration"], state["frames"], state["map_seeds"].tolist()
        )
        notes["validation"] = metric
        return self.saver.save_async(dict(state), name, metadata=notes, metric=metric)

    def save_rollout(self, batch: Batch, iteration: int) -> None:
        """Keep a rollout if it is time for one."""
        interval = self._config["rollout_save_interval"]
        if self._rollouts is not None and iteration % interval == 0:
            self._rollouts.save(as_tensordict(batch), iteration)

    def tell(
        self, iteration: int, frames: int, metrics: Mapping[str, float], progress: float = 0.0
    ) -> None:
        """Log the metrics of an iteration, and show them; `progress` is of the schedules."""
        if not self._leads:
            return
        times = self._monitor.get_stats(_SHOWN_WINDOW)
        now_s = time.perf_counter()
        took_s, self._told_s = now_s - self._told_s, now_s
        row = {
            f"perf/{name}": stats["last"]
            for name, stats in times.items()
            if name != "validation" or "validation/success" in metrics
        }
        row["perf/iteration"] = took_s
        row["perf/frames_per_s"] = self._frames_per_iteration / took_s
        row["perf/memory_bytes"] = rss_bytes(tree=False)
        stalls = self._stalls()
        interval = self._config["save_interval"]
        if interval and (iteration - 1) % interval == 0 and iteration > 1:  # its barrier is past
            row["perf/checkpoint_stall"] = stalls["last_ms"] / 1e3
        self._log.write({"env_frames": frames, **metrics, **row}, iteration)
        shares = {name: stats["share"] for name, stats in times.items()}
        if self._config.max_seconds is not None and progress > 0.0:
            self._panel.total_frames = round(frames / progress)
        # Validation is rare: its last figures stay on the screen.
        self._validated |= {k: v for k, v in metrics.items() if k.startswith("validation/")}
        self._panel.update(frames, {**self._validated, **metrics}, shares, stalls)
        every = self._config["stats_interval"]
        if every and iteration % every == 0:
            for line in (f"iteration {iteration}", *filter(None, self.summary().splitlines())):
                self._panel.note(line)

    def _stalls(self) -> dict[str, float]:
        stats = self.saver.get_stats()
        blocked = stats["blocked"]
        parts = [blocked[name] for name in ("call", "barrier") if name in blocked]
        return {
            "median_ms": 1e3 * sum(part["p50"] for part in parts),
            "max_ms": 1e3 * sum(part["max"] for part in parts),
            "last_ms": 1e3 * sum(part["last"] for part in parts),
            "saved": stats["total_saved"],
            "pending": stats["queue_size"],
        }

    def summary(self) -> str:
        """Return where the time went, and what was saved."""
        if not self._leads:
            return ""
        stats, stalls = self.saver.get_stats(), self._stalls()
        lines = [
            self._monitor.get_summary(),
            "",
            "[Checkpoint Stats]",
            f"  Total saved: {stats['total_saved']} (queue {stats['queue_size']}, "
            f"failed {stats['total_failed']})",
            f"  Compression ratio: {stats['compression_ratio']:.2f}x, "
            f"{format_bytes(stats['stored_bytes'])} written",
            f"  Training held up per save: median {stalls['median_ms']:.2f} ms, "
            f"longest {stalls['max_ms']:.2f} ms",
        ]
        return "\n".join(lines)

    def close_panel(self, *, stopped: bool) -> None:
        """Let the terminal show how it ended: done, or stopped before that."""
        if self._leads:
            self._panel.close(stopped)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _saver(config: Config, run: Run, ppo: PPO) -> AsyncCheckpointSaver:
    level = config["save_compression_level"]
    keep = config["checkpoint_keep"]
    return AsyncCheckpointSaver(
        run.checkpoints,
        max_queue_size=config["async_checkpoint_queue_size"],
        optimizers=[ppo.optimizer],
        modules=[ppo.policy],
        lazy=True,  # only `optimizer.step` writes the policy in this loop
        compress=bool(config["compress_checkpoint"]) and level > 0,
        compression_level=max(level, 1),
        delta_every=config["checkpoint_delta_every"],
        keep_last=keep,
        keep_best=None if keep is None else 1,
        handle_signals=False,  # the loop saves before it stops
    )
