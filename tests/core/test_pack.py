"""Packs: what goes in comes out, stock safetensors opens it, and limits hold."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from penstock.core.codecs import Codec, Delta, Layout, Lz4, Planes, Quantize, Raw, Zstd
from penstock.core.pack import (
    DTYPES,
    Entry,
    Index,
    Item,
    PackReader,
    PackWriter,
    is_pack,
)
from penstock.core.pack import format as pack_format
from penstock.core.pack.format import DIGEST_KEY, INDEX_KEY, place, render
from penstock.errors import (
    CorruptFile,
    DataError,
    LimitExceeded,
    StorageError,
    UnknownFormat,
    UnsupportedValue,
    UsageError,
)

PLAIN: list[Codec | None] = [None, Raw(), Lz4(), Lz4(5), Zstd(), Planes(), Planes("lz4")]
NUMPY_TYPES = sorted({dtype.words.name for dtype in DTYPES.values()})


def write(path: Path, *items: Item, **settings: Any) -> Path:
    with PackWriter(path, **settings) as writer:
        writer.write(items)
    return path


def bits(values: NDArray[Any]) -> tuple[Any, ...]:
    return (values.dtype.str, values.shape, values.tobytes())


def random_values(dtype: str, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    words = np.dtype(dtype)
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * words.itemsize)
    flat = np.frombuffer(raw, np.uint8)
    if words.kind == "b":
        return (flat > 127).reshape(shape)
    return flat.view(words).reshape(shape)


def weights(count: int, seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(count) * 0.02).astype(np.float32)


def forge(path: Path, index: Index, data: bytes = b"", hole_bytes: int = 0, **changes: Any) -> Path:
    """Write a pack by hand from an Index, digests valid, any part of its JSON replaced."""
    for entry in index.entries.values():
        entry.crcs = entry.crcs or [0] * len(entry.sizes)
    header = json.loads(render(index)[8:])
    content = json.loads(header["__metadata__"][INDEX_KEY]) | changes
    text = json.dumps(content)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    header["__metadata__"] = {INDEX_KEY: text, DIGEST_KEY: digest}
    raw = json.dumps(header).encode()
    raw = raw.ljust(len(raw) + -len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw + data)
        if hole_bytes:
            file.truncate(file.tell() + hole_bytes)  # a hole: no disk, no time
    return path


# --- round trips -------------------------------------------------------------------------------


@st.composite
def items(draw: st.DrawFn) -> list[Item]:
    names = draw(st.lists(st.text(min_size=1, max_size=12), unique=True, max_size=8))
    made = []
    for number, name in enumerate(names):
        dtype = draw(st.sampled_from(NUMPY_TYPES))
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
        values = random_values(dtype, shape, number)
        if draw(st.booleans()):
            values = np.zeros_like(values)
        layout = Layout(tuple(draw(st.permutations(range(len(shape))))))
        made.append(
            Item(
                name,
                values,
                codec=draw(st.sampled_from(PLAIN)),
                layout=draw(st.sampled_from([None, layout])),
                block_bytes=draw(st.sampled_from([1, 16, 24, 100, 4096, 1 << 20])),
            )
        )
    return made


def encodable(item: Item) -> bool:
    try:
        item.name.encode()
    except UnicodeEncodeError:
        return False
    return item.name != "__metadata__"


@settings(deadline=None, max_examples=120)
@given(items=items())
def test_many_tensors_come_back(
    items: list[Item], tmp_path_factory: pytest.TempPathFactory
) -> None:
    items = [item for item in items if encodable(item)]
    path = tmp_path_factory.mktemp("pack") / "a.pack"
    with PackWriter(path, kind="test", meta={"step": 7}) as writer:
        writer.write(items)
    with PackReader(path) as pack:
        assert sorted(pack.names) == sorted(item.name for item in items)
        assert pack.index.kind == "test"
        assert pack.index.meta == {"step": 7}
        assert pack.size_bytes == path.stat().st_size
        for item in items:
            assert bits(pack.read(item.name)) == bits(item.values)
            entry = pack.entry(item.name)
            if entry.plain:  # so that it can be mapped into memory
                assert (pack.index.header_bytes + entry.offset) % entry.words.itemsize == 0
        assert list(pack.verify()) == []
    assert is_pack(path)
    stock = load_file(path)
    assert set(stock) == {item.name for item in items}
    path.unlink()


def test_the_order_of_names_is_that_of_the_file(tmp_path: Path) -> None:
    even = [Item(f"t{k}", np.full(8, k, np.float32)) for k in (3, 1, 2)]
    path = write(tmp_path / "a", *even, Item("odd", np.zeros(3, np.int8)), Item("last", np.ones(2)))
    with PackReader(path) as pack:
        assert pack.names == ["t3", "t1", "t2", "last", "odd"]  # odd sizes go to the end
        offsets = [pack.entry(name).offset for name in pack.names]
        assert offsets == sorted(offsets)


@pytest.mark.parametrize("codec", PLAIN, ids=lambda codec: json.dumps(codec and codec.config()))
def test_large_tensors_in_many_blocks(tmp_path: Path, codec: Codec | None) -> None:
    values = weights(3_000_001)  # 12 MB: threads are used on both sides
    odd = np.arange(5_000_001, dtype=np.uint32).astype(np.uint8)
    path = write(tmp_path / "a", Item("w", values, codec=codec), Item("odd", odd, codec=codec))
    with PackReader(path) as pack:
        assert bits(pack.read("w")) == bits(values)
        assert bits(pack.read("odd")) == bits(odd)
        out = np.empty(values.size, np.float32)
        pack.read_into([("w", out)])
        assert bits(out) == bits(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    values = random_values(DTYPES[dtype].words.name, (5, 3), 1)
    path = write(
        tmp_path / "a",
        Item("plain", values, dtype),
        Item("coded", values, dtype, Planes()),
        Item("scalar", values[0, 0].reshape(()), dtype),
        Item("empty", values[:0], dtype, Planes()),
    )
    with PackReader(path) as pack:
        for name in ("plain", "coded"):
            assert bits(pack.read(name)) == bits(values)
        assert pack.read("scalar").shape == ()
        assert pack.read("scalar").tobytes() == values[0, 0].tobytes()
        assert pack.read("empty").shape == (0, 3)
        assert pack.entry("plain").dtype == dtype
    with safe_open(path, "numpy") as stock:
        assert sorted(stock.keys()) == ["coded", "empty", "plain", "scalar"]


def test_values_of_the_user_are_not_changed_and_may_be_strided(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    view = whole[::2, ::-1].T
    before = whole.copy()
    path = write(tmp_path / "a", Item("v", view, codec=Planes()), Item("p", view))
    with PackReader(path) as pack:
        assert np.array_equal(pack.read("v"), view)
        assert np.array_equal(pack.read("p"), view)
    assert np.array_equal(whole, before)


def test_a_temporal_layout(tmp_path: Path) -> None:
    rollout = np.cumsum(np.ones((50, 4, 3), np.int32), axis=0)
    item = Item("obs", rollout, codec=Zstd(), layout=Layout((1, 2, 0)), block_bytes=200)
    with PackReader(write(tmp_path / "a", item)) as pack:
        assert np.array_equal(pack.read("obs"), rollout)
        layout = pack.entry("obs").layout
        assert layout is not None
        one_env = pack.read_rows("obs", 2, 3)
        assert np.array_equal(layout.undo(one_env), rollout[:, 2:3])


def test_the_lossy_codec_reads_back_what_was_checked(tmp_path: Path) -> None:
    values = weights(10_000)
    path = write(tmp_path / "a", Item("w", values, codec=Quantize(1e-4), block_bytes=4096))
    with PackReader(path) as pack:
        assert np.abs(pack.read("w").astype(np.float64) - values).max() <= 1e-4
        assert list(pack.verify()) == []
    with pytest.raises(UnsupportedValue):
        write(tmp_path / "b", Item("w", np.array([np.nan]), codec=Quantize(1e-4)))
    assert os.listdir(tmp_path) == ["a"]


# --- stock safetensors -------------------------------------------------------------------------


def test_stock_safetensors_reads_plain_tensors_and_the_index(tmp_path: Path) -> None:
    plain = {
        "f": weights(1000).reshape(10, 100),
        "i": np.arange(7, dtype=np.int64),
        "odd": np.arange(5, dtype=np.int8),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 4), np.float16),
    }
    coded = Item("coded", weights(5000), codec=Planes())
    path = write(
        tmp_path / "a.safetensors", *(Item(k, v) for k, v in plain.items()), coded, meta={"a": 1}
    )
    stock = load_file(path)
    for name, values in plain.items():
        assert bits(stock[name]) == bits(values)
    assert stock["coded"].dtype == np.uint8
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
        assert np.array_equal(file.get_slice("f")[2:4], plain["f"][2:4])
    index = json.loads(metadata[INDEX_KEY])
    assert index["version"] == 1
    assert index["meta"] == {"a": 1}
    assert set(index["tensors"]) == {*plain, "coded"}


def test_an_empty_pack(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    with PackReader(path) as pack:
        assert pack.names == []
    assert load_file(path) == {}


# --- partial reads -----------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_rows_equal_the_slice(data: st.DataObject, tmp_path_factory: Any) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=12))
    values = random_values(data.draw(st.sampled_from(NUMPY_TYPES)), shape, 3)
    codec = data.draw(st.sampled_from(PLAIN))
    block = data.draw(st.sampled_from([1, 16, 48, 64, 1000]))
    path = tmp_path_factory.mktemp("rows") / "a"
    write(path, Item("v", values, codec=codec, block_bytes=block))
    with PackReader(path) as pack:
        for start in range(shape[0] + 1):
            stop = data.draw(st.integers(start, shape[0]))
            assert bits(pack.read_rows("v", start, stop)) == bits(values[start:stop])
        for wrong in ((-1, 0), (0, shape[0] + 1), (1, 0)):
            with pytest.raises(UsageError, match="rows"):
                pack.read_rows("v", *wrong)


@pytest.mark.parametrize("codec", [None, Planes()])
def test_rows_touch_only_their_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec | None
) -> None:
    values = weights(64_000).reshape(64, 1000)  # 4000 bytes per row, 64 blocks of 4000
    path = write(tmp_path / "a", Item("v", values, codec=codec, block_bytes=4000))
    read_at: list[tuple[int, int]] = []
    pread, preadv = os.pread, os.preadv

    def counting_pread(descriptor: int, size: int, offset: int) -> bytes:
        read_at.append((offset, size))
        return pread(descriptor, size, offset)

    def counting_preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read_at.append((offset, sum(buffer.nbytes for buffer in buffers)))
        return preadv(descriptor, buffers, offset)

    with PackReader(path) as pack:
        entry = pack.entry("v")
        first = pack.index.header_bytes + entry.offset
        monkeypatch.setattr(os, "pread", counting_pread)
        monkeypatch.setattr(os, "preadv", counting_preadv)
        assert np.array_equal(pack.read_rows("v", 10, 13), values[10:13])
        wanted = [(first + entry.block_offsets[k], entry.sizes[k]) for k in (10, 11, 12)]
        assert read_at == wanted
        read_at.clear()
        pack.read_rows("v", 5, 5)
        assert read_at == []


def test_rows_of_a_scalar_and_unknown_names(tmp_path: Path) -> None:
    with PackReader(write(tmp_path / "a", Item("s", np.array(1.0)))) as pack:
        with pytest.raises(UsageError, match="rows"):
            pack.read_rows("s", 0, 0)
        with pytest.raises(UsageError, match="no tensor 'x'"):
            pack.read("x")
        with pytest.raises(UsageError, match="do not fit"):
            pack.read_into([("s", np.empty(3))])


# --- deltas ------------------------------------------------------------------------------------


def delta_pair(folder: Path) -> tuple[Path, Path, NDArray[Any]]:
    old = weights(10_000)
    new = old + np.float32(1e-7) * weights(10_000, 5)
    base = write(folder / "base", Item("w", old, codec=Planes(), block_bytes=8000))
    with PackReader(base) as reader:
        item = Item("w", new, codec=Delta(), block_bytes=8000)
        path = write(folder / "delta", item, base=reader)
    return base, path, new


def test_a_delta_comes_back_and_is_smaller(tmp_path: Path) -> None:
    base, path, values = delta_pair(tmp_path)
    assert path.stat().st_size < 0.7 * base.stat().st_size
    with PackReader(path) as pack:
        assert bits(pack.read("w")) == bits(values)
        assert bits(pack.read_rows("w", 1990, 2010)) == bits(values[1990:2010])
        assert list(pack.verify()) == []
    link = tmp_path / "latest"
    link.symlink_to(path)
    with PackReader(link) as pack:
        assert bits(pack.read("w")) == bits(values)
    assert set(load_file(path)) == {"w"}


@pytest.mark.parametrize("count", [1, 3, 1025, 2051])
def test_a_delta_against_a_plain_base_of_odd_size(tmp_path: Path, count: int) -> None:
    # Such a base lies in one block at the end of its file, whatever block size was asked for.
    words = np.arange(count, dtype=np.uint16)
    base = write(tmp_path / "base", Item("w", words, "bfloat16", block_bytes=512))
    with PackReader(base) as reader:
        item = Item("w", words + 1, "bfloat16", Delta(), block_bytes=1024)
        path = write(tmp_path / "delta", item, base=reader)
    with PackReader(path) as pack:
        assert bits(pack.read("w")) == bits(words + 1)
        assert list(pack.verify()) == []


def test_a_delta_in_a_large_pack_uses_threads(tmp_path: Path) -> None:
    old = weights(2_000_000)
    base = write(tmp_path / "base", Item("w", old, codec=Planes()))
    with PackReader(base) as reader:
        path = write(tmp_path / "delta", Item("w", old * 2, codec=Delta()), base=reader)
    with PackReader(path) as pack:
        assert bits(pack.read("w")) == bits(old * 2)


def test_a_delta_without_its_base(tmp_path: Path) -> None:
    base, path, _ = delta_pair(tmp_path)
    base.unlink()
    with PackReader(path) as pack, pytest.raises(CorruptFile, match="not beside it"):
        pack.read("w")
    base.mkdir()
    with PackReader(path) as pack, pytest.raises(DataError):
        pack.read("w")


def test_a_delta_with_another_base(tmp_path: Path) -> None:
    base, path, _ = delta_pair(tmp_path)
    write(base, Item("w", weights(10_000, 9), codec=Planes(), block_bytes=8000))
    with PackReader(path) as pack, pytest.raises(CorruptFile, match="to another base"):
        pack.read("w")
    write(base)
    with PackReader(path) as pack:
        assert [name for name, _ in pack.verify()] == ["w"]


def test_a_delta_with_a_damaged_base(tmp_path: Path) -> None:
    base, path, _ = delta_pair(tmp_path)
    content = bytearray(base.read_bytes())
    content[-2000] ^= 1
    base.write_bytes(content)
    with PackReader(path) as pack, pytest.raises(CorruptFile, match="base is damaged"):
        pack.read("w")
    base.write_bytes(b"x" * 100)
    with PackReader(path) as pack, pytest.raises(DataError):
        pack.read("w")


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (Item("x", weights(10_000), codec=Delta()), "no tensor 'x'"),
        (Item("w", weights(9_999), codec=Delta()), "another dtype, shape"),
        (Item("w", weights(10_000).reshape(100, 100), codec=Delta()), "another dtype, shape"),
        (Item("w", weights(10_000).view(np.int32), codec=Delta()), "another dtype, shape"),
        (Item("w", weights(10_000), codec=Delta(), layout=Layout((0,))), "layout"),
    ],
)
def test_a_delta_that_could_not_be_read_is_not_written(
    tmp_path: Path, item: Item, reason: str
) -> None:
    base, path, _ = delta_pair(tmp_path)
    path.unlink()
    with PackReader(base) as reader, pytest.raises(UsageError, match=reason):
        write(path, item, base=reader)
    with pytest.raises(UsageError, match="needs a base"):
        write(path, Item("w", weights(10_000), codec=Delta()))
    assert os.listdir(tmp_path) == ["base"]


def test_a_delta_of_a_delta_is_not_written(tmp_path: Path) -> None:
    _, path, _ = delta_pair(tmp_path)
    with PackReader(path) as reader, pytest.raises(UsageError, match="difference itself"):
        PackWriter(tmp_path / "third", base=reader)
    assert sorted(os.listdir(tmp_path)) == ["base", "delta"]


# --- the writer --------------------------------------------------------------------------------

STREAM = """
import os, resource, sys
import numpy as np
from penstock.core.codecs import Planes
from penstock.core.pack import Item, PackWriter
mega = 1 << 20
block = np.random.default_rng(0).standard_normal(mega, dtype=np.float32)
def items(count):
    return [Item(f"t{k}", block, codec=Planes() if k % 2 else None) for k in range(count)]
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with PackWriter(sys.argv[1] + "warm") as writer:
    writer.write(items(8))
