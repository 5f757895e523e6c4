"""Adding to what others wrote: other programs, earlier versions of penstock, lerobot after us."""

from __future__ import annotations

import json
import runpy
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.dataset import layout
from penstock.dataset.check import check
from penstock.dataset.layout import Feature
from penstock.dataset.reader import Dataset
from penstock.dataset.unit import Episode
from penstock.dataset.writer import DatasetWriter
from penstock.errors import DataError, UsageError
from penstock.media.video import VideoSettings

HERE = Path(__file__).parent
s = SimpleNamespace(**runpy.run_path(str(HERE / "staging.py")))
hand = SimpleNamespace(**runpy.run_path(str(HERE / "handmade.py")))
VERSIONS = ["v3.0", "v2.1"]
CAMERAS = [hand.TOP, hand.SIDE, hand.WRIST]


def info_of(out: Path) -> dict:
    return json.loads((out / layout.INFO_PATH).read_bytes())


def old_dataset(name: str, folder: Path) -> Path:
    """Unpack a dataset that an earlier version of penstock wrote."""
    with tarfile.open(HERE / "old" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def see(root: Path, episodes: list[int], tasks: bool = True) -> None:
    """Check rows, pictures and statistics of the episodes of staging.py, in this order."""
    dataset = Dataset(root)
    assert [len(episode) for episode in dataset.episodes] == [s.length_of(n) for n in episodes]
    for episode, number in zip(dataset.episodes, episodes, strict=True):
        columns = episode.columns()
        for name, rows in s.rows(number, len(episode)).items():
            assert np.array_equal(columns[name], rows), (number, name)
        assert columns["episode_index"].ravel().tolist() == [episode.index] * len(episode)
        if tasks:
            assert list(episode.tasks) == [f"task {number % 3}"]
        shown = [s.number_of(frame[s.CAMERA]) for frame in episode.frames([s.CAMERA])]
        assert shown == [(number * 16 + k) % 256 for k in range(len(episode))]
    checkup = check(root)
    assert checkup.findings == [], checkup.text()


def kept(before: dict[str, bytes], after: dict[str, bytes]) -> bool:
    """Whether every file of rows and pictures that was there still has its bytes."""
    files = [name for name in before if name.startswith(("data/", "videos/", "meta/episodes/"))]
    return bool(files) and all(after.get(name) == before[name] for name in files)


@pytest.mark.parametrize("builds", [1, 2])
@pytest.mark.parametrize("version", VERSIONS)
def test_adding_to_a_dataset_of_other_making(tmp_path: Path, version: str, builds: int) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 3, version=version)
    shutil.rmtree(out / ".penstock")
    shutil.rmtree(out / "meta/penstock")
    (out / ".penstock.lock").unlink()
    info = info_of(out) | {"their": "own key"}
    (out / layout.INFO_PATH).write_text(json.dumps(info))
    before = s.files_of(out)
    with pytest.raises(UsageError, match="--append"):
        s.open_writer(out, "resume", version=version)
    with pytest.raises(UsageError, match="holds no units"):
        DatasetWriter.reopen(out)
    with s.open_writer(out, "append", version=version) as writer:
        assert (writer.total_episodes, writer.committed) == (3, [])
    for number in (3, 4):
        with s.open_writer(out, "append", version=version) as writer:
            s.commit(writer, number)
            if builds == 2:
                writer.build()
            assert writer.total_episodes == number + 1
    with s.open_writer(out, "resume", version=version) as writer:
        assert writer.build() is (builds == 1)
        assert writer.committed == [{"number": 3}, {"number": 4}]
    assert info_of(out)["their"] == "own key"
    assert kept(before, s.files_of(out))
    see(out, [0, 1, 2, 3, 4])


def add_like_handmade(writer: DatasetWriter, numbers: list[int]) -> None:
    """Add episodes of the content of handmade.py."""
    videos = {key: VideoSettings("png" if key == hand.WRIST else "h264") for key in CAMERAS}
    for number in numbers:
        length = hand.LENGTHS[number]
        with writer.unit({"n": number}, [Episode(length, hand.TASKS[number % 2])], videos) as unit:
            values = hand.values(number)
            unit.add_rows({n: values[n] for n in hand.FEATURES if n not in CAMERAS})
            for camera in CAMERAS:
                for k in range(length):
                    unit.video(camera, 0).add_frame(hand.picture(number, k, camera))
            unit.commit()


