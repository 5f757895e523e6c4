"""The command: each verb parses its words, calls one function, and prints.

Nothing heavy is imported before a verb is chosen, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from penstock import __version__
from penstock.errors import MissingExtra, PenstockError, UsageError

EXIT_FINDING = 1
EXIT_STORAGE = 4
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130

_EXIT_CODES = """\
exit codes:
  0 ok            1 finding (doctor)   2 usage            3 unusable data
  4 storage       5 missing extra      6 save discarded
  70 internal error                    130 interrupted

examples:
  penstock info runs/x
  penstock doctor runs/x"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are UsageErrors, like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code.

    Args:
        argv: The words after `penstock`; by default those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
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
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED, words)
    except PenstockError as error:
        return _fail(f"error: {error}", error.exit_code, words)
    except OSError as error:
        return _fail(f"error: {error}", EXIT_STORAGE, words)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return _fail_internal(error, words)
        missing = MissingExtra("torch", "rl")
        return _fail(f"error: {missing}", missing.exit_code, words)
    except Exception as error:
        return _fail_internal(error, words)


def _run(words: list[str]) -> int:
    parser = _build_parser()
    verbs = parser.get_default("verbs")
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen not in verbs:
        close = difflib.get_close_matches(chosen, verbs, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(verbs)}"
        raise UsageError(f"unknown verb {chosen!r}: {hint}")
    arguments = parser.parse_args(words)
    if chosen is None:
        parser.print_help()
        return UsageError.exit_code
    verb: Callable[[argparse.Namespace], int] = arguments.run
    return verb(arguments)


def _fail_internal(error: Exception, words: list[str]) -> int:
    text = f"internal error: {type(error).__name__}: {error}; run again with --debug"
    return _fail(text, EXIT_INTERNAL, words)


def _fail(message: str, code: int, words: list[str]) -> int:
    if "--debug" in words:
        import traceback

        traceback.print_exc()
    # One line, whatever the message holds.
    print(f"penstock: {' '.join(message.split())}", file=sys.stderr)
    return code


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="penstock",
        description="The data path of robot learning: memory stays bounded, training never "
        "stalls, nothing is lost.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    info = _verb(
        verbs,
        "info",
        "show what is in checkpoints or folders of them",
        "Sizes, codecs, base, metadata and the largest tensors, read from the header alone.\n"
        "Nothing is unpickled, and torch is not needed.",
        "penstock info runs/x/latest",
        _info,
    )
    info.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint, or a folder of them")
    info.add_argument(
        "--top", type=_natural, default=10, metavar="N", help="largest tensors to list (default 10)"
    )
    info.add_argument("--json", action="store_true", help="one JSON document on stdout")

    doctor = _verb(
        verbs,
        "doctor",
        "verify every byte of checkpoints or folders of them",
        "Decodes every block, checks the bases of differences, the `latest` pointer and\n"
        "left-over temporary files. Exit code 1 if anything is wrong.",
        "penstock doctor runs/x --json",
        _doctor,
    )
    doctor.add_argument(
        "paths", nargs="+", metavar="PATH", help="a checkpoint, or a folder of them"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON document on stdout")

    bench = _verb(
        verbs,
        "bench",
        "measure penstock and its peers side by side on this machine",
        "Each case states the claim it checks. Without a name, all cases run.",
        "penstock bench checkpoint --quick --html bench.html",
        _bench,
    )
    bench.add_argument("cases", nargs="*", metavar="CASE", help="checkpoint (default: all)")
    bench.add_argument("--quick", action="store_true", help="fewer repetitions, under 90 s")
    bench.add_argument("--json", action="store_true", help="one JSON document on stdout")
    bench.add_argument("--html", metavar="FILE", help="also write a report")

    demo = _verb(
        verbs,
        "demo",
        "train, kill, resume, damage and recover, in under two minutes",
        "Trains a small policy in a child process with a checkpoint per iteration, kills it,\n"
        "resumes it, compares with a run that was left alone, and writes a report.",
        "penstock demo --out demo",
        _demo,
    )
    demo.add_argument("--out", default="demo", metavar="DIR", help="folder to make (default demo)")

    parser.set_defaults(verbs=list(verbs.choices))
    return parser


def _verb(
    verbs: Any,
    name: str,
    summary: str,
    description: str,
    example: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback on an error")
    parser.set_defaults(run=run)
    return parser


def _natural(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return number


def _info(arguments: argparse.Namespace) -> int:
    from penstock.tools import inspect

    found = [inspect.describe(path) for path in arguments.paths]
    if arguments.json:
        _print_json(found)
    else:
        print("\n\n".join(inspect.describe_text(facts, arguments.top) for facts in found))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from penstock.tools import doctor

    result = doctor.check_all(arguments.paths)
    if arguments.json:
        _print_json(result.to_json())
    else:
        print(result.text())
    return EXIT_FINDING if result.findings else 0


def _bench(arguments: argparse.Namespace) -> int:
    from penstock.tools.bench import runner

    result = runner.run(arguments.cases, quick=arguments.quick)
    if arguments.json:
        _print_json(result)
    else:
        print(runner.text_report(result))
    if arguments.html:  # last: a folder that is missing must not cost minutes of measuring
        runner.html_report(result).write(arguments.html)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from penstock.tools import demo

    report = demo.run(arguments.out)
    print(f"\nreport: {report}")
    return 0


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2, allow_nan=False))
