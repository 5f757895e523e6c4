"""`penstock doctor`: verify every byte."""

from __future__ import annotations

import argparse

from penstock.commands.base import Command, Outcome


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files or folders")
    parser.add_argument(
        "--quick", action="store_true", help="of a dataset, decode only a sample of the pictures"
    )


def _run(arguments: argparse.Namespace) -> Outcome:
    from penstock.inspect import doctor

    result = doctor.check_all(arguments.paths, quick=arguments.quick)
    return Outcome(result.text(), result.to_json(), 1 if result.findings else 0)


COMMAND = Command(
    "verify every byte; exit code 1 on a finding",
    "A recording: every message is read. A dataset: schemas, counts, timestamps, statistics, and "
    "every picture is decoded. A checkpoint or rollout: every block is decoded; bases of "
    "differences, the latest pointer and left-over temporary files are checked. A replay buffer: "
    "every segment. Exit code 1 if anything is wrong.",
    "penstock doctor dataset --json",
    _add_arguments,
    _run,
    interruptible=True,
)
