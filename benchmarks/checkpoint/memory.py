"""Extra peak memory of saving, each way in a process of its own so that peaks do not mix.

`python -m benchmarks.checkpoint.memory METHOD HIDDEN` measures one way and prints JSON.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import Row, Settings
from benchmarks.measure import environment
from penstock.errors import PenstockError
from penstock.ui.progress import Progress

_SAVES = {"penstock": 5, "proposal": 1, "proposal queue": 3, "clone": 1}
QUEUE = "proposal, queue of 3"
_LABELS = {
    "penstock": "penstock, 5 saves",
    "proposal": "proposal, 1 save",
    "proposal queue": QUEUE,
    "clone": "clone (Lightning's way), 1 save",
}
_BAR = 1.15


def measure_memory(settings: Settings) -> list[Row]:
    """Measure every way in a fresh process."""
    rows = []
    repeats = 3 if settings.repeats > 3 else 1
    methods = ["penstock"] * repeats + [method for method in _SAVES if method != "penstock"]
    found: dict[str, list[float]] = {method: [] for method in _SAVES}
    # Two at a time: peaks of other processes do not matter, only time does.
    with (
        ThreadPoolExecutor(2) as pool,
        Progress(len(methods), "memory", "processes") as progress,
    ):
        results = pool.map(lambda method: _in_process(method, settings.hidden), methods)
        for method, share in zip(methods, results, strict=True):
            found[method].append(share)
            progress.advance()
    shares = {method: statistics.median(values) for method, values in found.items()}
    for method, share in shares.items():
        rows.append(
            Row(
                "extra peak memory",
                _LABELS[method],
                share,
                "x state",
                n=len(found[method]),
                ratio=share / shares["penstock"] if shares["penstock"] > 0 else None,
                bar=f"<= {_BAR}x the state" if method == "penstock" else "",
                met=share <= _BAR if method == "penstock" else None,
            )
        )
    return rows


def _in_process(method: str, hidden: int) -> float:
    command = [sys.executable, "-m", __name__, method, str(hidden)]
    done = subprocess.run(  # noqa: S603  this very module, in this interpreter
        command, capture_output=True, text=True, check=False, env=environment()
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PenstockError(f"measuring the memory of {method!r} failed: {last[0]}")
    result = json.loads(done.stdout)
    return float(result["extra_bytes"] / result["state_bytes"])


def _measure(method: str, hidden: int) -> dict[str, int]:
    """Compare the peak of a loop that saves with the peak of the same loop that does not."""
    from benchmarks.checkpoint.peers import Clone, Method, Penstock, ProposedQueue
    from benchmarks.checkpoint.state import Learner, nbytes
    from benchmarks.measure import peak_bytes, torch_threads

    learner = Learner(hidden)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch, torch_threads(1):
        learner.iterate()
        saver: Method
        if method == "penstock":
            saver = Penstock(Path(scratch), learner)
        elif method == "clone":
            saver = Clone()
        else:
            # The fast level: its buffers are as large as those of level 9, which takes 10 s a save.
            saver = ProposedQueue(Path(scratch), level=0)

        def loop(saves: int) -> int:
            gc.collect()
            _reset_peak()
            for _ in range(saves):
                saver.save(learner.state())
                time.sleep(0.05)
                learner.step()
                if method == "penstock":
                    saver.settle()
            if not saves:
                learner.step()
            peak = peak_bytes()
            saver.settle()
            return max(peak, peak_bytes())

        baseline = loop(0)
        peak = loop(_SAVES[method])
        saver.close()
    return {"extra_bytes": peak - baseline, "state_bytes": nbytes(learner.state())}


def _reset_peak() -> None:
    """Let the kernel forget the highest resident size of this process."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
