"""Recordings as the viewer shows them: each is an episode, with a time of its own per message."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from penstock.bags import Bag, open_bag
from penstock.bags.find import find_bags
from penstock.bags.messages import Decoder
from penstock.errors import DataError, UsageError
from penstock.inspect.recording import size_of
from penstock.media.encodings import DEPTH_ENCODINGS, ImageMessage
from penstock.media.images import ImageDecoder, thumbnail
from penstock.media.packets import PacketDecoder, is_key
from penstock.view.model import (
    MOST_EVENTS,
    MOST_POINTS,
    Camera,
    Curve,
    EpisodeView,
    Event,
    Points,
    Row,
    Source,
    pick,
    thin,
    time_events,
)
from penstock.view.pictures import DEPTH_MM, depth_jpeg

_OPEN_BAGS = 4
_MOST_FIELDS = 24  # of a topic
_MOST_ELEMENTS = 64  # of a field
_GROUP = 300  # packets of a video that are searched for the key frame before one
_AS_IT_IS = 1.5  # a JPEG up to so many times as wide as wanted is sent as recorded


class Recordings(Source):
    """Recordings of any kind: files and folders of ROS 1, ROS 2 and MCAP.

    Args:
        paths: Files, and folders of them.
    """

    kind = "recordings"

    def __init__(self, paths: Sequence[Path | str]) -> None:
        self._paths = find_bags(paths)
        self.path = ", ".join(str(path) for path in paths)
        self.rows = [Row(n, p.name, size_of(p), None) for n, p in enumerate(self._paths)]
        self._lock = threading.Lock()
        self._bags: OrderedDict[int, tuple[Bag, list[int]]] = OrderedDict()  # and its users

    def open(self, index: int) -> RecordingEpisode:
        """Open a recording."""
        pick(self.rows, index, "recording")
        return RecordingEpisode(self, index)

    def start_ns(self, index: int) -> int:
        """Return when a recording begins."""
        with self.use(index) as bag:
            return bag.start_ns

    @contextmanager
    def use(self, index: int) -> Iterator[Bag]:
        """Lend a recording; a few stay open for the next one who asks."""
        with self._lock:
            if index not in self._bags:
                self._bags[index] = open_bag(self._paths[index]), [0]
            self._bags.move_to_end(index)
            bag, users = self._bags[index]
            users[0] += 1
        try:
            yield bag
        finally:
            with self._lock:
                users[0] -= 1
                self._close_idle(_OPEN_BAGS)

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, most: int) -> None:
        for index in [n for n, (_, users) in self._bags.items() if not users[0]]:
            if len(self._bags) <= most:
                return
            self._bags.pop(index)[0].close()


class RecordingEpisode(EpisodeView):
    """One recording."""

    def __init__(self, recordings: Recordings, index: int) -> None:
        self._recordings, self._index = recordings, index
        self._lock = threading.Lock()  # decoders belong to one thread at a time
        self._images = ImageDecoder()
        self._decoders: dict[str, Decoder] = {}
        self.notes: list[str] = []
        self.cameras: list[Camera] = []
        self.curves: list[Curve] = []
        self._fields: list[tuple[str, str]] = []
        with recordings.use(index) as bag:
            self._start_ns = bag.start_ns
            self.seconds, self.frames, self.task = bag.duration_s, 0, bag.path.name
            rates = []
            for topic in bag.topics.values():
                if not topic.count:
                    continue
                if topic.media is None:
                    self._add_fields(bag, topic.name)
                    continue
                depth = self._depth_range(bag, topic.name)
                self.cameras.append(
                    Camera(topic.name, "frames", "recording", topic.count, None, 0.0, depth)
                )
                rates.append((topic.count - 1) / max(self.seconds, 1e-9))
        self.fps = float(min(max(round(max(rates, default=10.0)), 1), 240))

    def _add_fields(self, bag: Bag, topic: str) -> None:
        try:
            fields = self._decoder(bag, topic).fields()
        except DataError as error:
            self.notes.append(str(error))
            return
        chosen = [
            field
            for field, kind in fields.items()
            if not field.startswith(("header.", "layout.")) and not kind.startswith("time")
        ]
        for field in chosen[:_MOST_FIELDS]:
            self.curves.append(Curve(f"{topic} {field}", "recording"))
            self._fields.append((topic, field))
        if len(chosen) > _MOST_FIELDS:
            self.notes.append(f"{topic}: {len(chosen) - _MOST_FIELDS} more fields are not shown")

    def _decoder(self, bag: Bag, topic: str) -> Decoder:
        if topic not in self._decoders:
            self._decoders[topic] = bag.decoder(topic)
        return self._decoders[topic]

    def _depth_range(self, bag: Bag, topic: str) -> tuple[int, int] | None:
        """Return the range of a depth camera, by its first message; None for one of colours."""
        try:
            message = bag.first_messages([topic])[topic]
            image = self._decoder(bag, topic).image(message.data)
            if image.encoding not in DEPTH_ENCODINGS:
                return None
            depth = self._images.depth_mm(image)
        except (DataError, KeyError) as error:
            self.notes.append(str(error))
            return None
        seen = depth[depth > 0]
        if not seen.size:
            return DEPTH_MM
        low, high = np.percentile(seen, (1, 99))
        return int(0.8 * low), int(1.2 * high) + 1

    def video(self, camera: int) -> Path | BinaryIO:
        """Refuse: a recording has no video files."""
        raise UsageError("a recording has no video files")

    def picture(self, camera: int, frame: int, width: int) -> bytes:
        """Decode a message; a JPEG is given as it was recorded."""
        chosen = pick(self.cameras, camera, "camera")
        if not 0 <= frame < chosen.count:
            raise UsageError(f"there is no frame {frame}: there are {chosen.count}")
        with self._lock, self._recordings.use(self._index) as bag:
            if bag.is_video(chosen.name):
                return self._packet(bag, chosen.name, frame, width)
            wanted = {chosen.name: np.array([frame], np.int64)}
            for message in bag.read([chosen.name], wanted):
                image = self._decoder(bag, chosen.name).image(message.data)
                return self._jpeg(image, chosen.depth_mm, width)
        raise DataError(f"frame {frame} of {chosen.name} cannot be found")

    def _jpeg(self, image: ImageMessage, depth_mm: tuple[int, int] | None, width: int) -> bytes:
        if depth_mm is not None:
            return depth_jpeg(self._images.depth_mm(image), depth_mm, width)
        frame = self._images.color(image)
        if image.encoding == "jpeg" and frame.width <= _AS_IT_IS * width:
            return bytes(image.data)
        return thumbnail(frame, width)

    def _packet(self, bag: Bag, topic: str, frame: int, width: int) -> bytes:
        """Decode a video from the key frame before a packet up to it."""
        first = max(0, frame - _GROUP)
        decoder = self._decoder(bag, topic)
        group: list[tuple[int, str, bytes]] = []
        numbers = np.arange(first, frame + 1, dtype=np.int64)
        for message in bag.read([topic], {topic: numbers}):
            image = decoder.image(message.data)
            if is_key(image.encoding, image.data):
                group.clear()
            group.append((message.ordinal, image.encoding, bytes(image.data)))
        packets = PacketDecoder(group[-1][1])
        found: list[Any] = []
        for ordinal, _, data in group:
            with suppress(DataError):
                found = packets.decode(ordinal, data) or found
        found = packets.flush() or found
        if not found:
            raise DataError(f"{topic}: no key frame among the {_GROUP} packets before {frame}")
        return thumbnail(found[-1][1], width)

    def times(self, camera: int) -> NDArray[np.float64]:
        """Return the log times of a camera's messages."""
        chosen = pick(self.cameras, camera, "camera")
        with self._recordings.use(self._index) as bag:
            return (bag.times(chosen.name) - self._start_ns) / 1e9

    def points(
        self, curve: int, most: int = MOST_POINTS, window: tuple[float, float] | None = None
    ) -> Points:
        """Read a field of a topic: a sample of its messages, evenly spread, if there are many."""
        pick(self.curves, curve, "curve")
        topic, field = self._fields[curve]
        with self._recordings.use(self._index) as bag:
            t_s = (bag.times(topic) - self._start_ns) / 1e9
            chosen = np.arange(len(t_s))
            if window is not None:
                chosen = chosen[(t_s >= window[0]) & (t_s <= window[1])]
            chosen = chosen[:: max(1, -(-len(chosen) // most))]
            decoder = bag.decoder(topic)
            found: list[NDArray[np.float64]] = []
            labels: tuple[str, ...] = ()
            for message in bag.read([topic], {topic: chosen}):
                found.append(decoder.vector(message.data, field).reshape(-1)[:_MOST_ELEMENTS])
                if not labels:
                    labels = decoder.names(message.data, field)
        size = max((len(value) for value in found), default=0)
        values = np.full((len(found), size), np.nan, np.float32)
        for row, value in zip(values, found, strict=True):
            row[: len(value)] = value
        if len(labels) != size:
            labels = tuple(str(k) for k in range(size)) if size > 1 else ("",)
        order = np.argsort(t_s[chosen], kind="stable")
        return thin(t_s[chosen][order], values[order], labels[:size], most)

    def events(self) -> list[Event]:
        """Find what the times of the cameras' messages tell."""
        found: list[Event] = []
        for number, camera in enumerate(self.cameras):
            found += time_events(np.sort(self.times(number)), camera.name)
        return sorted(found, key=lambda event: event.t_s)[:MOST_EVENTS]
