"""The figures of the documents are those of the stored run, on every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import NAMES, figures, runner
from benchmarks.figures import FIGURES, Campaign, Measured
from penstock.errors import UsageError

ROOT = figures.ROOT
PAGES = figures.pages()
# A number with a unit of a measurement, written by hand.
TYPED = re.compile(r"\d[\d,.]* (?:ms|MB/s|frames/s|steps/s|GB/s)\b")


@pytest.fixture(scope="module")
def result():
    return runner.load(ROOT / "docs" / "bench.json")


def test_the_stored_run_is_whole(result):
    assert {case["name"] for case in result["cases"]} == set(NAMES)
    assert result["failed"] == {}
    assert not result["quick"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_page_says_what_the_run_says(page, result):
    text = page.read_text(encoding="utf-8")
    assert figures.filled(text, result) == text, "python -m benchmarks --from … --pages"


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_figure_can_be_written_and_is_used(name, result):
    assert figures.text_of(name, result)
    assert any(name in figures.names_in(page.read_text(encoding="utf-8")) for page in PAGES)
    figure = FIGURES[name]
    assert figure.command and figure.day if isinstance(figure, Campaign) else figure.case in NAMES


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md", "docs/claims.md"])
def test_no_figure_is_typed(name):
    text = figures._MARK.sub("", (ROOT / name).read_text(encoding="utf-8"))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    if name == "docs/claims.md":  # what was claimed is typed: it is a quotation
        rows = ["|".join(line.split("|")[3:]) for line in rows]
    assert [found for line in rows for found in TYPED.findall(line)] == []


def test_both_readmes_have_the_same_figures():
    one, other = (
        figures.names_in((ROOT / name).read_text(encoding="utf-8"))
        for name in ("README.md", "README.zh-CN.md")
    )
    assert one == other


def test_there_are_25_claims_in_plain_words():
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) == 25
    assert all(len(row) == 5 and row[3].strip() for row in rows)
    assert not re.search(r"[0-9a-f]{12}", figures._MARK.sub("", text))


def test_a_wrong_figure_is_noticed(result):
    row = {"what": "a", "who": "b", "value": 22.4, "unit": "ms"}
    run = {"cases": [{"name": "checkpoint", "rows": [row]}]}
    figure = {"x": Measured("checkpoint", "a", "b", "{:.0f} ms")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "FIGURES", figure)
        assert figures.filled("a <!--x-->9 s<!----> b", run) == "a <!--x-->22 ms<!----> b"
        with pytest.raises(UsageError, match="no figure 'y'"):
            figures.filled("<!--y-->1<!---->", run)
        with pytest.raises(UsageError, match="no row"):
            figures.filled("<!--x-->1<!---->", {"cases": []})


def test_pages_are_written_once(result, tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!--batch-->?<!---->")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert figures.write_pages(result) == [Path(tmp_path / "README.md")]
    assert figures.write_pages(result) == []
