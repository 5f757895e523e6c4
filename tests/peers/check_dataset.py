"""Read every frame of a dataset with the real lerobot; run by the Python that has it, not ours.

    python check_dataset.py ROOT [--expect values.npz] [--merge OTHER --merged OUT]

Prints one JSON document: {"ok": ..., "problems": [...], "frames": ..., "backends": {...}}.
The npz may hold `lengths` (frames per episode), `task` (one per frame), `vec/<feature>` (values,
one row per frame), `mean/<camera>` (mean of each channel in [0, 1], one row per frame), and the
pictures themselves: `jpeg/<camera>` (files, one padded row per frame), or `pic/<camera>` (pixels),
and `number/<camera>` (the number that is written into each). `mask` (height, width) says which
pixels tell a shift of brightness; without it all do.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
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
from PIL import Image

MEAN_TOLERANCE = 0.02
PICTURES = ("jpeg/", "pic/", "number/", "mask")
BANDS = {"all": (0, 255), "dark": (0, 63), "middle": (64, 191), "bright": (192, 255)}


class Pictures:
    """Compares the pictures of one camera, one after the other, with those that were put in.

    Args:
        expect: What the npz holds.
        name: The camera.
        error: How far the pixels of a channel may be off in the mean, of 255.
        shift: How far their mean may be off, over all pictures.
    """

    def __init__(self, expect: dict, name: str, error: float, shift: float) -> None:
        self._jpegs, self._pixels, self._numbers = (
            expect.get(kind + name) for kind in ("jpeg/", "pic/", "number/")
        )
        self._name, self._error, self._shift = name, error, shift
        self._mask = expect["mask"][:, :, None] if "mask" in expect else np.True_
        self.worst = 0.0
        self._sums, self._counts = np.zeros((4, 3)), np.zeros((4, 3))

    @property
    def known(self) -> bool:
        return self._jpegs is not None or self._pixels is not None

    def wanted(self, index: int) -> np.ndarray:
        if self._jpegs is not None:
            with Image.open(io.BytesIO(self._jpegs[index].tobytes())) as picture:
                return np.asarray(picture.convert("RGB"))
        pixels = self._pixels[index]
        return pixels if pixels.ndim == 3 else np.repeat(pixels[:, :, None], 3, axis=2)

    def look(self, index: int, image: torch.Tensor) -> list[str]:
        found = image.permute(1, 2, 0).numpy().astype(np.float64) * 255
        wanted = self.wanted(index)
        if found.shape != wanted.shape:
            return [f"frame {index}: {self._name} has shape {found.shape}, not {wanted.shape}"]
        error = np.abs(found - wanted).mean((0, 1)).max()
        self.worst = max(self.worst, float(error))
        for band, (low, high) in enumerate(BANDS.values()):
            inside = (wanted >= low) & (wanted <= high) & self._mask
            self._sums[band] += np.where(inside, found - wanted, 0).sum((0, 1))
            self._counts[band] += inside.sum((0, 1))
        problems = []
        if error > self._error:
            problems.append(f"frame {index}: {self._name} is off by {error:.2f} of 255")
        if self._numbers is not None and burned_in(found) != self._numbers[index]:
            number = burned_in(found)
            problems.append(f"frame {index}: {self._name} shows {number}: {self._numbers[index]}")
        return problems

    def end(self) -> list[str]:
        shift = self.shifts()["all"]
        if np.abs(shift).max() > self._shift:
            return [f"{self._name} is brighter by {shift} of 255"]
        return []

    def shifts(self) -> dict[str, list[float]]:
        """How much brighter pixels are than they should be: all, the dark ones, …, by channel."""
        means = self._sums / np.maximum(self._counts, 1)
        return dict(zip(BANDS, means.tolist(), strict=True))


def burned_in(pixels: np.ndarray) -> int:
    """The number in 16 dark or bright blocks along the top, lowest bit first."""
    size = min(16, pixels.shape[1] // 16)
    edge = size // 4
    rows = pixels[edge : size - edge].mean(2)
    blocks = [rows[:, bit * size + edge : (bit + 1) * size - edge].mean() for bit in range(16)]
    return sum((block > 128) << bit for bit, block in enumerate(blocks))


def backends() -> list[str]:
    """The video back ends that load here."""
    found = ["pyav"]
    with contextlib.suppress(Exception):
        from torchcodec.decoders import VideoDecoder  # noqa: F401

        found.insert(0, "torchcodec")
    return found


def read_all(
    root: Path, backend: str, expect: dict[str, np.ndarray], limits: tuple[float, float]
) -> dict[str, object]:
    """Read every frame; return counts and what is not as it should be."""
    problems: list[str] = []
    dataset = LeRobotDataset("peer/local", root, video_backend=backend)
    frame_in_episode: dict[int, int] = {}
    rows: dict[str, list[np.ndarray]] = {}
    cameras = dataset.meta.camera_keys
    pictures = {name: Pictures(expect, name, *limits) for name in cameras}
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
            rows.setdefault(f"mean/{name}", []).append(image.mean((1, 2)).numpy())
            if pictures[name].known:
                problems += pictures[name].look(index, image)
                continue
            shape = tuple(dataset.meta.shapes[name])
            names = dataset.meta.names[name]
            if names and names[2].startswith("channel"):
                shape = (shape[2], shape[0], shape[1])
            if tuple(image.shape) != shape:
                problems.append(f"frame {index}: {name} has shape {tuple(image.shape)}")
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
    for one in pictures.values():
        problems += one.end()
    lengths = [frame_in_episode[episode] for episode in sorted(frame_in_episode)]
    problems += compare({name: np.stack(values) for name, values in rows.items()}, lengths, expect)
    return {
        "problems": problems,
        "frames": len(dataset),
        "episodes": len(lengths),
        "lengths": lengths,
        "stats": sorted(dataset.meta.stats),
        "pictures": {
            name: {"worst": one.worst, "shift": one.shifts()}
            for name, one in pictures.items()
            if one.known
        },
    }


def compare(
    rows: dict[str, np.ndarray], lengths: list[int], expect: dict[str, np.ndarray]
) -> list[str]:
    """Say where the values read differ from the expected ones."""
    problems = []
    for name, value in expect.items():
        wanted = value
        if name.startswith(PICTURES):
            continue
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


def examine(
    root: Path, expect: dict[str, np.ndarray], chosen: list[str], limits: tuple[float, float]
) -> dict[str, object]:
    """Read the folder once per back end."""
    found: dict[str, object] = {}
    for backend in chosen:
        try:
            found[backend] = read_all(root, backend, expect, limits)
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
    parser.add_argument("--error", type=float, default=6.0, help="of a picture, of 255")
    parser.add_argument("--shift", type=float, default=1.5, help="of the brightness, of 255")
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
        found = examine(root, expect, chosen, (words.error, words.shift))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        found = {"lerobot": {"problems": [text], "trace": traceback.format_exc()[-3000:]}}
    problems = [f"{name}: {text}" for name, one in found.items() for text in one["problems"][:20]]
    json.dump({"ok": not problems, "problems": problems, "backends": found}, sys.stdout)
    return 0 if not problems else 1


if __name__ == "__main__":
    sys.exit(main())
