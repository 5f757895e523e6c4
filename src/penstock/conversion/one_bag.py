"""One bag: plan it, read it once, and commit it as a unit.

    read ──┬── camera lanes (decode → encode → mp4)
           └── rows (decode → align → parquet)

The lanes share one limit in bytes; the reader waits when they are full. Nothing is dropped, and
nothing but the unit is touched.
"""

from __future__ import annotations

import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bags import Bag, Limits, Message, open_bag
from penstock.conversion.account import Account
from penstock.conversion.align import Times
from penstock.conversion.features import Joints, describe
from penstock.conversion.lanes import Lanes, Spool
from penstock.conversion.mapping import Codec
from penstock.conversion.mapping import Mapping as Recipe
from penstock.conversion.memory import BASE_BYTES, MemoryWatch, encoder_bytes, queue_bytes
from penstock.conversion.pictures import Pictures, Shown, VideoPictures
from penstock.conversion.plan import Plan, plan_bag
from penstock.conversion.rows import Rows
from penstock.core.files import make_folder
from penstock.core.interrupt import check_stop
from penstock.core.objects import ObjectPath
from penstock.dataset.layout import Feature
from penstock.dataset.unit import Episode, UnitRecord, UnitWriter
from penstock.errors import DataError, PenstockError
from penstock.media.encodings import CODECS
from penstock.media.packets import KeyFrame
from penstock.media.video import VideoSettings

Advance = Callable[[int, int], None]  # bytes read, frames written, since the last call
_REPORT_EVERY_S = 0.2
_SKEWS = 2000  # time errors per feature, for the picture in the report


@dataclass(slots=True)
class Job:
    """What a worker needs to convert one bag.

    Attributes:
        bag: The recording.
        mapping: What the dataset holds.
        features: The features of the dataset, which this bag must have too.
        units: The folder that the unit is committed to, here or in object storage.
        record: Its key, position and source; the episodes come from the bag.
        memory_bytes: Resident memory to stay below.
        salvage: Read what can be read of a damaged bag.
        joints: The names of the joints of the dataset, in their order.
        most_frames: Convert only the beginning.
    """

    bag: Path
    mapping: Recipe
    features: dict[str, Feature]
    units: Path | ObjectPath
    record: UnitRecord
    memory_bytes: int
    salvage: bool
    joints: Joints = field(default_factory=dict)
    most_frames: int | None = None


@dataclass(slots=True)
class Converted:
    """What came of one bag.

    Attributes:
        bag: The recording.
        size_bytes: Its size.
        episodes: How many.
        account: Where the frames went.
        skew: Time errors per feature.
        skew_ms: A sample of the time errors per feature, for the picture in the report.
        timeline: What the frames follow.
        salvage: What was recovered of a damaged bag; None if it was whole.
        previews: A small JPEG per camera.
        wall_s: Time it took.
        cpu_s: Processor time of all threads.
        peak_bytes: Largest resident memory while it ran.
        memory: Resident memory over time.
    """

    bag: Path
    size_bytes: int
    episodes: int
    account: Account
    skew: dict[str, dict[str, float]]
    skew_ms: dict[str, list[float]]
    timeline: str
    salvage: str | None
    previews: dict[str, bytes]
    wall_s: float
    cpu_s: float
    peak_bytes: int
    memory: list[tuple[float, int]]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, without the pictures."""
        return {
            "bag": str(self.bag),
            "size_bytes": self.size_bytes,
            "episodes": self.episodes,
            **self.account.to_json(),
            "skew": self.skew,
            "timeline": self.timeline,
            "salvage": self.salvage,
            "wall_s": round(self.wall_s, 3),
            "cpu_s": round(self.cpu_s, 3),
        }


Outcome = Converted | PenstockError


def convert_bag(job: Job, advance: Advance) -> Converted:
    """Convert one bag into a unit, and commit it.

    Raises:
        PenstockError: The bag cannot be converted; nothing is left of it.
    """
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    limits = Limits.for_memory(job.memory_bytes)
    scratch = Path(tempfile.gettempdir()) if isinstance(job.units, ObjectPath) else job.units
    make_folder(scratch)
    with open_bag(job.bag, salvage=job.salvage, limits=limits, scratch=scratch) as bag:
        plan = plan_bag(bag, job.mapping, job.most_frames)
        _check_features(bag, job.features, describe(bag, job.mapping, plan, job.joints))
        reading = _Reading(bag, plan, job, advance)
        with MemoryWatch(job.memory_bytes, reading.lanes) as watch:
            reading.run()
    return Converted(
        job.bag,
        job.record.source.get("size_bytes", 0),
        len(plan.episodes),
        plan.account,
        plan.skews(),
        {
            name: (skew[:: -(-len(skew) // _SKEWS)] / 1e6).tolist()
            for name, skew in plan.skew_ns.items()
        },
        plan.timeline,
        None if bag.salvage is None else str(bag.salvage),
        reading.previews,
        time.perf_counter() - start_s,
        time.process_time() - start_cpu_s,
        watch.peak_bytes,
        watch.samples,
    )


def outcome_of(job: Job, advance: Advance) -> Outcome:
    """Convert a bag; whatever goes wrong with it is its own affair, and no other bag's."""
    try:
        return convert_bag(job, advance)
    except PenstockError as error:
        return error
    except Exception as error:
        return PenstockError(
            f"{job.bag}: {type(error).__name__}: {' '.join(str(error).split())[:200]}; this is a "
            "fault of penstock: please report it, with the recording if you may"
        )


