"""The structure of a storage's data: the form in which the user has it, and the tree of its keys.

Within, a storage keeps a TensorDict. It takes the form of its first data, be it a TensorDict, a
tensorclass, a bare tensor or a pytree, and answers in that form, as TorchRL's own storages do. The
tree of keys is taken apart once, at the first write. After that an answer is a list of tensors in a
fixed order, and building the nested TensorDict around them costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from penstock.tensors import DTYPE_NAMES, check_storable


@dataclass(frozen=True)
class Form:
    """The form of the data of a storage; a TensorDict by default.

    Attributes:
        kind: The class, of a tensorclass.
        structure: Of a pytree, a bare tensor among them: the same containers, with the numbers of
            the tensors in place of the tensors.
    """

    kind: type | None = None
    structure: Any = None

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

    @property
    def is_tensor(self) -> bool:
        """Whether the data is one bare tensor."""
        return isinstance(self.structure, int)

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
    """The keys of a storage, and the structure that all answers of it have.

    Args:
        keys: The tensors, in order.
        extras: Batch dimensions beyond those of the storage, of the root `()` and of each nested
            TensorDict, by path.
        big: Numbers of the keys that are compressed.
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
    """View a CPU tensor as bytes, one row per slot; copies only if it is not contiguous."""
    count, row_bytes = tensor.shape[:lead].numel(), tensor.shape[lead:].numel() * tensor.itemsize
    flat = tensor.detach().contiguous()
    # A dimension of one element may have any stride, which torch then does not view as bytes.
    flat = flat.as_strided((flat.numel(),), (1,), flat.storage_offset())
    rows: NDArray[np.uint8] = flat.view(torch.uint8).numpy().reshape(count, row_bytes)
    return rows
