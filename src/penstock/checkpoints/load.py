"""Load checkpoints: find the file, tell its kind, verify it, fall back to an older one."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lz4.frame
import torch

from penstock.checkpoints import folder
from penstock.core import tree
from penstock.core.files import storage_error
from penstock.core.pack import PackReader, is_pack
from penstock.errors import (
    CorruptFile,
    DataError,
    LimitExceeded,
    PenstockWarning,
    UnknownFormat,
    UsageError,
)
from penstock.tensors import empty_tensor, fetch_torch_value, flat_words

_LZ4_MAGIC = b"\x04\x22\x4d\x18"
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"  # of torch.save before version 1.6
_LZ4_MAX_RATIO = 255  # what the LZ4 format can reach at most


def load_checkpoint(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    only: str | None = None,
) -> Any:
    """Load a checkpoint, every byte verified.

    Reads penstock's files, plain `torch.save` files and LZ4-compressed ones (`foo.pt` finds
    `foo.pt.lz4`); the latter two through torch's restricted unpickler, and without checksums. Every
    tensor is fresh memory, so that it may be handed to `load_state_dict`.

    Args:
        path: A file, or a folder: then the newest checkpoint that verifies.
        device: Where the tensors go.
        only: A pattern such as "model.actor.*"; only what matches is read and returned.

    Returns:
        The state, as it was handed to `save_async`.

    Raises:
        CorruptFile: The file is damaged; or in a folder, every checkpoint is.
        UsageError: There is no such file.
    """
    where = Path(path)
    if where.is_dir():
        return from_newest(where, lambda file: _load_file(file, device, only))
    found = resolve(where)
    return _load_file(found, device, only)


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


def from_newest(where: Path, load: Callable[[Path], Any]) -> Any:
    """Apply `load` to the newest checkpoint of a folder that verifies; say what was passed over."""
    damaged: list[str] = []
    for candidate in folder.candidates(where):
        try:
            result = load(candidate)
        except CorruptFile as error:
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
    raise UsageError(f"there is no checkpoint in {where}")


def _load_file(path: Path, device: str | torch.device, only: str | None) -> Any:
    try:
        if is_pack(path):
            with PackReader(path, find_base=folder.find_base) as pack:
                return _load_pack(pack, torch.device(device), only)
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == _LZ4_MAGIC:
            return _filtered(_torch_load(_unlz4(path), path, device), only)
        if magic == _ZIP_MAGIC or magic[:1] == _PICKLE_MAGIC:
            return _filtered(_torch_load(path, path, device), only)
        raise _not_a_checkpoint(path)
    except OSError as error:
        raise storage_error("read", path, error) from error


def _not_a_checkpoint(path: Path) -> DataError:
    if folder.latest(path.parent) == path:
        return CorruptFile(f"{path} is damaged: its first bytes are not those of a checkpoint")
    return UnknownFormat(f"{path} is no checkpoint: neither penstock, torch.save nor LZ4")


def _load_pack(pack: PackReader, device: torch.device, only: str | None) -> Any:
    description = pack.index.meta.get("state")
    if only is not None:
        description = tree.select(description, only)
        if description is None:
            raise UsageError(f"{pack.path}: nothing matches only={only!r}")
    wanted: dict[str, torch.Tensor] = {}
    _collect(description, pack, wanted)
    pack.read_into((name, flat_words(tensor)) for name, tensor in wanted.items())
    moved = {name: tensor.to(device) for name, tensor in wanted.items()}

    def fetch(record: dict[str, Any]) -> Any:
        match record[tree.TAG]:
            case "tensor":
                return moved[record["v"]]
            case "ndarray":
                return wanted[record["v"]].numpy()
        return fetch_torch_value(record)

    return tree.unflatten(description, fetch)


def _collect(node: tree.Json, pack: PackReader, found: dict[str, torch.Tensor]) -> None:
    """Allocate a tensor for every one that the description names, once."""
    names = list(_names(node))
    for name in names:
        if name not in pack.index.entries:
            raise CorruptFile(f"{pack.path} is damaged: tensor {name!r} is missing")
    pack.check_memory(sum(pack.entry(name).nbytes for name in set(names)))
    for name in names:
        if name not in found:
            entry = pack.entry(name)
            found[name] = empty_tensor(entry.dtype, entry.shape)


def _names(node: tree.Json) -> Any:
    if isinstance(node, list):
        for item in node:
            yield from _names(item)
    elif isinstance(node, dict):
        if node.get(tree.TAG) in ("tensor", "ndarray"):
            yield str(node["v"])
        else:
            for child in node.values():
                yield from _names(child)


def _metadata(path: Path) -> Any:
    if not is_pack(path):
        raise UnknownFormat(f"{path} was not written by penstock and has no metadata")
    with PackReader(path, find_base=folder.find_base) as pack:
        return tree.unflatten(pack.index.meta.get("metadata"), fetch_torch_value)


def _torch_load(source: Path | io.BytesIO, path: Path, device: str | torch.device) -> Any:
    try:
        return torch.load(source, map_location=device, weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or a hostile file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise CorruptFile(
            f"{path} cannot be loaded by torch without running code: {reason[:200]}"
        ) from error


def _unlz4(path: Path) -> io.BytesIO:
    limit = path.stat().st_size * _LZ4_MAX_RATIO
    content = io.BytesIO()
    try:
        with lz4.frame.open(path) as stream:
            while chunk := stream.read(1 << 22):
                content.write(chunk)
                if content.tell() > limit:
                    raise LimitExceeded(f"{path} unpacks to more than {limit} bytes")
    except (RuntimeError, EOFError, ValueError) as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error
    content.seek(0)
    return content


def _filtered(state: Any, only: str | None) -> Any:
    if only is None:
        return state
    leaves: dict[str, Any] = {}

    def store(path: str, value: Any) -> tree.Json:
        leaves[path] = value
        return {tree.TAG: "leaf", "v": path}

    chosen = tree.select(tree.flatten(state, store), only)
    if chosen is None:
        raise UsageError(f"nothing matches only={only!r}")
    return tree.unflatten(chosen, lambda record: leaves[record["v"]])
