"""The demo, short: it resumes bit by bit, recovers, and overwrites nothing of others."""

from __future__ import annotations

import pytest

from penstock.errors import UsageError
from penstock.tools import demo

# Each starts processes that import torch: slow on a loaded machine.
pytestmark = pytest.mark.timeout(500)


def test_demo_tells_its_story_and_may_run_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    out = tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    report = demo.run(out, iterations=12)
    said = capsys.readouterr().out
    assert "killed at iteration 6" in said
    assert "tensors are bit-identical" in said
    assert "warning: fell back to" in said
    assert "<svg" in report.read_text()
    (out / "mine.txt").write_text("keep me")
    demo.run(out, iterations=8)
    assert (out / "mine.txt").read_text() == "keep me"


def test_demo_refuses_a_folder_it_did_not_make(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(UsageError, match="not made by the demo"):
        demo.run(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        demo.run(tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
