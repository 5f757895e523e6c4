"""The containers of synthetic recordings, by the writers of rosbags and mcap."""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

from penstock.core.files import storage_error
from penstock.errors import MissingExtra, UsageError

_MCAP_CHUNK_BYTES: Final = 10**6


class SampleWriter(ABC):
    """Takes serialised messages; `close` completes the recording.

    Attributes:
        size_bytes: About what was written so far.
    """

    size_bytes: int = 0

    @abstractmethod
    def add(self, topic: str, type_name: str) -> int:
        """Add a topic; returns its handle."""

    @abstractmethod
    def write(self, handle: int, t_ns: int, data: bytes | memoryview) -> None:
        """Write a message."""

    @abstractmethod
    def close(self) -> None:
        """Complete the recording."""


def new_writer(path: Path, kind: str, compression: str, store: Any) -> SampleWriter:
    """Make a writer for a kind of container; refuse a path that is taken."""
    if path.exists():
        raise UsageError(f"{path} exists already; remove it or choose another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "bag" and compression in ("none", "lz4", "bz2"):
            return _Ros1(path, compression, store)
        bare = path.suffix in (".db3", ".mcap")
        if kind == "mcap" and bare and compression in ("none", "lz4", "zstd"):
            return _McapFile(path, compression, store)
        if kind == "db3" and compression in ("none", "zstd", "zstd_file"):
            return _Ros2(path, bare, "sqlite3", compression, store)
        if kind == "mcap" and compression in ("none", "zstd"):
            return _Ros2(path, bare, "mcap", compression, store)
    except OSError as error:
        raise storage_error("write", path, error) from error
    raise UsageError(f"cannot write {path}: no {kind!r} recording with {compression!r} compression")


class _Ros1(SampleWriter):
    def __init__(self, path: Path, compression: str, store: Any) -> None:
        from rosbags.rosbag1 import Writer

        self._store = store
        self._writer = Writer(path)
        self._path = path
        self._compressed = compression != "none"
        if self._compressed:
            self._writer.set_compression(Writer.CompressionFormat[compression.upper()])
        self._writer.open()
        self._chunks = 1

    def add(self, topic: str, type_name: str) -> int:
        self._writer.add_connection(topic, type_name, typestore=self._store)
        return len(self._writer.connections) - 1

    def write(self, handle: int, t_ns: int, data: bytes | memoryview) -> None:
        writer = self._writer
        writer.write(writer.connections[handle], t_ns, data)
        if not self._compressed:
            self.size_bytes += len(data) + 48
        if len(writer.chunks) != self._chunks:
            # rosbags keeps the time and offset of every message until the end, but needs only
            # their number once a chunk is written: without this, memory would grow.
            done = writer.chunks[-2]
            for key, entries in done.connections.items():
                done.connections[key] = range(len(entries))  # type: ignore[assignment]
            self._chunks = len(writer.chunks)
            if self._compressed:
                self.size_bytes = self._path.stat().st_size

    def close(self) -> None:
        self._writer.close()


class _Ros2(SampleWriter):
    def __init__(self, path: Path, bare: bool, storage: str, compression: str, store: Any) -> None:
        from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer

        self._store, self._path, self._bare = store, path, bare
        folder = Path(tempfile.mkdtemp(dir=path.parent)) / path.stem if bare else path
        self._writer = Writer(folder, version=9, storage_plugin=StoragePlugin[storage.upper()])
        modes = {
            ("sqlite3", "zstd"): CompressionMode.MESSAGE,
            ("sqlite3", "zstd_file"): CompressionMode.FILE,
            ("mcap", "zstd"): CompressionMode.STORAGE,
        }
        mode = modes.get((storage, compression), CompressionMode.NONE)
        self._writer.set_compression(mode, CompressionFormat.ZSTD)
        self._writer.open()

    def add(self, topic: str, type_name: str) -> int:
        self._writer.add_connection(topic, type_name, typestore=self._store)
        return len(self._writer.connections) - 1

    def write(self, handle: int, t_ns: int, data: bytes | memoryview) -> None:
        self._writer.write(self._writer.connections[handle], t_ns, data)
        self.size_bytes += len(data) + 32

    def close(self) -> None:
        storage = self._writer.storage
        self._writer.close()
        if self._bare and storage is not None:
            made = Path(storage.path)
            made = made if made.exists() else made.with_suffix(made.suffix + ".zstd")
            made.rename(self._path)
            shutil.rmtree(made.parent.parent)


class _McapFile(SampleWriter):
    def __init__(self, path: Path, compression: str, store: Any) -> None:
        try:
            from mcap.writer import CompressionType, Writer
        except ImportError as error:
            raise MissingExtra("mcap", "foxglove") from error

        kinds = {
            "none": CompressionType.NONE,
            "lz4": CompressionType.LZ4,
            "zstd": CompressionType.ZSTD,
        }
        self._store = store
        self._file = path.open("xb")
        self._writer = Writer(
            self._file, chunk_size=_MCAP_CHUNK_BYTES, compression=kinds[compression]
        )
        self._writer.start(profile="ros2", library="penstock")
        self._schemas: dict[str, int] = {}

    def add(self, topic: str, type_name: str) -> int:
        if type_name not in self._schemas:
            text, _ = self._store.generate_msgdef(type_name, ros_version=2)
            self._schemas[type_name] = self._writer.register_schema(
                name=type_name, encoding="ros2msg", data=text.encode()
            )
        return self._writer.register_channel(
            topic=topic, message_encoding="cdr", schema_id=self._schemas[type_name]
        )

    def write(self, handle: int, t_ns: int, data: bytes | memoryview) -> None:
        self._writer.add_message(
            channel_id=handle, log_time=t_ns, data=bytes(data), publish_time=t_ns
        )
        self.size_bytes = self._file.tell()

    def close(self) -> None:
        self._writer.finish()  # type: ignore[no-untyped-call]
        self._file.close()
