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
from penstock.commands import VERBS
from penstock.core.interrupt import check_stop
from penstock.errors import SnapshotDiscarded
from penstock.samples import write_sample


@pytest.fixture
def checkpoint(tmp_path):
    torch = pytest.importorskip("torch", reason="writes a checkpoint")
    from penstock import AsyncCheckpointSaver

    with AsyncCheckpointSaver(tmp_path / "run") as saver:
        state = {"model": {"weight": torch.arange(5000.0)}, "step": 3}
        return saver.save_async(state, "a.pt", metadata={"note": "first"}).wait()


def test_every_verb_is_one_line_of_the_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for verb in VERBS:
        (line,) = [line for line in lines if line.split()[:1] == [verb]]
        assert len(line.split()) > 2  # with what it does


def test_without_torch_train_says_only_that():
    code = "import sys; sys.modules['torch'] = None; from penstock import cli; cli.main(['train'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == 'penstock: error: torch is not installed: pip install "penstock[rl]"\n'


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_is_one_screen(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([*verb.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert "example" in said
    lines = said.splitlines()
    assert len(lines) <= 40
    assert [line for line in lines if len(line) > 80] == []
    if verb:
        assert all(word in said for word in ("-q", "-v", "--json", "--debug"))


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

    assert min(once() for _ in range(3)) < 0.25


@pytest.mark.parametrize(
    ("verb", "absent"),
    [
        ("--help", {"torch", "numpy", "rich"}),
        ("info", {"torch"}),
        ("doctor", {"torch"}),
    ],
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
            "use one of info, convert, build, doctor, view, edit, rescue, card, push, ",
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
        (PermissionError(13, "Permission denied", "a/b"), 4, "check the permissions"),
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


def test_ctrl_c_while_the_command_is_loaded_is_one_line() -> None:
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started without
class Interrupting:
    def find_spec(self, name, *_):
        if name == "penstock.commands.parser":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from penstock.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "penstock: interrupted\n")


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


def test_old_spellings_work_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    write_sample(tmp_path / "a.bag", seconds=1, cameras=1, width=64, height=48, state_hz=50)
    words = ["convert", str(tmp_path / "a.bag"), str(tmp_path / "out"), "--no-check"]
    assert cli.main([*words, "--version", "v2.1"]) == 0
    assert "--format" in capsys.readouterr().err
    assert cli.main(["info", str(tmp_path / "out")]) == 0
    assert "v2.1" in capsys.readouterr().out
    assert cli.main(["export-policy", str(tmp_path / "none"), str(tmp_path / "a.onnx")]) != 0
    assert "is now export" in capsys.readouterr().err


def test_quiet_verbose_and_json_are_everywhere(tmp_path, monkeypatch, capsys):
    """-q says nothing of what went well; an answer is what was asked for, and is said."""
    monkeypatch.delenv("PENSTOCK_PROGRESS", raising=False)
    write_sample(tmp_path / "a.bag", seconds=1, cameras=1, width=64, height=48, state_hz=50)
    out = str(tmp_path / "out")
    assert cli.main(["convert", "-q", str(tmp_path / "a.bag"), out, "--no-check"]) == 0
    assert "".join(capsys.readouterr()) == ""
    assert "PENSTOCK_PROGRESS" not in os.environ
    assert cli.main(["build", "-q", out]) == 0
    assert "".join(capsys.readouterr()) == ""
    assert cli.main(["info", "-q", out]) == 0
    assert "episodes" in capsys.readouterr().out
    assert cli.main(["build", "--json", out]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 1
    assert cli.main(["info", "-q", "-v", out]) == 2


@pytest.fixture
def take(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    write_sample(tmp_path / "a.bag", seconds=1, cameras=1, width=64, height=48, state_hz=50)
    return str(tmp_path / "a.bag")


def test_no_output_is_wider_than_the_terminal(take, tmp_path, checkpoint, monkeypatch, capsys):
    """What doctor had to say of a dataset was one line of 170 letters."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", take, "out"]) == 0
    capsys.readouterr()
    for words in (["info", "a.bag"], ["info", "out", "-v"], ["info", "run"], ["info", "run/a.pt"],
                  ["doctor", "a.bag", "out", "run", "-v"], ["edit", "out", "relabel", "x"],
                  ["advise", "run/a.pt"], ["advise", "out", "--memory", "20kB"]):  # fmt: skip
        assert cli.main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        # A path is never cut, and that of this folder may be longer.
        assert not [line for line in lines if len(line) > 80 and str(tmp_path) not in line], words
        assert not [line for line in lines if line.startswith("for torch.load:p")]


def test_a_check_that_is_over_is_whole(take, tmp_path, monkeypatch, capsys):
    """Files that need no reading were counted: it ended at 89 %, and a second line said 0 of 0."""
    assert cli.main(["convert", take, str(tmp_path / "out"), "--no-check"]) == 0
    monkeypatch.setenv("PENSTOCK_PROGRESS", "plain")
    assert cli.main(["doctor", str(tmp_path / "out")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "100%" in line


def test_options_of_every_verb_may_stand_before_it(take, capsys):
    assert cli.main(["--json", "info", take]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["path"] == take
    assert cli.main(["-q", "doctor", take]) == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["info", "a.bag", "--wrong"], "penstock info --help"),
        (["--wrong"], "penstock --help"),
        (["info", "empty"], "give"),  # it was a folder of 0 checkpoints, and all was well
        (["info", "notes.txt"], "give"),
        (["view", "notes.txt", "--no-browser"], "not a bag"),  # a page of nothing was served
        (["view", "a.bag", "--no-browser", "--port", "70000"], "--port"),  # an internal error
        (["view", "a.bag", "--no-browser", "--episode", "9"], "episode 9"),  # an empty page
        (["convert", "a.bag", "out", "--memory", "lots"], "memory"),
        (["convert", "a.bag", "out", "--map", "."], "is a folder"),
        (["convert", "a.bag", "out", "--report", "none/x.html"], "--report"),
        (["train", "--config", "none.yaml"], "check the path"),  # "create the folder first"
        (["train", "zzz=1"], "nearest"),  # the names of all settings, in any order
        (["evaluate", "none"], "none"),
    ],
)
def test_mistakes_say_what_and_where(words, expected, take, tmp_path, monkeypatch, capsys):
    if words[0] in ("train", "evaluate"):
        pytest.importorskip("torchrl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello, this is no recording")
    assert cli.main(words) in (2, 3, 4)
    said = capsys.readouterr().err.splitlines()
    assert expected in said[-1]
    assert len(said) == 1
    assert len(said[0]) < 300
    assert not (tmp_path / "out").exists()  # nothing was done before the mistake was seen


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for verb in VERBS:
        assert verb in script
    assert "write-map" in script and "--version" not in script
    if shell == "bash":
        code = script + (
            "\nCOMP_WORDS=(penstock con); COMP_CWORD=1; _penstock; echo ${COMPREPLY[@]}"
            "\nCOMP_WORDS=(penstock convert a --for); COMP_CWORD=3; _penstock; echo ${COMPREPLY[@]}"
        )
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["convert", "--format"]


def test_runs_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for name, seed in (("a", 1), ("b", 2)):
        run = tmp_path / "runs" / name
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").write_text(f"name: {name}\nseed: {seed}\nenv: {{num_envs: 64}}\n")
        rows = [
            {"step": i, "env_frames": 1e6 * i, "perf/iteration": 2.0, "validation/success": i / 10}
            for i in (1, 3 - seed)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["runs", str(tmp_path / "runs"), "--sort", "valid"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert said.index("20.0%") < said.index("10.0%")
    assert "seed" in said and "num_envs" not in said
    assert cli.main(["runs", "--json", str(tmp_path / "runs" / "a")]) == 0
    (facts,) = json.loads(capsys.readouterr().out)["runs"]
    assert (facts["iteration"], facts["frames"], facts["seconds"]) == (2, 2e6, 4.0)
    assert cli.main(["runs", str(tmp_path)]) == 2
    capsys.readouterr()
    again = ["runs", "--json", *map(str, (tmp_path / "runs", tmp_path / "runs" / "a"))]
    assert cli.main(again) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2
