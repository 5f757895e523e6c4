"""The keys of a TensorDict buffer: which are compressed, and how an answer is put together.

A tree of keys is taken apart once, at the first write. After that an answer is a list of tensors in
a fixed order, and building the nested TensorDict around them costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from tensordict.utils import is_non_tensor

from penstock.core.pack import DTYPES
from penstock.errors import CorruptFile, UnsupportedValue, UsageError
from penstock.replay.frames import CODEC_NAMES
from penstock.tensors import DTYPE_NAMES, check_storable
from penstock.ui.suggestions import did_you_mean

Path = tuple[str, ...]
Codecs = str | Mapping[Any, str]
_SAMPLE_ITEMS = 64
_TYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass
class Key:
    """One tensor of the tree.

    Attributes:
        path: Its nested key, as a tuple.
        dtype: Its element type.
        shape: Its shape in one slot.
        column: The number of its compressed column; None if it is kept plain.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    column: int | None = None

    @property
    def name(self) -> str:
        """How a message calls it."""
        return ".".join(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        """Describe it for a file."""
        return {
            "path": list(self.path),
            "dtype": DTYPE_NAMES[self.dtype],
            "shape": list(self.shape),
        }


def key_from_json(record: Any) -> Key:
    """Rebuild what `Key.to_json` described."""
    if record["dtype"] not in _TYPES:
        raise CorruptFile(f"unknown dtype {record['dtype']!r}")
    shape = tuple(int(n) for n in record["shape"])
    if min(shape, default=1) < 0:
        raise CorruptFile(f"shape {shape} makes no sense")
    return Key(tuple(map(str, record["path"])), _TYPES[record["dtype"]], shape)


@dataclass
class _Node:
    """A (nested) TensorDict: tensors by their number, others by their own node."""

    extra: tuple[int, ...]
    children: dict[str, int | _Node] = field(default_factory=dict)


class KeyTree:
    """The structure that all answers of a storage have.

    Args:
        keys: The tensors, in order.
        extras: Batch dimensions beyond those of the storage, of the root `()` and of each nested
            TensorDict, by path.
    """

    def __init__(self, keys: Sequence[Key], extras: Mapping[Path, tuple[int, ...]]) -> None:
        self.keys = list(keys)
        self.extras = dict(extras)
        self.by_path = {key.path: key for key in self.keys}
        self.plain = [k for k, key in enumerate(self.keys) if key.column is None]
        self.big = [k for k, key in enumerate(self.keys) if key.column is not None]
        self._root = _Node(self.extras.get((), ()))
        for path in sorted(self.extras, key=len):
            self._node(path)
        for number, key in enumerate(self.keys):
            self._node(key.path[:-1]).children[key.path[-1]] = number

    def _node(self, path: Path) -> _Node:
        node = self._root
        for depth, name in enumerate(path):
            extra = self.extras.get(path[: depth + 1], self._root.extra)
            child = node.children.setdefault(name, _Node(extra))
            if not isinstance(child, _Node):
                raise CorruptFile(f"{'.'.join(path)} is a tensor and holds others at once")
            node = child
        return node

    def assemble(
        self,
        tensors: Mapping[int, torch.Tensor],
        batch: tuple[int, ...],
        device: torch.device | None,
        names: Sequence[str | None] | None = None,
    ) -> TensorDict:
        """Build the TensorDict of an answer.

        Args:
            tensors: By the number of their key; keys left out are left out of the answer.
            batch: The leading dimensions of all of them.
            device: Where they are.
            names: Of all batch dimensions.
        """
        size = torch.Size((*batch, *self._root.extra))
        answer = self._build(self._root, tensors, batch, size, device)
        if names is not None:
            answer.names = list(names)
        return answer

    def _build(
        self,
        node: _Node,
        tensors: Mapping[int, torch.Tensor],
        batch: tuple[int, ...],
        size: torch.Size,
        device: torch.device | None,
    ) -> TensorDict:
        source: dict[str, Any] = {}
        for name, child in node.children.items():
            if isinstance(child, int):
                if child in tensors:
                    source[name] = tensors[child]
            else:
                inner = size if child.extra == node.extra else torch.Size((*batch, *child.extra))
                source[name] = self._build(child, tensors, batch, inner, device)
        # The shapes are known to fit; the public constructor would check every one of them again,
        # at five times the cost of gathering a small key.
        return TensorDict._new_unsafe(source=source, batch_size=size, device=device)


def walk(data: TensorDictBase, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Yield every tensor of a tree with its path; refuse what is not a tensor.

    Raises:
        UnsupportedValue: Something in it cannot be stored.
    """
    for name, value in data.items():
        here = (*path, name)
        if is_non_tensor(value):
            raise UnsupportedValue(
                f"{'.'.join(here)} is not a tensor (non-tensor data), which a compressed storage "
                "cannot hold; leave it out, or encode it as a tensor"
            )
        if is_tensor_collection(value):
            yield from walk(value, here)
        else:
            check_storable(".".join(here), value)
            yield here, value


def extras_of(data: TensorDictBase, lead: int, path: Path = ()) -> dict[Path, tuple[int, ...]]:
    """Return the batch dimensions beyond the first `lead` ones, of the tree and all within it."""
    found = {path: tuple(data.batch_size[lead:])}
    for name, value in data.items():
        if is_tensor_collection(value) and not is_non_tensor(value):
            found.update(extras_of(value, lead, (*path, name)))
    return found


def wanted_codec(path: Path, codecs: Codecs) -> str:
    """Return the codec that the user asked for."""
    if isinstance(codecs, str):
        return codecs
    for key, name in codecs.items():
        if ((key,) if isinstance(key, str) else tuple(key)) == path:
            return name
    return "auto"


def check_names(codecs: Codecs) -> None:
    """Refuse codecs that there are not.

    Raises:
        UsageError: A name is not one of `penstock.replay.frames`.
    """
    for name in [codecs] if isinstance(codecs, str) else codecs.values():
        if name not in CODEC_NAMES:
            raise UsageError(f"there is no codec {name!r}; {did_you_mean(name, CODEC_NAMES)}")


def check_codecs(codecs: Codecs, paths: Sequence[Path]) -> None:
    """Refuse settings for keys that are not there.

    Raises:
        UsageError: A key of `codecs` is not in the data.
    """
    if isinstance(codecs, str):
        return
    for key in codecs:
        path = (key,) if isinstance(key, str) else tuple(key)
        if path not in paths:
            known = [".".join(one) for one in paths]
            raise UsageError(
                f"codecs names {'.'.join(path)!r}, which is not in the data; "
                f"{did_you_mean('.'.join(path), known)}"
            )


def as_rows(tensor: torch.Tensor, lead: int) -> NDArray[np.uint8]:
    """View a CPU tensor as bytes, one row per slot; copies only if it is not contiguous."""
    count, row_bytes = tensor.shape[:lead].numel(), tensor.shape[lead:].numel() * tensor.itemsize
    flat = tensor.detach().contiguous()
    # A dimension of one element may have any stride, which torch then does not view as bytes.
    flat = flat.as_strided((flat.numel(),), (1,), flat.storage_offset())
    rows: NDArray[np.uint8] = flat.view(torch.uint8).numpy().reshape(count, row_bytes)
    return rows


def as_words(rows: NDArray[np.uint8], key: Key) -> NDArray[Any]:
    """View rows of bytes as the elements that they are."""
    words = DTYPES[DTYPE_NAMES[key.dtype]].words
    return rows.view(words).reshape(len(rows), *key.shape)


def from_rows(rows: NDArray[np.uint8], key: Key, batch: tuple[int, ...]) -> torch.Tensor:
    """View rows of bytes as a tensor of slots."""
    if not rows.size:  # torch does not view nothing as another type
        return torch.empty((*batch, *key.shape), dtype=key.dtype)
    return torch.from_numpy(rows).view(key.dtype).view((*batch, *key.shape))


def some_items(key: Key, tensor: torch.Tensor, lead: int) -> NDArray[Any]:
    """Return the content of a few slots, spread over all, to choose a codec by."""
    count = tensor.shape[:lead].numel()
    rows = tensor.detach().reshape(count, *key.shape)
    step = max(1, count // _SAMPLE_ITEMS)
    return as_words(as_rows(rows[::step][:_SAMPLE_ITEMS].cpu(), 1), key)
