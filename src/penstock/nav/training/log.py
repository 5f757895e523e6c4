"""Metrics to files: every iteration to metrics.jsonl, means of some to TensorBoard and wandb."""

from __future__ import annotations

import importlib.util
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from penstock.core.files import publish_bytes
from penstock.errors import MissingExtra
from penstock.nav.training.config import Config
from penstock.nav.training.runs import Run
from penstock.ui.monitor import JsonlSink, Sink, TensorBoardSink, WandbSink


class MetricsLog:
    """Where the metrics of a run go.

    Args:
        config: Says where.
        run: Its folder.
        iteration: The one that the run goes on from; rows behind it are of a part that was lost,
            and are dropped.
    """

    def __init__(self, config: Config, run: Run, iteration: int = 0) -> None:
        _drop_rows(run.metrics, iteration)
        self._every = JsonlSink(run.metrics)
        self._some: list[Sink] = []
        self._interval = config["log_interval"]
        self._held: dict[str, list[float]] = defaultdict(list)
        if config["tensorboard"]:
            self._some.append(TensorBoardSink(run.tensorboard))
        self.wandb = _wandb(config, run)
        if self.wandb is not None:
            self._some.append(self.wandb)

    def write(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Keep the metrics of an iteration."""
        self._every.write(metrics, iteration)
        for name, value in metrics.items():
            if math.isfinite(value):
                self._held[name].append(value)
        if iteration % self._interval == 0:
            self.flush(iteration)

    def flush(self, iteration: int) -> None:
        """Write the means since the last flush."""
        means = {name: math.fsum(values) / len(values) for name, values in self._held.items()}
        self._held.clear()
        for sink in self._some if means else ():
            sink.write(means, iteration)

    def close(self) -> None:
        """Finish all files."""
        for sink in (self._every, *self._some):
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
