"""The small files of a dataset against the journal that they follow from."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.dataset import layout
from penstock.dataset.doctor import check
from penstock.dataset.parquet import write_table

s = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("staging.py"))))


@pytest.fixture(scope="module", params=["v3.0", "v2.1"])
def original(request, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("original") / request.param
    s.write_dataset(root, 3, version=request.param)
    assert check(root).findings == []
    return root


@pytest.fixture
def root(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / original.name))


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def findings(root: Path) -> list[str]:
    return [f"{finding.where}: {finding.what}" for finding in check(root, "sample").findings]


def test_a_changed_info_is_found(root) -> None:
    edit(root / layout.INFO_PATH, lambda info: info.update(robot_type="other"))
    assert findings(root) == ["meta/info.json: it is not what was written at 'robot_type'"]
    assert check(root).ok  # it may have been meant to change


def test_another_layout_of_the_same_values_is_no_finding(root) -> None:
    edit(root / layout.INFO_PATH, lambda info: None)
    assert findings(root) == []


def test_a_changed_digit_in_the_statistics_is_found(root) -> None:
    if root.name == "v2.1":
        assert not (root / layout.STATS_PATH).exists()
        return

    def change(stats) -> None:
        stats[s.CAMERA]["mean"][1][0][0] += 1e-6

    edit(root / layout.STATS_PATH, change)
    where = f"at {s.CAMERA!r} at 'mean'"
    assert findings(root) == [f"meta/stats.json: it is not what was written {where}"]


def test_changed_tasks_are_found(root) -> None:
    if root.name == "v3.0":
        table = layout.tasks_table(["task 0", "task 1", "task 2", "task 3"])
        write_table(root / layout.TASKS_PATH, table)
    else:
        with (root / layout.TASKS_JSONL).open("a") as file:
            file.write('{"task_index": 3, "task": "task 3"}\n')
    assert any("its tasks are not those that were written" in text for text in findings(root))


@pytest.mark.parametrize("spoil", [b"", b"{}", b'{"format": 1}', b"[]", b"\xff"])
def test_spoilt_settings_are_an_error_and_never_worse(root, spoil) -> None:
    (root / ".penstock" / "settings.json").write_bytes(spoil)
    assert len(check(root, "sample").errors) == 1


def test_a_spoilt_state_of_the_statistics_is_an_error(root) -> None:
    packs = list((root / ".penstock").glob("stats-*.pack"))
    assert len(packs) == (1 if root.name == "v3.0" else 0)
    for pack in packs:
        data = pack.read_bytes()
        for content in (data[: len(data) // 2], b"", data[:40] + bytes(40) + data[80:]):
            pack.write_bytes(content)
            assert len(check(root, "sample").errors) == 1
        pack.unlink()
        assert len(check(root, "sample").errors) == 1
