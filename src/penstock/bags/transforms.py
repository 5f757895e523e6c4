"""Transforms by their two frames, as `/tf` holds them: many in one message, others in the next.

A path of a transform is "parent>child". Its seven numbers are translation and quaternion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.layout import Data, Layout
from penstock.errors import DataError

Numbers = Callable[[Data], NDArray[np.float64]]

SIZE: Final = 7
_NAMES: Final = ("x", "y", "z", "qx", "qy", "qz", "qw")
# Where the frames and the numbers are, in messages of ROS and of Foxglove.
_KINDS: Final = (
    ("header.frame_id", "child_frame_id", ("transform",)),
    ("parent_frame_id", "child_frame_id", ("translation", "rotation")),
)


def is_pair(path: str) -> bool:
    """Tell whether a path names a transform by its frames."""
    return ">" in path


def names_of(path: str) -> tuple[str, ...]:
    """Return the names of the seven numbers."""
    return tuple(f"{path.partition('>')[2]}.{name}" for name in _NAMES)


class Transforms:
    """Finds transforms in the messages of one topic."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._numbers: dict[int, list[Numbers]] = {}
        for parent, child, fields in _KINDS:
            for path in ("transforms", ""):
                try:
                    self._texts = layout.find_texts(path, (parent, child))
                except DataError:
                    continue
                self._path, self._fields = path, fields
                return
        raise DataError("it holds no transforms between two frames")

    def pairs(self, data: Data) -> list[str]:
        """Return the paths of the transforms of a message."""
        return [f"{parent.lstrip('/')}>{child.lstrip('/')}" for parent, child in self._texts(data)]

    def vector(self, data: Data, path: str) -> NDArray[np.float64]:
        """Return the seven numbers of a transform; none if the message does not hold it."""
        parent, _, child = path.partition(">")
        pairs = self.pairs(data)
        wanted = f"{parent.lstrip('/')}>{child.lstrip('/')}"
        if wanted not in pairs:
            return np.empty(0)
        place = pairs.index(wanted)
        if place not in self._numbers:
            head = f"{self._path}[{place}]." if self._path else ""
            self._numbers[place] = [self._layout.find(head + name) for name in self._fields]
        return np.concatenate([find(data) for find in self._numbers[place]])
