"""Advice on series of checkpoints: differences are predicted as a real saver stores them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import penstock
from penstock.advisor import advise
from penstock.advisor.checkpoints import DELTA_EVERY, folder_source
from penstock.errors import CorruptFile

SECONDS = 0.2


def training(rate):
    """Yield the states of a training: weights that move by `rate` of their size, and moments."""
    generator = torch.Generator().manual_seed(0)
    names = ("0.weight", "0.bias", "2.weight", "2.bias")
    shapes = ((160, 64), (160,), (160, 160), (160,))
    weights = {n: torch.randn(s, generator=generator) for n, s in zip(names, shapes, strict=True)}
    moments = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for number in itertools.count():
        for name, weight in weights.items():
            gradient = torch.randn(weight.shape, generator=generator)
            moments[name] += rate * gradient
            weight *= 1 - rate * gradient
        yield copy.deepcopy({"model": weights, "optimizer": {"exp_avg": moments}, "step": number})


def save(saver, states):
    with saver:
        for number, state in enumerate(states):
            saver.save_async(state, f"step_{number}.pt").wait()


def size(folder):
    files = [path for path in folder.iterdir() if not path.is_symlink()]
    return sum(path.stat().st_size for path in files)


def saver_of(line, folder):
    """Make the saver that a line of the settings describes."""
    line = line.replace('"checkpoints"', repr(str(folder)))
    return eval(line, {"AsyncCheckpointSaver": penstock.AsyncCheckpointSaver})


@pytest.mark.parametrize(
    ("kind", "count"), [("full", 14), ("delta", 5), ("torch", 12), ("torch", 2)]
)
def test_differences_are_predicted(kind, count, tmp_path):
    states = list(itertools.islice(training(1e-6), count))
    folder = tmp_path / kind
    if kind == "torch":
        folder.mkdir()
        for number, state in enumerate(states):
            torch.save(state, folder / f"step_{number}.pt")
    else:
        delta = DELTA_EVERY if kind == "delta" else 0
        save(penstock.AsyncCheckpointSaver(folder, delta_every=delta), states)
    found = advise(folder, seconds=SECONDS)
    assert (found.verdict, found.decision.delta_every) == ("B", DELTA_EVERY)
    assert found.decision.ratio_full < 1.3
    save(saver_of(found.settings[0], tmp_path / "advised"), states)
    assert found.ratio == pytest.approx(
        found.decision.raw_bytes / size(tmp_path / "advised"), rel=0.1
    )
    assert "as differences" in found.why[0]


def test_checkpoints_that_lie_far_apart_are_left_alone(tmp_path):
    states = list(itertools.islice(training(0.3), 4))
    save(penstock.AsyncCheckpointSaver(tmp_path / "full"), states)
    found = advise(tmp_path / "full", seconds=SECONDS)
    assert (found.verdict, found.decision.delta_every) == ("A", 0)
    save(penstock.AsyncCheckpointSaver(tmp_path / "delta", delta_every=10), states)
    real = found.decision.raw_bytes / size(tmp_path / "delta")
    assert found.decision.ratio_delta == pytest.approx(real, rel=0.1)
    assert found.settings[0] == 'AsyncCheckpointSaver("checkpoints", compress=False)'


def test_one_checkpoint_says_how_to_find_out(tmp_path):
    save(penstock.AsyncCheckpointSaver(tmp_path), itertools.islice(training(1e-6), 1))
    for path in (tmp_path, tmp_path / "step_0.pt"):
        found = advise(path, seconds=SECONDS)
        assert (found.verdict, found.decision.ratio_delta) == ("A", None)
        assert "delta_every" in found.to_json()["notes"][-1]


def test_what_cannot_be_read_is_left_out(tmp_path):
    save(
        penstock.AsyncCheckpointSaver(tmp_path, delta_every=3),
        itertools.islice(training(1e-6), 7),
    )
    (tmp_path / "step_0.pt").unlink()  # 1 and 2 build on it
    torch.save({"other": torch.zeros(5000)}, tmp_path / "other.pt")
    data = bytearray((tmp_path / "step_6.pt").read_bytes())
    data[-2000] ^= 1
    (tmp_path / "step_6.pt").write_bytes(data)
    found = advise(tmp_path, seconds=SECONDS)
    assert (found.verdict, found.decision.delta_every) == ("B", DELTA_EVERY)
    assert found.to_json()["notes"] == [
        "left out: 4 checkpoints of another structure, or that cannot be read"
    ]
    for number in (3, 4, 5):
        (tmp_path / f"step_{number}.pt").unlink()
    with pytest.raises(CorruptFile, match=r"step_6\.pt"):
        advise(tmp_path, seconds=SECONDS)


def test_a_run_keeps_its_checkpoints_out_of_the_memory(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    save(
        penstock.AsyncCheckpointSaver(tmp_path / "checkpoints"),
        itertools.islice(training(1e-6), 3),
    )
    batch = {"x": torch.randn(50, 20, 30).round(decimals=1), "r": torch.zeros(50, 20)}
    penstock.RolloutStorage(tmp_path / "rollouts").save(batch, 0)
    found = advise(tmp_path, seconds=SECONDS)
    assert found.decision.memory_bytes == sum(value.nbytes for value in batch.values())
    assert found.settings[-1].endswith("checkpoint_delta_every=10")


def test_samples_stand_for_the_checkpoints_around_them(tmp_path):
    state = {"w": torch.zeros(2000)}
    save(penstock.AsyncCheckpointSaver(tmp_path), [state] * 47)
    source = folder_source(tmp_path, 1 << 20)
    assert sum(sample.files for sample in source.samples) == pytest.approx(47)
    keyframes = [sample for sample in source.samples if sample.base is None]
    assert sum(sample.share for sample in keyframes) == pytest.approx(5)
    assert sum(sample.share for sample in source.samples) == pytest.approx(47)
    assert len(source.samples) <= 15
    [key] = source.keys
    assert (key.path, key.writer, key.dtype, key.shape) == (
        ("w",),
        "checkpoint",
        "float32",
        (2000,),
    )
    assert (key.raw_bytes, key.memory_bytes) == (47 * 8000, 8000)


def test_a_tensor_that_grows_is_no_other_structure(tmp_path):
    """A training keeps a history: only its newest checkpoint had been looked at."""
    states = list(itertools.islice(training(1e-6), 5))
    for number, state in enumerate(states):
        state["history"] = torch.zeros(number + 1, 10)
    states[1] = dict(reversed(states[1].items()))  # nor is the order of the tensors
    save(penstock.AsyncCheckpointSaver(tmp_path / "run"), states)
    found = advise(tmp_path / "run", seconds=SECONDS)
    assert not any("left out" in note for note in found.measurements.notes)
    assert found.decision.delta_every == DELTA_EVERY
    assert found.decision.raw_bytes >= 5 * sum(w.nbytes for w in states[0]["model"].values())
