"""What a killed recording left comes back: every episode whose bytes are on the disk."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli import main as penstock
from penstock.dataset import check as doctor
from penstock.dataset import layout
from penstock.dataset.footer import add_footer, readable_rows
from penstock.dataset.reader import Dataset
from penstock.dataset.rescue import rescue
from penstock.errors import DataError, PenstockError, UsageError

hand = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("handmade.py"))))
SCHEMA = layout.arrow_schema(hand.FEATURES, "v3.0")
SHAPES = [6 if name == "matrix" else None for name in SCHEMA.names]
DATA = "data/chunk-000/file-000.parquet"


def rows(episode: int) -> pa.Table:
    one = hand.values(episode)
    length = hand.LENGTHS[episode]
    one[hand.WRIST] = [hand.picture(episode, k, hand.WRIST) for k in range(length)]
    return hand.rows_table(one, "v3.0")


def unclosed(path: Path) -> list[int]:
    """Write a data file as a killed writer leaves it; return where each episode ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = []
    writer = pq.ParquetWriter(path, SCHEMA, compression="snappy", use_dictionary=True)
    for episode in range(3):
        writer.write_table(rows(episode))
        ends.append(path.stat().st_size)
    data = path.read_bytes()
    writer.close()
    path.write_bytes(data)
    return ends


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A recording of three episodes in one file each, killed before the end."""
    root = hand.make_dataset(tmp_path / "set", files=(0, 0, 0))
    shutil.rmtree(root / "data")
    unclosed(root / DATA)
    shutil.rmtree(root / "meta/episodes")
    return root


def same(out: Path, expected: list[int]) -> None:
    """See that a dataset has these episodes, frame by frame, and is sound."""
    dataset = Dataset(out)
    assert [len(episode) for episode in dataset.episodes] == [hand.LENGTHS[n] for n in expected]
    for episode, number in zip(dataset.episodes, expected, strict=True):
        assert episode.tasks == (hand.TASKS[number % 2],)
        wanted = hand.values(number)
        for k, frame in enumerate(episode.frames()):
            for name in ("observation.state", "action", "matrix", "reward", "note"):
                assert np.array_equal(frame[name], wanted[name][k])
            for camera in (hand.TOP, hand.SIDE, hand.WRIST):
                off = frame[camera].astype(int) - hand.picture(number, k, camera)
                assert np.abs(off).mean() < 8
    assert not [str(f) for f in doctor.check(out).findings if f.severity == "error"]


def digest(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_everything_on_the_disk_comes_back(killed: Path, tmp_path: Path) -> None:
    before = digest(killed)
    report = rescue(killed, tmp_path / "out")
    assert (report.episodes, report.frames, report.lost) == (3, sum(hand.LENGTHS), [])
    same(tmp_path / "out", [0, 1, 2])
    assert digest(killed) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "set"]


def test_the_command(killed: Path, capsys: pytest.CaptureFixture) -> None:
    info = json.loads((killed / layout.INFO_PATH).read_text())
    info["total_episodes"] = 4
    (killed / layout.INFO_PATH).write_text(json.dumps(info))
    assert penstock(["rescue", str(killed), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["episodes"] == 3 and len(found["lost"]) == 1
    same(killed.with_name("set_rescued"), [0, 1, 2])
    assert penstock(["rescue", str(killed)]) == 2  # it exists


def test_rows_that_were_being_written_are_lost(killed: Path, tmp_path: Path) -> None:
    ends = unclosed(killed / DATA)
    data = (killed / DATA).read_bytes()
    (killed / DATA).write_bytes(data[: ends[1] + (ends[2] - ends[1]) // 2])
    report = rescue(killed, tmp_path / "out")
    assert report.episodes == 2 and report.lost
    same(tmp_path / "out", [0, 1])


def faststart(path: Path) -> None:
    """Move the table of frames to the beginning, as lerobot does when it joins videos."""
    whole = path.with_suffix(".new.mp4")
    with (
        av.open(str(path)) as source,
        av.open(str(whole), "w", options={"movflags": "faststart"}) as out,
    ):
        stream = out.add_stream_from_template(source.streams.video[0], opaque=True)
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    whole.replace(path)


def test_half_a_video_gives_the_episodes_in_it(killed: Path, tmp_path: Path) -> None:
    video = killed / layout.V30.video_path(hand.TOP, 0, 0)
    faststart(video)
    with av.open(str(video)) as container:
        packets = [p for p in container.demux(video=0) if p.size]
        end = packets[hand.LENGTHS[0] + hand.LENGTHS[1] + 3].pos
    with video.open("r+b") as file:
        file.truncate(end)
    report = rescue(killed, tmp_path / "out")
    assert report.episodes == 2 and "episode 2" in " ".join(report.lost)
    same(tmp_path / "out", [0, 1])


def test_a_video_whose_copy_was_cut_off_comes_from_the_temporary_folder(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lerobot joins into the system's temporary folder, and moves that: a copy, on another disk."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    video = killed / layout.V30.video_path(hand.TOP, 0, 0)
    faststart(video)
    data = video.read_bytes()
    (temporary / "tmp1.mp4").write_bytes(bytes(len(data) + 1))  # of another recording
    (temporary / "tmp2.mp4").write_bytes(data)
    video.write_bytes(data[: max(len(data) // 2, 4500)])
    assert video.stat().st_size < len(data)
    before = digest(temporary)
    os.mkfifo(temporary / "tmp0.mp4")  # nobody waits for what another program may say
    report = rescue(killed, tmp_path / "out")
    (temporary / "tmp0.mp4").unlink()
    assert report.lost == [] and "tmp2.mp4" in " ".join(report.notes)
    same(tmp_path / "out", [0, 1, 2])
    assert digest(temporary) == before


def test_a_video_that_is_linked_to_nothing_is_told(killed: Path, tmp_path: Path) -> None:
    """As in a cache whose files were removed."""
    video = killed / layout.V30.video_path(hand.TOP, 0, 0)
    video.unlink()
    video.symlink_to(tmp_path / "gone.mp4")
    with pytest.raises(DataError, match="nothing came back"):  # all episodes were in it
        rescue(killed, tmp_path / "out")


@pytest.mark.parametrize("whole", [True, False])
def test_a_video_that_was_encoded_while_it_was_recorded(
    killed: Path, tmp_path: Path, whole: bool
) -> None:
    """With streaming_encoding: the rows are saved, the video not yet joined, or not yet whole."""
    for number, camera in enumerate((hand.TOP, hand.SIDE)):
        video = killed / layout.V30.video_path(camera, 0, 0)
        video.unlink()
        shown = [hand.picture(e, k, camera) for e in (0, 1) for k in range(hand.LENGTHS[e])]
        hand.write_video(video, shown)
        rest = killed / f"tmpab{number}" / f"{camera}_streaming.mp4"
        rest.parent.mkdir()
        hand.write_video(rest, [hand.picture(2, k, camera) for k in range(hand.LENGTHS[2])])
        if not whole:
            rest.write_bytes(rest.read_bytes()[:-200])
    report = rescue(killed, tmp_path / "out")
    assert bool(report.lost) != whole
    same(tmp_path / "out", [0, 1, 2] if whole else [0, 1])


def test_an_episode_under_way_that_is_encoded_at_once_is_told(killed: Path, tmp_path: Path) -> None:
    rest = killed / "tmpabc" / f"{hand.TOP}_streaming.mp4"
    rest.parent.mkdir()
    rest.write_bytes(b"\0\0\0\x20ftypisom")
    report = rescue(killed, tmp_path / "out")
    assert report.episodes == 3 and "episode 3" in " ".join(report.lost)
    same(tmp_path / "out", [0, 1, 2])


def test_pictures_that_waited_are_encoded(killed: Path, tmp_path: Path) -> None:
    for camera in (hand.TOP, hand.SIDE):
        video = killed / layout.V30.video_path(camera, 0, 0)
        video.unlink()
        shown = [hand.picture(e, k, camera) for e in (0, 1) for k in range(hand.LENGTHS[e])]
        hand.write_video(video, shown)
        folder = killed / "images" / camera / "episode-000002"
        folder.mkdir(parents=True)
        for k in range(hand.LENGTHS[2]):
            (folder / f"frame-{k:06d}.png").write_bytes(hand.png(hand.picture(2, k, camera)))
    rest = killed / "tmpabc"  # encoded, and not yet joined
    rest.mkdir()
    shown = [hand.picture(2, k, hand.SIDE) for k in range(hand.LENGTHS[2])]
    hand.write_video(rest / f"{hand.SIDE}_002.mp4", shown)
    report = rescue(killed, tmp_path / "out")
    assert report.lost == [] and len(report.notes) == 3
    same(tmp_path / "out", [0, 1, 2])


def test_an_episode_under_way_is_told(killed: Path, tmp_path: Path) -> None:
    folder = killed / "images" / hand.TOP / "episode-000003"
    folder.mkdir(parents=True)
    (folder / "frame-000000.png").write_bytes(hand.png(hand.picture(0, 0, hand.TOP)))
    report = rescue(killed, tmp_path / "out")
    assert report.episodes == 3 and "episode 3" in " ".join(report.lost)


def test_records_of_an_earlier_session_are_used(tmp_path: Path) -> None:
    root = hand.make_dataset(tmp_path / "set", files=(0, 0, 1))
    (root / "data/chunk-000/file-001.parquet").write_bytes(b"PAR1")
    report = rescue(root, tmp_path / "out")
    assert report.episodes == 2
    same(tmp_path / "out", [0, 1])


def test_a_cut_info_needs_another_dataset(killed: Path, tmp_path: Path) -> None:
    other = hand.make_dataset(tmp_path / "other")
    (killed / layout.INFO_PATH).write_text("")
    with pytest.raises(DataError, match="--like"):
        rescue(killed, tmp_path / "out")
    rescue(killed, tmp_path / "out", like=other)
    same(tmp_path / "out", [0, 1, 2])


def test_lost_tasks_get_their_numbers(killed: Path, tmp_path: Path) -> None:
    (killed / layout.V30.tasks).write_bytes(b"PAR1")
    report = rescue(killed, tmp_path / "out")
    assert len(report.lost) == 2
    assert Dataset(tmp_path / "out").tasks == ["task 0", "task 1"]


def test_what_cannot_be_rescued(tmp_path: Path, killed: Path) -> None:
    with pytest.raises(UsageError, match=r"v2\.1"):
        rescue(hand.make_dataset(tmp_path / "old", "v2.1"), tmp_path / "out")
    with pytest.raises(UsageError, match="lies in"):
        rescue(killed, killed / "out")
    (killed / DATA).write_bytes(b"PAR1")
    with pytest.raises(DataError, match="no rows"):
        rescue(killed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def bytes_of(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int], Path]:
    path = tmp_path_factory.mktemp("cut") / "rows.parquet"
    ends = unclosed(path)
    return path.read_bytes(), ends, path


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_cut_anywhere_gives_what_was_whole(
    bytes_of: tuple[bytes, list[int], Path], data: st.DataObject
) -> None:
    whole, ends, path = bytes_of
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    found = add_footer(path, SCHEMA, SHAPES)
    episodes = sum(end <= cut for end in ends)
    assert found == sum(hand.LENGTHS[:episodes])
    if found:
        expected = pa.concat_tables([rows(e) for e in range(episodes)])
        assert pq.read_table(path).equals(expected)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(4, 20_000), junk=st.binary(min_size=1, max_size=40))
def test_damage_is_never_taken_for_more(
    bytes_of: tuple[bytes, list[int], Path], at: int, junk: bytes
) -> None:
    whole, _, path = bytes_of
    path.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
    try:
        found = add_footer(path, SCHEMA, SHAPES)
    except PenstockError:
        return
    assert 0 <= found <= sum(hand.LENGTHS)
    assert 0 <= readable_rows(path) <= found
