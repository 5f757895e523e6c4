"""The pictures of one camera: messages in, frames of a video out, in a thread of its own.

A picture is decoded only if a frame shows it, and never with the codec "copy", which puts the
recorded JPEG into the video as it is. Packets of a video build on each other: all are decoded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags import Bag, ImageMessage, Message
from penstock.conversion.align import Times, rising
from penstock.conversion.mapping import Mapping
from penstock.conversion.memory import encoder_bytes
from penstock.conversion.plan import Plan
from penstock.dataset.unit import UnitWriter
from penstock.errors import DataError
from penstock.media.headers import jpeg_body
from penstock.media.images import ImageDecoder, grey_from_depth, thumbnail
from penstock.media.packets import KeyFrame, PacketDecoder, is_key

# What a lane hands over: the bytes of a message, and the frames that show it.
Shown = tuple[bytes | memoryview, int, int]
_MOST_REORDERED: Final = 16  # pictures that a decoder keeps back at most


class Pictures:
    """The pictures of one camera: from its messages to the videos of its episodes.

    Attributes:
        preview: A small JPEG of a picture of the recording; None if there was none.
        needs_bytes: The memory that its encoder takes, about.
        copies: JPEGs are copied: that takes less than to hand them to a thread.
    """

    def __init__(
        self,
        name: str,
        bag: Bag,
        plan: Plan,
        mapping: Mapping,
        size: tuple[int, int],
        unit: UnitWriter,
    ) -> None:
        self.name = name
        self._plan = plan.cameras[name]
        self._where = f"{bag.path}: {self._plan.topic}"
        self._decoder = bag.decoder(self._plan.topic)
        self._codec = mapping.codec_of(self._plan.camera)
        self._size, self._bad, self._unit = size, mapping.bad_pictures, unit
        self._notes = plan.account.notes
        self.needs_bytes = encoder_bytes(self._codec, *size)
        self.copies = self._codec == "copy" and self._plan.video is None
        self._images = ImageDecoder()
        self._last: Any = None  # the last good picture, as it went into the video
        self._waiting: list[int] = []  # frames before the first good picture
        self.preview: bytes | None = None
        # The frames change their picture here; the ordinals rise, but for pictures that were
        # written late into the file: those that come before their turn wait.
        changes = np.flatnonzero(np.diff(self._plan.ordinals)) + 1
        edges = np.concatenate(([0], changes, [len(self._plan.ordinals)]))
        self._turns, self._spans = self._messages(edges)
        self._out_of_order: dict[int, int] | None = None
        if np.any(np.diff(self._turns) < 0):
            self._out_of_order = {ordinal: n for n, ordinal in enumerate(self._turns.tolist())}
        self._early_messages: dict[int, bytes] = {}
        self._next = self._worked = 0
        self._starts = [first for first, _ in plan.episodes]
        self._open: int | None = None  # the episode whose video is open
        self._video: Any = None

    def _messages(self, edges: Times) -> tuple[Times, NDArray[np.int32]]:
        """Return the messages in the order of the frames, and which frames show each."""
        spans = np.stack([edges[:-1], edges[1:]], axis=1).astype(np.int32)
        ordinals = self._plan.ordinals
        return ordinals if len(spans) == len(ordinals) else ordinals[edges[:-1]], spans

    @property
    def wanted(self) -> dict[str, Times]:
        """The messages that some frame shows."""
        return {self._plan.topic: rising(self._turns)}

    def shown(self, message: Message) -> Iterator[Shown]:
        """Yield the pictures whose turn a message makes, with their frames.

        Called for every message of the topic, in file order.
        """
        if self._out_of_order is not None:
            turn = self._out_of_order.get(message.ordinal)
            if turn is not None:
                self._early_messages[turn] = bytes(message.data)
            while self._next in self._early_messages:
                yield self._take(self._early_messages.pop(self._next))
        elif self._next < len(self._turns) and message.ordinal == self._turns[self._next]:
            yield self._take(message.data)

    def _take(self, data: bytes | memoryview) -> Shown:
        if not self.copies:
            data = bytes(data)  # a view keeps its whole chunk, and only its own bytes are counted
        first, after = self._spans[self._next].tolist()
        self._next += 1
        return data, first, after

    def work(self, item: Shown) -> None:
        """Bring one picture into its video; one thread calls it, for one after the other."""
        self._show(item)
        self._worked += 1
        if self._worked == len(self._turns):
            self._flush()
            self._close()

    def finish(self) -> None:
        """Check that every frame has its picture."""
        if self._waiting:
            raise DataError(f"{self._where}: none of its pictures can be decoded")
        if self._next < len(self._turns):
            raise DataError(f"{self._where}: pictures are missing")

    def _sink(self, frame: int) -> Any:
        """Return the video of the episode that a frame is in."""
        number = bisect_right(self._starts, frame) - 1
        if number != self._open:
            self._close()
            self._open, self._video = number, self._unit.video(self.name, number)
        return self._video

    def _close(self) -> None:
        if self._open is not None:
            self._unit.finish_video(self.name, self._open)
            self._open = None

    def _show(self, shown: Shown) -> None:
        """Put one picture into the frames that show it."""
        data, first, after = shown
        try:
            picture = self._picture(self._decoder.image(data))
        except _Mismatch as error:
            raise DataError(str(error)) from error
        except DataError as error:
            self._hold(first, after, error)
            return
        self._put(first, after, picture)

    def _hold(self, first: int, after: int, error: DataError) -> None:
        """Show the last good picture where there is none."""
        if self._bad == "fail":
            raise DataError(f"{self._where}: frame {first}: {error}") from error
        self._notes[f"{self._plan.topic}: pictures that cannot be decoded (held)"] += 1
        if self._last is None:
            self._waiting += range(first, after)
        else:
            self._put(first, after, self._last)

    def _put(self, first: int, after: int, picture: Any) -> None:
        for frame in (*self._waiting, *range(first, after)):
            self._write(frame, picture)
        self._waiting.clear()
        self._last = picture

    def _flush(self) -> None:
        """Every message has passed: bring what waits into its frames."""

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
            depth = self._images.depth_mm(image, self._size)
            self._check_size(depth.shape[1], depth.shape[0])
            if self._codec == "depth12":
                return depth
            return grey_from_depth(depth, *self._plan.camera.depth_range_mm)
        return self._scaled(self._images.color(image))

    def _scaled(self, frame: Any) -> Any:
        """Return a colour picture in the size of the feature."""
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
            first = f"{self._size[0]}x{self._size[1]}"
            raise _Mismatch(
                f"{self._where} has a picture of {width}x{height}, and the others are {first}: set "
                f"resize (--set features.{self.name}.resize=[{first.replace('x', ',')}]), and a "
                "codec other than copy"
            )


class VideoPictures(Pictures):
    """Works on the packets of one camera that sends a video: every one, in file order.

    With the codec "copy" they go into the video as they are, and are decoded all the same: only
    that shows which frame each of them is, and that none is missing.
    """

    def __init__(self, name: str, bag: Bag, plan: Plan, *words: Any) -> None:
        super().__init__(name, bag, plan, *words)
        self._video_codec = self._key.codec
        self._packets = PacketDecoder(self._key.codec)
        self._number = 0  # of the next packet
        self._frames: dict[int, tuple[int, int]] = {}  # of packets without a picture as yet
        self._ready: dict[int, tuple[int, int, Any]] = {}  # by first frame: after, packet, picture
        self._next_frame = 0
        self._early: deque[tuple[int, Any]] = deque()
        self._numbers: list[int] = []  # of the packets of `_early`, a heap
        self._copies: deque[tuple[int, bytes]] = deque()  # packets that are not in the video yet
        self._frame_of: dict[int, int] = {}  # the frame that such a packet shows
        self._first_frame = self._copied = 0  # of the episode: its first frame, packets written
        self._delay: int | None = None  # from a packet to its picture, in packets

    @property
    def _key(self) -> KeyFrame:
        assert self._plan.video is not None
        return self._plan.video

    def _messages(self, edges: Times) -> tuple[Times, NDArray[np.int32]]:
        """Return every packet from the first key frame on: one needs those before it."""
        shown, spans = super()._messages(edges)
        start = self._key.ordinal
        every = np.arange(start, shown.max() + 1)
        frames = np.zeros((len(every), 2), np.int32)
        frames[shown - start] = spans
        return every, frames

    def _show(self, shown: Shown) -> None:
        """Take a packet; put the pictures that it completes into their frames."""
        data, first, after = shown
        number, self._number = self._number, self._number + 1
        self._frames[number] = first, after
        try:
            packet = bytes(self._decoder.image(data).data)
            if self._codec == "copy" and after > first:
                self._copies.append((number, packet))
            pictures = self._packets.decode(number, packet)
        except DataError as error:
            self._settle(number, number, error)
            return
        self._collect(pictures)

    def _flush(self) -> None:
        """Bring the pictures that the decoder has kept into their frames."""
        self._collect(self._packets.flush())
        while self._early:
            self._settle(heappop(self._numbers), *self._early.popleft())
        for number in list(self._frames):
            self._settle(number, number, DataError("its packet gives no picture"))

    def _collect(self, pictures: list[tuple[int, Any]]) -> None:
        for packet, picture in pictures:
            number = packet
            # Pictures come in the order in which they are shown. Where the stamps rise in the
            # order of the packets nevertheless, the first of both belong together.
            if self._plan.in_file_order and (self._packets.reorders or self._early):
                heappush(self._numbers, packet)
                self._early.append((packet, picture))
                if len(self._early) <= _MOST_REORDERED:
                    continue
                number, (packet, picture) = heappop(self._numbers), self._early.popleft()
            self._settle(number, packet, picture)
            while (oldest := next(iter(self._frames), number)) < number - 4 * _MOST_REORDERED:
                self._settle(oldest, oldest, DataError("its packet gives no picture"))

    def _settle(self, number: int, packet: int, picture: Any) -> None:
        """Note what the frames of a packet show, and write those whose turn it is."""
        first, after = self._frames.pop(number)
        if first == after:
            return
        if isinstance(picture, DataError) and self._codec == "copy":
            raise DataError(f"{self._where}: {picture}: use h264, which holds the one before")
        self._ready[first] = after, packet, picture
        while self._next_frame in self._ready:
            first = self._next_frame
            self._next_frame, packet, picture = self._ready.pop(first)
            if isinstance(picture, DataError):
                self._hold(first, self._next_frame, picture)
                continue
            try:
                self._put(first, self._next_frame, self._scaled(picture))
            except _Mismatch as error:
                raise DataError(str(error)) from error
            if self._codec == "copy":
                self._frame_of[packet] = first
                self._copy(self._sink(first), packet)

    def _write(self, frame: int, picture: Any) -> None:
        if self._codec == "copy":
            self._sink(frame).add_copied(picture)
        else:
            super()._write(frame, picture)

    def _copy(self, sink: Any, packet: int) -> None:
        """Write the packets whose frames are known; they go into the video in file order."""
        if self._delay is None:
            self._delay = self._number - 1 - packet
        if sink.frames == 1:  # an episode begins
            self._first_frame, self._copied = self._frame_of[packet], 0
            if not is_key(self._video_codec, self._copies[0][1]):
                raise DataError(
                    f"{self._where}: an episode begins at frame {self._first_frame}, which is no "
                    "key frame, and codec copy needs one: use h264, which decodes the packets"
                )
        while self._copies and self._copies[0][0] in self._frame_of:
            number, data = self._copies.popleft()
            frame = self._frame_of.pop(number) - self._first_frame
            turn = self._copied - self._delay
            if turn > frame:
                raise DataError(f"{self._where}: its packets are not in order: use h264")
            sink.add_packet(data, frame, turn, is_key(self._video_codec, data))
            self._copied += 1


class _Mismatch(Exception):
    """A picture that no policy can mend: the bag fails."""
