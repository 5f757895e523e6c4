"""Parquet files: read a few rows at a time with page checksums verified, written whole or not.

Whatever pyarrow raises in reading leaves here as a DataError that names the file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from penstock.core.files import NewFile
from penstock.dataset.layout import Feature
from penstock.errors import CorruptFile, DataError, LimitExceeded

MAX_TABLE_BYTES = 1 << 30  # of the columns of a table that is read whole
_MAX_BATCH_BYTES = 8 << 20
_MAX_BATCH_ROWS = 4096
_TEXT_BYTES = 4096  # taken for the size of a text: the file does not say it
_PICTURE_BYTES = 512 << 10  # the same for a picture in a parquet file
_PICTURES_PER_BATCH = 16
_BUFFER_BYTES = 1 << 20

Columns = dict[str, np.ndarray[Any, Any]]


@contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Turn what pyarrow and the operating system raise into a DataError that names the file."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError) as error:
        what = "is missing from" if isinstance(error, FileNotFoundError) else "is a folder in"
        raise CorruptFile(f"{name} {what} {path}; copy the dataset again") from error
    except (pa.ArrowException, OSError, MemoryError, ValueError, KeyError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CorruptFile(f"{name} in {path} cannot be read: {reason}") from error


def inside(root: Path, name: str) -> Path:
    """Return the file of that name; refuse one that a link leads out of the folder, or a device.

    To open a FIFO is to wait for ever.
    """
    path = root / name
    try:
        if "/" not in name and path.is_file() and not path.is_symlink():
            return path  # most of a hundred thousand units
        if not path.resolve().is_relative_to(root.resolve()):
            raise DataError(f"{name} leads out of {root} by a link; put the file itself there")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(f"{name} in {root} is no file; put the file itself there")
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null byte
        raise DataError(f"{name!r} in {root} is no usable name") from error
    return path


class Table:
    """One parquet file, of which rows are read as they are asked for.

    Args:
        root: The dataset's folder.
        name: The file's path in it.
        file: The same file, where it is open already; it is closed with the table.

    Raises:
        DataError: The file is missing, or not a whole parquet file.
    """

    def __init__(self, root: Path, name: str, file: BinaryIO | None = None) -> None:
        self.root = root
        self.name = name
        path = inside(root, name)
        self._opened = file
        with reading(root, name):
            self._file = pq.ParquetFile(
                path if file is None else file,
                page_checksum_verification=True,
                pre_buffer=False,  # of a whole row group
                buffer_size=_BUFFER_BYTES,
            )
            self.schema: pa.Schema = self._file.schema_arrow
            groups = (self._file.metadata.row_group(i) for i in range(self._file.num_row_groups))
            self._starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self.rows = int(self._starts[-1])

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()
        if self._opened is not None:
            self._opened.close()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def whole(self, columns: Sequence[str]) -> pa.Table:
        """Read columns of all rows; only for metadata, which is small."""
        pieces, size = [], 0
        # What the file says of its sizes is not asked for: pyarrow 26 aborts the whole process
        # when the metadata of a column are damaged.
        for piece in self.pieces(columns):
            pieces.append(piece)
            size += piece.nbytes
            if size > MAX_TABLE_BYTES:
                raise LimitExceeded(
                    f"{self.name} in {self.root} takes over {MAX_TABLE_BYTES} bytes"
                )
        kinds = [self.schema.field(name) for name in columns]
        return pa.Table.from_batches(pieces, pieces[0].schema if pieces else pa.schema(kinds))

    def batches(
        self, features: Mapping[str, Feature], start: int = 0, stop: int | None = None
    ) -> Iterator[Columns]:
        """Read rows start to stop in pieces that take little memory.

        Args:
            features: The columns to read, each with its type and shape.
            start: The first row.
            stop: One past the last row; by default all.

        Yields:
            Per column an array of (rows, *shape); (rows,) where the shape is (1,). Pictures and
            texts are arrays of bytes and str objects.
        """
        for piece in self.pieces(list(features), start, stop, _batch_rows(features)):
            found: Columns = {}
            for name, feature in features.items():
                try:
                    found[name] = to_numpy(piece.column(name), feature)
                except DataError as error:
                    where = f"{self.name} in {self.root}, column {name!r}"
                    raise type(error)(f"{where}: {error}") from error
            yield found

    def pieces(
        self, columns: Sequence[str] | None, start: int = 0, stop: int | None = None, most: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """Read columns (None for all) of rows start to stop, at most so many rows at a time."""
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise CorruptFile(
                f"{self.name} in {self.root} has {self.rows} rows; {start} to {stop} are needed"
            )
        for name in columns or ():
            if self.schema.get_field_index(name) < 0:
                raise DataError(f"{self.name} in {self.root} has no column {name!r}, or two of it")
        if start == stop or columns == []:
            return
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        last = int(np.searchsorted(self._starts, stop, "left"))
        position = int(self._starts[first])
        with reading(self.root, self.name):
            for piece in self._file.iter_batches(
                most or _MAX_BATCH_ROWS,
                row_groups=list(range(first, last)),
                columns=None if columns is None else list(columns),
                use_threads=False,
            ):
                low, high = max(start - position, 0), min(stop - position, piece.num_rows)
                position += piece.num_rows
                if low < high:
                    yield piece.slice(low, high - low)
        if position < stop:
            raise CorruptFile(
                f"{self.name} in {self.root} ends after {position} rows; {stop} are needed"
            )


def read_rows(
    path: Path, start: int, stop: int, columns: Sequence[str] | None = None, *, most: int = 0
) -> Iterator[pa.Table]:
    """Read rows start to stop of a file, in tables of at most so many rows."""
    with Table(path.parent, path.name) as table:
        for piece in table.pieces(columns, start, stop, most):
            yield pa.Table.from_batches([piece])


class RowStream:
    """Tables one behind the other, handed out in pieces of any size."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def take(self, rows: int) -> pa.Table:
        """Return exactly so many rows as one piece."""
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


