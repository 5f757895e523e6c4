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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.core.files import (
    FolderLock,
    make_folder,
    names_synced_later,
    storage_error,
    sync_folder,
)
from penstock.dataset.plan import LOCK_NAME, UNITS
from penstock.dataset.unit import move_units
from penstock.errors import PenstockError, UsageError

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


def new_target(out: Path | str, *inputs: Path | str) -> Path:
    """Return the folder that a result goes to; refuse one with content, or inside what is read."""
    target = Path(os.path.realpath(out))
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise UsageError(f"{target} exists: give a new folder")
    for each in map(os.path.realpath, inputs):
        if target.is_relative_to(each):
            raise UsageError(f"{target} lies in {each}, which is read: give a folder beside it")
    return target


@contextmanager
def replacing(folder: Path, like: Path) -> Iterator[Path]:
    """Yield an empty folder, which at the end takes the place of another at once.

    After an error the other is as before. After the exchange its content is beside it, in the
    folder that was given, until `settle` removes it.

    Args:
        folder: What is replaced, or made if it is not there.
        like: The folder that has the permissions.
    """
    new = sibling(folder, "new")
    made = not folder.is_dir() or not any(folder.iterdir())
    lock = FolderLock(new, LOCK_NAME)  # the writer of a dataset that is there has its lock
    if made:
        make_folder(new)
        lock.acquire()
    try:
        if made:
            _empty(new)
        else:
            new.mkdir()
        shutil.copymode(like, new)
        with names_synced_later():
            yield new
        for each, _, _ in os.walk(new):
            sync_folder(Path(each))
        if made:
            with suppress(FileNotFoundError):
                folder.rmdir()
            os.rename(new, folder)
            sync_folder(folder.parent)
        else:
            exchange(new, folder)
    except BaseException as error:
        with suppress(PenstockError):
            settle(folder)  # what comes after the exchange must not lose the units
        if made:
            shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError):
            raise storage_error("build", folder, error) from error
        raise
    finally:
        lock.release()


def _empty(folder: Path) -> None:
    """Remove what is in a folder, but for its lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK_NAME:
            path.unlink()


def settle(folder: Path) -> None:
    """Repair what an interrupted exchange left; safe at any time, by the holder of the lock."""
    new, old = sibling(folder, "new"), sibling(folder, "old")
    try:
        if not folder.exists() and old.is_dir():
            os.rename(old, folder)
            sync_folder(folder.parent)
        if folder.exists():
            for left in (new, old):
                if left.is_dir() and not left.is_symlink():
                    take_over_units(left, folder)
                    shutil.rmtree(left)
    except OSError as error:
        raise storage_error("repair", folder, error) from error


def take_over_units(old: Path, root: Path) -> None:
    """Move the units from what was the dataset to what is it now; safe to repeat."""
    try:
        if (old / UNITS).is_dir():
            move_units(old / UNITS, root / UNITS)
    except OSError as error:
        raise storage_error("move", old / UNITS, error) from error


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
