"""`penstock demo`: the tour."""

from __future__ import annotations

import argparse

from penstock.commands.base import Command, Outcome


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="demo", metavar="DIR", help="folder to make (default demo)"
    )


def _run(arguments: argparse.Namespace) -> Outcome:
    from penstock import demo

    report = demo.run(arguments.out, silent=arguments.quiet or arguments.json)
    return Outcome(f"\nreport: {report}", {"report": str(report)}, answer=False)


COMMAND = Command(
    "the whole tour in under five minutes, with a report",
    "Records a sample bag, converts and checks it; trains the navigation policy, stops it "
    "half-way, resumes, flies it across unseen worlds; reads its rollouts in part, exports them, "
    "fills a replay buffer, asks for advice; damages a checkpoint, and recovers.\n\n"
    "Every command is printed before it is run, and every figure is measured in that run.",
    "penstock demo --out demo",
    _add_arguments,
    _run,
)
