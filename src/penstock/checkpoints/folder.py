"""A folder of checkpoints: which is the newest, which may go, where the base of a delta lies.

`latest` is a link to the newest durable checkpoint. Each checkpoint notes the run it belongs to and
its own name: what was copied here from elsewhere, or renamed, belongs to whoever did that and is
never removed. The base of a delta is named in its header; if that name has been written again
since, the old content lives on under a hidden name, because the checkpoints that build on it must
stay readable.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.files import (
    FolderLock,
    link_or_copy,
    publish_bytes,
    storage_error,
    sweep,
    sync_folder,
    temporary_path,
)
from penstock.core.pack import is_pack, read_summary
from penstock.errors import DataError

LATEST = "latest"
KIND = "checkpoint"
BASE_SUFFIX = ".base"
_NAME_BYTES = 256

Direction = Literal["max", "min"]
_Stamp = tuple[str, int, int, int]


@dataclass(frozen=True)
class Saved:
    """What a folder knows of one checkpoint, read from its header."""

    path: Path
    managed: bool
    run: str | None
    name: str | None
    sequence: int
    metric: float | None
    better: Direction
    base: str | None
    digest: str


def read_saved(path: Path) -> Saved | None:
    """Read the header of a checkpoint; None for any other file, or a damaged one.

    A disk that cannot be read now raises: that says nothing of the file.
    """
    try:
        if path.is_symlink() or not path.is_file() or not is_pack(path):
            return None
        summary = read_summary(path)
        if summary.kind != KIND:
            return None
        meta: dict[str, Any] = summary.meta
        metric = meta.get("metric")
        return Saved(
            path=path,
            managed=bool(meta.get("managed")),
            run=meta.get("run"),
            name=meta.get("name"),
            sequence=int(meta.get("sequence", 0)),
            metric=float(metric) if metric is not None else None,
            better="min" if meta.get("better") == "min" else "max",
            base=summary.base["digest"] if summary.base else None,
            digest=summary.digest,
        )
    except (FileNotFoundError, PermissionError, DataError, ValueError, TypeError):
        return None


def list_saved(folder: Path) -> list[Saved]:
    """List the checkpoints of a folder, newest first; those of `latest`'s run before others."""
    saved = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if not path.name.startswith(".") and (found := read_saved(path)):
                saved.append(found)
    newest = latest(folder)
    run = next((s.run for s in saved if s.path == newest), None)
    return sorted(saved, key=lambda s: (s.run == run, s.sequence, s.path.name), reverse=True)


