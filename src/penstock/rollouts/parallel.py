"""The same work on many pieces: in threads where that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.core.flow import Flow

T = TypeVar("T")
R = TypeVar("R")

_INLINE_BYTES = 4 << 20  # below this, threads cost more than they bring
_WORKERS = 2


def each(name: str, work: Callable[[T], R], pieces: Sequence[T], nbytes: int) -> list[R]:
    """Do the work on each piece and return the results in order.

    Args:
        name: Of the threads.
        work: Called with one piece; must release the GIL for threads to help.
        pieces: Of about equal size.
        nbytes: Bytes of all pieces together.
    """
    if nbytes <= _INLINE_BYTES or len(pieces) < 2:
        return [work(piece) for piece in pieces]
    with Flow(name) as flow:
        size = nbytes // len(pieces)
        return list(flow.map(work, pieces, workers=_WORKERS, name="work", size=lambda piece: size))
