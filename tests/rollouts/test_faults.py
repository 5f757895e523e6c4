"""Kills, full disks and damage: nothing acknowledged is lost, and nothing wrong is silent."""

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from harness import run_campaign, small_disk
from penstock import errors
from penstock.rollouts.storage import RolloutStorage

from .conftest import make_batch, same

# Some start processes that import torch: slow on a loaded machine.
pytestmark = pytest.mark.timeout(500)


def kill(path, kills):
    script = Path(__file__).with_name("kill_campaign.py")
    figures = run_campaign(script, path, kills, timeout_s=1500)
    assert figures["kills"] == kills
    assert figures["acknowledged"] >= kills
    assert (figures["lost"], figures["unreadable"], figures["leftovers"]) == (0, 0, [])
    return figures


def test_kill_9(tmp_path):
    kill(tmp_path, 25)


@pytest.mark.stress
@pytest.mark.timeout(2000)
def test_kill_9_two_hundred_times(tmp_path):
    sys.stdout.write(json.dumps(kill(tmp_path, 200)) + "\n")


def damaged(good, chance, case):
    data = bytearray(good)
    match case % 4:
        case 0 | 1:
            at = chance.randrange(len(data) * 8)
            data[at // 8] ^= 1 << at % 8
        case 2:
            at = chance.randrange(len(data))
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        case 3:
            data = data[: chance.randrange(len(data))]
    return bytes(data)


MANY = pytest.param(5000, marks=[pytest.mark.stress, pytest.mark.timeout(1500)])


@pytest.mark.parametrize("count", [1000, MANY])
def test_many_damages_none_silent(tmp_path, count):
    """Bit flips, zeroed pieces and truncations: an error, or exactly the right values."""
    chance = random.Random(4)
    batch = make_batch(5, 16)
    storage = RolloutStorage(tmp_path)
    path = storage.save(batch, 0)
    good = path.read_bytes()
    counts = {"detected": 0, "harmless": 0}
    for case in range(count):
        path.write_bytes(damaged(good, chance, case))
        try:
            loaded = storage.load(0)
        except errors.DataError as error:
            assert "\n" not in str(error)
            counts["detected"] += 1
        else:
            same(batch, loaded)
            counts["harmless"] += 1
    assert sum(counts.values()) == count
    assert counts["detected"] > 0.95 * count, counts


def test_a_part_is_verified_as_well(tmp_path):
    chance = random.Random(5)
    batch = make_batch(5, 16)
    storage = RolloutStorage(tmp_path)
    path = storage.save(batch, 0)
    good = path.read_bytes()
    detected = 0
    for case in range(300):
        path.write_bytes(damaged(good, chance, case))
        try:
            loaded = storage.load(0, envs=[3], steps=slice(2, 9))
        except errors.DataError:
            detected += 1
        else:
            same(batch[[3]][:, 2:9], loaded)
    assert detected > 250


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("background", [False, True])
def test_a_failing_disk(tmp_path, monkeypatch, call, background):
    batch = make_batch()
    with RolloutStorage(tmp_path, background=background, handle_signals=False) as storage:
        storage.save(batch, 1)
        storage.wait()

        def broken(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            if background:
                handle = storage.save(batch, 2)
                while not handle.done():
                    pass
            else:
                with pytest.raises(errors.StorageError, match="No space left on device; free"):
                    storage.save(batch, 2)
        if background:
            with pytest.raises(errors.StorageError, match="No space left on device; free"):
                storage.save(batch, 3)  # told at the next call, which does not start
        assert storage.iterations() == [1]
        assert [p.name for p in tmp_path.iterdir()] == ["rollout_000001.pack"]
        storage.save(batch, 4)
    same(batch, storage.load(4))


FULL_DISK = """
import resource, sys, torch
from tensordict import TensorDict
from penstock.errors import StorageError
from penstock.rollouts.storage import RolloutStorage
storage = RolloutStorage(sys.argv[1])
small = TensorDict({"x": torch.randn(2, 3, 100)}, batch_size=[2, 3])
storage.save(small, 1)
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    storage.save(TensorDict({"x": torch.randn(20, 30, 5000)}, batch_size=[20, 30]), 2)
except StorageError as error:
    print(error)
storage.save(small, 3)
print(storage.iterations())
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
    message, numbers = result.stdout.splitlines()
    assert numbers == "[1, 3]"
    assert sorted(p.name for p in path.iterdir()) == ["rollout_000001.pack", "rollout_000003.pack"]
    return message


def test_a_full_disk(tmp_path):
    """A real tmpfs of 4 MB where mounting is allowed, and always a limit of the file size."""
    limited, small = tmp_path / "limited", tmp_path / "small"
    limited.mkdir()
    assert "file size limit" in run_on_full_disk(limited, "limit")
    with small_disk(small, "size=4m") as mounted:
        if mounted:
            assert "No space left on device; free some space" in run_on_full_disk(small, "tmpfs")


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.StorageError, match="a part of this path is a file"):
        RolloutStorage(tmp_path / "file" / "rollouts")
