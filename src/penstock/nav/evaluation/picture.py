"""Flights seen from above, as a PNG: one panel per world."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingExtra, UsageError
from penstock.nav.evaluation.crossing import Flights, Outcome
from penstock.nav.simulation.task import CROSSING_M, EDGE_M, Settings
from penstock.nav.simulation.world import Obstacles, World

try:
    from PIL import Image, ImageDraw, ImageFont
except ModuleNotFoundError as error:
    raise MissingExtra("pillow", "rl") from error

Floats = NDArray[np.float32]
Colour = tuple[int, int, int]

MOST_WORLDS = 16
_PATHS = 64  # of each world, evenly chosen
_FINE = 2  # drawn so many times larger, then shrunk: smooth edges
_COLUMNS = 4
_HALF_X, _HALF_Y = 25.0, 25.8  # metres shown, from the middle
_PANEL_PX = (960, 780, 520, 392)  # width of a panel when there are 1, 2, 3, 4 side by side
_MARGIN, _GAP, _HEAD, _FOOT, _CAPTION = 28, 14, 84, 56, 30
_LINE = 28  # of the legend
_TRAIL_S = 4.0  # of a moving obstacle

_PAPER: Colour = (255, 255, 255)
_GROUND: Colour = (244, 245, 248)
_INK: Colour = (28, 33, 46)
_FAINT: Colour = (112, 120, 138)
_MOVING: Colour = (74, 96, 196)
COLOURS: dict[Outcome, Colour] = {
    Outcome.SUCCESS: (12, 148, 110),
    Outcome.STATIC: (214, 40, 57),
    Outcome.DYNAMIC: (235, 120, 12),
    Outcome.HEIGHT: (160, 60, 180),
    Outcome.TIMEOUT: (70, 78, 96),
}
_NAMES = {
    Outcome.SUCCESS: "reached the goal",
    Outcome.STATIC: "hit a box",
    Outcome.DYNAMIC: "hit a moving obstacle",
    Outcome.HEIGHT: "too low or too high",
    Outcome.TIMEOUT: "out of time",
}


def scenery(seed: int, settings: Settings, steps: int) -> tuple[Floats, Obstacles, Floats]:
    """Make the world of a seed again, and let its obstacles move for so many steps.

    Returned are its boxes, the obstacles, and their places after each step, [steps, m, 3].
    """
    obstacles = Obstacles([seed], settings.dynamic_obstacles, settings.period_s)
    track = np.empty((steps, obstacles.count, 3), np.float32)
    for step in range(steps):
        obstacles.advance()
        track[step] = obstacles.position[0]
    return World.generate(seed, settings.num_obstacles).boxes, obstacles, track


def draw(flights: Flights, settings: Settings, title: str, subtitle: str = "") -> bytes:
    """Draw flights, recorded with their settings, from above; return a PNG file.

    That is of at most 16 worlds, and of some paths in each: more would hide each other.
    """
    if flights.path is None:
        raise UsageError("the flights have no paths; fly with record=True")
    count = min(len(flights.seeds), MOST_WORLDS)
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    width = _PANEL_PX[columns - 1]
    height = round(width * _HALF_Y / _HALF_X)
    legend_lines = 1 if columns > 2 else 2
    sheet = _Sheet(
        2 * _MARGIN + columns * width + (columns - 1) * _GAP,
        _HEAD + rows * (_CAPTION + height + _GAP) + _FOOT + (legend_lines - 1) * _LINE,
    )
    sheet.text(_MARGIN, 22, title, 26, _INK, strong=True)
    met: set[int] = set()
    for world in range(count):
        x = _MARGIN + world % columns * (width + _GAP)
        y = _HEAD + world // columns * (_CAPTION + height + _GAP)
        here = (flights.world == world).numpy()
        path, outcome = flights.path.numpy()[here], flights.outcome.numpy()[here]
        share = float((outcome == Outcome.SUCCESS).mean()) * 100
        sheet.text(x + 2, y + 6, f"world {flights.seeds[world]}", 16, _INK, strong=True)
        sheet.text(x + width - 2, y + 6, f"{share:.1f} %", 16, COLOURS[Outcome.SUCCESS], end=True)
        stride = -(-len(path) // _PATHS)
        panel = _Panel(width, height)
        trail = min(path.shape[1], round(_TRAIL_S / flights.period_s))
        panel.scene(*scenery(flights.seeds[world], settings, max(1, trail)))
        panel.paths(path[::stride], outcome[::stride])
        met |= set(outcome[::stride].tolist())
        sheet.paste(panel, x, y + _CAPTION)
    if stride > 1:
        subtitle += f"; 1 of {stride} drones is shown"
    sheet.text(_MARGIN, 54, subtitle, 16, _FAINT)
    sheet.legend(met, settings.dynamic_obstacles > 0, legend_lines)
    return sheet.png()


class _Panel:
    """One world, in metres."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width * _FINE, height * _FINE)
        self._scale = self.size[0] / (2 * _HALF_X)
        self.image = Image.new("RGB", self.size, _GROUND)
        self._draw = ImageDraw.Draw(self.image)

    def scene(self, boxes: Floats, obstacles: Obstacles, track: Floats) -> None:
        """Draw what stands and what moves there."""
        self._ends()
        self._moving(obstacles, track)
        for x0, x1, y0, y1, high in boxes.tolist():
            # Darker is higher; whatever is above 4 m cannot be flown over.
            grey = 196 - round(104 * min(high, 4.5) / 4.5)
            (left, top), (right, bottom) = self._px([(x0, y1), (x1, y0)])
            self._draw.rectangle((left, top, right, bottom), fill=(grey, grey + 4, grey + 14))

    def _ends(self) -> None:
        for y, colour in ((EDGE_M, _FAINT), (-EDGE_M, COLOURS[Outcome.SUCCESS])):
            (left, at), (right, _) = self._px([(-CROSSING_M / 2, y), (CROSSING_M / 2, y)])
            self._draw.line((left, at, right, at), fill=colour, width=2 * _FINE)
        font = _font(11 * _FINE)
        (_, top), (_, low) = self._px([(0, EDGE_M), (0, -EDGE_M)])
        middle = self.size[0] / 2
        self._draw.text((middle, top - 3 * _FINE), "start", _FAINT, font, anchor="mb")
        goal = COLOURS[Outcome.SUCCESS]
        self._draw.text((middle, low + 4 * _FINE), "goal", goal, font, anchor="mt")

    def _moving(self, obstacles: Obstacles, track: Floats) -> None:
        """Draw where obstacles are when the drones start, and where they go from there."""
        mask = Image.new("L", self.size, 0)
        pen = ImageDraw.Draw(mask)
        for number in range(obstacles.count):
            points = self._px(track[:, number, :2].tolist())
            pen.line(points, fill=90, width=round(1.5 * _FINE), joint="curve")
        for number, wide in enumerate(obstacles.width.tolist()):
            ((x, y),) = self._px([track[0, number, :2].tolist()])
            half = wide / 2 * self._scale
            shape = pen.ellipse if obstacles.tall[number] else pen.rectangle
            shape((x - half, y - half, x + half, y + half), fill=160)
        self.image.paste(_MOVING, (0, 0), mask)

    def paths(self, path: Floats, outcome: NDArray[np.int8]) -> None:
        """Draw flights; those that failed come last, on top."""
        order = np.argsort(outcome != Outcome.SUCCESS, kind="stable")
        for number in order.tolist():
            kind = Outcome(int(outcome[number]))
            points = np.array(self._px(path[number, :, :2].tolist()))
            low = np.floor(points.min(0)) - 4 * _FINE
            width, height = (np.ceil(points.max(0)) + 4 * _FINE - low).astype(int).tolist()
            # In a mask of its own: where a line crosses itself it must not get darker.
            mask = Image.new("L", (width, height), 0)
            strength = 150 if kind is Outcome.SUCCESS else 230
            inside = [tuple(point) for point in (points - low).tolist()]
            ImageDraw.Draw(mask).line(inside, strength, round(1.4 * _FINE), joint="curve")
            self.image.paste(COLOURS[kind], (int(low[0]), int(low[1])), mask)
        for number in order.tolist():
            kind = Outcome(int(outcome[number]))
            if kind is not Outcome.SUCCESS:
                ((x, y),) = self._px([path[number, -1, :2].tolist()])
                _mark(self._draw, kind, x, y)

    def _px(self, points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        return [((x + _HALF_X) * self._scale, (_HALF_Y - y) * self._scale) for x, y in points]


class _Sheet:
    """The whole picture, in its own pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)
        self._image = Image.new("RGB", (width * _FINE, height * _FINE), _PAPER)
        self._draw = ImageDraw.Draw(self._image)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int,
        colour: Colour,
        *,
        strong: bool = False,
        end: bool = False,
    ) -> float:
        """Write words with their left (or right) upper corner at x, y; return their width.

        Those on the left get smaller until they fit on the sheet.
        """
        font = _font(size * _FINE)
        room = (self.size[0] - x - _MARGIN) * _FINE
        while not end and size > 9 and self._draw.textlength(words, font) > room:
            size -= 1
            font = _font(size * _FINE)
        at, anchor, stroke = (x * _FINE, y * _FINE), "ra" if end else "la", 0.35 * _FINE * strong
        self._draw.text(at, words, colour, font, anchor=anchor, stroke_width=stroke)
        return float(self._draw.textlength(words, font)) / _FINE

    def paste(self, panel: _Panel, x: int, y: int) -> None:
        """Put a panel in its place."""
        self._image.paste(panel.image, (x * _FINE, y * _FINE))

    def legend(self, outcomes: set[int], moving: bool, lines: int) -> None:
        """Explain the colours that occur, at the bottom."""
        x, y = float(_MARGIN), float(self.size[1] - _FOOT - (lines - 1) * _LINE + 16)
        for kind in Outcome:
            if kind not in outcomes:
                continue
            line = (x * _FINE, (y + 9) * _FINE, (x + 26) * _FINE, (y + 9) * _FINE)
            self._draw.line(line, fill=COLOURS[kind], width=3 * _FINE)
            if kind is not Outcome.SUCCESS:
                _mark(self._draw, kind, (x + 26) * _FINE, (y + 9) * _FINE)
            x += 36 + self.text(x + 36, y, _NAMES[kind], 15, _INK) + 28
        if lines > 1:
            x, y = float(_MARGIN), y + _LINE
        things = [((120, 124, 134), "box, darker is higher")]
        if moving:
            trail = f"moving obstacle at the start, and its first {_TRAIL_S:.0f} s"
            things.append((_MOVING, trail))
        for colour, name in things:
            box = (x * _FINE, (y + 2) * _FINE, (x + 14) * _FINE, (y + 16) * _FINE)
            self._draw.rectangle(box, fill=colour)
            x += 22 + self.text(x + 22, y, name, 15, _INK) + 28

    def png(self) -> bytes:
        """Return the picture as a file."""
        small = self._image.resize(self.size, Image.Resampling.LANCZOS)
        file = io.BytesIO()
        small.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
        return file.getvalue()


def _mark(pen: Any, kind: Outcome, x: float, y: float) -> None:
    """Mark where a flight ended: a cross for a box, a dot for anything else."""
    arm = 3.6 * _FINE
    if kind is Outcome.STATIC:
        for side in (-1, 1):
            line = (x - arm, y - side * arm, x + arm, y + side * arm)
            pen.line(line, fill=COLOURS[kind], width=2 * _FINE)
    else:
        box = (x - arm, y - arm, x + arm, y + arm)
        pen.ellipse(box, fill=COLOURS[kind], outline=_PAPER, width=_FINE)


def _font(size: float) -> Any:
    return ImageFont.load_default(size)
