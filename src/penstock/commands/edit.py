"""`penstock edit`: change the episodes of a dataset."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.commands.base import Command, Outcome
from penstock.errors import UsageError
from penstock.ui.suggestions import did_you_mean

if TYPE_CHECKING:
    from penstock.dataset.edit import EditReport, Edits

OPERATIONS = (
    "delete", "keep", "trim", "split", "cut", "relabel", "drop", "rename", "reencode", "merge",
    "apply", "undo",
)  # fmt: skip
_MOST = 10_000_000  # episodes


def run(
    path: str, operation: str, words: Sequence[str], out: str | None, dry_run: bool
) -> EditReport:
    """Edit a dataset.

    Raises:
        UsageError: A word cannot be understood, or names what is not there.
    """
    from penstock.dataset.edit import Edits, edit, undo

    if operation not in OPERATIONS:
        raise UsageError(f"unknown edit {operation!r}: {did_you_mean(operation, OPERATIONS)}")
    if operation == "undo":
        if words or out or dry_run:
            raise UsageError("undo takes nothing else: penstock edit DATASET undo")
        return undo(path)
    if not words:
        raise UsageError(f"{operation} needs to know what: see penstock edit --help")
    if operation == "merge":
        if out is None:
            raise UsageError("merge makes a new dataset: --out OUT")
        return edit(path, Edits(), others=words, out=out, dry_run=dry_run)
    return edit(path, _edits(operation, words), out=out, dry_run=dry_run)


def _edits(operation: str, words: Sequence[str]) -> Edits:
    from penstock.dataset.edit import Edits

    match operation:
        case "delete":
            return Edits(delete=_numbers(words))
        case "keep":
            return Edits(keep=_numbers(words))
        case "trim":
            found: dict[int, tuple[int, int | None]] = {}
            for word in words:
                episode, frames = _pair(word, "EPISODE=FIRST:STOP")
                first, _, stop = frames.partition(":")
                end = _number(stop) if stop else None
                found[_number(episode)] = (_number(first or "0"), end)
            return Edits(trim=found)
        case "cut":
            out: dict[int, list[tuple[int, int]]] = {}
            for word in words:
                episode, ranges = _pair(word, "EPISODE=FIRST:STOP,…")
                for frames in ranges.split(","):
                    first, _, stop = frames.partition(":")
                    if not (first and stop):
                        raise UsageError(f"{word!r} cannot be understood: EPISODE=FIRST:STOP,…")
                    out.setdefault(_number(episode), []).append((_number(first), _number(stop)))
            return Edits(cut=out)
        case "split":
            cuts = (_pair(word, "EPISODE=FRAME,…") for word in words)
            return Edits(split={_number(e): [_number(f) for f in at.split(",")] for e, at in cuts})
        case "relabel":
            task, *episodes = words
            if not task.strip():
                raise UsageError("the task is empty: say what is done")
            chosen: list[int | None] = [*_numbers(episodes)] if episodes else [None]
            return Edits(relabel=dict.fromkeys(chosen, task))
        case "drop":
            return Edits(drop=words)
        case "rename":
            return Edits(rename=dict(_pair(word, "OLD=NEW") for word in words))
        case "reencode":
            if len(words) > 1:
                raise UsageError(f"reencode takes one codec, not {' '.join(words)}")
            return Edits(codec=words[0])
        case _:
            if len(words) > 1:
                raise UsageError(f"apply takes one file, not {' '.join(words)}")
            from penstock.view.marks import read_marks

            return read_marks(Path(words[0]))


def text(report: EditReport) -> str:
    """Lay out what an edit did."""
    from penstock.ui.report import aligned

    lines = [
        ("dataset", str(report.out)),
        ("episodes", f"{report.episodes}; before {report.episodes_before}"),
        ("frames", f"{report.frames}; before {report.frames_before}"),
    ]
    if report.files:
        lines.append(("files", f"{report.files}, {report.kept_files} of them as they were"))
    if report.encoded:
        lines.append(("encoded", f"{report.encoded} videos of episodes were encoded again"))
    if report.dry_run:
        lines.append(("dry run", "nothing was written"))
    return aligned(lines)


def _numbers(words: Sequence[str]) -> list[int]:
    """Read episodes: 3 7 10-20 4,5."""
    found: list[int] = []
    for word in (part for each in words for part in each.split(",") if part):
        first, dash, last = word.partition("-")
        if not (first and (last or not dash)):
            raise UsageError(f"{word!r} is no episode, nor a range such as 10-20")
        low, high = _number(first), _number(last or first)
        if not 0 <= high - low < _MOST:
            raise UsageError(f"{word!r} is no range of episodes")
        found += range(low, high + 1)
    return found


def _number(word: str) -> int:
    if not word.isascii() or not word.isdigit() or len(word) > 9:
        raise UsageError(f"{word!r} is no number of an episode or a frame")
    return int(word)


def _pair(word: str, form: str) -> tuple[str, str]:
    left, equals, right = word.partition("=")
    if not (left and equals and right):
        raise UsageError(f"{word!r} cannot be understood: {form}")
    return left, right


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DATASET", help="a LeRobot dataset of any making")
    parser.add_argument("operation", metavar="EDIT", help="what to do, as above")
    parser.add_argument("words", nargs="*", metavar="...", help="with which episodes or features")
    parser.add_argument("--out", metavar="OUT", help="a new dataset; DATASET stays as it is")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be left; write nothing"
    )
    parser.add_argument("--card", action="store_true", help="write the card anew (README.md)")


def _run(a: argparse.Namespace) -> Outcome:
    report = run(a.path, a.operation, a.words, a.out, a.dry_run)
    if a.card and not a.dry_run:
        from penstock.inspect.card import write_card

        write_card(report.out)
    return Outcome(text(report), asdict(report), answer=False)


COMMAND = Command(
    "remove, shorten, split, relabel or merge episodes",
    "EDIT is one of\n"
    "  delete 3 7 10-20     keep 0-46           relabel 'pick a cup' 3 4\n"
    "  trim 5=10:200        split 5=100,150     cut 5=40:60,100:120\n"
    "  rename OLD=NEW       reencode h264       drop observation.wrench\n"
    "  merge OTHER... --out OUT                 apply marks.yaml     undo\n"
    "Frames that stay are not touched: rows and video packets are copied. The result is made "
    "beside the dataset and exchanged in one step; undo puts the last one back.",
    "penstock edit dataset delete 3 7 10-20",
    _add_arguments,
    _run,
    usage="penstock edit [options] DATASET EDIT ...",
    interruptible=True,
)
