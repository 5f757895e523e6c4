"""Kill -9 conversions, again and again, and look at what they leave.

Usage: kill_campaign.py FOLDER KILLS [SEED]. Prints one JSON line with the figures. Each victim is
forked from this process (everything is imported once), leads a process group of its own, and is
killed with all its workers. It reports through a pipe when it opens, commits and packs: the truth
about what was acknowledged is kept outside of it. Everything that reads datasets is forked, too, so
that this process never has a thread.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock import samples
from penstock.cli import main as penstock
from penstock.commands import convert
from penstock.conversion import run as conversion
from penstock.dataset import check as doctor
from penstock.dataset.reader import Dataset
from penstock.dataset.unit import UnitWriter
from penstock.dataset.writer import DatasetWriter

BAGS = 3
# What a victim says; a capital follows when it is done.
OPEN, COMMIT, BUILD = b"o", b"c", b"b"
PHASES = {OPEN: "opening", COMMIT: "commit", BUILD: "build"}
assert callable(convert.run)  # imported here, not in every victim


@dataclass(frozen=True)
class Case:
    """How a victim converts."""

    workers: int = 1
    version: str = "v3.0"
    split_frames: int = 0
    overwrite: bool = False

    @property
    def reference(self) -> str:
        """Cases of one reference make the same dataset."""
        return f"{self.version}-{self.split_frames}"

    def words(self, bags: Path, out: Path, mode: list[str]) -> list[str]:
        found = ["convert", str(bags), str(out), "--format", self.version, *mode]
        found += ["--workers", str(self.workers), "--memory", "1GB"]
        return found + ([f"split_frames={self.split_frames}"] if self.split_frames else [])


CASES = [
    Case(),
    Case(workers=2),
    Case(split_frames=25),
    Case(workers=2, split_frames=25),
    Case(version="v2.1"),
    Case(overwrite=True),
    Case(workers=2, overwrite=True),
    Case(workers=2, version="v2.1", split_frames=25),
]


@dataclass
class Figures:
    """What came of it; the last five must stay empty."""

    kills: int = 0
    by_phase: dict[str, int] = field(default_factory=dict)
    in_resume: int = 0
    datasets: int = 0
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)


def told(pipe: int) -> None:
    """Let the writer report, from now on, what it does."""

    def wrap(owner, name, letter):
        function = getattr(owner, name)

        def reporting(*args, **kwargs):
            os.write(pipe, letter)
            result = function(*args, **kwargs)
            os.write(pipe, letter.upper())
            return result

        setattr(owner, name, reporting)

    def begun(writer, commit=UnitWriter.commit):
        os.write(pipe, COMMIT)
        return commit(writer)

    def jobs(*args, run_jobs=conversion.run_jobs):
        for job, outcome in run_jobs(*args):
            os.write(pipe, COMMIT.upper())  # in this process, or in a worker
            yield job, outcome

    wrap(DatasetWriter, "__init__", OPEN)
    wrap(DatasetWriter, "build", BUILD)
    UnitWriter.commit, conversion.run_jobs = begun, jobs


def start(words: list[str], log: Path) -> tuple[int, int]:
    """Fork a conversion; return its process and what it tells."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            os.close(read)
            file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
            os.dup2(file, 1)
            os.dup2(file, 2)
            told(write)
            code = penstock(words)
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    return pid, read


class Victim:
    """One conversion, watched; killed, or left to end."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.began_s = time.monotonic()
        self._pid, self._pipe = start(words, log)
        self.events: list[tuple[float, bytes]] = []
        self.ended = False

    def watch(self, until_s: float | None, event: tuple[bytes, int] | None = None) -> None:
        """Read what it tells until a time, or until the n-th event of a kind, or its end."""
        while not self.ended:
            if event is not None and [e for _, e in self.events].count(event[0]) >= event[1]:
                return
            left = None if until_s is None else until_s - (time.monotonic() - self.began_s)
            if left is not None and left <= 0:
                return
            if not select.select([self._pipe], [], [], left)[0]:
                return
            data = os.read(self._pipe, 1)
            self.ended = not data
            if data:
                self.events.append((time.monotonic() - self.began_s, data))

    def kill(self) -> int:
        """Kill it and all its workers; return its exit code, negative for a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        self.watch(None)  # what it told before its end
        os.close(self._pipe)
        _, status = os.waitpid(self._pid, 0)
        while group_lives(self._pid):
            time.sleep(0.005)
        return os.waitstatus_to_exitcode(status)

    @property
    def acknowledged(self) -> int:
        return sum(event == COMMIT.upper() for _, event in self.events)

    @property
    def phase(self) -> str:
        """In which phase it was last."""
        last = self.events[-1][1] if self.events else b""
        if not self.events:
            return "start"
        return PHASES.get(last, "after the build" if last == b"B" else "converting")


