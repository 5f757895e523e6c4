"""The keys of a buffer: names or tuples of names, and what one frame of each is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.pack import DTYPES
from penstock.errors import CorruptFile, UsageError
from penstock.replay.frames import check_codec
from penstock.tensors import torch_dtype
from penstock.ui.suggestions import did_you_mean

KeyPath = tuple[str, ...]
Key = str | tuple[str, ...]
Codecs = str | Mapping[Any, str]


@dataclass(frozen=True)
class Field:
    """One key: where it lies, and what one frame (or slot) of it is."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Field:
        """Rebuild what `config` returned; what makes no sense is an error."""
        field = cls(
            tuple(map(str, config["path"])), str(config["dtype"]), tuple(map(int, config["shape"]))
        )
        if field.dtype not in DTYPES or min(field.shape, default=1) < 0:
            raise CorruptFile(f"the key {dict(config)!r} makes no sense")
        return field

    def config(self) -> dict[str, Any]:
        """Describe it for a file."""
        return {"path": list(self.path), "dtype": self.dtype, "shape": list(self.shape)}

    @cached_property
    def size(self) -> int:
        """Bytes of one frame."""
        return math.prod(self.shape) * DTYPES[self.dtype].words.itemsize

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """Its type in torch."""
        return torch_dtype(self.dtype)

    @property
    def name(self) -> str:
        """The key as one word, with dots."""
        return ".".join(self.path)

    def words(self, rows: NDArray[np.uint8]) -> NDArray[Any]:
        """View the bytes [n, size] of frames as the pack's words [n, *shape]."""
        return rows.view(DTYPES[self.dtype].words).reshape(len(rows), *self.shape)

    def tensor(self, rows: NDArray[np.uint8], shape: tuple[int, ...]) -> torch.Tensor:
        """View the bytes [n, size] of frames as a tensor [*shape, *self.shape]."""
        if not rows.size:  # torch does not view nothing as another type
            return torch.empty((*shape, *self.shape), dtype=self.torch_dtype)
        return torch.from_numpy(rows).view(self.torch_dtype).view((*shape, *self.shape))

    def __str__(self) -> str:
        return f"{show(self.path)}: {self.dtype}{list(self.shape)}"


def show(path: KeyPath) -> str:
    """Return a key as the user wrote it."""
    return repr(as_key(path))


def as_path(key: Any) -> KeyPath:
    """Return a key, a name or a tuple of names, as a path."""
    path = (key,) if isinstance(key, str) else key
    if not isinstance(path, tuple) or not path or not all(isinstance(k, str) for k in path):
        raise UsageError(f"{key!r} is not a key; give a name, or a tuple of names for a nested one")
    return path


def as_key(path: KeyPath) -> Key:
    """Return a path as the user wrote it: a name, or a tuple of names."""
    return path[0] if len(path) == 1 else path


def as_paths(keys: Iterable[Key]) -> list[KeyPath]:
    """Return keys as paths, none of them twice, none of them inside another."""
    if isinstance(keys, str):
        raise UsageError(f"keys is the text {keys!r}; give a list of keys")
    paths = [as_path(key) for key in keys]
    taken = set(paths)
    for path in paths:
        for n in range(1, len(path)):
            if path[:n] in taken:
                raise UsageError(f"{show(path)} lies inside {show(path[:n])}, which is a key too")
        if paths.count(path) > 1:
            raise UsageError(f"{show(path)} is given twice")
    return paths


def known(path: KeyPath, paths: Sequence[KeyPath], what: str) -> int:
    """Return the number of a key."""
    if path not in paths:
        hint = did_you_mean(".".join(path), map(".".join, paths))
        raise UsageError(f"{what}: there is no key {show(path)}; {hint}")
    return paths.index(path)


def check_codecs(codecs: Codecs) -> None:
    """Refuse codecs that there are not."""
    for name in [codecs] if isinstance(codecs, str) else codecs.values():
        check_codec(name, "codecs")


def codecs_of(codecs: Codecs, paths: Sequence[KeyPath], default: str) -> list[str]:
    """Return the name of the codec of each key."""
    check_codecs(codecs)
    if isinstance(codecs, str):
        return [codecs] * len(paths)
    chosen = [default] * len(paths)
    for key, name in codecs.items():
        chosen[known(as_path(key), paths, "codecs")] = name
    return chosen
