"""What data looks like to the user: a TensorDict, a tensorclass, a bare tensor, or a pytree.

Within, a storage keeps a TensorDict. It takes the form of its first data, and answers in that form,
as TorchRL's own storages do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.utils import is_tensorclass
from torch.utils import _pytree as pytree

from penstock.core import tree
from penstock.core.tree import Json
from penstock.errors import CorruptFile, UnsupportedValue, UsageError


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

    @property
    def is_tensor(self) -> bool:
        """Whether the data is one bare tensor."""
        return isinstance(self.structure, int)

    def wrap(self, data: Any, lead: int) -> TensorDictBase:
        """Return data of this form as one dense TensorDict.

        Args:
            data: What the user gives.
            lead: Leading dimensions that count as slots.

        Raises:
            UsageError: It has another form, or its parts do not fit together.
            UnsupportedValue: It holds something that is not a tensor.
        """
        if self.structure is not None:
            data = _in_order_of(self.structure, data)
        if form_of(data) != self:
            raise UsageError(
                f"the data is {form_of(data)}, the first data was {self}; a storage keeps one form"
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

    def to_json(self) -> Json:
        """Describe it for a file; None for a TensorDict, and for a tensorclass, which is code.

        Raises:
            UnsupportedValue: Its containers are of classes that a file cannot name.
        """
        return None if self.structure is None else tree.flatten([self.structure], lambda *_: None)

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


def form_of(data: Any) -> Form:
    """Return the form of some data.

    Raises:
        UnsupportedValue: A storage cannot hold it.
    """
    if is_tensor_collection(data):
        return Form(type(data)) if is_tensorclass(data) else Form()
    leaves, spec = pytree.tree_flatten(data, is_leaf=is_tensor_collection)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise UnsupportedValue(
                f"a compressed storage takes tensors, in TensorDicts or other containers, not "
                f"{type(leaf).__qualname__}; make it a tensor"
            )
    if not leaves:
        raise UsageError("the data has no tensors; there is nothing to store")
    return Form(structure=pytree.tree_unflatten(list(range(len(leaves))), spec))


def form_from_json(record: Json) -> Form:
    """Rebuild what `Form.to_json` described."""
    if record is None:
        return Form()

    def refuse(_: dict[str, Json]) -> Any:
        raise CorruptFile("the form of its data makes no sense")

    (structure,) = tree.unflatten(record, refuse)
    leaves = pytree.tree_leaves(structure)
    if leaves != list(range(len(leaves))):
        raise CorruptFile("the form of its data makes no sense")
    return Form(structure=structure)


def stack_items(items: list[Any]) -> Any:
    """Stack what a list holds one by one, as TorchRL does.

    Raises:
        UsageError: The items do not fit together.
    """
    try:
        if all(is_tensor_collection(item) for item in items):
            return torch.stack(items)
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *items)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"the items of the list do not fit together ({error})") from error
