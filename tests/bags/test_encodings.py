"""Protobuf and JSON in MCAP files, against google.protobuf, json and the SDK of Foxglove.

foxglove.mcap was written by foxglove-sdk 0.30: four messages each of its common schemas.
"""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    timestamp_pb2,
    wrappers_pb2,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from mcap.writer import Writer
from mcap_protobuf.writer import Writer as ProtobufWriter

from penstock.bags import Decoder, Limits, Topic, open_bag
from penstock.errors import DataError, PenstockError

from .damage import mutate

FOXGLOVE = Path(__file__).with_name("foxglove.mcap")
Kind = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "double": st.floats(width=64, allow_nan=False),
    "float": st.floats(width=32, allow_nan=False),
    "int64": st.integers(-(2**53), 2**53),
    "uint64": st.integers(0, 2**53),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "fixed64": st.integers(0, 2**53),
    "fixed32": st.integers(0, 2**32 - 1),
    "bool": st.booleans(),
    "uint32": st.integers(0, 2**32 - 1),
    "sfixed32": st.integers(-(2**31), 2**31 - 1),
    "sfixed64": st.integers(-(2**53), 2**53),
    "sint32": st.integers(-(2**31), 2**31 - 1),
    "sint64": st.integers(-(2**53), 2**53),
}


def make_types() -> tuple[Any, bytes]:
    """A type with every kind of number, once, packed and unpacked, in sub-messages and lists."""
    file = descriptor_pb2.FileDescriptorProto(name="a.proto", package="my.robot", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    inner = file.message_type.add(name="Inner")
    outer = file.message_type.add(name="Outer")
    for number, name in enumerate(SCALARS, 1):
        kind = getattr(Kind, f"TYPE_{name.upper()}")
        inner.field.add(name=f"a_{name}", number=number, type=kind, label=Kind.LABEL_OPTIONAL)
        for offset, packed in ((0, True), (100, False)):
            one = outer.field.add(
                name=f"{'packed' if packed else 'loose'}_{name}",
                number=number + 10 + offset,
                type=kind,
                label=Kind.LABEL_REPEATED,
            )
            one.options.packed = packed
    message = {"type": Kind.TYPE_MESSAGE, "type_name": ".my.robot.Inner"}
    outer.field.add(name="one", number=1, label=Kind.LABEL_OPTIONAL, **message)
    outer.field.add(name="many", number=2, label=Kind.LABEL_REPEATED, **message)
    outer.field.add(name="text", number=3, label=Kind.LABEL_OPTIONAL, type=Kind.TYPE_STRING)
    outer.field.add(name="blob", number=4, label=Kind.LABEL_OPTIONAL, type=Kind.TYPE_BYTES)
    itself = {"type": Kind.TYPE_MESSAGE, "type_name": ".my.robot.Outer"}
    outer.field.add(name="child", number=5, label=Kind.LABEL_OPTIONAL, **itself)
    stamp = {"type": Kind.TYPE_MESSAGE, "type_name": ".google.protobuf.Timestamp"}
    outer.field.add(name="stamp", number=6, label=Kind.LABEL_OPTIONAL, **stamp)
    pool = descriptor_pool.DescriptorPool()
    base = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(base)
    pool.Add(base)
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("my.robot.Outer"))
    schema = descriptor_pb2.FileDescriptorSet(file=[base, file]).SerializeToString()
    return kind, schema


OUTER, SCHEMA = make_types()


def decoder(definition: bytes | str = SCHEMA, encoding: str = "protobuf") -> Decoder:
    kind = "my.robot.Outer"
    return Decoder(Topic("/t", kind, 1, None, definition, encoding), "x.mcap", Limits())


DECODER = decoder()


