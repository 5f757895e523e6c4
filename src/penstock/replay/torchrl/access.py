"""Indices and slices of a CompressedStorage: which slots are meant, and how slices write through.

In TorchRL's own storage a slice is a view, and the buffer writes by it: `buffer[i, j] = data` is
`storage[:][i, j] = data`, `update_` is `storage[:].update_(data)`. Here the plain keys are views as
well, and the compressed ones are written by the methods of `StorageSlice`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch.utils._pytree import tree_leaves

from penstock.errors import UsageError
from penstock.replay.keys import KeyPath
from penstock.replay.torchrl.structure import leaves_of

if TYPE_CHECKING:
    from penstock.replay.torchrl.storage import CompressedStorage

Slots = NDArray[np.int64]

# Within TorchRL, these read or write single columns of `storage[...]`, and nothing else of it.
_COLUMN_MODULES = ("torchrl.data.replay_buffers.samplers", "torchrl.data.replay_buffers.her")
_COLUMN_METHODS = ("set_at_", "set_", "update_")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def key_path(index: Any) -> KeyPath:
    """Return the path of a key, if an index is one: a string, or strings in tuples; () if not."""
    if isinstance(index, str):
        return (index,)
    if type(index) is not tuple or not all(map(key_path, index)):
        return ()
    return tuple(name for part in index for name in key_path(part))


def slots_at(dims: tuple[int, ...], index: Any) -> Slots:
    """Return the slots that an index of any kind means, in the shape of the answer.

    A TensorDict of slot numbers says so itself: what it takes, and how, is thus the same for keys
    that are compressed and for those that are not.
    """
    if isinstance(index, torch.Tensor):
        index = index.cpu()
    elif isinstance(index, tuple):
        index = tuple(part.cpu() if isinstance(part, torch.Tensor) else part for part in index)
    numbers = torch.arange(int(np.prod(dims))).reshape(dims)
    slots: torch.Tensor = TensorDict({"slot": numbers}, batch_size=dims)[index]["slot"]
    return np.ascontiguousarray(slots.numpy()).reshape(slots.shape)


def place(
    cursor: Any, data: TensorDictBase, ndim: int, max_size: int, dims: tuple[int, ...]
) -> tuple[Slots, Any, TensorDictBase]:
    """Work out where data goes.

    `cursor` is one place along the first dimension, or several; or any index. `dims` are the slots
    per dimension, () before the first write, when `max_size` and the data decide.

    Returns:
        The slots, in the shape in which the data covers them; the cursor and the data, without what
        would be overwritten at once because a place is named again later.
    """
    single = isinstance(cursor, int | np.integer)
    if isinstance(cursor, range | list | np.ndarray):
        cursor = torch.as_tensor(np.asarray(cursor))
    rest = tuple(data.batch_size[1 - single : ndim - single])
    dims = dims or (-(-max_size // max(1, int(np.prod(rest)))), *rest)
    if isinstance(cursor, torch.Tensor) and cursor.dtype in _INTEGERS and cursor.ndim == 1:
        cursor = torch.where(cursor < 0, cursor + dims[0], cursor).long()
        rows = cursor.cpu().numpy()
        found, at = np.unique(rows[::-1], return_index=True)
        if found.size < rows.size and len(data) == len(cursor):  # of those named twice, the last
            kept = np.sort(rows.size - 1 - at)
            cursor, data, rows = cursor[kept], data[torch.from_numpy(kept)], rows[kept]
    elif single:
        rows = np.asarray(cursor + dims[0] if cursor < 0 else cursor, np.int64)
    else:
        rows = None
        slots = slots_at(dims, cursor)
        if np.unique(slots).size != slots.size:
            raise UsageError("an index names a slot twice; which value should it get?")
    if rows is not None:
        bad = rows[(rows < 0) | (rows >= dims[0])]
        if bad.size:
            raise UsageError(f"slot {int(bad.flat[0])} is not one of {dims[0]}")
        inner = np.arange(int(np.prod(dims[1:])), dtype=np.int64).reshape(dims[1:])
        outer = rows.reshape((*rows.shape, *[1] * inner.ndim))
        slots = np.asarray(outer * inner.size + inner)
    if tuple(data.batch_size[: slots.ndim]) != slots.shape:
        raise UsageError(
            f"data of batch size {list(data.batch_size)} does not fill {list(slots.shape)} slots; "
            "give one item per slot"
        )
    return slots, cursor, data


def is_view(index: Any) -> bool:
    """Tell whether torch gives a view for an index: numbers, slices, an ellipsis, None."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or part is ... or isinstance(part, int | np.integer | slice) for part in parts
    )


def reads_columns(frame: FrameType) -> bool:
    """Tell whether a caller is a part of TorchRL that looks only at small columns."""
    module = frame.f_globals.get("__name__", "")
    if module.startswith(_COLUMN_MODULES):
        return True
    inside: bool = module.startswith("torchrl.data.replay_buffers.replay_buffers")
    return inside and frame.f_code.co_name in _COLUMN_METHODS


