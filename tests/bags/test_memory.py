"""Memory, measured in a process of its own, on recordings that are hard to hold."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mcap.writer import CompressionType, IndexType, Writer
from rosbags.rosbag1 import Writer as Writer1
from rosbags.typesys import Stores, get_typestore

MB = 10**6
JOINTS = b"std_msgs/Header header\nfloat64[] position\n"
CLOUD = b"std_msgs/Header header\nuint8[] data\n"
READ = """
import json, sys
from pathlib import Path
import numpy as np
import penstock.bags.mcap, penstock.bags.ros1, penstock.bags.sqlite, penstock.bags.folder
from penstock.bags import Limits, open_bag
from penstock.core.memory import highest_rss_bytes

paths, memory_bytes, topics, salvage, wanted = json.load(sys.stdin)
before = highest_rss_bytes()
facts = []
for path in paths:
    with open_bag(path, salvage=salvage, limits=Limits.for_memory(memory_bytes)) as bag:
        names = topics or list(bag.topics)
        counts = [len(bag.times(name)) for name in names]
        stamps = bag.header_stamps(names)
        first = bag.first_messages(names)
        del first, stamps
        decoders = {name: bag.decoder(name) for name in names}
        total = sum(int(decoders[m.topic].vector(m.data, "position")[0])
                    if wanted else len(m.data) for m in bag.read(names))
        facts.append([sum(counts), total, bag.bytes_read])
