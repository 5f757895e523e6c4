"""Decoding by the bag's own definitions, against rosbags and against what was written."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from penstock.bags import ImageMessage, Limits, Topic, open_bag
from penstock.bags.messages import Decoder
from penstock.errors import DataError, LimitExceeded
from penstock.samples import (
    SampleFacts,
    expected_action,
    expected_arm_traj,
    expected_eef_command,
    expected_eef_state,
    expected_pose_command,
    expected_state,
    read_number,
)

from .conftest import Make

Sample = Callable[[str], SampleFacts]
EACH = ["plain.bag", "bare.db3", "zstd.mcap"]
SEP = "=" * 80
LIMITS = Limits()


def decoder(definition: str, kind: str = "a_msgs/msg/A", encoding: str = "ros1") -> Decoder:
    return Decoder(Topic("/t", kind, 1, None, definition, encoding), "x.bag", LIMITS)


@pytest.mark.parametrize("name", EACH)
def test_vectors_are_the_motion(sample: Sample, name: str) -> None:
    facts = sample(name)
    expected = {
        ("/sensors_data_raw", "joint_data.joint_q"): expected_state,
        ("/joint_cmd", "joint_q"): expected_action,
        ("/kuavo_arm_traj", "position"): expected_arm_traj,
        ("/leju_claw_state", "data.position"): expected_eef_state,
        ("/leju_claw_command", "data.position"): expected_eef_command,
    }
    with open_bag(facts.path) as bag:
        for (topic, path), function in expected.items():
            decode = bag.decoder(topic)
            for message in bag.read([topic]):
                t_s = (message.t_ns - facts.start_ns) / 1e9
                found = decode.vector(message.data, path)
                assert found.dtype == np.float64 and found.ndim == 1
                np.testing.assert_allclose(found, function(t_s), atol=1e-6)
        decode = bag.decoder("/cmd_pose_world_synced")
        for message in bag.read(["/cmd_pose_world_synced"]):
            x, y, yaw = expected_pose_command((message.t_ns - facts.start_ns) / 1e9)
            found = decode.vector(message.data, "twist.linear")
            np.testing.assert_allclose(found, [x, y, 0], atol=1e-6)
            assert decode.vector(message.data, "twist.angular.z")[0] == pytest.approx(yaw, abs=1e-6)
            np.testing.assert_allclose(
                decode.vector(message.data, "twist"), [x, y, 0, 0, 0, yaw], atol=1e-6
            )


def by_rosbags(topic: Topic, data: bytes | memoryview) -> Any:
    """The whole message, as rosbags decodes it."""
    store = get_typestore(Stores.EMPTY)
    store.register(get_types_from_msg(str(topic.definition), topic.type))
    if topic.encoding == "ros1":
        return store.deserialize_ros1(bytes(data), topic.type)
    return store.deserialize_cdr(bytes(data), topic.type)


@pytest.mark.parametrize("name", EACH)
def test_every_number_agrees_with_the_whole_message(sample: Sample, name: str) -> None:
    facts = sample(name)
    with open_bag(facts.path) as bag:
        for topic in bag.topics:
            decode = bag.decoder(topic)
            message = next(iter(bag.read([topic])))
            whole = by_rosbags(bag.topics[topic], message.data)
            for path, text in decode.fields().items():
                value: object = whole
                for part in path.split("."):
                    value = getattr(value, part)
                if text == "time":
                    value = value.sec + value.nanosec * 1e-9  # type: ignore[attr-defined]
                found = decode.vector(message.data, path)
                np.testing.assert_array_equal(found, np.atleast_1d(np.asarray(value, np.float64)))
            assert decode.stamp_ns(message.data) == message.t_ns


@pytest.mark.parametrize("name", EACH)
def test_pictures(sample: Sample, name: str) -> None:
    import av

    facts = sample(name)
    with open_bag(facts.path) as bag:
        for topic in facts.cameras:
            decode = bag.decoder(topic)
            codec = av.CodecContext.create("mjpeg", "r")
            for message in bag.read([topic]):
                image = decode.image(message.data)
                assert (image.encoding, image.width, image.height) == ("jpeg", 0, 0)
                assert isinstance(image.data, memoryview)
                (frame,) = codec.decode(av.Packet(bytes(image.data)))
                assert read_number(frame.to_ndarray(format="gray")) == message.ordinal
        for topic in facts.depths:
            decode = bag.decoder(topic)
            codec = av.CodecContext.create("png", "r")
            for message in bag.read([topic]):
                image = decode.image(message.data)
                assert image.encoding == "compressedDepth"
                assert image.data[:4] == b"\x89PNG"
                packet = av.Packet(bytes(image.data))
                packet.is_keyframe = True  # otherwise FFmpeg adds the picture before
                (frame,) = codec.decode(packet)
                pixels = frame.to_ndarray()
                assert pixels.dtype == np.uint16
                assert read_number(pixels, threshold=750) == message.ordinal
        with pytest.raises(DataError, match="no picture"):
            bag.decoder("/joint_cmd").image(b"")


@pytest.mark.parametrize(("kind", "name"), [("bag", "r.bag"), ("mcap", "r.mcap")])
def test_raw_pictures(make: Make, kind: str, name: str) -> None:
    facts = make(name, kind=kind, raw_images=True, seconds=0.3)
    topic = facts.cameras[0]
    with open_bag(facts.path) as bag:
        decode = bag.decoder(topic)
        for message in bag.read([topic]):
            image = decode.image(message.data)
            assert (image.encoding, image.width, image.height) == ("rgb8", 256, 192)
            assert image.step == 256 * 3 and not image.is_big_endian
            pixels = np.frombuffer(image.data, np.uint8).reshape(192, 256, 3)
            assert read_number(pixels) == message.ordinal
            with pytest.raises(DataError, match=topic):
                decode.image(message.data[:-1])


def test_formats_of_compressed_pictures() -> None:
    store = get_typestore(Stores.ROS1_NOETIC)
    decode = decoder("", "sensor_msgs/msg/CompressedImage")
    header = store.types["std_msgs/msg/Header"](
        0, store.types["builtin_interfaces/msg/Time"](1, 2), "camera"
    )
    png = b"\x89PNG\r\n\x1a\n123"

    def picture(text: str, data: bytes) -> ImageMessage:
        kind = "sensor_msgs/msg/CompressedImage"
        message = store.types[kind](header, text, np.frombuffer(data, np.uint8))
        return decode.image(store.serialize_ros1(message, kind))

    def image(text: str, data: bytes) -> tuple[str, bytes]:
        found = picture(text, data)
        return found.encoding, bytes(found.data)

    assert image("png", b"\xff\xd8\xff123") == ("jpeg", b"\xff\xd8\xff123")  # the magic decides
    assert image("jpeg", png) == ("png", png)
    assert image("16UC1; png compressed ", png) == ("compressedDepth", png)
    assert image("16UC1; compressedDepth", bytes(12) + png) == ("compressedDepth", png)
    assert image("16UC1; compressedDepth rvl", bytes(30))[0] == "rvl"
    rvl = picture("16UC1; compressedDepth rvl", bytes(12) + struct.pack("<2I", 4, 3) + b"123")
    assert (rvl.width, rvl.height, bytes(rvl.data)) == (4, 3, b"123")
    metres = picture("32FC1; compressedDepth", struct.pack("<i2f", 0, 100.5, 1.5) + png)
    assert (metres.encoding, metres.depth_quantization) == ("compressedDepth", (100.5, 1.5))
    assert picture("16UC1; compressedDepth", bytes(12) + png).depth_quantization is None
    assert image("webp", b"RIFF\0\0\0\0WEBPVP8 ")[0] == "webp"
    assert image("bgr8; jpeg compressed bgr8", b"")[0] == "jpeg"
    assert image("rgb8; png compressed", b"?")[0] == "png"
    assert image("h264", b"?")[0] == "h264"
    assert image("", b"?")[0] == "unknown"


def test_old_firmware_is_read_by_its_own_definition(make: Make) -> None:
    for name, kind in [("o.bag", "bag"), ("o.mcap", "mcap")]:
        facts = make(name, kind=kind, trouble=["old_firmware"], cameras=0, seconds=0.1)
        with open_bag(facts.path) as bag:
            decode = bag.decoder("/sensors_data_raw")
            paths = decode.fields()
            assert "joint_data.joint_current" in paths
            assert "joint_data.joint_torque" not in paths
            message = next(iter(bag.read(["/sensors_data_raw"])))
            found = decode.vector(message.data, "joint_data.joint_current")
            np.testing.assert_array_equal(found, np.full(28, 0.5))


def test_errors_name_the_topic_the_path_and_what_there_is(sample: Sample) -> None:
    with open_bag(sample("plain.bag").path) as bag:
        decode = bag.decoder("/sensors_data_raw")
        data = next(iter(bag.read(["/sensors_data_raw"]))).data
        with pytest.raises(
            DataError, match=r"/sensors_data_raw.*did you mean 'joint_data.joint_q'"
        ):
            decode.vector(data, "joint_data.joint_qq")
        with pytest.raises(DataError, match=r"its numbers are header\.seq"):
            decode.vector(data, "zzz")
        with pytest.raises(DataError, match="not numbers"):
            decode.vector(data, "header.frame_id")
        with pytest.raises(DataError, match="only 28 items"):
            decode.vector(data, "joint_data.joint_q[28]")
        assert decode.vector(data, "joint_data.joint_q[3]").shape == (1,)
        with pytest.raises(DataError, match=r"cut"):
            decode.vector(data[:100], "joint_data.joint_q")
        for path in ("", ".", "a[", "joint_data..joint_q", "header.stamp.sec.x", "joint_q[-1]"):
            with pytest.raises(DataError):
                decode.vector(data, path)


def test_types_without_a_header() -> None:
    decode = decoder("float64 x\nuint8[3] y\n")
    assert decode.stamp_ns(bytes(11)) is None
    assert decode.fields() == {"x": "float64", "y": "uint8[3]"}
    np.testing.assert_array_equal(decode.vector(struct.pack("<d3B", 2.5, 7, 8, 9), "y"), [7, 8, 9])


def test_a_header_that_is_not_first() -> None:
    text = "string name\nHeader header\n"
    decode = decoder(text)
    data = struct.pack("<I3s", 3, b"abc") + struct.pack("<IIII", 9, 5, 6, 0)
    assert decode.stamp_ns(data) == 5 * 10**9 + 6


def test_big_endian_cdr() -> None:
    text = "std_msgs/Header header\nuint8 a\nfloat64[] x\n"
    store = get_typestore(Stores.ROS2_HUMBLE)
    store.register(get_types_from_msg(text, "a_msgs/msg/A"))
    header = store.types["std_msgs/msg/Header"](
        store.types["builtin_interfaces/msg/Time"](5, 6), "ab"
    )
    message = store.types["a_msgs/msg/A"](header, 3, np.array([1.0, 2.0]))
    data = store.serialize_cdr(message, "a_msgs/msg/A", little_endian=False)
    decode = decoder(text, encoding="cdr")
    assert decode.stamp_ns(data) == 5 * 10**9 + 6
    np.testing.assert_array_equal(decode.vector(data, "x"), [1, 2])
    assert decode.vector(data, "a")[0] == 3


def test_cdr_of_version_2_aligns_to_four_bytes() -> None:
    decode = decoder("uint8 a\nfloat64 x\n", encoding="cdr")
    for second, order in ((7, "<"), (6, ">")):
        data = bytes([0, second, 0, 0]) + struct.pack(f"{order}B3xd", 3, 2.5)
        assert decode.vector(data, "x")[0] == 2.5
    for second in (2, 3, 8, 9, 10, 11):  # lists of parameters, and delimited ones
        with pytest.raises(DataError, match="not plain CDR"):
            decode.vector(bytes([0, second, 0, 0]) + bytes(20), "x")


def test_things_with_names_in_a_ros_message() -> None:
    text = f"J[] joints\n{SEP}\nMSG: a_msgs/J\nstring name\nfloat64 position\n"
    decode = decoder(text)
    data = struct.pack("<II1sdI1sd", 2, 1, b"a", 1.5, 1, b"b", 2.5)
    assert decode.fields() == {"position": "float64[]"}
    np.testing.assert_array_equal(decode.vector(data, "position"), [1.5, 2.5])
    np.testing.assert_array_equal(decode.vector(data, "joints[1].position"), [2.5])
    assert decode.names(data, "position") == ("a", "b")


IDL = """module a_msgs {
  module msg {
    struct A {
      double x;
      sequence<int32> y;
      float z[3];
    };
  };
};
"""


def test_idl() -> None:
    decode = decoder(IDL, encoding="cdr")
    assert decode.fields() == {"x": "float64", "y": "int32[]", "z": "float32[3]"}
    data = b"\0\1\0\0" + struct.pack("<dI2i3f", 1.5, 2, 3, 4, 5, 6, 7)
    np.testing.assert_array_equal(decode.vector(data, "y"), [3, 4])
    np.testing.assert_array_equal(decode.vector(data, "z"), [5, 6, 7])
    np.testing.assert_array_equal(decode.vector(data, "x"), [1.5])


def test_idl_as_rosbag2_writes_it() -> None:
    """A line with its name before each type, #include, and what an @annotation says."""
    other = "module b_msgs { module msg { struct B { long n; sequence<double, 8> w; }; }; };\n"
    arm = IDL.replace("double x;", '@unit (value="m")\n      double x;\n      b_msgs::msg::B b;')
    parts = (("a_msgs/msg/A", f'#include "b_msgs/msg/B.idl"\n\n{arm}'), ("b_msgs/msg/B", other))
    decode = decoder("".join(f"{SEP}\nIDL: {name}\n{text}" for name, text in parts), encoding="cdr")
    assert list(decode.fields()) == ["x", "b.n", "b.w", "y", "z"]
    data = b"\0\1\0\0" + struct.pack("<diI2dI1i3f", 1.5, 7, 2, 8, 9, 1, 3, 4, 5, 6)
    np.testing.assert_array_equal(decode.vector(data, "b"), [7, 8, 9])
    np.testing.assert_array_equal(decode.vector(data, "z"), [4, 5, 6])


