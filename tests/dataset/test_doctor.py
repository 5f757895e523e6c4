"""The doctor finds nothing in sound datasets, and every damage that changes what is read."""

from __future__ import annotations

import json
import random
import runpy
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from penstock.core.files import TEMPORARY_PREFIX, process_owner
from penstock.dataset import check as doctor
from penstock.dataset import layout
from penstock.dataset.check import Checkup, check
from penstock.dataset.check.findings import Report
from penstock.dataset.check.stats import StatsCheck, wrong_quantiles
from penstock.dataset.layout import Feature
from penstock.dataset.reader import Dataset
from penstock.dataset.stats import Moments, VectorStats
from penstock.errors import DataError, UsageError
from penstock.media.video import open_video

hand = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("handmade.py"))))
VERSIONS = ["v3.0", "v2.1"]
INFO, STATS, TASKS = layout.INFO_PATH, layout.V30.stats, layout.V30.tasks
EPISODES = layout.episodes_path(0, 0)
DATA = [layout.V30.data_path(0, i) for i in range(2)]
VIDEO = [layout.V30.video_path(hand.TOP, 0, i) for i in range(2)]
SIDE = layout.V30.video_path(hand.SIDE, 0, 0)
STATE = "observation.state"


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("originals")
    return {version: hand.make_dataset(folder / version, version) for version in VERSIONS}


@pytest.fixture
def root(originals, tmp_path) -> Path:
    """A copy of the v3.0 dataset to spoil."""
    return Path(shutil.copytree(originals["v3.0"], tmp_path / "copy"))


@pytest.fixture
def old(originals, tmp_path) -> Path:
    """A copy of the v2.1 dataset to spoil."""
    return Path(shutil.copytree(originals["v2.1"], tmp_path / "copy"))


# --- tools that spoil ---

Damage = Callable[[Path], object]


def cut(name: str, keep: float) -> Damage:
    def damage(root: Path) -> None:
        data = (root / name).read_bytes()
        (root / name).write_bytes(data[: int(len(data) * keep)])

    return damage


def replace_by(name: str, content: bytes) -> Damage:
    return lambda root: (root / name).write_bytes(content)


def delete(name: str) -> Damage:
    return lambda root: (root / name).unlink()


def swap(first: str, second: str) -> Damage:
    def damage(root: Path) -> None:
        (root / first).rename(root / "x")
        (root / second).rename(root / first)
        (root / "x").rename(root / second)

    return damage


def copy(source: str, target: str) -> Damage:
    def damage(root: Path) -> None:
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / source, root / target)

    return damage


def edit_json(name: str, change: Callable[[Any], object]) -> Damage:
    def damage(root: Path) -> None:
        value = json.loads((root / name).read_text())
        change(value)
        (root / name).write_text(json.dumps(value))

    return damage


def info(**values: object) -> Damage:
    return edit_json(INFO, lambda it: it.update(values))


def feature(name: str, **values: object) -> Damage:
    return edit_json(INFO, lambda it: it["features"].setdefault(name, {}).update(values))


def stat(name: str, key: str, value: object) -> Damage:
    return edit_json(STATS, lambda it: it[name].update({key: value}))


def edit_table(name: str, change: Callable[[pa.Table], pa.Table]) -> Damage:
    def damage(root: Path) -> None:
        table = change(pq.read_table(root / name))
        for index, field in enumerate(table.schema):  # pyarrow 23 cannot write vectors that miss
            if pa.types.is_fixed_size_list(field.type) and table[index].null_count:
                values = pa.array(table[index].to_pylist(), pa.list_(field.type.value_type))
                table = table.set_column(index, field.name, values)
        pq.write_table(table, root / name, row_group_size=1000, write_page_checksum=True)

    return damage


