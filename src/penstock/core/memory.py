"""Numbers as users give them, sizes as text, and the memory that this process holds."""

from __future__ import annotations

import operator
import os
import re
from contextlib import suppress
from decimal import Decimal
from glob import glob
from pathlib import Path
from typing import Any, Final

import psutil

from penstock.errors import UsageError

_DECIMAL: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNIT_BYTES: Final = {**_DECIMAL, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE_TEXT: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return an argument as a number; refuse what is no whole number, or less than the least."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise UsageError(f"{name}={value!r}: give a whole number, at least {least}")
    return number


def parse_bytes(value: str | int) -> int:
    """Return the number of bytes that a size such as ``"512MB"`` or ``"1.5 GiB"`` means.

    Units are B, kB, MB, GB, TB (powers of 1000) or KiB to TiB (of 1024), in any case of letters.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE_TEXT.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNIT_BYTES:
        raise UsageError(f"not a size in bytes: {value!r}; write for example 512MB or 2GiB")
    # Decimal, because 0.1 GB is exactly 100000000 bytes.
    return int(Decimal(match[1]) * _UNIT_BYTES[match[2].lower()])


def format_bytes(n: float) -> str:
    """Return a number of bytes for people, in powers of 1000: ``"1.5 GB"``."""
    if abs(n) < 1000:
        return f"{n:.0f} B"
    scaled = n / 1000
    for unit in ("kB", "MB", "GB"):
        if abs(round(scaled, 1)) < 1000:
            return f"{scaled:.1f} {unit}"
        scaled /= 1000
    return f"{scaled:.1f} TB"


def rss_bytes(tree: bool = True) -> int:
    """Return the resident memory of this process, with all child processes unless `tree` is False.

    Pages that processes share are counted once for each, so the sum is an upper bound.
    """
    total_bytes = 0
    for pid in _process_tree() if tree else [os.getpid()]:
        with suppress(psutil.Error):  # it ended between the listing and the reading
            total_bytes += psutil.Process(pid).memory_info().rss
    return total_bytes


def highest_rss_bytes() -> int:
    """Return the most that this process ever had in memory; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return 0


def _process_tree() -> list[int]:
    found = [os.getpid()]
    if not os.path.exists("/proc/thread-self/children"):
        # It looks at every process of the machine: 5 ms each time, on a quiet one.
        return found + [child.pid for child in psutil.Process().children(recursive=True)]
    for pid in found:
        for path in glob(f"/proc/{pid}/task/*/children"):
            with suppress(OSError):  # the thread, or the process, has ended meanwhile
                found += map(int, Path(path).read_text().split())
    return found
