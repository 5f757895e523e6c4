"""Recordings of the world outside, and the MCAP conformance suite, against their own libraries.

`make test-recordings` runs these where the recordings are: in ../shared/recordings, or in the
folder that PENSTOCK_RECORDINGS names.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest
from mcap.reader import make_reader
from rosbags.rosbag1 import Reader as Reader1

from penstock import convert
from penstock.bags import open_bag
from penstock.cli import main
from penstock.errors import PenstockError

from .conversion.maps import switched_on

pytestmark = pytest.mark.recordings
FOLDER = Path(
    os.environ.get("PENSTOCK_RECORDINGS", Path(__file__).parents[2] / "shared" / "recordings")
)
SUITE = FOLDER / "mcap-conformance"
CASES = sorted(SUITE.glob("*.mcap"))
FILES = sorted(
    path
    for kind in ("*.bag", "*.db3", "*.mcap")
    for path in FOLDER.rglob(kind)
    if SUITE not in path.parents
)


def test_the_recordings_are_there():
    assert FILES, f"there are no recordings in {FOLDER}: name their folder in PENSTOCK_RECORDINGS"
    assert len(CASES) == 416


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_conformance(path):
    records = json.loads(path.with_suffix(".json").read_text())["records"]
    wanted = [dict(record["fields"]) for record in records if record["type"] == "Message"]
    with open_bag(path) as bag:
        found = [(message.t_ns, bytes(message.data)) for message in bag.read()]
    assert found == [(int(it["log_time"]), bytes(map(int, it["data"]))) for it in wanted]


def reference(path: Path) -> dict[str, list[tuple[int, bytes]]]:
    """What the libraries of the formats find: time and bytes of each message, by topic."""
    found: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
    if path.suffix == ".bag":
        with Reader1(path) as reader:
            for connection, t_ns, data in reader.messages():
                found[connection.topic].append((t_ns, bytes(data)))
    elif path.suffix == ".mcap":
        with path.open("rb") as file:
            for _, channel, message in make_reader(file).iter_messages(log_time_order=False):
                found[channel.topic].append((message.log_time, message.data))
    else:
        with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
            rows = database.execute(
                "SELECT name, timestamp, data FROM messages JOIN topics ON topics.id = topic_id"
            )
            for topic, t_ns, data in rows:
                found[topic].append((t_ns, data))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_messages_are_those_of_the_libraries(path):
    try:
        wanted = reference(path)
    except Exception as error:
        pytest.skip(f"its own library cannot read it: {error!r}"[:200])
    found: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
    with open_bag(path) as bag:
        for message in bag.read():
            found[message.topic].append((message.t_ns, bytes(message.data)))
    assert {topic: len(items) for topic, items in found.items()} == {
        topic: len(items) for topic, items in wanted.items()
    }
    for topic, items in found.items():
        assert [t_ns for t_ns, _ in sorted(items)] == [t_ns for t_ns, _ in sorted(wanted[topic])]
        if not wanted[topic][0][1].startswith(b"\x28\xb5\x2f\xfd"):  # compressed one by one
            assert sorted(items) == sorted(wanted[topic]), topic


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_converts_or_says_why_not(path, tmp_path):
    try:
        report = convert([path], tmp_path / "out", memory="512MB", progress="quiet")
    except PenstockError as error:
        assert "\n" not in str(error)
        return
    assert report.ok
    assert report.peak_bytes <= 512 * 10**6


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_written_map_converts_and_so_does_what_it_leaves_out(path, tmp_path):
    target = tmp_path / "map.yaml"
    if main(["info", str(path), "--write-map", str(target)]):
        assert not target.exists()
        return
    text = target.read_text()
    maps = list(switched_on(text))
    if re.search(r"^  [a-z]", text.partition("\nfeatures:\n")[2], re.MULTILINE):
        maps.append(("", text))
    for number, (name, content) in enumerate(maps):
        target.write_text(content)
        report = convert(path, tmp_path / str(number), target, progress="quiet", check=False)
        assert report.ok, f"{name}: {report.text()}"
