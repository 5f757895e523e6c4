"""Verify datasets, checkpoints, rollouts and replay buffers, byte by byte, without torch."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.bags import find_bags, open_bag
from penstock.checkpoints import folder
from penstock.core.files import TEMPORARY_PREFIX, owner_is_dead, storage_error
from penstock.core.memory import format_bytes
from penstock.core.pack import PackReader
from penstock.dataset.check import check as check_lerobot
from penstock.errors import DataError, PenstockError
from penstock.inspect import checkpoint, kind_of, recording, run
from penstock.replay.segments import MANIFEST, LogReader
from penstock.ui.progress import Progress
from penstock.ui.report import wrapped

_SOUND = "cannot be verified"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and where."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclass
class Examination:
    """What was looked at, and what was found.

    Attributes:
        findings: What is wrong.
        notes: What the reader should know, and is not wrong.
        files: Number of files that were verified.
        size_bytes: Their size on disk.
        seconds: How long it took.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    size_bytes: int = 0
    seconds: float = 0.0

    def text(self) -> str:
        """Lay out one line per finding and note, and a summary."""
        count = len(self.findings)
        verdict = "ok" if not count else f"{count} finding{'s' if count > 1 else ''}"
        lines = [
            *(f"finding: {finding}" for finding in self.findings),
            *(f"note: {note}" for note in self.notes),
            f"{verdict}: verified {self.files} file{'s' if self.files != 1 else ''}, "
            f"{format_bytes(self.size_bytes)}, in {self.seconds:.2f} s",
        ]
        return "\n".join(wrapped(line, "  ") for line in lines)

    def to_json(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return asdict(self)


def check(path: str | os.PathLike[str]) -> list[Finding]:
    """Verify a checkpoint file or a folder of checkpoints; return what is wrong."""
    return check_all([path]).findings


def check_all(paths: Iterable[str | os.PathLike[str]], quick: bool = False) -> Examination:
    """Verify several files and folders.

    Args:
        paths: Recordings, datasets, checkpoints, rollouts, folders of them, saved replay buffers.
        quick: Of a dataset, decode only a sample of the pictures.

    Raises:
        UsageError: There is nothing under a name.
    """
    begin = time.perf_counter()
    result = Examination()
    files: list[Path] = []
    meant: set[Path] = set()  # what must be a checkpoint: named by the user, or by `latest`
    named = [Path(path) for path in paths]
    for path in named:
        match kind_of(path):
            case "dataset":
                _check_dataset(path, result, quick)
            case "replay":
                _check_replay(path, result)
            case "recording" | "recordings":
                _check_bags(find_bags([path]), result)
            case "rollouts" | "run" | "folder" as kind:
                for part in run.parts(path) if kind == "run" else [path]:
                    files += _folder_files(part, result)
                    newest = folder.latest(part)
                    if newest is not None:
                        meant.add(newest)
                        files += [newest] if newest not in files else []
            case _:
                files.append(path)
                meant.add(path)
    total = sum(file.stat().st_size for file in files if file.exists())
    with Progress(total, "doctor", "bytes", last_line=bool(files)) as progress:
        for file in files:
            progress.note(file.name)
            size_bytes = _check_file(file, result, meant=file in meant)
            progress.advance(size_bytes)
    if not result.files and not result.findings and not any(_SOUND in n for n in result.notes):
        problem = "nothing that can be verified: give recordings, datasets, checkpoints, rollouts"
        result.findings += [Finding(str(path), problem) for path in named]
    result.seconds = time.perf_counter() - begin
    return result


def _check_bags(bags: list[Path], result: Examination) -> None:
    """Read every message of recordings: their lengths, indexes and checksums must agree."""
    with Progress(sum(map(recording.size_of, bags)), "doctor", "bytes") as progress:
        for path in bags:
            progress.note(path.name)
            size_bytes = recording.size_of(path)
            try:
                with open_bag(path) as bag:
                    for message in bag.read():
                        del message
            except PenstockError as error:
                result.findings.append(Finding(str(path), str(error).removeprefix(f"{path}: ")))
            result.files += 1
            result.size_bytes += size_bytes
            progress.advance(size_bytes)


def _check_dataset(path: Path, result: Examination, quick: bool) -> None:
    """Verify a LeRobot dataset; what can be used all the same becomes a note."""
    size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with Progress(size_bytes, "doctor", "bytes") as progress:
        checkup = check_lerobot(path, "sample" if quick else "all", progress)
        progress.update(size_bytes)  # metadata, and what is no part of it
    for found in checkup.findings:
        problem = f"{found.what}; {found.todo}"
        if found.severity == "error":
            result.findings.append(Finding(str(path / found.where), problem))
        else:
            result.notes.append(f"{path / found.where}: {problem}")
    result.notes += [f"{path}: {note.what}; {note.todo}" for note in checkup.notes]
    covered = ", ".join(f"{count} {name}" for name, count in checkup.checked.items())
    result.notes.append(f"{path}: checked {covered}")
    result.files += checkup.checked.get("files", 0)
    result.size_bytes += size_bytes


def _check_replay(path: Path, result: Examination) -> None:
    """Verify a saved replay buffer: its manifest, and the very segments it names."""
    try:
        with LogReader(path) as log:
            problems = list(log.verify())
    except DataError as error:
        problems = [(MANIFEST, str(error))]
    for name, problem in problems:
        result.findings.append(Finding(str(path / name), _without_name(path / name, problem)))
    files = [path / MANIFEST, *path.glob("segment_*.pack")]
    result.files += len(files)
    result.size_bytes += sum(file.stat().st_size for file in files)


def _without_name(path: Path, problem: str) -> str:
    """The readers' messages begin with the file, by its full name; a finding names it already."""
    return problem.replace(f"{path.resolve()} is ", "", 1).removeprefix(f"{path} is ")


def _folder_files(where: Path, result: Examination) -> list[Path]:
    """Check what belongs to the folder itself; return the files to verify."""
    pointer = where / folder.LATEST
    if (pointer.is_symlink() or pointer.exists()) and folder.latest(where) is None:
        problem = "points at no checkpoint of this folder; the newest good one is used instead"
        result.findings.append(Finding(str(pointer), problem))
    files = checkpoint.checkpoint_files(where)
    for hidden in sorted(where.glob(".*")):
        if hidden.name.startswith(TEMPORARY_PREFIX):
            owner = hidden.name.removeprefix(TEMPORARY_PREFIX).rpartition("-")[0]
            if owner_is_dead(owner):
                problem = "left behind by a process that died; the next save removes it"
                result.findings.append(Finding(str(hidden), problem))
            else:
                result.notes.append(f"{hidden}: being written")
        elif hidden.name.endswith(folder.BASE_SUFFIX) and hidden.is_file():
            files.append(hidden)
    if not files:
        result.notes.append(f"{where}: no checkpoints")
    return files


def _check_file(path: Path, result: Examination, *, meant: bool) -> int:
    """Verify one file, which must be a checkpoint if it is `meant` as one; return its size."""
    try:
        size_bytes = path.stat().st_size
        kind = checkpoint.classify(path)
        problems: list[str] = []
        if kind == "pack":
            problems = _check_pack(path)
        elif kind == "torch":
            problems = _check_zip(path)
            if not problems:
                # torch.load itself ignores them.
                result.notes.append(f"{path}: torch.save file, only its zip checksums verified")
        elif kind in ("pickle", "lz4", "safetensors"):
            result.notes.append(f"{path}: {_SOUND}: no checksums")
            return size_bytes
        elif kind == "damaged":
            problems = ["damaged: its beginning or end is not that of a checkpoint"]
        elif meant:
            problems = ["not a checkpoint, or its first bytes are damaged"]
        else:
            result.notes.append(f"{path}: not a checkpoint, passed over")
            return size_bytes
    except OSError as error:
        problems, size_bytes = [str(storage_error("read", path, error))], 0
    except PenstockError as error:
        problems = [str(error)]
    result.findings += [Finding(str(path), _without_name(path, text)) for text in problems]
    result.files += 1
    result.size_bytes += size_bytes
    return size_bytes


def _check_pack(path: Path) -> list[str]:
    with checkpoint.open_pack(path) as pack:
        missing = _missing_base(pack)
        return [missing] if missing else [problem for _, problem in pack.verify()]


def _missing_base(pack: PackReader) -> str | None:
    """Say once, not once per tensor, that the base of a difference cannot be used."""
    if pack.index.base is None:
        return None
    try:
        pack.base()
    except PenstockError as error:
        return str(error)
    return None


def _check_zip(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as error:
        return [f"damaged: {error}"]
    if bad is None:
        return []
    return [f"{bad!r} does not match its zip checksum: damaged, or saved with CRC-32 switched off"]
