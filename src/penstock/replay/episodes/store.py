"""The episodes that are held: their records in one arena, their index, and which of them go first.

Not thread-safe: the buffer that owns it holds a lock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.memory import format_bytes
from penstock.core.reuse import ReusedMemory
from penstock.errors import UsageError
from penstock.replay.arena import Arena, Parts
from penstock.replay.episodes.index import EpisodeIndex
from penstock.replay.episodes.records import Column, RecordWriter
from penstock.replay.episodes.settings import Settings

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_USED, _LEAF, _FIRST = range(3)  # the index's extra columns: then locations, then sizes, per key
_CHUNK_BYTES = 8 << 20
_LEAST_CHUNK_BYTES = 64 << 10
_SLACK = 8  # memory held may exceed the byte limit by one part in so many, and these chunks
_SPARE_CHUNKS = 3  # the oldest is partly dead, the newest partly empty, and so is what moves


class EpisodeStore:
    """Whole episodes, each key of each in one record.

    Args:
        columns: How each key is stored.
        settings: Their limits are what the buffer was told: frames, bytes, who goes first.
        spill_dir: Where records beyond `max_bytes` go, instead of being evicted.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        settings: Settings,
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        max_bytes = settings.max_bytes
        self.columns = list(columns)
        self.memory = ReusedMemory()
        self._max_frames = settings.max_size
        self._max_bytes = max_bytes if spill_dir is None else None
        self._lru = settings.eviction == "lru"
        chunk = min(_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, (max_bytes or _CHUNK_BYTES << 5) >> 5))
        self._chunk_bytes = chunk
        memory_bytes = max_bytes if spill_dir is not None else None
        self._arena = Arena(chunk, memory_bytes=memory_bytes, spill_dir=spill_dir)
        self.index = EpisodeIndex(_FIRST + 2 * len(self.columns))
        self.clock = 0

    @property
    def nbytes(self) -> int:
        """Memory held: records, alive or not yet given back, and tables."""
        return self._arena.nbytes + self.index.nbytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the records held, in memory or on disk."""
        return self._arena.live_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes on disk."""
        return self._arena.spilled_bytes

    @property
    def used(self) -> Ints:
        """When each episode was last used, by row."""
        return self.index.column(_USED)

    @property
    def leaves(self) -> Ints:
        """Where the priorities of each episode start, by row; for `FramePriorities`."""
        return self.index.column(_LEAF)

    def encode(self, arrays: Sequence[NDArray[Any]]) -> list[Bytes]:
        """Return the records of an episode's arrays [T, *shape]; changes nothing, needs no lock."""
        return [column.encode(array) for column, array in zip(self.columns, arrays, strict=True)]

    def check_fits(self, length: int, records: Sequence[Bytes | Parts | RecordWriter]) -> None:
        """Refuse an episode that could not be held even alone.

        Raises:
            UsageError: It could not.
        """
        if self._max_frames is not None and length > self._max_frames:
            raise UsageError(
                f"an episode of {length} frames does not fit max_size={self._max_frames}; "
                "cut it, or make the buffer larger"
            )
        total = sum(record.size for record in records)
        if self._max_bytes is not None and total > self._max_bytes:
            raise UsageError(
                f"an episode of {format_bytes(total)} does not fit max_bytes={self._max_bytes}; "
                "cut it, or make the buffer larger"
            )

    def victims(self, length: int, records: Sequence[Bytes | Parts]) -> Ints:
        """Return the rows that must go before an episode can come, in the order of their going."""
        frames, nbytes = self.index.frames + length, self.live_bytes
        nbytes += sum(record.size for record in records)
        rows: list[int] = []
        if self._fits(frames, nbytes):
            return np.zeros(0, np.int64)
        order = np.argsort(self.used, kind="stable") if self._lru else range(len(self.index))
        for row in order:
            rows.append(int(row))
            frames -= int(self.index.lengths[row])
            nbytes -= int(self._sizes()[:, row].sum())
            if self._fits(frames, nbytes):
                break
        return np.array(rows, np.int64)

    def excess(self) -> int | None:
        """Return the row that must go since dead bytes take too much memory; None if none must."""
        over = self._max_bytes is not None and (
            self._arena.nbytes
            > self._max_bytes + self._max_bytes // _SLACK + _SPARE_CHUNKS * self._chunk_bytes
        )
        if not over or len(self.index) < 2:
            return None
        # The newest one stays: it is what the caller just added.
        return int(np.argmin(self.used[:-1])) if self._lru else 0

    def add(self, length: int, records: Sequence[Bytes | Parts], leaf: int) -> int:
        """Store an episode that was checked, and return its id."""
        locations: list[int] = []
        try:
            for record in records:
                locations.append(self._arena.put(record))
        except BaseException:
            sizes = np.array([record.size for record in records[: len(locations)]], np.int64)
            self._arena.free(np.array(locations, np.int64), sizes)
            raise
        self.clock += 1
        sizes_of = (record.size for record in records)
        return self.index.append(length, [self.clock, leaf, *locations, *sizes_of])

    def remove(self, row: int) -> None:
        """Forget an episode."""
        locations, sizes = self._locations()[:, row].copy(), self._sizes()[:, row].copy()
        self.index.remove(row)
        self._arena.free(locations, sizes)
        dead = self._arena.nbytes + self._arena.spilled_bytes - self._arena.live_bytes
        if dead > max(2 * self._chunk_bytes, self._arena.live_bytes // _SLACK):
            table = self._locations()
            moved = self._arena.compact(table.reshape(-1), self._sizes().reshape(-1))
            if moved is not None:
                table[:] = moved.reshape(table.shape)

    def touch(self, rows: Ints) -> None:
        """Note that episodes were used."""
        self.clock += 1
        self.used[rows] = self.clock

    def addresses(self, rows: Ints) -> NDArray[np.uint64]:
        """Return where the records of episodes lie, [keys, rows]; valid until a change."""
        return self._arena.addresses(self._locations()[:, rows])

    def gather(self, column: int, records: NDArray[np.uint64], lengths: Ints, steps: Ints) -> Bytes:
        """Return frames [n, size] of one key, in memory that is used again.

        Args:
            column: The number of the key.
            records: Where its records lie, one per frame: a row of `addresses`.
            lengths: Of the frames' episodes.
            steps: Of the frames.
        """
        out = self.memory.array((len(steps), self.columns[column].field.size), np.uint8)
        if len(steps):
            self.columns[column].gather(records, lengths, steps, out, self.memory)
        return out

    def record_bytes(self) -> Ints:
        """Return the bytes of each episode, by row."""
        return np.asarray(self._sizes().sum(axis=0))

    def records(self, column: int, rows: Ints) -> tuple[Bytes, Ints]:
        """Copy records out, one behind the other; return them and their sizes."""
        sizes = self._sizes()[column][rows]
        ends = np.cumsum(sizes)
        data = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
        locations = self._locations()[column][rows]
        for location, size, end in zip(
            locations.tolist(), sizes.tolist(), ends.tolist(), strict=True
        ):
            data[end - size : end] = self._arena.read(location, size)
        return data, sizes

    def put_records(self, data: Bytes, sizes: Ints) -> Ints:
        """Put records in without an episode; `restore` gives them one."""
        return self._arena.put_many(data, sizes)

    def restore(
        self,
        ids: Ints,
        starts: Ints,
        lengths: Ints,
        extra: Ints,
        next_ids: Ints,
    ) -> None:
        """Fill an empty store whose records are in already.

        Args:
            ids: Of the episodes, in order.
            starts: Frame ids of their first frames.
            lengths: Their frames.
            extra: The extra columns [2 + 2 * keys, episodes].
            next_ids: The next episode id and the next frame id.
        """
        rows = zip(ids.tolist(), starts.tolist(), lengths.tolist(), extra.T.tolist(), strict=True)
        self.index.restore(list(rows), next_ids)

    def _fits(self, frames: int, nbytes: int) -> bool:
        few = self._max_frames is None or frames <= self._max_frames
        return few and (self._max_bytes is None or nbytes <= self._max_bytes)

    def _locations(self) -> Ints:
        return self.index.columns(_FIRST, _FIRST + len(self.columns))

    def _sizes(self) -> Ints:
        count = len(self.columns)
        return self.index.columns(_FIRST + count, _FIRST + 2 * count)
