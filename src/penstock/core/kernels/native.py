"""How kernels are compiled, and how they reach C functions and addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic


def compiled(function: Callable[..., Any]) -> Any:
    """Compile on first use, without the GIL, kept on disk for the next process."""
    try:
        return njit(function, nogil=True, cache=True)
    except RuntimeError:  # no folder to keep it in
        return njit(function, nogil=True)


def foreign(library: ctypes.CDLL, name: str, signature: Any) -> Any:
    """Make a C function callable from compiled code."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    # By a symbol, not by the address: compiled code kept on disk must find it in every process.
    llvm.add_symbol(f"penstock_{name}", address)
    return types.ExternalFunction(f"penstock_{name}", signature)


@intrinsic
def pointer(_context: Any, address: Any) -> Any:
    """Take an integer for the address of bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), generate


@compiled
def bytes_at(address, size):
    """View bytes in memory."""
    return carray(pointer(address), size, np.uint8)


@compiled
def address_of(array):
    """Return where an array begins."""
    return np.uint64(array.ctypes.data)
