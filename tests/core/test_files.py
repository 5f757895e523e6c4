"""Publishing, locks and sweeping, with real processes, real kills and full disks."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness import small_disk
from penstock.core import files
from penstock.core.files import FolderLock, NewFile, publish_bytes, sweep
from penstock.errors import LockHeld, StorageError, UsageError

OLD = b"old content"
REPLACEMENTS = 200


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Run Python code in a process of its own; it says "ready" when the scene is set."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> str:
    """Let a process run to its end, by closing its input; return what it still said."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return output


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=240)


def failing(code: int) -> object:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# --- NewFile -----------------------------------------------------------------------------------


def test_a_file_has_no_name_before_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    with NewFile(target) as new:
        new.file.write(b"half")
        assert not target.exists()
        assert new.temporary.parent == tmp_path
        new.file.write(b" and half")
    assert target.read_bytes() == b"half and half"
    assert listing(tmp_path) == ["a.bin"]


READER = """
import sys
path = sys.argv[1]
print("ready", flush=True)
reads = 0
sizes = set()
while True:
    content = open(path, "rb").read()
    # A whole file is its own number, repeated as often as the number says.
    n = content[0]
    assert content == bytes([n]) * (1000 * (n + 1)), (n, len(content))
    sizes.add(n)
    reads += 1
    if n == 255:
        break
print(reads, len(sizes))
"""


def test_a_reader_never_sees_a_partial_file(tmp_path: Path) -> None:
    target = tmp_path / "state.bin"
    publish_bytes(target, bytes(1000))
    reader = start(READER, target)
    assert line_of(reader) == "ready"
    for n in range(REPLACEMENTS):
        with NewFile(target) as new:
            for _ in range(n + 1):  # many small writes: a partial file would be easy to see
                files.write_all(new.file, bytes([n]) * 1000)
    publish_bytes(target, bytes([255]) * 256_000)
    reads, seen = map(int, end(reader).split())
    assert reads >= seen > 1
    assert listing(tmp_path) == ["state.bin"]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_abandons(tmp_path: Path, failure: type[BaseException]) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(OLD)
    with pytest.raises(failure), NewFile(target) as new:
        new.file.write(b"new")
        raise failure()
    assert target.read_bytes() == OLD
    assert listing(tmp_path) == ["a.bin"]


