"""Messages as numbers: vectors by path, stamps, pictures; decoded from the bag's definitions.

A layout per encoding knows where the fields lie; it is chosen by how the messages are encoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.bags.limits import Limits
from penstock.bags.reader import Topic
from penstock.bags.transforms import Transforms, is_pair, names_of
from penstock.errors import DataError
from penstock.ui.suggestions import did_you_mean

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG: Final = b"\xff\xd8\xff"
_WEBP: Final = b"WEBP"
_DEPTH_HEADER_BYTES: Final = 12
_SHOWN_FIELDS: Final = 12
# Schemas of Foxglove whose numbers say nothing to a learner: settings beside data, drawings, texts.
_NO_NUMBERS: Final = frozenset(
    f"foxglove.{name}"
    for name in (
        *("PointCloud", "CompressedPointCloud", "Grid", "VoxelGrid", "GeoJSON", "Log", "Event"),
        *("RawImage", "CompressedImage", "CompressedVideo", "RawAudio", "CompressedAudio"),
        *("CameraCalibration", "ImageAnnotations", "SceneUpdate", "SceneEntity"),
    )
)

Data = bytes | memoryview


class Layout(Protocol):
    """Where the fields of a type lie in the messages of one encoding."""

    def leaves(self) -> Iterator[tuple[str, str]]:
        """Yield the paths of all numbers and times, and the text of their types."""

    def find(self, path: str) -> Callable[[Data], NDArray[np.float64]]:
        """Return a function from a message to the numbers at a path."""

    def find_names(self, path: str) -> Callable[[Data], tuple[str, ...]] | None:
        """Return a function from a message to the names of the numbers; None if it has none."""

    def find_texts(
        self, path: str, names: tuple[str, ...]
    ) -> Callable[[Data], list[tuple[str, ...]]]:
        """Return a function from a message to some texts of every item of a list."""

    def find_bytes(self, path: str) -> Callable[[Data], memoryview]:
        """Return a function from a message to the bytes of a text or blob."""

    def stamp_reader(self) -> tuple[Callable[[Data], int] | None, int | None]:
        """Return the function from a message to its stamp, and the first bytes that suffice."""


@dataclass(frozen=True, slots=True)
class ImageMessage:
    """A picture as a message holds it.

    Attributes:
        encoding: "jpeg", "png", "webp", "compressedDepth" (the data starts at the PNG magic), "rvl"
            or the encoding of a raw picture: "rgb8", "bgr8", "mono8", "mono16", "16UC1", ...
            A packet of a video has that of the video: "h264", "h265", "av1", "vp9".
            A compressed picture of another kind has the first word of its format.
        width: Columns; 0 if compressed, but for "rvl".
        height: Rows; 0 if compressed, but for "rvl".
        step: Bytes from row to row; 0 if compressed.
        is_big_endian: Of raw pixels wider than a byte.
        data: The pixels, or the compressed file; not copied.
        depth_quantization: Of a compressed depth that was recorded in metres (32FC1), the numbers a
            and b: a value v means a / (v - b) metres, and 0 none. None for values as recorded.
    """

    encoding: str
    width: int
    height: int
    step: int
    is_big_endian: bool
    data: memoryview
    depth_quantization: tuple[float, float] | None = None


class Decoder:
    """Decodes the messages of one topic.

    Args:
        topic: The topic, with the definition of its type.
        where: The bag, for the errors.
        limits: Of the definition.
        sample: A message, to tell the fields by where there is no definition (JSON alone).

    Raises:
        DataError: The type is not defined, hostile, or not of a known encoding.

    Attributes:
        topic: The topic.
        stamp_bytes: Of a message, the first bytes that suffice for its stamp; None for all.
    """

    def __init__(
        self, topic: Topic, where: str, limits: Limits, sample: Data | None = None
    ) -> None:
        self.topic = topic
        self._where = f"{where}: {topic.name}"
        if topic.mixed:
            raise DataError(
                f"{self._where} was recorded with several types or definitions, so that its "
                "messages cannot be told apart"
            )
        try:
            self._layout = _make_layout(topic, limits, sample)
        except DataError as error:
            raise type(error)(f"{self._where}: {error}") from error
        self._vectors: dict[str, Callable[[Data], NDArray[np.float64]]] = {}
        self._names: dict[str, Callable[[Data], tuple[str, ...]] | None] = {}
        self._texts: dict[str, Callable[[Data], memoryview]] = {}
        self._transforms: Transforms | None = None
        self._stamp, self.stamp_bytes = self._layout.stamp_reader()
        self._image: Callable[[Data], ImageMessage] | None = None

    def vector(self, data: Data, path: str) -> NDArray[np.float64]:
        """Return the numbers at a path.

        Args:
            data: The message.
            path: "position", "joint_data.joint_q", "data[3]", or a sub-message of numbers such as
                "pose.position", which gives its numbers in order. A time is a number of seconds.
                "map>base" is the transform between two frames; a message without it has none.

        Raises:
            DataError: There are no numbers at that path, or the message is damaged.
        """
        find = self._vectors.get(path)
        if find is None:
            try:
                if is_pair(path):
                    find = partial(self.transforms.vector, path=path)
                else:
                    find = self._layout.find(path)
                self._vectors[path] = find
            except DataError as error:
                raise DataError(f"{self._where}: {error}; {self._hint(path)}") from None
        try:
            return find(data)
        except DataError as error:
            raise DataError(f"{self._where}: {path}: {error}") from None

    def names(self, data: Data, path: str) -> tuple[str, ...]:
        """Return the names of the numbers at a path, as a JointState gives them; () for none."""
        if is_pair(path):
            return names_of(path)
        if path not in self._names:
            self._names[path] = self._layout.find_names(path)
        find = self._names[path]
        try:
            return () if find is None else find(data)
        except DataError as error:
            raise DataError(f"{self._where}: {path}: {error}") from None

    @property
    def transforms(self) -> Transforms:
        """The transforms of its messages.

        Raises:
            DataError: They hold none.
        """
        if self._transforms is None:
            try:
                self._transforms = Transforms(self._layout)
            except DataError as error:
                raise DataError(f"{self._where}: {error}") from None
        return self._transforms

    def text(self, data: Data, path: str) -> str:
        """Return the text at a path.

        Raises:
            DataError: There is no text at that path, or the message is damaged.
        """
        try:
            if path not in self._texts:
                self._texts[path] = self._layout.find_bytes(path)
            return bytes(self._texts[path](data)).decode("utf-8", "replace")
        except DataError as error:
            raise DataError(f"{self._where}: {error}") from None

    def fields(self) -> dict[str, str]:
        """Return the paths of all numbers, and the text of their types, such as "float64[]"."""
        return {} if self.topic.type in _NO_NUMBERS else dict(self._layout.leaves())

    def stamp_ns(self, data: Data) -> int | None:
        """Return the stamp of the message's header; None if its type has no header."""
        try:
            return None if self._stamp is None else self._stamp(data)
        except DataError as error:
            raise DataError(f"{self._where}: {error}") from None

    def stamp_reader(self) -> Callable[[Data], int] | None:
        """Return the function from a message to its header stamp; None if there is no header."""
        return None if self._stamp is None else self._stamp_of

    def image(self, data: Data) -> ImageMessage:
        """Return the picture, or the packet of a video, of a message (see `Topic.media`).

        Raises:
            DataError: The topic holds no pictures, or the message is damaged.
        """
        if self.topic.media is None:
            raise DataError(f"{self._where} holds {self.topic.type}, which is no picture")
        try:
            if self._image is None:
                self._image = self._make_image_reader()
            return self._image(data)
        except (struct.error, DataError) as error:
            reason = error if isinstance(error, DataError) else "the message is cut"
            raise DataError(f"{self._where}: {reason}") from None

    def _stamp_of(self, data: Data) -> int:
        return self.stamp_ns(data) or 0

    def _hint(self, path: str) -> str:
        names = list(self.fields())
        hint = did_you_mean(path, names)
        if hint.startswith("did"):
            return hint
        more = ", ..." if len(names) > _SHOWN_FIELDS else ""
        return f"its numbers are {', '.join(names[:_SHOWN_FIELDS])}{more}"

    def _make_image_reader(self) -> Callable[[Data], ImageMessage]:
        kind = self.topic.type.replace(".", "/").rpartition("/")[2]
        blob = self._layout.find_bytes("data")
        if kind in ("Image", "RawImage"):
            return self._make_raw_reader(blob)
        name = "encoding" if kind == "FFMPEGPacket" else "format"
        text = self._layout.find_bytes(name)
        video = self.topic.media == "video"

        def compressed(data: Data) -> ImageMessage:
            encoding, content = bytes(text(data)).decode("utf-8", "replace"), blob(data)
            if video:
                return ImageMessage(_video_codec(encoding), 0, 0, 0, False, content)
            return _compressed_image(encoding, content)

        return compressed

    def _make_raw_reader(
        self, blob: Callable[[Data], memoryview]
    ) -> Callable[[Data], ImageMessage]:
        height, width, step = map(self._layout.find, ("height", "width", "step"))
        text = self._layout.find_bytes("encoding")
        try:
            big_endian = self._layout.find("is_bigendian")
        except DataError:
            big_endian = None

        def raw(data: Data) -> ImageMessage:
            rows, columns, row_bytes = (int(find(data)[0]) for find in (height, width, step))
            big = big_endian is not None and bool(big_endian(data)[0])
            content = blob(data)
            if row_bytes * rows > len(content) or columns > row_bytes or min(rows, columns) < 0:
                raise DataError(
                    f"a picture of {columns}x{rows} with {row_bytes} bytes per row has only "
                    f"{len(content)} bytes"
                )
            encoding = bytes(text(data)).decode("utf-8", "replace")
            return ImageMessage(encoding, columns, rows, row_bytes, big, content)

        return raw


