"""Full and read-only disks, hostile names and inputs, signals, two writers: one clear line each."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from harness import remount, small_disk
from penstock.cli import main
from penstock.dataset import check as doctor
from penstock.dataset.reader import Dataset
from penstock.errors import DataError, PenstockError, UsageError

from .test_convert import same_dataset

pytestmark = pytest.mark.timeout(300)

QUIET = {"progress": "quiet", "memory": "1GB", "check": False}
COMMAND = [sys.executable, "-m", "penstock", "convert"]
ENVIRONMENT = {**os.environ, "PENSTOCK_PROGRESS": "quiet"}
STREAMS = ("strict", "backslashreplace")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")


def command(*words: object) -> subprocess.CompletedProcess:
    """Run the command in this process, with streams as strict as those of a real one."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in STREAMS)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["convert", *map(str, words)])
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return subprocess.CompletedProcess(words, code, *texts)


def one_line(result: subprocess.CompletedProcess, code: int) -> str:
    """Return the error of a command that failed as it should: one line, the right code."""
    assert result.returncode == code, (result.returncode, result.stderr, result.stdout)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("penstock: ")
    return lines[0]


def leftovers(out: Path) -> list[str]:
    """Return what no finished conversion leaves: temporaries, staging, helpers beside it."""
    found = [p for p in out.parent.iterdir() if p.name.startswith(f".{out.name}")]
    found += [p for p in out.rglob("*") if "penstock-tmp" in p.name or p.name == "staging"]
    return [str(path) for path in found]


def assert_sound(out: Path, expected: Path) -> int:
    """Check what a stopped conversion left: nothing, or a prefix of the expected dataset."""
    if not (out / "meta/info.json").exists():
        return 0
    errors = [f for f in doctor.check(out, "all").findings if f.severity == "error"]
    assert errors == []
    dataset, whole = Dataset(out), Dataset(expected)
    for episode in dataset.episodes:
        columns = episode.columns()
        for name, values in whole.episode(episode.index).columns().items():
            assert (columns[name] == values).all(), name
    return len(dataset)


@pytest.fixture(scope="module")
def bags(samples, tmp_path_factory):
    """A folder of four small bags."""
    folder = tmp_path_factory.mktemp("bags")
    for seed in range(4):
        shutil.copy(samples(seconds=2, seed=seed).path, folder / f"take_{seed}.bag")
    return folder