def latest(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` points at, if it is there."""
    pointer = folder / LATEST
    try:
        if pointer.is_symlink():
            target = folder / os.readlink(pointer)
        elif pointer.is_file():  # a file system without links: the pointer is a small text file
            with pointer.open("rb") as file:
                target = folder / file.read(_NAME_BYTES).decode().strip()
        else:
            return None
        inside = target.parent == folder and target.name not in ("", LATEST)
        return target if inside and target.is_file() else None
    except (OSError, ValueError):
        return None


def move_latest(target: Path) -> None:
    """Point `latest` at a checkpoint that is durable already."""
    folder = target.parent
    temporary = temporary_path(folder)
    try:
        try:
            os.symlink(target.name, temporary)
        except (OSError, NotImplementedError):
            publish_bytes(folder / LATEST, target.name.encode())
            return
        os.replace(temporary, folder / LATEST)
        sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise storage_error("move the pointer", folder / LATEST, error) from error


def candidates(folder: Path, best: bool = False) -> Iterator[Path]:
    """Yield the files from which a run may go on: the newest first, or the best by their metric."""
    newest = None if best else latest(folder)
    if newest is not None:
        yield newest
    saved = list_saved(folder)
    if best:
        saved = _best_first(saved, next((s.better for s in saved if s.metric is not None), "max"))
    yield from (s.path for s in saved if s.path != newest)


def find_base(path: Path, link: dict[str, str]) -> Path:
    """Find the base of a delta: beside it, under its name or the one kept for it."""
    kept = _kept_name(path.parent, link["file"], link["digest"])
    return kept if kept.exists() else path.parent / link["file"]


class RunFolder:
    """A folder as the one saver sees that writes it: locked, its own checkpoints known.

    Headers are read once and then known by their file's identity, so that a save costs the same
    however many checkpoints there are. It keeps the newest `keep_last` (None: all), and so many of
    the best by metric besides. Raises LockHeld while another saver writes this folder.
    """

    def __init__(
        self, path: Path, keep_last: int | None, keep_best: tuple[int, Direction] | None
    ) -> None:
        self.path = path
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._headers: dict[_Stamp, Saved | None] = {}
        self._bases: list[str] = []  # kept under hidden names
        self._looked: list[Saved] | None = None  # at what was here just before a name was given
        self._sequence: int | None = None
        self._unsaved: set[int] = set()  # whose save failed, though its file may be there
        self._run = secrets.token_hex(8)
        self._lock = FolderLock(path)
        self._lock.acquire()

    def next_meta(self, name: str) -> dict[str, Any]:
        """Return what the next checkpoint must note; goes on with the run that is there."""
        self._lock.acquire()  # again, if somebody removed its file
        if self._sequence is None:
            sweep(self.path)
            newest = latest(self.path)
            saved = read_saved(newest) if newest else None
            # A crash may have come before `latest` moved: what is newer has its number, too.
            since_ns = saved.path.stat().st_mtime_ns if saved else 0
            self._sequence = max((s.sequence for s in self._scan(since_ns)), default=0)
            if saved and saved.run:
                self._run = saved.run
        self._sequence += 1
        self._unsaved.add(self._sequence)
        return {
            "managed": self._keep_last is not None or self._keep_best is not None,
            "run": self._run,
            "name": name,
            "sequence": self._sequence,
            "better": self._keep_best[1] if self._keep_best else "max",
        }

    def keep_base(self, path: Path) -> None:
        """Before `path` is written again, keep its content if other checkpoints build on it."""
        self._looked = None
        saved = read_saved(path)
        if saved is None:
            return
        try:
            self._looked = [s for s in self._scan() if s.path != path]
            needed = any(s.base == saved.digest for s in self._looked)
        except OSError:
            needed = True  # nobody can tell
        if needed:
            link_or_copy(path, _kept_name(path.parent, path.name, saved.digest))

    def prune(self, published: Path) -> None:
        """Remove this run's own checkpoints, written under such rules, that none of them keeps.

        Kept in any case: what was just published, what `latest` names, and the bases of whatever
        stays, be it ours or not. A save that failed does not count among the newest.
        """
        self._unsaved.discard(self._sequence or 0)
        if self._keep_last is None and self._keep_best is None:
            if any(name.endswith(BASE_SUFFIX) for name in os.listdir(self.path)):
                self._remove_unneeded_bases(self._scan())
            return
        if self._looked is None:
            everything = self._scan()
        else:  # a look takes milliseconds where there are hundreds of files
            everything = [*self._looked, *filter(None, [read_saved(published)])]
        own = [s for s in everything if s.managed and s.run == self._run and s.name == s.path.name]
        own.sort(key=lambda s: s.sequence, reverse=True)
        keep = {published, latest(self.path)}
        counted = [s for s in own if s.sequence not in self._unsaved]
        keep |= {s.path for s in counted[: self._keep_last if self._keep_last is not None else 1]}
        if self._keep_best:
            count, better = self._keep_best
            keep |= {s.path for s in _best_first(counted, better)[:count]}
        going = {s.path: s for s in own if s.path not in keep}
        needed = {s.base for s in everything if s.path not in going}
        going = {path: s for path, s in going.items() if s.digest not in needed}
        for path, saved in going.items():
            # Read once more: somebody may have put another file there.
            if read_saved(path) == saved:
                path.unlink(missing_ok=True)
        self._remove_unneeded_bases([s for s in everything if s.path not in going])

    def close(self) -> None:
        """Let the next writer in."""
        self._lock.release()

    def _scan(self, since_ns: int = 0) -> list[Saved]:
        """Return all checkpoints (written since then), reading only the headers that are new."""
        known, self._headers, self._bases = self._headers, {}, []
        with os.scandir(self.path) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith("."):
                    if name.endswith(BASE_SUFFIX):
                        self._bases.append(name)
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_mtime_ns < since_ns:
                        continue
                    stamp = (name, status.st_ino, status.st_mtime_ns, status.st_size)
                    seen = stamp in known
                    self._headers[stamp] = known[stamp] if seen else read_saved(self.path / name)
        return [saved for saved in self._headers.values() if saved is not None]

    def _remove_unneeded_bases(self, staying: list[Saved]) -> None:
        needed = tuple(_kept_tail(s.base) for s in staying if s.base)
        for kept in (self.path / name for name in self._bases):
            saved = None if kept.name.endswith(needed) else read_saved(kept)
            if saved and kept == _kept_name(self.path, saved.name or "", saved.digest):
                kept.unlink(missing_ok=True)


def _best_first(saved: list[Saved], better: Direction) -> list[Saved]:
    """Sort those that have a metric; of equal ones the newest comes first."""
    found = [s for s in saved if s.metric is not None]
    found.sort(key=lambda s: s.sequence, reverse=True)
    return sorted(found, key=lambda s: s.metric or 0.0, reverse=better == "max")


def _kept_tail(digest: str) -> str:
    return f".{digest[:12]}{BASE_SUFFIX}"


def _kept_name(folder: Path, name: str, digest: str) -> Path:
    return folder / f".{name}{_kept_tail(digest)}"
