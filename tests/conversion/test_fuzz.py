"""Damaged bags through opening, planning, reading and decoding: a clean error or an honest report,
never a hang, never more memory than the cap."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("fuzz_worker.py")


def fuzz(folder: Path, first: int, count: int, timeout_s: float) -> dict:
    result = subprocess.run(
        [sys.executable, str(WORKER), str(folder), str(first), str(count)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    figures = json.loads(result.stdout)
    assert figures["wrong"] == [], figures
    assert figures["cases"] == count
    return figures


def test_a_hundred_damaged_bags(tmp_path):
    figures = fuzz(tmp_path, 0, 100, 110)
    assert figures["outcomes"]["refused"] > 20, figures
    assert figures["outcomes"]["salvaged with salvage"] > 20, figures


@pytest.mark.stress
@pytest.mark.timeout(1500)
def test_two_thousand_damaged_bags(tmp_path):
    figures = fuzz(tmp_path, 1000, 2000, 1400)
    sys.stdout.write(json.dumps(figures) + "\n")
