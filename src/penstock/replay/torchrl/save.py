"""A CompressedStorage in a folder: each save writes what changed, and a crash leaves the last one.

The folder is a `SegmentLog`. Slots are saved by blocks of 256; a save writes the blocks that have
changed since the last one into new segments, and the manifest says which segment holds the last
content of each block. Plain keys can be changed in place, past the storage: a checksum per block
notices.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from penstock.core.pack import Item
from penstock.errors import CorruptFile, DataError, UsageError
from penstock.replay.segments import LogReader, SegmentLog
from penstock.replay.torchrl.content import (
    BLOCK,
    NONSENSE,
    Ints,
    Part,
    SlotTracker,
    describe,
    install,
    part_of,
)
from penstock.replay.torchrl.keys import as_rows, as_words
from penstock.tensors import DTYPE_NAMES

if TYPE_CHECKING:
    from penstock.replay.torchrl.storage import CompressedStorage

HOLDER = "CompressedStorage"
_SEGMENT_BYTES = 64 << 20
_MOST_SEGMENTS = 48


class SegmentCheckpointer(StorageCheckpointerBase):  # type: ignore[misc]
    """Saves a CompressedStorage into a folder, each time only what changed; crash-safe."""

    def dumps(self, storage: CompressedStorage, path: str | PathLike[str]) -> None:
        """Save; a storage that was saved to this folder before writes only what changed.

        Other threads may go on using the storage meanwhile; saved is its state at the end. Of
        `ReplayBuffer.dumps`, which calls this, only this part is crash-safe: TorchRL writes the
        cursor of the writer into a file of its own, after it.

        Raises:
            UsageError: Nothing was ever written, or the folder holds something else.
            StorageError: The disk refuses; what was saved before stays.
        """
        self._refuse_hooks()
        if not storage.initialized:
            raise UsageError("this storage was never written; there is nothing to save")
        with storage._saving, SegmentLog.create_or_open(str(path), HOLDER) as log:
            _save(storage, log)

    def loads(self, storage: CompressedStorage, path: str | PathLike[str]) -> None:
        """Load; the storage must be as large as the one that was saved.

        Raises:
            UsageError: It is of another size.
            DataError: The folder holds no such thing, or is damaged; the storage is unchanged.
        """
        self._refuse_hooks()
        with storage._lock, SegmentLog.read(str(path), HOLDER) as log:
            _load(storage, log)

    def _refuse_hooks(self) -> None:
        if self._save_hooks or self._load_hooks:
            raise UsageError("hooks see whole tensors, which a compressed storage does not have")


def _save(storage: CompressedStorage, log: SegmentLog) -> None:
    """Write most of it while others use the storage, then what they changed, then commit."""
    with storage._lock:
        draft = _Draft(storage._tracker, log)
        groups = list(_groups(storage, draft.missing()))
    try:
        for group in groups:
            with storage._lock:
                if not draft.is_about(storage._tracker):
                    break
                items = draft.take(storage, group)
            draft.append(log, items, group)
        with storage._lock:
            if not draft.is_about(storage._tracker):  # emptied, loaded, or with new keys
                draft = _Draft(storage._tracker, log)
            crcs = _checksums(storage, draft.tracker.blocks())
            draft.home[draft.tracker.changed | (crcs != draft.crcs)] = -1
            for group in _groups(storage, draft.missing()):
                draft.append(log, draft.take(storage, group), group)
            _commit(storage, log, draft)
    except BaseException:
        draft.tracker.changed |= draft.changed_before
        raise


class _Draft:
    """A save in the making: which segment will hold which block."""

    def __init__(self, tracker: SlotTracker, log: SegmentLog) -> None:
        self.tracker, self.epoch = tracker, tracker.epoch
        self.changed_before = tracker.changed.copy()
        self.home = np.full_like(tracker.home, -1)
        self.crcs = tracker.crcs.copy()
        self.names: list[str] = []
        self.sizes: list[int] = []
        # Otherwise it is a new folder, or somebody else saved there meanwhile.
        if tracker.digest and tracker.digest == log.digest:
            self.home = tracker.home.copy()
            self.names, self.sizes = list(tracker.segments), list(tracker.segments.values())
            self.home[tracker.changed] = -1
            _retire(self.home, self.sizes)

    def is_about(self, tracker: SlotTracker) -> bool:
        """Tell whether the storage still has the structure that this save began with."""
        return tracker is self.tracker and tracker.epoch == self.epoch

    def missing(self) -> Ints:
        """Return the blocks that no segment holds."""
        blocks = self.tracker.blocks()
        found: Ints = blocks[self.home[blocks] < 0]
        return found

    def take(self, storage: CompressedStorage, blocks: Ints) -> list[Item]:
        """Copy blocks out; what is written to them from now on counts as changed."""
        tracker = self.tracker
        tracker.changed[blocks] = False
        self.crcs[blocks] = _checksums(storage, blocks)[blocks]
        items = []
        for name, array in part_of(storage, tracker.slots_of(blocks)).items():
            kind, _, number = name.partition(".")
            if kind == "plain":
                key = storage._tree.keys[int(number)]
                items.append(Item(name, as_words(array, key), DTYPE_NAMES[key.dtype]))
            else:
                items.append(Item(name, array))
        return items

    def append(self, log: SegmentLog, items: list[Item], blocks: Ints) -> None:
        """Make blocks a segment."""
        self.names.append(log.append(items, {}))
        self.sizes.append(len(blocks))
        self.home[blocks] = len(self.names) - 1


def _commit(storage: CompressedStorage, log: SegmentLog, draft: _Draft) -> None:
    used = np.unique(draft.home[draft.home >= 0])
    renumbered = np.full(len(draft.names) + 1, -1, np.int32)  # the last one is for home == -1
    renumbered[used] = np.arange(used.size, dtype=np.int32)
    home = renumbered[draft.home]
    segments = {draft.names[k]: draft.sizes[k] for k in used.tolist()}
    state = {**describe(storage), "sizes": list(segments.values())}
    log.commit(state, [Item("home", home)], keep=segments)
    tracker = draft.tracker
    tracker.home, tracker.segments, tracker.crcs = home, segments, draft.crcs
    tracker.digest = log.digest


def _load(storage: CompressedStorage, log: LogReader) -> None:
    home = log.item("home")
    try:
        sizes = dict(zip(log.segments, map(int, log.state["sizes"]), strict=True))
        if home.dtype != np.int32 or home.max(initial=-1) >= len(sizes):
            raise CorruptFile("its table of blocks makes no sense")
        tracker = install(storage, log.state, _read_parts(log, home))
    except DataError as error:
        raise type(error)(f"{log.folder} cannot be loaded: {error}") from error
    except NONSENSE as error:
        raise CorruptFile(f"{log.folder} cannot be loaded: its sizes make no sense") from error
    tracker.crcs = _checksums(storage, tracker.blocks())
    if home.shape == tracker.home.shape:
        tracker.home, tracker.segments, tracker.digest = home, sizes, log.digest
        tracker.changed[:] = False


def _read_parts(log: LogReader, home: NDArray[Any]) -> Iterator[Part]:
    for number, name in enumerate(log.segments):
        with log.open_segment(name) as segment:
            part = {item: segment.read(item) for item in segment.names}
        yield _only(part, home, number)


def _only(part: Part, home: NDArray[Any], number: int) -> Part:
    """Keep the slots whose last content lies in this segment."""
    try:
        kept = home[part["slots"] // BLOCK] == number
        if kept.all():
            return part
        chosen: Part = {}
        for name, array in part.items():
            if name.startswith("data."):
                lengths = part["lengths." + name.removeprefix("data.")]
                array = array[np.repeat(kept, lengths)]
            else:
                array = array[kept]
            chosen[name] = array
        return chosen
    except NONSENSE as error:
        raise CorruptFile(f"segment {number} makes no sense ({error!r})") from error


def _retire(home: NDArray[np.int32], sizes: list[int]) -> None:
    """Give up segments that are mostly outdated, or too many: their blocks are written again."""
    live = np.bincount(home[home >= 0], minlength=len(sizes))
    retired = live * 2 < np.array(sizes, np.int64)
    alive = np.flatnonzero(live * ~retired)
    if alive.size > _MOST_SEGMENTS:  # the smaller half becomes one: each block moves rarely
        retired[alive[np.argsort(live[alive], kind="stable")][: alive.size // 2]] = True
    home[np.isin(home, np.flatnonzero(retired))] = -1


def _groups(storage: CompressedStorage, blocks: Ints) -> Iterator[Ints]:
    """Cut blocks into groups of about one segment each."""
    columns = storage._columns
    written = max(1, int(storage._tracker.written.sum()))
    slot_bytes = sum(row_bytes for _, _, row_bytes in storage._flat)
    slot_bytes += columns.live_bytes // written if columns else 0
    step = max(1, _SEGMENT_BYTES // max(1, slot_bytes * BLOCK))
    for begin in range(0, len(blocks), step):
        yield blocks[begin : begin + step]


def _checksums(storage: CompressedStorage, blocks: Ints) -> NDArray[np.uint32]:
    """Return the checksums of the plain keys of blocks, and 0 for all others."""
    crcs = np.zeros_like(storage._tracker.crcs)
    leaves = [as_rows(leaf.cpu(), 1) for _, leaf, _ in storage._flat]
    for block in blocks.tolist():
        crc = 0
        for rows in leaves:
            crc = isal_zlib.crc32(rows[block * BLOCK : (block + 1) * BLOCK], crc)
        crcs[block] = crc
    return crcs
