"""The reader against datasets whose values are known, and against hostile and damaged ones."""

from __future__ import annotations

import json
import random
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.dataset import layout, tables
from penstock.dataset.layout import Feature
from penstock.dataset.reader import Dataset
from penstock.errors import (
    CorruptFile,
    DataError,
    LimitExceeded,
    PenstockError,
    UnknownFormat,
    UsageError,
)

hand = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("handmade.py"))))
VERSIONS = ["v3.0", "v2.1"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("originals")
    return {version: hand.make_dataset(folder / version, version) for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def good(request, originals) -> Path:
    """A dataset that must not be changed."""
    return originals[request.param]


@pytest.fixture(params=VERSIONS)
def root(request, originals, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(originals[request.param], tmp_path / "copy"))


def change_info(root: Path, **values) -> None:
    path = root / layout.INFO_PATH
    info = json.loads(path.read_text())
    info.update(values)
    path.write_text(json.dumps(info))


def test_metadata(good) -> None:
    dataset = Dataset(good)
    assert dataset.fps == 30
    assert dataset.tasks == list(hand.TASKS)
    assert [len(episode) for episode in dataset.episodes] == list(hand.LENGTHS)
    assert len(dataset) == 3
    assert dataset.total_frames == sum(hand.LENGTHS)
    assert dataset.features["action"] == hand.FEATURES["action"]
    assert dataset.camera_keys == [hand.TOP, hand.SIDE, hand.WRIST]
    last = dataset.episode(2)
    assert (last.index, last.from_index, last.to_index) == (2, 19, 39)
    assert last.tasks == ("pick the cup",)
    assert set(last.videos) == {hand.TOP, hand.SIDE}
    assert dataset.info["robot_type"] == "tester"
    assert "3 episodes, 39 frames" in repr(dataset)
    assert "Episode(2, 20 frames" in repr(last)


def test_columns_are_what_was_written(good) -> None:
    dataset = Dataset(good)
    for number in range(3):
        expected = hand.values(number)
        found = dataset.episode(number).columns()
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert np.array_equal(found[name], value), name
            if name != "note":
                assert found[name].dtype == dataset.features[name].dtype


def test_chosen_columns(good) -> None:
    found = Dataset(good).episode(1).columns(["action", "done"])
    assert list(found) == ["action", "done"]
    assert found["action"].shape == (7, 7)
    assert found["done"].dtype == bool


def test_frames_are_what_was_written(good) -> None:
    for episode in Dataset(good).episodes:
        expected = hand.values(episode.index)
        count = 0
        for k, frame in enumerate(episode.frames()):
            assert frame["task"] == hand.TASKS[episode.index % 2]
            assert np.array_equal(frame["observation.state"], expected["observation.state"][k])
            assert frame["note"] == expected["note"][k]
            for camera in (hand.TOP, hand.SIDE, hand.WRIST):
                wanted = hand.picture(episode.index, k, camera).astype(int)
                assert frame[camera].shape == wanted.shape
                assert np.abs(frame[camera] - wanted).mean() < (0.1 if camera == hand.WRIST else 4)
            count += 1
        assert count == episode.length


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 9), (5, None), (12, 12), (11, 12)])
def test_some_frames(good, start, stop) -> None:
    episode = Dataset(good).episode(0)
    found = list(episode.frames(["frame_index", hand.TOP], start, stop))
    assert [frame["frame_index"] for frame in found] == list(range(12))[start:stop]
    for frame in found:
        assert set(frame) == {"frame_index", hand.TOP, "task"}
        wanted = hand.picture(0, int(frame["frame_index"]), hand.TOP).mean((0, 1))
        assert np.abs(frame[hand.TOP].mean((0, 1)) - wanted).max() < 3


@pytest.mark.parametrize("camera", ["TOP", "WRIST"])
def test_one_image(good, camera) -> None:
    key = getattr(hand, camera)
    episode = Dataset(good).episode(2)
    for k in (0, 7, 19):
        wanted = hand.picture(2, k, key).mean((0, 1))
        assert np.abs(episode.image(key, k).mean((0, 1)) - wanted).max() < 3


def test_statistics(originals) -> None:
    dataset = Dataset(originals["v3.0"])
    rows = np.concatenate([episode.columns(["action"])["action"] for episode in dataset.episodes])
    assert np.allclose(dataset.stats()["action"]["mean"], rows.mean(0, dtype=float))
    by_episode = dict(dataset.episode_stats())
    assert sorted(by_episode) == [0, 1, 2]
    assert by_episode[1][hand.TOP]["std"].shape == (3, 1, 1)
    old = Dataset(originals["v2.1"])
    assert dict(old.episode_stats())[2]["counter"]["max"] == [219]
    with pytest.raises(UsageError, match="per episode only"):
        old.stats()


