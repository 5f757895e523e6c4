"""Rollouts as a LeRobot dataset: every value, every name, every way it can stop."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from penstock.dataset.check import check
from penstock.dataset.reader import Dataset
from penstock.dataset.unit import UnitWriter
from penstock.dataset.writer import DatasetWriter
from penstock.errors import DataError, UsageError
from penstock.rollouts import lerobot
from penstock.rollouts.lerobot import export, feature_names
from penstock.rollouts.storage import RolloutStorage

from .conftest import make_batch


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")


def saved(folder, *batches, **settings):
    storage = RolloutStorage(folder, **settings)
    for number, data in enumerate(batches):
        storage.save(data, number)
    return folder


def columns_of(root):
    """Every column of a dataset, its episodes one behind the other."""
    dataset = Dataset(root)
    parts = [episode.columns() for episode in dataset.episodes]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def equal_bits(found, tensor) -> None:
    wanted = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()
    assert found.dtype == wanted.dtype
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_every_value_comes_back(tmp_path, version) -> None:
    one, two = make_batch(7, 9, 0), make_batch(5, 9, 1)
    one["agents", "observation", "state"][0, 0] = torch.tensor([np.nan, np.inf, -0.0] + [0.0] * 5)
    report = export(saved(tmp_path / "r", one, two), tmp_path / "out", fps=20, version=version)
    assert check(tmp_path / "out").errors == []
    assert (report.frames, report.total_frames) == (108, 108)
    ends = 0
    for batch in (one, two):
        done = batch["done"].squeeze(-1).clone()
        done[:, -1] = True
        ends += int(done.sum())
    assert report.episodes == report.total_episodes == ends
    columns = columns_of(tmp_path / "out")
    for name, key in [
        ("observation.lidar", ("agents", "observation", "lidar")),
        ("observation.state", ("agents", "observation", "state")),
        ("action", "action"),
        ("half", "half"),
        ("count", "count"),
        ("next.done", "done"),
    ]:
        equal_bits(columns[name], torch.cat([b[key].flatten(0, 1) for b in (one, two)]))
    dataset = Dataset(tmp_path / "out")
    assert (dataset.fps, dataset.tasks, dataset.version) == (20, ["navigate"], version)
    assert dataset.features["observation.lidar"].shape == (1, 36, 4)
    assert report.widened == {"half": "bfloat16"}
    assert json.loads(json.dumps(report.to_json()))["features"]["action"] == "action"
    assert "108 frames in, 108 frames out" in report.text()
    assert "half: bfloat16 is float32 now" in report.text()


def test_episodes_are_cut_where_any_flag_says(tmp_path) -> None:
    terminated, truncated = torch.zeros(2, 3, 8, dtype=torch.bool)
    terminated[0, 2] = truncated[0, 3] = truncated[2, 7] = True
    data = {"obs": torch.arange(24.0).reshape(3, 8), "x": {"terminated": terminated}}
    data["truncated"] = truncated
    report = export(saved(tmp_path / "r", data), tmp_path / "out")
    assert [len(e) for e in Dataset(tmp_path / "out").episodes] == [3, 1, 4, 8, 8]
    columns = columns_of(tmp_path / "out")
    assert columns["next.done"].tolist() == (terminated | truncated).flatten().tolist()
    assert columns["next.terminated"].tolist() == terminated.flatten().tolist()
    assert columns["obs"].tolist() == list(range(24))
    assert report.features["next.done"] == ""
    assert report.cut_by == ["x.terminated", "truncated"]


def test_without_flags_a_row_is_an_episode(tmp_path) -> None:
    report = export(saved(tmp_path / "r", {"obs": torch.rand(4, 5)}), tmp_path / "out")
    assert [len(e) for e in Dataset(tmp_path / "out").episodes] == [5] * 4
    assert "next.done" not in report.features
    assert "each environment is one episode" in report.text()


def test_time_may_come_first(tmp_path) -> None:
    data = make_batch(6, 4)
    turned = data.transpose(0, 1).contiguous()
    export(saved(tmp_path / "a", data), tmp_path / "one")
    export(saved(tmp_path / "b", turned, time_dim=0), tmp_path / "two")
    one, two = columns_of(tmp_path / "one"), columns_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (("agents", "observation", "state"), "observation.state"),
        (("agents", "observation", "lidar"), "observation.lidar"),
        (("observation",), "observation.state"),
        (("agents", "action"), "action"),
        (("agents", "action_normalized"), "action"),
        (("agents", "reward"), "next.reward"),
        (("next", "reward"), "next.reward"),
        (("done",), "next.done"),
        (("next", "agents", "observation", "state"), "next.observation.state"),
        (("a/b", 3), "a_b.3"),
        (("timestamp",), "rollout.timestamp"),
        (("next",), "next"),
    ],
)
def test_a_name(key, name) -> None:
    assert feature_names([key]) == {key: name}


def test_names_that_meet() -> None:
    keys = [("done",), ("next", "done"), ("agents", "reward"), ("reward",)]
    assert feature_names(keys) == {
        ("done",): "done",
        ("next", "done"): "next.done",
        ("agents", "reward"): "agents.reward",
        ("reward",): "next.reward",
    }
    both = feature_names([("action",), ("agents", "action_normalized")])
    assert both[("agents", "action_normalized")] == "agents.action_normalized"
    with pytest.raises(UsageError, match=r"would both be the feature 'a\.b'"):
        feature_names([("a", "b"), ("a.b",)])


def torchrl_like(envs=3, steps=6, seed=0):
    """What a collector of TorchRL stores: root before the step, "next" after it."""
    observation = torch.randn(envs, steps + 1, 4, generator=torch.Generator().manual_seed(seed))
    done = torch.zeros(envs, steps, 1, dtype=torch.bool)
    done[0, 2] = True
    following = observation[:, 1:].clone()
    following[0, 2] = 99  # the last observation of an episode: the next frame begins another
    return TensorDict(
        {
            "observation": observation[:, :-1],
            "action": torch.rand(envs, steps, 2),
            "done": torch.zeros_like(done),
            "next": {"observation": following, "done": done, "reward": torch.rand(envs, steps, 1)},
        },
        batch_size=[envs, steps],
    )


def test_next_observations_are_left_out_where_the_next_frame_has_them(tmp_path) -> None:
    data = torchrl_like()
    report = export(saved(tmp_path / "r", data), tmp_path / "out")
    assert list(report.features) == [
        "observation.state",
        "action",
        "done",
        "next.done",
        "next.reward",
    ]
    assert "observation of the next frame" in report.left_out["next.observation"]
    assert report.cut_by == ["next.done"]
    assert [len(e) for e in Dataset(tmp_path / "out").episodes] == [3, 3, 6, 6]
    export(tmp_path / "r", tmp_path / "kept", keys=["observation", "next.observation"])
    columns = columns_of(tmp_path / "kept")
    equal_bits(columns["next.observation.state"], data["next", "observation"])


def test_next_observations_that_differ_are_kept_and_never_lost(tmp_path) -> None:
    odd = torchrl_like(seed=1)
    odd["next", "observation"][1, 1, 0] = -5
    report = export(saved(tmp_path / "a", odd), tmp_path / "one")
    assert "next.observation.state" in report.features
    folder = saved(tmp_path / "b", torchrl_like(), odd)
    with pytest.raises(DataError, match=r"rollout_000001.*next.observation is not always"):
        export(folder, tmp_path / "two")


def test_keys_environments_and_iterations_are_chosen(tmp_path) -> None:
    folder = saved(tmp_path / "r", make_batch(6, 8, 0), make_batch(6, 8, 1), make_batch(6, 8, 2))
    report = export(
        folder,
        tmp_path / "one",
        keys=["observation.state", ("agents", "observation", "lidar"), "done"],
        envs=2,
        iterations=[1],
    )
    assert list(report.features) == ["observation.lidar", "observation.state", "next.done"]
    assert (report.rollouts, report.frames) == (1, 16)
    state = make_batch(6, 8, 1)["agents", "observation", "state"]
    equal_bits(columns_of(tmp_path / "one")["observation.state"], state[:2].flatten(0, 1))
    export(folder, tmp_path / "two", envs=[4, 1], iterations=[1], keys=["agents"])
    equal_bits(columns_of(tmp_path / "two")["observation.state"], state[[4, 1]].flatten(0, 1))
    export(folder, tmp_path / "three", envs=slice(1, None, 2), iterations=[1], keys=["count"])
    assert columns_of(tmp_path / "three")["count"].reshape(3, 8)[:, 0].tolist() == [8, 24, 40]


def test_a_run_a_file_and_other_processes(tmp_path) -> None:
    rollouts = saved(tmp_path / "run" / "rollouts", make_batch(2, 3, 0))
    saved(rollouts / "rank_1", make_batch(2, 3, 1))
    report = export(tmp_path / "run", tmp_path / "one")
    assert (report.rollouts, report.frames) == (2, 12)
    report = export(rollouts / "rollout_000000.pack", tmp_path / "two")
    assert (report.rollouts, report.frames) == (1, 6)


def test_what_is_no_row_of_frames_is_said(tmp_path) -> None:
    data = {
        "obs": torch.rand(3, 4, 2),
        "gamma": torch.tensor(0.5),
        "note": "hello",
        "wave": torch.zeros(3, 4, dtype=torch.complex64),
        "nothing": torch.zeros(3, 4, 0),
        "deep": torch.arange(3 * 4 * 64).reshape(3, 4, 2, 2, 2, 2, 2, 2),
    }
    report = export(saved(tmp_path / "r", data), tmp_path / "out")
    assert list(report.features) == ["obs", "deep"]
    assert set(report.left_out) == {"gamma", "note", "wave", "nothing"}
    assert columns_of(tmp_path / "out")["deep"].shape == (12, 2, 2, 2, 2, 4)
    with pytest.raises(UsageError, match=r"'wave'.*LeRobot has no complex64"):
        export(tmp_path / "r", tmp_path / "out2", keys=["wave"])
    tags = TensorDict({"x": torch.rand(2, 3), "tag": NonTensorData("a", [2, 3])}, [2, 3])
    assert "tag" in export(saved(tmp_path / "t", tags), tmp_path / "out3").left_out


def test_wrong_arguments_touch_nothing(tmp_path) -> None:
    folder = saved(tmp_path / "r", make_batch(2, 3))
    flat = saved(tmp_path / "flat", TensorDict({"x": torch.rand(5)}, [5]))
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    for rollouts, options, words in [
        (folder, {"keys": ["observation.stat"]}, "did you mean 'observation.state'"),
        (folder, {"keys": "action"}, r"give a list of keys"),
        (folder, {"envs": 0}, "at least 1"),
        (folder, {"envs": [7]}, "7 is out of bounds .* axis of 2"),
        (folder, {"iterations": [3]}, "no rollout 3"),
        (folder, {"mode": "creat"}, "did you mean 'create'"),
        (folder, {"version": "v3"}, "did you mean 'v3.0'"),
        (folder, {"fps": 0}, "fps must be"),
        (folder, {"task": " "}, "task is"),
        (tmp_path / "empty", {}, "there is no rollout"),
        (flat, {}, r"no \[environments, steps\]"),
    ]:
        with pytest.raises((UsageError, DataError), match=words) as caught:
            export(rollouts, out, **options)
        assert "\n" not in str(caught.value)
        assert not out.exists()
    with pytest.raises(UsageError, match="would be deleted"):
        export(folder, tmp_path, mode="overwrite")
    (tmp_path / "r" / "rollout_000000.pack").write_bytes(b"nonsense")
    with pytest.raises(DataError):
        export(folder, out)


def test_rollouts_that_differ_are_refused_before_anything_is_written(tmp_path) -> None:
    other = make_batch(3, 4).exclude("action")
    folder = saved(tmp_path / "r", make_batch(3, 4), other)
    with pytest.raises(DataError, match=r"rollout_000001.*action is missing"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export(folder, tmp_path / "out", keys=["agents"]).frames == 24


@pytest.mark.parametrize("build", [True, False])
@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_an_interrupted_export_goes_on(tmp_path, version, build, monkeypatch) -> None:
    monkeypatch.setattr(lerobot, "_BLOCK_BYTES", 12_000)  # two environments
    folder = saved(tmp_path / "r", make_batch(7, 8, 0), make_batch(7, 8, 1))
    export(folder, tmp_path / "whole", version=version)
    commit, calls = UnitWriter.commit, []

    def stop(unit):
        calls.append(unit)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return commit(unit)

    monkeypatch.setattr(UnitWriter, "commit", stop)
    with pytest.raises(KeyboardInterrupt):
        export(folder, tmp_path / "out", version=version)
    monkeypatch.setattr(UnitWriter, "commit", commit)
    with DatasetWriter.reopen(tmp_path / "out") as writer:
        assert writer.total_frames == 48
        if build:
            writer.build()
    with pytest.raises(UsageError, match="not empty"):
        export(folder, tmp_path / "out", version=version)
    with pytest.raises(UsageError, match="task"):
        export(folder, tmp_path / "out", version=version, mode="resume", task="other")
    report = export(folder, tmp_path / "out", version=version, mode="resume")
    assert (report.frames, report.skipped_frames, report.total_frames) == (64, 48, 112)
    assert check(tmp_path / "out").findings == []
    one, two = columns_of(tmp_path / "out"), columns_of(tmp_path / "whole")
    assert all(np.array_equal(one[name], two[name]) for name in two)
    again = export(folder, tmp_path / "out", version=version, mode="resume")
    assert (again.frames, again.skipped_frames) == (0, 112)


def test_rollouts_that_came_since_are_added_and_changed_ones_refused(tmp_path) -> None:
    folder = saved(tmp_path / "r", make_batch(3, 4, 0))
    export(folder, tmp_path / "out")
    RolloutStorage(folder).save(make_batch(3, 4, 1), 1)
    assert export(folder, tmp_path / "out", mode="resume").frames == 12
    assert Dataset(tmp_path / "out").total_frames == 24
    RolloutStorage(folder).save(make_batch(3, 4, 2), 0)
    with pytest.raises(UsageError, match="another file than the one exported before"):
        export(folder, tmp_path / "out", mode="resume")
    assert export(folder, tmp_path / "out", mode="overwrite").total_frames == 24
    assert check(tmp_path / "out").findings == []


def test_rollouts_of_a_training(tmp_path, monkeypatch) -> None:
    """What `penstock train` saves has the keys that LeRobot expects."""
    pytest.importorskip("numba")  # of the extra "rl", which the simulator needs
    from penstock.nav.collect import as_tensordict
    from penstock.nav.ppo import Batch

    rng = torch.Generator().manual_seed(0)
    steps, drones = 6, 4

    def rand(*shape):
        return torch.rand(steps, drones, *shape, generator=rng)

    obs = {"state": rand(8), "lidar": rand(1, 36, 4), "direction": rand(1, 3)}
    flags = [rand() < 0.2, rand() < 0.1]
    batch = Batch(obs, rand(3), rand(), rand(), rand(), *flags, rand(), rand()[0], None)
    data = as_tensordict(batch)
    report = export(saved(tmp_path / "r", data), tmp_path / "out")
    assert {"observation.state", "observation.lidar", "action", "next.reward", "next.done"} <= set(
        report.features
    )
    columns = columns_of(tmp_path / "out")
    equal_bits(columns["observation.lidar"], obs["lidar"].transpose(0, 1).flatten(0, 1))
    equal_bits(columns["action"], batch.action.transpose(0, 1).flatten(0, 1))
    equal_bits(columns["next.done"], (flags[0] | flags[1]).T.flatten())
