"""The parser of all verbs, with the help of `penstock` itself."""

from __future__ import annotations

import argparse
import importlib

from penstock import __version__
from penstock.commands import VERBS
from penstock.commands.base import Command, HelpFormatter, Parser

_EPILOG = """\
examples:
  penstock info flight.bag
  penstock convert bags/ dataset --memory 512MB
  penstock doctor dataset

exit codes: 0 ok, 1 a finding or a bag that failed, 2 usage, 3 unusable data, 4 storage,
5 missing extra, 6 save discarded, 70 internal error, 130 interrupted, 143 terminated"""


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, Command]]:
    """Return the parser of all verbs, and the verbs by name."""
    parser = Parser(
        prog="penstock",
        description="The data path of robot learning: memory stays bounded, training never "
        "stalls, nothing is lost.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")
    commands: dict[str, Command] = {}
    for name in VERBS:
        commands[name] = importlib.import_module(f"penstock.commands.{name}").COMMAND
        commands[name].add_to(verbs, name)
    return parser, commands
