"""Any recording by one interface: ROS 1 .bag, ROS 2 .db3 and .mcap, alone or in a folder.

    with open_bag("flight.bag") as bag:
        bag.topics, bag.start_ns                    # cheap, from the index
        stamps = bag.times("/cam_h/color/image_raw/compressed")
        decoder = bag.decoder("/joint_cmd")
        for message in bag.read(["/joint_cmd"]):    # raw bytes; decoding is its own step
            decoder.vector(message.data, "joint_q")

Memory is bounded by the limits: the largest wanted message, a piece of a chunk, tables in arrays;
never by the length of the recording or the size of its chunks.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.bags.definitions import same_definition
from penstock.bags.limits import Limits
from penstock.bags.source import ZSTD_MAGIC, inflate_message
from penstock.bags.spool import Spool
from penstock.errors import CorruptFile, DataError, UsageError
from penstock.media.encodings import CODECS
from penstock.ui.suggestions import did_you_mean

if TYPE_CHECKING:
    from penstock.bags.messages import Decoder

Kind = Literal["bag", "db3", "mcap"]
_MEDIA: Final[dict[str, Literal["image", "video"]]] = {
    "sensor_msgs/msg/Image": "image",
    "sensor_msgs/msg/CompressedImage": "image",
    "foxglove.RawImage": "image",
    "foxglove.CompressedImage": "image",
    "foxglove.CompressedVideo": "video",
    **{f"{package}/msg/RawImage": "image" for package in ("foxglove", "foxglove_msgs")},
    **{f"{package}/msg/CompressedImage": "image" for package in ("foxglove", "foxglove_msgs")},
    **{f"{package}/msg/CompressedVideo": "video" for package in ("foxglove", "foxglove_msgs")},
    "ffmpeg_image_transport_msgs/msg/FFMPEGPacket": "video",
}
_KEPT_BYTES: Final = 1 << 14  # of a first message
_MOST_KEPT: Final = 500
_SAMPLES: Final = 10
Wanted = Mapping[str, NDArray[np.int64]]  # for some topics, the ordinals to yield, rising


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic of a bag.

    Attributes:
        name: Such as "/joint_cmd".
        type: The message type in ROS 2 spelling, such as "sensor_msgs/msg/JointState".
        count: Number of messages.
        size_bytes: Their bytes, added up; None where the index does not tell.
        definition: The definition of the type as the bag holds it; "" if it holds none. Bytes if
            it is not text, as of protobuf.
        encoding: How messages are serialised: "ros1", "cdr", "protobuf", "json"; another name is
            kept as it is, and such messages can be read but not decoded.
        mixed: The topic was recorded with more than one type or definition.
        schema_encoding: How the definition is written, if the bag tells: "ros1msg", "ros2msg",
            "ros2idl", "protobuf", "jsonschema", ...
    """

    name: str
    type: str
    count: int
    size_bytes: int | None
    definition: str | bytes
    encoding: str = "cdr"
    mixed: bool = False
    schema_encoding: str = ""

    @property
    def media(self) -> Literal["image", "video"] | None:
        """Whether its messages are pictures, or packets of a video; None for all others."""
        return _MEDIA.get(self.type)


