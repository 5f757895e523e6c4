"""Words for a person: what may have been meant, and foreign text made harmless."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_CHOICES = 24


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """Return a hint for a word that is not one of those known."""
    choices = list(map(str, known))
    if close := difflib.get_close_matches(str(word), choices, n=1, cutoff=0.5):
        return f"did you mean {close[0]!r}?"
    if len(choices) <= _MOST_CHOICES:
        return f"use one of {', '.join(choices)}"
    near = difflib.get_close_matches(str(word), sorted(choices), n=5, cutoff=0.0)
    return f"of {len(choices)}, the nearest are {', '.join(near)}"


def printable(text: str) -> str:
    """Return a text with its control characters spelled out, all but the line feeds."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
