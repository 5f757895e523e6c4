"""The tour: train, kill, resume, compare, damage, recover; every figure is from this very run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.checkpoints import folder as folders
from penstock.checkpoints.load import load_checkpoint
from penstock.core.memory import format_bytes
from penstock.core.progress import Progress
from penstock.core.report import Report, text_table
from penstock.errors import PenstockError, PenstockWarning, UsageError
from penstock.tools import doctor, inspect
from penstock.tools.bench.state import tensors

ITERATIONS = 120
_MARKER = ".penstock-demo"
_INTERRUPTED, _ALONE, _LOG, _REPORT = "interrupted", "uninterrupted", "training.log", "report.html"


@dataclass
class _Story:
    """What happened, as it was measured."""

    lines: list[str] = field(default_factory=list)
    blocked_ms: list[float] = field(default_factory=list)
    rewards: dict[str, list[float]] = field(default_factory=dict)
    saved: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    resumed_from: int = 0

    def say(self, text: str) -> None:
        self.lines.append(text)
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def run(out: str | os.PathLike[str], iterations: int = ITERATIONS) -> Path:
    """Run the tour and return the path of its report.

    Args:
        out: The folder to make; one that an earlier demo made is used again.
        iterations: Of the training.

    Raises:
        UsageError: The folder exists and is not that of a demo.
    """
    begin = time.perf_counter()
    home = _claim(Path(out))
    story = _Story()
    killed_at = iterations // 2
    story.say("1. train with a checkpoint per iteration, and kill -9 half-way")
    _train(story, home, _INTERRUPTED, iterations, kill_at=killed_at)
    story.say(f"   killed at iteration {killed_at}; durable: {_latest(home).name}")
    story.say("2. start the same command again: it goes on from `latest`")
    _train(story, home, _INTERRUPTED, iterations)
    story.say(f"   resumed from iteration {story.resumed_from}, finished at {iterations}")
    story.say("3. the same training, left alone")
    _train(story, home, _ALONE, iterations)
    story.say("4. compare the final states: weights, Adam moments, random generators")
    compared, equal = _compare(story, home, iterations)
    story.say(f"   {equal} of {compared} tensors are bit-identical")
    story.say("5. flip one bit in the newest checkpoint, and load")
    recovered = _damage_and_load(story, home)
    seconds = time.perf_counter() - begin
    report = _report(story, home, killed_at, (compared, equal), recovered, seconds)
    if equal != compared:
        raise PenstockError(f"{compared - equal} tensors differ after the resume; see {report}")
    return report


def _claim(home: Path) -> Path:
    """Make the folder, or clear what an earlier demo left in it, and nothing else."""
    if home.exists() and not home.is_dir():
        raise UsageError(f"{home} is a file; choose another --out")
    if home.exists() and any(home.iterdir()) and not (home / _MARKER).is_file():
        raise UsageError(f"{home} exists and was not made by the demo; choose another --out")
    home.mkdir(parents=True, exist_ok=True)
    (home / _MARKER).touch()
    for name in (_INTERRUPTED, _ALONE):
        shutil.rmtree(home / name, ignore_errors=True)
    for name in (_LOG, _REPORT):
        (home / name).unlink(missing_ok=True)
    return home


def _train(
    story: _Story, home: Path, name: str, iterations: int, kill_at: int | None = None
) -> None:
    """Run the training in a process of its own; kill it at an iteration, if asked to."""
    words = ["-m", "penstock.tools.demo_training", str(home / name), str(iterations)]
    story.say(f"   $ python {' '.join(words)}")
    rewards = story.rewards.setdefault(name, [])
    with (
        (home / _LOG).open("ab") as log,
        Progress(iterations, name, "iterations") as progress,
        subprocess.Popen(  # noqa: S603
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=log, text=True
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                told = json.loads(line)
                _note(story, rewards, told)
                if "iteration" in told:
                    progress.update(told["iteration"])
                    if told["iteration"] == kill_at:
                        break
        except BaseException:
            child.kill()
            raise
        if kill_at is not None:
            child.kill()
        code = child.wait()
    if kill_at is None and code:
        raise PenstockError(f"the training ended with code {code}; see {home / _LOG}")


def _note(story: _Story, rewards: list[float], told: dict[str, Any]) -> None:
    if "iteration" in told:
        del rewards[told["iteration"] - 1 :]  # what was lost with the kill is computed again
        rewards.append(told["reward"])
        if told["blocked_ms"] is not None:
            story.blocked_ms.append(told["blocked_ms"])
    elif "resumed_from" in told:
        story.resumed_from = told["resumed_from"]
    else:
        story.saved += told["total_saved"]
        story.raw_bytes += told["raw_bytes"]
        story.stored_bytes += told["stored_bytes"]


def _latest(home: Path) -> Path:
    newest = folders.latest(home / _INTERRUPTED)
    if newest is None:
        raise PenstockError(f"no checkpoint in {home / _INTERRUPTED}; see {home / _LOG}")
    return newest


def _compare(story: _Story, home: Path, iterations: int) -> tuple[int, int]:
    name = f"checkpoint_{iterations:04}.pt"
    states = []
    for run_name in (_INTERRUPTED, _ALONE):
        story.say(f"   >>> penstock.load_checkpoint({str(home / run_name / name)!r})")
        states.append(list(tensors(load_checkpoint(home / run_name / name))))
    pairs = list(zip(*states, strict=True))
    return len(pairs), sum(torch.equal(a, b) for a, b in pairs)


def _damage_and_load(story: _Story, home: Path) -> str:
    newest = _latest(home)
    with newest.open("r+b") as file:
        middle = newest.stat().st_size // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))
    story.say(f"   flipped bit 0 of byte {middle} of {newest.name}")
    story.say(f"   $ penstock doctor {newest}")
    story.say(f"   {doctor.check(newest)[0]}")
    story.say(f"   >>> penstock.load_checkpoint({str(home / _INTERRUPTED)!r})")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = load_checkpoint(home / _INTERRUPTED)
    words = [str(w.message) for w in caught if issubclass(w.category, PenstockWarning)]
    if not words:
        raise PenstockError("the damaged checkpoint was loaded without a word")
    story.say(f"   warning: {words[0]}")
    story.say(f"   loaded iteration {state['iteration']}, verified")
    return str(state["iteration"])


def _report(
    story: _Story,
    home: Path,
    killed_at: int,
    tensors_equal: tuple[int, int],
    recovered: str,
    seconds: float,
) -> Path:
    median, p99 = np.percentile(story.blocked_ms, [50, 99])
    compared, equal = tensors_equal
    share = 1 - story.stored_bytes / story.raw_bytes
    figures = [
        ("blocked per save, median", f"{median:.2f} ms", f"{len(story.blocked_ms)} saves"),
        ("blocked per save, p99", f"{p99:.2f} ms", "call and barrier"),
        ("checkpoints saved", f"{story.saved}", "in the two runs that ended"),
        ("written", format_bytes(story.stored_bytes), f"of {format_bytes(story.raw_bytes)}"),
        ("saved by compression", f"{share:.1%}", f"ratio {1 / (1 - share):.2f}, lossless"),
        ("killed at iteration", f"{killed_at}", f"resumed from {story.resumed_from}"),
        ("bit-identical", f"{equal} of {compared}", "tensors, against the run left alone"),
        ("flipped bit: fell back to", recovered, "the one before, with a warning"),
        ("whole demo", f"{seconds:.0f} s", f"{os.cpu_count()} cores"),
    ]
    sys.stdout.write("\n" + text_table(("figure", "value", "note"), figures) + "\n")
    report = Report("penstock demo")
    report.text(
        "A small policy was trained with a compressed checkpoint per iteration, killed, resumed, "
        "and compared with the same training left alone. All figures are from this run."
    )
    report.figures(figures)
    report.heading("How long each save held up training")
    report.plot(
        {"blocked": story.blocked_ms},
        "blocked per save, ms",
        "saves",
        "histogram",
        "The call of save_async and the barrier before the next optimizer step, together. "
        "100 ms before each iteration stand for a simulator.",
    )
    report.heading("Mean reward per iteration")
    same = story.rewards[_INTERRUPTED] == story.rewards[_ALONE]
    report.plot(
        story.rewards,
        "iteration",
        "mean reward",
        caption="Both lines are the same to the last bit, so only one is seen." if same else "",
    )
    report.heading("What was run")
    report.code("\n".join(story.lines))
    report.heading("The folder afterwards")
    columns, rows = inspect.folder_table(inspect.describe(home / _INTERRUPTED))
    report.table(columns, rows, "The checkpoints that the rules keep; * is `latest`.")
    return report.write(home / _REPORT)
