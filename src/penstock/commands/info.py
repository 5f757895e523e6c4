"""`penstock info`: what is in a file or folder."""

from __future__ import annotations

import argparse

from penstock.commands.base import Command, Outcome, natural


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files or folders")
    parser.add_argument("--write-map", metavar="FILE", help="write the guess for a bag, to edit it")
    parser.add_argument(
        "--salvage", action="store_true", help="read what there is of a damaged bag"
    )
    parser.add_argument(
        "--top",
        type=natural,
        metavar="N",
        help="list so many tensors or origins (default 10; -v: all)",
    )


def _run(arguments: argparse.Namespace) -> Outcome:
    from penstock import inspect

    found = [inspect.describe(path, arguments.salvage) for path in arguments.paths]
    if arguments.write_map:
        inspect.write_map(arguments.paths[0], arguments.write_map, arguments.salvage)
    top = arguments.top if arguments.top is not None else 10**9 if arguments.verbose else 10
    return Outcome("\n\n".join(inspect.text(facts, top) for facts in found), found)


COMMAND = Command(
    "show what is in a recording, dataset, checkpoint, run",
    "A recording: topics, types, rates, gaps, sizes, and a guess of what a dataset may hold. "
    "A dataset: features, episodes, codecs, origins. A checkpoint or rollout: sizes, codecs, its "
    "largest tensors. A replay buffer: keys, codecs, frames. A run: how far it is.\n\n"
    "Only indexes and headers are read; nothing is unpickled, and torch is not needed.",
    "penstock info flight.bag --write-map map.yaml",
    _add_arguments,
    _run,
    objects=True,
)
