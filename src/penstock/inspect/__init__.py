"""What is in a file or folder (`info`), and whether it is whole (`doctor`); without torch.

recording.py dataset.py checkpoint.py replay.py run.py   each kind: is it one, describe it, say it
doctor.py     verify all of them
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.errors import UsageError
from penstock.inspect import checkpoint, dataset, recording, replay, run
from penstock.objects import is_object

Facts = dict[str, Any]


def describe(path: str | os.PathLike[str], salvage: bool = False) -> Facts:
    """Say what is in a recording, a dataset, a checkpoint, a rollout, a replay buffer, a folder.

    Raises:
        UsageError: There is nothing under this name.
        DataError: It is damaged, or of no kind that penstock knows.
    """
    if is_object(path):
        return dataset.describe_remote(str(path))
    where = Path(path)
    if replay.is_replay(where):
        return replay.describe_replay(where)
    if replay.is_rollouts(where):
        return replay.describe_rollouts(where)
    if dataset.is_dataset(where):
        return dataset.describe(where)
    if recording.is_bag(where):
        return recording.describe(where, salvage)
    if recording.is_folder(where):
        return recording.describe_folder(where, salvage)
    if run.is_run(where):
        return run.describe(where)
    return checkpoint.describe(where)


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
