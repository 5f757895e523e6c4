"""The patch of docs/navrl.md, applied to a script with NavRL's calls, killed and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock import errors
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.rollouts.storage import RolloutStorage

from .conftest import assert_equal

HERE = Path(__file__).parent / "navrl"
PAGE = Path(__file__).parents[2] / "docs" / "navrl.md"
ITERATIONS = 12
SAVED = [0, 2, 4, 6, 8, 10]


def apply(diff, text):
    """Apply a unified diff by its lines alone; each hunk must fit, after the one before."""
    lines, at = text.splitlines(), 0
    for hunk in re.split(r"^@@.*@@$\n", diff, flags=re.M)[1:]:
        body = [line or " " for line in hunk.splitlines()]
        old = [line[1:] for line in body if line[0] in " -"]
        new = [line[1:] for line in body if line[0] in " +"]
        fits = [i for i in range(at, len(lines)) if lines[i : i + len(old)] == old]
        assert fits, f"this hunk does not apply:\n{hunk}"
        lines[fits[0] : fits[0] + len(old)] = new
        at = fits[0] + len(new)
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    (diff,) = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    target = tmp_path_factory.mktemp("navrl") / "train.py"
    target.write_text(apply(diff, (HERE / "train.py").read_text()))
    return target


def start(script, wandb, *words):
    wandb.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, HERE / "stand_ins.py", script, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"NAVRL_WANDB_DIR": str(wandb)},
    )


def run(script, wandb, *words):
    """Run it to its end; return what it printed and what it logged, by frames."""
    process = start(script, wandb, *words)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    (log,) = wandb.glob("*/log.jsonl")
    rows = map(json.loads, log.read_text().splitlines())
    return printed, {row["env_frames"]: row for row in rows}


def learned(row):
    """What is logged of learning, without what is logged of time."""
    return {name: row[name] for name in row if not name.startswith(("perf/", "rollout_fps"))}


@pytest.fixture(scope="module")
def straight(script, tmp_path_factory):
    """A run that nothing stops."""
    place = tmp_path_factory.mktemp("straight")
    printed, log = run(script, place / "wandb", f"+checkpoint_dir={place / 'run'}")
    return place, printed, log


def test_learns_as_the_unpatched_script(straight, tmp_path):
    place, printed, log = straight
    _, before = run(HERE / "train.py", tmp_path / "wandb")
    assert {k: learned(v) for k, v in log.items()} == {k: learned(v) for k, v in before.items()}
    assert len(log) == ITERATIONS
    assert {"perf/train", "perf/save", "perf/save_rollout"} <= log[max(log)].keys()
    assert "Performance Summary" in printed
    (old,) = (tmp_path / "wandb").glob("*/checkpoint_final.pt")
    (new,) = (place / "wandb").glob("*/checkpoint_final.pt")  # for the robot: weights alone
    assert_equal(torch.load(new), torch.load(old))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_goes_on_bit_for_bit(script, straight, tmp_path, number):
    place, _, expected = straight
    folder = tmp_path / "run"
    with start(script, tmp_path / "one", f"+checkpoint_dir={folder}", "+hang_at=8") as process:
        for line in process.stdout:
            if line == "hanging\n":
                process.send_signal(number)
    assert process.returncode != 0
    if number != signal.SIGKILL:  # what was under way is finished
        assert load_checkpoint(folder)["iteration"] == 7
    printed, log = run(script, tmp_path / "two", f"+checkpoint_dir={folder}", f"+resume={folder}")
    assert re.search(r"resumed at training step:  [1357]\b", printed)
    assert max(log) == max(expected)
    assert len(log) < ITERATIONS
    for frames in log:
        assert learned(log[frames]) == learned(expected[frames])
    assert_equal(
        load_checkpoint(folder / "state_final.pt"), load_checkpoint(place / "run/state_final.pt")
    )


def test_the_whole_state_is_saved(straight):
    place, _, log = straight
    state = load_checkpoint(place / "run")
    assert (state["iteration"], state["frames"]) == (ITERATIONS, max(log))
    assert sorted(state["optimizers"]) == ["actor_optim", "critic_optim", "feature_extractor_optim"]
    assert all(optimizer["state"] for optimizer in state["optimizers"].values())
    assert "value_norm.running_mean" in state["policy"]
    assert {"python", "numpy", "torch"} <= state["rng"].keys()


def test_rollouts_hold_their_own_iteration(straight):
    """The collector overwrites the same tensors: a file of later values would be easy to make."""
    place, _, log = straight
    rollouts = RolloutStorage(place / "run" / "rollouts")
    assert rollouts.iterations() == SAVED
    rows = [log[frames] for frames in sorted(log)]
    for i in SAVED:
        reward = rollouts.load(i)["next"]["agents"]["reward"]
        assert reward.mean().item() == rows[i]["reward"]


def test_an_old_checkpoint_of_the_weights_alone(script, straight, tmp_path):
    place, _, _ = straight
    (old,) = (place / "wandb").glob("*/checkpoint_final.pt")
    printed, log = run(
        script, tmp_path / "wandb", f"+checkpoint_dir={tmp_path}", f"+resume={old}", "seed=4"
    )
    assert "resumed at training step:  0" in printed
    assert len(log) == ITERATIONS
    first = load_checkpoint(tmp_path / "checkpoint_0.pt")["policy"]
    weights = torch.load(old)
    # One iteration of small steps after the loaded weights; a fresh network is much farther off.
    networks = [name for name in weights if not name.startswith("value_norm")]
    assert all((first[name] - weights[name]).abs().max() < 0.1 for name in networks)


def test_a_complete_run_is_not_trained_on(script, straight, tmp_path):
    place, _, _ = straight
    process = start(
        script, tmp_path / "wandb", f"+checkpoint_dir={tmp_path}", f"+resume={place}/run"
    )
    printed, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    assert "max_frame_num" in printed.splitlines()[-1]


def test_the_folder_of_a_running_training_is_refused(script, tmp_path):
    with start(script, tmp_path / "wandb", f"+checkpoint_dir={tmp_path}", "+hang_at=3") as process:
        for line in process.stdout:
            if line == "hanging\n":
                with (
                    AsyncCheckpointSaver(tmp_path, handle_signals=False) as second,
                    pytest.raises(errors.LockHeld, match=rf"being written by .*{process.pid}"),
                ):
                    second.save_async({"x": 1}, "x.pt")
                process.kill()


def test_a_patch_that_does_not_fit_is_noticed():
    diff = "--- a\n+++ b\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    assert apply(diff, "x\na\nb\n") == "x\na\nc\n"
    with pytest.raises(AssertionError, match="does not apply"):
        apply(diff, "a\nc\n")
