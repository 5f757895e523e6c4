"""Uses that nobody planned: odd names, odd pictures, two programs at once."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import runpy
import shutil
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.dataset import layout
from penstock.dataset.check import check
from penstock.dataset.edit import Edits, edit, undo
from penstock.dataset.layout import Feature
from penstock.dataset.reader import Dataset
from penstock.dataset.rescue import rescue
from penstock.dataset.swap import replacing, sibling
from penstock.dataset.unit import Episode
from penstock.dataset.writer import DatasetWriter
from penstock.errors import DataError, LockHeld, StorageError, UsageError
from penstock.media.depth import DepthCoding
from penstock.media.video import VideoSettings

s = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("staging.py"))))
VERSIONS = ["v3.0", "v2.1"]
DEPTH = "observation.depth"
AXES = ["channels", "height", "width"]


def depth_dataset(out: Path, feature: Feature, settings: VideoSettings, version: str) -> None:
    """Write one episode whose frame k is 500 + 100 k millimetres away."""
    features = {"x": Feature("float32", (1,)), DEPTH: feature}
    with DatasetWriter(out, features, 10, version=version) as writer:
        with writer.unit({"n": 0}, [Episode(12, "look")], {DEPTH: settings}) as unit:
            unit.add_rows({"x": np.arange(12.0)})
            for k in range(12):
                unit.video(DEPTH, 0).add_frame(np.full((48, 64), 500 + 100 * k, np.uint16))
            unit.commit()
        writer.build()


def distances(out: Path) -> list[int]:
    shown = [frame[DEPTH] for frame in Dataset(out).episode(0).frames()]
    assert all(picture.shape == (48, 64) and picture.dtype == np.uint16 for picture in shown)
    return [int(picture[0, 0]) for picture in shown]


def episode_stats(out: Path) -> dict[str, float]:
    [(_, stats)] = Dataset(out).episode_stats()
    return {name: value.ravel()[0] for name, value in stats[DEPTH].items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_depth_keeps_its_own_coding_through_every_edit(tmp_path, version):
    out, coding = tmp_path / "d", DepthCoding(0.1, 5.0, 1.0)
    info = {**coding.to_info(), "video.is_depth_map": True}
    feature = Feature("video", (1, 48, 64), AXES, info)
    depth_dataset(out, feature, VideoSettings("depth12", depth=coding), version)
    expected = [500 + 100 * k for k in range(12)]
    assert distances(out) == expected
    edit(out, Edits(trim={0: (3, 9)}))
    assert distances(out) == expected[3:9]
    with pytest.raises(UsageError, match="no video that h264"):
        edit(out, Edits(codec="h264"))
    edit(out, Edits(codec="depth12"))
    assert distances(out) == expected[3:9]
    assert episode_stats(out)["mean"] == 1050
    assert [f for f in check(out).findings if f.severity == "error"] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", ["png", "tiff"])
def test_depth_in_pictures_is_distances(tmp_path, version, form):
    out = tmp_path / "d"
    feature = Feature("image", (1, 48, 64), AXES, {"is_depth_map": True})
    depth_dataset(out, feature, VideoSettings("png"), version)
    if form == "tiff":  # as lerobot 0.6 keeps depth
        path = next((out / "data").rglob("*.parquet"))
        table = pq.read_table(path)
        found = [{"bytes": tiff(500 + 100 * k), "path": "x"} for k in range(12)]
        place = table.schema.get_field_index(DEPTH)
        pictures = pa.array(found, layout.IMAGE_TYPE)
        pq.write_table(table.set_column(place, DEPTH, pictures), path, write_page_checksum=True)
        shutil.rmtree(out / "meta/penstock")
    assert distances(out) == [500 + 100 * k for k in range(12)]
    assert check(out).findings == []
    edit(out, Edits(trim={0: (3, 9)}))
    assert distances(out) == [500 + 100 * k for k in range(3, 9)]
    assert episode_stats(out)["min"] == 800 and episode_stats(out)["max"] == 1300
    assert check(out).findings == []


def tiff(value: int) -> bytes:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.fromarray(np.full((48, 64), value, np.uint16)).save(buffer, "TIFF")
    return buffer.getvalue()


def test_a_grey_camera_is_counted_as_shares_of_white(tmp_path):
    """lerobot makes pictures of one channel that are no distances."""
    image = pytest.importorskip("PIL.Image")
    out = tmp_path / "d"
    depth_dataset(out, Feature("image", (1, 48, 64), AXES), VideoSettings("png"), "v3.0")
    path = next((out / "data").rglob("*.parquet"))
    table, found = pq.read_table(path), []
    for k in range(12):
        buffer = io.BytesIO()
        image.fromarray(np.full((48, 64), 20 * k, np.uint8)).save(buffer, "PNG")
        found.append({"bytes": buffer.getvalue(), "path": "x"})
    place = table.schema.get_field_index(DEPTH)
    pictures = pa.array(found, layout.IMAGE_TYPE)
    pq.write_table(table.set_column(place, DEPTH, pictures), path, write_page_checksum=True)
    shutil.rmtree(out / "meta/penstock")
    edit(out, Edits(trim={0: (3, 9)}))
    assert episode_stats(out)["max"] == pytest.approx(160 / 255)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_merged_dataset_that_has_a_recording_twice_goes_on(tmp_path, version):
    for name in ("a", "b"):
        with s.open_writer(tmp_path / name, version=version) as writer:
            writer.position_of(["first", "second"])
            for number, known in enumerate(["first", "second"]):
                s.commit(writer, number, source={"number": number, "fingerprint": known})
            writer.build()
    out = tmp_path / "out"
    edit(tmp_path / "a", Edits(), others=[tmp_path / "b"], out=out)
    with s.open_writer(out, "append", version=version) as writer:
        places = writer.position_of(["second", "third"])
        assert (places["first"], places["second"], places["third"]) == (0, 1, 4)
        s.commit(writer, 7, source={"number": 7, "fingerprint": "third"})
        writer.build()
    assert [len(episode) for episode in Dataset(out).episodes] == [5, 6, 5, 6, 8]
    assert check(out).findings == []


@pytest.mark.parametrize("version", VERSIONS)
def test_signs_that_mean_something_elsewhere(tmp_path, version, monkeypatch):
    """Braces in a camera's name, a colon in a relative path: no template, no protocol."""
    monkeypatch.chdir(tmp_path)
    out, camera = Path("10:30:00"), "cam {video_key} #1"
    features = {"x {0}": Feature("float32", (1,)), camera: s.FEATURES[s.CAMERA]}
    with DatasetWriter(out, features, 10, version=version) as writer:
        for number in range(2):
            with writer.unit({"n": number}, [Episode(4, "a\nb \u2028 {task}")]) as unit:
                unit.add_rows({"x {0}": np.arange(4.0)})
                for k in range(4):
                    unit.video(camera, 0).add_frame(s.picture(4 * number + k))
                unit.commit()
        writer.build()
    assert check(out).findings == []
    edit(out, Edits(delete=[0], relabel={1: ""}), out="a|b:c")
    dataset = Dataset("a|b:c")
    assert [s.number_of(frame[camera]) for frame in dataset.episode(0).frames()] == [4, 5, 6, 7]
    assert dataset.tasks == [""]
    assert check("a|b:c").findings == []


