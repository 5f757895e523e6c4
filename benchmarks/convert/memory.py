"""Memory of a conversion: all frames at once, as the proposal describes it, and penstock's.

`python -m benchmarks.convert.memory FRAMES` puts so many frames of three cameras
together in the old way and prints its peak.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import Row
from benchmarks.measure import environment
from penstock.errors import PenstockError
from penstock.samples import expected_action, expected_state, write_sample

OLD = "all frames in lists, then np.stack (proposal)"
OURS = "penstock copy"
_SHAPE, _CAMERAS = (480, 640, 3), 3
_NUMBERS = len(expected_state(0.0)) + len(expected_action(0.0))
_MEASURED = (20, 120)  # frames: what the process needs besides them falls out
_FRAMES = 10_000  # of the proposal's 10 GB bag
_CHUNKS = (100, 500, 1000, 2000, 5000)
_SECONDS = (8, 64)  # of the bags whose peaks are compared
_WINDOWS = (100, 2000)
_TURNS = 3


def measure_whole(bag_bytes_per_frame: float) -> list[Row]:
    """Measure what a frame costs when all are kept, and scale it to the proposal's example.

    Args:
        bag_bytes_per_frame: Of a recording with three cameras.
    """
    few, many = (_peak_bytes(frames) for frames in _MEASURED)
    per_frame = (many - few) / (_MEASURED[1] - _MEASURED[0])
    picture = int(np.prod(_SHAPE))
    scaled = f"memory of {_FRAMES:,} frames of 3 cameras (scaled)"
    rows = [
        Row("a decoded picture of 640x480", "uint8", picture / 1e6, "MB"),
        Row("a bag with 3 JPEG cameras", "per frame", bag_bytes_per_frame / 1e6, "MB"),
        Row("numbers of a frame", "state and action, float32", _NUMBERS * 4 / 1e3, "kB"),
        Row(scaled, "the pictures alone", _FRAMES * _CAMERAS * picture / 1e9, "GB"),
        Row(scaled, OLD, _FRAMES * per_frame / 1e9, "GB"),
    ]
    for frames in _CHUNKS:
        what = "memory of a chunk, stacked (scaled)"
        rows.append(Row(what, f"chunk_size={frames}", frames * per_frame / 1e9, "GB"))
    return rows


def _peak_bytes(frames: int) -> float:
    command = [sys.executable, "-m", __name__, str(frames)]
    done = subprocess.run(  # noqa: S603  this very module, in this interpreter
        command, capture_output=True, text=True, check=False, env=environment()
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PenstockError(f"measuring the memory of {frames} frames failed: {last[0]}")
    return float(done.stdout)


def _main(frames: int) -> None:
    from benchmarks.measure import peak_bytes

    buffer: list[list[Any]] = [[] for _ in range(_CAMERAS)]
    for number in range(frames):
        for camera in buffer:
            camera.append(np.full(_SHAPE, number % 256, np.uint8))
    stacked = [np.stack(camera) for camera in buffer]
    assert len(stacked) == _CAMERAS
    sys.stdout.write(str(peak_bytes()))


def measure_growth(folder: Path, convert: Callable[..., dict[str, Any]]) -> list[Row]:
    """Compare penstock's peaks for a short and a long bag, and for small and large windows."""
    peaks = []
    rows = []
    for seconds in _SECONDS:
        bag = folder / f"{seconds}.bag"
        write_sample(bag, seconds=seconds, numbered=False)
        # A window that both bags fill many times: before, memory grows with the first one.
        found = convert(bag, folder / "out", "copy", f"window_frames={_WINDOWS[0]}")
        peaks.append(found["peak_bytes"])
        rows.append(
            Row(
                "peak memory by size of the bag",
                f"{OURS}, {bag.stat().st_size / 1e6:.0f} MB",
                found["peak_bytes"] / 1e6,
                "MB",
                cpu_s=found["cpu_s"],
            )
        )
    times = _SECONDS[1] / _SECONDS[0]
    what = f"peak memory, a bag {times:g} times as large"
    rows.append(Row(what, f"{OURS}, chunk_size={_WINDOWS[0]}", peaks[1] / peaks[0], "x"))
    return sorted(rows + _by_window(bag, folder / "out", convert), key=lambda row: row.what)


def _by_window(bag: Path, out: Path, convert: Callable[..., dict[str, Any]]) -> list[Row]:
    """Compare windows on one bag, in turns."""
    found: dict[int, list[dict[str, Any]]] = {frames: [] for frames in _WINDOWS}
    for _ in range(_TURNS):
        for frames in _WINDOWS:
            found[frames].append(convert(bag, out, "copy", f"window_frames={frames}"))

    def middle(frames: int, name: str) -> float:
        return float(statistics.median(one[name] for one in found[frames]))

    rows = []
    for frames in _WINDOWS:
        who, cpu_s = f"{OURS}, chunk_size={frames}", middle(frames, "cpu_s")
        peak = middle(frames, "peak_bytes") / 1e6
        rows.append(Row("peak memory by chunk_size", who, peak, "MB", n=_TURNS))
        seconds = middle(frames, "wall_s")
        rows.append(Row("time by chunk_size", who, seconds, "s", n=_TURNS, cpu_s=cpu_s))
    what = f"processor time, chunk_size={_WINDOWS[0]} against {_WINDOWS[1]}"
    ratio = middle(_WINDOWS[0], "cpu_s") / middle(_WINDOWS[1], "cpu_s")
    return [*rows, Row(what, OURS, ratio, "x", n=_TURNS)]


if __name__ == "__main__":
    _main(int(sys.argv[1]))
