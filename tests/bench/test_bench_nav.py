from __future__ import annotations

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks import NAMES, Row, Settings, find_case, runner
from benchmarks.nav import case as nav
from benchmarks.nav import train as nav_train
from benchmarks.nav.pipeline import OURS, SYNC, Bench, measure_pipeline
from benchmarks.nav.plain_torchrl import PlainLoop
from benchmarks.nav.saving import Blocks, Loop, alternate, measure_saving
from benchmarks.nav.train import Training, compare, measure_resume, measure_training
from penstock.errors import PenstockError
from penstock.nav.config import load_config
from penstock.nav.distributed import Group
from penstock.nav.networks import Policy
from penstock.nav.ppo import gae
from penstock.nav.train import start

LIGHT = ["processes=1", "env.maps=2", "tensorboard=False"]
SMALL = ["env.num_envs=16", "env_dyn.curriculum=0", *LIGHT]


@pytest.fixture(autouse=True)
def quiet_and_restored(monkeypatch):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two of them wait for each other where cores are busy
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def judged(rows: list[Row]) -> dict[str, bool]:
    assert all(math.isfinite(row.value) for row in rows)
    return {row.what: row.met for row in rows if row.met is not None}


# ---------------------------------------------------------------------- the TorchRL peer


@pytest.fixture
def peer():
    config = load_config([*SMALL, "env.max_episode_length=60"])  # ten decisions: some are cut
    loop = PlainLoop(config.settings, config.steps, config.ppo)
    yield loop
    loop.close()


def seen(data):
    return {k: data["agents", "observation", k] for k in ("state", "lidar", "dynamic_obstacle")}


def test_the_peer_has_the_same_network(peer):
    batch = peer.collect()
    policy = Policy("fast", seed=0)
    alpha, beta, value = policy(seen(batch.reshape(-1)))
    flat = batch.reshape(-1)
    torch.testing.assert_close(flat["alpha"], alpha)
    torch.testing.assert_close(flat["beta"], beta)
    torch.testing.assert_close(flat["state_value"][:, 0], value)
    assert sum(p.numel() for p in peer.parameters) == sum(p.numel() for p in policy.parameters())


def test_the_peer_learns_from_the_same_advantages(peer):
    batch = peer.collect()
    policy = Policy("fast", seed=0)
    after = batch["next"]
    ended, over = after["done"][..., 0], after["terminated"][..., 0]
    assert (ended & ~over).any()
    following = policy(seen(after.reshape(-1)))[2].view(batch.shape)
    peer._next_values(batch)
    known = ~over
    torch.testing.assert_close(after["state_value"][..., 0][known], following[known])
    peer.gae(batch)
    advantage, returns = gae(
        after["agents", "reward"][..., 0].T,
        batch["state_value"][..., 0].T,
        over.T,
        (ended & ~over).T,
        following.detach().T,
        following.detach()[:, -1],
        gamma=peer.settings.gamma,
        lam=peer.settings.lam,
    )
    torch.testing.assert_close(batch["value_target"][..., 0].T, returns, rtol=1e-4, atol=1e-4)
    standard = (advantage - advantage.mean()) / advantage.std()
    torch.testing.assert_close(batch["advantage"][..., 0].T, standard, rtol=1e-3, atol=1e-3)


def test_the_peer_learns(peer):
    before = [p.detach().clone() for p in peer.parameters]
    losses = peer.iteration()
    assert all(math.isfinite(value) for value in losses.values())
    changed = [not torch.equal(a, b) for a, b in zip(before, peer.parameters, strict=True)]
    assert all(changed)  # features, actor and critic


def test_peers_take_turns_with_penstock():
    rows = nav.measure_peer(8, 1, training(frames_per_s=[1000.0]))
    assert {nav.ALONE, nav.PEER, nav.TOGETHER} <= {row.who for row in rows}
    (what,) = judged(rows)
    (row,) = [row for row in rows if row.what == what]
    assert row.met == (row.value >= 1.5)
    beside = next(row for row in rows if row.who == nav.TOGETHER and row.unit == "ms")
    assert beside.value == pytest.approx(256.0)  # 8 x 32 frames at 1000 frames/s


# ---------------------------------------------------------------------- environment, pipeline


def test_the_simulator_is_measured():
    rows = nav.measure_environment(8, 1, ("fast",), steps=20)
    assert set(judged(rows)) == {"environment, 8 drones (fast), 350 + 80 obstacles"}


def test_pipeline_is_measured_here_and_with_a_slow_environment():
    rows = measure_pipeline(envs=8, slow_envs=8, rounds=1, length=1)
    assert list(judged(rows)) == ["pipelined collection, environment as slow as the update"]
    assert {row.who for row in rows} == {OURS, SYNC}


def test_a_slow_environment_rests_before_every_step():
    bench = Bench(load_config(SMALL))
    bench.rest_s = 0.01
    assert bench.block(bench.sync, 1) >= 32 * 0.01
    assert bench.block(bench.pipelined, 1) >= 20 * 0.01
    assert bench.cpu_s > 0


# ---------------------------------------------------------------------- penstock train


