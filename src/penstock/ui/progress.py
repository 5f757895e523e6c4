"""One progress bar for every long job: done, rate, time left and memory, on stderr only."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from typing_extensions import Self

from penstock.core.interrupt import check_stop
from penstock.core.memory import format_bytes, rss_bytes
from penstock.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

Mode = Literal["rich", "plain", "quiet"]

ENV_MODE: Final = "PENSTOCK_PROGRESS"
_PERIOD_S: Final = {"rich": 0.25, "plain": 5.0}
_BAR: Final = 20
_GONE: Final = (OSError, ValueError)  # a terminal that has gone away must not stop the job
_MEMORY_PERIOD_S: Final = 1.0  # reading the whole process tree takes milliseconds


class Progress:
    """Shows how far a job is: a bar on a terminal, a line every 5 s in a log, or nothing.

    Showing never fails the job, and no thread is started: the display moves with the calls.

    Args:
        total: How much there is to do; None when nobody knows.
        title: Names the job.
        unit: What is counted; ``"bytes"`` is shown as MB and MB/s.
        mode: "rich", "plain" or "quiet". None takes the environment variable PENSTOCK_PROGRESS,
            and without it "rich" on a terminal, "plain" elsewhere.
        last_line: False for a job that shows nothing if it is over before anything was due.
    """

    def __init__(
        self,
        total: int | None = None,
        title: str = "",
        unit: str = "items",
        mode: Mode | None = None,
        last_line: bool = True,
    ) -> None:
        self.total = total
        self.title = title
        self.unit = unit
        self.mode = choose_mode(mode)
        self.done = 0
        self._last_line = last_line
        self._note = ""
        self._lock = threading.Lock()
        self._period_s = _PERIOD_S.get(self.mode, math.inf)  # after `close` nothing is due any more
        self._start_s = monotonic()
        # The rate is over the last 40 displays, so that the time left follows a change of speed.
        self._history: deque[tuple[float, int]] = deque([(self._start_s, 0)], maxlen=40)
        self._memory = (-_MEMORY_PERIOD_S, 0)
        self._bar = _RichBar(title, total) if self.mode == "rich" else None

    def advance(self, n: int = 1) -> None:
        """Say that n more are done; may be called from any thread.

        A job that shows how far it is can be stopped there: see `core.interrupt`.
        """
        check_stop()
        with self._lock:
            self.done += n
            self._show_when_due()

    def update(self, done: int) -> None:
        """Say how many are done in all."""
        self.advance(done - self.done)

    def note(self, text: str) -> None:
        """Say what the job is at; shown at the end of the line from the next display on."""
        with self._lock:
            self._note = text
            self._show_when_due()

    def close(self, stopped: bool = False) -> None:
        """Show the last line, and that the job ended before its time; later calls only count."""
        with self._lock:
            period_s, self._period_s = self._period_s, math.inf
            if period_s == math.inf or not (self._last_line or len(self._history) > 1):
                return
            now_s = monotonic()
            elapsed_s = now_s - self._start_s
            rate = self.done / elapsed_s if elapsed_s > 0 else 0.0
            self._put(now_s, rate, f"in {clock(elapsed_s)}", "stopped" if stopped else "")
            if self._bar is not None:
                with suppress(*_GONE):
                    self._bar.stop(full=not stopped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, *exc_info: object) -> None:
        self.close(stopped=exc_type is not None)

    def _show_when_due(self) -> None:
        now_s = monotonic()
        if now_s - self._history[-1][0] < self._period_s:
            return
        then_s, then_done = self._history[0]
        self._history.append((now_s, self.done))
        rate = (self.done - then_done) / (now_s - then_s)
        known = self.total is not None and rate > 0
        left_s = max((self.total or 0) - self.done, 0) / rate if known else 0.0
        self._put(now_s, rate, f"ETA {clock(left_s)}" if known else "", self._note)

    def _put(self, now_s: float, rate: float, when: str, last: str) -> None:
        if now_s - self._memory[0] >= _MEMORY_PERIOD_S:
            self._memory = (now_s, rss_bytes())
        speed = f"{rate / 1e6:.1f} MB/s" if self.unit == "bytes" else f"{rate:.1f} {self.unit}/s"
        words = [self._amount(), speed, when, f"mem {format_bytes(self._memory[1])}", last]
        with suppress(*_GONE):
            if self._bar is not None:
                self._bar.show(self.done, words)
            else:
                line = "  ".join(filter(None, words))
                line = f"{self.title}: {line}" if self.title else line
                print(line, file=sys.stderr, flush=True)  # noqa: T201

    def _amount(self) -> str:
        scale, digits, unit = (1e6, 1, "MB") if self.unit == "bytes" else (1, 0, self.unit)
        done = f"{self.done / scale:.{digits}f}"
        if self.total is None:
            return f"{done} {unit}"
        share = min(self.done / self.total, 1.0) if self.total else 1.0
        return f"{done}/{self.total / scale:.{digits}f} {unit}  {share:.0%}"


class _RichBar:
    """The bar on a terminal; rich is imported where it shows something, never before."""

    def __init__(self, title: str, total: int | None) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        console = terminal()
        self._room = max(20, console.width - len(title) - _BAR - 3)
        self._progress: Any = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=_BAR, complete_style="cyan", finished_style="green"),
            TextColumn("{task.fields[status]}", markup=False),
            console=console,
            auto_refresh=False,  # no thread of rich's own
            # Redirected prints come out on stderr, so never take them from a pipe or a file.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task(title, total=total, status="")

    def show(self, done: int, words: list[str]) -> None:
        self._progress.start()  # the first time
        for left_out in ([], [3], [3, 1]):  # where there is little room, memory, then speed
            kept = (word for k, word in enumerate(words) if word and k not in left_out)
            status = "  ".join(kept)
            if len(status) <= self._room:
                break
        else:
            status = status[: self._room - 1] + "…"
        self._progress.update(self._task, completed=done, status=status, refresh=True)

    def stop(self, full: bool) -> None:
        """Leave the bar as it is, or full: the job is done, whatever it was thought to be."""
        if full:
            self._progress.update(self._task, total=1, completed=1)
        self._progress.stop()


def terminal() -> Console:
    """Return stderr as a console of rich's that falls silent when nobody reads it any more."""
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True  # rich itself would close stdout and exit

    return QuietConsole(stderr=True)


def choose_mode(mode: str | None) -> Mode:
    """Return how to show something: as asked, as the environment says, or as stderr allows."""
    origin = "the progress mode" if mode else f"the environment variable {ENV_MODE}"
    fitting = "rich" if sys.stderr is not None and sys.stderr.isatty() else "plain"
    mode = mode or os.environ.get(ENV_MODE) or fitting
    if mode not in get_args(Mode):
        raise UsageError(f"{origin} is {mode!r}: use rich, plain or quiet")
    return cast(Mode, mode)


def clock(seconds: float) -> str:
    """Return a time as hours, minutes and seconds: ``"0:24:31"``."""
    return str(timedelta(seconds=round(min(seconds, 1e9))))
