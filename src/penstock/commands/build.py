"""`penstock build`: the LeRobot files from what is committed."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

from penstock.commands.base import Command, Outcome


@dataclass(frozen=True)
class BuildReport:
    """What a dataset holds after a build.

    Attributes:
        out: The folder.
        episodes: How many.
        frames: How many.
        added: Units that this build put in.
        missing: Recordings of the plan that have no unit yet.
        failed: Recordings that could not become one, and why.
    """

    out: str
    episodes: int
    frames: int
    added: int
    missing: int
    failed: dict[str, str]

    def text(self) -> str:
        """Return the summary for the terminal."""
        from penstock.ui.report import aligned

        lines = [("FAILED", f"{name}: {reason}") for name, reason in self.failed.items()]
        lines += [
            ("dataset", f"{self.out}: {self.episodes} episodes, {self.frames} frames"),
            ("units", f"{self.added} added"),
        ]
        if self.missing:
            todo = "penstock convert BAGS OUT --resume"
            lines.append(("missing", f"{self.missing} recordings: {todo}"))
        return aligned(lines)


def build(out: str) -> BuildReport:
    """Build the LeRobot files of a dataset from what is committed.

    Raises:
        UsageError: There is nothing of penstock's.
    """
    from penstock.dataset.writer import DatasetWriter

    with DatasetWriter.reopen(out) as writer:
        before = writer.built_units
        writer.build()
        known = {source.get("fingerprint") for source in writer.committed}
        failed = {
            str(note["source"].get("bag", "?")): str(note["reason"]) for note in writer.failures
        }
        writer.clear_units()
        return BuildReport(
            out,
            writer.total_episodes,
            writer.total_frames,
            writer.built_units - before,
            sum(bag not in known for bag in writer.plan.bags),
            failed,
        )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="the folder of the dataset, here or s3://…")


def _run(arguments: argparse.Namespace) -> Outcome:
    report = build(arguments.out)
    return Outcome(report.text(), asdict(report), 1 if report.failed else 0, answer=False)


COMMAND = Command(
    "make the LeRobot files of a dataset from what is committed",
    "convert commits every bag as a unit, and builds the LeRobot files from the units at its end, "
    "or when it is interrupted. build does so after a kill, a full disk, or when other machines "
    "have made the units. What is built already is kept as it is.",
    "penstock build dataset",
    _add_arguments,
    _run,
    interruptible=True,
    objects=True,
)
