"""The loop: what it leaves behind, that it goes on bit for bit, and how it stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import RolloutStorage, load_checkpoint, load_metadata
from penstock.cli import main
from penstock.core.files import FolderLock
from penstock.errors import DataError, LockHeld, UsageError
from penstock.nav.collect import EpisodeWindow
from penstock.nav.config import load_config
from penstock.nav.distributed import Group, Stop
from penstock.nav.ppo import PPO
from penstock.nav.train import Trainer, start

from .conftest import SMALL, differences


def test_a_run_leaves_everything_behind(tmp_path):
    more = ["save_interval=2", "rollout_save_interval=4", "eval_interval=4", "eval_worlds=2"]
    more += ["eval_drones=4", "tensorboard=True", "log_interval=4"]
    result = start([*SMALL, "name=x", *more])
    run = tmp_path / "runs/x"
    assert result.folder == run.relative_to(tmp_path)
    assert (result.iteration, result.frames, result.stopped) == (8, 2048, False)
    assert {"best.pt", "checkpoint_final.pt", "latest"} <= {
        path.name for path in (run / "checkpoints").iterdir()
    }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert {"loss/actor", "train/lr", "perf/update", "perf/frames_per_s", "env_frames"} <= set(
        rows[0]
    )
    assert "validation/success" in rows[3]
    assert list((run / "tensorboard").iterdir())
    rollout = RolloutStorage(run / "rollouts").load(8)
    assert rollout["agents", "observation", "lidar"].shape == (32, 8, 1, 36, 4)
    assert rollout["agents", "observation", "dynamic_obstacle"].shape == (32, 8, 5, 10)
    state = load_checkpoint(run / "checkpoints")
    assert state["iteration"] == 8
    notes = load_metadata(run / "checkpoints/checkpoint_final.pt")
    assert notes["settings"]["num_obstacles"] == 40
    assert notes["map_seeds"][0] >= 1_000_000
    # The learning rate follows the frames.
    assert rows[0]["train/lr"] > rows[-1]["train/lr"] > 0


@pytest.mark.parametrize("every", [1, 4, 100])
@pytest.mark.parametrize("collector", ["sync", "pipelined"])
def test_resume_goes_on_bit_for_bit(tmp_path, collector, every):
    words = [*SMALL, f"collector={collector}", f"env.new_map_every={every}", "shards=2"]
    words += ["env.max_episode_length=30"]  # five decisions: maps are renewed
    start([*words, "run_dir=whole"])
    start([*words, "run_dir=parts", "max_iterations=3"])
    assert not (tmp_path / "parts/checkpoints/checkpoint_final.pt").exists()
    start(["resume=parts", "max_iterations=5"])
    start(["resume=parts", "max_iterations=null"])
    whole, parts = load_checkpoint("whole/checkpoints"), load_checkpoint("parts/checkpoints")
    assert whole["iteration"] == parts["iteration"] == 8
    assert differences(whole, parts) == []
    rows = read_rows(tmp_path / "parts")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [outcomes(row) for row in rows] == [
        outcomes(row) for row in read_rows(tmp_path / "whole")
    ]
    renewed = whole["map_seeds"] % 100_000 > 0  # each shard begins with a round number
    assert bool(renewed.any()) == (every < 100)


def read_rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def outcomes(row: dict[str, float]) -> dict[str, float]:
    return {name: row[name] for name in row if name.startswith("train/")}


def test_episodes_cut_by_a_new_map_are_no_time_outs(tmp_path):
    """An episode may last 366 decisions: in 352 none is out of time, though maps are renewed."""
    words = ["max_frame_num=11264", "algo.training_frame_num=32", "algo.epochs=1"]
    start([*SMALL, *words, "env.new_map_every=1", "run_dir=x"])
    rows = [row for row in read_rows(tmp_path / "x") if "train/success" in row]
    kinds = ("success", "collision_static", "collision_dynamic", "collision_height", "timeout")
    assert rows
    for row in rows:
        assert sum(row[f"train/{kind}"] for kind in kinds) == pytest.approx(1.0, abs=1e-12)
        assert row["train/timeout"] == 0.0
    assert sum(row["train/cut"] for row in rows) > 0
    assert sum(row["train/episodes"] for row in rows) >= 32


def test_shares_are_over_a_window_of_finished_episodes():
    window = EpisodeWindow()
    shares = []
    for iteration in range(300):
        sums = torch.zeros(10, dtype=torch.float64)
        sums[0 if iteration < 150 else 1] = 50.0  # success, then collisions
        sums[5] = 7.0
        metrics = window.add(sums)
        shares.append(metrics["train/success"])
        assert (metrics["train/episodes"], metrics["train/cut"]) == (50.0, 7.0)
        again = EpisodeWindow()
        again.load(window.state())
        assert torch.equal(again.state(), window.state())
    assert shares[149] == 1.0
    assert shares[150] == 0.95  # 1000 episodes
    assert shares[169] == 0.0
    empty = torch.zeros(10, dtype=torch.float64)
    assert all(window.add(empty)["train/success"] == 0.0 for _ in range(5000))
    assert len(window.state()) <= 1000


def test_config_yaml_holds_what_is_used_and_what_changed(tmp_path):
    start([*SMALL, "run_dir=x", "env_dyn.num_obstacles=10", "max_iterations=2"])
    text = (tmp_path / "x/config.yaml").read_text()
    assert "# changed" not in text
    assert load_config([], base=tmp_path / "x/config.yaml")["env_dyn.num_obstacles"] == 8
    start(["resume=x", "save_interval=3", "max_iterations=3"])
    start(["resume=x", "max_iterations=4"])
    text = (tmp_path / "x/config.yaml").read_text()
    assert text.splitlines()[:2] == [
        "# changed after iteration 2: max_iterations 2 -> 3, save_interval 50 -> 3",
        "# changed after iteration 3: max_iterations 3 -> 4",
    ]
    config = load_config([], base=tmp_path / "x/config.yaml")
    assert (config["save_interval"], config["max_iterations"], config["resume"]) == (3, 4, None)


def test_counts_that_are_rounded_are_said(monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "plain")
    words = ["env_dyn.num_obstacles=10", "env.maps=3", "shards=2", "max_iterations=1"]
    start([*SMALL, *words, "run_dir=x"])
    told = capsys.readouterr().err
    assert "env_dyn.num_obstacles=10 becomes 8: there are 8 kinds" in told
    assert "env.maps=3 becomes 2" in told
    start([*SMALL, "max_iterations=1", "run_dir=y"])
    assert "becomes" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("max_minutes=0.01", "max_minutes=0.01 is used up after iteration"),
        ("max_frame_num=512", "max_frame_num=512 is used up after iteration 2"),
        ("max_iterations=1", "max_iterations=1 is used up after iteration 1"),
    ],
)
def test_a_finished_run_says_why_nothing_happens(capsys, limit, said):
    assert main(["train", *SMALL, limit, "run_dir=x"]) == 0
    assert "nothing to do" not in capsys.readouterr().out
    assert main(["train", "resume=x"]) == 0
    assert f"nothing to do: {said}" in capsys.readouterr().out


def test_the_last_line_says_that_a_run_was_stopped(monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "plain")
    start([*SMALL, "run_dir=x"], stop=AskAfter(20))
    assert capsys.readouterr().err.splitlines()[-1].endswith("stopped")
    start(["resume=x"])
    assert not capsys.readouterr().err.splitlines()[-1].endswith("stopped")


def test_the_screen_is_not_empty_while_torch_is_loaded(tmp_path):
    """Torch takes seconds to import; this one ends the process when it is asked for."""
    (tmp_path / "torch.py").write_text("import os\nos._exit(7)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PENSTOCK_PROGRESS": "plain"}
    command = [sys.executable, "-m", "penstock", "train"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 7
    assert done.stderr.startswith("penstock: loading torch")


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    states = []
    for number, seed in enumerate([0, 0, 1]):
        start([*SMALL, f"run_dir={number}", f"seed={seed}", "max_iterations=2"])
        states.append(load_checkpoint(f"{number}/checkpoints"))
    assert differences(states[0]["ppo"], states[1]["ppo"]) == []
    assert differences(states[0]["ppo"]["policy"], states[2]["ppo"]["policy"])


@pytest.mark.parametrize("moment", ["collect", "update"])
@pytest.mark.parametrize("collector", ["sync", "pipelined"])
def test_a_stop_in_the_middle_loses_only_what_was_half_done(monkeypatch, moment, collector):
    words = [*SMALL, f"collector={collector}"]
    start([*words, "run_dir=whole"])
    stop = AskAfter(calls=15 if moment == "collect" else 3)
    if moment == "collect":
        stop_at: Stop = stop
    else:
        stop_at = Stop()
        count_steps(monkeypatch, lambda: stop_at.ask() if stop() else None)
    result = start([*words, "run_dir=parts"], stop=stop_at)
    assert result.stopped
    assert result.iteration < 8
    start(["resume=parts"])
    whole, parts = load_checkpoint("whole/checkpoints"), load_checkpoint("parts/checkpoints")
    assert differences(whole, parts) == []


class AskAfter(Stop):
    """Asks to stop after so many looks."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def __call__(self) -> bool:
        self.calls -= 1
        return self.calls < 0


