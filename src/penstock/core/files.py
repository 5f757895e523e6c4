"""Files that appear whole or not at all, and folders with one writer.

Publishing is always the same five steps: temporary file in the target's own folder, data, fsync,
rename, fsync of the folder. Whatever happens before the rename leaves the old content in place and
at most a temporary behind, which `sweep` removes once its owner is dead.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar

from typing_extensions import Self

from penstock.errors import LockHeld, PenstockWarning, StorageError, UsageError

TEMPORARY_PREFIX = ".penstock-tmp-"
_names_later: contextvars.ContextVar[bool] = contextvars.ContextVar("names_later", default=False)
_HINTS = {
    errno.ENOSPC: "free some space and try again",
    errno.EDQUOT: "free some space and try again",
    errno.EFBIG: "the file size limit of this process or file system is reached",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "check the permissions of the folder",
    errno.EPERM: "check the permissions of the folder",
    errno.EIO: "the disk reports an error; check it before going on",
    errno.ENOENT: "the folder does not exist; create it first",
    errno.EISDIR: "it is a folder; give a file",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def storage_error(action: str, path: str | os.PathLike[str], error: OSError) -> StorageError:
    """Say an OS error in one line: what, where, why, what to do."""
    reason = error.strerror or type(error).__name__
    hint = _HINTS.get(error.errno or 0, "check the disk and the folder")
    if action == "read" and error.errno == errno.ENOENT:
        hint = "check the path"  # nobody creates a folder to read from it
    return StorageError(f"cannot {action} {path}: {reason}; {hint}")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # exFAT, SMB, FUSE
            raise
    finally:
        os.close(descriptor)


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create a folder and its missing parents, each of their names durable."""
    folder = Path(path).absolute()
    missing = itertools.takewhile(lambda parent: not parent.exists(), folder.parents)
    try:
        # From the top, so that the parents of whatever is there are durable, even after a kill.
        for made in reversed([folder, *missing]):
            made.mkdir(exist_ok=True)
            with contextlib.suppress(PermissionError):
                sync_folder(made.parent)
    except OSError as error:
        raise storage_error("create", path, error) from error
    return folder


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, durably; where there are no links, a second copy."""
    try:
        with contextlib.suppress(FileExistsError):
            os.link(source, target)
    except OSError:
        with NewFile(target) as new, source.open("rb") as file:
            while chunk := file.read(8 << 20):
                write_all(new.file, chunk)
    sync_folder(target.parent)


def process_owner() -> str:
    """Name this process so that no other is taken for it: host, pid, start time, container."""
    return f"{_host()}-{os.getpid()}-{_start_ticks(os.getpid())}-{_pid_namespace()}"


def owner_is_dead(owner: str) -> bool:
    """Tell whether a process named by `process_owner` is certainly gone (never guessed)."""
    try:
        host, pid, start, *namespace = owner.split("-")
        # Pids of another container say nothing here. (Older versions did not note theirs.)
        if host != _host() or namespace != [_pid_namespace()]:
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


def _pid_namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def _start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot: setting the clock does not change it.

    Raises:
        ProcessLookupError: It has ended, and only waits for its parent to ask how.
    """
    state, *stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    if state in (b"Z", b"X"):
        raise ProcessLookupError
    return int(stat[18])


def temporary_path(folder: Path) -> Path:
    """Return a name that nobody has, and that `sweep` removes once this process is dead."""
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


@contextlib.contextmanager
def names_synced_later() -> Iterator[None]:
    """Publish files of a folder whose names the caller makes durable at the end, all at once.

    For folders that nobody looks into before they get a name of their own.
    """
    token = _names_later.set(True)
    try:
        yield
    finally:
        _names_later.reset(token)


class NewFile:
    """A file that gets its name only when it is whole and on disk.

    As a context manager it publishes at the end of the block and abandons on an exception.
    `sync` may be called early, so that `publish` has only the rename left to do.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._synced_at = -1
        try:
            if self.path.is_dir():
                raise UsageError(f"cannot write {self.path}: it is a folder; give a file name")
            self.temporary = temporary_path(self.path.parent)
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
            if not _names_later.get():
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                self.publish()
        finally:
            self.abandon()
        if isinstance(error, OSError):
            raise storage_error("write", self.path, error) from error


def publish_bytes(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Publish a small file in one call."""
    with NewFile(path) as new:
        write_all(new.file, data)


def write_all(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    """Write every byte: an unbuffered file may take less than it is given."""
    view = memoryview(data).cast("B")
    while view:
        written = file.write(view)
        view = view[written:]


class FolderLock:
    """One writer per folder, by the kernel's flock, so that a dead holder never blocks.

    The lock file names its holder; it stays behind after release and means nothing by itself.
    """

    held: ClassVar[weakref.WeakSet[FolderLock]] = weakref.WeakSet()

    def __init__(self, folder: Path | str, name: str = ".penstock.lock") -> None:
        self.path = Path(folder) / name
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise LockHeld at once with the holder's name.

        Called again, it makes sure that the lock is still in force: its file may have been removed.
        """
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                    return
            self.release()
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise storage_error("lock", self.path.parent, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            folder, holder = self.path.parent, os.pread(descriptor, 4096, 0)
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
                os.close(descriptor)
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise storage_error("lock", folder, error) from error
                who = _describe_holder(holder)
                problem = f"{folder} is being written by {who}; wait for it, or stop it"
                raise LockHeld(problem) from error
            warnings.warn(
                f"{folder} lies on a file system without locks ({error.strerror}): "
                "nothing keeps a second writer out; let only one process write there",
                PenstockWarning,
                stacklevel=3,
            )
        since, command = time.strftime("%Y-%m-%d %H:%M:%S"), " ".join(sys.argv)[:200]
        name = f"{_this_process()} since {since} ({command})"
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, name.encode(errors="replace"), 0)
        self._descriptor = descriptor
        # Also for whoever forgets `release`.
        self._closing = weakref.finalize(self, _unlock, descriptor, os.getpid())
        self._closing.atexit = False  # at exit the kernel lets go, after all work is done
        self.held.add(self)

    def release(self) -> None:
        """Give the lock back; safe to call twice."""
        if self._descriptor is not None:
            self._closing()
            self._descriptor = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _unlock(descriptor: int, owner: int) -> None:
    """Close a locked file. Its owner unlocks it first: a child that it just forked shares it."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # no locks on this file system
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


# A forked child would keep the locks after our death.
os.register_at_fork(after_in_child=lambda: [*map(FolderLock.release, [*FolderLock.held])])


def _this_process() -> str:
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    return f"process {os.getpid()}{rank} on {socket.gethostname()}"


def _describe_holder(content: bytes) -> str:
    text = " ".join(content.decode(errors="replace").split())
    if not text.startswith("process "):  # nonsense, or an older version's
        return "another process"
    if text.startswith(f"{_this_process()} "):
        return f"this very process, by another writer; close that one first: {text}"
    return text