def group_lives(group: int) -> bool:
    """Whether a process of a group is alive; a killed one may take a moment to be gone."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(words[2]) == group and words[0] not in "ZX":
                    return True
    return False


def in_child(function, *arguments):
    """Call a function in a fork; return its JSON value, or raise SystemExit with its traceback."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            value = {"value": function(*arguments)}
        except BaseException:
            value = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            json.dump(value, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = json.load(pipe)
    os.waitpid(pid, 0)
    return answer


def contents(out: Path) -> list[str]:
    """Return a digest of each episode: its numbers and its decoded pictures."""
    found = []
    dataset = Dataset(out)
    for number in range(len(dataset.episodes)):
        digest = hashlib.blake2b()
        for name, column in sorted(dataset.episode(number).columns().items()):
            digest.update(name.encode() + np.ascontiguousarray(column).tobytes())
        for k, frame in enumerate(dataset.episode(number).frames(dataset.camera_keys)):
            if k % 5 == 0:
                for picture in frame.values():
                    digest.update(np.ascontiguousarray(picture).tobytes())
        found.append(digest.hexdigest())
    return found


def units_of(out: Path) -> list[str]:
    """Return the bags that are committed: built, or waiting to be."""
    replaces = False
    with contextlib.suppress(FileNotFoundError):
        replaces = json.loads((out / ".penstock/plan.json").read_bytes())["replaces"]
    found = {json.loads(p.read_bytes())["record"]["source"]["bag"] for p in waiting(out)}
    with contextlib.suppress(FileNotFoundError):
        lines = (out / "meta/penstock/built.jsonl").read_bytes().splitlines()[1:]
        lines = [] if replaces else lines  # of the dataset that is to be replaced
        found |= {json.loads(line.partition(b" ")[2])["source"]["bag"] for line in lines}
    return sorted(found)


def begun(case: Case, out: Path) -> bool:
    """Whether the overwriting has got so far that it can be resumed."""
    with contextlib.suppress(FileNotFoundError):
        plan = json.loads((out / ".penstock/plan.json").read_bytes())
        return plan["version"] == case.version and bool(waiting(out) or not plan["replaces"])
    return False


def waiting(out: Path) -> list[Path]:
    """Return the records of units; a kill may leave their folder with the dataset before."""
    folders = [out, *out.parent.glob(f".{out.name}.penstock-*")]
    return [path for each in folders for path in each.glob(".penstock/units/*/unit.json")]


def state_of(out: Path) -> dict:
    """Look at what a kill left, as a user would: with the reader and the doctor."""
    if not (out / "meta/info.json").exists():
        return {"episodes": None, "errors": []}
    checkup = doctor.check(out, "sample")
    errors = [f"{f.where}: {f.what}" for f in checkup.findings if f.severity == "error"]
    return {"episodes": contents(out), "errors": errors}


class Campaign:
    """Conversions that are killed, resumed, killed again, and in the end compared."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.figures = Figures()
        self._chance = random.Random(seed)
        self._log = folder / "log.txt"
        self._bags = folder / "bags"
        self._bags.mkdir(parents=True)
        size = {"seconds": 2, "width": 256, "height": 48, "state_hz": 100, "camera_hz": 30}
        for k in range(BAGS):
            in_child(lambda k=k: str(samples.write_sample(self._bags / f"{k}.bag", seed=k, **size)))
        self._references: dict[str, tuple[Path, list[str]]] = {}
        self._whole_s = 0.0  # of an undisturbed conversion

    def reference(self, case: Case) -> tuple[Path, list[str]]:
        """Return the dataset of a conversion that nobody disturbed, and its contents."""
        if case.reference not in self._references:
            out = self.folder / f"whole-{case.reference}"
            victim = self._start(case, out, ["--no-check"])
            code = victim.wait()
            self._whole_s = self._whole_s or time.monotonic() - victim.began_s
            if code != 0:
                raise SystemExit(f"the reference failed:\n{self._log.read_text()[-3000:]}")
            answer = in_child(state_of, out)
            state = answer.get("value") or {}
            if state.get("errors") != [] or not state.get("episodes"):
                raise SystemExit(f"the reference is not sound: {answer}")
            self._references[case.reference] = out, state["episodes"]
        return self._references[case.reference]

    def round(self, case: Case, kills: int, budget: int) -> None:
        """Convert into one folder, with so many kills on the way."""
        reference, expected = self.reference(case)
        number = self.figures.datasets
        out = self.folder / f"round-{number}" / "out"
        out.parent.mkdir()
        if case.overwrite:
            shutil.copytree(self.reference(Case(version="v2.1"))[0], out)
        acknowledged = 0
        for k in range(min(kills, budget)):
            mode = self._mode(case, out, acknowledged, k)
            victim = self._start(case, out, [*mode, "--no-check"])
            self._let_live(victim, case, BAGS - acknowledged)
            code = victim.kill()
            acknowledged += victim.acknowledged
            self.figures.acknowledged += victim.acknowledged
            if code == 0:
                break  # it was faster
            if code != -signal.SIGKILL:
                raise SystemExit(f"a victim ended by itself with {code}:\n{self._tail()}")
            self.figures.kills += 1
            self.figures.in_resume += k > 0
            phases = self.figures.by_phase
            phases[victim.phase] = phases.get(victim.phase, 0) + 1
            where = f"round {number} kill {k} {case} while {victim.phase}"
            self._look(out, expected, acknowledged, where, case.overwrite)
        mode = self._mode(case, out, acknowledged, 1)
        code = self._start(case, out, [*mode, "--no-check"]).wait()
        where = f"round {number} {case}"
        if code != 0:
            self.figures.unreadable.append(f"{where}: resuming ended with {code}: {self._tail()}")
        self.figures.different += [f"{where}: {name}" for name in differences(out, reference)]
        left = [p for p in out.parent.iterdir() if p.name not in ("out", "out.html")]
        left += [p for p in out.rglob("*") if "penstock-tmp" in p.name]
        left += list(out.glob(".penstock/units/*"))
        self.figures.leftovers += [f"{where}: {path}" for path in left]
        self.figures.datasets += 1
        if not left and not self.figures.different and not self.figures.unreadable:
            shutil.rmtree(out.parent)

    def _start(self, case: Case, out: Path, mode: list[str]) -> Victim:
        return Victim(case.words(self._bags, out, mode), self._log)

    def _mode(self, case: Case, out: Path, acknowledged: int, k: int) -> list[str]:
        """Overwrite until something is committed; apart from that, resume from the second time."""
        if case.overwrite and not (k and begun(case, out)):
            return ["--overwrite"]
        return ["--resume"] if k else []

    def _let_live(self, victim: Victim, case: Case, left: int) -> None:
        """Let a victim live until a random time, or until a moment within a random phase."""
        chance = self._chance
        match chance.choice(["time", "time", "time", "open", "commit", "commit", "build"]):
            case "time":
                share = (left + 1) / (BAGS + 1) * case.workers  # processes are slow to start
                victim.watch(chance.uniform(0.0, self._whole_s * share))
            case "open":
                victim.watch(None, (OPEN, 1))
                time.sleep(chance.uniform(0.0, 0.03))
            case "commit":
                said = COMMIT if case.workers == 1 else COMMIT.upper()
                victim.watch(None, (said, chance.randint(1, max(left, 1))))
                time.sleep(chance.uniform(0.0, 0.12))
            case "build":
                victim.watch(None, (BUILD, 1))
                time.sleep(chance.uniform(0.0, 0.2))
        victim.watch(time.monotonic() - victim.began_s)

    def _look(
        self, out: Path, expected: list[str], acknowledged: int, where: str, replacing: bool
    ) -> None:
        """Compare what a kill left with what was acknowledged."""
        answer = in_child(state_of, out)
        if "error" in answer:
            self.figures.unreadable.append(f"{where}: {answer['error']}")
            return
        found, errors = answer["value"]["episodes"], answer["value"]["errors"]
        self.figures.unreadable += [f"{where}: {error}" for error in errors]
        committed = units_of(out)
        if replacing and not committed:
            return  # the dataset that was to be overwritten is still in place
        # A unit may be durable and not acknowledged yet.
        if len(committed) < acknowledged:
            self.figures.lost.append(f"{where}: {committed} of {acknowledged}")
        if not replacing and found and any(episode not in expected for episode in found):
            self.figures.different.append(f"{where}: other episodes than expected")

    def _tail(self) -> str:
        return self._log.read_text()[-2000:]


def differences(one: Path, two: Path) -> list[str]:
    """Return the files in which two datasets differ, our private folder left out."""

    def files(root):
        return {
            str(p.relative_to(root))
            for p in root.rglob("*")
            if p.is_file() and not str(p.relative_to(root)).startswith(".")
        }

    return [
        name
        for name in sorted(files(one) | files(two))
        if not (one / name).exists()
        or not (two / name).exists()
        or not filecmp.cmp(one / name, two / name, shallow=False)
    ]


def main(folder: Path, kills: int, seed: int) -> None:
    os.environ["PENSTOCK_PROGRESS"] = "quiet"
    assert conversion.run_request
    campaign = Campaign(folder, seed)
    chance = random.Random(seed + 1)
    began_s = time.monotonic()
    turn = 0
    while campaign.figures.kills < kills:
        left = kills - campaign.figures.kills
        campaign.round(CASES[turn % len(CASES)], chance.randint(2, 5), left)
        turn += 1
    figures = vars(campaign.figures) | {"seconds": round(time.monotonic() - began_s, 1)}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
