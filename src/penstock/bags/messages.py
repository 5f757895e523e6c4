"""Messages as numbers: vectors by path, stamps, pictures; decoded from the bag's definitions."""

from __future__ import annotations

import difflib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from struct import unpack_from
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.definitions import load_types
from penstock.bags.limits import Limits
from penstock.bags.wire import Layout, Reader
from penstock.errors import DataError

if TYPE_CHECKING:
    from penstock.bags.reader import Topic

HEADER: Final = "std_msgs/msg/Header"
IMAGE: Final = "sensor_msgs/msg/Image"
COMPRESSED_IMAGE: Final = "sensor_msgs/msg/CompressedImage"
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG: Final = b"\xff\xd8\xff"
_DEPTH_HEADER_BYTES: Final = 12
_SHOWN_FIELDS: Final = 12

Data = bytes | memoryview


@dataclass(frozen=True, slots=True)
class ImageMessage:
    """A picture as a message holds it.

    Attributes:
        encoding: "jpeg", "png", "compressedDepth" (the data starts at the PNG magic), or the
            encoding of a raw picture: "rgb8", "bgr8", "mono8", "mono16", "16UC1", "32FC1", ...
            A compressed picture of another kind has the first word of its format.
        width: Columns; 0 if compressed.
        height: Rows; 0 if compressed.
        step: Bytes from row to row; 0 if compressed.
        is_big_endian: Of raw pixels wider than a byte.
        data: The pixels, or the compressed file; not copied.
    """

    encoding: str
    width: int
    height: int
    step: int
    is_big_endian: bool
    data: memoryview


class Decoder:
    """Decodes the messages of one topic.

    Args:
        topic: The topic, with the definition of its type.
        where: The bag, for the errors.
        limits: Of the definition.

    Raises:
        DataError: The type is not defined, hostile, or not of a known encoding.
    """

    def __init__(self, topic: Topic, where: str, limits: Limits) -> None:
        self.topic = topic
        self._where = f"{where}: {topic.name}"
        if topic.encoding not in ("ros1", "cdr"):
            raise DataError(
                f"{self._where} is encoded as {topic.encoding[:40]!r}; only ros1 and cdr messages "
                "can be decoded"
            )
        if topic.mixed:
            raise DataError(
                f"{self._where} was recorded with several types or definitions, so that its "
                "messages cannot be told apart"
            )
        try:
            self._types = load_types(topic.type, str(topic.definition), topic.encoding, limits)
        except DataError as error:
            raise type(error)(f"{self._where}: {error}") from error
        self._layout = Layout(self._types, topic.type, topic.encoding)
        self._vectors: dict[str, Callable[[Data], NDArray[np.float64]]] = {}
        self._names: dict[str, Callable[[Data], tuple[str, ...]] | None] = {}
        self.stamp_bytes: int | None = None  # of a message, the first ones that hold its stamp
        self._stamp = self._make_stamp_reader()
        self._whole: Callable[[Data], object] | None = None

    def message(self, data: Data) -> object:
        """Return the whole message, decoded: an object with the fields of its type."""
        if self._whole is None:
            self._whole = self._make_whole()
        try:
            self._layout.check(data)
            return self._whole(data)
        except Exception as error:  # generated code fails in many ways on damaged messages
            reason = " ".join(str(error).split())[:120]
            raise DataError(f"{self._where}: a message is damaged ({reason})") from error

    def vector(self, data: Data, path: str) -> NDArray[np.float64]:
        """Return the numbers at a path.

        Args:
            data: The message.
            path: "position", "joint_data.joint_q", "data[3]", or a sub-message of numbers such as
                "pose.position", which gives its numbers in order. A time is a number of seconds.

        Raises:
            DataError: There are no numbers at that path, or the message is damaged.
        """
        find = self._vectors.get(path)
        if find is None:
            try:
                find = self._vectors[path] = self._layout.find(path)
            except DataError as error:
                raise DataError(f"{self._where}: {error}; {self._hint(path)}") from None
        try:
            return find(data)
        except DataError as error:
            raise DataError(f"{self._where}: {path}: {error}") from None

    def names(self, data: Data, path: str) -> tuple[str, ...]:
        """Return the names of the numbers at a path, as a JointState gives them; () for none."""
        if path not in self._names:
            self._names[path] = self._layout.find_names(path)
        find = self._names[path]
        try:
            return () if find is None else find(data)
        except DataError as error:
            raise DataError(f"{self._where}: {path}: {error}") from None

    def fields(self) -> dict[str, str]:
        """Return the paths of all numbers, and the text of their types, such as "float64[]"."""
        return dict(self._layout.leaves())

    def stamp_ns(self, data: Data) -> int | None:
        """Return the stamp of the message's header; None if its type has no header."""
        return None if self._stamp is None else self._stamp(data)

    def stamp_reader(self) -> Callable[[Data], int] | None:
        """Return the function from a message to its header stamp; None if there is no header."""
        return self._stamp

    def image(self, data: Data) -> ImageMessage:
        """Return the picture of a sensor_msgs Image or CompressedImage message.

        Raises:
            DataError: The topic holds no pictures, or the message is damaged.
        """
        if self.topic.type not in (IMAGE, COMPRESSED_IMAGE):
            raise DataError(f"{self._where} holds {self.topic.type}, which is no picture")
        try:
            reader = self._layout.reader(data)
            if self.topic.type == IMAGE:
                return _raw_image(reader)
            return _compressed_image(reader)
        except (struct.error, UnicodeDecodeError, DataError) as error:
            reason = error if isinstance(error, DataError) else "the message is cut"
            raise DataError(f"{self._where}: {reason}") from None

    def _hint(self, path: str) -> str:
        names = list(self.fields())
        near = difflib.get_close_matches(path, names, n=1, cutoff=0.5)
        if near:
            return f"did you mean {near[0]!r}?"
        more = ", ..." if len(names) > _SHOWN_FIELDS else ""
        return f"its numbers are {', '.join(names[:_SHOWN_FIELDS])}{more}"

    def _make_stamp_reader(self) -> Callable[[Data], int] | None:
        fields = self._types[self.topic.type]
        header = next((f for f in fields if f.type == HEADER and f.size is None), None)
        if header is None:
            return None
        where, cdr = self._where, self._layout.cdr
        if fields[0] is header:
            # Four bytes (the number in ROS 1, the byte order in CDR) come before the stamp.
            self.stamp_bytes = 12

            def first(data: Data) -> int:
                big_endian = cdr and len(data) > 1 and not data[1] & 1
                try:
                    sec, nsec = unpack_from(">II" if big_endian else "<II", data, 4)
                except struct.error:
                    raise DataError(f"{where}: a message is too short for its header") from None
                return int(sec) * 10**9 + int(nsec)

            return first
        path = f"{header.name}.stamp"
        seconds, parts = self._layout.find(f"{path}.sec"), self._layout.find(f"{path}.nanosec")

        def later(data: Data) -> int:
            try:
                return int(seconds(data)[0]) * 10**9 + int(parts(data)[0])
            except DataError as error:
                raise DataError(f"{where}: {error}") from None

        return later

    def _make_whole(self) -> Callable[[Data], object]:
        """Hand the checked types, and nothing else of the bag, to rosbags."""
        from rosbags.interfaces import Nodetype
        from rosbags.typesys import Stores, get_typestore

        def describe(kind: str, size: int | None) -> Any:
            one: Any = (Nodetype.NAME, kind) if kind in self._types else (Nodetype.BASE, (kind, 0))
            if size is None:
                return one
            node = Nodetype.SEQUENCE if size < 0 else Nodetype.ARRAY
            return (node, (one, max(size, 0)))

        store = get_typestore(Stores.EMPTY)
        filler = [("structure_needs_at_least_one_member", (Nodetype.BASE, ("uint8", 0)))]
        made: Any = {
            name: ([], [(f.name, describe(f.type, f.size)) for f in fields] or filler)
            for name, fields in self._types.items()
        }
        try:
            store.register(made)
            store.get_msgdef(self.topic.type)
        except Exception as error:
            reason = " ".join(str(error).split())[:120]
            raise DataError(f"{self._where}: its type cannot be decoded ({reason})") from error
        kind = self.topic.type
        if self._layout.cdr:
            return lambda data: store.deserialize_cdr(data, kind)
        return lambda data: store.deserialize_ros1(data, kind)


