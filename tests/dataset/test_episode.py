"""Staging one episode: rows in any portions, a thread per camera, nothing left behind."""

from __future__ import annotations

import runpy
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness import small_disk
from penstock.errors import CorruptFile, DataError, StorageError, UsageError
from penstock.dataset.episode import EpisodeWriter, StagedEpisode
from penstock.dataset.layout import Feature
from penstock.dataset.stats import PictureStats, VectorStats
from penstock.media.video import VideoSettings, read_video

s = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("staging.py"))))
PICTURE = Feature("image", (3, s.HEIGHT, s.WIDTH), ["channels", "height", "width"])


def test_what_is_staged_can_be_opened_again(tmp_path: Path) -> None:
    s.stage(tmp_path / "e", 3, 12)
    staged = StagedEpisode.open(tmp_path / "e")
    assert (staged.frames, staged.fps, staged.task) == (12, s.FPS, "pick")
    assert staged.features == s.FEATURES
    assert staged.infos[s.CAMERA]["video.codec"] == "h264"
    table = pq.read_table(tmp_path / "e" / "rows.parquet")
    assert np.allclose(table["action"].to_pylist(), s.rows(3, 12)["action"])
    frames = [s.number_of(frame) for frame in read_video(tmp_path / "e" / f"{s.CAMERA}.mp4")]
    assert frames == [48 + i for i in range(12)]
    stats = staged.stats()
    assert isinstance(stats["action"], VectorStats) and stats["action"].rows == 12
    assert isinstance(stats[s.CAMERA], PictureStats) and stats[s.CAMERA].pictures == 12
    assert set(staged.files) == {"rows.parquet", "stats.pack", f"{s.CAMERA}.mp4"}


@pytest.mark.parametrize("codec", ["h264", "copy", "av1"])
def test_portions_and_repeats_do_not_matter(tmp_path: Path, codec: str) -> None:
    frames, dice = 9000, np.random.default_rng(0)
    features = {"x": Feature("float32", (2,)), s.CAMERA: s.FEATURES[s.CAMERA]}
    x = dice.normal(size=(frames, 2)).astype(np.float32)
    data = s.jpeg(s.picture(5))
    found = []
    for name, size in (("a", 1), ("b", 5000)):
        writer = EpisodeWriter(tmp_path / name, {"x": features["x"]}, s.FPS, frames, {})
        for start in range(0, frames, size * 37):
            writer.add_rows({"x": x[start : start + size * 37]})
        found.append(writer.finish("t").files)
    assert found[0] == found[1]
    found = []
    for name in ("c", "d"):
        writer = EpisodeWriter(
            tmp_path / name,
            {s.CAMERA: features[s.CAMERA]},
            s.FPS,
            30,
            {s.CAMERA: VideoSettings(codec)},
        )
        sink = writer.video(s.CAMERA)
        sink.add_jpeg(data)
        if name == "c":
            sink.repeat(29)
        else:
            for _ in range(29):
                sink.add_jpeg(data)
        found.append(writer.finish("t").files)
    assert found[0] == found[1]


def test_cameras_write_from_threads_of_their_own(tmp_path: Path) -> None:
    features = {f"cam{i}": s.FEATURES[s.CAMERA] for i in range(3)}
    writer = EpisodeWriter(tmp_path / "e", features, s.FPS, 20, {"cam2": VideoSettings("copy")})

    def work(key: str) -> None:
        sink = writer.video(key)
        for number in range(20):
            sink.add_jpeg(s.jpeg(s.picture(number)))
        sink.close()
        sink.close()

    threads = [threading.Thread(target=work, args=(key,)) for key in features]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    staged = writer.finish("t")
    for key in features:
        video = read_video(staged.folder / f"{key}.mp4")
        assert [s.number_of(frame) for frame in video] == list(range(20))


