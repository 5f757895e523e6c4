"""Damage datasets in every way that happens or that somebody would try, and use them.

Usage: hostile_campaign.py FOLDER FIRST COUNT. Prints a line per fault, and a last one with the
figures. A case is named by its number: `hostile_campaign.py FOLDER 1234 1` repeats one. Every
command runs in a fork with a clock and an eye on its memory, on a copy; around the copy lie files
that must not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
from isal import isal_zlib

from penstock import inspect, samples
from penstock.cli import main as penstock
from penstock.commands import build, convert
from penstock.dataset.writer import DatasetWriter
from penstock.inspect import doctor

# Imported here, not in every fork.
assert build and convert and doctor and inspect
MOST_S = 20
GROWTH_KB = 64 << 10
ESCAPE = "\x1b[31mred\x07"
VALUES = [None, -1, 0, 1, 2**31, 2**53, 2**63, 2**70, 1e308, float("nan"), True, "", "x" * 5000]
VALUES += ["../../canary", "/etc/passwd", "a/../../b", ESCAPE, "\x00", [], {}, [[[]]], [0] * 9999]
VALUES += ["{chunk_index:999999999d}", "data/{x}.parquet"]
COMMANDS = ("info", "doctor", "append", "resume", "build")
KINDS = ("v3.0", "v2.1", "waiting-v3.0", "waiting-v2.1")


def words_of(command: str, kind: str, folder: Path, out: Path) -> list[str]:
    """Return the command line."""
    if command in ("info", "doctor", "build"):
        return [command, str(out)]
    bags = "bags2" if command == "append" and kind in ("v3.0", "v2.1") else "both"
    words = ["convert", str(folder / bags), str(out), f"--{command}", "--no-check"]
    return [*words, "--format", kind[-4:]]


def make(folder: Path) -> None:
    """Make the datasets: both formats, without and with a unit that waits to be built."""
    size = {"seconds": 1, "width": 64, "height": 48, "state_hz": 50, "camera_hz": 10}
    for k in range(3):
        samples.write_sample(folder / f"bags{k}" / f"{k}.bag", seed=k, **size)
    (folder / "both").mkdir()
    for k in range(2):
        shutil.copy(folder / f"bags{k}" / f"{k}.bag", folder / "both")
    for version in ("v3.0", "v2.1"):
        out, waiting = folder / version, folder / f"waiting-{version}"
        assert penstock(["convert", str(folder / "both"), str(out), "--format", version]) == 0
        shutil.copytree(out, waiting)
        with patch.object(DatasetWriter, "build", lambda writer: False):
            penstock(words_of("append", version, folder, waiting))


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path to every value of a JSON value, but the whole."""
    items = value.items() if isinstance(value, dict) else ()
    for key, below in enumerate(value) if isinstance(value, list) else items:
        yield (*path, key)
        yield from places(below, (*path, key))


def damage_json(text: bytes, rng: np.random.Generator) -> bytes:
    """Change one value, or drop it, or nest it deeply; checksums are made right again."""
    lines = [text] if text.startswith((b"{\n", b"{ ")) else text.splitlines()
    at = int(rng.integers(len(lines)))
    with_crc = lines[at][8:9] == b" " and lines[at][:1] != b"{"
    value = json.loads(lines[at].partition(b" ")[2] if with_crc else lines[at])
    every = list(places(value))
    *path, last = every[int(rng.integers(len(every)))]
    owner = value
    for key in path:
        owner = owner[key]
    kind = int(rng.integers(len(VALUES) + 2))
    if kind < len(VALUES):
        owner[last] = VALUES[kind]
    elif kind == len(VALUES):
        del owner[last]
    body = b"[" * 100_000 if kind > len(VALUES) else json.dumps(value).encode()
    lines[at] = b"%08x %s" % (isal_zlib.crc32(body), body) if with_crc else body
    return b"\n".join([*lines, b""])