def _skip_header(reader: Reader) -> int:
    """Return the position behind a header: number (ROS 1 only), stamp, frame."""
    _, pos = _text(reader, 8 if reader.aligned else 12)
    return pos


def _text(reader: Reader, pos: int) -> tuple[str, int]:
    length, pos = reader.count(pos)
    if length > reader.size - pos:
        raise DataError("the message is cut")
    return bytes(reader.view[pos : pos + length]).rstrip(b"\0").decode("utf-8", "replace"), (
        pos + length
    )


def _bytes(reader: Reader, pos: int) -> memoryview:
    length, pos = reader.count(pos)
    if length > reader.size - pos:
        raise DataError(f"the picture has {length} bytes, but the message only {reader.size}")
    return reader.view[pos : pos + length]


def _raw_image(reader: Reader) -> ImageMessage:
    height, pos = reader.count(_skip_header(reader))
    width, pos = reader.count(pos)
    encoding, pos = _text(reader, pos)
    big_endian = unpack_from("B", reader.view, pos)[0] != 0
    step, pos = reader.count(pos + 1)
    data = _bytes(reader, pos)
    if step * height > len(data) or width > step:
        raise DataError(
            f"a picture of {width}x{height} with {step} bytes per row has only {len(data)} bytes"
        )
    return ImageMessage(encoding, width, height, step, big_endian, data)


def _compressed_image(reader: Reader) -> ImageMessage:
    text, pos = _text(reader, _skip_header(reader))
    data = _bytes(reader, pos)
    encoding = "unknown"
    head = bytes(data[: _DEPTH_HEADER_BYTES + 8])
    if head.startswith(_JPEG):
        encoding = "jpeg"
    elif head.startswith(_PNG):
        encoding = "png"
    elif head[_DEPTH_HEADER_BYTES:] == _PNG:
        encoding, data = "compressedDepth", data[_DEPTH_HEADER_BYTES:]
    elif "compressedDepth" in text:
        encoding = "rvl" if "rvl" in text.lower() else "compressedDepth"
    elif "jpeg" in text.lower() or "jpg" in text.lower():
        encoding = "jpeg"
    elif "png" in text.lower():
        encoding = "png"
    elif text.split():
        encoding = text.split()[0].rstrip(";")
    return ImageMessage(encoding, 0, 0, 0, False, data)
