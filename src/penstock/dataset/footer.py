"""Parquet files without their footer: the pages are found by their headers, and a footer is made.

A writer that is killed leaves pages of whole columns, and no word on where they are. Each page
begins with a header in Thrift's compact protocol that says its size and its number of values; with
the schema, which is known from elsewhere, that is enough to tell columns and row groups apart.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.files import write_all

_MAGIC: Final = b"PAR1"
_MOST_HEADER: Final = 1 << 20  # bytes of a page's header, which may hold a least and greatest value
_MOST_PAGE: Final = 1 << 30
_MOST_PAGES: Final = 1 << 22
_MOST_DEPTH: Final = 16
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
# Thrift's types, as far as a page's header and a footer have them.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _BINARY, _LIST, _STRUCT = 1, 2, 3, 4, 5, 6, 8, 9, 12
_SNAPPY = 1

Struct = dict[int, tuple[int, Any]]  # by the number of a field: its type and value


@dataclass(frozen=True, slots=True)
class _Page:
    """One page of a column, header included."""

    start: int
    stop: int
    values: int | None  # None in a dictionary
    plain_bytes: int  # before compression


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def byte(self) -> int:
        if self.at >= len(self._data):
            raise ValueError("it ends")
        self.at += 1
        return self._data[self.at - 1]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if not byte & 128:
                return value
            if shift > 63:
                raise ValueError("a number is too long")

    def number(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise ValueError("it ends")
        self.at += count
        return self._data[self.at - count : self.at]

    def value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _BYTE:
            return self.byte()
        if kind in (_I16, _I32, _I64):
            return self.number()
        if kind == _BINARY:
            return self.take(self.varint())
        if kind == _LIST:
            return self._list(depth)
        if kind == _STRUCT:
            return self.structure(depth + 1)
        raise ValueError(f"type {kind} is not known")

    def _list(self, depth: int) -> tuple[int, list[Any]]:
        head = self.byte()
        count, kind = head >> 4, head & 15
        count = self.varint() if count == 15 else count
        if count > len(self._data):
            raise ValueError("a list is too long")
        return kind, [self.value(kind, depth + 1) for _ in range(count)]

    def structure(self, depth: int = 0) -> Struct:
        if depth > _MOST_DEPTH:
            raise ValueError("it is nested too deep")
        found: Struct = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.number()
            found[number] = head & 15, self.value(head & 15, depth)
        return found


def _packed(kind: int, value: Any) -> bytes:
    """Write a value in the compact protocol."""
    if kind in (_I16, _I32, _I64):
        return _varint((value << 1) ^ (value >> 63))
    if kind == _BINARY:
        return _varint(len(value)) + bytes(value)
    if kind == _LIST:
        inner, items = value
        head = bytes([min(len(items), 15) << 4 | inner])
        head += _varint(len(items)) if len(items) >= 15 else b""
        return head + b"".join(_packed(inner, item) for item in items)
    if kind == _STRUCT:
        parts, before = [], 0
        for number, (inner, content) in sorted(value.items()):
            parts.append(bytes([(number - before) << 4 | inner]))  # no footer leaves out 15 fields
            if inner not in (_TRUE, _FALSE):
                parts.append(_packed(inner, content))
            before = number
        return b"".join(parts) + b"\0"
    return bytes([value])


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _pages(data: mmap.mmap) -> Iterator[_Page]:
    """Yield the pages that are whole, from the beginning on."""
    at, count = len(_MAGIC), 0
    while at < len(data) and count < _MOST_PAGES:
        reader = _Reader(data[at : at + _MOST_HEADER])
        try:
            header = reader.structure()
            kind, plain, packed = (header[number][1] for number in (1, 2, 3))
        except (ValueError, KeyError, IndexError):
            return
        of = {_DATA: 5, _DATA_V2: 8, _DICTIONARY: 7}.get(kind)
        stop = at + reader.at + packed
        good = of in header and 0 <= packed <= _MOST_PAGE and 0 <= plain <= _MOST_PAGE
        if not good or of is None or stop > len(data) or 1 not in header[of][1]:
            return
        values = None if kind == _DICTIONARY else header[of][1][1][1]
        yield _Page(at, stop, values, plain + reader.at)
        at, count = stop, count + 1


def _per_row(kind: pa.DataType) -> list[int]:
    """Return how many values a row has in each leaf of a type."""
    if isinstance(kind, pa.ExtensionType):
        return _per_row(kind.storage_type)
    if pa.types.is_struct(kind):
        return [count for field in kind for count in _per_row(field.type)]
    if pa.types.is_fixed_size_list(kind):
        return [kind.list_size * count for count in _per_row(kind.value_type)]
    return [1]


def _chunks(
    pages: Sequence[_Page], at: int, counts: Sequence[int]
) -> tuple[int, list[Sequence[_Page]], int] | None:
    """Tell the columns of one row group apart: (rows, pages of each, where the next one begins).

    The number of rows is that for which every column comes out even; the first that does is it.
    """
    first = at + (at < len(pages) and pages[at].values is None)
    total = 0
    for stop in range(first, len(pages)):
        if pages[stop].values is None:
            return None
        total += pages[stop].values or 0
        if total % counts[0]:
            continue
        rows, found, place = total // counts[0], [pages[at : stop + 1]], stop + 1
        for count in counts[1:]:
            begin, wanted = place, rows * count
            place += place < len(pages) and pages[place].values is None
            while wanted > 0 and place < len(pages) and pages[place].values is not None:
                wanted -= pages[place].values or 0
                place += 1
            if wanted:
                break
            found.append(pages[begin:place])
        else:
            return rows, found, place
    return None


def add_footer(path: Path, schema: pa.Schema, shapes: Sequence[int | None] = ()) -> int:
    """Append a footer to a file that has none; return the rows that can be read.

    Args:
        path: The file; a copy, for it is changed. What follows its last whole row group is cut off.
        schema: Of the file.
        shapes: Values of a row in each column whose lists have no fixed size; None for the others.
    """
    counts: list[int] = []
    for place, field in enumerate(schema):
        own = shapes[place] if place < len(shapes) else None
        counts += _per_row(field.type) if own is None else [own]
    template = _template(schema)
    groups: list[Struct] = []
    rows, end = 0, len(_MAGIC)
    with path.open("r+b") as file:
        if os.fstat(file.fileno()).st_size <= end or file.read(end) != _MAGIC:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            pages = list(_pages(data))
        at = 0
        while at < len(pages) and (found := _chunks(pages, at, counts)) is not None:
            count, columns, at = found
            groups.append(_group(template, count, columns, len(groups)))
            rows, end = rows + count, columns[-1][-1].stop
        footer = {**template, 3: (_I64, rows), 4: (_LIST, (_STRUCT, groups))}
        text = _packed(_STRUCT, footer)
        file.truncate(end)
        file.seek(end)
        write_all(file, text + struct.pack("<I", len(text)) + _MAGIC)
    return rows


def _template(schema: pa.Schema) -> Struct:
    """Return the footer of a file of that schema with one row group."""
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, schema, compression="snappy") as writer:
        columns = [pa.nulls(1, field.type) for field in schema]
        nullable = pa.schema([field.with_nullable(True) for field in schema], schema.metadata)
        writer.write_table(pa.table(columns, schema=nullable))
    data = buffer.getvalue()
    (length,) = struct.unpack("<I", data[-8:-4])
    return _Reader(data[-8 - length : -8]).structure()


def _group(template: Struct, rows: int, columns: Sequence[Sequence[_Page]], ordinal: int) -> Struct:
    chunks: list[Struct] = []
    for known, pages in zip(template[4][1][1][0][1][1][1], columns, strict=True):
        column = known[3][1]
        has_dictionary = pages[0].values is None
        first = pages[1] if has_dictionary else pages[0]
        described: Struct = {
            1: column[1],
            2: (_LIST, (_I32, [0, 3, 8])),  # PLAIN, RLE, RLE_DICTIONARY
            3: column[3],
            4: (_I32, _SNAPPY),
            5: (_I64, sum(page.values or 0 for page in pages)),
            6: (_I64, sum(page.plain_bytes for page in pages)),
            7: (_I64, pages[-1].stop - pages[0].start),
            9: (_I64, first.start),
        }
        if has_dictionary:
            described[11] = (_I64, pages[0].start)
        chunks.append({2: (_I64, 0), 3: (_STRUCT, described)})
    size = sum(chunk[3][1][6][1] for chunk in chunks)
    return {
        1: (_LIST, (_STRUCT, chunks)),
        2: (_I64, size),
        3: (_I64, rows),
        7: (_I16, ordinal),
    }


def readable_rows(path: Path) -> int:
    """Return how many rows can be read, from the beginning on; row groups are all or nothing."""
    rows = 0
    broken = suppress(pa.ArrowException, OSError, ValueError, MemoryError)
    with broken, pq.ParquetFile(path, pre_buffer=False) as file:
        for number in range(file.num_row_groups):
            rows += file.read_row_group(number, use_threads=False).num_rows
    return rows