def test_a_task_that_is_no_text_is_refused(tmp_path):
    out = tmp_path / "d"
    s.write_dataset(out, 3, version="v2.1")
    before = s.files_of(out)
    with pytest.raises(UsageError, match="no text"):
        edit(out, Edits(relabel={0: "\ud800"}))
    writer = s.open_writer(out, "resume", version="v2.1")
    with writer, pytest.raises(UsageError, match="no text"):
        writer.unit({"n": 9}, [Episode(3, "\udc80")])
    assert s.files_of(out) == before
    for name in ("tasks", "episodes"):
        path = out / f"meta/{name}.jsonl"
        path.write_text(path.read_text().replace("task 1", "\\ud800"))
    shutil.rmtree(out / "meta/penstock")
    with pytest.raises(UsageError, match="no text"):
        edit(out, Edits(delete=[0]))
    edit(out, Edits(relabel={None: "a task"}))
    assert Dataset(out).tasks == ["a task"]


def test_rows_of_another_episode_are_never_edited(tmp_path):
    out = tmp_path / "d"
    s.write_dataset(out, 3)
    path = next((out / "data").rglob("*.parquet"))
    table = pq.read_table(path)
    pq.write_table(pa.concat_tables([table.slice(3), table.slice(0, 3)]), path)
    before = s.files_of(out)
    with pytest.raises(DataError, match="doctor"):
        edit(out, Edits(delete=[2]))
    assert s.files_of(out) == before


