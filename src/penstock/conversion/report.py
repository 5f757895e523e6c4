"""What a conversion did: numbers for a program, a summary for the terminal, a page for people."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.conversion.account import Account
from penstock.conversion.mapping import Mapping
from penstock.conversion.one_bag import Converted
from penstock.conversion.request import Shard
from penstock.core.memory import format_bytes
from penstock.dataset.check import Finding
from penstock.dataset.layout import Feature
from penstock.dataset.reader import Dataset
from penstock.errors import DataError
from penstock.objects import ObjectPath
from penstock.ui.report import Report as Page
from penstock.ui.report import aligned

_POINTS, _CURVES = 400, 10  # of a curve, and in a picture
_SHOWN_TOPICS: Final = 6


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
        left_out: Topics that the guess of a mapping does not take.
        failed: Bags that could not be converted, and why.
        account: Where all frames went.
        peak_bytes: Largest resident memory, workers included.
        findings: What the check found wrong; None if nobody checked.
        training: What it found that a trainer may want to look at.
        shard: The part of a job array that this run was; it builds nothing.
    """

    out: Path | ObjectPath
    mapping: Mapping
    bags: list[Converted] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)
    copies: dict[Path, Path] = field(default_factory=dict)
    failed: dict[Path, str] = field(default_factory=dict)
    unused: int = 0
    left_out: tuple[str, ...] = ()
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
        return not self.failed and all(f.severity != "error" for f in self.findings or ())

    def add(self, bag: Converted) -> None:
        """Add a bag."""
        self.bags.append(bag)
        self.account.add(bag.account)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        findings = self.findings
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
            "left_out": list(self.left_out),
            "failed": {str(path): reason for path, reason in self.failed.items()},
            "peak_memory_bytes": self.peak_bytes,
            "memory_limit_bytes": self.memory_limit_bytes,
            "memory": [[round(s, 3), size] for s, size in self.memory],
            "workers": self.workers,
            "wall_s": round(self.wall_s, 3),
            "cpu_s": round(sum(bag.cpu_s for bag in self.bags), 3),
            "checked": self.checked,
            "training": [note.what for note in self.training],
            "findings": findings and [f"{f.where}: {f.what}" for f in findings],
            "report": None if self.page is None else str(self.page),
        }

    def text(self, verbose: bool = False) -> str:
        """Return the summary for the terminal: what failed first, then what was done.

        Args:
            verbose: Say in detail what the check looked at.
        """
        return aligned(self._lines(verbose))

    def _lines(self, verbose: bool) -> Iterator[tuple[str, str]]:
        for path, reason in self.failed.items():
            yield "FAILED", f"{path}: {reason}"
        for finding in self.findings or ():
            yield finding.severity.upper(), f"{finding.where}: {finding.what}"
        wall_s = self.wall_s or float("inf")
        speed = sum(bag.size_bytes for bag in self.bags) / wall_s
        if self.shard is None:
            yield "dataset", str(self.out)
            totals = f"{self.total_episodes} episodes, {self.total_frames} frames"
            yield "holds", f"{totals} at {self.mapping.fps} fps"
        else:
            yield "shard", f"{self.shard} of {self.out}"
            yield "next", "its units are committed: penstock build, when all shards are done"
        counts = f"{len(self.bags)} converted, {len(self.skipped)} done before"
        yield "bags", f"{counts}, {len(self.failed)} failed"
        yield "frames", self.account.balance
        limit = format_bytes(self.memory_limit_bytes)
        yield "memory", f"peak {format_bytes(self.peak_bytes)} of {limit}"
        rate = f"{format_bytes(speed)}/s, {self.frames_out / wall_s:.0f} frames/s"
        yield "time", f"{self.wall_s:.1f} s, {rate}"
        if self.findings is not None:
            yield "check", self._check_text(verbose)
        if self.page is not None:
            yield "report", str(self.page)
        for reason, count in self.account.dropped.most_common():
            yield "dropped", f"{count} x {reason}"
        for what, count in self.account.notes.most_common():
            yield "note", f"{count} x {what}"
        for bag in self.bags:
            if bag.salvage:
                yield "salvaged", f"{bag.bag.name}: {bag.salvage}"
        for path, other in self.copies.items():
            yield "copy", f"{path.name} is the same recording as {other.name}: taken once"
        if self.unused:
            yield "left out", f"{self.unused} bags, by the setting rosbag.num_used"
        if self.left_out:
            shown = ", ".join(self.left_out[:_SHOWN_TOPICS])
            more = len(self.left_out) - _SHOWN_TOPICS
            shown += f" and {more} more topics" if more > 0 else ""
            yield "left out", f"{shown}: penstock info RECORDING says why"
        for note in self.training:
            yield "look", f"{note.what}; {note.todo}"
        if self.bags and self.frames_out == sum(bag.episodes for bag in self.bags):
            same = "duplicate stamp" in self.account.dropped
            hint = ", or take the stamps of the messages: clock=header fps=30" if same else ""
            yield "look", f"every episode is a single frame; look at what was recorded{hint}"
        if self.ok and self.total_frames:
            for command in self.next_steps():
                yield "next", _command_lines(command)

    def next_steps(self) -> list[list[str]]:
        """Return what to type next, word by word."""
        out = shlex.quote(str(self.out))
        if isinstance(self.out, ObjectPath):
            return [["penstock", "info", out]]
        name = f"local/{re.sub('[^A-Za-z0-9._-]+', '_', self.out.name)}"  # as the Hub wants it
        return [
            ["penstock", "view", out],
            ["lerobot-train", f"--dataset.repo_id={name}", f"--dataset.root={out}",
             "--policy.type=act", "--policy.push_to_hub=false"],
        ]  # fmt: skip

    def _check_text(self, verbose: bool = True) -> str:
        if self.findings:
            return f"{len(self.findings)} findings"
        counts = ", ".join(f"{n} {what}" for what, n in self.checked.items())
        return f"ok ({counts})" if counts and verbose else "ok"

    def write_page(self, path: Path, command: str = "") -> Path:
        """Write the report as one HTML file, with the command that was typed."""
        account, limit = self.account, format_bytes(self.memory_limit_bytes)
        page = Page(f"Conversion into {self.out.name}")
        failed = [(str(bag), reason) for bag, reason in self.failed.items()]
        findings = [(f.severity, f.where, f.what, f.todo) for f in self.findings or ()]
        training = [(note.what, note.todo) for note in self.training]
        _table(page, "Bags that failed", ("bag", "reason"), failed)
        columns = ("severity", "where", "what", "what to do")
        _table(page, "Findings of the check", columns, findings)
        page.figures(
            [
                ("episodes", str(self.total_episodes), f"{self.total_frames} frames"),
                ("frames in", str(account.frames_in), self.bags[0].timeline if self.bags else "-"),
                ("frames out", str(account.frames_out), f"{self.mapping.fps} fps"),
                (
                    "dropped",
                    str(account.frames_dropped),
                    "reasons are below" if account.dropped else "no frame",
                ),
                ("peak memory", format_bytes(self.peak_bytes), f"limit {limit}"),
                ("time", f"{self.wall_s:.1f} s", f"{len(self.bags)} bags"),
            ]
        )
        page.text(f"Frames: {account.balance}.")
        if self.findings is not None:
            page.text(f"Check of the dataset: {self._check_text()}.")
        _table(page, "Dropped frames", ("reason", "frames"), account.dropped.most_common())
        _table(page, "Notes", ("what", "count"), account.notes.most_common())
        if self.bags:
            self._bags_part(page)
        self._videos_part(page, path.absolute().parent)
        if self.shard is None and not isinstance(self.out, ObjectPath):
            with suppress(DataError):  # the check tells of it
                _curves_part(page, Dataset(self.out))
        if self.bags:
            self._skew_part(page)
        if len(self.memory) > 1:
            page.heading("Memory over time")
            page.plot({"resident": [(s, size / 1e6) for s, size in self.memory]}, "s", "MB")
        page.heading("Settings")
        if command:
            page.code(command)
        page.code(json.dumps(self.mapping.to_json(), indent=1, ensure_ascii=False, default=str))
        if self.skipped:
            page.text(f"Converted before, and skipped: {', '.join(p.name for p in self.skipped)}.")
        _table(page, "Before you train", ("what", "what to do"), training)
        self.page = page.write(path)
        return self.page

    def _bags_part(self, page: Page) -> None:
        page.heading("Bags")
        rows: list[dict[str, Any]] = [
            {
                "bag": bag.bag.name,
                "size": format_bytes(bag.size_bytes),
                "episodes": bag.episodes,
                "in": bag.account.frames_in,
                "repeated": bag.account.frames_repeated,
                "out": bag.account.frames_out,
                "dropped": bag.account.frames_dropped,
                "seconds": f"{bag.wall_s:.1f}",
                "CPU s": f"{bag.cpu_s:.1f}",
            }
            for bag in self.bags
        ]
        page.table(list(rows[0]), [list(row.values()) for row in rows])
        for bag in self.bags:
            if bag.salvage:
                page.text(f"{bag.bag.name} was damaged. {bag.salvage}.")
        pictured = [bag for bag in self.bags if bag.previews][:12]
        if pictured:
            page.heading("First pictures")
        for bag in pictured:
            items = [(data, f"{bag.bag.name}: {key}") for key, data in bag.previews.items()]
            page.pictures(items)

    def _videos_part(self, page: Page, home: Path) -> None:
        """Show the first video of each camera, from the dataset itself: the page stays small."""
        cameras: dict[str, str] = {}
        here = [] if isinstance(self.out, ObjectPath) else self.out.glob("videos/**/*.mp4")
        for video in sorted(here):
            name = next((p for p in video.parts if p.startswith("observation.")), video.stem)
            cameras.setdefault(name, os.path.relpath(video.absolute(), home))
        if cameras:
            page.heading("Videos of the dataset")
            page.videos([(video, name) for name, video in cameras.items()])

    def _skew_part(self, page: Page) -> None:
        page.heading("Time errors")
        page.text("Stamp of the message that a frame took, minus the time of the frame.")
        rows: list[tuple[str, ...]] = []
        series: dict[str, list[float]] = {}
        for name in self.bags[0].skew:
            facts = [bag.skew[name] for bag in self.bags if name in bag.skew]
            middle = sum(f["p50_ms"] for f in facts) / len(facts)
            worst = (max(f[key] for f in facts) for key in ("p95_ms", "max_ms"))
            rows.append((name, f"{middle:.2f}", *(f"{value:.2f}" for value in worst)))
            values = [value for bag in self.bags for value in bag.skew_ms.get(name, ())]
            if any(values):
                series[name] = values
        page.table(("feature", "median ms", "p95 ms", "largest ms"), rows)
        if series:
            page.plot(series, "ms", "frames", "histogram", "time errors of all bags")


