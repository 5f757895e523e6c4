"""Arrays in memory (tensors, dicts, TensorDicts) and in .npz and .safetensors files, as values."""

from __future__ import annotations

import importlib.util
import math
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
import safetensors
from numpy.lib import format as npy
from numpy.typing import NDArray

from penstock.advisor.sample import (
    Held,
    Source,
    Values,
    batch_group,
    joined,
    nbytes,
    state_group,
)
from penstock.core.pack import DTYPES
from penstock.errors import (
    CorruptFile,
    LimitExceeded,
    MissingExtra,
    UnsupportedValue,
    UsageError,
)

Array = NDArray[Any]
Leaves = list[tuple[tuple[str, ...], Values]]

_MAX_DEPTH = 100
_BULK = 0.9  # of the bytes: what decides how a dict is meant
_WEIGHTS = ("weight", "bias", "running_mean", "running_var", "exp_avg", "exp_avg_sq")

# What a damaged archive makes the readers of zip and npy raise.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError)


@dataclass
class OnDevice:
    """A torch tensor; only what is taken is copied from its device."""

    tensor: Any
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    def take(self, rows: Sequence[slice], axis: int) -> Array:
        """Read rows."""
        import torch

        from penstock.tensors import flat_words

        places = [(*[slice(None)] * axis, some) for some in rows]
        pieces = [self.tensor[place] for place in places] or [self.tensor]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return flat_words(tensor).reshape(tuple(tensor.shape))


def leaves_of(data: Any) -> Leaves:
    """List the arrays and tensors in nested dicts, lists and TensorDicts.

    Raises:
        UnsupportedValue: One of them holds something else than numbers.
    """
    return list(_walk(data, ()))


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Values]]:
    if len(path) > _MAX_DEPTH:
        raise UnsupportedValue(f"{'.'.join(path)[:60]}… is nested deeper than {_MAX_DEPTH}")
    torch, tensordict = sys.modules.get("torch"), sys.modules.get("tensordict")
    if tensordict is not None and tensordict.is_tensor_collection(value):
        if tensordict.is_non_tensor(value):
            return
        for name in value.keys():  # noqa: SIM118 - a TensorDict iterates over its rows instead
            yield from _walk(value.get(name), (*path, str(name)))
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _walk(child, (*path, *map(str, name if isinstance(name, tuple) else [name])))
    elif torch is not None and isinstance(value, torch.Tensor):
        yield path, _tensor(path, value)
    elif isinstance(value, np.ndarray | np.generic):
        yield path, held(".".join(path), np.asarray(value))
    elif isinstance(value, list | tuple):
        if value and all(isinstance(item, bool | int | float) for item in value):
            yield path, held(".".join(path), np.asarray(value))
        else:
            for number, child in enumerate(value):
                yield from _walk(child, (*path, str(number)))


def _tensor(path: tuple[str, ...], tensor: Any) -> Values:
    import torch

    from penstock.tensors import DTYPE_NAMES, check_storable

    if type(tensor).__name__ == "MemoryMappedTensor":
        tensor = tensor.as_subclass(torch.Tensor)
    check_storable(".".join(path) or "the data", tensor)
    return OnDevice(tensor, DTYPE_NAMES[tensor.dtype])


def held(name: str, array: Array) -> Held:
    """Take an array; refuse one that holds no numbers.

    Raises:
        UnsupportedValue: It does not.
    """
    dtype = array.dtype.newbyteorder("=")
    if dtype.name not in DTYPES or DTYPES[dtype.name].words != dtype:
        raise UnsupportedValue(
            f"{name or 'the data'} is an array of {array.dtype}, which cannot be measured; "
            "convert it to numbers"
        )
    return Held(array.astype(dtype, copy=False), dtype.name)


def dict_source(data: Any, budget: int) -> Source:
    """Sample nested dicts of arrays, or a TensorDict."""
    source = Source(_kind(data))
    leading = None
    time_dim = 1
    if _is_tensordict(data) and data.batch_size:
        leading = tuple(data.batch_size)[:2]
        names = list(data.names)[:2]
        time_dim = names.index("time") if "time" in names else 1
    add_leaves(source, leaves_of(data), budget, leading, time_dim)
    return source


