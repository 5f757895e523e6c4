"""Let the n-th call of each kind fail, for every n, and look at what the saver makes of it.

Usage: disk_campaign.py FOLDER SIZE, with faulty_disk.so loaded before libc. Prints one JSON line.
SIZE "small" takes one error per kind of call, "large" all of them, once and lasting.
"""

import contextlib
import ctypes
import errno
import itertools
import json
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path

import torch

from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.errors import PenstockError

DISK = ctypes.CDLL(None)
SHORT = 0  # a write that takes half of what it is given
FULL = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG]
ERRORS = {
    "write": [errno.EIO, *FULL, SHORT],
    "fsync": [errno.EIO, *FULL, errno.EINVAL],
    "rename": [errno.EIO, errno.ENOSPC, errno.EROFS],
    "link": [errno.EIO, errno.EPERM, errno.EMLINK, errno.ENOSPC],
    "symlink": [errno.EIO, errno.EPERM, errno.ENOSPC],
    "open": [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EROFS],
    "unlink": [errno.EIO, errno.EACCES],
    "read": [errno.EIO],
    "close": [errno.EIO, errno.ENOSPC],
    "lseek": [errno.EIO],
    "fadvise": [errno.EIO],
    "mkdir": [errno.ENOSPC],
    "flock": [errno.EIO, errno.ENOLCK],
    "ftruncate": [errno.EIO],
}
OPTIONS = {"keep_last": 3, "delta_every": 3}


def state_of(n):
    torch.manual_seed(0)
    weights = torch.randn(9_000)
    weights[:40] += n
    return {"n": n, "w": weights, "b": torch.full((7,), float(n))}


def same(loaded, n):
    state = state_of(n)
    return loaded["n"] == n and all(torch.equal(loaded[key], state[key]) for key in ("w", "b"))


def name_of(n):
    return f"{n % 4}.pt"


class Story:
    """Saves before, during and after a fault, and what is known of them."""

    def __init__(self, folder):
        self.folder = folder
        self.acknowledged = []
        self.wrong = []
        self.reported = 0
        self.saver = None

    def open(self):
        try:
            self.saver = AsyncCheckpointSaver(self.folder, handle_signals=False, **OPTIONS)
        except PenstockError:
            self.reported += 1

    def save(self, n, *, must=False):
        try:
            self.saver.save_async(state_of(n), name_of(n)).wait()
            self.acknowledged.append(n)
        except PenstockError as error:
            self.reported += 1
            if must:
                self.wrong.append(f"save {n} after the fault: {error}")
        except Exception as error:
            self.wrong.append(f"save {n}: {error!r}")

    def close(self):
        if self.saver is not None:
            try:
                if not self.saver.shutdown(timeout=60):
                    self.wrong.append("shutdown takes for ever")
            except Exception as error:
                self.wrong.append(f"told twice: {error!r}")

    def check(self, tried):
        """The last three that were acknowledged are there, but for names written since."""
        for n in self.acknowledged[-3:]:
            if any(name_of(later) == name_of(n) for later in tried if later > n):
                continue
            self.expect(self.folder / name_of(n), [n])
        if self.acknowledged:
            self.expect(self.folder, [n for n in tried if n >= self.acknowledged[-1]])

    def expect(self, path, numbers):
        try:
            loaded = load_checkpoint(path)
            if not any(same(loaded, n) for n in numbers):
                self.wrong.append(f"{path.name} holds {loaded['n']}, not {numbers}")
        except PenstockError as error:
            self.wrong.append(f"{path.name} is lost: {error}")


def no_links(*_, **__):
    raise OSError(errno.EPERM, "this file system has no links")


def tell(folder, call, nth, count, error, *, during_open):
    """Return whether the fault came, how many saves were reported, and what was wrong."""
    story = Story(folder)
    folder.parent.mkdir()
    DISK.disk_fail(b"", 0, 0, 0)
    if not during_open:
        story.open()
        for n in (1, 2, 3):
            story.save(n, must=True)
    DISK.disk_fail(call.encode(), nth, count, error)
    if during_open:
        story.open()
    if story.saver is not None:
        for n in (4, 5, 6):  # 5 writes over the keyframe of 2 and 3
            story.save(n)
    came = DISK.disk_failed() > 0
    DISK.disk_fail(b"", 0, 0, 0)
    story.check(range(1, 7))
    if story.saver is None:
        story.open()
    for n in (7, 8):
        story.save(n, must=True)
    story.close()
    story.check(range(1, 9))
    left = {path.name for path in folder.iterdir() if path.name.startswith(".penstock-tmp")}
    hidden = {path.name for path in folder.iterdir() if path.name.startswith(".")} - left
    if left and call != "unlink":
        story.wrong.append(f"left behind: {left}")
    strange = {name for name in hidden if name != ".penstock.lock" and not name.endswith(".base")}
    if strange:
        story.wrong.append(f"nobody will remove {strange}")
    shutil.rmtree(folder.parent)
    return came, story


def main(root, size):
    torch.set_num_threads(1)
    logging.getLogger("penstock").addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
    faults = reported = 0
    wrong = []
    lasts = (1, 10**9) if size == "large" else (1,)
    for links in (True, False):
        if not links:
            os.link = no_links
        for call, every in ERRORS.items():
            chosen = every if size == "large" else every[: int(links)]
            if size == "small" and call == "write":
                chosen = [errno.ENOSPC if links else SHORT]
            for error, count, during_open in itertools.product(chosen, lasts, (False, True)):
                for nth in itertools.count(1):
                    came, story = tell(
                        root / "disk" / "run", call, nth, count, error, during_open=during_open
                    )
                    faults += came
                    reported += story.reported
                    which = f"{call} {nth} {errno.errorcode.get(error, 'short')} x{count} "
                    which += f"{during_open=} {links=}"
                    wrong += [f"{which}: {what}" for what in story.wrong]
                    if not came:
                        break
    figures = {"faults": faults, "reported": reported, "wrong": wrong}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(Path(sys.argv[1]) / "disk")
    main(Path(sys.argv[1]), sys.argv[2])
