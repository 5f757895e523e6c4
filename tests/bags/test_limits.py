"""Bombs: sizes that a file only claims are refused before anything is allocated."""

from __future__ import annotations

import bz2
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lz4.frame
import numpy as np
import pytest
from mcap.writer import CompressionType, Writer

from penstock.bags import Limits, open_bag
from penstock.errors import CorruptFile, DataError, LimitExceeded

from .conftest import Make

MOST_BYTES = 64 * 10**6


@contextmanager
def bounded() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def record(fields: dict[str, bytes], data: bytes, claimed: int | None = None) -> bytes:
    head = b"".join(
        struct.pack("<I", len(name) + 1 + len(value)) + name.encode() + b"=" + value
        for name, value in fields.items()
    )
    size = len(data) if claimed is None else claimed
    return struct.pack("<I", len(head)) + head + struct.pack("<I", size) + data


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def ros1_bag(
    path: Path,
    compression: str,
    stored: bytes,
    size: int,
    *,
    claimed: int | None = None,
    connections: int = 1,
    chunks: int = 1,
) -> Path:
    """Write a bag of one chunk by hand, with any lie in it."""
    chunk = record(
        {"compression": compression.encode(), "op": b"\x05", "size": u32(size)}, stored, claimed
    )
    index = record(
        {"conn": u32(0), "count": u32(1), "op": b"\x04", "ver": u32(1)},
        struct.pack("<III", 5, 0, 0),
    )
    connection = record(
        {"conn": u32(0), "op": b"\x07", "topic": b"/a"},
        record({"topic": b"/a", "type": b"std_msgs/String", "md5sum": b"*"}, b"")[4:-4],
    )
    index_pos = 4117 + len(chunk) + len(index)
    info = record(
        {
            "chunk_pos": struct.pack("<Q", 4117),
            "count": u32(1),
            "end_time": struct.pack("<II", 5, 0),
            "op": b"\x06",
            "start_time": struct.pack("<II", 5, 0),
            "ver": u32(1),
        },
        struct.pack("<II", 0, 1),
    )
    head = record(
        {
            "chunk_count": u32(chunks),
            "conn_count": u32(connections),
            "index_pos": struct.pack("<Q", index_pos),
            "op": b"\x03",
        },
        b"",
    )
    head = head[:-4] + u32(4117 - 13 - len(head)) + b" " * (4117 - 13 - len(head))
    path.write_bytes(b"#ROSBAG V2.0\n" + head + chunk + index + connection + info)
    return path


def message(size: int = 10) -> bytes:
    fields = {"conn": u32(0), "op": b"\x02", "time": struct.pack("<II", 5, 0)}
    return record(fields, u32(size - 4) + b"x" * (size - 4))


def test_the_handmade_bag_is_good(tmp_path: Path) -> None:
    path = ros1_bag(tmp_path / "x.bag", "none", message(), len(message()))
    with open_bag(path) as bag:
        (found,) = bag.read()
        assert (found.topic, found.t_ns, len(found.data)) == ("/a", 5 * 10**9, 10)


ZEROS = bytes(30_000_000)


@pytest.mark.parametrize(
    ("compression", "compress"), [("bz2", bz2.compress), ("lz4", lz4.frame.compress)]
)
def test_a_chunk_that_holds_more_than_it_says(
    tmp_path: Path, compression: str, compress: Callable[[bytes], bytes]
) -> None:
    path = ros1_bag(tmp_path / "x.bag", compression, compress(ZEROS), 1000)
    with bounded(), open_bag(path) as bag, pytest.raises(CorruptFile, match="declares"):
        list(bag.read())
    with bounded(), pytest.raises(DataError):
        open_bag(path, salvage=True)


@pytest.mark.parametrize("compression", ["none", "lz4", "bz2"])
@pytest.mark.parametrize("salvage", [False, True])
def test_a_chunk_that_claims_gigabytes(tmp_path: Path, compression: str, salvage: bool) -> None:
    path = ros1_bag(tmp_path / "x.bag", compression, b"x" * 100, 0xFFFFFFFF)
    with bounded(), pytest.raises(DataError), open_bag(path, salvage=salvage) as bag:
        list(bag.read())


def test_the_ratio_of_a_chunk(tmp_path: Path) -> None:
    stored = bz2.compress(ZEROS)
    assert len(stored) * 1000 < len(ZEROS)
    path = ros1_bag(tmp_path / "x.bag", "bz2", stored, len(ZEROS))
    with bounded(), open_bag(path) as bag, pytest.raises(LimitExceeded, match=r"Limits\.ratio"):
        list(bag.read())
    with (
        open_bag(path, limits=Limits(ratio=10**6)) as bag,
        pytest.raises(CorruptFile, match="index"),  # it is decompressed now: no message is there
    ):
        list(bag.read())


