"""The structure of a storage's data: the form in which the user has it, and the tree of its keys.

Within, a storage keeps a TensorDict. It takes the form of its first data, be it a TensorDict, a
tensorclass, a bare tensor or a pytree, and answers in that form, as TorchRL's own storages do. The
tree of keys is taken apart once, at the first write. After that an answer is a list of tensors in a
fixed order, and building the nested TensorDict around them costs a few microseconds.

In TorchRL's own storage a slice is a view, and the buffer writes by it: `buffer[i, j] = data` is
`storage[:][i, j] = data`, `update_` is `storage[:].update_(data)`. Here the plain keys are views as
well; the compressed ones are written by the methods of `StorageSlice`, and as `TensorSlice`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.utils import is_non_tensor, is_tensorclass
from torch.utils import _pytree as pytree

from penstock.core import tree
from penstock.core.tree import Json
from penstock.errors import CorruptFile, UnsupportedValue, UsageError
from penstock.replay.keys import Field, KeyPath
from penstock.tensors import DTYPE_NAMES, check_storable, settled, unmapped

if TYPE_CHECKING:
    from penstock.replay.torchrl.storage import CompressedStorage

Slots = NDArray[np.int64]

# Within TorchRL, these read or write single columns of `storage[...]`, and nothing else of it.
_COLUMN_MODULES = ("torchrl.data.replay_buffers.samplers", "torchrl.data.replay_buffers.her")
_COLUMN_METHODS = ("set_at_", "set_", "update_")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True)
class Form:
    """The form of the data of a storage; a TensorDict by default."""

    kind: type | None = None  # of a tensorclass
    structure: Any = None  # of a pytree, or a bare tensor: the same, with numbers for the tensors

    @classmethod
    def of(cls, data: Any) -> Form:
        """Return the form of some data."""
        if is_tensor_collection(data):
            return cls(type(data)) if is_tensorclass(data) else cls()
        leaves, spec = pytree.tree_flatten(data, is_leaf=is_tensor_collection)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise UnsupportedValue(
                    f"a compressed storage takes tensors, in TensorDicts or other containers, not "
                    f"{type(leaf).__qualname__}; make it a tensor"
                )
        if not leaves:
            raise UsageError("the data has no tensors; there is nothing to store")
        return cls(structure=pytree.tree_unflatten(list(range(len(leaves))), spec))

    @classmethod
    def from_json(cls, record: Json) -> Form:
        """Rebuild what `to_json` described."""
        if record is None:
            return cls()

        def refuse(_: dict[str, Json]) -> Any:
            raise CorruptFile("the form of its data makes no sense")

        (structure,) = tree.unflatten(record, refuse)
        leaves = pytree.tree_leaves(structure)
        if leaves != list(range(len(leaves))):
            refuse({})
        return cls(structure=structure)

    def to_json(self) -> Json:
        """Describe it for a file; None for a TensorDict, and for a tensorclass, which is code."""
        return None if self.structure is None else tree.flatten([self.structure], lambda *_: None)

    def wrap(self, data: Any, lead: int) -> TensorDictBase:
        """Return data of this form as one dense TensorDict."""
        if self.structure is not None:
            data = _in_order_of(self.structure, data)
        if Form.of(data) != self:
            raise UsageError(
                f"the data is {Form.of(data)}, the first data was {self}; a storage keeps one form"
            )
        if self.structure is not None:
            leaves = pytree.tree_leaves(data)
            batch = leaves[0].shape[:lead]
            if any(leaf.shape[:lead] != batch for leaf in leaves):
                shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
                raise UsageError(f"the tensors have {shapes}: their first {lead} sizes must agree")
            return TensorDict({str(i): leaf for i, leaf in enumerate(leaves)}, batch)
        if self.kind is not None:
            return TensorDict(dict(data.items()), data.batch_size, names=data.names)
        if type(data) is TensorDict:
            return data
        try:
            return data.contiguous()
        except RuntimeError as error:
            raise UsageError(f"the stacked data is ragged ({error}); pad it first") from error

    def unwrap(self, content: TensorDictBase) -> Any:
        """Return what `wrap` was given."""
        if self.structure is not None:
            return pytree.tree_map(lambda number: content.get(str(number)), self.structure)
        return content if self.kind is None else self.kind.from_tensordict(content)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        if self.kind is not None:
            return f"a {self.kind.__qualname__}"
        return "a TensorDict" if self.structure is None else f"a pytree {self.structure}"


def _in_order_of(structure: Any, data: Any) -> Any:
    """Return a pytree with the keys of its dicts in the order of another, if they are the same."""
    if type(data) is type(structure) and isinstance(data, dict) and data.keys() == structure.keys():
        ordered = {key: _in_order_of(structure[key], data[key]) for key in structure}
        return ordered if type(data) is dict else type(data)(ordered)
    return data


def stack_items(items: list[Any]) -> Any:
    """Stack what a list holds one by one, as TorchRL does."""
    try:
        if all(is_tensor_collection(item) for item in items):
            return torch.stack(items)
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *items)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"the items of the list do not fit together ({error})") from error


class KeyTree:
    """The keys of a storage, in order, and the structure that all answers of it have.

    `extras` are batch dimensions beyond those of the storage, of the root `()` and of each nested
    TensorDict, by path; `big` the numbers of the keys that are compressed.
    """

    def __init__(
        self,
        keys: Sequence[Field],
        extras: Mapping[KeyPath, tuple[int, ...]],
        big: Sequence[int] = (),
    ) -> None:
        self.keys = list(keys)
        self.extras = dict(extras)
        self.number = {key.path: k for k, key in enumerate(self.keys)}
        self.big = list(big)
        self.plain = [k for k in range(len(self.keys)) if k not in big]
        # Each (nested) TensorDict by its path: tensors by their number, others by their path.
        inner = {key.path[:n] for key in self.keys for n in range(len(key.path))}
        self._nodes: dict[KeyPath, dict[str, int | KeyPath]] = {}
        for path in sorted({(), *self.extras, *inner}, key=len):
            if path in self.number:
                raise CorruptFile(f"{'.'.join(path)} is a tensor and holds others at once")
            self._nodes[path] = {}
            if path:
                self._nodes[path[:-1]][path[-1]] = path
        for number, key in enumerate(self.keys):
            self._nodes[key.path[:-1]][key.path[-1]] = number

    def assemble(
        self,
        tensors: Mapping[int, torch.Tensor],
        batch: tuple[int, ...],
        device: torch.device | None,
        names: Sequence[str | None] | None = None,
    ) -> TensorDict:
        """Build the TensorDict of an answer."""
        built: dict[KeyPath, TensorDict] = {}
        for path, children in reversed(self._nodes.items()):
            source: dict[str, Any] = {}
            for name, child in children.items():
                if not isinstance(child, int):
                    source[name] = built[child]
                elif child in tensors:
                    source[name] = tensors[child]
            size = torch.Size((*batch, *self.extras.get(path, self.extras.get((), ()))))
            # The shapes are known to fit; the public constructor would check every one of them
            # again, at five times the cost of gathering a small key.
            built[path] = TensorDict._new_unsafe(source=source, batch_size=size, device=device)
        if names is not None:
            built[()].names = list(names)
        return built[()]


def leaves_of(data: TensorDictBase, path: KeyPath = ()) -> Iterator[tuple[KeyPath, torch.Tensor]]:
    """Yield every tensor of a tree with its path; refuse what is not a tensor."""
    for name, value in data.items():
        here = (*path, name)
        if is_non_tensor(value):
            raise UnsupportedValue(
                f"{'.'.join(here)} is not a tensor (non-tensor data), which a compressed storage "
                "cannot hold; leave it out, or encode it as a tensor"
            )
        if is_tensor_collection(value):
            yield from leaves_of(value, here)
        else:
            value = unmapped(value)
            check_storable(".".join(here), value)
            yield here, value


def extras_of(
    data: TensorDictBase, lead: int, path: KeyPath = ()
) -> dict[KeyPath, tuple[int, ...]]:
    """Return the batch dimensions beyond the first `lead` ones, of the tree and all within it."""
    found = {path: tuple(data.batch_size[lead:])}
    for name, value in data.items():
        if is_tensor_collection(value) and not is_non_tensor(value):
            found.update(extras_of(value, lead, (*path, name)))
    return found


def field_of(path: KeyPath, tensor: torch.Tensor, lead: int) -> Field:
    """Return what one slot of a tensor is."""
    return Field(path, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape[lead:]))


def as_rows(tensor: torch.Tensor, lead: int) -> NDArray[np.uint8]:
    """View a tensor as bytes, one row per slot; copies only what has no such view."""
    count, row_bytes = tensor.shape[:lead].numel(), tensor.shape[lead:].numel() * tensor.itemsize
    flat = settled(tensor)
    # A dimension of one element may have any stride, which torch then does not view as bytes.
    flat = flat.as_strided((flat.numel(),), (1,), flat.storage_offset())
    rows: NDArray[np.uint8] = flat.view(torch.uint8).numpy().reshape(count, row_bytes)
    return rows


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
    """Return where data goes: slots, in its shape; and cursor and data, the last of each slot.

    `cursor` is one place along the first dimension, or several; or any index. `dims` are the slots
    per dimension, () before the first write, when `max_size` and the data decide.
    """
    single = isinstance(cursor, int | np.integer)
    if isinstance(cursor, range | list | np.ndarray):
        cursor = torch.as_tensor(np.asarray(cursor, None if np.size(cursor) else np.int64))
    rest = tuple(data.batch_size[1 - single : ndim - single])
    dims = dims or (-(-max_size // max(1, int(np.prod(rest)))), *rest)
    several = isinstance(cursor, torch.Tensor) and cursor.dtype in _INTEGERS and cursor.ndim == 1
    if not single and not several:
        slots = slots_at(dims, cursor)
        if np.unique(slots).size != slots.size:
            raise UsageError("an index names a slot twice; which value should it get?")
    else:
        rows = np.array(cursor if single else cursor.cpu().numpy(), np.int64)
        bad = rows[(rows < -dims[0]) | (rows >= dims[0])]
        if bad.size:
            raise UsageError(f"slot {int(bad.flat[0])} is not one of {dims[0]}")
        rows += dims[0] * (rows < 0)
        if several and not (np.diff(rows) > 0).all() and len(data) == rows.size:
            _, at = np.unique(rows[::-1], return_index=True)  # of those named twice, the last
            kept = np.sort(rows.size - 1 - at)
            rows, data = rows[kept], data[torch.from_numpy(kept)]
        cursor = torch.from_numpy(rows) if several else cursor
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
    """A slice of a storage, which can be written. Compressed keys are in it decoded, or not at all.

    Its own methods write a whole record or nothing; what is derived from it, tensor by tensor.
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
        with suppress(IndexError):  # it goes into the items, which TensorDict allows
            slots = torch.from_numpy(self._slots)[index].numpy()
            return StorageSlice.over(content, self._owner, slots)
        return content

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write items; or, as in any TensorDict, put another tensor under a key of this one."""
        if self._owner is None or key_path(index):
            super().__setitem__(index, value)
            return
        numbers = TensorDict({"slot": torch.from_numpy(self._slots)}, self._slots.shape)[index]
        slots = numbers["slot"].numpy()
        if isinstance(value, dict):
            value = TensorDict.from_dict(value, batch_size=numbers.batch_size)
        changes = dict.fromkeys(self._compressed, value)
        if is_tensor_collection(value):
            if value.batch_size[: slots.ndim] != numbers.batch_size:
                value = value.expand(numbers.batch_size)
            value, changes = self._taken_apart(value)
        plain = self.exclude(*self._compressed)
        self._owner.write_keys(slots, changes, lambda: plain.__setitem__(index, value))

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
        self._owner.write_keys(slots, {path: value})
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
        rest, changes = self._taken_apart(source)
        plain = self.exclude(*self._compressed)
        self._owner.write_keys(
            self._slots, changes, lambda: plain.update_(rest, clone=clone, **more)
        )
        return self

    @property
    def _compressed(self) -> Mapping[KeyPath, str]:
        assert self._owner is not None
        return self._owner.compressed_keys

    def _taken_apart(self, data: TensorDictBase) -> tuple[TensorDictBase, dict[KeyPath, Any]]:
        """Return the plain keys of some data, and the compressed ones."""
        assert self._owner is not None
        data, leaves = self._owner.apart(data)
        changes = {path: leaf for path, leaf in leaves.items() if path in self._compressed}
        return data.exclude(*self._compressed), changes


@dataclass(eq=False)
class Decoded:
    """A compressed key of some slots, decoded, and the clock of the storage when it was."""

    owner: CompressedStorage
    path: KeyPath
    slots: Slots
    whole: torch.Tensor
    clock: int

    def refresh(self) -> None:
        """Decode it again, if the storage was written since."""
        if self.clock == self.owner.clock:
            return
        with self.owner.lock:
            with suppress(UsageError, KeyError):  # emptied: then it stays as it is
                self.whole.copy_(self.owner.decoded(self.path, self.slots))
            self.clock = self.owner.clock

    def write(self) -> None:
        """Write all of it to the storage."""
        with self.owner.lock:
            self.owner.write_keys(self.slots, {self.path: self.whole})
            self.clock = self.owner.clock


class TensorSlice(torch.Tensor):
    """A compressed key of a slice: it shows what the storage holds, and is written through to it.

    Whatever writes to it or to a view of it (`slice += 1`, `slice[1:3][0] = 9`, `out=slice`): the
    version that torch counts per memory tells, and the whole slice is written anew.
    """

    stored_as_plain = True  # wherever tensors are stored: see `check_storable`
    _decoded: Decoded

    @classmethod
    def over(cls, data: torch.Tensor, decoded: Decoded) -> TensorSlice:
        """Make one of a decoded key, or of a view of that."""
        made = data.as_subclass(cls)
        made._decoded = decoded
        return made

    @property
    def plain(self) -> torch.Tensor:
        """The same memory, as it is now, without the storage."""
        return self.as_subclass(torch.Tensor)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None  # TensorDict counts the bytes of these

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The storage does not go with it.
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what torch does; then write to the storage, if that changed the slice."""
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        found = {id(x._decoded): x._decoded for x in leaves if isinstance(x, TensorSlice)}
        sources = sorted(found.values(), key=lambda one: id(one.owner))  # one order of locks
        writes = func.__name__.endswith("_") or "out" in kwargs  # as torch names what does
        with ExitStack() as locks, torch._C.DisableTorchFunctionSubclass():
            for source in sources if func.__name__ != "__get__" else ():  # shape, dtype, …
                if writes:
                    locks.enter_context(source.owner.lock)
                source.refresh()
            before = [source.whole._version for source in sources]
            result = func(*args, **kwargs)
            for source, version in zip(sources, before, strict=True):
                if source.whole._version != version:
                    source.write()

            def wrapped(value: Any) -> Any:
                for source in sources if type(value) is torch.Tensor else ():
                    memory = source.whole.untyped_storage().data_ptr()
                    if memory == value.untyped_storage().data_ptr():
                        return TensorSlice.over(value, source)
                return value

            if func is torch.Tensor.as_subclass:
                return result
            several = type(result) in (tuple, list)  # not a torch.Size
            return type(result)(map(wrapped, result)) if several else wrapped(result)