def as_lerobot(root: Path) -> None:
    """Give the records of episodes the form that lerobot's have: a matrix counts its rows as one,
    and before 0.4 there are no quantiles."""
    path = root / layout.episodes_path(0, 0)
    table = pq.read_table(path)
    rows = [
        np.concatenate([np.asarray(hand.values(e)["matrix"]) for e in [number]]).reshape(-1, 3)
        for number in range(3)
    ]
    for stat in ("min", "max", "mean", "std"):
        value = [getattr(part.astype(np.float64), stat)(0).tolist() for part in rows]
        at = table.schema.get_field_index(f"stats/matrix/{stat}")
        table = table.set_column(
            at, f"stats/matrix/{stat}", pa.array(value, pa.list_(pa.float64()))
        )
    quantiles = [n for n in table.column_names if n.rpartition("/")[2] in layout.QUANTILES]
    pq.write_table(table.drop_columns(quantiles), path)


@pytest.mark.parametrize("form", ["v3.0", "lerobot", "v2.1"])
def test_every_kind_of_feature_can_be_added_to(tmp_path: Path, form: str) -> None:
    version = "v2.1" if form == "v2.1" else "v3.0"
    root = hand.make_dataset(tmp_path / "made", version)
    if form == "lerobot":
        as_lerobot(root)
    before = s.files_of(root)
    for numbers in ([0], [1, 2], [1]):
        with DatasetWriter(
            root, hand.FEATURES, hand.FPS, "tester", version=version, mode="append"
        ) as writer:
            add_like_handmade(writer, numbers)
            writer.build()
    assert kept(before, s.files_of(root))
    dataset = Dataset(root)
    for episode, number in zip(dataset.episodes, [0, 1, 2, 0, 1, 2, 1], strict=True):
        columns = episode.columns()
        for name, rows in hand.values(number).items():
            if name not in ("episode_index", "index"):
                assert np.array_equal(columns[name].ravel(), np.ravel(rows)), name
        assert list(episode.tasks) == [hand.TASKS[number % 2]]
        for camera in CAMERAS:
            picture = episode.image(camera, 4).astype(float)
            assert np.abs(picture - hand.picture(number, 4, camera)).mean() < 4
    records = dict(dataset.episode_stats())
    for added, original in ((3, 0), (6, 1)):
        for name in ("observation.state", "matrix", "counter", "done"):
            for stat, value in records[original][name].items():
                np.testing.assert_allclose(records[added][name][stat], value, 1e-6, 1e-6)
    checkup = check(root)
    assert checkup.errors == [], checkup.text()


@pytest.mark.parametrize("name", ["v3.0-packed", "v3.0-loose", "v2.1"])
def test_going_on_with_a_dataset_of_an_earlier_version(tmp_path: Path, name: str) -> None:
    out, version = old_dataset(name, tmp_path), name[:4]
    assert check(out).findings == []
    before = s.files_of(out)
    with pytest.raises(UsageError, match=r"settings\.x = 1, and not 2"):
        s.open_writer(out, "resume", version=version, settings={"x": 2})
    with DatasetWriter.reopen(out) as writer:
        assert (writer.total_episodes, writer.build()) == (3, False)
    # What a kill left behind: a file that no record knows. lerobot would read it.
    stray = out / layout.FORMATS[version].data_path(0, 3)
    stray.write_bytes(b"half a file")
    (out / ".penstock/staging/e3").mkdir(parents=True)
    s.write_dataset(out, 5, version=version, mode="resume")
    s.write_dataset(out, 6, version=version, mode="append")
    with s.open_writer(out, "resume", version=version) as writer:
        assert [source["number"] for source in writer.committed] == list(range(6))
        assert (writer.total_episodes, writer.build()) == (6, False)
    assert kept(before, s.files_of(out))
    see(out, list(range(6)))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_overwriting_a_dataset_of_an_earlier_version(tmp_path: Path) -> None:
    out = old_dataset("v3.0-loose", tmp_path)
    before = s.files_of(out)
    s.open_writer(out, "overwrite", settings={"x": 9}).close()
    assert s.files_of(out) == before
    with s.open_writer(out, "resume") as writer:
        assert writer.total_episodes == 3
    with s.open_writer(out, "overwrite", settings={"x": 9}) as writer:
        s.commit(writer, 7)
        writer.build()
    see(out, [7])


def test_a_batch_of_an_earlier_version(tmp_path: Path) -> None:
    out = old_dataset("v3.0-batch", tmp_path)
    features = {"x": Feature("float32", (2,)), "n": Feature("int64", (1,))}
    with DatasetWriter(out, features, 10, "testbot", mode="resume", settings={"x": 1}) as writer:
        assert writer.committed == [{"batch": 0}]
        with writer.unit({"batch": 1}, [Episode(3, "fly"), Episode(1, "land")]) as unit:
            unit.add_rows({"x": np.full((4, 2), 9), "n": np.arange(11, 15)})
            unit.commit()
        writer.build()
    dataset = Dataset(out)
    assert [len(episode) for episode in dataset.episodes] == [2, 3, 6, 3, 1]
    n = np.concatenate([episode.columns()["n"].ravel() for episode in dataset.episodes])
    assert n.tolist() == list(range(15))
    assert dataset.stats()["n"]["q50"].tolist() == [7]
    assert check(out).findings == []


