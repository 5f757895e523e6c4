"""Penstock and lerobot 0.6.1 in one environment: no conflict, and each reads what the other needs.

    python3.12 -m venv .venv-peers-312
    .venv-peers-312/bin/pip install "lerobot[dataset]==0.6.1" .

PENSTOCK_BESIDE_PYTHON names another Python that has both.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from .peer import PROJECT, environment

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

SAMPLE = """
from penstock.samples import write_sample
write_sample("take.bag", seconds=1, cameras=1, width=64, height=48)
"""


@pytest.fixture(scope="module")
def python() -> Path:
    default = PROJECT / ".venv-peers-312" / "bin" / "python"
    chosen = Path(os.environ.get("PENSTOCK_BESIDE_PYTHON", default))
    if not chosen.exists():
        pytest.fail(f"{chosen} is missing: run `make test-peers`, or see the head of {__file__}")
    return chosen


def run(*words: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment(old=False),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_nothing_conflicts(python, tmp_path) -> None:
    assert "No broken requirements" in run(python, "-m", "pip", "check", cwd=tmp_path)
    versions = run(
        python,
        "-c",
        "from importlib.metadata import version as v; print(v('lerobot'), v('av'), v('penstock'))",
        cwd=tmp_path,
    ).split()
    assert versions[0] == "0.6.1"
    assert versions[1].startswith("15.")


@pytest.mark.parametrize("codec", ["h264", "copy"])
def test_lerobot_reads_what_penstock_converts_beside_it(python, tmp_path, codec) -> None:
    run(python, "-c", SAMPLE, cwd=tmp_path)
    run(python, "-m", "penstock", "convert", "take.bag", "set", "--codec", codec, cwd=tmp_path)
    run(python, "-m", "penstock", "doctor", "set", cwd=tmp_path)
    script = Path(__file__).with_name("check_dataset.py")
    verdict = json.loads(run(python, script, "set", cwd=tmp_path))
    assert verdict["ok"], verdict
    assert verdict["backends"]["pyav"]["frames"] == 30
