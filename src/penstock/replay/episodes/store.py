"""The episodes that a buffer holds: records in one arena, an index, priorities, who goes first.

A record is one key of one episode, one piece of bytes. Of a plain key it is its frames, one behind
the other; of a compressed one a table of uint32 offsets from the start of the record, one more than
there are frames, and then the frames, each compressed by itself.

In a folder, a segment holds the records of some episodes, key by key, as they lie in memory:
nothing is compressed again. The manifest says which episodes live, where their records are, and all
that decides the next draws.

Not thread-safe: the buffer that owns it holds a lock.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core import tree
from penstock.core.memory import format_bytes
from penstock.core.pack import Item
from penstock.core.reuse import ReusedMemory
from penstock.errors import CorruptFile, UsageError
from penstock.replay.arena import Arena
from penstock.replay.episodes.index import EpisodeIndex
from penstock.replay.episodes.schema import Settings
from penstock.replay.frames import FrameCodec, Lz4Frames, RawFrames, choose_codec, frame_codec
from penstock.replay.keys import Field, show
from penstock.replay.priority import SumTree
from penstock.replay.segments import Block, LogReader, Place, Saved, need, taking_in

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Addresses = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

HOLDER = "dict"
_VERSION = 1
_LARGEST_RECORD = 2**32 - 1
_ENTRY = np.dtype("<u4")
_PAIRS = RawFrames(2 * _ENTRY.itemsize)
_OLD_MODES = ("block", "episode")

# The index's extra columns: when it was used, where its priorities start; then locations and
# sizes of its records, per key.
_USED, _OFFSET, _FIRST = range(3)
_CHUNK_BYTES = 8 << 20
_LEAST_CHUNK_BYTES = 64 << 10
_FIRST_CAPACITY = 1024  # of the tree of priorities
_EPSILON = 1e-8  # so that a frame without error is still drawn now and then
_SLACK = 8  # memory held may exceed the byte limit by one part in so many, and these chunks
_SPARE_CHUNKS = 3  # the oldest is partly dead, the newest partly empty, and so is what moves


class Column:
    """How one key is stored."""

    def __init__(self, field: Field, codec: FrameCodec) -> None:
        self.field = field
        self.codec = codec
        self.plain = codec.id == "raw"
        self.old: Mapping[str, Any] | None = None  # its settings in a file of before

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
        column.old = config if old else None
        return column

    def encode(self, frames: NDArray[Any]) -> Bytes:
        """Return the record of an episode's frames [T, *shape]."""
        writer = RecordWriter(self)
        writer.add(frames, copied=False)
        return np.concatenate(list(writer.take()))

    def from_file(self, record: Bytes, length: int) -> Bytes:
        """Return a record that comes from a file as it is kept in memory."""
        if self.old is not None:
            return self.encode(self._split(record, length, self.old))
        if not self.plain:
            _offsets(record, length, self.field)
        elif record.size != length * self.field.size:
            raise CorruptFile(f"a record of {show(self.field.path)} makes no sense")
        return record

    def _split(self, record: Bytes, length: int, config: Mapping[str, Any]) -> Bytes:
        """Decode the units of a record of before: blocks of some frames, or the whole episode."""
        per_unit = int(config["block_frames"]) if config["mode"] == "block" else length
        if per_unit < 1:
            raise CorruptFile(f"the key {dict(config)!r} makes no sense")
        units, unit_bytes = -(-length // per_unit), per_unit * self.field.size
        table = _offsets(record, units, self.field, per_unit)
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


def _offsets(record: Bytes, units: int, field: Field, per_unit: int = 1) -> Ints:
    """Return the table of a record, and refuse one in which something leads outside."""
    head = _ENTRY.itemsize * (units + 1)
    table = np.zeros(1, np.int64)
    if record.size >= head:
        table = record[:head].view(_ENTRY).astype(np.int64)
    sizes = np.diff(table)
    whole = table[0] == head and table[-1] == record.size
    if not whole or not ((sizes > 0) & (sizes <= per_unit * field.size)).all():
        raise CorruptFile(f"a record of {show(field.path)} makes no sense")
    return table


def _moved(addresses: Addresses, by: Ints) -> Addresses:
    return addresses + by.view(np.uint64)  # never negative


class FramePriorities:
    """One priority per frame held; new frames get the largest so far.

    The frames of an episode take consecutive entries of the tree, behind those of the episode
    before; the *offset* of an episode is where they start. When the end is reached, all move to the
    front: the tree has twice the entries needed, so that this costs little per frame.
    """

    def __init__(self, alpha: float, index: EpisodeIndex) -> None:
        self.alpha, self.largest, self.cursor = alpha, 1.0, 0
        self.tree = SumTree(_FIRST_CAPACITY)
        self._index = index

    @property
    def offsets(self) -> Ints:
        """Where the priorities of each episode start, by row."""
        offsets: Ints = self._index.extra[_OFFSET]
        return offsets

    def add(self, length: int) -> int:
        """Make room for an episode, and return its offset."""
        if self.cursor + length > self.tree.capacity:
            frames, values = self._index.frames, self.held()
            self.tree = SumTree(max(_FIRST_CAPACITY, 2 * (frames + length)))
            self.tree.set(np.arange(frames), values)
            self.offsets[:] = self._index.positions
            self.cursor = frames
        self.cursor += length
        self.tree.set(np.arange(self.cursor - length, self.cursor), self.largest)
        return self.cursor - length

    def remove(self, offset: int, length: int) -> None:
        """Forget the priorities of an episode."""
        self.tree.set(np.arange(offset, offset + length), 0.0)

    def update(self, ids: Ints, priorities: Floats) -> None:
        """Set the priorities of frames; those that are gone are passed over."""
        rows, steps, alive = self._index.locate(ids)
        raised = (priorities[alive] + _EPSILON) ** self.alpha
        self.tree.set(self.offsets[rows[alive]] + steps[alive], raised)
        self.largest = float(raised.max(initial=self.largest))

    def draw(self, count: int, rng: np.random.Generator, good: Bools | None) -> tuple[Ints, Ints]:
        """Draw frames, of the rows that are `good` (None: all); return their rows and steps."""
        drawn = self.tree.sample(count, rng)
        rows = self.offsets.searchsorted(drawn, side="right") - 1
        if good is not None and not good[rows].all():
            # From some episodes only, by a running sum over all entries: exact, but linear.
            bad = np.flatnonzero(~good[rows])
            mass = self.tree.get(np.arange(self.cursor))
            owner = self.offsets.searchsorted(np.arange(self.cursor), side="right") - 1
            mass[(owner < 0) | ~good[owner]] = 0
            sums = np.cumsum(mass)
            again = sums.searchsorted(rng.random(bad.size) * sums[-1], side="right")
            drawn[bad] = np.minimum(again, np.flatnonzero(mass)[-1])
            rows = self.offsets.searchsorted(drawn, side="right") - 1
        return rows, drawn - self.offsets[rows]

    def held(self) -> Floats:
        """Return the entries of all frames held, by position."""
        return self.tree.get(self._entries())

    def restore(self, layout: dict[str, Any], values: Floats) -> None:
        """Lay the tree out as it was, so that it draws the same."""
        capacity, cursor = int(layout["capacity"]), int(layout["cursor"])
        largest = float(layout["largest"])
        offsets, ends = self.offsets, self.offsets + self._index.lengths
        apart = (ends[:-1] <= offsets[1:]).all() and (offsets[:1] >= 0).all()
        inside = ends[-1:].sum() <= cursor <= capacity
        if not (apart and inside and 0 < largest < math.inf):
            raise UsageError("the layout of the priorities makes no sense")
        self.tree, self.cursor, self.largest = SumTree(capacity), cursor, largest
        self.tree.set(self._entries(), values)

    def _entries(self) -> Ints:
        index = self._index
        return np.repeat(self.offsets - index.positions, index.lengths) + np.arange(index.frames)


class EpisodeStore:
    """Whole episodes, each key of each in one record; and all that decides the next draws.

    Attributes:
        columns: How each key is stored; empty until the first episode is there.
        as_tensordict: Whether that was a TensorDict.
    """

    def __init__(
        self,
        settings: Settings,
        spill_dir: str | os.PathLike[str] | None,
        rng: np.random.Generator,
    ) -> None:
        self.settings, self.rng = settings, rng
        self.columns: list[Column] = []
        self.as_tensordict = False
        self._memory = ReusedMemory()
        limit = settings.max_bytes
        self._max_bytes = limit if spill_dir is None else None
        chunk = min(_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, (limit or _CHUNK_BYTES << 5) >> 5))
        self._chunk_bytes = chunk
        self.arena = Arena(chunk, None if spill_dir is None else limit, spill_dir)
        self._keys = len(settings.paths)
        self.index = EpisodeIndex(_FIRST + 2 * self._keys)
        alpha = settings.alpha
        self.priorities = None if alpha is None else FramePriorities(alpha, self.index)
        self.clock = 0

    @property
    def nbytes(self) -> int:
        """Memory held: records, alive or not yet given back, and tables."""
        tree = self.priorities.tree.nbytes if self.priorities else 0
        return self.arena.nbytes + self.index.nbytes + tree

    @property
    def used(self) -> Ints:
        """When each episode was last used, by row."""
        used: Ints = self.index.extra[_USED]
        return used

    @property
    def locations(self) -> Ints:
        """Where the records lie, [keys, rows]."""
        return self.index.extra[_FIRST : _FIRST + self._keys]

    @property
    def sizes(self) -> Ints:
        """Bytes of the records, [keys, rows]."""
        return self.index.extra[_FIRST + self._keys :]

    def check_fits(self, length: int, records: Iterable[RecordWriter]) -> None:
        """Refuse an episode that could not be held even alone."""
        total, most = sum(record.size for record in records), self.settings.max_size
        advice = "cut it, or make the buffer larger"
        if most is not None and length > most:
            raise UsageError(
                f"an episode of {length} frames does not fit max_size={most}; {advice}"
            )
        if (most := self._max_bytes) is not None and total > most:
            problem = f"an episode of {format_bytes(total)} does not fit max_bytes={most}"
            raise UsageError(f"{problem}; {advice}")

    def put(self, length: int, records: Sequence[RecordWriter]) -> int:
        """Store an episode that was checked, forgetting others to make room; return its id."""
        sizes = [record.size for record in records]
        for gone in self.index.ids[self._victims(length, sum(sizes))].tolist():
            self.remove(self.index.row_of(gone))
        locations: list[int] = []
        try:
            for record in records:
                locations.append(self.arena.put(record.take(), record.size))
            offset = self.priorities.add(length) if self.priorities else 0
        except BaseException:  # a full disk, or no memory
            freed = np.array(sizes[: len(locations)], np.int64)
            self.arena.free(np.array(locations, np.int64), freed)
            raise
        self.clock += 1
        episode_id = self.index.append(length, [self.clock, offset, *locations, *sizes])
        # Dead bytes may take too much memory: then more must go, but not what was just added.
        while self._max_bytes is not None and len(self.index) > 1:
            slack = self._max_bytes // _SLACK + _SPARE_CHUNKS * self._chunk_bytes
            if self.arena.nbytes <= self._max_bytes + slack:
                break
            self.remove(self._order(len(self.index) - 1)[0])
        return episode_id

    def _order(self, count: int) -> list[int]:
        """Return the first so many rows, in the order of their going."""
        lru = self.settings.eviction == "lru"
        rows = np.argsort(self.used[:count], kind="stable") if lru else np.arange(count)
        return list(map(int, rows))

    def _victims(self, length: int, nbytes: int) -> list[int]:
        """Return the rows that must go before an episode can come."""
        frames, nbytes = self.index.frames + length, self.arena.live_bytes + nbytes
        most_frames, most_bytes = self.settings.max_size, self._max_bytes
        rows: list[int] = []
        for row in self._order(len(self.index)):
            few = most_frames is None or frames <= most_frames
            if few and (most_bytes is None or nbytes <= most_bytes):
                break
            rows.append(row)
            frames -= int(self.index.lengths[row])
            nbytes -= int(self.sizes[:, row].sum())
        return rows

    def remove(self, row: int | None) -> None:
        """Forget an episode."""
        assert row is not None
        if self.priorities is not None:
            offset = int(self.priorities.offsets[row])
            self.priorities.remove(offset, int(self.index.lengths[row]))
        locations, sizes = self.locations[:, row].copy(), self.sizes[:, row].copy()
        self.index.remove(row)
        self.arena.free(locations, sizes)
        dead = self.arena.nbytes + self.arena.spilled_bytes - self.arena.live_bytes
        if dead > max(2 * self._chunk_bytes, self.arena.live_bytes // _SLACK):
            table = self.locations
            moved = self.arena.compact(table.reshape(-1), self.sizes.reshape(-1))
            if moved is not None:
                table[:] = moved.reshape(table.shape)

    def gather(self, column: int, records: Addresses, steps: Ints) -> Bytes:
        """Return frames [n, size] of one key, in memory that is used again."""
        out = self._memory.array((len(steps), self.columns[column].field.size), np.uint8)
        self.columns[column].gather(records, steps, out)
        return out

    def blocks(self, some: Sequence[int] | None = None) -> dict[int, Block]:
        """Return the episodes by their ids; they never change."""
        ids, sizes = self.index.ids, self.sizes.sum(axis=0)
        if some is not None:
            held = np.isin(ids, some)
            ids, sizes = ids[held], sizes[held]
        return dict(zip(ids.tolist(), map(Block, sizes.tolist()), strict=True))

    def copy(self, blocks: Sequence[int]) -> list[Item]:
        """Return the records of episodes."""
        rows = np.searchsorted(self.index.ids, np.array(blocks, np.int64))
        items = [Item("ids", self.index.ids[rows]), Item("lengths", self.index.lengths[rows])]
        for number in range(len(self.columns)):
            sizes = self.sizes[number][rows]
            data = self.arena.gather(self.locations[number][rows], sizes)
            items += [Item(f"sizes.{number}", sizes), Item(f"records.{number}", data)]
        return items

    def state(self, blocks: Mapping[int, Block]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return what is not in the episodes."""
        index, priorities = self.index, self.priorities
        state: dict[str, Any] = {
            "version": _VERSION,
            "settings": asdict(self.settings),
            "rng": tree.flatten(self.rng.bit_generator.state, lambda path, value: None),
            "tensordict": self.as_tensordict,
            "columns": [column.config() for column in self.columns] or None,
            "clock": self.clock,
            "next": [index.next_id, index.next_frame],
        }
        named = {"ids": index.ids, "starts": index.starts, "lengths": index.lengths}
        named |= {"used": self.used, "leaves": index.extra[_OFFSET]}
        tables: dict[str, NDArray[Any]] = {name: table.copy() for name, table in named.items()}
        if priorities is not None:
            layout = {"cursor": priorities.cursor, "largest": priorities.largest}
            state["priorities"] = {"capacity": priorities.tree.capacity, **layout}
            tables["priorities"] = priorities.held()
        return state, tables


def load(
    folder: str | os.PathLike[str], spill_dir: str | os.PathLike[str] | None
) -> tuple[EpisodeStore, Saved]:
    """Return what was saved, every byte verified."""
    with LogReader(os.fspath(folder), HOLDER) as log, taking_in(folder, UsageError):
        return _load(log, spill_dir)


def _load(log: LogReader, spill_dir: str | os.PathLike[str] | None) -> tuple[EpisodeStore, Saved]:
    state = log.state
    need(state["version"] == _VERSION, "a version that is not of this penstock; upgrade it")
    rng = np.random.default_rng()
    rng.bit_generator.state = tree.unflatten(state["rng"], _refuse)
    saved = Saved(log.folder.resolve(), log.digest)
    store = EpisodeStore(Settings.from_json(state["settings"]), spill_dir, rng)
    if state["columns"] is None:
        return store, saved
    columns = [Column.from_config(config) for config in state["columns"]]
    paths = tuple(column.field.path for column in columns)
    need(paths == store.settings.paths, "its keys contradict each other")
    store.columns, store.as_tensordict = columns, state["tensordict"] is True
    names = ("ids", "starts", "lengths", "used", "leaves", "segment", "place")
    ids, starts, lengths, used, offsets, segments, places = log.ints(*names)
    if len(ids):  # as they come from an index
        good = max(lengths.max(), starts.max()) < 2**62
        good = good and (np.diff(ids) > 0).all() and (np.diff(starts) >= lengths[:-1]).all()
        good = good and min(ids[0], starts[0], lengths.min() - 1) >= 0
        good = good and ids[-1] < state["next"][0] and starts[-1] + lengths[-1] <= state["next"][1]
        need(good, "its list of episodes makes no sense")
    extra = np.zeros((_FIRST + 2 * len(columns), len(ids)), np.int64)
    extra[_USED], extra[_OFFSET] = used, offsets
    for number, name in enumerate(log.segments):
        rows = np.flatnonzero(segments == number)
        at = places[rows]
        with log.open_segment(name) as segment:
            held, steps = segment.read("ids"), segment.read("lengths")
            good = at.size and at.min() >= 0 and at.max() < len(held)
            good = good and np.array_equal(held[at], ids[rows])
            need(good and np.array_equal(steps[at], lengths[rows]), f"{name} has others")
            total = 0
            for k, column in enumerate(columns):
                sizes, data = segment.read(f"sizes.{k}"), segment.read(f"records.{k}")
                good = sizes.shape == held.shape and (sizes >= 1).all() and sizes.sum() == data.size
                need(good, f"the records of {name} make no sense")
                total += data.size
                ends = np.cumsum(sizes)
                for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                    record = data[ends[place] - sizes[place] : ends[place]]
                    record = column.from_file(record, int(steps[place]))
                    extra[_FIRST + k, row] = store.arena.put([record], record.size)
                    extra[_FIRST + len(columns) + k, row] = record.size
        if not any(column.old for column in columns):  # those are written anew, as they are now
            saved.sizes[name] = total
            saved.places.update({int(held[k]): Place(name, k) for k in at.tolist()})
    store.index.restore(ids, starts, lengths, extra, state["next"])
    store.clock = int(state["clock"])
    if store.priorities is not None:
        store.priorities.restore(state["priorities"], log.item("priorities"))
    return store, saved


def _refuse(record: dict[str, Any]) -> Any:
    raise CorruptFile(f"{record!r} makes no sense")
