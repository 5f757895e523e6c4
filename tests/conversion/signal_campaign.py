"""Send SIGINT and SIGTERM to conversions at random moments, and look at how they end.

Usage: signal_campaign.py FOLDER SIGNALS [SEED] [BUSY]. Prints one JSON line with the figures. Three
of four victims are forked from this process, which has everything imported and no thread; the
fourth is a command of its own, which is hit while it starts. BUSY processes keep the machine busy
meanwhile. A conversion must end within 10 s, with 130 or 143 and one line, and be resumed to the
bytes of an undisturbed one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from kill_campaign import group_lives

from penstock import samples
from penstock.cli import main as penstock
from penstock.commands import convert

BAGS = 3
LONGEST_S = 10
assert callable(convert.run)  # imported here, not in every victim


def start(words: list[str], log: Path, fresh: bool = False) -> int:
    """Start a process that runs a command of its own, and writes what it says into a file.

    Args:
        words: The command.
        log: The file.
        fresh: Start a new interpreter, which has to import everything.
    """
    log.write_bytes(b"")
    pid = os.fork()
    if pid:
        return pid
    begun = False
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1)
        os.dup2(target, 2)
        if fresh:
            os.execv(sys.executable, [sys.executable, "-m", "penstock", *words])
        begun = True
        code = penstock(words)
    except BaseException as error:
        if not begun:  # as the command itself would end so early
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os.write(2, f"\n{type(error).__name__} left main\n".encode())
        code = 99
    os._exit(code)


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def content(folder: Path) -> dict[str, bytes]:
    """Return every file of a dataset, but for its lock, which names a process."""
    files = (path for path in folder.rglob("*") if path.is_file() and "lock" not in path.name)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def words_of(bags: Path, out: Path, workers: int, *more: str) -> list[str]:
    memory = ["--memory", "1GB", "--no-check", "-q"]
    return ["convert", str(bags), str(out), "--workers", str(workers), *memory, *more]


def campaign(folder: Path, signals: int, seed: int) -> dict:
    bags, out, log = folder / "bags", folder / "out", folder / "log"
    bags.mkdir(parents=True)
    for number in range(BAGS):
        path = bags / f"take_{number}.bag"
        samples.write_sample(path, seconds=1.5, width=160, height=128, seed=number, state_hz=100)
    begin_s = time.monotonic()
    assert code_of(start(words_of(bags, folder / "whole", 1), log)) == 0, log.read_text()
    usual_s = time.monotonic() - begin_s
    whole = content(folder / "whole")
    begin_s = time.monotonic()
    assert code_of(start(["info", str(bags / "take_0.bag")], log, fresh=True)) == 0, log.read_text()
    start_s = 2 * (time.monotonic() - begin_s)
    draws, ends, wrong, slowest_s = random.Random(seed), Counter(), [], 0.0
    sent = 0
    while sent < signals:
        number = draws.choice((signal.SIGINT, signal.SIGTERM))
        workers = draws.choice((1, 1, 1, 2))
        moment_s = draws.uniform(0, usual_s * (1.0 if workers == 1 else 3.0))
        shutil.rmtree(out, ignore_errors=True)
        fresh = draws.random() < 0.25
        moment_s = draws.uniform(0, start_s) if fresh else moment_s
        pid = start(words_of(bags, out, workers), log, fresh)
        time.sleep(moment_s)
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            code_of(pid)
            ends["done before the signal"] += 1
            continue
        os.kill(pid, number)
        sent, sent_s = sent + 1, time.monotonic()
        code = code_of(pid)
        took_s = time.monotonic() - sent_s
        slowest_s = max(slowest_s, took_s)
        while group_lives(pid):
            time.sleep(0.01)
        said = log.read_text()
        ends[f"{code}"] += 1
        where = f"{number.name} after {moment_s:.3f} s, {workers} workers, fresh: {fresh}"
        if fresh and code in (1, -number) and "penstock" not in said:
            ends["before penstock was begun"] += 1  # Python itself was starting
        elif code not in (0, -number, 128 + number):
            wrong.append(f"{where}: exit {code}: {said[-300:]}")
        elif len(said.splitlines()) != (code == 128 + number):
            wrong.append(f"{where}: said {said[-300:]!r}")
        elif code == 0 and content(out) != whole:  # it may only have been faster than the signal
            wrong.append(f"{where}: exit 0, and the dataset is not whole")
        if took_s > LONGEST_S:
            wrong.append(f"{where}: took {took_s:.1f} s")
        if code_of(start(words_of(bags, out, 1, "--resume"), log)) != 0:
            wrong.append(f"{where}: cannot be resumed: {log.read_text()[-300:]}")
        elif content(out) != whole:
            wrong.append(f"{where}: resumed to other bytes")
    return {"signals": sent, "ends": dict(ends), "slowest_s": round(slowest_s, 2), "wrong": wrong}


def main(folder: str, signals: str, seed: str = "1", busy: str = "6") -> None:
    spinners = []
    for _ in range(int(busy)):
        pid = os.fork()
        if not pid:
            while os.getppid() != 1:
                sum(range(20_000))
            os._exit(0)
        spinners.append(pid)
    try:
        figures = campaign(Path(folder), int(signals), int(seed))
    finally:
        for pid in spinners:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
