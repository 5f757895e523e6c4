"""CompressedStorage: a TorchRL storage whose large keys are compressed, whose small ones are plain.

Small keys lie in one preallocated TensorDict, just as in TorchRL's LazyTensorStorage, of which this
is a subclass: samplers that look through whole columns (SliceSampler) find them there. Large keys
lie in `CompressedColumns`, and a batch of them is decoded in one native call per key.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.context import get_spawning_popen
from os import PathLike
from typing import Any

import numpy as np
import torch

from penstock.core.extras import needs_torchrl
from penstock.core.interrupt import signals_postponed
from penstock.core.memory import parse_bytes, whole_number
from penstock.core.reuse import ReusedMemory
from penstock.errors import CorruptFile, UnsupportedValue, UsageError

with needs_torchrl("CompressedStorage"):
    from tensordict import TensorDict, TensorDictBase
    from torch.utils._pytree import tree_map
    from torchrl.data import LazyTensorStorage, TensorStorage

from penstock.replay.arena import CompressedColumns, Encoded
from penstock.replay.frames import FrameCodec, choose_codec
from penstock.replay.keys import Codecs, KeyPath, check_codecs, codecs_of
from penstock.replay.segments import Saved
from penstock.replay.torchrl.save import (
    SegmentCheckpointer,
    SlotTracker,
    export_plain,
    export_state,
    import_state,
)
from penstock.replay.torchrl.structure import (
    Decoded,
    Form,
    KeyTree,
    Slots,
    StorageSlice,
    TensorSlice,
    as_rows,
    extras_of,
    field_of,
    is_view,
    key_path,
    leaves_of,
    place,
    reads_columns,
    slots_at,
    stack_items,
)

Leaves = dict[KeyPath, torch.Tensor]

_PLAIN_BYTES = 256  # below this, a key is not worth a look-up of its own
_REUSED_BYTES = 64 * 1024
# Torch has no indexing for these: they go to the columns, compressed or not.
_NOT_INDEXED = (torch.uint16, torch.uint32, torch.uint64)
_ADDED_BY_TORCHRL = {("index",)}  # by some writers, to some data


class CompressedStorage(LazyTensorStorage):  # type: ignore[misc]
    """A storage for TorchRL's replay buffers that compresses what is worth it.

    It takes TensorDicts, nested as they like, tensorclasses, bare tensors and pytrees of tensors,
    and gives back what was put in, bit for bit (tensorclasses *within* it as TensorDicts). The
    codec of each key is chosen at the first write, from its data, and verified by a round trip.
    Batches are decoded into memory that is used again once nobody holds the batch any more.

    Reading by an index gives copies. A slice (`storage[:]`) is a view, as in LazyTensorStorage:
    what is written to it, or to a part of it by torch (`slice["pixels"][3] = 0`), is written to the
    storage, and it shows what is written later. The whole large key of the slice is decoded and
    encoded for that; the methods of the slice itself (`slice[i, j] = data`, `set_`, `set_at_`,
    `update_`), by which TorchRL's buffer writes, encode only what changes, all keys or none.

    Args:
        max_size: Number of slots.
        codecs: "auto", the name of a codec for all keys, or {key: name} with "auto" for the rest;
            names are those of `penstock.replay.frames`. Keys below 256 bytes are always plain.
        ndim: Leading dimensions of the data that count as slots, as in LazyTensorStorage.
        device: Where small keys are kept and batches are delivered.
        memory_bytes: Compressed bytes to keep in memory, such as "4GB"; needs `spill_dir`.
        spill_dir: Where the rest goes, in files without a name. Large keys that do not compress
            are then kept there too.

    Example:
        buffer = TensorDictReplayBuffer(storage=CompressedStorage(1_000_000), batch_size=256)
        buffer.extend(data)
        batch = buffer.sample()
    """

    _default_checkpointer = SegmentCheckpointer

    def __init__(
        self,
        max_size: int,
        *,
        codecs: Codecs = "auto",
        ndim: int = 1,
        device: torch.device | str = "cpu",
        memory_bytes: int | str | None = None,
        spill_dir: str | PathLike[str] | None = None,
    ) -> None:
        max_size, ndim = whole_number("max_size", max_size), whole_number("ndim", ndim)
        if memory_bytes is not None and spill_dir is None:
            raise UsageError("memory_bytes needs spill_dir: where should the rest go?")
        check_codecs(codecs)
        memory = None if memory_bytes is None else parse_bytes(memory_bytes)
        super().__init__(max_size, ndim=ndim, device=device)
        self._codecs = codecs
        self._spill: dict[str, Any] = {"memory_bytes": memory, "spill_dir": spill_dir}
        self.lock = threading.RLock()
        self._saving = threading.Lock()
        self._memory = ReusedMemory()
        self._form = Form()
        self._tree = KeyTree([], {})
        self._first_paths: frozenset[KeyPath] = frozenset()
        self._columns: CompressedColumns | None = None
        self._tracker = SlotTracker(0)
        self._saved: Saved | None = None
        self._flat: list[tuple[int, torch.Tensor, int]] = []
        self._dims: tuple[int, ...] = ()
        self._names: list[str | None] | None = None

    @property
    def nbytes(self) -> int:
        """Memory held: compressed frames and their tables, and the preallocated plain keys."""
        columns = self._columns.nbytes if self._columns else 0
        return columns + sum(leaf.nbytes for _, leaf, _ in self._flat) + self._tracker.nbytes

    @property
    def compressed_keys(self) -> dict[KeyPath, str]:
        """The keys that are compressed, and their codecs; empty before the first write."""
        codecs = self._columns.codecs if self._columns else {}
        return {self._tree.keys[k].path: codec.id for k, codec in codecs.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """What it was made with, but for its size."""
        device = "auto" if self.device is None else self.device
        return {"codecs": self._codecs, "ndim": self.ndim, "device": device, **self._spill}

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write slots, or raise and change nothing; called by the buffer's writer.

        Args:
            cursor: A slot, or several, along the first dimension.
            data: As many items, in the form of the first data; a list holds them one by one.
            set_cursor: False writes in place: the length stays, and keys may be left out.
        """
        if isinstance(data, list) and data:
            data = stack_items(data)
        with self.lock:
            form = self._form if self.initialized else Form.of(data)
            lead = int(self.ndim) - isinstance(cursor, int | np.integer)
            mask = getattr(cursor, "dtype", None) in (torch.bool, np.bool_)
            if self._dims and (mask or isinstance(cursor, tuple)):
                lead = slots_at(self._dims, cursor).ndim
            data = form.wrap(data, lead)
            slots, cursor, data = place(cursor, data, self.ndim, self.max_size, self._dims)
            lead = slots.ndim
            data, leaves = self.apart(data)
            tree, columns = self._tree, self._columns
            if columns is None:
                tree, columns = self._choose(leaves, extras_of(data, lead), slots)
            else:
                self._check(leaves, lead, partial=not set_cursor)
                if not leaves.keys() <= tree.number.keys():
                    self._add_keys(leaves, lead)
                    tree = self._tree
            flat = slots.reshape(-1)
            encoded: dict[int, Encoded] = {}
            for k in tree.big:
                if (leaf := leaves.get(tree.keys[k].path)) is not None:
                    encoded[k] = columns.codecs[k].encode(as_rows(leaf, lead))
            plain = data.exclude(*(tree.keys[k].path for k in tree.big)) if tree.big else data
            with signals_postponed():  # an interrupt must not leave half of a record
                columns.store(flat, encoded)
                first = not self.initialized
                super().set(cursor, plain, set_cursor=set_cursor)
                if first:
                    self._form, self._tree, self._columns = form, tree, columns
                    self._tracker = SlotTracker(self._capacity, self._tracker.clock)
                    self._first_paths = frozenset(tree.number) - _ADDED_BY_TORCHRL
                    self._refresh()
                self._tracker.touch(flat)

    def apart(self, data: TensorDictBase) -> tuple[TensorDictBase, Leaves]:
        """Return data, and its tensors; copied if it is a part of this very storage."""
        leaves = dict(leaves_of(data))
        own = {leaf.untyped_storage().data_ptr() for _, leaf, _ in self._flat}
        if own.isdisjoint(leaf.untyped_storage().data_ptr() for leaf in leaves.values()):
            return data, leaves
        copy = data.clone()
        return copy, dict(leaves_of(copy))

    def get(self, index: Any) -> Any:
        """Read slots, by any index that a TensorDict takes; or one key of all of them."""
        with self.lock:
            return self._read(index, self._tree.big)

    def __getitem__(self, item: Any) -> Any:
        # A sampler asks for `storage[:]` at every batch, to look at one small column of it. Who
        # asks decides only about cost: a caller that is not known here gets everything.
        if self._tree.big and reads_columns(sys._getframe(1)):
            with self.lock:
                return self._read(item, [])
        return self.get(item)

    def _read(self, index: Any, big: list[int]) -> Any:
        """Read slots, in the form of the data; of the compressed keys only those in `big`."""
        path = key_path(index)
        if path:
            wanted = [k for k in self._tree.big if self._tree.keys[k].path[: len(path)] == path]
            return self._get_any(slice(None), wanted)[path]
        slots = self._fast_slots(index)
        if slots is not None:
            return self._form.unwrap(self._gather(slots, big))
        if self._form.structure is not None and type(index) is tuple and len(index) > self.ndim:
            whole = self._form.unwrap(self._get_any(slice(None), self._tree.big))
            return tree_map(lambda leaf: leaf[index], whole)  # into the tensors, beyond the slots
        return self._form.unwrap(self._get_any(index, big))

    def write_keys(
        self,
        slots: Slots,
        changes: Mapping[KeyPath, Any],
        write_plain: Callable[[], object] = lambda: None,
    ) -> None:
        """Write compressed keys of slots, and the plain ones by the call: all of it, or nothing.

        `changes` are by key, anything that torch would take for `tensor[slots] = value`; of a slot
        that is named twice, the last value counts.
        """
        with self.lock:
            assert self._columns is not None
            flat, last = np.unique(slots.reshape(-1)[::-1], return_index=True)
            kept = slots.size - 1 - last
            encoded: dict[int, Encoded] = {}
            for path, value in changes.items():
                k = self._tree.number[path]
                key = self._tree.keys[k]
                target = torch.empty((*slots.shape, *key.shape), dtype=key.torch_dtype)
                target[...] = value
                encoded[k] = self._columns.codecs[k].encode(as_rows(target, slots.ndim)[kept])
            before = []
            for _, leaf, _ in self._flat:
                index = torch.from_numpy(flat).to(leaf.device)
                before.append((leaf, index, leaf.index_select(0, index)))
            with signals_postponed():  # as in `set`
                try:
                    write_plain()
                    self._columns.store(flat, encoded)
                except BaseException:  # a key that does not fit, a full disk
                    for leaf, index, rows in before:
                        leaf.index_copy_(0, index, rows)
                    raise
                self._tracker.touch(flat)

    def decoded(self, path: KeyPath, slots: Slots) -> torch.Tensor:
        """Return a compressed key of slots, as it is now."""
        assert self._columns is not None
        k = self._tree.number[path]
        rows = self._memory.array((slots.size, self._tree.keys[k].size), np.uint8)
        self._columns.decode(k, slots.reshape(-1), rows)
        return self._tree.keys[k].tensor(rows, slots.shape).to(device=self._storage.device)

    @property
    def clock(self) -> int:
        """Moves with every write."""
        return self._tracker.clock

    def flatten(self) -> Any:
        """Return a storage of one dimension with the same content, decoded."""
        if self.ndim == 1:
            return self
        with self.lock:
            content = self._get_any(slice(None), self._tree.big).flatten(0, self.ndim - 1)
            return TensorStorage(self._form.unwrap(content))

    def state_dict(self, *, compressed: bool = True) -> dict[str, Any]:
        """Return the content as tensors, for `torch.save`.

        `compressed=False` returns what a LazyTensorStorage of this size would, and can load.
        """
        with self.lock:
            return export_state(self) if compressed else export_plain(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, also that of a LazyTensorStorage; or raise and change nothing."""
        with self.lock:
            import_state(self, state_dict)
            self._bump_mutation_revision()

    def _empty(self) -> None:
        with self.lock:
            if self._columns is not None:
                self._columns.clear()
            slots = self._capacity if self.initialized else 0
            self._tracker = SlotTracker(slots, self._tracker.clock)
            super()._empty()

    def __repr__(self) -> str:
        keys = ", ".join(f"{'.'.join(path)}: {name}" for path, name in self.compressed_keys.items())
        size = f"len={len(self)}, max_size={self.max_size}, compressed={{{keys}}}"
        return f"{type(self).__name__}({size}, nbytes={self.nbytes})"

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise UsageError(
                "a CompressedStorage cannot be shared with other processes; let them send their "
                "data to the process that owns it"
            )
        content = self.state_dict()
        return {"max_size": self.max_size, "settings": self.settings, "content": content}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CompressedStorage.__init__(self, state["max_size"], **state["settings"])
        if state["content"]["initialized"]:
            self.load_state_dict(state["content"])

    @property
    def _capacity(self) -> int:
        return int(torch.Size(self._total_shape).numel())

    def _conditional_patch_leaf(self, key: Any) -> torch.Tensor:
        path = (key,) if isinstance(key, str) else tuple(key)
        if path in self.compressed_keys:
            raise UsageError(f"{'.'.join(path)} is compressed; write it with buffer[index] = data")
        leaf: torch.Tensor = super()._conditional_patch_leaf(key)
        return leaf

    def _choose(
        self, leaves: Leaves, extras: dict[KeyPath, tuple[int, ...]], slots: Slots
    ) -> tuple[KeyTree, CompressedColumns]:
        """Decide, from the first data, which keys are worth compressing; changes nothing."""
        if not leaves:
            raise UsageError("the first data has no tensors; there is nothing to store")
        keys = [field_of(path, tensor, slots.ndim) for path, tensor in leaves.items()]
        wanted = codecs_of(self._codecs, list(leaves), "auto")
        codecs: dict[int, FrameCodec] = {}
        for k, (key, tensor) in enumerate(zip(keys, leaves.values(), strict=True)):
            items = key.words(as_rows(tensor, slots.ndim))
            codec = choose_codec(items, wanted[k], key.name)
            worth = codec.id != "raw" or self._spill["spill_dir"] is not None
            if (worth and key.size >= _PLAIN_BYTES) or tensor.dtype in _NOT_INDEXED:
                codecs[k] = codec
        inner = int(np.prod(slots.shape[slots.ndim - self.ndim + 1 :]))
        capacity = -(-self.max_size // inner) * inner
        columns = CompressedColumns(capacity, codecs, **self._spill)
        return KeyTree(keys, extras, list(codecs)), columns

    def _refresh(self) -> None:
        """Note what the fast path needs: flat views of the plain keys, dimensions, names."""
        self._dims = tuple(self._total_shape)
        last = self.ndim - 1
        self._flat = []
        for k in self._tree.plain:
            leaf = self._storage.get(self._tree.keys[k].path).flatten(0, last)
            row_bytes = leaf.nbytes // max(1, len(leaf))
            self._flat.append((k, leaf, row_bytes))
        names = self._storage.names
        named = any(name is not None for name in names)
        self._names = [None, *names[self.ndim :]] if named else None

    def _check(self, leaves: Leaves, lead: int, partial: bool) -> None:
        """Refuse data that is not like the first; new keys are welcome, as in TorchRL."""
        if not partial:
            missing = self._first_paths - leaves.keys()
            if missing:
                names = ", ".join(sorted(".".join(path) for path in missing))
                raise UsageError(f"the data lacks {names}, which the first data had")
        for path, tensor in leaves.items():
            number = self._tree.number.get(path)
            if number is None and tensor.dtype in _NOT_INDEXED:
                raise UnsupportedValue(
                    f"{'.'.join(path)} was not in the first data, and torch cannot write "
                    f"{tensor.dtype} by index; convert it, or have it from the start"
                )
            found = field_of(path, tensor, lead)
            if number is not None and self._tree.keys[number] != found:
                raise UsageError(
                    f"the data has {found}, the first data had {self._tree.keys[number]}; "
                    "a storage keeps one type and shape per key"
                )

    def _add_keys(self, leaves: Leaves, lead: int) -> None:
        """A later write brings keys (TorchRL adds "index" itself); they are plain.

        Room for them is made before anything is written: it may be more than there is.
        """
        tree, device = self._tree, self._storage.device
        fields = [field_of(path, tensor, lead) for path, tensor in leaves.items()]
        added = [field for field in fields if field.path not in tree.number]
        rooms = []
        try:
            grown = KeyTree([*tree.keys, *added], tree.extras, tree.big)
            for field in added:
                shape = (*self._dims, *field.shape)
                rooms.append(torch.zeros(shape, dtype=field.torch_dtype, device=device))
        except CorruptFile as error:
            raise UsageError(f"the data is nested as the first data was not: {error}") from error
        except RuntimeError as error:
            names = ", ".join(map(str, added))
            raise UsageError(
                f"the data has keys that the first data had not ({names}), and there is no memory "
                f"for {self._capacity} slots of them; have them from the start"
            ) from error
        for field, room in zip(added, rooms, strict=True):
            self._storage.set(field.path, room)
        self._tree = grown
        self._tracker.touch(np.flatnonzero(self._tracker.written))  # all is saved again
        self._refresh()

    def _fast_slots(self, index: Any) -> Slots | None:
        """Return the slots of the indices that samplers make; None for all others."""
        parts = index if type(index) is tuple else (index,)
        if len(parts) != self.ndim or not self.initialized:
            return None
        length = self._len if self.ndim == 1 else self._len_along_dim0
        slots: Slots | None = None
        for part, limit in zip(parts, (length, *self._dims[1:]), strict=True):
            good = type(part) is torch.Tensor and part.dtype is torch.int64
            if not good or part.ndim != 1 or not part.numel():
                return None
            numbers = part.cpu().numpy()
            if int(numbers.view(np.uint64).max()) >= limit:  # negative ones are huge, seen so
                return None
            if slots is not None and slots.shape != numbers.shape:
                return None
            slots = numbers if slots is None else slots * limit + numbers
        return slots

    def _gather(self, slots: Slots, big: list[int]) -> TensorDict:
        device, count = self._storage.device, slots.size
        on_cpu = device is None or device.type == "cpu"
        index = torch.from_numpy(slots).to(device=device)
        tensors: dict[int, torch.Tensor] = {}
        for k, leaf, row_bytes in self._flat:
            if on_cpu and row_bytes * count >= _REUSED_BYTES:
                rows = self._memory.array((count, row_bytes), np.uint8)
                out = self._tree.keys[k].tensor(rows, (count,))
                tensors[k] = torch.index_select(leaf, 0, index, out=out)
            else:
                tensors[k] = leaf.index_select(0, index)
        for k in big:
            tensors[k] = self.decoded(self._tree.keys[k].path, slots)
        return self._tree.assemble(tensors, (count,), device, self._names)

    def _get_any(self, index: Any, big: list[int]) -> Any:
        """Let a TensorDict of slot numbers say what an index means, however odd it is."""
        content = super().get(index)
        if not self._tree.big:
            return content
        slots = slots_at((self._len_along_dim0, *self._dims[1:]), index)
        # It writes through to the storage, where TorchRL's own would.
        view = isinstance(content, TensorDictBase) and is_view(index)
        if big:
            tensors = {k: content.get(self._tree.keys[k].path) for k in self._tree.plain}
            for k in big:
                path = self._tree.keys[k].path
                tensors[k] = whole = self.decoded(path, slots)
                if view:
                    part = Decoded(self, path, slots, whole, self.clock)
                    tensors[k] = TensorSlice.over(whole, part)
            names = content.names if self._names is not None else None
            content = self._tree.assemble(tensors, slots.shape, content.device, names)
        return StorageSlice.over(content, self, slots) if view else content
