"""What an episode is: nested arrays with one frame per step, checked before they are used."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.pack import DTYPES
from penstock.errors import UnsupportedValue, UsageError
from penstock.tensors import DTYPE_NAMES, check_storable, flat_words
from penstock.ui.suggestions import did_you_mean

KeyPath = tuple[str, ...]
Key = str | tuple[str, ...]
TORCH_TYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Field:
    """One key of the episodes: where it lies, and what one frame of it is.

    Args:
        path: The key, from the outside in.
        dtype: A name of the pack's types.
        shape: Of one frame.
    """

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        """Bytes of one frame."""
        return math.prod(self.shape) * DTYPES[self.dtype].words.itemsize

    def tensor(self, data: NDArray[np.uint8], shape: tuple[int, ...]) -> torch.Tensor:
        """View the bytes [n, size] of frames as a tensor [*shape, *self.shape]."""
        words = data.view(DTYPES[self.dtype].words).reshape((*shape, *self.shape))
        if self.dtype in np.sctypeDict:
            return torch.from_numpy(words)
        signed = words.view(np.int16) if words.itemsize == 2 else words
        return torch.from_numpy(signed).view(TORCH_TYPES[self.dtype])

    def __str__(self) -> str:
        return f"{show(self.path)}: {self.dtype}{list(self.shape)}"


def show(path: KeyPath) -> str:
    """Return a key as the user wrote it."""
    return repr(as_key(path))


def as_path(key: Any) -> KeyPath:
    """Return a key, a name or a tuple of names, as a path.

    Raises:
        UsageError: It is neither.
    """
    path = (key,) if isinstance(key, str) else key
    if not isinstance(path, tuple) or not path or not all(isinstance(k, str) for k in path):
        raise UsageError(f"{key!r} is not a key; give a name, or a tuple of names for a nested one")
    return path


def as_key(path: KeyPath) -> Key:
    """Return a path as the user wrote it: a name, or a tuple of names."""
    return path[0] if len(path) == 1 else path


def as_paths(keys: Iterable[Key]) -> list[KeyPath]:
    """Return keys as paths, none of them twice, none of them inside another.

    Raises:
        UsageError: They are not like that.
    """
    if isinstance(keys, str):
        raise UsageError(f"keys is the text {keys!r}; give a list of keys")
    paths = [as_path(key) for key in keys]
    taken = set(paths)
    for path in paths:
        for n in range(1, len(path)):
            if path[:n] in taken:
                raise UsageError(f"{show(path)} lies inside {show(path[:n])}, which is a key too")
    if len(taken) != len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise UsageError(f"{show(twice)} is given twice")
    return paths


def known(path: KeyPath, paths: Sequence[KeyPath], what: str) -> int:
    """Return the number of a key.

    Raises:
        UsageError: There is no such key.
    """
    if path not in paths:
        hint = did_you_mean(".".join(path), map(".".join, paths))
        raise UsageError(f"{what}: there is no key {show(path)}; {hint}")
    return paths.index(path)


def is_tensordict(value: Any) -> bool:
    """Tell whether a value is a TensorDict, without importing tensordict for it."""
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, module.TensorDictBase)


def read_episode(
    episode: Any, paths: Sequence[KeyPath]
) -> tuple[list[Field], list[NDArray[Any]], int]:
    """Check an episode and return its fields, its arrays [T, *shape] in pack words, and T.

    The arrays may be views of what was given.

    Raises:
        UsageError: It lacks a key, has one too many, is ragged or empty, or holds no numbers.
    """
    found = dict(_leaves(episode, set(paths)))
    for path in found:
        known(path, paths, "the episode")
    fields, arrays, length = [], [], -1
    for path in paths:
        if path not in found:
            hint = did_you_mean(".".join(path), map(".".join, found)) if found else "it is empty"
            raise UsageError(f"the episode has no key {show(path)}; {hint}")
        field, array = _field(path, found[path])
        if length < 0:
            length = len(array)
        if len(array) != length:
            raise UsageError(
                f"the episode is ragged: {show(path)} has {len(array)} frames, "
                f"{show(paths[0])} has {length}; give every key the same number"
            )
        fields.append(field)
        arrays.append(array)
    if length < 1:
        raise UsageError("the episode has no frames; add episodes of at least one")
    return fields, arrays, length


def nested(leaves: Iterable[tuple[KeyPath, Any]]) -> dict[str, Any]:
    """Put values under their paths."""
    root: dict[str, Any] = {}
    for path, value in leaves:
        inner = root
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return root


def _leaves(value: Any, paths: set[KeyPath], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if prefix in paths or not (isinstance(value, Mapping) or is_tensordict(value)):
        if not prefix:
            kind = type(value).__name__
            raise UsageError(f"an episode is a dict of arrays or a TensorDict, not a {kind}")
        yield prefix, value
        return
    for name in value.keys():  # noqa: SIM118 - a TensorDict iterates over its steps instead
        yield from _leaves(value[name], paths, (*prefix, name))


def _field(path: KeyPath, value: Any) -> tuple[Field, NDArray[Any]]:
    if isinstance(value, list | tuple):
        value = _stacked(path, value)
    if isinstance(value, torch.Tensor):
        check_storable(show(path), value)
        tensor = value.detach().cpu().contiguous()
        dtype, shape = DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        array = flat_words(tensor).reshape(shape)
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise _ragged(path, error) from error
        if array.dtype.name not in DTYPES:
            raise UnsupportedValue(
                f"{show(path)} is an array of {array.dtype}, which cannot be stored; use numbers"
            )
        # Arrays from files may have the bytes of a number in the other order.
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        dtype, shape = array.dtype.name, array.shape
        if np.ndim(value) == 0:
            shape = ()
    if not shape:
        raise UsageError(f"{show(path)} is a single value; give one frame per step")
    field = Field(path, dtype, shape[1:])
    if not field.size:
        raise UsageError(f"{show(path)} has frames of shape {list(shape[1:])}: there is nothing")
    return field, array


def _stacked(path: KeyPath, frames: Sequence[Any]) -> Any:
    try:
        if frames and all(isinstance(frame, torch.Tensor) for frame in frames):
            if len({(frame.dtype, frame.shape) for frame in frames}) > 1:
                raise ValueError("the frames differ in shape or dtype")
            return torch.stack([frame.detach() for frame in frames])
        if frames and all(isinstance(frame, np.ndarray) for frame in frames):
            if len({frame.dtype for frame in frames}) > 1:
                raise ValueError("the frames differ in dtype")
            return np.stack(frames)
        return np.asarray(frames)
    except (ValueError, RuntimeError) as error:
        raise _ragged(path, error) from error


def _ragged(path: KeyPath, error: Exception) -> UsageError:
    return UsageError(f"{show(path)} is ragged: {error}; make all frames alike")
