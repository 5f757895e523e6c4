"""Kinds of MCAP files that others write: padded records, messages compressed one by one."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import pytest
from mcap.writer import CompressionType, Writer

from penstock.bags import open_bag
from penstock.bags.definitions import same_definition
from penstock.bags.limits import BadRecord
from penstock.bags.mcap import parse_chunk_index
from penstock.core.codecs import zstd
from penstock.errors import CorruptFile

DEFINITION = b"float64[] data\n"


def write(path: Path, messages: list[bytes], encoding: str = "cdr", chunk: int = 1 << 20) -> Path:
    with path.open("wb") as file:
        writer = Writer(file, chunk_size=chunk, compression=CompressionType.NONE)
        writer.start(profile="ros2")
        schema = writer.register_schema("my_msgs/msg/Data", "ros2msg", DEFINITION)
        channel = writer.register_channel("/data", encoding, schema)
        for number, data in enumerate(messages):
            writer.add_message(channel, log_time=number, data=data, publish_time=number)
        writer.finish()
    return path


def numbers(*values: float) -> bytes:
    return b"\0\1\0\0" + struct.pack(f"<I4x{len(values)}d", len(values), *values)


def test_messages_that_are_compressed_one_by_one(tmp_path):
    plain = [numbers(*range(k, k + 50)) for k in range(9)]
    path = write(tmp_path / "x.mcap", [zstd.compress(data) for data in plain])
    with open_bag(path) as bag:
        assert [bytes(message.data) for message in bag.read()] == plain
        (first,) = bag.decoder("/data").vector(plain[3], "data")[:1]
    assert first == 3
    bomb = zstd.compress(bytes(200 << 20))
    with (
        open_bag(write(tmp_path / "bomb.mcap", [bomb])) as bag,
        pytest.raises(CorruptFile, match=r"above the limits|cut"),
    ):
        list(bag.read())
    other = write(tmp_path / "json.mcap", [zstd.compress(b"x")], "json")  # theirs to know
    with open_bag(other) as bag:
        assert [bytes(message.data) for message in bag.read()] == [zstd.compress(b"x")]


def test_a_small_message_does_not_keep_its_chunk(tmp_path):
    large = numbers(*[0.0] * 100_000)
    path = write(tmp_path / "x.mcap", [large, numbers(1.0), large], chunk=1 << 24)
    with open_bag(path) as bag:
        first, small, last = bag.read()
    assert isinstance(small.data, bytes)
    assert isinstance(first.data, memoryview) and isinstance(last.data, memoryview)


def chunk_index(offsets: dict[int, int], index_bytes: int) -> bytes:
    out = io.BytesIO()
    out.write(struct.pack("<QQQQ", 0, 5, 100, 400))
    pairs = b"".join(struct.pack("<HQ", *pair) for pair in offsets.items())
    out.write(struct.pack("<I", len(pairs)) + pairs)
    out.write(struct.pack("<QI", index_bytes, 0) + struct.pack("<QQ", 300, 300))
    return out.getvalue()


def test_the_counts_of_a_padded_index_are_not_guessed():
    assert parse_chunk_index(chunk_index({1: 500, 2: 531}, 78)).counts.tolist() == [1, 2]
    assert parse_chunk_index(chunk_index({1: 500, 2: 534}, 84)).counts is None
    with pytest.raises(BadRecord):
        parse_chunk_index(chunk_index({1: 500}, 31)[:-3])


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("#c\nfloat64 x  # m\n\nHeader  h\n===\nMSG: b/B\nint8 b\n===\nMSG: a/A\nint8 a", True),
        ("float64 x\nHeader h\n===\nMSG: a/A\nint8 a\n===\nMSG: b/B\nint16 b", False),
        ("Header h\nfloat64 x\n===\nMSG: a/A\nint8 a\n===\nMSG: b/B\nint8 b", False),
        ("float32 x\nHeader h\n===\nMSG: a/A\nint8 a\n===\nMSG: b/B\nint8 b", False),
    ],
)
def test_definitions_that_differ_in_words_alone(other, same):
    one = "float64 x\nHeader h\n===\nMSG: a/A\nint8 a\n===\nMSG: b/B\nint8 b\n"
    assert same_definition(one, other) is same
