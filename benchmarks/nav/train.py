"""`penstock train` as users run it, in processes of its own: its speed, and whether it resumes."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import Row
from penstock.checkpoints.load import load_checkpoint
from penstock.errors import PenstockError
from penstock.ui.progress import Progress

_BARS = {"fast": 20_000, "navrl": 5_500}  # frames/s
_NOT_UPDATE = 0.25
_LOOK_S = 0.02
_GIVE_UP_S = 600.0
_PHASES = ("perf/collect", "perf/update", "perf/other", "perf/checkpoint", "perf/validation")
_CLOCKS = ("seconds",)  # of a state: how long training took is never the same twice


@dataclass(frozen=True)
class Training:
    """What a run of `penstock train` said, from one iteration to another.

    Attributes:
        algo: The preset.
        rows: Of metrics.jsonl, one per iteration; the first ones are left out.
        wall_s: Wall-clock time per iteration, seen from outside.
        cpu_s: Processor time per iteration, of all its processes.
        frames: Per iteration.
    """

    algo: str
    rows: Sequence[Mapping[str, float]]
    wall_s: float
    cpu_s: float
    frames: int

    @property
    def frames_per_s(self) -> float:
        """The median of what the run itself says."""
        return statistics.median(row["perf/frames_per_s"] for row in self.rows)

    @property
    def not_update(self) -> float:
        """Median share of an iteration that is not the update."""
        return statistics.median(
            1.0 - row["perf/update"] / sum(row.get(name, 0.0) for name in _PHASES)
            for row in self.rows
        )

    def table(self) -> list[Row]:
        """Lay out as rows, judged."""
        what, who, count = f"training, algo={self.algo}", "penstock train", len(self.rows)
        least, seen = _BARS[self.algo], self.frames / self.wall_s
        speed, rest = self.frames_per_s, self.not_update
        table = [
            Row(
                what,
                who,
                speed,
                "frames/s",
                n=count,
                cpu_s=self.cpu_s,
                bar=f">= {least:,} frames/s",
                met=speed >= least,
            ),
            Row(
                what, "the same, by a clock outside", seen, "frames/s", n=count, ratio=seen / speed
            ),
        ]
        if self.algo == "fast":
            what = f"{what}, all but the update"
            bar = f"<= {_NOT_UPDATE:.0%}"
            table.append(Row(what, who, 100 * rest, "%", n=count, bar=bar, met=rest <= _NOT_UPDATE))
        return table


def measure_training(
    folder: Path, algo: str, iterations: int, *, envs: int, skip: int = 3, words: Sequence[str] = ()
) -> Training:
    """Train for a while.

    Args:
        folder: Of the run; it must not exist.
        algo: The preset.
        iterations: How many are measured.
        envs: Drones.
        skip: Iterations before them: compilation, caches.
        words: More settings.
    """
    settings = [
        f"run_dir={folder}",
        f"algo={algo}",
        f"env.num_envs={envs}",
        f"max_iterations={skip + iterations}",
        "env_dyn.curriculum=0",  # all obstacles are there, not a tenth as at the start of a run
        "eval_interval=0",
        *words,
    ]
    seen: list[tuple[float, float, Any]] = []
    total = skip + iterations
    with Progress(total, f"train {algo}", "iterations") as progress, _started(settings) as process:
        for row in _follow(process, folder / "metrics.jsonl"):
            seen.append((time.perf_counter(), _tree_cpu_s(process.pid), row))
            progress.advance()
            if len(seen) == total:
                break
        _finish(process)
    if len(seen) <= skip:
        raise PenstockError(f"penstock train ended after {len(seen)} of {total} iterations")
    (begin, cpu, first), (end, cpu_end, last) = seen[max(skip, 1) - 1], seen[-1]
    span = max(len(seen) - max(skip, 1), 1)
    return Training(
        algo,
        [row for _, _, row in seen[skip:]],
        max(end - begin, 1e-9) / span,
        (cpu_end - cpu) / span,
        round((last["env_frames"] - first["env_frames"]) / span) or round(first["env_frames"]),
    )


def measure_resume(folder: Path, *, envs: int, half: int = 10, words: Sequence[str] = ()) -> Row:
    """Train twice as far in one go and in two, and compare the states."""
    common = [f"env.num_envs={envs}", "eval_interval=0", *words]
    whole, parts = folder / "whole", folder / "parts"
    with Progress(3, "resume", "runs") as progress:
        with (
            _started([*common, f"run_dir={whole}", f"max_iterations={2 * half}"]) as one,
            _started([*common, f"run_dir={parts}", f"max_iterations={half}"]) as other,
        ):
            for process in (other, one):
                _finish(process)
                progress.advance()
        with _started([f"resume={parts}", f"max_iterations={2 * half}"]) as process:
            _finish(process)
            progress.advance()
    name = f"checkpoints/checkpoint_{2 * half:06d}.pt"
    different, count = compare(load_checkpoint(whole / name), load_checkpoint(parts / name))
    return Row(
        f"resume: {half} + {half} iterations against {2 * half}",
        "equal, bit for bit" if not different else f"different: {different[0]}",
        len(different),
        "different tensors",
        n=count,
        bar="0",
        met=not different,
    )


def compare(first: Any, second: Any, name: str = "") -> tuple[list[str], int]:
    """Return the names of leaves of two states that differ in any bit, and how many leaves.

    How long training took is left out.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = [
            (str(key), first.get(key), second.get(key))
            for key in sorted(first.keys() | second.keys(), key=str)
            if name or key not in _CLOCKS
        ]
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            return [name], 1
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(first, second, strict=True))]
    else:
        return ([] if _same(first, second) else [name]), 1
    different, count = [], 0
    for key, a, b in pairs:
        found, leaves = compare(a, b, f"{name}/{key}" if name else key)
        different += found
        count += leaves
    return different, count


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        # As bytes, so that NaN equals itself and 0 is not -0.
        return first.contiguous().numpy().tobytes() == second.contiguous().numpy().tobytes()
    return type(first) is type(second) and bool(first == second)


