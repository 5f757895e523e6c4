"""What many tiny units cost whoever plans, commits and builds them; prints one JSON line.

Usage: many_units.py FOLDER COUNT. One unit is made by a worker's code, and copied under the other
names: making them is the workers' affair, and not measured. Times are processor time, which other
programs do not change, and wall time.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock.dataset.layout import Feature
from penstock.dataset.unit import RECORD, Episode, UnitRecord, UnitWriter, make_key
from penstock.dataset.writer import DatasetWriter

FEATURES = {
    "observation.state": Feature("float32", (4,)),
    "action": Feature("float32", (2,)),
}
FRAMES = 8
MOST_LINKS = 30_000  # of one file: ext4 allows 65,000


def make_units(units: Path, bags: list[str]) -> None:
    """Commit a unit for every bag: real ones, and links to them."""
    rows = {"observation.state": np.ones((FRAMES, 4)), "action": np.ones((FRAMES, 2))}
    for position, bag in enumerate(bags):
        source = {"bag": f"take_{position}.bag", "fingerprint": bag, "size_bytes": 1}
        record = UnitRecord(make_key(bag), position, source, [Episode(FRAMES, "walk")])
        if position % MOST_LINKS == 0:
            with UnitWriter(units, record, FEATURES, 30) as writer:
                writer.add_rows(rows)
                writer.commit()
            real = units / record.key
            content = json.loads((real / RECORD).read_bytes())
            continue
        folder = units / record.key
        folder.mkdir()
        for name in content["files"]:
            os.link(real / name, folder / name)
        content["record"] |= {"key": record.key, "position": position, "source": source}
        (folder / RECORD).write_text(json.dumps(content))


def main(root: Path, count: int) -> None:
    figures: dict[str, float] = {"units": count}

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        yield
        figures[f"{name}_s"] = round(time.perf_counter() - start_s, 3)
        figures[f"{name}_cpu_s"] = round(time.process_time() - start_cpu_s, 3)

    bags = [make_key("bag", number) * 2 for number in range(count)]
    with timed("plan"), DatasetWriter(root, FEATURES, 30, bags=bags) as writer:
        positions = writer.position_of(bags)
        units = writer.units
    make_units(units, bags)
    with timed("commit"):  # what the driver does for every bag: its record, and whether it is there
        for bag in bags:
            record = UnitRecord(make_key(bag), positions[bag], {"fingerprint": bag}, [])
            assert (units / record.key / RECORD).is_file()
    with timed("reopen"):
        writer = DatasetWriter.reopen(root)
    with timed("build"):
        writer.build()
    assert writer.total_episodes == count
    writer.close()
    figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
