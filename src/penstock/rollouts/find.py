"""Find the rollouts of a file, a folder, or a run, those of all its processes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.core.files import storage_error
from penstock.errors import UsageError

_NAME = re.compile(r"rollout_(\d{6,})\.pack")
_RANK = re.compile(r"rank_(\d+)")


@dataclass(frozen=True)
class Found:
    """One rollout: its file, its number, and the process that saved it."""

    path: Path
    iteration: int
    rank: int = 0


def find_rollouts(path: Path, iterations: Iterable[int] | None) -> list[Found]:
    """Return the rollouts of a file, a folder or a run, in order.

    Raises:
        UsageError: There is none, or not one of those asked for.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist; check the path")
    if path.is_file():
        match = _NAME.fullmatch(path.name)
        found = [Found(path, int(match[1]) if match else 0)]
    else:
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        try:
            found = list(_in_folder(folder, 0))
            for below in folder.iterdir():
                if (match := _RANK.fullmatch(below.name)) and below.is_dir():
                    found += _in_folder(below, int(match[1]))
        except OSError as error:
            raise storage_error("read", folder, error) from error
    if not found:
        raise UsageError(f"there is no rollout in {path}; give a folder with rollout_*.pack files")
    if iterations is not None:
        wanted = set(iterations)
        missing = wanted - {each.iteration for each in found}
        if missing:
            numbers = sorted({each.iteration for each in found})
            raise UsageError(
                f"no rollout {min(missing)} in {path}: there are {len(numbers)}, from "
                f"{numbers[0]} to {numbers[-1]}"
            )
        found = [each for each in found if each.iteration in wanted]
    return sorted(found, key=lambda each: (each.iteration, each.rank))


def _in_folder(folder: Path, rank: int) -> Iterator[Found]:
    for file in folder.iterdir():
        if match := _NAME.fullmatch(file.name):
            yield Found(file, int(match[1]), rank)
