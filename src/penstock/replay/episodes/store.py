"""The episodes that a buffer holds: records in one arena, an index, priorities, who goes first.

A record is one key of one episode, one piece of bytes. Of a plain key it is its frames, one behind
the other; of a compressed one a table of uint32 offsets from the start of the record, one more than
there are frames, and then the frames, each compressed by itself.

Not thread-safe: the buffer that owns it holds a lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.memory import format_bytes
from penstock.core.reuse import ReusedMemory
from penstock.errors import CorruptFile, UsageError
from penstock.replay.arena import Arena
from penstock.replay.episodes.frame_priority import FramePriorities
from penstock.replay.episodes.index import EpisodeIndex
from penstock.replay.episodes.schema import Settings
from penstock.replay.frames import FrameCodec, Lz4Frames, RawFrames, choose_codec, frame_codec
from penstock.replay.keys import Field, show

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Addresses = NDArray[np.uint64]

_LARGEST_RECORD = 2**32 - 1
_ENTRY = np.dtype("<u4")
_PAIRS = RawFrames(2 * _ENTRY.itemsize)
_OLD_MODES = ("block", "episode")

# The index's extra columns: when it was used, where its priorities start; then locations and
# sizes of its records, per key.
_USED, _OFFSET, _FIRST = range(3)
_CHUNK_BYTES = 8 << 20
_LEAST_CHUNK_BYTES = 64 << 10
_SLACK = 8  # memory held may exceed the byte limit by one part in so many, and these chunks
_SPARE_CHUNKS = 3  # the oldest is partly dead, the newest partly empty, and so is what moves


class Column:
    """How one key is stored."""

    def __init__(self, field: Field, codec: FrameCodec) -> None:
        self.field = field
        self.codec = codec
        self.plain = codec.id == "raw"
        self._old: Mapping[str, Any] | None = None

    @classmethod
    def choose(cls, field: Field, frames: NDArray[Any], codec: str) -> Column:
        """Choose a codec from the first episode."""
        return cls(field, choose_codec(frames, codec, show(field.path)))

    def config(self) -> dict[str, Any]:
        """Return the JSON settings from which `from_config` rebuilds this column."""
        return {**self.field.config(), "codec": self.codec.config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Column:
        """Rebuild a column; anything unexpected is a CorruptFile or an error of Python's.

        Files of before may hold several frames compressed as one: `from_file` splits those.
        """
        field = Field.from_config(config)
        mode = config.get("mode", "frame")
        codec = frame_codec(config["codec"])
        old = mode != "frame" and codec.id != "raw"
        if old:
            try:
                codec = frame_codec({**codec.config(), "size": field.size})
            except CorruptFile:  # sparse held so many frames, and does not hold one
                codec = Lz4Frames(field.size)
        if mode not in ("frame", *_OLD_MODES) or (
            field.size < 1 or (codec.size != field.size and codec.id != "raw")
        ):
            raise CorruptFile(f"the key {dict(config)!r} makes no sense")
        column = cls(field, codec)
        column._old = config if old else None
        return column

    @property
    def is_old(self) -> bool:
        """Whether records in its file must be made anew."""
        return self._old is not None

    def encode(self, frames: NDArray[Any]) -> Bytes:
        """Return the record of an episode's frames [T, *shape]."""
        writer = RecordWriter(self)
        writer.add(frames, copied=False)
        return np.concatenate(list(writer.take()))

    def from_file(self, record: Bytes, length: int) -> Bytes:
        """Return a record that comes from a file as it is kept in memory."""
        if self._old is not None:
            return self.encode(self._split(record, length, self._old))
        if self.plain:
            good = record.size == length * self.field.size
        else:
            good = _offsets(record, length, self.field.size) is not None
        if not good:
            raise CorruptFile(f"a record of {show(self.field.path)} makes no sense")
        return record

    def _split(self, record: Bytes, length: int, config: Mapping[str, Any]) -> Bytes:
        """Decode the units of a record of before: blocks of some frames, or the whole episode."""
        per_unit = int(config["block_frames"]) if config["mode"] == "block" else length
        if per_unit < 1:
            raise CorruptFile(f"the key {dict(config)!r} makes no sense")
        units, unit_bytes = -(-length // per_unit), per_unit * self.field.size
        table = _offsets(record, units, unit_bytes)
        if table is None:
            raise CorruptFile(f"a record of {show(self.field.path)} makes no sense")
        out = np.empty((units, unit_bytes), np.uint8)
        start = record.__array_interface__["data"][0]
        codec = frame_codec({**config["codec"], "size": unit_bytes})
        codec.decode((table[:-1] + start).astype(np.uint64), np.diff(table), out)
        return out.reshape(-1, self.field.size)[:length]  # the last block was filled up

    def gather(self, records: Addresses, steps: Ints, out: Bytes) -> None:
        """Fill the rows of `out` [n, size] with frames."""
        plain, size = (self.codec, self.field.size) if self.plain else (_PAIRS, _ENTRY.itemsize)
        found = out if self.plain else np.empty((len(out), _PAIRS.size), np.uint8)
        addresses = _moved(records, steps * size)
        plain.decode(addresses, np.full(len(out), found.shape[1]), found)
        if not self.plain:  # those were the offsets of each frame and of the next
            table = found.view(_ENTRY).astype(np.int64)
            self.codec.decode(_moved(records, table[:, 0]), table[:, 1] - table[:, 0], out)


class RecordWriter:
    """Makes the record of an episode that comes in parts: no more than its bytes are held."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._parts: list[Bytes] = []
        self._lengths: list[Ints] = []
        self._frames = 0
        self._nbytes = 0

    @property
    def size(self) -> int:
        """Bytes of the record so far."""
        return self._nbytes + (0 if self._column.plain else _ENTRY.itemsize * (self._frames + 1))

    def add(self, frames: NDArray[Any], *, copied: bool = True) -> None:
        """Add frames [n, *shape]; unless `copied`, the caller leaves them alone until `finish`."""
        column = self._column
        rows = frames.reshape(len(frames), -1).view(np.uint8).reshape(-1, column.field.size)
        data, lengths = column.codec.encode(rows)  # perhaps a view
        self._lengths.append(lengths)
        self._parts.append(data.copy() if copied else data)
        self._frames += len(frames)
        self._nbytes += data.size
        if not column.plain and self.size > _LARGEST_RECORD:
            raise UsageError(
                f"{show(column.field.path)}: an episode of {self._frames} frames is too large for "
                f"{column.codec.id}; use raw, or shorter episodes"
            )

    def take(self) -> Iterator[Bytes]:
        """Hand the record over, part by part, each of which is then given up; once only."""
        if not self._column.plain:
            yield _table(np.concatenate(self._lengths))
        while self._parts:
            yield self._parts.pop(0)


def _table(lengths: Ints) -> Bytes:
    """Return the offsets of frames, from the start of the record."""
    table = np.empty(len(lengths) + 1, np.int64)
    table[0] = _ENTRY.itemsize * len(table)
    np.cumsum(lengths, out=table[1:])
    table[1:] += table[0]
    return table.astype(_ENTRY).view(np.uint8)


def _offsets(record: Bytes, units: int, unit_bytes: int) -> Ints | None:
    """Return the table of a record, if nothing in it leads outside."""
    head = _ENTRY.itemsize * (units + 1)
    if record.size < head:
        return None
    table: Ints = record[:head].view(_ENTRY).astype(np.int64)
    sizes = np.diff(table)
    inside = bool(table[0] == head and table[-1] == record.size)
    return table if inside and (sizes > 0).all() and (sizes <= unit_bytes).all() else None


def _moved(addresses: Addresses, by: Ints) -> Addresses:
    return addresses + by.view(np.uint64)  # never negative


class EpisodeStore:
    """Whole episodes, each key of each in one record."""

    def __init__(
        self,
        columns: Sequence[Column],
        settings: Settings,
        spill_dir: str | os.PathLike[str] | None = None,
        as_tensordict: bool = False,
    ) -> None:
        max_bytes = settings.max_bytes
        self.columns = list(columns)
        self.as_tensordict = as_tensordict
        self._memory = ReusedMemory()
        self._max_frames = settings.max_size
        self._max_bytes = max_bytes if spill_dir is None else None
        self._lru = settings.eviction == "lru"
        chunk = min(_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, (max_bytes or _CHUNK_BYTES << 5) >> 5))
        self._chunk_bytes = chunk
        memory_bytes = max_bytes if spill_dir is not None else None
        self.arena = Arena(chunk, memory_bytes=memory_bytes, spill_dir=spill_dir)
        self.index = EpisodeIndex(_FIRST + 2 * len(self.columns))
        self.priorities = FramePriorities(settings.alpha) if settings.alpha is not None else None
        self.clock = 0

    @property
    def nbytes(self) -> int:
        """Memory held: records, alive or not yet given back, and tables."""
        tree = self.priorities.tree.nbytes if self.priorities else 0
        return self.arena.nbytes + self.index.nbytes + tree

    @property
    def used(self) -> Ints:
        """When each episode was last used, by row."""
        return self.index.column(_USED)

    @property
    def priority_offsets(self) -> Ints:
        """Where the priorities of each episode start, by row."""
        return self.index.column(_OFFSET)

    def check_fields(self, fields: Sequence[Field]) -> None:
        """Refuse an episode that looks other than the first one."""
        for column, field in zip(self.columns, fields, strict=True):
            if column.field != field:
                raise UsageError(
                    f"the episode has {field}, the first one had {column.field}; "
                    "use a buffer of its own"
                )

    def check_fits(self, length: int, records: Iterable[RecordWriter]) -> None:
        """Refuse an episode that could not be held even alone."""
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

    def put(self, length: int, records: Sequence[RecordWriter]) -> int:
        """Store an episode that was checked, forgetting others to make room; return its id."""
        for gone in self.index.ids[self._victims(length, records)].tolist():
            row = self.index.row_of(gone)
            assert row is not None
            self.remove(row)
        offset = 0
        if self.priorities is not None:
            offset = self.priorities.add(length, self.index, self.priority_offsets)
        sizes = [record.size for record in records]
        locations: list[int] = []
        try:
            for record in records:
                locations.append(self.arena.put(record.take(), record.size))
        except BaseException:  # a full disk
            freed = np.array(sizes[: len(locations)], np.int64)
            self.arena.free(np.array(locations, np.int64), freed)
            if self.priorities is not None:
                self.priorities.remove(offset, length)
            raise
        self.clock += 1
        episode_id = self.index.append(length, [self.clock, offset, *locations, *sizes])
        while (excess := self._excess()) is not None:
            self.remove(excess)
        return episode_id

    def _victims(self, length: int, records: Sequence[RecordWriter]) -> Ints:
        """Return the rows that must go before an episode can come, in the order of their going."""
        frames, nbytes = self.index.frames + length, self.arena.live_bytes
        nbytes += sum(record.size for record in records)
        rows: list[int] = []
        order = np.argsort(self.used, kind="stable") if self._lru else range(len(self.index))
        for row in order:
            few = self._max_frames is None or frames <= self._max_frames
            if few and (self._max_bytes is None or nbytes <= self._max_bytes):
                break
            rows.append(int(row))
            frames -= int(self.index.lengths[row])
            nbytes -= int(self._sizes()[:, row].sum())
        return np.array(rows, np.int64)

    def _excess(self) -> int | None:
        """Return the row that must go since dead bytes take too much memory; None if none must."""
        over = self._max_bytes is not None and (
            self.arena.nbytes
            > self._max_bytes + self._max_bytes // _SLACK + _SPARE_CHUNKS * self._chunk_bytes
        )
        if not over or len(self.index) < 2:
            return None
        # The newest one stays: it is what the caller just added.
        return int(np.argmin(self.used[:-1])) if self._lru else 0

    def remove(self, row: int) -> None:
        """Forget an episode."""
        if self.priorities is not None:
            self.priorities.remove(int(self.priority_offsets[row]), int(self.index.lengths[row]))
        locations, sizes = self._locations()[:, row].copy(), self._sizes()[:, row].copy()
        self.index.remove(row)
        self.arena.free(locations, sizes)
        dead = self.arena.nbytes + self.arena.spilled_bytes - self.arena.live_bytes
        if dead > max(2 * self._chunk_bytes, self.arena.live_bytes // _SLACK):
            table = self._locations()
            moved = self.arena.compact(table.reshape(-1), self._sizes().reshape(-1))
            if moved is not None:
                table[:] = moved.reshape(table.shape)

    def touch(self, rows: Ints) -> None:
        """Note that episodes were used."""
        self.clock += 1
        self.used[rows] = self.clock

    def addresses(self, rows: Ints) -> NDArray[np.uint64]:
        """Return where the records of episodes lie, [keys, rows]; valid until a change."""
        return self.arena.addresses(self._locations()[:, rows])

    def gather(self, column: int, records: NDArray[np.uint64], steps: Ints) -> Bytes:
        """Return frames [n, size] of one key, in memory that is used again."""
        out = self._memory.array((len(steps), self.columns[column].field.size), np.uint8)
        if len(steps):
            self.columns[column].gather(records, steps, out)
        return out

    def record_bytes(self) -> Ints:
        """Return the bytes of each episode, by row."""
        return np.asarray(self._sizes().sum(axis=0))

    def records(self, column: int, rows: Ints) -> tuple[Bytes, Ints]:
        """Copy records out, one behind the other; return them and their sizes."""
        sizes = self._sizes()[column][rows]
        return self.arena.gather(self._locations()[column][rows], sizes), sizes

    def _locations(self) -> Ints:
        return self.index.columns(_FIRST, _FIRST + len(self.columns))

    def _sizes(self) -> Ints:
        count = len(self.columns)
        return self.index.columns(_FIRST + count, _FIRST + 2 * count)
