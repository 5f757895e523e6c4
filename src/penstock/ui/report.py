"""Tables for the terminal, and reports as one self-contained HTML file.

The file needs no network and no script; it follows the reader's light or dark setting and fits a
telephone as well as a desktop.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import unicodedata
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.core.files import publish_bytes
from penstock.ui.suggestions import printable

Kind = Literal["line", "bars", "histogram"]
Point = tuple[float, float]
Series = Mapping[str, Sequence[float] | Sequence[Point]]

_NARROW = 3  # columns that fit a telephone
_LABEL = 14
_LEAST = 12  # columns of a terminal that a column of text keeps
# Of a plot; its colours come from the page's style.
_WIDTH, _HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 28, 44
_COLOURS = 10
_BINS = 30
_FEW = 12  # points that are marked: one alone would not be seen


class Report:
    """One page: add parts from top to bottom, then `write` it. All text is escaped."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Add a heading."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, *paragraphs: str) -> None:
        """Add paragraphs."""
        self._parts.extend(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)

    def code(self, text: str) -> None:
        """Add lines that are to be shown as they are."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def figures(self, items: Sequence[tuple[str, str, str]]) -> None:
        """Add key figures: (label, value with its unit, note)."""
        cells = (
            f"<div><span>{escape(label)}</span><b>{escape(value)}</b>"
            f"<small>{escape(note)}</small></div>"
            for label, value, note in items
        )
        self._parts.append(f'<div class="figures">{"".join(cells)}</div>')

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = ""
    ) -> None:
        """Add a table; columns that hold only numbers are aligned on the right."""
        texts = [[_text(value) for value in row] for row in rows]
        classes = [' class="n"' if flag else "" for flag in _numeric(columns, texts)]
        head = "".join(f"<th{c}>{escape(n)}</th>" for n, c in zip(columns, classes, strict=True))
        body = ""
        for row in texts:
            cells = (
                f'<td{c} data-label="{escape(name)}">{escape(cell)}</td>'
                for name, cell, c in zip(columns, row, classes, strict=True)
            )
            body += f"<tr>{''.join(cells)}</tr>"
        title = f"<caption>{escape(caption)}</caption>" if caption else ""
        wide = ' class="wide"' if len(columns) > _NARROW else ""
        self._parts.append(
            f'<div class="scroll"><table{wide}>{title}<thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def plot(
        self, series: Series, x_label: str, y_label: str, kind: Kind = "line", caption: str = ""
    ) -> None:
        """Add a picture of the series; see `draw`."""
        note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        picture = draw(series, x_label, y_label, kind)
        self._parts.append(f'<figure><div class="scroll">{picture}</div>{note}</figure>')

    def pictures(self, items: Sequence[tuple[bytes, str]]) -> None:
        """Add pictures side by side: (the bytes of a PNG or JPEG file, caption)."""
        figures = []
        for picture, caption in items:
            kind = "png" if picture.startswith(b"\x89PNG") else "jpeg"
            source = f"data:image/{kind};base64,{b64encode(picture).decode()}"
            figures.append((f'<img src="{source}" alt="{escape(caption)}">', caption))
        self._side_by_side(figures)

    def videos(self, items: Sequence[tuple[str, str]]) -> None:
        """Add videos that can be played: (path from the page on, caption)."""
        self._side_by_side(
            (f'<video controls muted preload="metadata" src="{escape(path)}"></video>', caption)
            for path, caption in items
        )

    def _side_by_side(self, items: Iterable[tuple[str, str]]) -> None:
        figures = (
            f"<figure>{element}<figcaption>{escape(caption)}</figcaption></figure>"
            for element, caption in items
        )
        self._parts.append(f'<div class="pictures">{"".join(figures)}</div>')

    def html(self) -> str:
        """Return the page."""
        title = escape(self._title)
        style = files("penstock.ui").joinpath("report.css").read_text(encoding="utf-8")
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>\n{style}</style></head>\n<body><h1>{title}</h1>\n"
            + "\n".join(self._parts)
            + "\n</body></html>\n"
        )

    def write(self, path: str | PathLike[str]) -> Path:
        """Publish the page, whole or not at all; return where it is."""
        target = Path(path)
        publish_bytes(target, self.html().encode(errors="replace"))
        return target


def draw(series: Series, x_label: str, y_label: str, kind: Kind = "line") -> str:
    """Draw series, by their names, as an HTML element.

    A line goes through points (x, y), or through values at x = 1, 2, 3, …; bars are one value per
    name (the first); a histogram counts the values of each series. Labels name a unit, too.
    """
    points = {name: _points(values) for name, values in series.items()}
    kept = {name: some for name, some in points.items() if some}
    if not kept:
        return f"<p>{escape(x_label)}: no values</p>"
    if kind == "line":
        return _lines(kept, x_label, y_label)
    values = {name: [y for _, y in some] for name, some in kept.items()}
    if kind == "bars":
        return _bars({name: some[0] for name, some in values.items()}, y_label)
    return _lines(_outlines(values), x_label, y_label)


def _points(values: Sequence[float] | Sequence[Point]) -> list[Point]:
    """Give values that are no points the places 1, 2, 3, …; leave out what is not finite."""
    places = [v if isinstance(v, tuple) else (float(k), v) for k, v in enumerate(values, 1)]
    return [(x, y) for x, y in places if math.isfinite(x) and math.isfinite(y)]


def _lines(series: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> str:
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x0, x1 = _widened((min(xs), max(xs)))
    y0, y1 = _widened((min(0.0, *ys), max(ys)))

    def right(x: float) -> float:
        return _LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for value in _ticks(y0, y1):
        at = down(value)
        parts.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    for value in _ticks(x0, x1):
        parts.append(
            f'<text x="{right(value):.1f}" y="{_HEIGHT - _BOTTOM + 16}" '
            f'text-anchor="middle">{value:.4g}</text>'
        )
    for k, points in enumerate(series.values()):
        line = " ".join(f"{right(x):.1f},{down(y):.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{_colour(k)}" stroke-width="2"/>'
        )
        for x, y in points if len(points) <= _FEW else ():
            where = f'cx="{right(x):.1f}" cy="{down(y):.1f}"'
            parts.append(f'<circle {where} r="3" fill="{_colour(k)}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts += [
        f'<text x="4" y="14">{escape(y_label)}</text>',
        f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
    ]
    label = escape(f"{y_label} over {x_label}", quote=True)
    picture = (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )
    return picture + (_legend(list(series)) if len(series) > 1 else "")


def _outlines(series: Mapping[str, Sequence[float]]) -> dict[str, list[Point]]:
    """Count the values of each series in bins, and return the outlines of the columns."""
    ends = min(map(min, series.values())), max(map(max, series.values()))
    edges = np.linspace(*_widened(ends), _BINS + 1)
    outlines = {}
    for name, values in series.items():
        heights = np.repeat(np.histogram(values, edges)[0], 2).tolist()
        outlines[name] = list(zip(np.repeat(edges, 2).tolist(), [0, *heights, 0], strict=True))
    return outlines


def _bars(values: Mapping[str, float], label: str) -> str:
    """Lay bars out as rows of name, bar and value: long names fit a narrow screen."""
    longest = max(*values.values(), 0.0) or 1.0
    rows = "".join(
        f"<span>{escape(name)}</span><div>"
        f'<i style="width:{100 * max(value, 0.0) / longest:.1f}%"></i></div><b>{_number(value)}</b>'
        for name, value in values.items()
    )
    return f'<div class="bars"><small>{escape(label)}</small>{rows}</div>'


def _legend(names: Sequence[str]) -> str:
    keys = (
        f'<span style="white-space:nowrap;margin-right:1.2em">'
        f'<span style="color:{_colour(k)}">&#9632;</span> {escape(name)}</span> '
        for k, name in enumerate(names)
    )
    return f"<div>{''.join(keys)}</div>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _widened(ends: tuple[float, float]) -> tuple[float, float]:
    low, high = ends
    return (low, high) if high > low else (low, low + (abs(low) or 1.0))


def _ticks(low: float, high: float) -> list[float]:
    """Choose about five round numbers in a range."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def _colour(k: int) -> str:
    return f"var(--c{k % _COLOURS})"


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is, or COLUMNS; None where nothing limits."""
    if os.environ.get("COLUMNS", "").isdecimal() or (sys.stdout and sys.stdout.isatty()):
        return max(40, shutil.get_terminal_size().columns)
    return None


def aligned(lines: Iterable[tuple[str, str]]) -> str:
    """Lay out labels and values for the terminal, one below the other."""
    indent = " " * _LABEL
    found = [f"{label + ': ':<{_LABEL}}{text}" for label, text in lines]
    return "\n".join(
        line.replace("\n", f"\n{indent}") if "\n" in line else wrapped(line, indent)
        for line in found
    )


def wrapped(text: str, indent: str = "", end: str = "") -> str:
    """Wrap a line to the terminal: further lines are indented, all but the last have an end."""
    width = terminal_width()
    if width is None or _columns(text) <= width:
        return text
    return f"{end}\n".join(_lines_of(text, width - len(end), indent))


def _columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: two for a letter of Chinese."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def _lines_of(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text into lines of so many columns."""
    lines, line = [], ""
    for blanks, word in re.findall(r"( *)([^ ]+)", text):
        for piece in _pieces(word):
            if line.strip() and _columns(line + blanks + piece) > width:
                lines.append(line)
                line, blanks = indent, ""
            line, blanks = line + blanks + piece, ""
    return [*lines, line]


