"""Committing, building, resuming, replacing: always a whole dataset, and never a unit lost."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from penstock.dataset import build as building
from penstock.dataset import layout, swap
from penstock.dataset.check import check
from penstock.dataset.layout import Feature, FileLimits
from penstock.dataset.metadata import read_tasks
from penstock.dataset.reader import Dataset
from penstock.dataset.unit import Episode, write_failure_note
from penstock.dataset.writer import DatasetWriter
from penstock.errors import CorruptFile, LockHeld, SaverClosed, StorageError, UsageError
from penstock.media.images import ImageDecoder, to_rgb
from penstock.media.video import VideoSettings, read_video

s = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("staging.py"))))
LENGTHS = [s.length_of(number) for number in range(20)]
SMALL = FileLimits(data_mb=1, video_mb=50)
UNITS = ".penstock/units"
BUILT = "meta/penstock/built.jsonl"


def info_of(out: Path) -> dict:
    return json.loads((out / "meta/info.json").read_bytes())


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def episodes_of(out: Path) -> list[dict]:
    paths = sorted(out.glob("meta/episodes/*/*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def check_v3(out: Path, numbers: int | list[int]) -> None:
    """Check everything that lerobot relies on, by itself."""
    numbers = list(range(numbers)) if isinstance(numbers, int) else numbers
    info, records = info_of(out), episodes_of(out)
    lengths = [LENGTHS[number] for number in numbers]
    count = len(numbers)
    assert info["total_episodes"] == len(records) == count
    assert info["total_frames"] == sum(lengths)
    assert info["splits"] == {"train": f"0:{count}"}
    assert [row["episode_index"] for row in records] == list(range(count))
    assert [row["length"] for row in records] == lengths
    starts = np.cumsum([0, *lengths])
    tasks = read_tasks(out, layout.V30)
    for row, number, length in zip(records, numbers, lengths, strict=True):
        at = row["episode_index"]
        span = (row["dataset_from_index"], row["dataset_to_index"])
        assert span == (starts[at], starts[at + 1])
        path = out / layout.V30.data_path(row["data/chunk_index"], row["data/file_index"])
        table = pq.read_table(path, filters=[("episode_index", "=", at)])
        assert table["index"].to_pylist() == list(range(*span))
        assert table["frame_index"].to_pylist() == list(range(length))
        times = np.arange(length) / s.FPS
        assert np.array_equal(table["timestamp"].to_numpy(), times.astype(np.float32))
        assert {tasks[i] for i in table["task_index"].to_pylist()} == {f"task {number % 3}"}
        assert row["tasks"] == [f"task {number % 3}"]
        expected = s.rows(number, length)["observation.state"]
        found = np.array(table["observation.state"].to_pylist(), np.float32)
        assert np.array_equal(found, expected)
        np.testing.assert_allclose(
            row["stats/observation.state/mean"], expected.mean(0, np.float64), 1e-6
        )
        key = f"videos/{s.CAMERA}"
        place = row[f"{key}/chunk_index"], row[f"{key}/file_index"]
        video = out / layout.V30.video_path(s.CAMERA, *place)
        begin = row[f"{key}/from_timestamp"] * s.FPS
        assert begin == pytest.approx(round(begin), abs=1e-9)
        seconds = row[f"{key}/to_timestamp"] - row[f"{key}/from_timestamp"]
        assert seconds == pytest.approx(length / s.FPS, abs=1e-12)
        frames = read_video(video, round(begin), length)
        shown = [(number * 16 + i) % 256 for i in range(length)]
        assert [s.number_of(frame) for frame in frames] == shown
    stats = json.loads((out / layout.V30.stats).read_bytes())
    values = np.concatenate(
        [s.rows(i, n)["observation.state"] for i, n in zip(numbers, lengths, strict=True)]
    ).astype(np.float64)
    np.testing.assert_allclose(stats["observation.state"]["mean"], values.mean(0))
    np.testing.assert_allclose(stats["observation.state"]["q90"], np.quantile(values, 0.9, axis=0))
    assert stats["index"]["max"] == [sum(lengths) - 1]
    assert stats[s.CAMERA]["count"] == [sum(lengths)]
    assert min(np.ravel(stats[s.CAMERA]["std"])) > 0.05


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    """Datasets of seven episodes, a unit each, in one build."""
    folder = tmp_path_factory.mktemp("whole")
    for version in layout.VERSIONS:
        with s.open_writer(folder / version, version=version) as writer:
            for number in range(7):
                s.commit(writer, number)
            assert writer.build()
    return {version: folder / version for version in layout.VERSIONS}


def test_a_dataset_of_units(tmp_path: Path) -> None:
    out = tmp_path / "d"
    with s.open_writer(out) as writer:
        assert not writer.build()
        for number in range(3):
            unit = s.commit(writer, number)
            assert unit.record.position == number
            assert not (out / "meta").exists()  # the LeRobot files are built, not grown
        s.commit(writer, 3, 4)
        sources = [{"number": number} for number in range(4)]
        for _ in range(2):
            assert writer.committed == sources
            assert [record.position for record in writer.records] == [0, 1, 2, 3]
            assert (writer.total_episodes, writer.total_frames) == (5, sum(LENGTHS[:5]))
            writer.build()
        assert not writer.build()
        assert list((out / UNITS).iterdir()) == []
    check_v3(out, 5)
    assert check(out).findings == []
    files = [path for path in s.files_of(out) if path.startswith(("data", "videos", "meta/epi"))]
    assert len(files) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    info = info_of(out)["features"][s.CAMERA]["info"]
    assert list(info)[:3] == ["video.height", "video.width", "video.codec"]


def test_v2_1(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 4, version="v2.1", limits=FileLimits(files_per_chunk=3))
    info = info_of(out)
    assert (info["total_episodes"], info["total_videos"], info["total_chunks"]) == (4, 4, 2)
    lines = lines_of(out / layout.V21.episodes)
    assert lines[3] == {"episode_index": 3, "tasks": ["task 0"], "length": LENGTHS[3]}
    tasks = [line["task"] for line in lines_of(out / layout.V21.tasks)]
    assert tasks == ["task 0", "task 1", "task 2"]
    stats = lines_of(out / layout.V21.episode_stats)
    assert list(stats[2]["stats"]["action"]) == ["min", "max", "mean", "std", "count"]
    for number in range(4):
        table = pq.read_table(out / layout.V21.data_path(number // 3, number))
        assert table.num_rows == LENGTHS[number]
        assert set(table["episode_index"].to_pylist()) == {number}
        video = out / layout.V21.video_path(s.CAMERA, number // 3, number)
        assert s.header_of(video)[0] == LENGTHS[number]
    assert check(out).findings == []


# Which units are committed before each of the builds.
SPLITS = [
    [[0, 1, 2, 3, 4, 5, 6]],
    [[6, 5, 4, 3, 2, 1, 0]],
    [[0], [1, 2], [3, 4, 5, 6]],
    [[3], [0, 6], [5], [1, 2, 4]],
    [[6], [5], [4], [3], [2], [1], [0]],
    [[1, 3, 5], [0, 2, 4, 6]],
]


@pytest.fixture(scope="module")
def units(tmp_path_factory) -> list[Path]:
    """Seven units, as workers have made them."""
    folder = tmp_path_factory.mktemp("units")
    return [s.worker(folder, number, number).folder for number in range(7)]


@pytest.mark.parametrize(
    ("version", "limit", "splits"),
    [
        *(("v3.0", 500, splits) for splits in SPLITS[1:]),
        *((version, None, splits) for version in layout.VERSIONS for splits in SPLITS[3:]),
    ],
)
def test_any_order_of_commits_and_builds_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, limit: int, splits: list, units
) -> None:
    """The reference is one build of all; every build between is a whole dataset."""
    if limit:
        monkeypatch.setattr(building, "MB", limit)
    for name, builds in (("one", SPLITS[0]), ("many", splits)):
        committed: list[int] = []
        for numbers in builds:
            with s.open_writer(tmp_path / name, "resume", version=version, limits=SMALL) as writer:
                for number in numbers:
                    shutil.copytree(units[number], writer.units / units[number].name)
                writer.build()
            committed = sorted([*committed, *numbers])
            if version == "v3.0":
                check_v3(tmp_path / name, committed)
    assert s.files_of(tmp_path / "one") == s.files_of(tmp_path / "many")
    if limit:
        assert 1 < len(list((tmp_path / "one").glob("videos/*/*/*.mp4"))) < 7
    assert check(tmp_path / "many").findings == []


def test_units_of_many_episodes_are_split_at_the_size_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "d"
    monkeypatch.setattr(building, "MB", 500)
    with s.open_writer(out, limits=FileLimits(1, 50, files_per_chunk=2)) as writer:
        s.worker(writer.units, 1, 3, 4, 5, 6, 7)
        writer.build()
        s.worker(writer.units, 0, 0, 1, 2)
        writer.build()
    check_v3(out, 8)
    videos = sorted(out.glob("videos/*/*/*.mp4"))
    assert 1 < len(videos) < 8
    assert {path.parent.name for path in videos} > {"chunk-000"}
    with s.open_writer(out, "append") as writer:
        s.commit(writer, 8)
        writer.build()
    check_v3(out, 9)


def test_a_long_episode_is_written_in_bounded_row_groups(tmp_path: Path) -> None:
    """A row group is in memory as a whole, several times: an hour must not take more than that."""
    numbers = {"action": Feature("float32", (2,))}
    with DatasetWriter(tmp_path / "out", numbers, 30) as writer:
        with writer.unit({"bag": "long"}, [Episode(10_000, "drive")]) as unit:
            unit.add_rows({"action": np.arange(20_000, dtype=np.float32).reshape(-1, 2)})
            unit.commit()
        writer.build()
    [path] = (tmp_path / "out").glob("data/*/*.parquet")
    found = pq.ParquetFile(path).metadata
    rows = [found.row_group(k).num_rows for k in range(found.num_row_groups)]
    assert sum(rows) == 10_000 and max(rows) <= 4096
    assert len(Dataset(tmp_path / "out").episode(0).columns(["action"])["action"]) == 10_000


def test_what_is_full_is_linked_and_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "MB", 500)
    out = tmp_path / "d"
    s.write_dataset(out, 7, limits=SMALL)
    before = {path: path.stat().st_ino for path in out.rglob("*-0*/*") if path.is_file()}
    s.write_dataset(out, 8, mode="append")
    same = [path for path, inode in before.items() if path.stat().st_ino == inode]
    assert any("data" in path.parts for path in same)
    assert sum("videos" in path.parts for path in same) >= 2
    check_v3(out, 8)


@pytest.mark.parametrize("g", [2, 12])
def test_videos_of_other_coding_are_not_joined(tmp_path: Path, g: int) -> None:
    out = tmp_path / "d"
    numbers = [0, 1, 2, 3]
    with s.open_writer(out) as writer:
        for number in numbers:
            settings = VideoSettings("h264", crf=40 if number == 2 else 23, g=g)
            with writer.unit({}, s.episodes(number), {s.CAMERA: settings}) as unit:
                s.fill(unit, number).commit()
    for more in ((), (4,)):
        with s.open_writer(out, "append") as writer:
            for number in more:
                settings = VideoSettings("h264", g=g)
                with writer.unit({}, s.episodes(number), {s.CAMERA: settings}) as unit:
                    s.fill(unit, number).commit()
            writer.build()
        check_v3(out, [*numbers, *more])
        files = [row[f"videos/{s.CAMERA}/file_index"] for row in episodes_of(out)]
        assert files == [0, 0, 1, 2, *(2 for _ in more)]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("exchanges", [True, False])
def test_file_systems_without_links_or_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole, links: bool, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(swap, "_rename_exchange", lambda a, b: False)
    if not links:

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(1, "not here")

        monkeypatch.setattr(os, "link", refuse)
    s.write_dataset(tmp_path / "d", 3)
    with s.open_writer(tmp_path / "d", "resume") as writer:
        s.commit(writer, 3)
        writer.build()
        for number in (4, 5, 6):
            s.commit(writer, number)
        writer.build()
        with pytest.raises(LockHeld):
            s.open_writer(tmp_path / "d", "resume")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert unlike(tmp_path / "d", whole["v3.0"]) == []


def unlike(one: Path, other: Path) -> list[str]:
    """Name the files that differ."""
    a, b = s.files_of(one), s.files_of(other)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def test_the_lock_holds_through_the_build(tmp_path: Path) -> None:
    out = tmp_path / "d"
    with s.open_writer(out) as writer:
        for number in range(2):
            s.commit(writer, number)
            with pytest.raises(LockHeld):
                s.open_writer(out, "resume")
            writer.build()
            for opened in (lambda: s.open_writer(out, "resume"), lambda: DatasetWriter.reopen(out)):
                with pytest.raises(LockHeld):
                    opened()
    s.open_writer(out, "resume").close()


def test_modes_refuse_what_they_must(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 2)
    with pytest.raises(UsageError, match="--resume"):
        s.open_writer(out)
    with pytest.raises(UsageError, match=r"settings\.x = 1, and not 2"):
        s.open_writer(out, "resume", settings={"x": 2})
    with pytest.raises(UsageError, match="fps = 10"):
        DatasetWriter(out, s.FEATURES, 15, "testbot", mode="resume", settings={"x": 1})
    with pytest.raises(UsageError, match="fps 10"):
        DatasetWriter(out, s.FEATURES, 15, "testbot", mode="append")
    other = {**s.FEATURES, "action": Feature("float32", (7,))}
    with pytest.raises(UsageError, match="shape of 'action'"):
        DatasetWriter(out, other, s.FPS, "testbot", mode="append")
    with pytest.raises(UsageError, match="'extra'"):
        DatasetWriter(out, {**s.FEATURES, "extra": Feature("float32", (1,))}, s.FPS, mode="append")
    foreign = tmp_path / "papers"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    for mode in ("create", "resume", "append", "overwrite"):
        with pytest.raises(UsageError):
            s.open_writer(foreign, mode)
    with pytest.raises(UsageError, match="holds no units"):
        DatasetWriter.reopen(foreign)
    with pytest.raises(UsageError, match="holds no units"):
        DatasetWriter.reopen(tmp_path / "nothing")
    assert (foreign / "thesis.tex").read_text() == "years of work"
    with pytest.raises(UsageError, match="a file"):
        s.open_writer(foreign / "thesis.tex")
    with pytest.raises(UsageError):
        DatasetWriter(tmp_path / "n", {}, 10)
    with pytest.raises(UsageError):
        DatasetWriter(tmp_path / "n", s.FEATURES, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"d", "papers"}
    check_v3(out, 2)


@pytest.mark.parametrize("waiting", [False, True])
def test_overwriting_keeps_the_old_until_the_build(tmp_path: Path, waiting: bool) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 3)
    (out / "README.md").write_text("mine")
    if waiting:
        s.write_dataset(out, 4, mode="append", build=False)
    old, count = s.files_of(out), 3 + waiting
    with s.open_writer(out, "overwrite", settings={"x": 2}) as writer:
        assert (writer.total_episodes, writer.committed, writer.build()) == (0, [], False)
    assert s.files_of(out) == old  # nothing came of it
    with s.open_writer(out, "resume") as writer:
        assert writer.total_episodes == count
    with s.open_writer(out, "overwrite", settings={"x": 2}) as writer:
        s.commit(writer, 5)
        assert s.files_of(out) == old
        assert writer.total_episodes == 1
    assert s.files_of(out) == old
    with DatasetWriter.reopen(out) as writer:
        assert writer.total_episodes == 1
        assert writer.build()
        s.commit(writer, 6)
        writer.build()
    check_v3(out, [5, 6])
    assert (out / "README.md").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    with pytest.raises(UsageError, match=r"settings\.x = 2"):
        s.open_writer(out, "resume")


def test_overwriting_a_dataset_that_was_never_built(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 2, build=False)
    with s.open_writer(out, "overwrite", settings={"x": 2}) as writer:
        assert writer.total_episodes == 0
    with s.open_writer(out, "resume") as writer:
        assert writer.total_episodes == 2
    with s.open_writer(out, "overwrite", settings={"x": 2}) as writer:
        s.commit(writer, 2)
    with s.open_writer(out, "overwrite", settings={"x": 3}) as writer:
        s.commit(writer, 4)
        writer.build()
    check_v3(out, [4])


def test_units_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 1)
    for bad, words in (
        (lambda units: s.worker(units, 1, 1, fps=20), "20 fps"),
        (lambda units: s.commit(writer, 1, codec="copy"), r"video\.codec is h264"),
    ):
        with s.open_writer(out, "resume") as writer:
            unit = bad(writer.units)
            with pytest.raises(UsageError, match=words) as caught:
                writer.build()
            assert str(unit.folder) in str(caught.value)
            shutil.rmtree(unit.folder)
    with s.open_writer(tmp_path / "new") as writer:  # before there is anything to compare with
        s.commit(writer, 0)
        s.commit(writer, 1, codec="copy")
        with pytest.raises(UsageError, match=r"video\.codec is h264"):
            writer.build()
    check_v3(out, 1)
    with pytest.raises(SaverClosed):
        writer.build()
    with pytest.raises(SaverClosed):
        s.commit(writer, 1)


def test_failures_are_remembered_until_the_unit_is_there(tmp_path: Path) -> None:
    out = tmp_path / "d"
    with s.open_writer(out) as writer:
        write_failure_note(writer.units, "abc", {"bag": "x.bag"}, "too short")
        key = s.worker(writer.units, 0, 0).record.key
        writer.build()
        write_failure_note(writer.units, key, {"number": 0}, "a slower worker did not know")
    with s.open_writer(out, "resume") as writer:
        assert writer.failures == [{"source": {"bag": "x.bag"}, "reason": "too short"}]
        assert writer.committed == [{"number": 0}]
        write_failure_note(writer.units, s.make_key({"number": 1}), {"number": 1}, "torn")
        assert len(writer.failures) == 2
        s.worker(writer.units, 1, 1)
        assert len(writer.failures) == 1
        writer.build()
        assert writer.failures == [{"source": {"bag": "x.bag"}, "reason": "too short"}]
        with pytest.raises(UsageError):
            write_failure_note(writer.units, "../x", {}, "a path")


def test_positions(tmp_path: Path) -> None:
    out = tmp_path / "d"
    with s.open_writer(out) as writer:
        assert writer.position_of(["b", "a"]) == {"b": 0, "a": 1}
        s.worker(writer.units, 1, 1)
    with s.open_writer(out, "resume") as writer:
        assert writer.position_of(["c", "a"]) == {"b": 0, "a": 1, "c": 2}
        # What has no fingerprint comes behind everything that was given a place.
        assert s.commit(writer, 3).record.position == 3
        writer.build()
    with s.open_writer(out, "append") as writer:
        assert writer.position_of(["d"])["d"] == 4
        for position, number in ((4, 4), (2, 2), (0, 0)):
            s.worker(writer.units, position, number)
        writer.build()
    check_v3(out, 5)
    with s.open_writer(out, "append") as writer:
        s.worker(writer.units, 4, 7)
        with pytest.raises(UsageError, match="position 4"):
            writer.build()


def test_a_unit_that_is_given_up_leaves_no_gap(tmp_path: Path) -> None:
    with s.open_writer(tmp_path / "d") as writer:
        for _ in range(2):
            with writer.unit({}, s.episodes(0)) as unit:
                unit.add_rows(s.rows(0, 1))
        assert s.commit(writer, 0).record.position == 0
        both = [writer.unit({"k": k}, s.episodes(k)) for k in (1, 2)]
        assert [s.fill(unit, 1 + k).commit().record.position for k, unit in enumerate(both)] == [
            *(1, 2)
        ]
        writer.build()
    check_v3(tmp_path / "d", 3)


def test_two_workers_make_the_same_unit(tmp_path: Path) -> None:
    """The second finds it there; and a third, which comes after the build, adds nothing."""
    out = tmp_path / "d"
    with s.open_writer(out) as writer:
        code = (
            "import runpy, sys, pathlib; s = runpy.run_path(sys.argv[1]);"
            "print(s['worker'](pathlib.Path(sys.argv[2]), 0, 0, 1).files)"
        )
        words = [sys.executable, "-c", code, str(Path(__file__).with_name("staging.py"))]
        runs = [
            subprocess.Popen([*words, str(writer.units)], stdout=subprocess.PIPE) for _ in range(3)
        ]
        told = {run.communicate(timeout=240)[0] for run in runs}
        assert [run.returncode for run in runs] == [0, 0, 0]
        assert len(told) == 1
        assert len(list(writer.units.iterdir())) == 1
        writer.build()
        s.worker(writer.units, 0, 0, 1)
        assert (writer.total_episodes, writer.build()) == (2, False)
        s.commit(writer, 2)
        writer.build()
    check_v3(out, 3)


def test_workers_go_on_through_builds(tmp_path: Path) -> None:
    """Workers know nothing of the lock: a unit that was committed is there, whenever that was."""
    out, told = tmp_path / "d", []
    features = {"x": Feature("int64", (1,))}
    with DatasetWriter(out, features, 10) as writer:

        def work(first: int) -> None:
            for number in range(first, first + 40):
                record = s.UnitRecord(f"u{number}", number, {"n": number}, [Episode(1, "t")])
                try:
                    with s.UnitWriter(writer.units, record, features, 10) as unit:
                        unit.add_rows({"x": [number]})
                        unit.commit()
                    told.append(number)
                except StorageError:
                    pass  # its folder moved away under it: the worker would try again

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100, 200)]
        for thread in threads:
            thread.start()
        builds = 0
        while any(thread.is_alive() for thread in threads):
            builds += writer.build()
        for thread in threads:
            thread.join()
        writer.build()
        found = [source["n"] for source in writer.committed]
    assert builds > 1
    assert found == sorted(set(found))
    assert set(told) <= set(found)
    columns = [episode.columns()["x"] for episode in Dataset(out).episodes]
    assert np.concatenate(columns).ravel().tolist() == found
    assert check(out).findings == []


def die_at(monkeypatch: pytest.MonkeyPatch, module, name: str, *, after: bool = False) -> None:
    """Stop dead when a function is called: nothing is tidied up, like a kill."""
    real = getattr(module, name)

    def die(*words: object, **more: object) -> None:
        if after:
            real(*words, **more)
        os._exit(9)

    monkeypatch.setattr(module, name, die)


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize(
    ("module", "name", "after", "built"),
    [
        (swap, "exchange", False, False),
        (swap, "exchange", True, True),
        (swap, "take_over_units", True, True),
        (os, "rename", False, False),
        (os, "rename", True, False),
    ],
)
def test_a_death_in_a_build_loses_nothing(
    tmp_path: Path, monkeypatch, module, name: str, after: bool, built: bool, exchanges: bool, whole
) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 3)
    if not exchanges:
        monkeypatch.setattr(swap, "_rename_exchange", lambda a, b: False)
    with s.open_writer(out, "resume") as writer:
        for number in (3, 4):
            s.commit(writer, number)
    pid = os.fork()
    if pid == 0:
        with s.open_writer(out, "resume") as writer:
            die_at(monkeypatch, module, name, after=after)
            writer.build()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    if module is os and exchanges:
        built = True  # the first rename is that of the units
    with DatasetWriter.reopen(out) as writer:
        assert writer.total_episodes == 5
        assert [path.name for path in tmp_path.iterdir()] == ["d"]
        assert writer.build() is not built
    with s.open_writer(out, "resume") as writer:
        for number in (5, 6):
            s.commit(writer, number)
        writer.build()
    assert unlike(out, whole["v3.0"]) == []


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    contents = {"cut": data[: len(data) // 2], "empty": b"", "other": data[:-9] + b"x" * 9}
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(contents[how])


VIDEO, PARTS = f"{s.CAMERA}-00000.mp4", ("rows.parquet", "episodes.parquet", "stats.pack")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in PARTS for how in ("cut", "empty", "gone", "other")),
        *((VIDEO, how) for how in ("cut", "empty", "gone")),
        *(("unit.json", how) for how in ("cut", "empty", "other")),
    ],
)
def test_a_damaged_unit_is_named_and_nothing_is_lost(
    tmp_path: Path, name: str, how: str, whole
) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 2)
    before = s.files_of(out)
    with s.open_writer(out, "resume") as writer:
        units = [s.commit(writer, number).folder for number in (2, 3)]
    damage(units[1] / name, how)
    with pytest.raises(CorruptFile, match=name) as caught:  # noqa: SIM117
        with s.open_writer(out, "resume") as writer:
            writer.build()
    assert str(units[1]) in str(caught.value)
    assert s.files_of(out) == before
    assert units[0].exists()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    shutil.rmtree(units[1])
    with s.open_writer(out, "resume") as writer:
        for number in (3, 4, 5, 6):
            s.commit(writer, number)
        writer.build()
    assert unlike(out, whole["v3.0"]) == []


def test_the_doctor_finds_what_a_codec_hides(tmp_path: Path) -> None:
    """A bit of a unit's video that changed after its commit: the build links it, as it is."""
    with s.open_writer(tmp_path / "d") as writer:
        video = s.commit(writer, 0).folder / VIDEO
        data = bytearray(video.read_bytes())
        data[-200] ^= 1
        video.write_bytes(data)
        writer.build()
    assert any("not those that were written" in e.what for e in check(tmp_path / "d").errors)


