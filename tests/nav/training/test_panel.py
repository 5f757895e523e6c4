"""The panel: what it says, in a log and on a terminal, and that it never stops the run."""

from __future__ import annotations

import io
import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from rich.console import Console

from penstock.errors import UsageError
from penstock.nav import panel as panel_module
from penstock.nav.panel import Panel
from penstock.ui.progress import ENV_MODE

METRICS = {
    "train/success": 0.831,
    "train/collision_static": 0.052,
    "train/collision_dynamic": 0.08,
    "train/collision_height": 0.001,
    "train/timeout": 0.036,
    "train/reward": 2.3123,
    "train/episode_length": 212.4,
    "loss/actor": -0.0123,
    "loss/critic": 0.3311,
    "loss/entropy": -1.5,
    "train/lr": 9.4e-4,
    "validation/success": 0.83,
    "env/dynamic_active": 40,
}
SHARES = {"collect": 0.41, "update": 0.57, "checkpoint": 0.02}
STALLS = {"median_ms": 1.234, "max_ms": 8.1, "saved": 12, "pending": 1}


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(panel_module, "monotonic", clock)
    monkeypatch.setattr(panel_module, "rss_bytes", lambda: 812_000_000)
    monkeypatch.delenv(ENV_MODE, raising=False)
    return clock


