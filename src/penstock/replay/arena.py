"""Many small pieces of bytes in a few large chunks, found by location, moved to disk if need be.

A location is a number: the chunk in its upper bits, the offset in the lower ones. It stays valid
until the piece is freed or moved by `compact`; a chunk that has gone to disk keeps its locations.
`CompressedColumns` are slots of compressed frames in an arena: what is written over is given back.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.files import make_folder, storage_error, write_all
from penstock.errors import UsageError
from penstock.replay.frames import Bytes, FrameCodec, Ints

Encoded = tuple[Bytes, Ints]  # frames as bytes, one behind the other, and the length of each

_OFFSET_BITS = 40
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_MOSTLY_DEAD = 0.5
_FIRST_BYTES = 256 * 1024
_SLACK_BYTES = 16 << 20  # dead memory that is not worth moving anything for


@dataclass
class _Chunk:
    content: Bytes
    used: int = 0
    live: int = 0
    map: mmap.mmap | None = None  # set when the chunk lies on disk


class Arena:
    """Append-only memory with eviction: freed pieces give their chunk back when all of it is dead.

    A piece that is large beside `chunk_bytes` gets a chunk of its own. Above `memory_bytes`, chunks
    go to files in `spill_dir` without a name: they vanish with the process, however it ends.

    Not thread-safe: its owner holds a lock.
    """

    def __init__(
        self,
        chunk_bytes: int = 8 << 20,
        memory_bytes: int | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if memory_bytes is not None and spill_dir is None:
            raise UsageError("memory_bytes needs spill_dir: where should the rest go?")
        self._chunk_bytes = chunk_bytes
        self._memory_bytes = memory_bytes
        self._spill_dir = None if spill_dir is None else make_folder(spill_dir)
        self._chunks: dict[int, _Chunk] = {}
        self._bases = np.zeros(16, np.uint64)
        self._free_numbers: list[int] = []
        self._open = -1
        self.live_bytes = 0
        self.nbytes = 0
        self.spilled_bytes = 0

    def put(self, parts: Iterable[Bytes], size: int) -> int:
        """Copy a piece of so many bytes in, part by part, and return its location."""
        number, chunk = self._room_for(size)
        location = chunk.used + (number << _OFFSET_BITS)
        for part in parts:
            chunk.content[chunk.used : chunk.used + part.size] = part
            chunk.used += part.size
        chunk.live += size
        self.live_bytes += size
        return location

    def put_many(self, data: Bytes, lengths: Ints) -> Ints:
        """Copy consecutive pieces in and return their locations."""
        locations = np.empty(lengths.size, np.int64)
        ends = np.cumsum(lengths)
        first = 0
        while first < lengths.size:
            start = int(ends[first] - lengths[first])
            try:
                number, chunk = self._room_for(int(lengths[first]))
            except BaseException:  # a full disk, or no memory
                self.free(locations[:first], lengths[:first])
                raise
            # As many as fit, in one copy.
            last = int(np.searchsorted(ends, start + chunk.content.size - chunk.used, "right"))
            stop = int(ends[last - 1])
            size = stop - start
            chunk.content[chunk.used : chunk.used + size] = data[start:stop]
            begins = ends[first:last] - lengths[first:last] - start + chunk.used
            locations[first:last] = begins + (number << _OFFSET_BITS)
            chunk.used += size
            chunk.live += size
            self.live_bytes += size
            first = last
        return locations

    def free(self, locations: Ints, lengths: Ints) -> None:
        """Give pieces back; chunks in which nothing lives any more are dropped."""
        if not locations.size:
            return
        dead = np.bincount(locations >> _OFFSET_BITS, weights=lengths).astype(np.int64)
        for number in np.flatnonzero(dead).tolist():
            chunk, size = self._chunks[number], int(dead[number])
            chunk.live -= size
            self.live_bytes -= size
            if chunk.live == 0 and number != self._open:
                self._drop(number)

    def addresses(self, locations: Ints) -> NDArray[np.uint64]:
        """Return where pieces lie in memory; valid until the next put, free or compact."""
        found: NDArray[np.uint64] = self._bases[locations >> _OFFSET_BITS]
        found += (locations & _OFFSET_MASK).view(np.uint64)
        return found

    def read(self, location: int, nbytes: int) -> Bytes:
        """View a piece."""
        start = location & _OFFSET_MASK
        return self._chunks[location >> _OFFSET_BITS].content[start : start + nbytes]

    def gather(self, locations: Ints, lengths: Ints) -> Bytes:
        """Copy pieces out, one behind the other."""
        ends = np.cumsum(lengths)
        data = np.empty(int(ends[-1]) if ends.size else 0, np.uint8)
        # What was put together lies together: it is copied in one go.
        breaks = np.flatnonzero(locations[1:] != locations[:-1] + lengths[:-1]) + 1
        for begin, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), ends.size], strict=True):
            if stop > begin:
                first = int(ends[begin] - lengths[begin])
                size = int(ends[stop - 1]) - first
                data[first : first + size] = self.read(int(locations[begin]), size)
        return data

    def compact(self, locations: Ints, lengths: Ints) -> Ints | None:
        """Move what still lives in mostly dead chunks; return the new table, None for the same."""
        dead = {
            number: chunk.used - chunk.live
            for number, chunk in self._chunks.items()
            if number != self._open and chunk.live < _MOSTLY_DEAD * chunk.used
        }
        # A few half-dead chunks are cheaper than moving; but never more than a quarter is wasted.
        waste = sum(dead.values())
        if not dead or waste < (self.live_bytes + waste) // 4:
            return None
        moved = np.flatnonzero(np.isin(locations >> _OFFSET_BITS, list(dead)))
        table: Ints = locations.copy()
        table[moved] = self.put_many(self.gather(locations[moved], lengths[moved]), lengths[moved])
        self.free(locations[moved], lengths[moved])
        return table

    def _room_for(self, size: int) -> tuple[int, _Chunk]:
        """Return the open chunk, or a new one if the next piece does not fit."""
        chunk = self._chunks.get(self._open)
        if chunk is not None and chunk.used + size <= chunk.content.size:
            return self._open, chunk
        # Small arenas have small chunks; a large piece has its own, so that no room is wasted.
        usual = min(self._chunk_bytes, max(_FIRST_BYTES, self.live_bytes // 8))
        if size * 8 >= usual:
            return self._new_chunk(size)
        sealed, self._open = self._open, -1
        if chunk is not None and chunk.live == 0:
            self._drop(sealed)
        self._open, chunk = self._new_chunk(usual)
        return self._open, chunk

    def _new_chunk(self, size: int) -> tuple[int, _Chunk]:
        self._spill(size)
        number = self._free_numbers.pop() if self._free_numbers else len(self._chunks)
        if number >= self._bases.size:
            self._bases = np.concatenate([self._bases, np.zeros_like(self._bases)])
        chunk = _Chunk(np.empty(size, np.uint8))
        self._chunks[number] = chunk
        self._bases[number] = chunk.content.ctypes.data
        self.nbytes += size
        return number, chunk

    def _drop(self, number: int) -> None:
        chunk = self._chunks.pop(number)
        self._free_numbers.append(number)
        if chunk.map is None:
            self.nbytes -= chunk.content.size
        else:
            self.spilled_bytes -= chunk.content.size

    def _spill(self, coming: int) -> None:
        """Move the oldest chunks to disk until there is room for what is coming."""
        for number, chunk in self._chunks.items():
            if self._memory_bytes is None or self.nbytes + coming <= self._memory_bytes:
                return
            if chunk.map is None:
                self._to_disk(number, chunk)

    def _to_disk(self, number: int, chunk: _Chunk) -> None:
        assert self._spill_dir is not None
        try:
            with tempfile.TemporaryFile(dir=self._spill_dir) as file:
                write_all(file, chunk.content[: chunk.used].data)
                file.flush()
                if not chunk.used:
                    return
                chunk.map = mmap.mmap(file.fileno(), chunk.used, access=mmap.ACCESS_READ)
        except OSError as error:
            raise storage_error("spill to", self._spill_dir, error) from error
        with contextlib.suppress(OSError, AttributeError):
            chunk.map.madvise(mmap.MADV_RANDOM)  # a sample reads single frames, no neighbours
        self.nbytes -= chunk.content.size
        chunk.content = np.frombuffer(chunk.map, np.uint8)
        self.spilled_bytes += chunk.content.size
        self._bases[number] = chunk.content.ctypes.data


class CompressedColumns:
    """A fixed number of slots, each holding one compressed frame per column.

    Not for several threads at once: whoever owns it locks.
    """

    def __init__(
        self,
        slots: int,
        codecs: Mapping[int, FrameCodec],
        *,
        memory_bytes: int | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.codecs = dict(codecs)
        self._settings: dict[str, Any] = {"memory_bytes": memory_bytes, "spill_dir": spill_dir}
        self._row = {column: row for row, column in enumerate(self.codecs)}
        self._locations = np.full((len(self.codecs), slots), -1, np.int64)
        self._lengths = np.zeros((len(self.codecs), slots), np.int32)
        self.clear()

    def clear(self) -> None:
        """Give everything back."""
        self.arena = Arena(**self._settings)
        self._locations[:] = -1
        self._lengths[:] = 0
        self._patience = 0

    @property
    def nbytes(self) -> int:
        """Memory held: frames, alive or not yet given back, and tables."""
        return int(self.arena.nbytes + self._locations.nbytes + self._lengths.nbytes)

    def slot_bytes(self) -> Ints:
        """Return the compressed bytes of each slot."""
        return np.asarray(self._lengths.sum(axis=0, dtype=np.int64))

    def store(self, slots: Ints, encoded: Mapping[int, Encoded]) -> None:
        """Put frames into slots, each of them named once; what was there is given back."""
        fresh: dict[int, Ints] = {}
        try:
            for column, (data, lengths) in encoded.items():
                fresh[column] = self.arena.put_many(data, lengths)
        except BaseException:  # a full disk: what is stored stays as it is
            for column, locations in fresh.items():
                self.arena.free(locations, encoded[column][1])
            raise
        for column, locations in fresh.items():
            row = self._row[column]
            places, sizes = self._locations[row], self._lengths[row]
            old = places[slots]
            alive = old >= 0
            freed = sizes[slots][alive].astype(np.int64)
            places[slots] = locations
            sizes[slots] = encoded[column][1]
            self.arena.free(old[alive], freed)
        self._compact()

    def decode(self, column: int, slots: Ints, out: Bytes) -> None:
        """Decode the frames of slots into `out` of shape [n, size]."""
        row = self._row[column]
        locations = self._locations[row][slots]
        if locations.size and int(locations.min()) < 0:
            empty = int(slots[locations < 0][0])
            raise UsageError(f"slot {empty} was never written, there is nothing to read")
        addresses = self.arena.addresses(locations)
        lengths = self._lengths[row][slots].astype(np.int64)
        self.codecs[column].decode(addresses, lengths, out)

    def gather(self, column: int, slots: Ints) -> Encoded:
        """Copy the compressed frames of slots out; the slots must be written."""
        row = self._row[column]
        lengths = self._lengths[row][slots].astype(np.int64)
        return self.arena.gather(self._locations[row][slots], lengths), lengths

    def _compact(self) -> None:
        dead = self.arena.nbytes + self.arena.spilled_bytes - self.arena.live_bytes
        if dead <= max(_SLACK_BYTES, self.arena.live_bytes // 2, self._patience):
            return
        alive = self._locations >= 0
        moved = self.arena.compact(self._locations[alive], self._lengths[alive].astype(np.int64))
        if moved is None:  # looking costs: not again before there is more to gain
            self._patience = dead + dead // 4
        else:
            self._patience = 0
            self._locations[alive] = moved