def _check_features(bag: Bag, wanted: Mapping[str, Feature], found: Mapping[str, Feature]) -> None:
    for name, feature in found.items():
        expected = wanted[name]
        if expected.shape != feature.shape or expected.dtype != feature.dtype:
            raise DataError(
                f"{bag.path}: {name} is {feature.dtype} {list(feature.shape)}, and the dataset has "
                f"{expected.dtype} {list(expected.shape)}: convert it into a dataset of its own"
            )
        for key in ("video.codec", "video.pix_fmt"):
            one, other = ((it.info or {}).get(key) for it in (feature, expected))
            if feature.info is not None and one != other:
                raise DataError(
                    f"{bag.path}: {name} is a video of {one}, and codec copy of the dataset needs "
                    f"{other}: use h264, which decodes it"
                )


class _Reading:
    """The reading pass over one bag."""

    def __init__(self, bag: Bag, plan: Plan, job: Job, advance: Advance) -> None:
        self.bag, self.plan, self.job = bag, plan, job
        self._advance = advance
        self._starts = [first for first, _ in plan.episodes]
        self._queue_bytes = queue_bytes(job.memory_bytes)
        self.lanes = [Lanes("convert", self._queue_bytes)]
        self.previews: dict[str, bytes] = {}

    def run(self) -> None:
        times, mapping = self.plan.times, self.job.mapping
        episodes = [
            Episode(after - first, task, int(times[first]), int(times[after - 1]))
            for (first, after), task in zip(self.plan.episodes, self.plan.tasks, strict=True)
        ]
        videos = {
            name: _video_settings(mapping.codec_of(camera.camera), camera.video)
            for name, camera in self.plan.cameras.items()
        }
        record = replace(self.job.record, episodes=episodes)
        features = self.job.features
        with UnitWriter(self.job.units, record, features, mapping.fps, videos) as self.unit:
            self._read()
            self.unit.commit()

    def _read(self) -> None:
        rows = Rows(self.bag, self.plan, self.job.mapping)
        cameras = {name: _Camera(self, name) for name in self.plan.cameras}
        by_topic: dict[str, list[_Camera]] = {}
        for camera in cameras.values():
            by_topic.setdefault(camera.plan.topic, []).append(camera)
        counted = next(iter(cameras.values()), None)  # its frames show how far we are
        number_topics = frozenset(rows.topics)
        topics = list(dict.fromkeys([*by_topic, *number_topics]))
        read_bytes = frames = 0
        told_s = time.monotonic()
        spools = self._spools(cameras)
        with self.lanes[0] as lanes:
            for name, camera in cameras.items():
                if name not in spools and not camera.copies:
                    lanes.open(name, camera.work)
            for message in self.bag.read(topics, _wanted([rows, *cameras.values()])):
                check_stop()
                read_bytes += len(message.data)
                for camera in by_topic.get(message.topic, ()):
                    for shown in camera.shown(message):
                        if camera.copies:
                            camera.work(shown)
                        elif camera.name in spools:
                            spools[camera.name].put(shown)
                        else:
                            lanes.put(camera.name, shown, len(shown[0]))
                        frames += shown[2] - shown[1] if camera is counted else 0
                if message.topic in number_topics:
                    for count, columns in rows.take(message):
                        self.unit.add_rows(columns)
                        frames += 0 if counted else count
                if time.monotonic() - told_s > _REPORT_EVERY_S:
                    self._advance(read_bytes, frames)
                    read_bytes = frames = 0
                    told_s = time.monotonic()
            for _, columns in rows.finish():
                self.unit.add_rows(columns)
        for name, spool in spools.items():
            self._work_off(cameras[name], spool)
        for camera in cameras.values():
            camera.finish()
        self._advance(read_bytes, frames)

    def _spools(self, cameras: Mapping[str, _Camera]) -> dict[str, Spool]:
        """Return files for the pictures of the cameras whose encoders do not fit into memory.

        The bag is read once all the same: these cameras are encoded one after the other, later.
        """
        free = self.job.memory_bytes - BASE_BYTES - self._queue_bytes
        found = {}
        for number, (name, camera) in enumerate(cameras.items()):
            free -= camera.needs_bytes
            if number and free < 0:
                found[name] = Spool(self.unit.folder / f"{name}.spool")
        return found

    def _work_off(self, camera: _Camera, spool: Spool) -> None:
        with Lanes("convert", self._queue_bytes) as lanes:
            self.lanes.append(lanes)
            lanes.open(camera.name, camera.work)
            for shown in spool.take():
                check_stop()
                lanes.put(camera.name, shown, len(shown[0]))
                self._advance(0, 0)

    def episode_of(self, frame: int) -> int:
        """Return the number of the episode that a frame is in."""
        return bisect_right(self._starts, frame) - 1


