"""Measure penstock and its peers side by side: `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks import NAMES, figures, runner
from penstock.errors import PenstockError, UsageError


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if one failed, 130 if it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Each case states the claim it checks. Without a name, all cases run (about 20 "
        "min). A run can be kept (--save), shown again (--from) and compared with an older one.",
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, expect noise")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--html", metavar="FILE", help="also write a report")
    parser.add_argument("--save", metavar="FILE", help="also keep the run, as JSON")
    parser.add_argument(
        "--from", dest="stored", metavar="FILE", help="show a kept run; nothing is measured"
    )
    parser.add_argument("--compare", metavar="FILE", help="compare with an older run")
    parser.add_argument(
        "--pages", action="store_true", help="also write the figures into README and docs"
    )
    try:
        return _run(parser.parse_args(words))
    except PenstockError as error:
        print(f"benchmarks: error: {error}", file=sys.stderr)
        return error.exit_code


def _run(arguments: argparse.Namespace) -> int:
    older = runner.load(arguments.compare) if arguments.compare else None
    if arguments.stored and (arguments.cases or arguments.quick):
        raise UsageError("--from shows a run that was kept: give no cases and no --quick with it")
    if arguments.stored:
        result = runner.load(arguments.stored)
    else:
        result = runner.run(arguments.cases, quick=arguments.quick)
    if arguments.json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        print(runner.text_report(result))
    if older is not None:
        text = runner.compare_text(older, result)
        print(f"\n{text}", file=sys.stderr if arguments.json else sys.stdout)
    if arguments.save:  # files last: a folder that is missing must not cost minutes of measuring
        runner.save(result, arguments.save)
    if arguments.html:
        runner.html_report(result).write(arguments.html)
    if arguments.pages:
        for page in figures.write_pages(result):
            print(f"{page}: new figures")
    failed = result.get("failed", {})
    if "interrupted" in failed.values():
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
