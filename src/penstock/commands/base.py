"""What all verbs have in common: how they are described, and what they hand back."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.errors import UsageError

FORMATS = ("v3.0", "v2.1")
_COMMON = "every verb: -q errors only, -v more, --json, --debug (a traceback), -h"


@dataclass(frozen=True)
class Outcome:
    """What a verb came to.

    Attributes:
        text: For a person.
        data: For `--json`.
        code: The exit code.
        answer: The text is what was asked for, so that `-q` prints it, too.
    """

    text: str
    data: Any
    code: int = 0
    answer: bool = True


@dataclass(frozen=True)
class Command:
    """A verb: paths are positional, options begin with `--`.

    Attributes:
        summary: One line for `penstock --help`, at most 60 characters.
        description: What `--help` says; a line that begins with blanks is not wrapped.
        example: A command that works.
        add_arguments: Adds the verb's own words to its parser.
        run: Does it.
        usage: The usage line, where argparse's own would mislead.
        interruptible: The work calls `check_stop`, so that a signal ends it at a boundary.
        objects: Its paths may be those of object storage.
    """

    summary: str
    description: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Outcome]
    usage: str | None = None
    interruptible: bool = False
    objects: bool = False

    def add_to(self, verbs: Any, name: str) -> None:
        """Add the verb to the parser of all verbs."""
        parser: argparse.ArgumentParser = verbs.add_parser(
            name,
            help=self.summary,
            usage=self.usage,
            description=self.description,
            epilog=f"example:\n  {self.example}\n\n{_COMMON}",
            formatter_class=HelpFormatter,
            add_help=False,
        )
        parser.set_defaults(verb=name)
        self.add_arguments(parser)
        hidden = argparse.SUPPRESS  # one line at the end tells of all of them
        parser.add_argument("-h", "--help", action="help", help=hidden)
        loudness = parser.add_mutually_exclusive_group()
        loudness.add_argument("-q", "--quiet", action="store_true", help=hidden)
        loudness.add_argument("-v", "--verbose", action="store_true", help=hidden)
        parser.add_argument("--json", action="store_true", help=hidden)
        parser.add_argument("--debug", action="store_true", help=hidden)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are UsageErrors, like all others."""

    def error(self, message: str) -> NoReturn:
        """Raise.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{message}; see {self.prog} --help")


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal, and leaves indented lines as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(terminal_width(), 100) - 1)
        # argparse forgets that verbs are indented further: the longest got a line of its own.
        self._action_max_length = 14

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts: list[list[str]] = [[]]
        for line in text.splitlines():
            if not line or line.startswith(" "):
                parts += [[line], []]
            else:
                parts[-1].append(line)
        wrapped = (
            lines[0] if lines[0][:1] in ("", " ") else textwrap.fill(" ".join(lines), width)
            for lines in parts
            if lines
        )
        return "\n".join(wrapped)


class Renamed(argparse.Action):
    """The old spelling of an option: it works for one release, with a note."""

    def __init__(self, option_strings: Sequence[str], dest: str, new: str, **more: Any) -> None:
        super().__init__(option_strings, dest, help=argparse.SUPPRESS, **more)
        self.new = new

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Take the value as that of the new spelling."""
        note_renamed(str(option_string), self.new)
        setattr(namespace, self.dest, values)


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add `--format`, the version of LeRobot's format."""
    parser.add_argument(
        "--format", choices=FORMATS, metavar="NAME", help="LeRobot's: v3.0 (default) or v2.1"
    )
    parser.add_argument("--version", action=Renamed, dest="format", choices=FORMATS, new="--format")


def note(text: str) -> None:
    """Tell something beside the result."""
    sys.stderr.write(f"penstock: note: {text}\n")


def note_renamed(old: str, new: str) -> None:
    """Tell that a spelling will go."""
    note(f"{old} is now {new}; the old spelling goes with the next release")


def terminal_width() -> int:
    """Return the columns of the terminal, or 80."""
    return shutil.get_terminal_size((80, 24)).columns


def natural(text: str) -> int:
    """Read a count.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return number
