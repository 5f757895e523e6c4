"""Power loss and kill -9 at any system call: every committed unit is there, whole, or built.

A real writer is recorded once per format: three units, a build in the middle and one at the end.
Then every state that a disk may be in after any prefix of its calls is built and resumed.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.dataset.plan import Built
from penstock.dataset.unit import Unit, file_digest, json_digest
from penstock.errors import PenstockError
from powerloss import Call, Disk, Tree, build, has_strace, record

STAGING = Path(__file__).with_name("staging.py")
s = SimpleNamespace(**runpy.run_path(str(STAGING)))
VERSIONS = ["v3.0", "v2.1"]
EPISODES = 3
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_strace(), reason="needs strace (apt-get install strace) and ptrace"),
]
PROGRAM = """
import os, runpy, sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch
staging, root, count, version, broken = sys.argv[1:]
notes = os.open(root + "/notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
write = runpy.run_path(staging)["write_dataset"]
with patch(broken, lambda *what: None) if broken else nullcontext():
    write(Path(root, "out"), int(count), version=version, mode="resume",
          tell=lambda line: os.write(notes, line.encode()))
"""


@pytest.fixture
def memory(tmp_path) -> Iterator[Path]:
    """A folder in memory, if there is one: thousands of trees are built and removed."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=in_memory) as made:
        yield Path(made)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The files of a dataset that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    for version in VERSIONS:
        s.write_dataset(folder / version, EPISODES, version=version)
    return {version: s.files_of(folder / version) for version in VERSIONS}


def record_writer(tmp_path: Path, version: str, broken: str = "") -> tuple[Disk, list[Call]]:
    root = tmp_path / "disk"
    root.mkdir()
    words = STAGING, root, EPISODES, version, broken
    return Disk(str(root)), record(PROGRAM, *words, log=tmp_path / "log")


def problems(out: Path, version: str, committed: set[int]) -> Iterator[str]:
    """Say what of the committed units is lost or damaged, and what of the dataset is."""
    if not out.exists() and not committed:
        return
    with s.open_writer(out, "resume", version=version) as writer:
        there = {record.source["number"] for record in writer.records}
        if committed - there:
            yield f"units {sorted(committed - there)} are lost"
        for folder in writer.units.glob("*/unit.json"):
            unit = Unit.open(folder.parent)
            for name, digest in unit.files.items():
                if file_digest(unit.folder / name) != digest:
                    yield f"unit {unit.record.source}: {name} is damaged"
        built = Built.read(out)
        for name, digest in built.files.items() if built else ():
            path = out / name
            found = json_digest(path.read_bytes()) if name.endswith("json") else file_digest(path)
            if found != digest:
                yield f"{name} of the dataset is damaged"


def identity(tree: Tree) -> frozenset[tuple[str, object]]:
    """Return what matters of a tree: not what is under way, which nobody reads again."""
    under_way = re.compile(r".*\.penstock-tmp.*|\.out\.penstock-new/(?!\.penstock/units).*")
    return frozenset((n, text) for n, text in tree.items() if not under_way.fullmatch(n))


def lose_power(
    disk: Disk, calls: list[Call], where: Path, version: str, whole: dict[str, bytes], every: int
) -> tuple[int, list[str]]:
    """Lose the power after every call; return the number of states, and what went wrong."""
    committed: set[int] = set()
    seen = set()
    wrong = []
    for number, call in enumerate(calls):
        if not disk.apply(call):
            continue
        said = re.match(rb"committed (\d+)", call.texts[0]) if call.name == "write" else None
        if said:
            committed.add(int(said[1]))
        for tree in disk.states():
            key = hash((len(committed), identity(tree)))
            if key in seen:
                continue
            seen.add(key)
            build(tree, where)
            try:
                found = list(problems(where / "out", version, committed))
                if len(seen) % every == 0:
                    s.write_dataset(where / "out", EPISODES, version=version, mode="resume")
                    if s.files_of(where / "out") != whole:
                        found.append("going on gives another dataset")
            except (PenstockError, OSError) as error:
                found = [f"{type(error).__name__}: {error}"]
            wrong += [f"call {number} ({call.name}), state {len(seen)}: {what}" for what in found]
            shutil.rmtree(where)
    assert committed == set(range(EPISODES))
    return len(seen), wrong


@pytest.mark.parametrize("version", VERSIONS)
def test_power_loss(tmp_path, memory, whole, version):
    disk, calls = record_writer(tmp_path, version)
    states, wrong = lose_power(disk, calls, memory / "replayed", version, whole[version], 10)
    sys.stdout.write(f"{version}: {len(calls)} calls, {states} states\n")
    assert wrong == []
    assert states > 200


@pytest.mark.stress
@pytest.mark.parametrize("broken", ["os.fsync", "penstock.dataset.unit.sync_folder"])
def test_a_writer_that_does_not_sync_is_found_out(tmp_path, memory, whole, broken):
    disk, calls = record_writer(tmp_path, "v3.0", broken)
    assert lose_power(disk, calls, memory / "replayed", "v3.0", whole["v3.0"], 50)[1]


CALLS = ("mkdir", "rename", "renameat2", "link", "linkat", "unlink", "unlinkat", "rmdir")
CALLS += ("fsync", "write", "ftruncate")


@pytest.mark.stress
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("version", VERSIONS)
def test_kill_at_every_third_call(tmp_path, whole, version):
    """Each time a new process is killed in a call, before it is done; then another goes on."""
    kills = 0
    for call in CALLS:
        for number in range(1, 10_000, 3):
            root = tmp_path / f"{call}{number}"
            root.mkdir()
            kill = f"inject={call}:signal=KILL:when={number}"
            command = ["strace", "-f", "--seccomp-bpf", "-o", os.devnull, "-e", kill]
            command += [sys.executable, "-c", PROGRAM, str(STAGING), str(root)]
            command += [str(EPISODES), version, ""]
            ended = subprocess.run(command, capture_output=True, timeout=300, check=False)
            if ended.returncode == 0:
                break
            kills += 1
            said = (root / "notes").read_bytes() if (root / "notes").exists() else b""
            committed = {int(found) for found in re.findall(rb"committed (\d+)", said)}
            assert list(problems(root / "out", version, committed)) == []
            s.write_dataset(root / "out", EPISODES, version=version, mode="resume")
            assert s.files_of(root / "out") == whole[version]
            assert {path.name for path in root.iterdir()} <= {"notes", "out"}
            shutil.rmtree(root)
    sys.stdout.write(f"{version}: {kills} kills\n")
    assert kills > 50
