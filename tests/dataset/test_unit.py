"""Making a unit: rows in any portions, a thread per camera, many episodes, nothing left behind."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import small_disk
from penstock.dataset import build as building
from penstock.dataset import layout
from penstock.dataset.check import check
from penstock.dataset.layout import QUANTILES, Feature
from penstock.dataset.reader import Dataset
from penstock.dataset.stats import (
    PictureStats,
    VectorStats,
    counter_stats,
    counter_totals,
    episode_stats,
    read_stats,
)
from penstock.dataset.unit import UNIT_STATS, Episode, Unit, UnitRecord, UnitWriter
from penstock.dataset.writer import DatasetWriter
from penstock.errors import CorruptFile, DataError, StorageError, UsageError
from penstock.media.video import VideoSettings, read_video

s = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("staging.py"))))
PICTURE = Feature("image", (3, s.HEIGHT, s.WIDTH), ["channels", "height", "width"])
NUMBERS = {
    "observation.state": Feature("float32", (3,)),
    "observation.lidar": Feature("float32", (1, 4, 2)),
    "next.done": Feature("bool", (1,)),
    "count": Feature("int64", (1,)),
    "note": Feature("string", (1,)),
}


def begin(
    units: Path, features: dict, lengths: list[int], videos: dict | None = None, key: str = "k0"
) -> UnitWriter:
    record = UnitRecord(key, 0, {"of": key}, [Episode(length, "t") for length in lengths])
    return UnitWriter(units, record, features, s.FPS, videos)


def test_what_is_committed_can_be_opened_again(tmp_path: Path) -> None:
    made = s.worker(tmp_path, 7, 3, 4)
    unit = Unit.open(made.folder)
    assert unit == made
    assert (unit.record.position, unit.record.source, unit.fps) == (7, {"number": 3}, s.FPS)
    assert [(e.frames, e.task) for e in unit.record.episodes] == [(8, "task 0"), (5, "task 1")]
    assert unit.record.frames == 13
    assert unit.features == s.FEATURES
    assert unit.infos[s.CAMERA]["video.codec"] == "h264"
    table = pq.read_table(unit.folder / "rows.parquet")
    expected = np.concatenate([s.rows(3, 8)["action"], s.rows(4, 5)["action"]])
    assert np.array_equal(np.array(table["action"].to_pylist(), np.float32), expected)
    for place, number in enumerate((3, 4)):
        video = read_video(unit.folder / f"{s.CAMERA}-{place:05d}.mp4")
        shown = [number * 16 + i for i in range(s.length_of(number))]
        assert [s.number_of(frame) for frame in video] == shown
    stats = read_stats(unit.folder / UNIT_STATS)
    assert isinstance(stats["action"], VectorStats) and stats["action"].rows == 13
    assert isinstance(stats[s.CAMERA], PictureStats) and stats[s.CAMERA].pictures == 13
    assert {path.name for path in unit.folder.iterdir()} == {*unit.files, "unit.json"}


@pytest.mark.parametrize("lengths", [[9000], [4096, 1, 4095, 4097, 5, 6000], [3] * 3000])
def test_portions_do_not_matter(tmp_path: Path, lengths: list[int]) -> None:
    frames = sum(lengths)
    x = np.random.default_rng(0).normal(size=(frames, 2)).astype(np.float32)
    found = []
    for name, size in (("a", 37), ("b", 5000), ("c", frames)):
        with begin(tmp_path / name, {"x": Feature("float32", (2,))}, lengths) as unit:
            for start in range(0, frames, size):
                part = x[start : start + size].copy()
                unit.add_rows({"x": part})
                part[:] = 0  # the caller may use its array again
            found.append(unit.commit().files)
    assert found[0] == found[1] == found[2]


def test_cameras_write_from_threads_of_their_own(tmp_path: Path) -> None:
    features = {f"cam{i}": s.FEATURES[s.CAMERA] for i in range(3)}
    with begin(tmp_path, features, [12, 8], {"cam2": VideoSettings("copy")}) as unit:

        def work(key: str) -> None:
            for episode, frames in enumerate((12, 8)):
                sink = unit.video(key, episode)
                for number in range(frames):
                    sink.add_jpeg(s.jpeg(s.picture(episode * 12 + number)))
                unit.finish_video(key, episode)

        threads = [threading.Thread(target=work, args=(key,)) for key in features]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made = unit.commit()
    for key in features:
        names = [f"{key}-{episode:05d}.mp4" for episode in range(2)]
        frames = [frame for name in names for frame in read_video(made.folder / name)]
        assert [s.number_of(frame) for frame in frames] == list(range(20))


def test_copy_takes_the_statistics_of_sampled_frames_only(tmp_path: Path) -> None:
    features, videos = {s.CAMERA: s.FEATURES[s.CAMERA]}, {s.CAMERA: VideoSettings("copy")}
    with begin(tmp_path, features, [400], videos) as unit:
        sink = unit.video(s.CAMERA, 0)
        data = s.jpeg(s.picture(1))
        for _ in range(400):
            sink.add_jpeg(data)
        assert read_stats(unit.commit().folder / UNIT_STATS)[s.CAMERA].pictures == 100


def test_png_pictures_lie_in_a_parquet(tmp_path: Path) -> None:
    features = {"x": Feature("float32", (1,)), "cam": PICTURE}
    with begin(tmp_path, features, [5], {"cam": VideoSettings("png")}) as unit:
        unit.add_rows({"x": np.arange(5)})
        for number in range(5):
            unit.video("cam", 0).add_frame(s.picture(number))
        made = unit.commit()
    rows = pq.read_table(made.folder / "cam-00000.parquet")["image"].to_pylist()
    assert [row["path"] for row in rows] == [f"frame-{i:06d}.png" for i in range(5)]
    assert rows[0]["bytes"].startswith(b"\x89PNG")


def test_mistakes_are_named(tmp_path: Path) -> None:
    unit, good = begin(tmp_path, s.FEATURES, [5]), s.rows(0, 5)
    for columns, words in [
        ({"observation.state": good["observation.state"]}, "'action' is missing"),
        ({**good, "action": good["observation.state"]}, r"'action': rows of \[3\]"),
        ({**good, "action": good["action"][:3]}, "numbers of rows"),
        ({**good, "action": [["a", "b"]] * 5}, "'action': these are no rows of numbers"),
        ({**good, "more": good["action"]}, "'more' is no numeric feature"),
        ({name: rows.repeat(2, 0) for name, rows in good.items()}, "10 rows were given"),
    ]:
        with pytest.raises(UsageError, match=words):
            unit.add_rows(columns)
    with pytest.raises(UsageError, match="no camera"):
        unit.video("action", 0)
    with pytest.raises(UsageError, match="no episode 1"):
        unit.video(s.CAMERA, 1)
    unit.add_rows(good)
    unit.video(s.CAMERA, 0).add_frame(s.picture(0))
    with pytest.raises(DataError, match="has 1 frames in episode 0, and others 5"):
        unit.commit()
    assert list(tmp_path.iterdir()) == []
    assert unit.free_position is not None
    with pytest.raises(UsageError, match="already"):
        unit.add_rows(good)
    with pytest.raises(UsageError, match="no camera"):
        begin(tmp_path, s.FEATURES, [5], {"what": VideoSettings()})
    with pytest.raises(UsageError, match="png"):
        begin(tmp_path, s.FEATURES, [5], {s.CAMERA: VideoSettings("png")}).video(s.CAMERA, 0)
    for lengths in ([], [5, 0]):
        with pytest.raises(UsageError, match="at least one"):
            begin(tmp_path, s.FEATURES, lengths)
    for key in ("", "../x", "a b", ".x", "x" * 65, "ä"):
        with pytest.raises(UsageError, match="cannot name a unit"):
            begin(tmp_path, s.FEATURES, [1], key=key)
    with begin(tmp_path / "short", {"x": Feature("float32", (1,))}, [3, 2]) as unit:
        unit.add_rows({"x": [1, 2, 3]})
        with pytest.raises(DataError, match="'x' has 3 frames, and the episodes have 5"):
            unit.commit()


def test_a_unit_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    with begin(tmp_path, s.FEATURES, [5]) as unit:
        unit.add_rows(s.rows(0, 5))
        unit.video(s.CAMERA, 0).add_frame(s.picture(0))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="no committed unit"):
        Unit.open(tmp_path / "k0")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(format=2),
        lambda content: content.pop("files"),
        lambda content: content.update(files={"rows.parquet": 3}),
        lambda content: content["record"].update(key="../../x"),
        lambda content: content["record"].update(key="other"),
        lambda content: content["record"].update(episodes=[7]),
        lambda content: content.update(features=[]),
    ],
)
def test_a_record_that_makes_no_sense(tmp_path: Path, change) -> None:
    folder = s.worker(tmp_path, 0, 0).folder
    content = json.loads((folder / "unit.json").read_text())
    change(content)
    (folder / "unit.json").write_text(json.dumps(content))
    with pytest.raises(CorruptFile, match=r"unit\.json"):
        Unit.open(folder)


def test_non_finite_values_pass_and_are_left_out_of_the_statistics(tmp_path: Path) -> None:
    features = {"x": Feature("float32", (2,))}
    rows = np.array([[1, 2], [np.nan, np.inf], [3, 4], [np.nan, np.nan]], np.float32)
    with DatasetWriter(tmp_path / "d", features, s.FPS) as writer:
        with writer.unit({}, [Episode(3, "t"), Episode(1, "t")]) as unit:
            unit.add_rows({"x": rows})
            made = unit.commit()
        assert read_stats(made.folder / UNIT_STATS)["x"].non_finite == 4
        writer.build()
    dataset = Dataset(tmp_path / "d")
    found = np.concatenate([episode.columns()["x"] for episode in dataset.episodes])
    assert found.tobytes() == rows.tobytes()
    by_episode = dict(dataset.episode_stats())
    assert by_episode[0]["x"]["mean"].tolist() == [2, 3]
    assert by_episode[1]["x"]["mean"].tolist() == [0, 0]
    assert dataset.stats()["x"]["max"].tolist() == [3, 4]


@pytest.mark.parametrize("lengths", [[3, 2], [5000]])
@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_numbers_at_the_ends_of_their_types(tmp_path: Path, version: str, lengths: list) -> None:
    features = {"x": Feature("float64", (1,)), "i": Feature("int64", (1,))}
    frames = sum(lengths)
    x = np.where(np.arange(frames) % 2, 1.7e308, 5.0)
    i = np.where(np.arange(frames) % 2, 2**63 - 1, -(2**63))
    with DatasetWriter(tmp_path / "d", features, s.FPS, version=version) as writer:
        with writer.unit({}, [Episode(length, "t") for length in lengths]) as unit:
            unit.add_rows({"x": x, "i": i})
            unit.commit()
        writer.build()
    dataset = Dataset(tmp_path / "d")
    columns = [episode.columns() for episode in dataset.episodes]
    assert np.array_equal(np.concatenate([part["x"] for part in columns]).ravel(), x)
    assert np.array_equal(np.concatenate([part["i"] for part in columns]).ravel(), i)
    stats = dict(dataset.episode_stats())[0]
    assert stats["i"]["min"] < 0 < stats["i"]["max"]
    assert (stats["x"]["mean"], stats["x"]["std"]) == (5, 0)
    assert check(tmp_path / "d").errors == []


@pytest.mark.parametrize("codec", ["h264", "copy", "png"])
@pytest.mark.parametrize("size", ["64k", "256k"])
def test_a_full_disk_is_a_storage_error_and_leaves_nothing(
    tmp_path: Path, codec: str, size: str
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (s.HEIGHT, s.WIDTH, 3)).astype(np.uint8)
    data = s.jpeg(noise)
    camera = PICTURE if codec == "png" else s.FEATURES[s.CAMERA]
    features = {"x": Feature("float32", (64,)), "cam": camera}
    disk = tmp_path / "disk"
    with small_disk(disk, f"size={size}") as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        unit = begin(disk / "units", features, [500], {"cam": VideoSettings(codec)})
        with pytest.raises(StorageError, match="No space left"):
            sink = unit.video("cam", 0)
            for _ in range(500):
                unit.add_rows({"x": np.random.default_rng(1).normal(size=(1, 64))})
                sink.add_jpeg(data)
            unit.commit()
        unit.abandon()
        assert list((disk / "units").iterdir()) == []


# --- many episodes in one unit ---


def columns_of(frames: int, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "observation.state": rng.normal(size=(frames, 3)).astype(np.float32),
        "observation.lidar": rng.normal(size=(frames, 1, 4, 2)).astype(np.float32),
        "next.done": rng.random((frames, 1)) < 0.2,
        "count": rng.integers(-(2**60), 2**60, (frames, 1)),
        "note": np.array([f"frame {n}" for n in range(frames)], dtype=object),
    }


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_many_episodes_are_the_same_dataset_as_one_by_one(tmp_path: Path, version: str) -> None:
    lengths = [5, 1, 7, 32, 3, 3]
    columns = columns_of(sum(lengths), 0)
    for name, units in (("many", [lengths[:4], lengths[4:]]), ("single", [[n] for n in lengths])):
        with DatasetWriter(tmp_path / name, NUMBERS, 10, version=version) as writer:
            start = 0
            for number, own in enumerate(units):
                episodes = [Episode(length, "fly") for length in own]
                with writer.unit({"n": number}, episodes) as unit:
                    stop = start + sum(own)
                    unit.add_rows({n: column[start:stop] for n, column in columns.items()})
                    unit.commit()
                start = stop
            writer.build()
        checkup = check(tmp_path / name)
        assert checkup.findings == []
    many, single = (Dataset(tmp_path / name) for name in ("many", "single"))
    assert many.info == single.info
    start = 0
    for one, other in zip(many.episodes, single.episodes, strict=True):
        assert (one.tasks, one.from_index, len(one)) == (other.tasks, other.from_index, len(other))
        rows = slice(start, start + len(one))
        start = rows.stop
        for name, value in columns.items():
            for episode in (one, other):
                found = episode.columns()[name]
                assert np.array_equal(found, value[rows].reshape(found.shape)), name
    pairs = list(zip(many.episode_stats(), single.episode_stats(), strict=True))
    stats = [(a[1], b[1]) for a, b in pairs]
    if version == "v3.0":
        stats.append((many.stats(), single.stats()))
    for one, other in stats:
        assert one.keys() == other.keys()
        for name in one:
            for stat in one[name]:
                np.testing.assert_allclose(one[name][stat], other[name][stat], 1e-6, 1e-6)


def test_row_groups_hold_whole_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_GROUP_ROWS", 10)
    groups = building.row_groups([4, 4, 4, 20, 1, 9, 1], 100)
    assert groups == [(0, 8), (8, 12), (12, 32), (32, 42), (42, 43)]
    assert building.row_groups([3, 25], 12) == [(0, 3), (3, 15), (15, 27), (27, 28)]


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


def brute_force(values: np.ndarray) -> dict[str, float]:
    wide = values.astype(np.float64)
    found = {"min": wide.min(), "max": wide.max(), "mean": wide.mean(), "std": wide.std()}
    found |= {name: np.quantile(wide, share) for name, share in QUANTILES.items()}
    return found | {"count": len(wide)}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=9),
    st.sampled_from([1, 7, 10, 30]),
    st.integers(0, 5),
)
def test_statistics_of_the_automatic_features(episodes, fps, before) -> None:
    """By formula, of each episode and of all, against the columns themselves."""
    lengths, tasks = (np.array(column, np.int64) for column in zip(*episodes, strict=True))
    firsts, numbers = np.cumsum(lengths) - lengths + 100 * before, np.arange(len(lengths)) + before
    frame = np.concatenate([np.arange(length) for length in lengths])
    columns = {
        "timestamp": (frame / fps).astype(np.float32),
        "frame_index": frame,
        "episode_index": np.repeat(numbers, lengths),
        "index": np.arange(lengths.sum()) + 100 * before,
        "task_index": np.repeat(tasks, lengths),
    }
    found = counter_stats(lengths, firsts, numbers, tasks, fps)
    ends = np.cumsum(lengths)
    for name, values in columns.items():
        for number, part in enumerate(np.split(values, ends[:-1])):
            for stat, wanted in brute_force(part).items():
                value = found[name][stat][number].item()
                assert value == pytest.approx(wanted, rel=1e-6, abs=1e-6), (name, stat)
    totals = counter_totals(lengths, tasks, fps)
    columns["episode_index"] -= before
    columns["index"] -= 100 * before
    for name, values in columns.items():
        for stat, wanted in brute_force(values).items():
            assert totals[name][stat][0] == pytest.approx(wanted, rel=1e-6, abs=1e-6), (name, stat)
    assert list(totals) == list(layout.AUTO_FEATURES)


MEMORY_OF_ROWS = """
import sys
from pathlib import Path
import numpy as np
from penstock.conversion.memory import give_back_at_once
from penstock.core.memory import rss_bytes
from penstock.dataset.layout import Feature
from penstock.dataset.tables import give_back_unused
from penstock.dataset.unit import Episode, UnitRecord, UnitWriter
give_back_at_once()
features = {name: Feature("float32", (16,)) for name in ("observation.state", "action")}
record = UnitRecord("k0", 0, {}, [Episode(12_000, "t")])
taken = []
with UnitWriter(Path(sys.argv[1]), record, features, 30) as writer:
    for _ in range(12):
        writer.add_rows({n: np.random.randn(1000, 16).astype(np.float32) for n in features})
        give_back_unused()
        taken.append(rss_bytes(tree=False))
print(max(taken) - taken[1])
"""


def test_rows_of_a_long_recording_take_no_more_memory_than_those_of_a_short_one(tmp_path) -> None:
    words = [sys.executable, "-c", MEMORY_OF_ROWS, str(tmp_path / "units")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10 * 10**6  # 8192 bins for each of 32 numbers
