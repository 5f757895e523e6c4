"""Where the chunks of a recording lie and what they hold: in arrays, never an object for each."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.bags.limits import BadRecord, Limits

LOOSE: Final = "loose"  # the compression of a stretch of messages outside of chunks
ENTRY_BYTES: Final = 16  # that the time and the offset of a message take
SLOT_TYPE: Final = np.dtype([("chunk", "<u4"), ("key", "<u4"), ("count", "<u4"), ("pos", "<i8")])
_COMPRESSIONS: Final = ("?", "", "none", "lz4", "bz2", "zstd", LOOSE)
_ROW: Final = Struct("<qqqBB")
_ROW_TYPE: Final = np.dtype("<i8,<i8,<i8,u1,u1")
_MOST_COUNT: Final = 2**32 - 1

Numbers = NDArray[np.int64]
Entries = tuple[Numbers, Numbers]  # times and offsets of messages in a chunk


class Chunk(NamedTuple):
    """Where a chunk lies.

    Attributes:
        pos: Where its record begins.
        stop: Where the records that belong to it end, its index records included.
        usable_bytes: Of a damaged chunk: its decompressed bytes up to the damage; otherwise -1.
        compression: How it is stored, if the index tells; otherwise "?".
        indexed: Index records follow it; otherwise its messages are found by walking it.
    """

    pos: int
    stop: int
    usable_bytes: int = -1
    compression: str = "?"
    indexed: bool = True


class Tally:
    """Counts the messages of one chunk, and notes where they are unless they are too many."""

    def __init__(self, most: int, connections: int) -> None:
        self.counts: dict[int, int] = {}
        self.complete = True
        self.first_ns, self.last_ns = 1 << 62, -1
        self._most, self._connections = most, connections
        self._columns = array("q"), array("q"), array("q")

    def add(self, key: int, t_ns: int, offset: int) -> None:
        """Count a message."""
        self.counts[key] = self.counts.get(key, 0) + 1
        if len(self.counts) > self._connections:
            raise BadRecord(f"more than {self._connections} connections")
        self.first_ns, self.last_ns = min(self.first_ns, t_ns), max(self.last_ns, t_ns)
        if not self.complete:
            return
        for column, value in zip(self._columns, (key, t_ns, offset), strict=True):
            column.append(value)
        if len(self._columns[0]) > self._most:
            self.complete = False
            self._columns = array("q"), array("q"), array("q")

    def entries(self) -> Entries:
        """Return times and offsets, one connection after the other as in `keys`."""
        keys, times, offsets = (np.frombuffer(column, np.int64) for column in self._columns)
        order = np.argsort(keys, kind="stable")
        return times[order], offsets[order]

    @property
    def keys(self) -> list[int]:
        """The connections, rising."""
        return sorted(self.counts)


class ChunkTable(Sequence[Chunk]):
    """The chunks of a file in file order, and how many messages of which connection each holds.

    A slot is one connection in one chunk. The times and offsets of its messages are held, once
    they were read, if those of all messages fit into the limit.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path, self._limits = path, limits
        self._rows, self._made = bytearray(), bytearray()
        self._scanned: tuple[array[int], array[int]] | None = None
        self._frozen = self._is_scan = False
        self.slots = np.empty(0, SLOT_TYPE)
        self._first_slot = self._first_entry = np.zeros(1, np.int64)
        self.entries: Entries | None = None
        self.loaded = np.zeros(0, bool)

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        pos, stop, usable, code, indexed = _ROW.unpack_from(self._rows, number * _ROW.size)
        return Chunk(pos, stop, usable, _COMPRESSIONS[code], bool(indexed))

    def add(self, chunk: Chunk, slots: NDArray[Any], tally: Tally | None = None) -> None:
        """Add a chunk.

        Args:
            chunk: The chunk.
            slots: Of `SLOT_TYPE`; the numbers of the chunk are filled in.
            tally: Of a scan: where its messages are, in the order of the slots.
        """
        slots["chunk"] = len(self)
        name = chunk.compression if chunk.compression in _COMPRESSIONS else "?"
        code = _COMPRESSIONS.index(name)
        self._rows += _ROW.pack(*chunk[:3], code, chunk.indexed)
        self._made += slots.tobytes()
        self._limits.check_count(self._path, "chunks", len(self), self._limits.chunks)
        self._limits.check_index(self._path, len(self._rows) + len(self._made))
        if tally is None:
            return
        if not self._is_scan:
            self._scanned = array("q"), array("q")
            self._is_scan = True
        if self._scanned is not None:
            for held, column in zip(self._scanned, tally.entries(), strict=True):
                held.frombytes(column.tobytes())
            size_bytes = ENTRY_BYTES * len(self._scanned[0])
            if not tally.complete or size_bytes > self._limits.index_bytes:
                self._scanned = None

    def freeze(self, known: Collection[int]) -> None:
        """Sort the chunks, and leave out the messages of connections that are not known."""
        if self._frozen:
            return
        self._frozen = True
        slots = np.frombuffer(self._made, SLOT_TYPE).copy()
        rows = np.frombuffer(self._rows, _ROW_TYPE)
        keep = np.isin(slots["key"], np.array(list(known), np.int64)) & (slots["count"] > 0)
        order = np.argsort(rows["f0"], kind="stable")
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        scanned = None
        if self._scanned is not None:  # a scan finds the chunks in order
            kept = np.repeat(keep, slots["count"])
            scanned = tuple(np.frombuffer(column, np.int64)[kept] for column in self._scanned)
            del kept
        rows = rows[order]
        if not self._is_scan:  # an index does not tell everywhere where a chunk ends
            rows["f1"][:-1] = np.minimum(rows["f1"][:-1], rows["f0"][1:])
        self._rows = bytearray(rows.tobytes())
        slots = slots[keep]
        slots["chunk"] = rank[slots["chunk"]]
        self.slots = slots[np.argsort(slots["chunk"], kind="stable")]
        numbers = np.arange(len(self) + 1)
        self._first_slot = np.searchsorted(self.slots["chunk"], numbers)
        self._first_entry = np.concatenate(([0], np.cumsum(self.slots["count"], dtype=np.int64)))
        total = int(self._first_entry[-1])
        if scanned is not None:
            self.entries = scanned
        elif total * ENTRY_BYTES <= self._limits.index_bytes:
            self.entries = np.empty(total, np.int64), np.empty(total, np.int64)
        self.loaded = np.full(len(self), scanned is not None)
        self._made, self._scanned = bytearray(), None

    @property
    def counts(self) -> dict[int, int]:
        """The number of messages of each connection."""
        keys, place = np.unique(self.slots["key"], return_inverse=True)
        counts = np.bincount(place, self.slots["count"], len(keys)).astype(np.int64)
        return dict(zip(keys.tolist(), counts.tolist(), strict=True))

    @property
    def compressions(self) -> set[str]:
        """How the chunks are stored."""
        rows = np.frombuffer(self._rows, _ROW_TYPE)
        return {_COMPRESSIONS[code] for code in np.unique(rows["f3"])}

    def chunks_of(self, keys: Collection[int]) -> Iterator[int]:
        """Yield the numbers of the chunks with messages of some connections."""
        found = np.isin(self.slots["key"], np.array(list(keys), np.int64))
        yield from map(int, np.unique(self.slots["chunk"][found]))

    def slots_of(self, number: int) -> list[tuple[int, int, int]]:
        """Return the number, connection and messages of each slot of a chunk."""
        first, stop = self._first_slot[number : number + 2].tolist()
        here = self.slots[first:stop]
        numbers = range(first, stop)
        return list(zip(numbers, here["key"].tolist(), here["count"].tolist(), strict=True))

    def held(self, slot: int) -> Entries | None:
        """Return the entries of a slot of a loaded chunk; None if they are not held."""
        if self.entries is None:
            return None
        span = slice(*self._first_entry[slot : slot + 2].tolist())
        return self.entries[0][span], self.entries[1][span]

    def hold(self, slot: int, entries: Entries) -> None:
        """Hold the entries of a slot."""
        for column, values in zip(self.held(slot) or (), entries, strict=True):
            column[:] = values

    def count_of(self, number: int) -> int:
        """Return the number of messages in a chunk."""
        first, stop = self._first_slot[number : number + 2]
        return int(self._first_entry[stop] - self._first_entry[first])


def make_slots(
    keys: NDArray[Any], counts: NDArray[Any], places: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Return the slots of a chunk from an index; places are those of its index records.

    Raises:
        BadRecord: A number cannot be.
    """
    if len(counts) and int(counts.max()) > _MOST_COUNT:
        raise BadRecord("the index promises an impossible number of messages")
    slots = np.zeros(len(keys), SLOT_TYPE)
    slots["key"], slots["count"] = keys, counts
    if places is not None:
        slots["pos"] = places
    return slots
