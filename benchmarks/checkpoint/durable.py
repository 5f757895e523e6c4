"""Sizes, the speed to durable disk, and the time of a verified load."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import Row, Settings
from benchmarks.checkpoint.peers import (
    has_zipnn,
    proposed_write,
    torch_save_durably,
    zipnn_write,
)
from benchmarks.checkpoint.state import Learner, map_tensors, nbytes
from benchmarks.measure import Timing, clock, interleave, time_rows
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver

_DELTA_STEPS = 10
TORCH = "torch.save + fsync"
PROPOSED = "torch.save, LZ4-9 + fsync (proposal)"
ZIPNN = "torch.save, ZipNN + fsync"
FULL = "penstock full"
DELTA = f"penstock delta, {_DELTA_STEPS} steps"
# Shares saved that were promised, in percent.
_BARS = {("float32", FULL): 14, ("float32", DELTA): 35} | {
    ("bfloat16", FULL): 30,
    ("bfloat16", DELTA): 70,
}


def measure_durable(learner: Learner, settings: Settings) -> list[Row]:
    """Measure both element types; the learner makes ten more steps on the way."""
    before = _copy(learner.state())
    target = learner.steps + _DELTA_STEPS
    while learner.steps < target:
        learner.iterate()
    after = _copy(learner.state())
    rows = _measure(before, after, "float32", settings)
    before, after = map_tensors(before, _to_bf16), map_tensors(after, _to_bf16)
    return rows + _measure(before, after, "bfloat16", settings)


def _measure(before: Any, after: Any, dtype: str, settings: Settings) -> list[Row]:
    work = settings.work / dtype
    work.mkdir()
    raw = nbytes(after)
    files = {TORCH: work / "torch.pt", PROPOSED: work / "proposal.pt.lz4"}
    zipnn = {ZIPNN: work / "torch.znn"} if has_zipnn() else {}
    rounds = max(5, settings.repeats - 2) if settings.repeats > 3 else settings.repeats
    with (
        AsyncCheckpointSaver(work / "full", handle_signals=False) as full,
        AsyncCheckpointSaver(work / "delta", delta_every=1000, handle_signals=False) as delta,
    ):
        delta.save_async(before, "base.pt").wait()
        handles: dict[str, Any] = {}

        def save(saver: AsyncCheckpointSaver, who: str) -> Callable[[], None]:
            def run() -> None:
                handles[who] = saver.save_async(after, "checkpoint.pt")
                handles[who].wait()

            return run

        timings = interleave(
            {
                TORCH: _durable(lambda: torch_save_durably(after, files[TORCH]), files[TORCH]),
                FULL: _durable(save(full, FULL), work / "full" / "checkpoint.pt"),
                DELTA: _durable(save(delta, DELTA), work / "delta" / "checkpoint.pt"),
                **{
                    who: _durable(partial(zipnn_write, after, path, dtype), path)
                    for who, path in zipnn.items()
                },
            },
            rounds,
            f"durable {dtype}",
        )
        proposed = interleave(
            {PROPOSED: lambda: clock(lambda: proposed_write(after, files[PROPOSED]))},
            1,
            f"LZ4-9 {dtype}",
            warm_up=False,
        )
    torch_save_durably(after, files[TORCH])
    sizes = {
        TORCH: files[TORCH].stat().st_size,
        PROPOSED: files[PROPOSED].stat().st_size,
        **{who: path.stat().st_size for who, path in zipnn.items()},
        **{who: handle.stats["stored_bytes"] for who, handle in handles.items()},
    }
    shutil.rmtree(work)
    return _size_rows(dtype, raw, sizes) + _speed_rows(dtype, raw, timings | proposed)


def _durable(save: Callable[[], None], path: Path) -> Callable[[], float]:
    def run() -> float:
        path.unlink(missing_ok=True)  # outside the timed part: nobody overwrites
        return clock(save)

    return run


def _size_rows(dtype: str, raw: int, sizes: dict[str, int]) -> list[Row]:
    rows = []
    for who, size in sizes.items():
        saved = 100 * (1 - size / raw)
        bar = _BARS.get((dtype, who))
        rows.append(
            Row(
                f"size saved, {dtype}, {raw / 1e6:.1f} MB",
                who,
                saved,
                "%",
                bar=f">= {bar} %" if bar else "",
                met=saved >= bar if bar else None,
            )
        )
    return rows


def _speed_rows(dtype: str, raw: int, timings: dict[str, Timing]) -> list[Row]:
    speeds = {who: raw / 1e6 / timing.median for who, timing in timings.items()}
    rows = []
    for who, timing in timings.items():
        row = Row(
            f"speed to durable disk, {dtype}",
            who,
            speeds[who],
            "MB/s",
            n=len(timing.seconds),
            p90=raw / 1e6 / timing.p90,
            ratio=speeds[who] / speeds[FULL],
            cpu_s=sorted(timing.cpu_s)[len(timing.cpu_s) // 2],
        )
        if who in (FULL, DELTA):
            met = speeds[who] >= 0.6 * speeds[TORCH] and speeds[who] >= 10 * speeds[PROPOSED]
            row = replace(row, bar=">= 0.6x torch.save, >= 10x proposal", met=met)
        rows.append(row)
    return rows


def measure_load(learner: Learner, settings: Settings) -> list[Row]:
    """Time of a load: verified by penstock, unverified by torch; the file is in memory already."""
    work = settings.work / "load"
    work.mkdir()
    with AsyncCheckpointSaver(work, handle_signals=False) as saver:
        ours = saver.save_async(learner.state(), "full.pt").wait()
    theirs = work / "torch.plain"
    torch_save_durably(learner.state(), theirs)
    timings = interleave(
        {
            "torch.load (unverified)": lambda: clock(lambda: torch.load(theirs, weights_only=True)),
            FULL: lambda: clock(lambda: load_checkpoint(ours)),
        },
        2 * settings.rounds,
        "load",
    )
    once = interleave(
        {
            "torch.load (unverified)": lambda: _load_once(
                f"import torch; load = lambda: torch.load({str(theirs)!r}, weights_only=True)"
            ),
            FULL: lambda: _load_once(
                "from penstock.checkpoints.load import load_checkpoint; "
                f"load = lambda: load_checkpoint({str(ours)!r})"
            ),
        },
        settings.repeats,
        "load once",
    )
    shutil.rmtree(work)
    rows = []
    for what, both in (("load, float32", timings), ("load, float32, in a new process", once)):
        met = both[FULL].median <= 2 * both["torch.load (unverified)"].median
        rows += [
            replace(row, bar="<= 2x torch.load", met=met) if row.who == FULL else row
            for row in time_rows(what, both, FULL)
        ]
    return rows


def _load_once(prepare: str) -> float:
    """Return the seconds of one load in a process of its own, as a training loads: once."""
    code = (
        f"{prepare}; import time; begin = time.perf_counter(); load(); "
        "print(time.perf_counter() - begin)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return float(done.stdout)


def _copy(state: Any) -> Any:
    return map_tensors(state, lambda tensor: tensor.detach().clone())


def _to_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
