"""Check the files of a dataset against the checksums that penstock wrote beside them.

A codec hides most of what happens to its bytes: only a checksum tells that a video is what was
written. The journal has one for every file of every episode that was committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from isal import isal_zlib

from penstock.errors import DataError
from penstock.lerobot.columns import inside
from penstock.lerobot.doctor_journal import check_journal
from penstock.lerobot.findings import Report
from penstock.lerobot.layout import PRIVATE_FOLDER

JOURNAL = f"{PRIVATE_FOLDER}/journal.jsonl"
_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 16 << 20
_COPY = "copy the file again, or convert the recording again"


def check_digests(root: Path, report: Report) -> None:
    """Compare the files that the journal names, or that follow from it, if there is a journal."""
    if not (root / JOURNAL).is_file():
        return
    try:
        records = list(_records(root, report))
    except OSError as error:
        report.error(JOURNAL, f"it cannot be read: {error.strerror}", _COPY)
        return
    digests = {name: digest for record in records for name, digest in _files(record)}
    for name, (size, crc) in digests.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\x00" in name:
            report.error(JOURNAL, f"it names {name[:80]!r}, which is not in the dataset", _COPY)
            continue
        _check(root, name, size, crc, report)
    check_journal(root, records, report)


def _records(root: Path, report: Report) -> Iterator[dict[str, Any]]:
    """Read the lines of the journal; each begins with its own CRC-32."""
    number = 0
    with (root / JOURNAL).open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            crc, _, text = line.rstrip(b"\n").partition(b" ")
            record = None
            if line.endswith(b"\n") and crc == b"%08x" % isal_zlib.crc32(text):
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError):
                    record = None
            if isinstance(record, dict):
                yield record
            elif line.endswith(b"\n"):
                report.error(JOURNAL, f"line {number} fails its checksum", _COPY, "lines")
            else:
                report.warning(JOURNAL, "its last line is torn", "the next writer removes it")


def _files(record: dict[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    files = record.get("files")
    for name, value in files.items() if isinstance(files, dict) else ():
        pair = [value.get("size"), value.get("crc32")] if isinstance(value, dict) else value
        if isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair):
            yield name, (pair[0], pair[1])


def _check(root: Path, name: str, size: int, crc: int, report: Report) -> None:
    try:
        path = inside(root, name)
        with path.open("rb", buffering=0) as file:
            found = path.stat().st_size
            if found != size:
                report.error(name, f"it has {found} bytes, {size} were written", _COPY)
                return
            value = 0
            while block := file.read(_BLOCK_BYTES):
                value = isal_zlib.crc32(block, value)
    except FileNotFoundError:
        report.error(name, "it is missing", _COPY)
        return
    except (OSError, DataError) as error:
        report.error(name, f"it cannot be read: {error}", _COPY)
        return
    report.count("checksums")
    if value != crc:
        report.error(name, "its bytes are not those that were written", _COPY)
