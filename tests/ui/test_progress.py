"""The bar: which mode, what the lines say, and that stdout stays clean."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.ui import progress as progress_module
from penstock.ui.progress import ENV_MODE, Progress


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "monotonic", clock)
    monkeypatch.setattr(progress_module, "rss_bytes", lambda: 412_000_000)
    monkeypatch.delenv(ENV_MODE, raising=False)
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_and_the_last_one(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total=1000, title="convert", unit="frames") as progress:
        for _ in range(60):
            clock.now_s += 0.1
            progress.advance(10)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "convert: 500/1000 frames  50%  100.0 frames/s  ETA 0:00:05  mem 412.0 MB",
        "convert: 600/1000 frames  60%  100.0 frames/s  in 0:00:06  mem 412.0 MB",
    ]


def test_a_short_job_may_leave_no_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in (1.0, 7.0):
        with Progress(2, "build", "steps", last_line=False) as progress:
            clock.now_s += seconds
            progress.advance()
            progress.advance()
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["1/2", "2/2"]


def test_at_most_one_line_every_five_seconds(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(mode="plain")
    for _ in range(3000):
        clock.now_s += 0.01
        progress.advance()
        progress.note("here")
    assert 5 <= len(capsys.readouterr().err.splitlines()) <= 6
    progress.close()
    progress.close()
    progress.advance()
    clock.now_s += 100
    progress.advance()
    (last,) = capsys.readouterr().err.splitlines()
    assert last == "3000 items  100.0 items/s  in 0:00:30  mem 412.0 MB"


def test_bytes_are_shown_as_megabytes(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total=50_000_000, unit="bytes", mode="plain") as progress:
        clock.now_s += 5
        progress.update(12_500_000)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "12.5/50.0 MB  25%  2.5 MB/s  ETA 0:00:15  mem 412.0 MB"
    assert last.startswith("12.5/50.0 MB  25%  2.5 MB/s  in 0:00:05")


def test_eta_follows_a_change_of_speed(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total=100_000, mode="plain") as progress:
        for speed in [1000] * 10 + [1] * 60:
            clock.now_s += 5
            progress.advance(5 * speed)
    lines = capsys.readouterr().err.splitlines()
    assert "1000.0 items/s" in lines[9]
    assert " 1.0 items/s" in lines[69]


def test_note_and_stop_are_told(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), Progress(total=0, mode="plain") as progress:
        clock.now_s += 5
        progress.note("flight_7.bag")
        raise KeyError
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("  flight_7.bag")
    assert last.endswith("  stopped")


def test_quiet_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total=2, mode="quiet") as progress:
        clock.now_s += 50
        progress.advance(2)
        progress.note("x")
    assert progress.done == 2
    assert capsys.readouterr() == ("", "")


def test_mode_from_argument_environment_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert Progress().mode == "rich"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert Progress().mode == "plain"
    monkeypatch.setenv(ENV_MODE, "quiet")
    assert Progress().mode == "quiet"
    assert Progress(mode="plain").mode == "plain"
    monkeypatch.setenv(ENV_MODE, "loud")
    with pytest.raises(UsageError, match="PENSTOCK_PROGRESS is 'loud': use rich, plain or quiet"):
        Progress()
    with pytest.raises(UsageError, match="mode is 'fancy'"):
        Progress(mode="fancy")  # type: ignore[arg-type]


def test_rich_bar_goes_to_stderr_and_starts_no_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    threads = set(threading.enumerate())
    with Progress(total=4, title="[not markup]", unit="frames") as progress:
        clock.now_s += 1
        progress.advance(2)
        assert "2/4 frames  50%  2.0 frames/s  ETA 0:00:01  mem 412.0 MB" in terminal.getvalue()
        assert set(threading.enumerate()) == threads
        progress.advance(2)
    assert "[not markup]" in terminal.getvalue()
    assert "4/4 frames  100%" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_a_lost_terminal_does_not_stop_the_job(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    for mode in ("plain", "rich"):
        with Progress(total=2, mode=mode) as progress:
            clock.now_s += 10
            progress.advance(2)
        assert progress.done == 2


def test_threads_lose_no_count() -> None:
    progress = Progress(mode="quiet")

    def work() -> None:
        for _ in range(5000):
            progress.advance()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress.done == 20_000


def test_only_rich_mode_imports_rich(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from penstock.ui.progress import Progress\n"
        "with Progress(3, mode='plain') as progress: progress.update(3)\n"
        "print('rich' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert done.stderr.startswith("3/3 items  100%")
