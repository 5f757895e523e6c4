"""One folder, many who write there: other savers, other containers, people with `cp` and `rm`."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

from penstock import errors
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver


def make(path, **options):
    return AsyncCheckpointSaver(path, handle_signals=False, **options)


def state(n):
    torch.manual_seed(0)
    weights = torch.randn(9000)
    weights[:40] += n
    return {"n": n, "w": weights}


def save(saver, n, name=None, **options):
    return saver.save_async(state(n), name or f"{n}.pt", **options).wait()


def holds(path, n):
    loaded = load_checkpoint(path)
    return loaded["n"] == n and torch.equal(loaded["w"], state(n)["w"])


def names(path):
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))


def copy_run(path, numbers, to, **options):
    """Write a run elsewhere, then copy some of its files to where others work."""
    with make(path, **options) as saver:
        for n in range(max(numbers) + 1):
            save(saver, n)
    for n in numbers:
        shutil.copy(path / f"{n}.pt", to / f"{n}.pt")


# Two savers


def test_a_second_saver_is_refused_by_name(tmp_path):
    with make(tmp_path) as saver, make(tmp_path) as second:
        save(saver, 1)
        with pytest.raises(errors.LockHeld, match=f"this very process.*process {os.getpid()}"):
            save(second, 2)
        failures = []

        def other_thread():
            try:
                save(second, 3)
            except errors.LockHeld as error:
                failures.append(error)

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert failures
        assert names(tmp_path) == ["1.pt", "latest"]
    with make(tmp_path) as saver:
        save(saver, 4)


OTHER = """
import sys
import torch
from penstock import AsyncCheckpointSaver
from penstock.errors import LockHeld
try:
    with AsyncCheckpointSaver(sys.argv[1]) as saver:
        saver.save_async({"n": 2}, "2.pt").wait()
    print("saved")
except LockHeld as error:
    print(error)
