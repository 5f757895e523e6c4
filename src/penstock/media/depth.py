"""Depth maps: RVL as cameras send it, and the 12-bit codes that lerobot 0.6 and later use.

A distance d lies at log(d + shift) between log(depth_min + shift) and log(depth_max + shift); the
share is rounded to 4095 steps. With the defaults a step is 0.1 cm near and 0.4 cm at 10 m. What is
nearer than depth_min (0, no measurement, too) gets code 0 and comes back as depth_min.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.errors import DataError
from penstock.media.headers import Buffer

CODES = 4096


@dataclass(frozen=True)
class DepthCoding:
    """How distances become codes; everything in metres.

    Args:
        depth_min: The distance of code 0.
        depth_max: The distance of code 4095.
        shift: Added before the logarithm.
        use_log: Logarithmic steps; equal ones otherwise.
    """

    depth_min: float = 0.01
    depth_max: float = 10.0
    shift: float = 3.5
    use_log: bool = True

    def __post_init__(self) -> None:
        numbers = (self.depth_min, self.depth_max, self.shift)
        good = all(math.isfinite(number) for number in numbers) and self.depth_min < self.depth_max
        if not good or (self.use_log and self.depth_min + self.shift <= 0):
            raise DataError(f"depth from {self.depth_min} to {self.depth_max} m cannot be coded")

    @classmethod
    def from_info(cls, info: Mapping[str, Any] | None) -> Self:
        """Read it from a video feature's info; what is not there has lerobot's default."""
        found = info or {}
        values = {
            name: found.get(f"video.{name}", found.get(name))
            for name in ("depth_min", "depth_max", "shift", "use_log")
        }
        known = {name: value for name, value in values.items() if value is not None}
        if not all(isinstance(value, int | float) for value in known.values()):
            raise DataError(f"the depth settings of a video must be numbers: {known}")
        return cls(**known)

    def to_info(self) -> dict[str, Any]:
        """Return what a video feature's info says of it."""
        return {
            "is_depth_map": True,
            "depth_unit": "mm",
            "video.depth_min": self.depth_min,
            "video.depth_max": self.depth_max,
            "video.shift": self.shift,
            "video.use_log": self.use_log,
        }

    def encode(self, depth_mm: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """Turn millimetres into codes of 0 to 4095."""
        codes: NDArray[np.uint16] = self._codes[depth_mm]
        return codes

    def decode(self, codes: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """Turn codes into millimetres, between depth_min and depth_max."""
        depth: NDArray[np.uint16] = self._millimetres[codes & (CODES - 1)]
        return depth

    @cached_property
    def _codes(self) -> NDArray[np.uint16]:
        # In single precision and in millimetres, as lerobot does it for maps of integers.
        low, high, shift = (
            np.float32(1000 * value) for value in (self.depth_min, self.depth_max, self.shift)
        )
        values = np.arange(65536, dtype=np.float32)
        if self.use_log:
            first, last = math.log(float(low + shift)), math.log(float(high + shift))
            with np.errstate(invalid="ignore", divide="ignore"):
                share = (np.log(values + shift) - first) / (last - first)
        else:
            share = (values - low) / (high - low)
        scaled = np.nan_to_num(np.rint(share * (CODES - 1)), nan=0.0, neginf=0.0)
        codes: NDArray[np.uint16] = scaled.clip(0, CODES - 1).astype(np.uint16)
        return codes

    @cached_property
    def _millimetres(self) -> NDArray[np.uint16]:
        share = np.arange(CODES, dtype=np.float64) / (CODES - 1)
        if self.use_log:
            first = math.log(self.depth_min + self.shift)
            last = math.log(self.depth_max + self.shift)
            metres = np.exp(first + share * (last - first)) - self.shift
        else:
            metres = self.depth_min + share * (self.depth_max - self.depth_min)
        metres = metres.clip(self.depth_min, self.depth_max)
        return np.rint(metres * 1000).clip(0, 65535).astype(np.uint16)


def read_rvl(data: Buffer, width: int, height: int) -> NDArray[np.uint16]:
    """Decode RVL, the lossless depth maps of compressed_depth_image_transport.

    Zeros and others take turns in runs; others are told by their differences. Every number is a
    chain of nibbles, three bits each, the lowest first; the fourth bit says that more follow. (A.
    D. Wilson, Fast Lossless Depth Image Compression, 2017.)
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


def false_colours(depth_mm: NDArray[np.uint16], range_mm: tuple[int, int]) -> NDArray[np.uint8]:
    """Show a depth map in colours: near is red, far is blue, black is no measurement."""
    low, high = range_mm
    share = (np.clip(depth_mm.astype(np.float32), low, high) - low) / max(high - low, 1)
    codes = 255 - np.rint(share * 254).astype(np.uint8)
    codes[depth_mm == 0] = 0
    shown: NDArray[np.uint8] = _turbo()[codes]
    return shown


@lru_cache(maxsize=1)
def _turbo() -> NDArray[np.uint8]:
    """Return the colours of Google's Turbo, by its polynomial of fifth degree; 0 is black."""
    powers = np.linspace(0, 1, 256)[:, None] ** np.arange(6)
    red = powers @ [0.13572138, 4.61539260, -42.66032258, 132.13108234, -152.94239396, 59.28637943]
    green = powers @ [0.09140261, 2.19418839, 4.84296658, -14.18503333, 4.27729857, 2.82956604]
    blue = powers @ [0.10667330, 12.64194608, -60.58204836, 110.36276771, -89.90310912, 27.34824973]
    colours: NDArray[np.uint8] = np.rint(np.stack([red, green, blue], 1).clip(0, 1) * 255).astype(
        np.uint8
    )
    colours[0] = 0
    return colours
