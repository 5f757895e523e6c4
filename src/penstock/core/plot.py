"""Small plots as inline SVG: lines, bars, histograms. Colours come from the page's style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal

Kind = Literal["line", "bars", "histogram"]
Series = Mapping[str, Sequence[float]]

_WIDTH, _HEIGHT = 480, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 44
_COLOURS = 5
_BINS = 30


def draw(series: Series, x_label: str, y_label: str, kind: Kind = "line") -> str:
    """Draw series as an SVG element.

    Args:
        series: Values by name. A line goes through the values at x = 1, 2, 3, …; bars are one
            value per name (the first); a histogram counts the values of each series.
        x_label: What the horizontal axis shows, with its unit.
        y_label: What the vertical axis shows, with its unit.
        kind: "line", "bars" or "histogram".
    """
    kept = {name: [v for v in values if math.isfinite(v)] for name, values in series.items()}
    kept = {name: values for name, values in kept.items() if values}
    if not kept:
        return f"<p>{escape(x_label)}: no values</p>"
    if kind == "bars":
        return _bars(kept, x_label, y_label)
    if kind == "histogram":
        return _histogram(kept, x_label, y_label)
    longest = max(map(len, kept.values()))
    everything = [value for values in kept.values() for value in values]
    frame = _Frame((1.0, max(longest, 2.0)), (min(everything), max(everything)))
    for k, values in enumerate(kept.values()):
        points = " ".join(f"{frame.x(i):.1f},{frame.y(v):.1f}" for i, v in enumerate(values, 1))
        frame.add(
            f'<polyline points="{points}" fill="none" stroke="{_colour(k)}" stroke-width="2"/>'
        )
    return frame.svg(x_label, y_label, list(kept))


def _histogram(series: Mapping[str, Sequence[float]], x_label: str, y_label: str) -> str:
    low, high = min(map(min, series.values())), max(map(max, series.values()))
    span = (high - low) or abs(high) or 1.0
    counts = {}
    for name, values in series.items():
        bins = [0] * _BINS
        for value in values:
            bins[min(int((value - low) / span * _BINS), _BINS - 1)] += 1
        counts[name] = bins
    frame = _Frame((low, low + span), (0.0, float(max(map(max, counts.values())))))
    step = span / _BINS
    for k, bins in enumerate(counts.values()):
        for number, count in enumerate(bins):
            frame.box(low + number * step, low + (number + 1) * step, count, k, len(counts) > 1)
    return frame.svg(x_label, y_label, list(counts))


def _bars(series: Mapping[str, Sequence[float]], x_label: str, y_label: str) -> str:
    values = [v[0] for v in series.values()]
    frame = _Frame((0.0, float(len(values))), (min(0.0, *values), max(0.0, *values)))
    frame.ticks_x = False
    for k, value in enumerate(values):
        frame.box(k + 0.15, k + 0.85, value, k, False)
        where = f'x="{frame.x(k + 0.5):.1f}" y="{frame.y(max(value, 0)) - 4:.1f}"'
        frame.add(f'<text {where} text-anchor="middle">{value:.4g}</text>')
    return frame.svg(x_label, y_label, list(series))


class _Frame:
    """The axes of a plot, and what was drawn between them."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self._x0, self._x1 = x_range
        self._y0 = y_range[0]
        self._y1 = y_range[1] if y_range[1] > y_range[0] else y_range[0] + 1.0
        self._shapes: list[str] = []
        self.ticks_x = True

    def x(self, value: float) -> float:
        share = (value - self._x0) / (self._x1 - self._x0)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self._y0) / (self._y1 - self._y0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def add(self, shape: str) -> None:
        self._shapes.append(shape)

    def box(self, left: float, right: float, value: float, colour: int, veiled: bool) -> None:
        top, bottom = sorted((self.y(value), self.y(max(self._y0, 0.0))))
        if bottom > top:
            width = max(self.x(right) - self.x(left) - 1, 1)
            veil = ' fill-opacity="0.55"' if veiled else ""
            self.add(
                f'<rect x="{self.x(left):.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{bottom - top:.1f}" fill="{_colour(colour)}"{veil}/>'
            )

    def svg(self, x_label: str, y_label: str, names: Sequence[str]) -> str:
        parts = []
        for value in _ticks(self._y0, self._y1):
            at = self.y(value)
            parts.append(
                f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" '
                f'y2="{at:.1f}"/><text x="{_LEFT - 6}" y="{at + 4:.1f}" '
                f'text-anchor="end">{value:.4g}</text>'
            )
        for value in _ticks(self._x0, self._x1) if self.ticks_x else ():
            parts.append(
                f'<text x="{self.x(value):.1f}" y="{_HEIGHT - _BOTTOM + 16}" '
                f'text-anchor="middle">{value:.4g}</text>'
            )
        parts += self._shapes
        parts.append(f'<text x="4" y="14">{escape(y_label)}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(
            f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
        )
        label = escape(f"{y_label} over {x_label}", quote=True)
        picture = (
            f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{label}">{"".join(parts)}</svg>'
        )
        return picture + (_legend(names) if len(names) > 1 else "")


def _legend(names: Sequence[str]) -> str:
    keys = (
        f'<span style="white-space:nowrap;margin-right:1.2em">'
        f'<span style="color:{_colour(k)}">&#9632;</span> {escape(name)}</span> '
        for k, name in enumerate(names)
    )
    return f"<div>{''.join(keys)}</div>"


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