"""


@pytest.mark.timeout(500)
@pytest.mark.parametrize("container", [False, True])
def test_another_process_is_refused(tmp_path, container):
    """Also in another PID namespace, where the same number is another process."""
    isolate = ["unshare", "--pid", "--fork", "--mount-proc"] if container else []
    if container and subprocess.run([*isolate, "true"], check=False).returncode:
        pytest.skip("unshare is not allowed here")
    command = [*isolate, sys.executable, "-c", OTHER, str(tmp_path)]

    def run():
        result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
        return result.stdout.strip()

    with make(tmp_path) as saver:
        save(saver, 1)
        assert f"being written by process {os.getpid()}" in run()
        assert names(tmp_path) == ["1.pt", "latest"]
    assert run() == "saved"


def test_a_forked_child_is_refused_and_keeps_no_lock(tmp_path):
    with make(tmp_path) as saver:
        save(saver, 1)
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if make(tmp_path).save_async({"n": 2}, "2.pt") is None else 1)
            except errors.LockHeld as error:
                os._exit(7 if str(os.getppid()) in str(error) else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_child_that_was_just_forked_keeps_no_lock(tmp_path):
    slow = [0.5]  # the child has not run yet when the saver is closed
    os.register_at_fork(after_in_child=lambda: time.sleep(sum(slow)))
    read, write = os.pipe()
    with make(tmp_path) as saver:
        save(saver, 1)
        pid = os.fork()
        if pid == 0:  # outlives the saver
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    slow.clear()
    with make(tmp_path) as saver:
        save(saver, 2)
    os.close(write)
    os.close(read)
    os.waitpid(pid, 0)


def test_a_lock_file_that_was_removed_is_taken_again(tmp_path):
    with make(tmp_path) as saver, make(tmp_path) as second:
        save(saver, 1)
        (tmp_path / ".penstock.lock").unlink()
        save(saver, 2)
        with pytest.raises(errors.LockHeld):
            save(second, 3)
        (tmp_path / ".penstock.lock").unlink()
        save(second, 4)  # whoever comes first
        with pytest.raises(errors.LockHeld):
            save(saver, 5)
    assert holds(tmp_path, 4)


def test_one_folder_under_several_names_is_one_folder(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with make(tmp_path / "real", keep_last=2) as saver:
        save(saver, 1)
        save(saver, 2, "./2.pt")
        save(saver, 3, tmp_path / "link" / "3.pt")
        save(saver, 4, "sub/../4.pt")
    assert names(tmp_path / "real") == ["3.pt", "4.pt", "latest", "sub"]
    assert holds(tmp_path / "real", 4)


# Files of others


@pytest.mark.parametrize("options", [{"keep_last": 2}, {"keep_last": 1, "delta_every": 3}])
def test_copied_checkpoints_with_higher_numbers(tmp_path, options):
    """They stay, and ours stay: whatever sequence they were given elsewhere."""
    here = tmp_path / "here"
    with make(here, **options) as saver:
        for n in range(100, 103):
            save(saver, n)
        copy_run(tmp_path / "there", [7, 8, 9], here, keep_last=3)
        for n in range(103, 108):
            save(saver, n)
            assert holds(here, n)
            assert holds(here / f"{n}.pt", n)
    assert all(holds(here / f"{n}.pt", n) for n in (7, 8, 9))
    with make(here, **options) as saver:
        save(saver, 108)
    assert holds(here, 108)
    assert all(holds(here / f"{n}.pt", n) for n in (7, 8, 9))


def test_renamed_and_copied_checkpoints_stay(tmp_path):
    with make(tmp_path, keep_last=1) as saver:
        save(saver, 1)
        shutil.copy(tmp_path / "1.pt", tmp_path / "best.pt")
        os.link(tmp_path / "1.pt", tmp_path / "hard.pt")
        save(saver, 2)
        (tmp_path / "2.pt").rename(tmp_path / "mine.pt")
        save(saver, 3)
        save(saver, 4)
    assert names(tmp_path) == ["4.pt", "best.pt", "hard.pt", "latest", "mine.pt"]


def test_a_copied_delta_keeps_its_base(tmp_path):
    here = tmp_path / "here"
    with make(here, keep_last=1, delta_every=4) as saver:
        save(saver, 1)
        save(saver, 2)
        shutil.copy(here / "2.pt", here / "copy.pt")
        for n in range(3, 9):
            save(saver, n)
            assert holds(here / "copy.pt", 2)
            assert holds(here, n)


def test_a_read_error_unprotects_no_base(tmp_path, monkeypatch):
    from penstock.checkpoints import folder

    with make(tmp_path, keep_last=1, delta_every=4) as saver:
        for n in (1, 2):
            save(saver, n)
        read = folder.read_summary

        def failing(path):
            if path.name == "2.pt":
                raise OSError(errno.EIO, "Input/output error")
            return read(path)

        os.utime(tmp_path / "2.pt")  # what is known of it does not count any more
        monkeypatch.setattr(folder, "read_summary", failing)
        save(saver, 3, compress=False)
        save(saver, 1, compress=False)  # over the base
        monkeypatch.undo()
        assert holds(tmp_path / "2.pt", 2)


def test_foreign_files_with_our_kinds_of_names(tmp_path):
    foreign = [".notes.base", ".0.pt.0123456789ab.base", ".penstock-tmp-mine", "latest.bak"]
    for name in foreign:
        (tmp_path / name).write_text("mine")
    (tmp_path / "folder.pt").mkdir()
    os.mkfifo(tmp_path / "fifo.pt")
    with make(tmp_path, keep_last=1, delta_every=2) as saver:
        for n in range(5):
            save(saver, n, f"{n % 3}.pt")
        save(saver, 9, "fifo.pt")
        with pytest.raises(errors.UsageError, match="it is a folder"):
            save(saver, 10, "folder.pt")
        assert holds(tmp_path, 9)
    assert all((tmp_path / name).read_text() == "mine" for name in foreign)


@pytest.mark.parametrize("what", ["folder", "fifo", "file", "checkpoint", "link", "nothing"])
def test_something_else_in_the_place_of_latest(tmp_path, what):
    pointer = tmp_path / "latest"
    with make(tmp_path, keep_last=2) as saver:
        for n in (1, 2):
            save(saver, n)
    pointer.unlink()
    match what:
        case "folder":
            pointer.mkdir()
            (pointer / "file").write_text("mine")
        case "fifo":
            os.mkfifo(pointer)
        case "file":
            pointer.write_bytes(os.urandom(100_000))
        case "checkpoint":  # `cp -L` follows links
            shutil.copy(tmp_path / "2.pt", pointer)
        case "link":
            pointer.symlink_to("/dev/zero")
    assert holds(tmp_path, 2)
    with make(tmp_path, keep_last=2) as saver:
        for n in (3, 4):
            if what == "folder":
                with pytest.raises(errors.StorageError, match="cannot move the pointer"):
                    save(saver, n)
            else:
                save(saver, n)
                assert holds(tmp_path, n)
    assert holds(tmp_path / "2.pt", 2)


def test_a_run_that_was_copied_goes_on(tmp_path):
    with make(tmp_path / "a", keep_last=2, delta_every=3) as saver:
        for n in range(4):
            save(saver, n)
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    with make(tmp_path / "b", keep_last=2, delta_every=3) as saver:
        for n in range(4, 7):
            save(saver, n)
            assert holds(tmp_path / "b", n)
    assert holds(tmp_path / "a", 3)


def test_a_folder_that_is_removed_while_saving(tmp_path):
    run = tmp_path / "run"
    with make(run) as saver:
        save(saver, 1)
        shutil.rmtree(run)
        with pytest.raises(errors.StorageError, match="the folder does not exist"):
            save(saver, 2)
        run.mkdir()
        save(saver, 3)
        assert holds(run, 3)
        with make(run) as second, pytest.raises(errors.LockHeld):
            save(second, 4)


# File systems that can do less


def refuse(error):
    def refused(*_, **__):
        raise OSError(error, os.strerror(error))

    return refused


def lives(path, **options):
    """Names written twice, differences, retention: everything that needs the file system."""
    with make(path, delta_every=3, **options) as saver:
        for n in range(9):
            save(saver, n, f"{n % 4}.pt")
            assert holds(path, n)
    for n in range(9 - (options.get("keep_last") or 4), 9):
        assert holds(path / f"{n % 4}.pt", n)


@pytest.mark.parametrize("keep_last", [None, 2])
def test_file_systems_without_links_locks_and_folder_fsync(tmp_path, monkeypatch, keep_last):
    fsync = os.fsync

    def files_only(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    for number, error in enumerate([errno.EPERM, errno.ENOTSUP, errno.ENOSYS]):
        monkeypatch.setattr(os, "link", refuse(error))
        monkeypatch.setattr(os, "symlink", refuse(error))
        monkeypatch.setattr(os, "fsync", files_only)
        monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
        with pytest.warns(errors.PenstockWarning, match="without locks"):
            lives(tmp_path / str(number), keep_last=keep_last)


def test_a_real_fat_file_system(tmp_path):
    if shutil.which("mkfs.vfat") is None:
        pytest.skip("needs mkfs.vfat (apt-get install dosfstools)")
    image, disk = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    disk.mkdir()
    subprocess.run(["mkfs.vfat", image], check=True, capture_output=True)
    mount = ["mount", "-o", "loop", image, disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        lives(disk / "run", keep_last=2)
        lives(disk / "all")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_is_read_only(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(errors.StorageError, match="read-only"), make(disk) as saver:
            save(saver, 1)
    finally:
        subprocess.run(["umount", disk], check=True)
