"""Records with the real lerobot and kills it, many times; notes how many episodes were saved.

Run by the Python that has lerobot: record.py FOLDER KILLS SEED [video|streaming|images|batch ...]
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

HEIGHT, WIDTH, FPS, LENGTH = 96, 128, 30, 20


def picture(episode: int, k: int, camera: int) -> np.ndarray:
    """A smooth picture; its brightness tells the episode, the frame and the camera."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    image[..., 0] = 20 + 10 * (k % 20) + x // 8
    image[..., 1] = 20 + 20 * (episode % 10) + y // 8
    image[..., 2] = 40 + 90 * camera
    return image


def state(episode: int, k: int) -> np.ndarray:
    return np.array([episode, k, *np.sin(np.arange(5) + k / FPS)], np.float32)


def record(root: str, mode: str, saved: Callable[[int], None]) -> None:
    """Record until killed; `saved` is told of every episode that lerobot says it has saved."""
    visual = {"shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channels"]}
    kind = "image" if mode == "images" else "video"
    features = {
        "observation.state": {"dtype": "float32", "shape": (7,), "names": None},
        "action": {"dtype": "float32", "shape": (7,), "names": [*"abcdefg"]},
        "done": {"dtype": "bool", "shape": (1,), "names": None},
        "observation.images.top": {"dtype": kind, **visual},
        "observation.images.side": {"dtype": kind, **visual},
    }
    more = {"streaming": {"streaming_encoding": True}, "batch": {"batch_encoding_size": 5}}
    dataset = LeRobotDataset.create(
        "local/killed",
        fps=FPS,
        features=features,
        root=root,
        use_videos=kind == "video",
        **more.get(mode, {}),
    )
    for episode in itertools.count():
        length = LENGTH + episode % 5
        for k in range(length):
            dataset.add_frame(
                {
                    "observation.state": state(episode, k),
                    "action": state(episode, k) + 1,
                    "done": np.array([k == length - 1]),
                    "observation.images.top": picture(episode, k, 0),
                    "observation.images.side": picture(episode, k, 1),
                    "task": f"task {episode % 3}",
                }
            )
        dataset.save_episode()
        saved(episode)


def kill_one(folder: Path, mode: str, seconds: float) -> None:
    """Record in a child, kill it and its children; write down how many episodes were saved."""
    folder.mkdir(parents=True)
    log = os.open(folder / "saved", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    child = os.fork()
    if not child:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        record(str(folder / "set"), mode, lambda _: os.write(log, b"."))
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(log)


def main() -> None:
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    modes = sys.argv[4:] or ["video"]
    chance = random.Random(seed)
    for number in range(count):
        mode = modes[number % len(modes)]
        kill_one(folder / f"{number:03d}-{mode}", mode, chance.uniform(0.5, 9.0))


if __name__ == "__main__":
    main()
