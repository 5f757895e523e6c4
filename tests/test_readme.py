"""Every command and every snippet of the README runs, in both languages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from penstock import cli
from penstock.samples import write_sample

ROOT = Path(__file__).parent.parent
READMES = ("README.md", "README.zh-CN.md")
SMALL = {  # what makes a command take seconds
    "train": [
        *("env.num_envs=16", "env.maps=1", "env.num_obstacles=10", "env_dyn.num_obstacles=8"),
        *("env.max_episode_length=30", "algo.training_frame_num=8", "algo.minibatches=2"),
        *("algo.epochs=1", "save_interval=1", "rollout_save_interval=1", "processes=1"),
        *("tensorboard=False", "wandb.mode=disabled", "eval_interval=1", "eval_worlds=1"),
        "eval_drones=4",
    ],
    "view": ["--foxglove", "episode.mcap"],  # and end
    "evaluate": ["--worlds", "1", "--drones", "2"],
}


def blocks(name: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands(name: str) -> list[list[str]]:
    """The commands of a page, one after the other."""
    lines = [line for block in blocks(name, "bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.timeout(600)
def test_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    monkeypatch.chdir(tmp_path)
    size = {"seconds": 1, "width": 64, "height": 48, "cameras": 1, "state_hz": 50}
    for seed, name in enumerate(("take.bag", "take2.bag")):
        write_sample(Path("bags") / name, seed=seed, **size)
    ran, trained = [], 0
    for verb, *words in (words[1:] for words in commands("README.md") if words[0] == "penstock"):
        more = list(SMALL.get(verb, []))
        if verb == "train":
            trained += 1
            more.append(f"max_iterations={trained}")
        if "--resume" in words:
            more = more[-1:]
        assert cli.main([verb, *words, *more]) == 0, (verb, words, capsys.readouterr())
        ran.append(verb)
    assert {"info", "convert", "doctor", "edit", "train", "evaluate", "export"} <= set(ran)


@pytest.mark.parametrize("name", READMES)
def test_snippets_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = blocks(name, "python")
    assert len(found) >= 2
    for block in found:
        exec(compile(block, name, "exec"), {})


def test_both_readmes_have_the_same_commands():
    assert commands("README.md") == commands("README.zh-CN.md")
    assert blocks("README.md", "python")[1].splitlines()[:-1] == [
        *blocks("README.zh-CN.md", "python")[1].splitlines()[:-1]
    ]


@pytest.mark.parametrize("name", READMES)
def test_the_readme_is_short(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 120


def test_other_commands_exist():
    """What is not penstock's: make and pip."""
    makefile = (ROOT / "Makefile").read_text()
    for words in commands("README.md"):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.M)
        else:
            assert words[0] in ("pip", "penstock")
