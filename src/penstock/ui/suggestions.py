"""Words for a person: what may have been meant, and foreign text made harmless."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """Return a hint for a word that is not one of those known."""
    choices = list(map(str, known))
    close = difflib.get_close_matches(str(word), choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(choices)}"


def printable(text: str) -> str:
    """Return a text with its control characters spelled out, all but the line feeds."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
