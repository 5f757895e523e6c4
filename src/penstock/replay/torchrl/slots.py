"""Slots of compressed frames: for each key a table that says where the bytes of a slot lie.

A slot is written over and over, as a ring buffer does. What was there before is given back to the
arena, and when too much of the arena is dead, what is alive moves together. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.replay.arena import Arena
from penstock.replay.frames import FrameCodec

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_SLACK_BYTES = 16 << 20  # dead memory that is not worth moving anything for


class Encoded(NamedTuple):
    """Frames as bytes, one after another."""

    data: Bytes
    lengths: Ints


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
        spill_dir: Path | str | None = None,
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

    def encode(self, column: int, frames: Bytes) -> Encoded:
        """Encode frames of shape [n, size]; changes nothing."""
        return Encoded(*self.codecs[column].encode(frames))

    def store(self, slots: Ints, encoded: Mapping[int, Encoded]) -> None:
        """Put frames into slots, each of them named once; what was there is given back."""
        fresh: dict[int, Ints] = {}
        try:
            for column, (data, lengths) in encoded.items():
                fresh[column] = self.arena.put_many(data, lengths)
        except BaseException:  # a full disk: what is stored stays as it is
            for column, locations in fresh.items():
                self.arena.free(locations, encoded[column].lengths)
            raise
        for column, locations in fresh.items():
            row = self._row[column]
            places, sizes = self._locations[row], self._lengths[row]
            old = places[slots]
            alive = old >= 0
            freed = sizes[slots][alive].astype(np.int64)
            places[slots] = locations
            sizes[slots] = encoded[column].lengths
            if freed.size:
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
        return Encoded(self.arena.gather(self._locations[row][slots], lengths), lengths)

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
