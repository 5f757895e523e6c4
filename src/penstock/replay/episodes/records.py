"""One key of one episode as one piece of bytes, and single frames out of many such pieces.

A plain key is its frames, one behind the other. A compressed one is a table of uint32 offsets from
the start of the record, one more than there are units, and then the units. A unit is what is
compressed as one: a frame, a block of frames, or the whole episode. The last block of an
episode is filled up with copies of its last frame, so that all units of a key are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.reuse import ReusedMemory
from penstock.errors import CorruptFile, UsageError
from penstock.replay.arena import Parts
from penstock.replay.episodes.schema import Field, show
from penstock.replay.frames import (
    LARGEST_FRAME_BYTES,
    FrameCodec,
    RawFrames,
    choose_codec,
    frame_codec,
)

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Addresses = NDArray[np.uint64]

MODES = ("frame", "block", "episode")
_LARGEST_RECORD = 2**32 - 1
_SCRATCH_BYTES = 16 << 20
_ENTRY = np.dtype("<u4")
_PAIRS = RawFrames(2 * _ENTRY.itemsize)


class Column:
    """How one key is stored.

    Args:
        field: The key.
        codec: For units of its mode; in the mode "episode" for those of any length.
        mode: What is compressed as one: "frame", "block" or "episode".
        block_frames: Frames of a block.
    """

    def __init__(self, field: Field, codec: FrameCodec, mode: str, block_frames: int) -> None:
        self.field = field
        self.codec = codec
        self.mode = mode
        self.block_frames = block_frames if mode == "block" else 1
        self.plain = codec.id == "raw"
        self._frames = RawFrames(field.size)
        self._sizes = np.zeros(0, np.int64)

    @classmethod
    def choose(
        cls,
        field: Field,
        frames: NDArray[Any],
        codec: str | Mapping[str, Any],
        mode: str,
        block_frames: int,
    ) -> Column:
        """Choose a codec from the first episode.

        Args:
            field: The key.
            frames: The episode's frames [T, *shape].
            codec: A name of `frames.CODEC_NAMES`.
            mode: One of `MODES`.
            block_frames: Frames of a block.

        Raises:
            UsageError: There is no such codec, or it cannot hold these frames.
        """
        sample = frames
        if mode == "block":
            count = max(1, len(frames) // block_frames)
            sample = _filled_up(frames, block_frames)[: count * block_frames]
            sample = sample.reshape(count, block_frames, *frames.shape[1:])
        elif mode == "episode":
            sample = frames[np.newaxis]
        where = show(field.path)
        chosen = choose_codec(sample, codec, where)
        if mode == "episode" and chosen.id == "sparse" and field.size % 4:
            # It would hold this episode, but not one of another length.
            if codec != "auto":
                raise UsageError(f"{where}: sparse cannot hold frames of {field.size} bytes")
            chosen = choose_codec(sample, "lz4", where)
        return cls(field, chosen, mode, block_frames)

    def config(self) -> dict[str, Any]:
        """Return the JSON settings from which `from_config` rebuilds this column."""
        return {
            "path": list(self.field.path),
            "dtype": self.field.dtype,
            "shape": list(self.field.shape),
            "codec": self.codec.config(),
            "mode": self.mode,
            "block_frames": self.block_frames,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Column:
        """Rebuild a column; anything unexpected is a CorruptFile or an error of Python's."""
        shape = tuple(int(n) for n in config["shape"])
        field = Field(tuple(map(str, config["path"])), str(config["dtype"]), shape)
        codec = frame_codec(config["codec"])
        column = cls(field, codec, str(config["mode"]), int(config["block_frames"]))
        unit = field.size * column.block_frames
        fits = column.plain or column.mode == "episode" or codec.size == unit
        if column.mode not in MODES or column.block_frames < 1 or field.size < 1 or not fits:
            raise CorruptFile(f"the key {dict(config)!r} makes no sense")
        return column

    def encode(self, frames: NDArray[Any]) -> Bytes:
        """Return the record of an episode's frames [T, *shape]; perhaps a view of them.

        Raises:
            UsageError: The record would be larger than its table can say.
        """
        if self.plain:
            return frames.reshape(-1).view(np.uint8)
        per_unit = self._unit_frames(len(frames))
        units = -(-len(frames) // per_unit)
        self.check_size(len(frames), units, units * per_unit * self.field.size)
        data, lengths = self.encode_units(_filled_up(frames, per_unit), per_unit)
        return np.concatenate([_table(lengths), data])

    def encode_units(self, frames: NDArray[Any], per_unit: int) -> tuple[Bytes, Ints]:
        """Encode whole units of frames; return all bytes, perhaps a view, and their lengths."""
        units = len(frames) // per_unit
        rows = frames.reshape(units, -1).view(np.uint8)
        return self._codec_for(per_unit).encode(rows.reshape(units, per_unit * self.field.size))

    def check_size(self, length: int, units: int, nbytes: int) -> None:
        """Refuse an episode whose record is larger than its table can say.

        Raises:
            UsageError: It is, or a unit is larger than a codec takes.
        """
        unit_bytes = self._unit_frames(length) * self.field.size
        total = _ENTRY.itemsize * (units + 1) + nbytes
        if unit_bytes > LARGEST_FRAME_BYTES or total > _LARGEST_RECORD:
            raise UsageError(
                f"{show(self.field.path)}: an episode of {length} frames is too large for "
                f"{self.codec.id} in the mode {self.mode!r}; use raw, or shorter episodes"
            )

    def check(self, record: Bytes, length: int) -> None:
        """Refuse a record from a file whose table would lead outside of it.

        Raises:
            CorruptFile: It does.
        """
        if self.plain:
            good = record.size == length * self.field.size
        else:
            per_unit = self._unit_frames(length)
            self._codec_for(per_unit)  # there may be none for this length
            units = -(-length // per_unit)
            head = _ENTRY.itemsize * (units + 1)
            good = record.size >= head
            if good:
                table = record[:head].view(_ENTRY).astype(np.int64)
                sizes = np.diff(table)
                good = bool(table[0] == head and table[-1] == record.size)
                good = good and bool(
                    (sizes > 0).all() and (sizes <= per_unit * self.field.size).all()
                )
        if not good:
            raise CorruptFile(f"a record of {show(self.field.path)} makes no sense")

    def gather(
        self, records: Addresses, lengths: Ints, steps: Ints, out: Bytes, memory: ReusedMemory
    ) -> None:
        """Fill the rows of `out` [n, size] with frames.

        Args:
            records: Where the record of each frame's episode lies.
            lengths: Frames of that episode.
            steps: Which of them is wanted.
            out: Takes the frames.
            memory: For what must be unpacked on the way.
        """
        if self.plain:
            at = _moved(records, steps * self.field.size)
            self._frames.decode(at, self._equal_sizes(len(out)), out)
        elif self.mode == "frame":
            at, sizes = _units(records, _moved(records, steps * _ENTRY.itemsize))
            self.codec.decode(at, sizes, out)
        elif self.mode == "block":
            self._unpack(records, steps, self.block_frames, out, np.arange(len(out)), memory)
        else:
            for length in np.unique(lengths).tolist():
                rows = np.flatnonzero(lengths == length)
                self._unpack(records[rows], steps[rows], length, out, rows, memory)

    def _unpack(
        self,
        records: Addresses,
        steps: Ints,
        per_unit: int,
        out: Bytes,
        rows: NDArray[np.intp],
        memory: ReusedMemory,
    ) -> None:
        """Unpack each unit once, a few at a time, and copy the frames out of it."""
        entries = _moved(records, steps // per_unit * _ENTRY.itemsize)
        _, first, unit = np.unique(entries, return_index=True, return_inverse=True)
        at, sizes = _units(records[first], entries[first])
        unit_bytes = per_unit * self.field.size
        codec = self._codec_for(per_unit)
        some = max(1, _SCRATCH_BYTES // unit_bytes)
        for start in range(0, len(at), some):
            part = slice(start, start + some)
            count = len(at[part])
            units = memory.array((count, unit_bytes), np.uint8)
            codec.decode(at[part], sizes[part], units)
            here = np.flatnonzero((unit >= start) & (unit < start + count))
            frames = units.reshape(count, per_unit, self.field.size)
            out[rows[here]] = frames[unit[here] - start, steps[here] % per_unit]

    def _equal_sizes(self, count: int) -> Ints:
        """Return the size of a frame, over and over; kept, since batches are mostly alike."""
        if len(self._sizes) != count:
            self._sizes = np.full(count, self.field.size)
        return self._sizes

    def _unit_frames(self, length: int) -> int:
        return length if self.mode == "episode" else self.block_frames

    def _codec_for(self, per_unit: int) -> FrameCodec:
        if self.mode != "episode":
            return self.codec
        return frame_codec({**self.codec.config(), "size": per_unit * self.field.size})


class RecordWriter:
    """Makes the record of an episode that comes in parts: no more than its bytes are held.

    In the mode "episode" all frames are held until the end: they are compressed as one.

    Args:
        column: How the key is stored.
    """

    def __init__(self, column: Column) -> None:
        self._column = column
        self._per_unit = column.block_frames
        self._parts: list[Bytes] = []
        self._lengths: list[Ints] = []
        self._waiting: list[NDArray[Any]] = []  # less than a unit
        self._frames = 0
        self.size = 0

    def add(self, frames: NDArray[Any]) -> None:
        """Add frames [n, *shape]; they are copied or encoded.

        Raises:
            UsageError: The record would be larger than its table can say.
        """
        self._frames += len(frames)
        if self._column.plain:
            self._keep(frames.reshape(-1).view(np.uint8))
        elif self._column.mode == "episode":
            self._waiting.append(frames.copy())
        else:
            together = np.concatenate([*self._waiting, frames]) if self._waiting else frames
            whole = len(together) - len(together) % self._per_unit
            self._encode(together[:whole])
            self._waiting = [together[whole:].copy()] if whole < len(together) else []

    def finish(self) -> Bytes | Parts:
        """Return the record; the writer is of no use after that."""
        if self._column.mode == "episode" and not self._column.plain:
            return self._column.encode(np.concatenate(self._waiting))
        if self._waiting:
            self._encode(_filled_up(self._waiting.pop(), self._per_unit))
        parts, self._parts = self._parts, []
        return Parts(
            parts if self._column.plain else [_table(np.concatenate(self._lengths)), *parts]
        )

    def _encode(self, frames: NDArray[Any]) -> None:
        if len(frames):
            data, lengths = self._column.encode_units(frames, self._per_unit)
            self._keep(data)
            self._lengths.append(lengths)
            units = -(-self._frames // self._per_unit)
            self._column.check_size(self._frames, units, self.size)

    def _keep(self, data: Bytes) -> None:
        # A copy: what a codec returns is a view of memory for the worst case.
        self._parts.append(data.copy())
        self.size += data.size


def _table(lengths: Ints) -> Bytes:
    """Return the offsets of units, from the start of the record."""
    table = np.empty(len(lengths) + 1, np.int64)
    table[0] = _ENTRY.itemsize * len(table)
    np.cumsum(lengths, out=table[1:])
    table[1:] += table[0]
    return table.astype(_ENTRY).view(np.uint8)


def _filled_up(frames: NDArray[Any], multiple: int) -> NDArray[Any]:
    missing = -len(frames) % multiple
    if not missing:
        return frames
    return np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])


def _moved(addresses: Addresses, by: Ints) -> Addresses:
    return addresses + by.view(np.uint64)  # never negative


def _units(records: Addresses, entries: Addresses) -> tuple[Addresses, Ints]:
    """Look up where units lie and how long they are, given where their table entries are."""
    pairs = np.empty((len(entries), _PAIRS.size), np.uint8)
    _PAIRS.decode(entries, np.full(len(entries), _PAIRS.size), pairs)
    table = pairs.view(_ENTRY).astype(np.int64)
    return _moved(records, table[:, 0]), table[:, 1] - table[:, 0]
