"""Measure a sample: the ratio and speed of each codec on each key, by the code that is used."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.advisor.decide import LEAST_RATIO
from penstock.advisor.entropy import memoryless_bound
from penstock.advisor.model import CodecMeasure, KeyMeasure, Machine, Measurements
from penstock.advisor.sample import Key, Source, joined, spread
from penstock.advisor.stored import store
from penstock.advisor.timing import best, raw, timed
from penstock.core.codecs import Codec, Lz4, Zstd, bytes_of
from penstock.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from penstock.replay.frames import FrameCodec

Array = NDArray[Any]

BATCH_LEVEL = 1  # the default of CompressedDataCollector
COMPARED: tuple[tuple[str, Codec], ...] = (
    ("lz4 0", Lz4(0)),
    ("lz4 9", Lz4(9)),
    ("zstd 1", Zstd(1)),
    ("zstd 3", Zstd(3)),
)
_CHUNK_BYTES = 1 << 20
_TIMED_BYTES = 2 << 20
_FRAMES_BYTES = 16 << 20
_LEAST_FRAMES_BYTES, _MOST_FRAMES_BYTES = 256 << 10, 8 << 20
_BOUND_BYTES = 512 << 10
_COMPARED_BYTES = 6 << 20  # of all keys together, as the next
_COMPARED_KEYS = 16
_BOUND_KEYS = 64
_SMALL_FRAME_BYTES = 256  # a replay buffer leaves smaller ones alone unless it is told otherwise
_SMALL_CODECS = ("sparse", "lz4")  # in this order: the first is many times faster
_FEW_FRAMES = 512
_SHORT_S = 0.05  # what takes less is measured again
_CLEARLY = 0.9
_MANIFEST_BYTES, _RECORD_BYTES = 8000, 1400  # of a saved replay buffer, and per key
_TABLE_BYTES = 4  # per frame of a compressed key in a replay buffer


def measure_source(source: Source, machine: Machine, seconds: float) -> Measurements:
    """Measure every key of a sample.

    Args:
        source: The sample.
        machine: Where it is measured.
        seconds: After so long nothing is measured any more that the decision does not need.
    """
    until = time.perf_counter() + seconds
    stored = store(source, machine)
    overhead = stored.overhead_bytes
    batches = _batches(source, machine)
    keys = []
    order = sorted(range(len(source.keys)), key=lambda n: -source.keys[n].raw_bytes)
    whole = sum(key.raw_bytes for key in source.keys)
    for rank, number in enumerate(order):
        key = source.keys[number]
        share = key.raw_bytes / max(1, whole)
        compare = rank < _COMPARED_KEYS and time.perf_counter() < until
        measured = _measure_key(key, stored.codecs.get(number), machine, share, compare)
        bound = _bound(key) if rank < _BOUND_KEYS else None
        delta = stored.differences.get(number)
        keys.append(replace(measured, batch=batches.get(number), delta=delta, bound=bound))
    if not source.environments and _buffer_is_smaller(keys, overhead):
        keys = [replace(key, writer="replay", stored=key.memory) for key in keys]
        overhead = _buffer_overhead(keys)
    return Measurements(
        kind=source.kind,
        where=source.where,
        on_disk=bool(source.where),
        frames=source.frames,
        environments=source.environments,
        overhead_bytes=overhead,
        disk_bytes=source.disk_bytes,
        delta_every=source.delta_every if stored.differences else 0,
        notes=tuple(source.notes),
        slots=source.slots,
        keys=tuple(keys),
        machine=machine,
    )


def _buffer_is_smaller(keys: Sequence[KeyMeasure], overhead: int) -> bool:
    """Tell whether frames are stored better as a saved replay buffer than as a rollout.

    Pictures, mostly: its codecs know of rows.
    """
    stored, buffer = float(overhead), float(_buffer_overhead(keys))
    for key in keys:
        if key.writer != "rollouts" or (key.memory is None and key.raw_bytes):
            return False
        stored += key.raw_bytes / (key.stored.ratio if key.stored else 1.0)
        buffer += key.memory_bytes / (key.memory.ratio if key.memory else 1.0)
    return buffer < _CLEARLY * stored


def _buffer_overhead(keys: Sequence[KeyMeasure]) -> int:
    """About what the headers of a saved replay buffer take."""
    return _MANIFEST_BYTES + _RECORD_BYTES * len(keys)


def _measure_key(
    key: Key, stored: CodecMeasure | None, machine: Machine, share: float, compare: bool
) -> KeyMeasure:
    taken = [sample.words for sample in key.samples if sample.words.size]
    frames = [s.frames for s in key.samples if s.frames is not None and s.frames.size]
    fixed = key.note.startswith("already compressed")
    compared = _compare(taken, int(share * _COMPARED_BYTES)) if compare and taken else ()
    most = min(_MOST_FRAMES_BYTES, max(_LEAST_FRAMES_BYTES, int(share * _FRAMES_BYTES)))
    memory = _memory(key, _thinned(frames, most), machine) if frames else None
    if key.writer == "replay":
        stored = memory
    elif key.writer == "recording" and taken and not fixed:
        chunks = _chunks(taken, _TIMED_BYTES * 4)
        stored = timed("zstd 3", Zstd(3), chunks)
    elif key.stored_ratio is not None:
        speed = next((c for c in compared if c.name == "lz4 0"), raw(machine))  # like snappy
        ratio = key.stored_ratio
        stored = CodecMeasure("parquet", ratio, speed.encode_bytes_s, speed.decode_bytes_s)
    return KeyMeasure(
        name=".".join(key.path) or "data",
        path=key.path,
        writer=key.writer,
        dtype=key.dtype,
        shape=tuple(key.shape),
        raw_bytes=key.raw_bytes,
        memory_bytes=key.memory_bytes,
        sampled_bytes=sum(words.nbytes for words in taken),
        stored=stored,
        memory=memory,
        compared=compared,
        note=key.note,
    )


def _batches(source: Source, machine: Machine) -> dict[int, CodecMeasure]:
    """Measure what a `CompressedDataCollector` makes of batches [env, time]."""
    before: Counter[int] = Counter()
    coded: Counter[int] = Counter()
    seconds: dict[int, list[float]] = {}
    for group in source.groups:
        lead, env, when = group.axes
        if group.writer != "rollouts" or (env, when) != (0, 1) or not source.environments:
            continue
        from penstock.rollouts.compressed import compress_key
        from penstock.rollouts.structure import Leaf

        for key, words in group.items:
            if words.shape[:2] != lead:
                continue
            leaf = Leaf(str(key), source.keys[key].path, source.keys[key].dtype, words)
            for _ in range(1 if seconds else 2):  # the very first includes what is made ready
                begin = time.perf_counter()
                column = compress_key(leaf, True, BATCH_LEVEL)
                middle = time.perf_counter()
                if column:
                    column.decode()
                end = time.perf_counter()
            spent = seconds.setdefault(key, [1e-9, 1e-9])
            spent[0] += middle - begin
            spent[1] += end - middle
            before[key] += words.nbytes
            coded[key] += column.nbytes if column else words.nbytes
    return {
        key: CodecMeasure(
            "series groups", size / max(1, coded[key]), *(size / s for s in seconds[key])
        )
        if coded[key] < size
        else raw(machine)
        for key, size in before.items()
    }


def _chunks(arrays: Sequence[Array], most_bytes: int) -> list[Array]:
    """Cut about so many bytes out of arrays, from everywhere, in pieces of up to 1 MiB."""
    found: list[Array] = []
    for array in arrays:
        data = np.frombuffer(bytes_of(np.ascontiguousarray(array).reshape(-1)), np.uint8)
        most = max(1 << 12, most_bytes // len(arrays))
        run = min(_CHUNK_BYTES, max(1 << 12, most // 4))
        found += [data[some] for some in spread(data.size, run, max(1, most // run))]
    return found


def _compare(arrays: Sequence[Array], most_bytes: int) -> tuple[CodecMeasure, ...]:
    chunks = _chunks(arrays, min(_CHUNK_BYTES, max(1 << 16, most_bytes)))
    return tuple(timed(name, codec, chunks) for name, codec in COMPARED)


def _thinned(frames: Sequence[Array], most_bytes: int) -> Array:
    """Return about so many bytes of frames, runs from everywhere."""
    each = most_bytes // len(frames)
    parts = []
    for some in frames:
        count = max(1, each // max(1, some[0].nbytes))
        run = max(1, count // 48)
        parts.append(joined(some, spread(len(some), run, max(1, count // run)), 0))
    return np.concatenate(parts)


def _bound(key: Key) -> float | None:
    arrays = [s.words if s.frames is None else s.frames for s in key.samples if s.words.size]
    if not arrays:
        return None
    arrays = [array.reshape(1) if array.ndim == 0 else array for array in arrays]
    # Runs of neighbours in time: where two runs meet, a difference is wrong, which is rare.
    return memoryless_bound(_thinned(arrays, _BOUND_BYTES))


def _memory(key: Key, frames: Array, machine: Machine) -> CodecMeasure | None:
    """Measure what a replay buffer makes of these frames."""
    try:
        from penstock.replay.frames import choose_codec
    except MissingExtra:
        return None
    sample = np.ascontiguousarray(frames)
    where = key.path[-1] if key.path else "the data"
    rows = sample.reshape(len(sample), -1).view(np.uint8)
    codec = choose_codec(sample, "auto", where)
    if codec.id != "raw":
        return _frame_measure(codec, rows)
    if rows.shape[1] < _SMALL_FRAME_BYTES:
        few = np.ascontiguousarray(rows[:: max(1, len(rows) // _FEW_FRAMES)])
        for name in _SMALL_CODECS:
            with contextlib.suppress(UsageError):  # it cannot hold frames of this size
                codec = choose_codec(sample, name, where)
                if few.size >= LEAST_RATIO * _coded_bytes(codec.encode(few)[1]):
                    return _frame_measure(codec, rows)
    return raw(machine)


def _coded_bytes(lengths: NDArray[np.int64]) -> int:
    return int(lengths.sum()) + _TABLE_BYTES * len(lengths)


def _frame_measure(codec: FrameCodec, rows: NDArray[np.uint8]) -> CodecMeasure:
    begin = time.perf_counter()
    data, lengths = codec.encode(rows)
    encode_s = time.perf_counter() - begin
    if encode_s < _SHORT_S:
        encode_s = best(lambda: codec.encode(rows))
    data = np.ascontiguousarray(data)
    starts = (np.cumsum(lengths) - lengths).astype(np.uint64)
    starts += np.uint64(data.__array_interface__["data"][0])
    out = np.empty_like(rows)
    decode_s = best(lambda: codec.decode(starts, lengths, out))
    ratio = rows.size / _coded_bytes(lengths)
    return CodecMeasure(codec.id, ratio, rows.size / encode_s, rows.size / decode_s)
