"""The pack: one container for checkpoints, rollouts and replay segments (docs/format.md).

format.py knows the bytes of the header, writer.py streams blocks in, reader.py verifies them out.
"""

from penstock.core.pack.format import DTYPES as DTYPES
from penstock.core.pack.format import Entry as Entry
from penstock.core.pack.format import Index as Index
from penstock.core.pack.format import is_pack as is_pack
from penstock.core.pack.format import read_summary as read_summary
from penstock.core.pack.reader import PackReader as PackReader
from penstock.core.pack.writer import Item as Item
from penstock.core.pack.writer import PackWriter as PackWriter
