"""One rollout as one pack: time comes last; read whole, or by keys, environments and steps."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.codecs import Codec, Layout, Planes, Series, Zstd
from penstock.core.files import storage_error
from penstock.core.pack import Entry, Item, PackReader, PackWriter
from penstock.core.reuse import ReusedMemory
from penstock.core.threads import CORES
from penstock.errors import CorruptFile, UnknownFormat, UsageError
from penstock.rollouts.structure import (
    NONSENSE,
    Axes,
    Batch,
    Builder,
    Key,
    Leaf,
    Picked,
    Selection,
    choose,
    keys_of,
)

KIND = "rollout"
NAME = re.compile(r"rollout_(\d{6,})\.pack")

_PLAIN_BYTES = 4096  # smaller tensors are stored as they are: nothing to gain
# One environment is read by decoding a block of each key; smaller ones make saving slower, and
# those of a series, several of which are one call, hardly.
_BLOCK_BYTES, _SERIES_BLOCK_BYTES = 512 * 1024, 256 * 1024
_BLOCK_ROWS = 128
_LEAST_BLOCK_BYTES = 64 * 1024  # of rows without time, which may be single numbers
_LARGEST_ROW_BYTES = 64 << 20  # of one environment: beyond this a block holds a part of it
_PARALLEL_BYTES = 4 << 20
_WORKERS = min(2, max(1, CORES - 1))  # the caller encodes, too


def codec_for(words: np.dtype[Any], level: int, *, time_last: bool) -> Codec | None:
    """Return the codec for words of a type at a level of the scale 0 to 16.

    0 stores everything as it is. 1 to 9 compress what is worth the time to read it back; above, as
    far as it goes. (The scale is that of LZ4; ours has fewer steps, for more effort buys little.)
    """
    if level == 0:
        return None
    width = words.itemsize // 2 if words.kind == "c" else words.itemsize
    strength = 1 if level <= 9 else 2
    if width == 1:
        return Zstd(2 * strength - 1)
    return Series(strength) if time_last else Planes(level=strength)


def check_level(level: Any) -> int:
    """Refuse a compression level that is not on the scale."""
    if type(level) is not int or not 0 <= level <= 16:
        raise UsageError(f"compression_level={level!r}: give a whole number from 0 to 16")
    return level


def write_rollout(
    path: Path, batch: Batch, axes: Axes, iteration: int, level: int
) -> dict[str, Any]:
    """Write a rollout, durably, and return its sizes."""
    meta = {
        "iteration": iteration,
        "batch": list(axes.batch),
        "env": axes.env,
        "time": axes.time,
        "data": batch.node,
    }
    items = [_item(leaf, axes, level) for leaf in batch.leaves]
    with PackWriter(path, kind=KIND, meta=meta, workers=_WORKERS) as writer:
        writer.write(items)
    index = writer.index
    raw_bytes = sum(leaf.nbytes for leaf in batch.leaves)
    return {"raw_bytes": raw_bytes, "stored_bytes": index.header_bytes + index.data_bytes}


def _item(leaf: Leaf, axes: Axes, level: int) -> Item:
    values = leaf.words()
    if leaf.nbytes < _PLAIN_BYTES:
        return Item(leaf.item, values, leaf.dtype)
    order = axes.order(leaf.shape)
    least_bytes = _LEAST_BLOCK_BYTES if order is None else 0
    codec = codec_for(values.dtype, level, time_last=order is not None)
    if codec is None and axes.env == 0:
        order = None  # environments are together already, and reading in order is faster
    layout = Layout(order) if order and order != tuple(range(len(order))) else None
    row_bytes = leaf.nbytes // leaf.shape[order[0] if order else 0]
    block_bytes = _SERIES_BLOCK_BYTES if isinstance(codec, Series) else _BLOCK_BYTES
    if row_bytes <= _LARGEST_ROW_BYTES:
        most_rows = max(_BLOCK_ROWS, least_bytes // row_bytes)
        block_bytes = min(max(1, block_bytes // row_bytes), most_rows) * row_bytes
    return Item(leaf.item, values, leaf.dtype, codec, layout, block_bytes)


def identity(status: os.stat_result) -> tuple[int, ...]:
    """Tell one content from another under the same name."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class RolloutFile(ExitStack):
    """An open rollout; decodes only what is asked for, and verifies all of that."""

    def __init__(self, path: Path, memory: ReusedMemory) -> None:
        super().__init__()
        try:
            self._pack = self.enter_context(PackReader(path))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error("read", path, error) from error
        weakref.finalize(self, self._pack.close)
        self._memory = memory
        self.digest = self._pack.index.digest
        self.identity = identity(os.fstat(self._pack.fileno()))
        try:
            self.axes, self.entries = self._read_meta()
        except BaseException:
            self.close()
            raise

    def _read_meta(self) -> tuple[Axes, dict[Key, Entry | None]]:
        index, path = self._pack.index, self._pack.path
        if index.kind != KIND:
            raise UnknownFormat(f"{path} is a {index.kind}, not a rollout")
        try:
            meta = index.meta
            axes = Axes(tuple(map(int, meta["batch"])), meta["env"], meta["time"])
            items = dict(keys_of(meta["data"]))
            given = [axis for axis in (axes.env, axes.time) if axis is not None]
            known = [axis for axis in range(len(axes.batch)) if axis in given]
            good = len(axes.batch) <= 2 and sorted(given) == known
            good = good and all(type(axis) is int for axis in given)
        except (CorruptFile, *NONSENSE) as error:
            raise CorruptFile(f"{path} is damaged: its description makes no sense") from error
        if not good or {item for item in items.values() if item} != set(index.entries):
            raise CorruptFile(f"{path} is damaged: its description does not fit its tensors")
        return axes, {key: index.entries[item] if item else None for key, item in items.items()}

    def read(
        self,
        device: torch.device,
        keys: Iterable[Any] | None = None,
        envs: Any = None,
        steps: Any = None,
    ) -> Any:
        """Read the rollout, or a part of it."""
        picked: dict[int, Picked] = {}
        for name, index, axis in (("envs", envs, self.axes.env), ("steps", steps, self.axes.time)):
            if index is None:
                continue
            if axis is None:
                shape = list(self.axes.batch)
                raise UsageError(f"{name}: this rollout of batch size {shape} has no such axis")
            picked[axis] = Picked.of(name, index, self.axes.batch[axis])
        part, chosen = Selection(self.axes, picked), choose(self.entries, keys)
        words: dict[str, NDArray[Any]] = {}
        whole: list[Entry] = []
        for key, entry in self.entries.items():
            if entry is not None and (chosen is None or key in chosen):
                if part.covers(entry.shape):
                    words[entry.name] = self._read_part(entry, part)
                else:
                    whole.append(entry)
        self._pack.check_memory(sum(entry.nbytes for entry in whole))
        targets = []
        for entry in whole:
            # Whoever goes through rollouts one by one gets the same memory for each.
            array = words[entry.name] = self._memory.array(entry.shape, entry.words)
            if entry.layout is None or entry.whole_rows:
                targets.append((entry.name, array))
            else:
                np.copyto(array, self._pack.read(entry.name))
        self._pack.read_into(targets)
        try:
            dtypes = {name: self._pack.entry(name).dtype for name in words}
            return Builder(words, dtypes, device, chosen, part).build(self._pack.index.meta["data"])
        except (CorruptFile, *NONSENSE) as error:
            raise CorruptFile(
                f"{self._pack.path} is damaged: its description makes no sense ({error!r})"
            ) from error

    def read_words(self, key: Key, envs: NDArray[np.int64]) -> NDArray[Any]:
        """Read a tensor of some environments, as words of the pack."""
        entry = self.entries[key]
        assert entry is not None and self.axes.env is not None
        return self._read_part(entry, Selection(self.axes, {self.axes.env: Picked(envs)}))

    def _read_part(self, entry: Entry, part: Selection) -> NDArray[Any]:
        stored_axes = entry.layout.order if entry.layout else tuple(range(len(entry.shape)))
        first, positions = stored_axes[0], {a: p.positions for a, p in part.picked.items()}
        rows = positions.pop(first, np.arange(entry.shape[first]))
        values = self._read_rows(entry, rows).transpose(np.argsort(stored_axes))
        for axis, others in positions.items():
            values = values.take(others, axis)
        return np.ascontiguousarray(values).reshape(part.shape(entry.shape))

    def _read_rows(self, entry: Entry, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Read rows of the first axis on disk, each block of them once."""
        shape = entry.stored_shape
        row_bytes = entry.nbytes // max(1, shape[0])
        self._pack.check_memory(rows.size * row_bytes)
        out = np.empty((rows.size, *shape[1:]), entry.words)
        if not out.nbytes:
            return out
        if not entry.whole_rows:
            parts = [self._pack.read_rows(entry.name, row, row + 1) for row in rows.tolist()]
            return np.concatenate(parts)
        blocks, inside = np.divmod(rows, entry.block_bytes // row_bytes)
        wanted = set(blocks.tolist())
        if 2 * len(wanted) >= entry.blocks and entry.nbytes > _PARALLEL_BYTES:
            stored = self._memory.array((entry.nbytes // entry.words.itemsize,), entry.words)
            self._pack.read_into([(entry.name, stored)])
            return np.take(stored.reshape(shape), rows, axis=0, out=out, mode="clip")
        for block in sorted(wanted):
            content = self._pack.read_block(entry.name, block).reshape(-1, *shape[1:])
            places = blocks == block
            out[places] = content[inside[places]]
        return out


class OpenRollouts:
    """The rollouts that were read last, kept open: a header takes as long as an environment.

    A file is closed when it is no longer here, and nobody reads it any more.
    """

    def __init__(self, memory: ReusedMemory, most: int = 4) -> None:
        self._memory = memory
        self._most = most
        self._lock = threading.Lock()
        self._files: dict[Path, RolloutFile] = {}

    def open(self, path: Path) -> RolloutFile:
        """Open a rollout, or return the one that is open if the file is still the same."""
        with self._lock:
            file = self._files.pop(path, None)
            if file is None or file.identity != identity(os.stat(path)):
                file = RolloutFile(path, self._memory)
            self._files[path] = file
            for old in list(self._files)[: -self._most]:
                del self._files[old]
            return file

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            self._files.clear()