def test_a_field_that_cannot_be_read_does_not_hide_the_others() -> None:
    decode = decoder("float64 x\nwstring w\nfloat64 y\n", encoding="cdr")
    data = b"\0\1\0\0" + struct.pack("<dI", 1.5, 0)
    with pytest.raises(DataError, match="wstring"):
        decode.vector(data, "y")
    np.testing.assert_array_equal(decode.vector(data, "x"), [1.5])


HOSTILE = {
    "recursion": "A a\n",
    "mutual": f"B b\n{SEP}\nMSG: a_msgs/B\nA a\n",
    "bad field": "float64 x;import os\n",
    "field with dots": "float64 __class__.x\n",
    "dunder": "float64 __init__\n",
    "twice": "float64 x\nfloat64 x\n",
    "bad type": "os.system('x') y\n",
    "quotes": "float64 x'\"\n",
    "newline tricks": "float64 x\\\nimport os\n",
    "unknown type": "b_msgs/Nothing x\n",
    "part without a name": f"float64 x\n{SEP}\nfloat64 y\n",
    "bad name of a part": f"float64 x\n{SEP}\nMSG: a/../../b\nfloat64 y\n",
    "large": "#" * (10**6 + 1),
    "huge array": "float64[99999999999] x\n",
    "array of messages": f"B[100000] x\n{SEP}\nMSG: a_msgs/B\nfloat64 y\n",
    "deep": "T0 t\n" + "".join(f"{SEP}\nMSG: a_msgs/T{i}\nT{i + 1} t\n" for i in range(40)),
    "explosion": "T0 t\n"
    + "".join(f"{SEP}\nMSG: a_msgs/T{i}\nT{i + 1} t\nT{i + 1} u\n" for i in range(25))
    + f"{SEP}\nMSG: a_msgs/T25\nfloat64 x\n",
    "long name": "float64 " + "x" * 300 + "\n",
    "nested idl": "module a {" * 5000,
    "idl names": IDL.replace("double x", "double __import__"),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("encoding", ["ros1", "cdr"])
def test_hostile_definitions_are_refused(what: str, encoding: str) -> None:
    with pytest.raises(DataError):
        decoder(HOSTILE[what], encoding=encoding)


@pytest.mark.parametrize("kind", ["", "A", "a/b/c/d/e", "a msgs/msg/A", "a/msg/A\nB", "../../x"])
def test_hostile_type_names_are_refused(kind: str) -> None:
    with pytest.raises(DataError):
        decoder("float64 x\n", kind)


@pytest.mark.parametrize(("encoding", "value"), [("ros1", -56), ("cdr", 200)])
def test_a_byte_has_a_sign_in_ros_1_alone(encoding: str, value: int) -> None:
    lead = b"" if encoding == "ros1" else b"\0\1\0\0"
    decode = decoder("byte one\nbyte[2] two\nchar three\n", encoding=encoding)
    for path, found in (("one", [value]), ("two", [value] * 2), ("three", [200])):
        np.testing.assert_array_equal(decode.vector(lead + bytes([200] * 4), path), found)


def test_constants_and_defaults_are_no_fields() -> None:
    text = (
        'string EVIL="\'\'\'; import os #"\nint32 A=5\nint32 x 3\nstring s "a=b # c"\n'
        "float64[<=4] y [1.0, 2.0]  # comment\nstring<=5 z\n"
    )
    decode = decoder(text)
    assert set(decode.fields()) == {"x", "y"}
    data = struct.pack("<iI1sI2dI", 7, 1, b"q", 2, 1.0, 2.0, 0)
    np.testing.assert_array_equal(decode.vector(data, "x"), [7])
    np.testing.assert_array_equal(decode.vector(data, "y"), [1, 2])


def test_other_encodings_are_refused() -> None:
    with pytest.raises(DataError, match=r"/t: it is encoded as 'flatbuffer', which penstock does"):
        decoder("", encoding="flatbuffer")


def test_a_topic_of_two_types_is_refused() -> None:
    topic = Topic("/t", "std_msgs/msg/String", 1, None, "", "ros1", mixed=True)
    with pytest.raises(DataError, match="several types"):
        Decoder(topic, "x.bag", LIMITS)


def test_limits_of_the_caller_count() -> None:
    topic = Topic("/t", "a_msgs/msg/A", 1, None, "float64 x\n" * 3, "ros1")
    with pytest.raises(LimitExceeded):
        Decoder(topic, "x.bag", Limits(definition_bytes=10))


NESTED = (
    "Header header\nstring[] names\nB[] parts\nB[2] pair\nbool flag\nint16[] shorts\n"
    "float64[] last\nE nothing\nE[] nothings\nuint8 tail\n"
    f"{SEP}\nMSG: a_msgs/B\nuint8 a\nfloat64[3] b\nstring c\nfloat32[] d\n{SEP}\nMSG: a_msgs/E\n"
)


@cache
def nested(ros1: bool) -> tuple[Any, Decoder]:
    store = get_typestore(Stores.ROS1_NOETIC if ros1 else Stores.ROS2_HUMBLE)
    store.register(get_types_from_msg(NESTED, "a_msgs/msg/A"))
    return store, decoder(NESTED, encoding="ros1" if ros1 else "cdr")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ros1=st.booleans())
