"""What `penstock build` does, and what it says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.dataset.writer import DatasetWriter


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

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def text(self) -> str:
        """Return the summary for the terminal."""
        lines = [
            f"dataset        {self.out}: {self.episodes} episodes, {self.frames} frames",
            f"units          {self.added} added",
        ]
        if self.missing:
            lines.append(
                f"missing        {self.missing} recordings: penstock convert BAGS OUT --resume"
            )
        lines += [f"FAILED         {name}: {reason}" for name, reason in self.failed.items()]
        return "\n".join(lines)


def run(out: str) -> BuildReport:
    """Build the LeRobot files of a dataset from what is committed.

    Raises:
        UsageError: There is nothing of penstock's.
    """
    with DatasetWriter.reopen(out) as writer:
        before = writer.built_units
        writer.build()
        known = {source.get("fingerprint") for source in writer.committed}
        failed = {
            str(note["source"].get("bag", "?")): str(note["reason"]) for note in writer.failures
        }
        writer.clear_units()
        return BuildReport(
            str(Path(out)),
            writer.total_episodes,
            writer.total_frames,
            writer.built_units - before,
            sum(bag not in known for bag in writer.plan.bags),
            failed,
        )
