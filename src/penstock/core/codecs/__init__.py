"""Arrays to bytes and back: one small class per codec, rebuilt from a JSON config.

A codec works on one block: a contiguous 1-D array in, buffers out; `decode` fills memory that the
caller owns and checks every size before it allocates. All heavy calls release the GIL, and no
codec keeps state between calls, so that blocks may be coded by several threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.codecs.base import Codec as Codec
from penstock.core.codecs.base import Layout as Layout
from penstock.core.codecs.base import Lz4 as Lz4
from penstock.core.codecs.base import Raw as Raw
from penstock.core.codecs.base import Zstd as Zstd
from penstock.core.codecs.base import bytes_of as bytes_of
from penstock.core.codecs.base import unzstd as unzstd
from penstock.core.codecs.base import zstd as zstd
from penstock.core.codecs.planes import Delta as Delta
from penstock.core.codecs.planes import Planes as Planes
from penstock.core.codecs.planes import Quantize as Quantize
from penstock.core.codecs.series import Series as Series
from penstock.errors import CorruptFile, UsageError

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