def test_a_record_that_claims_to_be_long(tmp_path: Path) -> None:
    path = ros1_bag(tmp_path / "x.bag", "none", message(), len(message()), claimed=0x7FFFFFFF)
    with bounded(), open_bag(tmp_path / "x.bag", salvage=True) as bag:
        assert bag.message_count == 1
    with bounded(), pytest.raises(CorruptFile), open_bag(path) as bag:
        list(bag.read())


@pytest.mark.parametrize("lie", [{"connections": 2**32 - 1}, {"chunks": 2**32 - 1}])
def test_counts_beyond_the_limits(tmp_path: Path, lie: dict[str, int]) -> None:
    path = ros1_bag(tmp_path / "x.bag", "none", message(), len(message()), **lie)
    with bounded(), pytest.raises(LimitExceeded):
        open_bag(path)


@pytest.mark.parametrize("lie", [{"connections": 9999}, {"chunks": 1_000_000}])
def test_counts_that_the_file_has_not(tmp_path: Path, lie: dict[str, int]) -> None:
    path = ros1_bag(tmp_path / "x.bag", "none", message(), len(message()), **lie)
    with bounded(), pytest.raises(CorruptFile):
        open_bag(path)


@pytest.mark.parametrize("compression", [CompressionType.ZSTD, CompressionType.LZ4])
@pytest.mark.parametrize("salvage", [False, True])
def test_an_mcap_bomb(tmp_path: Path, compression: CompressionType, salvage: bool) -> None:
    path = tmp_path / "x.mcap"
    with path.open("wb") as file:
        writer = Writer(file, compression=compression, chunk_size=10**9)
        writer.start()
        channel = writer.register_channel("/a", "cdr", 0)
        writer.add_message(channel, 5, bytes(100_000_000), 5)
        writer.finish()
    limits = Limits(record_bytes=50_000_000)
    assert path.stat().st_size < 500_000
    with (
        bounded(),
        pytest.raises(DataError, match=r"message of /a has 100\.0 MB.*--memory|ratio|salvaged"),
        open_bag(path, limits=limits, salvage=salvage) as bag,
    ):
        list(bag.read())


@pytest.mark.parametrize("value", [0xFF, 0x7F, 0x01])
def test_every_length_of_an_mcap_made_huge(tmp_path: Path, value: int) -> None:
    path = tmp_path / "x.mcap"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start()
        schema = writer.register_schema("std_msgs/msg/String", "ros2msg", b"string data\n")
        channel = writer.register_channel("/a", "cdr", schema)
        writer.add_message(channel, 5, b"\0\1\0\0\1\0\0\0\0", 5)
        writer.finish()
    good = path.read_bytes()
    with bounded():
        for at in range(8, len(good) - 8):
            path.write_bytes(good[:at] + bytes([value] * 8) + good[at + 8 :])
            for salvage in (False, True):
                try:
                    with open_bag(path, salvage=salvage) as bag:
                        list(bag.read())
                except DataError:
                    continue


TIGHT = {
    "pieces of 5 kB": Limits(piece_bytes=5000),
    "no room for the index": Limits(index_bytes=50_000),
    "both": Limits(piece_bytes=5000, index_bytes=50_000),
}


@pytest.mark.parametrize("tight", TIGHT)
@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("x.bag", "none"),
        ("x.bag", "lz4"),
        ("x.bag", "bz2"),
        ("x.mcap", "none"),
        ("x.mcap", "zstd"),
        ("x.db3", "none"),
    ],
)
@pytest.mark.parametrize("salvage", [False, True])
def test_tight_limits_change_nothing(
    make: Make, tight: str, name: str, compression: str, salvage: bool
) -> None:
    """Chunks as streams of small pieces, and an index that is read again, give the same."""
    facts = make(
        name,
        kind=name.partition(".")[2],
        compression=compression,
        seconds=4,
        cameras=1,
        depth=False,
    )

    def everything(limits: Limits) -> list[object]:
        with open_bag(facts.path, limits=limits, salvage=salvage) as bag:
            topics = [*bag.topics]
            wanted = {"/joint_cmd": np.array([0, 3, 150, 151])}
            return [
                bag.topics,
                (bag.start_ns, bag.end_ns, bag.compression, bag.salvage),
                [bag.times(topic).tolist() for topic in topics],
                {k: v.tolist() for k, v in bag.header_stamps(topics).items()},
                bag.first_messages(topics),
                [(*m[:3], bytes(m.data)) for m in bag.read()],
                [(*m[:3], bytes(m.data)) for m in bag.read(["/joint_cmd"], wanted)],
            ]

    assert everything(TIGHT[tight]) == everything(Limits())
