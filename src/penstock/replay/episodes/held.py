"""Everything that a replay buffer holds, in one place: what its lock guards and what it saves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.replay.arena import Parts
from penstock.replay.episodes.frame_priority import FramePriorities
from penstock.replay.episodes.records import Column
from penstock.replay.episodes.sampling import Sampler
from penstock.replay.episodes.schema import Field
from penstock.replay.episodes.settings import Settings
from penstock.replay.episodes.store import EpisodeStore


class Held:
    """Episodes, their priorities, and the random numbers that draw from them.

    Not thread-safe: the buffer that owns it holds a lock.

    Args:
        settings: What the buffer was told.
        rng: Source of its random numbers.
        spill_dir: Where records beyond `max_bytes` go.
    """

    def __init__(
        self,
        settings: Settings,
        rng: np.random.Generator,
        spill_dir: str | os.PathLike[str] | None,
    ) -> None:
        self.settings = settings
        self.rng = rng
        self.as_tensordict = False
        self.store: EpisodeStore | None = None
        self.sampler: Sampler | None = None
        self.priorities = FramePriorities(settings.alpha) if settings.alpha is not None else None
        self._spill_dir = spill_dir

    def first_store(self, fields: Sequence[Field], arrays: Sequence[NDArray[Any]]) -> EpisodeStore:
        """Choose codecs from the first episode; nothing is held yet."""
        settings = self.settings
        columns = [
            Column.choose(field, array, codec, mode, settings.block_frames)
            for field, array, codec, mode in zip(
                fields, arrays, settings.codecs, settings.modes, strict=True
            )
        ]
        return self.new_store(columns)

    def check_fields(self, store: EpisodeStore, fields: Sequence[Field]) -> None:
        """Refuse an episode that looks other than the first one.

        Raises:
            UsageError: It does.
        """
        for column, field in zip(store.columns, fields, strict=True):
            if column.field != field:
                raise UsageError(
                    f"the episode has {field}, the first one had {column.field}; "
                    "use a buffer of its own"
                )

    def new_store(self, columns: Sequence[Column]) -> EpisodeStore:
        """Make an empty store with the buffer's limits."""
        return EpisodeStore(columns, self.settings, self._spill_dir)

    def adopt(self, store: EpisodeStore, as_tensordict: bool) -> None:
        """Hold a store from now on."""
        self.store = store
        self.sampler = Sampler(store.index, self.priorities)
        self.as_tensordict = as_tensordict

    def filled(self) -> tuple[EpisodeStore, Sampler]:
        """Return what batches come from.

        Raises:
            UsageError: There is no episode.
        """
        if self.store is None or self.sampler is None or not len(self.store.index):
            raise UsageError("the buffer is empty; add an episode first")
        return self.store, self.sampler

    def put(self, length: int, records: Sequence[NDArray[np.uint8] | Parts]) -> int:
        """Store an episode that was checked, forgetting others to make room; return its id."""
        store = self.store
        assert store is not None
        for gone in store.index.ids[store.victims(length, records)].tolist():
            self.forget(store.index.row_of(gone))
        leaf = 0
        if self.priorities is not None:
            leaf = self.priorities.add(length, store.index, store.leaves)
        try:
            episode_id = store.add(length, records, leaf)
        except BaseException:
            if self.priorities is not None:
                self.priorities.remove(leaf, length)
            raise
        while (row := store.excess()) is not None:
            self.forget(row)
        return episode_id

    def forget(self, row: int | None) -> None:
        """Forget the episode of a row."""
        store = self.store
        assert store is not None
        assert row is not None
        if self.priorities is not None:
            self.priorities.remove(int(store.leaves[row]), int(store.index.lengths[row]))
        store.remove(row)
