"""Disks that fail or are full, and kill -9 at random moments: nothing acknowledged is lost."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from harness import remount, small_disk
from penstock.dataset import swap
from penstock.dataset.reader import Dataset
from penstock.dataset.writer import DatasetWriter
from penstock.errors import StorageError, UsageError

STAGING = Path(__file__).with_name("staging.py")
s = SimpleNamespace(**runpy.run_path(str(STAGING)))
VERSIONS = ["v3.0", "v2.1"]
EPISODES = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The files of a dataset that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    for version in VERSIONS:
        s.write_dataset(folder / version, EPISODES, version=version)
    return {version: s.files_of(folder / version) for version in VERSIONS}


@contextmanager
def failing(call: str, at: int) -> Iterator[list[int]]:
    """Let the n-th call of a function of os fail; yield a list of the calls that were made."""
    real, calls = getattr(os, call), []

    def fail(*words: object, **more: object) -> object:
        calls.append(1)
        if len(calls) == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*words, **more)

    accessor = getattr(pathlib, "_NormalAccessor", None)  # until 3.10 paths call it, not os
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, fail)
        if hasattr(accessor, call):
            patch.setattr(accessor, call, staticmethod(fail))
        yield calls


@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_failing_step_of_a_commit_is_taken_back(
    tmp_path: Path, version: str, call: str, whole
) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 5, version=version)
    before = s.files_of(out)
    with s.open_writer(out, "resume", version=version) as writer:
        at = 0
        while True:
            at += 1
            try:
                with failing(call, at):
                    s.commit(writer, 5)
                break
            except StorageError as error:
                assert "check it before" in str(error)
            assert s.files_of(out) == before
            assert writer.total_episodes == 5
            assert list(writer.units.iterdir()) == []
        assert at > (1 if call == "rename" else 4)
        writer.build()
    assert s.files_of(out) == whole[version]


@pytest.mark.parametrize(
    ("version", "call", "exchanges"),
    [
        *(("v3.0", call, True) for call in ("fsync", "rename", "replace", "link", "mkdir")),
        ("v3.0", "rename", False),
        *(("v2.1", call, True) for call in ("fsync", "replace")),
    ],
)
def test_every_failing_step_of_a_build_keeps_the_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, call: str, exchanges: bool, whole
) -> None:
    """The dataset is the old or the new one, and a second try by the same writer goes on."""
    if not exchanges:
        monkeypatch.setattr(swap, "_rename_exchange", lambda a, b: False)
    out, template = tmp_path / "d", tmp_path / "template"
    s.write_dataset(template, 3, version=version)
    s.write_dataset(template, EPISODES, version=version, mode="resume", build=False)
    before, failed = s.files_of(template), 0
    while True:
        failed += 1
        shutil.copytree(template, out)
        with s.open_writer(out, "resume", version=version) as writer:
            try:
                with failing(call, failed) as calls:
                    writer.build()
            except StorageError:
                assert writer.total_episodes == EPISODES
                assert s.files_of(out) in (before, whole[version])
                writer.build()
        assert s.files_of(out) == whole[version]
        assert {path.name for path in tmp_path.iterdir()} == {"d", "template"}
        shutil.rmtree(out)
        if len(calls) < failed:
            break
    assert failed > (1 if call == "link" else 5)


@pytest.mark.parametrize("size_kb", [60, 100, 160, 240])
def test_a_full_disk_stops_commits_and_loses_nothing(tmp_path: Path, size_kb: int, whole) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, f"size={size_kb}k") as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        done = 0
        with pytest.raises(StorageError, match="No space left"):  # noqa: SIM117
            with s.open_writer(disk / "d") as writer:
                for number in range(20):
                    s.commit(writer, number)
                    done += 1
        remount(disk, "size=20m")
        if done <= EPISODES:
            with s.open_writer(disk / "d", "resume") as writer:
                assert writer.committed == [{"number": number} for number in range(done)]
            s.write_dataset(disk / "d", EPISODES, mode="resume")
            assert s.files_of(disk / "d") == whole["v3.0"]
        assert [path.name for path in disk.iterdir()] == ["d"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_full_disk_stops_a_build_and_loses_nothing(tmp_path: Path, version: str, whole) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "size=20m") as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        s.write_dataset(disk / "d", 3, version=version)
        s.write_dataset(disk / "d", EPISODES, version=version, mode="resume", build=False)
        before = s.files_of(disk / "d")
        full = os.statvfs(disk)
        used_kb = (full.f_blocks - full.f_bfree) * full.f_frsize // 1024
        for spare_kb in (0, 8, 24, 48, 96):
            remount(disk, f"size={used_kb + spare_kb}k")
            with s.open_writer(disk / "d", "resume", version=version) as writer:
                try:
                    writer.build()
                    break
                except StorageError as error:
                    assert "No space left" in str(error)
                assert writer.total_episodes == EPISODES
            assert s.files_of(disk / "d") == before
        else:
            spare_kb = 0
        assert spare_kb != 0 or before == s.files_of(disk / "d")
        remount(disk, "size=20m")
        s.write_dataset(disk / "d", EPISODES, version=version, mode="resume")
        assert s.files_of(disk / "d") == whole[version]
        assert [path.name for path in disk.iterdir()] == ["d"]


def test_a_folder_that_cannot_be_built_in_is_refused_before_the_work(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "size=20m") as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        with pytest.raises(UsageError, match="whole disk"):
            s.open_writer(disk)
        assert list(disk.iterdir()) == []


# --- kills ---


def run(out: Path, version: str, kill_after_s: float | None) -> tuple[bool, set[int]]:
    """Run a writer and kill it; return whether it was faster, and what it acknowledged."""
    process = subprocess.Popen(
        [sys.executable, str(STAGING), str(out), str(EPISODES), version],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # imported, not yet opened: the time counts from here
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        process.send_signal(signal.SIGKILL)
    text, error = process.communicate(timeout=240)
    assert process.returncode in (0, -signal.SIGKILL), error
    words = [line.split() for line in text.splitlines() if line.startswith("committed")]
    return process.returncode == 0, {int(number) for _, number in words}


def reopen(out: Path, version: str, acknowledged: set[int]) -> None:
    """Open and build what is there, and compare it with what was acknowledged."""
    if not (out / ".penstock/plan.json").exists() and not swap.sibling(out, "old").exists():
        assert not acknowledged
        return
    with DatasetWriter.reopen(out) as writer:
        writer.build()
        numbers = [source["number"] for source in writer.committed]
        frames = writer.total_frames
    assert acknowledged <= set(numbers)
    assert numbers == list(range(len(numbers)))
    if not numbers:
        return
    info = json.loads((out / "meta/info.json").read_bytes())
    assert (info["total_episodes"], info["total_frames"]) == (len(numbers), frames)
    assert frames == sum(s.length_of(number) for number in numbers)
    assert sum(pq.read_metadata(path).num_rows for path in out.glob("data/*/*.parquet")) == frames
    assert [len(episode) for episode in Dataset(out).episodes] == [
        s.length_of(number) for number in numbers
    ]


@pytest.mark.timeout(400)  # a process per kill, and fsyncs: slow on a loaded machine
@pytest.mark.parametrize(("version", "kills"), [("v3.0", 12), ("v2.1", 4)])
def test_kills_lose_nothing_and_change_nothing(
    tmp_path: Path, version: str, kills: int, whole
) -> None:
    start = time.monotonic()
    s.write_dataset(tmp_path / "timed", EPISODES, version=version)
    whole_s = time.monotonic() - start
    dice = random.Random(version)
    done = begun = 0
    out, acknowledged = tmp_path / "killed-0", set()
    while done < kills:
        finished, told = run(out, version, dice.uniform(0, whole_s))
        acknowledged |= told
        if finished:
            assert s.files_of(out) == whole[version]
            begun += 1  # a name of its own: what is finished would only finish again
            out, acknowledged = tmp_path / f"killed-{begun}", set()
            whole_s *= 0.9  # the machine may have been busy when it was measured
            continue
        done += 1
        if out.exists() and dice.random() < 0.5:
            reopen(out, version, acknowledged)
    finished, _ = run(out, version, None)
    assert finished
    reopen(out, version, acknowledged)
    assert s.files_of(out) == whole[version]
    assert list(tmp_path.glob(".*")) == []
