"""kill -9 at random moments: nothing acknowledged is lost, and the files end up the same."""

from __future__ import annotations

import json
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from penstock.dataset.writer import DatasetWriter

STAGING = Path(__file__).with_name("staging.py")
s = SimpleNamespace(**runpy.run_path(str(STAGING)))
EPISODES = 6


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
    text, error = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), error
    words = [line.split() for line in text.splitlines() if line.startswith("committed")]
    return process.returncode == 0, {int(number) for _, number in words}


def reopen(out: Path, version: str, acknowledged: set[int]) -> None:
    """Recover, and compare what there is with what the journal says."""
    settings = {"x": 1}
    with DatasetWriter(
        out, s.FEATURES, s.FPS, "testbot", version=version, mode="resume", settings=settings
    ) as writer:
        numbers = [source["number"] for source in writer.committed]
        frames = writer.total_frames
    assert acknowledged <= set(numbers)
    assert numbers == list(range(len(numbers)))
    if not numbers:
        return
    info = json.loads((out / "meta/info.json").read_bytes())
    assert (info["total_episodes"], info["total_frames"]) == (len(numbers), frames)
    assert frames == sum(5 + number % 4 for number in numbers)
    assert sum(pq.read_metadata(path).num_rows for path in out.glob("data/*/*.parquet")) == frames
    if version == "v3.0":
        episodes = [pq.read_metadata(path).num_rows for path in out.glob("meta/episodes/*/*")]
        assert sum(episodes) == len(numbers)
    else:
        assert len((out / "meta/episodes.jsonl").read_bytes().splitlines()) == len(numbers)


@pytest.mark.timeout(400)  # a process per kill, and fsyncs: slow on a loaded machine
@pytest.mark.parametrize(("version", "kills"), [("v3.0", 15), ("v2.1", 4)])
def test_kills_lose_nothing_and_change_nothing(tmp_path: Path, version: str, kills: int) -> None:
    start = time.monotonic()
    s.write_dataset(tmp_path / "whole", EPISODES, version=version)
    whole_s = time.monotonic() - start
    expected = s.files_of(tmp_path / "whole")
    dice = random.Random(version)
    done = begun = 0
    out, acknowledged = tmp_path / "killed-0", set()
    while done < kills:
        finished, told = run(out, version, dice.uniform(0, whole_s))
        acknowledged |= told
        if finished:
            assert s.files_of(out) == expected
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
    assert s.files_of(out) == expected
    assert list(tmp_path.glob(".*")) == []
