"""Arrays in memory (tensors, dicts, TensorDicts) and in .npz and .safetensors files, as values."""

from __future__ import annotations

import json
import math
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from penstock.advisor.sample import Held, Source, Values, batch_group, nbytes, state_group
from penstock.core.files import storage_error
from penstock.core.pack import DTYPES
from penstock.errors import CorruptFile, LimitExceeded, UnsupportedValue, UsageError

Array = NDArray[Any]
Leaves = list[tuple[tuple[str, ...], Values]]

_MAX_DEPTH = 100
_HEADER_BYTES = 100_000_000
_BULK = 0.9  # of the bytes: what decides how a dict is meant
_WEIGHTS = ("weight", "bias", "running_mean", "running_var", "exp_avg", "exp_avg_sq")
_TAGS = {entry.tag: name for name, entry in DTYPES.items() if entry.tag}

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


class NpzMember:
    """An array in an .npz file; rows are read one after the other, what lies between is skipped."""

    def __init__(self, path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._path, self._name = path, name
        self.shape = shape
        self._stored = dtype
        self.dtype = dtype.newbyteorder("=").name

    def take(self, rows: Sequence[slice], axis: int) -> Array:
        """Read rows of the first axis; along another, all of it is read first."""
        own = rows if axis == 0 and self.shape else ()
        try:
            with zipfile.ZipFile(self._path) as archive, archive.open(self._name) as file:
                npy_header(file)
                words = self._read(file, own or [slice(0, self.shape[0] if self.shape else 1)])
        except _DAMAGE as error:
            raise CorruptFile(f"{self._path} is damaged: {self._name!r}: {error}") from error
        array = words.reshape(-1, *self.shape[1:]) if self.shape else words.reshape(())
        array = array.astype(self._stored.newbyteorder("="), copy=False)
        if rows and axis:
            places = [(*[slice(None)] * axis, some) for some in rows]
            array = np.concatenate([array[place] for place in places], axis)
        return array

    def _read(self, file: IO[bytes], rows: Sequence[slice]) -> Array:
        row = math.prod(self.shape[1:]) * self._stored.itemsize
        out = np.empty(sum(some.stop - some.start for some in rows) * row, np.uint8)
        at, filled = 0, 0
        for some in rows:
            _skip(file, some.start * row - at)
            part = out[filled : filled + (some.stop - some.start) * row]
            view = part.data
            while view:
                count = file.readinto(view)  # type: ignore[attr-defined]
                if not count:
                    raise EOFError("it is cut off")
                view = view[count:]
            filled += part.size
            at = some.stop * row
        return out.view(self._stored)


def _skip(file: IO[bytes], size: int) -> None:
    while size > 0:
        chunk = file.read(min(size, 1 << 20))
        if not chunk:
            raise EOFError("it is cut off")
        size -= len(chunk)


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read what the beginning of an .npy file says: shape, column order, type."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return tuple(shape), bool(fortran), dtype


def npz_leaves(path: Path, largest_bytes: int) -> Leaves:
    """List the arrays of an .npz file; nothing is unpickled.

    Raises:
        CorruptFile: It is damaged.
        UnsupportedValue: An array holds objects.
        LimitExceeded: An array in column order, which must be read whole, is too large.
    """
    found: Leaves = []
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                with archive.open(info) as file:
                    shape, fortran, dtype = npy_header(file)
                name = info.filename.removesuffix(".npy")
                _check_npz(path, name, shape, dtype)
                size = math.prod(shape) * dtype.itemsize
                if size > info.file_size:
                    raise CorruptFile(f"{path} is damaged: {name!r} is shorter than it says")
                member = NpzMember(path, info.filename, shape, dtype)
                if fortran and len(shape) > 1:
                    if size > largest_bytes:
                        raise LimitExceeded(
                            f"{path}: {name!r} of {size} bytes is in column order and would be "
                            "read whole; save it in row order (np.ascontiguousarray)"
                        )
                    turned = NpzMember(path, info.filename, shape[::-1], dtype)
                    found.append(((name,), Held(turned.take((), 0).T, member.dtype)))
                else:
                    found.append(((name,), member))
    except _DAMAGE as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise storage_error("read", path, error) from error
    return found


def _check_npz(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    native = dtype.newbyteorder("=")
    if dtype.hasobject or native.name not in DTYPES or DTYPES[native.name].words != native:
        raise UnsupportedValue(
            f"{path}: {name!r} is an array of {dtype}, which cannot be measured; save it as numbers"
        )
    if any(n < 0 for n in shape):
        raise CorruptFile(f"{path} is damaged: {name!r} has the shape {list(shape)}")


def safetensors_leaves(path: Path) -> Leaves:
    """Map the tensors of a safetensors file; they are read where the sample lies.

    Raises:
        CorruptFile: Its header makes no sense.
        UnsupportedValue: A tensor is of a type that penstock does not know.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 2 <= length <= min(_HEADER_BYTES, size - 8):
                raise ValueError("its header is cut off")
            header = json.loads(file.read(length))
    except OSError as error:
        raise storage_error("read", path, error) from error
    except (ValueError, struct.error, RecursionError) as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    found: Leaves = []
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                found.append(((str(name),), _mapped(path, size - 8 - length, 8 + length, entry)))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFile(f"{path} is damaged: its header makes no sense ({error!r})") from error
    return found


def _mapped(path: Path, data_bytes: int, at: int, entry: Mapping[str, Any]) -> Values:
    if entry["dtype"] not in _TAGS:
        raise UnsupportedValue(f"{path}: tensors of {entry['dtype']} cannot be measured")
    dtype = _TAGS[entry["dtype"]]
    shape = tuple(map(int, entry["shape"]))
    start, stop = entry["data_offsets"]
    if min(shape, default=0) < 0 or not 0 <= start <= stop <= data_bytes:
        raise ValueError("a tensor lies outside of the file")
    if stop - start != nbytes(dtype, shape):
        raise ValueError("a tensor has another size than its shape says")
    words = DTYPES[dtype].words
    if start == stop:
        return Held(np.empty(shape, words), dtype)
    if shape == ():
        return Held(np.fromfile(path, words, 1, offset=at + start).reshape(()), dtype)
    return Held(np.memmap(path, words, "r", at + start, shape), dtype)


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
