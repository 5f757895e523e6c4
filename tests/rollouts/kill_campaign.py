"""Kill -9 a process that saves rollouts, again and again, and look at what it left.

Usage: kill_campaign.py FOLDER KILLS. Prints one JSON line with the figures. Each victim is forked
from this process (torch is imported once), and goes on where the last one was killed.
"""

import json
import random
import sys
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict

from harness import run_and_kill
from penstock.rollouts.storage import RolloutStorage

KEEP = 4
NAMES = 5  # iterations are used again, so that files are replaced as well as made


def batch(number):
    """What the save of this number must hold; it can be made again from the number alone."""
    generator = torch.Generator().manual_seed(number)
    return TensorDict(
        {
            "number": torch.full((8, 16), number),
            "agents": {"lidar": torch.rand(8, 16, 300, generator=generator).round(decimals=2)},
        },
        batch_size=[8, 16],
    )


def victim(path, start, background, acknowledge):
    """Save numbered rollouts for ever."""
    storage = RolloutStorage(path, keep_last=KEEP, background=background)
    for number in range(start + 1, sys.maxsize):
        saved = storage.save(batch(number), number if number % 3 else number % NAMES)
        if background:
            saved.wait()
        acknowledge(number)


def look(path, last):
    """Load everything; return the highest number, how many are wrong, and if the last is there."""
    storage = RolloutStorage(path)
    wrong, highest = 0, 0
    numbers = set()
    for _, data in storage.iterate():
        number = int(data["number"][0, 0])
        expected = batch(number)
        wrong += not all((data[key] == expected[key]).all() for key in expected.keys(True, True))
        numbers.add(number)
        highest = max(highest, number)
    return highest, wrong, last in numbers or last + 1 in numbers


def main(path, kills):
    torch.set_num_threads(1)
    chance = random.Random(kills)
    acknowledged = lost = unreadable = 0
    start = 0
    for kill in range(kills):
        doomed = partial(victim, path, start, bool(kill % 2))
        numbers = run_and_kill(doomed, chance.random() * 0.1)
        acknowledged += len(numbers)
        start, wrong, there = look(path, numbers[-1])
        unreadable += wrong
        # A save may be durable and not acknowledged yet; an older one than acknowledged is a loss.
        lost += not there or start not in (numbers[-1], numbers[-1] + 1)
    RolloutStorage(path).save(batch(0), 0)  # sweeps up after the dead
    leftovers = [name.name for name in path.iterdir() if name.name.startswith(".")]
    figures = {
        "kills": kills,
        "acknowledged": acknowledged,
        "lost": lost,
        "unreadable": unreadable,
        "leftovers": leftovers,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
