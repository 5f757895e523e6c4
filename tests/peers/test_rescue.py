"""Killed sessions of the real lerobot: what was saved comes back, and lerobot loads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .peer import run

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]
HERE = Path(__file__).parent
KILLS = 6


def test_killed_recordings_come_back(tmp_path: Path) -> None:
    kills = tmp_path / "kills"
    result = run("record.py", kills, KILLS, 7, "video", "images", "batch")
    assert result.returncode == 0, result.stderr[-3000:]
    command = [sys.executable, HERE / "rescued.py", kills]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["problems"] == [] and found["kills"] == KILLS
    assert found["came_back"] >= found["saved"]
    outs = sorted(path for path in kills.glob("*/out") if path.is_dir())
    result = run("load_all.py", *outs)
    assert result.returncode == 0, result.stderr[-3000:]
