"""What the measured checkpoints make of the proposal's sums, and LZ4's levels on their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch

from benchmarks import Row, Settings
from benchmarks.checkpoint.durable import DELTA, FULL, PROPOSED, TORCH
from benchmarks.checkpoint.memory import QUEUE
from benchmarks.checkpoint.stall import OURS, blocked
from benchmarks.checkpoint.stall import PROPOSED as PROPOSED_CALL
from benchmarks.checkpoint.state import tensors
from benchmarks.lz4_levels import measure_lz4, measure_top_levels
from benchmarks.measure import find_row

_COUNT = 1000  # checkpoints of the proposal's example
_INTERVAL = 1000
_ITERATION_S = 1024 * 32 / 10_000  # at the proposal's 10,000 frames/s
_PENDING, _MORE = 3, 5  # lengths of the queue that the proposal names
_SHARE = 32  # of each tensor one part in so many: 6 MB of 200


def measure_levels(state: Any) -> list[Row]:
    """Measure LZ4 on the bytes of a trained state: a part of every tensor, moments included."""
    parts = []
    for tensor in tensors(state):
        if tensor.is_floating_point() and tensor.numel() >= _SHARE:
            some = tensor.detach().reshape(-1)[: tensor.numel() // _SHARE]
            parts.append(some.contiguous().view(torch.uint8).numpy().tobytes())
    plain = b"".join(parts)
    return [*measure_lz4("checkpoint", plain, 2), measure_top_levels("checkpoint", plain)]


def conclude(rows: Sequence[Row], raw: int, settings: Settings) -> list[Row]:
    """Compute what follows from the rows that were measured.

    Args:
        rows: Of this case.
        raw: Bytes of the state.
        settings: What was measured.
    """
    what = blocked(settings)
    plain = find_row(rows, what, "torch.save").value
    found = [
        Row(
            "blocked time saved against torch.save (computed)",
            who,
            100 * (1 - find_row(rows, what, who).value / plain),
            "%",
        )
        for who in (PROPOSED_CALL, OURS)
    ]
    share = 100 * plain / 1e3 / (_INTERVAL * _ITERATION_S)
    often = 100 * plain / 1e3 / (10 * _ITERATION_S)
    lost = "training time that torch.save takes at 10,000 frames/s (computed)"
    found += [
        Row(lost, f"one save in {_INTERVAL:,} iterations", share, "%"),
        Row(lost, "one save in 10 iterations", often, "%"),
        Row(
            f"saves in {_COUNT:,} iterations (computed)",
            f"save_interval={_INTERVAL}",
            _COUNT // _INTERVAL,
            "saves",
        ),
    ]
    found += _sizes(rows, raw)
    for who in (PROPOSED, FULL):
        seconds = _PENDING * raw / 1e6 / find_row(rows, "speed to durable disk, float32", who).value
        found.append(Row(f"writing {_PENDING} pending saves (computed)", who, seconds, "s"))
    queue = find_row(rows, "extra peak memory", QUEUE).value
    found += [
        Row(f"extra memory of a queue of {_PENDING}", QUEUE, queue * raw / 1e6, "MB"),
        Row(
            f"extra memory of a queue of {_MORE} (computed)",
            "proposal, copies alone",
            _MORE * raw / 1e6,
            "MB",
        ),
    ]
    folder = files("penstock.checkpoints")
    lines = sum(
        len(entry.read_text(encoding="utf-8").splitlines())
        for entry in folder.iterdir()
        if entry.name.endswith(".py")
    )
    return [*found, Row("lines of code", "penstock checkpoints/", lines, "lines")]


def _sizes(rows: Sequence[Row], raw: int) -> list[Row]:
    found = []
    for dtype in ("float32", "bfloat16"):
        saved = {
            row.who: row.value / 100
            for row in rows
            if row.what.startswith(f"size saved, {dtype}") and row.unit == "%"
        }
        full, delta = 1 - saved[FULL], 1 - saved[DELTA]
        what = f"saved by a difference, against a full checkpoint, {dtype}"
        found.append(Row(what, DELTA, 100 * (1 - delta / full), "%"))
        for who, share in saved.items():
            found.append(Row(f"size, {dtype}", who, 1 / (1 - share), "x smaller"))
            found.append(Row(f"disk saved, {dtype}", who, 100 * share, "%"))
        if dtype == "float32":
            for who in (TORCH, PROPOSED, FULL, DELTA):
                size = raw * (1 - saved[who])
                what = f"{_COUNT:,} checkpoints (computed)"
                found.append(Row(what, who, _COUNT * size / 1e9, "GB"))
                found.append(Row("one checkpoint", who, size / 1e6, "MB"))
    return sorted(found, key=lambda row: row.what)
