"""What a CompressedStorage holds, taken out and put in: for a file or a state dict.

A part is the content of some slots as arrays; a description is everything else, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from penstock.core.pack import DTYPES
from penstock.errors import CorruptFile, UsageError
from penstock.replay.frames import FrameCodec, frame_codec
from penstock.replay.torchrl.columns import CompressedColumns, Encoded
from penstock.replay.torchrl.forms import Form, form_from_json
from penstock.replay.torchrl.keys import Key, KeyTree, as_rows, from_rows, key_from_json
from penstock.tensors import DTYPE_NAMES, flat_words

if TYPE_CHECKING:
    from penstock.replay.torchrl.storage import CompressedStorage

BLOCK = 256
NONSENSE = (LookupError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError)
"""What taking in a hostile description may raise."""

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
        epoch: Counts how often what was saved became useless, structure and all.
    """

    def __init__(self, slots: int) -> None:
        blocks = -(-slots // BLOCK)
        self.written = np.zeros(slots, np.bool_)
        self.changed = np.zeros(blocks, np.bool_)
        self.home = np.full(blocks, -1, np.int32)
        self.crcs = np.zeros(blocks, np.uint32)
        self.segments: dict[str, int] = {}
        self.digest = ""
        self.epoch = 0

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
        self.epoch += 1

    def blocks(self) -> Ints:
        """Return the blocks in which something was written."""
        found: Ints = np.unique(np.flatnonzero(self.written) // BLOCK)
        return found

    def slots_of(self, blocks: Ints) -> Ints:
        """Return the written slots of blocks."""
        all_slots = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
        all_slots = all_slots[all_slots < self.written.size]
        found: Ints = all_slots[self.written[all_slots]]
        return found


def export_state(storage: CompressedStorage) -> dict[str, Any]:
    """Return everything as tensors."""
    if not storage.initialized:
        return {"initialized": False, "_len": 0}
    tracker = storage._tracker
    part = part_of(storage, np.flatnonzero(tracker.written))
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
        "description": json.dumps(describe(storage)),
        "tensors": tensors,
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
    try:
        description = json.loads(state["description"])
        for name, tensor in state["tensors"].items():
            whole = tensor.cpu().contiguous()
            part[name] = flat_words(whole).reshape(tuple(whole.shape))
    except NONSENSE as error:
        raise CorruptFile(f"this state makes no sense ({error!r})") from error
    install(storage, description, [part])


def _import_plain(storage: CompressedStorage, state: dict[str, Any]) -> None:
    """Take over the state of a LazyTensorStorage: all of its slots, written or not, in one tree."""
    try:
        content, length = state["_storage"], int(state["_len"])
        if not isinstance(content, torch.Tensor):
            content = TensorDict({}, []).load_state_dict(content, strict=False)
        dims = tuple(content.shape[: storage.ndim])
        written = content[: -(-length // max(1, int(np.prod(dims[1:]))))]
    except NONSENSE as error:
        raise CorruptFile(f"this state makes no sense ({error!r})") from error
    expected = -(-storage.max_size // max(1, int(np.prod(dims[1:]))))
    if len(dims) != storage.ndim or dims[0] != expected:
        raise UsageError(
            f"it was saved with {list(dims)} slots, this storage has max_size={storage.max_size} "
            f"and ndim={storage.ndim}; make it as it was"
        )
    slots = int(np.prod(dims))
    if not 0 <= length <= slots:
        raise CorruptFile(f"this state makes no sense (a length of {length} in {slots} slots)")
    if not length:
        storage._empty()
        return
    # Apart, so that what cannot be taken over leaves the storage as it is.
    apart = type(storage)(storage.max_size, **storage.settings)
    apart.set(range(len(written)), written)
    apart._len = length
    import_state(storage, export_state(apart))


def part_of(storage: CompressedStorage, slots: Ints) -> Part:
    """Copy the content of slots; plain keys as rows of bytes."""
    part: Part = {"slots": slots}
    for k, leaf, _ in storage._flat:
        part[f"plain.{k}"] = as_rows(leaf.cpu(), 1)[slots]
    for k in storage._tree.big:
        column = storage._tree.keys[k].column
        assert storage._columns is not None and column is not None
        data, lengths = storage._columns.gather(column, slots)
        part[f"lengths.{k}"], part[f"data.{k}"] = lengths, data
    return part


def describe(storage: CompressedStorage) -> dict[str, Any]:
    """Return everything but the content of slots, as JSON."""
    columns = storage._columns
    keys = []
    for key in storage._tree.keys:
        codec = columns.codecs[key.column].config() if columns and key.column is not None else None
        keys.append({**key.to_json(), "codec": codec, "first": key.path in storage._first_paths})
    return {
        "form": storage._form.to_json(),
        "dims": list(storage._dims),
        "len": len(storage),
        "cursor": storage._last_cursor_index,
        "keys": keys,
        "extras": [[list(path), list(extra)] for path, extra in storage._tree.extras.items()],
        "names": list(storage._storage.names) if storage._names is not None else None,
    }


def install(storage: CompressedStorage, state: Any, parts: Iterable[Part]) -> SlotTracker:
    """Build everything anew, and only when it is whole put it in place of what is there.

    Args:
        storage: Takes it over.
        state: From `describe`.
        parts: Of different slots; plain keys as elements of their type.

    Raises:
        UsageError: It is of a storage of another size.
        CorruptFile: It makes no sense.
    """
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
        form = form_from_json(state.get("form"))  # files of before have none
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
    except NONSENSE as error:
        raise CorruptFile(f"its description makes no sense ({error!r})") from error
    if form != Form() or storage._form.kind is None:  # a file does not name a tensorclass
        storage._form = form
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
        if int(lengths.max(initial=0)) > data.size or int(lengths.sum()) != data.size:
            raise CorruptFile(f"the frames of {tree.keys[k].name} have {data.size} bytes")
        assert column is not None
        encoded[column] = Encoded(data, lengths)
    columns.store(slots, encoded)
    tracker.touch(slots)


def _names(tree: KeyTree) -> list[str]:
    plain = [f"plain.{k}" for k in tree.plain]
    return plain + [f"{kind}.{k}" for k in tree.big for kind in ("lengths", "data")]


def _rows_of(array: NDArray[Any], key: Key, count: int) -> NDArray[np.uint8]:
    words = DTYPES[DTYPE_NAMES[key.dtype]].words
    if array.dtype != words or array.shape != (count, *key.shape):
        raise CorruptFile(f"{key.name} is {array.dtype} {list(array.shape)}: not {count} slots")
    rows: NDArray[np.uint8] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return rows.reshape(count, key.nbytes)