@st.composite
def inners(draw: st.DrawFn) -> Any:
    inner = OUTER().one.__class__()
    for name, values in SCALARS.items():
        if draw(st.booleans()):
            setattr(inner, f"a_{name}", draw(values))
    return inner


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_number_is_that_of_google_protobuf(data: st.DataObject) -> None:
    message = OUTER(text=data.draw(st.text(max_size=5)), blob=data.draw(st.binary(max_size=5)))
    if data.draw(st.booleans()):
        message.one.CopyFrom(data.draw(inners()))
    message.many.extend(data.draw(st.lists(inners(), max_size=3)))
    message.stamp.FromNanoseconds(data.draw(st.integers(0, 2**61)))
    for name, values in SCALARS.items():
        for kind in ("packed", "loose"):
            getattr(message, f"{kind}_{name}").extend(data.draw(st.lists(values, max_size=3)))
    raw = message.SerializeToString()
    assert DECODER.stamp_ns(raw) == message.stamp.ToNanoseconds()
    whole = [float(getattr(message.one, f"a_{name}")) for name in SCALARS]
    np.testing.assert_array_equal(DECODER.vector(raw, "one"), whole)
    for name in SCALARS:
        np.testing.assert_array_equal(
            DECODER.vector(raw, f"one.a_{name}"), [float(getattr(message.one, f"a_{name}"))]
        )
        for kind in ("packed", "loose"):
            expected = np.array([*getattr(message, f"{kind}_{name}")], np.float64)
            np.testing.assert_array_equal(DECODER.vector(raw, f"{kind}_{name}"), expected)
        for number, item in enumerate(message.many):
            found = DECODER.vector(raw, f"many[{number}].a_{name}")
            np.testing.assert_array_equal(found, [float(getattr(item, f"a_{name}"))])
    # Parts of one message merge, as protobuf has it.
    other = OUTER()
    other.one.a_int32 = 7
    both = raw + other.SerializeToString()
    assert DECODER.vector(both, "one.a_int32")[0] == OUTER.FromString(both).one.a_int32
    assert DECODER.vector(both, "one.a_double")[0] == message.one.a_double


def test_fields_and_errors() -> None:
    fields = DECODER.fields()
    assert fields["one.a_sint32"] == "int32" and fields["packed_float"] == "float32[]"
    assert fields["many[0].a_bool"] == "bool" and fields["blob"] == "uint8[]"
    assert fields["stamp"] == "time" and "text" not in fields
    assert not any(path.startswith("child.child.") for path in fields)
    for path in ("text", "nothing", "one[0]", "child", "many[0]..x", ""):
        with pytest.raises(DataError, match="/t"):
            DECODER.vector(b"", path)
    with pytest.raises(DataError, match="0 items"):
        DECODER.vector(b"", "many[0].a_bool")
    with pytest.raises(DataError, match="cut"):
        DECODER.vector(b"\x0a\x05\x01", "one.a_double")
    assert DECODER.vector(b"", "one.a_double").tolist() == [0.0]


def test_a_file_of_the_protobuf_writer(tmp_path: Path) -> None:
    path = tmp_path / "x.mcap"
    with path.open("wb") as file, ProtobufWriter(file) as writer:
        for number in range(20):
            message = OUTER(packed_double=[number, 2.5])
            message.stamp.FromNanoseconds(number * 1000)
            writer.write_message("/robot", message, number, number)
    with open_bag(path) as bag:
        topic = bag.topics["/robot"]
        assert (topic.type, topic.encoding) == ("my.robot.Outer", "protobuf")
        assert topic.schema_encoding == "protobuf"
        np.testing.assert_array_equal(bag.header_stamps(["/robot"])["/robot"], np.arange(20) * 1000)
        decode = bag.decoder("/robot")
        for message in bag.read():
            found = decode.vector(message.data, "packed_double")
            np.testing.assert_array_equal(found, [message.ordinal, 2.5])


