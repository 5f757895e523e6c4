"""Start the real lerobot, 0.4.4 for v3.0 and 0.3.3 for v2.1, in a Python of its own.

    python3 -m venv .venv-peers
    .venv-peers/bin/pip install lerobot==0.4.4
    .venv-peers/bin/pip install --no-deps --target .venv-peers/v21 lerobot==0.3.3 datasets==3.6.0

PENSTOCK_PEERS_PYTHON names another Python with lerobot, PENSTOCK_PEERS_V21 another folder.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent


def environment(old: bool) -> dict[str, str]:
    """The variables for a lerobot that stays offline; `old` chooses the one of v2.1."""
    chosen = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if old:
        folder = Path(os.environ.get("PENSTOCK_PEERS_V21", PROJECT / ".venv-peers" / "v21"))
        if not (folder / "lerobot").is_dir():
            pytest.fail(f"{folder} has no lerobot 0.3.3; see the head of {__file__}")
        chosen["PYTHONPATH"] = str(folder)
    return {**chosen, "HF_HUB_OFFLINE": "1", "SVT_LOG": "1", "OMP_NUM_THREADS": "1"}


def run(script: str, *words: object, old: bool = False) -> subprocess.CompletedProcess[str]:
    python = Path(
        os.environ.get("PENSTOCK_PEERS_PYTHON", PROJECT / ".venv-peers" / "bin" / "python")
    )
    if not python.exists():
        pytest.fail(f"{python} is missing: run `make test-peers`, or see the head of {__file__}")
    return subprocess.run(
        [python, HERE / script, *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(old),
        check=False,
    )


def lerobot_reads(root: Path, expect: Path, *words: object, old: bool = False) -> dict:
    """Let lerobot read every frame; return its verdict, which must be good."""
    result = run("check_dataset.py", root, "--expect", expect, *words, old=old)
    assert result.stdout, result.stderr[-3000:]
    verdict = json.loads(result.stdout)
    assert verdict["ok"], json.dumps(verdict, indent=1)[:5000]
    assert "pyav" in verdict["backends"]
    return verdict
