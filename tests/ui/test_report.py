"""Reports: everything escaped, nothing from the network, published whole."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from penstock.errors import UsageError
from penstock.ui.report import Report, draw, text_table

NASTY = "<script>alert('&')</script>"


class Balance(HTMLParser):
    """Checks that every element is closed."""

    void = ("meta", "line", "rect", "polyline", "circle", "br")

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page():
    report = Report(NASTY)
    report.heading(NASTY)
    report.text(NASTY)
    report.code(NASTY)
    report.figures([(NASTY, "1 ms", NASTY)])
    report.table([NASTY, "n"], [[NASTY, 3], ["x", None]], caption=NASTY)
    for kind in ("line", "bars", "histogram"):
        report.plot({NASTY: [1.0, 2.0, 4.0], "b": [3.0]}, NASTY, NASTY, kind, NASTY)
    return report


def test_everything_is_escaped_and_closed():
    html = page().html()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    balance = Balance()
    balance.feed(html)
    assert balance.open == []


def test_nothing_comes_from_the_network():
    html = page().html()
    assert not re.search(r"(src|href)\s*=|url\(|https?://|@import", html)
    assert "prefers-color-scheme" in html
    assert 'name="viewport"' in html


def test_write_is_whole_or_not_at_all(tmp_path):
    path = page().write(tmp_path / "report.html")
    assert path.read_text() == page().html()
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(UsageError):
        page().write(tmp_path)


@pytest.mark.parametrize("kind", ["line", "bars", "histogram"])
@pytest.mark.parametrize(
    "values", [[], [0.0], [5.0, 5.0], [-3.0, 2.0], [float("nan"), 1.0], [1e-9, 2e-9], [1e12]]
)
def test_every_kind_of_values_can_be_drawn(kind, values):
    picture = draw({"a": values}, "x", "y", kind)
    assert "nan" not in picture
    assert "inf" not in picture


def test_histogram_counts_every_value():
    picture = draw({"a": [1.0] * 7 + [2.0] * 3}, "ms", "saves", "histogram")
    line = re.search(r'points="([^"]+)"', picture)[1]
    heights = [float(point.split(",")[1]) for point in line.split()]
    floor = max(heights)
    assert {round((floor - y) / (floor - min(heights)) * 7) for y in heights} == {0, 3, 7}


def test_text_table_aligns_numbers_on_the_right():
    table = text_table(["name", "size"], [["a", "1.5 MB"], ["longer", "12.5 MB"], ["c", None]])
    assert table.splitlines() == [
        "name       size",
        "a        1.5 MB",
        "longer  12.5 MB",
        "c             -",
    ]


def test_control_characters_stay_harmless():
    assert text_table(["name"], [["a\x1b[31m\n"]]).splitlines() == ["name", "a\\x1b[31m\\n"]
