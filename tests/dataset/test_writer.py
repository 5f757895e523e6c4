"""Committing, recovering, packing, appending, replacing: always a whole dataset."""

from __future__ import annotations

import errno
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness import remount, small_disk
from penstock.errors import CorruptFile, LockHeld, SaverClosed, StorageError, UsageError
from penstock.dataset import commit, layout, packing, swap
from penstock.dataset import writer as writing
from penstock.dataset.episode import EpisodeWriter
from penstock.media.images import ImageDecoder, to_rgb
from penstock.dataset.layout import Feature, FileLimits
from penstock.media.video import VideoSettings, probe, read_video
from penstock.dataset.writer import DatasetWriter

HERE = Path(__file__).parent
s = SimpleNamespace(**runpy.run_path(str(HERE / "staging.py")))
LENGTHS = [5 + number % 4 for number in range(20)]


def open_writer(out: Path, mode: str = "create", **more: object) -> DatasetWriter:
    more.setdefault("settings", {"x": 1})
    return DatasetWriter(out, s.FEATURES, s.FPS, "testbot", mode=mode, **more)


def info_of(out: Path) -> dict:
    return json.loads((out / "meta/info.json").read_bytes())


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def episodes_of(out: Path) -> list[dict]:
    paths = sorted(out.glob("meta/episodes/*/*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def check_v3(out: Path, episodes: int, first: int = 0) -> None:
    """Check everything that lerobot relies on, by itself."""
    info, rows = info_of(out), episodes_of(out)
    lengths = LENGTHS[:episodes]
    assert info["total_episodes"] == len(rows) == episodes
    assert info["total_frames"] == sum(lengths)
    assert info["splits"] == {"train": f"0:{episodes}"}
    assert [row["episode_index"] for row in rows] == list(range(episodes))
    assert [row["length"] for row in rows] == lengths
    starts = np.cumsum([0, *lengths])
    tasks = layout.read_tasks(pq.read_table(out / layout.TASKS_PATH))
    for row in rows:
        number = row["episode_index"]
        assert (row["dataset_from_index"], row["dataset_to_index"]) == (
            starts[number],
            starts[number + 1],
        )
        path = out / layout.data_path("v3.0", row["data/chunk_index"], row["data/file_index"])
        table = pq.read_table(path, filters=[("episode_index", "=", number)])
        assert table["index"].to_pylist() == list(range(starts[number], starts[number + 1]))
        assert table["frame_index"].to_pylist() == list(range(lengths[number]))
        times = np.arange(lengths[number]) / s.FPS
        assert np.array_equal(table["timestamp"].to_numpy(), times.astype(np.float32))
        assert {tasks[i] for i in table["task_index"].to_pylist()} == {f"task {number % 3}"}
        assert row["tasks"] == [f"task {number % 3}"]
        expected = s.rows(number, lengths[number])["observation.state"]
        assert np.array_equal(
            np.array(table["observation.state"].to_pylist(), np.float32), expected
        )
        key = f"videos/{s.CAMERA}"
        video = out / layout.video_path(
            "v3.0", s.CAMERA, row[f"{key}/chunk_index"], row[f"{key}/file_index"]
        )
        begin = row[f"{key}/from_timestamp"] * s.FPS
        assert begin == round(begin)
        seconds = row[f"{key}/to_timestamp"] - row[f"{key}/from_timestamp"]
        assert seconds == pytest.approx(lengths[number] / s.FPS, abs=1e-12)
        frames = read_video(video, round(begin), lengths[number])
        shown = [(number * 16 + i) % 256 for i in range(lengths[number])]
        assert [s.number_of(frame) for frame in frames] == shown
    stats = json.loads((out / layout.STATS_PATH).read_bytes())
    values = np.concatenate([s.rows(i, n)["observation.state"] for i, n in enumerate(lengths)])
    np.testing.assert_allclose(stats["observation.state"]["mean"], values.mean(0, np.float64))
    np.testing.assert_allclose(
        stats["observation.state"]["q90"], np.quantile(values.astype(np.float64), 0.9, axis=0)
    )
    assert stats["index"]["max"] == [sum(lengths) - 1]
    assert stats[s.CAMERA]["count"] == [sum(lengths)]
    assert min(np.ravel(stats[s.CAMERA]["std"])) > 0.05


@pytest.mark.parametrize("finalize", [False, True])
def test_a_dataset_is_whole_after_every_commit(tmp_path: Path, finalize: bool) -> None:
    out = tmp_path / "d"
    with open_writer(out) as writer:
        for number in range(4):
            staged = s.stage(tmp_path / "e", number, LENGTHS[number], f"task {number % 3}")
            assert writer.commit(staged, {"n": number}) == number
            assert not (tmp_path / "e").exists()
            check_v3(out, number + 1)
        assert writer.committed == [{"n": number} for number in range(4)]
        if finalize:
            assert writer.finalize()
    check_v3(out, 4)
    files = [path for path in s.files_of(out) if path.startswith(("data", "videos", "meta/epi"))]
    assert len(files) == (3 if finalize else 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]
    assert list(info_of(out)["features"][s.CAMERA]["info"])[:3] == [
        *("video.height", "video.width", "video.codec")
    ]


def test_v2_1(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 4, version="v2.1", limits=FileLimits(files_per_chunk=3))
    info = info_of(out)
    assert (info["total_episodes"], info["total_videos"], info["total_chunks"]) == (4, 4, 2)
    lines = lines_of(out / layout.EPISODES_JSONL)
    assert lines[3] == {"episode_index": 3, "tasks": ["task 0"], "length": LENGTHS[3]}
    assert [line["task"] for line in lines_of(out / layout.TASKS_JSONL)] == [
        *("task 0", "task 1", "task 2")
    ]
    stats = lines_of(out / layout.EPISODES_STATS_JSONL)
    assert list(stats[2]["stats"]["action"]) == ["min", "max", "mean", "std", "count"]
    for number in range(4):
        table = pq.read_table(out / layout.data_path("v2.1", number // 3, number))
        assert table.num_rows == LENGTHS[number]
        assert set(table["episode_index"].to_pylist()) == {number}
        video = out / layout.video_path("v2.1", s.CAMERA, number // 3, number)
        assert probe(video).frames == LENGTHS[number]


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_resuming_gives_the_same_bytes(tmp_path: Path, version: str) -> None:
    s.write_dataset(tmp_path / "whole", 5, version=version)
    for count in (0, 2, 3):
        s.write_dataset(tmp_path / "parts", count, version=version, mode="resume", finalize=False)
    s.write_dataset(tmp_path / "parts", 5, version=version, mode="resume")
    assert s.files_of(tmp_path / "whole") == s.files_of(tmp_path / "parts")
    s.write_dataset(tmp_path / "parts", 5, version=version, mode="resume")  # nothing left to do
    assert s.files_of(tmp_path / "whole") == s.files_of(tmp_path / "parts")


def test_packing_follows_the_size_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "d"
    monkeypatch.setattr(packing, "_MB", 3000)
    s.write_dataset(out, 7, limits=FileLimits(files_per_chunk=2))
    check_v3(out, 7)
    videos = sorted(out.glob("videos/*/*/*.mp4"))
    assert len(videos) < 7 and all(path.parent.name.startswith("chunk-") for path in videos)
    with open_writer(out, "append") as writer:
        staged = s.stage(tmp_path / "e", 7, LENGTHS[7], "task 1")
        assert writer.commit(staged, {"n": 7}) == 7
        check_v3(out, 8)
        writer.finalize()
    check_v3(out, 8)


def test_videos_of_other_coding_are_not_joined(tmp_path: Path) -> None:
    out = tmp_path / "d"
    with open_writer(out) as writer:
        for number, crf in enumerate((23, 23, 40)):
            episode = EpisodeWriter(
                tmp_path / "e", s.FEATURES, s.FPS, 5, {s.CAMERA: VideoSettings("h264", crf=crf)}
            )
            episode.add_rows(s.rows(number, 5))
            for i in range(5):
                episode.video(s.CAMERA).add_frame(s.picture(number * 16 + i))
            writer.commit(episode.finish("t"), {})
        writer.finalize()
    row = episodes_of(out)[2]
    video = out / layout.video_path("v3.0", s.CAMERA, 0, row[f"videos/{s.CAMERA}/file_index"])
    start = round(row[f"videos/{s.CAMERA}/from_timestamp"] * s.FPS)
    assert s.number_of(next(read_video(video, start, 1))) == 32


def test_where_folders_cannot_be_exchanged_two_renames_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "_rename_exchange", lambda a, b: False)
    s.write_dataset(tmp_path / "d", 3)
    check_v3(tmp_path / "d", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_death_between_the_two_renames_is_repaired(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 3, finalize=False)
    expected = s.files_of(out)
    os.rename(out, swap.sibling(out, "old"))
    (swap.sibling(out, "new")).mkdir()
    with open_writer(out, "resume") as writer:
        assert writer.total_episodes == 3
    assert s.files_of(out) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_without_hard_links_the_dataset_stays_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "link", refuse)
    with open_writer(tmp_path / "d") as writer:
        for number in range(2):
            writer.commit(s.stage(tmp_path / "e", number, LENGTHS[number], f"task {number}"), {})
        assert not writer.finalize()
    check_v3(tmp_path / "d", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_the_lock_holds_through_the_packing(tmp_path: Path) -> None:
    out = tmp_path / "d"
    with open_writer(out) as writer:
        for number in range(2):
            writer.commit(s.stage(tmp_path / "e", number, LENGTHS[number], f"task {number}"), {})
        with pytest.raises(LockHeld):
            open_writer(out, "resume")
        writer.finalize()
        with pytest.raises(LockHeld):
            open_writer(out, "resume")
    open_writer(out, "resume").close()


def test_modes_refuse_what_they_must(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 2)
    with pytest.raises(UsageError, match="--resume"):
        open_writer(out)
    with pytest.raises(UsageError, match=r"settings\.x = 1, and not 2"):
        open_writer(out, "resume", settings={"x": 2})
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
            open_writer(foreign, mode)
    assert (foreign / "thesis.tex").read_text() == "years of work"
    with pytest.raises(UsageError, match="a file"):
        open_writer(foreign / "thesis.tex")
    with pytest.raises(UsageError):
        DatasetWriter(tmp_path / "n", {}, 10)
    with pytest.raises(UsageError):
        DatasetWriter(tmp_path / "n", s.FEATURES, 0)
    assert not (tmp_path / "n").exists()
    check_v3(out, 2)


def test_overwriting_keeps_the_old_until_the_first_commit(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 3)
    old = s.files_of(out)
    with open_writer(out, "overwrite", settings={"x": 2}):
        pass
    assert s.files_of(out) == old  # nothing came of it
    with open_writer(out, "overwrite", settings={"x": 2}) as writer:
        kept = swap.sibling(out, "replaced")
        assert s.files_of(kept) == old
        writer.commit(s.stage(tmp_path / "e", 0, 5, "task 0"), {})
        assert not kept.exists()
    check_v3(out, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_episodes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with open_writer(tmp_path / "d") as writer:
        writer.commit(s.stage(tmp_path / "a", 0, 5, "task 0"), {})
        with pytest.raises(UsageError, match="fps"):
            writer.commit(s.stage(tmp_path / "b", fps=20), {})
        with pytest.raises(UsageError, match=r"video\.codec is h264"):
            writer.commit(s.stage(tmp_path / "c", codec="copy"), {})
    check_v3(tmp_path / "d", 1)
    with pytest.raises(SaverClosed):
        writer.commit(tmp_path / "b", {})


def test_failures_are_remembered(tmp_path: Path) -> None:
    with open_writer(tmp_path / "d") as writer:
        writer.failed({"bag": "x.bag"}, "too short")
    with open_writer(tmp_path / "d", "resume") as writer:
        assert writer.failures == [{"source": {"bag": "x.bag"}, "reason": "too short"}]
        assert writer.committed == []


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_every_failing_step_of_a_commit_can_be_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Let the n-th fsync of a commit fail, for every n, and go on."""
    out = tmp_path / "d"
    real, calls, fail_at = os.fsync, 0, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with open_writer(out, version=version) as writer:
        writer.commit(s.stage(tmp_path / "e", 0, LENGTHS[0], "task 0"), {"n": 0})
        staged = s.stage(tmp_path / "e", 1, LENGTHS[1], "task 1")
        before = s.files_of(out)
        monkeypatch.setattr(os, "fsync", fsync)
        while True:
            calls, fail_at = 0, fail_at + 1
            try:
                writer.commit(staged, {"n": 1})
                break
            except StorageError as error:
                assert "free some space" in str(error)
            monkeypatch.setattr(os, "fsync", real)
            assert s.files_of(out) == before, fail_at
            assert writer.total_episodes == 1
            monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.undo()
    assert fail_at > 8
    s.write_dataset(tmp_path / "whole", 2, version=version, finalize=False)
    assert s.files_of(out) == s.files_of(tmp_path / "whole")


@pytest.mark.parametrize("step", ["place", "journal", "info"])
def test_recovery_rolls_to_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Stop dead in the middle of a commit: no undoing, like a kill."""
    out = tmp_path / "d"
    s.write_dataset(out, 2, finalize=False)
    before = s.files_of(out)

    class Death(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Death

    writer = open_writer(out, "resume")
    staged = s.stage(writer.staging("e2"), 2, LENGTHS[2], "task 2")
    monkeypatch.setattr(DatasetWriter, "_undo", lambda *_: None)
    if step == "place":
        monkeypatch.setattr(commit, "write_stats", die)
    elif step == "journal":
        monkeypatch.setattr(writer._opened.journal, "append", die)
    else:
        monkeypatch.setattr(writing, "info_bytes", die)
    with pytest.raises(Death):
        writer.commit(staged, {"number": 2})
    writer._lock.release()
    monkeypatch.undo()
    for _ in range(2):  # idempotent
        with open_writer(out, "resume") as writer:
            assert writer.total_episodes == (3 if step == "info" else 2)
    if step == "info":
        check_v3(out, 3)
    else:
        assert s.files_of(out) == before


def test_a_torn_or_damaged_journal(tmp_path: Path) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 3, finalize=False)
    journal = out / ".penstock" / "journal.jsonl"
    data = journal.read_bytes()
    shutil.copytree(out, tmp_path / "copy")
    (tmp_path / "copy/.penstock/journal.jsonl").write_bytes(data[:-20])  # its last line is torn
    # The statistics of two episodes are gone: they were replaced when the third was committed.
    with pytest.raises(CorruptFile, match="stats-000002"):
        open_writer(tmp_path / "copy", "resume")
    journal.write_bytes(data + b"0000 {torn")
    with open_writer(out, "resume") as writer:
        assert writer.total_episodes == 3
    assert journal.read_bytes() == data
    journal.write_bytes(data[:40] + b"X" + data[41:])
    with pytest.raises(CorruptFile, match="line 1"):
        open_writer(out, "resume")


def test_committed_files_that_are_gone_are_noticed(tmp_path: Path) -> None:
    s.write_dataset(tmp_path / "d", 2, finalize=False)
    (tmp_path / "d" / layout.data_path("v3.0", 0, 1)).write_bytes(b"short")
    with pytest.raises(CorruptFile, match=r"file-001\.parquet has 5 bytes"):
        open_writer(tmp_path / "d", "resume")


def forget_private(out: Path) -> None:
    """Make it a dataset that someone else wrote."""
    shutil.rmtree(out / ".penstock")
    (out / ".penstock.lock").unlink()


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_appending_to_a_dataset_of_other_making(tmp_path: Path, version: str) -> None:
    out = tmp_path / "d"
    s.write_dataset(out, 3, version=version)
    forget_private(out)
    info = info_of(out) | {"their": "own key"}
    (out / layout.INFO_PATH).write_text(json.dumps(info))
    with pytest.raises(UsageError, match="--append"):
        open_writer(out, "resume", version=version)
    for number in (3, 4):
        with open_writer(out, "append", version=version) as writer:
            staged = s.stage(tmp_path / "e", number, LENGTHS[number], f"task {number % 3}")
            assert writer.commit(staged, {"n": number}) == number
            writer.finalize()
    assert info_of(out)["their"] == "own key"
    if version == "v3.0":
        check_v3(out, 5)
    else:
        assert info_of(out)["total_frames"] == sum(LENGTHS[:5])
        lines = lines_of(out / layout.EPISODES_JSONL)
        assert [line["length"] for line in lines] == LENGTHS[:5]


def test_a_picture_feature_goes_into_the_data_file(tmp_path: Path) -> None:
    feature = Feature("image", (3, s.HEIGHT, s.WIDTH), ["channels", "height", "width"])
    features = {"x": Feature("float32", (1,)), "cam": feature}
    with DatasetWriter(tmp_path / "d", features, s.FPS) as writer:
        for number in range(2):
            episode = EpisodeWriter(
                tmp_path / "e", features, s.FPS, 70, {"cam": VideoSettings("png")}
            )
            episode.add_rows({"x": np.arange(70)})
            for i in range(70):
                episode.video("cam").add_frame(s.picture(number * 70 + i))
            writer.commit(episode.finish("t"), {})
        writer.finalize()
    assert info_of(tmp_path / "d")["video_path"] is None
    table = pq.read_table(tmp_path / "d" / layout.data_path("v3.0", 0, 0))
    assert table.num_rows == 140
    assert table.schema.equals(layout.arrow_schema(features, "v3.0"))
    pixels = [to_rgb(ImageDecoder().png(row["bytes"])) for row in table["cam"].to_pylist()]
    assert [s.number_of(picture) for picture in pixels] == list(range(140))


def test_no_heavy_module_is_loaded(tmp_path: Path) -> None:
    code = "import sys, penstock.dataset.writer; assert not {'torch', 'pandas'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_failing_step_of_the_packing_leaves_the_dataset_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "d"
    s.write_dataset(tmp_path / "whole", 3)
    s.write_dataset(out, 3, finalize=False)
    before = s.files_of(out)
    real, calls, fail_at = os.fsync, 0, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    while True:
        calls, fail_at = 0, fail_at + 1
        with open_writer(out, "resume") as writer:
            monkeypatch.setattr(os, "fsync", fsync)
            try:
                writer.finalize()
                break
            except StorageError:
                pass
            finally:
                monkeypatch.setattr(os, "fsync", real)
        done = s.files_of(out)
        # The last call comes after the exchange: the packing is done, and only not proven durable.
        assert done in (before, s.files_of(tmp_path / "whole"))
        if done != before:
            break
    assert fail_at > 5
    open_writer(out, "resume").close()
    assert s.files_of(out) == s.files_of(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "whole"]


@pytest.mark.parametrize("size_kb", [40, 60, 80, 100, 120, 160])
def test_a_full_disk_stops_a_commit_and_loses_nothing(tmp_path: Path, size_kb: int) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, f"size={size_kb}k") as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        done = 0
        try:
            with open_writer(disk / "d") as writer:
                for number in range(20):
                    staged = s.stage(tmp_path / "e", number, LENGTHS[number], f"task {number % 3}")
                    writer.commit(staged, {"number": number})
                    done += 1
        except StorageError as error:
            assert "No space left" in str(error)
        assert done < 20
        assert (tmp_path / "e").exists()  # the episode that did not fit is still staged
        remount(disk, "size=20m")
        if done:
            check_v3(disk / "d", done)
        s.write_dataset(disk / "d", 6, mode="resume")
        check_v3(disk / "d", max(done, 6))
        assert [path.name for path in disk.iterdir()] == ["d"]
