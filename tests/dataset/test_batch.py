"""Many episodes in one commit: the same dataset as one by one, all or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StorageError, UsageError
from penstock.dataset import batch as batches
from penstock.dataset.batch import EpisodeBatch
from penstock.dataset.batch_stats import episode_stats
from penstock.dataset.doctor import check
from penstock.dataset.episode import EpisodeWriter
from penstock.dataset.journal import Journal
from penstock.dataset.layout import Feature
from penstock.dataset.reader import Dataset
from penstock.dataset.stats import VectorStats
from penstock.dataset.writer import DatasetWriter

FEATURES = {
    "observation.state": Feature("float32", (3,)),
    "observation.lidar": Feature("float32", (1, 4, 2)),
    "next.done": Feature("bool", (1,)),
    "count": Feature("int64", (1,)),
}


def make(lengths, seed=0, task="fly") -> EpisodeBatch:
    rng = np.random.default_rng(seed)
    frames = int(np.sum(lengths))
    columns = {
        "observation.state": rng.normal(size=(frames, 3)).astype(np.float32),
        "observation.lidar": rng.normal(size=(frames, 1, 4, 2)).astype(np.float32),
        "next.done": rng.random((frames, 1)) < 0.2,
        "count": rng.integers(-(2**60), 2**60, (frames, 1)),
    }
    return EpisodeBatch(columns, np.array(lengths, np.int64), task)


def one_by_one(writer: DatasetWriter, batch: EpisodeBatch) -> None:
    start = 0
    for number, length in enumerate(batch.lengths.tolist()):
        staged = EpisodeWriter(writer.staging(f"e{number}"), FEATURES, 10, length)
        staged.add_rows({n: c[start : start + length] for n, c in batch.columns.items()})
        writer.commit(staged.finish(batch.task), {"n": number})
        start += length


def content(root: Path):
    """Everything a reader sees; statistics apart, since they may differ in the last digit."""
    dataset = Dataset(root)
    rows = [(e.index, len(e), e.tasks, e.from_index, e.columns()) for e in dataset.episodes]
    stats = dict(dataset.episode_stats())
    return dataset.info, rows, stats, dataset.stats() if dataset.version == "v3.0" else {}


def compare(one, other) -> None:
    for a, b in zip(one[1], other[1], strict=True):
        assert a[:4] == b[:4]
        assert a[4].keys() == b[4].keys()
        for name in a[4]:
            assert np.array_equal(a[4][name], b[4][name]), name
    assert one[0] == other[0]
    for a, b in [*((one[2][k], other[2][k]) for k in one[2]), (one[3], other[3])]:
        assert a.keys() == b.keys()
        for name in a:
            for stat in a[name]:
                np.testing.assert_allclose(a[name][stat], b[name][stat], 1e-6, 1e-6)


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_a_batch_is_the_same_dataset_as_one_by_one(tmp_path, version) -> None:
    first, second = make([5, 1, 7, 32], 0), make([3, 3], 1, "land")
    with DatasetWriter(tmp_path / "many", FEATURES, 10, version=version) as writer:
        assert writer.commit_many(first, {"a": 1}) == range(4)
        assert writer.commit_many(second, {"a": 2}) == range(4, 6)
        assert writer.committed == [{"a": 1}, {"a": 2}]
        loose = content(tmp_path / "many")
        assert writer.finalize()
    with DatasetWriter(tmp_path / "single", FEATURES, 10, version=version) as writer:
        one_by_one(writer, first)
        one_by_one(writer, second)
        writer.finalize()
    for root in ("many", "single"):
        checkup = check(tmp_path / root)
        assert checkup.findings == [], checkup.text()
    compare(content(tmp_path / "many"), content(tmp_path / "single"))
    compare(loose, content(tmp_path / "single"))


def test_batches_and_single_episodes_mix(tmp_path) -> None:
    with DatasetWriter(tmp_path / "out", FEATURES, 10) as writer:
        writer.commit_many(make([4, 2]), {"k": 0})
        one_by_one(writer, make([3, 5], 7))
        writer.finalize()
        writer.commit_many(make([6], 3), {"k": 1})
        writer.finalize()
    assert [len(e) for e in Dataset(tmp_path / "out").episodes] == [4, 2, 3, 5, 6]
    assert check(tmp_path / "out").findings == []


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_killed_before_its_line_a_batch_is_not_there(tmp_path, version, monkeypatch) -> None:
    out = tmp_path / "out"
    with DatasetWriter(out, FEATURES, 10, version=version) as writer:
        writer.commit_many(make([4, 2]), {"k": 0})
        append = Journal.append

        def killed(journal, record) -> None:
            shutil.copytree(out, tmp_path / "killed")
            append(journal, record)
            data = (out / ".penstock/journal.jsonl").read_bytes()
            shutil.copytree(out, tmp_path / "torn")
            (tmp_path / "torn/.penstock/journal.jsonl").write_bytes(data[:-9])

        monkeypatch.setattr(Journal, "append", killed)
        writer.commit_many(make([5] * 9, 1), {"k": 1})
    monkeypatch.undo()
    for name in ("killed", "torn"):
        assert len(Dataset(tmp_path / name)) == 2
        with DatasetWriter(tmp_path / name, FEATURES, 10, version=version, mode="resume") as writer:
            assert writer.committed == [{"k": 0}]
            assert check(tmp_path / name).findings == []
            writer.commit_many(make([5] * 9, 1), {"k": 1})
        compare(content(tmp_path / name), content(out))


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_batch_that_fails_is_taken_back(tmp_path, version, error, monkeypatch) -> None:
    out = tmp_path / "out"
    with DatasetWriter(out, FEATURES, 10, version=version) as writer:
        writer.commit_many(make([4, 2]), {"k": 0})
        before = {p for p in out.rglob("*") if p.is_file()}

        def fail(journal, record) -> None:
            raise error

        monkeypatch.setattr(Journal, "append", fail)
        with pytest.raises((KeyboardInterrupt, StorageError)):
            writer.commit_many(make([5, 6], 1), {"k": 1})
        monkeypatch.undo()
        assert {p for p in out.rglob("*") if p.is_file()} == before
        writer.commit_many(make([5, 6], 1), {"k": 1})
    assert check(out).findings == []


def test_what_does_not_fit_is_refused(tmp_path) -> None:
    good = make([2, 3])
    columns = dict(good.columns)
    with DatasetWriter(tmp_path / "out", FEATURES, 10) as writer:
        for changed, words in [
            ({"count": columns["count"][:4]}, "'count': rows of int64"),
            ({"count": columns["count"].astype(np.float32)}, "'count': rows of float32"),
            ({"more": columns["count"]}, "only the batch has the feature 'more'"),
        ]:
            with pytest.raises(UsageError, match=words):
                writer.commit_many(EpisodeBatch({**columns, **changed}, good.lengths, "t"), {})
        with pytest.raises(UsageError, match="at least one episode"):
            writer.commit_many(EpisodeBatch(columns, np.array([5, 0]), "t"), {})
        with pytest.raises(UsageError, match="only the dataset has"):
            writer.commit_many(EpisodeBatch({}, good.lengths, "t"), {})
        assert writer.total_episodes == 0


def test_row_groups_hold_whole_episodes(monkeypatch) -> None:
    monkeypatch.setattr(batches, "_GROUP_ROWS", 10)
    assert batches._groups([4, 4, 4, 20, 1, 9, 1]) == [
        (0, 8),
        (8, 12),
        (12, 32),
        (32, 42),
        (42, 43),
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["float32", "bool", "int32"]),
    st.floats(0, 1),
)
def test_statistics_of_many_episodes_are_those_of_each(lengths, seed, dtype, odd) -> None:
    rng = np.random.default_rng(seed)
    frames = sum(lengths)
    rows = rng.normal(0, 3, (frames, 2, 2)).astype(dtype)
    if dtype == "float32":
        rows[rng.random(rows.shape) < odd] = rng.choice([np.nan, np.inf, -np.inf])
    feature = Feature(dtype, (2, 2))
    found = episode_stats(rows, np.array(lengths), feature)
    start = 0
    for number, length in enumerate(lengths):
        reference = VectorStats(4)
        reference.add(rows[start : start + length])
        start += length
        for stat, wanted in reference.to_json(feature).items():
            np.testing.assert_allclose(
                found[stat][number], np.ravel(wanted), 1e-6, 1e-6, err_msg=stat
            )
