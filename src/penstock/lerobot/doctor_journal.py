"""Compare the small files of a dataset with what the journal of penstock says they must be.

info.json, stats.json and the tasks follow from the journal and the stored state of the statistics,
so a single changed digit in them is found, without a checksum that would have to change with them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import DataError
from penstock.lerobot import layout, metadata, opening
from penstock.lerobot.columns import inside
from penstock.lerobot.episode import read_stats
from penstock.lerobot.findings import Report
from penstock.lerobot.journal import Base, Record
from penstock.lerobot.layout import PRIVATE_FOLDER
from penstock.lerobot.state import State, info_bytes, stats_bytes

_TODO = "open it with --resume or --append, which repairs it; nothing, if it was meant to change"
_ROOM = 1e-9  # another machine may sum in another order


def check_journal(root: Path, records: Sequence[Record], report: Report) -> None:
    """Compare the files that follow from the journal; nothing if settings.json is not there."""
    if not (root / opening.SETTINGS).is_file():
        return
    try:
        spec, _ = opening.read_settings(root)
        state = State.begin(Base.from_record(records[0]), {})
        for record in records[1:]:
            state = state.after(record)
        if state.episodes == state.base.episodes:
            return  # nothing was committed: the files are those that were there before
        wanted = {layout.INFO_PATH: json.loads(info_bytes(spec, state))}
        if spec.version == "v3.0":
            pack = inside(root, f"{PRIVATE_FOLDER}/{state.stats_file}")
            state.stats.update(read_stats(pack))
            wanted[layout.STATS_PATH] = json.loads(stats_bytes(spec, state))
    except (DataError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        what = f"it does not fit the other files there: {error}"
        report.error(PRIVATE_FOLDER, what, "copy the dataset again")
        return
    for name, value in wanted.items():
        try:
            where = _difference(metadata.read_json(root, name), value)
        except DataError:
            continue  # said by the check of that file
        if where is not None:
            report.warning(name, f"it is not what was written{where}", _TODO)
    _check_lists(root, spec.version, state, report)


def _check_lists(root: Path, version: layout.Version, state: State, report: Report) -> None:
    try:
        if metadata.read_tasks(root, version) != state.tasks:
            name = layout.TASKS_PATH if version == "v3.0" else layout.TASKS_JSONL
            report.warning(name, "its tasks are not those that were written", _TODO)
        for name, size in state.sizes.items():
            found = inside(root, name).stat().st_size
            if found != size:
                report.warning(name, f"it has {found} bytes, {size} were written", _TODO)
    except (DataError, OSError):
        return  # said by the check of that file


def _difference(found: Any, wanted: Any) -> str | None:
    """Return where two JSON values differ first, None where they do not."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        pairs = [(f" at {key!r}", found.get(key), wanted.get(key)) for key in found | wanted]
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = [("", a, b) for a, b in zip(found, wanted, strict=True)]
    elif isinstance(found, float) and isinstance(wanted, int | float):
        return None if math.isclose(found, wanted, rel_tol=_ROOM, abs_tol=_ROOM) else ""
    else:
        return None if type(found) is type(wanted) and found == wanted else ""
    for place, a, b in pairs:
        below = _difference(a, b)
        if below is not None:
            return place + below
    return None