@pytest.fixture(scope="module")
def whole(bags, tmp_path_factory):
    """Their dataset."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert penstock.convert(bags, out, **QUIET).ok
    return out


# Full and read-only disks.


@contextlib.contextmanager
def tmpfs(path: Path, options: str):
    """Mount a small disk."""
    with small_disk(path, options) as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        yield path


# From too small for the first staged video to too small for the build: see the stages seen below.
SIZES_KB = (24, 180, 300, 400, 600, 1000, 1200, 1400)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk(bags, whole, tmp_path, workers):
    sizes = SIZES_KB if workers == 1 else (300, 1200)
    stages = []
    for size_kb in sizes:
        with tmpfs(tmp_path / f"disk-{size_kb}", f"size={size_kb}k") as disk:
            out = disk / "out"
            words = (bags, out, "--workers", workers, "--memory", "1GB", "--no-check")
            report = ("--report", tmp_path / "page.html")
            result = command(*words, *report)
            if result.returncode == 0:
                stages.append((size_kb, "none"))
                continue
            line = one_line(result, 4)
            assert "No space left on device; free some space" in line
            assert_sound(out, whole)
            committed = committed_units(out)
            if out.exists():
                assert leftovers(out) == []
            stages.append((size_kb, "build" if committed == 4 else committed))
            remount(disk, "size=16m")
            again = command(*words, *report, "--resume")
            assert again.returncode == 0, again.stderr
            assert same_dataset(out, whole) == []
            assert leftovers(out) == []
    if workers == 1:
        # It failed before the first commit, between commits, and in the build at the end.
        seen = {stage for _, stage in stages}
        assert 0 in seen, stages
        assert {1, 2, 3} & seen, stages
        assert "build" in seen, stages


def test_a_read_only_disk(bags, whole, tmp_path):
    with tmpfs(tmp_path / "disk", "size=16m") as disk:
        shutil.copytree(whole, disk / "old")
        remount(disk, "ro")
        for out, mode in ((disk / "out", ()), (disk / "old", ("--resume",))):
            started_s = time.monotonic()
            line = one_line(command(bags, out, "--memory", "1GB", *mode), 4)
            assert "read-only" in line
            assert time.monotonic() - started_s < 20
        assert same_dataset(disk / "old", whole) == []


def test_the_report_on_a_full_disk_does_not_harm_the_dataset(bags, whole, tmp_path):
    with tmpfs(tmp_path / "disk", "size=16k") as disk:
        line = one_line(command(bags, tmp_path / "out", "--report", disk / "page.html"), 4)
        assert "page.html" in line
        assert same_dataset(tmp_path / "out", whole) == []
        assert list(disk.iterdir()) == []


def test_a_killed_command_leaves_nothing_beside_the_dataset_for_long(bags, tmp_path):
    """A kill while the page is written leaves a temporary there, which the next command sweeps."""
    child = subprocess.run([sys.executable, "-c", TEMPORARY, str(tmp_path)], capture_output=True)
    assert child.returncode == 0, child.stderr
    assert len(list(tmp_path.iterdir())) == 1
    assert command(bags, tmp_path / "out", "--no-check").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.html"]


TEMPORARY = """
import sys
from pathlib import Path
from penstock.core.files import temporary_path
temporary_path(Path(sys.argv[1])).touch()
"""


# Wrong words.


def test_out_is_a_file(bags, tmp_path):
    target = tmp_path / "out"
    target.write_text("mine")
    for mode in ((), ("--resume",), ("--append",), ("--overwrite",)):
        assert "is a file" in one_line(command(bags, target, *mode), 2)
    assert target.read_text() == "mine"
    assert "not a folder" in one_line(command(bags, target / "below"), 4)


def test_missing_parents_are_made_and_not_left_by_a_failure(bags, whole, tmp_path):
    out = tmp_path / "a" / "b" / "out"
    assert penstock.convert(bags, out, **QUIET).ok
    assert same_dataset(out, whole) == []
    with pytest.raises(UsageError):
        penstock.convert(bags, tmp_path / "c" / "d", fps=0, **QUIET)
    assert not (tmp_path / "c").exists()


def test_unreadable_bags(samples, tmp_path):
    good = samples(seconds=2).path
    folder = tmp_path / "bags"
    folder.mkdir()
    shutil.copy(good, folder / "good.bag")
    (folder / "empty.bag").touch()
    (folder / "folder.bag").mkdir()
    (folder / "dangling.bag").symlink_to(tmp_path / "nowhere")
    (folder / "loop.bag").symlink_to(folder / "loop.bag")
    (folder / "text.bag").write_text("not a bag")
    (folder / "random.mcap").write_bytes(os.urandom(5000))
    os.mkfifo(folder / "pipe.bag")
    report = penstock.convert(folder, tmp_path / "out", **QUIET)
    assert report.total_episodes == 1
    assert {p.name for p in report.failed} == {"empty.bag", "text.bag", "random.mcap"}
    assert all("\n" not in reason for reason in report.failed.values())
    alone = penstock.convert(good, tmp_path / "alone", **QUIET)
    assert alone.ok
    assert same_dataset(tmp_path / "out", tmp_path / "alone", origin=False) == []


@pytest.mark.parametrize("kind", ["empty", "folder", "dangling", "loop", "fifo", "missing"])
@pytest.mark.timeout(20)
def test_one_unreadable_bag_is_one_line(tmp_path, kind):
    bag = tmp_path / "x.bag"
    match kind:
        case "empty":
            bag.touch()
        case "folder":
            bag.mkdir()
        case "dangling":
            bag.symlink_to(tmp_path / "nowhere")
        case "loop":
            bag.symlink_to(bag)
        case "fifo":
            os.mkfifo(bag)
    result = command(bag, tmp_path / "out")
    assert str(bag) in one_line(result, 3)
    assert not (tmp_path / "out").exists()


def test_a_bag_given_twice_is_converted_once(bags, tmp_path):
    bag = bags / "take_0.bag"
    twin = tmp_path / "link.bag"
    twin.symlink_to(bag)
    report = penstock.convert([bag, bag, twin, bags / "." / "take_0.bag"], tmp_path / "o", **QUIET)
    assert report.total_episodes == 1


def test_copies_of_a_bag_are_the_same_with_and_without_a_break(samples, tmp_path):
    """A bag is known by its content: its copy must not depend on whether a run was interrupted."""
    folder = tmp_path / "bags"
    folder.mkdir()
    for name in ("a.bag", "b.bag"):
        shutil.copy(samples(seconds=2).path, folder / name)
    at_once = penstock.convert(folder, tmp_path / "once", **QUIET)
    penstock.convert(folder / "a.bag", tmp_path / "broken", **QUIET)
    resumed = penstock.convert(folder, tmp_path / "broken", resume=True, **QUIET)
    assert at_once.total_episodes == resumed.total_episodes


def test_out_inside_the_bags_folder(bags, whole, tmp_path):
    folder = tmp_path / "bags"
    shutil.copytree(bags, folder)
    assert penstock.convert(folder, folder / "out", **QUIET).ok
    assert same_dataset(folder / "out", whole) == []
    again = penstock.convert(folder, folder / "out", resume=True, **QUIET)
    assert len(again.skipped) == 4
    for mode in ({}, {"overwrite": True}, {"append": True}):
        with pytest.raises(UsageError, match=r"not empty|lies in"):
            penstock.convert(folder, folder, **mode, **QUIET)
    assert len(list(folder.glob("*.bag"))) == 4


def test_overwriting_never_deletes_the_bags(bags, whole, tmp_path):
    """A bag that lies in the dataset to be overwritten would be moved aside, and deleted."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "raw").mkdir()
    shutil.copy(bags / "take_0.bag", out / "raw" / "take_0.bag")
    with pytest.raises(UsageError, match="take_0"):
        penstock.convert([bags / "take_1.bag", out / "raw"], out, overwrite=True, **QUIET)
    assert (out / "raw" / "take_0.bag").exists()
    assert same_dataset(out, whole) == ["raw/take_0.bag"]