def test_the_schemas_of_foxglove() -> None:
    with open_bag(FOXGLOVE) as bag:
        second = {m.topic: m.data for m in bag.read() if m.ordinal == 1}
        decoders = {name: bag.decoder(name) for name in bag.topics}

        def vector(topic: str, path: str) -> list[float]:
            return decoders[topic].vector(second[topic], path).tolist()

        assert vector("/joints", "position") == [1.5, 0.0, -1.0]
        assert decoders["/joints"].names(second["/joints"], "position") == ("a", "b", "c")
        velocity = vector("/joints", "velocity")
        assert velocity[0] == 1 and math.isnan(velocity[1]) and velocity[2] == 3
        assert vector("/joints", "effort") == []  # none of them has one
        assert vector("/pose", "pose") == [1, 2, 3, 0, 0, 0, 1]
        assert vector("/tf1", "translation") == [1, 0, 1.5]
        assert vector("/tf", "transforms[1].rotation.w") == [1]
        assert vector("/scan", "ranges") == [1, 2, 1]
        assert vector("/fix", "latitude") + vector("/fix", "altitude") == [48.1, 501]
        for topic in ("/cloud", "/log", "/image", "/raw", "/video"):
            assert decoders[topic].fields() == {}  # nothing that a learner could use
        for topic in decoders.keys() - {"/tf", "/json"}:
            assert decoders[topic].stamp_ns(second[topic]) == 101 * 10**9 + 5000
        jpeg, raw, packet = (
            decoders[name].image(second[name]) for name in ("/image", "/raw", "/video")
        )
        assert (jpeg.encoding, bytes(jpeg.data)) == ("jpeg", b"\xff\xd8\xff" + b"\1" * 20)
        assert (raw.encoding, raw.width, raw.height, raw.step) == ("rgb8", 4, 2, 12)
        assert bytes(raw.data) == bytes(range(24))
        assert (packet.encoding, bytes(packet.data)) == ("h264", b"\0\0\0\1" + b"\1" * 9)
        media = {name: topic.media for name, topic in bag.topics.items()}
        assert {media["/image"], media["/raw"]} == {"image"} and media["/video"] == "video"
        assert media["/joints"] is None
        assert vector("/json", "q") == [1, 2, 3] and vector("/json", "pose") == [1.5, 1]
        assert decoders["/json"].fields()["ok"] == "bool"


def test_info_tells_the_encodings() -> None:
    from penstock.inspect import recording

    facts = recording.describe(FOXGLOVE)
    assert facts["kind"] == "MCAP file (json, protobuf)"
    assert {topic["encoding"] for topic in facts["topics"]} == {"json", "protobuf"}
    text = recording.text(facts)
    assert "ROS" not in text and "foxglove.JointStates (protobuf)" in text


JSON_SCHEMA = {
    "title": "my.State",
    "type": "object",
    "properties": {
        "timestamp": {"title": "time", "type": "object", "properties": {"sec": {"type": "integer"},
                                                                    "nsec": {"type": "integer"}}},
        "q": {"type": "array", "items": {"type": "number"}},
        "pose": {"$ref": "#/$defs/Pose"},
        "joints": {"type": "array", "items": {"type": "object", "properties": {
            "name": {"type": "string"}, "position": {"type": "number"}}}},
        "maybe": {"type": ["number", "null"]},
        "data": {"type": "string", "contentEncoding": "base64"},
        "label": {"type": "string"},
    },
    "$defs": {"Pose": {"type": "object", "properties": {"x": {"type": "number"},
                                                        "y": {"type": "integer"}}}},
}  # fmt: skip
JSON_MESSAGE = {
    "timestamp": {"sec": 5, "nsec": 6},
    "q": [1, 2.5, -3e2],
    "pose": {"y": 2, "x": 1.25},
    "joints": [{"name": "a", "position": 1.0}, {"name": "b", "position": 2.0}],
    "data": base64.b64encode(b"\1\2\3").decode(),
    "label": "x",
}


def test_json_by_its_schema() -> None:
    decode = decoder(json.dumps(JSON_SCHEMA), "json")
    raw = json.dumps(JSON_MESSAGE).encode()
    assert decode.fields() == {
        "timestamp": "time", "q": "float64[]", "pose.x": "float64", "pose.y": "int64",
        "position": "float64[]", "maybe": "float64", "data": "uint8[]",
    }  # fmt: skip
    assert decode.vector(raw, "q").tolist() == [1, 2.5, -300]
    assert decode.vector(raw, "pose").tolist() == [1.25, 2]  # in the order of the schema
    assert decode.vector(raw, "position").tolist() == [1, 2]
    assert decode.names(raw, "position") == ("a", "b")
    assert decode.vector(raw, "data").tolist() == [1, 2, 3]
    assert math.isnan(decode.vector(raw, "maybe")[0])
    assert decode.stamp_ns(raw) == 5 * 10**9 + 6
    with pytest.raises(DataError, match="not numbers"):
        decode.vector(raw, "label")
    for bad in (b"", b"[]", b"{", b'{"q": [1, "x"]}', b"\xff", b"[" * 100_000):
        with pytest.raises(DataError, match="/t"):
            decode.vector(bad, "q")