def _make_layout(topic: Topic, limits: Limits, sample: Data | None) -> Layout:
    """Return the layout of an encoding."""
    if topic.encoding in ("ros1", "cdr"):
        from penstock.bags.wire import RosLayout

        return RosLayout(topic, limits)
    if topic.encoding == "protobuf":
        from penstock.bags.protobuf import ProtobufLayout

        return ProtobufLayout(topic, limits)
    if topic.encoding == "json":
        from penstock.bags.json_messages import JsonLayout

        return JsonLayout(topic, limits, sample)
    raise DataError(
        f"it is encoded as {topic.encoding[:40]!r}, which penstock does not read; ros1, cdr, "
        "protobuf and json messages can be decoded"
    )


def _video_codec(text: str) -> str:
    """Return the codec of a video: "h264", "h265", "av1", "vp9", or as it is written."""
    word = text.lower().replace(";", " ").replace(",", " ").split()
    plain = word[0].replace(".", "").replace("-", "") if word else "unknown"
    names = {"hevc": "h265", "libx264": "h264", "libx265": "h265", "avc": "h264"}
    return names.get(plain.partition("_")[0], plain.partition("_")[0])


def _compressed_image(text: str, data: memoryview) -> ImageMessage:
    encoding, width, height = "unknown", 0, 0
    head = bytes(data[: _DEPTH_HEADER_BYTES + 8])
    quantization = None
    if "compressedDepth" in text and text.startswith("32FC1") and len(head) > _DEPTH_HEADER_BYTES:
        quantization = struct.unpack_from("<4x2f", head)
    if head.startswith(_JPEG):
        encoding = "jpeg"
    elif head.startswith(_PNG):
        encoding = "png"
    elif head[8:12] == _WEBP:
        encoding = "webp"
    elif head[_DEPTH_HEADER_BYTES:] == _PNG:
        encoding, data = "compressedDepth", data[_DEPTH_HEADER_BYTES:]
    elif "compressedDepth" in text:
        encoding = "rvl" if "rvl" in text.lower() else "compressedDepth"
        if encoding == "rvl" and len(head) == _DEPTH_HEADER_BYTES + 8:
            width, height = struct.unpack_from("<2I", head, _DEPTH_HEADER_BYTES)
            data = data[len(head) :]
    elif "jpeg" in text.lower() or "jpg" in text.lower():
        encoding = "jpeg"
    elif "png" in text.lower():
        encoding = "png"
    elif text.split():
        encoding = text.split()[0].rstrip(";")
    return ImageMessage(encoding, width, height, 0, False, data, quantization)
