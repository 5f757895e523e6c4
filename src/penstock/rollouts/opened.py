"""The rollouts that are kept open between reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.reuse import ReusedMemory
from penstock.rollouts.files import RolloutFile, identity


class OpenRollouts:
    """The rollouts that were read last, kept open: a header takes as long as an environment.

    Args:
        memory: For the batches.
        most: How many stay open.
    """

    def __init__(self, memory: ReusedMemory, most: int = 4) -> None:
        self._memory = memory
        self._most = most
        self._lock = threading.Lock()
        self._idle: dict[Path, RolloutFile] = {}

    @contextmanager
    def open(self, path: Path) -> Iterator[RolloutFile]:
        """Open a rollout, or take the one that is open if the file is still the same."""
        with self._lock:
            file = self._idle.pop(path, None)  # nobody else reads it meanwhile, or closes it
        if file is not None and file.identity != identity(os.stat(path)):
            file.close()
            file = None
        if file is None:
            file = RolloutFile(path, self._memory)
        try:
            yield file
        finally:
            with self._lock:
                spare = [self._idle.pop(path)] if path in self._idle else []
                self._idle[path] = file
                while len(self._idle) > self._most:
                    spare.append(self._idle.pop(next(iter(self._idle))))
            for other in spare:
                other.close()

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            files, self._idle = list(self._idle.values()), {}
        for file in files:
            file.close()
