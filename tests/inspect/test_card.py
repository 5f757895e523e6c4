"""The card of a dataset says what is in it, whatever its names hold."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML

from penstock.cli import main as penstock
from penstock.dataset import check as doctor
from penstock.errors import UsageError
from penstock.inspect.card import write_card
from penstock.media.images import ImageDecoder
from penstock.samples import write_sample

HERE = Path(__file__).parent
hand = SimpleNamespace(**runpy.run_path(str(HERE.parent / "dataset" / "handmade.py")))


def front(text: str) -> dict:
    return YAML(typ="safe").load(text.split("---\n")[1])


def test_what_it_says(tmp_path: Path) -> None:
    root = hand.make_dataset(tmp_path / "set")
    text = write_card(root, license="cc-by-4.0", name="me/cups").read_text()
    found = front(text)
    assert found["license"] == "cc-by-4.0" and found["task_categories"] == ["robotics"]
    assert "LeRobot" in found["tags"]
    assert found["configs"] == [{"config_name": "default", "data_files": "data/*/*.parquet"}]
    for word in (*hand.TASKS, "observation.state", "h264", "me/cups", str(sum(hand.LENGTHS))):
        assert word in text
    frame = ImageDecoder().jpeg((root / "card.jpg").read_bytes())
    assert frame.height == 240 and frame.width == 3 * 360
    assert not doctor.check(root).findings


def test_it_is_written_again_and_keeps_the_licence(tmp_path: Path) -> None:
    root = hand.make_dataset(tmp_path / "set")
    write_card(root, license="mit")
    assert penstock(["edit", str(root), "delete", "1", "--card", "-q"]) == 0
    text = (root / "README.md").read_text()
    assert "| episodes | 2 |" in text and front(text)["license"] == "mit"


def test_what_somebody_wrote_is_kept(tmp_path: Path) -> None:
    root = hand.make_dataset(tmp_path / "set")
    (root / "README.md").write_text("my own words")
    with pytest.raises(UsageError, match="--overwrite"):
        write_card(root)
    assert (root / "README.md").read_text() == "my own words"
    assert penstock(["card", str(root), "--overwrite", "-q"]) == 0
    assert front((root / "README.md").read_text())["license"] == "unknown"
    with pytest.raises(UsageError, match="licence"):
        write_card(root, license="mit\ntags: [evil]")


def test_names_with_markup_are_only_text(tmp_path: Path) -> None:
    evil = "a | b <script>x</script> [link](http://evil) `code`\n---\nlicense: evil"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hand.make_dataset.__globals__, "TASKS", (evil, "place the cup"))
        root = hand.make_dataset(tmp_path / "set")
    text = write_card(root).read_text()
    assert re.search(r"(?<!\\)<script|(?<!\\)\]\(http|(?<!\\)`code", text) is None
    assert front(text)["license"] == "unknown"


def test_a_conversion_writes_it_with_its_recordings(tmp_path: Path) -> None:
    bag = tmp_path / "take.bag"
    write_sample(bag, seconds=2, cameras=1, width=64, height=48, state_hz=50)
    assert penstock(["convert", str(bag), str(tmp_path / "set"), "--card", "-q"]) == 0
    text = (tmp_path / "set/README.md").read_text()
    assert "take.bag" in text and "| episodes | 1 |" in text
