"""Checkpoints as the files of others: torch.save and plain safetensors."""

from __future__ import annotations

import io
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoints.load import load_checkpoint
from penstock.core import tree
from penstock.core.files import publish_bytes
from penstock.errors import UsageError
from penstock.tensors import store_torch_value


def to_torch(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write a checkpoint as a file that `torch.load(out, weights_only=True)` reads.

    What that refuses is converted: numpy's arrays become tensors, its numbers Python's, frozensets
    sets.

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
    _collect("", load_checkpoint(path), tensors, others)
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
        plain = type(value)((key, _without_numpy(child)) for key, child in value.items())
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            plain._metadata = value._metadata  # type: ignore[attr-defined]
        return plain
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_without_numpy, value))
    return set(value) if isinstance(value, frozenset) else value


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:  # before torch 2.3 there are no uint16, uint32 and uint64
        return torch.from_numpy(array.astype(np.int64))


def _collect(
    path: str, value: Any, tensors: dict[str, torch.Tensor], others: dict[str, str]
) -> None:
    prefix = f"{path}." if path else ""
    if isinstance(value, torch.Tensor):
        # A file of safetensors has no two names for one tensor.
        copy = value.clone(memory_format=torch.contiguous_format)
        tensors[tree.free_name(path or "tensor", tensors)] = copy
    elif isinstance(value, np.ndarray):
        tensors[tree.free_name(path or "tensor", tensors)] = _tensor(value)
    elif isinstance(value, dict | list | tuple) and _has_tensor(value):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            _collect(f"{prefix}{key}", child, tensors, others)
    else:
        note = tree.flatten(value, lambda _, foreign: store_torch_value(foreign))
        others[tree.free_name(path, others)] = json.dumps(note)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_has_tensor, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor | np.ndarray)
