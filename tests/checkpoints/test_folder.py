"""Retention, `latest`, deltas and their bases."""

import os

import pytest
import torch

from penstock import errors
from penstock.checkpoints import folder
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver

from .conftest import Training, assert_equal


def make(tmp_path, **options):
    return AsyncCheckpointSaver(tmp_path, handle_signals=False, **options)


def names(tmp_path):
    return sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".pt")


def save_all(saver, count, **options):
    for i in range(count):
        saver.save_async({"i": i, "x": torch.full((100,), float(i))}, f"{i}.pt", **options).wait()


def test_keep_last(tmp_path):
    with make(tmp_path, keep_last=2) as saver:
        save_all(saver, 5)
        assert saver.latest() == tmp_path / "4.pt"
    assert names(tmp_path) == ["3.pt", "4.pt"]
    with make(tmp_path, keep_last=2) as saver:  # a later run goes on with the rule and the count
        saver.save_async({"i": 9}, "9.pt").wait()
    assert names(tmp_path) == ["4.pt", "9.pt"]


@pytest.mark.parametrize(("direction", "best"), [("max", "1.pt"), ("min", "2.pt")])
def test_keep_best(tmp_path, direction, best):
    with make(tmp_path, keep_last=1, keep_best=(1, direction)) as saver:
        for i, metric in enumerate([3.0, 9.0, 1.0, float("nan"), None]):
            saver.save_async({"i": i}, f"{i}.pt", metric=metric).wait()
    assert names(tmp_path) == sorted([best, "4.pt"])


def test_nothing_foreign_is_removed(tmp_path):
    (tmp_path / "mine.pt").write_bytes(b"not a checkpoint")
    torch.save({"a": 1}, tmp_path / "torch.pt")
    with make(tmp_path) as saver:
        save_all(saver, 2)
    with make(tmp_path, keep_last=1) as saver:
        saver.save_async({"i": 7}, "7.pt").wait()
        saver.save_async({"i": 8}, "8.pt").wait()
    assert names(tmp_path) == ["0.pt", "1.pt", "8.pt", "mine.pt", "torch.pt"]


def test_latest_is_a_link_that_any_reader_follows(tmp_path):
    from safetensors.torch import load_file

    with make(tmp_path, compress=False) as saver:
        save_all(saver, 3)
    assert os.readlink(tmp_path / "latest") == "2.pt"
    assert load_checkpoint(tmp_path / "latest")["i"] == 2
    assert load_file(tmp_path / "latest")["x"][0] == 2


def test_latest_where_links_do_not_exist(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "symlink", lambda *_: (_ for _ in ()).throw(OSError(95, "no links")))
    with make(tmp_path) as saver:
        save_all(saver, 2)
        assert saver.latest() == tmp_path / "1.pt"
    assert (tmp_path / "latest").read_text() == "1.pt"
    assert load_checkpoint(tmp_path)["i"] == 1


@pytest.mark.parametrize("target", ["../outside.pt", "/etc/passwd", "", "latest", "."])
def test_a_hostile_pointer_stays_in_its_folder(tmp_path, target):
    (tmp_path / "outside.pt").write_bytes(b"x")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "latest").write_text(target)
    assert folder.latest(inner) is None
    with pytest.raises(errors.UsageError, match="no checkpoint"):
        load_checkpoint(inner)


def train_and_save(tmp_path, count, **options):
    training = Training(width=1200)
    for _ in range(30):
        training.step()
    expected = []
    with make(tmp_path, optimizers=[training.optimizer], **options) as saver:
        for i in range(count):
            expected.append(training.copy())
            saver.save_async(training.state(), f"{i}.pt")
            training.step()
            saver.wait()
        deltas = saver.get_stats()["total_deltas"]
    return expected, deltas


def test_deltas_are_smaller_and_exact(tmp_path):
    expected, deltas = train_and_save(tmp_path, 7, delta_every=3)
    assert deltas == 4
    sizes = [(tmp_path / f"{i}.pt").stat().st_size for i in range(7)]
    for i in (1, 2, 4, 5):
        assert sizes[i] < 0.9 * sizes[0]
    for i, state in enumerate(expected):
        assert_equal(load_checkpoint(tmp_path / f"{i}.pt"), state)


