"""Where the chunks of a recording lie and what they hold: in arrays, never an object for each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.bags.limits import BadRecord, Limits
from penstock.bags.spool import Rows, RowStore

LOOSE: Final = "loose"  # the compression of a stretch of messages outside of chunks
_COMPRESSIONS: Final = ("?", "", "none", "lz4", "bz2", "zstd", LOOSE)
_CHUNK: Final = np.dtype("<i8,<i8,<i8,u1")
_SLOT: Final = np.dtype([("chunk", "<u4"), ("key", "<u4"), ("count", "<u4")])
_MOST_COUNT: Final = 2**32 - 1


class Chunk(NamedTuple):
    """Where a chunk lies.

    Attributes:
        pos: Where its record begins.
        stop: Where the records that belong to it end, its index records included.
        usable_bytes: Of a damaged chunk: its decompressed bytes up to the damage; otherwise -1.
        compression: How it is stored, if the index tells; otherwise "?".
    """

    pos: int
    stop: int
    usable_bytes: int = -1
    compression: str = "?"


class ChunkTable(Sequence[Chunk]):
    """The chunks of a file in file order, and how many messages of which connection each holds.

    A slot is one connection in one chunk.

    Attributes:
        rows: The places of the messages, of those chunks that are loaded.
    """

    def __init__(self, path: Path, limits: Limits, scratch: Path | None) -> None:
        self._path, self._limits = path, limits
        self._made_chunks, self._made_slots = bytearray(), bytearray()
        self.rows = RowStore(scratch)
        self._chunks, self._slots = np.empty(0, _CHUNK), np.empty(0, _SLOT)
        self._first_slot = self._first_row = np.zeros(1, np.int64)
        self._loaded = np.zeros(0, bool)

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, number: Any) -> Any:
        pos, stop, usable_bytes, code = self._chunks[number].tolist()
        return Chunk(pos, stop, usable_bytes, _COMPRESSIONS[code])

    def add(self, chunk: Chunk, keys: NDArray[Any], counts: NDArray[Any]) -> None:
        """Add a chunk with the numbers of messages of its connections."""
        if len(counts) and int(counts.max()) > _MOST_COUNT:
            raise BadRecord("the index promises an impossible number of messages")
        slots = np.zeros(len(keys), _SLOT)
        slots["chunk"] = len(self._made_chunks) // _CHUNK.itemsize
        slots["key"], slots["count"] = keys, counts
        name = chunk.compression if chunk.compression in _COMPRESSIONS else "?"
        made = np.array((*chunk[:3], _COMPRESSIONS.index(name)), _CHUNK)
        self._made_chunks += made.tobytes()
        self._made_slots += slots.tobytes()
        count = len(self._made_chunks) // _CHUNK.itemsize
        self._limits.check_count(self._path, "chunks", count, self._limits.chunks)
        self._limits.check_index(self._path, len(self._made_chunks) + len(self._made_slots))

    def freeze(self) -> None:
        """Sort the chunks; from now on they can be asked for."""
        chunks = np.frombuffer(self._made_chunks, _CHUNK)
        slots = np.frombuffer(self._made_slots, _SLOT).copy()
        order = np.argsort(chunks["f0"], kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        self._chunks = chunks[order]
        scanned = len(self.rows) > 0  # a scan finds the chunks in order, and their ends
        if not scanned:
            starts, stops = self._chunks["f0"], self._chunks["f1"]
            stops[:-1] = np.minimum(stops[:-1], starts[1:])
        slots["chunk"] = rank[slots["chunk"]]
        self._slots = slots[np.argsort(slots["chunk"], kind="stable")]
        self._first_slot = np.searchsorted(self._slots["chunk"], np.arange(len(self) + 1))
        counted = np.bincount(self._slots["chunk"], self._slots["count"], len(self))
        self._first_row = np.concatenate(([0], np.cumsum(counted.astype(np.int64))))
        self._loaded = np.full(len(self), scanned)
        self._made_chunks, self._made_slots = bytearray(), bytearray()

    @property
    def counts(self) -> dict[int, int]:
        """The number of messages of each connection."""
        keys, place = np.unique(self._slots["key"], return_inverse=True)
        counts = np.bincount(place, self._slots["count"], len(keys)).astype(np.int64)
        return dict(zip(keys.tolist(), counts.tolist(), strict=True))

    @property
    def compressions(self) -> set[str]:
        """How the chunks are stored."""
        return {_COMPRESSIONS[code] for code in np.unique(self._chunks["f3"])}

    def chunks_of(self, keys: Collection[int]) -> list[int]:
        """Return the numbers of the chunks with messages of some connections, rising."""
        found = np.isin(self._slots["key"], list(keys)) & (self._slots["count"] > 0)
        return list(map(int, np.unique(self._slots["chunk"][found])))

    def slots_of(self, number: int) -> dict[int, int]:
        """Return how many messages of each connection a chunk holds."""
        here = self._slots[slice(*self._first_slot[number : number + 2].tolist())]
        found: dict[int, int] = {}
        for key, count in zip(here["key"].tolist(), here["count"].tolist(), strict=True):
            found[key] = found.get(key, 0) + count
        return found

    def count_of(self, number: int) -> int:
        """Return the number of messages in a chunk."""
        return int(self._first_row[number + 1] - self._first_row[number])

    def is_loaded(self, number: int) -> bool:
        """Tell whether the places of a chunk's messages are known."""
        return bool(self._loaded[number])

    def load(self, number: int, blocks: Iterator[Rows]) -> None:
        """Take the places of a chunk's messages in, by their offsets; they must be all."""
        at = int(self._first_row[number])
        for rows in blocks:
            if at + len(rows) > self._first_row[number + 1]:
                raise BadRecord("a chunk holds more messages than the index promises")
            self.rows.write(at, rows)
            at += len(rows)
        if at < self._first_row[number + 1]:
            raise BadRecord("a chunk holds fewer messages than the index promises")
        self._loaded[number] = True

    def places(self, numbers: Sequence[int]) -> Iterator[Rows]:
        """Yield the places of the messages of loaded chunks, those of neighbours together."""
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
            yield from self.rows.blocks(*self._first_row[[run[0], run[-1] + 1]].tolist())
