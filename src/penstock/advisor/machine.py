"""What this machine does: copying in memory, writing to the disk of the data, reading from it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil

from penstock.advisor.model import Machine
from penstock.core.files import write_all

_COPY_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
_FILE_BYTES = 64 << 20


def measure_machine(where: Path | None, seconds: float) -> Machine:
    """Measure; takes about `seconds`, and leaves nothing behind.

    Args:
        where: What the data is; the disk it lies on is measured. None for the temporary folder's.
        seconds: What writing and reading may take, each.
    """
    write, read = _disk(where, seconds)
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory_bytes=int(psutil.virtual_memory().total),
        copy_bytes_s=_copy_speed(),
        write_bytes_s=write,
        read_bytes_s=read,
    )


def _copy_speed() -> float:
    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begin)
    return _COPY_BYTES / best


def _disk(where: Path | None, seconds: float) -> tuple[float | None, float | None]:
    folders = [Path(tempfile.gettempdir())]
    if where is not None:
        beside = where if where.is_dir() else where.parent
        # Nothing is put beside the data if the temporary folder lies on the same disk.
        if not _same_disk(folders[0], beside):
            folders.insert(0, beside)
    for folder in folders:
        # The file has no name: whatever happens, it goes with this process.
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _measure_file(file, seconds)
    return None, None


def _same_disk(one: Path, other: Path) -> bool:
    try:
        return os.stat(one).st_dev == os.stat(other).st_dev
    except OSError:
        return True


def _measure_file(file: BinaryIO, seconds: float) -> tuple[float, float | None]:
    # Random bytes: some file systems compress.
    chunk = np.random.default_rng(0).integers(0, 256, _CHUNK_BYTES, np.uint8).tobytes()
    size, begin = 0, time.perf_counter()
    while size < _FILE_BYTES and time.perf_counter() - begin < seconds:
        write_all(file, chunk)
        os.fsync(file.fileno())
        size += len(chunk)
    write = size / (time.perf_counter() - begin)
    return write, _read_speed(file.fileno(), size)


def _read_speed(descriptor: int, size: int) -> float | None:
    """Read the file back, if it can be shown that it does not come out of the cache."""
    if not hasattr(os, "RWF_NOWAIT") or not hasattr(os, "posix_fadvise"):
        return None
    os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
    buffer = bytearray(_CHUNK_BYTES)
    for at in (0, size // 2, size - 4096):
        try:
            os.preadv(descriptor, [memoryview(buffer)[:1]], at, os.RWF_NOWAIT)
        except BlockingIOError:
            continue  # it would have to wait for the disk: good
        except OSError:
            return None
        return None
    os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    for at in range(0, size, _CHUNK_BYTES):
        os.preadv(descriptor, [buffer], at)
    return size / (time.perf_counter() - begin)
