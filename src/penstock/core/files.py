"""Files that appear whole or not at all, and folders with one writer.

Publishing is always the same five steps: temporary file in the target's own folder, data, fsync,
rename, fsync of the folder. Whatever happens before the rename leaves the old content in place and
at most a temporary behind, which `sweep` removes once its owner is dead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from penstock.errors import LockHeld, StorageError, UsageError

TEMPORARY_PREFIX = ".penstock-tmp-"
_HINTS = {
    errno.ENOSPC: "free some space and try again",
    errno.EDQUOT: "free some space and try again",
    errno.EFBIG: "the file size limit of this process or file system is reached",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "check the permissions of the folder",
    errno.EPERM: "check the permissions of the folder",
    errno.EIO: "the disk reports an error; check it before going on",
    errno.ENOENT: "the folder does not exist; create it first",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def storage_error(action: str, path: Path | str, error: OSError) -> StorageError:
    """Say an OS error in one line: what, where, why, what to do."""
    reason = error.strerror or type(error).__name__
    hint = _HINTS.get(error.errno or 0, "check the disk and the folder")
    return StorageError(f"cannot {action} {path}: {reason}; {hint}")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def process_owner() -> str:
    """Name this process so that no later one is taken for it: host, pid, start time."""
    return f"{_host()}-{os.getpid()}-{_start_ticks(os.getpid())}"


def owner_is_dead(owner: str) -> bool:
    """Tell whether a process named by `process_owner` is certainly gone (never guessed)."""
    try:
        host, pid, start = owner.split("-")
        if host != _host():
            return False
        with contextlib.suppress(PermissionError):
            os.kill(int(pid), 0)
        return _start_ticks(int(pid)) != int(start)
    except ProcessLookupError:
        return True
    except (ValueError, OverflowError, OSError):
        return False


def _host() -> str:
    return "".join(c for c in socket.gethostname() if c.isalnum())[:32] or "host"


def _start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot: setting the clock does not change it."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat.rpartition(b")")[2].split()[19])


def _temporary_path(folder: Path) -> Path:
    return folder / f"{TEMPORARY_PREFIX}{process_owner()}-{secrets.token_hex(6)}"


def sweep(folder: Path) -> list[Path]:
    """Remove the temporaries that dead processes left in a folder; return what was removed."""
    removed = []
    for entry in folder.glob(f"{TEMPORARY_PREFIX}*"):
        owner = entry.name.removeprefix(TEMPORARY_PREFIX).rpartition("-")[0]
        if not owner_is_dead(owner):
            continue
        with contextlib.suppress(OSError):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
            removed.append(entry)
    return removed


class NewFile:
    """A file that gets its name only when it is whole and on disk.

    As a context manager it publishes at the end of the block and abandons on an exception.
    `sync` may be called early, so that `publish` has only the rename left to do.

    Example:
        with NewFile(path) as new:
            new.file.write(b"...")
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._synced_at = -1
        self._open = False
        try:
            if self.path.is_dir():
                raise UsageError(f"cannot write {self.path}: it is a folder; give a file name")
            self.temporary = _temporary_path(self.path.parent)
            # Not tempfile: the file must get the permissions that open() would have given it.
            descriptor = os.open(self.temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except OSError as error:
            raise storage_error("write", self.path, error) from error
        self.file: BinaryIO = open(descriptor, "w+b", buffering=0)  # noqa: SIM115
        self._open = True

    def sync(self) -> None:
        """Bring all that was written to the disk; a failure is final: no second try proves more."""
        self.check_open()
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            self.abandon()
            raise storage_error("write", self.path, error) from error
        self._synced_at = os.fstat(self.file.fileno()).st_size

    def publish(self) -> None:
        """Give the file its name, durably; the old content is gone only when the new is safe."""
        self.check_open()
        if self._synced_at != os.fstat(self.file.fileno()).st_size:
            self.sync()
        try:
            self.file.close()
            os.replace(self.temporary, self.path)
            self._open = False
            sync_folder(self.path.parent)
        except OSError as error:
            raise storage_error("write", self.path, error) from error

    def abandon(self) -> None:
        """Remove the temporary; the name keeps its old content. Safe to call twice."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):
            self.file.close()
        with contextlib.suppress(OSError):
            self.temporary.unlink()

    def check_open(self) -> None:
        """Refuse a call on a file that has its name already, or will never get it."""
        if not self._open:
            raise UsageError(f"{self.path}: this new file was published or given up already")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.publish()
        except OSError as failure:
            raise storage_error("write", self.path, failure) from failure
        finally:
            self.abandon()
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise storage_error("write", self.path, error) from error


def publish_bytes(path: Path | str, data: bytes) -> None:
    """Publish a small file in one call."""
    with NewFile(path) as new:
        write_all(new.file, data)


def write_all(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    """Write every byte: an unbuffered file may take less than it is given."""
    view = memoryview(data).cast("B")
    while view:
        written = file.write(view)
        view = view[written:]


@contextlib.contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Fill a temporary folder, then publish it under its name; refuse a name that is taken.

    Args:
        path: The final name. It must not exist: nothing is ever replaced.

    Yields:
        The temporary folder to fill, beside the final one.
    """
    target = Path(path)
    temporary = _temporary_path(target.parent)
    try:
        if target.exists() or target.is_symlink():
            raise UsageError(f"{target} exists already; remove it or choose another name")
        temporary.mkdir()
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        os.rename(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise storage_error("write", target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class FolderLock:
    """One writer per folder, by the kernel's flock, so that a dead holder never blocks.

    The lock file names its holder; it stays behind after release and means nothing by itself.

    Example:
        with FolderLock(out):
            ...
    """

    def __init__(self, folder: Path | str, name: str = ".penstock.lock") -> None:
        self.path = Path(folder) / name
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise LockHeld at once with the holder's name."""
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise storage_error("lock", self.path.parent, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _describe_holder(os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise storage_error("lock", self.path.parent, error) from error
            raise LockHeld(
                f"{self.path.parent} is being written by {holder}; wait for it, or stop it"
            ) from error
        holder_json = json.dumps(
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                "command": " ".join(sys.argv)[:200],
            }
        )
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder_json.encode(), 0)
        self._descriptor = descriptor
        # A forked child shares the open file, and would keep the lock after our death.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _drop_in_child(this))

    def release(self) -> None:
        """Give the lock back; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _drop_in_child(reference: weakref.ref[FolderLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.release()


def _describe_holder(content: bytes) -> str:
    try:
        holder = json.loads(content)
        text = (
            f"process {holder['pid']} on {holder['host']} since {holder['since']} "
            f"({holder['command']})"
        )
        return " ".join(text.split())
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