before = peak()
with PackWriter(sys.argv[1]) as writer:
    writer.write(items(60))
print(peak() - before, os.path.getsize(sys.argv[1]))
"""


def test_the_writer_streams(tmp_path: Path) -> None:
    path = tmp_path / "a"
    result = subprocess.run(
        [sys.executable, "-c", STREAM, str(path)], capture_output=True, text=True, check=True
    )
    grown, size = map(int, result.stdout.split())
    assert size > 200_000_000
    assert grown < 48_000_000, "the writer holds more than a few blocks"
    with PackReader(path) as pack:
        assert len(pack.names) == 60


@pytest.mark.parametrize("letter", ["n", '"', "\\", "\x01", "ü", "机"])
def test_a_header_has_room_whatever_the_names(tmp_path: Path, letter: str) -> None:
    items = [
        Item(f"{k:04}" + letter * 60, np.full((1,) * 20 + (5 + k,), k, np.int32), codec=codec)
        for k in range(200)
        for codec in [Planes() if k % 3 else None]
    ]
    write(tmp_path / "a", *items, meta={letter * 999: [letter] * 99})
    with PackReader(tmp_path / "a") as pack:
        for item in items:
            assert bits(pack.read(item.name)) == bits(item.values)
    assert len(load_file(tmp_path / "a")) == 200
    assert os.listdir(tmp_path) == ["a"]


def test_all_tensors_are_given_in_one_call(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one call"), PackWriter(tmp_path / "a") as writer:
        writer.write([Item("a", np.ones(3))])
        writer.write([Item("b", np.ones(3))])
    with PackWriter(tmp_path / "a") as writer:
        pass  # none at all
    with PackReader(tmp_path / "a") as pack:
        assert pack.names == []


@pytest.mark.parametrize("size", [3, 8])
def test_a_name_is_taken_once(tmp_path: Path, size: int) -> None:
    item = Item("a", np.zeros(size, np.int8))
    for again in (item, Item("a", np.zeros(16, np.int8)), Item("a", np.zeros(5, np.int8))):
        with pytest.raises(UsageError, match="taken"):
            write(tmp_path / "x", item, again)
    with pytest.raises(UsageError, match="taken"):
        write(tmp_path / "x", Item("__metadata__", np.zeros(8)))
    with pytest.raises(UsageError, match="cannot be stored"):
        write(tmp_path / "x", Item("a", np.array(["text"])))
    with pytest.raises(UsageError, match="cannot be stored"):
        write(tmp_path / "x", Item("a", np.zeros(3, ">f4")))
    with pytest.raises(UsageError, match="cannot be stored"):
        write(tmp_path / "x", Item("a", np.zeros(3, np.float32), "bfloat16"))
    with pytest.raises(UsageError, match="name"):
        write(tmp_path / "x", Item("\ud800", np.zeros(3)))
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # older arrays have 32 dimensions at most
        with pytest.raises(UsageError, match="dimensions"):
            write(tmp_path / "x", Item("a", np.zeros((1,) * 33)))
    assert os.listdir(tmp_path) == []


def test_an_error_that_was_caught_inside_does_not_publish_half(tmp_path: Path) -> None:
    path = write(tmp_path / "x", Item("old", np.ones(3)))
    items = [Item("a", weights(1 << 20), codec=Planes()), Item("b", np.array([np.nan]))]
    items[1].codec = Quantize(1.0)
    with pytest.raises(UsageError, match="given up"), PackWriter(path) as writer:
        with pytest.raises(UnsupportedValue):
            writer.write(items)
        with pytest.raises(UsageError, match="given up"):
            writer.write([Item("c", np.ones(3))])
    assert os.listdir(tmp_path) == ["x"]
    with PackReader(path) as pack:
        assert pack.names == ["old"]


def test_meta_must_be_json(tmp_path: Path) -> None:
    for meta in ({"x": float("nan")}, {"x": object()}, {"x": b""}):
        with pytest.raises(UsageError, match="meta"):
            PackWriter(tmp_path / "x", meta=meta)
    assert os.listdir(tmp_path) == []


def test_write_then_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = PackWriter(tmp_path / "a")
    writer.write([Item("v", weights(1000), codec=Planes()), Item("odd", np.zeros(3, np.int8))])
    assert not (tmp_path / "a").exists()
    digest = writer.index.digest
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    writer.publish()
    assert len(synced) == 1  # of the folder: the data was safe before
    writer.abandon()
    with PackReader(tmp_path / "a") as pack:
        assert pack.index.digest == digest
        assert bits(pack.read("v")) == bits(weights(1000))


def test_a_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", Item("old", np.ones(3)))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, fail)
        with pytest.raises(StorageError, match="disk reports an error"):
            write(path, Item("new", np.ones(3)))
        monkeypatch.undo()
        assert os.listdir(tmp_path) == ["a"]
        with PackReader(path) as pack:
            assert pack.names == ["old"]
    writer = PackWriter(path)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError):
        writer.write([Item("new", np.ones(3))])
    monkeypatch.undo()
    with pytest.raises(UsageError):
        writer.publish()  # a failed fsync is final
    with PackReader(path) as pack:
        assert pack.names == ["old"]


FULL = """
import resource, sys
import numpy as np
from penstock.core.pack import Item, PackWriter
from penstock.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    with PackWriter(sys.argv[1]) as writer:
        items = [Item(f"t{k}", np.zeros(200_001, np.uint8)) for k in range(5)]
        writer.write([*items, Item("x" * 70_000, np.zeros(3))])
    print("published")
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [100, 5_000, 70_000, 300_000, 1_000_000, 1_100_000])
def test_a_full_disk_at_any_point(tmp_path: Path, limit: int) -> None:
    path = write(tmp_path / "a", Item("old", np.ones(3)))
    command = [sys.executable, "-c", FULL, str(path), str(limit)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"cannot write {path}: ")
    assert len(result.stdout.splitlines()) == 1
    assert os.listdir(tmp_path) == ["a"]
    with PackReader(path) as pack:
        assert pack.names == ["old"]


