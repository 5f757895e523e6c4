"""What a conversion did: numbers for a program, a summary for the terminal, a page for people."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.conversion.account import Account
from penstock.conversion.mapping import Mapping
from penstock.conversion.one_bag import Converted
from penstock.conversion.request import Shard
from penstock.core.memory import format_bytes
from penstock.dataset.check import Finding
from penstock.ui.report import Report as Page
from penstock.ui.report import aligned


@dataclass(slots=True)
class BagReport:
    """One bag and what came of it."""

    path: Path
    size_bytes: int
    done: Converted

    @property
    def account(self) -> Account:
        """Where its frames went."""
        return self.done.account

    @property
    def salvage(self) -> str | None:
        """What was recovered of it; None if it was whole."""
        return self.done.salvage

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, without the pictures."""
        return {
            "bag": str(self.path),
            "size_bytes": self.size_bytes,
            "episodes": self.done.episodes,
            **self.account.to_json(),
            "skew": self.done.skew,
            "timeline": self.done.timeline,
            "salvage": self.salvage,
            "wall_s": round(self.done.wall_s, 3),
            "cpu_s": round(self.done.cpu_s, 3),
        }


@dataclass(slots=True)
class Report:
    """What a conversion did.

    Attributes:
        out: The dataset.
        mapping: What was asked for.
        bags: The bags converted in this run.
        skipped: Bags that were committed before.
        copies: Bags that are the same recording as another one of this run.
        unused: Bags that a setting leaves out: rosbag.num_used.
        failed: Bags that could not be converted, and why.
        account: Where all frames went.
        peak_bytes: Largest resident memory, workers included.
        findings: What the check found wrong; None if nobody checked.
        training: What it found that a trainer may want to look at.
        shard: The part of a job array that this run was; it builds nothing.
    """

    out: Path
    mapping: Mapping
    bags: list[BagReport] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)
    copies: dict[Path, Path] = field(default_factory=dict)
    failed: dict[Path, str] = field(default_factory=dict)
    unused: int = 0
    account: Account = field(default_factory=Account)
    peak_bytes: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)
    memory_limit_bytes: int = 0
    workers: int = 1
    total_episodes: int = 0
    total_frames: int = 0
    wall_s: float = 0.0
    findings: list[Finding] | None = None
    training: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    page: Path | None = None
    shard: Shard | None = None

    @property
    def frames_in(self) -> int:
        """Frames that were recorded."""
        return self.account.frames_in

    @property
    def frames_out(self) -> int:
        """Frames of this run in the dataset."""
        return self.account.frames_out

    @property
    def dropped(self) -> dict[str, int]:
        """Frames that are not in the dataset, by reason."""
        return dict(self.account.dropped)

    @property
    def ok(self) -> bool:
        """Whether every bag was converted and the check found nothing wrong."""
        errors = [f for f in self.findings or () if f.severity == "error"]
        return not self.failed and not errors

    def add(self, bag: BagReport) -> None:
        """Add a bag."""
        self.bags.append(bag)
        self.account.add(bag.account)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "out": str(self.out),
            "shard": None if self.shard is None else str(self.shard),
            "episodes": self.total_episodes,
            "frames": self.total_frames,
            **self.account.to_json(),
            "bags": [bag.to_json() for bag in self.bags],
            "skipped": [str(path) for path in self.skipped],
            "copies": {str(path): str(other) for path, other in self.copies.items()},
            "unused": self.unused,
            "failed": {str(path): reason for path, reason in self.failed.items()},
            "peak_memory_bytes": self.peak_bytes,
            "memory_limit_bytes": self.memory_limit_bytes,
            "memory": [[round(s, 3), size] for s, size in self.memory],
            "workers": self.workers,
            "wall_s": round(self.wall_s, 3),
            "cpu_s": round(sum(bag.done.cpu_s for bag in self.bags), 3),
            "checked": self.checked,
            "training": [note.what for note in self.training],
            "findings": None
            if self.findings is None
            else [f"{f.where}: {f.what}" for f in self.findings],
            "report": None if self.page is None else str(self.page),
        }

    def text(self, verbose: bool = False) -> str:
        """Return the summary for the terminal: what failed first, then what was done.

        Args:
            verbose: Say in detail what the check looked at.
        """
        size_bytes = sum(bag.size_bytes for bag in self.bags)
        speed = size_bytes / self.wall_s if self.wall_s else 0.0
        rate = self.frames_out / self.wall_s if self.wall_s else 0.0
        lines = [("FAILED", f"{path}: {reason}") for path, reason in self.failed.items()]
        for finding in self.findings or ():
            lines.append((finding.severity.upper(), f"{finding.where}: {finding.what}"))
        made = f"{self.total_episodes} episodes, {self.total_frames} frames at "
        lines += [
            ("dataset", f"{self.out}: {made}{self.mapping.fps} fps")
            if self.shard is None
            else (
                "shard",
                f"{self.shard} of {self.out}: its units are committed; when all shards are done, "
                "penstock build makes the dataset",
            ),
            (
                "bags",
                f"{len(self.bags)} converted, {len(self.skipped)} done before, "
                f"{len(self.failed)} failed",
            ),
            ("frames", self._balance()),
            (
                "memory",
                f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.memory_limit_bytes)}",
            ),
            ("time", f"{self.wall_s:.1f} s, {format_bytes(speed)}/s, {rate:.0f} frames/s"),
        ]
        if self.findings is not None:
            lines.append(("check", self._check_text(verbose)))
        if self.page is not None:
            lines.append(("report", str(self.page)))
        lines += [("dropped", f"{n} x {why}") for why, n in self.account.dropped.most_common()]
        lines += [("note", f"{n} x {what}") for what, n in self.account.notes.most_common()]
        lines += [
            ("salvaged", f"{bag.path.name}: {bag.salvage}") for bag in self.bags if bag.salvage
        ]
        lines += [
            ("copy", f"{path.name} is the same recording as {other.name}: taken once")
            for path, other in self.copies.items()
        ]
        if self.unused:
            lines.append(("left out", f"{self.unused} bags, by the setting rosbag.num_used"))
        lines += [("look", f"{note.what}; {note.todo}") for note in self.training]
        if self.ok and self.total_frames:
            lines += [("next", command) for command in self.next_steps()]
        return aligned(lines)

    def next_steps(self) -> list[str]:
        """Return what to type next."""
        out = shlex.quote(str(self.out))
        name = shlex.quote(f"local/{self.out.name}")
        return [
            f"penstock view {out}",
            f"lerobot-train --dataset.repo_id={name} --dataset.root={out} --policy.type=act "
            "--policy.push_to_hub=false",
        ]

    def _balance(self) -> str:
        account = self.account
        repeated = f" + {account.frames_repeated} repeated" if account.frames_repeated else ""
        return (
            f"{account.frames_in} in{repeated} = {account.frames_out} out + "
            f"{account.frames_dropped} dropped"
        )

    def _check_text(self, verbose: bool = True) -> str:
        findings = self.findings or []
        if not findings:
            counts = ", ".join(f"{n} {what}" for what, n in self.checked.items())
            return f"ok ({counts})" if counts and verbose else "ok"
        return f"{len(findings)} findings"

    def write_page(self, path: Path, command: str = "") -> Path:
        """Write the report as one HTML file.

        Args:
            path: The file.
            command: What was typed.
        """
        page = Page(f"Conversion into {self.out.name}")
        if self.failed:
            page.heading("Bags that failed")
            page.table(("bag", "reason"), [(str(p), why) for p, why in self.failed.items()])
        if self.findings:
            page.heading("Findings of the check")
            rows = [(f.severity, f.where, f.what, f.todo) for f in self.findings]
            page.table(("severity", "where", "what", "what to do"), rows)
        page.figures(
            [
                ("episodes", str(self.total_episodes), f"{self.total_frames} frames"),
                ("frames in", str(self.account.frames_in), self.mapping_text()),
                ("frames out", str(self.account.frames_out), f"{self.mapping.fps} fps"),
                (
                    "dropped",
                    str(self.account.frames_dropped),
                    "reasons are below" if self.account.dropped else "no frame",
                ),
                (
                    "peak memory",
                    format_bytes(self.peak_bytes),
                    f"limit {format_bytes(self.memory_limit_bytes)}",
                ),
                ("time", f"{self.wall_s:.1f} s", f"{len(self.bags)} bags"),
            ]
        )
        page.text(f"Frames: {self._balance()}.")
        if self.findings is not None:
            page.text(f"Check of the dataset: {self._check_text()}.")
        if self.account.dropped:
            page.heading("Dropped frames")
            page.table(("reason", "frames"), self.account.dropped.most_common())
        if self.account.notes:
            page.heading("Notes")
            page.table(("what", "count"), self.account.notes.most_common())
        self._bags_part(page)
        self._pictures_part(page)
        self._videos_part(page, path)
        self._skew_part(page)
        if len(self.memory) > 1:
            page.heading("Memory over time")
            page.plot({"resident": [(s, size / 1e6) for s, size in self.memory]}, "s", "MB")
        self._settings_part(page, command)
        if self.training:
            page.heading("Before you train")
            page.table(("what", "what to do"), [(note.what, note.todo) for note in self.training])
        self.page = page.write(path)
        return self.page

    def mapping_text(self) -> str:
        """Say what the frames follow."""
        return self.bags[0].done.timeline if self.bags else "-"

    def _bags_part(self, page: Page) -> None:
        if not self.bags:
            return
        page.heading("Bags")
        page.table(
            ("bag", "size", "episodes", "in", "repeated", "out", "dropped", "seconds", "CPU s"),
            [
                (
                    bag.path.name,
                    format_bytes(bag.size_bytes),
                    bag.done.episodes,
                    bag.account.frames_in,
                    bag.account.frames_repeated,
                    bag.account.frames_out,
                    bag.account.frames_dropped,
                    f"{bag.done.wall_s:.1f}",
                    f"{bag.done.cpu_s:.1f}",
                )
                for bag in self.bags
            ],
        )
        for bag in self.bags:
            if bag.salvage:
                page.text(f"{bag.path.name} was damaged. {bag.salvage}.")

    def _pictures_part(self, page: Page) -> None:
        shown = [(bag, bag.done.previews) for bag in self.bags if bag.done.previews][:12]
        if not shown:
            return
        page.heading("First pictures")
        for bag, previews in shown:
            page.pictures([(data, f"{bag.path.name}: {key}") for key, data in previews.items()])

    def _videos_part(self, page: Page, path: Path) -> None:
        """Show the first video of each camera, from the dataset itself: the page stays small."""
        videos = sorted(self.out.glob("videos/**/*.mp4"))
        cameras: dict[str, Path] = {}
        for video in videos:
            name = next((p for p in video.parts if p.startswith("observation.")), video.stem)
            cameras.setdefault(name, video)
        if cameras:
            page.heading("Videos of the dataset")
            home = path.absolute().parent
            page.videos(
                [(os.path.relpath(video.absolute(), home), key) for key, video in cameras.items()]
            )

    def _settings_part(self, page: Page, command: str) -> None:
        page.heading("Settings")
        if command:
            page.code(command)
        page.code(json.dumps(self.mapping.to_json(), indent=1, ensure_ascii=False, default=str))
        if self.skipped:
            page.text(f"Converted before, and skipped: {', '.join(p.name for p in self.skipped)}.")

    def _skew_part(self, page: Page) -> None:
        if not self.bags:
            return
        page.heading("Time errors")
        page.text("Stamp of the message that a frame took, minus the time of the frame.")
        rows = []
        for name in self.bags[0].done.skew:
            facts = [bag.done.skew[name] for bag in self.bags if name in bag.done.skew]
            rows.append(
                (
                    name,
                    f"{sum(f['p50_ms'] for f in facts) / len(facts):.2f}",
                    f"{max(f['p95_ms'] for f in facts):.2f}",
                    f"{max(f['max_ms'] for f in facts):.2f}",
                )
            )
        page.table(("feature", "median ms", "p95 ms", "largest ms"), rows)
        series: dict[str, list[float]] = {}
        for bag in self.bags:
            for name, values in bag.done.skew_ms.items():
                if any(values):
                    series.setdefault(name, []).extend(values)
        if series:
            page.plot(series, "ms", "frames", "histogram", "time errors of all bags")
