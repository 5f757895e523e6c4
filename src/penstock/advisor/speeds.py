"""How fast it goes: codecs on blocks of a sample, copies in memory, the disk of the data."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil
from numpy.typing import NDArray

from penstock.advisor.decide import CodecMeasure, Machine
from penstock.core.codecs import Codec, Delta
from penstock.core.files import write_all

Array = NDArray[Any]

HIGHEST = 1000.0  # ratio: a pack is padded to that
_ENOUGH_S = 0.1  # what took so long is not measured again
_COPY_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
_FILE_BYTES = 64 << 20


def raw(machine: Machine) -> CodecMeasure:
    """Return what leaving data as it is takes: a copy."""
    return CodecMeasure("raw", 1.0, machine.copy_bytes_s, machine.copy_bytes_s)


def timed(codec: Codec, blocks: Sequence[Array], bases: Sequence[Array] = ()) -> CodecMeasure:
    """Encode and decode blocks, in one thread; a `Delta` needs as many bases."""
    size = sum(block.nbytes for block in blocks)
    none: list[Array | None] = [None] * len(blocks)
    pairs = list(zip(blocks, bases or none, strict=True))
    coded: list[bytes] = []
    out = [np.empty_like(block) for block in blocks]

    def encode() -> None:
        coded[:] = [b"".join(codec.encode(block, base)) for block, base in pairs]

    def decode() -> None:
        for data, target, (_, base) in zip(coded, out, pairs, strict=True):
            codec.decode(memoryview(data), target, base)

    # What is made ready at the first use is no part of the speed.
    first = b"".join(codec.encode(*pairs[0]))
    codec.decode(memoryview(first), out[0], pairs[0][1])
    encode_s = best(encode)
    ratio = min(HIGHEST, size / max(1, sum(map(len, coded))))
    return CodecMeasure(_name(codec), ratio, size / encode_s, size / best(decode))


def _name(codec: Codec) -> str:
    """Name a codec and its level."""
    if isinstance(codec, Delta):
        return f"{codec.id} {_name(codec.inner)}"
    level = codec.config().get("level")
    return codec.id if level is None else f"{codec.id} {level}"


def best(work: Callable[[], object]) -> float:
    """Return the least seconds that some work took."""
    least, spent = float("inf"), 0.0
    for _ in range(3):
        begin = time.perf_counter()
        work()
        took = time.perf_counter() - begin
        least, spent = min(least, took), spent + took
        if spent > _ENOUGH_S:
            break
    return max(least, 1e-9)


def measure_machine(where: str, seconds: float) -> Machine:
    """Measure, with the disk that the data lies on; leaves nothing behind.

    Writing and reading take about so many seconds, each.
    """
    write, read = _disk(where, seconds)
    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory_bytes=int(psutil.virtual_memory().total),
        copy_bytes_s=_COPY_BYTES / best(lambda: np.copyto(target, source)),
        write_bytes_s=write,
        read_bytes_s=read,
    )


def _disk(where: str, seconds: float) -> tuple[float | None, float | None]:
    folders = [Path(tempfile.gettempdir())]
    with contextlib.suppress(OSError):
        beside = Path(where) if os.path.isdir(where) else Path(where).parent
        # Nothing is put beside the data if the temporary folder lies on the same disk.
        if where and os.stat(folders[0]).st_dev != os.stat(beside).st_dev:
            folders.insert(0, beside)
    for folder in folders:
        # The file has no name: whatever happens, it goes with this process.
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _measure_file(file, seconds)
    return None, None


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