def test_any_message_agrees_with_rosbags(data: st.DataObject, ros1: bool) -> None:
    store, decode = nested(ros1)
    kinds = store.types
    text = st.text("ab", max_size=5)

    def part() -> object:
        return kinds["a_msgs/msg/B"](
            data.draw(st.integers(0, 255)),
            np.array(data.draw(st.lists(st.floats(-9, 9), min_size=3, max_size=3))),
            data.draw(text),
            np.array(data.draw(st.lists(st.integers(0, 9), max_size=3)), np.float32),
        )

    stamp = kinds["builtin_interfaces/msg/Time"](data.draw(st.integers(0, 2**31 - 1)), 7)
    header = kinds["std_msgs/msg/Header"](*([5] if ros1 else []), stamp, data.draw(text))
    message = kinds["a_msgs/msg/A"](
        header,
        data.draw(st.lists(text, max_size=3)),
        [part() for _ in range(data.draw(st.integers(0, 2)))],
        [part(), part()],
        data.draw(st.booleans()),
        np.array(data.draw(st.lists(st.integers(-9, 9), max_size=3)), np.int16),
        np.array(data.draw(st.lists(st.floats(-9, 9), max_size=3)), np.float64),
        kinds["a_msgs/msg/E"](),
        [kinds["a_msgs/msg/E"]() for _ in range(data.draw(st.integers(0, 1)))],
        data.draw(st.integers(0, 255)),
    )
    serialize = store.serialize_ros1 if ros1 else store.serialize_cdr
    raw = serialize(message, "a_msgs/msg/A")
    np.testing.assert_array_equal(decode.vector(raw, "shorts"), message.shorts)
    np.testing.assert_array_equal(decode.vector(raw, "last"), message.last)
    np.testing.assert_array_equal(decode.vector(raw, "tail"), [message.tail])
    np.testing.assert_array_equal(decode.vector(raw, "pair[1].b"), message.pair[1].b)
    for i, one in enumerate(message.parts):
        np.testing.assert_array_equal(decode.vector(raw, f"parts[{i}].d"), one.d)
    assert decode.stamp_ns(raw) == stamp.sec * 10**9 + stamp.nanosec


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_give_a_message_or_a_data_error(raw: bytes, ros1: bool) -> None:
    _, decode = nested(ros1)
    for call in (
        lambda: decode.stamp_ns(raw),
        *(lambda path=path: decode.vector(raw, path) for path in decode.fields()),
    ):
        with suppress(DataError):
            call()
    for kind in ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"):
        with suppress(DataError):
            decoder("", kind, "ros1" if ros1 else "cdr").image(raw)
