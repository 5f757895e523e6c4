"""What an export of rollouts did, for the terminal and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.memory import format_bytes


@dataclass
class ExportReport:
    """What an export did.

    Attributes:
        out: The dataset.
        episodes: Episodes written in this run.
        frames: Frames written in this run: as many as were read.
        seconds: Wall clock.
        bytes: Of the dataset, with all that was there before.
        total_episodes: Of the dataset.
        total_frames: Of the dataset.
        fps: Of the dataset.
        rollouts: Files that were read.
        skipped_frames: Frames of these rollouts that were there already.
        features: The key of each feature; "" for one that was made.
        cut_by: The keys that say where an episode ends.
        widened: Features whose numbers are float32 now, exactly, and what they were.
        left_out: Keys that are not in the dataset, and why.
    """

    out: Path
    episodes: int = 0
    frames: int = 0
    seconds: float = 0.0
    bytes: int = 0
    total_episodes: int = 0
    total_frames: int = 0
    fps: int = 0
    rollouts: int = 0
    skipped_frames: int = 0
    features: dict[str, str] = field(default_factory=dict)
    cut_by: list[str] = field(default_factory=list)
    widened: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**vars(self), "out": str(self.out), "seconds": round(self.seconds, 3)}

    def text(self) -> str:
        """Return the summary for the terminal."""
        rate = self.episodes / self.seconds if self.seconds else 0.0
        before = f", {self.skipped_frames} were there already" if self.skipped_frames else ""
        cut = ", ".join(self.cut_by) or "nothing: the row of each environment is one episode"
        lines = [
            f"dataset    {self.out}: {self.total_episodes} episodes, {self.total_frames} frames at "
            f"{self.fps} fps, {format_bytes(self.bytes)}",
            f"rollouts   {self.rollouts} read: {self.frames} frames in, {self.frames} frames out"
            f"{before}",
            f"episodes   {self.episodes} in {self.seconds:.1f} s ({rate:.0f} per second), cut by "
            f"{cut}",
            f"features   {', '.join(self.features)}",
        ]
        lines += [
            f"widened    {name}: {dtype} is float32 now, exactly"
            for name, dtype in self.widened.items()
        ]
        lines += [f"left out   {name}: {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)