def count_steps(monkeypatch: pytest.MonkeyPatch, each: Callable[[], Any]) -> None:
    step = PPO._step

    def counted(self: PPO, *parts: torch.Tensor) -> torch.Tensor:
        each()
        return step(self, *parts)

    monkeypatch.setattr(PPO, "_step", counted)


def test_a_number_that_is_none_stops_with_its_name_and_a_state(monkeypatch, tmp_path):
    steps = []

    def poison() -> None:
        steps.append(1)

    step = PPO._step

    def poisoned(self: PPO, *parts: torch.Tensor) -> torch.Tensor:
        if len(steps) == 9:  # in the third iteration
            with torch.no_grad():
                self.policy.critic.bias.fill_(float("nan"))
        return step(self, *parts)

    monkeypatch.setattr(PPO, "_step", poisoned)
    count_steps(monkeypatch, poison)
    with pytest.raises(DataError, match="critic_loss") as raised:
        start([*SMALL, "run_dir=x"])
    assert "iteration 3" in str(raised.value)
    assert "checkpoint_000002.pt" in str(raised.value)
    monkeypatch.undo()
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    monkeypatch.chdir(tmp_path)
    state = load_checkpoint("x/checkpoints")
    assert state["iteration"] == 2
    assert all(torch.isfinite(value).all() for value in state["ppo"]["policy"].values())
    assert start(["resume=x"]).iteration == 8


