"""Damaged bags: refused with a hint, and what `salvage` gets out of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from penstock.bags import Bag, open_bag
from penstock.errors import CorruptFile, DataError

from .conftest import Make

Messages = list[tuple[str, int, bytes]]
CHUNKED = [
    ("x.bag", "none"),
    ("x.bag", "lz4"),
    ("x.bag", "bz2"),
    ("x.mcap", "none"),
    ("x.mcap", "lz4"),
    ("x.mcap", "zstd"),
]
LONG = {
    "seconds": 1.5,
    "cameras": 1,
    "raw_images": True,
    "state_hz": 50,
    "depth": False,
    "width": 208,
    "height": 160,
}


def messages(bag: Bag) -> Messages:
    return [(m.topic, m.t_ns, bytes(m.data)) for m in bag.read()]


def truth(path: Path) -> Messages:
    with open_bag(path) as bag:
        assert len(bag._chunks) >= 4
        return messages(bag)


def check_salvaged(path: Path, expected: Messages, least: int) -> Bag:
    """Everything recovered was recorded, in order, times agree, and the report counts it."""
    with open_bag(path, salvage=True) as bag:
        found = messages(bag)
        rest = iter(expected)
        assert all(message in rest for message in found)
        assert len(found) >= least
        assert bag.salvage is not None
        assert bag.salvage.messages == len(found) == bag.message_count
        times = [t_ns for _, t_ns, _ in found]
        assert (bag.start_ns, bag.end_ns) == (min(times), max(times))
        for topic in bag.topics:
            np.testing.assert_array_equal(
                bag.times(topic), [t_ns for name, t_ns, _ in found if name == topic]
            )
    return bag


def kind_of(name: str) -> str:
    return "mcap" if name.endswith("mcap") else "bag"


@pytest.mark.parametrize(("name", "compression"), CHUNKED)
@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_cut_bag(make: Make, name: str, compression: str, part: float) -> None:
    facts = make(name, kind=kind_of(name), compression=compression, **LONG)
    expected = truth(facts.path)
    data = facts.path.read_bytes()
    facts.path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(CorruptFile, match=r"x\.(bag|mcap).*--salvage"):
        open_bag(facts.path)
    bag = check_salvaged(facts.path, expected, int(len(expected) * (part - 0.25)))
    assert "cut" in bag.salvage.reason


@pytest.mark.parametrize(("name", "compression"), CHUNKED)
def test_a_damaged_chunk(make: Make, name: str, compression: str) -> None:
    facts = make(name, kind=kind_of(name), compression=compression, **LONG)
    expected = truth(facts.path)
    with open_bag(facts.path) as bag:
        chunks = list(bag._chunks)
    data = bytearray(facts.path.read_bytes())
    middle = chunks[len(chunks) // 2]
    if name == "x.bag" and compression == "none":  # the head of a record in the chunk
        at = data.index(b"conn=", middle.pos + 3000)
        data[at - 8 : at + 4] = b"\xff" * 12
    elif (
        name == "x.bag" and compression == "lz4"
    ):  # it has no checksum: only damage to its frame is found for sure
        at = data.index(b"\x04\x22\x4d\x18", middle.pos)
        data[at : at + 4] = bytes(4)
    else:
        at = (middle.pos + middle.stop) // 2
        data[at : at + 100] = bytes(100)
    facts.path.write_bytes(data)
    with pytest.raises(CorruptFile, match="--salvage"), open_bag(facts.path) as bag:
        messages(bag)
    least = int(len(expected) * (1 - 1.5 / len(chunks)))
    bag = check_salvaged(facts.path, expected, least)
    assert bag.salvage.damaged_chunks >= 1


@pytest.mark.parametrize(("name", "compression"), CHUNKED)
def test_garbage_between_chunks(make: Make, name: str, compression: str) -> None:
    facts = make(name, kind=kind_of(name), compression=compression, **LONG)
    expected = truth(facts.path)
    with open_bag(facts.path) as bag:
        second = bag._chunks[2]
    data = facts.path.read_bytes()
    noise = np.random.default_rng(0).bytes(5000)
    facts.path.write_bytes(data[: second.pos] + noise + data[second.pos :])
    bag = check_salvaged(facts.path, expected, len(expected))
    assert bag.salvage.skipped_bytes >= 5000


@pytest.mark.parametrize(("name", "compression"), CHUNKED)
def test_a_destroyed_chunk_header(make: Make, name: str, compression: str) -> None:
    facts = make(name, kind=kind_of(name), compression=compression, **LONG)
    expected = truth(facts.path)
    with open_bag(facts.path) as bag:
        chunks = list(bag._chunks)
    data = bytearray(facts.path.read_bytes())
    data[chunks[2].pos : chunks[2].pos + 40] = bytes(40)
    facts.path.write_bytes(data)
    check_salvaged(facts.path, expected, int(len(expected) * (1 - 1.5 / len(chunks))))


@pytest.mark.parametrize(("name", "compression"), CHUNKED)
def test_a_whole_bag_needs_no_salvage(make: Make, name: str, compression: str) -> None:
    facts = make(name, kind=kind_of(name), compression=compression, **LONG)
    expected = truth(facts.path)
    with open_bag(facts.path, salvage=True) as bag:
        assert bag.salvage is None
        assert messages(bag) == expected


def test_a_damaged_summary_is_not_believed(make: Make) -> None:
    facts = make("x.mcap", kind="mcap", compression="zstd", **LONG)
    expected = truth(facts.path)
    data = bytearray(facts.path.read_bytes())
    at = data.rindex(b"/joint_cmd")  # the copy of the channel in the summary
    data[at + 1] ^= 1
    facts.path.write_bytes(data)
    with pytest.raises(CorruptFile, match=r"summary.*--salvage"):
        open_bag(facts.path)
    bag = check_salvaged(facts.path, expected, len(expected))
    assert "summary" in bag.salvage.reason


def make_active(path: Path) -> Path:
    """Make a .bag as the recorder leaves it when it is killed: index_pos 0, nothing at the end."""
    data = bytearray(path.read_bytes())
    at = data.index(b"index_pos=") + len(b"index_pos=")
    index_pos = int.from_bytes(data[at : at + 8], "little")
    data[at : at + 8] = bytes(8)
    active = path.with_name(path.name + ".active")
    active.write_bytes(data[:index_pos])
    return active


def test_an_unindexed_bag(make: Make) -> None:
    facts = make("x.bag", **LONG)
    expected = truth(facts.path)
    active = make_active(facts.path)
    with pytest.raises(CorruptFile, match=r"x\.bag\.active.*no index.*--salvage"):
        open_bag(active)
    bag = check_salvaged(active, expected, len(expected))
    assert bag.salvage.damaged_chunks == bag.salvage.skipped_bytes == 0
    with open_bag(active, salvage=True) as bag:
        decode = bag.decoder("/joint_cmd")
        assert len(decode.vector(next(iter(bag.read(["/joint_cmd"]))).data, "joint_q")) == 28


@pytest.mark.parametrize("part", [0.5, 0.9])
def test_a_cut_database(make: Make, part: float) -> None:
    facts = make("x.db3", kind="db3", **LONG)
    with open_bag(facts.path) as bag:
        expected = messages(bag)
    data = facts.path.read_bytes()
    facts.path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(CorruptFile, match="--salvage"), open_bag(facts.path) as bag:
        messages(bag)
    check_salvaged(facts.path, expected, 1)


def test_a_database_with_a_hole(make: Make) -> None:
    facts = make("x.db3", kind="db3", **LONG)
    with open_bag(facts.path) as bag:
        expected = messages(bag)
    data = bytearray(facts.path.read_bytes())
    middle = len(data) // 8192 * 4096
    data[middle : middle + 8192] = b"\xa5" * 8192
    facts.path.write_bytes(data)
    with open_bag(facts.path, salvage=True) as bag:
        found = messages(bag)
        assert bag.message_count == len(found) > len(expected) * 0.8
        for topic in bag.topics:
            assert len(bag.times(topic)) == bag.topics[topic].count


@pytest.mark.parametrize("name", ["x.bag", "x.mcap", "x.db3"])
def test_nothing_to_salvage(make: Make, name: str) -> None:
    kind = name.partition(".")[2]
    facts = make(name, kind=kind, seconds=0.1)
    facts.path.write_bytes(facts.path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"nothing could be salvaged|not a ROS 2 bag"):
        open_bag(facts.path, salvage=True)


def test_messages_in_a_row_of_an_unchunked_mcap_that_was_cut(tmp_path: Path) -> None:
    from .test_ros2 import write_mcap

    path = tmp_path / "x.mcap"
    write_mcap(path, use_chunking=False)
    data = bytearray(path.read_bytes())
    cut = len(data) // 2
    path.write_bytes(data[:cut])
    with open_bag(path, salvage=True) as bag:
        before = bag.message_count
        assert before > 200
    data[cut // 2 : cut // 2 + 30] = b"\xff" * 30
    path.write_bytes(data)
    with open_bag(path, salvage=True) as bag:
        assert len(messages(bag)) >= 495
        assert re.search(r"\d+ messages recovered", str(bag.salvage))
