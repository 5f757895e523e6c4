"""Write a pack as a stream of blocks: what is encoded and not yet written is a few of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from penstock.core.codecs import Codec, Layout, Raw, Series
from penstock.core.codecs.base import Buffer, as_unsigned
from penstock.core.files import NewFile, storage_error, write_all
from penstock.core.pack.format import (
    ALIGNMENT,
    DTYPES,
    MAX_DIMENSIONS,
    Entry,
    Index,
    check_limits,
    render,
)
from penstock.core.pack.reader import PackReader
from penstock.core.reuse import BLOCKS
from penstock.core.threads import INLINE_BYTES, parallel_map
from penstock.errors import LimitExceeded, UsageError

DEFAULT_BLOCK_BYTES = 1 << 20
_WRITEBACK_BYTES = 8 << 20


@dataclass
class Item:
    """A tensor to write.

    Args:
        name: Unique in the pack.
        values: The elements; bfloat16 and float8 come as the unsigned words of their bits.
        dtype: A name of `DTYPES`; by default that of `values`.
        codec: How each block is coded; `Delta` takes its base from the writer's base pack.
        layout: Order of the axes on disk.
        block_bytes: Bytes per block before coding; a partial read decodes whole blocks.
    """

    name: str
    values: NDArray[Any]
    dtype: str | None = None
    codec: Codec | None = None
    layout: Layout | None = None
    block_bytes: int = DEFAULT_BLOCK_BYTES


_Block = tuple[Entry, NDArray[Any], int]
# Of a series several blocks, with the number of the first.
_Coded = tuple[Entry, list[Buffer], int]  # with the checksum


def _header_room(index: Index) -> int:
    """Return the most that the header may need: it is written last, and before the data."""
    entries = {
        name: replace(
            entry,
            sizes=[4 * entry.block_bytes + 4096] * entry.blocks,
            crcs=[2**32 - 1] * entry.blocks,
        )
        for name, entry in index.entries.items()
    }
    return len(render(replace(index, entries=entries))) + 16 * len(entries)  # for their checksums


def _is_odd(entry: Entry) -> bool:
    """Tell whether a plain tensor leaves what follows it unaligned."""
    return entry.plain and entry.nbytes % ALIGNMENT != 0


def _blocks(entry: Entry, item: Item) -> Iterator[_Block]:
    """Cut a tensor: flat, or rows with the axes as on disk, put in order when they are encoded."""
    values = item.values
    if not entry.layout or not entry.whole_rows:
        stored = values.transpose(entry.layout.order) if entry.layout else values
        values = np.ascontiguousarray(stored).reshape(-1)
    (whole,) = entry.cut(values, max(1, entry.blocks)) if entry.blocks else (values,)
    step = max(1, DEFAULT_BLOCK_BYTES // entry.block_bytes) if _in_one_call(entry, whole) else 1
    for number, view in enumerate(entry.cut(values, step)):
        yield entry, view, number * step


def _in_one_call(entry: Entry, values: NDArray[Any]) -> bool:
    """Tell whether blocks of a series, as on disk or not, can be encoded in one compiled call."""
    if not isinstance(entry.codec, Series) or not entry.codec.compiled:
        return False
    if entry.layout is None or values.ndim == 1:
        return values.flags.c_contiguous
    return entry.turn is not None and entry.layout.undo(values).flags.c_contiguous


def _grouped(blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """Put small blocks together: handing one to a thread costs as much as encoding 64 kB."""
    group: list[_Block] = []
    size = 0
    for block in blocks:
        if group and size + block[1].nbytes > DEFAULT_BLOCK_BYTES:
            yield group
            group, size = [], 0
        group.append(block)
        size += block[1].nbytes
    if group:
        yield group


class PackWriter(NewFile):
    """Write tensors into a pack that appears under its name only when it is whole and durable.

    `write` takes all tensors and makes them durable under a temporary name, so that `publish` is
    only a rename. Leaving the `with` block publishes; an exception leaves no trace.

    Args:
        path: Where the pack will appear.
        kind: What it holds: "checkpoint", "rollout", "replay", ….
        meta: JSON-able settings and scalars, stored in the index.
        base: The pack that `Delta` items refer to; it must lie in the same folder.
        workers: Threads that encode; `nice` and `patient` are those of `parallel_map`.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        kind: str = "tensors",
        meta: dict[str, Any] | None = None,
        base: PackReader | None = None,
        workers: int = 2,
        nice: int = 0,
        patient: Callable[[], bool] = lambda: False,
    ) -> None:
        self._base = base
        self._workers = workers
        self._nice = nice
        self._patient = patient
        if base and base.index.base:
            raise UsageError(f"{base.path.name} is a difference itself; give its base")
        link = {"file": base.path.name, "digest": base.index.digest} if base else None
        self.index = Index(kind, meta or {}, {}, link)
        try:
            json.dumps(self.index.meta, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{path}: its meta is not JSON ({error})") from error
        self._pushed = 0
        self._written = False
        super().__init__(path)

    def write(self, items: Sequence[Item]) -> None:
        """Write all tensors, encoding their blocks in parallel, and bring them to the disk."""
        self.check_open()
        if self._written:
            raise UsageError(f"{self.path}: give all tensors in one call")
        try:
            self._write(items)
        except BaseException as error:
            self.abandon()  # an entry may be half written: such a pack must never get its name
            if isinstance(error, OSError):
                raise storage_error("write", self.path, error) from error
            if isinstance(error, LimitExceeded):
                raise LimitExceeded(f"cannot write {self.path}: {error}") from error
            raise
        self._written = True

    def publish(self) -> None:
        """Give the pack its name."""
        if not self._written:
            self.write([])
        super().publish()

    def _write(self, items: Sequence[Item]) -> None:
        started: dict[str, tuple[Entry, Item]] = {}
        for item in items:
            if item.name in started or item.name == "__metadata__":
                raise UsageError(f"{item.name}: this name is taken in {self.path.name}")
            started[item.name] = (self._entry(item), item)
        # Sizes that are no multiple of the alignment come last, wide elements first, so that every
        # plain tensor starts at a multiple of its element size.
        ordered = sorted(
            started.values(), key=lambda pair: -pair[0].words.itemsize if _is_odd(pair[0]) else -99
        )
        self.index.entries = {entry.name: entry for entry, _ in ordered}
        room = _header_room(self.index)
        self.file.seek(room)
        blocks = (block for entry, item in ordered for block in _blocks(entry, item))
        small = sum(item.values.nbytes for item in items) <= INLINE_BYTES
        coded = parallel_map(
            lambda group: [coded for block in group for coded in self._encode(*block)],
            _grouped(blocks),
            name="encode",
            helpers=0 if small else self._workers,
            size=lambda group: 2 * sum(values.nbytes for _, values, _ in group),
            # Of less the only helper waits while the caller, who encodes as well, is at its block.
            limit_bytes=4 * max(2, self._workers) * DEFAULT_BLOCK_BYTES,
            nice=self._nice,
            patient=self._patient,
        )
        with closing(coded):
            for group in coded:
                for result in group:
                    self._store(*result)
        header = render(self.index, room)
        self.index.header_bytes = len(header)
        self.file.seek(0)
        write_all(self.file, header)
        self.sync()

    def _entry(self, item: Item) -> Entry:
        dtype = item.dtype or item.values.dtype.name
        if dtype not in DTYPES or DTYPES[dtype].words != item.values.dtype:
            raise UsageError(f"{item.name}: dtype {dtype} cannot be stored in a pack")
        if item.values.ndim > MAX_DIMENSIONS:
            raise UsageError(f"{item.name}: {item.values.ndim} dimensions, over {MAX_DIMENSIONS}")
        if item.name.encode(errors="replace").decode() != item.name:
            raise UsageError(f"{item.name!r}: a name must be text that UTF-8 can hold")
        nbytes, width = item.values.nbytes, item.values.itemsize
        codec = item.codec if item.codec and nbytes else Raw()
        entry = Entry(
            name=item.name,
            dtype=dtype,
            shape=tuple(item.values.shape),
            codec=codec,
            block_bytes=max(width, item.block_bytes // width * width),
            plain=codec.id == "raw" and DTYPES[dtype].tag is not None,
            layout=item.layout,
        )
        if _is_odd(entry):
            if nbytes > DEFAULT_BLOCK_BYTES:
                entry.plain = False  # as a padded blob it keeps what follows aligned
            else:
                entry.block_bytes = nbytes
        if codec.needs_base:
            if self._base is None:
                raise UsageError(f"{entry.name}: a difference needs a base pack")
            other = self._base.entry(entry.name)
            entry.block_bytes = other.block_bytes
            if not other.same_blocks(entry):  # it could not be read back
                raise UsageError(f"{entry.name}: its base has another dtype, shape or layout")
        check_limits(entry)
        return entry

    def _encode(self, entry: Entry, values: NDArray[Any], number: int) -> Iterator[_Coded]:
        codec = entry.codec
        if isinstance(codec, Series) and _in_one_call(entry, values):
            turn = (0, 0)
            if entry.layout and entry.turn and values.ndim > 1:
                turn, values = entry.turn, entry.layout.undo(values)
            words = as_unsigned(values)
            for data, crc in codec.encode_blocks(words, entry.block_bytes // words.itemsize, turn):
                yield entry, [data], crc
            return
        if values.ndim > 1:
            stored = BLOCKS.array(values.shape, values.dtype)
            np.copyto(stored, values)
            values = stored.reshape(-1)
        base = None
        if codec.needs_base:
            assert self._base is not None
            base = self._base.read_block(entry.name, number)
        buffers = codec.encode(values, base)
        kept = values
        if codec.lossy:  # the checksum covers what a reader gets
            kept = np.empty_like(values)
            codec.decode(memoryview(b"".join(buffers)), kept, base)
        yield entry, buffers, int(isal_zlib.crc32(kept.view(np.uint8)))

    def _store(self, entry: Entry, buffers: list[Buffer], crc: int) -> None:
        entry.sizes.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        entry.crcs.append(crc)
        for buffer in buffers:
            write_all(self.file, buffer)
        if len(entry.sizes) == entry.blocks:
            write_all(self.file, bytes(entry.padded_bytes() - sum(entry.sizes)))
        # Let the disk begin early, so that the fsync at the end finds less to do: on Linux this
        # advice starts the write-back of dirty pages and returns at once.
        length = self.file.tell() - self._pushed
        if length >= _WRITEBACK_BYTES:
            os.posix_fadvise(self.file.fileno(), self._pushed, length, os.POSIX_FADV_DONTNEED)
            self._pushed += length