# --- limits ------------------------------------------------------------------------------------


def bomb(name: str, shape: tuple[int, ...], block_bytes: int, codec: Codec) -> Index:
    entry = Entry(name, "uint8", shape, codec, block_bytes, plain=False)
    if block_bytes and entry.blocks < 10_000:
        entry.sizes = [20] * entry.blocks
    entry.crcs = [0] * len(entry.sizes)
    return Index("bomb", {}, {name: entry})


def refuse_quickly(path: Path, *errors: type[Exception]) -> None:
    """Opening and reading must fail within a second and 64 MB."""
    tracemalloc.start()
    began = time.monotonic()
    try:
        with pytest.raises(errors), PackReader(path) as pack:
            for name in pack.names:
                pack.read(name)
        assert time.monotonic() - began < 1
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_the_forger_makes_valid_packs(tmp_path: Path) -> None:
    path = write(tmp_path / "a", Item("w", weights(1000), codec=Planes()), meta={"k": [1]})
    with PackReader(path) as pack:
        index = pack.index
        data = path.read_bytes()[index.header_bytes :]
    with PackReader(forge(tmp_path / "b", index, data)) as again:
        assert bits(again.read("w")) == bits(weights(1000))
        assert again.index.meta == {"k": [1]}


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20), (2**40, 2**40), (2**62,) * 20])
def test_a_tiny_file_that_claims_a_terabyte(tmp_path: Path, shape: tuple[int, ...]) -> None:
    index = bomb("x", shape, 1 << 28, Zstd())
    place(index.entries.values())
    path = forge(tmp_path / "a", index)
    assert path.stat().st_size < 200_000
    refuse_quickly(path, CorruptFile, LimitExceeded)


