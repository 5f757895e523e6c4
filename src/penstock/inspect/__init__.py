"""What is in a file or folder (`info`), and whether it is whole (`doctor`); without torch.

recording.py dataset.py checkpoint.py replay.py run.py   each kind: is it one, describe it, say it
doctor.py     verify all of them
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from penstock.core.files import storage_error
from penstock.errors import UnknownFormat, UsageError
from penstock.inspect import checkpoint, dataset, recording, replay, run
from penstock.objects import is_object

Facts = dict[str, Any]
Kind = Literal["replay", "rollouts", "dataset", "run", "recording", "recordings", "folder", "file"]

# How each kind is told, and described; a path is of the first that it is.
_KINDS: dict[Kind, tuple[Callable[[Path], bool], Callable[..., Facts]]] = {
    "replay": (replay.is_replay, replay.describe_replay),
    "rollouts": (replay.is_rollouts, replay.describe_rollouts),
    "dataset": (dataset.is_dataset, dataset.describe),
    "run": (run.is_run, run.describe),
    "recording": (recording.is_bag, recording.describe),
    "recordings": (recording.is_folder, recording.describe_folder),
}


def describe(path: str | os.PathLike[str], salvage: bool = False) -> Facts:
    """Say what is in a recording, a dataset, a checkpoint, a rollout, a replay buffer, a folder.

    Raises:
        UsageError: There is nothing under this name.
        DataError: It is damaged, or of no kind that penstock knows.
    """
    if is_object(path):
        return dataset.describe_remote(str(path))
    where = Path(path)
    kind = kind_of(where)
    if kind == "file":
        return checkpoint.describe_file(where)
    if kind in _KINDS:
        found = _KINDS[kind][1]
        return found(where, salvage) if kind.startswith("recording") else found(where)
    facts = checkpoint.describe_folder(where)
    if not facts["checkpoints"]:
        raise UnknownFormat(
            f"{where} holds nothing that penstock reads: give a folder of recordings, "
            "checkpoints or rollouts, a dataset, a run or a replay buffer"
        )
    return facts


def kind_of(where: Path) -> Kind:
    """Say what a path is, as all commands take it.

    Returns:
        "recordings" is a folder of some, "folder" one of checkpoints or of anything; for a "file"
        see `checkpoint.classify`.

    Raises:
        UsageError: There is nothing under this name.
        StorageError: It cannot be read.
    """
    if not where.exists() and not where.is_symlink():
        raise UsageError(f"there is no file or folder {where}; check the path")
    try:
        known = next((kind for kind, (is_one, _) in _KINDS.items() if is_one(where)), None)
    except OSError as error:
        raise storage_error("read", where, error) from error
    return known or ("folder" if where.is_dir() else "file")


def text(facts: Facts, top: int = 10) -> str:
    """Lay out what `describe` found for the terminal, with so many tensors, or other rows."""
    if "segments" in facts:
        return replay.replay_text(facts)
    if "rollouts" in facts:
        return replay.rollouts_text(facts)
    if "recordings" in facts:
        return recording.folder_text(facts)
    if "topics" in facts:
        return recording.text(facts)
    if "episodes" in facts:
        return dataset.text(facts, top)
    if "last" in facts:
        return run.text(facts)
    return checkpoint.text(facts, top)


def write_map(path: str, target: str, salvage: bool) -> None:
    """Write the guessed mapping of a bag as a YAML file; never over an existing one."""
    if not recording.is_bag(Path(path)):
        raise UsageError(f"{path} is no recording: --write-map needs one")
    if Path(target).exists():
        raise UsageError(f"{target} exists already; remove it or choose another name")
    recording.write_map(Path(path), Path(target), salvage)
