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
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from typing_extensions import Self

from penstock.core.files import storage_error
from penstock.core.threads import POLL_S, start
from penstock.errors import UsageError


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
        if limit_bytes <= 0:
            raise UsageError(f"{name}: a limit of {limit_bytes} bytes holds nothing: give more")
        self.name = name
        self.limit_bytes = limit_bytes
        self.used_bytes = self.peak_bytes = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # see core/threads.py
        self._room = threading.Lock()  # opened when there may be room
        self._items: dict[str, deque[tuple[Any, int]]] = {}
        self._threads: list[threading.Thread] = []
        self._ending = self._stopped = False
        self._error: BaseException | None = None

    def open(self, lane: str, work: Callable[[Any], None]) -> None:
        """Start a lane: a thread that calls `work` for every item put into it."""
        if lane in self._items:
            raise UsageError(f"{self.name} has a lane {lane!r} already: choose another name")
        self._items[lane] = deque()
        thread = threading.Thread(
            target=self._run, args=(lane, work), name=f"{self.name}-{lane}", daemon=False
        )
        self._threads.append(thread)
        start(thread)

    def put(self, lane: str, item: Any, size_bytes: int) -> None:
        """Hand an item over; waits while the lanes hold too much.

        Raises:
            BaseException: What a lane failed with; nothing is worked on after that.
        """
        size_bytes = max(size_bytes, 1)
        while not self._stopped:
            with self._lock:
                if not self.used_bytes or self.used_bytes + size_bytes <= self.limit_bytes:
                    self.used_bytes += size_bytes
                    self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                    self._items[lane].append((item, size_bytes))
                    self._changed.notify_all()
                    return
            self._room.acquire(timeout=POLL_S)  # in C: an interrupt leaves nothing half done
        self._raise()

    def resize(self, limit_bytes: int) -> None:
        """Change the limit; what is held already stays held."""
        with self._lock:
            self.limit_bytes = limit_bytes
            self._wake_reader()

    def close(self) -> None:
        """Wait until every item has been worked on, and end the threads."""
        with self._lock:
            self._ending = True
            self._changed.notify_all()
        try:
            for thread in self._threads:
                thread.join()
        except BaseException:  # an interrupt: whoever cleans up now must find no thread at work
            self.cancel()
            raise
        self._raise()

    def cancel(self) -> None:
        """End the threads; what waits is not worked on."""
        self._stop(None)
        for thread in self._threads:
            if thread.ident is not None:  # an interrupt may come before its start
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, trace: object) -> None:
        if exc is None:
            self.close()
        else:
            self.cancel()

    def _run(self, lane: str, work: Callable[[Any], None]) -> None:
        try:
            while self._work_on_one(lane, work):
                pass
        except BaseException as error:
            self._stop(error)

    def _work_on_one(self, lane: str, work: Callable[[Any], None]) -> bool:
        """Work on the next item; one call each, so that no item stays alive in a waiting thread."""
        items = self._items[lane]
        with self._lock:
            while not items and not self._ending and not self._stopped:
                self._changed.wait(POLL_S)
            if self._stopped or not items:
                return False
            item, size_bytes = items.popleft()
        try:
            work(item)
        finally:
            with self._lock:
                self.used_bytes -= size_bytes
                self._wake_reader()
        return True

    def _wake_reader(self) -> None:
        if self._room.locked():
            self._room.release()

    def _stop(self, error: BaseException | None) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            self._stopped = True
            self._changed.notify_all()
            self._wake_reader()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
        if self._stopped:
            raise UsageError(f"{self.name} was stopped: make new lanes")


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
