"""`penstock card`: the README.md of a dataset."""

from __future__ import annotations

import argparse

from penstock.commands.base import Command, Outcome


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DATASET", help="a LeRobot dataset of any making")
    parser.add_argument("--license", metavar="NAME", help="the hub's name of it, as apache-2.0")
    parser.add_argument("--name", metavar="USER/NAME", help="of the repository")
    parser.add_argument(
        "--overwrite", action="store_true", help="also a README.md that somebody else wrote"
    )


def _run(a: argparse.Namespace) -> Outcome:
    from penstock.inspect.card import write_card

    target = str(write_card(a.path, license=a.license, name=a.name, overwrite=a.overwrite))
    return Outcome(f"wrote {target}", {"wrote": target}, answer=False)


COMMAND = Command(
    "write the dataset card: README.md with a picture",
    "What the Hugging Face Hub shows of a dataset: its front matter (licence, robotics, LeRobot, "
    "data files), one frame of every camera, features, tasks, episodes, and the recordings they "
    "come from. A card of penstock's is written anew; any other README.md is kept.",
    "penstock card dataset --license apache-2.0",
    _add_arguments,
    _run,
)
