"""Rows of parquet files as arrays, a few at a time, with page checksums verified.

Whatever pyarrow raises leaves here as a DataError that names the file.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.dataset.layout import Feature
from penstock.errors import CorruptFile, DataError, LimitExceeded

MAX_TABLE_BYTES = 1 << 30  # of the columns of a table that is read whole
_MAX_BATCH_BYTES = 8 << 20
_MAX_BATCH_ROWS = 4096
_TEXT_BYTES = 4096  # taken for the size of a text: the file does not say it
_PICTURE_BYTES = 512 << 10  # the same for a picture in a parquet file
_BUFFER_BYTES = 1 << 20

Columns = dict[str, np.ndarray[Any, Any]]


@contextlib.contextmanager
def reading(path: Path, name: str) -> Iterator[None]:
    """Turn what pyarrow and the operating system raise into a DataError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{name} is missing from {path}; copy the dataset again") from error
    except IsADirectoryError as error:
        raise DataError(f"{name} in {path} is a folder; copy the dataset again") from error
    except (pa.ArrowException, OSError, MemoryError, ValueError, KeyError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CorruptFile(f"{name} in {path} cannot be read: {reason}") from error


def inside(root: Path, name: str) -> Path:
    """Return the file of that name; refuse one that a link leads out of the folder, or a device.

    To open a FIFO is to wait for ever.
    """
    path = root / name
    try:
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

    Raises:
        DataError: The file is missing, or not a whole parquet file.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        path = inside(root, name)
        with reading(root, name):
            self._file = pq.ParquetFile(
                path,
                page_checksum_verification=True,
                pre_buffer=False,
                buffer_size=_BUFFER_BYTES,
            )
            self.schema: pa.Schema = self._file.schema_arrow
            groups = (self._file.metadata.row_group(i) for i in range(self._file.num_row_groups))
            sizes = [group.num_rows for group in groups]
        self.rows: int = sum(sizes)
        self._starts = np.cumsum([0, *sizes])

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def whole(self, columns: Sequence[str]) -> pa.Table:
        """Read columns of all rows; only for metadata, which is small."""
        self._need(columns)
        pieces, size = [], 0
        # What the file says of its sizes is not asked for: pyarrow 26 aborts the whole process
        # when the metadata of a column are damaged.
        with reading(self.root, self.name):
            for piece in self._file.iter_batches(columns=list(columns), use_threads=False):
                pieces.append(piece)
                size += piece.nbytes
                if size > MAX_TABLE_BYTES:
                    raise LimitExceeded(
                        f"{self.name} in {self.root} takes over {MAX_TABLE_BYTES} bytes"
                    )
            kinds = [self.schema.field(name) for name in columns]
            return pa.Table.from_batches(pieces, pieces[0].schema if pieces else pa.schema(kinds))

    def batches(
        self,
        features: Mapping[str, Feature],
        start: int = 0,
        stop: int | None = None,
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
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise CorruptFile(
                f"{self.name} in {self.root} has {self.rows} rows; {start} to {stop} are needed"
            )
        self._need(list(features))
        if start == stop or not features:
            return
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        last = int(np.searchsorted(self._starts, stop, "left"))
        position = int(self._starts[first])
        with reading(self.root, self.name):
            pieces = self._file.iter_batches(
                batch_size=_batch_rows(features),
                row_groups=list(range(first, last)),
                columns=list(features),
                use_threads=False,
            )
            for piece in pieces:
                low, high = max(start - position, 0), min(stop - position, piece.num_rows)
                position += piece.num_rows
                if low < high:
                    part = piece.slice(low, high - low)
                    yield {
                        name: self._array(part.column(name), name, feature)
                        for name, feature in features.items()
                    }
        if position < stop:
            raise CorruptFile(
                f"{self.name} in {self.root} ends after {position} rows; {stop} are needed"
            )

    def rows_of(
        self, columns: Sequence[str], prefixes: tuple[str, ...], rows: int
    ) -> Iterator[dict[str, Any]]:
        """Read named columns, and those whose name begins so, as plain values row by row."""
        self._need(columns)
        chosen = [*columns, *(name for name in self.schema.names if name.startswith(prefixes))]
        with reading(self.root, self.name):
            for piece in self._file.iter_batches(rows, columns=chosen, use_threads=False):
                yield from piece.to_pylist()

    def _need(self, columns: Sequence[str]) -> None:
        for name in columns:
            if self.schema.get_field_index(name) < 0:
                raise DataError(f"{self.name} in {self.root} has no column {name!r}, or two of it")

    def _array(self, array: pa.Array, name: str, feature: Feature) -> np.ndarray[Any, Any]:
        try:
            return to_numpy(array, feature)
        except DataError as error:
            raise type(error)(f"{self.name} in {self.root}, column {name!r}: {error}") from error


def _batch_rows(features: Mapping[str, Feature]) -> int:
    row_bytes = 0
    for feature in features.values():
        if feature.dtype == "image":
            row_bytes += _PICTURE_BYTES
        elif feature.dtype == "string":
            row_bytes += _TEXT_BYTES * math.prod(feature.shape)
        else:
            row_bytes += np.dtype(feature.dtype).itemsize * math.prod(feature.shape)
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
    if shape == (1,) and not _is_list(array.type):
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
        if found.dtype != wanted:
            if found.dtype.kind != wanted.kind:
                raise DataError(f"{array.type} is stored where the dataset promises {wanted}")
            found = found.astype(wanted)
    return found.reshape(rows, *(() if shape == (1,) else shape))


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _unnest(array: pa.Array, size: int) -> pa.Array:
    if not _is_list(array.type):
        raise DataError(f"{array.type} is stored where the dataset promises lists of {size}")
    if array.null_count:
        raise CorruptFile(f"{array.null_count} values are missing")
    if pa.types.is_fixed_size_list(array.type):
        good = array.type.list_size == size
    else:
        good = bool(np.all(np.diff(array.offsets.to_numpy()) == size))
    flat = array.flatten()
    if not good or len(flat) != len(array) * size:
        raise DataError(f"its rows do not have {size} elements each, as the dataset promises")
    return flat


def _pictures(array: pa.Array) -> np.ndarray[Any, Any]:
    if not (pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0):
        raise DataError(f"{array.type} is stored where the dataset promises pictures")
    data = array.field("bytes")
    if array.null_count or data.null_count:
        raise DataError("a picture is not in the file itself; embed it")
    found = np.empty(len(array), dtype=object)
    found[:] = data.to_pylist()
    return found
