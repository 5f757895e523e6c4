"""`penstock doctor`: verify every byte."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack

from penstock.commands.base import Command, Outcome
from penstock.errors import UsageError
from penstock.objects import ObjectPath, is_object


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files or folders")
    parser.add_argument(
        "--quick", action="store_true", help="of a dataset, decode only a sample of the pictures"
    )


def _run(arguments: argparse.Namespace) -> Outcome:
    from penstock.inspect import doctor

    with ExitStack() as stack:
        here = {path: _copied(path, stack) for path in arguments.paths}
        result = doctor.check_all(list(here.values()), quick=arguments.quick)
    text, data = result.text(), json.dumps(result.to_json())
    for path, folder in here.items():
        text, data = text.replace(folder, path), data.replace(folder, path)
    return Outcome(text, json.loads(data), 1 if result.findings else 0)


def _copied(path: str, stack: ExitStack) -> str:
    """Return a path; of a dataset in object storage a copy in the temporary folder."""
    if not is_object(path):
        return path
    from penstock.dataset.layout import INFO_PATH
    from penstock.dataset.remote import RemoteDataset

    if not (ObjectPath(path) / INFO_PATH).is_file():
        raise UsageError(f"{path} is no dataset: doctor looks at nothing else in object storage")
    remote = stack.enter_context(RemoteDataset(ObjectPath(path), changes=False))
    remote.fetch_all()
    return str(remote.folder)


COMMAND = Command(
    "verify every byte; exit code 1 on a finding",
    "A recording: every message is read. A dataset: schemas, counts, timestamps, statistics, and "
    "every picture is decoded. A checkpoint or rollout: every block is decoded; bases of "
    "differences, the latest pointer and left-over temporary files are checked. A replay buffer: "
    "every segment. Exit code 1 if anything is wrong.",
    "penstock doctor dataset --json",
    _add_arguments,
    _run,
    interruptible=True,
    objects=True,
)
