"""What a checkpoint per iteration costs the training loop, in blocks with and without saving.

The loop runs as `penstock train` runs it, on all cores, so that writing has no core to itself: a
process per core, each this module; process 0 saves and keeps the time. Blocks alternate in one
run, since two runs on the same machine differ by more than saving costs.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import Row
from benchmarks.measure import environment
from penstock.errors import PenstockError
from penstock.nav.config import load_config
from penstock.nav.distributed import Group, Stop
from penstock.nav.recorder import Run, RunRecorder
from penstock.nav.train import Trainer
from penstock.ui.monitor import PerformanceMonitor
from penstock.ui.progress import Progress

_SETTLE_S = 60.0
_GIVE_UP_S = 600.0
_LEAST = 0.97  # frames/s with saving, of those without
_STALL_MS = 1.0


@dataclass(frozen=True)
class Blocks:
    """Times of the blocks, and how long each save held training up.

    Attributes:
        saving_s: Of each block with a save per iteration.
        plain_s: Of the block beside it, without.
        stalls_s: Of each save: the call and the barrier before the next optimizer step.
        frames: Of a block.
    """

    saving_s: list[float]
    plain_s: list[float]
    stalls_s: list[float]
    frames: int

    def table(self, *, judged: bool = True) -> list[Row]:
        """Lay out as rows.

        Args:
            judged: Whether the speed that is left is judged: a save takes as long for short
                iterations as for long ones, so the bar is for those of 32,768 frames.
        """
        what, who = "frames/s, a checkpoint every iteration", "penstock, saving"
        pairs = list(zip(self.plain_s, self.saving_s, strict=True))
        share = statistics.median(plain / saving for plain, saving in pairs)
        saving, plain = statistics.median(self.saving_s), statistics.median(self.plain_s)
        stall = 1e3 * statistics.median(self.stalls_s)
        ordered = sorted(self.stalls_s)
        p90 = 1e3 * ordered[min(len(ordered) - 1, round(0.9 * len(ordered)))]
        saves, blocks = len(self.stalls_s), len(pairs)
        return [
            Row(
                "training held up per checkpoint, in the loop",
                "penstock, call + barrier",
                stall,
                "ms",
                n=saves,
                p90=p90,
                bar=f"<= {_STALL_MS:g} ms",
                met=stall <= _STALL_MS,
            ),
            Row(what, who, self.frames / saving, "frames/s", n=blocks, ratio=1.0),
            Row(what, "no save", self.frames / plain, "frames/s", n=blocks, ratio=saving / plain),
            Row(
                "speed that is left with a checkpoint every iteration",
                who,
                share,
                "x no save",
                n=blocks,
                bar=f">= {_LEAST}" if judged else "reported: short iterations",
                met=share >= _LEAST if judged else None,
            ),
        ]


def measure_saving(
    folder: Path, *, envs: int, blocks: int, length: int, words: Sequence[str] = ()
) -> Blocks:
    """Run the blocks in processes of their own.

    Args:
        folder: Of the run; it must not exist.
        envs: Drones.
        blocks: Of each kind.
        length: Iterations of a block.
        words: More settings.
    """
    words = [f"run_dir={folder}", f"env.num_envs={envs}", *words]
    size = load_config(words).processes
    meeting = Path(tempfile.gettempdir()) / f"penstock-bench-{os.getpid()}-{secrets.token_hex(8)}"
    around = environment() | {"PENSTOCK_PROGRESS": "quiet"}
    around.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they all are on this machine
    own = [str(size), f"file://{meeting}", str(blocks), str(length), *words]
    running: list[subprocess.Popen[str]] = []
    with Progress(1, "checkpoints in the loop", "runs") as progress:
        try:
            for rank in range(size):
                command = [sys.executable, "-m", __name__, str(rank), *own]
                running.append(
                    subprocess.Popen(  # noqa: S603  this very module, in this interpreter
                        command,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        env=around,
                    )
                )
            said = [process.communicate(timeout=_GIVE_UP_S) for process in running]
        except subprocess.TimeoutExpired as error:
            raise PenstockError(f"training did not end within {_GIVE_UP_S:.0f} s") from error
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
            with suppress(OSError):
                meeting.unlink()
        progress.advance()
    for process, (_, complaint) in zip(running, said, strict=True):
        if process.returncode:
            last = complaint.strip().splitlines()[-1:] or ["no message"]
            raise PenstockError(f"training ended with code {process.returncode}: {last[0]}")
    return Blocks(**json.loads(said[0][0].strip().splitlines()[-1]))


class Loop:
    """One process's loop, an iteration at a time: that of nav/train.py, saving left to the caller.

    Args:
        words: Settings.
        group: The processes.
    """

    def __init__(self, words: list[str], group: Group) -> None:
        config = load_config([*words, "save_interval=1", "env_dyn.curriculum=0"])
        torch.set_num_threads(config["threads"])
        run = Run(Path(config["run_dir"]))
        if group.is_main:
            run.create(config)
        group.barrier()  # the folder is there for all
        self.trainer = Trainer(config, group, Stop())
        self._stack = ExitStack()
        self._stack.callback(self.trainer.collector.close)
        trainer, self._monitor = self.trainer, PerformanceMonitor(history=1000)
        self.recorder = self._stack.enter_context(RunRecorder(run, trainer, self._monitor))
        self._metrics: dict[str, float] = {}

    def iterate(self, *, save: bool) -> None:
        """Do one iteration."""
        trainer, monitor = self.trainer, self._monitor
        with monitor.timer("collect"):
            batch = trainer.collector.collect(trainer.dynamic_active, trainer.disturbed)
        with monitor.timer("update"):
            stats = trainer.ppo.update(batch, trainer.order, trainer.progress, trainer.check_stop)
        with monitor.timer("other"):
            self._metrics, _ = trainer.advance(batch, stats)
        with monitor.timer("checkpoint"):
            state = trainer.state()
            if save:
                self.recorder.save(state, self._metrics, best=False)
        self.recorder.log_iteration(self._metrics)

    def stall_s(self) -> float:
        """How long the last save held training up, so far."""
        blocked = self.recorder.saver.get_stats()["blocked"]
        return float(sum(blocked[name]["last"] for name in ("call", "barrier")))

    def settle(self) -> None:
        """Wait until nothing is being written."""
        if not self.recorder.saver.wait(_SETTLE_S):
            raise PenstockError(f"a checkpoint was not written within {_SETTLE_S:.0f} s")

    def close(self) -> None:
        """Finish all files."""
        self._stack.close()


def alternate(loop: Loop, blocks: int, length: int) -> Blocks:
    """Run blocks with and without saving, in turn; the first one of each kind is forgotten."""
    leads = loop.trainer.group.is_main
    times: dict[bool, list[float]] = {True: [], False: []}
    stalls: list[float] = []
    for number in range(blocks + 1):
        for save in (True, False) if number % 2 else (False, True):
            # A save before the clock starts: its writing is in the block, that of the last is not.
            loop.iterate(save=save)
            begin = time.perf_counter()
            for _ in range(length):
                loop.iterate(save=save)
                # The barrier of the save before was in this update, the call of this one after it.
                if save and leads and number:
                    stalls.append(loop.stall_s())
            seconds = time.perf_counter() - begin
            if number:
                times[save].append(seconds)
            if leads:
                loop.settle()
    frames = length * loop.trainer.frames_per_iteration
    return Blocks(times[True], times[False], stalls, frames)


def _main(rank: str, size: str, address: str, blocks: str, length: str, *words: str) -> None:
    with Group(int(rank), int(size), address) as group:
        loop = Loop(list(words), group)
        try:
            result = alternate(loop, int(blocks), int(length))
        finally:
            loop.close()
    if group.is_main:
        sys.stdout.write(json.dumps(vars(result)) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