def exchanges(out: str, times: int) -> None:
    edit(out, Edits(delete=[1]))
    for _ in range(times):
        undo(out)


def test_a_reader_never_mixes_what_was_before_an_edit_with_what_is_after(tmp_path):
    out = tmp_path / "d"
    s.write_dataset(out, 5)
    lengths = [s.length_of(number) for number in range(5)]
    editor = multiprocessing.get_context("spawn").Process(target=exchanges, args=(str(out), 40))
    editor.start()
    try:
        while editor.is_alive():
            found = [len(episode) for episode in Dataset(out).episodes]
            assert found in (lengths, [lengths[0], *lengths[2:]])
    finally:
        editor.join()
    assert editor.exitcode == 0
    dataset = Dataset(out)
    undo(out)
    with pytest.raises(DataError, match="open it again"):
        dataset.episode(3).columns()
    opened, before = Dataset(out), s.files_of(out)
    first = opened.episode(0).columns()["observation.state"]
    s.write_dataset(out, 6, mode="resume")  # adds to it: nothing of what was there is another
    assert s.files_of(out) != before
    assert np.array_equal(opened.episode(0).columns()["observation.state"], first)
    assert len(list(opened.episode(4).frames())) == lengths[4]


def test_two_merges_into_one_folder(tmp_path):
    s.write_dataset(tmp_path / "a", 2)
    out = tmp_path / "out"
    with replacing(out, tmp_path / "a") as new:
        (new / "mine").write_text("x")
        with pytest.raises(LockHeld):
            edit(tmp_path / "a", Edits(), out=out)
        assert (new / "mine").exists()
    assert (out / "mine").exists()
    with pytest.raises(UsageError, match="lies in"):
        edit(tmp_path / "a", Edits(), others=[out], out=out / "sub")
    left = sibling(tmp_path / "late", "new")  # of a merge that was killed
    (left / "data").mkdir(parents=True)
    edit(tmp_path / "a", Edits(), out=tmp_path / "late")
    assert check(tmp_path / "late").findings == []


