"""What is kept of a run, and where: its folder, checkpoints, rollouts, metrics, the panel.

runs/x/  config.yaml  metrics.jsonl  tensorboard/  rollouts/  evaluation/
         checkpoints/  checkpoint_000100.pt …  best.pt  latest
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.core.files import FolderLock, make_folder, publish_bytes
from penstock.core.memory import format_bytes, rss_bytes
from penstock.errors import DataError, MissingExtra, UsageError
from penstock.nav.collect import as_tensordict
from penstock.nav.config import Config, load_config, write_config
from penstock.nav.panel import Panel
from penstock.nav.ppo import PPO, Batch
from penstock.rollouts.storage import RolloutStorage
from penstock.ui.monitor import JsonlSink, PerformanceMonitor, Sink, TensorBoardSink, WandbSink
from penstock.ui.report import aligned
from penstock.ui.suggestions import did_you_mean

if TYPE_CHECKING:
    from penstock.nav.train import Trainer

BEST = "best.pt"
FINAL = "checkpoint_final.pt"
_SHOWN_WINDOW = 20  # iterations that shares of time are over


class Run:
    """The folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.yaml"
        self.checkpoints = folder / "checkpoints"
        self.rollouts = folder / "rollouts"
        self.metrics = folder / "metrics.jsonl"
        self.tensorboard = folder / "tensorboard"

    def create(self, config: Config) -> None:
        """Make the folder; what is there already is left alone, with a `UsageError`."""
        inside = self.folder.iterdir() if self.folder.is_dir() else [self.folder]
        if self.folder.exists() and any(not p.name.startswith(".penstock") for p in inside):
            raise UsageError(
                f"{self.folder} exists already: go on with resume={self.folder}, or give another "
                "name=… or run_dir=…"
            )
        make_folder(self.checkpoints)
        write_config(config, self.config)

    def load_state(self) -> dict[str, Any] | None:
        """Read the newest whole checkpoint; None if the run was stopped before the first."""
        if not self.checkpoints.is_dir() or not any(self.checkpoints.glob("*.pt")):
            return None
        state = load_checkpoint(self.checkpoints)
        missing = {"ppo", "shards", "iteration", "frames"} - set(state)
        if missing:
            raise DataError(
                f"{self.checkpoints} holds no state of `penstock train`: {sorted(missing)[0]!r} is "
                "missing"
            )
        return dict(state)


def open_run(config: Config, words: Sequence[str]) -> tuple[Config, Run, dict[str, Any] | None]:
    """Return the settings, the folder and, if the run is resumed, the state to go on from.

    With `resume` only the words of the configuration count, on top of the run's own settings.
    """
    if config["resume"] is None:
        given, name = config["run_dir"], config["name"]
        name = time.strftime("%Y%m%d-%H%M%S") if name is None else str(name)
        if Path(name).name != name:
            raise UsageError(f"name={name!r} is a path; give a plain name, or run_dir=…")
        return config, Run(Path("runs") / name if given is None else Path(str(given))), None
    run = Run(Path(str(config["resume"])))
    if not run.config.exists():
        known = [str(path.parent) for path in run.folder.parent.glob("*/config.yaml")]
        hint = did_you_mean(str(run.folder), known) if known else "start it without resume="
        raise UsageError(f"resume={run.folder}: there is no run; {hint}")
    changes = [word for word in words if not word.lstrip("+").startswith(("resume=", "run_dir="))]
    merged = load_config([*changes, f"resume={run.folder}"], base=run.config)
    return merged, run, run.load_state()


