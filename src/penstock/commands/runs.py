"""`penstock runs`: training runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from penstock.commands.base import Command, Outcome
from penstock.errors import UsageError

_COLUMNS = ("run", "state", "iter", "M frames", "min", "frames/s", "valid", "policy", "+shield")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="runs, or folders of runs (default runs)"
    )
    parser.add_argument(
        "--sort",
        choices=("name", "valid", "frames"),
        default="name",
        metavar="KEY",
        help="by name (default), valid or frames",
    )


def _run(arguments: argparse.Namespace) -> Outcome:
    from penstock.inspect.run import Comparison, RunFacts, compare, is_run
    from penstock.ui.report import text_table

    folders: list[Path] = []
    for path in map(Path, arguments.paths or ["runs"]):
        found = [path] if is_run(path) else sorted(filter(is_run, path.glob("*")))
        if not found:
            raise UsageError(f"{path} is no training run, and holds none; see penstock train")
        folders += [run for run in found if run.resolve() not in map(Path.resolve, folders)]
    comparison: Comparison = compare(folders)
    orders: dict[str, Any] = {
        "name": lambda run: run.name,
        "valid": lambda run: -(run.validation or 0.0),
        "frames": lambda run: -run.frames,
    }
    runs = sorted(comparison.runs, key=orders[arguments.sort])

    def row(run: RunFacts) -> tuple[str, ...]:
        shares = (
            run.validation,
            run.evaluation.get("policy"),
            run.evaluation.get("policy + shield"),
        )
        return (
            run.name,
            run.state,
            str(run.iteration),
            f"{run.frames / 1e6:.2f}",
            f"{run.seconds / 60:.1f}",
            f"{run.frames / run.seconds:,.0f}" if run.seconds else "-",
            *("-" if share is None else f"{share:.1%}" for share in shares),
        )

    parts = [text_table(_COLUMNS, [row(run) for run in runs])]
    if comparison.differences:
        columns = ("setting", *(run.name for run in runs))
        lines = [
            (key, *(str(values.get(run.name, "-")) for run in runs))
            for key, values in comparison.differences.items()
        ]
        parts.append(f"settings that differ\n{text_table(columns, lines)}")
    data = {"runs": [vars(run) for run in runs], "differences": comparison.differences}
    return Outcome("\n\n".join(parts), data)


COMMAND = Command(
    "list and compare training runs",
    "How far each run is, its speed, its best share of crossings on validation maps (valid), what "
    "penstock evaluate found on unseen worlds (policy, +shield), and the settings in which the "
    "runs differ. Read from their folders; torch is not needed.",
    "penstock runs\n  penstock runs runs/a runs/b --sort valid",
    _add_arguments,
    _run,
)
