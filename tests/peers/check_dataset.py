"""Read every frame of a dataset with the real lerobot; run by the Python that has it, not ours.

    python check_dataset.py ROOT [--expect values.npz] [--merge OTHER --merged OUT]

Prints one JSON document: {"ok": ..., "problems": [...], "frames": ..., "backends": {...}}.
The npz may hold `lengths` (frames per episode), `task` (one per frame), `vec/<feature>` (values,
one row per frame) and `mean/<camera>` (mean of each channel in [0, 1], one row per frame).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()  # a cache that stays would hide changes

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

MEAN_TOLERANCE = 0.02


def backends() -> list[str]:
    """The video back ends that load here."""
    found = ["pyav"]
    with contextlib.suppress(Exception):
        from torchcodec.decoders import VideoDecoder  # noqa: F401

        found.insert(0, "torchcodec")
    return found


def read_all(root: Path, backend: str, expect: dict[str, np.ndarray]) -> dict[str, object]:
    """Read every frame; return counts and what is not as it should be."""
    problems: list[str] = []
    dataset = LeRobotDataset("peer/local", root, video_backend=backend)
    frame_in_episode: dict[int, int] = {}
    rows: dict[str, list[np.ndarray]] = {}
    cameras = dataset.meta.camera_keys
    for index in range(len(dataset.hf_dataset)):
        item = dataset[index]
        episode = int(item["episode_index"])
        k = frame_in_episode.get(episode, 0)
        frame_in_episode[episode] = k + 1
        if int(item["index"]) != index:
            problems.append(f"frame {index}: index is {int(item['index'])}")
        if int(item["frame_index"]) != k:
            problems.append(f"frame {index}: frame_index is {int(item['frame_index'])}, not {k}")
        if abs(float(item["timestamp"]) - k / dataset.fps) > 1e-4:
            problems.append(f"frame {index}: timestamp {float(item['timestamp'])} at frame {k}")
        for name in cameras:
            image = item[name]
            shape = tuple(dataset.meta.shapes[name])
            names = dataset.meta.names[name]
            if names and names[2].startswith("channel"):
                shape = (shape[2], shape[0], shape[1])
            if tuple(image.shape) != shape:
                problems.append(f"frame {index}: {name} has shape {tuple(image.shape)}")
            rows.setdefault(f"mean/{name}", []).append(image.mean((1, 2)).numpy())
        for name in dataset.features:
            if name not in cameras:
                value = item[name]
                value = value.numpy() if isinstance(value, torch.Tensor) else np.array(value)
                rows.setdefault(f"vec/{name}", []).append(value)
        rows.setdefault("task", []).append(np.array(item["task"]))
    if len(dataset) != len(dataset.hf_dataset):
        problems.append(f"{len(dataset)} frames announced, {len(dataset.hf_dataset)} there")
    if sorted(frame_in_episode) != list(range(dataset.num_episodes)):
        problems.append(f"episodes {sorted(frame_in_episode)}, not 0..{dataset.num_episodes - 1}")
    lengths = [frame_in_episode[episode] for episode in sorted(frame_in_episode)]
    problems += compare({name: np.stack(values) for name, values in rows.items()}, lengths, expect)
    return {
        "problems": problems,
        "frames": len(dataset),
        "episodes": len(lengths),
        "lengths": lengths,
        "stats": sorted(dataset.meta.stats),
    }


def compare(
    rows: dict[str, np.ndarray], lengths: list[int], expect: dict[str, np.ndarray]
) -> list[str]:
    """Say where the values read differ from the expected ones."""
    problems = []
    for name, value in expect.items():
        wanted = value
        if name == "lengths":
            if lengths != wanted.tolist():
                problems.append(f"episode lengths {lengths}, not {wanted.tolist()}")
            continue
        if name not in rows:
            problems.append(f"{name} is not there")
            continue
        if rows[name].dtype == np.float32 and wanted.dtype == np.float64:
            wanted = wanted.astype(np.float32)  # torch makes a float32 of any single number
        got = rows[name].reshape(wanted.shape) if rows[name].size == wanted.size else rows[name]
        if got.shape != wanted.shape:
            problems.append(f"{name} has shape {got.shape}, not {wanted.shape}")
        elif name.startswith("mean/"):
            worst = float(np.abs(got - wanted).max())
            if worst > MEAN_TOLERANCE:
                problems.append(f"{name}: a channel's mean is off by {worst:.4f}")
        elif not np.array_equal(got, wanted, equal_nan=got.dtype.kind == "f"):
            problems.append(f"{name}: values differ, first in row {first_difference(got, wanted)}")
    return problems


def first_difference(got: np.ndarray, wanted: np.ndarray) -> int:
    differs = (got != wanted).reshape(len(got), -1).any(1)
    return int(np.argmax(differs))


def examine(root: Path, expect: dict[str, np.ndarray], chosen: list[str]) -> dict[str, object]:
    """Read the folder once per back end."""
    found: dict[str, object] = {}
    for backend in chosen:
        try:
            found[backend] = read_all(root, backend, expect)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            found[backend] = {"problems": [text], "trace": traceback.format_exc()[-3000:]}
    return found


def merge(roots: list[Path], out: Path) -> None:
    from lerobot.datasets.aggregate import aggregate_datasets

    names = [f"peer/part{i}" for i in range(len(roots))]
    aggregate_datasets(names, "peer/merged", roots=roots, aggr_root=out)


def twice(expect: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What two copies of the same dataset, one after the other, must hold."""
    numbered = ("vec/index", "vec/episode_index", "vec/task_index")
    return {
        name: np.concatenate([value, value])
        for name, value in expect.items()
        if name not in numbered
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--expect", type=Path)
    parser.add_argument("--backend", action="append", choices=["torchcodec", "pyav"])
    parser.add_argument("--merge", type=Path, help="a second dataset with the same values")
    parser.add_argument("--merged", type=Path, help="where the two together go")
    words = parser.parse_args()
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
    expect: dict[str, np.ndarray] = {}
    if words.expect:
        with np.load(words.expect, allow_pickle=False) as values:
            expect = dict(values)
    chosen = words.backend or backends()
    root = words.root
    try:
        if words.merge:
            merge([words.root, words.merge], words.merged)
            root, expect = words.merged, twice(expect)
        found = examine(root, expect, chosen)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        found = {"lerobot": {"problems": [text], "trace": traceback.format_exc()[-3000:]}}
    problems = [f"{name}: {text}" for name, one in found.items() for text in one["problems"][:20]]
    json.dump({"ok": not problems, "problems": problems, "backends": found}, sys.stdout)
    return 0 if not problems else 1


if __name__ == "__main__":
    sys.exit(main())