@pytest.mark.parametrize("how", ["exchanged", "added to"])
def test_a_dataset_that_changes_while_it_is_merged(tmp_path, monkeypatch, how):
    for name in ("a", "b"):
        s.write_dataset(tmp_path / name, 2)
    from penstock.dataset import build

    def meanwhile(*_: object) -> None:
        if how == "exchanged":
            os.rename(tmp_path / "b", tmp_path / "old")
            shutil.copytree(tmp_path / "old", tmp_path / "b")
        else:
            path = tmp_path / "a" / layout.INFO_PATH
            path.write_text(path.read_text().replace('"total_episodes": 2', '"total_episodes": 3'))

    monkeypatch.setattr(build.Build, "_write_data", meanwhile)
    monkeypatch.setattr(build.Build, "_write_videos", lambda *_: None)
    monkeypatch.setattr(build.Build, "_write_records", lambda *_: None)
    monkeypatch.setattr(build.Build, "_write_stats", lambda *_: 0)
    with pytest.raises(StorageError, match="changed meanwhile"):
        edit(tmp_path / "a", Edits(), others=[tmp_path / "b"], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rescue_believes_no_number_of_a_task(tmp_path):
    out = tmp_path / "d"
    s.write_dataset(out, 2)
    path = next((out / "data").rglob("*.parquet"))
    table = pq.read_table(path)
    place = table.schema.get_field_index("task_index")
    numbers = [*table.column("task_index").to_pylist()[: s.length_of(0)]]
    numbers += [1 << 40] * s.length_of(1)
    changed = table.set_column(place, "task_index", pa.array(numbers, pa.int64()))
    pq.write_table(changed, path)
    report = rescue(out, tmp_path / "out")
    assert report.episodes == 1 and "episode 1" in " ".join(report.lost)
    assert Dataset(tmp_path / "out").tasks == ["task 0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_numbers_and_texts_of_every_shape(tmp_path, version):
    features = {
        "one": Feature("float32", (1, 1)),
        "tall": Feature("int64", (3, 1)),
        "deep": Feature("float64", (2, 2, 2, 2)),
        "switches": Feature("bool", (2, 3)),
        "ticks": Feature("uint64", (1,)),
        "words": Feature("string", (2,)),
    }
    rng = np.random.default_rng(0)

    def rows(n: int) -> dict[str, np.ndarray]:
        found = {k: rng.normal(size=(n, *f.shape)) for k, f in features.items()}
        found["switches"] = found["switches"] > 0
        found["ticks"] = np.full((n, 1), (1 << 64) - 1 - n, np.uint64)
        found["words"] = np.array([[f"a {k}", f"b {k}"] for k in range(n)], object)
        return found

    out, given = tmp_path / "d", [rows(n) for n in (4, 5, 6)]
    for mode, numbers in (("create", (0, 1)), ("append", (2,))):
        with DatasetWriter(out, features, 10, version=version, mode=mode) as writer:
            for number in numbers:
                length = len(given[number]["one"])
                with writer.unit({"n": number}, [Episode(length, "go")]) as unit:
                    unit.add_rows(given[number])
                    unit.commit()
            writer.build()
        shutil.rmtree(out / "meta/penstock")
    edit(out, Edits(delete=[0], trim={1: (1, 3)}))
    for episode, (number, part) in zip(
        Dataset(out).episodes, [(1, slice(1, 3)), (2, slice(0, 6))], strict=True
    ):
        for name, values in episode.columns([*features]).items():
            expected = given[number][name][part].astype(values.dtype).reshape(values.shape)
            assert np.array_equal(values, expected), name
    assert check(out).findings == []


def test_distances_of_two_codings_never_come_under_one(tmp_path):
    plain = Feature("video", (1, 48, 64), AXES)
    for name, coding in (("near", DepthCoding(0.1, 2.0, 1.0)), ("far", DepthCoding())):
        settings = VideoSettings("depth12", depth=coding)
        depth_dataset(tmp_path / name, plain, settings, "v3.0")
    near, far = distances(tmp_path / "near"), distances(tmp_path / "far")
    with pytest.raises(UsageError, match="distances"):
        edit(tmp_path / "near", Edits(), others=[tmp_path / "far"], out=tmp_path / "out")
    features = {"x": Feature("float32", (1,)), DEPTH: plain}
    with DatasetWriter(tmp_path / "near", features, 10, mode="append") as writer:
        settings = {DEPTH: VideoSettings("depth12")}
        with writer.unit({"n": 1}, [Episode(1, "look")], settings) as unit:
            unit.add_rows({"x": np.arange(1.0)})
            unit.video(DEPTH, 0).add_frame(np.full((48, 64), 500, np.uint16))
            unit.commit()
        with pytest.raises(UsageError, match="distances"):
            writer.build()
    assert (distances(tmp_path / "near"), distances(tmp_path / "far")) == (near, far)
    edit(tmp_path / "far", Edits(trim={0: (1, 4)}), out=tmp_path / "cut")
    assert distances(tmp_path / "cut") == far[1:4]


@pytest.mark.parametrize("version", VERSIONS)
def test_colours_are_encoded_anew_beside_depth_that_stays(tmp_path, version):
    out, camera = tmp_path / "d", s.CAMERA
    features = {camera: s.FEATURES[camera], DEPTH: Feature("video", (1, 48, 64), AXES)}
    settings = {DEPTH: VideoSettings("depth12")}
    with DatasetWriter(out, features, 10, version=version) as writer:
        with writer.unit({"n": 0}, [Episode(3, "look")], settings) as unit:
            for k in range(3):
                unit.video(camera, 0).add_frame(s.picture(k))
                unit.video(DEPTH, 0).add_frame(np.full((48, 64), 500 + k, np.uint16))
            unit.commit()
        writer.build()
    before = distances(out)
    assert edit(out, Edits(codec="av1")).encoded == 1
    dataset = Dataset(out)
    assert dataset.features[camera].info["video.codec"] == "av1"
    assert dataset.features[DEPTH].info["video.codec"] == "hevc"
    assert distances(out) == before
    assert check(out).findings == []


def test_undo_takes_away_nothing_that_came_after_the_edit(tmp_path):
    out, other = tmp_path / "d", tmp_path / "other"
    s.write_dataset(out, 3, version="v2.1")
    s.write_dataset(other, 3, version="v2.1")
    edit(out, Edits(delete=[2]))
    for path in other.rglob("*"):  # another program adds an episode
        target = out / path.relative_to(other)
        if path.is_file() and ".penstock" not in str(path) and "meta/penstock" not in str(path):
            shutil.copy(path, target)
    with pytest.raises(UsageError, match="was added to"):
        undo(out)
    assert len(Dataset(out)) == 3


@pytest.mark.parametrize("version", VERSIONS)
def test_a_video_that_begins_late_is_cut_where_it_is_read(tmp_path, version):
    """Frame n has the time (n + 3) / fps: readers count from the first."""
    out = tmp_path / "d"
    s.write_dataset(out, 2, version=version)
    for number, video in enumerate(sorted((out / "videos").rglob("*.mp4"))):
        shown = range(11) if version == "v3.0" else [range(5), range(5, 11)][number]
        with av.open(str(video), "w") as container:
            stream = container.add_stream("libx264", rate=s.FPS, options={"g": "2", "bf": "0"})
            stream.width, stream.height, stream.pix_fmt = s.WIDTH, s.HEIGHT, "yuv420p"
            for k, value in enumerate(shown):
                frame = av.VideoFrame.from_ndarray(s.picture(value), "rgb24")
                frame.pts, frame.time_base = k + 3, Fraction(1, s.FPS)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    edit(out, Edits(trim={1: (1, 4)}), out=tmp_path / "cut")
    cut = Dataset(tmp_path / "cut")
    found = [[s.number_of(f[s.CAMERA]) for f in episode.frames()] for episode in cut.episodes]
    assert found == [[0, 1, 2, 3, 4], [6, 7, 8]]


def test_a_dataset_that_is_only_read_stays_as_it_is(tmp_path):
    out = tmp_path / "d"
    s.write_dataset(out, 2)
    (out / ".penstock.lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    edit(out, Edits(keep=[0]), out=tmp_path / "cut")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_video_with_one_key_frame_is_cut_and_split(tmp_path):
    """What a cut brings along may be most of the file; pieces that lie side by side share it."""
    out, count = tmp_path / "d", 6000
    with DatasetWriter(out, {s.CAMERA: s.FEATURES[s.CAMERA]}, s.FPS) as writer:
        with writer.unit({"n": 0}, [Episode(count, "look")]) as unit:
            first = av.VideoFrame.from_ndarray(s.picture(0), "rgb24")
            for _ in range(count):
                unit.video(s.CAMERA, 0).add_frame(first)
            unit.commit()
        writer.build()
    video = next((out / "videos").rglob("*.mp4"))
    options = {"g": "100000", "bf": "3", "b_strategy": "0", "preset": "ultrafast"}
    with av.open(str(video), "w") as container:
        stream = container.add_stream("libx264", rate=s.FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = s.WIDTH, s.HEIGHT, "yuv420p"
        for k in range(count):
            frame = av.VideoFrame.from_ndarray(s.picture(k // 100), "rgb24")
            frame.pts, frame.time_base = k, Fraction(1, s.FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    shutil.rmtree(out / "meta/penstock")  # it is of the other video
    edit(out, Edits(trim={0: (5895, 5905)}), out=tmp_path / "cut")
    shown = [s.number_of(f[s.CAMERA]) for f in Dataset(tmp_path / "cut").episode(0).frames()]
    assert shown == [58] * 5 + [59] * 5
    cameras = {s.CAMERA: s.FEATURES[s.CAMERA]}
    with DatasetWriter(tmp_path / "cut", cameras, s.FPS, mode="append") as writer:
        with writer.unit({"n": 1}, [Episode(3, "look")]) as unit:
            for k in range(3):
                unit.video(s.CAMERA, 0).add_frame(s.picture(k))
            unit.commit()
        writer.build()
    longer = Dataset(tmp_path / "cut")
    shown = [[s.number_of(f[s.CAMERA]) for f in episode.frames()] for episode in longer.episodes]
    assert shown == [[58] * 5 + [59] * 5, [0, 1, 2]]
    before = video.stat().st_size
    edit(out, Edits(split={0: [2000, 4000]}))
    sizes = [path.stat().st_size for path in (out / "videos").rglob("*.mp4")]
    assert sum(sizes) < 2 * before
    ends = [[s.number_of(e.image(s.CAMERA, k)) for k in (0, 1999)] for e in Dataset(out).episodes]
    assert ends == [[0, 19], [20, 39], [40, 59]]


@pytest.mark.parametrize("stated", ["float32", "float64"])
def test_times_of_64_bits(tmp_path, stated):
    out = tmp_path / "d"
    s.write_dataset(out, 3)
    path = next((out / "data").rglob("*.parquet"))
    table = pq.read_table(path)
    times = table.column("frame_index").to_numpy() / s.FPS
    place = table.schema.get_field_index("timestamp")
    table = table.set_column(place, "timestamp", pa.array(times, pa.float64()))
    pq.write_table(table, path, write_page_checksum=True)
    info = out / layout.INFO_PATH
    known = json.loads(info.read_bytes())
    known["features"]["timestamp"]["dtype"] = stated
    info.write_text(json.dumps(known))
    for name in ("meta/penstock", ".penstock"):
        shutil.rmtree(out / name)
    assert check(out).findings == []
    s.write_dataset(out, 1, mode="append")
    assert check(out).findings == []
    edit(out, Edits(delete=[0]))
    assert check(out).findings == []
    assert [len(episode) for episode in Dataset(out).episodes] == [6, 7, 5]


@pytest.mark.parametrize("version", VERSIONS)
def test_pictures_that_were_counted_by_their_pixels(tmp_path, version):
    """As lerobot does where it encodes while it records."""
    out, pixels = tmp_path / "d", s.WIDTH * s.HEIGHT
    s.write_dataset(out, 2, version=version)
    before = dict(Dataset(out).episode_stats())
    if version == "v3.0":
        path = out / layout.V30.stats
        stats = json.loads(path.read_bytes())
        whole, stats[s.CAMERA]["count"] = stats[s.CAMERA], [11 * pixels]
        path.write_text(json.dumps(stats))
        path = out / layout.episodes_path(0, 0)
        table, name = pq.read_table(path), f"stats/{s.CAMERA}/count"
        counts = pa.array([[5 * pixels], [6 * pixels]], pa.list_(pa.int64()))
        table = table.set_column(table.schema.get_field_index(name), name, counts)
        pq.write_table(table, path, write_page_checksum=True)
    else:
        path = out / layout.V21.episode_stats
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line, frames in zip(lines, (5, 6), strict=True):
            line["stats"][s.CAMERA]["count"] = [frames * pixels]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("meta/penstock", ".penstock"):
        shutil.rmtree(out / name)
    assert check(out).findings == []
    if version == "v3.0":
        s.write_dataset(out, 1, mode="append", version=version)  # a third: episode 0 once more
        stats = Dataset(out).stats()[s.CAMERA]
        assert stats["count"].tolist() == [16]
        own = before[0][s.CAMERA]["mean"]
        expected = (np.array(whole["mean"]) * 11 + own * 5) / 16
        np.testing.assert_allclose(stats["mean"], expected, rtol=1e-9)
    edit(out, Edits(delete=[0]))
    stats = dict(Dataset(out).episode_stats())
    assert stats[0][s.CAMERA]["count"].tolist() == [6]
    assert check(out).findings == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_dataset_that_lerobot_has_only_begun(tmp_path, version):
    """It has an info.json, and nothing else."""
    other, begun = tmp_path / "other", tmp_path / "begun"
    s.write_dataset(other, 2, version=version)
    info = json.loads((other / layout.INFO_PATH).read_bytes()) | {"splits": {}, "their": "key"}
    info |= {name: 0 for name in info if name.startswith("total_")}
    (begun / "meta").mkdir(parents=True)
    (begun / layout.INFO_PATH).write_text(json.dumps(info))
    for first, second in ((begun, other), (other, begun)):
        out = tmp_path / f"from {first.name}"
        edit(first, Edits(), others=[second], out=out)
        assert len(Dataset(out)) == 2
        assert check(out).findings == []
    s.write_dataset(begun, 2, mode="append", version=version)
    assert len(Dataset(begun)) == 2 and Dataset(begun).info["their"] == "key"
    assert check(begun).findings == []
