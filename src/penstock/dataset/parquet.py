"""Parquet files with checksums, that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.files import NewFile, write_all
from penstock.errors import CorruptFile, DataError, StorageError

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


def read_rows(
    path: Path, start: int, stop: int, columns: Sequence[str] | None = None, *, most: int = 4096
) -> Iterator[pa.Table]:
    """Read rows start to stop, in tables of at most so many rows.

    Raises:
        CorruptFile: The file is missing, damaged, or ends before.
    """
    with open_parquet(path) as file:
        sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
        starts = np.cumsum([0, *sizes])
        if stop > starts[-1]:
            raise CorruptFile(f"{path} is damaged: it has {starts[-1]} rows, {stop} are needed")
        first = int(np.searchsorted(starts, start, "right")) - 1
        last = int(np.searchsorted(starts, stop, "left"))
        position = int(starts[first])
        groups = list(range(first, last))
        names = None if columns is None else list(columns)
        for batch in file.iter_batches(most, row_groups=groups, columns=names, use_threads=False):
            low, high = max(start - position, 0), min(stop - position, batch.num_rows)
            position += batch.num_rows
            if low < high:
                yield pa.Table.from_batches([batch.slice(low, high - low)])


class RowStream:
    """Tables one behind the other, handed out in pieces of any size."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def take(self, rows: int) -> pa.Table:
        """Return exactly so many rows as one piece.

        Raises:
            CorruptFile: There are not so many left.
        """
        while self._rows < rows:
            table = next(self._tables, None)
            if table is None:
                raise CorruptFile(f"{rows} rows were expected, and {self._rows} are left")
            self._waiting.append(table)
            self._rows += table.num_rows
        whole = pa.concat_tables(self._waiting)
        self._waiting = [whole.slice(rows)] if self._rows > rows else []
        self._rows -= rows
        return whole.slice(0, rows).combine_chunks()
