"""Samples of checkpoints: of one, or of a series that may be stored as differences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from penstock.advisor.decide import KeyPath
from penstock.advisor.sample import Array, Rows, Sample, Source, Values, nbytes, some_of
from penstock.bags.find import natural_key
from penstock.checkpoints import folder
from penstock.core.pack import Entry, PackReader, is_pack
from penstock.errors import DataError, LimitExceeded, UsageError
from penstock.inspect import checkpoint

Structure = dict[KeyPath, tuple[str, tuple[int, ...]]]  # type and shape of each tensor, by name

DELTA_EVERY = 10  # of the series that is measured, and advised
_SERIES, _MEMBERS = 3, 4  # keyframes that are looked at, and differences of each
_LOADED_BYTES = 1 << 30  # of files that must be loaded to look into them, in a series
_LZ4_RATIO = 20  # what a compressed file of numbers may become, at most, to be loaded for a look
_CHANGED = 0.1  # of the bytes of a checkpoint, in tensors whose shape differs from the newest's
_ALIKE = 2.0  # how far the sizes of such files may be apart to be of one series


def file_source(where: Path, budget: int) -> Source:
    """Sample one checkpoint: a pack by its blocks, anything else through `load_checkpoint`."""
    source = Source("checkpoint", str(where), disk_bytes=where.stat().st_size)
    with _opened(where) as (values, meta):
        if meta is None:
            from penstock.advisor.arrays import add_values

            add_values(source, values, budget)
        else:
            source.take_state(values, budget, meta)
    return source


def folder_source(where: Path, budget: int) -> Source:
    """Sample the checkpoints of a folder."""
    source = Source("folder of checkpoints", str(where))
    add_checkpoints(source, where, budget)
    return source


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[Values], dict[str, Any] | None]]:
    """Yield the tensors of a checkpoint, and what its header says; None for another pack."""
    if is_pack(path):
        with checkpoint.open_pack(path) as pack:
            if pack.index.base is not None:
                pack.base()  # a difference to a file that is gone cannot be read
            values = [_packed(pack, entry) for entry in pack.index.entries.values()]
            yield values, pack.index.meta if pack.index.kind == folder.KIND else None
        return
    from penstock.advisor.arrays import values_of
    from penstock.checkpoints.load import load_checkpoint

    size = _loaded_bytes(path)
    available = psutil.virtual_memory().available
    if size > available:
        raise LimitExceeded(
            f"{path} must be loaded to look into it and may take {size} bytes, {available} are "
            "free; free some memory, or save it with AsyncCheckpointSaver"
        )
    values = values_of(load_checkpoint(path))
    yield values, {"state": [list(one.path) for one in values]}  # about what a header takes


def _loaded_bytes(path: Path) -> int:
    return path.stat().st_size * (_LZ4_RATIO if checkpoint.classify(path) == "lz4" else 1)


def _packed(pack: PackReader, entry: Entry) -> Values:
    """Describe a tensor of a pack: flat, for the order on disk does not matter here."""
    count = entry.nbytes // entry.words.itemsize
    return Values((entry.name,), entry.dtype, (count,), partial(_elements, pack, entry))


def _elements(pack: PackReader, entry: Entry, rows: Rows, axis: int) -> Array:
    """Read elements of a flat tensor, by decoding the blocks that they lie in."""
    if not rows:
        return pack.read(entry.name).reshape(-1)
    each = entry.block_bytes // entry.words.itemsize
    pieces = []
    for some in rows:
        for block in range(some.start // each, -(-some.stop // each)):
            first = block * each
            words = pack.read_block(entry.name, block)
            pieces.append(words[max(0, some.start - first) : some.stop - first])
    return np.concatenate(pieces)


def add_checkpoints(source: Source, where: Path, budget: int) -> None:
    """Sample those checkpoints of a folder that have the structure of the newest.

    Of a series a few are taken: keyframes from the first to the last, as a saver would make them,
    and some of the checkpoints that would be stored as differences to each.
    """
    files, left_out = _series(where)
    if not files:
        raise UsageError(f"{where} holds nothing that advise can look into; see `penstock info`")
    runs = _choose(files)
    share = budget // sum(map(len, runs))
    failures = []
    taken: list[list[Sample]] = [[] for _ in runs]
    for run, samples in zip(runs, taken, strict=True):
        for path in run:
            try:
                samples += _take_alike(source, path, share)
            except DataError as error:
                failures.append(error)
    if not any(taken):
        raise failures[0]
    _weigh(source, [samples for samples in taken if samples], len(files))
    for key in source.keys:
        if key.writer == "checkpoint":
            key.raw_bytes *= len(files)  # but in memory there is one at a time
    source.disk_bytes += sum(path.stat().st_size for path in files)
    left_out += sum(map(len, runs)) - sum(map(len, taken))
    if left_out:
        count = f"{left_out} checkpoint{'s' if left_out > 1 else ''}"
        source.notes.append(f"left out: {count} of another structure, or that cannot be read")


def _take_alike(source: Source, path: Path, budget: int) -> list[Sample]:
    """Sample a checkpoint, unless its structure is another than that of those before.

    A tensor that has grown since then (a log, a history) is left out of the sample.
    """
    keys = [key for key in source.keys if key.writer == "checkpoint"]
    with _opened(path) as (values, meta):
        there = _structure(values)
        known = _structure(keys) or there
        if not _alike(there, known):
            return []
        same = [one for one in values if there[one.path] == known[one.path]]
        return [source.take_state(same, budget, meta or {})]


def _structure(tensors: Sequence[Any]) -> Structure:
    """Return types and shapes by name: files may hold their tensors in any order."""
    return {one.path: (one.dtype, tuple(one.shape)) for one in tensors}


def _alike(one: Structure, other: Structure) -> bool:
    """Whether two checkpoints hold the same tensors, by name; a few may differ in their shape."""
    if one.keys() != other.keys():
        return False
    changed = sum(nbytes(*one[name]) for name in one if one[name] != other[name])
    return changed <= _CHANGED * sum(nbytes(*entry) for entry in one.values())


def _weigh(source: Source, runs: Sequence[list[Sample]], count: int) -> None:
    """Tell each sample for how many of the checkpoints it stands, full and as a difference."""
    samples = sum(map(len, runs))
    differences = samples - len(runs)
    source.delta_every = DELTA_EVERY if differences else 0
    full = math.ceil(count / DELTA_EVERY)
    for keyframe, *others in runs:
        keyframe.files = count / samples
        keyframe.share = full / len(runs) if differences else 0.0
        for sample in others:
            sample.files, sample.base = keyframe.files, keyframe
            sample.share = (count - full) / differences


def _choose(files: Sequence[Path]) -> list[list[Path]]:
    """Choose keyframes, and some of the checkpoints that follow each."""
    series, members = _SERIES, _MEMBERS
    if not is_pack(files[0]):
        affordable = max(2, _LOADED_BYTES // max(1, _loaded_bytes(files[0])))
        series = max(1, min(_SERIES, affordable // 2))
        members = max(1, min(_MEMBERS, affordable // series - 1))
    starts = some_of(range(0, len(files), DELTA_EVERY), series)
    return [
        [files[start], *some_of(files[start + 1 : start + DELTA_EVERY], members)]
        for start in starts
    ]


def _series(where: Path) -> tuple[list[Path], int]:
    """List the checkpoints like the newest, in the order they were saved; count the others."""
    packs: dict[Path, tuple[int, Structure]] = {}
    foreign: list[Path] = []
    damaged = 0
    for path in sorted(checkpoint.checkpoint_files(where), key=natural_key):
        try:
            kind = checkpoint.classify(path)
            if kind in ("torch", "pickle", "lz4"):
                foreign.append(path)
            elif kind == "pack":
                with _opened(path) as (values, meta):
                    if meta is not None:
                        packs[path] = meta.get("sequence") or 0, _structure(values)
        except DataError:
            damaged += 1
    if packs:
        files = sorted(packs, key=lambda path: packs[path][0])
        latest = folder.latest(where)
        like = packs[latest if latest in packs else files[-1]][1]
        alike = [path for path in files if _alike(packs[path][1], like)]
    else:
        newest = max(foreign, key=lambda path: path.stat().st_mtime_ns, default=None)
        size = newest.stat().st_size if newest else 0
        alike = [p for p in foreign if size / _ALIKE <= p.stat().st_size <= size * _ALIKE]
    return alike, damaged + len(packs) + len(foreign) - len(alike)
