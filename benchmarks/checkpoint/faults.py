"""Damaged files: who notices a flipped bit, a zeroed page, a truncation."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from benchmarks import Row, Settings
from benchmarks.checkpoint.state import Learner, map_tensors, tensors
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.errors import PenstockError
from penstock.ui.progress import Progress

_HIDDEN = 64  # a file of about 200 kB
_PAGE = 4096

Damage = Callable[[bytearray, random.Random], bytearray]


def flip(data: bytearray, chance: random.Random) -> bytearray:
    """Flip one bit."""
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def zero_page(data: bytearray, chance: random.Random) -> bytearray:
    """Zero one page, as a lost write does."""
    start = chance.randrange(-(-len(data) // _PAGE)) * _PAGE
    stop = min(start + _PAGE, len(data))
    data[start:stop] = bytes(stop - start)
    return data


def truncate(data: bytearray, chance: random.Random) -> bytearray:
    """Cut the file off."""
    return data[: chance.randrange(len(data))]


DAMAGES: dict[str, Damage] = {
    "bit flip": flip,
    "zeroed page": zero_page,
    "truncation": truncate,
}


def measure_faults(settings: Settings) -> list[Row]:
    """Damage files of every format and count the loads that are silently wrong."""
    learner = Learner(_HIDDEN)
    for _ in range(5):
        learner.iterate()
    state = map_tensors(learner.state(), lambda tensor: tensor.detach().clone())
    work = settings.work / "faults"
    work.mkdir()
    formats = _write_all(state, work)
    rows = []
    total = settings.faults + (len(formats) - 1) * len(DAMAGES) * settings.peer_faults
    with Progress(total, "faults", "files") as progress:
        for who, (file, load) in formats.items():
            original = file.read_bytes()
            for number, (what, damage) in enumerate(DAMAGES.items()):
                share = (settings.faults + number) // len(DAMAGES)
                count = share if who == "penstock" else settings.peer_faults
                chance = random.Random(f"{who} {what}")  # noqa: S311
                outcomes: Counter[str] = Counter()
                for _ in range(count):
                    file.write_bytes(damage(bytearray(original), chance))
                    outcomes[_outcome(load, state)] += 1
                    progress.advance()
                file.write_bytes(original)
                rows.append(_row(who, what, count, outcomes))
    shutil.rmtree(work)
    return rows


def _write_all(state: Any, work: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """Write a state in every format; return the file that holds the data, and how to load it."""
    with AsyncCheckpointSaver(work / "penstock", handle_signals=False) as saver:
        ours = saver.save_async(state, "checkpoint.pt").wait()
    plain = work / "plain.pt"
    torch.save(state, plain)
    flat = work / "flat.safetensors"
    save_file({f"{k:04}": tensor for k, tensor in enumerate(tensors(state))}, flat)
    folder = work / "dcp"
    save_distributed(state, storage_writer=FileSystemWriter(folder), no_dist=True)

    def load_flat() -> Any:
        return [tensor for _, tensor in sorted(load_file(flat).items())]

    def load_dcp() -> Any:
        target = map_tensors(state, torch.zeros_like)
        load_distributed(target, storage_reader=FileSystemReader(folder), no_dist=True)
        return target

    return {
        "penstock": (ours, lambda: load_checkpoint(ours)),
        "torch.save": (plain, lambda: torch.load(plain, weights_only=True)),
        "safetensors": (flat, load_flat),
        "DCP": (next(folder.glob("*.distcp")), load_dcp),
    }


def _row(who: str, what: str, count: int, outcomes: Counter[str]) -> Row:
    silent = outcomes["silent"]
    ours = who == "penstock"
    return Row(
        f"silently wrong after a {what}",
        who,
        silent,
        f"of {count}",
        n=count,
        bar="0" if ours else "",
        met=silent == 0 and outcomes["crash"] == 0 if ours else None,
    )


def _outcome(load: Callable[[], Any], state: Any) -> str:
    try:
        loaded = load()
    except PenstockError:
        return "refused"
    except (Exception, CheckpointException):  # of our own, only the kind above is right
        return "crash"
    return "unharmed" if _same(loaded, state) else "silent"


def _same(loaded: Any, state: Any) -> bool:
    ours, theirs = list(tensors(state)), list(tensors(loaded))
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        if a.dim() and b.dim()
        else torch.equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )
