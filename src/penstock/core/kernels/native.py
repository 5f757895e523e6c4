"""How kernels are compiled, and how they reach C functions and addresses."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import lz4.block._block
import numpy as np
from isal import isal_zlib
from numba import carray, njit, types
from numba.extending import intrinsic

from penstock.core.codecs import zstd


def compiled(function: Callable[..., Any], error_model: str = "python") -> Any:
    """Compile on first use, without the GIL, kept on disk for the next process.

    With the `error_model` "numpy" a division by zero gives infinity, and so no branch.
    """
    try:
        return njit(function, nogil=True, error_model=error_model, cache=True)
    except RuntimeError:  # no folder to keep it in
        return njit(function, nogil=True, error_model=error_model)


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
zstd_unpack = _ZSTD and _foreign(_ZSTD, "ZSTD_decompressDCtx", _W(_W, _W, _W, _W, _W))
"""None, as are the next three, where zstd is not visible. The first argument is of a `ZstdRoom`."""
zstd_reset = _ZSTD and _foreign(_ZSTD, "ZSTD_CCtx_reset", _W(_W, _I))
zstd_set = _ZSTD and _foreign(_ZSTD, "ZSTD_CCtx_setParameter", _W(_W, _I, _I))
zstd_pack = _ZSTD and _foreign(_ZSTD, "ZSTD_compress2", _W(_W, _W, _W, _W, _W))


class ZstdRoom:
    """What zstd needs to pack and unpack in, by its address; for one thread at a time."""

    def __init__(self) -> None:
        assert _ZSTD is not None
        addresses = []
        for kind in "CD":
            create, free = (getattr(_ZSTD, f"ZSTD_{verb}{kind}Ctx") for verb in ("create", "free"))
            create.restype = ctypes.c_void_p
            addresses.append(create())
            weakref.finalize(self, free, ctypes.c_void_p(addresses[-1])).atexit = False
        self.packing, self.unpacking = map(np.uint64, addresses)


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