def test_deltas_go_only_one_deep(tmp_path):
    train_and_save(tmp_path, 5, delta_every=5)
    key = folder.read_saved(tmp_path / "0.pt")
    for i in range(1, 5):
        assert folder.read_saved(tmp_path / f"{i}.pt").base == key.digest


def test_a_delta_that_does_not_pay_is_not_made(tmp_path):
    with make(tmp_path, delta_every=5) as saver:
        for i in range(3):
            saver.save_async({"x": torch.randn(100_000)}, f"{i}.pt").wait()
        assert saver.get_stats()["total_deltas"] == 0


def test_bases_outlive_retention(tmp_path):
    expected, _ = train_and_save(tmp_path, 6, delta_every=4, keep_last=1)
    assert names(tmp_path) == ["4.pt", "5.pt"]
    assert_equal(load_checkpoint(tmp_path), expected[5])
    (tmp_path / "b").mkdir()
    expected, _ = train_and_save(tmp_path / "b", 4, delta_every=4, keep_last=2)
    assert names(tmp_path / "b") == ["0.pt", "2.pt", "3.pt"]
    assert_equal(load_checkpoint(tmp_path / "b"), expected[3])


def test_a_base_that_is_written_again_is_kept(tmp_path):
    training = Training(width=1200)
    for _ in range(30):
        training.step()
    with make(tmp_path, optimizers=[training.optimizer], delta_every=4) as saver:
        states = {}
        for name in ("a.pt", "b.pt", "c.pt"):
            states[name] = training.copy()
            saver.save_async(training.state(), name)
            training.step()
            saver.wait()
        assert saver.get_stats()["total_deltas"] == 2
        states["a.pt"] = training.copy()
        saver.save_async(training.state(), "a.pt")
        training.step()
        saver.wait()
        for name, state in states.items():
            assert_equal(load_checkpoint(tmp_path / name), state)
        for name in ("b.pt", "c.pt"):  # nobody needs the old content any more
            saver.save_async({"x": 1}, name, compress=False).wait()
    assert not list(tmp_path.glob(".*base"))


def test_a_missing_or_foreign_base_is_said(tmp_path):
    train_and_save(tmp_path, 2, delta_every=2)
    with make(tmp_path) as saver:
        saver.save_async({"x": 1}, "other.pt").wait()
    (tmp_path / "0.pt").unlink()
    with pytest.raises(errors.CorruptFile, match=r"difference to 0\.pt, which is not beside it"):
        load_checkpoint(tmp_path / "1.pt")
    (tmp_path / "other.pt").rename(tmp_path / "0.pt")
    with pytest.raises(errors.CorruptFile, match=r"another 0\.pt"):
        load_checkpoint(tmp_path / "1.pt")


@pytest.mark.parametrize("damage", ["everywhere", "one byte"])
def test_a_damaged_keyframe_is_never_built_on(tmp_path, damage):
    training = Training(width=30_000)
    for _ in range(10):
        training.step()
    with make(tmp_path, optimizers=[training.optimizer], delta_every=10) as saver:
        saver.save_async(training.state(), "0.pt").wait()
        data = bytearray((tmp_path / "0.pt").read_bytes())
        where = range(len(data) // 3, len(data), 5000) if damage == "everywhere" else [-100_000]
        for at in where:
            data[at] ^= 255
        (tmp_path / "0.pt").write_bytes(data)
        for name in ("1.pt", "2.pt"):
            expected = training.copy()
            saver.save_async(training.state(), name)
            training.step()
            saver.wait()
            assert_equal(load_checkpoint(tmp_path / name), expected)
        assert folder.read_saved(tmp_path / "1.pt").base is None


def test_a_crash_before_latest_moved_gives_no_number_twice(tmp_path):
    with make(tmp_path) as saver:
        save_all(saver, 2)
    folder.move_latest(tmp_path / "0.pt")  # as it was when 1.pt had just got its name
    with make(tmp_path) as saver:
        saver.save_async({"i": 9}, "0_again.pt").wait()
    (tmp_path / folder.LATEST).unlink()
    assert load_checkpoint(tmp_path)["i"] == 9