def edit_column(name: str, column: str, change: Callable[[list], object]) -> Damage:
    """Change the values of one column in place; its type stays."""

    def edit(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(column)
        values = table.column(column).to_pylist()
        change(values)
        return table.set_column(
            place, table.schema.field(place), pa.array(values, table.schema.field(place).type)
        )

    return edit_table(name, edit)


def put(index: int, value: object) -> Callable[[list], object]:
    return lambda values: values.__setitem__(index, value)


def add(index: int, value: float) -> Callable[[list], object]:
    return lambda values: values.__setitem__(index, values[index] + value)


def video(name: str, images: Callable[[], list], **options: object) -> Damage:
    return lambda root: hand.write_video(root / name, images(), **options)


def pictures(count: int, camera: str = hand.TOP) -> list:
    return [hand.picture(0, k, camera) for k in range(count)]


def first_file() -> list:
    return [hand.picture(e, k, hand.TOP) for e in (0, 1) for k in range(hand.LENGTHS[e])]


def link_out(root: Path) -> None:
    outside = root.parent / "outside.mp4"
    (root / VIDEO[0]).rename(outside)
    (root / VIDEO[0]).symlink_to(outside)


def two_cameras_in_one_file(root: Path) -> None:
    info(video_path="videos/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4")(root)
    for number in range(2):
        (root / f"videos/chunk-000/file-{number:03d}.mp4").parent.mkdir(exist_ok=True)
        shutil.copy(root / VIDEO[number], root / f"videos/chunk-000/file-{number:03d}.mp4")


def drop_rows(count: int) -> Damage:
    return edit_table(DATA[1], lambda table: table.slice(0, len(table) - count))


def move(name: str, key: str, change: Callable[[list], object]) -> Damage:
    return edit_column(EPISODES, f"videos/{name}/{key}", change)


def bad_png(values: list) -> None:
    data = bytearray(values[3]["bytes"])
    data[len(data) // 2] ^= 0xFF
    values[3]["bytes"] = bytes(data)


def small_png(values: list) -> None:
    values[3]["bytes"] = hand.png(hand.picture(0, 0, hand.WRIST)[:32])


def rename_column(table: pa.Table) -> pa.Table:
    return table.rename_columns(["acton" if n == "action" else n for n in table.column_names])


def as_double(table: pa.Table) -> pa.Table:
    place = table.schema.get_field_index("action")
    return table.set_column(place, "action", table.column(place).cast(pa.list_(pa.float64(), 7)))


ERRORS: dict[str, Damage] = {
    "info deleted": delete(INFO),
    "info empty": replace_by(INFO, b""),
    "info cut": cut(INFO, 0.5),
    "info is a list": replace_by(INFO, b"[]"),
    "info of another version": info(codebase_version="v9.0"),
    "fps 0": info(fps=0),
    "fps other": info(fps=31),
    "fps text": info(fps="30"),
    "one episode more": info(total_episodes=4),
    "one frame less": info(total_frames=38),
    "one task more": info(total_tasks=3),
    "chunks_size 0": info(chunks_size=0),
    "no timestamp feature": edit_json(INFO, lambda it: it["features"].pop("timestamp")),
    "feature of another length": feature(STATE, shape=[8]),
    "feature of another type": feature(STATE, dtype="float64"),
    "feature of an unknown type": feature(STATE, dtype="pickle"),
    "video of another size": feature(hand.TOP, shape=[64, 98, 3]),
    "picture of another size": feature(hand.WRIST, shape=[66, 96, 3]),
    "feature without data": feature("ghost", dtype="float32", shape=[2], names=None),
    "camera without video": feature("cam", dtype="video", shape=[64, 96, 3], names=None),
    "data_path leads out": info(data_path="../x/{chunk_index}/{file_index}"),
    "data_path absolute": info(data_path="/etc/passwd"),
    "data_path runs code": info(data_path="data/{chunk_index.__class__}"),
    "video_path null": info(video_path=None),
    "video_path unknown": info(video_path="videos/{camera}.mp4"),
    "feature name leads out": feature("../../x", dtype="float32", shape=[1], names=None),
    "stats deleted": delete(STATS),
    "stats cut": cut(STATS, 0.7),
    "stats NaN": stat("action", "mean", [float("nan")] * 7),
    "stats infinite": stat("action", "max", [float("inf")] * 7),
    "stats mean wrong": stat("action", "mean", [0.0] * 7),
    "stats std wrong": stat("action", "std", [0.0] * 7),
    "stats min wrong": stat("reward", "min", [-1.0]),
    "stats max wrong": stat("counter", "max", [218]),
    "stats count wrong": stat("action", "count", [38]),
    "stats shape wrong": stat("action", "mean", [0.0] * 6),
    "stats not numbers": stat("action", "mean", ["a"] * 7),
    "stats without a feature": edit_json(STATS, lambda it: it.pop("action")),
    "stats without a mean": edit_json(STATS, lambda it: it["action"].pop("mean")),
    "stats quantiles out of order": stat("reward", "q10", [100.0]),
    "stats of pictures wrong": stat(hand.TOP, "mean", [[[0.9]], [[0.9]], [[0.9]]]),
    "stats of pictures in bytes": stat(hand.TOP, "max", [[[255.0]], [[255.0]], [[255.0]]]),
    "tasks deleted": delete(TASKS),
    "tasks cut": cut(TASKS, 0.9),
    "tasks noise": replace_by(TASKS, bytes(range(256)) * 8),
    "task missing": edit_table(TASKS, lambda table: table.slice(0, 1)),
    "task renamed": edit_column(TASKS, "__index_level_0__", put(1, "other")),
    "tasks exchanged": edit_column(TASKS, "task_index", lambda values: values.reverse()),
    "task twice": edit_column(TASKS, "__index_level_0__", put(1, hand.TASKS[0])),
    "task number jumps": edit_column(TASKS, "task_index", put(1, 5)),
    "episodes deleted": delete(EPISODES),
    "episodes cut": cut(EPISODES, 0.98),
    "episodes empty": replace_by(EPISODES, b""),
    "episodes twice": copy(EPISODES, layout.episodes_path(0, 1)),
    "episodes in another order": edit_table(
        EPISODES, lambda table: table.take(pa.array([1, 0, 2]))
    ),
    "episode missing": edit_table(EPISODES, lambda table: table.slice(0, 2)),
    "episode longer": edit_column(EPISODES, "length", put(1, 8)),
    "episode of 0 frames": edit_column(EPISODES, "length", put(1, 0)),
    "episode begins elsewhere": edit_column(EPISODES, "dataset_from_index", put(1, 11)),
    "episode in another data file": edit_column(EPISODES, "data/file_index", put(1, 1)),
    "episode in no data file": edit_column(EPISODES, "data/file_index", put(2, 7)),
    "episode with negative place": edit_column(EPISODES, "data/file_index", put(2, -1)),
    "episode with an unknown task": edit_column(EPISODES, "tasks", put(0, ["fly"])),
    "episode with another task": edit_column(EPISODES, "tasks", put(0, [hand.TASKS[1]])),
    "episode without tasks": edit_column(EPISODES, "tasks", put(0, [])),
    "episode in no video file": move(hand.TOP, "file_index", put(2, 7)),
    "episode in another video file": move(hand.TOP, "file_index", put(2, 0)),
    "video begins half a frame late": move(hand.TOP, "from_timestamp", add(1, 0.5 / 30)),
    "video begins a frame early": move(hand.TOP, "from_timestamp", add(1, -1 / 30)),
    "video begins a frame late": move(hand.TOP, "from_timestamp", add(1, 1 / 30)),
    "video ends a frame late": move(hand.TOP, "to_timestamp", add(1, 1 / 30)),
    "video time NaN": move(hand.TOP, "from_timestamp", put(1, float("nan"))),
    "video time missing": move(hand.TOP, "from_timestamp", put(1, None)),
    "episode stats wrong": edit_column(EPISODES, "stats/action/mean", put(1, [9.0] * 7)),
    "episode stats missing": edit_column(EPISODES, "stats/action/mean", put(1, None)),
    "episode stats of pictures wrong": edit_column(
        EPISODES, f"stats/{hand.TOP}/mean", put(1, [[[0.9]], [[0.9]], [[0.9]]])
    ),
    "episodes without a column": edit_table(
        EPISODES, lambda table: table.drop_columns(["data/file_index"])
    ),
    "data deleted": delete(DATA[0]),
    "data empty": replace_by(DATA[0], b""),
    "data cut": cut(DATA[0], 0.5),
    "data without its last byte": cut(DATA[0], 0.99999),
    "data files exchanged": swap(DATA[0], DATA[1]),
    "data file of the other": copy(DATA[1], DATA[0]),
    "last row missing": drop_rows(1),
    "rows added": edit_table(DATA[1], lambda table: pa.concat_tables([table, table.slice(0, 2)])),
    "rows exchanged": edit_table(
        DATA[1], lambda table: table.take(pa.array([1, 0, *range(2, 20)]))
    ),
    "index shifted": edit_table(
        DATA[1],
        lambda table: table.set_column(
            table.schema.get_field_index("index"), "index", pc.add(table.column("index"), 1)
        ),
    ),
    "frame_index repeats": edit_column(DATA[1], "frame_index", put(5, 4)),
    "timestamp 1 ms off": edit_column(DATA[1], "timestamp", add(5, 0.001)),
    "timestamp NaN": edit_column(DATA[1], "timestamp", put(5, float("nan"))),
    "episode_index wrong": edit_column(DATA[1], "episode_index", put(5, 1)),
    "task_index too high": edit_column(DATA[1], "task_index", put(5, 2)),
    "task_index negative": edit_column(DATA[1], "task_index", put(5, -1)),
    "task_index of another task": edit_column(DATA[1], "task_index", put(5, 1)),
    "column missing": edit_table(DATA[1], lambda table: table.drop_columns(["action"])),
    "column renamed": edit_table(DATA[1], rename_column),
    "column of another type": edit_table(DATA[1], as_double),
    "value missing": edit_column(DATA[1], "reward", put(5, None)),
    "vector missing": edit_column(DATA[1], "action", put(5, None)),
    "value out of range": edit_column(DATA[1], "reward", put(5, 1e6)),
    "values shifted": edit_column(DATA[1], "counter", add(19, 1)),
    "matrix row missing": edit_column(DATA[1], "matrix", put(5, [[1.0, 2.0, 3.0]])),
    "picture damaged": edit_column(DATA[1], hand.WRIST, bad_png),
    "picture of another size in the rows": edit_column(DATA[1], hand.WRIST, small_png),
    "picture missing": edit_column(DATA[1], hand.WRIST, put(5, None)),
    "picture is text": edit_column(DATA[1], hand.WRIST, put(5, {"bytes": b"hello", "path": ""})),
    "data file that nobody owns": copy(DATA[1], layout.V30.data_path(0, 2)),
    "video deleted": delete(VIDEO[0]),
    "video empty": replace_by(VIDEO[0], b""),
    "video cut in half": cut(VIDEO[0], 0.5),
    "video without its end": cut(VIDEO[0], 0.9),
    "video is text": replace_by(VIDEO[0], b"not a video" * 100),
    "video is a picture": lambda root: replace_by(VIDEO[0], hand.png(pictures(1)[0]))(root),
    "video one frame short": video(VIDEO[0], lambda: first_file()[:-1]),
    "video at another rate": video(VIDEO[0], first_file, fps=25),
    "video of another size in the file": video(
        VIDEO[0], lambda: [image[:32] for image in first_file()]
    ),
    "video of the other camera": copy(SIDE, VIDEO[0]),
    "video files exchanged": swap(VIDEO[0], VIDEO[1]),
    "two cameras in one file": two_cameras_in_one_file,
    "video behind a link": link_out,
}

WARNINGS: dict[str, Damage] = {
    "splits wrong": info(splits={"train": "0:2"}),
    "unusual path": lambda root: (
        info(data_path="rows/{chunk_index}-{file_index}.parquet")(root),
        (root / "rows").mkdir(),
        *((root / DATA[i]).rename(root / f"rows/0-{i}.parquet") for i in range(2)),
    ),
    "a median that is none": stat("reward", "q50", [4.0]),
    "no quantiles": edit_json(STATS, lambda it: it["action"].pop("q50")),
    "std of pictures 0": stat(hand.TOP, "std", [[[0.0]], [[0.0]], [[0.0]]]),
    "statistics of nothing": edit_json(STATS, lambda it: it.update(ghost=it["action"])),
    "a NaN in a column": edit_column(DATA[1], "action", put(5, [float("nan")] + [1.0] * 6)),
    "a column more": edit_table(
        DATA[1], lambda table: table.append_column("more", pa.array(range(20)))
    ),
    "video longer than its episodes": video(VIDEO[0], lambda: [*first_file(), *pictures(3)]),
    "codec not the stated one": feature(hand.TOP, info={"video.codec": "av1"}),
    "video that nobody owns": copy(VIDEO[0], layout.V30.video_path(hand.TOP, 0, 5)),
    "video times drift": move(hand.TOP, "from_timestamp", add(1, 2e-5)),
    "records that lie elsewhere": edit_column(EPISODES, "meta/episodes/file_index", put(1, 3)),
    "pictures left behind": copy(DATA[0], "images/top/episode-000000/frame-000000.png"),
    "a temporary of the dead": lambda root: (
        root / "data" / f"{TEMPORARY_PREFIX}{process_owner().rpartition('-')[0]}-1-abc"
    ).write_bytes(b"x"),
}


# --- what is sound ---


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("decode", ["all", "sample"])
def test_nothing_is_wrong_with_a_sound_dataset(originals, version, decode) -> None:
    result = check(originals[version], decode)
    assert result.findings == []
    assert result.ok
    checked = result.checked
    assert checked["episodes"] == 3
    assert checked["rows"] == 39
    assert checked["frames decoded"] == (78 if decode == "all" else 18)
    assert checked["pictures decoded"] == (39 if decode == "all" else 9)
    assert checked["episode statistics"] == 3
    assert checked["files"] == sum(path.is_file() for path in originals[version].rglob("*"))
    assert result.ok


@pytest.mark.parametrize("files", [(0, 0, 0), (0, 1, 2)])
def test_any_grouping_into_files_is_sound(tmp_path, files) -> None:
    assert check(hand.make_dataset(tmp_path / "x", files=files)).findings == []


def test_workers_change_nothing(originals) -> None:
    assert check(originals["v3.0"], workers=3) == check(originals["v3.0"])


def test_progress_hears_of_every_byte(originals) -> None:
    done: list[int] = []
    notes: list[str] = []
    bar = SimpleNamespace(advance=done.append, note=notes.append)
    check(originals["v3.0"], progress=bar)
    root = originals["v3.0"]
    sizes = [p.stat().st_size for p in root.rglob("*") if p.suffix in (".mp4", ".parquet")]
    meta = [(root / name).stat().st_size for name in (TASKS, EPISODES)]
    assert sum(done) == sum(sizes) - sum(meta)
    assert set(notes) == {*DATA, *VIDEO, *(name.replace("top", "side") for name in VIDEO)}


def test_wrong_calls(tmp_path) -> None:
    for call in (
        lambda: check(tmp_path / "nothing"),
        lambda: check(tmp_path, "some"),  # type: ignore[arg-type]
        lambda: check(tmp_path, workers=0),
    ):
        with pytest.raises(UsageError):
            call()


def test_a_folder_that_is_no_dataset(tmp_path) -> None:
    assert "not a LeRobot dataset" in check(tmp_path).errors[0].what


# --- what is not ---


def test_there_are_enough_cases() -> None:
    assert len(ERRORS) + len(WARNINGS) >= 60


@pytest.mark.parametrize("name", ERRORS)
def test_damage_is_an_error(root, name) -> None:
    ERRORS[name](root)
    result = check(root)
    assert not result.ok, result.findings
    for finding in result.findings:
        assert finding.where and finding.what and finding.todo
        assert "\n" not in str(finding)


@pytest.mark.parametrize("name", WARNINGS)
def test_a_flaw_is_a_warning(root, name) -> None:
    WARNINGS[name](root)
    result = check(root)
    assert result.warnings, result.findings
    if name != "a NaN in a column":  # its statistics are wrong too
        assert result.ok, result.findings


OLD_FILES = [layout.V21.tasks, layout.V21.episodes, layout.V21.episode_stats]
OLD_DATA = [layout.V21.data_path(0, i) for i in range(3)]
OLD_VIDEO = [layout.V21.video_path(hand.TOP, 0, i) for i in range(3)]


def edit_lines(name: str, change: Callable[[list], object]) -> Damage:
    def damage(root: Path) -> None:
        lines = [json.loads(line) for line in (root / name).read_text().splitlines()]
        change(lines)
        (root / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return damage


OLD_ERRORS: dict[str, Damage] = {
    **{f"{name} deleted": delete(name) for name in [*OLD_FILES, OLD_DATA[1], OLD_VIDEO[1]]},
    **{f"{name} cut": cut(name, 0.6) for name in [*OLD_FILES, OLD_DATA[1], OLD_VIDEO[1]]},
    "data exchanged": swap(OLD_DATA[0], OLD_DATA[2]),
    "videos exchanged": swap(OLD_VIDEO[0], OLD_VIDEO[2]),
    "episode missing": edit_lines(layout.V21.episodes, lambda it: it.pop()),
    "episode twice": edit_lines(layout.V21.episodes, lambda it: it.append(it[0])),
    "length wrong": edit_lines(layout.V21.episodes, lambda it: it[1].update(length=8)),
    "length text": edit_lines(layout.V21.episodes, lambda it: it[1].update(length="7")),
    "stats wrong": edit_lines(
        layout.V21.episode_stats, lambda it: it[1]["stats"]["action"].update(mean=[9.0] * 7)
    ),
    "stats of an episode missing": edit_lines(layout.V21.episode_stats, lambda it: it.pop(1)),
    "task twice": edit_lines(layout.V21.tasks, lambda it: it.append(it[0])),
    "task other": edit_lines(layout.V21.tasks, lambda it: it[0].update(task="other")),
    "index shifted": edit_column(OLD_DATA[1], "index", add(0, 1)),
    "data that nobody owns": copy(OLD_DATA[0], layout.V21.data_path(0, 9)),
}


@pytest.mark.parametrize("name", OLD_ERRORS)
def test_damage_is_an_error_in_v21(old, name) -> None:
    OLD_ERRORS[name](old)
    result = check(old)
    assert not result.ok, result.findings


def test_totals_of_v21_are_warnings(old) -> None:
    info(total_videos=5, total_chunks=7)(old)
    result = check(old)
    assert result.ok
    assert len(result.warnings) == 2


@pytest.mark.parametrize("name", [EPISODES, TASKS, *DATA])
def test_every_flipped_bit_of_a_parquet_file_that_matters_is_found(root, name) -> None:
    """Flips that are not found must leave the table as it was."""
    path = root / name
    original = path.read_bytes()
    table = pq.read_table(path)
    rng = random.Random(name)
    found = 0
    for _ in range(40):
        spoilt = bytearray(original)
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoilt)
        if not check(root, "sample").findings:
            again = pq.read_table(path)
            assert again.equals(table)
        else:
            found += 1
    assert found > 10


def test_flipped_bytes_of_a_video(root) -> None:
    """What is not found decodes to nearly the same pictures: a codec has no checksum."""
    path = root / VIDEO[1]
    original = path.read_bytes()
    rng = random.Random(5)
    found = silent = 0
    for _ in range(40):
        spoilt = bytearray(original)
        spoilt[rng.randrange(len(spoilt))] ^= 0xFF
        path.write_bytes(spoilt)
        if not check(root).ok:
            found += 1
            continue
        with open_video(path) as (container, _):
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(frames) == 20
        off = max(
            np.abs(frame.mean((0, 1)) - hand.picture(2, k, hand.TOP).mean((0, 1))).max()
            for k, frame in enumerate(frames)
        )
        silent += off > 40
    assert found >= 12
    assert silent <= 3


def test_damaged_footers_never_abort(root) -> None:
    """pyarrow ends the whole process for some of these, if it is asked for a column's metadata."""
    path = root / EPISODES
    original = path.read_bytes()
    footer_bytes = int.from_bytes(original[-8:-4], "little")
    rng = random.Random(2)
    for _ in range(150):
        spoilt = bytearray(original)
        spoilt[rng.randrange(len(spoilt) - footer_bytes - 8, len(spoilt))] ^= rng.randrange(1, 256)
        path.write_bytes(spoilt)
        with suppress(DataError):
            Dataset(root)


@pytest.mark.parametrize(("version", "severity"), [("v3.0", "warning"), ("v2.1", "error")])
def test_names_that_lerobot_takes_for_pictures(version, severity) -> None:
    report = Report()
    features = {"image_gain": Feature("float32", (2,)), "gain": Feature("float32", (2,))}
    rows = np.arange(10.0).reshape(5, 2)
    keys = {q: np.quantile(rows, share, axis=0) for q, share in layout.QUANTILES.items()}
    one = {"min": rows[0], "max": rows[-1], "mean": rows.mean(0), "std": rows.std(0), **keys}
    stats = {name: {**one, "count": np.array([5.0])} for name in features}
    StatsCheck(layout.FORMATS[version], features, report).form("stats", "all", stats, 5)
    [finding] = report.checkup().findings
    assert finding.severity == severity
    assert "'image_gain'" in finding.what


def test_statistics_of_a_matrix_as_lerobot_counts_them(root) -> None:
    """Over all its rows: (2, 3) has statistics of (3,)."""
    stats = json.loads((root / STATS).read_text())
    for key, value in stats["matrix"].items():
        if key != "count":
            stats["matrix"][key] = value[0]
    (root / STATS).write_text(json.dumps(stats))
    assert check(root).errors == []


def test_a_writer_at_work_is_not_an_error(root) -> None:
    (root / "data" / f"{TEMPORARY_PREFIX}{process_owner()}-abc").write_bytes(b"x")
    result = check(root)
    assert result.ok
    assert "being written" in result.warnings[0].what


def test_many_alike_are_counted_not_listed() -> None:
    report = Report()
    for k in range(100):
        report.error("a", f"frame {k}", "frames")
        report.warning("a", f"note {k}", "look", "notes")
    report.error("b", "alone")
    result = report.checkup()
    assert len(result.errors) == 6
    assert result.errors[4].what == "frame 4 (and 95 more like it)"
    assert [finding.what for finding in result.warnings] == ["note 0 (and 99 more like it)"]
    assert not result.ok


def test_a_finding_is_a_line_of_text() -> None:
    report = Report()
    report.error("a", "broken", todo="mend it")
    report.warning("b", "odd", "look")
    report.count("files", 2)
    result = report.checkup()
    lines = [str(finding) for finding in result.findings]
    assert lines == ["error: a: broken; mend it", "warning: b: odd; look"]
    assert result.checked == {"files": 2}
    assert isinstance(result, Checkup)
    assert doctor.Finding("a", "b", "c").severity == "error"


# --- the counters that the statistics are compared with ---


@pytest.mark.parametrize("sizes", [(100,), (1, 99), (33, 33, 34), (1,) * 100])
def test_moments_equal_numpy(sizes) -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(5, 2, (100, 3)).astype(np.float32)
    moments = Moments(3)
    for piece in np.split(rows, np.cumsum(sizes)[:-1]):
        moments.add(piece)
    exact = rows.astype(np.float64)
    assert np.allclose(moments.mean, exact.mean(0), rtol=1e-12)
    assert np.allclose(moments.std, exact.std(0), rtol=1e-12)
    assert np.array_equal(moments.low, exact.min(0))
    assert np.array_equal(moments.high, exact.max(0))
    assert moments.rows == 100


def test_moments_leave_out_what_is_no_number() -> None:
    rows = np.array([[1.0, np.nan], [3.0, 4.0], [np.inf, 6.0]])
    moments = Moments(2)
    moments.add(rows)
    assert moments.non_finite == 2
    assert moments.mean.tolist() == [2.0, 5.0]
    assert moments.count.tolist() == [2, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("kind", ["normal", "constant", "two values"])
def test_true_quantiles_are_never_blamed(count, kind) -> None:
    rng = np.random.default_rng(count)
    rows = rng.normal(size=(count, 2))
    if kind == "constant":
        rows[:] = 3
    elif kind == "two values":
        rows = (rows > 0).astype(float)
    points = {q: np.quantile(rows, share, axis=0) for q, share in layout.QUANTILES.items()}
    seen = VectorStats(2)
    seen.add(rows)
    assert wrong_quantiles(points, seen) == []


def test_false_quantiles_are_blamed() -> None:
    rows = np.random.default_rng(0).normal(size=(1000, 1))
    points = {q: np.quantile(rows, share, axis=0) for q, share in layout.QUANTILES.items()}
    points["q90"] = points["q90"] * 0.8
    seen = VectorStats(1)
    seen.add(rows)
    assert wrong_quantiles(points, seen) == ["q90"]