def test_json_matrices() -> None:
    matrix = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    decode = decoder(json.dumps({"type": "object", "properties": {"m": matrix}}), "json")
    assert decode.vector(b'{"m": [[1, 2], [3, 4]]}', "m").tolist() == [1, 2, 3, 4]
    for bad in (b'{"m": [[1, 2], [3]]}', b'{"m": [[1, "x"]]}'):
        with pytest.raises(DataError, match="/t"):
            decode.vector(bad, "m")


@pytest.mark.parametrize("schema", [None, b"{}", b'{"type": "object"}'])
def test_json_without_a_schema(tmp_path: Path, schema: bytes | None) -> None:
    path = tmp_path / "x.mcap"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start()
        known = schema and writer.register_schema("Any", "jsonschema", schema)
        channel = writer.register_channel("/t", "json", known or 0)
        for number in range(3):
            data = json.dumps({"q": [number, 1.5], "on": True, "at": {"x": 2}}).encode()
            writer.add_message(channel, number, data, number)
        writer.finish()
    with open_bag(path) as bag:
        decode = bag.decoder("/t")
        assert decode.fields() == {"q": "float64[]", "on": "bool", "at.x": "float64"}
        found = [decode.vector(m.data, "q").tolist() for m in bag.read()]
    assert found == [[0, 1.5], [1, 1.5], [2, 1.5]]


def test_an_unknown_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.mcap"
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start()
        schema = writer.register_schema("my.Table", "flatbuffer", b"\0\xff\1")
        channel = writer.register_channel("/t", "flatbuffer", schema)
        writer.add_message(channel, 1, b"x", 1)
        writer.finish()
    with open_bag(path) as bag:
        assert len(list(bag.read())) == 1
        with pytest.raises(DataError, match=r"/t: it is encoded as 'flatbuffer'"):
            bag.decoder("/t")


def explosion(depth: int) -> bytes:
    """A type that contains two of the next, 2^depth laid out."""
    file = descriptor_pb2.FileDescriptorProto(name="a.proto", package="my.robot")
    for level in range(depth):
        kind = file.message_type.add(name="Outer" if level == 0 else f"T{level}")
        for number in (1, 2):
            kind.field.add(
                name=f"f{number}", number=number, label=Kind.LABEL_OPTIONAL,
                type=Kind.TYPE_MESSAGE, type_name=f".my.robot.T{level + 1}",
            )  # fmt: skip
    file.message_type.add(name=f"T{depth}").field.add(
        name="x", number=1, label=Kind.LABEL_OPTIONAL, type=Kind.TYPE_DOUBLE
    )
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


@pytest.mark.parametrize("depth", [25, 400])
def test_types_that_explode(depth: int) -> None:
    decode = decoder(explosion(depth))
    assert len(decode.fields()) <= 2000
    with pytest.raises(DataError):
        decode.vector(b"", "f1")


