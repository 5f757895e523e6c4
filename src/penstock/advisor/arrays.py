"""Samples of arrays: tensors, dicts and TensorDicts in memory, .npz and .safetensors files."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import safetensors
import torch
from numpy.lib import format as npy

from penstock.advisor.decide import KeyPath
from penstock.advisor.sample import Array, Rows, Source, Values, joined
from penstock.errors import CorruptFile, LimitExceeded, UnsupportedValue, UsageError
from penstock.rollouts import structure
from penstock.rollouts.structure import Leaf, as_path

_MAX_DEPTH = 100
_BULK = 0.9  # of the bytes: what decides how a dict is meant
_WEIGHTS = ("weight", "bias", "running_mean", "running_var", "exp_avg", "exp_avg_sq")

# What a damaged archive makes the readers of zip and npy raise.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError)


def data_source(data: Any, budget: int) -> Source:
    """Sample nested dicts of arrays, or a TensorDict."""
    values = values_of(data)
    if not values and not isinstance(data, Mapping) and not structure.is_tensor_collection(data):
        raise UsageError(
            "advise takes a path, a TensorDict, a dict of arrays or a replay buffer of TorchRL, "
            f"not {type(data).__name__}"
        )
    source = Source("TensorDict" if isinstance(data, structure.TensorDictBase) else "arrays")
    add_values(source, values, budget, data)
    return source


def values_of(data: Any) -> list[Values]:
    """List the arrays and tensors in nested dicts, lists and TensorDicts; refuse no numbers."""
    return list(_walk(data, ()))


def _walk(value: Any, path: KeyPath) -> Iterator[Values]:
    if len(path) > _MAX_DEPTH:
        raise UnsupportedValue(f"{'.'.join(path)[:60]}… is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, structure.NonTensorData | structure.NonTensorStack):
        return
    if isinstance(value, Mapping) or structure.is_tensor_collection(value):
        for name, child in value.items():
            yield from _walk(child, (*path, *map(str, as_path(name))))
    elif isinstance(value, torch.Tensor):
        leaf = Leaf.of(path, value)
        yield Values(path, leaf.dtype, leaf.shape, partial(_tensor_rows, leaf))
    elif isinstance(value, np.ndarray | np.generic):
        words = _numbers(path, np.asarray(value))
        yield Values(path, words.dtype.name, words.shape, partial(joined, words))
    elif isinstance(value, list | tuple):
        if value and all(isinstance(item, bool | int | float) for item in value):
            yield from _walk(np.asarray(value), path)
        else:
            for number, child in enumerate(value):
                yield from _walk(child, (*path, str(number)))


def _tensor_rows(leaf: Leaf, rows: Rows, axis: int) -> Array:
    """Copy rows from the device of a tensor."""
    whole: Any = leaf.value
    pieces = [whole.narrow(axis, some.start, some.stop - some.start) for some in rows] or [whole]
    part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
    return Leaf("", (), leaf.dtype, part).words()


def _numbers(path: KeyPath, array: Array) -> Array:
    """Return an array as words of the pack; refuse one that holds no numbers."""
    [leaf] = structure.take_apart({path or ("the data",): array}).leaves
    return leaf.words()


def add_values(source: Source, values: Sequence[Values], budget: int, data: Any = None) -> None:
    """Sample arrays that belong together: as a batch if they share their first axis, else a state.

    `data` is what they were in; a TensorDict knows its batch size, and which axis is time.
    """
    known = isinstance(data, structure.TensorDictBase) and data.batch_size
    lead = tuple(data.batch_size)[:2] if known else _common_lead(values)
    if not lead:
        source.take_state(values, budget, {})
        return
    leaves: Any = values
    axes = structure.find_axes(data, structure.Batch(None, leaves), time_dim=1)
    source.frames = math.prod(lead)
    source.environments = lead[axes.env or 0] if len(lead) == 2 else 0
    source.take_batch(values, axes, lead, budget)


def _common_lead(values: Sequence[Values]) -> tuple[int, ...]:
    """Return the leading shape that (nearly) all of the bytes share: frames, or [env, time].

    () if there is none, or the names are those of a network: a training state.
    """
    if any(one.path and one.path[-1].rpartition(".")[2] in _WEIGHTS for one in values):
        return ()
    shares: Counter[int] = Counter()
    for one in values:
        if one.shape:
            shares[one.shape[0]] += one.nbytes
    first, most = max(shares.items(), key=lambda share: share[1], default=(0, 0))
    if not shares or most < _BULK * sum(one.nbytes for one in values):
        return ()
    rows = [one for one in values if one.shape[:1] == (first,)]
    seconds = {one.shape[1:2] for one in rows}
    # Pictures of one camera agree in more axes, too, but then in all of them.
    alike = len({one.shape for one in rows}) == 1 or all(one.dtype == "uint8" for one in rows)
    return (first,) if len(seconds) > 1 or alike else (first, *seconds.pop())


def npz_source(where: Path, budget: int) -> Source:
    """Sample an .npz file, array by array; nothing is unpickled, nor too large for the memory."""
    source = Source("npz file", str(where), disk_bytes=where.stat().st_size)
    try:
        with zipfile.ZipFile(where) as archive:
            values = [_member(archive, info, where) for info in archive.infolist()]
    except _DAMAGE as error:
        raise CorruptFile(f"{where} is damaged: {error}") from error
    add_values(source, values, budget)
    return source


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: Path) -> Values:
    """Describe an array of an .npz file by its header; rows are read when it is sampled."""
    path = (info.filename.removesuffix(".npy"),)
    name = f"{where}: {path[0]!r}"
    with archive.open(info) as file:
        old = npy.read_magic(file) == (1, 0)
        read_header = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
        shape, by_columns, stored = read_header(file)
        begin = file.tell()
    dtype = _numbers((name,), np.empty(0, stored)).dtype
    size = math.prod(shape) * dtype.itemsize
    if size > info.file_size:
        raise CorruptFile(f"{where} is damaged: {info.filename!r} is shorter than it says")
    whole = by_columns or not shape
    at_once, free = size // (1 if whole else max(1, shape[0])), psutil.virtual_memory().available
    if at_once > free:
        raise LimitExceeded(f"{name} takes {at_once} bytes, {free} are free; save a part of it")

    def take(rows: Rows, axis: int) -> Array:
        try:
            with zipfile.ZipFile(where) as archive, archive.open(info.filename) as file:
                if whole or axis or not rows:
                    array = npy.read_array(file, allow_pickle=False)
                    return np.array(joined(_numbers((name,), array), rows, axis))
                data = bytearray()
                for some in rows:
                    file.seek(begin + some.start * at_once)
                    data += file.read((some.stop - some.start) * at_once)
                return _numbers((name,), np.frombuffer(data, stored).reshape(-1, *shape[1:]))
        except _DAMAGE as error:
            raise CorruptFile(f"{name} is damaged: {error}") from error

    return Values(path, dtype.name, shape, take)


def safetensors_source(where: Path, budget: int) -> Source:
    """Sample a safetensors file, where torch maps its tensors."""
    source = Source("safetensors file", str(where), disk_bytes=where.stat().st_size)
    try:
        with safetensors.safe_open(where, "pt") as file:
            values = values_of({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise CorruptFile(f"{where} is damaged: {error}") from error
    add_values(source, values, budget)
    return source
