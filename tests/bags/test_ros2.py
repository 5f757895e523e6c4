"""ROS 2 bags: folders, split files, databases without metadata, and MCAP files of every make."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mcap.writer import CompressionType, IndexType, Writer

from penstock.bags import Bag, find_bags, open_bag
from penstock.errors import CorruptFile, DataError, LimitExceeded, PenstockError, UnknownFormat
from penstock.samples import SampleFacts

from .conftest import Make

Sample = Callable[[str], SampleFacts]


def messages(bag: Bag) -> list[tuple[str, int, int, bytes]]:
    return [(m.topic, m.ordinal, m.t_ns, bytes(m.data)) for m in bag.read()]


@pytest.fixture
def split(make: Make, tmp_path: Path) -> Path:
    """A folder of two split files, of which the second goes on where the first ends."""
    folder = tmp_path / "take"
    make("first", kind="db3", seconds=0.4)
    make("second", kind="db3", seconds=0.3, seed=1)
    folder.mkdir()
    shutil.move(tmp_path / "first" / "first.db3", folder / "take_9.db3")
    shutil.move(tmp_path / "second" / "second.db3", folder / "take_10.db3")
    (folder / "metadata.yaml").write_text(
        "rosbag2_bagfile_information:\n  version: 5\n  storage_identifier: sqlite3\n"
        "  relative_file_paths: [take/take_9.db3, take_10.db3]\n"
    )
    return folder


@pytest.mark.parametrize("metadata", [True, False])
def test_split_files_are_one_bag(split: Path, metadata: bool) -> None:
    if not metadata:
        (split / "metadata.yaml").unlink()
    with open_bag(split / "take_9.db3") as first, open_bag(split / "take_10.db3") as second:
        parts = messages(first) + messages(second)
        counts = {t.name: t.count for t in first.topics.values()}
        start_ns, end_ns = first.start_ns, max(first.end_ns, second.end_ns)
    with open_bag(split) as bag:
        found = messages(bag)
        assert [(m[0], m[2], m[3]) for m in found] == [(m[0], m[2], m[3]) for m in parts]
        ordinals: dict[str, int] = {}
        for topic, ordinal, _, _ in found:
            assert ordinal == ordinals.get(topic, 0)
            ordinals[topic] = ordinal + 1
        assert ordinals == {name: topic.count for name, topic in bag.topics.items()}
        assert all(bag.topics[name].count > count for name, count in counts.items())
        for topic in bag.topics:
            np.testing.assert_array_equal(bag.times(topic), [m[2] for m in found if m[0] == topic])
        assert (bag.start_ns, bag.end_ns) == (start_ns, end_ns)
        assert bag.kind == "db3"
        assert bag.decoder("/joint_cmd").fields()["joint_q"] == "float64[]"


def test_parts_that_the_metadata_does_not_name_yet(split: Path, make: Make) -> None:
    """The recorder was killed: it lists its files at the end, or when it begins the next one."""
    stale = (split / "metadata.yaml").read_text().replace(", take_10.db3", "")
    with open_bag(split) as bag:
        whole = messages(bag)
    (split / "metadata.yaml").write_text(stale)
    shutil.copy(split / "take_9.db3", split / "another.db3")
    with open_bag(split) as bag:
        assert messages(bag) == whole


def test_a_folder_of_parts_is_one_bag(split: Path) -> None:
    (split / "metadata.yaml").unlink()
    assert len(find_bags([split])) == 2  # take_9 and take_10 may be two takes
    (split / "take_9.db3").rename(split / "take_0.db3")
    (split / "take_10.db3").rename(split / "take_1.db3")
    assert find_bags([split]) == [split]


def test_a_missing_part(split: Path) -> None:
    (split / "take_9.db3").unlink()
    with pytest.raises(CorruptFile, match=r"take_9.db3.*--salvage"):
        open_bag(split)
    with open_bag(split, salvage=True) as bag:
        assert bag.message_count > 10


@pytest.mark.parametrize(
    "text", ["", "{", "rosbag2_bagfile_information: 5", "a: " + "[" * 5000, "x: &a [*a]", "\0"]
)
def test_damaged_metadata(split: Path, text: str) -> None:
    (split / "metadata.yaml").write_text(text)
    with pytest.raises(CorruptFile, match=r"metadata\.yaml"):
        open_bag(split)
    with open_bag(split, salvage=True) as bag:
        assert len(bag._parts) == 2


def test_metadata_cannot_name_other_folders(split: Path, tmp_path: Path) -> None:
    shutil.move(split / "take_10.db3", tmp_path / "outside.db3")
    text = (split / "metadata.yaml").read_text()
    (split / "metadata.yaml").write_text(text.replace("take_10.db3", "../outside.db3"))
    with pytest.raises(CorruptFile, match="outside"):
        open_bag(split)


def test_files_of_two_kinds_are_refused(split: Path, make: Make) -> None:
    (split / "metadata.yaml").unlink()
    shutil.move(make("m.mcap", kind="mcap", seconds=0.1).path, split)
    with pytest.raises(DataError, match="both"):
        open_bag(split)


def test_a_compressed_file_alone(make: Make) -> None:
    facts = make("z", kind="db3", compression="zstd_file", seconds=0.3)
    with open_bag(facts.path / "z.db3.zstd") as bag, open_bag(facts.path) as folder:
        assert messages(bag) == messages(folder)
        temporary = bag._temporary
        assert temporary.exists()
    assert not temporary.exists()
    path = facts.path / "z.db3.zstd"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CorruptFile):
        open_bag(path)


def test_a_database_without_definitions(make: Make) -> None:
    facts = make("old.db3", kind="db3", seconds=0.2)
    with sqlite3.connect(facts.path) as database:
        database.execute("DROP TABLE message_definitions")
    database.close()
    with open_bag(facts.path) as bag:
        assert bag.topics["/joint_cmd"].definition == ""
        data = next(iter(bag.read(["/kuavo_arm_traj"]))).data
        assert bag.decoder("/kuavo_arm_traj").vector(data, "position").shape == (14,)
        with pytest.raises(DataError, match="kuavo_msgs/msg/jointCmd is not defined"):
            bag.decoder("/joint_cmd")


def test_a_log_beside_the_database_is_read(make: Make) -> None:
    """A recorder in WAL mode that was killed leaves its last messages in the log."""
    facts = make("wal.db3", kind="db3", seconds=0.2)
    database = sqlite3.connect(facts.path)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA wal_autocheckpoint=0")
    database.execute("INSERT INTO messages(topic_id, timestamp, data) VALUES (1, 5, x'00010000')")
    database.commit()
    log = facts.path.with_name("wal.db3-wal")
    copy = facts.path.with_name("copy.db3")
    shutil.copy(facts.path, copy)
    shutil.copy(log, copy.with_name("copy.db3-wal"))
    database.close()
    with open_bag(copy) as bag:
        assert bag.message_count == sum(facts.counts.values()) + 1
        assert bag.start_ns == 5


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE topics",
        "DROP TABLE messages",
        "DROP TABLE messages; CREATE VIEW messages AS WITH RECURSIVE c(id) AS "
        "(SELECT 1 UNION ALL SELECT id + 1 FROM c) SELECT id, 1 AS topic_id, id AS timestamp, "
        "x'00' AS data FROM c",
        "DROP TABLE messages; CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id INTEGER, "
        "timestamp INTEGER, data BLOB AS (zeroblob(900000000)))",
        "UPDATE messages SET timestamp = 'soon'",
        "UPDATE messages SET timestamp = 1.5",
        "UPDATE messages SET data = 'text'",
        "CREATE TABLE m AS SELECT * FROM messages; DROP TABLE messages; "
        "ALTER TABLE m RENAME TO messages; UPDATE messages SET id = NULL",
        "UPDATE messages SET topic_id = 99",
        "UPDATE topics SET name = x'ff00'",
        "UPDATE message_definitions SET encoded_message_definition = x'ff'",
        "UPDATE messages SET data = x'28b52ffd00'",
    ],
)
def test_hostile_databases(make: Make, sql: str) -> None:
    facts = make("h.db3", kind="db3", seconds=0.05, cameras=0)
    database = sqlite3.connect(facts.path)
    database.executescript(sql)
    database.close()
    with pytest.raises(PenstockError), open_bag(facts.path) as bag:
        messages(bag)


def test_a_message_above_the_limit_is_not_read(make: Make) -> None:
    facts = make("l.db3", kind="db3", seconds=0.05, cameras=0)
    database = sqlite3.connect(facts.path)
    database.execute("INSERT INTO messages(topic_id, timestamp, data) VALUES (1, 5, zeroblob(3e8))")
    database.commit()
    database.close()
    with open_bag(facts.path) as bag, pytest.raises(LimitExceeded):
        messages(bag)
    with open_bag(facts.path, salvage=True) as bag:
        assert bag.salvage is not None
        assert bag.salvage.damaged_chunks == 1
        assert len(messages(bag)) == bag.salvage.messages > 0


def write_mcap(
    path: Path, *, finish: bool = True, encoding: str = "cdr", **settings: object
) -> int:
    """Write an MCAP file of two topics of numbered messages; returns their number."""
    with path.open("wb") as file:
        writer = Writer(file, chunk_size=2000, **settings)  # type: ignore[arg-type]
        writer.start(profile="ros2", library="test")
        schema = writer.register_schema("std_msgs/msg/UInt32", "ros2msg", b"uint32 data\n")
        channels = [writer.register_channel(t, encoding, schema) for t in ("/a", "/b")]
        for i in range(500):
            data = b"\0\1\0\0" + i.to_bytes(4, "little")
            writer.add_message(channels[i % 3 == 0], i * 10, data, i * 10)
        if finish:
            writer.finish()
    return 500


VARIANTS: dict[str, dict[str, object]] = {
    "usual": {},
    "lz4": {"compression": CompressionType.LZ4},
    "plain chunks": {"compression": CompressionType.NONE},
    "unchunked": {"use_chunking": False},
    "unchunked with data crc": {"use_chunking": False, "enable_data_crcs": True},
    "no message index": {"index_types": IndexType.CHUNK},
    "no chunk index": {"index_types": IndexType.MESSAGE},
    "no index": {"index_types": IndexType.NONE},
    "no statistics": {"use_statistics": False},
    "no channels in the summary": {"repeat_channels": False, "repeat_schemas": False},
    "no summary": {
        "repeat_channels": False,
        "repeat_schemas": False,
        "use_statistics": False,
        "use_summary_offsets": False,
        "index_types": IndexType.NONE,
    },
    "no crc": {"enable_crcs": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_make_of_mcap(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "x.mcap"
    write_mcap(path, **VARIANTS[variant])
    with open_bag(path) as bag:
        found = messages(bag)
        assert [int.from_bytes(data[4:], "little") for *_, data in found] == list(range(500))
        assert [t_ns for _, _, t_ns, _ in found] == [i * 10 for i in range(500)]
        assert [topic for topic, *_ in found] == ["/b" if i % 3 == 0 else "/a" for i in range(500)]
        np.testing.assert_array_equal(bag.times("/b"), np.arange(0, 5000, 30))
        assert (bag.topics["/b"].count, bag.topics["/a"].count) == (167, 333)
        assert bag.topics["/a"].type == "std_msgs/msg/UInt32"
        assert (bag.start_ns, bag.end_ns) == (0, 4990)
        assert len(list(bag.read(["/b"]))) == 167
        assert bag.salvage is None
        decode = bag.decoder("/a")
        assert decode.vector(found[1][3], "data")[0] == 1
        with pytest.raises(DataError, match="no header"):
            bag.header_stamps(["/a"])


def test_an_empty_mcap(tmp_path: Path) -> None:
    path = tmp_path / "e.mcap"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start()
        writer.finish()
    with open_bag(path) as bag:
        assert bag.topics == {}
        assert list(bag.read()) == []
        assert (bag.start_ns, bag.end_ns, bag.message_count) == (0, 0, 0)


def test_other_encodings_can_be_read_raw(tmp_path: Path) -> None:
    path = tmp_path / "j.mcap"
    write_mcap(path, encoding="cbor")
    with open_bag(path) as bag:
        assert len(messages(bag)) == 500
        with pytest.raises(DataError, match="cbor"):
            bag.decoder("/a")


@pytest.mark.parametrize("variant", ["usual", "plain chunks", "unchunked with data crc"])
def test_a_flipped_bit_is_found_by_the_checksums(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "x.mcap"
    write_mcap(path, **VARIANTS[variant])
    good = path.read_bytes()
    with open_bag(path) as bag:
        truth, chunks = messages(bag), list(bag._chunks)
    rng = np.random.default_rng(0)
    for chunk in chunks[:4]:
        for pos in rng.integers(chunk.pos + 60, chunk.stop - 60, 5):
            data = bytearray(good)
            data[pos] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
            try:
                with open_bag(path) as bag:
                    found = messages(bag)
            except CorruptFile:
                continue
            assert found == truth  # the bit belongs to nothing that matters, such as a sequence


def test_a_wrong_extension_does_not_matter(make: Make, tmp_path: Path) -> None:
    facts = make("x.mcap", kind="mcap", seconds=0.1)
    renamed = facts.path.rename(tmp_path / "x.bag")
    with open_bag(renamed) as bag:
        assert bag.kind == "mcap"


def test_an_mcap_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "x.mcap"
    path.write_bytes(b"\x89MCAP9\r\n" + bytes(100))
    with pytest.raises(UnknownFormat):
        open_bag(path)
