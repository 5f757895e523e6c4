"""Nested batches taken apart: a JSON description of the containers, and the tensors beside it.

A batch is a TensorDict, or nested dicts of tensors, arrays and plain values. Keys survive exactly,
whatever characters they hold: they are in the description, and the names of the tensors in a file
are only labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core import tree
from penstock.core.extras import installed
from penstock.core.pack import DTYPES
from penstock.core.tree import Json
from penstock.errors import CorruptFile, MissingExtra, UnsupportedValue, UsageError
from penstock.tensors import (
    DTYPE_NAMES,
    check_storable,
    flat_words,
    settled,
    tensor_bytes,
    tensor_over,
    unmapped,
)
from penstock.ui.suggestions import did_you_mean

if TYPE_CHECKING:
    from tensordict import NonTensorData as NonTensorData
    from tensordict import NonTensorStack as NonTensorStack
    from tensordict import TensorDict as TensorDict
    from tensordict import TensorDictBase as TensorDictBase
    from tensordict import is_tensor_collection as is_tensor_collection
    from tensordict import is_tensorclass as is_tensorclass
else:
    try:
        import tensordict
    except ImportError:
        tensordict = None

    class _Absent:
        """Stands for what a tensordict of 2023 lacks, or for all of it: nothing is one of these."""

        def __init__(self, *_: Any, **__: Any) -> None:
            old = f"this rollout needs a newer tensordict than {installed('tensordict')}"
            raise MissingExtra("tensordict", "rl", old if tensordict else None)

        from_list = classmethod(lambda cls, _: cls())  # as a NonTensorStack is made

    NonTensorData = getattr(tensordict, "NonTensorData", _Absent)
    NonTensorStack = getattr(tensordict, "NonTensorStack", _Absent)
    TensorDict = getattr(tensordict, "TensorDict", _Absent)
    TensorDictBase = getattr(tensordict, "TensorDictBase", _Absent)
    is_tensor_collection = getattr(tensordict, "is_tensor_collection", lambda _: False)
    is_tensorclass = getattr(tensordict, "is_tensorclass", lambda _: False)

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

    @classmethod
    def of(cls, key: Key, tensor: torch.Tensor, item: str = "") -> Leaf:
        """Return a tensor as a leaf; refuse one that cannot be stored."""
        tensor = unmapped(tensor)
        check_storable(_dotted(key), tensor)
        return cls(item, key, DTYPE_NAMES[tensor.dtype], tensor)

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
            return flat_words(settled(self.value)).reshape(self.shape)
        return self.value


@dataclass
class Batch:
    """A batch taken apart: `node` is JSON, the leaves are the tensors it names."""

    node: Json
    leaves: list[Leaf]


@dataclass(frozen=True)
class Axes:
    """The leading axes of a batch, at most two: which are environments, which is time.

    Tensors that do not begin with the shape `batch` are never indexed.
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
    if isinstance(value, TensorDictBase | dict):
        described: dict[str, Json] = {"kind": "dict"}
        if not isinstance(value, dict):
            value = dense(value, _dotted(key))
            names = value.names if any(value.names) else None
            batch = list(value.batch_size)
            described = {"kind": "tensordict", "batch_size": batch, "names": names}
        children = []
        for name, child in value.items():
            path = (*key, *as_path(name))
            children.append([_plain(name, path), _describe(child, path, leaves, taken)])
        return {**described, "v": children}
    if isinstance(value, torch.Tensor):
        leaves.append(Leaf.of(key, value, _item_name(key, taken)))
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

    `time_dim` is the one that is time where no name says so.
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


def keys_of(node: Json, key: Key = ()) -> Iterator[tuple[Key, str | None]]:
    """Yield every key of a batch, as a tuple, with the name of its tensor (None: a value)."""
    if len(key) > MAX_DEPTH:
        raise CorruptFile(f"the rollout is nested deeper than {MAX_DEPTH}")
    if node["kind"] not in ("dict", "tensordict"):
        yield key, node.get("item")
        return
    for name, child in node["v"]:
        yield from keys_of(child, (*key, *as_path(_key_name(node, name))))


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
            if not isinstance(index, slice):
                index = index.cpu() if isinstance(index, torch.Tensor) else index
                index = np.asarray(index, None if np.size(index) else np.int64)
            positions = np.arange(size, dtype=np.int64)[index]
            if positions.ndim > 1:
                raise IndexError("it has several axes")
        except (IndexError, TypeError, ValueError) as error:
            text = "give a number, a slice, or a list of whole numbers"
            raise UsageError(f"{name}: {error}; {text}, of an axis of {size}") from None
        return Picked(positions.reshape(-1), positions.ndim == 0)


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

    def narrow(self, values: Any, axis: int = 0) -> Any:
        """Index nested lists of values as the tensors were indexed."""
        if axis == len(self.axes.batch):
            return values
        every = range(len(values)) if axis not in self.picked else self.picked[axis].positions
        found = [self.narrow(values[position], axis + 1) for position in every]
        return found[0] if axis in self.dropped else found


@dataclass(frozen=True)
class Builder:
    """Rebuilds a batch, or the chosen keys of a part of it, from its description.

    A class, not nested functions: two that call each other keep the arrays alive until the garbage
    collector comes by, and every load would pay for fresh memory.
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
            if 0 in shape:  # an empty stack holds nothing
                return NonTensorData(None, batch_size=shape)
            return NonTensorStack.from_list(self.part.narrow(value))
        raise CorruptFile(f"unknown kind of value {kind!r} at {_dotted(key)}")

    def _children(self, node: Json, key: Key) -> dict[Any, Any]:
        found = {}
        for record, child in node["v"]:
            name = _key_name(node, record)
            path = (*key, *as_path(name))
            if self.chosen is None or any(full[: len(path)] == path for full in self.chosen):
                found[name] = self.build(child, path)
        return found