def test_a_hole_that_claims_a_terabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The ratio is kept by a hole in the file: only the memory of the machine is left to say no.
    index = bomb("x", (1 << 20, 1 << 20), 1 << 28, Zstd())
    place(index.entries.values())
    path = forge(tmp_path / "a", index, hole_bytes=index.data_bytes)
    assert path.stat().st_blocks * 512 < 1_000_000
    refuse_quickly(path, LimitExceeded)
    with PackReader(path) as pack:
        with pytest.raises(LimitExceeded):
            pack.read_rows("x", 0, 1 << 20)
        with pytest.raises(CorruptFile):
            pack.read_rows("x", 5, 6)
    monkeypatch.setattr(pack_format, "MAX_TENSOR_BYTES", 1 << 30)
    refuse_quickly(path, LimitExceeded)


@pytest.mark.parametrize("shape", [(0, 2**62, 2**62), (0, 2**63 - 1), (1,) * 65, (1,) * 100_000])
def test_shapes_that_numpy_cannot_name(tmp_path: Path, shape: tuple[int, ...]) -> None:
    index = bomb("x", shape, 1 << 20, Raw())
    entry = index.entries["x"]
    entry.sizes, entry.crcs = [1] * entry.blocks, [zlib.crc32(b"\0")] * entry.blocks
    data = bytes(8) if entry.blocks else b""
    refuse_quickly(forge(tmp_path / "a", index, data), CorruptFile, LimitExceeded)


