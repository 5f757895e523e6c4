"""The command: one verb is chosen, runs, and what it came to is printed; errors are one line.

The verbs are in commands/, a file each.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from penstock.commands.base import note_renamed
from penstock.commands.parser import build_parser
from penstock.core.files import storage_error
from penstock.core.interrupt import interruptible
from penstock.errors import MissingExtra, PenstockError, UsageError
from penstock.objects import is_object
from penstock.ui.progress import ENV_MODE
from penstock.ui.suggestions import did_you_mean, printable

R = TypeVar("R")
EXIT_STORAGE = 4
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_RENAMED = {"export-policy": "export"}


class _Terminated(KeyboardInterrupt):
    """SIGTERM: whoever runs us asks us to stop."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code.

    Args:
        argv: The words after `penstock`; by default those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file name may hold bytes that are no text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse, after --help or --version
        return end.code if isinstance(end.code, int) else 0
    except BrokenPipeError:
        # The reader has gone (`| head`): point stdout elsewhere, or the interpreter complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _Terminated as stop:
        return _fail(": ".join(["terminated", *map(str, stop.args)]), EXIT_TERMINATED, words)
    except KeyboardInterrupt as stop:
        return _fail(": ".join(["interrupted", *map(str, stop.args)]), EXIT_INTERRUPTED, words)
    except PenstockError as error:
        return _fail(f"error: {error}", error.exit_code, words)
    except OSError as error:
        said = storage_error("use", error.filename, error) if error.filename else error
        return _fail(f"error: {said}", EXIT_STORAGE, words)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return _fail_internal(error, words)
        missing = MissingExtra("torch", "rl")
        return _fail(f"error: {missing}", missing.exit_code, words)
    except Exception as error:
        return _fail_internal(error, words)


def _run(words: list[str]) -> int:
    parser, commands = build_parser()
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None:  # what every verb takes may stand before it, too
        at = words.index(chosen)
        words = [*words[at : at + 1], *words[:at], *words[at + 1 :]]
    if chosen == "bench":
        raise UsageError("bench is no verb any more: in the source tree, python -m benchmarks")
    if chosen in _RENAMED:
        note_renamed(chosen, _RENAMED[chosen])
        words = [_RENAMED[chosen] if word == chosen else word for word in words]
    elif chosen is not None and chosen not in commands:
        raise UsageError(f"unknown verb {chosen!r}: {did_you_mean(chosen, commands)}")
    arguments, rest = parser.parse_known_args(words)
    # Words behind an option: argparse would not give them to a list that has begun.
    if rest and (not hasattr(arguments, "words") or any(word.startswith("-") for word in rest)):
        verb = f"{arguments.verb} " if chosen else ""
        raise UsageError(f"unrecognized arguments: {' '.join(rest)}; see penstock {verb}--help")
    if rest:
        arguments.words += rest
    if chosen is None:
        parser.print_help()
        return UsageError.exit_code
    command = commands[arguments.verb]
    if not command.objects:
        _refuse_objects(arguments)
    arguments.typed = shlex.join(["penstock", *words])
    with _progress("quiet" if arguments.quiet else None):
        outcome = (
            _until_stopped(lambda: command.run(arguments))
            if command.interruptible
            else command.run(arguments)
        )
    if arguments.json:
        _print_json(outcome.data)
    elif outcome.text and (outcome.answer or outcome.code or not arguments.quiet):
        # Names in it come from files, and may hold what a terminal would obey.
        print(_coloured(printable(outcome.text)))
    return outcome.code


def _refuse_objects(arguments: argparse.Namespace) -> None:
    for value in vars(arguments).values():
        for path in value if isinstance(value, list) else [value]:
            if is_object(path):
                raise UsageError(
                    f"{arguments.verb} works on files of this machine, and {path} is in object "
                    f"storage: copy it here first, with the tool of its vendor"
                )


@contextmanager
def _progress(mode: str | None) -> Iterator[None]:
    """Show progress in a mode, here and in worker processes; None leaves it as it is."""
    before = os.environ.get(ENV_MODE)
    if mode is not None:
        os.environ[ENV_MODE] = mode
    try:
        yield
    finally:
        if mode is not None and before is None:
            del os.environ[ENV_MODE]
        elif mode is not None and before is not None:
            os.environ[ENV_MODE] = before


def _until_stopped(work: Callable[[], R]) -> R:
    """Do long work that Ctrl-C and SIGTERM stop at its next boundary."""

    def terminate(*_: object) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        return work()
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        return interruptible(work)
    finally:
        signal.signal(signal.SIGTERM, before)


def _fail_internal(error: Exception, words: list[str]) -> int:
    text = f"internal error: {type(error).__name__}: {error}; run again with --debug"
    return _fail(text, EXIT_INTERNAL, words)


def _fail(message: str, code: int, words: list[str]) -> int:
    if "--debug" in words:
        import traceback

        traceback.print_exc()
    # One line, whatever the message holds.
    print(printable(f"penstock: {' '.join(message.split())}"), file=sys.stderr)
    return code


def _coloured(text: str) -> str:
    """Colour what is wrong and what is well, where a terminal shows it."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    text = re.sub(r"(?m)^(FAILED|ERROR|CANNOT|MISSING|finding)(:.*)", "\x1b[31m\\1\x1b[0m\\2", text)
    return re.sub(r"(?m)^(ok\b|check: +ok)", "\x1b[32m\\1\x1b[0m", text)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2, allow_nan=False))
