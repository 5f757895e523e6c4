"""A buffer that is killed while it saves: nothing acknowledged is lost, nothing is half there."""

from pathlib import Path

import pytest

from harness import run_campaign

CAMPAIGN = Path(__file__).with_name("kill_campaign.py")


def kill(kind, folder, kills, timeout_s):
    figures = run_campaign(CAMPAIGN, kind, folder, kills, timeout_s=timeout_s)
    for wrong in ("lost", "unreadable", "different"):
        assert figures[wrong] == [], figures
    assert figures["kills"] == kills
    assert figures["acknowledged"] >= kills
    assert figures["interrupted"] > kills // 10  # else nobody was killed in the middle of a save


@pytest.mark.timeout(300)  # starts processes that import torch: slow on a loaded machine
@pytest.mark.parametrize("kind", ["storage", "dict"])
def test_fifteen_kills(kind, tmp_path):
    kill(kind, tmp_path, 15, 290)


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["storage", "dict"])
def test_two_hundred_kills(kind, tmp_path):
    kill(kind, tmp_path, 200, 1700)
