"""kill -9 at random moments: every dataset stays readable, nothing acknowledged is lost, and the
resumed conversion gives the files of the undisturbed one, byte for byte."""

import json
import sys
from pathlib import Path

import pytest

from harness import run_campaign

CAMPAIGN = Path(__file__).with_name("kill_campaign.py")


def kill(folder: Path, kills: int, seed: int, timeout_s: float) -> dict:
    figures = run_campaign(CAMPAIGN, folder / "campaign", kills, seed, timeout_s=timeout_s)
    assert figures["kills"] == kills
    for wrong in ("lost", "unreadable", "different", "leftovers"):
        assert figures[wrong] == [], figures
    assert figures["acknowledged"] > 0
    return figures


@pytest.mark.timeout(300)
def test_fifteen_kills(tmp_path):
    figures = kill(tmp_path, 15, 1, 290)
    assert figures["in_resume"] >= 3, figures


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_two_hundred_kills(tmp_path):
    figures = kill(tmp_path, 200, 2, 2900)
    assert set(figures["by_phase"]) >= {"opening", "converting", "commit", "build"}, figures
    assert figures["in_resume"] >= 50, figures
    sys.stdout.write(json.dumps(figures) + "\n")
