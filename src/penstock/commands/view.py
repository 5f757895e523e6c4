"""`penstock view`: look at a recording or a dataset, and mark episodes."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from pathlib import Path

from penstock.commands.base import Command, Outcome, natural
from penstock.objects import is_object


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="PATH", help="a dataset, a recording, or a folder of recordings")
    add("--with", nargs="+", dest="bags", metavar="BAGS", help="recordings to show beside it")
    add("--marks", metavar="FILE", help="the edit list (default PATH.marks.yaml)")
    add("--episode", type=natural, default=0, metavar="N", help="to begin with")
    add("--port", type=natural, default=0, metavar="N", help="default: any that is free")
    add("--no-browser", action="store_true", help="only print the address")
    add("--screenshot", metavar="FILE", help="write a PNG of the page, and end")
    add("--width", type=natural, default=1280, metavar="N", help="of that picture (default 1280)")
    add("--dark", action="store_true", help="take it in dark colours")
    add("--rerun", metavar="FILE", help="write the episode for rerun (.rrd), and end")
    add("--foxglove", metavar="FILE", help="write the episode for Foxglove (.mcap), and end")


def _run(a: argparse.Namespace) -> Outcome:
    from penstock.bags import open_bag
    from penstock.inspect import kind_of
    from penstock.view import show

    known = is_object(a.path) or kind_of(Path(a.path)) in ("dataset", "recording", "recordings")
    if not known and Path(a.path).is_file():
        open_bag(a.path).close()  # a recording of another name; of anything else it says so
    if a.rerun or a.foxglove:
        return _export(a)
    if a.screenshot:
        show.screenshot(
            lambda: show.open_viewer(a.path, a.bags, a.marks, a.episode),
            Path(a.screenshot),
            a.episode,
            a.width,
            a.dark,
        )
        return Outcome(f"wrote {a.screenshot}", {"wrote": [a.screenshot]}, answer=False)
    viewer = show.open_viewer(a.path, a.bags, a.marks, a.episode)
    marks = f"; marks go to {viewer.marks.path}" if viewer.marks else ""

    def say(url: str) -> None:
        address = f"{url}#{a.episode}" if a.episode else url
        sys.stdout.write(f"{address}\nCtrl-C ends{marks}\n")
        sys.stdout.flush()
        if not a.no_browser:
            webbrowser.open(address)

    show.serve(viewer, a.port, say)
    return Outcome("", {})


def _export(a: argparse.Namespace) -> Outcome:
    from penstock.view import export, show

    source = show.open_source(a.path, a.bags)
    wrote = []
    try:
        for target, write in ((a.rerun, export.to_rerun), (a.foxglove, export.to_foxglove)):
            if target:
                write(source, a.episode, Path(target))
                wrote.append(target)
    finally:
        source.close()
    return Outcome("\n".join(f"wrote {name}" for name in wrote), {"wrote": wrote}, answer=False)


COMMAND = Command(
    "look at a recording or a dataset, and mark episodes",
    "A local page, offline: cameras in step, curves, frames that were dropped, repeated or late, "
    "findings of doctor; ? shows the keys. X rejects an episode, [ and ] shorten it: the marks "
    "are an edit list, saved at once, for penstock edit DATASET apply FILE.",
    "penstock view dataset --with bags/",
    _add_arguments,
    _run,
    interruptible=True,
    objects=True,
)
