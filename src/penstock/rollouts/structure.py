"""Nested batches taken apart: a JSON description of the containers, and the tensors beside it.

A batch is a TensorDict, or nested dicts of tensors, arrays and plain values. Keys survive exactly,
whatever characters they hold: they are in the description, and the names of the tensors in a file
are only labels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core import tree
from penstock.core.pack import DTYPES
from penstock.core.tree import Json
from penstock.errors import CorruptFile, UnsupportedValue, UsageError
from penstock.rollouts.tensordicts import (
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)
from penstock.tensors import DTYPE_NAMES, check_storable, flat_words, tensor_bytes, tensor_over
from penstock.ui.suggestions import did_you_mean

Key = tuple[Any, ...]
MAX_DEPTH = 100
# What a description that was not made here may raise when it is put together.
NONSENSE = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError)


@dataclass
class Leaf:
    """One tensor of a batch: as it came, or as an array of the pack's words for its dtype."""

    item: str
    key: Key
    dtype: str
    value: torch.Tensor | NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.value.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        if isinstance(self.value, torch.Tensor):
            return tensor_bytes(self.value)
        return self.value.nbytes

    def words(self) -> NDArray[Any]:
        """View or copy it as an array of pack words, in its own shape, on the CPU."""
        if isinstance(self.value, torch.Tensor):
            tensor = self.value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            return flat_words(tensor).reshape(self.shape)
        return self.value


@dataclass
class Batch:
    """A batch taken apart: `node` is JSON, the leaves are the tensors it names."""

    node: Json
    leaves: list[Leaf]


