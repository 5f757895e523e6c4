"""kill -9 at random moments, again and again: nothing acknowledged is lost, and the end is the same."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from staging import files_of, write_dataset

from penstock.lerobot.writer import DatasetWriter

EPISODES = 10
KILLS = 15
HERE = Path(__file__).parent


def run(out: Path, version: str, kill_after_s: float | None) -> tuple[bool, set[int]]:
    """Run a writer, kill it after a while; return whether it finished, and what it acknowledged."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "staging.py"), str(out), str(EPISODES), version],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    if kill_after_s is not None:
        # The clock starts when the writer does: importing takes longer than all the rest.
        lines.append(process.stdout.readline())
        time.sleep(kill_after_s)
        process.send_signal(signal.SIGKILL)
    out_text, error = process.communicate(timeout=60)
    lines += out_text.splitlines()
    assert process.returncode in (0, -9), error
    words = [line.split() for line in lines if line.startswith("committed")]
    return process.returncode == 0, {int(number) for _, number in words}


def check_consistent(out: Path, acknowledged: set[int]) -> None:
    if not (out / ".penstock" / "journal.jsonl").exists():
        assert not acknowledged
        return
    info = out / "meta" / "info.json"
    if info.exists():
        # Even before recovery info.json is whole, and says no more than what was committed.
        assert json.loads(info.read_text())["total_episodes"] >= 0


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_kills_lose_nothing_and_change_nothing(tmp_path: Path, version: str) -> None:
    whole = tmp_path / "whole"
    write_dataset(whole, EPISODES, version=version)
    expected = files_of(whole)
    dice = random.Random(version)
    kills = 0
    out, acknowledged = tmp_path / "killed-0", set()
    while kills < KILLS:
        finished, told = run(out, version, dice.uniform(0, 0.5))
        acknowledged |= told
        check_consistent(out, acknowledged)
        if finished:
            assert files_of(out) == expected
            out, acknowledged = tmp_path / f"killed-{kills}", set()
        else:
            kills += 1
            with DatasetWriter.__new__(DatasetWriter)._reopen(out) as writer:  # type: ignore
                assert acknowledged <= {source["number"] for source in writer.committed}
    finished, _ = run(out, version, None)
    assert finished
    assert files_of(out) == expected
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