class _Camera:
    """One camera's lane: which messages it wants, and where its pictures go."""

    def __init__(self, reading: _Reading, name: str) -> None:
        self.name = name
        self.plan = reading.plan.cameras[name]
        self._reading = reading
        mapping = reading.job.mapping
        codec = mapping.codec_of(self.plan.camera)
        _, height, width = reading.job.features[name].picture_size
        self.needs_bytes = encoder_bytes(codec, width, height)
        # To copy a JPEG takes less than to hand it to a thread; the reader does it.
        self.copies = codec == "copy" and self.plan.video is None
        kind = Pictures if self.plan.video is None else VideoPictures
        self._pictures = kind(
            reading.bag, self.plan, codec, (width, height), mapping.bad_pictures, self._sink
        )
        # The frames change their picture here; the ordinals rise, but for pictures that were
        # written late into the file: those that come before their turn wait.
        changes = np.flatnonzero(np.diff(self.plan.ordinals)) + 1
        edges = np.concatenate(([0], changes, [len(self.plan.ordinals)]))
        self._spans = np.stack([edges[:-1], edges[1:]], axis=1)
        self._wanted = self.plan.ordinals[edges[:-1]]
        if self.plan.video is not None:  # a packet needs those before it, shown or not
            start, shown, spans = self.plan.video.ordinal, self._wanted, self._spans
            self._wanted = np.arange(start, shown.max() + 1)
            self._spans = np.zeros((len(self._wanted), 2), np.int64)
            self._spans[shown - start] = spans
        self._turns: dict[int, int] | None = None
        if np.any(np.diff(self._wanted) < 0):
            self._turns = {ordinal: turn for turn, ordinal in enumerate(self._wanted.tolist())}
        self._early: dict[int, Any] = {}
        self._next = 0
        self._worked = 0
        self._open = -1
        self._video: Any = None

    @property
    def wanted(self) -> dict[str, Times]:
        """The messages that some frame shows."""
        return {self.plan.topic: np.unique(self._wanted)}

    def shown(self, message: Message) -> Iterator[Shown]:
        """Yield the pictures whose turn a message makes, with their frames.

        Called for every message of the topic, in file order.
        """
        if self._turns is not None:
            turn = self._turns.get(message.ordinal)
            if turn is None:
                return
            self._early[turn] = bytes(message.data)
            while self._next in self._early:
                yield self._take(self._early.pop(self._next))
        elif self._next < len(self._wanted) and message.ordinal == self._wanted[self._next]:
            yield self._take(message.data)

    def _take(self, data: bytes | memoryview) -> Shown:
        if not self.copies:
            data = bytes(data)  # a view keeps its whole chunk, and only its own bytes are counted
        first, after = self._spans[self._next].tolist()
        self._next += 1
        return data, first, after

    def work(self, item: Shown) -> None:
        """Show one picture; runs in the lane's thread."""
        self._pictures.show(item)
        self._worked += 1
        if self._worked == len(self._wanted):
            self._pictures.flush()
            self._close()

    def finish(self) -> None:
        """Check that every frame got its picture."""
        self._pictures.finish()
        self._reading.plan.account.notes.update(self._pictures.notes)
        if self._pictures.preview is not None:
            self._reading.previews[self.name] = self._pictures.preview
        if self._next < len(self._wanted):
            raise DataError(f"{self._reading.bag.path}: pictures of {self.plan.topic} are missing")

    def _sink(self, frame: int) -> Any:
        number = self._reading.episode_of(frame)
        if number != self._open:
            self._close()
            self._open = number
            self._video = self._reading.unit.video(self.name, number)
        return self._video

    def _close(self) -> None:
        if self._video is not None:
            self._reading.unit.finish_video(self.name, self._open)
            self._video = None


def _wanted(users: Iterable[Rows | _Camera]) -> dict[str, Times]:
    """Return the messages of each topic that somebody wants."""
    found: dict[str, Times] = {}
    for user in users:
        for topic, ordinals in user.wanted.items():
            found[topic] = np.union1d(found.get(topic, ordinals), ordinals)
    return found


def _video_settings(codec: Codec, video: KeyFrame | None) -> VideoSettings:
    """Return how the pictures are stored; a grey picture is a picture like others.

    AV1 pays for every frame that stands alone: with one in 6 instead of one in 2 it takes half
    the time, and a random access decodes at most 6 frames.
    """
    if codec == "av1":
        return VideoSettings("av1", g=6)
    if codec == "copy" and video is not None:
        return VideoSettings("copy", copied=CODECS[video.codec][0], copied_pix_fmt=video.pix_fmt)
    return VideoSettings("h264" if codec == "grey8" else codec)