def test_out_may_be_the_folder_one_is_in(bags, whole, tmp_path, monkeypatch, capsys):
    here = tmp_path / "data.v1"
    here.mkdir()
    monkeypatch.chdir(here)
    assert main(["convert", str(bags), ".", "--no-check", "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["report"]).name == "data.v1.html"
    assert same_dataset(here, whole) == []


@pytest.mark.parametrize(
    "name",
    [
        "with space.bag",
        "-dash.bag",
        "--resume",
        "new\nline.bag",
        "tick`$(x).bag",
        "名字.bag",
        "fps=3.bag",
        "a" * 250 + ".bag",
        "\udcff.bag",
    ],
)
def test_names_of_bags(samples, tmp_path, name):
    bag = tmp_path / "bags" / name
    bag.parent.mkdir()
    shutil.copy(samples(seconds=2).path, bag)
    out = tmp_path / "out"
    # As words that begin with a dash would, a path is given with its folder, or after `--`.
    result = command(bag, out, "--json", "--memory", "1GB")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["frames_out"] == 60
    again = command(bag, out, "--resume", "--memory", "1GB")
    assert again.returncode == 0, again.stderr
    assert "1 done before" in again.stdout
    damaged = bag.with_name("cut" + name[-100:])
    damaged.write_bytes(bag.read_bytes()[:5000])
    one_line(command(damaged, tmp_path / "none"), 3)


WRONG_WORDS = [
    ("fpss=3", "did you mean 'fps'"),
    ("fps=0", "fps"),
    ("fps=x", "fps"),
    ("fps=1e400", "fps"),
    ("split_frames=-1", "split_frames"),
    ("gap=never", "gap"),
    ("codec=mp4", "codec"),
    ("clock=wall", "clock"),
    ("hold_s=nan", "hold_s"),
    ("task=", ""),
    ("features=[]", "features"),
    ("features.x.y=1", "feature 'x' has an unknown key 'y'"),
]


@pytest.mark.parametrize(("word", "text"), WRONG_WORDS)
def test_wrong_settings(bags, tmp_path, capsys, word, text):
    code = main(["convert", str(bags), str(tmp_path / "out"), "--no-check", word])
    error = capsys.readouterr().err
    if word == "task=":
        assert code in (0, 2), error
        return
    assert code == 2, error
    assert error.count("\n") == 1
    assert text in error
    assert not (tmp_path / "out").exists()


HOSTILE_FEATURES = [
    "../../evil",
    "/etc/evil",
    "a/b",
    "..",
    ".",
    "",
    "nul\0",
    "new\nline",
    "x" * 300,
    "timestamp",
    "{chunk_index}",
    "observation.images.\u202egnp",
    "observation.images.\u00e9",  # looks like the next one
    "observation.images.e\u0301",
]


@pytest.mark.parametrize("name", HOSTILE_FEATURES)
@pytest.mark.parametrize("camera", [True, False])
def test_names_of_features(samples, tmp_path, name, camera):
    from penstock.conversion.settings import from_json

    facts = samples(seconds=2)
    state = {"topic": "/sensors_data_raw", "field": "joint_data.joint_q"}
    picture = {"topic": facts.cameras[0], "kind": "color"}
    features = {"observation.state": state, name: picture if camera else state}
    out = tmp_path / "root" / "out"
    out.parent.mkdir()
    before = sorted(tmp_path.rglob("*"))
    try:
        mapping = from_json({"fps": 30, "features": features})
        report = penstock.convert(facts.path, out, mapping, **QUIET)
    except PenstockError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 400
        assert sorted(tmp_path.rglob("*")) == before
    else:
        raise AssertionError(f"{name!r} became a feature: {report.text()}")
    assert {p.name for p in tmp_path.iterdir()} == {"root"}
    assert {p.name for p in out.parent.iterdir()} <= {"out"}


HOSTILE_TOPICS = [
    "/../../evil/image_raw/compressed",
    "/a\0b/image_raw/compressed",
    "/" + "x" * 300 + "/image_raw/compressed",
    "/\u00e9/image_raw/compressed",
    "/e\u0301/image_raw/compressed",
    "/new\nline/compressed",
    "//",
    "",
    "/.hidden./compressed",
    "/{video_key}/compressed",
    "/a\\b/compressed",
    "/CON/compressed",
]


def test_names_of_topics(samples, tmp_path):
    """A recording with hostile topics: all that is guessed from them stays inside the dataset."""
    from mcap.writer import Writer

    from penstock.bags import open_bag

    bag = tmp_path / "root" / "x.mcap"
    bag.parent.mkdir()
    with open_bag(samples("c.mcap", kind="mcap", seconds=2, cameras=1).path) as source:
        camera = next(t for t in source.topics.values() if "Image" in t.type)
        pictures = [(m.t_ns, bytes(m.data)) for m in source.read([camera.name])]
    with bag.open("wb") as file:
        writer = Writer(file)
        writer.start()
        schema = writer.register_schema(camera.type, "ros2msg", camera.definition.encode())
        channels = [writer.register_channel(name, "cdr", schema) for name in HOSTILE_TOPICS]
        for t_ns, data in pictures:
            for channel in channels:
                writer.add_message(channel, t_ns, data, t_ns)
        writer.finish()
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "root" / "out"
    try:
        report = penstock.convert(bag, out, codec="copy", **QUIET)
    except PenstockError as error:
        assert "\n" not in str(error), error
        assert sorted(tmp_path.rglob("*")) == before
    else:
        assert report.ok, report.text()
        assert len(Dataset(out).camera_keys) == len(HOSTILE_TOPICS)
        assert not [f for f in doctor.check(out, "sample").findings if f.severity == "error"]
    assert {p.name for p in tmp_path.iterdir()} == {"root"}
    assert {p.name for p in out.parent.iterdir()} <= {"out", "x.mcap"}


def test_a_map_that_is_no_map(bags, tmp_path):
    target = tmp_path / "map.yaml"
    for text in ("", "[1, 2", "fps: !!python/object/apply:os.system ['touch pwned']", "a: " * 5000):
        target.write_text(text)
        line = one_line(command(bags, tmp_path / "out", "--map", target), 2)
        assert "map.yaml" in line
        assert len(line) < 500
    target.write_bytes(b"\xff\xfe\x00")
    assert "map.yaml" in one_line(command(bags, tmp_path / "out", "--map", target), 2)
    assert not (tmp_path / "out").exists()
    assert not Path("pwned").exists()


# Signals and other processes.


def children_of(pid: int) -> list[int]:
    text = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in text.stdout.split()]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] not in "ZX"
    return False