@contextmanager
def new_parquet(
    path: Path, schema: pa.Schema, *, compression: str = "snappy", dictionary: bool = True
) -> Iterator[pq.ParquetWriter]:
    """Write a parquet file, published durably at the end of the block."""
    # A page is measured once per batch, and a reader needs room for two: 1024 pictures are 100 MB.
    pictures = any(pa.types.is_struct(kind) for kind in schema.types)
    with NewFile(path) as new:
        try:
            with (
                pa.OSFile(str(new.temporary), "wb") as file,
                pq.ParquetWriter(
                    file,
                    schema,
                    compression=compression,
                    use_dictionary=dictionary,
                    write_page_checksum=True,
                    write_batch_size=_PICTURES_PER_BATCH if pictures else None,
                ) as writer,
            ):
                yield writer
        except pa.ArrowException as error:
            if isinstance(error, OSError):
                raise
            raise DataError(f"cannot write {path}: {error}") from error


def give_back_unused() -> None:
    """Give memory back to the system that was freed and is kept: it grows with the recording.

    Arrow keeps some of its own, and so does glibc: tables of muxers that grow side by side leave
    holes of every size behind them.
    """
    pa.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).malloc_trim(0)


def write_table(path: Path, table: pa.Table) -> None:
    """Publish a small table as one row group."""
    with new_parquet(path, table.schema) as writer:
        writer.write_table(table)


def _batch_rows(features: Mapping[str, Feature]) -> int:
    row_bytes = 0
    for feature in features.values():
        sizes = {"image": _PICTURE_BYTES, "string": _TEXT_BYTES * feature.size}
        row_bytes += sizes.get(feature.dtype) or np.dtype(feature.dtype).itemsize * feature.size
    if row_bytes > MAX_TABLE_BYTES:
        raise LimitExceeded(f"one row takes {row_bytes} bytes; {MAX_TABLE_BYTES} are allowed")
    return max(1, min(_MAX_BATCH_ROWS, _MAX_BATCH_BYTES // max(1, row_bytes)))


def to_numpy(array: pa.Array, feature: Feature) -> np.ndarray[Any, Any]:
    """Return a column's rows as one array of (rows, *shape); (rows,) where the shape is (1,)."""
    rows = len(array)
    if isinstance(array.type, pa.ExtensionType):
        array = array.storage
    if feature.dtype == "image":
        return _pictures(array)
    shape: tuple[int, ...] = feature.shape
    if shape == (1,) and not is_list(array.type):
        shape = ()
    for size in shape:
        array = _unnest(array, size)
    if array.null_count:
        raise CorruptFile(f"{array.null_count} values are missing")
    if feature.dtype == "string":
        if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
            raise DataError(f"{array.type} is stored where the dataset promises text")
        found: np.ndarray[Any, Any] = np.array(array.to_pylist(), dtype=object)
    else:
        found = array.to_numpy(zero_copy_only=False)
        wanted = np.dtype(feature.dtype)
        if found.dtype.kind != wanted.kind:
            raise DataError(f"{array.type} is stored where the dataset promises {wanted}")
        found = found.astype(wanted, copy=False)
    return found.reshape(rows, *(() if shape == (1,) else shape))


def to_column(values: NDArray[Any], shape: tuple[int, ...], kind: pa.DataType) -> pa.Array:
    """Return (episodes, elements) as a column of nested lists of that shape and type."""
    if not shape:
        return pa.array(np.ascontiguousarray(values).reshape(-1), kind)
    inner = to_column(values, shape[1:], kind.value_type)
    offsets = pa.array(np.arange(0, len(inner) + 1, shape[0], dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, inner, type=kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is a list of any flavour."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _unnest(array: pa.Array, size: int) -> pa.Array:
    if not is_list(array.type):
        raise DataError(f"{array.type} is stored where the dataset promises lists of {size}")
    if array.null_count:
        raise CorruptFile(f"{array.null_count} values are missing")
    if pa.types.is_fixed_size_list(array.type):  # `flatten` would load pyarrow.compute
        good, first = array.type.list_size == size, array.offset * size
    else:
        offsets = array.offsets.to_numpy()
        good, first = bool(np.all(np.diff(offsets) == size)), int(offsets[0])
    if not good:
        raise DataError(f"its rows do not have {size} elements each, as the dataset promises")
    return array.values.slice(first, len(array) * size)


def _pictures(array: pa.Array) -> np.ndarray[Any, Any]:
    if not (pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0):
        raise DataError(f"{array.type} is stored where the dataset promises pictures")
    data = array.field("bytes")
    if array.null_count or data.null_count:
        raise DataError("a picture is not in the file itself; embed it")
    found = np.empty(len(array), dtype=object)
    found[:] = data.to_pylist()
    return found