def test_wrong_states_are_refused_before_anything_starts(tmp_path):
    start([*SMALL, "run_dir=x", "max_iterations=1"])
    before = sorted(path.name for path in (tmp_path / "x/checkpoints").iterdir())
    for words, message in (
        (["algo=navrl", "algo.minibatches=2"], "preset"),
        (["env.num_envs=64"], "drones"),
        (["shards=2"], "the checkpoint has 1 shards"),
    ):
        with pytest.raises(UsageError, match=message):
            start(["resume=x", *words])
    assert sorted(path.name for path in (tmp_path / "x/checkpoints").iterdir()) == before
    with pytest.raises(UsageError, match="exists already: go on with resume=x"):
        start([*SMALL, "run_dir=x"])
    with pytest.raises(UsageError, match=r"resume=y: there is no run; use one of x"):
        start(["resume=y"])
    with pytest.raises(UsageError, match="is a path"):
        start([*SMALL, "name=../y"])
    with pytest.raises(UsageError, match="do not fit"):
        start([*SMALL, "run_dir=z", "env.num_obstacles=1000000"])
    assert not (tmp_path / "z").exists()


def test_two_trainings_do_not_write_into_one_folder():
    start([*SMALL, "run_dir=x", "max_iterations=1"])
    with FolderLock("x"), pytest.raises(LockHeld):
        start(["resume=x", "max_iterations=2"])


