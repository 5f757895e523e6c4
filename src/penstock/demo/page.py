"""What the tour measured: one table for the terminal, one page for people."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.memory import format_bytes
from penstock.demo.stage import Stage
from penstock.nav.evaluation import table
from penstock.nav.evaluation.page import learning_curves
from penstock.ui.report import Report, text_table

Figure = tuple[str, str, str]


@dataclass
class Figures:
    """What was measured, as the commands and calls gave it."""

    converted: dict[str, Any] = field(default_factory=dict)
    stopped_after: int = 0
    metrics: Path = Path()
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    flights: bytes = b""
    view: bytes = b""
    actions_ms: float | None = None
    rollout: dict[str, Any] = field(default_factory=dict)
    loads: dict[str, dict[str, float]] = field(default_factory=dict)
    buffer: dict[str, float] = field(default_factory=dict)
    advice: dict[str, Any] = field(default_factory=dict)
    recovered: int = 0

    def read_metrics(self, path: Path) -> None:
        """Take what the training logged."""
        self.metrics = path
        self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def read_evaluation(self, folder: Path) -> None:
        """Take what the evaluation wrote."""
        self.evaluation = json.loads((folder / "evaluation.json").read_text())
        self.flights = (folder / "flights.png").read_bytes()

    def note_buffer(self, buffer: Any, batch: Any, seconds: float) -> None:
        """Take what a filled buffer holds."""
        frames = len(buffer)
        drawn = sum(value.nbytes for value in _leaves(batch))
        count = next(iter(_leaves(batch)))
        raw = drawn / (count.shape[0] * count.shape[1]) * frames
        self.buffer = {
            "frames": frames,
            "raw_bytes": raw,
            "held_bytes": buffer.stored_bytes,
            "seconds": seconds,
        }

    @property
    def stalls_ms(self) -> list[float]:
        """How long each checkpoint paused training."""
        name = "perf/checkpoint_stall"
        return [1e3 * row[name] for row in self.rows if row.get(name) is not None]

    def rollout_text(self) -> str:
        """Say what a rollout weighs, by key."""
        keys = [
            (key["name"], format_bytes(key["raw_bytes"]), f"{key['raw_bytes'] / stored:.2f}")
            for key in self.rollout["largest"]
            if (stored := key["stored_bytes"])
        ]
        return text_table(("key", "bytes", "times smaller"), keys)

    def loads_text(self) -> str:
        """Say what parts of a rollout cost."""
        rows = [(what, f"{1e3 * stats['p50']:.1f} ms") for what, stats in self.loads.items()]
        return text_table(("loaded", "median"), rows)

    def buffer_text(self) -> str:
        """Say what the buffer holds."""
        held = self.buffer
        return (
            f"{held['frames']:.0f} frames, {format_bytes(held['raw_bytes'])} of them in "
            f"{format_bytes(held['held_bytes'])}, and a batch, in {held['seconds']:.1f} s"
        )

    def advice_text(self) -> str:
        """Say what `advise` advised."""
        advice = self.advice
        lines = [f"{advice['verdict']}: {advice['meaning']}", *advice["why"]]
        return "\n".join([*lines, *advice["settings"]])

    def all(self, seconds: float) -> list[Figure]:
        """Return the figures: label, value, note."""
        found, rows, held = self.converted, self.rows, self.buffer
        stalls = self.stalls_ms or [float("nan")]
        rates = [row["perf/frames_per_s"] for row in rows[1:]] or [float("nan")]
        results = self.evaluation["results"]
        raw, stored = self.rollout["raw_bytes"], self.rollout["size_bytes"]
        whole, one, drone = (stats["p50"] for stats in self.loads.values())
        figures = [
            (
                "recording to dataset",
                f"{found['frames_out']} frames",
                f"of {found['frames_in']} recorded, {sum(found['dropped'].values())} dropped",
            ),
            (
                "peak memory of it",
                format_bytes(found["peak_memory_bytes"]),
                f"limit {format_bytes(found['memory_limit_bytes'])}",
            ),
            (
                "training",
                f"{statistics.median(rates):,.0f} frames/s",
                f"{rows[-1]['env_frames'] / 1e6:.2f} M frames, {len(rows)} iterations",
            ),
            (
                "paused per checkpoint",
                f"{statistics.median(stalls):.2f} ms",
                f"median of {len(stalls)}, longest {max(stalls):.1f} ms",
            ),
            (
                "stopped by Ctrl-C after",
                f"iteration {self.stopped_after}",
                f"went on from there to {len(rows)}",
            ),
        ]
        for name in ("policy", "policy + shield"):
            rate = results[name]["rates"]["success"]
            note = f"of crossings reach the goal ({100 * rate['low']:.0f}-{100 * rate['high']:.0f})"
            figures.append((name, f"{rate['mean']:.1%}", note))
        if self.actions_ms is not None:
            note = "per decision, behind the shield, without torch"
            figures.append(("exported policy", f"{self.actions_ms:.2f} ms", note))
        return [
            *figures,
            (
                "a rollout",
                f"{raw / stored:.1f}x smaller",
                f"{format_bytes(raw)} in {format_bytes(stored)}, lossless",
            ),
            (
                "reading one key of it",
                f"{one / whole:.0%} of the time",
                f"one drone {drone / whole:.0%}",
            ),
            (
                "replay buffer",
                f"{held['raw_bytes'] / held['held_bytes']:.1f}x smaller",
                f"{held['frames']:.0f} frames, lossless",
            ),
            ("advice", str(self.advice["verdict"]), str(self.advice["meaning"])),
            ("a bit flipped", "found", f"iteration {self.recovered} loaded instead"),
            ("the tour", f"{seconds:.0f} s", f"on {os.cpu_count()} cores"),
        ]


def show(stage: Stage, figures: Figures, path: Path) -> Path:
    """Print the figures, and write the page."""
    figures_now = figures.all(stage.seconds)
    stage.say("\n" + text_table(("figure", "value", "note"), figures_now))
    report = Report("penstock demo")
    report.text("Every figure on this page was measured in this run, by the commands below.")
    report.figures(figures_now)
    report.heading("Flights across worlds that were not trained on")
    report.table(*table.cells(figures.evaluation["results"]))
    report.pictures([(figures.flights, "The policy with the safety shield, from above.")])
    if figures.view:
        report.heading("The dataset and its recordings, as `penstock view` shows them")
        report.pictures([(figures.view, "Cameras in step, curves, what was dropped or late.")])
    report.heading("Recordings to a dataset: memory over time")
    memory = [(s, size / 1e6) for s, size in figures.converted["memory"]]
    limit = figures.converted["memory_limit_bytes"] / 1e6
    ends = [(0.0, limit), (memory[-1][0] if memory else 1.0, limit)]
    report.plot({"resident": memory, "limit": ends}, "s", "MB")
    report.heading("Learning to cross 350 boxes")
    report.plot(learning_curves(figures.metrics), "million frames", "reach the goal, %")
    report.heading("How long each checkpoint paused training")
    report.plot(
        {"paused": figures.stalls_ms},
        "ms per checkpoint",
        "checkpoints",
        "histogram",
        "The call of save_async and the barrier before the next step of the optimizer, together.",
    )
    report.heading("Where the time went")
    report.plot({name: [100 * share] for name, share in _shares(figures.rows)}, "", "%", "bars")
    report.heading("A rollout: what is left of each key")
    report.plot(
        {
            f"{key['name']}, {format_bytes(key['raw_bytes'])}": [
                100 * key["stored_bytes"] / key["raw_bytes"]
            ]
            for key in figures.rollout["largest"]
            if key["raw_bytes"]
        },
        "",
        "stored, % of its size, lossless",
        "bars",
    )
    report.heading("What was run")
    report.code("\n".join(stage.lines))
    return report.write(path)


def _shares(rows: list[dict[str, Any]]) -> list[tuple[str, float]]:
    phases = ("collect", "update", "validation", "checkpoint", "rollout", "other")
    totals = {name: sum(row.get(f"perf/{name}") or 0.0 for row in rows) for name in phases}
    whole = sum(totals.values()) or 1.0
    return [(name, total / whole) for name, total in totals.items() if total]


def _leaves(batch: Any) -> list[Any]:
    parts = []
    for value in batch.values():
        parts += _leaves(value) if hasattr(value, "keys") else [value]
    return parts