def test_wrong_questions(good) -> None:
    dataset = Dataset(good)
    episode = dataset.episode(0)
    for call, words in [
        (lambda: dataset.episode(3), "no episode 3"),
        (lambda: dataset.episode(-1), "no episode -1"),
        (lambda: episode.columns(["actoin"]), "no feature 'actoin'"),
        (lambda: episode.columns([hand.TOP]), "is a picture"),
        (lambda: episode.columns([hand.WRIST]), "is a picture"),
        (lambda: episode.image("action", 0), "not a picture"),
        (lambda: episode.image(hand.TOP, 12), "frame 12"),
        (lambda: list(episode.frames(start=3, stop=2)), "frames 3 to 2"),
        (lambda: list(episode.frames(stop=13)), "frames 0 to 13"),
    ]:
        with pytest.raises(UsageError, match=words):
            call()


def test_no_dataset(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UnknownFormat):
            Dataset(path)


def test_an_empty_dataset(tmp_path) -> None:
    spec = layout.Spec(hand.FEATURES, 30, None, "v3.0", layout.FileLimits())
    info = layout.info_json(spec, 0, 0, 0)
    (tmp_path / "meta").mkdir()
    (tmp_path / layout.INFO_PATH).write_text(json.dumps(info))
    dataset = Dataset(tmp_path)
    assert len(dataset) == dataset.total_frames == 0


@pytest.mark.parametrize(
    "template",
    [
        "../{chunk_index}.parquet",
        "/etc/passwd",
        "data/../../x",
        "data/{chunk_index.__class__}",
        "data/{nothing}",
        "data/{chunk_index!r}",
        "",
        "data/\x00",
        "x" * 5000,
    ],
)
def test_path_templates_stay_inside(root, template) -> None:
    change_info(root, data_path=template)
    with pytest.raises(DataError):
        Dataset(root).episode(0).columns()


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", "a\x00b", "x" * 300, "a\\b"])
def test_feature_names_stay_inside(root, name) -> None:
    info = json.loads((root / layout.INFO_PATH).read_text())
    info["features"][name] = {"dtype": "video", "shape": [4, 4, 3], "names": None}
    change_info(root, features=info["features"])
    with pytest.raises(DataError):
        Dataset(root)


def test_links_that_lead_out_are_refused(root, tmp_path) -> None:
    data = root / Dataset(root).episode(0).data_file
    outside = tmp_path / "outside.parquet"
    data.rename(outside)
    data.symlink_to(outside)
    with pytest.raises(DataError, match="leads out"):
        Dataset(root).episode(0).columns()


def test_links_inside_are_followed(root) -> None:
    data = root / Dataset(root).episode(0).data_file
    (root / "elsewhere").mkdir()
    data.rename(root / "elsewhere" / "x.parquet")
    data.symlink_to(root / "elsewhere" / "x.parquet")
    assert len(Dataset(root).episode(0).columns()["action"]) == 12


@pytest.mark.parametrize(
    "values",
    [
        {"fps": 0},
        {"fps": -1},
        {"fps": "30"},
        {"fps": True},
        {"fps": float("nan")},
        {"codebase_version": "v1.6"},
        {"codebase_version": None},
        {"chunks_size": 0},
        {"features": []},
        {"features": {}},
        {"video_path": None},
        {"total_episodes": 4},
        {"total_frames": 38},
        {"total_tasks": 1},
        {"total_episodes": "3"},
    ],
)
def test_bad_info(root, values) -> None:
    change_info(root, **values)
    with pytest.raises(DataError):
        Dataset(root)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000]
)
def test_info_that_is_no_object(root, content) -> None:
    (root / layout.INFO_PATH).write_bytes(content)
    with pytest.raises(DataError):
        Dataset(root)


def test_a_huge_json_is_refused_before_it_is_read(root) -> None:
    with (root / layout.INFO_PATH).open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(LimitExceeded):
        Dataset(root)


def test_a_damaged_page_is_noticed(root) -> None:
    episode = Dataset(root).episode(0)
    path = root / episode.data_file
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    spoilt = bytearray(path.read_bytes())
    spoilt[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 0x10
    path.write_bytes(spoilt)
    with pytest.raises(CorruptFile, match="cannot be read"):
        episode.columns()


def test_rows_of_another_episode_are_noticed(originals, tmp_path) -> None:
    root = Path(shutil.copytree(originals["v2.1"], tmp_path / "copy"))
    first, third = (root / layout.V21.data_path(0, i) for i in (0, 2))
    shutil.copy(third, first)
    with pytest.raises(CorruptFile, match="other rows than episode 0"):
        Dataset(root).episode(0).columns()


def test_a_cut_video_is_noticed(root) -> None:
    episode = Dataset(root).episode(0)
    path = root / episode.videos[hand.TOP].file
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError):
        list(episode.frames([hand.TOP]))


