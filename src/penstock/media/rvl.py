"""RVL, the lossless coding of depth maps that compressed_depth_image_transport offers.

Zeros and others take turns in runs; others are told by their differences. Every number is a chain
of nibbles, three bits each, the lowest first; the fourth bit says that more follow. (A. D. Wilson,
Fast Lossless Depth Image Compression, 2017.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.media.headers import Buffer


def read_rvl(data: Buffer, width: int, height: int) -> NDArray[np.uint16]:
    """Decode a depth map.

    Raises:
        DataError: The data are cut or damaged.
    """
    numbers = _numbers(data)
    depth = np.zeros(width * height, np.int64)
    at = place = 0
    before = 0
    while place < len(depth):
        if at + 2 > len(numbers):
            raise DataError(f"the RVL is cut: it holds {place} of {len(depth)} pixels")
        zeros, others = int(numbers[at]), int(numbers[at + 1])
        at += 2
        place += zeros
        steps = numbers[at : at + others]
        if place + others > len(depth) or len(steps) < others or not zeros + others:
            raise DataError("the RVL is damaged: a run does not fit the picture")
        values = before + np.cumsum((steps >> 1) ^ -(steps & 1))
        depth[place : place + others] = values
        before = int(values[-1]) if others else before
        at += others
        place += others
    return depth.astype(np.uint16).reshape(height, width)


def _numbers(data: Buffer) -> NDArray[np.int64]:
    """Split the words into their chains of nibbles, and add each up."""
    whole = memoryview(data).nbytes // 4 * 4
    words = np.frombuffer(memoryview(data)[:whole], "<u4").astype(">u4").view(np.uint8)
    nibbles = np.stack([words >> 4, words & 15], axis=1).reshape(-1)
    ends = np.flatnonzero(nibbles < 8)
    if not len(ends):
        return np.empty(0, np.int64)
    starts = np.concatenate(([0], ends[:-1] + 1))
    if int((ends - starts).max()) > 10:
        raise DataError("the RVL is damaged: a number has more than 32 bits")
    nibbles = nibbles[: ends[-1] + 1]
    shifts = 3 * (np.arange(len(nibbles)) - np.repeat(starts, ends - starts + 1))
    return np.add.reduceat((nibbles & 7).astype(np.int64) << shifts, starts)