HOSTILE = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from bags.test_encodings import attack
from penstock.core.memory import highest_rss_bytes
what, first, cases = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
attack(what, 0, 3)
before = highest_rss_bytes()
errors = attack(what, first, cases)
print(json.dumps([errors, highest_rss_bytes() - before]))
"""


def samples() -> dict[str, tuple[bytes, bytes, str]]:
    message = OUTER(text="abc", blob=b"123", packed_int32=[1, -2, 3], loose_sint64=[5, -6])
    message.one.a_double = 2.5
    message.many.add().a_float = 1.5
    message.stamp.FromNanoseconds(5)
    raw = message.SerializeToString()
    text = json.dumps(JSON_SCHEMA).encode()
    return {
        "protobuf": (SCHEMA, raw, "protobuf"),
        "json": (text, json.dumps(JSON_MESSAGE).encode(), "json"),
    }


def attack(what: str, first: int, cases: int) -> int:
    """Damage messages or schemas, and use every part of the decoder; returns the clean errors."""
    encoding, _, part = what.partition(" ")
    schema, raw, _ = samples()[encoding]
    errors = 0
    for case in range(first, first + cases):
        rng = np.random.default_rng([11, case])
        hurt = mutate(schema if part == "schema" else raw, rng)
        definition: bytes | str = hurt if part == "schema" else schema
        data = raw if part == "schema" else hurt
        if encoding == "json":
            definition = definition.decode("utf-8", "replace")
        try:
            decode = decoder(definition, encoding)
            for path in [*decode.fields(), "one", "many", "joints", "pose", "map>base"]:
                try:
                    decode.vector(data, path)
                    decode.names(data, path)
                    decode.text(data, "text")
                except PenstockError as error:
                    assert "\n" not in str(error) and len(str(error)) < 1000
                    errors += 1
            decode.stamp_ns(data)
        except PenstockError as error:
            assert "/t" in str(error) and "\n" not in str(error) and len(str(error)) < 400
            errors += 1
    return errors


def run_attack(what: str, cases: int) -> None:
    arguments = [str(Path(__file__).parents[1]), what, "0", str(cases)]
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors, growth = json.loads(done.stdout)
    assert errors > cases // 10
    assert growth < 64 * 10**6


ATTACKS = ["protobuf message", "protobuf schema", "json message", "json schema"]


@pytest.mark.parametrize("what", ATTACKS)
def test_damaged_messages_and_schemas(what: str) -> None:
    run_attack(what, 300)


@pytest.mark.stress
@pytest.mark.parametrize("what", ATTACKS)
def test_damaged_messages_and_schemas_for_long(what: str) -> None:
    run_attack(what, 10_000)


def test_json_names_that_are_no_identifiers(tmp_path: Path) -> None:
    """As web recorders write them: with hyphens, blanks and dots."""
    values = {
        "left-arm": [1, 2],
        "right arm": {"\u5173\u8282 1": 3},
        "observation.state": [4, 5],
        "observation": {"v": 6},
        "a.b": [{"name": "x", "q-1": 7}],
        "\x1b[31m": 8,
        "x>y": 9,
        "": 10,
    }
    data = json.dumps(values).encode()
    found = Decoder(Topic("/t", "T", 1, None, "", "json"), "x.mcap", Limits(), [data])
    assert found.vector(data, "left-arm").tolist() == [1, 2]
    assert found.vector(data, "left-arm[1]").tolist() == [2]
    assert found.vector(data, "right arm").tolist() == [3]
    assert found.vector(data, "observation.state").tolist() == [4, 5]
    assert found.vector(data, "observation.v").tolist() == [6]
    assert found.vector(data, "a.b.q-1").tolist() == [7]
    assert found.names(data, "a.b.q-1") == ("x",)
    assert not any("\x1b" in path or ">" in path for path in found.fields())


def protobuf_type(build: Any, package: str = "a") -> tuple[Any, Any]:
    """Return the class of the message `M` of a file of descriptors, and a decoder of it."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package)
    base = descriptor_pb2.FileDescriptorProto()
    wrappers_pb2.DESCRIPTOR.CopyToProto(base)
    file.dependency.append(base.name)
    build(file)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(base)
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.M"))
    schema = descriptor_pb2.FileDescriptorSet(file=[base, file]).SerializeToString()
    topic = Topic("/t", f"{package}.M", 1, None, schema, "protobuf")
    return kind, Decoder(topic, "x.mcap", Limits())


def add_field(message: Any, name: str, number: int, kind: str = "DOUBLE", **more: Any) -> Any:
    label = more.pop("label", Kind.LABEL_OPTIONAL)
    return message.field.add(
        name=name, number=number, type=getattr(Kind, f"TYPE_{kind}"), label=label, **more
    )


