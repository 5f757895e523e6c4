"""A buffer that is killed while it saves: nothing acknowledged is lost, nothing is half there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).with_name("kill_campaign.py")


def run_campaign(kind, folder, kills, timeout_s):
    result = subprocess.run(
        [sys.executable, str(CAMPAIGN), kind, str(folder), str(kills)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    for wrong in ("lost", "unreadable", "different"):
        assert figures[wrong] == [], figures
    assert figures["kills"] == kills
    assert figures["acknowledged"] >= kills
    assert figures["interrupted"] > kills // 10  # else nobody was killed in the middle of a save


@pytest.mark.timeout(300)  # starts processes that import torch: slow on a loaded machine
@pytest.mark.parametrize("kind", ["storage", "dict"])
def test_fifteen_kills(kind, tmp_path):
    run_campaign(kind, tmp_path, 15, 290)


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["storage", "dict"])
def test_two_hundred_kills(kind, tmp_path):
    run_campaign(kind, tmp_path, 200, 1700)
