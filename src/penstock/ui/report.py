"""Tables for the terminal, and reports as one self-contained HTML file.

The file needs no network and no script; it follows the reader's light or dark setting and fits a
telephone as well as a desktop.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.core.files import publish_bytes
from penstock.ui.plot import Kind, Series, draw
from penstock.ui.suggestions import printable

_NARROW = 3  # columns that fit a telephone
_LABEL = 14
_LEAST = 12  # columns of a terminal that a column of text keeps


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
        """Add a picture of the series; see `plot.draw`."""
        note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        picture = draw(series, x_label, y_label, kind)
        self._parts.append(f'<figure><div class="scroll">{picture}</div>{note}</figure>')

    def pictures(self, items: Sequence[tuple[bytes, str]]) -> None:
        """Add pictures side by side: (the bytes of a PNG or JPEG file, caption)."""
        self._side_by_side(
            (f'<img src="{_data_url(picture)}" alt="{escape(caption)}">', caption)
            for picture, caption in items
        )

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


def _data_url(picture: bytes) -> str:
    kind = "png" if picture.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{b64encode(picture).decode()}"


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is, or COLUMNS; None where nothing limits."""
    if os.environ.get("COLUMNS", "").isdecimal() or (sys.stdout and sys.stdout.isatty()):
        return max(40, shutil.get_terminal_size().columns)
    return None


def aligned(lines: Iterable[tuple[str, str]]) -> str:
    """Lay out labels and values for the terminal, one below the other."""
    found = []
    for label, text in lines:
        line = f"{label + ':':<{_LABEL}}{text}"
        found.append(line if "\n" in text else wrapped(line, " " * _LABEL))
    return "\n".join(found)


def command_lines(words: Iterable[str], width: int = 62) -> str:
    """Lay out a command behind a label, so that a shell takes its lines as one."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return f" \\\n{' ' * _LABEL}".join(lines)


def wrapped(text: str, indent: str = "") -> str:
    """Wrap a line of prose to the terminal, further lines indented."""
    width = terminal_width()
    if width is None or len(text) <= width:
        return text
    return textwrap.fill(
        text,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def text_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lay out a table for the terminal: aligned columns, numbers on the right.

    Where it would be wider than the terminal, words are wrapped and names shortened.
    """
    texts = [[_text(value) for value in row] for row in rows]
    right = _numeric(columns, texts)
    lines = [list(columns), *texts]
    widths = _fitted_widths(lines, right)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if flag else cell.ljust(width)
            for cell, width, flag in zip(part, widths, right, strict=True)
        ).rstrip()
        for line in lines
        for part in _wrapped(line, widths)
    )


def _fitted_widths(lines: Sequence[Sequence[str]], right: Sequence[bool]) -> list[int]:
    """Return the width of each column; the widest ones of text give way to a narrow terminal."""
    widths = [max(len(line[k]) for line in lines) for k in range(len(right))]
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
        if len(cell) <= width:
            cells.append([cell])
        else:
            parts = textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
            cells.append([_shortened(part, width) for part in parts])
    return zip_longest(*cells, fillvalue="")


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


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
