"""Full disks, failing disks, kills and damage: an error in time, and nothing lost."""

import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harness import compile_faulty_disk, run_campaign, small_disk
from penstock import errors
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver

from .conftest import assert_equal

# Each starts processes that import torch: slow on a loaded machine.
pytestmark = pytest.mark.timeout(500)


def leftovers(path):
    return [p.name for p in path.iterdir() if p.name.startswith(".") and p.name != ".penstock.lock"]


@pytest.mark.parametrize("call", ["fsync", "replace", "symlink"])
def test_a_failing_disk_is_told_at_the_next_call(tmp_path, monkeypatch, call):
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        saver.save_async({"n": 1}, "1.pt").wait()

        def broken(*_, **__):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            if call == "symlink":  # then the pointer is published as a file, which fails, too
                patch.setattr(os, "replace", broken)
            saver.save_async({"n": 2}, "2.pt")
            while saver.get_stats()["queue_size"]:
                time.sleep(0.001)
        with pytest.raises(errors.StorageError, match=r"cannot .*Input/output error"):
            saver.save_async({"n": 3}, "3.pt")
        assert not (tmp_path / "3.pt").exists()
        assert load_checkpoint(tmp_path)["n"] == 1
        assert leftovers(tmp_path) == []
        saver.save_async({"n": 3}, "3.pt").wait()  # told once, then the saver goes on
    assert load_checkpoint(tmp_path)["n"] == 3


def test_each_way_of_waiting_tells_it_once(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for tell in ("handle", "wait", "shutdown", "exit"):
        saver = AsyncCheckpointSaver(tmp_path, handle_signals=False)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            handle = saver.save_async({"x": torch.ones(5)}, "x.pt")
            while not handle.done():
                time.sleep(0.001)
        with pytest.raises(errors.StorageError, match="No space left on device; free some space"):
            match tell:
                case "handle":
                    handle.wait()
                case "wait":
                    saver.wait()
                case "shutdown":
                    saver.shutdown()
                case "exit":
                    saver.__exit__(None, None, None)
        assert saver.shutdown() is True
        assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "state",
    [
        {"log": "x" * 100_000_001},  # the header of a file holds what is no array
        {"w": torch.empty(0, 1 << 40)},
    ],
    ids=["header", "shape"],
)
def test_what_no_reader_would_take_is_never_called_saved(tmp_path, state):
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        saver.save_async({"n": 1}, "1.pt").wait()
        with pytest.raises(errors.PenstockError, match=r"2\.pt.* over \d+"):
            saver.save_async(state, "2.pt").wait()
    assert load_checkpoint(tmp_path)["n"] == 1
    assert not (tmp_path / "2.pt").exists()
    assert leftovers(tmp_path) == []


FULL_DISK = """
import resource, sys, torch
from penstock import AsyncCheckpointSaver, load_checkpoint
from penstock.errors import StorageError
out = sys.argv[1]
saver = AsyncCheckpointSaver(out)
saver.save_async({"n": 1, "x": torch.randn(1000)}, "1.pt").wait()
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
saver.save_async({"n": 2, "x": torch.randn(3_000_000)}, "2.pt")
try:
    saver.wait()
except StorageError as error:
    print(error)
saver.save_async({"n": 3, "x": torch.randn(1000)}, "3.pt").wait()
print(load_checkpoint(out)["n"])
saver.shutdown()
"""


def run_on_full_disk(path, how):
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path), how],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    message, number = result.stdout.splitlines()
    assert number == "3"
    assert sorted(p.name for p in path.iterdir()) == [".penstock.lock", "1.pt", "3.pt", "latest"]
    return message


def test_a_full_disk(tmp_path):
    """A real tmpfs of 4 MB where mounting is allowed, and always a limit of the file size."""
    assert "file size limit" in run_on_full_disk(tmp_path, "limit")
    small = tmp_path / "small"
    with small_disk(small, "size=4m") as mounted:
        if mounted:
            assert "No space left on device; free some space" in run_on_full_disk(small, "tmpfs")


def test_a_target_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.StorageError, match="a part of this path is a file"):
        AsyncCheckpointSaver(tmp_path / "file" / "runs", handle_signals=False)


@pytest.mark.parametrize("delta_every", [0, 3])
def test_a_thousand_damages_none_silent(tmp_path, delta_every):
    """Bit flips, zeroed pages and truncations: an error or exactly the right values."""
    chance = random.Random(delta_every)
    torch.manual_seed(0)
    state = {"n": 0, "w": torch.randn(30_000), "h": torch.randn(5000).bfloat16()}
    with AsyncCheckpointSaver(tmp_path, handle_signals=False, delta_every=delta_every) as saver:
        for i in range(3):
            state["n"] = i
            state["w"][:500] += 1e-3
            saver.save_async(state, f"{i}.pt").wait()
    path = tmp_path / "2.pt"
    good = path.read_bytes()
    detected = harmless = 0
    for case in range(500):
        data = bytearray(good)
        match case % 3:
            case 0:
                at = chance.randrange(len(data) * 8)
                data[at // 8] ^= 1 << at % 8
            case 1:
                at = chance.randrange(len(data))
                data[at : at + 4096] = bytes(len(data[at : at + 4096]))
            case 2:
                data = data[: chance.randrange(len(data))]
        path.write_bytes(data)
        try:
            loaded = load_checkpoint(path)
        except errors.DataError:
            detected += 1
        else:
            assert_equal(loaded, state)
            harmless += 1
    assert detected + harmless == 500
    assert detected > 480


def kill(path, kills):
    script = Path(__file__).with_name("kill_campaign.py")
    figures = run_campaign(script, path, kills, timeout_s=2900)
    assert figures["kills"] == kills
    assert figures["acknowledged"] >= kills
    assert (figures["lost"], figures["unreadable"]) == (0, 0)


def test_kill_9(tmp_path):
    kill(tmp_path, 20)


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_kill_9_two_hundred_times(tmp_path):
    kill(tmp_path, 200)


def let_calls_fail(tmp_path, size):
    library = compile_faulty_disk(tmp_path)
    if library is None:
        pytest.skip("needs gcc, for a library that lets system calls fail")
    figures = run_campaign(
        Path(__file__).with_name("disk_campaign.py"),
        tmp_path,
        size,
        timeout_s=3000,
        LD_PRELOAD=str(library),
        FAULTY_DISK=str(tmp_path / "disk"),
    )
    sys.stdout.write(f"{figures}\n")
    assert figures["wrong"] == []
    assert figures["reported"] > 50
    return figures["faults"]


def test_every_call_fails_once(tmp_path):
    """EIO or ENOSPC at the n-th write, fsync, rename, …, for every n; and short writes."""
    assert let_calls_fail(tmp_path, "small") > 150


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_every_call_fails_in_every_way(tmp_path):
    assert let_calls_fail(tmp_path, "large") > 1000


def test_saves_at_the_strangest_moments(tmp_path):
    """In `atexit`, in a signal handler, without threads, …: written, or refused by name."""
    script = Path(__file__).with_name("exit_campaign.py")
    figures = run_campaign(script, tmp_path, timeout_s=480)
    assert figures["wrong"] == []
    assert len(figures["cases"]) > 20
