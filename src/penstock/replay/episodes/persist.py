"""A replay buffer in a folder: episodes as segments, everything else in the manifest.

A segment holds the records of some episodes, key by key, as they lie in memory: nothing is
compressed again. The manifest says which episodes live, where their records are, and all that
decides the next draws.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core import tree
from penstock.core.pack import Item
from penstock.errors import CorruptFile, DataError, UsageError
from penstock.replay.episodes.schema import Settings
from penstock.replay.episodes.store import Column, EpisodeStore
from penstock.replay.segments import Block, LogReader, Place, Saved, SegmentLog

Ints = NDArray[np.int64]

HOLDER = "dict"
_VERSION = 1
_NONSENSE = (LookupError, ValueError, TypeError, AttributeError, OverflowError, UsageError)


@dataclass
class Content:
    """A buffer's store as `save_blocks` asks for it, each episode a block."""

    store: EpisodeStore

    def blocks(self, some: Sequence[int] | None = None) -> dict[int, Block]:
        """Return the episodes by their ids; they never change."""
        ids, sizes = self.store.index.ids, self.store.sizes.sum(axis=0)
        if some is not None:
            held = np.isin(ids, some)
            ids, sizes = ids[held], sizes[held]
        return dict(zip(ids.tolist(), map(Block, sizes.tolist()), strict=True))

    def copy(self, blocks: Sequence[int]) -> list[Item]:
        """Return the records of episodes."""
        store = self.store
        rows = np.searchsorted(store.index.ids, np.array(blocks, np.int64))
        items = [Item("ids", store.index.ids[rows]), Item("lengths", store.index.lengths[rows])]
        for number in range(len(store.columns)):
            sizes = store.sizes[number][rows]
            data = store.arena.gather(store.locations[number][rows], sizes)
            items += [Item(f"sizes.{number}", sizes), Item(f"records.{number}", data)]
        return items

    def state(self, blocks: Mapping[int, Block]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return what is not in the episodes."""
        store, index, priorities = self.store, self.store.index, self.store.priorities
        state: dict[str, Any] = {
            "version": _VERSION,
            "settings": asdict(store.settings),
            "rng": tree.flatten(store.rng.bit_generator.state, lambda path, value: None),
            "tensordict": store.as_tensordict,
            "columns": [column.config() for column in store.columns] or None,
            "clock": store.clock,
            "next": [index.next_id, index.next_frame],
        }
        tables: dict[str, NDArray[Any]] = {
            "ids": index.ids.copy(),
            "starts": index.starts.copy(),
            "lengths": index.lengths.copy(),
            "used": store.used.copy(),
            "leaves": np.zeros_like(index.ids),
        }
        if priorities is not None:
            state["priorities"] = {
                "capacity": priorities.tree.capacity,
                "cursor": priorities.cursor,
                "largest": priorities.largest,
            }
            tables["leaves"] = priorities.offsets.copy()
            tables["priorities"] = priorities.held()
        return state, tables


def load(folder: Path, spill_dir: str | os.PathLike[str] | None) -> tuple[EpisodeStore, Saved]:
    """Return what was saved, every byte verified."""
    with SegmentLog.read(folder, HOLDER) as log:
        try:
            return _load(log, spill_dir)
        except DataError:
            raise
        except _NONSENSE as error:
            raise CorruptFile(f"{folder} is damaged: its state makes no sense ({error})") from error


def _load(log: LogReader, spill_dir: str | os.PathLike[str] | None) -> tuple[EpisodeStore, Saved]:
    state = log.state
    if state["version"] != _VERSION:
        raise CorruptFile(f"{log.folder}: version {state['version']!r}; upgrade penstock")
    rng = np.random.default_rng()
    rng.bit_generator.state = tree.unflatten(state["rng"], _refuse)
    settings = Settings.from_json(state["settings"])
    saved = Saved(log.folder.resolve(), log.digest)
    store = EpisodeStore(settings, spill_dir, rng)
    if state["columns"] is None:
        return store, saved
    columns = [Column.from_config(config) for config in state["columns"]]
    if tuple(column.field.path for column in columns) != settings.paths:
        raise CorruptFile(f"{log.folder} is damaged: its keys contradict each other")
    store.columns, store.as_tensordict = columns, state["tensordict"] is True
    names = ("ids", "starts", "lengths", "used", "leaves", "segment", "place")
    table = {name: _ints(log, name) for name in names}
    _check_order(log, table, state["next"])
    extra = np.zeros((2 + 2 * len(columns), len(table["ids"])), np.int64)
    extra[0], extra[1] = table["used"], table["leaves"]
    for number, name in enumerate(log.segments):
        rows = np.flatnonzero(table["segment"] == number)
        size = _read_segment(log, name, store, table, rows, extra)
        if any(column.is_old for column in columns):
            continue  # they are written anew, as they are in memory now
        saved.sizes[name] = size
        places = (Place(name, at) for at in table["place"][rows].tolist())
        saved.places.update(zip(table["ids"][rows].tolist(), places, strict=True))
    columns_of_index = (table[name].tolist() for name in ("ids", "starts", "lengths"))
    store.index.restore(list(zip(*columns_of_index, extra.T.tolist(), strict=True)), state["next"])
    store.clock = int(state["clock"])
    if store.priorities is not None:
        store.priorities.restore(state["priorities"], log.item("priorities"))
    return store, saved


def _read_segment(
    log: LogReader,
    name: str,
    store: EpisodeStore,
    table: dict[str, Ints],
    rows: Ints,
    extra: Ints,
) -> int:
    """Put the records of some episodes into the store; note where they are in `extra`.

    Returns:
        Bytes of all records of the segment.
    """
    count = len(store.columns)
    total = 0
    with log.open_segment(name) as segment:
        ids, lengths = segment.read("ids"), segment.read("lengths")
        places = table["place"][rows]
        same = places.size and places.min() >= 0 and places.max() < len(ids)
        if not same or not (
            np.array_equal(ids[places], table["ids"][rows])
            and np.array_equal(lengths[places], table["lengths"][rows])
        ):
            raise CorruptFile(f"{segment.path} is damaged: it holds other episodes")
        for number, column in enumerate(store.columns):
            sizes, data = segment.read(f"sizes.{number}"), segment.read(f"records.{number}")
            if sizes.shape != ids.shape or (sizes < 1).any() or sizes.sum() != data.size:
                raise CorruptFile(f"{segment.path} is damaged: its records make no sense")
            total += data.size
            ends = np.cumsum(sizes)
            for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                record = data[ends[place] - sizes[place] : ends[place]]
                record = column.from_file(record, int(lengths[place]))
                extra[2 + number, row] = store.arena.put([record], record.size)
                extra[2 + count + number, row] = record.size
    return total


def _check_order(log: LogReader, table: dict[str, Ints], following: list[int]) -> None:
    """Refuse tables from which no index could have come."""
    ids, starts, lengths, segments = (table[n] for n in ("ids", "starts", "lengths", "segment"))
    good = all(values.shape == ids.shape and ids.ndim == 1 for values in table.values())
    if good and len(ids):
        small = max(lengths.max(), starts.max()) < 2**62
        rising = (np.diff(ids) > 0).all() and (starts[:-1] + lengths[:-1] <= starts[1:]).all()
        least = min(ids[0], starts[0], lengths.min() - 1, segments.min()) >= 0
        ends = ids[-1] < following[0] and starts[-1] + lengths[-1] <= following[1]
        good = bool(small and rising and least and ends and segments.max() < len(log.segments))
    if not good:
        raise CorruptFile(f"{log.folder} is damaged: its list of episodes makes no sense")


def _ints(log: LogReader, name: str) -> Ints:
    values = log.item(name)
    if values.dtype != np.int64:
        raise CorruptFile(f"{log.folder} is damaged: {name!r} is {values.dtype}")
    return values


def _refuse(record: dict[str, Any]) -> Any:
    raise CorruptFile(f"{record!r} makes no sense")
