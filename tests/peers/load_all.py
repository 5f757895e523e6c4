"""Loads every frame of datasets with the real lerobot; run by the Python that has it."""

from __future__ import annotations

import sys

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset


def main() -> None:
    for root in sys.argv[1:]:
        dataset = LeRobotDataset("local/rescued", root=root, video_backend="pyav")
        for index in range(len(dataset)):
            frame = dataset[index]
            state = np.asarray(frame["observation.state"])
            assert int(state[0]) == int(frame["episode_index"])
            assert int(state[1]) == int(frame["frame_index"])
            assert tuple(frame["observation.images.top"].shape) == (3, 96, 128)
        sys.stdout.write(f"{root}: {len(dataset)} frames\n")


if __name__ == "__main__":
    main()
