"""Read a pack: verify everything that is handed out, decode only what is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from isal import isal_zlib
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.core.codecs import Series
from penstock.core.codecs.base import as_unsigned, expect
from penstock.core.pack.format import Entry, Index, read_index
from penstock.core.reuse import BLOCKS
from penstock.core.threads import parallel_list
from penstock.errors import CorruptFile, DataError, LimitExceeded, UsageError

_TASK_BYTES = 4 << 20

BaseFinder = Callable[[Path, dict[str, str]], Path]


class PackReader:
    """An open pack. Nothing it returns was not verified.

    A delta opens its base on demand and checks that it is the very file it was made against;
    `find_base` tells where it lies, by default beside the delta.
    """

    def __init__(
        self,
        path: Path | str,
        find_base: BaseFinder = lambda path, link: path.parent / link["file"],
    ) -> None:
        # A link such as `latest` is followed first: a base is named relative to the real file.
        self.path = Path(path).resolve()
        self._find_base = find_base
        self._base: PackReader | None = None
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            self.index: Index = read_index(self.path, self._descriptor)
        except BaseException:
            self.close()
            raise
        self.size_bytes = self.index.header_bytes + self.index.data_bytes

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in file order."""
        return list(self.index.entries)

    def entry(self, name: str) -> Entry:
        """Return what the index says of a tensor."""
        try:
            return self.index.entries[name]
        except KeyError:
            raise UsageError(f"{self.path.name} has no tensor {name!r}") from None

    def read(self, name: str) -> NDArray[Any]:
        """Read a whole tensor, in its original shape."""
        entry = self.entry(name)
        self.check_memory(entry.nbytes)
        flat = np.empty(entry.nbytes // entry.words.itemsize, entry.words)
        self.read_into([(name, flat)])
        stored = flat.reshape(entry.stored_shape)
        return entry.layout.undo(stored) if entry.layout else stored

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read rows [start, stop) of the first axis on disk, decoding only their blocks.

        With a layout, the axes of the result are in the order on disk: `entry.layout.undo` them.
        """
        entry = self.entry(name)
        shape = entry.stored_shape
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise UsageError(f"rows {start}:{stop} are not in {name!r} of shape {list(shape)}")
        row_bytes = entry.nbytes // shape[0] if shape[0] else 0
        first, last = start * row_bytes, stop * row_bytes
        width = entry.words.itemsize
        self.check_memory(last - first)
        out = np.empty((last - first) // width, entry.words)
        for block in range(first // entry.block_bytes, -(-last // entry.block_bytes)):
            begin = block * entry.block_bytes
            low = max(begin, first)
            content = self.read_block(name, block)[(low - begin) // width : (last - begin) // width]
            out[(low - first) // width :][: content.size] = content
        return out.reshape((stop - start, *shape[1:]))

    def read_block(self, name: str, block: int) -> NDArray[Any]:
        """Read one block as a flat array."""
        entry = self.entry(name)
        out = BLOCKS.array((entry.span(block) // entry.words.itemsize,), entry.words)
        self._decode(entry, block, out)
        return out

    def read_into(self, targets: Iterable[tuple[str, NDArray[Any]]]) -> None:
        """Fill arrays of the entries' `words` type with whole tensors, several blocks at a time.

        Contiguous 1-D ones are filled in disk order; those of the tensor's own shape get each block
        put in its place while it is in the cache, whatever the order on disk (`Entry.whole_rows`
        only).
        """
        tasks: list[Callable[[], None]] = []
        total = 0
        for name, out in targets:
            entry = self.entry(name)
            if out.nbytes != entry.nbytes:
                raise UsageError(f"{name}: {entry.nbytes} bytes do not fit {out.nbytes}")
            total += entry.nbytes
            tasks += self._tasks(entry, out)
            self._check_padding(entry)
            if entry.codec.needs_base:
                self.base()  # opened once, before the threads race for it
        parallel_list(lambda task: task(), tasks, name="unpack", nbytes=total)

    def _tasks(self, entry: Entry, out: NDArray[Any]) -> Iterator[Callable[[], None]]:
        """Cut the work of filling an array into pieces of a few megabytes."""
        placed = entry.layout is not None and out.ndim > 1
        if placed and not entry.whole_rows:
            raise UsageError(f"{entry.name}: its blocks are parts of rows; read it in disk order")
        turn = entry.turn if placed else (0, 0)
        pieces = list(entry.cut(out))
        if isinstance(entry.codec, Series) and turn is not None and out.flags.c_contiguous:
            words = as_unsigned(out.view(entry.words))
            step = max(1, _TASK_BYTES // entry.block_bytes)
            for first in range(0, entry.blocks, step):
                some = pieces[first : first + step]
                yield partial(self._decode_series, entry, first, some, turn, words)
            return
        for block, piece in enumerate(pieces):
            yield partial(self._decode, entry, block, piece)

    def verify(self) -> Iterator[tuple[str, str]]:
        """Decode everything in little memory; yield (tensor, problem) for each bad tensor."""
        for name, entry in self.index.entries.items():
            try:
                self._check_padding(entry)
                for block in range(entry.blocks):
                    self.read_block(name, block)
            except DataError as error:
                yield name, str(error)

    def fileno(self) -> int:
        """Return the descriptor of the open file."""
        return self._descriptor

    def close(self) -> None:
        """Close the file and its base."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._base is not None:
            self._base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def base(self) -> PackReader:
        """Open the base of a delta, checking that it is the file that was meant."""
        if self._base is None:
            link = self.index.base
            if link is None:
                raise CorruptFile(f"{self.path} is damaged: a delta without a base")
            path, problem = self._find_base(self.path, link), f"{self.path} is a difference to"
            try:
                base = PackReader(path, self._find_base)
            except (OSError, ValueError) as error:
                missing = isinstance(error, FileNotFoundError)
                why = "is not beside it; put both in one folder" if missing else f"fails: {error}"
                raise CorruptFile(f"{problem} {link['file']}, which {why}") from error
            if base.index.digest != link["digest"] or base.index.base is not None:
                base.close()
                raise CorruptFile(f"{problem} another {link['file']} than the one beside it")
            self._base = base
        return self._base

    def _decode_series(
        self,
        entry: Entry,
        first: int,
        pieces: list[NDArray[Any]],
        turn: tuple[int, int],
        words: NDArray[Any],
    ) -> None:
        """Decode and verify consecutive blocks in one call; one by one where that fails."""
        last = first + len(pieces)
        sizes, crcs = entry.sizes[first:last], entry.crcs[first:last]
        data = BLOCKS.array((sum(sizes),), np.uint8)
        got = os.preadv(self._descriptor, [data.data], self._position(entry, first))
        counts = [piece.nbytes // words.itemsize for piece in pieces]
        start = first * entry.block_bytes // words.itemsize
        out = words[start : start + sum(counts)]
        assert isinstance(entry.codec, Series)
        if got != data.size or not entry.codec.decode_blocks(data, sizes, counts, crcs, turn, out):
            for block, piece in enumerate(pieces, first):
                self._decode(entry, block, piece)  # says what is wrong, if anything

    def _decode(self, entry: Entry, block: int, out: NDArray[Any]) -> None:
        """Read, decode and verify one block into `out`: flat, or rows with the axes as on disk."""
        if out.ndim > 1:
            np.copyto(out, self.read_block(entry.name, block).reshape(out.shape))
            return
        at = self._position(entry, block)
        target = out.view(np.uint8)
        raw = entry.codec.id == "raw"
        try:
            base = self._base_block(entry, block) if entry.codec.needs_base else None
            data = target if raw else BLOCKS.array((entry.sizes[block],), np.uint8)
            expect(os.preadv(self._descriptor, [data.data], at) == data.size, "cut off")
            if not raw:
                entry.codec.decode(data.data, out, base)
            expect(isal_zlib.crc32(target) == entry.crcs[block], "its checksum is wrong")
        except CorruptFile as error:
            raise CorruptFile(
                f"{self.path} is damaged: tensor {entry.name!r}, block {block} at byte {at}: "
                f"{error}"
            ) from error

    def _position(self, entry: Entry, block: int) -> int:
        return self.index.header_bytes + entry.offset + entry.block_offsets[block]

    def _base_block(self, entry: Entry, block: int) -> NDArray[Any]:
        base = self.base()
        other = base.index.entries.get(entry.name)
        if other is None or not other.same_blocks(entry):
            raise CorruptFile(f"{base.path.name} does not hold its base")
        return base.read_block(entry.name, block)

    def _check_padding(self, entry: Entry) -> None:
        used = sum(entry.sizes)
        at = self.index.header_bytes + entry.offset + used
        left = entry.stored_bytes - used
        while left:
            chunk = os.pread(self._descriptor, min(left, 1 << 20), at)
            if not chunk or chunk.count(0) != len(chunk):
                raise CorruptFile(f"{self.path} is damaged: padding of {entry.name!r} at byte {at}")
            at, left = at + len(chunk), left - len(chunk)

    def check_memory(self, size_bytes: int) -> None:
        """Refuse, before anything is allocated, what this machine cannot hold."""
        if size_bytes >= 1 << 28 and size_bytes > (total := psutil.virtual_memory().total):
            raise LimitExceeded(
                f"{self.path}: {size_bytes} bytes asked for, this machine has {total}"
            )
