"""The command: fast to answer, one line per error, documented exit codes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock import cli
from penstock.core.interrupt import check_stop
from penstock.errors import SnapshotDiscarded
from penstock.tools.samples import write_sample

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = "PENSTOCK_UPDATE_SNAPSHOTS"  # set it to write the snapshots anew


@pytest.fixture
def checkpoint(tmp_path):
    torch = pytest.importorskip("torch", reason="writes a checkpoint")
    from penstock import AsyncCheckpointSaver

    with AsyncCheckpointSaver(tmp_path / "run") as saver:
        state = {"model": {"weight": torch.arange(5000.0)}, "step": 3}
        return saver.save_async(state, "a.pt", metadata={"note": "first"}).wait()


VERBS = ["", "info", "doctor", "convert", "edit", "train", "evaluate", "demo"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_one_screen_and_as_it_was(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*verb.split(), "--help"]) == 0
    said = capsys.readouterr().out
    snapshot = SNAPSHOTS / f"help{'_' + verb if verb else ''}.txt"
    if os.environ.get(UPDATE):
        SNAPSHOTS.mkdir(exist_ok=True)
        snapshot.write_text(said)
    assert said == snapshot.read_text(), f"changed on purpose? run again with {UPDATE}=1"
    assert len(said.splitlines()) <= 40
    assert "example" in said


def test_help_answers_at_once():
    """In processor time: what the machine does besides is not the command's fault."""

    def cpu_s():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def once():
        begin_s = cpu_s()
        subprocess.run(
            [sys.executable, "-m", "penstock", "--help"], check=True, capture_output=True
        )
        return cpu_s() - begin_s

    assert min(once() for _ in range(3)) < 0.3


@pytest.mark.parametrize(
    ("verb", "absent"),
    [("--help", {"torch", "numpy", "rich"}), ("info", {"torch"}), ("doctor", {"torch"})],
)
def test_nothing_heavy_is_imported(verb, absent, checkpoint):
    paths = [] if verb == "--help" else [str(checkpoint), str(checkpoint.parent)]
    code = (
        "import sys\n"
        "from penstock.cli import main\n"
        f"code = main({[verb, *paths]!r})\n"
        "print('\\n' + ' '.join(sorted(sys.modules)))\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.strip().splitlines()[-1].split())
    assert "penstock.cli" in modules
    assert not modules & absent


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("penstock ")


def test_no_verb_shows_help(capsys):
    assert cli.main([]) == 2
    assert "verbs:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["inof"], 2, "unknown verb 'inof': did you mean 'info'?"),
        (
            ["xyzzy"],
            2,
            "use one of info, doctor, convert, build, edit, train, evaluate, export-policy, ",
        ),
        (["info"], 2, "PATH"),
        (["info", "--wrong", "x"], 2, "--wrong"),
        (["info", "--top", "-3", "x"], 2, "not a count"),
        (["info", "nowhere.pt"], 2, "there is no file or folder nowhere.pt"),
        (["doctor", "nowhere.pt"], 2, "there is no file or folder nowhere.pt"),
        (["bench", "checkpoint"], 2, "python -m benchmarks"),
    ],
)
def test_usage_errors_are_one_line(words, code, expected, capsys):
    assert cli.main(words) == code
    said = capsys.readouterr().err
    assert said.startswith("penstock: error: ")
    assert expected in said
    assert len(said.splitlines()) == 1


def test_unusable_data_is_3(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("hello, this is no checkpoint")
    assert cli.main(["info", str(tmp_path / "notes.txt")]) == 3
    assert "no file that penstock reads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (PermissionError(13, "Permission denied"), 4, "Permission denied"),
        (SnapshotDiscarded("gone"), 6, "error: gone"),
        (ModuleNotFoundError("no", name="torch"), 5, 'pip install "penstock[rl]"'),
        (ModuleNotFoundError("no", name="other"), 70, "--debug"),
        (RuntimeError("two\nlines"), 70, "internal error: RuntimeError: two lines"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(error, code, expected, monkeypatch, capsys):
    def fail(words):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["info", "x"]) == code
    said = capsys.readouterr().err
    assert expected in said
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1
    assert cli.main(["info", "x", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error(checkpoint):
    done = subprocess.run(
        f"{sys.executable} -m penstock info {checkpoint} --json | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_info_and_doctor_speak_json(checkpoint, capsys):
    assert cli.main(["info", "--json", str(checkpoint)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts[0]["kind"] == "penstock checkpoint"
    assert facts[0]["metadata"] == {"note": "first"}
    assert cli.main(["doctor", "--json", str(checkpoint)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["findings"], result["files"]) == ([], 1)


def test_doctor_returns_1_on_a_finding(checkpoint, capsys):
    data = bytearray(checkpoint.read_bytes())
    data[-100] ^= 1
    checkpoint.write_bytes(data)
    assert cli.main(["doctor", str(checkpoint)]) == 1
    assert "finding: " in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_work_at_its_boundary_and_nowhere_else(number):
    """The work never sees an exception but at `check_stop`, wherever the signal finds it."""
    steps = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            cli._until_stopped(lambda: (steps.append(0), slow_work(number, steps)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps[-1] == "stopped"


def slow_work(number, steps):
    os.kill(os.getpid(), number)
    deadline_s = time.monotonic() + 20
    try:
        while time.monotonic() < deadline_s:
            check_stop()
            time.sleep(0.001)
    except KeyboardInterrupt:
        steps.append("stopped")
        raise


def test_names_from_files_never_command_the_terminal(tmp_path, monkeypatch, capsys):
    """A task, a bag's name: what they hold is spelled out, in results and in errors."""
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    monkeypatch.chdir(tmp_path)
    name = "e\x1b[31mvil.bag"
    write_sample(Path(name), seconds=1, cameras=1, width=64, height=48, state_hz=50)
    assert cli.main(["convert", name, "out", "--task", "red\x1b[31m", "--no-check"]) == 0
    assert cli.main(["info", "out"]) == 0
    assert cli.main(["build", "out"]) == 0
    assert cli.main(["info", "none\x1b[31m"]) != 0
    said = "".join(capsys.readouterr())
    assert "\x1b" not in said
    assert "red\\x1b[31m" in said
