"""`info` and `doctor` on the folder of a training run."""

from __future__ import annotations

import json

import torch

from penstock import AsyncCheckpointSaver, RolloutStorage, inspect
from penstock.inspect import doctor


def make_run(folder):
    (folder / "evaluation").mkdir(parents=True)
    (folder / "config.yaml").write_text("env:\n  num_envs: 64\nseed: 3\nother: 1\n")
    with AsyncCheckpointSaver(folder / "checkpoints") as saver:
        saver.save_async({"x": torch.arange(1000)}, "checkpoint_000001.pt")
    RolloutStorage(folder / "rollouts").save({"a": torch.ones(4, 8)}, 1)
    rows = [{"step": i, "env_frames": i * 1e6, "train/success": 0.25 * i} for i in (1, 2)]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "cut o'
    (folder / "metrics.jsonl").write_text(text)
    result = {"results": {"policy": {"rates": {"success": {"mean": 0.75}}}}}
    (folder / "evaluation/evaluation.json").write_text(json.dumps(result))
    return folder


def test_info_says_how_far_a_run_is(tmp_path):
    facts = inspect.describe(make_run(tmp_path / "x"))
    text = inspect.text(facts)
    assert "env.num_envs=64  seed=3" in text
    assert "iteration 2, 2.00 M frames, 50.0% of the last training episodes" in text
    assert "policy 75.0%" in text
    assert "rollouts:" in text
    assert "checkpoint_000001.pt" in text
    json.dumps(facts)


def test_info_takes_damaged_parts(tmp_path):
    run = make_run(tmp_path / "x")
    (run / "config.yaml").write_text("a: [1")
    (run / "evaluation/evaluation.json").write_text("{")
    (run / "metrics.jsonl").unlink()
    assert "damaged" in inspect.text(inspect.describe(run))


def test_doctor_looks_into_all_parts_of_a_run(tmp_path):
    run = make_run(tmp_path / "x")
    assert doctor.check(run) == []
    for path in (run / "checkpoints/checkpoint_000001.pt", run / "rollouts/rollout_000001.pack"):
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[-20] ^= 1
        path.write_bytes(damaged)
        assert [finding.path for finding in doctor.check(run)], path
        path.write_bytes(whole)


def test_a_rate_that_is_rounded_is_said(tmp_path):
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "config.yaml").write_text("sim: {substeps: 6}\nenv: {_target_: null}\n")
    for place in (run, run / "rollouts", run / "rollouts/rollout_000100.pack"):
        note = inspect.run.rate_note(place, 10)
        assert note is not None and "every 0.096 s (10.42 per second)" in note
    (run / "config.yaml").write_text("sim: {substeps: 25}\n")  # 0.4 s
    assert inspect.run.rate_note(run, 10) is not None
    for harmless in ("{}", "sim: {substeps: many}", "sim: {substeps: 6}\nenv: {_target_: a.B}"):
        (run / "config.yaml").write_text(harmless)
        assert inspect.run.rate_note(run, 10) is None
    assert inspect.run.rate_note(tmp_path, 10) is None