def open_screen(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in the place of stderr; not as a fixture, since pytest then takes it back."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "40")
    return terminal


def drawn(panel: Panel, width: int) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(panel)
    return console.export_text().splitlines()


def plain(text: str) -> str:
    """What is left without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


# ---------------------------------------------------------------------- in a log


def test_lines_in_a_log(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Panel(50_000_000, "train") as panel:
        for second in range(1, 25):
            clock.now_s += 1
            panel.update(second * 33_000, METRICS, SHARES, STALLS)
    out, err = capsys.readouterr()
    first, second_line, last = err.splitlines()
    assert out == ""
    assert first == (
        "train: 330.0k/50.0M frames  1%  33.0k frames/s  ETA 0:25:05  elapsed 0:00:10  "
        "success 83.1%  static 5.2%  dynamic 8.0%  height 0.1%  time-out 3.6%  validation 83.0%  "
        "reward 2.31  length 212.4  actor loss -0.0123  critic loss 0.331  entropy -1.5  "
        "learning rate 9.4e-04  dyn. obstacles 40  collect 41%  update 57%  checkpoint 2%  "
        "checkpoints 12 saved, 1 pending, stall 1.23 ms median, 8.1 ms worst  mem 812.0 MB"
    )
    assert second_line.startswith("train: 660.0k/50.0M frames")
    assert last.startswith("train: 792.0k/50.0M frames  2%  33.0k frames/s  in 0:00:24  success")
    assert "ETA" not in last


def test_missing_values_are_left_out_and_strange_ones_are_dashes(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = {"train/success": math.nan, "loss/actor": None, "train/reward": math.inf}
    with Panel(100, "", mode="plain") as panel:
        clock.now_s += 10
        panel.update(10, strange, {"collect": math.nan}, {"saved": None})  # type: ignore[arg-type, dict-item]
    first, _ = capsys.readouterr().err.splitlines()
    assert first == (
        "10/100 frames  10%  1 frames/s  ETA 0:01:30  elapsed 0:00:10  success -  reward -  "
        "actor loss -  collect -  checkpoints - saved, - pending, stall - ms median, - ms worst  "
        "mem 812.0 MB"
    )


def test_the_speed_is_that_of_the_last_minute_and_of_this_run(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    panel = Panel(1_000_000, "t", mode="plain", initial_frames=500_000)
    frames = 500_000
    for speed in [2000] * 100 + [100] * 100:
        clock.now_s += 1
        frames += speed
        panel.update(frames, {}, {}, {})
    lines = capsys.readouterr().err.splitlines()
    assert "  2000 frames/s  ETA 0:04:00  elapsed 0:00:10" in lines[0]
    assert "50%" not in lines[0]
    assert "52%" in lines[0]
    assert "  100 frames/s  " in lines[-1]
    panel.close()
    # 210,000 frames in 200 s: those of the earlier run do not count.
    assert "  1050 frames/s  in 0:03:20" in capsys.readouterr().err


def test_nothing_moves_and_nothing_is_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Panel(0, "t", mode="plain") as panel:
        clock.now_s += 10
        panel.update(0, {}, {}, {})
    first, last = capsys.readouterr().err.splitlines()
    assert first == "t: 0/0 frames  100%  - frames/s  ETA -  elapsed 0:00:10  mem 812.0 MB"
    assert last == "t: 0/0 frames  100%  0 frames/s  in 0:00:10  mem 812.0 MB"


def test_notes_stay_and_the_end_is_told(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), Panel(100, "train", mode="plain") as panel:
        panel.note("checkpoint\nsaved")
        raise KeyError
    panel.note("too late")
    panel.update(50, {}, {}, {})
    panel.close()
    note, last = capsys.readouterr().err.splitlines()
    assert note == "train: checkpoint saved"
    assert last.endswith("  stopped")


def test_quiet_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Panel(2, "t", mode="quiet") as panel:
        clock.now_s += 50
        panel.update(2, METRICS, SHARES, STALLS)
        panel.note("x")
    assert panel.frames == 2
    assert capsys.readouterr() == ("", "")


def test_modes_are_those_of_progress(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert Panel(1, "t").mode == "rich"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert Panel(1, "t").mode == "plain"
    monkeypatch.setenv(ENV_MODE, "quiet")
    assert Panel(1, "t").mode == "quiet"
    monkeypatch.setenv(ENV_MODE, "loud")
    with pytest.raises(UsageError, match="PENSTOCK_PROGRESS is 'loud': use rich, plain or quiet"):
        Panel(1, "t")


def test_only_a_terminal_imports_rich() -> None:
    code = (
        "import sys\n"
        "from penstock.nav.panel import Panel\n"
        "with Panel(3, 't', mode='plain') as panel:\n"
        "    panel.update(3, {}, {}, {})\n"
        "print('rich' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert done.stderr.startswith("t: 3/3 frames  100%")


# ---------------------------------------------------------------------- on a terminal


def test_the_panel_on_80_columns(clock: Clock) -> None:
    panel = Panel(50_000_000, "train [fast]", mode="quiet")
    clock.now_s += 372
    panel.update(12_400_000, METRICS | {"loss/entropy": math.nan}, SHARES, STALLS)
    assert drawn(panel, 80) == [
        "╭─ train [fast] ───────────────────────────────────────────────────────────────╮",
        "│ ━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 12.4M/50.0M frames  25%  │",
        "│ 33.3k frames/s   ETA 0:18:48   elapsed 0:06:12   memory 812.0 MB             │",
        "│                                                                              │",
        "│ last episodes                 learning                 time                  │",
        "│ success         83.1% ━━━━╺   reward            2.31   collect    ━━╺━━  41% │",
        "│ static           5.2% ━━━━━   length           212.4   update     ━━╸━━  57% │",
        "│ dynamic          8.0% ━━━━━   actor loss     -0.0123   checkpoint ━━━━━   2% │",
        "│ height           0.1% ━━━━━   critic loss      0.331                         │",
        "│ time-out         3.6% ━━━━━   entropy              -                         │",
        "│ validation      83.0% ━━━━╺   learning rate  9.4e-04                         │",
        "│                               dyn. obstacles      40                         │",
        "│                                                                              │",
        "│ checkpoints 12 saved, 1 pending, stall 1.23 ms median, 8.1 ms worst          │",
        "╰──────────────────────────────────────────────────────────────────────────────╯",
    ]


@pytest.mark.parametrize("width", [8, 20, 40, 79, 80, 100, 200])
def test_any_width_holds(clock: Clock, width: int) -> None:
    panel = Panel(50_000_000, "a title that is longer than the terminal is wide", mode="quiet")
    panel.update(12_400_000, METRICS, SHARES | {"a phase with a long name": 0.1}, STALLS)
    lines = drawn(panel, width)
    assert {len(line) for line in lines} == {min(width, 104)}
    if width >= 40:
        text = "\n".join(lines)
        for word in ("success", "83.1%", "critic loss", "0.331", "collect", "41%", "12 saved"):
            assert word in text


def test_nothing_known_yet_is_dashes(clock: Clock) -> None:
    text = "\n".join(drawn(Panel(100, "t", mode="quiet"), 80))
    assert "- frames/s   ETA -" in text
    assert re.search(r"success +- ", text)
    assert "nan" not in text.lower()
    assert "none" not in text.lower()


def test_on_a_terminal_it_moves_without_a_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = open_screen(monkeypatch)
    threads = set(threading.enumerate())
    with Panel(1000, "[not markup]") as panel:
        assert "[not markup]" in plain(screen.getvalue())  # before the first iteration
        clock.now_s += 60
        panel.update(500, METRICS, SHARES, STALLS)
        assert "500/1000 frames  50%" in plain(screen.getvalue())
        panel.note("checkpoint [ckpt_1.pt] saved")
        before = len(screen.getvalue())
        panel.update(501, METRICS, SHARES, STALLS)  # too soon to be shown
        assert len(screen.getvalue()) == before
        assert set(threading.enumerate()) == threads
    text = plain(screen.getvalue())
    assert "0:01:00  checkpoint [ckpt_1.pt] saved" in text
    assert "╰─ done ─" in text.splitlines()[-1]
    assert "in 0:01:00" in text
    assert screen.getvalue().count("\x1b[?25h") == screen.getvalue().count("\x1b[?25l") == 1
    assert capsys.readouterr().out == ""
    after = screen.getvalue()
    panel.update(900, {}, {}, {})
    panel.note("late")
    panel.close()
    assert screen.getvalue() == after


def test_a_stop_is_told_on_a_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    with pytest.raises(KeyboardInterrupt), Panel(1000, "t") as panel:
        panel.update(500, {}, {}, {})
        raise KeyboardInterrupt
    assert "╰─ stopped ─" in plain(screen.getvalue())


def _gone() -> io.StringIO:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    return Gone()


def _closed() -> io.StringIO:
    terminal = Terminal()
    terminal.close()
    return terminal


@pytest.mark.parametrize("make", [_gone, _closed])
@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_a_lost_terminal_does_not_stop_the_run(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], io.StringIO],
    mode: panel_module.Mode,
) -> None:
    monkeypatch.setattr(sys, "stderr", make())
    with Panel(100, "t", mode=mode) as panel:
        clock.now_s += 20
        panel.update(50, METRICS, SHARES, STALLS)
        panel.note("saved")
    assert panel.frames == 50


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_strange_values_do_not_stop_the_run(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, mode: panel_module.Mode
) -> None:
    screen = open_screen(monkeypatch)
    strange = {"train/success": "much", "loss/actor": [1, 2], "train/lr": object()}
    with Panel(100, "t", mode=mode) as panel:
        clock.now_s += 20
        panel.update(50, strange, {"collect": None}, {"saved": "x"})  # type: ignore[arg-type, dict-item]
    assert "50/100 frames" in plain(screen.getvalue())
    assert "much" not in screen.getvalue()
    assert re.search(r"collect [━ ]*-", plain(screen.getvalue()))
