"""Load checkpoints: find the file, tell its kind, verify it, fall back to an older one.

And write them as the files of others: torch.save and plain safetensors.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import struct
import sys
import warnings
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoints import folder
from penstock.core import tree
from penstock.core.extras import version_of
from penstock.core.files import publish_bytes, storage_error
from penstock.core.pack import PackReader, is_pack
from penstock.core.pack.format import DIGEST_KEY, INDEX_KEY, MAX_HEADER_BYTES
from penstock.errors import (
    CorruptFile,
    LimitExceeded,
    PenstockWarning,
    StorageError,
    UnknownFormat,
    UsageError,
)
from penstock.tensors import (
    empty_array,
    empty_tensor,
    fetch_torch_value,
    flat_words,
    store_torch_value,
)

_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"  # of torch.save before version 1.6
_LZ4_MAX_RATIO = 20  # trained states stay below 4; zeros reach 255
_LZ4_FREE_BYTES = 64 << 20


def load_checkpoint(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    only: str | None = None,
    best: bool = False,
) -> Any:
    """Load a checkpoint, every byte verified.

    Reads penstock's files; and, without checksums, safetensors files, plain `torch.save` files and
    LZ4-compressed ones (`foo.pt` finds `foo.pt.lz4`), the latter two through torch's restricted
    unpickler. Every tensor is fresh memory, so that it may be handed to `load_state_dict`.

    Args:
        path: A file, or a folder: then the newest checkpoint that verifies.
        device: Where the tensors go.
        only: A pattern such as "model.actor.*"; only what matches is read and returned.
        best: Of a folder, the best by the `metric` it was saved with (the highest, or the lowest if
            the saver's `keep_best` said "min").

    Returns:
        The state, as it was handed to `save_async`.

    Raises:
        CorruptFile: The file is damaged; or in a folder, every checkpoint is.
        UsageError: There is no such file.
    """
    where = Path(path)
    if where.is_dir():
        return from_newest(where, lambda file: _load_file(file, device, only), best=best)
    if best:
        raise UsageError(f"best=True looks for the best of a folder; {where} is none")
    return _load_file(resolve(where), device, only)


def load_metadata(path: str | os.PathLike[str]) -> Any:
    """Return the `metadata` that was saved with a checkpoint (of a folder: with the newest)."""
    where = Path(path)
    if where.is_dir():
        return from_newest(where, _metadata)
    return _metadata(resolve(where))


def resolve(path: Path) -> Path:
    """Find the file that is meant: itself, or itself with the ending .lz4."""
    for candidate in (path, path.with_name(path.name + ".lz4")):
        if candidate.is_file():
            return candidate
    if path.parent.is_dir():
        beside = sorted(saved.path.name for saved in folder.list_saved(path.parent))[-3:]
        hint = f"the folder has {', '.join(beside)}" if beside else "the folder has no checkpoint"
    else:
        hint = "its folder does not exist"
    raise UsageError(f"there is no checkpoint {path}: {hint}")


def from_newest(where: Path, load: Callable[[Path], Any], *, best: bool = False) -> Any:
    """Apply `load` to the newest (or best) checkpoint of a folder that can be read.

    What was passed over is told in a warning.
    """
    damaged: list[str] = []
    for candidate in folder.candidates(where, best):
        try:
            result = load(candidate)
        except (CorruptFile, StorageError) as error:
            damaged.append(str(error))
            continue
        if damaged:
            warnings.warn(
                f"fell back to {candidate.name}: {'; '.join(damaged)}",
                PenstockWarning,
                stacklevel=3,
            )
        return result
    if damaged:
        raise CorruptFile(f"no checkpoint in {where} can be read: {'; '.join(damaged)}")
    which = "checkpoint that was saved with a metric" if best else "checkpoint"
    raise UsageError(f"there is no {which} in {where}")


def _load_file(path: Path, device: str | torch.device, only: str | None) -> Any:
    try:
        if is_pack(path):
            with PackReader(path, find_base=folder.find_base) as pack:
                return _load_pack(pack, torch.device(device), only)
        state = _load_foreign(path, device)
    except OSError as error:
        raise storage_error("read", path, error) from error
    if only is None:
        return state
    leaves: list[Any] = []  # not by their paths: two may have the same

    def store(path: str, value: Any) -> tree.Json:
        leaves.append(value)
        return {tree.TAG: "leaf", "v": len(leaves) - 1}

    description = tree.flatten(state, store)
    return tree.unflatten(description, lambda record: leaves[record["v"]], only)


def _load_pack(pack: PackReader, device: torch.device, only: str | None) -> Any:
    kinds: dict[str, str] = {}
    read: dict[str, Any] = {}  # what the file is read into, ...
    placed: dict[str, Any] = {}  # ... and what stands in the state: the same, but on a GPU
    total_bytes = 0

    def fetch(record: dict[str, Any]) -> Any:
        nonlocal total_bytes
        kind, name = record[tree.TAG], str(record.get("v"))
        if kind not in ("tensor", "ndarray"):
            return fetch_torch_value(record)
        if name not in pack.index.entries:
            raise CorruptFile(f"{pack.path} is damaged: tensor {name!r} is missing")
        if kinds.setdefault(name, kind) != kind:
            raise CorruptFile(f"{pack.path} is damaged: {name!r} is both tensor and array")
        if name not in read:
            entry = pack.entry(name)
            total_bytes += entry.nbytes
            pack.check_memory(total_bytes)
            # Arrays not by way of torch: it may lack a type of numpy's.
            empty = empty_tensor if kind == "tensor" else empty_array
            read[name] = placed[name] = empty(entry.dtype, entry.shape)
            if kind == "tensor" and device.type != "cpu":
                placed[name] = torch.empty_like(read[name], device=device)
        return placed[name]

    state = tree.unflatten(pack.index.meta.get("state"), fetch, only)
    pack.read_into(
        (name, flat_words(value) if kinds[name] == "tensor" else value.reshape(-1))
        for name, value in read.items()
    )
    for name, value in read.items():
        if placed[name] is not value:
            placed[name].copy_(value)
    return state


def _load_foreign(path: Path, device: str | torch.device) -> Any:
    with path.open("rb") as file:
        magic = file.read(9)
    if magic[8:] == b"{":
        return _safetensors_load(path, device)
    if magic.startswith(_LZ4_MAGIC):
        return _torch_load(_unlz4(path), path, device)
    if magic.startswith((_ZIP_MAGIC, _PICKLE_MAGIC)):
        return _torch_load(path, path, device)
    if folder.latest(path.parent) == path:
        raise CorruptFile(f"{path} is damaged: its first bytes are not those of a checkpoint")
    raise UnknownFormat(f"{path} is no checkpoint: neither penstock, safetensors, torch nor LZ4")


def _metadata(path: Path) -> Any:
    if not is_pack(path):
        raise UnknownFormat(f"{path} was not written by penstock and has no metadata")
    with PackReader(path, find_base=folder.find_base) as pack:
        return tree.unflatten(pack.index.meta.get("metadata"), fetch_torch_value)


def _torch_load(source: Path | io.BytesIO, path: Path, device: str | torch.device) -> Any:
    try:
        with _safe_globals():
            return torch.load(source, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or a hostile file
        refused = re.search(r"(?:GLOBAL|global|class|type) '?([\w.]+\.[\w.]+)", str(error))
        unknown = "tensordict" not in sys.modules
        if unknown and refused and refused[1].startswith("tensordict."):
            with suppress(ImportError):
                importlib.import_module("tensordict")
                if isinstance(source, io.BytesIO):
                    source.seek(0)
                return _torch_load(source, path, device)
        if refused and "PytorchStreamReader" not in str(error):
            raise UnknownFormat(
                f"{path} holds a {refused[1]}, which torch does not load without running code; "
                "save tensors, numbers, strings, lists and dicts only"
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CorruptFile(f"{path} cannot be loaded by torch: {reason[:200]}") from error


def _safe_globals() -> AbstractContextManager[Any]:
    """Let torch's restricted unpickler build numpy arrays and TensorDicts: plain data, no code."""
    if not hasattr(torch.serialization, "safe_globals"):  # from torch 2.5
        return nullcontext()
    core = np._core if hasattr(np, "_core") else np.core
    kinds: list[Any] = [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype]
    kinds += {type(np.dtype(code)) for code in "?bhilqBHILQefdFD"}
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None:
        kinds += [tensordict.TensorDict, tensordict.LazyStackedTensorDict, torch.Size, torch.device]
        make = getattr(sys.modules.get("tensordict._reductions"), "_make_td", None)
        kinds += [make] if make is not None else []  # sets the attributes of one of these two
    context: AbstractContextManager[Any] = torch.serialization.safe_globals(kinds)
    return context


def _safetensors_load(path: Path, device: str | torch.device) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(min(length, MAX_HEADER_BYTES))
        if any(f'"{key}":'.encode() in header for key in (INDEX_KEY, DIGEST_KEY)):  # one of ours
            raise CorruptFile(f"{path} is damaged: unreadable header")
    try:
        return load_file(path, str(device))
    except SafetensorError as error:
        raise CorruptFile(f"{path} is no whole safetensors file: {error}") from error


def _unlz4(path: Path) -> io.BytesIO:
    limit = max(_LZ4_FREE_BYTES, path.stat().st_size * _LZ4_MAX_RATIO)
    content = io.BytesIO()
    try:
        with lz4.frame.open(path) as stream:
            while chunk := stream.read(1 << 22):
                content.write(chunk)
                if content.tell() > limit:  # before the next chunk is unpacked
                    raise LimitExceeded(
                        f"{path} unpacks to more than {_LZ4_MAX_RATIO} times its size; if you "
                        "trust it, unpack it with `lz4 -d` and load the result"
                    )
    except (RuntimeError, EOFError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    content.seek(0)
    return content


def to_torch(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write a checkpoint as a file that `torch.load(out, weights_only=True)` reads.

    What that refuses is converted: numpy's arrays become tensors, its numbers Python's, frozensets
    sets, deques lists, and before torch 2.4 Counters dicts.

    Args:
        path: A checkpoint, or a folder: then the newest.
        out: The new file; one that is there is replaced.
    """
    content = io.BytesIO()
    torch.save(_without_numpy(load_checkpoint(path)), content)
    publish_bytes(out, content.getbuffer())
    return Path(out)


def to_safetensors(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the tensors of a checkpoint as a plain safetensors file.

    Tensors are named by their paths ("model.actor.0.weight"); what is no tensor becomes JSON in the
    file's metadata, under its path.

    Args:
        path: A checkpoint, or a folder: then the newest.
        out: The new file; one that is there is replaced.

    Raises:
        UsageError: There is no tensor in it.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, str] = {}

    def collect(path: str, value: Any) -> None:
        inside: list[Any] = []

        def note(_: str, leaf: Any) -> tree.Json | None:
            if isinstance(leaf, torch.Tensor | np.ndarray):
                inside.append(leaf)
                return {}
            return store_torch_value(leaf)

        text = json.dumps(tree.flatten(value, note))
        if not inside:
            others[tree.free_name(path, others)] = text
        elif inside[0] is value:
            tensor = _tensor(value) if isinstance(value, np.ndarray) else value
            # A file of safetensors has no two names for one tensor.
            copy = tensor.clone(memory_format=torch.contiguous_format)
            tensors[tree.free_name(path or "tensor", tensors)] = copy
        else:
            for key, child in value.items() if isinstance(value, dict) else enumerate(value):
                collect(f"{path}.{key}" if path else str(key), child)

    collect("", load_checkpoint(path))
    if not tensors:
        raise UsageError(f"{path} holds no tensor")
    publish_bytes(out, save(tensors, others))
    return Path(out)


def _without_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _tensor(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        counted = type(value) is Counter and version_of(torch.__version__) < (2, 4)
        plain: Any = {} if counted else type(value)()
        plain.update({key: _without_numpy(child) for key, child in value.items()})
        if hasattr(value, "_metadata"):
            plain._metadata = value._metadata
        return plain
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_without_numpy, value))
    if isinstance(value, deque):
        return [_without_numpy(item) for item in value]
    return set(value) if isinstance(value, frozenset) else value


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:  # before torch 2.3 there are no uint16, uint32 and uint64
        return torch.from_numpy(array.astype(np.int64))
