"""One bag: plan it, read it once, and commit it as a unit.

    read ──┬── camera lanes (decode → encode → mp4)
           └── rows (decode → align → parquet)

The lanes share one limit in bytes; the reader waits when they are full. Nothing is dropped, and
nothing but the unit is touched.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bags import Bag, Limits
from penstock.conversion.account import Account
from penstock.conversion.align import Times
from penstock.conversion.features import Joints, describe
from penstock.conversion.lanes import Lanes, Spool
from penstock.conversion.mapping import Codec
from penstock.conversion.mapping import Mapping as Recipe
from penstock.conversion.memory import BASE_BYTES, MemoryWatch, queue_bytes
from penstock.conversion.pictures import Pictures, VideoPictures
from penstock.conversion.plan import Plan, plan_bag
from penstock.conversion.recordings import OpenRecording
from penstock.conversion.rows import Rows
from penstock.core.files import make_folder
from penstock.core.interrupt import check_stop
from penstock.dataset.layout import Feature
from penstock.dataset.tables import give_back_unused
from penstock.dataset.unit import Episode, UnitRecord, UnitWriter
from penstock.errors import DataError, PenstockError
from penstock.media.encodings import CODECS
from penstock.media.packets import KeyFrame
from penstock.media.video import VideoSettings
from penstock.objects import ObjectPath

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
    """What came of one bag, and what it took.

    Time errors are per feature, with a sample of them for the report; previews are small JPEGs.
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


def convert_bag(job: Job, advance: Advance, opened: OpenRecording | None = None) -> Converted:
    """Convert one bag into a unit, and commit it.

    Args:
        job: What to do.
        advance: Told of bytes and frames as they are done.
        opened: The recording that was looked at before, by the same settings.

    Raises:
        PenstockError: The bag cannot be converted; nothing is left of it.
    """
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    scratch = Path(tempfile.gettempdir()) if isinstance(job.units, ObjectPath) else job.units
    make_folder(scratch)
    limits = Limits.for_memory(job.memory_bytes)
    with opened or OpenRecording(job.salvage, limits, scratch) as recordings:
        bag = recordings.open(job.bag)
        plan = plan_bag(bag, job.mapping, job.most_frames)
        _check_features(bag, job.features, describe(bag, job.mapping, plan, job.joints))
        skew, skew_ms = plan.take_skews(_SKEWS)
        with MemoryWatch() as watch, _open_unit(job, plan) as unit:
            previews = _read(bag, plan, job, unit, advance)
            unit.commit()
    return Converted(
        job.bag,
        job.record.source.get("size_bytes", 0),
        len(plan.episodes),
        plan.account,
        skew,
        skew_ms,
        plan.timeline,
        None if bag.salvage is None else str(bag.salvage),
        previews,
        time.perf_counter() - start_s,
        time.process_time() - start_cpu_s,
        watch.peak_bytes,
    )


def outcome_of(job: Job, advance: Advance, opened: OpenRecording | None = None) -> Outcome:
    """Convert a bag; whatever goes wrong with it is its own affair, and no other bag's."""
    try:
        return convert_bag(job, advance, opened)
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


def _open_unit(job: Job, plan: Plan) -> UnitWriter:
    episodes = [
        Episode(after - first, task, int(plan.times[first]), int(plan.times[after - 1]))
        for (first, after), task in zip(plan.episodes, plan.tasks, strict=True)
    ]
    videos = {
        name: _video_settings(job.mapping.codec_of(camera.camera), camera.video)
        for name, camera in plan.cameras.items()
    }
    record = replace(job.record, episodes=episodes)
    return UnitWriter(job.units, record, job.features, job.mapping.fps, videos)


def _read(bag: Bag, plan: Plan, job: Job, unit: UnitWriter, advance: Advance) -> dict[str, bytes]:
    """Read the bag once, and bring everything into the unit; return a preview of each camera."""
    give_back_unused()  # what planning took
    rows = Rows(bag, plan, job.mapping)
    cameras: dict[str, Pictures] = {}
    by_topic: dict[str, list[Pictures]] = {}
    for name, own in plan.cameras.items():
        kind = Pictures if own.video is None else VideoPictures
        size = job.features[name].picture_size
        cameras[name] = kind(name, bag, plan, job.mapping, (size[2], size[1]), unit)
        by_topic.setdefault(own.topic, []).append(cameras[name])
    counted = next(iter(cameras.values()), None)  # its frames show how far we are
    number_topics = frozenset(rows.topics)
    topics = list(dict.fromkeys([*by_topic, *number_topics]))
    read_bytes = frames = 0
    told_s = time.monotonic()
    limit_bytes = queue_bytes(job.memory_bytes)
    spools = _spools(cameras, unit.folder, job.memory_bytes - BASE_BYTES - limit_bytes)
    with Lanes("convert", limit_bytes) as lanes:
        for name, camera in cameras.items():
            if name not in spools and not camera.copies:
                lanes.open(name, camera.work)
        for message in bag.read(topics, _wanted([rows, *cameras.values()])):
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
                    unit.add_rows(columns)
                    frames += 0 if counted else count
            if time.monotonic() - told_s > _REPORT_EVERY_S:
                advance(read_bytes, frames)
                give_back_unused()
                read_bytes = frames = 0
                told_s = time.monotonic()
        for _, columns in rows.finish():
            unit.add_rows(columns)
    for name, spool in spools.items():
        with Lanes("convert", limit_bytes) as lanes:
            lanes.open(name, cameras[name].work)
            for shown in spool.take():
                check_stop()
                lanes.put(name, shown, len(shown[0]))
                advance(0, 0)
    for camera in cameras.values():
        camera.finish()
    advance(read_bytes, frames)
    give_back_unused()
    return {name: it.preview for name, it in cameras.items() if it.preview is not None}


def _spools(cameras: Mapping[str, Pictures], folder: Path, free_bytes: int) -> dict[str, Spool]:
    """Return files for the pictures of the cameras whose encoders do not fit into memory.

    The bag is read once all the same: these cameras are encoded one after the other, later.
    """
    found = {}
    for number, (name, camera) in enumerate(cameras.items()):
        free_bytes -= camera.needs_bytes
        if number and free_bytes < 0:
            found[name] = Spool(folder / f"{name}.spool")
    return found


def _wanted(users: Iterable[Rows | Pictures]) -> dict[str, Times]:
    """Return the messages of each topic that somebody wants."""
    found: dict[str, Times] = {}
    for user in users:
        for topic, ordinals in user.wanted.items():
            before = found.get(topic)
            found[topic] = ordinals if before is None else np.union1d(before, ordinals)
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
