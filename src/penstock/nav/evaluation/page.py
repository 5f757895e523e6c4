"""An evaluation as a page: the table, how training went, and the flights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.nav.evaluation import table
from penstock.ui.report import Point, Report

_CURVES = {"validation/success": "validation maps, policy alone", "train/success": "training"}


def build(result: Mapping[str, Any], picture: bytes, metrics: Path) -> Report:
    """Lay out what is in evaluation.json, the PNG of the flights, and the run's metrics.jsonl."""
    report = Report("Crossings of unseen worlds")
    settings, results = result["settings"], result["results"]
    report.text(
        f"{result['checkpoint']}: {settings['num_obstacles']} boxes, "
        f"{settings['dynamic_obstacles']} moving obstacles, {settings['drone']} drone, a decision "
        f"every {settings['substeps'] * 16} ms."
    )
    report.figures(
        [
            (name, f"{summary['rates']['success']['mean']:.1%}", "reach the goal")
            for name, summary in results.items()
        ]
    )
    report.table(*table.cells(results))
    report.text(*table.footnotes(results))
    if result["stress"] is not None:
        report.heading("Under disturbances")
        report.table(*table.stress_cells(result["stress"]))
    curves = learning_curves(metrics)
    if curves:
        report.heading("Learning")
        report.plot(curves, "million frames", "episodes that reach the goal, %")
    report.heading("Flights")
    report.pictures([(picture, f"{list(results)[-1]}, from above")])
    return report


def learning_curves(metrics: Path) -> dict[str, list[Point]]:
    """Return success in % over million frames, by what was flown; empty without metrics."""
    if not metrics.is_file():
        return {}
    curves: dict[str, list[Point]] = {name: [] for name in _CURVES.values()}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off by a crash
        for key, name in _CURVES.items():
            if isinstance(row.get(key), int | float) and "env_frames" in row:
                curves[name].append((row["env_frames"] / 1e6, 100.0 * row[key]))
    return {name: points for name, points in curves.items() if points}
