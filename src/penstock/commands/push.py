"""`penstock push`: a dataset to the Hugging Face Hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.commands.base import Command, Outcome


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DATASET", help="a LeRobot dataset of any making")
    parser.add_argument("repository", metavar="USER/NAME", help="of the repository")
    parser.add_argument("--private", action="store_true", help="make it a private one")
    parser.add_argument("--license", metavar="NAME", help="for the card, if it has none yet")


def _run(a: argparse.Namespace) -> Outcome:
    from penstock.inspect.card import CARD, write_card
    from penstock.integrations.hub import push

    if a.license or not (Path(a.path) / CARD).exists():
        write_card(a.path, license=a.license, name=a.repository)
    url = push(a.path, a.repository, private=a.private)
    return Outcome(f"pushed {a.path} to {url}", {"url": url}, answer=False)


COMMAND = Command(
    "push a dataset to the Hugging Face Hub",
    "Uploads the dataset with its card (written if there is none) and tags it with its version. "
    "Repeated after a failure, it goes on where it stopped. Needs huggingface_hub: pip install "
    '"penstock[hub]", and a login: hf auth login.',
    "penstock push dataset user/name --license apache-2.0",
    _add_arguments,
    _run,
)