def test_copy_takes_the_statistics_of_sampled_frames_only(tmp_path: Path) -> None:
    feature = {s.CAMERA: s.FEATURES[s.CAMERA]}
    writer = EpisodeWriter(tmp_path / "e", feature, s.FPS, 400, {s.CAMERA: VideoSettings("copy")})
    sink = writer.video(s.CAMERA)
    sink.add_jpeg(s.jpeg(s.picture(1)))
    sink.repeat(399)
    assert writer.finish("t").stats()[s.CAMERA].pictures == 100


def test_png_pictures_lie_in_a_parquet(tmp_path: Path) -> None:
    features = {"x": Feature("float32", (1,)), "cam": PICTURE}
    writer = EpisodeWriter(tmp_path / "e", features, s.FPS, 5, {"cam": VideoSettings("png")})
    writer.add_rows({"x": np.arange(5)})
    for number in range(5):
        writer.video("cam").add_frame(s.picture(number))
    staged = writer.finish("t")
    rows = pq.read_table(staged.folder / "cam.images.parquet")["image"].to_pylist()
    assert [row["path"] for row in rows] == [f"frame-{i:06d}.png" for i in range(5)]
    assert rows[0]["bytes"].startswith(b"\x89PNG")


def test_mistakes_are_named(tmp_path: Path) -> None:
    writer = EpisodeWriter(tmp_path / "e", s.FEATURES, s.FPS, 5)
    good = s.rows(0, 5)
    with pytest.raises(UsageError, match="'action' is missing"):
        writer.add_rows({"observation.state": good["observation.state"]})
    with pytest.raises(UsageError, match=r"'action': rows of \[3\]"):
        writer.add_rows({**good, "action": good["observation.state"]})
    with pytest.raises(UsageError, match="numbers of rows"):
        writer.add_rows({**good, "action": good["action"][:3]})
    with pytest.raises(UsageError, match="no camera"):
        writer.video("action")
    writer.add_rows(good)
    writer.video(s.CAMERA).add_frame(s.picture(0))
    with pytest.raises(DataError, match="has 1 frames, and others have 5"):
        writer.finish("t")
    assert not (tmp_path / "e").exists()
    with pytest.raises(UsageError, match="already"):
        writer.add_rows(good)
    with pytest.raises(UsageError, match="no camera"):
        EpisodeWriter(tmp_path / "f", s.FEATURES, s.FPS, 5, {"what": VideoSettings()})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UsageError, match="not empty"):
        EpisodeWriter(tmp_path / "full", s.FEATURES, s.FPS, 5)


def test_an_abandoned_episode_leaves_nothing(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "e", s.FEATURES, s.FPS, 5) as writer:
        writer.add_rows(s.rows(0, 5))
        writer.video(s.CAMERA).add_frame(s.picture(0))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="no finished episode"):
        StagedEpisode.open(tmp_path / "e")


def test_an_unfinished_or_damaged_folder_is_no_episode(tmp_path: Path) -> None:
    staged = s.stage(tmp_path / "e")
    (staged.folder / "episode.json").write_text('{"format": 2}')
    with pytest.raises(CorruptFile):
        StagedEpisode.open(staged.folder)


def test_non_finite_values_pass_and_are_counted(tmp_path: Path) -> None:
    features = {"x": Feature("float32", (2,))}
    writer = EpisodeWriter(tmp_path / "e", features, s.FPS, 3)
    writer.add_rows({"x": [[1, 2], [np.nan, np.inf], [3, 4]]})
    staged = writer.finish("t")
    assert staged.stats()["x"].non_finite == 2
    assert np.isnan(pq.read_table(staged.folder / "rows.parquet")["x"].to_pylist()[1][0])


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
        writer = EpisodeWriter(disk / "e", features, s.FPS, 500, {"cam": VideoSettings(codec)})
        with pytest.raises(StorageError, match="No space left"):
            sink = writer.video("cam")
            for _ in range(500):
                writer.add_rows({"x": np.random.default_rng(1).normal(size=(40, 64))})
                for _ in range(40):
                    sink.add_jpeg(data)
            writer.finish("t")
        writer.abandon()
        assert list(disk.iterdir()) == []
