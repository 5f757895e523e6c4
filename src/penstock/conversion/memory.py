"""What a conversion may hold in memory: what its parts need, and a watch over all of it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from typing_extensions import Self

from penstock.conversion.mapping import Mapping as Recipe
from penstock.core.memory import format_bytes, highest_rss_bytes, rss_bytes
from penstock.dataset.layout import Feature
from penstock.errors import UsageError

# What one worker needs beside its queue and its encoders: the interpreter, libraries, parquet.
BASE_BYTES: Final = 170 * 10**6
# What an encoder and the pictures on their way through it take, per pixel (measured).
_PER_PIXEL: Final = {"h264": 24, "grey8": 24, "depth12": 40, "av1": 64, "png": 12, "copy": 1}
_QUEUE_BYTES: Final = 16 * 2**20  # hundreds of pictures: more would only be more memory
_LEAST_QUEUE_BYTES: Final = 4 * 2**20
_MAX_SAMPLES: Final = 2000
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's malloc.h


def encoder_bytes(codec: str, width: int, height: int) -> int:
    """Return the memory that one camera takes while it is encoded, about."""
    return _PER_PIXEL[codec] * width * height


def queue_bytes(memory_bytes: int) -> int:
    """Return what may wait between reading and encoding in a worker of so much memory."""
    return max(min(memory_bytes - BASE_BYTES, _QUEUE_BYTES), _LEAST_QUEUE_BYTES)


def fitting_workers(
    mapping: Recipe, features: Mapping[str, Feature], memory_bytes: int, workers: int
) -> int:
    """Return how many workers fit into the memory; the parent process counts as well.

    Raises:
        UsageError: Not even one: the largest camera must fit, the others may wait.
    """
    cameras = [(0, "no camera")]
    for name, camera in mapping.cameras.items():
        _, height, width = features[name].picture_size
        codec = mapping.codec_of(camera)
        what = f"{name} ({width}x{height} as {codec})"
        cameras.append((encoder_bytes(codec, width, height), what))
    most, what = max(cameras)
    floor = BASE_BYTES + _LEAST_QUEUE_BYTES + most
    if memory_bytes < floor:
        raise UsageError(
            f"memory is {format_bytes(memory_bytes)}, and {what} needs "
            f"{format_bytes(floor)}: raise --memory, or give the camera a resize"
        )
    return min(workers, max((memory_bytes - rss_bytes()) // floor, 1))


def give_back_at_once() -> None:
    """Let freed blocks of two megabytes or more go back to the system, instead of being kept.

    glibc keeps what was freed for later, more and more as larger blocks are used: pictures then
    take a third more memory than they need. Chunks are smaller: new pages for each would cost a
    quarter of a conversion by copy. Does nothing where there is no glibc.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 1 << 21)
        mallopt(_M_ARENA_MAX, 2)


class MemoryWatch:
    """Samples the memory of this process and its children.

    Attributes:
        peak_bytes: The most that was seen.
        samples: Seconds from the start, and bytes.
    """

    def __init__(self, interval_s: float = 0.2) -> None:
        self.peak_bytes = 0
        self.samples: list[tuple[float, int]] = []
        self._interval_s = interval_s
        self._taken, self._stride = 0, 1
        self._closing = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=False)

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter()
        self._highest_before = highest_rss_bytes()
        self._sample()  # so that even the shortest block has a peak
        self._thread.start()
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        self._closing.set()
        self._thread.join()
        if len(self.samples) == 1 and exc is None and self._error is None:
            self._sample()  # even the shortest block has a curve
        highest = highest_rss_bytes()
        if highest > self._highest_before:  # a peak between two samples
            self.peak_bytes = max(self.peak_bytes, highest)
        if self._error is not None and exc is None:  # never hide the error of the block
            raise self._error

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._interval_s):
                self._sample()
        except BaseException as error:
            self._error = error

    def _sample(self) -> None:
        rss = rss_bytes(tree=True)
        self.peak_bytes = max(self.peak_bytes, rss)
        if self._taken % self._stride == 0:
            self.samples.append((time.perf_counter() - self._start_s, rss))
        self._taken += 1
        if len(self.samples) > _MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._stride *= 2
