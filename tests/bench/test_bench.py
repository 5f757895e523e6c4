"""The benchmark on a tiny state: every row is there, and the verdicts follow the figures."""

from __future__ import annotations

import json
import math
import random

import pytest

from benchmarks import Settings, runner
from benchmarks.checkpoint.faults import DAMAGES
from benchmarks.measure import Timing, interleave, time_rows
from benchmarks.monitor import case as monitor
from benchmarks.replay import modes as replay_modes
from penstock.errors import UsageError

# Each starts processes that import torch: slow on a loaded machine.
pytestmark = pytest.mark.timeout(500)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    work = tmp_path_factory.mktemp("bench")
    settings = Settings(
        work,
        hidden=64,
        train_steps=8,
        rounds=2,
        repeats=2,
        faults=30,
        peer_faults=2,
        phase_s=0.01,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        patch.setenv("PENSTOCK_PROGRESS", "quiet")
        return runner.run(["checkpoint"], settings=settings)


def test_every_quantity_is_measured(result):
    rows = result["cases"][0]["rows"]
    for word in ("blocked", "small", "iteration", "lost", "memory", "size", "speed", "load"):
        assert any(word in row["what"] for row in rows), word
    assert sum(row["n"] for row in rows if "silently" in row["what"] and row["bar"]) == 30
    peers = [row for row in rows if "silently" in row["what"] and not row["bar"]]
    assert {row["who"] for row in peers} == {"torch.save", "safetensors", "DCP"}


def test_damage_is_never_silent(result):
    rows = [row for row in result["cases"][0]["rows"] if "silently" in row["what"]]
    assert all(row["value"] == 0 and row["met"] for row in rows if row["who"] == "penstock")


def test_result_is_json_text_and_page(result):
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    text = runner.text_report(result)
    assert "the original proposal" in text
    assert "bars met" in text
    assert "python -m benchmarks" in runner.html_report(result).html()


def test_unknown_case():
    with pytest.raises(UsageError, match="use one of checkpoint"):
        runner.run(["nonsense"])


def test_interleave_takes_turns(monkeypatch):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    order = []

    def turn(name, seconds):
        order.append(name)
        return seconds

    timings = interleave(
        {"a": lambda: turn("a", 1.0), "b": lambda: turn("b", 2.0)}, 2, "t", warm_up=False
    )
    assert order == ["a", "b", "b", "a"]
    rows = time_rows("x", timings, "a")
    assert [(row.value, row.ratio, row.n) for row in rows] == [(1e3, 1.0, 2), (2e3, 2.0, 2)]


def test_percentiles():
    timing = Timing([float(k) for k in range(1, 12)], [0.0])
    assert (timing.median, timing.p90) == (6.0, 10.0)
    assert Timing([3.0], [0.0]).p90 == 3.0


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_changes_the_data(damage):
    original = bytes(range(1, 256)) * 100
    for seed in range(20):
        assert damage(bytearray(original), random.Random(seed)) != original


TINY = {"rounds": 2, "repeats": 2, "episodes": 2, "entries": 4096, "envs": 64, "batches": 4}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("replay", {"LazyTensorStorage", "CompressedListStorage", "proposal, per episode"}),
        ("rollout", {"pickle + LZ4-9 (proposal)", "as it is"}),
        ("pipeline", {"one after the other"}),
        ("monitor", {"lists (proposal)", "perf_counter twice"}),
    ],
)
def test_every_peer_is_measured_beside_penstock(tmp_path, monkeypatch, name, wanted):
    monkeypatch.setattr(replay_modes, "_BATCHES", (32,))
    monkeypatch.setattr(replay_modes, "_EPISODES", (10, 1000))
    monkeypatch.setattr(monitor, "_LONG", 20_000)
    result = runner.run([name], settings=Settings(tmp_path, **TINY))
    (case,) = result["cases"]
    assert wanted <= {row["who"] for row in case["rows"]}
    assert "penstock" in {row["who"] for row in case["rows"]}
    assert all(math.isfinite(row["value"]) for row in case["rows"])
    judged = [row for row in case["rows"] if row["met"] is not None]
    assert judged
    for row in judged:  # the verdict follows from the figure that is shown
        if row["bar"].endswith("x penstock"):
            least = float(row["bar"].split()[1])
            assert row["met"] == (row["ratio"] >= least)
    assert name in runner.text_report(result)
    assert "the original proposal" in case["claim"]
