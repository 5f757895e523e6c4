"""Faults for tests of several folders: processes that are killed, and disks that are small."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def told(error: BaseException, caplog: Any) -> str:
    """Return what was told beside an error: as its notes, or before Python 3.11 in the log."""
    return "\n".join([*getattr(error, "__notes__", ()), caplog.text])


def run_and_kill(victim: Callable[[Callable[[int], None]], None], delay_s: float) -> list[int]:
    """Fork a victim, and kill it a while after it acknowledged its first save.

    Args:
        victim: Works for ever; calls what it is given with the number of each save that is durable.
        delay_s: Between the first of these and the kill.

    Returns:
        The numbers: they went through a pipe, so the truth is kept outside the victim.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            victim(lambda number: os.write(write, struct.pack("<q", number)))
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        first = pipe.read(8)
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        rest = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status) or len(first) != 8:
        raise SystemExit(f"the victim died by itself: status {status}")
    return [number for (number,) in struct.iter_unpack("<q", first + rest)]


def run_campaign(
    script: Path, *words: object, timeout_s: float, **variables: str
) -> dict[str, Any]:
    """Run a campaign of faults in a process of its own; return the figures it prints last."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables
    result = subprocess.run(
        [sys.executable, str(script), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def compile_faulty_disk(folder: Path) -> Path | None:
    """Compile the library that lets calls fail (see faulty_disk.c); None where there is no gcc."""
    library = folder / "faulty_disk.so"
    source = Path(__file__).with_name("faulty_disk.c")
    if shutil.which("gcc") is None:
        return None
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[bool]:
    """Mount a tmpfs on a folder, which is made; yield whether that was possible here."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Change the size or the mode of a small disk."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


_INTERRUPTS = """
import random, signal, sys, time
{setup}

class Stop(KeyboardInterrupt):
    pass

def handler(*_):
    global armed
    if armed:
        armed = False
        raise Stop

armed = False
signal.signal(signal.SIGALRM, handler)
sys.unraisablehook = lambda dropped: None  # Python drops some; the next one counts
end_s = time.monotonic() + 4
while time.monotonic() < end_s:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.003))
        work()
    except Stop:
        pass
    armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
"""


def interrupt_often(setup: str) -> subprocess.CompletedProcess:
    """Call `work()`, which `setup` defines, again and again, and interrupt it at any instruction.

    It hangs, and times out, if an interrupt makes `work` wait for ever.
    """
    code = _INTERRUPTS.format(setup=setup)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
