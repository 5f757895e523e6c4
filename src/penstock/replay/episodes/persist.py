"""A replay buffer in a folder: new episodes as segments, everything else in the manifest.

A segment holds the records of some episodes, key by key, as they lie in memory: nothing is
compressed again. The manifest says which episodes live, where their records are, and all that
decides the next draws. A segment of which less than half lives is written anew with the next save,
so that a folder is never much more than twice the buffer.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core import tree
from penstock.core.pack import Item
from penstock.errors import CorruptFile, DataError, UsageError
from penstock.replay.episodes.held import Held
from penstock.replay.episodes.records import Column
from penstock.replay.episodes.settings import Settings
from penstock.replay.episodes.store import EpisodeStore
from penstock.replay.segments import LogReader, SegmentLog

Ints = NDArray[np.int64]

HOLDER = "dict"
_VERSION = 1
_SEGMENT_BYTES = 64 << 20
_SPARE_ROUNDS = 8  # for what other threads add meanwhile
_NONSENSE = (LookupError, ValueError, TypeError, AttributeError, OverflowError, UsageError)


@dataclass(frozen=True)
class Saved:
    """What the last save left in a folder.

    Args:
        folder: The folder.
        digest: Of that very commit.
        places: For each episode, its segment and its place in there.
        sizes: Bytes of records in each segment.
    """

    folder: Path
    digest: str
    places: dict[int, tuple[str, int]]
    sizes: dict[str, int]


def save(held: Held, lock: threading.RLock, folder: Path, saved: Saved | None) -> Saved:
    """Write what a folder lacks, then commit.

    Args:
        held: What to save.
        lock: Guards it; held only while something is copied out of it.
        folder: Where to.
        saved: What the last call returned.
    """
    with SegmentLog.create_or_open(folder, HOLDER) as log:
        places: dict[int, tuple[str, int]] = {}
        sizes: dict[str, int] = {}
        # Only if nobody else has saved there since: the names of segments alone prove nothing.
        if saved and saved.folder == folder.resolve() and saved.digest == log.digest:
            places, sizes = dict(saved.places), dict(saved.sizes)
            with lock:
                _give_up_sparse(held.store, places, sizes)
        with lock:
            rounds = 2 * (held.store.live_bytes if held.store else 0) // _SEGMENT_BYTES
        rounds += _SPARE_ROUNDS
        while True:
            with lock:
                batch, complete = _missing(held.store, places, everything=rounds <= 0)
                items = _segment_items(held.store, batch) if held.store else []
                ids = held.store.index.ids[batch].tolist() if held.store else []
                if complete:  # what is committed is the state of this very moment
                    state, tables = _state(held), _tables(held)
            if ids:
                name = log.append(items, {"episodes": len(ids)})
                sizes[name] = sum(item.values.nbytes for item in items)
                places.update((identity, (name, at)) for at, identity in enumerate(ids))
            if complete:
                break
            rounds -= 1
        live = tables["ids"].tolist()
        places = {identity: places[identity] for identity in live}
        keep = sorted({name for name, _ in places.values()})
        numbers = {name: number for number, name in enumerate(keep)}
        tables["segment"] = np.array([numbers[places[i][0]] for i in live], np.int64)
        tables["place"] = np.array([places[i][1] for i in live], np.int64)
        log.commit(state, [Item(name, values) for name, values in tables.items()], keep=keep)
        return Saved(folder.resolve(), log.digest, places, {name: sizes[name] for name in keep})


def load(folder: Path, spill_dir: str | os.PathLike[str] | None) -> tuple[Held, Saved]:
    """Return what was saved, every byte verified.

    Raises:
        CorruptFile: The folder is damaged.
    """
    with SegmentLog.read(folder, HOLDER) as log:
        try:
            return _load(log, spill_dir)
        except DataError:
            raise
        except _NONSENSE as error:
            raise CorruptFile(f"{folder} is damaged: its state makes no sense ({error})") from error


def _give_up_sparse(
    store: EpisodeStore | None, places: dict[int, tuple[str, int]], sizes: dict[str, int]
) -> None:
    """Forget the places of dead episodes, and of all those in segments that are mostly dead."""
    alive = dict.fromkeys(sizes, 0)
    live = (
        zip(store.index.ids.tolist(), store.record_bytes().tolist(), strict=True) if store else ()
    )
    held = dict(live)
    for identity in list(places):
        if identity in held:
            alive[places[identity][0]] += held[identity]
        else:
            del places[identity]
    for name, count in alive.items():
        if 2 * count < sizes[name]:
            del sizes[name]
    for identity in [i for i, (name, _) in places.items() if name not in sizes]:
        del places[identity]


def _missing(
    store: EpisodeStore | None, places: dict[int, tuple[str, int]], everything: bool
) -> tuple[Ints, bool]:
    """Return rows that no segment holds yet, as many as one takes; and whether these are all."""
    if store is None:
        return np.zeros(0, np.int64), True
    written = np.fromiter(places, np.int64, len(places))
    rows = np.flatnonzero(~np.isin(store.index.ids, written))
    sums = np.cumsum(store.record_bytes()[rows])
    count = max(1, int(sums.searchsorted(_SEGMENT_BYTES, side="right")))
    if everything or count >= len(rows):
        return rows, True
    return rows[:count], False


def _segment_items(store: EpisodeStore | None, rows: Ints) -> list[Item]:
    assert store is not None
    items = [
        Item("ids", store.index.ids[rows]),
        Item("lengths", store.index.lengths[rows]),
    ]
    for number in range(len(store.columns)):
        data, sizes = store.records(number, rows)
        items += [Item(f"sizes.{number}", sizes), Item(f"records.{number}", data)]
    return items


def _state(held: Held) -> dict[str, Any]:
    store, priorities = held.store, held.priorities
    return {
        "version": _VERSION,
        "settings": held.settings.to_json(),
        "rng": tree.flatten(held.rng.bit_generator.state, lambda path, value: None),
        "tensordict": held.as_tensordict,
        "columns": [column.config() for column in store.columns] if store else None,
        "clock": store.clock if store else 0,
        "next": [store.index.next_id, store.index.next_frame] if store else [0, 0],
        "priorities": priorities
        and {
            "capacity": priorities.tree.capacity,
            "cursor": priorities.cursor,
            "largest": priorities.largest,
        },
    }


def _tables(held: Held) -> dict[str, NDArray[Any]]:
    if held.store is None:
        return {"ids": np.zeros(0, np.int64)}
    store, index = held.store, held.store.index
    tables: dict[str, NDArray[Any]] = {
        "ids": index.ids.copy(),
        "starts": index.starts.copy(),
        "lengths": index.lengths.copy(),
        "used": store.used.copy(),
        "leaves": store.leaves.copy(),
    }
    if held.priorities is not None:
        tables["priorities"] = held.priorities.held(index, store.leaves)
    return tables


def _load(log: LogReader, spill_dir: str | os.PathLike[str] | None) -> tuple[Held, Saved]:
    state = log.state
    if state["version"] != _VERSION:
        raise CorruptFile(f"{log.folder}: version {state['version']!r}; upgrade penstock")
    rng = np.random.default_rng()
    rng.bit_generator.state = tree.unflatten(state["rng"], _refuse)
    held = Held(Settings.from_json(state["settings"]), rng, spill_dir)
    saved = Saved(log.folder.resolve(), log.digest, {}, {})
    if state["columns"] is None:
        return held, saved
    columns = [Column.from_config(config) for config in state["columns"]]
    if tuple(column.field.path for column in columns) != held.settings.paths:
        raise CorruptFile(f"{log.folder} is damaged: its keys contradict each other")
    store = held.new_store(columns)
    names = ("ids", "starts", "lengths", "used", "leaves", "segment", "place")
    table = {name: _ints(log, name) for name in names}
    _check_order(log, table, state["next"])
    extra = np.zeros((2 + 2 * len(columns), len(table["ids"])), np.int64)
    extra[0], extra[1] = table["used"], table["leaves"]
    for number, name in enumerate(log.segments):
        rows = np.flatnonzero(table["segment"] == number)
        saved.sizes[name] = _read_segment(log, name, store, table, rows, extra)
        saved.places.update(
            (identity, (name, at))
            for identity, at in zip(
                table["ids"][rows].tolist(), table["place"][rows].tolist(), strict=True
            )
        )
    store.restore(table["ids"], table["starts"], table["lengths"], extra, np.array(state["next"]))
    store.clock = int(state["clock"])
    held.adopt(store, state["tensordict"] is True)
    if held.priorities is not None:
        layout = state["priorities"]
        held.priorities.restore(
            int(layout["capacity"]),
            int(layout["cursor"]),
            float(layout["largest"]),
            store.index,
            store.leaves,
        )
        held.priorities.fill(store.index, store.leaves, log.item("priorities"))
    return held, saved


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
                column.check(record, int(lengths[place]))
                extra[2 + number, row] = store.put_records(record, sizes[place : place + 1])[0]
                extra[2 + count + number, row] = sizes[place]
    return total


def _check_order(log: LogReader, table: dict[str, Ints], following: list[int]) -> None:
    """Refuse tables from which no index could have come."""
    ids, starts, lengths = table["ids"], table["starts"], table["lengths"]
    good = all(values.shape == ids.shape and ids.ndim == 1 for values in table.values())
    good = good and bool((lengths > 0).all() and (np.diff(ids) > 0).all())
    if good and len(ids):
        segments = table["segment"]
        good = bool(
            ids[0] >= 0
            and starts[0] >= 0
            and lengths.max() < 2**62
            and starts.max() < 2**62
            and (starts[:-1] + lengths[:-1] <= starts[1:]).all()
            and ids[-1] < following[0]
            and starts[-1] + lengths[-1] <= following[1]
            and segments.min() >= 0
            and segments.max() < len(log.segments)
        )
    if not good:
        raise CorruptFile(f"{log.folder} is damaged: its list of episodes makes no sense")


def _ints(log: LogReader, name: str) -> Ints:
    values = log.item(name)
    if values.dtype != np.int64:
        raise CorruptFile(f"{log.folder} is damaged: {name!r} is {values.dtype}")
    return values


def _refuse(record: dict[str, Any]) -> Any:
    raise CorruptFile(f"{record!r} makes no sense")
