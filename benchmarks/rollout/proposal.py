"""The proposal's way to keep a rollout, in a process of its own: penstock never imports pickle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from penstock.errors import PenstockError

# RolloutStorage of the original proposal: numpy, pickle, LZ4 level 9; and back to tensors.
_SCRIPT = """
import os, pickle, sys, time
import lz4.frame, numpy as np, torch
data = dict(np.load(sys.argv[1]))
path = sys.argv[2]
for line in sys.stdin:
    begin = time.perf_counter()
    if line.strip() == "save":
        packed = lz4.frame.compress(pickle.dumps(data, protocol=4), compression_level=9)
        with open(path, "wb") as file:
            file.write(packed)
    else:
        with open(path, "rb") as file:
            back = pickle.loads(lz4.frame.decompress(file.read()))
        tensors = {key: torch.from_numpy(value) for key, value in back.items()}
        if line.strip() == "env":
            tensors = {key: value[len(value) // 2].clone() for key, value in tensors.items()}
        elif line.strip() == "key":
            tensors = tensors["state"]
    print(time.perf_counter() - begin, flush=True)
"""


class ProposedRollouts:
    """Saves and loads when asked, and says how long it took.

    Args:
        data: An `.npz` of the arrays.
        path: Where the compressed pickle goes.
    """

    def __init__(self, data: Path, path: Path) -> None:
        self.path = path
        self._process = subprocess.Popen(  # noqa: S603  our own script, in this interpreter
            [sys.executable, "-c", _SCRIPT, str(data), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str) -> float:
        """Let it "save", "load" all, one "env" or one "key"; return the seconds it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise PenstockError(
                f"the proposal's process ended ({self._process.wait()}) at {what!r}"
            )
        return float(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()
