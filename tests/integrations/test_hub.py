"""A dataset is pushed to the hub: a stand-in of it, with the real huggingface_hub."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cli import main as penstock

HERE = Path(__file__).parent
pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: pip install penstock[hub]")
Hub = runpy.run_path(str(HERE / "hub_stand_in.py"))["Hub"]
hand = SimpleNamespace(**runpy.run_path(str(HERE.parent / "dataset" / "handmade.py")))
pytestmark = pytest.mark.timeout(300)


def push(hub: Hub, *words: str, token: str = "hf_test", home: Path) -> subprocess.CompletedProcess:
    """Run the command; the library reads its settings when it is imported."""
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": token,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-m", "penstock", "push", *words]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    root = hand.make_dataset(tmp_path / "set")
    (root / ".penstock").mkdir()
    (root / ".penstock/built.json").write_text("private")
    (root / ".penstock.lock").write_text("machine, user and command line of the last writer")
    return root


def content(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
        and path.relative_to(root).parts[0] not in (".penstock", ".penstock.lock", ".cache")
    }


def test_a_push_brings_everything_but_what_is_private(dataset: Path, tmp_path: Path) -> None:
    with Hub() as hub:
        done = push(hub, str(dataset), "me/cups", "--license", "mit", home=tmp_path / "home")
        assert done.returncode == 0, done.stderr
        assert {n: d for n, d in hub.files.items() if n != ".gitattributes"} == content(dataset)
        assert "README.md" in hub.files and b"license: mit" in hub.files["README.md"]
        assert hub.tags == {"v3.0": f"{hub.commits:040d}"}
        assert list(hub.repositories) == ["me/cups"]


def test_a_failed_push_goes_on(dataset: Path, tmp_path: Path) -> None:
    with Hub() as hub:
        hub.refuse = 3
        done = push(hub, str(dataset), "me/cups", home=tmp_path / "home")
        assert done.returncode == 4 and "push again" in done.stderr
        assert len(done.stderr.strip().splitlines()) >= 1 and hub.tags == {}
        before = list(hub.uploads)
        assert len(before) == 3
        hub.refuse = None
        done = push(hub, str(dataset), "me/cups", home=tmp_path / "home")
        assert done.returncode == 0, done.stderr
        assert len(set(hub.uploads)) == len(hub.uploads)  # nothing was sent twice
        assert {n: d for n, d in hub.files.items() if n != ".gitattributes"} == content(dataset)
        done = push(hub, str(dataset), "me/cups", home=tmp_path / "home")
        assert done.returncode == 0 and hub.tags == {"v3.0": f"{hub.commits:040d}"}


def test_who_may_not_is_told(dataset: Path, tmp_path: Path) -> None:
    with Hub() as hub:
        done = push(hub, str(dataset), "me/cups", token="hf_wrong", home=tmp_path / "home")
    assert done.returncode == 4 and "hf auth login" in done.stderr and not hub.files


def test_a_wrong_name_is_told(dataset: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("cups", "a/b/c", "me/", "me/cu ps"):
        assert penstock(["push", str(dataset), name]) == 2
    assert "user/name" in capsys.readouterr().err
