"""Advice on real arrays: the right verdict, and the predicted ratio is what the settings give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import penstock
from benchmarks.experience import depth_pictures, flights
from penstock.advisor import Advice, Limits, advise, decide
from penstock.advisor.measure import measure_machine
from penstock.errors import PenstockError, UnsupportedValue, UsageError

SECONDS = 0.5
NAMES = ("DictReplayBuffer", "RolloutStorage", "CompressedDataCollector")


def size_of(data):
    if isinstance(data, TensorDict):
        return sum(value.nbytes for value in data.values(True, True))
    return sum(value.nbytes for value in data.values())


def run_line(line, **names):
    """Run a line of the settings as a user would."""
    return eval(line, {name: getattr(penstock, name) for name in NAMES} | names)


def real_stored(found, data, folder, monkeypatch):
    """Store the data by the first advised line; return how many times smaller it is."""
    monkeypatch.chdir(folder)
    stored = run_line(found.settings[0])
    if isinstance(stored, penstock.DictReplayBuffer):
        stored.add(data)
        stored.save("replay")
        size = sum(path.stat().st_size for path in (folder / "replay").iterdir())
    else:
        size = stored.save(data, 0).stat().st_size
    return size_of(data) / size


def under(found, **limits):
    """The same measurements, judged by other limits."""
    limits = Limits(**limits)
    return Advice(found.measurements, limits, decide(found.measurements, limits))


def real_held(found, data, episodes):
    line = next(line for line in found.settings if line.startswith("DictReplayBuffer("))
    assert "spill_dir" not in line
    buffer = run_line(line)
    for episode in episodes:
        buffer.add(episode)
    assert len(buffer) == found.measurements.frames
    return size_of(data) / buffer.stored_bytes


def noise():
    return {"x": np.random.default_rng(0).integers(0, 2**32, (4000, 144), np.uint32)}


def zeros(rows=20_000, width=32):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(rows, width)).astype(np.float32)
    return {"state": np.where(rng.random((rows, width)) < 0.9, 0, values).astype(np.float32)}


def pictures():
    return {"pixels": np.concatenate([depth_pictures(70, seed) for seed in range(4)])}


def noisy_pictures():
    return {"pixels": np.concatenate([depth_pictures(70, seed, 2.0) for seed in range(4)])}


@pytest.fixture(scope="module")
def lidar():
    return flights(160, 32, 0.02)


def saved(data, folder):
    path = folder / "data.npz"
    np.savez(path, **data)
    return path


def test_noise_is_left_alone(tmp_path, monkeypatch):
    found = advise(saved(noise(), tmp_path), seconds=SECONDS)
    for limits in ({}, {"memory": 10**6}, {"bandwidth": 1e5}):
        assert under(found, **limits).verdict == "A"
        assert under(found, **limits).ratio == 1.0
    assert found.decision.ratio_stored == pytest.approx(
        real_stored(found, noise(), tmp_path, monkeypatch), rel=0.1
    )


@pytest.mark.parametrize("make", [pictures, noisy_pictures, zeros])
def test_stored_and_held_in_memory(make, tmp_path, monkeypatch):
    data = make()
    [array] = data.values()
    found = advise(saved(data, tmp_path), seconds=SECONDS)
    assert found.verdict == "B"
    assert found.ratio == pytest.approx(real_stored(found, data, tmp_path, monkeypatch), rel=0.1)
    found = under(found, memory=array.nbytes * 9 // 10)
    assert (found.verdict, found.decision.form) == ("C", "buffer")
    assert found.ratio == pytest.approx(real_held(found, data, [data]), rel=0.1)


def test_lidar(lidar, tmp_path, monkeypatch):
    found = advise(lidar, seconds=SECONDS)
    assert (found.verdict, found.ratio) == ("A", 1.0)  # PPO: it fits, is used and dropped
    found = under(found, bandwidth=1e6)
    assert found.verdict == "B"
    assert found.ratio == pytest.approx(real_stored(found, lidar, tmp_path, monkeypatch), rel=0.1)


def test_batches_that_do_not_fit_are_compressed_as_they_are_collected(lidar):
    memory = 4 * 10**6
    found = under(advise(lidar, seconds=SECONDS), memory=memory)
    assert (found.verdict, found.decision.form, found.decision.fits) == ("C", "batch", True)
    collector = run_line(found.settings[0], collector=[lidar])
    [batch] = collector
    assert found.ratio == pytest.approx(batch.raw_bytes / batch.nbytes, rel=0.1)
    assert (batch.decompress() == lidar).all()
    assert batch.nbytes + collector._cache._limit_bytes <= 1.1 * memory
    assert found.decision.ratio_in_memory == pytest.approx(real_held(found, lidar, lidar), rel=0.1)
    too_small = under(found, memory=10**6)
    assert (too_small.verdict, too_small.decision.fits) == ("C", False)
    assert "spill_dir on disk" in too_small.why[1]
    assert 'spill_dir="spill"' in too_small.settings[1]


def halves():
    rng = np.random.default_rng(0)
    return {"x": np.concatenate([np.zeros((12_000, 80)), rng.normal(size=(12_000, 80))])}


def late():
    """Nothing but zeros, and noise in the last fifth."""
    x = np.zeros((1000, 6000), np.float32)
    x[800:] = np.random.default_rng(0).normal(size=(200, 6000))
    return {"x": x}


def many():
    rng = np.random.default_rng(0)
    return {f"key{k}": (rng.normal(size=(600, 16)) * (k % 3)).astype(np.float32) for k in range(60)}


def tiny():
    return {"x": np.arange(3000, dtype=np.float32)}


def few():
    return {"x": np.ones((10, 4), np.float32), "y": np.zeros((10, 3))}


def long_rows():
    return TensorDict({"x": torch.randn(3, 150_000, 4).cumsum(1)}, [3, 150_000])


def time_first():
    walk = torch.randn(64, 300, 9).cumsum(0)
    return TensorDict({"x": walk, "z": torch.zeros(64, 300)}, [64, 300], names=["time", None])


def odd_types():
    return {
        "half": np.cumsum(np.ones((5000, 8), np.float16), 0, dtype=np.float16),
        "nan": np.full((5000, 4), np.nan),
        "flag": np.zeros((5000,), bool),
        "complex": np.ones((5000, 2), np.complex64),
        "big": np.arange(5000, dtype=">f4"),
        "scalar": np.float32(3),
        "none": np.zeros((5000, 0)),
    }


@pytest.mark.parametrize("make", [halves, late, many, tiny, few, long_rows, time_first, odd_types])
def test_the_sample_stands_for_the_whole(make, tmp_path):
    data = make()
    found = advise(data, seconds=SECONDS)
    real = size_of(data) / penstock.RolloutStorage(tmp_path).save(data, 0).stat().st_size
    assert found.decision.ratio_stored == pytest.approx(real, rel=0.1)


def test_frames_in_time_that_are_too_large_for_the_sample():
    """Time is the axis of the rows: there are no windows in them."""
    frames = torch.zeros(40, 3_000_000, dtype=torch.uint8)
    data = TensorDict({"x": frames}, [40], names=["time"])
    found = advise(data, bandwidth="1Mb/s", seconds=SECONDS)
    assert found.verdict == "B"
    assert 0 < found.measurements.keys[0].sampled_bytes <= 4 * 3_000_000


def test_of_large_data_only_a_part_is_looked_at():
    data = halves()
    found = advise(data, seconds=SECONDS).measurements
    assert 0 < found.keys[0].sampled_bytes < size_of(data) / 3


def test_bfloat16():
    data = TensorDict({"x": torch.zeros(500, 20, 8, dtype=torch.bfloat16)}, [500, 20])
    assert advise(data, bandwidth="1Mb/s", seconds=SECONDS).verdict == "B"


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_one_array_alone(make):
    found = advise(make((5000, 20)), bandwidth="1Mb/s", seconds=SECONDS)
    assert (found.verdict, found.measurements.frames) == ("B", 5000)
    assert [key.name for key in found.measurements.keys] == ["data"]


def test_weights_are_a_checkpoint():
    net = torch.nn.Linear(300, 300)
    found = advise(net.state_dict(), seconds=SECONDS)
    assert {key.writer for key in found.measurements.keys} == {"checkpoint"}
    assert found.settings[0] == 'AsyncCheckpointSaver("checkpoints", compress=False)'


def test_the_bound_is_beaten_by_repeats():
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, (1, 64, 64), np.uint8)
    found = advise({"x": np.repeat(block, 200, 0)}, seconds=SECONDS).to_json()
    assert found["keys"][0]["beats_bound"]
    assert found["ratio_stored"] > 10


def test_the_json_has_what_it_promises():
    found = advise(tiny(), memory="1GB", bandwidth="1Gb/s", reuse=3, seconds=SECONDS).to_json()
    names = {"verdict", "ratio", "ratio_stored", "ratio_in_memory", "break_even", "why",
             "settings", "keys", "machine", "limits"}  # fmt: skip
    assert names <= set(found)
    assert found["limits"]["bandwidth"] == 125e6
    assert found["machine"]["copy_bytes_s"] > 0
    assert {c["name"] for c in found["keys"][0]["compared"]} == {
        "lz4 0", "lz4 9", "zstd 1", "zstd 3"
    }  # fmt: skip


@pytest.mark.parametrize("data", [{}, {"a": {}}, {"a": "text"}, {"a": np.zeros(0)}, 3, None, []])
def test_nothing_to_measure(data):
    with pytest.raises(UsageError, match=r"nothing to measure|advise takes"):
        advise(data)


@pytest.mark.parametrize("value", [np.array([None]), np.array(["x"]), np.datetime64("2020-01-01")])
def test_what_holds_no_numbers_is_named(value):
    with pytest.raises(UnsupportedValue, match=r"deep\.x is an array of"):
        advise({"deep": {"x": value}})


def test_the_machine_is_measured(tmp_path):
    found = measure_machine(str(tmp_path), 0.05)
    assert found.cores >= 1
    assert found.memory_bytes > 10**8
    assert found.copy_bytes_s > 10**7
    assert found.write_bytes_s > 10**4
    assert list(tmp_path.iterdir()) == []


def test_nonsense_seconds():
    for seconds in (0, -1, float("nan"), "x", True):
        with pytest.raises(PenstockError, match="seconds"):
            advise(tiny(), seconds=seconds)
