"""Written maps, with what they leave out switched on."""

from __future__ import annotations

import re
from collections.abc import Iterator


def switched_on(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each feature that a map leaves out, and the map with it switched on."""
    lines = text.splitlines()
    for first, line in enumerate(lines):
        match = re.match(r"  # (observation\S*):    # left out", line)
        if match is None:
            continue
        after = first + 1
        while after < len(lines) and lines[after].startswith("  #   "):
            after += 1
        block = ["  " + line[4:] for line in lines[first:after]]
        yield match[1], "\n".join([*lines[:first], *block, *lines[after:]]) + "\n"
