"""The rows that the claims stand on: their figures are right where the right answer is known."""

from __future__ import annotations

import time
from pathlib import Path

import lz4.frame
import numpy as np
import pytest
import torch

from benchmarks import Row, Settings
from benchmarks.checkpoint import claims as checkpoint_claims
from benchmarks.checkpoint.durable import DELTA, FULL, PROPOSED, TORCH
from benchmarks.convert import memory as convert_memory
from benchmarks.experience import depth_pictures, flights
from benchmarks.lz4_levels import measure_lz4, measure_top_levels
from benchmarks.measure import Timing, burst
from benchmarks.monitor.case import ProposedMonitor
from benchmarks.pipeline import collecting
from benchmarks.replay.modes import FrameBuffer, ProposedPrefixSum
from benchmarks.rollout import claims as rollout_claims
from penstock.replay.episodes.index import PrefixSum
from penstock.ui.monitor import PerformanceMonitor


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")


def by(rows):
    return {(row.what, row.who): row.value for row in rows}


def test_lz4_rows():
    data = bytes(range(256)) * 400
    rows = by(measure_lz4("x", data, 2, levels=(0, 9)))
    size = len(lz4.frame.compress(data, compression_level=9))
    assert rows["LZ4 size, x", "level 9"] == pytest.approx(len(data) / size)
    assert rows["LZ4 compress, x", "level 0"] > rows["LZ4 compress, x", "level 9"] > 0
    assert rows["LZ4 decompress, x", "level 0"] > 0
    assert measure_top_levels("x", data).value == 1.0


def test_burst_is_the_time_of_one_call():
    assert burst(lambda: time.sleep(0.002), 5)() == pytest.approx(0.003, abs=0.002)


# ---------------------------------------------------------------------- rollouts


def test_sizes_of_a_batch_do_not_depend_on_what_was_measured():
    rows = rollout_claims.measure_sizes(flights(8))
    assert rows == rollout_claims.measure_sizes(flights(16))
    found = by(rows)
    assert found["bytes of a step", "the observation"] == 816
    assert found["a batch of 1024 x 32 steps", "steps"] == 32768
    once = found["a batch of 1024 x 32 steps", "everything, observations once"]
    twice = found["a batch of 1024 x 32 steps", "everything, next observations too"]
    seen = found["a batch of 1024 x 32 steps", "observations"]
    assert twice - once == pytest.approx(seen)


def test_scaled_sizes():
    found = by(rollout_claims.scale_sizes("x", flights(8), {"penstock": 4.0, "proposal": 2.0}))
    assert found["a batch stored, x", "proposal"] == pytest.approx(
        2 * found["a batch stored, x", "penstock"]
    )
    assert found["disk saved, x", "penstock"] == 75
    assert found["disk saved, x", "as it is"] == 0


def test_the_break_even_link_is_where_both_ways_take_equally_long():
    there, back = {"penstock": Timing([0.04], [0])}, {"penstock": Timing([0.01], [0])}
    (row,) = rollout_claims._break_even(100.0, there, back, {"penstock": 4.0})
    megabytes_s = row.value * 1e3 / 8
    assert 100 / megabytes_s == pytest.approx(25 / megabytes_s + 0.05)


def test_the_proposals_minibatch_is_the_batch():
    lidar = flights(8)["agents", "observation", "lidar"]
    packed = [lz4.frame.compress(env.numpy().tobytes()) for env in lidar]
    chosen = torch.tensor([0, 33, 255, 33])
    flat = lidar.reshape(-1, *lidar.shape[2:])
    assert torch.equal(rollout_claims._minibatch(packed, chosen, lidar.shape[1:]), flat[chosen])


# ---------------------------------------------------------------------- replay


def test_frames_come_back():
    pictures = depth_pictures(6)
    buffer = FrameBuffer(pictures)
    for threads in (False, True):
        got = buffer.sample(np.array([5, 0, 5]), threads)
        assert np.array_equal(got.numpy(), pictures[[5, 0, 5]])


def test_both_indices_agree():
    lengths = np.random.default_rng(0).integers(1, 30, 50)
    ours = PrefixSum(int(lengths.sum()))
    for length in lengths.tolist():
        ours.add(length)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    theirs = ProposedPrefixSum(starts)
    for frame in range(int(lengths.sum())):
        assert ours.get_range_idx(frame) == theirs.get_range_idx(frame)


# ---------------------------------------------------------------------- collecting, monitor


def test_two_batches():
    found = by(collecting.measure_same_td())
    what = "memory of two batches held, return_same_td"
    assert found[what, "True"] == 1
    assert found[what, "False"] == 2
    assert found["objects behind two batches, return_same_td", "True"] == 1


