"""The pack: one container for checkpoints, rollouts and replay segments (docs/format.md).

format.py knows the bytes of the header, writer.py streams blocks in, reader.py verifies them out.
"""

from penstock.core.pack.format import (
    DTYPES,
    Entry,
    Index,
    is_pack,
    read_summary,
)
from penstock.core.pack.reader import PackReader
from penstock.core.pack.writer import Item, PackWriter

__all__ = [
    "DTYPES",
    "Entry",
    "Index",
    "Item",
    "PackReader",
    "PackWriter",
    "is_pack",
    "read_summary",
]
