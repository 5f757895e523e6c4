"""Torch tensors as bytes: names of types, addresses, and which tensors can be stored at all."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.pack import DTYPES
from penstock.core.tree import TAG, Json
from penstock.errors import CorruptFile, UnsupportedValue

NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in DTYPES if hasattr(torch, name)
}
_TYPES = {name: dtype for dtype, name in NAMES.items()}
_LARGE_BYTES = 4 << 20
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def check_storable(path: str, tensor: torch.Tensor) -> None:
    """Refuse, by its path, a tensor whose bytes alone do not say what it is."""
    if type(tensor) not in _PLAIN_CLASSES:
        problem = f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif tensor.layout is not torch.strided:
        problem = f"a {tensor.layout} tensor"
    elif tensor.dtype not in NAMES:
        problem = f"a tensor of {tensor.dtype}"
    elif tensor.device.type == "meta":
        problem = "a tensor without data (device meta)"
    else:
        return
    raise UnsupportedValue(f"{path} is {problem}, which cannot be stored; convert it first")


def flat_words(tensor: torch.Tensor) -> NDArray[Any]:
    """View a contiguous CPU tensor as a flat numpy array of its pack words."""
    if not tensor.numel():
        return np.empty(0, DTYPES[NAMES[tensor.dtype]].words)
    flat = tensor.detach().reshape(-1)
    if tensor.dtype is torch.bool:
        flat = flat.view(torch.uint8)
    elif NAMES[tensor.dtype] not in np.sctypeDict:
        flat = flat.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    words: NDArray[Any] = flat.numpy().view(DTYPES[NAMES[tensor.dtype]].words)
    return words


def tensor_over(words: NDArray[Any], dtype: str) -> torch.Tensor:
    """Make a tensor of a pack's dtype over an array of its words; they share memory."""
    return torch.from_numpy(words).view(_TYPES[dtype])


def empty_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Allocate a fresh CPU tensor for a pack entry, in huge pages where the system has them."""
    tensor = torch.empty(shape, dtype=_TYPES[dtype])
    if tensor.nbytes >= _LARGE_BYTES and sys.platform == "linux":
        # First use costs a fault per page: with pages of 4 kB that is a third of a load.
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(start, length, mmap.MADV_HUGEPAGE)  # advice only: a refusal does not matter
    return tensor


def store_torch_value(value: Any) -> Json | None:
    """Describe the small torch values of a training state; None for anything else."""
    if isinstance(value, torch.Size):
        return {TAG: "torch.Size", "v": list(value)}
    if isinstance(value, torch.dtype):
        return {TAG: "torch.dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {TAG: "torch.device", "v": str(value)}
    return None


def fetch_torch_value(record: dict[str, Json]) -> Any:
    """Rebuild what `store_torch_value` described."""
    kind, value = record[TAG], record.get("v", ())
    if kind == "torch.Size":
        return torch.Size(value)
    if kind == "torch.dtype":
        dtype = getattr(torch, str(value), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    if kind == "torch.device":
        return torch.device(value)
    raise CorruptFile(f"unknown kind of value {kind!r}; a newer penstock may have written it")
