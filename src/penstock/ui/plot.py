"""Small plots for a page: lines and histograms as inline SVG, bars as text with boxes.

Colours come from the page's style.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal

import numpy as np

Kind = Literal["line", "bars", "histogram"]
Point = tuple[float, float]
Series = Mapping[str, Sequence[float] | Sequence[Point]]

_WIDTH, _HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 28, 44
_COLOURS = 10
_BINS = 30
_FEW = 12  # points that are marked: one alone would not be seen


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
    """Draw axes, and a line through the points of each series."""
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
