"""Metrics to files: every iteration to metrics.jsonl, the same figures to TensorBoard and wandb."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path

from penstock.core.files import publish_bytes
from penstock.errors import MissingExtra
from penstock.nav.training.config import Config
from penstock.nav.training.runs import Run
from penstock.ui.monitor import JsonlSink, TensorBoardSink, WandbSink


class MetricsLog:
    """Where the metrics of a run go.

    All get the same figures, nothing is averaged: wandb by iteration, TensorBoard by frames.

    Args:
        config: Says where.
        run: Its folder.
        iteration: The one that the run goes on from; rows behind it are of a part that was lost,
            and are dropped.
        frames: Frames up to there.
    """

    def __init__(self, config: Config, run: Run, iteration: int = 0, frames: int = 0) -> None:
        _drop_rows(run.metrics, iteration)
        self._every = JsonlSink(run.metrics)
        self._interval = config["log_interval"]
        self._last: tuple[Mapping[str, float], int] | None = None  # not told to the others yet
        self._tensorboard: TensorBoardSink | None = None
        if config["tensorboard"]:
            self._tensorboard = TensorBoardSink(run.tensorboard, purge_step=frames + 1)
        self.wandb = _wandb(config, run)

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
        if self._tensorboard is not None:
            self._tensorboard.write(finite, int(metrics["env_frames"]))
        if self.wandb is not None:
            self.wandb.write(finite, iteration)

    def close(self) -> None:
        """Finish all files; the last iteration is in all of them."""
        self._write_others()
        for sink in (self._every, self._tensorboard, self.wandb):
            if sink is not None:
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
