"""`penstock rescue`: what a killed recording left."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from penstock.commands.base import Command, Outcome


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DATASET", help="what a killed lerobot session left")
    parser.add_argument(
        "out", nargs="?", metavar="OUT", help="the new dataset (default DATASET_rescued)"
    )
    parser.add_argument(
        "--like", metavar="OTHER", help="a dataset of the same features, if info.json is cut"
    )


def _run(a: argparse.Namespace) -> Outcome:
    from penstock.dataset.rescue import rescue

    root = Path(a.path).absolute()
    report = rescue(root, a.out or root.with_name(f"{root.name}_rescued"), a.like)
    return Outcome(report.text(), asdict(report), 1 if report.lost else 0, answer=False)


COMMAND = Command(
    "bring back what a killed lerobot recording left",
    "A recording that is killed leaves parquet files without a footer, videos that the records do "
    "not know, pictures that were not encoded yet. Every episode whose bytes reached the disk "
    "comes back in OUT; what did not is told, with exit code 1. DATASET is only read.",
    "penstock rescue recording recording_rescued",
    _add_arguments,
    _run,
    interruptible=True,
)
