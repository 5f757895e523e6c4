"""kill -9 at random moments: every dataset stays readable, nothing acknowledged is lost, and the
resumed conversion gives the files of the undisturbed one, byte for byte."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).with_name("kill_campaign.py")


def run_campaign(folder: Path, kills: int, seed: int, timeout_s: float) -> dict:
    result = subprocess.run(
        [sys.executable, str(CAMPAIGN), str(folder / "campaign"), str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    figures = json.loads(result.stdout)
    assert figures["kills"] == kills
    for wrong in ("lost", "unreadable", "different", "leftovers"):
        assert figures[wrong] == [], figures
    assert figures["acknowledged"] > 0
    return figures


@pytest.mark.timeout(300)
def test_fifteen_kills(tmp_path):
    figures = run_campaign(tmp_path, 15, 1, 290)
    assert figures["in_resume"] >= 3, figures


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_two_hundred_kills(tmp_path):
    figures = run_campaign(tmp_path, 200, 2, 2900)
    assert set(figures["by_phase"]) >= {"opening", "converting", "commit", "packing"}, figures
    assert figures["in_resume"] >= 50, figures
    sys.stdout.write(json.dumps(figures) + "\n")