def test_blocks_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = bomb("x", (1 << 30,), 1 << 30, Zstd())
    place(index.entries.values())
    path = forge(tmp_path / "a", index, hole_bytes=index.data_bytes)
    refuse_quickly(path, LimitExceeded)
    good = write(tmp_path / "b", Item("v", weights(1000), codec=Zstd()))
    for limit in ("MAX_BLOCK_BYTES", "MAX_TENSOR_BYTES"):
        monkeypatch.setattr(pack_format, limit, 3999)
        refuse_quickly(good, LimitExceeded)
        monkeypatch.setattr(pack_format, limit, 4000)
    with PackReader(good) as pack:
        assert pack.read("v").size == 1000


def test_a_header_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000) + b'{"__metadata__":{"penstock":"')
        file.truncate(300_000_000)
    refuse_quickly(path, LimitExceeded)
    good = write(tmp_path / "b", Item("v", weights(1000)))
    with monkeypatch.context() as patch:
        patch.setattr(pack_format, "MAX_HEADER_BYTES", 100)
        refuse_quickly(good, LimitExceeded)
    for length in (2**63, 2**64 - 1, 10**9):
        path.write_bytes(struct.pack("<Q", length) + b"{}" * 100)
        refuse_quickly(path, CorruptFile, LimitExceeded)