def committed_units(out: Path) -> int:
    """Count the units that wait to be built, and those that are."""
    built = 0
    with contextlib.suppress(OSError):
        built = (out / "meta/penstock/built.jsonl").read_bytes().count(b"\n") - 1
    return built + len(list(out.glob(".penstock/units/*/unit.json")))


def stopped(bags: Path, out: Path, workers: int, number: int, after: int, group: bool):
    """Convert, send a signal after so many commits; return how it ended, and its workers."""
    process = subprocess.Popen(
        [*COMMAND, str(bags), str(out), "--workers", str(workers), "--memory", "1GB", "--no-check"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
        # A shell in the background lets its programs ignore SIGINT: not what is tested here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while process.poll() is None and (
            committed_units(out) < after or not (out / ".penstock.lock").exists()
        ):
            time.sleep(0.002)
        if workers > 1 and not after:
            while process.poll() is None and len(children_of(process.pid)) < 2:
                time.sleep(0.01)
        workers_found = children_of(process.pid)
        (os.killpg if group else os.kill)(process.pid, number)
        sent_s = time.monotonic()
        output, error = process.communicate(timeout=240)
        took_s = time.monotonic() - sent_s
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, error, took_s, workers_found


CASES = [(1, 0, True), (1, 2, False), (2, 0, True), (2, 1, False)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("workers", "after", "group"), CASES)
def test_a_signal_stops_it_at_once_and_it_can_be_resumed(
    bags, whole, tmp_path, number, workers, after, group
):
    """As by Ctrl-C, which goes to all workers, and as by `kill`."""
    out = tmp_path / "out"
    code, _, error, took_s, children = stopped(bags, out, workers, number, after, group)
    assert code == 128 + number, (code, error)
    assert len(error.splitlines()) == 1, error
    assert took_s < 10
    deadline_s = time.monotonic() + 5
    while any(alive(child) for child in children) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not [child for child in children if alive(child)]
    assert leftovers(out) == []
    assert assert_sound(out, whole) >= after  # what was committed was built
    again = command(bags, out, "--resume", "--memory", "1GB")
    assert again.returncode == 0, again.stderr
    assert same_dataset(out, whole) == []
    assert leftovers(out) == []


def test_a_signal_while_the_files_are_built_costs_no_bag(
    bags, whole, tmp_path, monkeypatch, capsys
):
    def stopped(*_):
        raise KeyboardInterrupt

    words = ["convert", str(bags), str(tmp_path / "out"), "--memory", "1GB", "--no-check", "-q"]
    with monkeypatch.context() as patch:
        patch.setattr("penstock.dataset.writer.build", stopped)
        assert main(words) == 130
    assert "--resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert same_dataset(tmp_path / "out", whole) == []


def test_workers_end_with_whoever_started_them(bags, tmp_path):
    code, _, _, _, children = stopped(bags, tmp_path / "out", 2, signal.SIGKILL, 1, False)
    assert code == -signal.SIGKILL
    assert children
    deadline_s = time.monotonic() + 20
    while any(alive(child) for child in children) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not [child for child in children if alive(child)]


def test_a_worker_that_dies_is_a_failed_bag(bags, whole, tmp_path):
    """As the kernel does when memory runs out: the other bags are converted."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*COMMAND, str(bags), str(out), "--workers", "2", "--memory", "1GB", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    victim = None
    while victim is None and process.poll() is None:
        for unit in out.glob(".penstock/units/.penstock-tmp-*"):
            pid = int(unit.name.split("-")[3])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                victim = pid if unit.exists() else None  # it is at work on it, and stays so
                os.kill(pid, signal.SIGKILL if victim else signal.SIGCONT)
                break
    output, error = process.communicate(timeout=240)
    assert process.returncode == 1, error
    facts = json.loads(output)
    (reason,) = facts["failed"].values()
    assert "its worker ended with code -9" in reason
    assert facts["episodes"] == 3
    again = command(bags, out, "--resume", "--memory", "1GB")
    assert again.returncode == 0, again.stderr
    assert same_dataset(out, whole) == []  # in its place, though it came last


def test_the_second_writer_is_refused_at_once(bags, tmp_path):
    """Two real processes; the one that holds the folder is named."""
    out = tmp_path / "out"
    first = subprocess.Popen(
        [*COMMAND, str(bags), str(out), "--memory", "1GB", "--no-check"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        while committed_units(out) < 1:
            assert first.poll() is None, first.communicate()
            time.sleep(0.002)
        first.send_signal(signal.SIGSTOP)  # it must not be done before we are
        for mode in ("--resume", "--append", "--overwrite"):
            program = (
                "import sys, time, penstock.conversion.run as run\n"
                "from penstock.errors import LockHeld\n"
                f"request = run.make_request({str(bags)!r}, {str(out)!r}, {mode[2:]}=True)\n"
                "start_s = time.process_time()\n"
                "try:\n    run.run_request(request)\n"
                "except LockHeld as error:\n    print(time.process_time() - start_s, error)\n"
            )
            result = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                timeout=240,
                check=True,
            )
            took_s, _, text = result.stdout.partition(" ")
            assert float(took_s) < 1.0
            assert f"is being written by process {first.pid} on " in text
            line = one_line(command(bags, out, mode), 4)
            assert f"process {first.pid}" in line
        first.send_signal(signal.SIGCONT)
        _, error = first.communicate(timeout=240)
        assert first.returncode == 0, error
    finally:
        if first.poll() is None:
            first.kill()
            first.communicate()
    assert len(Dataset(out)) == 4


@pytest.mark.parametrize("place", ["rename", "exchange"])
def test_an_interrupt_in_a_commit_or_a_build_loses_nothing(bags, whole, tmp_path, place):
    """Whatever raises there: what was committed is kept, and the next run goes on."""
    from penstock.dataset import swap

    out, rename, exchange = tmp_path / "out", os.rename, swap.exchange

    def renamed(source, target):
        rename(source, target)
        if Path(target).parent.name == "units":
            raise KeyboardInterrupt

    def exchanged(new, root):
        exchange(new, root)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if place == "rename":
            patch.setattr(os, "rename", renamed)
        else:
            patch.setattr(swap, "exchange", exchanged)
        with pytest.raises(KeyboardInterrupt):
            penstock.convert(bags, out, **QUIET)
    assert committed_units(out) >= 1
    report = penstock.convert(bags, out, resume=True, **QUIET)
    assert report.ok
    assert len(report.skipped) == (1 if place == "rename" else 4)
    assert same_dataset(out, whole) == []
    assert leftovers(out) == []


def test_no_bag_is_a_data_error_before_anything_is_made(tmp_path):
    with pytest.raises(DataError):
        penstock.convert([], tmp_path / "out", **QUIET)
    assert list(tmp_path.iterdir()) == []


def test_the_page_shows_the_episodes(bags, tmp_path):
    out, page = tmp_path / "out", tmp_path / "out.html"
    assert main(["convert", str(bags), str(out), "-q", "--no-check"]) == 0
    text = page.read_text()
    assert "<h2>Episodes</h2>" in text and "<h2>The first episode</h2>" in text
    for name in ("observation.state", "action"):
        assert f'aria-label="{name} over s"' in text
