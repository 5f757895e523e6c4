"""Check the videos of a dataset: that every frame is there, decodes, and has its time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np

from penstock.core.interrupt import check_stop
from penstock.dataset.columns import inside
from penstock.dataset.findings import Report
from penstock.dataset.layout import Feature
from penstock.dataset.metadata import EpisodeRecord, Info
from penstock.errors import DataError
from penstock.media.av_versions import pixel_format
from penstock.media.video import open_video

Decode = Literal["all", "sample"]
TOLERANCE_S = 1e-4  # lerobot refuses a frame that is further from its time than this
_EXACT_S = 1e-6
_COPY = "copy the file again, or convert the recording again"
_CONVERT = "convert the recording again"


@dataclass
class Brightness:
    """Sums over the channels of sampled pictures, in [0, 1]."""

    pictures: int = 0
    mean: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(3))
    square: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(3))

    def add(self, picture: np.ndarray[Any, Any]) -> None:
        """Add one RGB picture of uint8."""
        # A quarter of the lines is enough to compare means with, and takes a quarter of the time.
        values = picture[:: 1 if picture.shape[0] < 300 else 4].astype(np.float32) / 255
        self.pictures += 1
        self.mean += values.mean((0, 1), dtype=np.float64)
        self.square += (values**2).mean((0, 1), dtype=np.float64)

    def merge(self, other: Brightness) -> None:
        """Add another's pictures."""
        self.pictures += other.pictures
        self.mean += other.mean
        self.square += other.square

    def moments(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return mean and standard deviation per channel."""
        mean = self.mean / self.pictures
        return mean, np.sqrt(np.maximum(self.square / self.pictures - mean**2, 0))


@dataclass(frozen=True)
class VideoJob:
    """One video file and the episodes that lie in it."""

    key: str
    file: str
    records: list[EpisodeRecord]


def video_jobs(info: Info, records: Sequence[EpisodeRecord]) -> list[VideoJob]:
    """Group the episodes by the video files they lie in."""
    jobs: dict[tuple[str, str], VideoJob] = {}
    for record in records:
        for key, span in record.videos.items():
            job = jobs.setdefault((key, span.file), VideoJob(key, span.file, []))
            job.records.append(record)
    return list(jobs.values())


def sample_indices(length: int) -> np.ndarray[Any, Any]:
    """Return the frames that lerobot takes an episode's picture statistics from."""
    count = max(min(100, length), min(int(length**0.75), 10_000))
    return np.unique(np.round(np.linspace(0, length - 1, count)).astype(np.int64))


def check_video(
    root: Path, info: Info, job: VideoJob, decode: Decode, report: Report
) -> dict[int, Brightness]:
    """Check one file.

    Returns:
        The brightness of the sampled frames by episode; empty unless every frame was decoded.
    """
    feature = info.features[job.key]
    needed = check_spans(info, job, report)
    report.count("video files")
    try:
        if not inside(root, job.file).is_file():
            report.error(job.file, "it is missing", _COPY)
            return {}
        with open_video(inside(root, job.file)) as (container, stream):
            _check_header(info, job, feature, container, needed, report)
            stream.codec_context.thread_count = 1
            # Without this ffmpeg paints over what is damaged and says nothing.
            stream.codec_context.options = {"err_detect": "crccheck+bitstream+buffer+explode"}
            if decode == "all":
                return _decode_all(info, job, feature, container, needed, report)
            _decode_sample(info, job, feature, container, report)
    except DataError as error:
        report.error(job.file, str(error), _COPY)
    except (av.FFmpegError, OSError, ValueError, MemoryError, OverflowError) as error:
        report.error(job.file, f"it cannot be read: {_reason(error)}", _COPY)
    return {}


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def check_spans(info: Info, job: VideoJob, report: Report) -> int:
    """Check the times of the episodes in one file; return the frames that it must have."""
    position = needed = 0
    for record in sorted(job.records, key=lambda record: record.videos[job.key].from_s):
        span = record.videos[job.key]
        where, here = record.source, f"episode {record.index} in {job.file}"
        first = round(span.from_s * info.fps)
        off_s = abs(span.from_s - first / info.fps)
        if off_s > TOLERANCE_S / 2:
            report.error(
                where,
                f"{here} begins at {span.from_s} s, which is no frame at {info.fps} fps",
                _CONVERT,
                f"from_timestamp of {job.key}",
            )
        elif off_s > _EXACT_S:
            report.warning(
                where,
                f"{here} begins {off_s * 1e6:.1f} us beside a frame: summed durations drift",
                "rewrite from_timestamp as frames / fps",
                f"drift of {job.key}",
            )
        if abs(span.to_s - span.from_s - record.length / info.fps) > TOLERANCE_S:
            report.error(
                where,
                f"{here} lasts {span.to_s - span.from_s:.6f} s, but has {record.length} frames",
                _CONVERT,
                f"to_timestamp of {job.key}",
            )
        if first < position:
            report.error(
                where,
                f"{here} begins at frame {first}, inside the episode before it",
                _CONVERT,
                f"overlap of {job.key}",
            )
        elif first > position:
            report.warning(
                where,
                f"{here} begins at frame {first}; frames {position} to {first} are nobody's",
                "nothing, if episodes were removed on purpose",
                f"gap of {job.key}",
            )
        position = max(position, first + record.length)
        needed = position
    return needed


def _check_header(
    info: Info, job: VideoJob, feature: Feature, container: Any, needed: int, report: Report
) -> None:
    stream = container.streams.video[0]
    context = stream.codec_context
    _, height, width = feature.picture_size
    if (context.height, context.width) != (height, width):
        report.error(
            job.file,
            f"it is {context.width}x{context.height}, info.json says {width}x{height}",
            _CONVERT,
        )
    rate = stream.average_rate
    if rate is None or abs(float(rate) - info.fps) > 1e-3 * info.fps / max(needed, 1):
        # torchcodec finds a frame by round(time * this rate).
        report.error(job.file, f"it has {rate} frames per second, not {info.fps}", _CONVERT)
    if stream.duration is not None and stream.time_base is not None and stream.frames:
        duration_s = float(stream.duration * stream.time_base)
        if abs(duration_s - stream.frames / info.fps) > TOLERANCE_S:
            report.warning(
                job.file,
                f"it lasts {duration_s:.6f} s with {stream.frames} frames: lerobot would shift "
                "what it appends to it",
                "do not merge this dataset with lerobot",
            )
    codec = context.codec.canonical_name
    stated = feature.info or {}
    actual = {
        "video.codec": codec,
        "video.pix_fmt": pixel_format(context),
        "video.height": context.height,
        "video.width": context.width,
        "video.fps": info.fps,
    }
    for name, value in actual.items():
        if name in stated and stated[name] != value:
            report.warning(
                job.file,
                f"{name} is {value!r}, info.json says {stated[name]!r}",
                "correct the info of the feature",
                f"{name} of {job.key}",
            )


def _decode_all(
    info: Info, job: VideoJob, feature: Feature, container: Any, needed: int, report: Report
) -> dict[int, Brightness]:
    """Decode every frame: count, time, size, damage; sample the brightness."""
    wanted = _wanted_frames(info, job) if not feature.is_depth else {}
    found: dict[int, Brightness] = {}
    stream = container.streams.video[0]
    count = 0
    try:
        for frame in container.decode(stream):
            check_stop()
            _check_frame(info, job, feature, frame, count, report)
            if count in wanted:
                picture = frame.to_ndarray(format="rgb24")
                found.setdefault(wanted[count], Brightness()).add(picture)
            count += 1
    except (av.FFmpegError, ValueError, MemoryError) as error:
        report.error(job.file, f"frame {count} does not decode: {_reason(error)}", _COPY)
        report.count("frames decoded", count)
        return {}
    report.count("frames decoded", count)
    if count < needed:
        report.error(job.file, f"it has {count} frames, its episodes need {needed}", _COPY)
    elif count > needed:
        report.warning(
            job.file,
            f"it has {count} frames, its episodes use {needed}",
            "nothing, if episodes were removed on purpose",
        )
    if stream.frames and stream.frames != count:
        report.error(job.file, f"it promises {stream.frames} frames and has {count}", _COPY)
    return found


def _wanted_frames(info: Info, job: VideoJob) -> dict[int, int]:
    """Return the frames to sample: number in the file -> episode."""
    wanted: dict[int, int] = {}
    for record in job.records:
        first = round(record.videos[job.key].from_s * info.fps)
        if record.length > 0:
            wanted.update((first + int(k), record.index) for k in sample_indices(record.length))
    return wanted


def _check_frame(
    info: Info, job: VideoJob, feature: Feature, frame: Any, number: int, report: Report
) -> None:
    _, height, width = feature.picture_size
    if frame.time is None or abs(frame.time - number / info.fps) > TOLERANCE_S:
        report.error(
            job.file,
            f"frame {number} is shown at {frame.time} s, not {number / info.fps:.6f} s",
            _CONVERT,
            "frame times",
        )
    if frame.is_corrupt:
        report.error(job.file, f"frame {number} is damaged", _COPY, "damaged frames")
    if (frame.height, frame.width) != (height, width):
        report.error(
            job.file, f"frame {number} is {frame.width}x{frame.height}", _CONVERT, "frame sizes"
        )


def _decode_sample(
    info: Info, job: VideoJob, feature: Feature, container: Any, report: Report
) -> None:
    """Decode the first, a middle and the last frame of every episode."""
    stream = container.streams.video[0]
    still = 0
    for record in job.records:
        seen: list[bytes] = []
        first = round(record.videos[job.key].from_s * info.fps)
        for number in sorted({first, first + record.length // 2, first + record.length - 1}):
            frame = next(_frames_from(container, stream, number, info.fps), None)
            if frame is None:
                report.error(job.file, f"frame {number} is not there", _COPY, "missing frames")
                continue
            _check_frame(info, job, feature, frame, number, report)
            report.count("frames decoded")
            seen.append(bytes(frame.planes[0]))
        still += len(seen) == 3 and len(set(seen)) == 1
    if still:
        report.note(
            job.file,
            f"{job.key} stands still in {still} of {len(job.records)} episodes",
            "check whether the camera was frozen",
        )


def _frames_from(container: Any, stream: Any, number: int, fps: float) -> Iterator[Any]:
    target_s = number / fps
    container.seek(math.floor(target_s / stream.time_base), stream=stream)
    for frame in container.decode(stream):
        if frame.time is not None and frame.time > target_s - TOLERANCE_S:
            yield frame


def shared_files(jobs: Sequence[VideoJob]) -> Mapping[str, list[str]]:
    """Return the files that more than one camera claims, with their cameras."""
    cameras: dict[str, list[str]] = {}
    for job in jobs:
        cameras.setdefault(job.file, []).append(job.key)
    return {file: keys for file, keys in cameras.items() if len(keys) > 1}
