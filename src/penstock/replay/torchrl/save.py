"""A CompressedStorage taken out and put in: as a state dict, or saved into a folder.

The folder is a `SegmentLog`, its blocks are 256 slots each. A *part* is the content of some slots
as arrays: "slots", and per key "plain.3", or "lengths.3" and "data.3". A description is everything
else, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from isal import isal_zlib
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase

from penstock.core.pack import DTYPES, Item
from penstock.errors import UsageError
from penstock.replay.arena import CompressedColumns, Encoded
from penstock.replay.frames import frame_codec
from penstock.replay.keys import Field
from penstock.replay.segments import (
    Block,
    LogReader,
    Place,
    Saved,
    need,
    save_blocks,
    taking_in,
)
from penstock.replay.torchrl.structure import Form, KeyTree, as_rows
from penstock.tensors import flat_words, tensor_over

if TYPE_CHECKING:
    from penstock.replay.torchrl.storage import CompressedStorage

HOLDER = "CompressedStorage"
BLOCK = 256

Ints = NDArray[np.int64]
Part = dict[str, NDArray[Any]]


class SlotTracker:
    """Which slots hold something (`written`), and the clock of the last write of each block."""

    def __init__(self, slots: int, clock: int = 0) -> None:
        self.clock = clock + 1
        self.written = np.zeros(slots, np.bool_)
        self.versions = np.full(-(-slots // BLOCK), self.clock, np.int64)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self.written.nbytes + self.versions.nbytes

    def touch(self, slots: Ints) -> None:
        """Note that slots were written."""
        self.clock += 1
        self.written[slots] = True
        self.versions[slots // BLOCK] = self.clock


class SegmentCheckpointer(StorageCheckpointerBase):  # type: ignore[misc]
    """Saves a CompressedStorage into a folder, each time only what changed; crash-safe."""

    def dumps(self, storage: CompressedStorage, path: str | PathLike[str]) -> None:
        """Save; a storage that was saved to this folder before writes only what changed.

        Other threads may go on using the storage meanwhile; saved is its state at the end. Of
        `ReplayBuffer.dumps`, which calls this, only this part is crash-safe: TorchRL writes the
        cursor of the writer into a file of its own, after it.
        """
        self._refuse_hooks()
        if not storage.initialized:
            raise UsageError("this storage was never written; there is nothing to save")
        with storage._saving:
            content = _Content(storage)
            storage._saved = save_blocks(content, storage.lock, path, HOLDER, storage._saved)

    def loads(self, storage: CompressedStorage, path: str | PathLike[str]) -> None:
        """Load; the storage must be as large as the one that was saved."""
        self._refuse_hooks()
        sizes: dict[str, int] = {}
        with storage.lock, LogReader(str(path), HOLDER) as log:
            with taking_in(log.folder):
                if "home" in log.names:  # files of before: per block, the number of its segment
                    home = log.item("home").astype(np.int64)
                    block = np.flatnonzero(home >= 0)
                    segment, place = home[block], np.zeros_like(block)
                    need((segment < len(log.segments)).all(), "its table of blocks")
                else:
                    block, segment, place = log.ints("block", "segment", "place")
                install(storage, log.state, _read_parts(log, block, segment, sizes))
            held = _Content(storage).blocks()
            places = {
                k: Place(log.segments[s], p, held[k].version)
                for k, s, p in zip(block.tolist(), segment.tolist(), place.tolist(), strict=True)
                if k in held
            }
            storage._saved = Saved(log.folder.resolve(), log.digest, places, sizes)

    def _refuse_hooks(self) -> None:
        if self._save_hooks or self._load_hooks:
            raise UsageError("hooks see whole tensors, which a compressed storage does not have")


class _Content:
    """The storage as `save_blocks` asks for it."""

    def __init__(self, storage: CompressedStorage) -> None:
        self._storage = storage

    def blocks(self, some: Sequence[int] | None = None) -> dict[int, Block]:
        """Return the blocks in which something was written.

        Plain keys can be changed in place, past the storage: a checksum notices.
        """
        storage = self._storage
        tracker, columns = storage._tracker, storage._columns
        assert columns is not None
        plain = [as_rows(leaf, 1) for _, leaf, _ in storage._flat]
        slot_bytes = columns.slot_bytes() + sum(rows.shape[1] for rows in plain)
        found: dict[int, Block] = {}
        written = np.unique(np.flatnonzero(tracker.written) // BLOCK)
        if some is not None:
            written = written[np.isin(written, some)]
        for block in written.tolist():
            crc, here = 0, slice(block * BLOCK, (block + 1) * BLOCK)
            for rows in plain:
                crc = isal_zlib.crc32(rows[here], crc)
            size = int(slot_bytes[here][tracker.written[here]].sum())
            found[block] = Block(size, (int(tracker.versions[block]), crc))
        return found

    def copy(self, blocks: Sequence[int]) -> list[Item]:
        """Return the content of blocks."""
        storage = self._storage
        slots = (np.array(blocks, np.int64)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        slots = slots[slots < storage._tracker.written.size]
        return _items_of(storage, slots[storage._tracker.written[slots]])

    def state(self, blocks: Mapping[int, Block]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return what is not in the blocks, but for their numbers."""
        return describe(self._storage), {"block": np.array(list(blocks), np.int64)}


