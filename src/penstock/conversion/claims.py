"""Who does what: a claim is a file, so that it holds wherever machines share a folder.

A claim has generations: `<name>.0`, and where its holder died, `<name>.1` and so on. Each file is
created exclusively, so that of all who find the holder dead, one goes on. A holder is dead if it is
a process of this machine that is gone, or if it has not touched its file for a lease; clocks of two
machines are never compared. What is done under a claim must be safe to do twice: a machine that
stands still for longer than a lease may come back.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from typing_extensions import Self

from penstock.core.files import make_folder, owner_is_dead, process_owner, storage_error
from penstock.core.interrupt import start

# Network file systems show the age of a file up to a minute late.
LEASE_S: Final = 180.0
_BEATS_PER_LEASE: Final = 12


class Claims:
    """The claims of this process in a folder; they are given back at the end of the `with` block.

    Args:
        folder: Where the files are; made if need be.
        lease_s: For how long a claim holds of which no sign of life is seen; alike for all.

    Example:
        with Claims(folder) as claims:
            if claims.take("a3f0"):
                ...
                claims.release("a3f0")
    """

    def __init__(self, folder: Path, lease_s: float = LEASE_S) -> None:
        self._folder, self._lease_s = folder, lease_s
        self._held: dict[str, int] = {}
        self._seen: dict[Path, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="penstock-claims", daemon=False)

    def take(self, name: str) -> bool:
        """Claim something; False while somebody else has it, who lives as far as can be seen."""
        for generation in range(1000):
            path = self._path(name, generation)
            try:
                self._create(path)
            except FileExistsError:
                if self._is_abandoned(path):
                    continue
                return False
            with self._lock:
                self._held[name] = generation
            return True
        return False

    def release(self, name: str) -> None:
        """Give a claim back."""
        with self._lock:
            generation = self._held.pop(name)
        for each in range(generation + 1):
            with suppress(OSError):
                self._path(name, each).unlink()

    def __enter__(self) -> Self:
        make_folder(self._folder)
        start(self._heart)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._heart.join()
        for name in list(self._held):
            self.release(name)
        for folder in (self._folder, self._folder.parent):
            with suppress(OSError):  # others have claims there, or a plan
                folder.rmdir()

    def _path(self, name: str, generation: int) -> Path:
        return self._folder / f"{name}.{generation}"

    def _create(self, path: Path) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # a build may have taken it away
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            raise
        except OSError as error:
            raise storage_error("write", path, error) from error
        try:
            with suppress(OSError):  # a full disk: the claim holds without a name, for a lease
                os.write(descriptor, process_owner().encode())
        finally:
            os.close(descriptor)

    def _is_abandoned(self, path: Path) -> bool:
        try:
            owner, touched_ns = path.read_text(errors="replace"), path.stat().st_mtime_ns
        except OSError:
            return False  # it was given back just now: the next try will tell
        if owner_is_dead(owner):
            return True
        now_s = time.monotonic()
        seen_ns, since_s = self._seen.get(path, (None, now_s))
        if seen_ns != touched_ns:
            self._seen[path] = touched_ns, now_s
            return False
        return now_s - since_s > self._lease_s

    def _beat(self) -> None:
        while not self._end.wait(self._lease_s / _BEATS_PER_LEASE):
            with self._lock:
                paths = [self._path(name, number) for name, number in self._held.items()]
            for path in paths:
                with suppress(OSError):
                    os.utime(path)