@pytest.mark.parametrize("name", [BUILT, ".penstock/plan.json"])
@pytest.mark.parametrize("how", ["cut", "empty", "other"])
def test_a_damaged_record_of_the_dataset_is_named(tmp_path: Path, name: str, how: str) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 2)
    s.write_dataset(out, 3, mode="resume", build=False)
    damage(out / name, how)
    before = s.files_of(out), sorted((out / UNITS).iterdir())
    for mode in ("resume", "append"):
        with pytest.raises(CorruptFile, match=Path(name).name):
            s.open_writer(out, mode)
    with pytest.raises(CorruptFile, match=Path(name).name):
        DatasetWriter.reopen(out)
    assert before == (s.files_of(out), sorted((out / UNITS).iterdir()))


def test_without_its_plan_a_dataset_is_not_taken_for_nothing(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 2, build=False)
    (out / ".penstock/plan.json").unlink()
    for mode in ("create", "resume", "append", "overwrite"):
        with pytest.raises(UsageError):
            s.open_writer(out, mode)
    assert len(list((out / UNITS).iterdir())) == 2


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_damaged_lerobot_files_are_named_by_the_build(tmp_path: Path, version: str) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 2, version=version)
    s.write_dataset(out, 3, version=version, mode="resume", build=False)
    records = "meta/episodes.jsonl" if version == "v2.1" else "meta/episodes/chunk-000/file-000"
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if not name.startswith(("data", records)) or not path.is_file():
            continue
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        try:
            with s.open_writer(out, "resume", version=version) as writer:
                writer.build()
        except CorruptFile as error:
            assert path.name in str(error)
        else:
            assert version == "v2.1"  # its files are linked, and not read
            assert name.startswith("data")
            return
        path.write_bytes(data)
    s.write_dataset(out, 4, version=version, mode="resume")
    check_v3(out, 4)


