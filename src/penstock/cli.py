"""The command: each verb parses its words, calls one function, and prints.

Nothing heavy is imported before a verb is chosen, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from penstock.arguments import build_parser
from penstock.core.interrupt import interruptible
from penstock.errors import MissingExtra, PenstockError, UsageError
from penstock.ui.suggestions import did_you_mean, printable

R = TypeVar("R")
EXIT_FINDING = 1
EXIT_STORAGE = 4
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


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
        return _fail(f"error: {error}", EXIT_STORAGE, words)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return _fail_internal(error, words)
        missing = MissingExtra("torch", "rl")
        return _fail(f"error: {missing}", missing.exit_code, words)
    except Exception as error:
        return _fail_internal(error, words)


def _run(words: list[str]) -> int:
    parser = build_parser()
    verbs = parser.get_default("verbs")
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen == "bench":
        raise UsageError("bench is no verb any more: in the source tree, python -m benchmarks")
    if chosen is not None and chosen not in verbs:
        raise UsageError(f"unknown verb {chosen!r}: {did_you_mean(chosen, verbs)}")
    arguments, rest = parser.parse_known_args(words)
    # Words behind an option: argparse would not give them to a list that has begun.
    if rest and (not hasattr(arguments, "words") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.words += rest
    if chosen is None:
        parser.print_help()
        return UsageError.exit_code
    return _VERBS[arguments.verb](arguments)


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


def _info(arguments: argparse.Namespace) -> int:
    from penstock.tools import inspect

    found = [inspect.describe_any(path, arguments.salvage) for path in arguments.paths]
    if arguments.write_map:
        inspect.write_map(arguments.paths[0], arguments.write_map, arguments.salvage)
    if arguments.json:
        _print_json(found)
    else:
        _show("\n\n".join(inspect.any_text(facts, arguments.top) for facts in found))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from penstock.tools import doctor

    result = _until_stopped(lambda: doctor.check_all(arguments.paths, quick=arguments.quick))
    if arguments.json:
        _print_json(result.to_json())
    else:
        _show(result.text())
    return EXIT_FINDING if result.findings else 0


def _convert(arguments: argparse.Namespace) -> int:
    from penstock.tools import convert_command

    report = _until_stopped(lambda: convert_command.run(arguments))
    if arguments.json:
        _print_json(report.to_json())
    else:
        _show(report.text())
    return 0 if report.ok else EXIT_FINDING


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


def _build(arguments: argparse.Namespace) -> int:
    from penstock.tools import build_command

    result = _until_stopped(lambda: build_command.run(arguments.out))
    if arguments.json:
        _print_json(result.to_json())
    else:
        _show(result.text())
    return EXIT_FINDING if result.failed else 0


def _edit(arguments: argparse.Namespace) -> int:
    from penstock.tools import edit_command

    a = arguments
    report = _until_stopped(
        lambda: edit_command.run(a.path, a.operation, a.words, a.out, a.dry_run)
    )
    if arguments.json:
        _print_json(edit_command.to_json(report))
    else:
        _show(edit_command.text(report))
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from penstock.tools import train_command

    return train_command.run(arguments)


def _evaluate(arguments: argparse.Namespace) -> int:
    from penstock.tools import evaluate_command

    result = _until_stopped(lambda: evaluate_command.run(arguments))
    if arguments.json:
        _print_json(result.to_json())
    else:
        _show(result.text())
    return 0


def _export_policy(arguments: argparse.Namespace) -> int:
    from penstock.nav.export import export_policy

    result = export_policy(arguments.run, arguments.out, checkpoint=arguments.checkpoint)
    if arguments.json:
        _print_json(result.to_json())
    else:
        _show(result.text())
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from penstock.rollouts.lerobot import export
    from penstock.tools.inspect_run import rate_note

    mode = "resume" if arguments.resume else "overwrite" if arguments.overwrite else "create"
    report = _until_stopped(
        lambda: export(
            arguments.rollouts,
            arguments.out,
            keys=arguments.keys.split(",") if arguments.keys else None,
            envs=arguments.envs,
            fps=arguments.fps,
            task=arguments.task,
            version=arguments.version,
            mode=mode,
        )
    )
    if arguments.json:
        _print_json(report.to_json())
    else:
        _show(report.text())
    note = rate_note(Path(arguments.rollouts).absolute(), report.fps)
    if note is not None:
        print(f"penstock: note: {note}", file=sys.stderr)
    return 0


def _advise(arguments: argparse.Namespace) -> int:
    from penstock.tools.advise import advise

    advice = advise(
        arguments.path,
        memory=arguments.memory,
        bandwidth=arguments.bandwidth,
        reuse=arguments.reuse,
        device_memory=arguments.device_memory,
    )
    if arguments.json:
        _print_json(advice.to_json())
    else:
        _show(advice.text())
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from penstock.tools import demo

    report = demo.run(arguments.out)
    print(f"\nreport: {report}")
    return 0


def _show(text: str) -> None:
    """Print a text; names in it come from files, and may hold what a terminal would obey."""
    print(printable(text))


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2, allow_nan=False))


_VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "info": _info,
    "doctor": _doctor,
    "convert": _convert,
    "build": _build,
    "edit": _edit,
    "train": _train,
    "evaluate": _evaluate,
    "export-policy": _export_policy,
    "export": _export,
    "advise": _advise,
    "demo": _demo,
}