# ---------------------------------------------------------------------- processes


@contextlib.contextmanager
def _started(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(  # noqa: S603  this very program, in this interpreter
        [sys.executable, "-m", "penstock", "train", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PENSTOCK_PROGRESS": "quiet"},  # of progress there is one, here
    )
    try:
        yield process
    finally:
        if process.poll() is None:  # something went wrong here: it saves, and stops its others
            process.terminate()
        process.communicate()


def _finish(process: subprocess.Popen[str]) -> None:
    try:
        _, said = process.communicate(timeout=_GIVE_UP_S)
    except subprocess.TimeoutExpired as error:
        raise PenstockError(f"penstock train did not end within {_GIVE_UP_S:.0f} s") from error
    if process.returncode:
        last = said.strip().splitlines()[-1:] or ["no message"]
        raise PenstockError(f"penstock train ended with code {process.returncode}: {last[0]}")


def _follow(process: subprocess.Popen[str], path: Path) -> Iterator[Any]:
    """Yield the rows of a file of metrics as they are written, until the process ends."""
    place = 0
    limit_s = time.monotonic() + _GIVE_UP_S
    while True:
        ended = process.poll() is not None  # before reading: what it wrote last is read, too
        if path.exists() and path.stat().st_size > place:
            with path.open("rb") as file:
                file.seek(place)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            place += len(whole)
            yield from map(json.loads, whole.splitlines())
        if ended:
            return
        if time.monotonic() > limit_s:
            raise PenstockError(f"penstock train wrote no more metrics within {_GIVE_UP_S:.0f} s")
        time.sleep(_LOOK_S)


def _tree_cpu_s(pid: int) -> float:
    """Processor seconds of a process and those that it started."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        ended = root.cpu_times()
        total += ended.children_user + ended.children_system
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
    return total
