"""Paths, schemas and info.json, as lerobot 0.4.4 writes and reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.dataset import layout
from penstock.dataset.layout import Feature, FileLimits, Spec
from penstock.dataset.metadata import read_tasks
from penstock.dataset.tables import write_table
from penstock.errors import DataError, UsageError

CAMERA = Feature("video", (3, 480, 640), ["channels", "height", "width"])
FEATURES = {
    "observation.state": Feature("float32", (16,)),
    "grip": Feature("float32", (1,)),
    "pose": Feature("float64", (4, 4)),
    "note": Feature("string", (1,)),
    "picture": Feature("image", (480, 640, 3), ["height", "width", "channels"]),
    "observation.images.head": CAMERA,
}


def test_paths() -> None:
    assert layout.V30.data_path(1, 2) == "data/chunk-001/file-002.parquet"
    assert layout.V21.data_path(0, 7) == "data/chunk-000/episode_000007.parquet"
    assert layout.V30.video_path("a.b", 0, 3) == "videos/a.b/chunk-000/file-003.mp4"
    assert layout.V21.video_path("a.b", 0, 3) == "videos/chunk-000/a.b/episode_000003.mp4"
    assert layout.episodes_path(0, 0) == "meta/episodes/chunk-000/file-000.parquet"


@pytest.mark.parametrize(
    "template",
    [
        "/etc/{video_key}",
        "../{video_key}.mp4",
        "videos/{video_key}/../../x",
        "videos/{video_key.__class__}",
        "videos/{video_key!r}",
        "videos/{0}",
        "videos/{nothing}",
        "videos/{chunk_index:0999999999d}",
        "videos/{chunk_index:0100d}",
        "",
        "x" * 5000,
    ],
)
def test_hostile_templates_do_not_lead_out(template: str) -> None:
    with pytest.raises(DataError):
        layout.expand(template, video_key="k", chunk_index=0, file_index=0)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "end.", "a\\b", "a\x00b", "x" * 201])
def test_names_that_cannot_be_a_folder_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        layout.check_name(name)
    with pytest.raises(DataError):
        layout.read_features({name: {"dtype": "float32", "shape": [1]}})


def test_data_columns_are_those_of_lerobot() -> None:
    schema = layout.arrow_schema(FEATURES, "v3.0")
    assert schema.names == [
        *("observation.state", "grip", "pose", "note", "picture"),
        *("timestamp", "frame_index", "episode_index", "index", "task_index"),
    ]
    assert schema.field("observation.state").type == pa.list_(pa.float32(), 16)
    assert schema.field("grip").type == pa.float32()
    assert schema.field("pose").type == pa.list_(pa.list_(pa.float64()))
    assert schema.field("picture").type == pa.struct(
        [("bytes", pa.binary()), ("path", pa.string())]
    )
    known = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert known["observation.state"] == {
        "feature": {"dtype": "float32", "_type": "Value"},
        "length": 16,
        "_type": "List",
    }
    assert known["picture"] == {"_type": "Image"}
    assert known["pose"] == {"shape": [4, 4], "dtype": "float64", "_type": "Array2D"}
    assert list(known) == schema.names


def test_old_readers_get_the_old_name_of_a_list() -> None:
    metadata = layout.arrow_schema(FEATURES, "v2.1").metadata[b"huggingface"]
    assert json.loads(metadata)["info"]["features"]["observation.state"]["_type"] == "Sequence"


def test_episode_columns() -> None:
    schema = layout.episodes_schema(FEATURES)
    key = "observation.images.head"
    assert schema.field(f"videos/{key}/from_timestamp").type == pa.float64()
    assert schema.field(f"stats/{key}/mean").type == pa.list_(pa.list_(pa.list_(pa.float64())))
    assert schema.field("stats/observation.state/q01").type == pa.list_(pa.float64())
    assert schema.field("stats/frame_index/min").type == pa.list_(pa.int64())
    assert schema.field("stats/frame_index/mean").type == pa.list_(pa.float64())
    assert "stats/note/min" not in schema.names
    assert schema.names[-1] == "meta/episodes/file_index"


@pytest.mark.parametrize("version", layout.VERSIONS)
def test_info_has_every_key_with_its_type(version: layout.Version) -> None:
    info = layout.info_json(Spec(FEATURES, 30, "r", version, FileLimits()), 3, 90, 1)
    keys = {**layout.INFO_KEYS, **layout.FORMATS[version].info_keys}
    assert set(info) == set(keys)
    for key, kinds in keys.items():
        assert isinstance(info[key], kinds), key
    assert info["splits"] == {"train": "0:3"}
    again = layout.read_features(json.loads(json.dumps(info["features"])))
    assert {n: f for n, f in again.items() if n in FEATURES} == FEATURES
    assert list(again)[-5:] == list(layout.AUTO_FEATURES)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"dtype": "complex64", "shape": [1]},
        {"dtype": "float32"},
        {"dtype": "float32", "shape": []},
        {"dtype": "float32", "shape": [0]},
        {"dtype": "float32", "shape": [True]},
        {"dtype": "float32", "shape": [1 << 40]},
        {"dtype": "float32", "shape": [1] * 6},
        {"dtype": "float32", "shape": [1], "names": "abc"},
        {"dtype": "video", "shape": [3, 2, 2], "info": []},
    ],
)
def test_bad_features_are_data_errors(value: object) -> None:
    with pytest.raises(DataError, match="'f'"):
        Feature.from_json("f", value)


def test_picture_size_in_both_orders() -> None:
    assert CAMERA.picture_size == (3, 480, 640)
    assert FEATURES["picture"].picture_size == (3, 480, 640)
    assert Feature("video", (480, 640, 1)).picture_size == (1, 480, 640)
    assert Feature("video", (3, 4, 3)).picture_size == (3, 4, 3)


def test_tasks_come_back_under_either_name(tmp_path: Path) -> None:
    table = layout.tasks_table(["b", "a", "ü"])
    path = tmp_path / layout.V30.tasks
    path.parent.mkdir()
    for names in (table.column_names, ["task_index", "task"]):
        write_table(path, table.rename_columns(names))
        assert read_tasks(tmp_path, layout.V30) == ["b", "a", "ü"]
    pandas = json.loads(table.schema.metadata[b"pandas"])
    assert pandas["index_columns"] == ["__index_level_0__"]
    write_table(path, pa.table({"task_index": [0, 2], "task": ["a", "b"]}))
    with pytest.raises(DataError, match="task numbers"):
        read_tasks(tmp_path, layout.V30)


def test_statistics_have_the_types_of_lerobot() -> None:
    features = {
        "done": Feature("bool", (1,)),
        "n": Feature("int64", (2,)),
        "pose": FEATURES["pose"],
    }
    schema = layout.episodes_schema(features)
    assert schema.field("stats/done/min").type == pa.list_(pa.bool_())
    assert schema.field("stats/done/mean").type == pa.list_(pa.float64())
    assert schema.field("stats/n/max").type == pa.list_(pa.int64())
    assert schema.field("stats/pose/max").type == pa.list_(pa.list_(pa.float64()))
