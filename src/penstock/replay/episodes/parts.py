"""An episode that comes in parts: encoded as it comes, and in the buffer only when it is whole."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from typing_extensions import Self

from penstock.errors import UsageError
from penstock.replay.episodes.held import Held
from penstock.replay.episodes.records import RecordWriter
from penstock.replay.episodes.schema import is_tensordict, read_episode
from penstock.replay.episodes.store import EpisodeStore


class EpisodeInParts:
    """An episode under way; made by `DictReplayBuffer.episode`, used by one thread.

    Attributes:
        id: Of the episode, for `DictReplayBuffer.remove`; -1 before the end of the block.

    Args:
        held: What the buffer holds.
        lock: Guards it.
    """

    def __init__(self, held: Held, lock: threading.RLock) -> None:
        self.id = -1
        self._held = held
        self._lock = lock
        self._store: EpisodeStore | None = None
        self._writers: list[RecordWriter] = []
        self._length = 0
        self._as_tensordict = False

    def __len__(self) -> int:
        """Count the frames that came so far."""
        return self._length

    def extend(self, part: Any) -> None:
        """Add frames to the end of the episode.

        Args:
            part: As for `DictReplayBuffer.add`; it is copied.

        Raises:
            UsageError: It is not as for `add`, or the episode would not fit the buffer any more.
        """
        if self.id >= 0:
            raise UsageError("this episode is in the buffer already; begin another")
        fields, arrays, length = read_episode(part, self._held.settings.paths)
        if self._store is None:
            with self._lock:
                store = self._held.store or self._held.first_store(fields, arrays)
            self._held.check_fields(store, fields)
            self._store = store
            self._writers = [RecordWriter(column) for column in store.columns]
            self._as_tensordict = is_tensordict(part)
        self._held.check_fields(self._store, fields)
        for writer, array in zip(self._writers, arrays, strict=True):
            writer.add(array)
        self._length += length
        self._store.check_fits(self._length, self._writers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        writers, self._writers = self._writers, []
        if kind is not None:
            return
        store = self._store
        if store is None:
            raise UsageError("the episode has no frames; extend it by at least one")
        records = [writer.finish() for writer in writers]
        del writers  # their parts go as they are copied
        store.check_fits(self._length, records)
        with self._lock:
            if self._held.store is None:
                self._held.adopt(store, self._as_tensordict)
            elif self._held.store is not store:
                self._check_same(store, self._held.store)
            self.id = self._held.put(self._length, records)

    @staticmethod
    def _check_same(mine: EpisodeStore, theirs: EpisodeStore) -> None:
        """Refuse records that were encoded while another thread settled other codecs."""
        for one, other in zip(mine.columns, theirs.columns, strict=True):
            if one.config() != other.config():
                raise UsageError(
                    f"{other.field}: another thread added the first episode meanwhile; "
                    "add this one again"
                )
