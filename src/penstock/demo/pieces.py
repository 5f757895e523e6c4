"""The Python of the tour: each function is printed before it is called, so it imports what it uses.

Only public names are used, as in a user's own script.
"""

from __future__ import annotations

from typing import Any


def record(folder: str, bags: int, seconds: float) -> Any:
    """Write recordings as a Kuavo would."""
    from pathlib import Path

    from penstock.samples import write_sample

    Path(folder).mkdir()
    return [
        write_sample(f"{folder}/take_{k}.bag", seconds=seconds, width=320, height=240, seed=k)
        for k in range(bags)
    ]


def fly(policy: str) -> float:
    """Ask an exported policy for a velocity, 200 times; return the median milliseconds."""
    import numpy as np

    import penstock
    from penstock.nav import Navigator

    navigator, monitor = Navigator.load(policy), penstock.PerformanceMonitor()
    shapes = navigator.settings.shapes()
    seen = {name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}
    for _ in range(200):
        with monitor.timer("decide"):
            navigator.velocity(seen, height=np.ones(1))
    return 1e3 * monitor.get_stats()["decide"]["p50"]


def read_partly(folder: str) -> Any:
    """Time loading a rollout, one key of it, and one drone of it."""
    import penstock

    storage = penstock.RolloutStorage(folder)
    newest, monitor = storage.iterations()[-1], penstock.PerformanceMonitor()
    for _ in range(5):
        with monitor.timer("the whole rollout"):
            storage.load(newest)
        with monitor.timer("rewards only"):
            storage.load(newest, keys=[("agents", "reward")])
        with monitor.timer("drone 7 only"):
            storage.load(newest, envs=[7])
    return monitor.get_stats()


def fill_buffer(dataset: str) -> Any:
    """Fill a replay buffer from a dataset, and draw a batch."""
    import penstock

    buffer = penstock.DictReplayBuffer.from_lerobot(dataset)
    batch = buffer.sample(256, sequence=4)  # windows of 4 frames, within episodes
    return buffer, batch


def flip_a_bit(path: str) -> int:
    """Damage the byte in the middle of a file."""
    with open(path, "r+b") as file:
        middle = file.seek(0, 2) // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))
    return middle


def load_newest(folder: str) -> Any:
    """Load the newest checkpoint that is whole."""
    import penstock

    return penstock.load_checkpoint(folder)
