"""Arrays to bytes and back: one small class per codec, rebuilt from a JSON config.

A codec works on one block: a contiguous 1-D array in, buffers out; `decode` fills memory that the
caller owns and checks every size before it allocates. All heavy calls release the GIL, and no
codec keeps state between calls, so that blocks may be coded by several threads.

    raw, lz4, zstd   base.py: the bytes as they are, or a general compressor over them
    planes           planes.py: the k-th bytes of all elements together
    delta, quantize  planes.py: the difference to a base; floats within an error that the user
                     states; each with an inner codec
    series           series.py: zeros as a bitmap, the rest as differences to the one before

`Layout` is the temporal layout: a permutation of the axes, so that neighbours in time lie together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.codecs.base import (
    Codec,
    Layout,
    Lz4,
    Raw,
    Zstd,
    as_unsigned,
    bytes_of,
    unzstd,
    zstd,
)
from penstock.core.codecs.planes import Delta, Planes, Quantize
from penstock.core.codecs.series import Series
from penstock.errors import CorruptFile, UsageError

__all__ = [
    "Codec",
    "Delta",
    "Layout",
    "Lz4",
    "Planes",
    "Quantize",
    "Raw",
    "Series",
    "Zstd",
    "as_unsigned",
    "bytes_of",
    "from_config",
    "unzstd",
    "zstd",
]

_REGISTRY: Mapping[str, type[Codec]] = {
    codec.id: codec for codec in (Raw, Lz4, Zstd, Planes, Series, Delta, Quantize)
}


def from_config(config: Mapping[str, Any]) -> Codec:
    """Rebuild a codec from its JSON settings; anything unexpected is a CorruptFile."""
    try:
        settings = dict(config)
        kind = settings.pop("id", None)
        codec = _REGISTRY.get(kind)
        if codec in (Delta, Quantize):
            settings["inner"] = from_config(settings["inner"])
        if codec is not None:
            return codec(**settings)
    except RecursionError:
        raise CorruptFile("codec settings are nested too deep") from None
    except (TypeError, ValueError, KeyError, UsageError) as error:
        raise CorruptFile(f"codec settings {config!r} make no sense ({error})") from error
    raise CorruptFile(f"unknown codec {kind!r}; a newer penstock may have written this file")
