"""The checksums beside a dataset: of this version's builds, and of earlier versions' journals."""

from __future__ import annotations

import json
import random
import runpy
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.dataset import layout
from penstock.dataset.check import check
from penstock.dataset.tables import write_table
from penstock.dataset.writer import DatasetWriter
from penstock.errors import PenstockError

HERE = Path(__file__).parent
s = SimpleNamespace(**runpy.run_path(str(HERE / "staging.py")))
hand = SimpleNamespace(**runpy.run_path(str(HERE / "handmade.py")))
BUILT, JOURNAL = "meta/penstock/built.jsonl", ".penstock/journal.jsonl"


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    """Datasets of this version, and one with the journal of an earlier one."""
    folder = tmp_path_factory.mktemp("originals")
    for version in layout.VERSIONS:
        s.write_dataset(folder / version, 3, version=version)
    with_journal(hand.make_dataset(folder / "journal"))
    for root in folder.iterdir():
        assert check(root).findings == []
    return {root.name: root for root in folder.iterdir()}


@pytest.fixture(params=["v3.0", "v2.1", "journal"])
def root(request, originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals[request.param], tmp_path / request.param))


@pytest.fixture(params=["v3.0", "v2.1"])
def built(request, originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals[request.param], tmp_path / request.param))


def line(value: object) -> bytes:
    text = json.dumps(value).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def with_journal(root: Path, torn: bool = False) -> Path:
    """Write the journal that earlier versions kept: a checksum for every file."""
    lines = []
    for path in sorted(root.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            entry = {"size": len(data), "crc32": zlib.crc32(data)}
            name = path.relative_to(root).as_posix()
            lines.append(line({"kind": "episode", "files": {name: entry}}))
    (root / ".penstock").mkdir()
    content = b"".join(lines)
    (root / JOURNAL).write_bytes(content[:-5] if torn else content)
    return root


def findings(root: Path) -> list[str]:
    return [f"{finding.where}: {finding.what}" for finding in check(root, "sample").findings]


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_every_file_is_verified(root) -> None:
    wanted = {path for path in s.files_of(root) if not path.startswith("meta/penstock")}
    assert check(root).checked["checksums"] == len(wanted)


def test_every_changed_byte_is_found(root) -> None:
    rng = random.Random(11)
    files = [root / name for name in s.files_of(root) if not name.endswith(".pack")]
    for _ in range(40):
        path = rng.choice(files)
        original = path.read_bytes()
        spoilt = bytearray(original)
        at = rng.randrange(len(spoilt))
        if rng.random() < 0.7:
            spoilt[at] ^= 1 << rng.randrange(8)
        else:
            del spoilt[at:]
        path.write_bytes(spoilt)
        if path.suffix != ".json" or root.name == "journal":
            assert check(root, "sample").findings, (path, at)
        path.write_bytes(original)


def test_a_changed_info_is_a_warning(built) -> None:
    edit(built / layout.INFO_PATH, lambda info: info.update(robot_type="other"))
    assert findings(built) == ["meta/info.json: it is not what was written"]
    assert check(built).ok  # it may have been meant to change


def test_another_layout_of_the_same_values_is_no_finding(built) -> None:
    edit(built / layout.INFO_PATH, lambda info: None)
    if built.name == "v3.0":
        edit(built / layout.V30.stats, lambda stats: None)
    assert findings(built) == []


def test_a_changed_digit_in_the_statistics_is_found(originals, tmp_path) -> None:
    root = Path(shutil.copytree(originals["v3.0"], tmp_path / "d"))

    def change(stats) -> None:
        stats[s.CAMERA]["mean"][1][0][0] += 1e-6

    edit(root / layout.V30.stats, change)
    assert findings(root) == ["meta/stats.json: it is not what was written"]


def test_changed_tasks_are_found(built) -> None:
    if built.name == "v3.0":
        table = layout.tasks_table(["task 0", "task 1", "task 2", "task 3"])
        write_table(built / layout.V30.tasks, table)
    else:
        with (built / layout.V21.tasks).open("a") as file:
            file.write('{"task_index": 3, "task": "task 3"}\n')
    assert any("meta/tasks" in text and "not what was written" in text for text in findings(built))


def test_a_torn_journal_counts_up_to_the_tear(tmp_path) -> None:
    root = with_journal(hand.make_dataset(tmp_path / "made"), torn=True)
    result = check(root)
    assert result.ok
    assert result.checked["checksums"] == len(s.files_of(root)) - 1


@pytest.mark.parametrize("spoil", [b"", b"{}", b"[]\n", b"\xff\n", b"x" * 99, line([]), line({})])
def test_a_spoilt_list_is_an_error_and_never_worse(built, spoil) -> None:
    (built / BUILT).write_bytes(spoil)
    errors = check(built, "sample").errors
    assert [error.where for error in errors] == [BUILT]


def hostile(root: Path, name: str) -> None:
    """Put a name into the list of files, with a checksum that fits."""
    if root.name == "journal":
        (root / JOURNAL).write_bytes(line({"files": {name: [1, 2]}}))
        return
    head, *units = (root / BUILT).read_bytes().splitlines(keepends=True)
    value = json.loads(head.partition(b" ")[2])
    value["files"][name] = [1, 2]
    (root / BUILT).write_bytes(b"".join([line(value), *units]))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "data/../../secret", "link/secret"])
def test_a_list_that_leads_out_touches_nothing(root, name, tmp_path) -> None:
    (tmp_path / "secret").write_text("a")
    (root / "link").symlink_to(tmp_path)
    before = check(root, "sample").errors
    hostile(root, name)
    found = [error for error in check(root, "sample").errors if error not in before]
    assert len(found) == 1
    assert "not in the dataset" in found[0].what
    if root.name != "journal":
        with DatasetWriter.reopen(root) as writer:
            s.commit(writer, 3)
            writer.build()
    assert (tmp_path / "secret").read_text() == "a"


@pytest.mark.parametrize("key", ["../../../secret", "/secret", "", ".", "..", "a/b"])
def test_a_unit_that_leads_out_touches_nothing(built, key, tmp_path) -> None:
    (tmp_path / "secret").mkdir()
    head, *units = (built / BUILT).read_bytes().splitlines(keepends=True)
    unit = json.loads(units[0].partition(b" ")[2]) | {"key": key}
    (built / BUILT).write_bytes(b"".join([head, line(unit), *units[1:]]))
    with pytest.raises(PenstockError, match=r"built\.jsonl"):
        DatasetWriter.reopen(built)
    assert len(check(built, "sample").errors) == 1
    assert (tmp_path / "secret").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head["base"].update(episodes="many"),
        lambda head: head["base"].update(next_file=[]),
        lambda head: head.update(base=3),
        lambda head: head.update(tasks=None),
        lambda head: head.update(infos=[1]),
        lambda head: head.update(files={"x": 7}),
        lambda head: head.update(units=1),
        lambda head: head.update(folded=99),
    ],
)
def test_totals_that_make_no_sense_are_named(built, change, tmp_path) -> None:
    head, *units = (built / BUILT).read_bytes().splitlines(keepends=True)
    value = json.loads(head.partition(b" ")[2])
    change(value)
    (built / BUILT).write_bytes(b"".join([line(value), *units]))
    before = s.files_of(built)
    with pytest.raises(PenstockError, match=r"built\.jsonl"):  # noqa: SIM117
        with DatasetWriter.reopen(built) as writer:
            s.commit(writer, 3)
            writer.build()
    assert s.files_of(built) == before
    check(built, "sample")
