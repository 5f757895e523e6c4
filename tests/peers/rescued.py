"""Rescues what record.py left, and compares every frame with what was recorded; prints JSON.

python tests/peers/rescued.py FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from penstock.dataset import check as doctor
from penstock.dataset.reader import Dataset
from penstock.dataset.rescue import rescue
from penstock.errors import DataError

HEIGHT, WIDTH, FPS, LENGTH = 96, 128, 30, 20


def picture(episode: int, k: int, camera: int) -> np.ndarray:
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    image[..., 0] = 20 + 10 * (k % 20) + x // 8
    image[..., 1] = 20 + 20 * (episode % 10) + y // 8
    image[..., 2] = 40 + 90 * camera
    return image


def problems(folder: Path) -> tuple[list[str], int, int]:
    """Return what is wrong with a rescue, how many episodes were saved, and how many came back."""
    saved = (folder / "saved").stat().st_size
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    like = None
    if not (folder / "set/meta/info.json").read_bytes():  # lerobot was writing it
        mode = folder.name.partition("-")[2]
        others = folder.parent.glob(f"*-{mode}/set/meta/info.json")
        like = next(other.parent.parent for other in others if other.stat().st_size)
    try:
        report = rescue(folder / "set", out, like)
    except DataError as error:
        return ([f"{folder.name}: {error}"] if saved else []), saved, 0
    dataset = Dataset(out)
    found = [f"{folder.name}: {f}" for f in doctor.check(out).findings if f.severity == "error"]
    if len(dataset) < saved:
        found.append(f"{folder.name}: {saved} saved, {len(dataset)} came back; {report.lost}")
    for episode in dataset.episodes:
        e = episode.index
        if (len(episode), episode.tasks) != (LENGTH + e % 5, (f"task {e % 3}",)):
            found.append(f"{folder.name}: episode {e} is {len(episode)} of {episode.tasks}")
        for k, frame in enumerate(episode.frames()):
            expected = np.array([e, k, *np.sin(np.arange(5) + k / FPS)], np.float32)
            same = np.array_equal(frame["observation.state"], expected)
            same = same and np.array_equal(frame["action"], expected + 1)
            for camera, name in enumerate(("top", "side")):
                shown = frame[f"observation.images.{name}"].astype(int)
                same = same and np.abs(shown - picture(e, k, camera)).mean() < 9
            if not same:
                found.append(f"{folder.name}: episode {e}, frame {k} is another one")
                break
    return found, saved, len(dataset)


def main() -> None:
    wrong, saved, back, kills = [], 0, 0, 0
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        if (folder / "set").exists():
            some, before, after = problems(folder)
            wrong += some
            kills, saved, back = kills + 1, saved + before, back + after
    found = {"kills": kills, "saved": saved, "came_back": back, "problems": wrong}
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