@pytest.mark.parametrize("key", ["STRING", "UINT32", "SINT64"])
def test_the_keys_of_a_map_name_its_values(key: str) -> None:
    """Writers give the items of a map in any order."""

    def build(file: Any) -> None:
        file.syntax = "proto3"
        outer = file.message_type.add(name="M")
        for number, (name, kind) in enumerate((("One", "DOUBLE"), ("Many", "MESSAGE")), 1):
            entry = outer.nested_type.add(name=f"{name}Entry")
            entry.options.map_entry = True
            add_field(entry, "key", 1, key)
            more = {"type_name": ".a.Joint"} if kind == "MESSAGE" else {}
            add_field(entry, "value", 2, kind, **more)
            kinds = {"type_name": f".a.M.{name}Entry", "label": Kind.LABEL_REPEATED}
            add_field(outer, name.lower(), number, "MESSAGE", **kinds)
        joint = file.message_type.add(name="Joint")
        add_field(joint, "q", 1)
        add_field(joint, "dq", 2, "FLOAT")

    kind, decode = protobuf_type(build)
    keys = ["left", "right"] if key == "STRING" else [7, 3]
    for order in (keys, keys[::-1]):
        raw = b""
        for name in order:  # each by itself: the parts of a message merge
            raw += kind(one={name: keys.index(name) + 0.5}).SerializeToString()
            one = kind()
            one.many[name].q = keys.index(name)
            raw += one.SerializeToString()
        names = tuple(str(name) for name in order)
        assert decode.names(raw, "one.value") == names
        assert decode.vector(raw, "one.value").tolist() == [keys.index(n) + 0.5 for n in order]
        assert decode.names(raw, "many.value.q") == names
        # A thing of several numbers has a name for each of them.
        assert decode.names(raw, "many.value") == tuple(
            f"{name}.{part}" for name in names for part in ("q", "dq")
        )
        assert decode.vector(raw, "many.value").tolist() == [
            number for name in order for number in (keys.index(name), 0)
        ]


def test_what_is_not_set_is_no_zero() -> None:
    """As proto3 can tell it: `optional`, one of several, and the wrappers of Google."""

    def build(file: Any) -> None:
        file.syntax = "proto3"
        outer = file.message_type.add(name="M")
        outer.oneof_decl.add(name="target")
        add_field(outer, "width", 1, oneof_index=0)
        add_field(outer, "force", 2, oneof_index=0)
        outer.oneof_decl.add(name="_maybe")
        add_field(outer, "maybe", 3, oneof_index=1, proto3_optional=True)
        add_field(outer, "plain", 4)
        wrapped = {"type_name": ".google.protobuf.DoubleValue"}
        add_field(outer, "wrapped", 5, "MESSAGE", **wrapped)
        add_field(outer, "list", 6, "MESSAGE", label=Kind.LABEL_REPEATED, **wrapped)

    kind, decode = protobuf_type(build)

    def numbers(message: Any, *paths: str) -> list[float]:
        return [decode.vector(message.SerializeToString(), path)[0] for path in paths]

    paths = ("width", "force", "maybe", "plain", "wrapped")
    nan = math.nan
    np.testing.assert_array_equal(numbers(kind(), *paths), [nan, nan, nan, 0, nan])
    some = kind(width=0.0, maybe=0.0)
    some.wrapped.value = 0.0
    np.testing.assert_array_equal(numbers(some, *paths), [0, nan, 0, 0, 0])
    some.force = 2.0
    np.testing.assert_array_equal(numbers(some, *paths), [nan, 2, 0, 0, 0])
    some.list.add(value=1.5)
    some.list.add()
    assert decode.vector(some.SerializeToString(), "list").tolist() == [1.5, 0]


