"""Measure a sample: what each part of penstock makes of each key, by the code that is used.

Samples are stored by the writers themselves, and what the index of such a file says is what the
whole data will become. Checkpoints of a series are stored twice: full, and those between keyframes
as differences, as `delta_every` would do it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from numpy.typing import NDArray

from penstock.advisor.decide import (
    LEAST_RATIO,
    CodecMeasure,
    KeyMeasure,
    Machine,
    Part,
    coded_bytes,
    together,
)
from penstock.advisor.sample import Array, Piece, Sample, Source, nbytes, positions, spread, thinned
from penstock.core.codecs import Codec, Delta, Lz4, Planes, Zstd, bytes_of
from penstock.core.codecs.base import SIGNED, UNSIGNED
from penstock.core.files import write_all
from penstock.core.pack import Entry, Item, PackReader, PackWriter
from penstock.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from penstock.replay.frames import FrameCodec

ROLLOUT_LEVEL = 9  # the default of RolloutStorage
BATCH_LEVEL = 1  # of CompressedDataCollector
CHECKPOINT_LEVEL = 2  # of AsyncCheckpointSaver

_PLAIN_BYTES = 4096  # smaller tensors of a checkpoint are stored as they are
_WORTH_IT = 0.9  # a saver stores a difference if it is at least so much smaller
_TIMED_BYTES, _TIMED_BLOCKS = 2 << 20, 256
_BLOCK_HEADER_BYTES = 24  # per block in the header of a pack
_COMPARED: tuple[Codec, ...] = (Lz4(0), Lz4(9), Zstd(1), Zstd(3))
_COMPARED_KEYS = 16
_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 1 << 20, 1 << 12
_RECORDED_BYTES = 8 << 20
_FRAMES_BYTES, _LEAST_FRAMES_BYTES = 8 << 20, 256 << 10  # of all keys, of one
_BOUND_BYTES, _BOUND_MOST_BYTES, _BOUND_KEYS = 512 << 10, 2 << 20, 64
_SMALL_FRAME_BYTES = 256  # a replay buffer leaves smaller ones alone unless it is told otherwise
_SMALL_CODECS = ("sparse", "lz4")  # in this order: the first is many times faster
_CLEARLY = 0.9
_MANIFEST_BYTES, _RECORD_BYTES = 8000, 1400  # of a saved replay buffer, and per key
_TABLE_BYTES = 4  # per frame of a compressed key in a replay buffer
_HIGHEST = 1000.0  # ratio: a pack is padded to that
_ENOUGH_S = 0.1  # what took so long is not measured again
_COPY_BYTES, _WRITE_BYTES, _FILE_BYTES = 64 << 20, 4 << 20, 64 << 20


def measure_source(source: Source, seconds: float) -> None:
    """Measure every key of a sample; after so long only what the decision needs."""
    until = time.perf_counter() + seconds
    _store(source)
    _compress_batches(source)
    pieces: defaultdict[KeyMeasure, list[Piece]] = defaultdict(list)
    for sample in source.samples:
        for piece in sample.pieces:
            pieces[piece.key].append(piece)
    source.keys.sort(key=lambda key: -key.raw_bytes)
    whole = sum(key.raw_bytes for key in source.keys)
    for rank, key in enumerate(source.keys):
        words = [piece.words for piece in pieces[key]]
        frames = [piece.frames for piece in pieces[key] if piece.frames is not None]
        # Files of before may hold others.
        frames = [some for some in frames if some[0].shape == frames[-1][0].shape]
        budget = max(_LEAST_FRAMES_BYTES, _FRAMES_BYTES * key.raw_bytes // max(1, whole))
        key.sampled_bytes = sum(array.nbytes for array in words)
        if words and rank < _COMPARED_KEYS and time.perf_counter() < until:
            chunks = _chunks(words, min(_CHUNK_BYTES, budget))
            key.compared = tuple(timed(codec, chunks) for codec in _COMPARED)
        if words and rank < _BOUND_KEYS:
            # Where two runs of neighbours in time meet, a difference is wrong, which is rare.
            shaped = frames or [array.reshape(-1) for array in words]
            key.bound = memoryless_bound(thinned(shaped, _BOUND_BYTES))
        if frames:
            key.memory = _hold(key, thinned(frames, budget), source.machine)
        if key.writer == "replay":
            key.stored = key.memory
        elif key.writer == "recording" and words and not key.is_compressed:
            key.stored = timed(Zstd(3), _chunks(words, _RECORDED_BYTES))
        elif key.writer == "dataset" and key.stored:  # by snappy, which is about as fast as LZ4
            like = key.compared[0] if key.compared else raw(source.machine)
            key.stored = replace(like, name=key.stored.name, ratio=key.stored.ratio)
    _prefer_buffer(source)
    source.samples.clear()


def _prefer_buffer(source: Source) -> None:
    """Store frames as a saved replay buffer if that is smaller than a rollout.

    Pictures, mostly: its codecs know of rows.
    """
    for key in source.keys:
        if key.writer != "rollouts" or (key.memory is None and key.raw_bytes):
            return
    overhead = _MANIFEST_BYTES + _RECORD_BYTES * len(source.keys)
    stored = source.overhead_bytes + coded_bytes(source.keys, "")
    buffer = overhead + coded_bytes(source.keys, "buffer")
    if not source.environments and buffer < _CLEARLY * stored:
        source.overhead_bytes = overhead
        for key in source.keys:
            key.writer, key.stored = "replay", key.memory


def _chunks(arrays: Sequence[Array], most_bytes: int) -> list[Array]:
    """Cut about so many bytes out of arrays, from everywhere, in pieces of up to 1 MiB."""
    most = max(_LEAST_CHUNK_BYTES, most_bytes // len(arrays))
    run = min(_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, most // 4))
    chunks: list[Array] = []
    for array in arrays:
        data = np.frombuffer(bytes_of(np.ascontiguousarray(array).reshape(-1)), np.uint8)
        chunks += [data[some] for some in spread(data.size, run, max(1, most // run))]
    return chunks


def _hold(key: KeyMeasure, frames: Array, machine: Machine) -> CodecMeasure | None:
    """Measure what a replay buffer makes of these frames."""
    try:
        from penstock.replay.frames import choose_codec
    except MissingExtra:
        return None
    rows = frames.reshape(len(frames), -1).view(np.uint8)
    for name in ("auto", *(_SMALL_CODECS if rows.shape[1] < _SMALL_FRAME_BYTES else ())):
        with contextlib.suppress(UsageError):  # it cannot hold frames of this size
            codec = choose_codec(frames, name, key.name)
            if codec.id != "raw":
                found = _timed_frames(codec, rows)
                if name == "auto" or found.ratio >= LEAST_RATIO:
                    return found
    return raw(machine)


def _timed_frames(codec: FrameCodec, rows: NDArray[np.uint8]) -> CodecMeasure:
    encode_s = best(lambda: codec.encode(rows))
    data, lengths = codec.encode(rows)
    data = np.ascontiguousarray(data)
    starts = (np.cumsum(lengths) - lengths).astype(np.uint64)
    starts += np.uint64(data.__array_interface__["data"][0])
    out = np.empty_like(rows)
    decode_s = best(lambda: codec.decode(starts, lengths, out))
    ratio = rows.size / (int(lengths.sum()) + _TABLE_BYTES * len(lengths))
    return CodecMeasure(codec.id, ratio, rows.size / encode_s, rows.size / decode_s)


def _compress_batches(source: Source) -> None:
    """Measure what a `CompressedDataCollector` makes of batches [env, time]."""
    parts: defaultdict[KeyMeasure, list[Part]] = defaultdict(list)
    for sample in source.samples:
        axes = sample.axes
        if sample.writer != "rollouts" or not axes or (axes.env, axes.time) != (0, 1):
            continue
        from penstock.rollouts.compressed import compress_key
        from penstock.rollouts.structure import Leaf

        for key, words, _ in sample.pieces:
            if not source.environments or words.shape[:2] != axes.batch:
                continue
            leaf, size = Leaf("", key.path, key.dtype, words), words.nbytes
            compress = partial(compress_key, leaf, True, BATCH_LEVEL)
            found = None
            if column := compress():  # the very first includes what is made ready
                speeds = size / best(compress), size / best(column.decode)
                found = CodecMeasure("series groups", size / column.nbytes, *speeds)
            parts[key].append((size, found))
    for key, some in parts.items():
        found = together(some)
        key.batch = found if found.ratio > 1 else raw(source.machine)


def _store(source: Source) -> None:
    """Write the samples into a temporary folder, and read what became of their keys."""
    full: defaultdict[KeyMeasure, list[Part]] = defaultdict(list)
    series: defaultdict[KeyMeasure, list[Part]] = defaultdict(list)
    written = [sample for sample in source.samples if sample.writer in ("rollouts", "checkpoint")]
    files: defaultdict[str, float] = defaultdict(float)
    for sample in written:
        files[sample.writer] += sample.files
    overhead, plain = 0.0, raw(source.machine)
    measure = partial(_measure_entry, plain, _TIMED_BYTES // max(1, len(written)))
    with tempfile.TemporaryDirectory(prefix="penstock-advise-") as folder, ExitStack() as stack:
        packs: dict[Sample, PackReader] = {}
        for number, sample in enumerate(written):
            path = Path(folder) / f"{number}.pack"
            names = (_write_rollout if sample.writer == "rollouts" else _write_state)(path, sample)
            pack = packs[sample] = stack.enter_context(PackReader(path))
            base, smaller = packs[sample.base] if sample.base else None, {}
            if base is not None:
                path = path.with_suffix(".delta")
                _write_state(path, sample, base)
                delta = stack.enter_context(PackReader(path))
                smaller = {entry.name: entry for entry in _differences(pack, delta)}
            header = pack.index.header_bytes
            for (key, words, _), name in zip(sample.pieces, names, strict=True):
                entry = pack.entry(name)
                found = difference = measure(entry, pack)
                per_file = key.raw_bytes / max(1.0, files[sample.writer])
                more = per_file / entry.block_bytes - entry.blocks
                header += int(_BLOCK_HEADER_BYTES * max(0.0, more))
                full[key].append((words.nbytes * sample.files, found))
                if name in smaller:
                    difference = measure(smaller[name], delta, base)
                if sample.share:
                    series[key].append((words.nbytes * sample.share, difference))
            overhead += header * sample.files
    for key, some in full.items():
        key.stored = together(some)
    for key, some in series.items():
        key.delta = together(some)
    source.overhead_bytes = int(overhead)


def _measure_entry(
    plain: CodecMeasure,
    most_bytes: int,
    entry: Entry,
    pack: PackReader,
    base: PackReader | None = None,
) -> CodecMeasure:
    """Say what became of a tensor; the speed is that of its codec on some of its blocks.

    `plain` is the speed where there is no codec, and of reading what a difference builds on.
    """
    ratio = entry.nbytes / max(1, entry.stored_bytes)
    if entry.codec.id == "raw":
        return replace(plain, ratio=ratio)
    most = min(_TIMED_BLOCKS, max(1, most_bytes // entry.block_bytes))
    chosen = positions(spread(entry.blocks, 1, most))
    blocks = [pack.read_block(entry.name, block) for block in chosen]
    if base is None:
        return replace(timed(entry.codec, blocks), ratio=ratio)
    found = timed(entry.codec, blocks, [base.read_block(entry.name, block) for block in chosen])
    encode_s, decode_s = 1 / found.encode_bytes_s, 1 / found.decode_bytes_s
    read_s = 1 / plain.decode_bytes_s
    return CodecMeasure(found.name, ratio, 1 / (encode_s + read_s), 1 / (decode_s + read_s))


def _write_rollout(path: Path, sample: Sample) -> list[str]:
    from penstock.rollouts.file import write_rollout
    from penstock.rollouts.structure import take_apart

    assert sample.axes is not None
    batch = take_apart({key.path: np.ascontiguousarray(words) for key, words, _ in sample.pieces})
    write_rollout(path, batch, sample.axes, 0, ROLLOUT_LEVEL)
    return [leaf.item for leaf in batch.leaves]


def _write_state(path: Path, sample: Sample, base: PackReader | None = None) -> list[str]:
    planes = Planes(level=CHECKPOINT_LEVEL)
    items = []
    for key, words, _ in sample.pieces:
        # By the size of the tensor, not that of the sample.
        coded = nbytes(key.dtype, key.shape) >= _PLAIN_BYTES
        codec = (Delta(planes) if base else planes) if coded else None
        items.append(Item(repr(key.path), words, key.dtype, codec))
    with PackWriter(path, kind="checkpoint", meta=sample.meta, base=base) as writer:
        writer.write(items)
    return [item.name for item in items]


def _differences(full: PackReader, delta: PackReader) -> list[Entry]:
    """Return the tensors that a saver would store as differences."""
    sizes = {name: entry.stored_bytes for name, entry in full.index.entries.items()}
    coded = [entry for entry in delta.index.entries.values() if entry.codec.id != "raw"]
    smaller = [entry for entry in coded if entry.stored_bytes < sizes[entry.name]]
    before = sum(sizes[entry.name] for entry in coded)
    saved = sum(sizes[entry.name] - entry.stored_bytes for entry in smaller)
    return smaller if before - saved <= _WORTH_IT * before else []


def memoryless_bound(frames: Array) -> float:
    """Return the best ratio that a coder without memory could reach on frames [time, ...].

    That is the order-0 entropy of the byte planes of one of: the values; their differences in time;
    the values without the zeros, which are a bitmap; the differences between what is left; the
    differences to the row above. The smallest counts. A coder that also finds repeats may
    do better.

    Neighbours in time lie along the first axis; complex numbers count as two.
    """
    if frames.dtype.kind == "c":
        half = np.float32 if frames.itemsize == 8 else np.float64
        frames = np.ascontiguousarray(frames)[..., np.newaxis].view(half)
    words = np.ascontiguousarray(frames).view(UNSIGNED[frames.itemsize])
    if not words.size:
        return 1.0
    words = words[: max(2, _BOUND_MOST_BYTES // max(1, words[0].nbytes))]
    bits = min(_candidates(words))
    return min(_HIGHEST, 8 * words.nbytes / bits) if bits else _HIGHEST


def _candidates(words: Array) -> Iterator[float]:
    yield _plane_bits(words)
    yield _plane_bits(_gaps(words))
    series = words.reshape(len(words), -1).T.reshape(-1)  # time comes last
    kept = series[series != 0]
    share = kept.size / series.size
    bitmap = -sum(series.size * p * float(np.log2(p)) for p in (share, 1 - share) if p)
    yield bitmap + _plane_bits(kept)
    yield bitmap + _plane_bits(_gaps(kept))
    if words.ndim >= 3:
        yield _plane_bits(_gaps(np.moveaxis(words, 1, 0)))


def _gaps(words: Array) -> Array:
    """Return the first of the values, then differences, the sign in the lowest bit."""
    gaps = np.diff(words, axis=0).view(SIGNED[words.itemsize])
    codes = ((gaps << 1) ^ (gaps >> (8 * words.itemsize - 1))).view(words.dtype)
    return np.concatenate([words[:1], codes])


def _plane_bits(words: Array) -> float:
    """Return the bits of the byte planes of values, each byte coded by how often it appears."""
    planes = np.ascontiguousarray(words).reshape(-1).view(np.uint8).reshape(-1, words.itemsize)
    bits = 0.0
    for k in range(words.itemsize):
        counts = np.bincount(planes[:, k], minlength=256)
        counts = counts[counts > 0]
        bits -= float(np.sum(counts * np.log2(counts / len(planes))))
    return bits


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
    ratio = min(_HIGHEST, size / max(1, sum(map(len, coded))))
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

    Writing takes about so many seconds.
    """
    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory_bytes=int(psutil.virtual_memory().total),
        copy_bytes_s=_COPY_BYTES / best(lambda: np.copyto(target, source)),
        write_bytes_s=_write_speed(where, seconds),
    )


def _write_speed(where: str, seconds: float) -> float | None:
    folders = [tempfile.gettempdir()]
    with contextlib.suppress(OSError):
        beside = where if os.path.isdir(where) else os.path.dirname(where) or "."
        # Nothing is put beside the data if the temporary folder lies on the same disk.
        if where and os.stat(folders[0]).st_dev != os.stat(beside).st_dev:
            folders.insert(0, beside)
    # Random bytes: some file systems compress.
    chunk = np.random.default_rng(0).integers(0, 256, _WRITE_BYTES, np.uint8).tobytes()
    for folder in folders:
        # The file has no name: whatever happens, it goes with this process.
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begin, took = time.perf_counter(), 0.0
            while file.tell() < _FILE_BYTES and took < seconds:
                write_all(file, chunk)
                os.fsync(file.fileno())
                took = time.perf_counter() - begin
            return file.tell() / took
    return None
