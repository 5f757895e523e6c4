"""Put one folder in the place of another, at once.

Siblings of the dataset, by names that nothing else uses or sweeps:
`.<name>.penstock-new`       a folder being built, or after the exchange the old content
`.<name>.penstock-undo`      the content before the last edit
`.<name>.penstock-old`       the old content between two renames, where exchanging is not possible
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from penstock.core.files import storage_error, sync_folder

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


def sibling(folder: Path, role: str) -> Path:
    """Return the name of a helper folder beside a dataset."""
    return folder.parent / f".{folder.name}.penstock-{role}"


def exchange(new: Path, folder: Path) -> None:
    """Swap two folders; the old content stays beside until `settle` removes it.

    With renameat2 there is no moment without the folder; without it there is one between two
    renames, which `settle` repairs.
    """
    try:
        if not _rename_exchange(new, folder):
            old = sibling(folder, "old")
            os.rename(folder, old)
            try:
                os.rename(new, folder)
            except OSError:
                os.rename(old, folder)
                raise
        sync_folder(folder.parent)
    except OSError as error:
        raise storage_error("replace", folder, error) from error


def settle(folder: Path, take_over: Callable[[Path, Path], None]) -> None:
    """Repair what an interrupted exchange left; safe at any time, by the holder of the lock.

    Args:
        folder: The dataset.
        take_over: Moves what must not be lost from a folder that goes to the one that stays.
    """
    new, old = sibling(folder, "new"), sibling(folder, "old")
    try:
        if not folder.exists() and old.is_dir():
            os.rename(old, folder)
            sync_folder(folder.parent)
        if folder.exists():
            for left in (new, old):
                if left.is_dir() and not left.is_symlink():
                    take_over(left, folder)
                    shutil.rmtree(left)
    except OSError as error:
        raise storage_error("repair", folder, error) from error


def _rename_exchange(first: Path, second: Path) -> bool:
    """Exchange two names; False if the system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    result = call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number))