def add_leaves(
    source: Source,
    leaves: Leaves,
    budget: int,
    leading: tuple[int, ...] | None = None,
    time_dim: int = 1,
) -> None:
    """Sample arrays that belong together: as a batch if they share their first axis, else a state.

    Args:
        source: Gets keys and a group.
        leaves: The arrays.
        budget: Bytes to take.
        leading: The batch size, where it is known.
        time_dim: Which of two leading axes is time.
    """
    lead = common_lead(leaves) if leading is None else leading
    if not lead:
        state_group(source, leaves, budget)
        return
    axes = rollout_axes(leaves, lead if leading else None, time_dim)
    source.frames = math.prod(lead)
    source.environments = lead[1 - time_dim] if len(lead) == 2 else 0
    batch_group(source, leaves, axes, lead, budget)


def common_lead(leaves: Leaves) -> tuple[int, ...]:
    """Return the leading shape that (nearly) all of the bytes share: frames, or [env, time].

    () if there is none, or the names are those of a network: a training state.
    """
    sizes = [nbytes(values.dtype, values.shape) for _, values in leaves]
    if any(path and path[-1].rpartition(".")[2] in _WEIGHTS for path, _ in leaves):
        return ()
    shares: Counter[int] = Counter()
    for (_, values), size in zip(leaves, sizes, strict=True):
        if values.shape:
            shares[values.shape[0]] += size
    if not shares:
        return ()
    first, most = shares.most_common(1)[0]
    if most < _BULK * sum(sizes):
        return ()
    rows = [values for _, values in leaves if values.shape[:1] == (first,)]
    seconds = {values.shape[1:2] for values in rows}
    # Pictures of one camera agree in more axes, too, but then in all of them.
    alike = len({values.shape for values in rows}) == 1 or all(v.dtype == "uint8" for v in rows)
    if len(seconds) == 1 and not alike and seconds != {()}:
        return first, seconds.pop()[0]
    return (first,)


def rollout_axes(
    leaves: Leaves, batch: tuple[int, ...] | None, time_dim: int
) -> tuple[tuple[int, ...], int | None, int | None]:
    """Return the axes as `RolloutStorage` would find them (`rollouts.structure.find_axes`)."""
    if batch is None:
        largest = max(leaves, key=lambda leaf: nbytes(leaf[1].dtype, leaf[1].shape))[1]
        batch = largest.shape[:2]
    if len(batch) == 2:
        return batch, 1 - time_dim, time_dim
    return (batch, None, 0) if time_dim == 0 else (batch, 0, None)


def _kind(data: Any) -> str:
    return "TensorDict" if _is_tensordict(data) else "arrays"


def _is_tensordict(data: Any) -> bool:
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(data, module.TensorDictBase)


@dataclass
class NpzMember:
    """An array in an .npz file; numpy reads it whole each time, and rows of it are kept."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def take(self, rows: Sequence[slice], axis: int) -> Array:
        """Read rows."""
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                array = held(self.name, archive[self.name]).words
        except _DAMAGE as error:
            raise CorruptFile(f"{self.path} is damaged: {self.name!r}: {error}") from error
        return np.array(joined(array, rows, axis))  # a view would keep all of it in memory


def npz_leaves(path: Path) -> Leaves:
    """List the arrays of an .npz file; nothing is unpickled.

    Raises:
        CorruptFile: It is damaged.
        UnsupportedValue: An array holds something else than numbers.
        LimitExceeded: An array is larger than the memory that is free.
    """
    found: Leaves = []
    free = psutil.virtual_memory().available
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                with archive.open(info) as file:
                    shape, dtype = _npy_header(file)
                    values = held(f"{path}: {name!r}", np.empty(0, dtype))
                if math.prod(shape) * dtype.itemsize > info.file_size:
                    raise CorruptFile(f"{path} is damaged: {name!r} is shorter than it says")
                if info.file_size > free:
                    raise LimitExceeded(
                        f"{path}: {name!r} takes {info.file_size} bytes, {free} are free; save a "
                        "part of it"
                    )
                found.append(((name,), NpzMember(path, name, shape, values.dtype)))
    except _DAMAGE as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    return found


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    return tuple(shape), dtype


def safetensors_leaves(path: Path) -> Leaves:
    """Map the tensors of a safetensors file; they are read where the sample lies.

    Raises:
        CorruptFile: Its header makes no sense.
        UnsupportedValue: A tensor is of a type that penstock does not know.
        MissingExtra: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", "torch")
    try:
        with safetensors.safe_open(path, "pt") as file:
            return [((name,), _tensor((name,), file.get_tensor(name))) for name in file.keys()]  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error


def check_some(source: Source) -> Source:
    """Refuse data in which there is nothing to measure.

    Raises:
        UsageError: There is nothing.
    """
    if not sum(key.raw_bytes for key in source.keys):
        raise UsageError(
            f"{source.where or 'the data'} holds nothing to measure: give arrays, tensors, or a "
            "file with some"
        )
    return source