@dataclass(frozen=True)
class Axes:
    """The leading axes of a batch: which of them are environments, which is time.

    Attributes:
        batch: The leading shape, of at most two axes; tensors that do not begin with it are never
            indexed.
        env: Number of the axis of environments, if there is one.
        time: Number of the axis of time, if there is one.
    """

    batch: tuple[int, ...]
    env: int | None
    time: int | None

    def cover(self, shape: tuple[int, ...]) -> bool:
        """Tell whether a tensor of this shape has these axes."""
        return bool(self.batch) and tuple(shape[: len(self.batch)]) == self.batch

    def order(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the order of axes that puts environments first and time last, or None."""
        if self.env is None or self.time is None or not self.cover(shape):
            return None
        return (self.env, *range(2, len(shape)), self.time)


def take_apart(data: Any) -> Batch:
    """Describe a batch and list its tensors."""
    if not isinstance(data, TensorDictBase | dict):
        raise UsageError(
            f"a rollout is a TensorDict or nested dicts of tensors, not {_class(data)}; wrap it"
        )
    leaves: list[Leaf] = []
    return Batch(_describe(data, (), leaves, {"__metadata__", ""}), leaves)


def _describe(value: Any, key: Key, leaves: list[Leaf], taken: set[str]) -> Json:
    if len(key) > MAX_DEPTH:
        raise UnsupportedValue(
            f"{_dotted(key)[:60]}… is nested deeper than {MAX_DEPTH}, or contains itself"
        )
    if isinstance(value, NonTensorStack | NonTensorData):
        stack = isinstance(value, NonTensorStack)
        return {
            "kind": "nontensors" if stack else "nontensor",
            "v": _plain(value.tolist() if stack else value.data, key),
            "batch_size": list(value.batch_size),
        }
    if is_tensorclass(value):
        raise UnsupportedValue(
            f"{_dotted(key)} is a {_class(value)}; store its TensorDict: to_tensordict()"
        )
    if isinstance(value, TensorDictBase):
        data = dense(value, _dotted(key))
        children = [
            [name, _describe(data.get(name), (*key, name), leaves, taken)]
            for name in data.keys()  # noqa: SIM118 - it iterates over its steps instead
        ]
        return {
            "kind": "tensordict",
            "batch_size": list(data.batch_size),
            "names": data.names if any(data.names) else None,
            "v": children,
        }
    if isinstance(value, dict):
        children = []
        for name, child in value.items():
            path = (*key, *as_path(name))
            children.append([_plain(name, path), _describe(child, path, leaves, taken)])
        return {"kind": "dict", "v": children}
    if isinstance(value, torch.Tensor):
        if isinstance(value, MemoryMappedTensor):
            value = value.as_subclass(torch.Tensor)
        check_storable(_dotted(key), value)
        leaves.append(Leaf(_item_name(key, taken), key, DTYPE_NAMES[value.dtype], value))
        return {"kind": "tensor", "item": leaves[-1].item, "device": str(value.device)}
    if isinstance(value, np.ndarray):
        array = value.astype(value.dtype.newbyteorder("="), copy=False)
        if array.dtype.name not in DTYPES or DTYPES[array.dtype.name].words != array.dtype:
            raise UnsupportedValue(
                f"{_dotted(key)} is an array of {value.dtype}, which cannot be stored; convert it"
            )
        leaves.append(Leaf(_item_name(key, taken), key, array.dtype.name, array))
        return {"kind": "array", "item": leaves[-1].item}
    return {"kind": "value", "v": _plain(value, key)}


def dense(data: TensorDictBase, name: str) -> TensorDictBase:
    """Return a TensorDict of whole tensors; refuse a stack of unequal ones."""
    try:
        return data if type(data) is TensorDict else data.contiguous()  # a lazy stack, most often
    except RuntimeError as error:
        raise UnsupportedValue(
            f"{name} is a stack of unequal parts, which cannot be stored; pad them"
        ) from error


def _plain(value: Any, key: Key) -> Json:
    try:
        return tree.flatten(value, lambda path, foreign: None)
    except UnsupportedValue as error:
        raise UnsupportedValue(f"{_dotted(key)}: {error}") from None


def _item_name(key: Key, taken: set[str]) -> str:
    name = "/".join(map(str, key))
    number = 0
    while name in taken or name.encode(errors="replace").decode() != name:
        name, number = f"tensor {number}", number + 1
    taken.add(name)
    return name


def as_path(name: Any) -> Key:
    """Return the name of a key, which may be a tuple of names, as a tuple."""
    return name if isinstance(name, tuple) else (name,)


def _dotted(key: Key) -> str:
    return ".".join(map(str, key)) or "the rollout"


def _class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def find_axes(data: Any, batch: Batch, time_dim: int) -> Axes:
    """Find the axes of environments and time.

    A TensorDict tells by its batch size, and by the name "time" if it has one. Of dicts the largest
    tensor tells: its first two axes count, and for every tensor that begins with the same two.

    Args:
        data: The batch.
        batch: The same, taken apart.
        time_dim: Which of the first two axes is time, where no name says so.
    """
    names: list[Any] = []
    if isinstance(data, TensorDictBase) and data.batch_size:
        leading = tuple(data.batch_size)[:2]
        names = list(data.names)[:2]
    else:
        shapes = [leaf.shape for leaf in sorted(batch.leaves, key=lambda leaf: -leaf.nbytes)]
        leading = shapes[0][:2] if shapes else ()
    time: int | None = names.index("time") if "time" in names else time_dim
    if len(leading) == 2 and time is not None:
        return Axes(leading, 1 - time, time)
    if len(leading) == 1:
        return Axes(leading, None, 0) if time == 0 else Axes(leading, 0, None)
    return Axes((), None, None)


def keys_of(node: Json) -> dict[Key, str | None]:
    """Return every key of a batch, as a tuple, with the name of its tensor (None: a value)."""
    try:
        return dict(_walk(node, ()))
    except NONSENSE as error:
        raise CorruptFile(f"the description of the rollout makes no sense ({error!r})") from error


def _walk(node: Json, key: Key) -> Iterator[tuple[Key, str | None]]:
    if len(key) > MAX_DEPTH:
        raise CorruptFile(f"the rollout is nested deeper than {MAX_DEPTH}")
    if node["kind"] not in ("dict", "tensordict"):
        yield key, node.get("item")
        return
    for name, child in node["v"]:
        yield from _walk(child, (*key, *as_path(_key_name(node, name))))


def _key_name(node: Json, name: Json) -> Any:
    return name if node["kind"] == "tensordict" else tree.unflatten(name, _refuse)


def _refuse(record: dict[str, Json]) -> Any:
    raise CorruptFile(f"unknown kind of value {record.get(tree.TAG)!r}")


def choose(known: Iterable[Key], wanted: Iterable[Any] | None) -> set[Key] | None:
    """Return the keys that a list of keys, tuples and prefixes asks for; None for all."""
    if wanted is None:
        return None
    if isinstance(wanted, str | tuple):
        raise UsageError(f"keys={wanted!r}: give a list of keys, as [{wanted!r}]")
    known = list(known)
    chosen: set[Key] = set()
    for word in wanted:
        prefix = as_path(word)
        found = {key for key in known if key[: len(prefix)] == prefix}
        if not found:
            hint = did_you_mean(_dotted(prefix), sorted({_dotted(key) for key in known}))
            raise UsageError(f"no key {word!r} in this rollout: {hint}")
        chosen |= found
    return chosen


@dataclass(frozen=True)
class Picked:
    """What an index picks from one axis."""

    positions: NDArray[np.int64]
    drops: bool = False  # a single number: the axis goes away

    @staticmethod
    def of(name: str, index: Any, size: int) -> Picked:
        """Check an index against the length of its axis."""
        try:
            if isinstance(index, slice):
                return Picked(np.arange(*index.indices(size), dtype=np.int64))
            if not isinstance(index, list | tuple | np.ndarray | torch.Tensor):
                index = np.array(operator.index(index))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{name}={index!r}: give a number, a slice, or a list of numbers ({error})"
            ) from None
        array = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
        if array.dtype == np.bool_ and array.shape == (size,):
            return Picked(np.flatnonzero(array))
        if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
            raise UsageError(
                f"{name}: an index of shape {list(array.shape)} and type {array.dtype} does not "
                f"fit an axis of {size}; give one list of whole numbers"
            )
        outside = array[(array < -size) | (array >= size)]
        if outside.size:
            raise UsageError(f"{name}: {outside.flat[0]} is not in an axis of {size}")
        positions = array.reshape(-1).astype(np.int64)
        return Picked(np.where(positions < 0, positions + size, positions), array.ndim == 0)


@dataclass(frozen=True)
class Selection:
    """Which part of a batch is rebuilt: what is picked from each axis; by default everything."""

    axes: Axes
    picked: Mapping[int, Picked]

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Tell whether it takes a part of a tensor of this shape."""
        return bool(self.picked) and self.axes.cover(shape)

    @property
    def dropped(self) -> set[int]:
        """The axes that go away."""
        return {axis for axis, picked in self.picked.items() if picked.drops}

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return what a shape becomes."""
        if not self.covers(shape):
            return shape
        sizes = {axis: picked.positions.size for axis, picked in self.picked.items()}
        return tuple(sizes.get(axis, n) for axis, n in enumerate(shape) if axis not in self.dropped)

    def names(self, shape: tuple[int, ...], names: list[Any]) -> list[Any]:
        """Return what the names of the axes of a batch size become."""
        dropped = self.dropped if self.covers(shape) else ()
        return [name for axis, name in enumerate(names) if axis not in dropped]

    def narrow(self, rows: list[Any], shape: tuple[int, ...]) -> Any:
        """Index nested lists of values as the tensors were indexed; `shape` is the result's."""
        if len(self.axes.batch) > 1:
            rows = [self._picked(row, 1) for row in rows]
        rows = self._picked(rows, 0)
        if 0 in shape:  # an empty stack holds nothing
            return NonTensorData(None, batch_size=shape)
        return NonTensorStack.from_list(rows)

    def _picked(self, values: Any, axis: int) -> Any:
        if axis not in self.picked:
            return values
        found = [values[position] for position in self.picked[axis].positions]
        return found[0] if axis in self.dropped else found


@dataclass(frozen=True)
class Builder:
    """Rebuilds a batch from its description.

    A class, not nested functions: two that call each other keep the arrays alive until the garbage
    collector comes by, and every load would pay for fresh memory.

    Args:
        words: The tensors and arrays by their names, as words of a pack.
        dtypes: The type of each.
        device: Where tensors go, and TensorDicts say they are.
        chosen: Keys to rebuild; None for all.
        part: What of the batch the tensors are.
    """

    words: Mapping[str, NDArray[Any]]
    dtypes: Mapping[str, str]
    device: torch.device
    chosen: set[Key] | None
    part: Selection

    def build(self, node: Json, key: Key = ()) -> Any:
        """Return what a description describes."""
        kind = node["kind"]
        if kind == "array":
            return self.words[node["item"]]
        if kind == "tensor":
            item = node["item"]
            return tensor_over(self.words[item], self.dtypes[item]).to(self.device)
        if kind == "value":
            return tree.unflatten(node["v"], _refuse)
        if kind == "dict":
            return self._children(node, key)
        batch = tuple(node["batch_size"])
        shape = self.part.shape(batch)
        if kind == "tensordict":
            names = node["names"] and self.part.names(batch, node["names"])
            content = self._children(node, key)
            return TensorDict(content, batch_size=shape, device=self.device, names=names)
        value = tree.unflatten(node["v"], _refuse)
        if kind == "nontensor":
            return NonTensorData(value, batch_size=shape)
        if kind == "nontensors":
            return self.part.narrow(value, shape)
        raise CorruptFile(f"unknown kind of value {kind!r} at {_dotted(key)}")

    def _children(self, node: Json, key: Key) -> dict[Any, Any]:
        found = {}
        for record, child in node["v"]:
            name = _key_name(node, record)
            path = (*key, *as_path(name))
            if self.chosen is None or any(full[: len(path)] == path for full in self.chosen):
                found[name] = self.build(child, path)
        return found