def training(frames_per_s=(19_000.0, 21_000.0, 30_000.0), algo="fast") -> Training:
    rows = [
        {
            "perf/frames_per_s": speed,
            "perf/collect": 0.2,
            "perf/update": 0.75,
            "perf/other": 0.03,
            "perf/checkpoint": 0.02,
        }
        for speed in frames_per_s
    ]
    return Training(algo, rows, wall_s=2.0, cpu_s=3.0, frames=32_768)


def test_training_is_judged_by_medians():
    rows = training().table()
    assert [row.value for row in rows] == pytest.approx([21_000, 16_384, 25.0])
    assert [row.met for row in rows] == [True, None, True]
    assert [row.met for row in training([19_999.0]).table()] == [False, None, True]
    assert [row.met for row in training([5_500.0], "navrl").table()] == [True, None]


def test_training_runs_in_processes_of_its_own(tmp_path):
    found = measure_training(tmp_path / "run", "fast", 1, envs=16, skip=1, words=LIGHT)
    assert (len(found.rows), found.frames) == (1, 512)
    assert found.rows[0]["step"] == 2
    assert found.rows[0]["env/dynamic_active"] == 80
    assert found.wall_s > 0
    assert found.cpu_s >= 0
    judged(found.table())


def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(PenstockError, match=r"ended with code \d+: .*unknown setting 'nonsense'"):
        measure_training(tmp_path / "run", "fast", 1, envs=16, words=["nonsense=1"])


def test_resume_is_compared(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def here(words):  # a process takes seconds to start
        start(words)
        yield SimpleNamespace()

    monkeypatch.setattr(nav_train, "_started", here)
    monkeypatch.setattr(nav_train, "_finish", lambda process: None)
    row = measure_resume(tmp_path, envs=16, half=1, words=LIGHT)
    assert (row.value, row.met) == (0, True)
    assert row.n > 50


def test_states_are_compared_bit_by_bit():
    state = {"a": torch.tensor([0.0, math.nan]), "b": [1, {"c": torch.ones(2)}], "seconds": 1.0}
    same = {"a": torch.tensor([0.0, math.nan]), "b": [1, {"c": torch.ones(2)}], "seconds": 2.0}
    assert compare(state, same) == ([], 3)
    same["a"] = torch.tensor([-0.0, math.nan])
    assert compare(state, same) == (["a"], 3)
    same["b"] = [1, {"c": torch.ones(2, dtype=torch.float64), "d": 0}]
    assert compare(state, same) == (["a", "b/1/c", "b/1/d"], 4)
    same["b"] = [1]
    assert compare(state, same)[0] == ["a", "b"]


# ---------------------------------------------------------------------- checkpoints in the loop


def test_saving_is_judged_by_pairs():
    blocks = Blocks([1.0, 2.0, 4.0], [0.98, 1.98, 2.0], [0.0004, 0.0006, 0.003], frames=1000)
    rows = blocks.table()
    assert judged(rows) == {
        "training held up per checkpoint, in the loop": True,
        "speed that is left with a checkpoint every iteration": True,
    }
    assert rows[-1].value == pytest.approx(0.98)
    assert rows[0].value == pytest.approx(0.6)
    assert blocks.table(judged=False)[-1].met is None
    slow = Blocks([1.0], [0.9], [0.002], frames=1000).table()
    assert not any(judged(slow).values())


def test_blocks_alternate_in_one_loop(tmp_path):
    loop = Loop([*SMALL, f"run_dir={tmp_path / 'run'}"], Group())
    blocks = alternate(loop, 1, 2)
    saved = loop.recorder.saver.get_stats()
    loop.close()
    assert loop.trainer.iteration == 2 * 2 * 3  # with and without, forgotten and kept, one before
    assert saved["total_saved"] == 2 * 3
    assert saved["total_failed"] == 0
    assert (len(blocks.saving_s), len(blocks.plain_s), len(blocks.stalls_s)) == (1, 1, 2)
    assert blocks.frames == 2 * 512


def test_blocks_run_in_processes_of_their_own(tmp_path):
    blocks = measure_saving(tmp_path / "run", envs=16, blocks=1, length=1, words=LIGHT)
    assert len(blocks.stalls_s) == 1
    assert len(blocks.saving_s) == len(blocks.plain_s) == 1


# ---------------------------------------------------------------------- the case


@pytest.mark.parametrize("repeats", [2, 7])
def test_the_case_is_text_json_and_page(tmp_path, monkeypatch, repeats):
    given = {}

    def fake(name, result):
        def measure(*args, **options):
            given[name] = (args, options)
            return result

        monkeypatch.setattr(nav, f"measure_{name}", measure)

    row = Row("resume", "equal", 0, "different tensors", bar="0", met=True)
    blocks = Blocks([1.0], [1.0], [0.0005], frames=1000)
    for name, result in (
        ("environment", [row]),
        ("training", training()),
        ("peer", [row]),
        ("saving", blocks),
        ("resume", row),
        ("pipeline", [row]),
    ):
        fake(name, result)
    result = runner.run(["nav"], settings=Settings(tmp_path, repeats=repeats))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert "training, algo=fast" in runner.text_report(result)
    assert "x no save" in runner.html_report(result).html()
    assert "1024 drones" in result["cases"][0]["data"]
    assert given["training"][1]["envs"] == 1024
    assert given["saving"][1]["envs"] == (256 if repeats == 2 else 1024)


def test_it_is_registered():
    assert "nav" in NAMES
    assert find_case("nav") is nav.CASE
