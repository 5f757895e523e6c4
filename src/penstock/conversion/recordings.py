"""Recordings by what is in them: a copy under another name is the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import Self

from penstock.bags import Bag, Limits, open_bag
from penstock.core.files import storage_error
from penstock.core.threads import parallel_map
from penstock.objects import as_object

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 * 1024
_AT_ONCE: Final = 16  # most of their time they wait for the storage


@dataclass(frozen=True, slots=True)
class Recording:
    """A bag that is to be converted."""

    path: Path
    size_bytes: int
    fingerprint: str

    @classmethod
    def of(cls, path: Path) -> Recording:
        """Look at a bag."""
        return cls(path, size_of(path), fingerprint(path))


class OpenRecording:
    """Opens recordings; the last one stays open for whoever asks next.

    A conversion guesses from a recording, describes it and converts it: its index is read once.

    Args:
        salvage: As for `open_bag`.
        limits: As for `open_bag`.
        scratch: As for `open_bag`.
    """

    def __init__(self, salvage: bool, limits: Limits, scratch: Path | None = None) -> None:
        self._settings = salvage, limits, scratch
        self._bag: Bag | None = None

    def open(self, path: Path) -> Bag:
        """Return a recording, open until another one is asked for."""
        if self._bag is None or self._bag.path != path:
            self.close()
            salvage, limits, scratch = self._settings
            self._bag = open_bag(path, salvage=salvage, limits=limits, scratch=scratch)
        return self._bag

    def close(self) -> None:
        """Close what is open; safe to call twice."""
        bag, self._bag = self._bag, None
        if bag is not None:
            bag.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    __del__ = close


def look_at(paths: Sequence[Path]) -> list[Recording]:
    """Return bags with their sizes and fingerprints, in their order."""
    return list(parallel_map(Recording.of, paths, name="fingerprint", helpers=_AT_ONCE))


def size_of(path: Path) -> int:
    """Return the bytes of a file or folder; 0 if it cannot be read, which is told later."""
    with suppress(OSError):
        if path.is_dir():
            return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return path.stat().st_size
    return 0


def fingerprint(path: Path) -> str:
    """Name a recording by its content: its size, and 64 samples of 64 KiB of each file.

    In object storage: by its name, size and time of upload.

    Reading all of a 50 GB bag to tell that it is done already would take longer than the user
    has patience for; two recordings that agree in size and in all samples are taken for one.
    """
    digest = hashlib.blake2b(digest_size=16)
    remote = as_object(path)
    if remote is not None:  # what the listing told: nothing is read for it
        digest.update(remote.version.encode())
        return digest.hexdigest()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        try:
            size = file.stat().st_size
            digest.update(f"{size}\n".encode())
            with file.open("rb") as stream:
                for k in range(_SAMPLES if size > _SAMPLE_BYTES else 1):
                    stream.seek(max(size - _SAMPLE_BYTES, 0) * k // (_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
        except OSError as error:
            raise storage_error("read", file, error) from error
    return digest.hexdigest()
