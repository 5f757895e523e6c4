"""The real Lightning and the real transformers: killed, resumed, equal to what was not stopped.

They have an environment of their own, .venv-integrations, made by `make test-peers`;
PENSTOCK_INTEGRATIONS_PYTHON names another Python that has both.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from penstock.checkpoints.load import load_checkpoint, to_torch

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
KILLED = -9

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]


def run(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    usual = PROJECT / ".venv-integrations" / "bin" / "python"
    python = Path(os.environ.get("PENSTOCK_INTEGRATIONS_PYTHON", usual))
    if not python.exists():
        pytest.fail(f"{python} is missing: run `make test-peers`, or see the head of {__file__}")
    return subprocess.run(
        [python, HERE / script, *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(PROJECT / "src"), "HF_HUB_OFFLINE": "1"},
        check=False,
    )


def finished(script: str, folder: Path, *words: object) -> dict:
    out = folder.with_suffix(".torch")
    result = run(script, folder, out, *words)
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(out)


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("average", ["none", "swa", "ema"])
def test_lightning_resumes_bit_for_bit(tmp_path: Path, average: str) -> None:
    script, words = "fit_lightning.py", ("--average", average)
    straight = finished(script, tmp_path / "straight", *words)
    assert run(script, tmp_path / "a", tmp_path / "x", *words, "--kill-at", 4).returncode == KILLED
    resumed = finished(script, tmp_path / "a", *words, "--resume", tmp_path / "a")  # the folder
    assert resumed["epoch"] == straight["epoch"]
    assert same(resumed["weights"], straight["weights"])
    assert same(resumed["optimizer"], straight["optimizer"])
    # ModelCheckpoint has chosen, loaded and removed as ever.
    assert resumed["best"][0] == straight["best"][0]
    kept = {path.name for path in (tmp_path / "straight").glob("*.ckpt")}
    left = {path.name for path in (tmp_path / "a").glob("*.ckpt")}
    assert len(kept) == 3
    # A kill between a save and the removal that it allows leaves a file that Lightning has
    # forgotten; there is at most one.
    assert kept <= left
    assert len(left) <= 4


def test_lightning_kill_never_finds_nothing(tmp_path: Path) -> None:
    """Old checkpoints go only when newer ones are durable; what is there is whole."""
    for epoch in (1, 2, 3):
        folder = tmp_path / str(epoch)
        run("fit_lightning.py", folder, tmp_path / "x", "--kill-at", epoch)
        assert load_checkpoint(folder)["epoch"] in range(epoch)
        for path in folder.glob("*.ckpt"):
            load_checkpoint(path)


def test_lightning_refuses_by_name_and_converts(tmp_path: Path) -> None:
    result = run("fit_lightning.py", tmp_path / "bad", tmp_path / "x", "--bad")
    assert result.returncode == 1
    assert "UnsupportedValue: hyper_parameters.loss is a torch.nn" in result.stderr
    finished("fit_lightning.py", tmp_path / "good")
    out = to_torch(tmp_path / "good", tmp_path / "out.ckpt")
    assert torch.load(out, weights_only=True)["hyper_parameters"]["width"] == 16


def test_transformers_resumes_bit_for_bit(tmp_path: Path) -> None:
    script = "fit_transformers.py"
    straight = finished(script, tmp_path / "straight")
    assert run(script, tmp_path / "a", tmp_path / "x", "--kill-at", 22).returncode == KILLED
    assert sorted(path.name for path in (tmp_path / "a").glob("*.pt"))[:2] == [
        "checkpoint-10.pt",
        "checkpoint-15.pt",
    ]
    resumed = finished(script, tmp_path / "a", "--resume", tmp_path / "a")
    assert resumed["step"] == straight["step"]
    assert same(resumed["weights"], straight["weights"])
    assert same(resumed["optimizer"], straight["optimizer"])
    for log in (resumed["log"], straight["log"]):
        for row in log:
            row.pop("loss", None)  # a mean since the last row, which the Trainer begins anew
    assert same(resumed["log"], straight["log"])


def test_transformers_refuses_what_it_did_not_save(tmp_path: Path) -> None:
    torch.save({"x": 1}, tmp_path / "x.pt")
    words = ("--resume", tmp_path / "x.pt")
    result = run("fit_transformers.py", tmp_path / "a", tmp_path / "y", *words)
    assert "UsageError" in result.stderr
    assert "was not saved by PenstockCallback" in result.stderr
