"""Check the files of a dataset against the checksums that penstock wrote beside them.

A codec hides most of what happens to its bytes: only a checksum tells that a video is what was
written. built.jsonl has one for every file; datasets of earlier versions have them in a journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.dataset import layout, metadata
from penstock.dataset.adopt import JOURNAL, journal_records
from penstock.dataset.columns import inside
from penstock.dataset.findings import Report
from penstock.dataset.plan import BUILT, Built
from penstock.dataset.unit import Digest, file_digest, json_digest
from penstock.errors import DataError

_COPY = "copy the file again, or convert the recording again"
_MEANT = "nothing, if it was meant to change; else copy the dataset again"
# Small files that people and other programs change with good reason.
_SMALL = (layout.INFO_PATH, layout.STATS_PATH, layout.TASKS_PATH, layout.TASKS_JSONL)


def check_digests(root: Path, report: Report) -> None:
    """Compare the files that penstock wrote, if it did."""
    try:
        built = Built.read(root)
    except DataError as error:
        report.error(BUILT, str(error), "copy the dataset again")
        return
    if built is None:
        digests, where = dict(_journal_digests(root)), JOURNAL
    else:
        info = metadata.read_info(root).raw
        if (info["total_episodes"], info["total_frames"]) != (built.episodes, built.frames):
            report.warning(
                layout.INFO_PATH,
                f"it counts {info['total_episodes']} episodes, and penstock built "
                f"{built.episodes}: another program has changed the dataset, and its checksums "
                "say nothing",
                "nothing, if that was meant",
            )
            return
        digests, where = built.files, BUILT
    for name, digest in digests.items():
        _check(root, name, digest, where, report)


def _journal_digests(root: Path) -> Iterator[tuple[str, Digest]]:
    """Return the checksums of an earlier version's journal."""
    for record in journal_records(root):
        files = record.get("files")
        for name, value in files.items() if isinstance(files, dict) else ():
            pair: Any = (
                [value.get("size"), value.get("crc32")] if isinstance(value, dict) else value
            )
            if isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair):
                yield name, (pair[0], pair[1])


def _check(root: Path, name: str, digest: Digest, where: str, report: Report) -> None:
    try:
        path = inside(root, name)
    except DataError:
        report.error(where, f"it names {name[:80]!r}, which is not in the dataset", _COPY)
        return
    try:
        is_json = name in (layout.INFO_PATH, layout.STATS_PATH) and where == BUILT
        found = json_digest(path.read_bytes()) if is_json else file_digest(path)
    except FileNotFoundError:
        report.error(name, "it is missing", _COPY)
        return
    except (OSError, ValueError, RecursionError) as error:
        report.error(name, f"it cannot be read: {error}", _COPY)
        return
    report.count("checksums")
    if found == digest:
        return
    if name in _SMALL:
        report.warning(name, "it is not what was written", _MEANT)
    elif found[0] != digest[0]:
        report.error(name, f"it has {found[0]} bytes, {digest[0]} were written", _COPY)
    else:
        report.error(name, "its bytes are not those that were written", _COPY)
