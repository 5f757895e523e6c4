"""The examples run as they are, are short, and say what they show.

Importing torch and TorchRL takes seconds, and every example needs them: they are imported once, in
a process that then forks for each example.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
MAX_LINES = {"dqn_pixels": 140, "ros2_navigator": 240, "sac_navigation": 170}  # else 40
NEED_ROS = {"ros2_navigator"}  # its messages are tested in tests/nav/test_ros2_navigator.py
NEWS = {  # words that a good run prints; each holds a figure of that run
    "advise": "ratio",
    "convert_bag": "60 in = 60 out + 0 dropped",
    "convert_kuavo": "40 frames at 20 Hz",
    "dqn_pixels": "caught, ",
    "monitor": "Performance Summary",
    "navigation_env": "decisions/s",
    "pipelined": "ahead   : 2560 frames",
    "replay_buffer": "4000 pictures: 28.2 MB",
    "rollouts": "times smaller",
    "rollouts_to_lerobot_to_replay": "equal",
    "sac_navigation": "cross, buffer",
    "save_checkpoints": "6 saved",
    "torchrl_replay": "6400 frames",
    "train_navigation": "4 iterations",
}
ARGUMENTS = {
    "dqn_pixels": ["--iterations", "40"],
    "sac_navigation": ["--steps", "22", "--drones", "2"],
}
AGAIN = {"convert_bag": "1 episode(s)", "save_checkpoints": "after step 60"}
WARM = """
import json, os, runpy, sys
import numba, tensordict, torch._dynamo, torchrl.collectors, torchrl.data, torchrl.envs

for line in sys.stdin:
    path, folder, words = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        sys.argv = [path, *words]
        sys.path[0] = os.path.dirname(path)
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            import traceback
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""

Run = Callable[[Path, Path], tuple[int, str, str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run an example in a folder; gives its exit code, and what it printed."""
    env = {**os.environ, "PENSTOCK_PROGRESS": "quiet", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", WARM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as warm:
        assert warm.stdin is not None and warm.stdout is not None

        def start(path: Path, folder: Path) -> tuple[int, str, str]:
            words = ARGUMENTS.get(path.stem, [])
            warm.stdin.write(json.dumps([str(path), str(folder), words]) + "\n")
            warm.stdin.flush()
            code = int(warm.stdout.readline())
            return code, (folder / "stdout").read_text(), (folder / "stderr").read_text()

        yield start
        warm.stdin.close()


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.stem not in NEED_ROS], ids=lambda path: path.stem
)
def test_example_runs(path: Path, run: Run, tmp_path: Path) -> None:
    code, out, err = run(path, tmp_path)
    assert code == 0, err
    assert NEWS[path.stem] in out, out
    assert "Warning" not in err and "penstock:" not in err, err
    if path.stem in AGAIN:  # it says that it goes on
        code, out, err = run(path, tmp_path)
        assert code == 0, err
        assert AGAIN[path.stem] in out, out


def test_a_failing_example_is_noticed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("print('before')\nraise ValueError('on purpose')\n")
    code, out, err = run(path, tmp_path)
    assert code == 1 and "on purpose" in err and "before" in out


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} == NEWS.keys() | NEED_ROS


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_says_what_it_shows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MAX_LINES.get(path.stem, 40)
    lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    assert lines[0].endswith("."), "the first line is a sentence"
    assert any(f"python examples/{path.name}" in line for line in lines), "says how to run it"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_uses_public_names_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            assert not [name for name in names if name.startswith("_")]
