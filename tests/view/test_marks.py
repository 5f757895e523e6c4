"""Marks: saved at once, and carried out by `penstock edit`."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cli import main as penstock
from penstock.dataset.reader import Dataset
from penstock.errors import UsageError
from penstock.view.marks import Mark, Marks, read_marks
from penstock.view.server import ViewServer
from penstock.view.show import open_viewer

HERE = Path(__file__).parent
hand = SimpleNamespace(**runpy.run_path(str(HERE.parent / "dataset" / "handmade.py")))
Visitor = runpy.run_path(str(HERE / "looking.py"))["Visitor"]
LENGTHS = [12, 7, 20]
TEXT = "pick: the \"red\" cup # not the 杯 'blue' one\n- {x: !!python/name:os.system }"


def test_marks_become_an_edit(tmp_path: Path) -> None:
    root = hand.make_dataset(tmp_path / "set")
    with ViewServer(open_viewer(str(root), None, None)) as server:
        visitor = Visitor(server)
        assert visitor.post("api/mark/1", {"reject": True})[0] == 200
        assert visitor.post("api/mark/2", {"trim": [4, 16]})[0] == 200
        assert visitor.post("api/mark/2", {"split": [10]})[0] == 200
        assert visitor.post("api/mark/0", {"task": TEXT})[0] == 200
        rows = {row["index"]: row["mark"] for row in visitor.get("api/episodes")["rows"]}
        assert rows == {0: "edit", 1: "reject", 2: "edit"}
        assert visitor.get("api/episodes?which=rejected")["total"] == 1
    file = tmp_path / "set.marks.yaml"
    assert penstock(["edit", str(root), "apply", str(file), "-q"]) == 0
    found = Dataset(root)
    assert [episode.length for episode in found.episodes] == [12, 6, 6]
    assert found.episodes[0].tasks == (TEXT,)
    with pytest.raises(UsageError, match="applied already"):
        open_viewer(str(root), None, None)


def test_marks_come_back(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    marks = Marks(path, LENGTHS)
    marks.change(2, {"trim": [3, 18], "split": [9, 5], "task": TEXT})
    marks.change(0, {"reject": True})
    again = Marks(path, LENGTHS)
    assert again.of(2) == Mark(False, (3, 18), (5, 9), task=TEXT)
    assert again.of(0).reject and again.of(1) == Mark()
    again.change(2, {"trim": None, "split": None, "task": None})
    again.change(0, {"reject": False})
    edits = read_marks(path)
    assert not edits.delete and not edits.trim and edits.keep is None


def test_cuts_outside_of_what_is_kept_go(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "m.yaml", LENGTHS)
    marks.change(2, {"split": [5, 10, 15]})
    assert marks.change(2, {"trim": [5, 12]}).split == (10,)


def test_frames_in_the_middle_are_rejected(tmp_path: Path) -> None:
    root = hand.make_dataset(tmp_path / "set")
    with ViewServer(open_viewer(str(root), None, None)) as server:
        visitor = Visitor(server)
        assert visitor.post("api/mark/2", {"cut": [[12, 15], [4, 6], [5, 8]]})[0] == 200
        assert visitor.get("api/episode/2")["mark"]["cut"] == [[4, 8], [12, 15]]
        assert visitor.post("api/mark/2", {"trim": [0, 14]})[0] == 200
        for wrong in ([[3, 3]], [[0, 99]], [3], "x", [[1, 2, 3]], [[1, "a"]]):
            assert visitor.post("api/mark/2", {"cut": wrong})[0] == 404
        rows = {row["index"]: row["mark"] for row in visitor.get("api/episodes")["rows"]}
        assert rows[2] == "edit"
    file = tmp_path / "set.marks.yaml"
    assert Marks(file, LENGTHS).of(2).cut == ((4, 8), (12, 14))
    assert penstock(["edit", str(root), "apply", str(file), "-q"]) == 0
    assert [episode.length for episode in Dataset(root).episodes] == [12, 7, 4, 4]


def test_the_whole_episode_is_no_trim(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "m.yaml", LENGTHS)
    assert marks.change(0, {"trim": [0, 12]}) == Mark()


@pytest.mark.parametrize(
    "text",
    ["keep: [1]", "codec: h264", "delete: [99]", "relabel: {all: x}", "wrong: 1", "delete: [a]"],
)
def test_other_lists_are_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(UsageError):
        Marks(path, LENGTHS)
    assert path.read_text() == text


def test_a_full_disk_keeps_the_old_marks(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "m.yaml"
    marks = Marks(path, LENGTHS)
    marks.change(0, {"reject": True})
    before = path.read_bytes()
    tmp_path.chmod(0o500)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.core.files.os.open", refuse)
    with pytest.raises(Exception, match="space"):
        marks.change(1, {"reject": True})
    tmp_path.chmod(0o700)
    assert path.read_bytes() == before and marks.of(1) == Mark()
