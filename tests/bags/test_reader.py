"""Every container against rosbags, which reads them by its own code."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rosbags.rosbag1 import Reader as Reader1
from rosbags.rosbag2 import Reader as Reader2

from penstock.bags import find_bags, open_bag
from penstock.errors import CorruptFile, DataError, UnknownFormat, UsageError
from penstock.samples import SampleFacts

from .conftest import CONTAINERS, Make

NAMES = [name for name, _, _ in CONTAINERS]
Sample = Callable[[str], SampleFacts]


def oracle(path: Path) -> dict[str, list[tuple[int, bytes]]]:
    """The messages of each topic, in time order, as rosbags reads them."""
    found = defaultdict(list)
    with (Reader1 if path.suffix == ".bag" else Reader2)(path) as reader:
        for connection, t_ns, data in reader.messages():
            found[connection.topic].append((t_ns, bytes(data)))
    return {topic: sorted(messages) for topic, messages in found.items()}


def ours(path: Path, **settings: object) -> dict[str, list[tuple[int, bytes]]]:
    found = defaultdict(list)
    with open_bag(path, **settings) as bag:
        for message in bag.read():
            assert message.ordinal == len(found[message.topic])
            found[message.topic].append((message.t_ns, bytes(message.data)))
    return {topic: sorted(messages) for topic, messages in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_same_messages_as_rosbags(sample: Sample, name: str) -> None:
    facts = sample(name)
    expected = oracle(facts.path)
    assert ours(facts.path) == expected
    assert {topic: len(found) for topic, found in expected.items()} == facts.counts


@pytest.mark.parametrize("name", NAMES)
def test_metadata(sample: Sample, name: str) -> None:
    facts = sample(name)
    kind, compression = next((k, c) for n, k, c in CONTAINERS if n == name)
    expected = oracle(facts.path)
    with open_bag(facts.path) as bag:
        assert bag.kind == kind
        assert bag.compression == compression.removesuffix("_file")
        assert bag.path == facts.path
        assert {topic.name: topic.count for topic in bag.topics.values()} == facts.counts
        assert bag.message_count == sum(facts.counts.values())
        times = [t_ns for messages in expected.values() for t_ns, _ in messages]
        assert (bag.start_ns, bag.end_ns) == (min(times), max(times))
        assert bag.topics["/joint_cmd"].type == "kuavo_msgs/msg/jointCmd"
        assert "control_modes" in bag.topics["/joint_cmd"].definition
        assert bag.topics[facts.cameras[0]].type == "sensor_msgs/msg/CompressedImage"
        assert bag.salvage is None
        assert bag.size_bytes > 10_000


@pytest.mark.parametrize("name", NAMES)
def test_times_and_stamps_are_those_of_the_messages(sample: Sample, name: str) -> None:
    facts = sample(name)
    with open_bag(facts.path) as bag:
        for topic in bag.topics:
            read = np.array([m.t_ns for m in bag.read([topic])], np.int64)
            assert bag.times(topic).dtype == np.int64
            np.testing.assert_array_equal(bag.times(topic), read)
            np.testing.assert_array_equal(bag.header_stamps([topic])[topic], read)


@pytest.mark.parametrize("name", ["plain.bag", "bz2.bag", "bare.db3", "zstd.mcap"])
def test_only_the_asked_topics_in_file_order(sample: Sample, name: str) -> None:
    facts = sample(name)
    wanted = ["/joint_cmd", facts.cameras[1]]
    with open_bag(facts.path) as bag:
        everything = [(m.topic, m.ordinal, m.t_ns, bytes(m.data)) for m in bag.read()]
        some = [(m.topic, m.ordinal, m.t_ns, bytes(m.data)) for m in bag.read(wanted)]
        assert some == [message for message in everything if message[0] in wanted]
        assert list(bag.read([])) == []
        assert len(list(bag.read(["/joint_cmd", "/joint_cmd"]))) == facts.counts["/joint_cmd"]


@pytest.mark.parametrize("name", ["plain.bag", "bz2.bag", "bare.db3", "zstd.mcap"])
def test_several_readings_at_once(sample: Sample, name: str) -> None:
    facts = sample(name)
    counts: list[int] = []
    with open_bag(facts.path) as bag:
        first, second = bag.read(), bag.read()
        for a, b in zip(first, second, strict=True):
            assert (a.topic, a.t_ns, a.data) == (b.topic, b.t_ns, b.data)
        threads = [
            threading.Thread(target=lambda: counts.append(sum(1 for _ in bag.read())))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == [sum(facts.counts.values())] * 3


@pytest.mark.parametrize("name", ["plain.bag", "lz4.bag", "bz2.bag", "plain.mcap", "bare.db3"])
def test_data_stays_valid_while_it_is_held(sample: Sample, name: str) -> None:
    facts = sample(name)
    with open_bag(facts.path) as bag:
        held = [(m.data, bytes(m.data)) for m in bag.read()]
    assert all(bytes(data) == copy for data, copy in held)


def test_an_abandoned_reading_leaves_no_thread(sample: Sample) -> None:
    before = threading.active_count()
    with open_bag(sample("bz2.bag").path) as bag:
        reading = bag.read()
        next(reading)
        reading.close()
    assert threading.active_count() == before


def test_a_closed_bag_says_so(sample: Sample) -> None:
    with open_bag(sample("plain.bag").path) as bag:
        pass
    bag.close()
    with pytest.raises(UsageError, match="was closed"):
        list(bag.read())


def test_an_unknown_topic_is_named(sample: Sample) -> None:
    with open_bag(sample("plain.bag").path) as bag:
        for call in (bag.times, bag.decoder, lambda t: bag.read([t])):
            with pytest.raises(UsageError, match="did you mean '/joint_cmd"):
                call("/joint_cmnd")


@pytest.mark.parametrize(
    ("kind", "name"), [("bag", "x.bag"), ("db3", "x"), ("mcap", "x.mcap"), ("mcap", "xm")]
)
def test_empty_topic(make: Make, kind: str, name: str) -> None:
    facts = make(name, kind=kind, trouble=["empty_topic"])
    topic = facts.affected["empty_topic"]
    with open_bag(facts.path) as bag:
        assert bag.topics[topic].count == 0
        assert len(bag.times(topic)) == len(bag.header_stamps([topic])[topic]) == 0
        assert list(bag.read([topic])) == []


def test_unsorted_messages_come_in_file_order(make: Make) -> None:
    for name, kind in [("u.bag", "bag"), ("u.mcap", "mcap"), ("u.db3", "db3")]:
        facts = make(name, kind=kind, trouble=["unsorted"])
        with open_bag(facts.path) as bag:
            times = bag.times("/joint_cmd")
            assert np.any(np.diff(times) < 0)
            np.testing.assert_array_equal(times, [m.t_ns for m in bag.read(["/joint_cmd"])])
        assert ours(facts.path) == oracle(facts.path)


def test_find_bags(tmp_path: Path, make: Make) -> None:
    for name in ("take_10.bag", "take_2.bag", "b.mcap"):
        make(name, kind="mcap" if name == "b.mcap" else "bag", seconds=0.05)
    make("folder", kind="db3", seconds=0.05)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no bag")
    found = find_bags([tmp_path])
    assert [path.name for path in found] == ["b.mcap", "folder", "take_2.bag", "take_10.bag"]
    again = find_bags([tmp_path, tmp_path / "b.mcap", tmp_path / "folder"])
    assert again == found
    assert find_bags([tmp_path / "folder"]) == [tmp_path / "folder"]
    with pytest.raises(DataError, match="holds no bag"):
        find_bags([tmp_path / "empty"])
    with pytest.raises(DataError, match="does not exist"):
        find_bags([tmp_path / "nothing"])
    with pytest.raises(DataError, match="no bag was given"):
        find_bags([])


def test_a_folder_of_several_bags_holds_them_from_above_too(tmp_path: Path, make: Make) -> None:
    """It was taken for one ROS 2 bag: takes were joined, and .bag files in it were lost."""
    names = "mixed/a.bag mixed/b.mcap takes/x.mcap takes/y.mcap ros1/one.bag .trash/gone.bag"
    for name in map("data/{}".format, names.split()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        make(name, kind="bag" if name.endswith(".bag") else "mcap", seconds=0.05)
    for name in ("data/split/split_0.mcap", "data/split/split_1.mcap", "data/single/take_7.mcap"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make(name, kind="mcap", seconds=0.05)
    data = tmp_path / "data"
    found = [str(path.relative_to(data)) for path in find_bags([data])]
    assert found == [
        *("mixed/a.bag", "mixed/b.mcap", "ros1/one.bag", "single", "split"),
        *("takes/x.mcap", "takes/y.mcap"),
    ]
    parts = ("mixed", "ros1", "single", "split", "takes")
    one_by_one = find_bags([data / name for name in parts])
    assert len(one_by_one) == len(found)


def test_what_is_no_bag(tmp_path: Path) -> None:
    for name, data in [
        ("empty.bag", b""),
        ("text.bag", b"hello, this is no bag"),
        ("old.bag", b"#ROSBAG V1.2\n" + bytes(100)),
        ("zip.mcap", b"PK\3\4" + bytes(50)),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UnknownFormat, match=name):
            open_bag(tmp_path / name)
    with pytest.raises(DataError, match="does not exist"):
        open_bag(tmp_path / "nothing.bag")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="not a ROS 2 bag folder"):
        open_bag(tmp_path / "folder")


def test_a_wrong_count_in_the_index_is_found(make: Make) -> None:
    facts = make("x.bag", seconds=0.3, cameras=0)
    data = facts.path.read_bytes()  # it ends with the last count of the last chunk info
    count = int.from_bytes(data[-4:], "little") + 1
    facts.path.write_bytes(data[:-4] + count.to_bytes(4, "little"))
    with open_bag(facts.path) as bag, pytest.raises(CorruptFile, match="instead of"):
        list(bag.read())
