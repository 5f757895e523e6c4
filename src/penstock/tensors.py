"""Torch tensors as bytes: names of types, addresses, and which tensors can be stored at all."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.extras import version_of
from penstock.core.pack import DTYPES
from penstock.core.tree import TAG, Json
from penstock.errors import CorruptFile, UnknownFormat, UnsupportedValue, UsageError

if version_of(torch.__version__) < (2, 3) and version_of(np.__version__) >= (2, 0):
    raise UsageError(
        f"torch {torch.__version__} works with numpy 1 only, numpy {np.__version__} is installed: "
        'pip install "numpy<2"'
    )

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in DTYPES if hasattr(torch, name)
}
_TYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LARGE_BYTES = 4 << 20
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PLAIN_CLASSES = frozenset(
    {torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)}  # from torch 2.5
)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor's elements; `Tensor.nbytes` is there from torch 2.1."""
    return tensor.numel() * tensor.element_size()


def unmapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that tensordict keeps in a file as a plain one, over the same memory."""
    mapped = getattr(sys.modules.get("tensordict"), "MemoryMappedTensor", ())
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, mapped) else tensor


def check_storable(path: str, tensor: torch.Tensor) -> None:
    """Refuse, by its path, a tensor whose bytes alone do not say what it is."""
    if type(tensor) not in PLAIN_CLASSES and not getattr(tensor, "stored_as_plain", False):
        problem = f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif tensor.is_nested:
        problem = "a nested tensor"
    elif tensor.layout is not torch.strided:
        problem = f"a {tensor.layout} tensor"
    elif tensor.dtype not in DTYPE_NAMES:
        problem = f"a tensor of {tensor.dtype}"
    elif tensor.is_meta:
        problem = "a tensor without data (device meta)"
    else:
        return
    raise UnsupportedValue(f"{path} is {problem}, which cannot be stored; convert it first")


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor contiguous on the CPU, with conjugates and signs that torch put off in it."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def flat_words(tensor: torch.Tensor) -> NDArray[Any]:
    """View a contiguous CPU tensor as a flat numpy array of its pack words."""
    name = DTYPE_NAMES[tensor.dtype]
    kind = DTYPES[name].words
    if not tensor.numel():
        return np.empty(0, kind)
    flat = tensor.detach().reshape(-1)
    if kind.name != name or tensor.dtype is torch.bool:  # numpy has no such type
        flat = flat.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    words: NDArray[Any] = flat.numpy().view(kind)
    return words


def tensor_over(words: NDArray[Any], dtype: str) -> torch.Tensor:
    """Make a tensor of a pack's dtype over an array of its words; they share memory."""
    if words.dtype.kind == "u" and words.itemsize > 1:  # numpy's are taken from torch 2.3
        words = words.view(f"i{words.itemsize}")
    return torch.from_numpy(words).view(torch_dtype(dtype))


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type of a pack's dtype; UnknownFormat where this torch has none."""
    try:
        return _TYPES[name]
    except KeyError:
        raise UnknownFormat(
            f"torch {torch.__version__} has no {name}: load it with a newer torch (float8 came "
            "with 2.1, unsigned integers of 2 to 8 bytes with 2.3)"
        ) from None


def empty_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Allocate a fresh CPU tensor for a pack entry, in huge pages where the system has them."""
    tensor = torch.empty(shape, dtype=torch_dtype(dtype), device="cpu")
    nbytes = tensor_bytes(tensor)
    if nbytes >= _LARGE_BYTES and sys.platform == "linux":
        # First use costs a fault per page: with pages of 4 kB that is a third of a load.
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(start, length, mmap.MADV_HUGEPAGE)  # advice only: a refusal does not matter
    return tensor


def empty_array(dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Allocate a fresh array of a pack's words, in huge pages where the system has them."""
    words = DTYPES[dtype].words
    memory = empty_tensor("uint8", (math.prod(shape) * words.itemsize,))
    array: NDArray[Any] = memory.numpy().view(words).reshape(shape)
    return array


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
        return dtype if isinstance(dtype, torch.dtype) else torch_dtype(str(value))
    if kind == "torch.device":
        return torch.device(value)
    raise CorruptFile(f"unknown kind of value {kind!r}; a newer penstock may have written it")