def add_by_hand(root: Path, number: int) -> None:
    """Add an episode of staging.py as lerobot does: new files, new records, new totals."""
    other = root.parent / "other"
    s.write_dataset(other, 1)
    info, mine = info_of(root), Dataset(root)
    total, frames = info["total_episodes"], info["total_frames"]
    length = s.length_of(0)
    table = pq.read_table(other / layout.V30.data_path(0, 0))
    for name, value in (
        ("episode_index", np.full(length, total)),
        ("index", np.arange(length) + frames),
    ):
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(value))
    pq.write_table(table, root / layout.V30.data_path(0, number))
    video = layout.V30.video_path(s.CAMERA, 0, number)
    shutil.copy(other / layout.V30.video_path(s.CAMERA, 0, 0), root / video)
    record = pq.read_table(other / layout.episodes_path(0, 0)).to_pylist()[0]
    record |= {
        "episode_index": total,
        "dataset_from_index": frames,
        "dataset_to_index": frames + length,
        "data/file_index": number,
        f"videos/{s.CAMERA}/file_index": number,
        "meta/episodes/file_index": number,
        "stats/episode_index/min": [total],
        "stats/episode_index/max": [total],
    }
    for name in ("episode_index", "index"):
        offset = total if name == "episode_index" else frames
        for stat in ("min", "max", "mean", *layout.QUANTILES):
            value = 0 if name == "episode_index" else record[f"stats/{name}/{stat}"][0]
            record[f"stats/{name}/{stat}"] = [value + offset]
    schema = layout.episodes_schema(s.FEATURES)
    pq.write_table(pa.Table.from_pylist([record], schema), root / layout.episodes_path(0, number))
    info |= {"total_episodes": total + 1, "total_frames": frames + length}
    info["splits"] = {"train": f"0:{total + 1}"}
    (root / layout.INFO_PATH).write_text(json.dumps(info, indent=4))
    assert mine.tasks[0] == "task 0"
    shutil.rmtree(other)


@pytest.mark.parametrize("waiting", [False, True])
def test_what_another_program_added_after_us_is_never_lost(tmp_path: Path, waiting: bool) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 3)
    if waiting:
        s.write_dataset(out, 4, mode="resume", build=False)
    add_by_hand(out, 1)
    before = s.files_of(out)
    assert "another program" in check(out).warnings[0].what
    with s.open_writer(out, "resume") as writer:
        numbers = [source["number"] for source in writer.committed]
        assert numbers == [0, 1, 2, *([3] if waiting else [])]
        assert writer.total_episodes == 4 + waiting
    s.write_dataset(out, 5, mode="resume")
    assert kept(before, s.files_of(out))
    see(out, [0, 1, 2, 0, 3, 4])
    add_by_hand(out, 7)
    s.write_dataset(out, 6, mode="resume")
    see(out, [0, 1, 2, 0, 3, 4, 0, 5])
    with s.open_writer(out, "resume") as writer:
        assert [source["number"] for source in writer.committed] == list(range(6))


def test_records_that_others_wrote_anew_are_taken_as_they_are(tmp_path: Path) -> None:
    """The totals are the same, but the episodes have changed places."""
    out = tmp_path / "d"
    s.write_dataset(out, 5)  # 0 and 4 have the same length
    turned = tmp_path / "turned"
    with s.open_writer(turned) as writer:
        for number in (4, 1, 2, 3, 0):
            s.commit(writer, number)
        writer.build()
    shutil.rmtree(turned / "meta/penstock")
    shutil.copytree(out / "meta/penstock", turned / "meta/penstock")
    s.write_dataset(turned, 6, mode="resume")
    see(turned, [4, 1, 2, 3, 0, 5])


def test_datasets_that_cannot_be_added_to(tmp_path: Path) -> None:
    root = hand.make_dataset(tmp_path / "made")
    for change, words in (
        ({"fps": 29.97}, "29.97"),
        ({"data_path": "d/{chunk_index}/{file_index}.parquet"}, "other names"),
        ({"codebase_version": "v2.0"}, "v2.0"),
    ):
        info = info_of(root)
        (root / layout.INFO_PATH).write_text(json.dumps(info | change))
        with pytest.raises((UsageError, DataError), match=words):
            DatasetWriter(root, hand.FEATURES, hand.FPS, mode="append")
        (root / layout.INFO_PATH).write_text(json.dumps(info))
        assert not (root / ".penstock").exists()
