"""The bytes of a pack header: a valid safetensors header with one JSON index in its metadata.

Every byte of a file is accounted for: the index is covered by a digest, the safetensors entries
must be exactly those that the index implies, each block has the CRC-32 of its original bytes, and
padding must be zero. So whatever changes a value on disk is noticed on reading.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from penstock.core import codecs
from penstock.core.codecs import Codec, Layout
from penstock.core.codecs.base import expect
from penstock.errors import CorruptFile, DataError, LimitExceeded, UnknownFormat, UsageError

FORMAT_VERSION = 1
INDEX_KEY = "penstock"
DIGEST_KEY = "penstock.digest"
ALIGNMENT = 8
MAX_RATIO = 1000  # a blob is padded to this share of its tensor, so that readers can refuse bombs
RATIO_FREE_BYTES = 64 * 1024
MAX_DIMENSIONS = 32  # numpy's limit before version 2
_DIGEST_BYTES = 16

# What a reader is willing to allocate; checked before it does.
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
MAX_BLOCK_BYTES = 256 << 20
MAX_TENSOR_BYTES = 1 << 40

# What the parsing of a hostile index may raise: all of it means that the file is damaged.
_NONSENSE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_REFUSED = (*_NONSENSE, DataError, UsageError)


class Dtype(NamedTuple):
    """How an element type is stored: the safetensors tag (None: only as a blob), numpy's words."""

    tag: str | None
    words: np.dtype[Any]


# Their order counts: some formats name a type by its number here.
DTYPES: dict[str, Dtype] = {
    "bool": Dtype("BOOL", np.dtype("bool")),
    "uint8": Dtype("U8", np.dtype("uint8")),
    "int8": Dtype("I8", np.dtype("int8")),
    "uint16": Dtype("U16", np.dtype("uint16")),
    "int16": Dtype("I16", np.dtype("int16")),
    "uint32": Dtype("U32", np.dtype("uint32")),
    "int32": Dtype("I32", np.dtype("int32")),
    "uint64": Dtype("U64", np.dtype("uint64")),
    "int64": Dtype("I64", np.dtype("int64")),
    "float16": Dtype("F16", np.dtype("float16")),
    "bfloat16": Dtype("BF16", np.dtype("uint16")),
    "float8_e4m3fn": Dtype("F8_E4M3", np.dtype("uint8")),
    "float8_e5m2": Dtype("F8_E5M2", np.dtype("uint8")),
    "float32": Dtype("F32", np.dtype("float32")),
    "float64": Dtype("F64", np.dtype("float64")),
    "complex64": Dtype(None, np.dtype("complex64")),
    "complex128": Dtype(None, np.dtype("complex128")),
}