class StorageSlice(TensorDict):  # type: ignore[misc]
    """A slice of a storage. Compressed keys are in it decoded, or not at all; both can be written.

    Writing *into* a decoded tensor (`slice["pixels"][3] = 0`) changes that copy only.
    """

    _owner: CompressedStorage | None = None  # of the slice itself, not of what is derived from it
    _slots: Slots

    @classmethod
    def over(cls, content: TensorDictBase, owner: CompressedStorage, slots: Slots) -> StorageSlice:
        """Make a slice of what was read of some slots."""
        made: StorageSlice = cls._new_unsafe(
            source=dict(content.items()),
            batch_size=content.batch_size,
            device=content.device,
            names=content.names if content._has_names() else None,
        )
        made._owner, made._slots = owner, slots
        return made

    def __getitem__(self, index: Any) -> Any:
        """Read a key, or items; a part that is a view writes through as well."""
        content = super().__getitem__(index)
        if self._owner is None or not is_tensor_collection(content) or not is_view(index):
            return content
        try:
            slots = torch.from_numpy(self._slots)[index].numpy()
        except IndexError:  # it goes into the items, which TensorDict allows
            return content
        return StorageSlice.over(content, self._owner, slots)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write items; or, as in any TensorDict, put another tensor under a key of this one."""
        if self._owner is None or key_path(index):
            super().__setitem__(index, value)
            return
        numbers = TensorDict({"slot": torch.from_numpy(self._slots)}, self._slots.shape)[index]
        slots = numbers["slot"].numpy()
        if isinstance(value, dict):
            value = TensorDict.from_dict(value, batch_size=numbers.batch_size)
        if is_tensor_collection(value):
            if value.batch_size[: slots.ndim] != numbers.batch_size:
                value = value.expand(numbers.batch_size)
            changes = {path: leaf for path, leaf in leaves_of(value) if path in self._compressed}
            value = value.exclude(*self._absent)
        else:
            changes = dict.fromkeys(self._compressed, value)
        self._owner.write_keys(slots, changes, lambda: TensorDict.__setitem__(self, index, value))

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Swap two of the dimensions; a buffer with `dim_extend=1` writes by that."""
        content = super().transpose(dim0, dim1)
        if self._owner is None or max(dim0, dim1) >= self._slots.ndim or min(dim0, dim1) < 0:
            return content
        return StorageSlice.over(content, self._owner, self._slots.swapaxes(dim0, dim1))

    def set_(self, key: Any, item: Any, **options: Any) -> StorageSlice:
        """Write one key of all slots."""
        if self._owner is not None and key_path(key) in self._compressed:
            return self.set_at_(key, item, ...)
        super().set_(key, item, **options)
        return self

    def set_at_(self, key: Any, value: Any, index: Any, **options: Any) -> StorageSlice:
        """Write one key of some slots."""
        path = key_path(key)
        if self._owner is None or path not in self._compressed:
            super().set_at_(key, value, index, **options)
            return self
        try:
            slots = torch.from_numpy(self._slots)[index].numpy()
        except IndexError:  # it goes into the items: they are written anew as a whole
            whole = self._owner.get(path).flatten(0, self._owner.ndim - 1)[self._slots]
            whole[index] = value
            return self.set_(key, whole)
        copy = self.get(path, None)
        self._owner.write_keys(
            slots, {path: value}, lambda: copy is not None and copy.__setitem__(index, value)
        )
        return self

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Any = None, **more: Any
    ) -> StorageSlice:
        """Write the keys that are given, of all slots."""
        if self._owner is None:
            super().update_(input_dict_or_td, clone, keys_to_update=keys_to_update, **more)
            return self
        source = input_dict_or_td
        if isinstance(source, dict):
            source = TensorDict.from_dict(source, batch_size=self.batch_size)
        if keys_to_update is not None:
            source = source.select(*keys_to_update, strict=False)
        changes = {path: leaf for path, leaf in leaves_of(source) if path in self._compressed}
        rest = source.exclude(*self._absent)
        self._owner.write_keys(
            self._slots, changes, lambda: TensorDict.update_(self, rest, clone=clone, **more)
        )
        return self

    @property
    def _compressed(self) -> Mapping[KeyPath, str]:
        assert self._owner is not None
        return self._owner.compressed_keys

    @property
    def _absent(self) -> list[KeyPath]:
        """The compressed keys that were not decoded."""
        return [path for path in self._compressed if self.get(path, None) is None]


class TensorSlice(torch.Tensor):
    """The slice of a storage of bare tensors that are compressed; writes go to the storage, too.

    Whatever writes to it or to a view of it (`slice += 1`, `slice[1:3][0] = 9`, `out=slice`): the
    version that torch counts per memory tells, and the whole slice is written anew.
    """

    _content: StorageSlice
    _whole: torch.Tensor

    @classmethod
    def over(
        cls, data: torch.Tensor, content: StorageSlice, whole: torch.Tensor | None = None
    ) -> TensorSlice:
        """Make one of the only tensor of a slice, or of a view of that."""
        made = data.as_subclass(cls)
        made._content, made._whole = content, data if whole is None else whole
        return made

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The storage does not go with it.
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what torch does; then write to the storage, if that changed the slice."""
        with torch._C.DisableTorchFunctionSubclass():
            leaves = tree_leaves((args, kwargs or {}))
            slices = [leaf for leaf in leaves if isinstance(leaf, TensorSlice)]
            before = [one._whole._version for one in slices]
            result = func(*args, **kwargs or {})
            for one, version in zip(slices, before, strict=True):
                if one._whole._version != version:
                    one._content.set_("0", one._whole)
                    break
            for one in slices:
                if (
                    type(result) is torch.Tensor
                    and result.untyped_storage().data_ptr()
                    == one._whole.untyped_storage().data_ptr()
                ):
                    return TensorSlice.over(result, one._content, one._whole)
        return result
