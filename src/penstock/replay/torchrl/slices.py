"""What a slice of a CompressedStorage gives: a TensorDict that writes through to the storage.

In TorchRL's own storage a slice is a view, and the buffer writes by it: `buffer[i, j] = data` is
`storage[:][i, j] = data`, `update_` is `storage[:].update_(data)`. Here the plain keys are views as
well, and the compressed ones are written by the methods below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_tensor_collection, unravel_key

from penstock.replay.torchrl.index import is_view

if TYPE_CHECKING:
    from penstock.replay.torchrl.storage import CompressedStorage

Path = tuple[str, ...]
Slots = NDArray[np.int64]


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
        if self._owner is None or isinstance(index, str) or (type(index) is tuple and _key(index)):
            super().__setitem__(index, value)
            return
        numbers = TensorDict({"slot": torch.from_numpy(self._slots)}, self._slots.shape)[index]
        slots = numbers["slot"].numpy()
        if isinstance(value, dict):
            value = TensorDict.from_dict(value, batch_size=numbers.batch_size)
        if is_tensor_collection(value):
            if value.batch_size[: slots.ndim] != numbers.batch_size:
                value = value.expand(numbers.batch_size)
            changes = {path: leaf for path, leaf in _leaves(value) if path in self._compressed}
            value = value.exclude(*self._absent)
        else:
            changes = dict.fromkeys(self._compressed, value)
        self._write(slots, changes, lambda: TensorDict.__setitem__(self, index, value))

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Swap two of the dimensions; a buffer with `dim_extend=1` writes by that."""
        content = super().transpose(dim0, dim1)
        if self._owner is None or max(dim0, dim1) >= self._slots.ndim or min(dim0, dim1) < 0:
            return content
        return StorageSlice.over(content, self._owner, self._slots.swapaxes(dim0, dim1))

    def set_(self, key: Any, item: Any, **options: Any) -> StorageSlice:
        """Write one key of all slots."""
        path = _key(key)
        if self._owner is None or path not in self._compressed:
            super().set_(key, item, **options)
            return self
        self._write(self._slots, {path: item}, lambda: self._update_copy(path, item, ...))
        return self

    def set_at_(self, key: Any, value: Any, index: Any, **options: Any) -> StorageSlice:
        """Write one key of some slots."""
        path = _key(key)
        if self._owner is None or path not in self._compressed:
            super().set_at_(key, value, index, **options)
            return self
        try:
            slots = torch.from_numpy(self._slots)[index].numpy()
        except IndexError:  # it goes into the items: they are written anew as a whole
            whole = self._owner.get(path).view(-1, *self._owner.shape_of(path))[self._slots]
            whole[index] = value
            return self.set_(key, whole)
        self._write(slots, {path: value}, lambda: self._update_copy(path, value, index))
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
        changes = {path: leaf for path, leaf in _leaves(source) if path in self._compressed}
        rest = source.exclude(*self._absent)
        self._write(
            self._slots, changes, lambda: TensorDict.update_(self, rest, clone=clone, **more)
        )
        return self

    @property
    def _compressed(self) -> Mapping[Path, str]:
        assert self._owner is not None
        return self._owner.compressed_keys

    @property
    def _absent(self) -> list[Path]:
        """The compressed keys that were not decoded."""
        return [path for path in self._compressed if self.get(path, None) is None]

    def _update_copy(self, path: Path, value: Any, index: Any) -> None:
        copy = self.get(path, None)
        if copy is not None:
            copy[index] = value

    def _write(
        self, slots: Slots, changes: Mapping[Path, Any], plain: Callable[[], object]
    ) -> None:
        """Write the compressed keys, and the plain ones in between: what fails, fails before."""
        assert self._owner is not None
        with self._owner.changing(slots, changes):
            plain()


class TensorSlice(torch.Tensor):
    """The slice of a storage of bare tensors that are compressed; writes go to the storage, too."""

    # What is derived from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _content: StorageSlice

    @classmethod
    def over(cls, data: torch.Tensor, content: StorageSlice) -> TensorSlice:
        """Make one of the only tensor of a slice."""
        made = data.as_subclass(cls)
        made._content = content
        return made

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Swap two of the dimensions, as a buffer with `dim_extend=1` does."""
        turned = super().transpose(dim0, dim1)
        content = (
            self._content.transpose(dim0, dim1) if max(dim0, dim1) < self._content.ndim else None
        )
        return TensorSlice.over(turned, content) if isinstance(content, StorageSlice) else turned

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write items, whole ones or parts of them."""
        super().__setitem__(index, value)
        self._content.set_("0", self.as_subclass(torch.Tensor))


def _key(key: Any) -> Path:
    """Return a key as a path; () if it is an index."""
    found = unravel_key(key)
    return (found,) if isinstance(found, str) else tuple(found or ())


def _leaves(data: TensorDictBase, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, value in data.items():
        if is_tensor_collection(value):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value