def _pieces(word: str) -> list[str]:
    """Return the parts between which a line may end: what looks like a path has but one."""
    if word.isascii() or any(mark in word for mark in "/'\""):
        return [word]
    return re.findall(r"[!-~]+|[^!-~][^\w!-~]*", word)  # no line begins with a comma


def text_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lay out a table for the terminal: aligned columns, numbers on the right.

    Where it would be wider than the terminal, words are wrapped and names shortened.
    """
    texts = [[_text(value) for value in row] for row in rows]
    right = _numeric(columns, texts)
    lines = [list(columns), *texts]
    widths = _fitted_widths(lines, right)
    return "\n".join(
        "  ".join(map(_padded, part, widths, right)).rstrip()
        for line in lines
        for part in _wrapped(line, widths)
    )


def _fitted_widths(lines: Sequence[Sequence[str]], right: Sequence[bool]) -> list[int]:
    """Return the width of each column; the widest ones of text give way to a narrow terminal."""
    widths = [max(_columns(line[k]) for line in lines) for k in range(len(right))]
    room = terminal_width()
    while room is not None and sum(widths) + 2 * len(widths) - 2 > room:
        k = max(range(len(widths)), key=lambda k: 0 if right[k] else widths[k])
        if right[k] or widths[k] <= _LEAST:
            break
        widths[k] -= 1
    return widths


def _wrapped(line: Sequence[str], widths: Sequence[int]) -> Iterable[Sequence[str]]:
    """Wrap the cells of a row that are too long; one without blanks loses its middle."""
    cells = []
    for cell, width in zip(line, widths, strict=True):
        if _columns(cell) <= width:
            cells.append([cell])
        else:
            cells.append([_shortened(part, width) for part in _lines_of(cell, width)])
    return zip_longest(*cells, fillvalue="")


def _shortened(text: str, width: int) -> str:
    if _columns(text) <= width:
        return text
    head, tail = text, text
    while _columns(head) > (width - 1) // 3:
        head = head[:-1]
    while _columns(tail) > width - 1 - _columns(head):
        tail = tail[1:]
    return f"{head}…{tail}"


def _padded(cell: str, width: int, right: bool) -> str:
    blanks = " " * (width - _columns(cell))
    return f"{blanks}{cell}" if right else f"{cell}{blanks}"


def _text(value: Any) -> str:
    """Say a cell in one line; control characters of foreign names stay harmless."""
    text = "-" if value is None else str(value)
    return printable(text).replace("\n", "\\n")


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    flags = []
    for k in range(len(columns)):
        cells = [row[k] for row in rows if row[k] not in ("", "-")]
        flags.append(bool(cells) and all(cell.lstrip("-+")[:1].isdigit() for cell in cells))
    return flags
