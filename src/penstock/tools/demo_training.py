"""The training that the demo starts, kills and resumes: `python -m penstock.tools.demo_training`.

It is what a user's script looks like. One JSON line per iteration goes to stdout.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from penstock import AsyncCheckpointSaver, load_checkpoint, rng_state, set_rng_state
from penstock.tools.bench.state import Learner

_HIDDEN = 256
_SIMULATOR_S = 0.1  # stands for the simulator, during which no tensor changes


def train(folder: Path, iterations: int) -> None:
    """Train, with a checkpoint per iteration; go on from the newest one if there is any."""
    torch.set_num_threads(1)  # the order of sums, and so the last bit, depends on their number
    learner = Learner(_HIDDEN)
    done = 0
    with AsyncCheckpointSaver(
        folder, optimizers=[learner.optimizer], modules=[learner.net], delta_every=5, keep_last=6
    ) as saver:
        if saver.latest() is not None:
            state = load_checkpoint(folder)
            learner.load(state)
            set_rng_state(state["rng"])
            done = state["iteration"]
            _tell(resumed_from=done)
        while done < iterations:
            time.sleep(_SIMULATOR_S)
            reward = learner.iterate()
            done += 1
            _tell(iteration=done, reward=reward, blocked_ms=_blocked_ms(saver))
            state = {**learner.state(), "rng": rng_state(), "iteration": done}
            saver.save_async(state, f"checkpoint_{done:04}.pt", metadata={"reward": reward})
        saver.wait()
        stats = saver.get_stats()
    _tell(**{key: stats[key] for key in ("total_saved", "raw_bytes", "stored_bytes")})


def _blocked_ms(saver: AsyncCheckpointSaver) -> float | None:
    """Return how long the previous save held training up: its call, and its barrier since."""
    blocked = saver.get_stats()["blocked"]
    if "barrier" not in blocked:
        return None
    return float(1e3 * (blocked["call"]["last"] + blocked["barrier"]["last"]))


def _tell(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
