"""Write small datasets with lerobot itself; run by the Python that has lerobot, not by ours.

    python make_golden.py OUT --mode video|image|h264 [--episodes 3]

Beside the dataset OUT it leaves OUT.npz with the values that were put in.
"""

from __future__ import annotations

import argparse
import inspect
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

FPS, HEIGHT, WIDTH = 30, 96, 128
LENGTHS = (12, 7, 20, 9)
TASKS = ("pick the cup", "place the cup", "pick the cup", "wave")


def picture(episode: int, k: int, camera: int) -> np.ndarray:
    """A smooth picture whose brightness tells the episode and the frame."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    image[..., 0] = (40 + 6 * k + x // 4) % 256
    image[..., 1] = (60 + 50 * episode + y // 4) % 256
    image[..., 2] = 90 + 60 * camera + (x + y) // 8
    return image


def frame(episode: int, k: int) -> dict[str, object]:
    """One frame without its pictures."""
    t = k / FPS
    state = np.sin(np.arange(7) + t + episode).astype(np.float32)
    return {
        "observation.state": state,
        "action": (state * 2 + 1).astype(np.float32),
        "matrix": (np.arange(6).reshape(2, 3) + t).astype(np.float32),
        "reward": np.array([t * 10], np.float64),
        "counter": np.array([100 * episode + k], np.int64),
        "done": np.array([k % 5 == 4], bool),
        "note": f"episode {episode}, frame {k}",
    }


def features(mode: str, *, plain: bool) -> dict[str, dict[str, object]]:
    """The features; plain leaves out those that lerobot cannot merge."""
    visual = {"shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channels"]}
    kind = "image" if mode == "image" else "video"
    chosen: dict[str, dict[str, object]] = {
        "observation.state": {"dtype": "float32", "shape": (7,), "names": [*"abcdefg"]},
        "action": {"dtype": "float32", "shape": (7,), "names": {"motors": [*"abcdefg"]}},
        "matrix": {"dtype": "float32", "shape": (2, 3), "names": None},
        "reward": {"dtype": "float64", "shape": (1,), "names": None},
        "counter": {"dtype": "int64", "shape": (1,), "names": None},
        "done": {"dtype": "bool", "shape": (1,), "names": None},
        "note": {"dtype": "string", "shape": (1,), "names": None},
        "observation.images.top": {"dtype": kind, **visual},
        "observation.images.wrist": {"dtype": "image" if mode != "h264" else "video", **visual},
    }
    if plain:
        for name in ("matrix", "note"):
            del chosen[name]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--mode", choices=["video", "image", "h264"], default="video")
    parser.add_argument("--episodes", type=int, default=3)
    parser.add_argument("--plain", action="store_true")
    words = parser.parse_args()
    chosen = features(words.mode, plain=words.plain)
    extra = {"vcodec": "h264"} if words.mode == "h264" else {}
    dataset = LeRobotDataset.create(
        "peer/golden", FPS, chosen, words.out, robot_type="tester", use_videos=True, **extra
    )
    takes_task = "task" in inspect.signature(dataset.add_frame).parameters  # before 0.4
    put: dict[str, list[np.ndarray]] = {}
    tasks = []
    for episode in range(words.episodes):
        for k in range(LENGTHS[episode]):
            row = {name: value for name, value in frame(episode, k).items() if name in chosen}
            for name, value in row.items():
                put.setdefault(f"vec/{name}", []).append(np.asarray(value))
            for camera, name in enumerate(("observation.images.top", "observation.images.wrist")):
                row[name] = picture(episode, k, camera)
                put.setdefault(f"mean/{name}", []).append(row[name].mean((0, 1)) / 255)
            tasks.append(TASKS[episode])
            if takes_task:
                dataset.add_frame(row, task=TASKS[episode])
            else:
                dataset.add_frame({**row, "task": TASKS[episode]})
        dataset.save_episode()
    if hasattr(dataset, "finalize"):
        dataset.finalize()
    stacked = {name: np.stack(values) for name, values in put.items()}
    lengths = np.array(LENGTHS[: words.episodes])
    np.savez(f"{words.out}.npz", lengths=lengths, task=np.array(tasks), **stacked)


if __name__ == "__main__":
    main()
