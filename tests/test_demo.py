"""The tour, short: every step runs, every figure is there, and it overwrites nothing of others."""

from __future__ import annotations

import re

import pytest

from penstock import demo
from penstock.demo.stage import Stage
from penstock.errors import PenstockError, UsageError

SMALL = ("env.num_envs=64", "env.maps=2", "processes=1", "eval_worlds=2", "eval_drones=2")
SHORT = "max_iterations=60"


@pytest.mark.timeout(600)  # a dozen processes, most of which import torch
def test_the_tour(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    report = demo.run(
        "demo", minutes=10, stop_after=0, seconds=1.0, drones=2, settings=(*SMALL, SHORT)
    )
    said = capfd.readouterr().out
    commands = [word for word in re.findall(r"\$ penstock (\w+)", said) if word != "view"]
    assert commands == [  # view needs a browser
        *("info", "convert", "doctor", "edit", "edit", "train", "train", "evaluate", "export"),
        *("info", "export", "advise", "doctor"),
    ]
    assert "^C" in said or "kill -TERM" in said  # where Ctrl-C is ignored
    assert "warning: fell back to" in said
    page = report.read_text()
    assert page.count("<svg") >= 3
    assert "data:image/png" in page
    for figure in ("peak memory", "paused per checkpoint", "policy + shield", "a bit flipped"):
        assert figure in page
    # What the tour left is cleared, what somebody else put there is kept.
    (tmp_path / "demo" / "mine.txt").write_text("keep me")
    Stage("demo", ("run", "dataset"))
    assert (tmp_path / "demo" / "mine.txt").read_text() == "keep me"
    assert not (tmp_path / "demo" / "run").exists()


def test_a_command_that_fails_ends_the_tour(tmp_path, capfd):
    stage = Stage(tmp_path / "demo", ())
    with pytest.raises(PenstockError, match=r"penstock info \S+ ended with code 2 instead of 0"):
        stage.run("info", tmp_path / "nothing.bag")
    assert "nothing.bag" in capfd.readouterr().err


def test_a_command_that_ends_before_it_is_interrupted(tmp_path, capfd):
    """On a slow or paused machine, a training reaches its last minute before anybody stops it."""
    stage = Stage(tmp_path / "demo", ())
    stage.interrupt("--version", when=lambda: False)
    with pytest.raises(PenstockError, match="ended with code 2"):
        stage.interrupt("info", tmp_path / "nothing.bag", when=lambda: False)
    assert "nothing.bag" in capfd.readouterr().err


def test_demo_refuses_a_folder_it_did_not_make(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(UsageError, match="not made by the demo"):
        demo.run(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        demo.run(tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
