"""Editing datasets: frames that stay are the same to the bit, numbers and statistics are right."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest

from penstock.cli import main as penstock
from penstock.core.interrupt import check_stop
from penstock.dataset import build
from penstock.dataset import check as doctor
from penstock.dataset.edit import Edits, edit, undo
from penstock.dataset.layout import AUTO_FEATURES
from penstock.dataset.plan import Built
from penstock.dataset.reader import Dataset
from penstock.dataset.swap import sibling
from penstock.dataset.writer import DatasetWriter
from penstock.errors import PenstockError, UsageError
from powerloss import has_strace

HERE = Path(__file__).parent
s = SimpleNamespace(**runpy.run_path(str(HERE / "staging.py")))
hand = SimpleNamespace(**runpy.run_path(str(HERE / "handmade.py")))
VERSIONS = ["v3.0", "v2.1"]
COUNT = 6


@pytest.fixture(params=VERSIONS)
def dataset(tmp_path, request) -> Path:
    out = tmp_path / "data set"
    s.write_dataset(out, COUNT, version=request.param)
    return out


def frames(path: Path, episode: int) -> list[tuple]:
    """Return the content of every frame: its numbers, a digest of its pictures, its task."""
    found = []
    for frame in Dataset(path).episode(episode).frames():
        pictures = hashlib.blake2b(np.ascontiguousarray(frame[s.CAMERA])).hexdigest()
        numbers = [frame[n].tobytes() for n in ("observation.state", "action")]
        found.append((*numbers, pictures, frame["task"]))
    return found


def every(path: Path) -> list[list[tuple]]:
    return [frames(path, number) for number in range(len(Dataset(path)))]


def check(path: Path) -> list[str]:
    return [str(finding) for finding in doctor.check(path).findings]


def test_delete(dataset):
    before = every(dataset)
    report = edit(dataset, Edits(delete=[1, 4]))
    assert (report.episodes_before, report.episodes, report.encoded) == (6, 4, 0)
    assert every(dataset) == [before[k] for k in (0, 2, 3, 5)]
    assert check(dataset) == []


def test_keep_leaves_files_that_stay_alone(tmp_path):
    out = tmp_path / "out"
    s.write_dataset(out, COUNT, version="v2.1")
    video = next((out / "videos").rglob("episode_000000.mp4"))
    inode = video.stat().st_ino
    report = edit(out, Edits(keep=[0, 1, 2]))
    assert video.stat().st_ino == inode
    assert report.kept_files == report.files == 6


def test_trim_and_split(dataset):
    before = every(dataset)
    edit(dataset, Edits(trim={1: (2, 5)}, split={3: [1, 4]}))
    after = every(dataset)
    v3 = Dataset(dataset).version == "v3.0"
    expected = [before[0], before[1][2:5], before[2]]
    expected += [before[3][:1], before[3][1:4], before[3][4:], *before[4:]]
    if v3:
        assert after == expected
    else:  # a video of its own that begins between key frames is encoded again
        plain = [[(*frame[:2], frame[3]) for frame in episode] for episode in after]
        assert plain == [[(*frame[:2], frame[3]) for frame in episode] for episode in expected]
    errors = [text for text in check(dataset) if text.startswith("error")]
    assert errors == []
    pictures = [s.number_of(f[s.CAMERA]) for f in Dataset(dataset).episode(1).frames()]
    assert pictures == [(16 + k) % 256 for k in (2, 3, 4)]


def test_frames_in_the_middle_are_taken_out(dataset):
    before = every(dataset)
    edit(dataset, Edits(trim={3: (1, 8)}, cut={0: [(1, 2), (3, 5)], 3: [(2, 4), (5, 6)]}))
    after = every(dataset)
    expected = [before[0][:1], before[0][2:3], *before[1:3]]
    expected += [before[3][1:2], before[3][4:5], before[3][6:8], *before[4:]]
    plain = [[(*frame[:2], frame[3]) for frame in episode] for episode in after]
    assert plain == [[(*frame[:2], frame[3]) for frame in episode] for episode in expected]
    if Dataset(dataset).version == "v3.0":
        assert after == expected
    assert [text for text in check(dataset) if text.startswith("error")] == []
    shown = [s.number_of(f[s.CAMERA]) for f in Dataset(dataset).episode(6).frames()]
    assert len(shown) == 2 and shown[1] == shown[0] + 1


def test_relabel_rename_and_drop(dataset):
    before = every(dataset)
    edit(
        dataset,
        Edits(relabel={2: "stack"}, rename={"action": "command"}, drop=["observation.state"]),
    )
    now = Dataset(dataset)
    assert now.episode(2).tasks == ("stack",)
    assert "command" in now.features and "action" not in now.features
    assert "observation.state" not in now.features
    command = now.episode(3).columns(["command"])["command"]
    assert [row.tobytes() for row in command] == [frame[1] for frame in before[3]]
    assert check(dataset) == []


def test_a_camera_can_be_renamed_and_dropped(dataset):
    edit(dataset, Edits(rename={s.CAMERA: "observation.images.top"}))
    assert Dataset(dataset).camera_keys == ["observation.images.top"]
    assert check(dataset) == []
    edit(dataset, Edits(drop=["observation.images.top"]))
    assert Dataset(dataset).camera_keys == []
    assert list((dataset / "videos").rglob("*.mp4")) == []
    assert check(dataset) == []


def test_statistics_are_those_of_a_conversion_of_the_same_frames(tmp_path):
    whole, some = tmp_path / "whole", tmp_path / "some"
    s.write_dataset(whole, COUNT)
    with s.open_writer(some) as writer:
        for number in (0, 2, 5):
            s.commit(writer, number)
        writer.build()
    edit(whole, Edits(keep=[0, 2, 5]))
    edited, made = Dataset(whole).stats(), Dataset(some).stats()
    assert edited.keys() == made.keys()
    for name in made:
        exact = ("min", "max", "mean", "std", "count") if name == s.CAMERA else made[name]
        for stat in exact:
            np.testing.assert_allclose(edited[name][stat], made[name][stat], rtol=1e-12, atol=1e-12)
    for (_, a), (_, b) in zip(
        Dataset(whole).episode_stats(), Dataset(some).episode_stats(), strict=True
    ):
        for name in a:
            for stat in a[name]:
                np.testing.assert_array_equal(a[name][stat], b[name][stat])


def test_undo_and_redo(dataset):
    before = s.files_of(dataset)
    edit(dataset, Edits(delete=[0]))
    after = s.files_of(dataset)
    undo(dataset)
    assert s.files_of(dataset) == before
    undo(dataset)
    assert s.files_of(dataset) == after
    undo(dataset)
    with s.open_writer(dataset, "resume", version=Dataset(dataset).version) as writer:
        s.commit(writer, COUNT)
        writer.build()
    with pytest.raises(UsageError, match="nothing to undo"):
        undo(dataset)


def test_an_edited_dataset_goes_on_and_deleted_episodes_stay_away(dataset):
    version = Dataset(dataset).version
    before = every(dataset)
    edit(dataset, Edits(delete=[0, 3]))
    s.write_dataset(dataset, COUNT + 1, version=version, mode="resume")
    after = every(dataset)
    assert after[:4] == [before[k] for k in (1, 2, 4, 5)]
    assert len(after) == 5
    assert check(dataset) == []
    built = Built.read(dataset)
    assert [len(unit.episodes) for unit in built.units] == [0, 1, 1, 0, 1, 1, 1]


def test_merge_a_larger_one_into_a_smaller_one(tmp_path, dataset):
    small = tmp_path / "small"
    edit(dataset, Edits(keep=[0]), out=small)
    both = [*every(small), *every(dataset)]
    edit(small, Edits(), others=[dataset])
    assert every(small) == both
    assert check(small) == []


def test_merge_and_out(tmp_path, dataset):
    other, out = tmp_path / "other", tmp_path / "sub" / "out"
    version = Dataset(dataset).version
    s.write_dataset(other, 3, version=version)
    mine, theirs = s.files_of(dataset), s.files_of(other)
    expected = every(dataset) + every(other)
    edit(dataset, Edits(), others=[other], out=out)
    assert every(out) == expected
    assert check(out) == []
    assert s.files_of(dataset) == mine and s.files_of(other) == theirs
    assert list(tmp_path.glob(".*penstock*")) == []
    with pytest.raises(UsageError, match="exists"):
        edit(dataset, Edits(), others=[other], out=out)


def test_reencode(dataset):
    report = edit(dataset, Edits(codec="av1", keep=[0, 1]))
    assert report.encoded == 2
    now = Dataset(dataset)
    assert now.features[s.CAMERA].info["video.codec"] == "av1"
    assert [s.number_of(f[s.CAMERA]) for f in now.episode(1).frames()] == list(range(16, 22))
    assert check(dataset) == []
    assert not (dataset / ".penstock" / "scratch").exists()


def test_videos_with_long_groups_and_b_frames_keep_every_frame(tmp_path):
    """Every cut of a video whose frames need others before and behind them."""
    out = tmp_path / "out"
    s.write_dataset(out, 1)
    video = next((out / "videos").rglob("*.mp4"))
    count = Dataset(out).episode(0).length
    with av.open(str(video), "w") as container:
        stream = container.add_stream("libx264", rate=s.FPS)
        stream.width, stream.height, stream.pix_fmt = s.WIDTH, s.HEIGHT, "yuv420p"
        stream.codec_context.options = {
            "g": "250",
            "bf": "3",
            "b_strategy": "0",
            "b-pyramid": "normal",
        }
        stream.codec_context.time_base = Fraction(1, s.FPS)
        for k in range(count):
            frame = av.VideoFrame.from_ndarray(s.picture(k), "rgb24")
            frame.pts = k
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    whole = [s.number_of(f[s.CAMERA]) for f in Dataset(out).episode(0).frames()]
    assert whole == list(range(count))
    for start in range(count):
        for stop in range(start + 1, count + 1):
            cut = tmp_path / f"cut-{start}-{stop}"
            edit(out, Edits(trim={0: (start, stop)}), out=cut)
            shown = [s.number_of(f[s.CAMERA]) for f in Dataset(cut).episode(0).frames()]
            assert shown == list(range(start, stop))
            edit(cut, Edits(relabel={None: "again"}))
            shown = [s.number_of(f[s.CAMERA]) for f in Dataset(cut).episode(0).frames()]
            assert shown == list(range(start, stop))


@pytest.mark.parametrize(
    ("edits", "what"),
    [
        (Edits(delete=[6]), "no episode 6"),
        (Edits(keep=[]), "nothing would be left"),
        (Edits(trim={0: (0, 99)}), "frames 0 to 4"),
        (Edits(trim={0: (3, 3)}), "frames 0 to 4"),
        (Edits(split={0: [7]}), "frames 0 to 4"),
        (Edits(split={0: [0]}), "frames 0 to 4"),
        (Edits(cut={0: [(1, 9)]}), "frames 0 to 4"),
        (Edits(cut={0: [(2, 2)]}), "frames 0 to 4"),
        (Edits(trim={0: (2, 5)}, cut={0: [(1, 3)]}), "frames 0 to 4"),
        (Edits(keep=[0], cut={0: [(0, 5)]}), "nothing would be left"),
        (Edits(drop=["x"]), "no feature 'x'"),
        (Edits(rename={"action": "observation.state"}), "taken"),
        (Edits(rename={"action": "a/b"}), "cannot name"),
        (Edits(codec="mp3"), "not known"),
    ],
)
def test_what_cannot_be_done_changes_nothing(dataset, edits, what):
    before = s.files_of(dataset)
    with pytest.raises(UsageError, match=what):
        edit(dataset, edits)
    assert s.files_of(dataset) == before
    assert not sibling(dataset, "new").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["relabel", " ", "0"], "task"),
        (["delete", "4-2"], "4-2"),
        (["delete", "-1"], "-1"),
        (["cut", "0=3:3"], "3:3"),
    ],
)
def test_words_that_cannot_be_meant_change_nothing(dataset, capsys, words, what):
    before = s.files_of(dataset)
    assert penstock(["edit", str(dataset), *words]) == 2
    assert what in capsys.readouterr().err
    assert s.files_of(dataset) == before


def test_units_that_wait_are_built_first(tmp_path):
    out = tmp_path / "out"
    s.write_dataset(out, 2)
    with s.open_writer(out, "resume") as writer:
        s.commit(writer, 2)
    with pytest.raises(UsageError, match="penstock build"):
        edit(out, Edits(delete=[0]))


def test_a_full_disk_leaves_the_dataset_as_it_was(dataset, monkeypatch):
    before = s.files_of(dataset)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.dataset.swap.exchange", full)
    with pytest.raises(PenstockError, match="No space"):
        edit(dataset, Edits(delete=[0]))
    assert s.files_of(dataset) == before
    assert not sibling(dataset, "new").exists()


def test_a_signal_stops_it_before_anything_is_exchanged(tmp_path, monkeypatch):
    """An edit, and a build; after which both can be done."""
    out = tmp_path / "out"
    s.write_dataset(out, 2)
    before = s.files_of(out)
    writing = build.join

    def interrupted(*words):
        os.kill(os.getpid(), signal.SIGTERM)
        with suppress(KeyboardInterrupt):
            while True:
                check_stop()
                time.sleep(0.001)
        return writing(*words)

    with monkeypatch.context() as patch:
        patch.setattr(build, "join", interrupted)
        assert penstock(["edit", str(out), "delete", "0"]) == 143
        assert s.files_of(out) == before
        with s.open_writer(out, "resume") as writer:
            s.commit(writer, 2)
        assert penstock(["build", str(out)]) == 143
        assert len(Dataset(out)) == 2
    assert penstock(["build", str(out)]) == 0
    assert penstock(["edit", str(out), "delete", "0"]) == 0
    assert len(Dataset(out)) == 2
    assert check(out) == []


def test_the_command(dataset, capsys, tmp_path):
    marks = tmp_path / "marks.yaml"
    marks.write_text("delete: [5]\ntrim: {1: [0, 4]}\nsplit: {2: [3]}\nrelabel: {all: go}\n")
    path = str(dataset)
    assert penstock(["edit", path, "apply", str(marks), "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert len(Dataset(path)) == 6
    assert penstock(["edit", path, "apply", str(marks)]) == 0
    assert [e.length for e in Dataset(path).episodes] == [5, 4, 3, 4, 8, 5]
    assert penstock(["edit", path, "delete", "0-2", "4,5"]) == 0
    assert len(Dataset(path)) == 1
    assert penstock(["edit", path, "undo"]) == 0
    assert len(Dataset(path)) == 6
    assert penstock(["edit", path, "cut", "4=2:4,5:6", "5=0:1"]) == 0
    assert [e.length for e in Dataset(path).episodes] == [5, 4, 3, 4, 2, 1, 2, 4]
    assert penstock(["edit", path, "undo"]) == 0
    capsys.readouterr()
    for words in (["explode"], ["delete"], ["cut", "1=2"], ["trim", "1"], ["apply", "no.yaml"]):
        assert penstock(["edit", path, *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    marks.write_text("delete: 5\n")
    assert penstock(["edit", path, "apply", str(marks)]) == 2
    marks.write_text("remove: [5]\n")
    assert penstock(["edit", path, "apply", str(marks)]) == 2
    assert "'rename'" in capsys.readouterr().err


@pytest.mark.parametrize("version", VERSIONS)
def test_datasets_of_other_making(tmp_path, version):
    """Matrices, texts, PNGs in the rows, two cameras, two tasks: nothing of it by our writer."""
    path = tmp_path / "theirs"
    hand.make_dataset(path, version)
    info = json.loads((path / "meta" / "info.json").read_bytes())
    info["extra"] = {"kept": True}
    (path / "meta" / "info.json").write_text(json.dumps(info))
    before = [list(Dataset(path).episode(k).frames()) for k in range(3)]
    edit(path, Edits(delete=[1], split={2: [9]}, rename={hand.WRIST: "observation.images.hand"}))
    after = [list(Dataset(path).episode(k).frames()) for k in range(3)]
    expected = [before[0], before[2][:9], before[2][9:]]
    encoded = {hand.TOP, hand.SIDE} if version == "v2.1" else set()
    for old, new in zip(expected, after, strict=True):
        for a, b in zip(old, new, strict=True):
            for name in set(a) - {*AUTO_FEATURES, *encoded}:
                other = "observation.images.hand" if name == hand.WRIST else name
                np.testing.assert_array_equal(a[name], b[other])
    assert [e.tasks for e in Dataset(path).episodes] == [("pick the cup",)] * 3
    assert Dataset(path).info["extra"] == {"kept": True}
    errors = [text for text in check(path) if text.startswith("error")]
    assert errors == []


def test_an_episode_of_several_tasks_is_not_made_one_of_the_first(tmp_path):
    path = tmp_path / "theirs"
    hand.make_dataset(path, "v2.1")
    lines = (path / "meta" / "episodes.jsonl").read_text().splitlines()
    changed = json.loads(lines[0]) | {"tasks": list(hand.TASKS)}
    text = "\n".join([json.dumps(changed), *lines[1:]]) + "\n"
    (path / "meta" / "episodes.jsonl").write_text(text)
    with pytest.raises(UsageError, match="has 2 tasks"):
        edit(path, Edits(delete=[1]))
    edit(path, Edits(delete=[1], relabel={0: "both"}))
    assert Dataset(path).episode(0).tasks == ("both",)


def test_what_is_no_dataset_stays_as_it_is(tmp_path, dataset, capsys):
    plain = tmp_path / "plain"
    plain.mkdir()
    for path, code in ((plain, 3), (tmp_path / "nowhere", 3)):
        assert penstock(["edit", str(path), "delete", "0"]) == code
        assert "LeRobot dataset" in capsys.readouterr().err
    assert list(plain.iterdir()) == []
    before = s.files_of(dataset)
    assert penstock(["edit", str(dataset), "keep", "0", "--out", str(dataset / "in")]) == 2
    assert s.files_of(dataset) == before
    assert penstock(["edit", str(dataset), "trim", "0=2:"]) == 0
    assert Dataset(dataset).episode(0).length == 3


PROGRAM = """
import sys
from penstock.dataset.edit import Edits, edit
edit(sys.argv[1], Edits(delete=[1], trim={2: (1, 4)}))
"""


@pytest.mark.stress
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not has_strace(), reason="needs strace (apt-get install strace) and ptrace")
@pytest.mark.parametrize("version", VERSIONS)
def test_killed_at_every_third_call_it_is_the_old_or_the_new(tmp_path, version):
    first, done = tmp_path / "first", tmp_path / "done"
    s.write_dataset(first, 4, version=version)
    shutil.copytree(first, done)
    edit(done, Edits(delete=[1], trim={2: (1, 4)}))
    old, new = s.files_of(first), s.files_of(done)
    kills = 0
    for call in (
        "mkdir",
        "rename",
        "renameat2",
        "link",
        "linkat",
        "unlink",
        "rmdir",
        "fsync",
        "write",
    ):
        for number in range(1, 10_000, 3):
            out = tmp_path / f"{call}{number}" / "out"
            shutil.copytree(first, out)
            command = ["strace", "-f", "--seccomp-bpf", "-o", os.devnull]
            command += ["-e", f"inject={call}:signal=KILL:when={number}"]
            command += [sys.executable, "-c", PROGRAM, str(out)]
            ended = subprocess.run(command, capture_output=True, timeout=300, check=False)
            assert s.files_of(out) in (old, new)
            if ended.returncode == 0:
                break
            kills += 1
            DatasetWriter.reopen(out).close()  # settles what the kill left
            assert {path.name for path in out.parent.iterdir()} <= {"out", ".out.penstock-undo"}
            shutil.rmtree(out.parent)
    assert kills > 30