def _read_parts(
    log: LogReader, block: Ints, segment: Ints, sizes: dict[str, int]
) -> Iterator[Part]:
    """Yield what of each segment is the last content of its slots; note the bytes of each."""
    for number, name in enumerate(log.segments):
        with log.open_segment(name) as file:
            part = {item: file.read(item) for item in file.names}
        sizes[name] = sum(part[item].nbytes for item in part if item.startswith(("plain", "data")))
        kept = np.isin(part["slots"] // BLOCK, block[segment == number])
        if kept.all():
            yield part
            continue
        chosen: Part = {}
        for item, array in part.items():
            kind, _, key = item.partition(".")
            by = np.repeat(kept, part[f"lengths.{key}"]) if kind == "data" else kept
            chosen[item] = array[by]
        yield chosen


def export_state(storage: CompressedStorage) -> dict[str, Any]:
    """Return everything as tensors."""
    if not storage.initialized:
        return {"initialized": False, "_len": 0}
    items = _items_of(storage, np.flatnonzero(storage._tracker.written))
    return {
        "initialized": True,
        "_len": len(storage),
        "description": json.dumps(describe(storage)),
        "tensors": {i.name: tensor_over(i.values, i.dtype or i.values.dtype.name) for i in items},
    }


def export_plain(storage: CompressedStorage) -> dict[str, Any]:
    """Return everything decoded, as a LazyTensorStorage would."""
    if not storage.initialized:
        return {"_storage": {}, "initialized": False, "_len": 0}
    content = storage.get(slice(None))
    if not isinstance(content, torch.Tensor | TensorDictBase):
        raise UsageError(
            f"a LazyTensorStorage has no state of {storage._form}; use compressed=True"
        )
    whole = content[:1].expand(storage._dims[0], *content.shape[1:]).clone()
    whole[: len(content)] = content
    if not isinstance(whole, torch.Tensor):
        whole = TensorDict(dict(whole.items()), whole.batch_size).state_dict()
    return {"_storage": whole, "initialized": True, "_len": len(storage)}


def import_state(storage: CompressedStorage, state: dict[str, Any]) -> None:
    """Take over what `export_state` returned, or a LazyTensorStorage's `state_dict`."""
    if not state.get("initialized"):
        storage._empty()
        return
    if "_storage" in state:
        _import_plain(storage, state)
        return
    part: Part = {}
    with taking_in("this state"):
        description = json.loads(state["description"])
        for name, tensor in state["tensors"].items():
            whole = tensor.cpu().contiguous()
            part[name] = flat_words(whole).reshape(tuple(whole.shape))
    install(storage, description, [part])


def _import_plain(storage: CompressedStorage, state: dict[str, Any]) -> None:
    """Take over the state of a LazyTensorStorage: all of its slots, written or not, in one tree."""
    with taking_in("this state"):
        content, length = state["_storage"], int(state["_len"])
        if not isinstance(content, torch.Tensor):
            content = TensorDict({}, []).load_state_dict(content, strict=False)
        dims = tuple(content.shape[: storage.ndim])
        written = content[: -(-length // max(1, int(np.prod(dims[1:]))))]
    _check_dims(storage, dims)
    need(0 <= length <= int(np.prod(dims)), f"a length of {length}")
    if not length:
        storage._empty()
        return
    # Apart, so that what cannot be taken over leaves the storage as it is.
    apart = type(storage)(storage.max_size, **storage.settings)
    apart.set(range(len(written)), written)
    apart._len = length
    import_state(storage, export_state(apart))


def _check_dims(storage: CompressedStorage, dims: tuple[int, ...]) -> None:
    expected = -(-storage.max_size // max(1, int(np.prod(dims[1:]))))
    if len(dims) != storage.ndim or dims[0] != expected:
        raise UsageError(
            f"it was saved with {list(dims)} slots, this storage has max_size={storage.max_size} "
            f"and ndim={storage.ndim}; make it as it was"
        )


def _items_of(storage: CompressedStorage, slots: Ints) -> list[Item]:
    """Copy the content of slots."""
    items = [Item("slots", slots)]
    for k, leaf, _ in storage._flat:
        key = storage._tree.keys[k]
        items.append(Item(f"plain.{k}", key.words(as_rows(leaf, 1)[slots]), key.dtype))
    for k in storage._tree.big:
        assert storage._columns is not None
        data, lengths = storage._columns.gather(k, slots)
        items += [Item(f"data.{k}", data), Item(f"lengths.{k}", lengths)]
    return items


def describe(storage: CompressedStorage) -> dict[str, Any]:
    """Return everything but the content of slots, as JSON."""
    codecs = storage._columns.codecs if storage._columns else {}
    keys = []
    for k, key in enumerate(storage._tree.keys):
        codec = codecs[k].config() if k in codecs else None
        keys.append({**key.config(), "codec": codec, "first": key.path in storage._first_paths})
    return {
        "form": storage._form.to_json(),
        "dims": list(storage._dims),
        "len": len(storage),
        "cursor": storage._last_cursor_index,
        "keys": keys,
        "extras": [[list(path), list(extra)] for path, extra in storage._tree.extras.items()],
        "names": list(storage._storage.names) if storage._names is not None else None,
    }


def install(storage: CompressedStorage, state: Any, parts: Iterable[Part]) -> None:
    """Build everything anew, and only when it is whole put it in place of what is there."""
    with taking_in("this state"):
        dims = tuple(int(n) for n in state["dims"])
        _check_dims(storage, dims)
        keys = [Field.from_config(record) for record in state["keys"]]
        need(len({key.path for key in keys}) == len(keys), "a key is there twice")
        configs = {k: one["codec"] for k, one in enumerate(state["keys"]) if one["codec"]}
        codecs = {k: frame_codec(config) for k, config in configs.items()}
        need(all(codec.size == keys[k].size for k, codec in codecs.items()), "a codec does not fit")
        extras = {tuple(path): tuple(extra) for path, extra in state["extras"]}
        tree = KeyTree(keys, extras, list(codecs))
        first = frozenset(keys[k].path for k, record in enumerate(state["keys"]) if record["first"])
        form = Form.from_json(state.get("form"))  # files of before have none
        length, cursor, names = state["len"], state["cursor"], state["names"]
        slots = int(np.prod(dims))
        need(type(length) is int and 0 <= length <= slots, f"a length of {length!r}")
        good = cursor is None or (type(cursor) is int and 0 <= cursor < slots)
        need(good, f"a cursor at {cursor!r}")
        known = isinstance(storage.device, torch.device)
        device = storage.device if known else torch.device("cpu")  # "auto" has nothing to follow
        leaves = {
            k: torch.empty((slots, *keys[k].shape), dtype=keys[k].torch_dtype) for k in tree.plain
        }
        columns = CompressedColumns(slots, codecs, **storage._spill)
        tracker = SlotTracker(slots, storage._tracker.clock)
        for part in parts:
            _fill(part, tree, leaves, columns, tracker)
        shaped = {k: leaf.view(*dims, *keys[k].shape) for k, leaf in leaves.items()}
        plain = tree.assemble(shaped, dims, torch.device("cpu"), names).to(device)
    if form != Form() or storage._form.kind is None:  # a file does not name a tensorclass
        storage._form = form
    storage.device = device
    storage._storage, storage.initialized = plain, True
    storage.max_size = slots
    storage.__dict__["_total_shape_value"] = torch.Size(dims)
    storage._len = length
    storage._set_last_cursor(cursor)
    storage._tree, storage._columns, storage._tracker = tree, columns, tracker
    storage._first_paths = first
    storage._refresh()


def _fill(
    part: Part,
    tree: KeyTree,
    leaves: dict[int, torch.Tensor],
    columns: CompressedColumns,
    tracker: SlotTracker,
) -> None:
    slots = part["slots"]
    need(slots.dtype == np.int64 and slots.ndim == 1, "its table of slots")
    need(len(part) == 1 + len(tree.plain) + 2 * len(tree.big), "it has other keys")
    last = tracker.written.size - 1
    need(((slots >= 0) & (slots <= last)).all(), "a slot is out of range")
    once = np.unique(slots).size == slots.size and not tracker.written[slots].any()
    need(once, "a slot is there twice")
    for k, leaf in leaves.items():
        key, array = tree.keys[k], part[f"plain.{k}"]
        good = array.dtype == DTYPES[key.dtype].words and array.shape == (slots.size, *key.shape)
        need(good, f"{key.name} is {array.dtype} {list(array.shape)}")
        rows = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        as_rows(leaf, 1)[slots] = rows.reshape(slots.size, key.size)
    encoded: dict[int, Encoded] = {}
    for k in tree.big:
        lengths, data = part[f"lengths.{k}"], part[f"data.{k}"]
        good = lengths.shape == slots.shape and lengths.dtype == np.int64 and data.ndim == 1
        good = good and data.dtype == np.uint8 and bool((lengths >= 0).all())
        good = good and bool((lengths <= data.size).all()) and int(lengths.sum()) == data.size
        need(good, f"the frames of {tree.keys[k].name}")
        encoded[k] = data, lengths
    columns.store(slots, encoded)
    tracker.touch(slots)