def test_what_users_put_there_stays(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 2)
    files = ["README.md", "data/notes.txt", "meta/mine.json", "extra/x/y.bin", "videos/cut.mp4"]
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    (tmp_path / "elsewhere").mkdir()
    (out / "link").symlink_to(tmp_path / "elsewhere")
    (out / "dangling").symlink_to("nowhere")
    out.chmod(0o750)
    s.write_dataset(out, 3, mode="resume")
    assert [(out / name).read_text() for name in files] == files
    assert os.readlink(out / "link") == str(tmp_path / "elsewhere")
    assert os.readlink(out / "dangling") == "nowhere"
    assert out.stat().st_mode & 0o777 == 0o750
    check_v3(out, 3)


def test_a_link_to_the_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    s.write_dataset(tmp_path / "disk" / "d", 1)
    (tmp_path / "link").symlink_to("disk/d")
    s.write_dataset(tmp_path / "link", 2, mode="resume")
    assert (tmp_path / "link").is_symlink()
    check_v3(tmp_path / "disk" / "d", 2)
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "link"}


def test_a_picture_feature_goes_into_the_data_file(tmp_path: Path) -> None:
    feature = Feature("image", (3, s.HEIGHT, s.WIDTH), ["channels", "height", "width"])
    features = {"x": Feature("float32", (1,)), "cam": feature}
    splits = {"one": [0, 1], "two": [1, 0]}
    for name, order in splits.items():
        with DatasetWriter(tmp_path / name, features, s.FPS) as writer:
            for number in order:
                record = s.UnitRecord(
                    f"k{number}", number, {}, [Episode(70, "a"), Episode(70, "b")]
                )
                with s.UnitWriter(writer.units, record, features, s.FPS) as unit:
                    unit.add_rows({"x": np.arange(140)})
                    for i in range(140):
                        sink = unit.video("cam", i // 70)
                        sink.add_frame(s.picture((number * 140 + i) % 256))
                    unit.commit()
                if name == "two":
                    writer.build()
            writer.build()
    assert unlike(tmp_path / "one", tmp_path / "two") == []
    assert info_of(tmp_path / "one")["video_path"] is None
    table = pq.read_table(tmp_path / "one" / layout.V30.data_path(0, 0))
    assert table.num_rows == 280
    assert table.schema.equals(layout.arrow_schema(features, "v3.0"))
    pixels = [to_rgb(ImageDecoder().png(row["bytes"])) for row in table["cam"].to_pylist()]
    assert [s.number_of(picture) for picture in pixels] == [i % 256 for i in range(280)]
    assert check(tmp_path / "one").findings == []


def test_no_heavy_module_is_loaded(tmp_path: Path) -> None:
    code = "import sys, penstock.dataset.writer; assert not {'torch', 'pandas'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
