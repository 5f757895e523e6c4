"""A bag is read once: what is asked twice is not read twice, and what is not wanted not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from penstock.bags import open_bag

from .conftest import Make
from .test_memory import write

LONG = {"seconds": 2.0, "cameras": 2, "width": 320, "height": 240, "depth": False}


def chunks_with(path, topics):
    """The bytes of the chunks, and their index records, that hold messages of some topics."""
    with open_bag(path) as bag:
        keys = [key for own in bag._keys(topics).values() for key in own]
        numbers = bag._chunks.chunks_of(keys)
        return sum(bag._chunks[n].stop - bag._chunks[n].pos for n in numbers)


@pytest.mark.parametrize(
    ("name", "compression"), [("x.bag", "lz4"), ("x.bag", "none"), ("x.mcap", "zstd")]
)
def test_the_index_and_the_messages_are_read_once(make: Make, name, compression):
    facts = make(name, kind=name.partition(".")[2], compression=compression, **LONG)
    topics = ["/joint_cmd", "/sensors_data_raw", facts.cameras[0]]
    with open_bag(facts.path) as bag:
        opened = bag.bytes_read
        for _ in range(3):
            times = {topic: bag.times(topic) for topic in bag.topics}
        index = bag.bytes_read - opened
        messages = sum(1 for _ in bag.read(topics))
        read = bag.bytes_read - opened
    assert messages == sum(len(times[topic]) for topic in topics)
    assert index < 0.1 * read
    assert read <= 1.05 * chunks_with(facts.path, topics)
    assert opened < 0.05 * facts.path.stat().st_size + 20_000


@pytest.mark.parametrize("name", ["x.bag", "x.mcap", "x.db3"])
def test_header_stamps_of_many_topics_are_one_pass(make: Make, name):
    facts = make(name, kind=name.partition(".")[2], **LONG)
    with open_bag(facts.path) as bag:
        topics = list(bag.topics)
        bag.times(topics[0])
        before = bag.bytes_read
        stamps = bag.header_stamps(topics)
        assert bag.bytes_read - before <= 1.05 * bag.size_bytes
        for topic in topics:
            np.testing.assert_array_equal(stamps[topic], bag.times(topic))


KINDS = [
    *(("x.bag", "lz4"), ("x.bag", "bz2"), ("x.bag", "none"), ("x.mcap", "zstd")),
    *(("x.mcap", "none"), ("x.db3", "none"), ("x_db3", "zstd")),
]


@pytest.mark.parametrize(("name", "compression"), KINDS)
def test_the_header_clock_reads_every_chunk_once(make: Make, tmp_path, name, compression):
    kind = name.rpartition(".")[2].rpartition("_")[2]
    facts = make(name, kind=kind, compression=compression, **LONG)
    topics = ["/joint_cmd", "/sensors_data_raw", facts.cameras[0]]
    wanted = {facts.cameras[0]: np.array([3, 4, 50])}
    with open_bag(facts.path) as bag:
        expected = [[*m] for m in bag.read(topics, wanted)]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with open_bag(facts.path, scratch=scratch) as bag:
        before = bag.bytes_read
        stamps = bag.header_stamps(topics[:2], keep=topics)
        for topic in topics[:2]:
            np.testing.assert_array_equal(stamps[topic], bag.times(topic))
        if kind == "db3":
            whole = sum(len(m.data) for m in bag.read(topics))
        else:
            whole = chunks_with(facts.path, topics)
        assert [[*m] for m in bag.read(topics, wanted)] == expected
        assert len(list(bag.read(["/joint_cmd"]))) == len(stamps["/joint_cmd"])
        assert set(bag.first_messages(topics)) == set(topics)
        first = next(iter(bag.read(topics)))
        both = zip(bag.read(topics), bag.read(topics), strict=True)  # two readings at once
        assert first == next(both)[0] and all(one == other for one, other in both)
        if kind != "db3" or compression == "zstd":
            assert bag.bytes_read - before <= 1.05 * whole
        assert not list(scratch.iterdir())  # what is kept there has no name


def test_a_disk_without_room_costs_a_second_reading_and_nothing_else(make: Make):
    facts = make("x.bag", compression="lz4", **LONG)
    script = (
        "import resource, signal, sys; from penstock.bags import open_bag\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "with open_bag(sys.argv[1]) as bag:\n"
        "    stamps = bag.header_stamps(bag.topics)\n"
        "    found = list(bag.read())\n"
        "    print(len(found) == bag.message_count == sum(map(len, stamps.values())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, facts.path], capture_output=True, text=True
    )
    assert done.stdout.strip() == "True", done.stderr


def test_header_stamps_of_large_messages_read_their_heads_alone(make: Make):
    facts = make("x.bag", compression="none", raw_images=True, **LONG)
    with open_bag(facts.path) as bag:
        before = bag.bytes_read
        stamps = bag.header_stamps(facts.cameras)
        assert bag.bytes_read - before < 0.1 * bag.size_bytes
        for topic in facts.cameras:
            np.testing.assert_array_equal(stamps[topic], bag.times(topic))


def test_the_first_message_of_a_late_topic_is_found_by_the_index(tmp_path):
    path = write(tmp_path / "x.mcap", 4001, 50_000, 4000, chunk_size=1 << 16)
    with open_bag(path) as bag:
        opened = bag.bytes_read
        found = bag.first_messages(["/joints", "/cloud"])
        assert set(found) == {"/joints", "/cloud"} and found["/cloud"].ordinal == 0
        assert bag.bytes_read - opened < 0.5 * path.stat().st_size


def test_only_wanted_chunks_are_read(tmp_path):
    path = write(tmp_path / "x.mcap", 4000, 2000, 2, chunk_size=1 << 16)
    with open_bag(path) as bag:
        opened = bag.bytes_read
        wanted = np.array([5, 1999, 3999])
        found = [m.ordinal for m in bag.read(["/joints"], {"/joints": wanted})]
        assert found == wanted.tolist()
        assert bag.bytes_read - opened < 0.1 * path.stat().st_size


@pytest.mark.parametrize("settings", [{"use_chunking": False}, {"use_statistics": False}])
def test_a_file_without_an_index_is_scanned_once(tmp_path, settings):
    path = write(tmp_path / "x.mcap", 3000, 2000, 3, chunk_size=1 << 16, **settings)
    with open_bag(path) as bag:
        opened = bag.bytes_read
        for topic in bag.topics:
            bag.times(topic)
        assert bag.bytes_read == opened  # the scan noted them
        sum(1 for _ in bag.read())
        assert bag.bytes_read - opened <= 1.05 * path.stat().st_size


def test_a_database_gives_only_wanted_data(make: Make):
    facts = make("x.db3", kind="db3", raw_images=True, **LONG)
    wanted = {facts.cameras[0]: np.array([0, 7])}
    with open_bag(facts.path) as bag:
        sizes = [len(m.data) for m in bag.read([facts.cameras[0]], wanted)]
        assert len(sizes) == 2 and bag.bytes_read == sum(sizes)
    script = (
        "import sys; from pathlib import Path; from penstock.bags import open_bag\n"
        "def rchar(): return int(Path('/proc/self/io').read_text().split()[1])\n"
        "with open_bag(sys.argv[1]) as bag:\n"
        "    before = rchar(); n = sum(1 for _ in bag.read([sys.argv[2]])); print(rchar() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, facts.path, "/joint_cmd"], capture_output=True, check=True
    )
    if sys.platform == "linux":
        assert int(done.stdout) < 0.2 * facts.path.stat().st_size


def test_a_killed_process_leaves_a_decompressed_file_that_the_next_removes(make: Make, tmp_path):
    facts = make("z", kind="db3", compression="zstd_file", seconds=0.2)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = (
        "import sys, time; from pathlib import Path; from penstock.bags import open_bag\n"
        "with open_bag(sys.argv[1], scratch=Path(sys.argv[2])):\n"
        "    print('open', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, facts.path, scratch], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"open\n"
    (left,) = scratch.iterdir()
    with open_bag(facts.path, scratch=scratch):
        assert left.exists()  # it is in use
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with open_bag(facts.path, scratch=scratch) as bag:
        assert bag.message_count and not left.exists()
    assert not list(scratch.iterdir())
