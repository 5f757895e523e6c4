"""Temporary files without a name: for messages, and for their places if they are many."""

from __future__ import annotations

import io
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.files import storage_error

if TYPE_CHECKING:
    from penstock.bags.reader import Message, Selection

# A message: its connection, its time, and its offset in a chunk, number in a table, or length.
ROW: Final = np.dtype([("key", "<u4"), ("t_ns", "<i8"), ("place", "<i8")])
_PACK_ROW: Final = Struct("<Iqq").pack
_BLOCK_ROWS: Final = 1 << 13
_BLOCK_BYTES: Final = 1 << 20
_ROWS_BYTES: Final = 2 << 20  # of rows in memory: more would grow with the recording

Rows = NDArray[Any]  # of ROW


@contextmanager
def _storage(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = folder or Path(tempfile.gettempdir())
        raise storage_error("use a temporary file in", where, error) from error


class RowStore:
    """The places of messages in file order: in memory, beyond a limit in a temporary file."""

    def __init__(self, folder: Path | None) -> None:
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed with the bag
            _ROWS_BYTES, dir=None if folder is None else str(folder)
        )
        self._folder = folder
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._flushed = 0

    def __len__(self) -> int:
        return self._flushed + len(self._pending) // ROW.itemsize

    def append(self, key: int, t_ns: int, place: int) -> None:
        """Add a row at the end."""
        self._pending += _PACK_ROW(key, t_ns, place)
        if len(self._pending) >= _BLOCK_BYTES:
            self._flush()

    def cut(self, count: int) -> None:
        """Forget all rows but the first ones."""
        self._flush()
        self._flushed = min(self._flushed, count)

    def write(self, first: int, rows: Rows) -> None:
        """Put rows at their number, wherever the end is."""
        self._flush()
        with self._lock, _storage(self._folder):
            self._file.seek(first * ROW.itemsize)
            self._file.write(rows.tobytes())
            self._flushed = max(self._flushed, first + len(rows))

    def blocks(self, first: int = 0, stop: int | None = None) -> Iterator[Rows]:
        """Yield the rows of a span, some at a time."""
        self._flush()
        stop = len(self) if stop is None else stop
        for start in range(first, stop, _BLOCK_ROWS):
            with self._lock, _storage(self._folder):
                self._file.seek(start * ROW.itemsize)
                data = self._file.read(min(_BLOCK_ROWS, stop - start) * ROW.itemsize)
            yield np.frombuffer(data, ROW)

    def _flush(self) -> None:
        if self._pending:
            rows, self._pending = np.frombuffer(self._pending, ROW), bytearray()
            self.write(self._flushed, rows)

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    __del__ = close


class Spool:
    """The messages of some topics in a temporary file, in the order in which they came."""

    def __init__(self, topics: Collection[str], folder: Path | None) -> None:
        self.topics = frozenset(topics)
        self._keys = {topic: [number] for number, topic in enumerate(topics)}
        self._names = list(topics)
        self._folder, self._lock = folder, threading.Lock()
        self._rows = RowStore(folder)  # their lengths: they lie behind each other
        self._file: Any = io.BytesIO()  # there even if the next line fails
        with _storage(folder):
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed with the bag
                dir=folder, buffering=1 << 16
            )

    def put(self, message: Message) -> bool:
        """Add a message; False if the disk has no room, so that the spool is of no use."""
        try:
            self._rows.append(self._keys[message.topic][0], message.t_ns, len(message.data))
            self._file.write(message.data)
            return True
        except OSError:
            return self._give_up()

    def flush(self) -> bool:
        """Write what waits; False if the disk has no room."""
        try:
            self._file.flush()
            return True
        except OSError:
            return self._give_up()

    def read(self, selection: Selection) -> Iterator[Message]:
        """Yield the wanted messages."""
        from penstock.bags.reader import Message

        end = 0
        for table in self._rows.blocks():
            places, ordinals = selection.pick(table["key"], self._keys)
            ends = end + np.cumsum(table["place"])
            end = int(ends[-1])
            wanted = zip(table[places].tolist(), ends[places].tolist(), ordinals, strict=True)
            for (key, t_ns, length), stop, ordinal in wanted:
                with self._lock, _storage(self._folder):
                    self._file.seek(stop - length)
                    data: bytes = self._file.read(length)
                yield Message(self._names[key], int(ordinal), t_ns, data)

    def _give_up(self) -> bool:
        with suppress(OSError):
            self.close()
        return False

    def close(self) -> None:
        """Let the files go."""
        self._rows.close()
        self._file.close()

    __del__ = close
