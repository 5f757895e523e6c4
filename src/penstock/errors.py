"""Every exception penstock raises on purpose.

PenstockError                   exit code 1, the base of all
├── UsageError                  2  a wrong argument, setting or call
│   ├── UnsupportedValue        2  a value that cannot be stored without running code
│   └── SaverClosed             2  a call on something that was closed, or that another process owns
├── DataError                   3  a file or recording that cannot be used
│   ├── CorruptFile             3  its bytes are not the bytes that were written
│   ├── UnknownFormat           3  not a file that penstock can read
│   └── LimitExceeded           3  it asks for more memory than the limits allow
├── StorageError                4  the disk or the folder refuses: full, read-only, failing
│   └── LockHeld                4  another writer is at work there
├── PeerLost                    1  another process of the same training is gone
├── MissingExtra                5  an optional dependency is not installed
└── SnapshotDiscarded           6  a checkpoint given up: its tensors were changed under it

A message says what, where, which value, and what to do, in one line.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose."""

    exit_code = 1


class UsageError(PenstockError):
    """A wrong argument, setting or call."""

    exit_code = 2


class UnsupportedValue(UsageError):
    """A value that cannot be stored without pickle, named by its path in the state."""


class SaverClosed(UsageError):
    """A call on an object that was closed, or that belongs to another process."""


class DataError(PenstockError):
    """A file or recording that cannot be used."""

    exit_code = 3


class CorruptFile(DataError):
    """The bytes of a file are not those that were written."""


class UnknownFormat(DataError):
    """The file is of no kind that penstock reads."""


class LimitExceeded(DataError):
    """The file asks for more memory than the limits allow; nothing was allocated."""


class StorageError(PenstockError):
    """The disk or the folder refuses: full, read-only, failing."""

    exit_code = 4


class LockHeld(StorageError):
    """Another writer holds the folder."""


class PeerLost(PenstockError):
    """Another process of the same training is gone."""


class MissingExtra(PenstockError):
    """An optional dependency is not installed, or not in a version that will do.

    Args:
        package: Its name.
        extra: What brings it.
        problem: What is wrong, if it is not just missing.
    """

    exit_code = 5

    def __init__(self, package: str, extra: str, problem: str | None = None) -> None:
        problem = problem or f"{package} is not installed"
        super().__init__(f'{problem}: pip install "penstock[{extra}]"')


class SnapshotDiscarded(PenstockError):
    """A checkpoint was given up because its tensors were changed while they were copied."""

    exit_code = 6


class PenstockWarning(UserWarning):
    """Something the user should know, that stops nothing."""
