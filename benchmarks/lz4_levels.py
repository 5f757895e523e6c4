"""LZ4 as the proposal uses it, on plain bytes: what each level gains and how fast it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lz4.frame

from benchmarks import Row
from benchmarks.measure import clock, interleave, time_rows

LEVELS = (0, 6, 9)
_SAMPLE_BYTES = 6_000_000  # a third of a second at the slowest level
_TOP_BYTES = 1_000_000
_TOP = (12, 16)  # the most that LZ4 has, and the most that the proposal names


def measure_lz4(name: str, data: bytes, rounds: int, levels: Sequence[int] = LEVELS) -> list[Row]:
    """Measure speed both ways and size, on a sample from the middle.

    Args:
        name: Of the data.
        data: Plain bytes, as they lie in memory.
        rounds: Measurements of each.
        levels: Of LZ4, from the fastest to the smallest.
    """
    sample = _middle(data, _SAMPLE_BYTES)
    packed = {level: lz4.frame.compress(sample, compression_level=level) for level in levels}

    def compress(level: int) -> Callable[[], float]:
        return lambda: clock(lambda: lz4.frame.compress(sample, compression_level=level))

    def decompress(level: int) -> Callable[[], float]:
        return lambda: clock(lambda: lz4.frame.decompress(packed[level]))

    rows = []
    for what, turn in (("compress", compress), ("decompress", decompress)):
        turns = {_who(level): turn(level) for level in levels}
        timings = interleave(turns, rounds, f"LZ4 {what}, {name}")
        for row in time_rows("", timings, _who(levels[-1]), scale=1.0):
            speeds = (len(sample) / 1e6 / value for value in (row.value, row.p90 or row.value))
            speed, slow = speeds
            what_row = f"LZ4 {what}, {name}"
            rows.append(Row(what_row, row.who, speed, "MB/s", row.n, p90=slow, cpu_s=row.cpu_s))
    for level, stored in packed.items():
        ratio = len(sample) / len(stored)
        rows.append(Row(f"LZ4 size, {name}", _who(level), ratio, "x smaller"))
    low, high = levels[0], levels[-1]
    gain = len(packed[low]) / len(packed[high])
    what = f"LZ4 level {high} against level {low}, {name}"
    return [*rows, Row(what, _who(high), gain, "x smaller")]


def measure_top_levels(name: str, data: bytes) -> Row:
    """Say what the highest level that the proposal names gains over the highest of LZ4."""
    sample = _middle(data, _TOP_BYTES)
    sizes = [len(lz4.frame.compress(sample, compression_level=level)) for level in _TOP]
    what = f"LZ4 level {_TOP[1]} against level {_TOP[0]}, {name}"
    return Row(what, _who(_TOP[1]), sizes[1] / sizes[0], "x the size")


def _who(level: int) -> str:
    return f"level {level}"


def _middle(data: bytes, size: int) -> bytes:
    start = max(0, (len(data) - size) // 2)
    return data[start : start + size]
