"""The pictures of one camera: messages in, frames of a video out, in a thread of its own.

A picture is decoded only if a frame shows it, and never with the codec "copy", which puts the
recorded JPEG into the video as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.bags import Bag, ImageMessage
from penstock.conversion.mapping import BadPictures, Codec
from penstock.conversion.plan import CameraPlan
from penstock.errors import DataError
from penstock.media.images import ImageDecoder, grey_from_depth, jpeg_body, thumbnail

# What a lane hands over: the bytes of a message, and the frames that show it.
Shown = tuple[bytes | memoryview, int, int]


class Pictures:
    """Works on the pictures of one camera, in the order of the frames.

    Args:
        bag: Its decoder parses the messages.
        plan: Which picture each frame shows.
        codec: How the pictures are stored.
        size: Width and height of the feature.
        bad: What a picture that cannot be decoded does.
        sink: Returns the video of the episode that a frame is in.

    Attributes:
        notes: What happened, counted.
        preview: A small JPEG of a picture of the recording; None if there was none.
    """

    def __init__(
        self,
        bag: Bag,
        plan: CameraPlan,
        codec: Codec,
        size: tuple[int, int],
        bad: BadPictures,
        sink: Callable[[int], Any],
    ) -> None:
        self._where = f"{bag.path}: {plan.topic}"
        self._decoder = bag.decoder(plan.topic)
        self._plan = plan
        self._codec = codec
        self._size = size
        self._bad = bad
        self._sink = sink
        self._images = ImageDecoder()
        self._last: Any = None  # the last good picture, as it went into the video
        self._waiting: list[int] = []  # frames before the first good picture
        self.notes: Counter[str] = Counter()
        self.preview: bytes | None = None

    def show(self, shown: Shown) -> None:
        """Put one picture into the frames that show it."""
        data, first, after = shown
        try:
            picture = self._picture(self._decoder.image(data))
        except _Mismatch as error:
            raise DataError(str(error)) from error
        except DataError as error:
            if self._bad == "fail":
                raise DataError(f"{self._where}: frame {first}: {error}") from error
            self.notes[f"{self._plan.topic}: pictures that cannot be decoded (held)"] += 1
            if self._last is None:
                self._waiting += range(first, after)
                return
            picture = self._last
        for frame in (*self._waiting, *range(first, after)):
            self._write(frame, picture)
        self._waiting.clear()
        self._last = picture

    def finish(self) -> None:
        """Check that every frame has its picture."""
        if self._waiting:
            raise DataError(f"{self._where}: none of its pictures can be decoded")

    def _write(self, frame: int, picture: Any) -> None:
        sink = self._sink(frame)
        if self._codec == "copy":
            sink.add_jpeg(picture)
        else:
            sink.add_frame(picture)

    def _picture(self, image: ImageMessage) -> Any:
        """Return the picture as the video takes it."""
        if self._codec == "copy":
            return self._jpeg(image)
        if self._plan.camera.kind == "depth":
            depth = self._images.depth_mm(
                image.data, image.encoding, image.width, image.height, image.step,
                image.is_big_endian, self._size, image.depth_quantization,
            )  # fmt: skip
            self._check_size(depth.shape[1], depth.shape[0])
            if self._codec == "depth12":
                return depth
            return grey_from_depth(depth, *self._plan.camera.depth_range_mm)
        frame = self._images.color(
            image.data, image.encoding, image.width, image.height, image.step, image.is_big_endian
        )
        if self._plan.camera.resize:
            frame = self._images.resize(frame, *self._size)
        self._check_size(frame.width, frame.height)
        if self.preview is None:
            self.preview = thumbnail(frame)
        return frame

    def _jpeg(self, image: ImageMessage) -> bytes:
        if image.encoding != "jpeg":
            raise _Mismatch(
                f"{self._where} has {image.encoding} pictures, and codec copy needs JPEG: use h264"
            )
        body, width, height = jpeg_body(image.data)
        self._check_size(width, height)
        if self.preview is None:
            self.preview = thumbnail(self._images.jpeg(body))
        return body

    def _check_size(self, width: int, height: int) -> None:
        if (width, height) != self._size:
            raise _Mismatch(
                f"{self._where} has a picture of {width}x{height}, and the others are "
                f"{self._size[0]}x{self._size[1]}: set resize, and a codec other than copy"
            )


class _Mismatch(Exception):
    """A picture that no policy can mend: the bag fails."""