print(json.dumps([highest_rss_bytes() - before, facts]))
"""


def read(
    paths: list[Path],
    memory_bytes: int,
    topics: list[str] | None = None,
    salvage: bool = False,
    wanted: bool = True,
) -> tuple[int, list[list[int]]]:
    """Use every way of reading; returns the growth in bytes, and counts, sums, bytes read."""
    arguments = json.dumps([[str(p) for p in paths], memory_bytes, topics, salvage, wanted])
    done = subprocess.run(
        [sys.executable, "-c", READ], input=arguments, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    growth, facts = json.loads(done.stdout)
    return growth, facts


def joints(number: int) -> bytes:
    head = b"\0\1\0\0" + struct.pack("<iI", number // 1000, number % 1000 * 10**6)
    return head + struct.pack("<I4s", 1, b"\0\0\0\0") + struct.pack("<I4xd", 1, float(number))


def cloud(number: int, size: int) -> bytes:
    head = b"\0\1\0\0" + struct.pack("<iI", number // 1000, number % 1000 * 10**6)
    data = np.full(size, number % 251, np.uint8)
    data[:: 1 << 8] = np.random.default_rng(number).integers(0, 255, -(-size // (1 << 8)))
    return head + struct.pack("<I4s", 1, b"\0\0\0\0") + struct.pack("<I", size) + data.tobytes()


def write(path: Path, count: int, cloud_bytes: int, every: int, **settings: object) -> Path:
    """A 1 kHz joint state, and a cloud with every so many of them."""
    with path.open("wb") as file:
        writer = Writer(file, **settings)  # type: ignore[arg-type]
        writer.start(profile="ros2")
        kinds = [("joints", JOINTS), ("cloud", CLOUD)]
        schemas = [writer.register_schema(f"a_msgs/msg/{n}", "ros2msg", d) for n, d in kinds]
        small, large = (
            writer.register_channel(f"/{name}", "cdr", schema)
            for (name, _), schema in zip(kinds, schemas, strict=True)
        )
        for number in range(count):
            writer.add_message(small, number * MB, joints(number), number * MB)
            if every and number % every == 0:
                data = cloud(number, cloud_bytes)
                writer.add_message(large, number * MB, data, number * MB)
        writer.finish()
    return path


HUGE = {"chunk_size": 10**9, "compression": CompressionType.ZSTD}


@pytest.mark.parametrize(
    "settings",
    [
        HUGE,
        {**HUGE, "compression": CompressionType.LZ4},
        {**HUGE, "compression": CompressionType.NONE},
        {**HUGE, "index_types": IndexType.NONE},
    ],
    ids=["zstd", "lz4", "none", "no index"],
)
def test_small_messages_in_a_huge_chunk(tmp_path, settings):
    """One chunk of 200 MB; only the joints are wanted."""
    path = write(tmp_path / "x.mcap", 2000, 200_000, 2, **settings)
    growth, [(count, total, _)] = read([path], 64 * MB, ["/joints"])
    assert (count, total) == (2000, 1999 * 1000)
    assert growth < 32 * MB


def test_salvage_of_a_huge_chunk(tmp_path):
    path = write(tmp_path / "x.mcap", 2000, 200_000, 2, **HUGE)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    growth, [(count, total, _)] = read([path], 64 * MB, ["/joints"], salvage=True)
    assert count > 800 and total == count * (count - 1) // 2
    assert growth < 32 * MB


@pytest.mark.parametrize("compression", [CompressionType.ZSTD, CompressionType.NONE])
def test_large_clouds_beside_a_joint_state(tmp_path, compression):
    """Each cloud of 60 MB is a chunk; all of them are wanted, one at a time."""
    path = write(tmp_path / "x.mcap", 100, 60 * MB, 25, compression=compression)
    growth, [(count, _, _)] = read([path], 256 * MB, ["/joints"])
    assert count == 100 and growth < 24 * MB
    growth, [(count, total, _)] = read([path], 256 * MB, ["/cloud"], wanted=False)
    assert count == 4 and total > 4 * 60 * MB
    assert growth < 60 * MB * 2 + 24 * MB  # one message is held while the next one is read


def test_a_wanted_message_above_the_limit_is_refused(tmp_path):
    path = write(tmp_path / "x.mcap", 10, 60 * MB, 10)
    with pytest.raises(AssertionError, match=r"a message of /cloud has 60\.0 MB.*--memory"):
        read([path], 64 * MB, ["/cloud"], wanted=False)
    assert read([path], 64 * MB, ["/joints"])[1][0][0] == 10


def test_a_large_chunk_of_ros1(tmp_path):
    store = get_typestore(Stores.ROS1_NOETIC)
    kinds = store.types
    path = tmp_path / "x.bag"
    writer = Writer1(path)
    writer.set_compression(Writer1.CompressionFormat.BZ2)
    writer.chunk_threshold = 10**9
    with writer:
        state, image = "sensor_msgs/msg/JointState", "sensor_msgs/msg/CompressedImage"
        small = writer.add_connection("/joints", state, typestore=store)
        large = writer.add_connection("/camera", image, typestore=store)
        for number in range(600):
            stamp = kinds["builtin_interfaces/msg/Time"](number, 0)
            header = kinds["std_msgs/msg/Header"](number, stamp, "")
            none = np.empty(0)
            one = kinds[state](header, ["a"], np.array([float(number)]), none, none)
            writer.write(small, number * MB, bytes(store.serialize_ros1(one, state)))
            if number % 10 == 0:
                data = np.frombuffer(cloud(number, MB), np.uint8)
                picture = kinds[image](header, "jpeg", data)
                writer.write(large, number * MB, bytes(store.serialize_ros1(picture, image)))
    growth, [(count, total, _)] = read([path], 64 * MB, ["/joints"])
    assert (count, total) == (600, 599 * 300)
    assert growth < 32 * MB


def test_many_messages_with_little_room_for_their_index(tmp_path):
    """The places of 300,000 messages do not fit into an eighth of 32 MB: they are read again."""
    path = write(tmp_path / "x.mcap", 300_000, 0, 0)
    growth, [(count, total, _)] = read([path], 32 * MB)
    assert count == 300_000 and total == 299_999 * 150_000
    assert growth < 24 * MB


def test_many_messages_without_an_index(tmp_path):
    """Neither the file nor the memory has room for their places: each reading walks the chunks."""
    path = write(tmp_path / "x.mcap", 300_000, 0, 0, index_types=IndexType.NONE)
    growth, [(count, total, _)] = read([path], 32 * MB)
    assert count == 300_000 and total == 299_999 * 150_000
    assert growth < 24 * MB


def test_a_hundred_topics(tmp_path):
    path = tmp_path / "x.mcap"
    with path.open("wb") as file:
        writer = Writer(file, chunk_size=1 << 20)
        writer.start(profile="ros2")
        schema = writer.register_schema("a_msgs/msg/joints", "ros2msg", JOINTS)
        channels = [writer.register_channel(f"/t{n}", "cdr", schema) for n in range(100)]
        for number in range(1000):
            for channel in channels:
                writer.add_message(channel, number * MB, joints(number), number * MB)
        writer.finish()
    growth, [(count, total, read_bytes)] = read([path], 64 * MB)
    assert (count, total) == (100_000, 100 * 999 * 500)
    assert growth < 24 * MB
    assert read_bytes < 3.1 * path.stat().st_size  # index and first messages, stamps, messages


@pytest.mark.parametrize("number", [500, pytest.param(5000, marks=pytest.mark.stress)])
def test_many_tiny_bags(tmp_path, number):
    paths = [write(tmp_path / f"{n}.mcap", 3, 0, 0) for n in range(number)]
    few, _ = read(paths[:50], 64 * MB)
    many, facts = read(paths, 64 * MB)
    assert len(facts) == number and all(count == 3 for count, _, _ in facts)
    assert many - few < 4 * MB
