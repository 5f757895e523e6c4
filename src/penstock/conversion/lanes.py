"""Work that one reader hands out to several threads, each with its own kind of item.

    with Lanes("encode", limit_bytes=parse_bytes("64MB")) as lanes:
        for camera in cameras:
            lanes.open(camera.name, camera.encode)
        for message in bag.read():
            lanes.put(message.topic, message, len(message.data))
    # here every item has been worked on

All lanes together hold at most `limit_bytes`; whoever puts more waits. The items of a lane are
worked on in order, by one thread. What no lane has room for waits in a `Spool`, on the disk.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from typing_extensions import Self

from penstock.core.files import storage_error


class Lanes:
    """Threads that share one limit in bytes; the first error of any of them reaches the caller.

    Args:
        name: Names the threads.
        limit_bytes: What may wait or be worked on in all lanes together. An item that is larger
            passes alone.

    Attributes:
        used_bytes: What waits or is worked on now.
        peak_bytes: The most there ever was.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.name, self.limit_bytes = name, limit_bytes
        self.used_bytes = self.peak_bytes = 0
        self._room = threading.Condition()
        self._lanes: dict[str, tuple[threading.Thread, SimpleQueue[tuple[Any, int] | None]]] = {}
        self._stopped = False
        self._error: BaseException | None = None

    def open(self, lane: str, work: Callable[[Any], None]) -> None:
        """Start a lane: a thread that calls `work` for every item put into it."""
        items: SimpleQueue[tuple[Any, int] | None] = SimpleQueue()
        thread = threading.Thread(
            target=self._run, args=(items, work), name=f"{self.name}-{lane}", daemon=False
        )
        thread.start()
        self._lanes[lane] = thread, items

    def put(self, lane: str, item: Any, size_bytes: int) -> None:
        """Hand an item over; waits while the lanes hold too much.

        Raises:
            BaseException: What a lane failed with; nothing is worked on after that.
        """
        with self._room:
            while self.used_bytes and self.used_bytes + size_bytes > self.limit_bytes:
                self._room.wait()
            self.used_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._lanes[lane][1].put((item, size_bytes))
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        """Wait until every item has been worked on; after an error, what waits is left undone."""
        self._stopped = self._stopped or exc is not None
        for thread, items in self._lanes.values():
            items.put(None)
            thread.join()
        if self._error is not None and exc is None:
            raise self._error

    def _run(self, items: SimpleQueue[tuple[Any, int] | None], work: Callable[[Any], None]) -> None:
        while self._work_on_one(items.get(), work):
            pass

    def _work_on_one(self, entry: tuple[Any, int] | None, work: Callable[[Any], None]) -> bool:
        """Work on an item; one call each, so that none stays alive in a waiting thread."""
        if entry is None:
            return False
        item, size_bytes = entry
        try:
            if not self._stopped:
                work(item)
        except BaseException as error:
            self._error = self._error or error
            self._stopped = True
        finally:
            with self._room:
                self.used_bytes -= size_bytes
                self._room.notify()
        return True


class Spool:
    """Pictures that wait on the disk, in order, each with the frames that show it."""

    _HEAD = struct.Struct("<QQQ")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "xb")  # noqa: SIM115 - closed by `take`, or with the process

    def put(self, shown: tuple[bytes | memoryview, int, int]) -> None:
        """Add a picture."""
        data, first, after = shown
        try:
            self._file.write(self._HEAD.pack(len(data), first, after))
            self._file.write(data)
        except OSError as error:
            raise storage_error("write", self._path, error) from error

    def take(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield all of them, and remove the file."""
        try:
            self._file.close()
            with open(self._path, "rb") as file:
                while head := file.read(self._HEAD.size):
                    size, first, after = self._HEAD.unpack(head)
                    yield file.read(size), first, after
            self._path.unlink()
        except OSError as error:
            raise storage_error("read", self._path, error) from error