def test_batches_alive_are_few():
    found = by(collecting.measure_alive(16))
    assert found["batches alive, 2 ahead", "one after the other"] in (1, 2)
    assert 2 <= found["batches alive, 2 ahead", "penstock"] <= 4


def test_sums_of_the_proposal():
    found = by(collecting.compute_gains())
    assert found["1,000,000 frames at 10,000 frames/s (computed)", "training"] == pytest.approx(
        100 / 60
    )
    low, high = (
        found["gains of checkpoints, pipeline and compression together (computed)", who]
        for who in ("the least of each", "the most of each")
    )
    assert low < 30 < high


def test_both_monitors_say_the_same():
    ours, theirs = PerformanceMonitor(), ProposedMonitor()
    with theirs.timer("a"):
        pass
    assert len(theirs.timings["a"]) == 1
    theirs.timings.clear()
    for seconds in (0.1, 0.4, 0.2, 0.3):
        ours.record("a", seconds)
        theirs.timings["a"].append(seconds)
    for window in (None, 2):
        mine = ours.get_stats(window)["a"]
        for name, value in theirs.get_stats(window)["a"].items():
            assert mine[name] == pytest.approx(value)
    for number in ("250.00", "111.80", "100.00", "400.00"):
        assert number in theirs.get_summary()
        assert number in ours.get_summary()


# ---------------------------------------------------------------------- checkpoints, recordings


def test_conclusions_follow_from_the_rows():
    what = "blocked, 100 ms before the step"
    rows = [
        Row(what, "torch.save", 1000.0, "ms"),
        Row(what, "deepcopy + queue (proposal)", 100.0, "ms"),
        Row(what, "penstock", 0.5, "ms"),
        Row("extra peak memory", "proposal, queue of 3", 4.0, "x state"),
    ]
    for dtype in ("float32", "bfloat16"):
        for who, saved in ((TORCH, 0.0), (PROPOSED, 5.0), (FULL, 20.0), (DELTA, 60.0)):
            rows.append(Row(f"size saved, {dtype}, 200.0 MB", who, saved, "%"))
            rows.append(Row(f"speed to durable disk, {dtype}", who, 50.0, "MB/s"))
    found = by(checkpoint_claims.conclude(rows, 200_000_000, Settings(Path("."))))
    assert found["blocked time saved against torch.save (computed)", "penstock"] == 99.95
    assert found["one checkpoint", PROPOSED] == pytest.approx(190)
    assert found["1,000 checkpoints (computed)", TORCH] == pytest.approx(200)
    assert found["size, float32", FULL] == pytest.approx(1.25)
    difference = "saved by a difference, against a full checkpoint, float32"
    assert found[difference, DELTA] == pytest.approx(50)
    assert found["extra memory of a queue of 3", "proposal, queue of 3"] == pytest.approx(800)
    assert found["writing 3 pending saves (computed)", PROPOSED] == pytest.approx(12)


def test_levels_of_a_state():
    state = {"weight": torch.randn(256, 256), "moment": torch.zeros(256, 256), "step": 3}
    found = by(checkpoint_claims.measure_levels(state))
    assert found["LZ4 size, checkpoint", "level 9"] == pytest.approx(2, rel=0.1)


def test_the_old_way_keeps_everything_twice(monkeypatch):
    monkeypatch.setattr(convert_memory, "_MEASURED", (10, 40))
    found = by(convert_memory.measure_whole(250_000))
    what = "memory of 10,000 frames of 3 cameras (scaled)"
    alone = found[what, "the pictures alone"]
    assert alone == pytest.approx(27.648)
    assert found[what, convert_memory.OLD] == pytest.approx(2 * alone, rel=0.1)
    chunk = "memory of a chunk, stacked (scaled)"
    assert found[chunk, "chunk_size=1000"] == pytest.approx(found[what, convert_memory.OLD] / 10)


def test_growth_is_that_of_the_peaks(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_memory, "_SECONDS", (0.5, 1.0))
    asked = []

    def convert(bag, out, codec, *words):
        asked.append((bag.name, codec, *words))
        return {"peak_bytes": 1e6 * len(asked), "cpu_s": 1.0, "wall_s": 2.0}

    found = by(convert_memory.measure_growth(tmp_path, convert))
    assert found["peak memory, a bag 2 times as large", "penstock copy, chunk_size=100"] == 2
    small, large = "window_frames=100", "window_frames=2000"
    assert [words for _, _, *words in asked] == [[small], [small], *([small], [large]) * 3]
    peaks = "peak memory by chunk_size"
    assert found[peaks, "penstock copy, chunk_size=100"] == 5  # the median of 3, 5 and 7
    assert found[peaks, "penstock copy, chunk_size=2000"] == 6
    assert found["processor time, chunk_size=100 against 2000", "penstock copy"] == 1
