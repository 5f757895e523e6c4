"""How kernels are compiled, and how they reach C functions and addresses."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import lz4.block._block
import numpy as np
from isal import isal_zlib
from numba import carray, njit, types
from numba.extending import intrinsic


def compiled(function: Callable[..., Any]) -> Any:
    """Compile on first use, without the GIL, kept on disk for the next process."""
    try:
        return njit(function, nogil=True, cache=True)
    except RuntimeError:  # no folder to keep it in
        return njit(function, nogil=True)


def _foreign(library: ctypes.CDLL, name: str, signature: Any, stand_in: str = "") -> Any:
    """Make a C function callable from compiled code, or at least something under its name."""
    function = getattr(library, stand_in or name)
    # By a symbol, not by the address: compiled code kept on disk must find it in every process.
    llvm.add_symbol(f"penstock_{name}", ctypes.cast(function, ctypes.c_void_p).value)
    return types.ExternalFunction(f"penstock_{name}", signature)


def _library(function: str, *paths: str | None) -> ctypes.CDLL | None:
    """Find the library that has a function: in a package that carries it, or the system's."""
    for path in paths:
        with contextlib.suppress(OSError):
            if path and hasattr(library := ctypes.CDLL(path), function):
                return library
    return None


def _module_file(name: str) -> str | None:
    try:
        found = importlib.util.find_spec(name)
    except ImportError:
        return None
    return found.origin if found else None


_LZ4 = _library("LZ4_decompress_safe", lz4.block._block.__file__, "liblz4.so.1")
_CRC = _library("crc32_gzip_refl", isal_zlib.__file__, "libisal.so.2")
_ZSTD = _library("ZSTD_decompress", _module_file("backports.zstd._zstd"), "libzstd.so.1")
if _LZ4 is None or _CRC is None:
    raise ImportError("LZ4 or ISA-L is not visible; pip install --force-reinstall lz4 isal")

_W, _I, _U = types.uintp, types.int32, types.uint32
lz4_unpack = _foreign(_LZ4, "LZ4_decompress_safe", _I(_W, _W, _I, _I))
lz4_pack_fast = _foreign(_LZ4, "LZ4_compress_fast", _I(_W, _W, _I, _I, _I))
lz4_pack_hard = _foreign(_LZ4, "LZ4_compress_HC_extStateHC", _I(_W, _W, _W, _I, _I, _I))
# The same with memory that the last call left in order: it need not be cleared.
_AGAIN = "LZ4_compress_HC_extStateHC_fastReset"
lz4_pack_hard_again = _foreign(
    *(_LZ4, _AGAIN, _I(_W, _W, _W, _I, _I, _I)),
    stand_in=_AGAIN if hasattr(_LZ4, _AGAIN) else "LZ4_compress_HC_extStateHC",
)
LZ4_HARD_BYTES: int = _LZ4.LZ4_sizeofStateHC()
"""What `lz4_pack_hard` needs of memory to work in, aligned to 8 bytes."""
crc32 = _foreign(_CRC, "crc32_gzip_refl", _U(_U, _W, types.uint64))
copy_bytes = _foreign(ctypes.CDLL(None), "memcpy", _W(_W, _W, _W))  # three times as fast as a loop
HAS_ZSTD = _ZSTD is not None
"""Whether `zstd_unpack` may be called; code on disk needs the symbol in any case."""
zstd_unpack = (
    _foreign(_LZ4, "ZSTD_decompress", _W(_W, _W, _W, _W), stand_in="LZ4_versionNumber")
    if _ZSTD is None
    else _foreign(_ZSTD, "ZSTD_decompress", _W(_W, _W, _W, _W))
)


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
