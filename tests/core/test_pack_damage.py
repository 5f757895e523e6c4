"""Damaged and hostile packs: a DataError, or exactly the original values. Never anything else.

`Outcome.WHOLE` is no miss: some changes, such as a space that became a tab, change no value.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import struct
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.core.codecs import Delta, Layout, Lz4, Planes, Quantize, Raw, Zstd
from penstock.core.pack import Entry, Item, PackReader, PackWriter
from penstock.core.pack import format as pack_format
from penstock.errors import DataError

KINDS = ["plain", "planes", "delta", "mixed"]
LARGE_MUTATIONS = 2000
FUZZ_CASES = 2000


class Outcome(Enum):
    """What became of one damaged file; anything else is a failure."""

    REFUSED = 1
    WHOLE = 2


State = dict[str, tuple[str, tuple[int, ...], bytes]]


def read_all(path: Path) -> tuple[State, Any]:
    with PackReader(path) as pack:
        state = {}
        for name in pack.names:
            values = pack.read(name)
            state[name] = (pack.entry(name).dtype, values.shape, values.tobytes())
        return state, (pack.names, pack.index.kind, pack.index.meta)


def outcome(path: Path, original: tuple[State, Any], what: object) -> Outcome:
    """Read a damaged file; fail on wrong values and on every exception but DataError."""
    try:
        found = read_all(path)
    except DataError as error:
        assert "\n" not in str(error), what
        return Outcome.REFUSED
    assert found == original, f"silently wrong after {what}"
    return Outcome.WHOLE


def values(count: int, seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(count) * 0.02).astype(np.float32)


def make(folder: Path, kind: str, scale: int = 1) -> Path:
    """Write a pack of about 4 kB (times scale) of one kind; a delta has its base beside it."""
    path = folder / kind
    w = values({"plain": 300, "planes": 600, "delta": 1000, "mixed": 200}[kind] * scale)
    meta = {"step": 12, "text": "ünï"}
    base = None
    if kind == "plain":
        items = [Item("w", w.reshape(-1, 3)), Item("odd", np.arange(7, dtype=np.int8))]
    elif kind == "planes":
        items = [Item("w", w, codec=Planes(), block_bytes=2000)]
    elif kind == "delta":
        with PackWriter(folder / "base") as writer:
            writer.write([Item("w", w, codec=Planes(), block_bytes=2000)])
        base = PackReader(folder / "base")
        items = [Item("w", w * np.float32(1.0001), codec=Delta(), block_bytes=2000)]
    else:
        items = [
            Item("w", w[: 150 * scale], codec=Planes("lz4"), block_bytes=256),
            Item("z", np.zeros((4, 5 * scale), np.int16), codec=Zstd(), layout=Layout((1, 0))),
            Item("q", w[: 50 * scale], codec=Quantize(1e-3, Lz4())),
            Item("c", np.ones(5, np.complex64), codec=Raw()),
            Item("b", np.array([True, False, True])),
            Item("s", np.array(2.5)),
            Item("e", np.zeros((0, 3))),
        ]
    with PackWriter(path, kind="damage", meta=meta, base=base) as writer:
        writer.write(items)
    if base:
        base.close()
    return path


@pytest.fixture(params=KINDS)
def pack(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make(tmp_path, request.param)


# --- damage ------------------------------------------------------------------------------------


def test_every_bit_flip(pack: Path, record_property: Any) -> None:
    original, content = read_all(pack), pack.read_bytes()
    assert 1500 < len(content) < 8000
    counts: Counter[Outcome] = Counter()
    with pack.open("r+b", buffering=0) as file:
        for bit in range(8 * len(content)):
            at, mask = bit // 8, 1 << bit % 8
            os.pwrite(file.fileno(), bytes([content[at] ^ mask]), at)
            counts[outcome(pack, original, ("flip", at, mask))] += 1
            os.pwrite(file.fileno(), content[at : at + 1], at)
    assert outcome(pack, original, "nothing") is Outcome.WHOLE
    assert counts.total() >= 8000
    # A compressor has a few bits of which nothing depends; all others are noticed.
    assert counts[Outcome.WHOLE] <= 0.005 * counts.total()
    record_property("flips", counts.total())


def test_every_flip_of_the_base(tmp_path: Path) -> None:
    delta = make(tmp_path, "delta")
    base = tmp_path / "base"
    original, content = read_all(delta), base.read_bytes()
    counts: Counter[Outcome] = Counter()
    for bit in range(0, 8 * len(content), 29):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        base.write_bytes(damaged)
        counts[outcome(delta, original, ("base", bit))] += 1
    assert counts[Outcome.WHOLE] <= 0.01 * counts.total()  # its padding is not what we read


def test_every_truncation(pack: Path) -> None:
    original, content = read_all(pack), pack.read_bytes()
    for length in reversed(range(len(content))):
        os.truncate(pack, length)
        assert outcome(pack, original, ("cut", length)) is Outcome.REFUSED


def test_appended_bytes(pack: Path) -> None:
    original, content = read_all(pack), pack.read_bytes()
    for tail in (b"\0", b" ", b"x", bytes(7), bytes(8), bytes(512), content):
        pack.write_bytes(content + tail)
        assert outcome(pack, original, ("appended", tail)) is Outcome.REFUSED
        pack.write_bytes(tail + content)
        assert outcome(pack, original, ("prepended", tail)) is Outcome.REFUSED


def test_lost_pages(pack: Path) -> None:
    original, content = read_all(pack), pack.read_bytes()
    for page in (512, 4096):
        for at in range(0, len(content), page):
            for fill in (b"\0", b"\xff", b" "):
                damaged = bytearray(content)
                damaged[at : at + page] = fill * len(damaged[at : at + page])
                pack.write_bytes(damaged)
                same = damaged == content
                result = outcome(pack, original, ("page", at, page, fill))
                assert (result is Outcome.WHOLE) == same


@pytest.mark.parametrize("codec", [None, Raw(), Planes(), Zstd()])
def test_swapped_blocks(tmp_path: Path, codec: Any) -> None:
    path = tmp_path / "a"
    with PackWriter(path) as writer:
        writer.write(
            [
                Item(name, values(1024, ord(name)), codec=codec, block_bytes=1024)
                for name in ("a", "b")
            ]
        )
    original, content = read_all(path), path.read_bytes()
    with PackReader(path) as reader:
        spans = []
        for entry in reader.index.entries.values():
            first = reader.index.header_bytes + entry.offset
            for start, size in zip(entry.block_offsets, entry.sizes, strict=False):
                spans.append((first + start, size))
    swaps = 0
    for one, (a, size_a) in enumerate(spans):
        for b, size_b in spans[one + 1 :]:
            size = min(size_a, size_b)
            damaged = bytearray(content)
            damaged[a : a + size], damaged[b : b + size] = (
                content[b : b + size],
                content[a : a + size],
            )
            path.write_bytes(damaged)
            assert outcome(path, original, ("swap", a, b)) is Outcome.REFUSED
            swaps += 1
    assert swaps == 28


def mutate(content: bytes, choose: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(choose.choice([1, 1, 1, 2, 5])):
        at = choose.randrange(len(damaged))
        # Half of the changes hit the header, which is the small part of a large file.
        if choose.random() < 0.5:
            at = choose.randrange(min(len(damaged), 3000))
        size = choose.choice([1, 2, 8, 63, 512])
        match choose.choice(["flip", "noise", "zeros", "cut", "insert", "delete", "copy", "huge"]):
            case "flip":
                damaged[at] ^= 1 << choose.randrange(8)
            case "noise":
                damaged[at : at + size] = choose.randbytes(len(damaged[at : at + size]))
            case "zeros":
                damaged[at : at + size] = bytes(len(damaged[at : at + size]))
            case "cut":
                del damaged[max(at, 1) :]
            case "insert":
                damaged[at:at] = choose.randbytes(size)
            case "delete":
                del damaged[at : at + min(size, len(damaged) - 1)]
            case "copy":
                other = choose.randrange(len(damaged))
                piece = damaged[other : other + size]
                damaged[at : at + len(piece)] = piece
            case "huge":
                word = struct.pack("<Q", choose.choice([2**64 - 1, 2**63, 2**32, 10**12]))
                damaged[at : at + 8] = word[: len(damaged[at : at + 8])]
    return bytes(damaged)


@pytest.mark.parametrize("kind", KINDS)
def test_random_damage_of_larger_packs(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path, kind, scale=20)
    original, content = read_all(path), path.read_bytes()
    assert len(content) > 10_000
    choose = random.Random(kind)
    counts: Counter[Outcome] = Counter()
    for number in range(LARGE_MUTATIONS // len(KINDS)):
        damaged = mutate(content, choose)
        path.write_bytes(damaged)
        result = outcome(path, original, ("mutation", kind, number))
        assert result is Outcome.REFUSED or damaged == content or kind != "plain"
        counts[result] += 1
    assert counts[Outcome.REFUSED] > 0.8 * counts.total()


def test_verify_names_the_damaged_tensor_only(tmp_path: Path) -> None:
    path = make(tmp_path, "mixed")
    with PackReader(path) as reader:
        entry = reader.entry("w")
        at = reader.index.header_bytes + entry.offset + entry.block_offsets[1]
    content = bytearray(path.read_bytes())
    content[at + 20] ^= 255
    path.write_bytes(content)
    with PackReader(path) as reader:
        problems = list(reader.verify())
        assert [name for name, _ in problems] == ["w"]
        assert f"block 1 at byte {at}" in problems[0][1]
        assert str(path) in problems[0][1]
        for name in reader.names:
            if name != "w":
                reader.read(name)


# --- hostile files with valid digests ----------------------------------------------------------


def forge(path: Path, text: str, table: dict[str, Any] | str, data: bytes = b"") -> None:
    """Write a pack from any index text; its digest is valid."""
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
    metadata = json.dumps({pack_format.INDEX_KEY: text, pack_format.DIGEST_KEY: digest})
    entries = table if isinstance(table, str) else json.dumps(table)[1:-1]
    raw = f'{{"__metadata__":{metadata}{"," if entries else ""}{entries}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def attempt(path: Path) -> Outcome:
    """Open and read everything, in every way: it works, or it is a DataError."""
    try:
        with PackReader(path) as pack:
            for _ in pack.verify():
                pass
            for name in pack.names:
                entry = pack.entry(name)
                if entry.nbytes < 1 << 26:
                    pack.read(name)
                if entry.stored_shape:
                    pack.read_rows(name, 0, min(entry.stored_shape[0], 1))
    except DataError as error:
        assert "\n" not in str(error)
        return Outcome.REFUSED
    return Outcome.WHOLE


def parts(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Take a pack apart: the index, the table of safetensors, the data."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    index = json.loads(header.pop("__metadata__")[pack_format.INDEX_KEY])
    return index, header, content[8 + length :]


@pytest.mark.parametrize(
    "name",
    [
        *("../secret/base", "/etc/passwd", "", ".", "..", "a/b", "./base", "base/", "\0", "a\0b"),
        *("n" * 300, "folder", "missing", "\ud800", "delta", "//base", "..\\base", "fifo\n"),
        *(7, None, [], {}, True),
    ],
    ids=repr,
)
def test_hostile_base_names(tmp_path: Path, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home, secret = tmp_path / "home", tmp_path / "secret"
    home.mkdir()
    secret.mkdir()
    (home / "folder").mkdir()
    path = make(home, "delta")
    (home / "base").rename(secret / "base")  # the very base: only the name is wrong
    index, table, data = parts(path)
    index["base"]["file"] = name
    forge(path, json.dumps(index), table, data)
    opened: list[str] = []
    real = os.open

    def watched(target: Any, *arguments: Any, **more: Any) -> int:
        opened.append(os.path.realpath(target))
        return real(target, *arguments, **more)

    monkeypatch.setattr(os, "open", watched)
    with pytest.raises(DataError), PackReader(path) as pack:
        pack.read("w")
    assert all(target.startswith(str(home)) for target in opened)


@pytest.mark.parametrize("digest", ["", "../../x", "0" * 31, "zz" * 16, 5, None, "0" * 34])
def test_hostile_base_digests(tmp_path: Path, digest: Any) -> None:
    path = make(tmp_path, "delta")
    index, table, data = parts(path)
    index["base"]["digest"] = digest
    forge(path, json.dumps(index), table, data)
    with pytest.raises(DataError):
        PackReader(path)


def hostile_texts() -> Iterator[tuple[str, str]]:
    start = '{"version":1,"kind":"k","meta":{},"base":null,"tensors":'
    record = (
        '{"dtype":"uint8","shape":[8],"codec":{"id":"raw"},"plain":true,"block":8,'
        '"sizes":[8],"crcs":[0],"crc":0}'
    )
    for depth in (100, 900, 3000, 200_000):
        yield (
            f"meta {depth}",
            start.replace("{}", '{"a":' + "[" * depth + "]" * depth + "}") + "{}}",
        )
        yield f"index {depth}", "[" * depth
        yield f"closed {depth}", "[" * depth + "]" * depth
        codec = '{"id":"delta","inner":' * depth + '{"id":"raw"}' + "}" * depth
        yield f"codec {depth}", start + '{"a":' + record.replace('{"id":"raw"}', codec) + "}}"
        shape = "[" + ",".join(["1"] * depth) + "]"
        yield f"shape {depth}", start + '{"a":' + record.replace("[8]", shape, 1) + "}}"
        huge = "[" + ",".join(["9223372036854775807"] * depth) + "]"
        yield f"large {depth}", start + '{"a":' + record.replace("[8]", huge, 1) + "}}"
    for number in ("-1", "8.0", "1e3", "1e999", "NaN", "Infinity", "true", "null", '"8"', "[]"):
        for place in ('"shape":[8', '"block":8', '"sizes":[8', '"crcs":[0', '"crc":0'):
            changed = place.rstrip("80") + number
            yield f"{place} {number}", start + '{"a":' + record.replace(place, changed) + "}}"
    for digits in (20, 400, 4000, 5000, 100_000):
        for place in ('"shape":[8', '"block":8', '"sizes":[8', '"crcs":[0', '"crc":0'):
            changed = place.rstrip("80") + "9" * digits
            yield f"{place} {digits}", start + '{"a":' + record.replace(place, changed) + "}}"
        yield f"version {digits}", '{"version":' + "9" * digits + "}"
        yield f"meta {digits}", start.replace("{}", '{"a":' + "9" * digits + "}") + "{}}"
    yield "duplicate tensors", start + '{"a":' + record + ',"a":' + record + "}}"
    yield "duplicate keys", '{"version":2,' + start[1:] + "{}}"
    yield "last version wins", start + '{},"version":3}'
    for text in ("", "null", "[]", "1", '"x"', "{}", '{"version":1}', "\ufeff{}", "{", "nan"):
        yield f"text {text!r}", text
    for field in ("kind", "meta", "base", "tensors"):
        for value in ("null", "[]", "1", '"x"', "[[]]", '{"a":null}', "true"):
            yield f"{field} {value}", start + f'{{}},"{field}":{value}}}'
    for name in (
        "",
        "../x",
        "/etc/passwd",
        "\\u0000",
        "a|b",
        "\\ud800",
        "__metadata__",
        "x" * 9999,
    ):
        yield f"name {name[:20]}", start + f'{{"{name}":' + record + "}}"


def test_a_folder_of_attacks(tmp_path: Path) -> None:
    texts = list(hostile_texts())
    assert len(texts) > 150
    table = {"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}
    for number, (what, text) in enumerate(texts):
        for entries in ({}, table):
            path = tmp_path / f"attack{number}"
            forge(path, text, entries, bytes(8) if entries else b"")
            try:
                attempt(path)
            except Exception as error:
                raise AssertionError(f"{what}: {error!r}") from error
            path.unlink()
    whole = [text for what, text in texts if what in ("duplicate keys", "kind 1")]
    for text in whole:  # harmless nonsense is taken, so the forger's files do reach the parser
        forge(tmp_path / "good", text, {})
        assert attempt(tmp_path / "good") is Outcome.WHOLE


def test_nonsense_outside_the_index(tmp_path: Path) -> None:
    path = make(tmp_path, "plain")
    index, table, data = parts(path)
    text = json.dumps(index)
    forge(path, text, table, data)
    assert attempt(path) is Outcome.WHOLE
    rendered = json.dumps(table)[1:-1]
    for entries in (
        "",
        rendered + ',"extra":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',
        rendered.replace("F32", "I32"),
        rendered.replace("data_offsets", "offsets"),
        rendered + ',"deep":' + "[" * 200_000,
        rendered + ',"deep":' + "[" * 500 + "]" * 500,
        rendered + ',"__metadata__":{}',
        rendered + ',"__metadata__":null',
        rendered + ',"__metadata__":{"penstock":5,"penstock.digest":5}',
        rendered + ',"__metadata__":{"penstock":"\\ud800","penstock.digest":"x"}',
        rendered + ',"n":' + "9" * 5000,
    ):
        forge(path, text, entries, data)
        assert attempt(path) is Outcome.REFUSED
    for raw in (b"[]", b"null", b"1", b'"penstock"', b"\xff\xfe{}", b"{}", b"[" * 100_000, b"   "):
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
        assert attempt(path) is Outcome.REFUSED


# --- a grammar fuzzer over the index -----------------------------------------------------------

NASTY: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 7, 8, -1, 2**31, 2**32, 2**40, 2**63, 2**64, 10**30, 10**400),
    *(0.0, 1.0, -0.5, 1e308, 5e-324, "", "a", "raw", "zstd", "uint8", "float64", "complex128"),
    *("../x", "\0", "\ud800", "ü" * 50, [], [[]], [0], [1, 2], [0, 0], [None], {}, {"id": "raw"}),
    {"id": "quantize", "epsilon": 1e-9, "inner": {"id": "raw"}},
    {"id": "quantize", "epsilon": 1e300, "inner": {"id": "planes"}},
    {"id": "delta", "inner": {"id": "delta", "inner": {"id": "raw"}}},
    {"id": "delta", "inner": {"id": "zstd", "level": 1}},
    {"id": "lz4", "level": 3},
    {"id": "planes", "inner": "lz4"},
    {"file": "base", "digest": "00" * 16},
]


def spots(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield path
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from spots(child, (*path, key))


def fuzz(content: Any, choose: random.Random) -> Any:
    changed = copy.deepcopy(content)
    for _ in range(choose.choice([1, 1, 2, 3])):
        everywhere = [spot for spot in spots(changed) if spot]
        if not everywhere:
            return choose.choice(NASTY)
        *way, last = choose.choice(everywhere)
        parent = changed
        for key in way:
            parent = parent[key]
        value = copy.deepcopy(choose.choice(NASTY))
        match choose.choice(["set", "set", "set", "nudge", "delete", "add"]):
            case "set":
                parent[last] = value
            case "nudge" if type(parent[last]) is int:
                parent[last] += choose.choice([-1, 1, 8, 1000])
            case "delete":
                del parent[last]
            case "add" if isinstance(parent, list):
                parent.insert(last, value)
            case "add":
                parent[choose.choice(["a", "order", "base", "id", "inner", "level"])] = value
    return changed


def mend(content: Any) -> tuple[dict[str, Any], int]:
    """Make the rest of a fuzzed file agree, so that the fuzz reaches the code behind the checks."""
    for name, record in content["tensors"].items():
        entry = Entry(name, record["dtype"], tuple(record["shape"]), Raw(), record["block"], False)
        entry.crcs = record["crcs"]
        record["crc"] = entry.checksum()
    tensors = content["tensors"].items()
    entries = {name: pack_format._parse_entry(name, record) for name, record in tensors}
    pack_format.place(entries.values())
    size = sum(entry.stored_bytes for entry in entries.values())
    return {name: entry.safetensors() for name, entry in entries.items()}, size


def test_a_grammar_fuzzer_over_the_index(tmp_path: Path) -> None:
    originals = [parts(make(tmp_path, kind)) for kind in KINDS]
    choose = random.Random(2)
    counts: Counter[Outcome] = Counter()
    mended = 0
    path = tmp_path / "fuzzed"
    for number in range(FUZZ_CASES):
        index, table, data = choose.choice(originals)
        content = fuzz(index, choose)
        if choose.random() < 0.8:
            try:
                table, size = mend(content)
                data = data.ljust(size, b"\0")[:size] if size < 1 << 20 else data
                mended += 1
            except Exception:  # it stays contradictory: that is a case, too
                table = dict(table)
        forge(path, json.dumps(content), table, data)
        try:
            counts[attempt(path)] += 1
        except Exception as error:
            raise AssertionError(f"case {number}: {error!r}: {content}") from error
    assert counts.total() == FUZZ_CASES
    assert mended > FUZZ_CASES // 10
    assert counts[Outcome.WHOLE] > 50
    assert counts[Outcome.REFUSED] > FUZZ_CASES // 2
