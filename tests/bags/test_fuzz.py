"""Random damage: a clean error or a reading, never anything else, within time and memory."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest

from penstock.errors import PenstockError

from .conftest import Make
from .damage import mutate, read_all

CASES = 300  # of each container; every second one with salvage
MOST_S = 5.0
MOST_GROWTH_KB = 200_000


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("x.bag", "none"),
        ("x.bag", "lz4"),
        ("x.mcap", "none"),
        ("x.mcap", "zstd"),
        ("x.db3", "none"),
        ("x.db3", "zstd"),
    ],
)
def test_damaged_files(make: Make, name: str, compression: str) -> None:
    facts = make(
        name,
        kind=name.partition(".")[2],
        compression=compression,
        seconds=0.06,
        cameras=1,
        width=64,
        height=48,
        depth=False,
    )
    good = facts.path.read_bytes()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {True: 0, False: 0}
    for case in range(CASES):
        rng = np.random.default_rng([7, case])
        facts.path.write_bytes(mutate(good, rng))
        start_s = time.perf_counter()
        try:
            read_all(facts.path, salvage=case % 2 == 0, decode=case % 10 < 2)
            outcomes[True] += 1
        except PenstockError as error:
            outcomes[False] += 1
            text = str(error)
            assert str(facts.path) in text, (case, text)
            assert "\n" not in text and len(text) < 400, (case, text)
        assert time.perf_counter() - start_s < MOST_S, case
    assert outcomes[False] > CASES // 4
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert grown_kb < MOST_GROWTH_KB


@pytest.mark.parametrize("name", ["x.bag", "x.mcap", "x.db3"])
def test_cut_everywhere(make: Make, name: str) -> None:
    """Every prefix of a small bag, in steps."""
    facts = make(name, kind=name.partition(".")[2], seconds=0.03, cameras=0)
    good = facts.path.read_bytes()
    for stop in range(0, len(good), max(1, len(good) // 150)):
        facts.path.write_bytes(good[:stop])
        with pytest.raises(PenstockError):
            read_all(facts.path, salvage=False)
