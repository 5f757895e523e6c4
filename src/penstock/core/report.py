"""Tables for the terminal, and reports as one self-contained HTML file.

The file needs no network and no script; it follows the reader's light or dark setting and fits a
telephone as well as a desktop.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.core.files import publish_bytes
from penstock.core.plot import Kind, Series, draw

_STYLE = """
:root { color-scheme: light dark; --fg: #1b1f24; --soft: #5b6570; --bg: #ffffff; --card: #f4f6f8;
  --line: #d6dbe1; --c0: #0b6bcb; --c1: #c4560a; --c2: #23803f; --c3: #8a3fc4; --c4: #a8324a; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6e9ed; --soft: #9aa5b1; --bg: #14171a;
  --card: #1e2328; --line: #363d45; --c0: #5aa9f5; --c1: #f0924f; --c2: #5cc47e; --c3: #bd8bec;
  --c4: #ee7f94; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 1.5rem 1rem 3rem; background: var(--bg);
  color: var(--fg); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; max-width: 75ch; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr));
  gap: .75rem; margin: 1rem 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .6rem .8rem; }
.figures span, .figures small { display: block; color: var(--soft); font-size: .85rem; }
.figures b { display: block; font-size: 1.3rem; line-height: 1.3; }
.scroll { overflow-x: auto; margin: .75rem 0 1.25rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem; }
th, td { padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; min-width: 4.5rem; }
td:first-child, th:first-child { min-width: 9rem; }
th { color: var(--soft); font-weight: 600; }
td.n, th.n { text-align: right; white-space: nowrap; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .7rem .9rem; font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
.pictures { display: flex; flex-wrap: wrap; gap: .75rem; }
.pictures figure { margin: .5rem 0; max-width: 100%; }
.pictures img { display: block; max-width: 100%; border-radius: 6px; }
figcaption { color: var(--soft); font-size: .9rem; }
.plot text { font: 13px system-ui, sans-serif; fill: var(--soft); }
.plot { width: 100%; max-width: 620px; height: auto; display: block; }
.plot .axis { stroke: var(--line); }
@media (max-width: 600px) {  /* a wide table becomes a list: a row each, a line per column */
  .wide, .wide tbody, .wide tr, .wide td { display: block; }
  .wide caption { display: block; }
  .wide thead { display: none; }
  .wide tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .wide td, .wide td.n { display: flex; justify-content: space-between; gap: 1rem; border: 0;
    padding: .1rem 0; text-align: right; white-space: normal; overflow-wrap: anywhere; }
  .wide td::before { content: attr(data-label); color: var(--soft); text-align: left; }
  .wide td:first-child { font-weight: 600; text-align: left; }
  .wide td:first-child::before { content: none; }
  .wide td:empty { display: none; }
}
.bars { display: grid; grid-template-columns: fit-content(45%) 1fr auto; gap: .3rem .7rem;
  align-items: center; max-width: 620px; font-variant-numeric: tabular-nums; }
.bars small { grid-column: 1 / -1; color: var(--soft); }
.bars span { overflow-wrap: anywhere; font-size: .9rem; }
.bars i { display: block; height: .9rem; background: var(--c0); border-radius: 2px; }
.bars b { text-align: right; }
"""


_NARROW = 3  # columns that fit a telephone


class Report:
    """One page: add parts from top to bottom, then `write` it.

    Everything handed over is text and is escaped.

    Args:
        title: Of the page.

    Example:
        report = Report("A run")
        report.figures([("saves", "40", "all durable")])
        report.write("report.html")
    """

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
        right = _numeric(columns, texts)
        head = "".join(
            f"<th{_class(flag)}>{escape(name)}</th>"
            for name, flag in zip(columns, right, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td{_class(flag)} data-label="{escape(name)}">{escape(cell)}</td>'
                for name, cell, flag in zip(columns, row, right, strict=True)
            )
            + "</tr>"
            for row in texts
        )
        title = f"<caption>{escape(caption)}</caption>" if caption else ""
        wide = ' class="wide"' if len(columns) > _NARROW else ""
        self._parts.append(
            f'<div class="scroll"><table{wide}>{title}<thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def plot(
        self,
        series: Series,
        x_label: str,
        y_label: str,
        kind: Kind = "line",
        caption: str = "",
    ) -> None:
        """Add a picture of the series; see `plot.draw`."""
        note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        picture = draw(series, x_label, y_label, kind)
        self._parts.append(f'<figure><div class="scroll">{picture}</div>{note}</figure>')

    def pictures(self, items: Sequence[tuple[bytes, str]]) -> None:
        """Add pictures side by side: (the bytes of a PNG or JPEG file, caption)."""
        cells = (
            f'<figure><img src="{_data_url(picture)}" alt="{escape(caption)}">'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            for picture, caption in items
        )
        self._parts.append(f'<div class="pictures">{"".join(cells)}</div>')

    def html(self) -> str:
        """Return the page."""
        title = escape(self._title)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n"
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


def aligned(lines: Iterable[tuple[str, str]]) -> str:
    """Lay out labels and values for the terminal, one below the other."""
    return "\n".join(f"{label + ':':<14}{text}" for label, text in lines)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lay out a table for the terminal: aligned columns, numbers on the right."""
    texts = [[_text(value) for value in row] for row in rows]
    right = _numeric(columns, texts)
    lines = [list(columns), *texts]
    widths = [max(len(line[k]) for line in lines) for k in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if flag else cell.ljust(width)
            for cell, width, flag in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _text(value: Any) -> str:
    """Say a cell in one line; control characters of foreign names stay harmless."""
    text = "-" if value is None else str(value)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    flags = []
    for k in range(len(columns)):
        cells = [row[k] for row in rows if row[k] not in ("", "-")]
        flags.append(bool(cells) and all(cell.lstrip("-+")[:1].isdigit() for cell in cells))
    return flags


def _class(right: bool) -> str:
    return ' class="n"' if right else ""