def test_a_run_stopped_before_its_first_checkpoint_starts_again(tmp_path):
    start([*SMALL, "run_dir=x", "max_iterations=1"])
    for path in (tmp_path / "x/checkpoints").iterdir():
        path.unlink()
    assert start(["resume=x", "max_iterations=2"]).iteration == 2


def test_minutes_end_a_training_and_its_schedules(tmp_path):
    start([*SMALL, "run_dir=x", "max_minutes=0.1"])
    rows = [json.loads(line) for line in (tmp_path / "x/metrics.jsonl").read_text().splitlines()]
    assert len(rows) > 8  # max_frame_num does not count then
    assert rows[-1]["train/lr"] < 0.5 * rows[0]["train/lr"]


def test_moving_obstacles_appear_bit_by_bit(tmp_path):
    start([*SMALL, "run_dir=x", "env_dyn.num_obstacles=80", "env_dyn.curriculum=0.5"])
    rows = [json.loads(line) for line in (tmp_path / "x/metrics.jsonl").read_text().splitlines()]
    counts = [row["env/dynamic_active"] for row in rows]
    assert counts == sorted(counts)
    assert all(count % 8 == 0 for count in counts)  # so many there are: equally many of each kind
    assert counts[0] == 8  # a tenth of them flew in the first iteration
    assert counts[-1] == 80


def test_navrl_networks_train():
    result = start([*SMALL, "algo=navrl", "algo.minibatches=2", "max_iterations=1", "run_dir=x"])
    assert result.iteration == 1


def test_another_environment_plugs_in(tmp_path):
    words = ["env._target_=penstock.nav.simulation.env.NavigationEnv", "env.num_envs=16"]
    words += ["algo.training_frame_num=8", "algo.minibatches=2", "tensorboard=False"]
    start([*words, "wandb.mode=disabled", "max_iterations=2", "run_dir=x"])
    start([*words, "resume=x", "max_iterations=3"])
    rows = [json.loads(line) for line in (tmp_path / "x/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["env_frames"] == 3 * 8 * 16
    with pytest.raises(UsageError, match=r"give env\._target_"):
        start(["resume=x"])


def test_a_run_does_not_go_on_in_another_environment():
    plugin = "env._target_=penstock.nav.simulation.env.NavigationEnv"
    learner = [word for word in SMALL if not word.startswith("env")]
    start([*SMALL, "run_dir=own", "max_iterations=1"])
    start([*learner, plugin, "env.num_envs=16", "run_dir=other", "max_iterations=1"])
    for words in (["resume=own", plugin], ["resume=other", "env._target_=null"]):
        with pytest.raises(UsageError, match="of another environment"):
            start([*words, "max_iterations=2"])


def test_no_process_flies_the_random_numbers_of_another_seed():
    words = ["env._target_=penstock.nav.simulation.env.NavigationEnv", "env.num_envs=4"]
    words += ["algo.training_frame_num=8", "algo.minibatches=2", "env.num_obstacles=5"]
    states = []
    for seed, rank in ((0, 1), (1, 0), (0, 0)):
        group = Group()
        group.rank = rank
        trainer = Trainer(load_config([*words, f"seed={seed}"]), group, Stop())
        states.append(bytes(trainer.collector.state_dict()[0]["generator"].numpy()))
        trainer.collector.close()
    assert len(set(states)) == 3


def test_a_disturbed_run_goes_on_bit_for_bit(tmp_path):
    noise = ["sim.noise.range_m=0.05", "sim.noise.missed=0.2", "sim.noise.drift_m=0.1"]
    words = [*SMALL, *noise, "sim.latency=1", "sim.wind=0.5", "sim.mass=0.1", "sim.curriculum=0.5"]
    start([*words, "run_dir=whole"])
    start([*words, "run_dir=parts", "max_iterations=3"])
    start(["resume=parts", "max_iterations=null"])
    whole, parts = load_checkpoint("whole/checkpoints"), load_checkpoint("parts/checkpoints")
    assert differences(whole, parts) == []
