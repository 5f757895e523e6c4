"""Messages as numbers: vectors by path, stamps, pictures; decoded from the bag's definitions.

A layout per encoding knows where the fields lie; it is chosen by how the messages are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.layout import Data, Layout, as_bytes
from penstock.bags.limits import Limits
from penstock.bags.reader import Topic
from penstock.bags.transforms import Transforms, is_pair, names_of
from penstock.errors import DataError
from penstock.media.encodings import ImageMessage, compressed_image, video_packet
from penstock.ui.suggestions import did_you_mean

_RAW_FIELDS: Final = ("height", "width", "step", "encoding", "data")
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


class Decoder:
    """Decodes the messages of one topic.

    Args:
        topic: The topic, with the definition of its type.
        where: The bag, for the errors.
        limits: Of the definition.
        samples: The first messages, to tell fields by that no definition names (JSON alone).

    Raises:
        DataError: The type is not defined, hostile, or not of a known encoding.

    Attributes:
        topic: The topic.
        stamp_bytes: Of a message, the first bytes that suffice for its stamp; None for all.
    """

    def __init__(
        self, topic: Topic, where: str, limits: Limits, samples: Sequence[Data] = ()
    ) -> None:
        self.topic = topic
        self._where = f"{where}: {topic.name}"
        if topic.mixed:
            raise DataError(
                f"{self._where} was recorded with several types or definitions, so that its "
                "messages cannot be told apart"
            )
        try:
            self._layout = _make_layout(topic, limits, samples)
        except DataError as error:
            raise type(error)(f"{self._where}: {error}") from error
        self._found: dict[tuple[str, str], Any] = {}  # by what is read and its path, the functions
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
        find = self._found.get(("vector", path))
        if find is None:
            try:
                pair = partial(self.transforms.vector, path=path) if is_pair(path) else None
                find = self._found["vector", path] = pair or self._layout.find(path)
            except DataError as error:
                raise DataError(f"{self._where}: {error}; {self._hint(path)}") from None
        try:
            numbers: NDArray[np.float64] = find(data)
            return numbers
        except DataError as error:
            raise DataError(f"{self._where}: {path}: {error}") from None

    def names(self, data: Data, path: str) -> tuple[str, ...]:
        """Return the names of the numbers at a path, as a JointState gives them; () for none."""
        if is_pair(path):
            return names_of(path)
        find = self._found["names", path] if self.has_names(path) else None
        try:
            names: tuple[str, ...] = () if find is None else find(data)
            return names
        except DataError as error:
            raise DataError(f"{self._where}: {path}: {error}") from None

    def has_names(self, path: str) -> bool:
        """Tell whether the type has a place for the names of the numbers at a path."""
        if ("names", path) not in self._found:
            self._found["names", path] = self._layout.find_names(path)
        return self._found["names", path] is not None

    @property
    def transforms(self) -> Transforms:
        """The transforms of its messages."""
        with self._named():
            if self._transforms is None:
                self._transforms = Transforms(self._layout)
            return self._transforms

    def text(self, data: Data, path: str) -> str:
        """Return the text at a path."""
        with self._named():
            if ("text", path) not in self._found:
                self._found["text", path] = self._layout.find_bytes(path)
            return bytes(self._found["text", path](data)).decode("utf-8", "replace")

    def fields(self) -> dict[str, str]:
        """Return the paths of all numbers, and the text of their types, such as "float64[]"."""
        return {} if self.topic.type in _NO_NUMBERS else dict(self._layout.leaves())

    def stamp_ns(self, data: Data) -> int | None:
        """Return the stamp of the message's header; None if its type has no header."""
        with self._named():
            return None if self._stamp is None else self._stamp(data)

    def stamp_reader(self) -> Callable[[Data], int] | None:
        """Return the function from a message to its header stamp; None if there is no header."""
        return None if self._stamp is None else lambda data: self.stamp_ns(data) or 0

    def image(self, data: Data) -> ImageMessage:
        """Return the picture, or the packet of a video, of a message (see `Topic.media`).

        Raises:
            DataError: The topic holds no pictures, or the message is damaged.
        """
        if self.topic.media is None:
            raise DataError(f"{self._where} holds {self.topic.type}, which is no picture")
        with self._named():
            if self._image is None:
                self._image = self._image_reader()
            return self._image(data)

    def _hint(self, path: str) -> str:
        names = list(self.fields())
        hint = did_you_mean(path, names)
        if hint.startswith("did"):
            return hint
        more = ", ..." if len(names) > _SHOWN_FIELDS else ""
        return f"its numbers are {', '.join(names[:_SHOWN_FIELDS])}{more}"

    def _image_reader(self) -> Callable[[Data], ImageMessage]:
        kind = self.topic.type.replace(".", "/").rpartition("/")[2]
        self._layout.find_bytes("data")  # it must be there, and bytes
        if kind in ("Image", "RawImage"):
            order = ("is_bigendian",) if "is_bigendian" in self._layout.root.fields else ()
            return partial(_raw_image, self._layout.values(*_RAW_FIELDS, *order))
        read = self._layout.values("encoding" if kind == "FFMPEGPacket" else "format", "data")
        make = video_packet if self.topic.media == "video" else compressed_image

        def compressed(data: Data) -> ImageMessage:
            text, content = read(data)
            return make(str(text or ""), as_bytes(content))

        return compressed

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the topic to the errors."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self._where}: {error}") from None


def _raw_image(read: Callable[[Data], list[Any]], data: Data) -> ImageMessage:
    *numbers, text, blob, big_endian = [*read(data), False][: len(_RAW_FIELDS) + 1]
    try:
        rows, columns, row_bytes = (int(number or 0) for number in numbers)
    except (TypeError, ValueError, OverflowError):
        raise DataError("the size of a picture is none") from None
    content = as_bytes(blob)
    if row_bytes * rows > len(content) or columns > row_bytes or min(rows, columns) < 0:
        raise DataError(
            f"a picture of {columns}x{rows} with {row_bytes} bytes per row has only "
            f"{len(content)} bytes"
        )
    return ImageMessage(str(text), content, columns, rows, row_bytes, bool(big_endian))


def _make_layout(topic: Topic, limits: Limits, samples: Sequence[Data]) -> Layout:
    """Return the layout of an encoding."""
    if topic.encoding in ("ros1", "cdr"):
        from penstock.bags.ros import RosLayout

        return RosLayout(topic, limits)
    if topic.encoding == "protobuf":
        from penstock.bags.protobuf import ProtobufLayout

        return ProtobufLayout(topic, limits)
    if topic.encoding == "json":
        from penstock.bags.json_messages import JsonLayout

        return JsonLayout(topic, limits, samples)
    raise DataError(
        f"it is encoded as {topic.encoding[:40]!r}, which penstock does not read; ros1, cdr, "
        "protobuf and json messages can be decoded"
    )
