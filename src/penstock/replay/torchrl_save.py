"""What a CompressedStorage holds, on disk and in a state dict.

On disk it is a `SegmentLog`. Slots are saved by blocks of 256; a save writes the blocks that have
changed since the last one into new segments, and the manifest says which segment holds the last
content of each block. Plain keys can be changed in place, past the storage: a checksum per block
notices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from isal import isal_zlib
from numpy.typing import NDArray
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from penstock.core.pack import DTYPES, Item
from penstock.errors import CorruptFile, DataError, UsageError
from penstock.replay.columns import CompressedColumns, Encoded
from penstock.replay.frames import FrameCodec, frame_codec
from penstock.replay.segments import LogReader, SegmentLog
from penstock.replay.torchrl_keys import Key, KeyTree, as_rows, as_words, from_rows, key_from_json
from penstock.tensors import NAMES, flat_words

if TYPE_CHECKING:
    from penstock.replay.torchrl import CompressedStorage

HOLDER = "CompressedStorage"
BLOCK = 256
_SEGMENT_BYTES = 64 << 20
_MOST_SEGMENTS = 48
_NONSENSE = (LookupError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError)

Ints = NDArray[np.int64]
Part = dict[str, NDArray[Any]]
"""The content of some slots: "slots", and per key "plain.3", or "lengths.3" and "data.3"."""


class SlotTracker:
    """Which slots hold something, and which segment holds their last saved content.

    Attributes:
        written: Per slot, whether it holds something.
        changed: Per block, whether it was written since the last save.
        home: Per block, the number of the segment that holds it; -1 for none.
        crcs: Per block, the checksum of its plain keys when it was saved.
        segments: Names of the segments, and how many blocks each was written with.
        digest: The commit that all of this is about; "" for none.
    """

    def __init__(self, slots: int) -> None:
        blocks = -(-slots // BLOCK)
        self.written = np.zeros(slots, np.bool_)
        self.changed = np.zeros(blocks, np.bool_)
        self.home = np.full(blocks, -1, np.int32)
        self.crcs = np.zeros(blocks, np.uint32)
        self.segments: dict[str, int] = {}
        self.digest = ""

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self.written.nbytes + self.changed.nbytes + self.home.nbytes + self.crcs.nbytes

    def touch(self, slots: Ints) -> None:
        """Note that slots were written."""
        self.written[slots] = True
        self.changed[slots // BLOCK] = True

    def forget(self) -> None:
        """Note that what was saved is of no use any more: the next save writes everything."""
        self.digest = ""

    def slots_of(self, blocks: Ints) -> Ints:
        """Return the written slots of blocks."""
        all_slots = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        all_slots = all_slots[all_slots < self.written.size]
        found: Ints = all_slots[self.written[all_slots]]
        return found


class SegmentCheckpointer(StorageCheckpointerBase):  # type: ignore[misc]
    """Saves a CompressedStorage into a folder, each time only what changed; crash-safe."""

    def dumps(self, storage: CompressedStorage, path: str | PathLike[str]) -> None:
        """Save; a storage that was saved to this folder before writes only what changed.

        Raises:
            UsageError: Nothing was ever written, or the folder holds something else.
            StorageError: The disk refuses; what was saved before stays.
        """
        self._refuse_hooks()
        if not storage.initialized:
            raise UsageError("this storage was never written; there is nothing to save")
        with storage._lock, SegmentLog.create_or_open(str(path), HOLDER) as log:
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


def export_state(storage: CompressedStorage) -> dict[str, Any]:
    """Return everything as tensors."""
    if not storage.initialized:
        return {"initialized": False, "_len": 0}
    tracker = storage._tracker
    part = _part(storage, np.flatnonzero(tracker.written))
    tensors = {}
    for name, array in part.items():
        kind, _, number = name.partition(".")
        if kind == "plain":
            key = storage._tree.keys[int(number)]
            tensors[name] = from_rows(array, key, (len(array),))
        else:
            tensors[name] = torch.from_numpy(array)
    return {
        "initialized": True,
        "_len": len(storage),
        "description": json.dumps(_describe(storage)),
        "tensors": tensors,
    }


def import_state(storage: CompressedStorage, state: dict[str, Any]) -> None:
    """Take over what `export_state` returned."""
    if not state.get("initialized"):
        storage._empty()
        return
    part: Part = {}
    try:
        description = json.loads(state["description"])
        for name, tensor in state["tensors"].items():
            whole = tensor.cpu().contiguous()
            part[name] = flat_words(whole).reshape(tuple(whole.shape))
    except _NONSENSE as error:
        raise CorruptFile(f"this state makes no sense ({error!r})") from error
    _install(storage, description, [part])


def _save(storage: CompressedStorage, log: SegmentLog) -> None:
    tracker = storage._tracker
    crcs = _checksums(storage)
    if tracker.digest and tracker.digest == log.digest:
        home, names = tracker.home.copy(), list(tracker.segments)
        sizes = list(tracker.segments.values())
        home[tracker.changed | (crcs != tracker.crcs)] = -1
        _retire(home, sizes)
    else:  # a new folder, or somebody else saved there meanwhile
        home, names, sizes = np.full_like(tracker.home, -1), [], []
    blocks = np.unique(np.flatnonzero(tracker.written) // BLOCK)
    for group in _groups(storage, blocks[home[blocks] < 0]):
        home[group] = len(names)
        names.append(log.append(_items(storage, _part(storage, tracker.slots_of(group))), {}))
        sizes.append(len(group))
    used = np.unique(home[home >= 0])
    renumbered = np.full(len(names) + 1, -1, np.int32)  # the last one is for home == -1
    renumbered[used] = np.arange(used.size, dtype=np.int32)
    home = renumbered[home]
    segments = {names[k]: sizes[k] for k in used.tolist()}
    state = {**_describe(storage), "sizes": list(segments.values())}
    log.commit(state, [Item("home", home)], keep=segments)
    tracker.home, tracker.segments, tracker.crcs = home, segments, crcs
    tracker.changed[:] = False
    tracker.digest = log.digest


def _load(storage: CompressedStorage, log: LogReader) -> None:
    home = log.item("home")
    try:
        sizes = dict(zip(log.segments, map(int, log.state["sizes"]), strict=True))
        tracker = _install(storage, log.state, _read_parts(log, home))
    except DataError as error:
        raise type(error)(f"{log.folder} cannot be loaded: {error}") from error
    except _NONSENSE as error:
        raise CorruptFile(f"{log.folder} cannot be loaded: its sizes make no sense") from error
    tracker.home, tracker.segments = home.astype(np.int32), sizes
    tracker.digest = log.digest
    tracker.crcs = _checksums(storage)
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
    except _NONSENSE as error:
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


def _checksums(storage: CompressedStorage) -> NDArray[np.uint32]:
    tracker = storage._tracker
    crcs = np.zeros_like(tracker.crcs)
    leaves = [as_rows(leaf.cpu(), 1) for _, leaf, _ in storage._flat]
    for block in np.unique(np.flatnonzero(tracker.written) // BLOCK).tolist():
        crc = 0
        for rows in leaves:
            crc = isal_zlib.crc32(rows[block * BLOCK : (block + 1) * BLOCK], crc)
        crcs[block] = crc
    return crcs


def _part(storage: CompressedStorage, slots: Ints) -> Part:
    part: Part = {"slots": slots}
    for k, leaf, _ in storage._flat:
        part[f"plain.{k}"] = as_rows(leaf.cpu(), 1)[slots]
    for k in storage._tree.big:
        column = storage._tree.keys[k].column
        assert storage._columns is not None and column is not None
        data, lengths = storage._columns.gather(column, slots)
        part[f"lengths.{k}"], part[f"data.{k}"] = lengths, data
    return part


def _items(storage: CompressedStorage, part: Part) -> list[Item]:
    items = []
    for name, array in part.items():
        kind, _, number = name.partition(".")
        if kind == "plain":
            key = storage._tree.keys[int(number)]
            items.append(Item(name, as_words(array, key), NAMES[key.dtype]))
        else:
            items.append(Item(name, array))
    return items


def _describe(storage: CompressedStorage) -> dict[str, Any]:
    columns = storage._columns
    keys = []
    for key in storage._tree.keys:
        codec = columns.codecs[key.column].config() if columns and key.column is not None else None
        keys.append({**key.to_json(), "codec": codec, "first": key.path in storage._first_paths})
    return {
        "dims": list(storage._dims),
        "len": len(storage),
        "cursor": storage._last_cursor_index,
        "keys": keys,
        "extras": [[list(path), list(extra)] for path, extra in storage._tree.extras.items()],
        "names": list(storage._storage.names) if storage._names is not None else None,
    }


def _install(storage: CompressedStorage, state: Any, parts: Iterable[Part]) -> SlotTracker:
    """Build everything anew, and only when it is whole put it in place of what is there."""
    try:
        dims = tuple(int(n) for n in state["dims"])
        expected = -(-storage.max_size // max(1, int(np.prod(dims[1:]))))
        if len(dims) != storage.ndim or dims[0] != expected:
            raise UsageError(
                f"it was saved with {list(dims)} slots, this storage has max_size="
                f"{storage.max_size} and ndim={storage.ndim}; make it as it was"
            )
        keys: list[Key] = []
        codecs: list[FrameCodec] = []
        for record in state["keys"]:
            key = key_from_json(record)
            if record["codec"] is not None:
                key.column = len(codecs)
                codecs.append(frame_codec(record["codec"]))
                if codecs[-1].size != key.nbytes:
                    raise CorruptFile(f"the codec of {key.name} is for frames of another size")
            keys.append(key)
        extras = {tuple(path): tuple(extra) for path, extra in state["extras"]}
        tree = KeyTree(keys, extras)
        first = frozenset(
            key.path for key, record in zip(keys, state["keys"], strict=True) if record["first"]
        )
        length, cursor, names = int(state["len"]), state["cursor"], state["names"]
        slots = int(np.prod(dims))
        if not 0 <= length <= slots or not (cursor is None or 0 <= cursor < slots):
            raise CorruptFile(f"a length of {length} makes no sense")
        known = isinstance(storage.device, torch.device)
        device = storage.device if known else torch.device("cpu")  # "auto" has nothing to follow
        leaves = {k: torch.empty((slots, *keys[k].shape), dtype=keys[k].dtype) for k in tree.plain}
        big = [keys[k].nbytes for k in tree.big]
        columns = CompressedColumns(slots, codecs, big, **storage._spill)
        tracker = SlotTracker(slots)
        for part in parts:
            _fill(part, tree, leaves, columns, tracker)
        shaped = {k: leaf.view(*dims, *keys[k].shape) for k, leaf in leaves.items()}
        plain = tree.assemble(shaped, dims, torch.device("cpu"), names).to(device)
    except _NONSENSE as error:
        raise CorruptFile(f"its description makes no sense ({error!r})") from error
    storage.device = device
    storage._storage, storage.initialized = plain, True
    storage.max_size = slots
    storage.__dict__["_total_shape_value"] = torch.Size(dims)
    storage._len = length
    storage._set_last_cursor(cursor)
    storage._adopt(tree, columns, tracker)
    storage._first_paths = first
    return tracker


def _fill(
    part: Part,
    tree: KeyTree,
    leaves: dict[int, torch.Tensor],
    columns: CompressedColumns,
    tracker: SlotTracker,
) -> None:
    slots = part["slots"]
    if slots.dtype != np.int64 or slots.ndim != 1 or len(set(part)) != 1 + len(_names(tree)):
        raise CorruptFile("its table of slots makes no sense")
    if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < tracker.written.size:
        raise CorruptFile("a slot is out of range")
    for k, leaf in leaves.items():
        as_rows(leaf, 1)[slots] = _rows_of(part[f"plain.{k}"], tree.keys[k], slots.size)
    encoded: dict[int, Encoded] = {}
    for k in tree.big:
        column = tree.keys[k].column
        lengths, data = part[f"lengths.{k}"], part[f"data.{k}"]
        whole = lengths.shape == slots.shape and lengths.dtype == np.int64 and data.ndim == 1
        if not whole or data.dtype != np.uint8 or int(lengths.min(initial=0)) < 0:
            raise CorruptFile(f"the frames of {tree.keys[k].name} make no sense")
        if int(lengths.sum()) != data.size:
            raise CorruptFile(f"the frames of {tree.keys[k].name} have {data.size} bytes")
        assert column is not None
        encoded[column] = Encoded(data, lengths)
    columns.store(slots, encoded)
    tracker.touch(slots)


def _names(tree: KeyTree) -> list[str]:
    plain = [f"plain.{k}" for k in tree.plain]
    return plain + [f"{kind}.{k}" for k in tree.big for kind in ("lengths", "data")]


def _rows_of(array: NDArray[Any], key: Key, count: int) -> NDArray[np.uint8]:
    words = DTYPES[NAMES[key.dtype]].words
    if array.dtype != words or array.shape != (count, *key.shape):
        raise CorruptFile(f"{key.name} is {array.dtype} {list(array.shape)}: not {count} slots")
    rows: NDArray[np.uint8] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return rows.reshape(count, key.nbytes)
