"""Several processes, torchrun, signals and kill -9: the real things."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock import load_checkpoint
from penstock.errors import UsageError
from penstock.nav.networks import Policy
from penstock.nav.train import start

from .conftest import SMALL, differences

PENSTOCK = [sys.executable, "-m", "penstock", "train"]
BIN = Path(sys.executable).parent


def words(*more: str) -> list[str]:
    return [*(word for word in SMALL if not word.startswith("processes=")), "shards=2", *more]


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> dict:
    """What two processes make of two shards."""
    folder = tmp_path_factory.mktemp("together")
    done = run([*PENSTOCK, *words("processes=2", f"run_dir={folder}/x")])
    assert done.returncode == 0, done.stderr
    return load_checkpoint(folder / "x/checkpoints")


def weights(policy: dict) -> torch.Tensor:
    return torch.cat([value.flatten() for value in policy.values()])


def test_two_processes_learn_what_one_does():
    """In one iteration: what a processor rounds differently for half the rows soon grows."""
    once = "max_iterations=1"
    start(words("processes=1", "run_dir=alone", once))
    assert run([*PENSTOCK, *words("processes=2", "run_dir=both", once)]).returncode == 0
    alone, both = (load_checkpoint(f"{name}/checkpoints") for name in ("alone", "both"))
    assert alone["frames"] == both["frames"]
    for one, two in zip(alone["shards"], both["shards"], strict=True):
        torch.testing.assert_close(
            one["simulator/rows"], two["simulator/rows"], rtol=1e-2, atol=1e-2
        )
    before = weights(Policy("fast", seed=0).state_dict())
    one, two = (weights(state["ppo"]["policy"]) for state in (alone, both))
    assert (one - two).norm() < 0.25 * (one - before).norm()


def test_processes_may_be_fewer_when_a_run_goes_on(together):
    done = run([*PENSTOCK, *words("processes=2", "run_dir=x")])
    assert done.returncode == 0, done.stderr
    # They go on as one process, too: shards do not care who flies them.
    assert differences(load_checkpoint("x/checkpoints")["shards"], together["shards"]) == []
    assert start(["resume=x", "processes=1", "max_frame_num=2304"]).iteration == 9


def test_torchrun_learns_what_two_processes_do(together):
    script = Path(__file__).parents[3] / "train.py"
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", str(script)]
    done = run([*command, *words("run_dir=x")])
    assert done.returncode == 0, done.stderr
    assert differences(load_checkpoint("x/checkpoints"), together) == []
    assert done.stdout.count("Performance Summary") == 1  # process 0 alone speaks


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_state_and_the_run_goes_on(tmp_path, processes, number):
    words_ = words(f"processes={processes}", "run_dir=x", "max_frame_num=20e6")
    process = subprocess.Popen(
        [*PENSTOCK, *words_],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = tmp_path / "x/metrics.jsonl"
    try:
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > 3000):
            time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        # Ctrl-C reaches all processes of the terminal, kill only the one.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        seen = len(metrics.read_text().splitlines())
        _, error = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 128 + number, error
    assert error.strip() == "penstock: stopped, the state is saved: penstock train --resume x"
    # It stopped after the iteration that was under way, or, once the others knew, the next.
    assert len(metrics.read_text().splitlines()) <= seen + 2
    psutil.wait_procs(children, timeout=5)
    assert not [child for child in children if child.is_running()]
    state = load_checkpoint("x/checkpoints")
    rows = metrics.read_text().count("\n")
    assert state["iteration"] == rows
    assert start(["resume=x", "processes=1", f"max_iterations={rows + 1}"]).iteration == rows + 1


def test_kill_9_loses_nothing_that_was_saved(tmp_path):
    command = [*PENSTOCK, *words("processes=2", "save_interval=1", "max_frame_num=5120")]
    assert run([*command, "run_dir=whole"]).returncode == 0
    process = subprocess.Popen([*command, "run_dir=x"], start_new_session=True)
    checkpoints = tmp_path / "x/checkpoints"
    try:
        while process.poll() is None and len(list(checkpoints.glob("checkpoint_*"))) < 3:
            time.sleep(0.002)
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    # The others notice that process 0 is gone.
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not [child for child in alive if "train" in " ".join(child.cmdline())], alive
    # Of the third, `latest` may not have told yet: that is written after it.
    assert load_checkpoint(checkpoints)["iteration"] >= 2
    assert run([*PENSTOCK, "resume=x"]).returncode == 0
    whole = load_checkpoint("whole/checkpoints")
    assert differences(load_checkpoint(checkpoints), whole) == []


@pytest.mark.parametrize("every", [1, 4, 100])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_goes_on_bit_for_bit_and_so_do_its_curves(tmp_path, number, every):
    short = ["env.max_episode_length=30", f"env.new_map_every={every}", "max_frame_num=15360"]
    words_ = words("processes=1", "save_interval=4", "tensorboard=True", *short)
    process = subprocess.Popen(
        [*PENSTOCK, *words_, "run_dir=x"],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = tmp_path / "x/metrics.jsonl"
    try:
        while process.poll() is None and not (
            metrics.exists() and metrics.read_text().count("\n") >= 10
        ):
            time.sleep(0.002)
        process.send_signal(number)
        process.wait(60)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    assert 10 <= metrics.read_text().count("\n") < 60
    check_curves(tmp_path / "x", whole=number == signal.SIGINT)
    start(["resume=x"])
    start([*words_, "run_dir=whole"])
    parts, whole = load_checkpoint("x/checkpoints"), load_checkpoint("whole/checkpoints")
    assert parts["iteration"] == 60
    assert differences(parts, whole) == []
    check_curves(tmp_path / "x", whole=True)


def check_curves(run: Path, *, whole: bool) -> None:
    """Every point of TensorBoard is that of metrics.jsonl; after kill -9 the last may be torn."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curves = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    curves.Reload()
    for name in {name for row in rows for name in row} - {"step"}:
        there = {int(row["env_frames"]): row[name] for row in rows if name in row}
        points = {point.step: point.value for point in curves.Scalars(name)}
        assert points == {
            step: pytest.approx(value, rel=1e-6)
            for step, value in there.items()
            if whole or step in points
        }
        assert len(there) - len(points) <= (0 if whole else 1), name


def test_a_process_that_dies_ends_the_training_with_a_line(tmp_path):
    command = [*PENSTOCK, *words("processes=2", "run_dir=x", "max_frame_num=20e6")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        metrics = tmp_path / "x/metrics.jsonl"  # a row per iteration that was done
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        for child in psutil.Process(process.pid).children():
            if "spawn_main" in " ".join(child.cmdline()):
                child.kill()
        _, error = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "process 1 of the training ended with code -9" in error
    assert len(error.strip().splitlines()) == 1, error
    # Process 0 saved what was done before.
    assert load_checkpoint("x/checkpoints")["iteration"] >= 1


def test_python_train_py_is_the_same_command():
    script = Path(__file__).parents[3] / "train.py"
    done = run([sys.executable, str(script), "env.num_env=3"])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "unknown setting 'env.num_env'; did you mean 'env.num_envs'?" in line


def test_shards_that_do_not_divide_are_refused():
    with pytest.raises(UsageError, match="shards or processes"):
        start(words("processes=3", "run_dir=x"))