class Message(NamedTuple):
    """One message, not decoded.

    Attributes:
        topic: Its topic.
        ordinal: Its number within the topic, in file order, from 0.
        t_ns: When it was received (log time).
        data: Its bytes. They stay valid for as long as they are held; a memoryview keeps the
            chunk that it lies in alive, of which it is an eighth at least.
    """

    topic: str
    ordinal: int
    t_ns: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What was recovered from a damaged bag.

    Attributes:
        reason: What was wrong with it.
        messages: Messages recovered.
        chunks: Chunks (in a database: runs of rows) from which something was recovered.
        damaged_chunks: Chunks that are lost in part or as a whole.
        skipped_bytes: Bytes of the file that could not be understood; 0 where that is unknown.
    """

    reason: str
    messages: int
    chunks: int
    damaged_chunks: int
    skipped_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.reason}: {self.messages} messages recovered from {self.chunks} chunks, "
            f"{self.damaged_chunks} chunks damaged, {self.skipped_bytes} bytes skipped"
        )


def _names_all(schema: str) -> bool:
    """Tell whether a JSON schema names all fields, as far as that can be told."""
    open_ends = re.search(r'"(additional|pattern)Properties"\s*:\s*[{t]', schema)
    return '"properties"' in schema and open_ends is None


def join_topics(topics: Iterable[Topic]) -> dict[str, Topic]:
    """Join the entries of each topic: counts add up, the first type and definition stay."""
    joined: dict[str, Topic] = {}
    for topic in topics:
        known = joined.get(topic.name)
        if known is not None:
            # In ROS 1 the definition is the identity: tf/tfMessage is tf2_msgs/TFMessage.
            named = known.type == topic.type or (known.encoding == "ros1" and known.definition)
            same = (
                bool(named)
                and known.encoding == topic.encoding
                and same_definition(known.definition, topic.definition)
            )
            topic = replace(known, count=known.count + topic.count, mixed=known.mixed or not same)
        joined[topic.name] = topic
    return joined


def among(keys: NDArray[Any], own: Sequence[int]) -> NDArray[np.bool_]:
    """Tell which connections are among some."""
    return np.asarray(keys == own[0]) if len(own) == 1 else np.isin(keys, own)


class Selection:
    """The messages that are wanted of some topics; it numbers them as they pass.

    Args:
        first: The topics, with the ordinal of the next message of each.
        wanted: For some of them, the only ordinals that are wanted, rising.
    """

    def __init__(self, first: Mapping[str, int], wanted: Wanted) -> None:
        self._next = dict(first)
        self._wanted = {topic: wanted[topic] for topic in self._next if topic in wanted}

    @property
    def topics(self) -> list[str]:
        """The topics."""
        return list(self._next)

    def expected(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return how many messages of each topic come, of so many that there are."""
        wanted = self._wanted
        return {t: len(wanted[t]) if t in wanted else counts[t] for t in self._next}

    def part(self, counts: Mapping[str, int]) -> Selection | None:
        """Pass over the next messages; return what is wanted of them, None for nothing."""
        first, wanted = {}, {}
        for topic, count in counts.items():
            start = self._next[topic]
            self._next[topic] = start + count
            if topic in self._wanted:
                span = np.searchsorted(self._wanted[topic], (start, start + count))
                if span[0] == span[1]:
                    continue
                wanted[topic] = self._wanted[topic][slice(*span)]
            first[topic] = start
        return Selection(first, wanted) if first else None

    def pick(
        self, keys: NDArray[Any], connections: Mapping[str, Sequence[int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take the next messages by their connections; return places and ordinals of the wanted."""
        ordinals = np.full(len(keys), -1, np.int64)
        for topic, first in self._next.items():
            own = connections[topic]
            places = np.flatnonzero(among(keys, own))
            self._next[topic] = first + len(places)
            numbers = np.arange(first, first + len(places))
            wanted = self._wanted.get(topic)
            if wanted is not None:
                span = np.searchsorted(wanted, (first, first + len(places)))
                numbers = wanted[slice(*span)]
                places = places[numbers - first]
            ordinals[places] = numbers
        found = np.flatnonzero(ordinals >= 0)
        return found, ordinals[found]


class Bag(ABC):
    """A recording that is open for reading; use it in a `with` block.

    Every reading has its own position: several may be under way at once, also in threads.

    Attributes:
        path: The file or folder.
        kind: Its container.
        size_bytes: The size of its files.
        topics: By name, in the order of their first appearance in the index.
        start_ns: The earliest log time; 0 in an empty bag.
        end_ns: The latest log time; 0 in an empty bag.
        compression: "none", "lz4", "bz2", "zstd", or several joined by "+".
        salvage: What was recovered; None if the bag was whole.
    """

    path: Path
    kind: Kind
    size_bytes: int
    topics: dict[str, Topic]
    start_ns: int
    end_ns: int
    compression: str
    limits: Limits
    salvage: SalvageReport | None = None
    _scratch: Path | None = None  # the folder for temporary files; None for the system's
    _spool: Spool | None = None

    @cached_property
    def _firsts(self) -> dict[str, Message]:
        """The small ones of the first messages that were asked for."""
        return {}

    @cached_property
    def _samples(self) -> dict[str, list[bytes]]:
        """The first messages of topics in JSON whose schemas do not name all fields."""
        return {}

    @cached_property
    def _videos(self) -> set[str]:
        """The topics of compressed pictures that hold packets of a video."""
        packed = [name for name, it in self.topics.items() if it.type.endswith("CompressedImage")]
        videos = set()
        for name, first in self.first_messages(packed).items():
            with suppress(DataError):
                if self.decoder(name).image(first.data).encoding in CODECS:
                    videos.add(name)
        return videos

    @property
    def message_count(self) -> int:
        """Number of messages of all topics."""
        return sum(topic.count for topic in self.topics.values())

    @property
    def duration_s(self) -> float:
        """Seconds between the earliest and the latest message."""
        return (self.end_ns - self.start_ns) / 1e9

    def topic(self, name: str) -> Topic:
        """Return a topic; a UsageError names the nearest one there is."""
        found = self.topics.get(name)
        if found is None:
            hint = did_you_mean(name, self.topics)
            raise UsageError(f"{self.path} has no topic {name!r}; {hint}")
        return found

    @property
    @abstractmethod
    def bytes_read(self) -> int:
        """Bytes that were read from the files so far; of a database, those of its messages."""

    @abstractmethod
    def times(self, topic: str) -> NDArray[np.int64]:
        """Return the log times of a topic in nanoseconds, in file order.

        They come from the index: no chunk is decompressed, and the memory is 8 bytes for each
        message of this one topic. (A file without an index is read once from end to end.)
        """

    def read(
        self, topics: Iterable[str] | None = None, wanted: Wanted | None = None
    ) -> Iterator[Message]:
        """Read the messages of some topics, or of all, in one pass in file order.

        Args:
            topics: Their names; None for all.
            wanted: For a topic, the only ordinals to yield, rising. What lies between them is
                passed over by the index: neither decompressed nor looked at.

        Raises:
            CorruptFile: The data is damaged, or is not what the index promises.
        """
        names = self.topics if topics is None else dict.fromkeys(topics)
        counts = {name: self.topic(name).count for name in names}
        selection = Selection(dict.fromkeys(counts, 0), wanted or {})
        spool = self._spool
        if spool is not None and spool.topics >= counts.keys():
            return self._checked(spool.read(selection), selection.expected(counts))
        return self._checked(self._read(selection), selection.expected(counts))

    def header_stamps(
        self, topics: Iterable[str], keep: Iterable[str] = ()
    ) -> dict[str, NDArray[np.int64]]:
        """Return the header stamps of some topics in nanoseconds, in file order, in one pass.

        Of large messages that are not compressed no more than the heads is read. Otherwise the
        messages lie in a temporary file from then on, where `read` takes them from: a chunk is
        read and decompressed once. Where that file has no room, they are read again later.

        Args:
            topics: The topics.
            keep: Others, which will be read together with them.

        Raises:
            DataError: Messages of one of the topics carry no header.
        """
        readers, sizes = {}, {}
        for name in dict.fromkeys(topics):
            decoder = self.decoder(name)
            reader = decoder.stamp_reader()
            if reader is None:
                raise DataError(
                    f"{self.path}: {name} ({self.topic(name).type}) has no header stamp; use the "
                    "log times"
                )
            readers[name] = reader
            if decoder.stamp_bytes is not None:
                sizes[name] = decoder.stamp_bytes
        counts = {name: self.topic(name).count for name in [*readers, *keep]}
        found = {name: np.empty(counts[name], np.int64) for name in readers}
        spool = None
        if sizes.keys() == readers.keys() and self._has_near_heads(list(readers)):
            first = dict.fromkeys(readers, 0)
            messages = self._read_heads(Selection(first, {}), sizes)
            counts = {name: counts[name] for name in readers}
        else:
            spool = Spool(counts, self._scratch)
            messages = self._read(Selection(dict.fromkeys(counts, 0), {}))
        for message in self._checked(messages, counts):
            if message.topic in readers:
                found[message.topic][message.ordinal] = readers[message.topic](message.data)
            if spool is not None and not spool.put(message):
                spool = None
        self._spool = spool if spool is not None and spool.flush() else None
        return found

    def first_messages(self, topics: Iterable[str]) -> dict[str, Message]:
        """Return the first message of each topic that has one; what lies between is passed over.

        Small ones are kept: whoever asks for all topics at once has each chunk read once.
        """
        names = [name for name in dict.fromkeys(topics) if self.topic(name).count]
        firsts = self._firsts
        found = {name: firsts[name] for name in names if name in firsts}
        missing = {name: np.zeros(1, np.int64) for name in names if name not in found}
        for message in self.read(missing, missing):
            first = message._replace(data=bytes(message.data))
            found[message.topic] = first
            if len(first.data) <= _KEPT_BYTES and len(firsts) < _MOST_KEPT:
                firsts[message.topic] = first
            if len(found) == len(names):
                break
        return found

    def is_video(self, topic: str) -> bool:
        """Tell whether a topic holds packets of a video: by its type, or by its pictures' format.

        Isaac ROS sends H.264 as CompressedImage.
        """
        return self.topic(topic).media == "video" or topic in self._videos

    def decoder(self, topic: str) -> Decoder:
        """Return the decoder of a topic's messages, made from the definitions in the bag."""
        from penstock.bags.messages import Decoder

        found = self.topic(topic)
        samples: Sequence[bytes] = ()
        if found.encoding == "json" and not _names_all(str(found.definition)):
            if topic not in self._samples:
                few = {topic: np.arange(min(found.count, _SAMPLES))}
                self._samples[topic] = [bytes(it.data) for it in self.read([topic], few)]
            samples = self._samples[topic]
        return Decoder(found, str(self.path), self.limits, samples)

    def close(self) -> None:
        """Close the files; safe to call twice."""
        if self._spool is not None:
            self._spool.close()

    @abstractmethod
    def _read(self, selection: Selection) -> Iterator[Message]:
        """Yield the wanted messages in file order."""

    def _has_near_heads(self, topics: Sequence[str]) -> bool:
        """Tell whether the first bytes of messages can be had without reading much more."""
        return False

    def _read_heads(self, selection: Selection, sizes: Mapping[str, int]) -> Iterator[Message]:
        """Yield the wanted messages with so many of their first bytes, or more."""
        raise NotImplementedError

    def _checked(self, messages: Iterator[Message], expected: dict[str, int]) -> Iterator[Message]:
        """Pass messages on, decompressed, and make sure that there are as many as promised."""
        found = dict.fromkeys(expected, 0)
        for message in messages:
            found[message.topic] += 1
            if message.data[:4] == ZSTD_MAGIC and self.topics[message.topic].encoding == "cdr":
                plain = inflate_message(self.path, message.data, self.limits)
                message = message._replace(data=plain)
            yield message
        for name, count in expected.items():
            if found[name] != count:
                raise CorruptFile(
                    f"{self.path}: the index promises {count} messages of {name}, the data holds "
                    f"{found[name]}; pass --salvage to read what there is"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