def _curves_part(page: Page, dataset: Dataset) -> None:
    """Show how long the episodes are, and the numbers of the first one."""
    if len(dataset) > 1:
        page.heading("Episodes")
        page.plot({"length": [e.length / dataset.fps for e in dataset.episodes]}, "episode", "s")
    numbers = {
        name: feature
        for name, feature in dataset.features.items()
        if feature.dtype.startswith("float") and len(feature.shape) == 1
    }
    shown = [name for name in ("observation.state", "action") if name in numbers]
    if shown and len(dataset):
        page.heading("The first episode")
        episode = dataset.episodes[0]
        step, row = -(-episode.length // _POINTS), 0
        lines: dict[str, list[list[tuple[float, float]]]] = {
            name: [[] for _ in range(min(numbers[name].shape[0], _CURVES))] for name in shown
        }
        for _, columns in dataset.scan(shown, [0]):
            rows = len(columns[shown[0]])
            for at in range(-row % step, rows, step):
                for name in shown:
                    values = columns[name][at].reshape(-1).tolist()
                    for line, value in zip(lines[name], values, strict=False):
                        line.append(((row + at) / dataset.fps, value))
            row += rows
        for name in shown:
            labels, size = _labels(numbers[name]), numbers[name].shape[0]
            rest = f"{size - _CURVES} more are not shown" if size > _CURVES else ""
            page.plot(dict(zip(labels, lines[name], strict=False)), "s", name, caption=rest)


def _labels(feature: Feature) -> list[str]:
    """Return the names of the numbers of a feature, or their places."""
    names = feature.names
    if isinstance(names, dict):  # lerobot's: {"motors": [...]}
        names = next(iter(names.values()), None)
    if isinstance(names, list) and len(set(map(str, names))) == feature.shape[0]:
        return [str(name) for name in names]
    return [str(number) for number in range(feature.shape[0])]


def _table(page: Page, heading: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    if rows:
        page.heading(heading)
        page.table(columns, rows)


def _command_lines(words: Iterable[str], width: int = 62) -> str:
    """Lay out a command so that a shell takes its lines as one."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return " \\\n".join(lines)