def damage_bytes(good: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(good)
    if not data:
        return b"\xff" * 100
    at = int(rng.integers(len(data)))
    match int(rng.integers(6)):
        case 0:
            del data[at:]
        case 1:
            data[at] ^= 1 << int(rng.integers(8))
        case 2:
            for place in rng.integers(len(data), size=20):
                data[place] ^= 1 << int(rng.integers(8))
        case 3:
            data[at : at + 4] = int(rng.choice([2**32 - 1, 2**31 - 1, 2**28])).to_bytes(4, "big")
        case 4:
            data[at : at + 8] = (2**63 - 1).to_bytes(8, "little")
        case 5:
            data[at:at] = rng.bytes(int(rng.integers(1, 1000)))
    return bytes(data)


def damage(out: Path, canary: Path, rng: np.random.Generator) -> str:
    """Damage a dataset in one way; return what was done."""
    every = [p for p in sorted(out.rglob("*")) if p.is_file() and p.name != ".penstock.lock"]
    path = every[int(rng.integers(len(every)))]
    # Text is worth more: it holds names, sizes and places.
    texts = [p for p in every if p.suffix in (".json", ".jsonl")]
    if rng.integers(2):
        path = texts[int(rng.integers(len(texts)))]
    name = path.relative_to(out).as_posix()
    match int(rng.integers(10)):
        case 0:
            path.unlink()
            path.symlink_to(canary)
            return f"{name} leads outside"
        case 1:
            path.unlink()
            os.mkfifo(path)
            return f"{name} is a FIFO"
        case 2:
            folder = path.parent
            if folder != out:
                moved = canary.parent / "moved"
                shutil.rmtree(moved, ignore_errors=True)
                os.rename(folder, moved)
                folder.symlink_to(moved)
                return f"the folder of {name} leads outside"
            return "nothing"
        case 3:
            path.unlink()
            path.mkdir()
            return f"{name} is a folder"
        case 4:
            path.unlink()
            return f"{name} is missing"
        case _ if path.suffix in (".json", ".jsonl"):
            path.write_bytes(damage_json(path.read_bytes(), rng))
            return f"a value of {name}"
        case _:
            path.write_bytes(damage_bytes(path.read_bytes(), rng))
            return f"bytes of {name}"


def tree(root: Path) -> dict[str, str]:
    """Return what lies in a folder; nothing is followed."""
    found = {}
    for folder, folders, names in os.walk(root):
        for name in [*names, *folders]:
            path = Path(folder, name)
            where = path.relative_to(root).as_posix()
            if path.is_symlink():
                found[where] = os.readlink(path)
            elif path.is_file():
                found[where] = hashlib.blake2b(path.read_bytes()).hexdigest()
    return {k: v for k, v in found.items() if not k.endswith(".penstock.lock")}


def in_fork(function: Callable[[], int], log: Path) -> tuple[str, int]:
    """Call a function; return how it ended, and by how much the memory grew (KB)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = "crash"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            os.setsid()
            signal.alarm(MOST_S)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
            os.dup2(file, 1)
            os.dup2(file, 2)
            code = str(function())
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(write, f"{code} {grown}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read().split()
    os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return (said[0], int(said[1])) if said else ("hang or crash", 0)


def one(folder: Path, number: int, baseline: dict[str, int]) -> list[str]:
    """Run one case; return its faults."""
    rng = np.random.default_rng(number)
    command, kind = COMMANDS[int(rng.integers(5))], KINDS[int(rng.integers(4))]
    case, log = folder / "case", folder / "log.txt"
    shutil.rmtree(case, ignore_errors=True)
    out = case / "below" / "out"
    shutil.copytree(folder / kind, out)
    for canary in (case / "below" / "canary", case / "canary"):
        canary.write_bytes(b"canary" * 100)
    what = damage(out, canary, rng)
    words = words_of(command, kind, folder, out)
    inside, outside = split(case)
    began = time.monotonic()
    code, grown = in_fork(lambda: penstock(words), log)
    took = time.monotonic() - began
    said = log.read_bytes()
    inside_after, outside_after = split(case)
    changed = {name for name in inside if inside[name] != inside_after.get(name)}
    changed = {name for name in changed if "/.penstock/" not in name and ".html" not in name}
    faults = {
        f"exit {code}": code not in "0123456",
        "traceback": b"Traceback" in said,
        "escapes printed raw": b"\x1b[31m" in said or b"\x07" in said,
        f"changed outside: {sorted(outside.items() ^ outside_after.items())}": outside
        != outside_after,
        f"changed although refused: {sorted(changed)}": code != "0" and changed,
        "a reader changed something": command in ("info", "doctor") and inside != inside_after,
        f"{grown // 1024} MB more": grown > baseline[f"{command} {kind}"] + GROWTH_KB,
        f"{took:.0f} s": took > MOST_S,
    }
    tail = said[-600:].decode(errors="replace")
    return [
        f"{number} ({command}, {kind}; {what}): {w}\n{tail}" for w, bad in faults.items() if bad
    ]


def split(case: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return what lies in the dataset and beside it under its name, and what lies elsewhere."""
    every = tree(case)
    ours = {name for name in every if name.startswith(("below/out", "below/.out"))}
    return {n: every[n] for n in ours}, {n: v for n, v in every.items() if n not in ours}


def main(folder: Path, first: int, count: int) -> int:
    """Run cases; return the number of faults."""
    if not (folder / "v3.0").exists():
        make(folder)
    baseline: dict[str, int] = {}
    for kind in KINDS:
        for command in COMMANDS:
            out = folder / "whole"
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(folder / kind, out)
            words = words_of(command, kind, folder, out)
            code, grown = in_fork(lambda words=words: penstock(words), folder / "log.txt")
            assert code == "0", (folder / "log.txt").read_text()
            baseline[f"{command} {kind}"] = grown
    bad = 0
    for number in range(first, first + count):
        for fault in one(folder, number, baseline):
            bad += 1
            sys.stdout.write(fault + "\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps({"cases": count, "faults": bad}) + "\n")
    return bad


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
