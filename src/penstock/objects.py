"""Files in object storage (S3, Google Cloud Storage): listed, read by ranges, written whole.

Credentials come from the usual environment only, as the vendors' own tools take them. An object
appears when its upload is complete, and never in parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from penstock.core.files import storage_error
from penstock.errors import StorageError, UsageError

T = TypeVar("T")
SCHEMES: Final = ("s3", "gs")
_CONNECT_S, _REQUEST_S = 10.0, 60.0
_SDK_ATTEMPTS: Final = 5  # of the SDK, for one request
# Ours: answers break off, and the SDK stops repeating where too many requests fail.
_ATTEMPTS: Final = 6
_PAUSE_S: Final = 0.5
_CHUNK_BYTES: Final = 8 << 20


def is_object(path: object) -> bool:
    """Whether a path names something in object storage."""
    return str(path).startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def as_object(path: object) -> ObjectPath | None:
    """Return a path of object storage, which goes by the type of a path of this machine."""
    return path if isinstance(path, ObjectPath) else None


def _file_system(scheme: str, bucket: str) -> Any:
    """Return the connection to a bucket, as the environment says now."""
    environment = os.environ
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return _connect(scheme, bucket, endpoint, region)


@lru_cache(maxsize=16)
def _connect(scheme: str, bucket: str, endpoint: str | None, region: str | None) -> Any:
    """Connect once for each bucket and process."""
    from pyarrow import fs

    if scheme == "gs":
        return fs.GcsFileSystem()
    if region is None and endpoint is None:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        region=region,
        endpoint_override=endpoint,
        connect_timeout=_CONNECT_S,
        request_timeout=_REQUEST_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_SDK_ATTEMPTS),
        allow_delayed_open=True,  # a small object is one request, not three
    )


class ObjectPath:
    """A file or folder in object storage, with what readers need of pathlib's interface.

    What a listing told is kept: nothing is asked for twice, and no object one by one.
    """

    def __init__(self, url: str, info: Any = None) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc or ":" in parts.netloc:
            raise UsageError(
                "a URL of object storage names a bucket, nothing else: credentials and the "
                "endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …)"
            )
        if parts.scheme not in SCHEMES or not parts.netloc:
            raise UsageError(f"{url} names no bucket: write s3://bucket/folder")
        self._scheme, self._bucket = parts.scheme, parts.netloc
        self._key = url.partition("://")[2].rstrip("/")  # with the bucket; # and ? are letters
        self._info = info

    def __str__(self) -> str:
        return f"{self._scheme}://{self._key}"

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __lt__(self, other: ObjectPath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self}/{name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectPath, (str(self),)  # to another process: it asks itself

    @property
    def name(self) -> str:
        """The last part."""
        return self._key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return os.path.splitext(self.name)[1]

    @property
    def stem(self) -> str:
        """The name without its ending."""
        return os.path.splitext(self.name)[0]

    @property
    def parts(self) -> tuple[str, ...]:
        """The bucket, the folders and the name."""
        return tuple(self._key.split("/"))

    @property
    def parent(self) -> ObjectPath:
        """The folder that it is in."""
        return self.parents[0]

    @property
    def parents(self) -> list[ObjectPath]:
        """The folders above it."""
        ends = range(len(self.parts) - 1, 0, -1)
        return [ObjectPath(f"{self._scheme}://{'/'.join(self.parts[:end])}") for end in ends]

    def absolute(self) -> ObjectPath:
        """Return it as it is: it depends on no current folder, and there are no links."""
        return self

    resolve = absolute

    def is_file(self) -> bool:
        """Whether it is an object."""
        return bool(self.info.is_file)

    def is_dir(self) -> bool:
        """Whether objects lie below it."""
        from pyarrow import fs

        return bool(self.info.type == fs.FileType.Directory)

    def stat(self) -> SimpleNamespace:
        """Return its size."""
        return SimpleNamespace(st_size=self.info.size)

    @property
    def version(self) -> str:
        """What tells it from an object that takes its place: size and time of the upload."""
        return f"{self.name} {self.info.size} {self.info.mtime_ns}"

    @property
    def info(self) -> Any:
        """What the storage knows of it."""
        if self._info is None:
            self._info = self._call(lambda files: files.get_file_info(self._key))
        return self._info

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield what lies in this folder: one call per thousand objects."""
        return self._list(recursive=False)

    def rglob(self, pattern: str) -> Iterator[ObjectPath]:
        """Yield all that lies below it; the pattern is "*"."""
        assert pattern == "*"
        return self._list(recursive=True)

    def _list(self, recursive: bool) -> Iterator[ObjectPath]:
        from pyarrow import fs

        selector = fs.FileSelector(self._key, recursive=recursive)
        for info in self._call(lambda files: files.get_file_info(selector)):
            yield ObjectPath(f"{self._scheme}://{info.path}", info)

    def open(self, mode: str = "rb") -> Any:
        """Return a file to read from its beginning."""
        return self._call(lambda files: files.open_input_stream(self._key))

    def read_bytes(self) -> bytes:
        """Return all of it."""

        def get(files: Any) -> bytes:
            with files.open_input_stream(self._key) as stream:
                return bytes(stream.read())

        return self._call(get)

    def relative_to(self, folder: ObjectPath) -> str:
        """Return its path in a folder."""
        return self._key.removeprefix(f"{folder._key}/")

    def write_bytes(self, data: Any) -> None:
        """Put an object, whole or not at all; an upload that breaks off is begun again."""

        def put(files: Any) -> None:
            # Nothing may fail in here but the storage: a stream that is closed is an object.
            with files.open_output_stream(self._key) as stream:
                stream.write(data)

        self._write(put)

    def upload(self, path: Path) -> None:
        """Put the content of a file of this machine."""
        import pyarrow as pa

        if path.stat().st_size == 0:
            self.write_bytes(b"")
            return
        with pa.memory_map(str(path)) as file:
            self.write_bytes(file.read_buffer())

    def download(self, path: Path) -> None:
        """Write its content into a file of this machine, which may be there already."""

        def get(files: Any) -> None:
            with files.open_input_stream(self._key) as stream, path.open("wb") as file:
                while chunk := stream.read(_CHUNK_BYTES):
                    file.write(chunk)

        self._call(get)

    def copy_to(self, target: ObjectPath) -> None:
        """Let the storage copy it, within the bucket."""
        self._write(lambda files: files.copy_file(self._key, target._key))

    def delete(self) -> None:
        """Remove it; nothing happens if it is not there."""
        with suppress(FileNotFoundError):
            self._write(lambda files: files.delete_file(self._key))

    def delete_folder(self) -> None:
        """Remove all that lies below it, a thousand objects per call."""
        with suppress(FileNotFoundError):
            self._write(lambda files: files.delete_dir(self._key))

    def _write(self, work: Callable[[Any], None]) -> None:
        self._call(work, "write")
        self._info = None

    def open_ranges(self) -> ObjectFile:
        """Return it for reading by ranges, from any thread."""
        return ObjectFile(self, self._call(lambda files: files.open_input_file(self._key)))

    def _call(self, work: Callable[[Any], T], action: str = "read") -> T:
        return _repeated(self, lambda: work(_file_system(self._scheme, self._bucket)), action)


class ObjectFile:
    """An object that is read by ranges."""

    def __init__(self, path: ObjectPath, file: Any) -> None:
        self._path, self._file = path, file
        self.size_bytes: int = file.size()

    def read(self, pos: int, size_bytes: int) -> bytes:
        """Return so many bytes; an answer that breaks off is asked for again."""

        def get() -> bytes:
            data: bytes = self._file.read_at(size_bytes, pos)
            if len(data) != size_bytes:
                raise OSError(None, f"{len(data)} of {size_bytes} bytes came")
            return data

        return _repeated(self._path, get)

    def close(self) -> None:
        """Let it go."""
        self._file.close()


def _repeated(path: ObjectPath, work: Callable[[], T], action: str = "read") -> T:
    """Do something until it succeeds, or is refused: not every request is repeated by the SDK."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S * 2 ** (attempt - 1))
        try:
            return work()
        except FileNotFoundError:
            raise
        except OSError as problem:
            error = problem
        if "HTTP status 4" in str(error):
            break
    if error.strerror:
        raise storage_error(action, str(path), error) from error
    reason = " ".join(str(error).split())
    hint = "check the bucket, the network and the credentials of the environment"
    raise StorageError(f"cannot {action} {path}: {reason[:300]}; {hint}") from error