class RunRecorder:
    """Keeps the record of one process; all but process 0 keep rollouts only."""

    saver: AsyncCheckpointSaver

    def __init__(self, run: Run, trainer: Trainer, monitor: PerformanceMonitor) -> None:
        self._trainer = trainer
        self._config = config = trainer.config
        self._monitor = monitor
        group, iteration = trainer.group, trainer.iteration
        self._is_main = group.is_main
        self._rollouts: RolloutStorage | None = None
        self._logged_s = time.perf_counter()
        self._validated: dict[str, float] = {}
        with ExitStack() as stack:
            if config["rollout_save_interval"]:
                folder = run.rollouts if group.is_main else run.rollouts / f"rank_{group.rank}"
                self._rollouts = stack.enter_context(
                    RolloutStorage(
                        folder,
                        config["rollout_compression_level"],
                        keep_last=config["rollout_keep"],
                        background=True,
                        handle_signals=False,
                    )
                )
            if group.is_main:
                stack.enter_context(FolderLock(run.folder))
                if config["resume"] is not None:
                    write_config(config, run.config, iteration)
                self.saver = stack.enter_context(_saver(config, run, trainer.ppo))
                self._log = _MetricsLog(config, run, iteration, trainer.frames)
                stack.callback(self._log.close)
                title = f"training {run.folder.name}"
                self._panel = stack.enter_context(
                    Panel(config.max_frames, title, initial_frames=trainer.frames)
                )
                resumed = f", resumed after iteration {iteration}" if iteration else ""
                processes = f"{group.size} process{'es' if group.size > 1 else ''}"
                self._panel.note(
                    f"{trainer.frames_per_iteration} frames per iteration, {processes}, "
                    f"{run.folder}{resumed}"
                )
                for note in config.notes:
                    self._panel.note(note)
            self._stack = stack.pop_all()

    def save(self, state: Mapping[str, Any], metrics: Mapping[str, float], *, best: bool) -> None:
        """Ask for a checkpoint if it is time for one; it is written in the background."""
        iteration = state["iteration"]
        interval = self._config["save_interval"]
        if not self._is_main:
            return
        if best:
            score = metrics["validation/success"]
            self._save(state, BEST, metric=score)
            self._panel.note(f"iteration {iteration}: best on validation maps, {score:.1%}")
        if interval and iteration % interval == 0:
            self._save(state, f"checkpoint_{iteration:06d}.pt")

    def save_now(self, state: Mapping[str, Any], name: str | None = None) -> str:
        """Save a state and wait until it is durable; return where it is."""
        if not self._is_main:
            return "process 0 saved the state before it"
        handle = self._save(state, name or f"checkpoint_{state['iteration']:06d}.pt")
        handle.wait()
        return f"the state before it is in {handle.path}"

    def _save(self, state: Mapping[str, Any], name: str, metric: float | None = None) -> Any:
        settings = self._config.settings
        seeds = state["map_seeds"].tolist()
        notes = {
            "settings": {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in asdict(settings).items()
            },
            "preset": self._config.preset,
            "iteration": state["iteration"],
            "frames": state["frames"],
            "map_seeds": [settings.map_seed, max(seeds, default=settings.map_seed)],
            "validation": metric,
        }
        return self.saver.save_async(dict(state), name, metadata=notes, metric=metric)

    def save_rollout(self, batch: Batch) -> None:
        """Keep a rollout if it is time for one."""
        iteration = self._trainer.iteration
        if self._rollouts is not None and iteration % self._config["rollout_save_interval"] == 0:
            self._rollouts.save(as_tensordict(batch), iteration)

    def log_iteration(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an iteration, and show them."""
        if not self._is_main:
            return
        iteration, frames = self._trainer.iteration, self._trainer.frames
        times = self._monitor.get_stats(_SHOWN_WINDOW)
        now_s = time.perf_counter()
        took_s, self._logged_s = now_s - self._logged_s, now_s
        row = {
            f"perf/{name}": stats["last"]
            for name, stats in times.items()
            if name != "validation" or "validation/success" in metrics
        }
        row["perf/iteration"] = took_s
        row["perf/frames_per_s"] = self._trainer.frames_per_iteration / took_s
        row["perf/memory_bytes"] = rss_bytes(tree=False)
        stalls = self._stalls()
        interval = self._config["save_interval"]
        if interval and (iteration - 1) % interval == 0 and iteration > 1:  # its barrier is past
            row["perf/checkpoint_stall"] = stalls["last_ms"] / 1e3
        self._log.write({"env_frames": frames, **metrics, **row}, iteration)
        shares = {name: stats["share"] for name, stats in times.items()}
        if self._config.max_seconds is not None and self._trainer.progress > 0.0:
            self._panel.total_frames = round(frames / self._trainer.progress)
        # Validation is rare: its last figures stay on the screen.
        self._validated |= {k: v for k, v in metrics.items() if k.startswith("validation/")}
        self._panel.update(frames, {**self._validated, **metrics}, shares, stalls)
        every = self._config["stats_interval"]
        if every and iteration % every == 0:
            for line in (f"iteration {iteration}", *filter(None, self.summary().splitlines())):
                self._panel.note(line)

    def _stalls(self) -> dict[str, float]:
        stats = self.saver.get_stats()
        parts = [stats["blocked"].get(name, {}) for name in ("call", "barrier")]
        times = {"median_ms": "p50", "max_ms": "max", "last_ms": "last"}
        stalls = {
            name: 1e3 * sum(part.get(key, 0.0) for part in parts) for name, key in times.items()
        }
        return stalls | {"saved": stats["total_saved"], "pending": stats["queue_size"]}

    def summary(self) -> str:
        """Return where the time went, and what was saved."""
        if not self._is_main:
            return ""
        stats, stalls = self.saver.get_stats(), self._stalls()
        counts = "{total_saved}, {total_failed} failed, {queue_size} waiting".format(**stats)
        size = f"{format_bytes(stats['stored_bytes'])}, {stats['compression_ratio']:.2f}x smaller"
        pause = "{median_ms:.2f} ms per save, longest {max_ms:.2f} ms".format(**stalls)
        saves = [("saves", counts), ("written", size), ("paused", pause)]
        return f"{self._monitor.get_summary()}\n\n{aligned(saves)}"

    def close_panel(self, *, stopped: bool) -> None:
        """Let the terminal show how it ended: done, or stopped before that."""
        if self._is_main:
            self._panel.close(stopped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


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


class _MetricsLog:
    """Metrics to files: every iteration to metrics.jsonl, the same to TensorBoard and wandb.

    Nothing is averaged; wandb is by iteration, TensorBoard by frames. Rows behind the iteration
    that the run goes on from are of a part that was lost, and are dropped.
    """

    def __init__(self, config: Config, run: Run, iteration: int, frames: int) -> None:
        _drop_rows(run.metrics, iteration)
        self._every = JsonlSink(run.metrics)
        self._interval = config["log_interval"]
        self._last: tuple[Mapping[str, float], int] | None = None  # not told to the others yet
        self._others: list[Sink] = []
        if config["tensorboard"]:
            self._others.append(TensorBoardSink(run.tensorboard, purge_step=frames + 1))
        if (wandb := _wandb(config, run)) is not None:
            self._others.append(wandb)

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Keep the metrics of an iteration; `env_frames` is one of them."""
        self._every.write(metrics, iteration)
        self._last = metrics, iteration
        if iteration % self._interval == 0:
            self._write_others()

    def _write_others(self) -> None:
        if self._last is None:
            return
        metrics, iteration = self._last
        self._last = None
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for sink in self._others:
            by_frames = isinstance(sink, TensorBoardSink)
            sink.write(finite, int(metrics["env_frames"]) if by_frames else iteration)

    def close(self) -> None:
        """Finish all files; the last iteration is in all of them."""
        self._write_others()
        for sink in (self._every, *self._others):
            sink.close()


def _drop_rows(path: Path, iteration: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= iteration:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # cut off by a crash
    publish_bytes(path, "".join(f"{line}\n" for line in kept).encode())


def _wandb(config: Config, run: Run) -> WandbSink | None:
    mode = config["wandb.mode"]
    if mode == "disabled":
        return None
    if importlib.util.find_spec("wandb") is None:
        if mode == "online":
            raise MissingExtra("wandb", "wandb")
        return None  # optional: offline is the default, and no reason to stop
    import wandb

    begun = wandb.init(
        project=config["wandb.project"],
        id=config["wandb.run_id"],
        resume="allow",
        mode=mode,
        dir=str(run.folder),
        name=run.folder.name,
        config=dict(config.raw),
    )
    return WandbSink(begun)
