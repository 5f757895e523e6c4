"""Kill -9 a process that saves, again and again, and look at what it left.

Usage: kill_campaign.py FOLDER KILLS. Prints one JSON line with the figures. Each victim is forked
from this process (torch is imported once), and goes on where the last one was killed.
"""

import json
import random
import sys
from functools import partial
from pathlib import Path

import torch

from harness import run_and_kill
from penstock.checkpoints import folder
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver


def victim(path, start, acknowledge):
    """Save numbered states for ever; some with a step after the save, some without."""
    net = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    saver = AsyncCheckpointSaver(path, optimizers=[optimizer], keep_last=2, delta_every=3)
    for number in range(start + 1, sys.maxsize):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(number)
        state = {"n": number, "net": net.state_dict()}
        handle = saver.save_async(state, f"{number % 7}.pt")
        if number % 3:
            optimizer.step()
        handle.wait()
        acknowledge(number)


def main(path, kills):
    torch.set_num_threads(1)
    chance = random.Random(kills)
    acknowledged = lost = unreadable = 0
    start = 0
    for _ in range(kills):
        numbers = run_and_kill(partial(victim, path, start), chance.random() * 0.2)
        acknowledged += len(numbers)
        loaded = load_checkpoint(path)
        start = loaded["n"]
        # A save may be durable and not acknowledged yet; an older one than acknowledged is a loss.
        lost += start not in (numbers[-1], numbers[-1] + 1)
        whole = all((tensor == start).all() for tensor in loaded["net"].values())
        unreadable += not whole or folder.latest(path) is None
        for saved in folder.list_saved(path):
            load_checkpoint(saved.path)
    figures = {"kills": kills, "acknowledged": acknowledged, "lost": lost, "unreadable": unreadable}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