@dataclass
class Entry:
    """One tensor of a pack."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: Codec
    block_bytes: int
    plain: bool
    layout: Layout | None = None
    sizes: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)
    stored_bytes: int = 0
    offset: int = 0

    # What depends on fields that never change is computed once: a header has hundreds of blocks.
    @cached_property
    def words(self) -> np.dtype[Any]:
        """The numpy type in which the elements are handled."""
        return DTYPES[self.dtype].words

    @cached_property
    def nbytes(self) -> int:
        """Size of the decoded tensor."""
        return math.prod(self.shape) * self.words.itemsize

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.nbytes // self.block_bytes)

    @cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the order of axes in which the elements lie on disk."""
        return tuple(self.shape[axis] for axis in self.layout.order) if self.layout else self.shape

    @property
    def whole_rows(self) -> bool:
        """Whether each block holds whole rows of the first axis on disk."""
        rows = self.stored_shape[0] if self.shape and self.nbytes else 0
        return rows > 0 and self.block_bytes % (self.nbytes // rows) == 0

    @cached_property
    def turn(self) -> tuple[int, int] | None:
        """(features, steps) of [rows, steps, features] stored as [rows, features, steps]."""
        if self.layout is None or self.words.kind == "c":  # a complex number is two words
            return None
        if self.layout.order != (0, *range(2, len(self.shape)), 1):
            return None
        return math.prod(self.shape[2:]), self.shape[1]

    @cached_property
    def block_offsets(self) -> list[int]:
        """Where each block starts, from the tensor's first byte on disk; for finished entries."""
        return list(accumulate(self.sizes, initial=0))

    def same_blocks(self, other: Entry) -> bool:
        """Tell whether the blocks of two entries match, so that one can be the other's base."""
        mine = (self.dtype, self.shape, self.layout, self.block_bytes)
        return mine == (other.dtype, other.shape, other.layout, other.block_bytes)

    def span(self, block: int) -> int:
        """Bytes of a block, decoded."""
        return min(self.block_bytes, self.nbytes - block * self.block_bytes)

    def cut(self, array: NDArray[Any], step: int = 1) -> Iterator[NDArray[Any]]:
        """Cut an array into one view per block, or per so many: flat, in the order on disk.

        With a layout an array of the tensor's own shape is cut into rows with the axes as on disk
        (`whole_rows` only).
        """
        if self.layout and array.ndim > 1:
            stored = array.transpose(self.layout.order)
        else:
            stored = array.reshape(-1).view(self.words)
        for start in range(0, self.nbytes, step * self.block_bytes):
            unit = self.nbytes // len(stored)
            yield stored[start // unit : (start + step * self.block_bytes) // unit]

    def checksum(self) -> int:
        """CRC-32 over name|dtype|shape| and the original bytes, combined from the blocks' own."""
        head = f"{self.name}|{self.dtype}|{','.join(map(str, self.shape))}|".encode()
        crc = isal_zlib.crc32(head)
        for block, block_crc in enumerate(self.crcs):
            crc = isal_zlib.crc32_combine(crc, block_crc, self.span(block))
        return int(crc)

    def padded_bytes(self) -> int:
        """Length of the blob on disk: aligned, and never under 1/1000 of the tensor."""
        length = sum(self.sizes)
        if self.plain:
            return length
        if self.nbytes > RATIO_FREE_BYTES:
            length = max(length, -(-self.nbytes // MAX_RATIO))
        return -(-length // ALIGNMENT) * ALIGNMENT

    def to_json(self) -> dict[str, Any]:
        """Return the index record."""
        record: dict[str, Any] = {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "codec": self.codec.config(),
            "plain": self.plain,
            "block": self.block_bytes,
            "sizes": self.sizes,
            "crcs": self.crcs,
            "crc": self.checksum(),
        }
        if self.layout:
            record["order"] = list(self.layout.order)
        return record

    def safetensors(self) -> dict[str, Any]:
        """Return the entry of the safetensors header."""
        dtype = DTYPES[self.dtype].tag if self.plain else "U8"
        shape = list(self.stored_shape) if self.plain else [self.stored_bytes]
        span = [self.offset, self.offset + self.stored_bytes]
        return {"dtype": dtype, "shape": shape, "data_offsets": span}


@dataclass
class Index:
    """What a pack says about itself."""

    kind: str
    meta: dict[str, Any]
    entries: dict[str, Entry]
    base: dict[str, str] | None = None
    digest: str = ""
    header_bytes: int = 0

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return sum(entry.stored_bytes for entry in self.entries.values())


def place(entries: Iterable[Entry]) -> None:
    """Give the entries their offsets: one after another, without holes."""
    at = 0
    for entry in entries:
        entry.stored_bytes = entry.padded_bytes()
        entry.offset = at
        at += entry.stored_bytes


def render(index: Index, header_bytes: int = 0) -> bytes:
    """Render the header (length word included), padded to `header_bytes` if it is shorter."""
    place(index.entries.values())
    text = json.dumps(
        {
            "version": FORMAT_VERSION,
            "kind": index.kind,
            "meta": index.meta,
            "base": index.base,
            "tensors": {name: entry.to_json() for name, entry in index.entries.items()},
        },
        separators=(",", ":"),
        allow_nan=False,
    )
    index.digest = _digest(text)
    header: dict[str, Any] = {"__metadata__": {INDEX_KEY: text, DIGEST_KEY: index.digest}}
    header.update((name, entry.safetensors()) for name, entry in index.entries.items())
    data = json.dumps(header, separators=(",", ":")).encode()
    length = max(len(data), header_bytes - 8)
    length += -length % ALIGNMENT
    if length > MAX_HEADER_BYTES:
        raise LimitExceeded(
            f"a header of {length} bytes is over {MAX_HEADER_BYTES}; hold long lists of numbers, "
            "and many small tensors, in arrays"
        )
    return struct.pack("<Q", length) + data.ljust(length)


def is_pack(path: Path | str) -> bool:
    """Tell from the first bytes whether a file is a pack (not whether it is undamaged)."""
    with open(path, "rb") as file:
        head = file.read(256)
    return head[8:].startswith(b'{"__metadata__":{"' + INDEX_KEY.encode() + b'":')


def read_index(path: Path, descriptor: int) -> Index:
    """Read and check the header of an open file; a DataError says what is wrong with it."""
    with _damage_of(path):
        index, tensors, table = _read_header(descriptor)
        index.entries = {name: _parse_entry(name, record) for name, record in tensors.items()}
        place(index.entries.values())
        implied = {name: entry.safetensors() for name, entry in index.entries.items()}
        expect(table == implied, "the tensor table contradicts the index")
        size, expected = os.fstat(descriptor).st_size, index.header_bytes + index.data_bytes
        expect(size == expected, f"{size} bytes long, should be {expected}")
    return index


def read_summary(path: Path) -> Index:
    """Read what a pack says of itself as a whole; its tensors are not looked at, nor listed."""
    with open(path, "rb", buffering=0) as file, _damage_of(path):
        return _read_header(file.fileno())[0]


@contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Name the file in whatever is wrong with it."""
    try:
        yield
    except (LimitExceeded, UnknownFormat) as error:
        raise type(error)(f"{path}: {error}") from error
    except _REFUSED as error:
        raise CorruptFile(f"{path} is damaged: {error}") from error


def _read_header(descriptor: int) -> tuple[Index, dict[str, Any], dict[str, Any]]:
    """Return the index without its entries, their records, and the safetensors table."""
    size = os.fstat(descriptor).st_size
    expect(size >= 10, f"{size} bytes are no pack")
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    expect(length <= size - 8, "cut off, or its header length is wrong")
    if length > MAX_HEADER_BYTES:
        raise LimitExceeded(f"header of {length} bytes is over {MAX_HEADER_BYTES}")
    raw = os.pread(descriptor, length, 8)
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        text, digest = metadata[INDEX_KEY], metadata[DIGEST_KEY]
        matches = _digest(text) == digest and len(metadata) == 2
        expect(matches, "the index does not match its digest")
        content = json.loads(text)
    except _NONSENSE as error:
        if INDEX_KEY.encode() not in raw[:256]:
            raise UnknownFormat("this is not a penstock file") from error
        raise CorruptFile(f"unreadable header ({error})") from error
    if content.get("version") != FORMAT_VERSION:
        raise UnknownFormat(
            f"format version {content.get('version')!r}, this penstock reads {FORMAT_VERSION}; "
            "upgrade penstock"
        )
    expect(isinstance(content["meta"], dict), "meta is not an object")
    base = _parse_base(content["base"])
    index = Index(str(content["kind"]), content["meta"], {}, base, digest, 8 + length)
    return index, content["tensors"], header


def _parse_base(link: dict[str, Any] | None) -> dict[str, str] | None:
    if link is None:
        return None
    base = {"file": str(link["file"]), "digest": str(link["digest"])}
    # A name from a file never leaves the folder of that file.
    plain = Path(base["file"]).name == base["file"] and base["file"] not in ("", ".", "..")
    expect(plain, f"base {base['file']!r} is not a plain file name")
    digest_bytes = len(bytes.fromhex(base["digest"]))
    expect(digest_bytes == _DIGEST_BYTES, f"base digest {base['digest']!r} makes no sense")
    return base


def _parse_entry(name: str, record: dict[str, Any]) -> Entry:
    axes = len(record["shape"])
    expect(axes <= MAX_DIMENSIONS, f"{name}: {axes} dimensions")
    shape = tuple(_natural(n) for n in record["shape"])
    expect(record["dtype"] in DTYPES, f"{name}: unknown dtype {record['dtype']!r}")
    layout = Layout(tuple(_natural(n) for n in record["order"])) if "order" in record else None
    expect(layout is None or len(layout.order) == axes, f"{name}: layout and shape differ")
    entry = Entry(
        name=name,
        dtype=record["dtype"],
        shape=shape,
        codec=codecs.from_config(record["codec"]),
        block_bytes=_natural(record["block"]),
        plain=record["plain"] is True,
        layout=layout,
        sizes=[_natural(n) for n in record["sizes"]],
        crcs=[_natural(n) for n in record["crcs"]],
    )
    whole_words = entry.block_bytes > 0 and entry.block_bytes % entry.words.itemsize == 0
    expect(whole_words, f"{name}: block size {entry.block_bytes} makes no sense")
    check_limits(entry)
    all_listed = entry.blocks == len(entry.sizes) == len(entry.crcs)
    expect(all_listed, f"{name}: {entry.blocks} blocks expected, {len(entry.sizes)} listed")
    raw = entry.codec.id == "raw"
    may_be_plain = raw and DTYPES[entry.dtype].tag is not None
    expect(may_be_plain or not entry.plain, f"{name}: a plain tensor must be raw")
    exact = not raw or entry.sizes == list(map(entry.span, range(entry.blocks)))
    expect(exact, f"{name}: a raw block has the wrong length")
    fits = entry.checksum() == record["crc"]
    expect(fits, f"{name}: the tensor's checksum contradicts its blocks")
    return entry


def check_limits(entry: Entry) -> None:
    """Refuse what a reader would not allocate: before it is read, and before it is written."""
    if min(entry.block_bytes, entry.nbytes) > MAX_BLOCK_BYTES:
        raise LimitExceeded(
            f"{entry.name}: a block of {entry.block_bytes} bytes is over {MAX_BLOCK_BYTES}"
        )
    # Zeros are left out: a shape like [0, 2**62] is empty, and still more than numpy can name.
    shape = list(entry.shape)
    if math.prod(filter(None, shape)) * entry.words.itemsize > MAX_TENSOR_BYTES:
        raise LimitExceeded(f"{entry.name}: shape {shape} is over {MAX_TENSOR_BYTES} bytes")


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise CorruptFile(f"{value!r} is not a count")
    return value


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
