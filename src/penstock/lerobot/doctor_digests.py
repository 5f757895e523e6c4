"""Check the files of a dataset against the checksums that penstock wrote beside them."""

from __future__ import annotations

from pathlib import Path

from penstock.lerobot.findings import Report


def check_digests(root: Path, report: Report) -> None:
    """Compare every file that the journal names with its size and CRC-32, if there is a journal."""