def test_only_our_errors_leave_for_any_damage(root) -> None:
    """300 random damages: the reader either reads, or raises one of our errors."""
    rng = random.Random(7)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    refused = 0
    for _ in range(300):
        path = rng.choice(files)
        original = path.read_bytes()
        spoilt = bytearray(original)
        kind = rng.choice(["flip", "cut", "huge", "noise"])
        at = rng.randrange(len(spoilt))
        if kind == "flip":
            spoilt[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del spoilt[at:]
        elif kind == "huge":
            spoilt[at : at + 8] = b"\xff" * 7 + b"\x7f"
        else:
            spoilt[at : at + 32] = rng.randbytes(32)
        path.write_bytes(spoilt)
        try:
            dataset = Dataset(root)
            for episode in dataset.episodes:
                episode.columns()
            list(dataset.episode(rng.randrange(3)).frames(stop=2))
        except PenstockError as error:
            assert "\n" not in str(error)
            refused += 1
        path.write_bytes(original)
    assert refused > 100


def test_rows_across_row_groups(tmp_path) -> None:
    """Any range of rows equals that of the whole table, whatever the row groups are."""
    features = {"x": Feature("int64", (1,)), "v": Feature("float32", (3,))}
    numbers = np.arange(1000)
    vectors = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    table = pa.table(
        {
            "x": pa.array(numbers),
            "v": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 3),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=97)
    rng = random.Random(3)
    with tables.Table(tmp_path, "t.parquet") as read:
        for _ in range(50):
            start, stop = sorted(rng.choices(range(1001), k=2))
            pieces = list(read.batches(features, start, stop))
            found = np.concatenate([piece["x"] for piece in pieces]) if pieces else np.arange(0)
            assert np.array_equal(found, numbers[start:stop])
            for piece in pieces:
                assert np.array_equal(piece["v"], vectors[piece["x"]])
        with pytest.raises(CorruptFile, match="1000 rows"):
            list(read.batches(features, 0, 1001))


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        (pa.array([1.0, None]), Feature("float64", (1,))),
        (pa.array([[1.0], [1.0, 2.0]]), Feature("float64", (2,))),
        (pa.array([[1.0, 2.0], None]), Feature("float64", (2,))),
        (pa.array([[1.0, None], [1.0, 2.0]]), Feature("float64", (2,))),
        (pa.array(["a", "b"]), Feature("float64", (1,))),
        (pa.array([1.5, 2.5]), Feature("int64", (1,))),
        (pa.array([1, 2]), Feature("string", (1,))),
        (pa.array([1, 2]), Feature("image", (4, 4, 3))),
        (pa.array([1.0, 2.0]), Feature("float64", (2,))),
        (pa.array([{"bytes": None, "path": "/etc/passwd"}]), Feature("image", (4, 4, 3))),
        (pa.array([[1.0, 2.0]], pa.list_(pa.float64(), 2)), Feature("float64", (3,))),
    ],
)
def test_columns_that_break_their_promise(values, feature) -> None:
    with pytest.raises(DataError):
        tables.to_numpy(values, feature)


def test_a_slice_of_pictures_is_that_slice() -> None:
    array = pa.array([{"bytes": bytes([i]), "path": ""} for i in range(10)]).slice(4, 3)
    found = tables.to_numpy(array, Feature("image", (4, 4, 3)))
    assert found.tolist() == [b"\x04", b"\x05", b"\x06"]


def test_a_row_that_is_too_large_is_refused(tmp_path) -> None:
    pq.write_table(pa.table({"x": pa.array([[1.0]])}), tmp_path / "t.parquet")
    with tables.Table(tmp_path, "t.parquet") as table, pytest.raises(LimitExceeded):
        list(table.batches({"x": Feature("float64", (1 << 20, 1 << 20))}))


def test_the_public_names_are_imported_on_first_use(originals) -> None:
    program = f"""
import sys, penstock.lerobot
assert not {{"av", "pyarrow", "numpy", "torch"}} & set(sys.modules)
assert {{"Dataset", "open"}} <= set(dir(penstock.lerobot))
assert len(penstock.lerobot.open({str(originals["v3.0"])!r})) == 3
from penstock.lerobot import Dataset
assert isinstance(penstock.lerobot.open({str(originals["v2.1"])!r}), Dataset)
assert "torch" not in sys.modules
assert not hasattr(penstock.lerobot, "nothing")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
