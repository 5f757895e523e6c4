"""Kill -9 a process that fills and saves a replay buffer, and look at what it left.

Usage: kill_campaign.py KIND FOLDER KILLS, where KIND is "storage" (CompressedStorage) or "dict"
(DictReplayBuffer). Prints one JSON line with the figures. Each victim is forked from this process
(torch is imported once), and goes on where the last one was killed. What a save must hold follows
from the number of items alone.
"""

import json
import logging
import random
import sys
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict

from harness import run_and_kill
from penstock.errors import DataError
from penstock.replay.episodes.buffer import DictReplayBuffer
from penstock.replay.segments import MANIFEST, LogReader
from penstock.replay.torchrl.storage import CompressedStorage

SLOTS = 1100
STEP = 170  # no divisor of anything: blocks are half written, the ring wraps anywhere


def items(numbers):
    """The content of items, by their numbers."""
    pixels = (numbers[:, None] * torch.arange(1, 401) % 253).to(torch.uint8)
    return {"n": numbers, "pixels": pixels, "next": {"reward": numbers.double() / 3}}


class Storage:
    """A ring of slots: item n lies in slot n % SLOTS until it is overwritten."""

    def __init__(self, folder, anew=False):
        self.storage, self.total = CompressedStorage(SLOTS), 0
        if (folder / MANIFEST).exists():
            self.storage.loads(folder)
            self.total = int(self.storage[:]["n"].max()) + 1
            if anew:
                self.storage._saved = None

    def add(self):
        numbers = torch.arange(self.total, self.total + STEP)
        data = TensorDict(items(numbers), batch_size=[STEP])
        self.storage.set(numbers % SLOTS, data)
        self.total += STEP

    def save(self, folder):
        self.storage.dumps(folder)

    def is_whole(self):
        slots = torch.arange(min(self.total, SLOTS))
        truth = items(slots + (self.total - 1 - slots) // SLOTS * SLOTS)
        found = self.storage[:]
        return len(found) == len(slots) and bool(
            (found == TensorDict(truth, batch_size=[len(slots)])).all()
        )


class Episodes:
    """Episodes of STEP frames; the oldest are forgotten whole."""

    def __init__(self, folder, anew=False):
        if (folder / MANIFEST).exists():
            self.buffer = DictReplayBuffer.load(folder)
            self.total = (self.buffer.episodes[-1] + 1) * STEP
            if anew:
                self.buffer._saved = None
        else:
            keys = ["n", "pixels", ("next", "reward")]
            self.buffer, self.total = DictReplayBuffer(SLOTS, keys, img_compressed=True), 0

    def add(self):
        self.buffer.add(items(torch.arange(self.total, self.total + STEP)))
        self.total += STEP

    def save(self, folder):
        self.buffer.save(folder)

    def is_whole(self):
        held = min(self.total, SLOTS // STEP * STEP)
        truth = items(torch.arange(self.total - held, self.total))
        found = self.buffer.get(truth["n"].numpy())
        return len(self.buffer) == held and all(
            torch.equal(one, other)
            for one, other in (
                (found["n"], truth["n"]),
                (found["pixels"], truth["pixels"]),
                (found["next"]["reward"], truth["next"]["reward"]),
            )
        )


KINDS = {"storage": Storage, "dict": Episodes}


def save_for_ever(kind, folder, anew, acknowledge):
    """Add and save, again and again."""
    victim = kind(folder, anew)
    while True:
        victim.add()
        victim.save(folder)
        acknowledge(victim.total)


def was_interrupted(folder):
    """Tell whether the victim left something that a finished save does not leave."""
    with LogReader(folder) as log:
        listed = set(log.segments)
    there = {path.name for path in folder.glob("segment_*")}
    return there != listed or any(folder.glob(".penstock-tmp*"))


def main(kind, folder, kills):
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    kind(folder).add()  # compiles before the forks
    chance = random.Random(kills)
    figures = {"kills": kills, "acknowledged": 0, "interrupted": 0}
    wrong = {"lost": [], "unreadable": [], "different": []}
    for kill in range(kills):
        doomed = partial(save_for_ever, kind, folder, kill % 4 == 3)
        totals = run_and_kill(doomed, chance.random() * 0.1)
        figures["acknowledged"] += len(totals)
        try:
            figures["interrupted"] += was_interrupted(folder)
            left = kind(folder)
        except DataError as error:
            wrong["unreadable"].append([kill, str(error)])
            break
        # A save may be durable and not acknowledged yet; an older one than acknowledged is a loss.
        if left.total not in (totals[-1], totals[-1] + STEP):
            wrong["lost"].append([kill, left.total, totals[-1]])
        if not left.is_whole():
            wrong["different"].append([kill, left.total])
    sys.stdout.write(json.dumps(figures | wrong) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    main(KINDS[sys.argv[1]], target, int(sys.argv[3]))
