"""How kernels are compiled, and how they reach C functions and addresses."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import lz4.block._block
import numpy as np
from isal import isal_zlib
from numba import carray, njit, types
from numba.extending import intrinsic

from penstock.core.codecs import zstd


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


def _library(function: str, module: Any, system: str) -> ctypes.CDLL | None:
    """Find the library that has a function: in a module that carries it, or the system's."""
    for path in (getattr(module, "__file__", None), system):
        with contextlib.suppress(OSError):
            if path and hasattr(library := ctypes.CDLL(path), function):
                return library
    return None


_LZ4 = _library("LZ4_decompress_safe", lz4.block._block, "liblz4.so.1")
_CRC = _library("crc32_gzip_refl", isal_zlib, "libisal.so.2")
_ZSTD = _library("ZSTD_decompress", zstd._zstd, "libzstd.so.1")
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
zstd_unpack = _ZSTD and _foreign(_ZSTD, "ZSTD_decompress", _W(_W, _W, _W, _W))
"""None, as are the next four, where zstd is not visible."""
zstd_open = _ZSTD and _foreign(_ZSTD, "ZSTD_createCCtx", _W())
zstd_set = _ZSTD and _foreign(_ZSTD, "ZSTD_CCtx_setParameter", _W(_W, _I, _I))
zstd_pack = _ZSTD and _foreign(_ZSTD, "ZSTD_compress2", _W(_W, _W, _W, _W, _W))
zstd_close = _ZSTD and _foreign(_ZSTD, "ZSTD_freeCCtx", _W(_W))


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
