"""A folder of checkpoints: which is the newest, which may go, where the base of a delta lies.

`latest` is a link to the newest durable checkpoint. The base of a delta is named in its header; if
that name has been written again since, the old content lives on under a hidden name, because the
checkpoints that build on it must stay readable.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.core.files import publish_bytes, storage_error, sync_folder
from penstock.core.pack import PackReader, is_pack
from penstock.errors import DataError

LATEST = "latest"
KIND = "checkpoint"
BASE_SUFFIX = ".base"


@dataclass(frozen=True)
class Saved:
    """What a folder knows of one checkpoint, read from its header."""

    path: Path
    sequence: int
    metric: float | None
    managed: bool
    base: str | None
    digest: str


def read_saved(path: Path) -> Saved | None:
    """Read the header of a checkpoint; None for any other or damaged file."""
    try:
        if path.is_symlink() or not path.is_file() or not is_pack(path):
            return None
        with PackReader(path) as pack:
            if pack.index.kind != KIND:
                return None
            meta, base = pack.index.meta, pack.index.base
            return Saved(
                path=path,
                sequence=int(meta.get("sequence", 0)),
                metric=meta.get("metric"),
                managed=bool(meta.get("managed")),
                base=base["digest"] if base else None,
                digest=pack.index.digest,
            )
    except (OSError, DataError, ValueError, TypeError):
        return None


def list_saved(folder: Path) -> list[Saved]:
    """List the checkpoints of a folder, newest first."""
    found = (read_saved(path) for path in folder.iterdir() if not path.name.startswith("."))
    return sorted((s for s in found if s), key=lambda s: (s.sequence, s.path.name), reverse=True)


def latest(folder: Path) -> Path | None:
    """Return the checkpoint that `latest` points at, if it is there."""
    pointer = folder / LATEST
    try:
        if pointer.is_symlink():
            target = folder / os.readlink(pointer)
        else:  # a file system without links: the pointer is a small text file
            target = folder / pointer.read_text().strip()
    except (OSError, ValueError):
        return None
    inside = target.parent == folder and target.name not in ("", LATEST)
    return target if inside and target.is_file() else None


def move_latest(target: Path) -> None:
    """Point `latest` at a checkpoint that is durable already."""
    folder = target.parent
    temporary = folder / f".{LATEST}-{secrets.token_hex(4)}"
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


def candidates(folder: Path) -> Iterator[Path]:
    """Yield the files from which a run may go on, the best first."""
    newest = latest(folder)
    if newest is not None:
        yield newest
    seen = {newest}
    for saved in list_saved(folder):
        if saved.path not in seen:
            yield saved.path


def find_base(path: Path, link: dict[str, str]) -> Path:
    """Find the base of a delta: beside it, under its name or the one kept for it."""
    kept = _kept_name(path.parent, link["file"], link["digest"])
    return kept if kept.exists() else path.parent / link["file"]


def keep_base(path: Path) -> None:
    """Before `path` is written again, keep its content if other checkpoints build on it."""
    saved = read_saved(path) if path.exists() else None
    if saved and any(s.base == saved.digest and s.path != path for s in list_saved(path.parent)):
        with contextlib.suppress(FileExistsError):
            os.link(path, _kept_name(path.parent, path.name, saved.digest))
            sync_folder(path.parent)


def prune(
    folder: Path, keep_last: int | None, keep_best: tuple[int, Literal["max", "min"]] | None
) -> list[Path]:
    """Remove the managed checkpoints that no rule keeps; return what was removed.

    Kept are the newest, the best, the bases of what is kept, and everything that was not written
    by a saver with such rules.
    """
    everything = list_saved(folder)
    removed = []
    if keep_last is not None or keep_best is not None:
        keep = _kept(everything, keep_last, keep_best)
        for saved in everything:
            if saved.managed and saved.digest not in keep:
                saved.path.unlink(missing_ok=True)
                removed.append(saved.path)
        everything = [saved for saved in everything if saved.path not in removed]
    needed = {saved.base for saved in everything}
    for kept in folder.glob(f".*{BASE_SUFFIX}"):
        if not any(digest and kept.name.endswith(_kept_tail(digest)) for digest in needed):
            kept.unlink(missing_ok=True)
            removed.append(kept)
    return removed


def _kept(
    everything: list[Saved],
    keep_last: int | None,
    keep_best: tuple[int, Literal["max", "min"]] | None,
) -> set[str | None]:
    keep = everything[: keep_last if keep_last is not None else 1]
    if keep_best:
        count, direction = keep_best
        rated = [s for s in everything if s.metric is not None]
        # Of equal ones the newest is kept: `everything` starts with it, and sorting is stable.
        rated.sort(key=lambda s: s.metric or 0.0, reverse=direction == "max")
        keep = keep + rated[:count]
    digests: set[str | None] = {s.digest for s in keep}
    return digests | {s.base for s in keep}


def _kept_tail(digest: str) -> str:
    return f".{digest[:12]}{BASE_SUFFIX}"


def _kept_name(folder: Path, name: str, digest: str) -> Path:
    return folder / f".{name}{_kept_tail(digest)}"
