"""The live panel of a training run: how far, how fast, how well, and where the time goes."""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import Self

from penstock.core.memory import format_bytes, rss_bytes
from penstock.ui.progress import Mode, choose_mode, clock, terminal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

_PERIOD_S: Final = {"rich": 0.5, "plain": 10.0, "quiet": math.inf}  # drawing takes some 10 ms
_RATE_S: Final = 60.0  # the speed is that of the last minute, so that the time left follows it
_STEP_S: Final = 0.5  # between two points of that minute
_MEMORY_PERIOD_S: Final = 1.0  # reading the whole process tree takes milliseconds
_MAX_WIDTH: Final = 104
_WIDE: Final = 76  # inside the frame: enough for three columns
# Name on the screen, key, colour: an episode ends in one of these ways.
_ENDS: Final = (
    ("success", "train/success", "green"),
    ("static", "train/collision_static", "red"),
    ("dynamic", "train/collision_dynamic", "red"),
    ("height", "train/collision_height", "magenta"),
    ("time-out", "train/timeout", "yellow"),
    ("validation", "validation/success", "bright_green"),
)
_LEARNING: Final = (
    ("reward", "train/reward"),
    ("length", "train/episode_length"),
    ("actor loss", "loss/actor"),
    ("critic loss", "loss/critic"),
    ("entropy", "loss/entropy"),
    ("learning rate", "train/lr"),
    ("dyn. obstacles", "env/dynamic_active"),
)