def test_an_os_error_inside_the_block_is_said_in_our_words(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="free some space"), NewFile(tmp_path / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert listing(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_failing_disk_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(OLD)
    monkeypatch.setattr(os, call, failing(code))
    with pytest.raises(StorageError) as caught:
        publish_bytes(target, b"new content")
    monkeypatch.undo()
    assert str(target) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert target.read_bytes() == OLD
    assert listing(tmp_path) == ["a.bin"]


def test_a_failed_fsync_is_never_retried_as_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After an error the kernel forgets the lost pages: the next fsync would say "all well".
    target = tmp_path / "a.bin"
    target.write_bytes(OLD)
    new = NewFile(target)
    new.file.write(b"new")
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(StorageError):
        new.sync()
    monkeypatch.undo()
    with pytest.raises(UsageError, match="given up"):
        new.publish()
    with pytest.raises(UsageError, match="given up"):
        new.sync()
    assert target.read_bytes() == OLD
    assert listing(tmp_path) == ["a.bin"]


def test_a_failing_folder_sync_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(OLD)
    monkeypatch.setattr(files, "sync_folder", failing(errno.EIO))
    with pytest.raises(StorageError, match="disk reports an error"):
        publish_bytes(target, b"new content")
    assert target.read_bytes() in (OLD, b"new content")
    assert listing(tmp_path) == ["a.bin"]


def test_early_sync_leaves_only_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(stat.S_IFMT(os.fstat(descriptor).st_mode))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    new = NewFile(tmp_path / "a.bin")
    new.file.write(b"1")
    new.sync()
    assert synced == [stat.S_IFREG]
    new.publish()
    assert synced == [stat.S_IFREG, stat.S_IFDIR]

    late = NewFile(tmp_path / "b.bin")
    late.file.write(b"1")
    late.sync()
    late.file.write(b"2")  # after the sync: it must be synced again
    late.publish()
    assert synced[2:] == [stat.S_IFREG, stat.S_IFREG, stat.S_IFDIR]


FILL = """
import resource, sys
from penstock.core.files import publish_bytes
from penstock.errors import StorageError
path, limit = sys.argv[1], int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    publish_bytes(path, bytes(8_000_000))
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["tmpfs", "file size limit"])
def test_a_full_disk_keeps_the_old_content(tmp_path: Path, kind: str) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "size=1m") if kind == "tmpfs" else contextlib.nullcontext(False) as small:
        disk.mkdir(exist_ok=True)
        target = disk / "a.bin"
        target.write_bytes(OLD)
        said = end(start(FILL, target, 0 if small else 500_000)).splitlines()
        assert len(said) == 1
        hint = "free some space and try again" if small else "file size limit"
        assert said[0].startswith(f"cannot write {target}: ")
        assert hint in said[0]
        assert target.read_bytes() == OLD
        assert listing(disk) == ["a.bin"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o000])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        publish_bytes(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~umask


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is a folder"):
        NewFile(tmp_path)
    with pytest.raises(StorageError, match="create it first"):
        NewFile(tmp_path / "missing" / "a")
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(StorageError, match="is a file, not a folder"):
        NewFile(tmp_path / "file" / "a")
    with pytest.raises(StorageError, match="choose a shorter name"):
        publish_bytes(tmp_path / ("n" * 300), b"")
    assert listing(tmp_path) == ["file"]


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "ro") as read_only:
        if not read_only:
            monkeypatch.setattr(os, "open", failing(errno.EROFS))
            monkeypatch.setattr(os, "mkdir", failing(errno.EROFS))
        for attempt in (
            lambda: NewFile(disk / "a"),
            lambda: FolderLock(disk).acquire(),
        ):
            with pytest.raises(StorageError, match="choose another folder"):
                attempt()
        monkeypatch.undo()
        assert listing(disk) == []


def test_abandon_twice_and_after_publish(tmp_path: Path) -> None:
    new = NewFile(tmp_path / "a")
    new.abandon()
    new.abandon()
    assert listing(tmp_path) == []
    with NewFile(tmp_path / "b") as new:
        new.file.write(b"x")
    new.abandon()
    assert (tmp_path / "b").read_bytes() == b"x"


@pytest.mark.parametrize("code", [*files._HINTS, errno.EBUSY])
def test_storage_errors_are_one_line(code: int) -> None:
    text = str(files.storage_error("write", Path("/x/y"), OSError(code, os.strerror(code))))
    assert text.startswith("cannot write /x/y: ")
    assert os.strerror(code) in text
    assert "\n" not in text
    assert "; " in text


# --- sweep -------------------------------------------------------------------------------------

HALF_WRITTEN = """
import sys, time
from pathlib import Path
from penstock.core.files import NewFile, temporary_path
folder = Path(sys.argv[1])
new = NewFile(folder / "a")
new.file.write(bytes(100_000))
inside = temporary_path(folder)
inside.mkdir()
(inside / "part").write_bytes(b"x")
print("ready", flush=True)
sys.stdin.read()
inside.rename(folder / "set")
new.abandon()
"""


def test_sweep_removes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    dead, alive = start(HALF_WRITTEN, tmp_path), start(HALF_WRITTEN, tmp_path / ".")
    try:
        assert line_of(dead) == line_of(alive) == "ready"
        mine = NewFile(tmp_path / "mine")
        assert len(listing(tmp_path)) == 5
        kill(dead)
        host = files.process_owner().split("-")[0]
        gone = dead.pid
        strangers = [
            f".penstock-tmp-otherhost-{gone}-123-abcdef",
            ".penstock-tmp-",
            ".penstock-tmp-abc",
            f".penstock-tmp-{host}-{gone}",
            f".penstock-tmp-{host}-x-y-abcdef",
            f".penstock-tmp-{host}-{2**80}-1-abcdef",
            f".penstock-tmp-{host}-0-1-abcdef",
            f".penstock-tmp-{host}-{gone}-1-2-abcdef",
            f"penstock-tmp-{host}-{gone}-1-abcdef",
            f"model-{gone}.pt",
        ]
        for name in strangers:
            (tmp_path / name).write_bytes(OLD)
        removed = sweep(tmp_path)
        assert len(removed) == 2
        assert all(f"-{gone}-" in path.name and not path.exists() for path in removed)
        assert len(list(tmp_path.glob(f"*-{alive.pid}-*"))) == 2
        assert mine.temporary.exists()
        assert set(strangers) <= set(listing(tmp_path))
        assert sweep(tmp_path) == []
        mine.publish()
        end(alive)
        assert (tmp_path / "set" / "part").read_bytes() == b"x"
        assert set(listing(tmp_path)) == {*strangers, "mine", "set"}
    finally:
        kill(dead)
        kill(alive)


def test_sweep_knows_a_reused_pid(tmp_path: Path) -> None:
    host, pid, ticks, space = files.process_owner().split("-")
    stale = tmp_path / f".penstock-tmp-{host}-{pid}-{int(ticks) - 1}-{space}-abcdef"
    stale.write_bytes(OLD)
    assert sweep(tmp_path) == [stale]
    assert sweep(tmp_path / "missing") == []


def test_a_process_that_nobody_asked_for_is_dead(tmp_path: Path) -> None:
    """A killed process keeps its pid and its start time until its parent has waited for it."""
    code = "from penstock.core.files import process_owner as p; print(p(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        owner = process.stdout.readline().strip()
        assert not files.owner_is_dead(owner)
        process.kill()
        state = Path(f"/proc/{process.pid}/stat")
        while b") Z" not in state.read_bytes():
            time.sleep(0.01)
        assert files.owner_is_dead(owner)


def test_sweep_does_not_follow_links(tmp_path: Path) -> None:
    host, pid, ticks, space = files.process_owner().split("-")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_bytes(OLD)
    (tmp_path / f".penstock-tmp-{host}-{pid}-{int(ticks) - 1}-{space}-abcdef").symlink_to(precious)
    assert len(sweep(tmp_path)) == 1
    assert (precious / "data").read_bytes() == OLD


def test_setting_the_clock_makes_nobody_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    # The boot time in wall-clock seconds moves with every step of the clock (NTP).
    owner = files.process_owner()
    real = psutil.boot_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: real + 1)
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: real + 1)
    assert not files.owner_is_dead(owner)


# --- FolderLock --------------------------------------------------------------------------------

HOLDER = """
import sys
from penstock.core.files import FolderLock
with FolderLock(sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_refused_at_once_by_name(tmp_path: Path) -> None:
    holder = start(HOLDER, tmp_path, "two\nlines")
    try:
        assert line_of(holder) == "ready"
        began = time.monotonic()
        with pytest.raises(LockHeld) as caught:
            FolderLock(tmp_path).acquire()
        assert time.monotonic() - began < 1
        text = str(caught.value)
        assert f"process {holder.pid} on {socket.gethostname()}" in text
        assert str(tmp_path) in text
        assert "\n" not in text
        end(holder)
        with FolderLock(tmp_path):
            pass
    finally:
        kill(holder)


def test_a_dead_holder_does_not_block(tmp_path: Path) -> None:
    holder = start(HOLDER, tmp_path)
    assert line_of(holder) == "ready"
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=240)
    with FolderLock(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / ".penstock.lock").read_text()


FORKING = """
import os, sys, time
from penstock.core.files import FolderLock
lock = FolderLock(sys.argv[1])
lock.acquire()
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), 9)
# A child that drops its copy must not unlock the folder for the others.
time.sleep(0.2)
try:
    FolderLock(sys.argv[1]).acquire()
except Exception as error:
    print(type(error).__name__, flush=True)
"""


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    parent = start(FORKING, tmp_path, "die")
    child = int(line_of(parent))
    assert parent.wait(timeout=240) == -signal.SIGKILL
    try:
        assert psutil.pid_exists(child)
        deadline = time.monotonic() + 20
        while True:  # the child may not have come to its first line yet
            try:
                with FolderLock(tmp_path):
                    break
            except LockHeld:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert psutil.pid_exists(child)
    finally:
        kill(parent)  # closes the child's input: it ends


def test_a_lock_that_is_taken_often_leaves_nothing_behind_for_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **given: callbacks.append(given))
    for _ in range(3):
        with FolderLock(tmp_path):
            pass
    assert not callbacks


def test_a_forked_child_does_not_release_the_lock(tmp_path: Path) -> None:
    parent = start(FORKING, tmp_path, "stay")
    assert int(line_of(parent)) > 0
    assert end(parent).split() == ["LockHeld"]


def test_release_twice_then_take_again(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    for _ in range(3):
        lock.acquire()
        with pytest.raises(LockHeld, match=f"process {os.getpid()} "):
            FolderLock(tmp_path).acquire()
        lock.release()
        lock.release()
    with FolderLock(tmp_path), FolderLock(tmp_path, "other.lock"):
        pass


@pytest.mark.parametrize("content", [b"", b"[" * 4096, b"[]", b"{}", b"\xff\xfe", b'{"pid": 1}'])
def test_a_lock_file_with_nonsense_still_refuses(tmp_path: Path, content: bytes) -> None:
    with FolderLock(tmp_path):
        (tmp_path / ".penstock.lock").write_bytes(content)
        with pytest.raises(LockHeld, match="another process"):
            FolderLock(tmp_path).acquire()


def test_a_full_disk_can_still_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    lock = FolderLock(tmp_path)
    lock.acquire()
    with pytest.raises(LockHeld):
        FolderLock(tmp_path).acquire()
    lock.release()
    with FolderLock(tmp_path):
        pass


def test_eight_processes_race_for_the_lock(tmp_path: Path) -> None:
    racers = [start(RACER, tmp_path) for _ in range(8)]
    wins = sum(int(end(racer)) for racer in racers)
    assert wins == len((tmp_path / "log").read_text().splitlines()) > 0


RACER = """
import os, sys, time
from pathlib import Path
from penstock.core.files import FolderLock
from penstock.errors import LockHeld
folder = Path(sys.argv[1])
wins = 0
stop = time.monotonic() + 0.7
while time.monotonic() < stop:
    try:
        with FolderLock(folder):
            # Only one may be here: the exclusive creation says so.
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            with open(folder / "log", "a") as log:
                log.write("x\\n")
            os.unlink(folder / "inside")
            wins += 1
    except LockHeld:
        pass
    time.sleep(0.001)
print(wins)
"""
