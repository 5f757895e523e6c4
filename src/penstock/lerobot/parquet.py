"""Parquet files with checksums, that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.files import NewFile, write_all
from penstock.errors import CorruptFile, DataError, StorageError

ROWS_PER_GROUP = 50_000
BYTES_PER_GROUP = 64 << 20
_BUFFER_BYTES = 1 << 20
_PICTURES_PER_BATCH = 16


class WholeWriter:
    """A buffer before an unbuffered file that writes every byte, and forgets them on an error.

    Unlike io.BufferedWriter it never tries again behind one's back when the disk is full.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._buffer = bytearray()
        self._at = 0
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        """Take bytes."""
        view = memoryview(data)
        self._buffer += view
        self._at += view.nbytes
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()
        return view.nbytes

    def flush(self) -> None:
        """Write what waits."""
        waiting, self._buffer = self._buffer, bytearray()
        write_all(self._file, waiting)

    def tell(self) -> int:
        """Return the position behind all that was taken."""
        return self._at

    def close(self) -> None:
        """Do nothing: the file is its owner's."""

    def readable(self) -> bool:
        """Return False."""
        return False

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return False."""
        return False


@contextmanager
def new_parquet(
    path: Path, schema: pa.Schema, *, compression: str = "snappy", dictionary: bool = True
) -> Iterator[pq.ParquetWriter]:
    """Write a parquet file, published durably at the end of the block."""
    # A page is measured once per batch, and a reader needs room for two: 1024 pictures are 100 MB.
    pictures = any(pa.types.is_struct(kind) for kind in schema.types)
    with NewFile(path) as new:
        buffer = WholeWriter(new.file)
        try:
            with pq.ParquetWriter(
                buffer,
                schema,
                compression=compression,
                use_dictionary=dictionary,
                write_page_checksum=True,
                write_batch_size=_PICTURES_PER_BATCH if pictures else None,
            ) as writer:
                yield writer
            buffer.flush()
        except pa.ArrowException as error:
            if isinstance(error, OSError):
                raise
            raise DataError(f"cannot write {path}: {error}") from error


def write_table(path: Path, table: pa.Table) -> None:
    """Publish a small table as one row group."""
    with new_parquet(path, table.schema) as writer:
        writer.write_table(table)


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a parquet file for reading; checksums are verified where they are."""
    try:
        with pq.ParquetFile(
            path,
            page_checksum_verification=True,
            pre_buffer=False,  # of a whole row group
            buffer_size=_BUFFER_BYTES,
        ) as file:
            yield file
    except FileNotFoundError as error:
        raise CorruptFile(f"{path} is missing") from error
    except StorageError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise CorruptFile(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from error


def read_table(path: Path) -> pa.Table:
    """Read a small table."""
    with open_parquet(path) as file:
        return file.read()


def slices(file: pq.ParquetFile, rows: int) -> Iterator[pa.Table]:
    """Read a file in tables of exactly so many rows, whatever its row groups; the last is less."""
    waiting: list[pa.RecordBatch] = []
    have = 0
    for batch in file.iter_batches(batch_size=rows):
        waiting.append(batch)
        have += batch.num_rows
        while have >= rows:
            table = pa.Table.from_batches(waiting)
            yield table.slice(0, rows)
            waiting = table.slice(rows).to_batches() if have > rows else []
            have -= rows
    if have:
        yield pa.Table.from_batches(waiting)


class GroupWriter:
    """Collects tables and writes them as large row groups, within bounded memory."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._bytes = 0

    def add(self, table: pa.Table) -> None:
        """Add rows."""
        full = self._rows + table.num_rows > ROWS_PER_GROUP
        if self._tables and (full or self._bytes + table.nbytes > BYTES_PER_GROUP):
            self.flush()
        self._tables.append(table)
        self._rows += table.num_rows
        self._bytes += table.nbytes

    def flush(self) -> None:
        """Write what was collected as one row group."""
        if self._tables:
            whole = pa.concat_tables(self._tables).combine_chunks()
            self._writer.write_table(whole, row_group_size=max(whole.num_rows, 1))
        self._tables, self._rows, self._bytes = [], 0, 0
