"""Reports: everything escaped, nothing from the network, published whole."""
# ruff: noqa: RUF001

from __future__ import annotations

import re
import unicodedata
from html.parser import HTMLParser

import pytest

from penstock.errors import UsageError
from penstock.ui.report import Report, aligned, draw, text_table, wrapped

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


def columns_of(line):
    """How many columns of a terminal a line takes."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in line)


@pytest.mark.parametrize("width", [40, 61, 80, 120])
def test_chinese_takes_two_columns_a_letter(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    task = (
        "把红色的杯子从桌子左边拿起来，放到右边的抽屉里面，关上抽屉；重复三次，直到全部完成为止。"
        * 2
    )
    bag = "拾取杯子并放到桌子上的抽屉里_第一次尝试_左手_机器人实验室.bag"
    table = text_table(("name", "frames", "task"), [(bag, 30, task), ("take.bag", 7, "pick")])
    lines = [*table.splitlines(), *aligned([("tasks", task)]).splitlines()]
    lines += wrapped(f"  - 3 of 5 bags: {task} and then {task}", "    ").splitlines()
    assert max(map(columns_of, lines)) <= width
    assert all(line.strip()[0] not in "，。；" for line in lines)
    assert "".join(lines).count("把") == 2 + 2 + 4  # nothing of a task is lost
    head, last = table.splitlines()[0], table.splitlines()[-1]
    assert columns_of(head[: head.index("task")]) == columns_of(last[: last.index("pick")])


def test_a_path_to_be_copied_stays_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for path in ("/data/" + "take_" * 12, "/数据/" + "拾取杯子" * 12, "'" + "拾取杯子 " * 3 + "'"):
        assert path.split()[0] in wrapped(f"next: penstock view {path}", "  ", " \\")