def test_groups_are_the_messages_that_they_hold() -> None:
    """Of proto2, and of editions with `message_encoding = DELIMITED`."""

    def build(file: Any) -> None:
        outer = file.message_type.add(name="M")
        group = outer.nested_type.add(name="Pose")
        add_field(group, "x", 1)
        add_field(group, "names", 2, "STRING", label=Kind.LABEL_REPEATED)
        add_field(group, "pose", 3, "GROUP", type_name=".a.M.Pose")
        add_field(outer, "pose", 1, "GROUP", type_name=".a.M.Pose")
        many = {"type_name": ".a.M.Pose", "label": Kind.LABEL_REPEATED}
        add_field(outer, "many", 2, "GROUP", **many)
        add_field(outer, "last", 3, default_value="7.5")

    kind, decode = protobuf_type(build)
    message = kind(last=3.0)
    message.pose.x = 1.0
    message.pose.names.append("a" * 200)
    message.pose.pose.x = 2.0
    message.many.add(x=4.0)
    message.many.add(x=5.0)
    raw = message.SerializeToString()
    assert decode.vector(raw, "pose.x").tolist() == [1]
    assert decode.vector(raw, "pose.pose.x").tolist() == [2]
    assert decode.vector(raw, "many.x").tolist() == [4, 5]
    assert decode.vector(raw, "last").tolist() == [3]
    assert decode.vector(b"", "last").tolist() == [7.5]
    for hostile in (b"\x0b" * 10_000, b"\x0b\x0b\x0c", b"\x0c", raw[:-12], b"\x0b\x12\xff\xff\x03"):
        with pytest.raises(DataError):
            decode.vector(hostile, "last")


def test_json_schemas_as_generators_write_them() -> None:
    """Parts that are joined, tuples, names that are escaped: as pydantic and others have them."""
    schema = {
        "$ref": "#/$defs/Robot~1State",
        "$defs": {
            "P": {"type": "object", "properties": {"x": {"type": "number"}}},
            "Robot/State": {
                "type": "object",
                "properties": {
                    "pose": {
                        "allOf": [{"$ref": "#/$defs/P"}, {"properties": {"y": {"type": "number"}}}],
                        "description": "where it is",
                    },
                    "goal": {"type": "array", "prefixItems": [{"type": "number"}] * 3},
                    "old": {"type": "array", "items": [{"type": "number"}, {"type": "integer"}]},
                    "mixed": {"type": "array", "items": [{"type": "number"}, {"type": "string"}]},
                },
            },
        },
    }
    found = Decoder(Topic("/t", "T", 1, None, json.dumps(schema), "json"), "x.mcap", Limits())
    data = json.dumps({"pose": {"x": 1, "y": 2}, "goal": [3, 4, 5], "old": [6, 7]}).encode()
    assert list(found.fields()) == ["pose.x", "pose.y", "goal", "old"]
    for path, wanted in (("pose", [1, 2]), ("goal", [3, 4, 5]), ("old", [6, 7])):
        assert found.vector(data, path).tolist() == wanted
    for odd in ({"allOf": [{"$ref": "#"}]}, {"allOf": [3, None]}, {"$ref": 5}):
        topic = Topic("/t", "T", 1, None, json.dumps(odd), "json")
        assert Decoder(topic, "x.mcap", Limits()).fields() == {}


def test_json_fields_that_no_schema_names(tmp_path: Path) -> None:
    """Of a map, and without a schema: the first messages tell, also if one of them is empty."""
    mapped = {
        "type": "object",
        "properties": {
            "joints": {"type": "object", "additionalProperties": {"type": "number"}},
            "v": {"type": "number"},
        },
    }
    with (tmp_path / "a.mcap").open("wb") as file:
        writer = Writer(file)
        writer.start()
        one = writer.register_schema("S", "jsonschema", json.dumps(mapped).encode())
        topics = {"/map": writer.register_channel("/map", "json", one)}
        topics["/none"] = writer.register_channel("/none", "json", 0)
        for k in range(20):
            said: dict[str, Any] = {"joints": {"b": k, "a": 1}, "v": 2}
            writer.add_message(topics["/map"], k, json.dumps(said).encode(), k)
            said = {"x": None, "q": []} if k == 1 else {"x": k, "q": [k, 1]} if k else {}
            writer.add_message(topics["/none"], k, json.dumps(said).encode(), k)
        writer.finish()
    with open_bag(tmp_path / "a.mcap") as bag:
        assert list(bag.decoder("/map").fields()) == ["joints.b", "joints.a", "v"]
        assert bag.decoder("/none").fields() == {"x": "float64", "q": "float64[]"}
