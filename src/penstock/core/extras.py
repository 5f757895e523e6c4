"""Packages that do not come with penstock: one line tells which is needed, and which is there."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from penstock.errors import MissingExtra, PenstockWarning

TORCHRL = (0, 14)  # its storages and samplers are extended, private parts included


@contextmanager
def needs_torchrl(what: str) -> Iterator[None]:
    """Stand around imports of TorchRL: refuse an older one than the tested, warn of a newer one."""
    tested = ".".join(map(str, TORCHRL))
    found = installed("torchrl")
    there = "none is installed" if found is None else f"{found} is installed"
    problem = f"{what} needs TorchRL {tested}, {there}"
    if found is None or version_of(found) < TORCHRL:
        raise MissingExtra("torchrl", "rl", problem)
    if version_of(found) > TORCHRL:
        warnings.warn(
            f"{what} was tested with TorchRL {tested}, {found} is installed; if it fails: "
            f'pip install "penstock[rl]"',
            PenstockWarning,
            stacklevel=4,
        )
    try:
        yield
    except ImportError as error:
        problem = f"{problem} and cannot be imported ({error})"
        raise MissingExtra("torchrl", "rl", problem) from error


def installed(package: str) -> str | None:
    """Return the version of a package, or None; without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def version_of(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version: "2.0.1+cu117" gives (2, 0)."""
    numbers = [int(number) for number in re.findall(r"\d+", text)[:2]]
    return numbers[0], numbers[1] if len(numbers) > 1 else 0
