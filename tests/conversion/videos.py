"""Recordings of cameras that send a video: encoded by av, written by mcap and google.protobuf.

Every picture carries its number in 16 squares, and a topic of JSON beside it the same number.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from mcap.reader import make_reader
from mcap.writer import Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from penstock.media.video import _no_realtime

WIDTH, HEIGHT = 64, 64
PERIOD_NS = 33_333_333
START_NS = 1_700_000_000 * 10**9
FOXGLOVE = Path(__file__).parents[1] / "bags" / "foxglove.mcap"
VIDEO_MSG = "builtin_interfaces/Time timestamp\nstring frame_id\nuint8[] data\nstring format\n"
ENCODERS: dict[str, tuple[str, dict[str, str]]] = {
    "h264": ("libx264", {"preset": "ultrafast", "tune": "zerolatency"}),
    "h264 with B-frames": ("libx264", {"preset": "veryfast", "bf": "3", "b-pyramid": "normal"}),
    "h265": ("libx265", {"preset": "ultrafast", "x265-params": "log-level=none:bframes=0"}),
    "h265 with B-frames": (
        "libx265",
        {"preset": "ultrafast", "x265-params": "log-level=none:bframes=3"},
    ),
    "av1": ("libsvtav1", {"preset": "12", "crf": "15", "svtav1-params": "lp=1:pred-struct=1"}),
    "vp9": ("libvpx-vp9", {"deadline": "realtime", "cpu-used": "8", "lag-in-frames": "0"}),
}


class Packet(NamedTuple):
    """One packet: its bytes, the number of its picture, and whether it stands alone."""

    data: bytes
    shows: int
    is_key: bool


def picture(number: int) -> np.ndarray[Any, Any]:
    bits = (number >> np.arange(16) & 1).reshape(4, 4) * 255
    square = np.ones((HEIGHT // 4, WIDTH // 4), np.uint8)
    return np.repeat(np.kron(bits, square).astype(np.uint8)[..., None], 3, axis=2)


def number_in(rgb: np.ndarray[Any, Any]) -> int:
    centres = rgb[HEIGHT // 8 :: HEIGHT // 4, WIDTH // 8 :: WIDTH // 4, 1].ravel() > 127
    return int((centres << np.arange(16)).sum())


@cache
def encode(kind: str, count: int, key_every: int = 30) -> list[Packet]:
    """Encode pictures 0 to `count`; the packets come in the order in which they are decoded."""
    if kind != "av1":
        return encode_here(kind, count, key_every)
    # Without a look ahead SVT-AV1 now and then waits for itself for ever.
    command = [sys.executable, __file__, kind, str(count), str(key_every)]
    for _ in range(3):
        with suppress(subprocess.TimeoutExpired):
            said = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
            return [Packet(base64.b64decode(data), n, key) for data, n, key in json.loads(said)]
    raise AssertionError("SVT-AV1 came to no end, three times")


def encode_here(kind: str, count: int, key_every: int) -> list[Packet]:
    """Encode in this process."""
    name, options = ENCODERS[kind]
    encoder = av.CodecContext.create(name, "w")
    encoder.width, encoder.height, encoder.pix_fmt = WIDTH, HEIGHT, "yuv420p"
    encoder.time_base, encoder.framerate = Fraction(1, 30), Fraction(30)
    encoder.gop_size, encoder.options, encoder.thread_count = key_every, dict(options), 1
    packets: list[Packet] = []
    for number in range(count + 1):
        frame = None
        if number < count:
            frame = av.VideoFrame.from_ndarray(picture(number % 2**16), "rgb24")
            frame.pts = number
        with nullcontext() if number else _no_realtime():  # SVT-AV1 takes it when it is opened
            packets += [Packet(bytes(p), p.pts, p.is_keyframe) for p in encoder.encode(frame)]
    return packets


def decoded(kind: str, packets: list[Packet]) -> list[int]:
    """Return the numbers that av sees in the pictures: an encoder may have spoilt a square."""
    name = {"h264": "h264", "h265": "hevc", "av1": "libdav1d", "vp9": "vp9"}[kind.split()[0]]
    decoder = av.CodecContext.create(name, "r")
    frames = [frame for packet in packets for frame in decoder.decode(av.Packet(packet.data))]
    frames += decoder.decode(None)
    return [number_in(frame.to_ndarray(format="rgb24")) for frame in frames]


def record(
    path: Path,
    codec: str,
    packets: Iterable[tuple[int, Packet]],
    encoding: str = "protobuf",
) -> Path:
    """Write packets, and a number for every place in time; headers say when a picture is shown.

    Args:
        path: The MCAP file.
        codec: As the messages name it.
        packets: In file order; the places, which count periods, are taken in rising order.
        encoding: Of the packets: "protobuf", "json", "cdr" or "cdr of sensor_msgs".
    """
    with open(path, "wb") as file:
        writer = Writer(file, chunk_size=1 << 16)
        writer.start()
        make, schema = _writer_of(writer, encoding)
        video = writer.register_channel("/cam", encoding.split()[0], schema)
        kind = json.dumps({"type": "object", "properties": {"n": {"type": "number"}}})
        state_schema = writer.register_schema("State", "jsonschema", kind.encode())
        state = writer.register_channel("/state", "json", state_schema)
        items = list(packets)
        for place, (_, packet) in zip(sorted(place for place, _ in items), items, strict=True):
            t_ns = START_NS + place * PERIOD_NS
            data = make(START_NS + packet.shows * PERIOD_NS, codec, packet.data)
            writer.add_message(video, t_ns, data, t_ns)
            writer.add_message(state, t_ns, json.dumps({"n": place}).encode(), t_ns)
        writer.finish()
    return path


def _writer_of(writer: Writer, encoding: str) -> tuple[Any, int]:
    if encoding == "protobuf":
        with FOXGLOVE.open("rb") as file:
            summary = make_reader(file).get_summary()
        assert summary is not None
        found = next(s for s in summary.schemas.values() if s.name == "foxglove.CompressedVideo")
        pool = descriptor_pool.DescriptorPool()
        for proto in descriptor_pb2.FileDescriptorSet.FromString(found.data).file:
            pool.Add(proto)
        kind = message_factory.GetMessageClass(pool.FindMessageTypeByName(found.name))

        def protobuf(stamp_ns: int, codec: str, data: bytes) -> bytes:
            message = kind(frame_id="cam", data=data, format=codec)
            message.timestamp.seconds, message.timestamp.nanos = divmod(stamp_ns, 10**9)
            return bytes(message.SerializeToString())

        return protobuf, writer.register_schema(found.name, "protobuf", found.data)
    if encoding == "json":
        fields = {"timestamp": {"type": "object", "properties": {"sec": {"type": "integer"},
                                                                 "nsec": {"type": "integer"}}},
                  "frame_id": {"type": "string"}, "format": {"type": "string"},
                  "data": {"type": "string", "contentEncoding": "base64"}}  # fmt: skip
        schema = json.dumps({"type": "object", "properties": fields}).encode()

        def as_json(stamp_ns: int, codec: str, data: bytes) -> bytes:
            sec, nsec = divmod(stamp_ns, 10**9)
            values = {"timestamp": {"sec": sec, "nsec": nsec}, "frame_id": "cam", "format": codec}
            return json.dumps(values | {"data": base64.b64encode(data).decode()}).encode()

        return as_json, writer.register_schema("foxglove.CompressedVideo", "jsonschema", schema)
    isaac = encoding == "cdr of sensor_msgs"  # as Isaac ROS sends H.264
    name = "sensor_msgs/msg/CompressedImage" if isaac else "foxglove_msgs/msg/CompressedVideo"
    store = get_typestore(Stores.ROS2_HUMBLE)
    store.register(get_types_from_msg(VIDEO_MSG, "foxglove_msgs/msg/CompressedVideo"))
    types = store.types
    definition, _ = store.generate_msgdef(name, ros_version=2)

    def cdr(stamp_ns: int, codec: str, data: bytes) -> bytes:
        stamp = types["builtin_interfaces/msg/Time"](*divmod(stamp_ns, 10**9))
        array = np.frombuffer(data, np.uint8)
        if isaac:
            message = types[name](types["std_msgs/msg/Header"](stamp, "cam"), codec, array)
        else:
            message = types[name](stamp, "cam", array, codec)
        return bytes(store.serialize_cdr(message, name))

    return cdr, writer.register_schema(name, "ros2msg", definition.encode())


if __name__ == "__main__":
    made = encode_here(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    told = [(base64.b64encode(data).decode(), shows, key) for data, shows, key in made]
    sys.stdout.write(json.dumps(told))