def test_a_blob_is_never_under_a_thousandth_of_its_tensor(tmp_path: Path) -> None:
    zeros = np.zeros(8 << 20, np.uint8)
    path = write(tmp_path / "a", Item("z", zeros, codec=Zstd()))
    assert path.stat().st_size > zeros.nbytes // 1000
    with PackReader(path) as pack:
        assert bits(pack.read("z")) == bits(zeros)
        assert list(pack.verify()) == []


def test_files_that_are_no_packs(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    foreign = tmp_path / "foreign"
    save_file({"a": np.zeros(3)}, foreign)
    assert not is_pack(foreign)
    with pytest.raises(UnknownFormat):
        PackReader(foreign)
    for content in (b"", b"x", b"x" * 9, b"PK\3\4" + bytes(100), bytes(100), b"\x80\x02}q\0."):
        foreign.write_bytes(content)
        assert not is_pack(foreign)
        with pytest.raises(DataError):
            PackReader(foreign)
    with pytest.raises(FileNotFoundError):
        PackReader(tmp_path / "missing")


def test_a_newer_version_says_so(tmp_path: Path) -> None:
    path = forge(tmp_path / "a", Index("k", {}, {}), version=2)
    with pytest.raises(UnknownFormat, match="upgrade penstock"):
        PackReader(path)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    base, path, _ = delta_pair(tmp_path)
    for _ in range(3):
        with PackReader(path) as pack:
            pack.read("w")
    base.write_bytes(b"x" * 100)
    with PackReader(path) as pack, pytest.raises(DataError):
        pack.read("w")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError):
        PackReader(path)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_page_about_the_format_is_true(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    example = json.loads(page.split("```json")[1].split("```")[0])
    bias, weight = np.zeros(4, np.float32), np.ones((512, 1024), np.float32)
    items = [Item("bias", bias), Item("weight", weight, codec=Planes())]
    path = write(tmp_path / "a", *items, kind="checkpoint", meta={"step": 100})
    with safe_open(path, "numpy") as file:
        index = json.loads(file.metadata()[INDEX_KEY])
    for described in (example, index):
        del described["tensors"]["weight"]["sizes"]  # a matter of the version of zstd
    assert index == example
    for dtype in DTYPES:
        assert dtype.rstrip("0123456789") in page or "float8" in dtype
    for codec in ("raw", "lz4", "zstd", "planes", "delta", "quantize"):
        assert f"| `{codec}`" in page
    python = page.split("```python")[1].split("```")[0].replace("ckpt_100.pt", str(path))
    result = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True)
    assert result.stdout.strip() == "[0. 0. 0. 0.]"


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1), (1, 0, 2), None])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_blocks_are_put_in_their_place(tmp_path, order, rows):
    values = np.arange(7 * 5 * 4, dtype=np.float32).reshape(7, 5, 4)
    layout = Layout(order) if order else None
    stored = values.transpose(order).shape if layout else values.shape
    row_bytes = values.nbytes // stored[0]
    with PackWriter(tmp_path / "x.pack") as writer:
        x = Item("x", values, codec=Zstd(), layout=layout, block_bytes=rows * row_bytes)
        odd = Item("odd", values, codec=Zstd(), layout=Layout((0, 2, 1)), block_bytes=12)
        writer.write([x, odd])
    with PackReader(tmp_path / "x.pack") as pack:
        out = np.zeros_like(values)
        pack.read_into([("x", out)])
        assert (out == values).all()
        flat = np.zeros(values.size, np.float32)
        pack.read_into([("x", flat)])
        assert (flat == (values.transpose(order) if layout else values).reshape(-1)).all()
        assert not pack.entry("odd").whole_rows
        with pytest.raises(UsageError, match="disk order"):
            pack.read_into([("odd", out)])