class Panel:
    """Shows a training run: a panel on a terminal, a line every 10 s in a log, or nothing.

    Showing never fails the run, and no thread is started: the display moves with the calls. Values
    that are missing or not finite are shown as "-". The mode is as for
    `penstock.ui.progress.Progress`; initial frames are those of runs that this one continues.

    Example:
        with Panel(total_frames=50_000_000, title="train") as panel:
            for frames, stats in training:
                panel.update(frames, stats, {"collect": 0.4, "update": 0.6}, {})
    """

    def __init__(
        self, total_frames: int, title: str, mode: Mode | None = None, initial_frames: int = 0
    ) -> None:
        self.total_frames = total_frames
        self.title = title
        self.mode: Mode = choose_mode(mode)
        self.frames = self._first = initial_frames
        self._metrics: Mapping[str, Any] = {}
        self._shares: Mapping[str, Any] = {}  # of the time, by phase
        self._stalls: Mapping[str, Any] = {}  # of checkpoints
        self._lock = threading.Lock()
        self._ended = ""
        self._start_s = self._shown_s = monotonic()
        self._history = deque([(self._start_s, initial_frames)])
        self._memory = (-math.inf, 0)
        self._live: Any = None

    def update(
        self,
        frames: int,
        metrics: Mapping[str, float],
        shares: Mapping[str, float],
        stalls: Mapping[str, float],
    ) -> None:
        """Say how things are; frames are in all, shares are of the time that each phase takes."""
        with self._lock:
            self.frames = frames
            # Copies: the caller may go on with its own.
            self._metrics, self._shares, self._stalls = dict(metrics), dict(shares), dict(stalls)
            now_s = monotonic()
            if now_s - self._history[-1][0] >= _STEP_S:
                self._history.append((now_s, frames))
            if not self._ended and now_s - self._shown_s >= _PERIOD_S[self.mode]:
                self._shown_s = now_s
                self._show()

    def note(self, text: str) -> None:
        """Show one line that stays: a checkpoint was saved, say."""
        with self._lock:
            if not self._ended:
                self._put(" ".join(text.split()))

    def close(self, stopped: bool = False) -> None:
        """Show how it ended, perhaps before its time; later calls show nothing."""
        with self._lock:
            if self._ended:
                return
            self._ended = "stopped" if stopped else "done"
            self._show()
            if self._live is not None:
                with suppress(Exception):
                    self._live.stop()

    def __enter__(self) -> Self:
        if self.mode == "rich":  # the first iteration compiles, which takes its time
            self._show()
        return self

    def __exit__(self, exc_type: object, *exc_info: object) -> None:
        self.close(stopped=exc_type is not None)

    # ------------------------------------------------------------------ in a log

    def _show(self) -> None:
        with suppress(Exception):  # no lost terminal or strange value may stop an hour of training
            if self.mode == "plain":
                self._put(self._line())
            elif self.mode == "rich":
                self._screen().update(self, refresh=True)

    def _put(self, line: str) -> None:
        """Show a line that stays."""
        with suppress(Exception):
            if self.mode == "plain":
                line = f"{self.title}: {line}" if self.title else line
                print(line, file=sys.stderr, flush=True)  # noqa: T201
            elif self.mode == "rich":
                from rich.text import Text

                text = Text.assemble((f"{clock(monotonic() - self._start_s)}  ", "dim"), line)
                self._screen().console.print(text, no_wrap=True, overflow="ellipsis")

    def _line(self) -> str:
        words = [f"{self._amount()} frames", f"{self._share():.0%}", *self._pace()]
        known = self._metrics
        words += [f"{name} {_percent(known[key])}" for name, key, _ in _ENDS if key in known]
        words += [f"{name} {_number(known[key])}" for name, key in _LEARNING if key in known]
        words += [f"{name} {_percent(share, 0)}" for name, share in self._shares.items()]
        if self._stalls:
            words.append(self._checkpoints())
        words.append(f"mem {format_bytes(self._rss())}")
        if self._ended == "stopped":
            words.append("stopped")
        return "  ".join(words)

    def _pace(self) -> list[str]:
        """Frames per second, and the time left; at the end those of the whole run."""
        now_s = monotonic()
        elapsed_s = now_s - self._start_s
        if self._ended:
            rate = (self.frames - self._first) / elapsed_s if elapsed_s > 0 else 0.0
            return [f"{_count(rate)} frames/s", f"in {clock(elapsed_s)}"]
        while len(self._history) > 1 and self._history[1][0] <= now_s - _RATE_S:
            self._history.popleft()
        then_s, then_frames = self._history[0]
        if now_s <= then_s or self.frames <= then_frames:
            return ["- frames/s", "ETA -", f"elapsed {clock(elapsed_s)}"]
        rate = (self.frames - then_frames) / (now_s - then_s)
        left_s = max(self.total_frames - self.frames, 0) / rate
        return [f"{_count(rate)} frames/s", f"ETA {clock(left_s)}", f"elapsed {clock(elapsed_s)}"]

    def _share(self) -> float:
        done = self.frames / self.total_frames if self.total_frames > 0 else 1.0
        return min(max(done, 0.0), 1.0)

    def _amount(self) -> str:
        return f"{_count(self.frames)}/{_count(self.total_frames)}"

    def _checkpoints(self) -> str:
        keys = ("saved", "pending", "median_ms", "max_ms")
        saved, pending, median, worst = (_number(self._stalls.get(key)) for key in keys)
        return (
            f"checkpoints {saved} saved, {pending} pending, stall {median} ms median, "
            f"{worst} ms worst"
        )

    def _rss(self) -> int:
        now_s = monotonic()
        if now_s - self._memory[0] >= _MEMORY_PERIOD_S:
            self._memory = (now_s, rss_bytes())
        return self._memory[1]

    # ------------------------------------------------------------------ on a terminal

    def _screen(self) -> Any:
        if self._live is None:
            from rich.live import Live

            # Without a thread of rich's own. Redirected prints come out on stderr, so they are
            # never taken from a pipe or a file.
            shown = sys.stdout is not None and sys.stdout.isatty()
            self._live = Live(console=terminal(), auto_refresh=False, redirect_stdout=shown)
            self._live.start()
        return self._live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the panel as wide as there is room: three columns, or one below the other."""
        from rich.console import Group
        from rich.panel import Panel as Frame
        from rich.text import Text

        width = max(min(options.max_width, _MAX_WIDTH), 8)
        inside = width - 4
        amount = f"{self._amount()} frames  {self._share():.0%}"
        bar = _bar(self._share(), max(inside - len(amount) - 2, 1), "cyan")
        pace = "   ".join([*self._pace(), f"memory {format_bytes(self._rss())}"])
        parts = self._columns(5 if inside < _WIDE + 10 else 10)
        if inside >= _WIDE:
            body: list[Any] = [_grid([parts], {}, {}, {}, expand=True)]
        else:
            body = [part for table in parts for part in (table, Text())][:-1]
        foot = Text(self._checkpoints(), style="dim")
        head = _grid([(bar, Text(amount, style="bold"))], {}, {})
        yield Frame(
            Group(head, Text(pace), Text(), *body, Text(), foot),
            title=Text(self.title or "training", style="bold"),
            title_align="left",
            subtitle=Text(self._ended) if self._ended else None,
            subtitle_align="left",
            border_style={"": "cyan", "done": "green"}.get(self._ended, "yellow"),
            width=width,
        )

    def _columns(self, small: int) -> list[Table]:
        """How episodes end, how learning goes, and where the time goes; bars so wide."""
        get = self._metrics.get
        ends: list[Any] = [("[bold not dim]last episodes",)]
        for name, key, colour in _ENDS:
            ends.append((name, f"[{colour}]{_percent(get(key))}", _bar(get(key), small, colour)))
        learning: list[Any] = [("[bold not dim]learning",)]
        learning += [(name, _number(get(key))) for name, key in _LEARNING]
        phases: list[Any] = [("[bold not dim]time",)]
        for name, share in self._shares.items():
            phases.append((name, _bar(share, small, "blue"), _percent(share, 0)))
        # With least widths, so that the rest does not jump when the first values come.
        name_, value = {"style": "dim"}, {"justify": "right", "min_width": 7}
        phase = name_ | {"min_width": 10, "max_width": 10}
        return [
            _grid(ends, name_, value, {}),
            _grid(learning, name_, value),
            _grid(phases, phase, {"min_width": small}, {"justify": "right", "min_width": 4}),
        ]


def _grid(rows: Iterable[Any], *columns: Mapping[str, Any], expand: bool = False) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 1, 0, 0), expand=expand)
    for options in columns:
        table.add_column(no_wrap=True, overflow="ellipsis", **options)
    for row in rows:
        table.add_row(*row)
    return table


def _bar(share: Any, width: int, colour: str) -> Any:
    from rich.progress_bar import ProgressBar

    done = _finite(share) or 0.0  # rich cuts it
    return ProgressBar(1.0, done, width, complete_style=colour, finished_style=colour)


def _finite(value: Any) -> float | None:
    """Return a value as a number, None for whatever is none."""
    with suppress(TypeError, ValueError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def _percent(value: Any, digits: int = 1) -> str:
    share = _finite(value)
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def _number(value: Any) -> str:
    number = _finite(value)
    if number is None:
        return "-"
    if number == int(number) and abs(number) < 1e6:
        return f"{number:.0f}"
    if 0.001 <= abs(number) < 1e6:
        return f"{number:.3g}" if abs(number) < 100 else f"{number:.1f}"
    return f"{number:.1e}"


def _count(value: float) -> str:
    """Return a number of frames for people: 950, 33.1k, 12.4M, 1.20G."""
    for unit, scale, digits in (("G", 1e9, 2), ("M", 1e6, 1), ("k", 1e3, 1)):
        if abs(value) >= scale * (10 if unit == "k" else 1):
            return f"{value / scale:.{digits}f}{unit}"
    return f"{value:.0f}"
