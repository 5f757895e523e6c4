"""What an episode is, nested arrays with one frame per step, and what a buffer was told of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.memory import parse_bytes, whole_number
from penstock.core.pack import DTYPES
from penstock.errors import CorruptFile, UnsupportedValue, UsageError
from penstock.replay.keys import Codecs, Field, Key, KeyPath, as_paths, codecs_of, known, show
from penstock.tensors import DTYPE_NAMES, check_storable, flat_words, settled, unmapped
from penstock.ui.suggestions import did_you_mean

_DEFAULT_ALPHA = 0.6
_EVICTIONS = ("fifo", "lru")
_OF_OLD_FILES = {"modes", "block_frames"}  # settings that a buffer no longer has


@dataclass(frozen=True)
class Settings:
    """The settings of a `DictReplayBuffer`, in its order of keys."""

    max_size: int | None
    max_bytes: int | None
    paths: tuple[KeyPath, ...]
    codecs: tuple[str, ...]
    eviction: str
    next_paths: tuple[KeyPath, ...]
    alpha: float | None

    @classmethod
    def check(
        cls,
        max_size: int | None,
        max_bytes: int | str | None,
        keys: Iterable[Key],
        codecs: Codecs | None,
        default_codec: str,
        eviction: str,
        next_keys: Iterable[Key],
        priority: bool | float,
        spill_dir: str | os.PathLike[str] | None,
    ) -> Settings:
        """Check what the user gave."""
        paths = as_paths(keys)
        if not paths:
            raise UsageError("keys is empty; name what an episode holds")
        limit = None if max_bytes is None else parse_bytes(max_bytes)
        if limit == 0 or (max_size is None and (limit is None or spill_dir is not None)):
            raise UsageError("nothing bounds the buffer; give max_size, or max_bytes of at least 1")
        if spill_dir is not None and limit is None:
            raise UsageError("spill_dir needs max_bytes: the memory to use before the disk")
        if eviction not in _EVICTIONS:
            raise UsageError(f"eviction is {eviction!r}; {did_you_mean(eviction, _EVICTIONS)}")
        alpha: float | None = None
        if priority is not False:
            alpha = _DEFAULT_ALPHA if priority is True else float(priority)
            if not 0 <= alpha <= 1:
                raise UsageError(f"priority is {priority}; give the exponent, from 0 to 1")
        next_paths = as_paths(next_keys)
        for path in next_paths:
            known(path, paths, "next_keys")
        settings = cls(
            None if max_size is None else whole_number("max_size", max_size),
            limit,
            tuple(paths),
            tuple(codecs_of(default_codec if codecs is None else codecs, paths, default_codec)),
            eviction,
            tuple(next_paths),
            alpha,
        )
        for made in settings.made_paths():
            clash = next((p for p in paths if p[: len(made)] == made or made[: len(p)] == p), None)
            if clash is not None:
                raise UsageError(f"the key {show(clash)} is in the way of {show(made)} of a batch")
        return settings

    def made_paths(self) -> list[KeyPath]:
        """Keys that every batch has beside those stored."""
        made: list[KeyPath] = [("next", *path) for path in self.next_paths]
        if made:
            made.append(("next", "valid"))
        if self.alpha is not None:
            made += [("index",), ("weight",)]
        return made

    def check_free(self, made: str) -> None:
        """Refuse to put something into a batch under a name that is one of its keys."""
        if any(path[0] == made for path in self.paths):
            raise UsageError(f"the key {made!r} of the episodes is in the way of that of a batch")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Settings:
        """Rebuild settings; raises what Python or the checks raise if they make no sense."""
        paths = [tuple(path) for path in record["paths"]]
        codecs = dict(zip(paths, record["codecs"], strict=True))
        alpha = False if record["alpha"] is None else float(record["alpha"])
        following = [tuple(path) for path in record["next_paths"]]
        limits = record["max_size"], record["max_bytes"]
        eviction = record["eviction"]
        settings = cls.check(*limits, paths, codecs, "raw", eviction, following, alpha, None)
        if record.keys() - _OF_OLD_FILES != asdict(settings).keys():
            raise CorruptFile("settings of a newer penstock; upgrade it")
        return settings


def is_tensordict(value: Any) -> bool:
    """Tell whether a value is a TensorDict, without importing tensordict for it."""
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, module.TensorDictBase)


def read_episode(
    episode: Any, paths: Sequence[KeyPath]
) -> tuple[list[Field], list[NDArray[Any]], int]:
    """Check an episode and return its fields, its arrays [T, *shape] in pack words, and T.

    The arrays may be views of what was given.
    """
    found = dict(_leaves(episode, set(paths)))
    for path in found:
        known(path, paths, "the episode")
    fields, arrays = [], []
    for path in paths:
        if path not in found:
            hint = did_you_mean(".".join(path), map(".".join, found)) if found else "it is empty"
            raise UsageError(f"the episode has no key {show(path)}; {hint}")
        field, array = _field(path, found[path])
        fields.append(field)
        arrays.append(array)
        if len(array) != (length := len(arrays[0])):
            raise UsageError(
                f"the episode is ragged: {show(path)} has {len(array)} frames, "
                f"{show(paths[0])} has {length}; give every key the same number"
            )
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
        value = unmapped(value)
        check_storable(show(path), value)
        dtype, shape = DTYPE_NAMES[value.dtype], tuple(value.shape)
        array = flat_words(settled(value)).reshape(shape)
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
    kinds: tuple[tuple[type, Any], ...] = ((torch.Tensor, torch.stack), (np.ndarray, np.stack))
    try:
        for kind, stack in kinds:
            if frames and all(isinstance(frame, kind) for frame in frames):
                if len({frame.dtype for frame in frames}) > 1:
                    raise ValueError("the frames differ in dtype")
                return stack(frames)
        return np.asarray(frames)
    except (ValueError, RuntimeError) as error:
        raise _ragged(path, error) from error


def _ragged(path: KeyPath, error: Exception) -> UsageError:
    return UsageError(f"{show(path)} is ragged: {error}; make all frames alike")
