"""The verbs of the command line: a file each, that says its words and calls one function.

A new verb is a file here with a COMMAND, and its name in VERBS. Nothing heavy is imported before a
verb runs, so that `--help` answers at once.
"""

from __future__ import annotations

VERBS = (
    "info",
    "convert",
    "build",
    "doctor",
    "view",
    "edit",
    "rescue",
    "card",
    "push",
    "train",
    "runs",
    "evaluate",
    "export",
    "advise",
    "demo",
    "completion",
)
