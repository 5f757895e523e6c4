"""Samples of checkpoints: of one, or of a series that may be stored as differences."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from penstock.advisor.arrays import Leaves, add_leaves, leaves_of
from penstock.advisor.sample import Group, Key, Source, Values, nbytes, spread, state_group
from penstock.checkpoints import folder
from penstock.core.pack import Entry, PackReader, is_pack
from penstock.errors import DataError, LimitExceeded, UsageError
from penstock.inspect import checkpoint

Array = NDArray[Any]

DELTA_EVERY = 10  # of the series that is measured, and advised
_SERIES, _MEMBERS = 3, 4  # keyframes that are looked at, and differences of each
_LOADED_BYTES = 1 << 30  # of files that must be loaded to look into them, in a series
_LZ4_RATIO = 20  # what a compressed file of numbers may become, at most, to be loaded for a look
_CHANGED = 0.1  # of the bytes of a checkpoint, in tensors whose shape differs from the newest's
_ALIKE = 2.0  # how far the sizes of such files may be apart to be of one series


@dataclass
class Packed:
    """A tensor in a pack, of which blocks are read."""

    pack: PackReader
    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape: flat, for the order on disk does not matter here."""
        return (self.entry.nbytes // self.entry.words.itemsize,)

    @property
    def dtype(self) -> str:
        """Its type."""
        return self.entry.dtype

    def take(self, rows: Sequence[slice], axis: int) -> Array:
        """Read elements, by decoding the blocks that they lie in."""
        if not rows:
            return self.pack.read(self.entry.name).reshape(-1)
        width = self.entry.words.itemsize
        pieces = []
        for some in rows:
            at = some.start * width
            while at < some.stop * width:
                block = at // self.entry.block_bytes
                start, stop = self.entry.block_range(block)
                end = min(stop, some.stop * width)
                words = self.pack.read_block(self.entry.name, block)
                pieces.append(words[(at - start) // width : (end - start) // width])
                at = end
        return np.concatenate(pieces)


def checkpoint_source(path: Path, budget: int) -> Source:
    """Sample one checkpoint: a pack by its blocks, anything else through `load_checkpoint`."""
    source = Source("checkpoint", str(path), disk_bytes=path.stat().st_size)
    with _opened(path) as (leaves, meta):
        if meta is None:  # a pack, but no checkpoint
            add_leaves(source, leaves, budget)
        else:
            state_group(source, leaves, budget, meta=meta)
    return source


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Leaves, dict[str, Any] | None]]:
    """Yield the tensors of a checkpoint, and what its header says; None for another pack."""
    if is_pack(path):
        with checkpoint.open_pack(path) as pack:
            entries = pack.index.entries.items()
            leaves: Leaves = [((name,), Packed(pack, entry)) for name, entry in entries]
            yield leaves, pack.index.meta if pack.index.kind == folder.KIND else None
        return
    from penstock.checkpoints.load import load_checkpoint

    size = _loaded_bytes(path)
    available = psutil.virtual_memory().available
    if size > available:
        raise LimitExceeded(
            f"{path} must be loaded to look into it and may take {size} bytes, {available} are "
            "free; free some memory, or save it with AsyncCheckpointSaver"
        )
    leaves = leaves_of(load_checkpoint(path))
    yield leaves, {"state": [list(name) for name, _ in leaves]}  # about what a header takes


def _loaded_bytes(path: Path) -> int:
    return path.stat().st_size * (_LZ4_RATIO if checkpoint.classify(path) == "lz4" else 1)


def checkpoints_source(where: Path, budget: int) -> Source:
    """Sample the checkpoints of a folder."""
    source = Source("folder of checkpoints", str(where))
    add_checkpoints(source, where, budget)
    return source


def add_checkpoints(source: Source, where: Path, budget: int) -> None:
    """Sample those checkpoints of a folder that have the structure of the newest.

    Of a series a few are taken: keyframes from the first to the last, as a saver would make them,
    and some of the checkpoints that would be stored as differences to each.

    Raises:
        UsageError: There is none.
        DataError: None of them can be read.
    """
    files, left_out = _series(where)
    if not files:
        raise UsageError(f"{where} holds nothing that advise can look into; see `penstock info`")
    chosen = _chosen(files)
    share = budget // sum(1 + len(picked) for _, picked, _ in chosen)
    first = len(source.groups)
    failures = []
    taken: list[tuple[list[Group], int]] = []
    for keyframe, picked, between in chosen:
        groups: list[Group] = []
        base = len(source.groups)
        for path in (keyframe, *picked):
            try:
                group = _add_alike(source, path, share)
            except DataError as error:
                failures.append(error)
                continue
            if group is None:
                left_out += 1
                continue
            group.base = base if groups else None
            groups.append(group)
        taken.append((groups, between))
    if len(source.groups) == first:
        raise failures[0]
    _weigh(source, taken, len(files))
    source.disk_bytes += sum(path.stat().st_size for path in files)
    left_out += len(failures)
    if left_out:
        count = f"{left_out} checkpoint{'s' if left_out > 1 else ''}"
        source.notes.append(f"left out: {count} of another structure, or that cannot be read")


def _add_alike(source: Source, path: Path, budget: int) -> Group | None:
    """Sample a checkpoint, unless its structure is another than that of those before.

    A tensor that has grown since then (a log, a history) is left out of the sample.
    """
    known = _structure((k.path, k) for k in source.keys if k.writer == "checkpoint")
    with _opened(path) as (leaves, meta):
        found = _structure(leaves)
        if known and not _alike(found, known):
            return None
        same = [leaf for leaf in leaves if not known or found[leaf[0]] == known[leaf[0]]]
        return state_group(source, same, budget, meta=meta)


def _structure(leaves: Iterable[tuple[tuple[str, ...], Key | Values]]) -> dict[Any, Any]:
    """Return type and shape by name: files may hold their tensors in any order."""
    return {path: (some.dtype, tuple(some.shape)) for path, some in leaves}


def _alike(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two checkpoints hold the same tensors, by name; a few may differ in their shape."""
    if one.keys() != other.keys():
        return False
    whole = sum(nbytes(*entry) for entry in one.values())
    changed = sum(nbytes(*one[name]) for name in one if one[name] != other[name])
    return changed <= _CHANGED * whole


def _weigh(source: Source, taken: Sequence[tuple[list[Group], int]], count: int) -> None:
    """Tell each sample for how many of the checkpoints it stands."""
    taken = [(groups, between) for groups, between in taken if groups]
    full = math.ceil(count / DELTA_EVERY)
    sampled = sum(len(groups) for groups, _ in taken)
    compared = sum(between for groups, between in taken if len(groups) > 1)
    for groups, between in taken:
        for group in groups:
            group.files = count / sampled
            if not compared:
                continue
            if group.base is None:
                group.share = full / len(taken)
            else:
                group.share = (count - full) * between / compared / (len(groups) - 1)
    source.delta_every = DELTA_EVERY if compared else 0
    for key in source.keys:
        if key.writer == "checkpoint":
            key.raw_bytes *= count  # but in memory there is one at a time


def _chosen(files: Sequence[Path]) -> list[tuple[Path, list[Path], int]]:
    """Choose keyframes, and some of the checkpoints that follow each; count those, too."""
    starts = range(0, len(files), DELTA_EVERY)
    series, members = _SERIES, _MEMBERS
    if not is_pack(files[0]):
        affordable = max(2, _LOADED_BYTES // max(1, _loaded_bytes(files[0])))
        series = max(1, min(_SERIES, affordable // 2))
        members = max(1, min(_MEMBERS, affordable // series - 1))
    chosen = []
    for some in spread(len(starts), 1, series):
        for start in starts[some]:
            rest = files[start + 1 : start + DELTA_EVERY]
            picked = [p for part in spread(len(rest), 1, members) for p in rest[part]]
            chosen.append((files[start], picked, len(rest)))
    return chosen


def _series(where: Path) -> tuple[list[Path], int]:
    """List the checkpoints like the newest, in the order they were saved; count the others."""
    packs: list[tuple[int, Path, Any]] = []
    others: list[Path] = []
    left_out = 0
    for path in checkpoint.checkpoint_files(where):
        try:
            kind = checkpoint.classify(path)
            if kind in ("torch", "pickle", "lz4"):
                others.append(path)
            elif kind == "pack":
                packs += _pack_header(path)
        except DataError:
            left_out += 1
    newest = folder.latest(where)
    if packs:
        packs.sort(key=lambda pack: (pack[0], _natural(pack[1])))
        like = next((pack for pack in packs if pack[1] == newest), packs[-1])
        alike = [path for _, path, structure in packs if _alike(structure, like[2])]
        return alike, left_out + len(packs) + len(others) - len(alike)
    if not others:
        return [], left_out
    size = max(others, key=lambda path: path.stat().st_mtime_ns).stat().st_size
    alike = [p for p in others if size / _ALIKE <= p.stat().st_size <= size * _ALIKE]
    return sorted(alike, key=_natural), left_out + len(others) - len(alike)


def _pack_header(path: Path) -> list[tuple[int, Path, Any]]:
    """Return when a checkpoint was saved and what it holds; nothing for another pack.

    Raises:
        DataError: It cannot be read, or its keyframe is gone.
    """
    with checkpoint.open_pack(path) as pack:
        if pack.index.kind != folder.KIND:
            return []
        if pack.index.base is not None:
            pack.base()
        structure = {e.name: (e.dtype, e.shape) for e in pack.index.entries.values()}
        sequence = pack.index.meta.get("sequence")
        return [(sequence if isinstance(sequence, int) else 0, path, structure)]


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key by which step_9 comes before step_10."""
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
