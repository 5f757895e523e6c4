"""Check the videos of a dataset: that every frame is there, decodes, and has its time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np

from penstock.core.interrupt import check_stop
from penstock.dataset.check.findings import Report
from penstock.dataset.metadata import EpisodeRecord, Info
from penstock.dataset.stats import PictureStats, sample_indices
from penstock.dataset.tables import inside
from penstock.errors import DataError
from penstock.media.av_versions import pixel_format
from penstock.media.video import open_video

Decode = Literal["all", "sample"]
TOLERANCE_S = 1e-4  # lerobot refuses a frame that is further from its time than this
_EXACT_S = 1e-6
_REMOVED = "nothing, if episodes were removed on purpose"


def counted_lines(picture: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a quarter of the lines of a picture: enough to compare means with."""
    return picture[:: 1 if picture.shape[0] < 300 else 4]


@dataclass(frozen=True)
class VideoJob:
    """One video file and the episodes that lie in it."""

    key: str
    file: str
    records: list[EpisodeRecord]


def video_jobs(records: Sequence[EpisodeRecord]) -> list[VideoJob]:
    """Group the episodes by the video files they lie in."""
    jobs: dict[tuple[str, str], VideoJob] = {}
    for record in records:
        for key, span in record.videos.items():
            job = jobs.setdefault((key, span.file), VideoJob(key, span.file, []))
            job.records.append(record)
    return list(jobs.values())


class VideoCheck:
    """The check of one file."""

    def __init__(self, root: Path, info: Info, job: VideoJob, report: Report) -> None:
        self._root, self._fps, self._job, self._report = root, info.fps, job, report
        self._feature = info.features[job.key]

    def run(self, decode: Decode) -> dict[int, PictureStats]:
        """Return the brightness of the sampled frames by episode, if every frame was decoded."""
        needed = self._check_spans()
        self._report.count("video files")
        try:
            path = inside(self._root, self._job.file)
            if not path.is_file():
                self._error("it is missing")
                return {}
            with open_video(path) as (container, stream):
                self._check_header(stream, needed)
                stream.codec_context.thread_count = 1
                # Without this ffmpeg paints over what is damaged and says nothing.
                stream.codec_context.options = {"err_detect": "crccheck+bitstream+buffer+explode"}
                if decode == "all":
                    return self._decode_all(container, stream, needed)
                self._decode_sample(container, stream)
        except DataError as error:
            self._error(str(error))
        except (av.FFmpegError, OSError, ValueError, MemoryError, OverflowError) as error:
            self._error(f"it cannot be read: {_reason(error)}")
        return {}

    def _error(self, what: str, kind: str = "") -> None:
        self._report.error(self._job.file, what, kind)

    def _first(self, record: EpisodeRecord) -> int:
        """Return the number of an episode's first frame in the file."""
        return round(record.videos[self._job.key].from_s * self._fps)

    def _check_spans(self) -> int:
        """Check the times of the episodes; return the frames that the file must have."""
        key, position = self._job.key, 0
        for record in sorted(self._job.records, key=lambda record: record.videos[key].from_s):
            span, first = record.videos[key], self._first(record)
            where, here = record.source, f"episode {record.index} in {self._job.file}"
            off_s = abs(span.from_s - first / self._fps)
            lasts_s = span.to_s - span.from_s
            if off_s > TOLERANCE_S / 2:
                what = f"{here} begins at {span.from_s} s, which is no frame at {self._fps} fps"
                self._report.error(where, what, f"from_timestamp of {key}")
            elif off_s > _EXACT_S:
                what = f"{here} begins {off_s * 1e6:.1f} us beside a frame: summed durations drift"
                todo = "rewrite from_timestamp as frames / fps"
                self._report.warning(where, what, todo, f"drift of {key}")
            if abs(lasts_s - record.length / self._fps) > TOLERANCE_S:
                what = f"{here} lasts {lasts_s:.6f} s, but has {record.length} frames"
                self._report.error(where, what, f"to_timestamp of {key}")
            if first < position:
                what = f"{here} begins at frame {first}, inside the episode before it"
                self._report.error(where, what, f"overlap of {key}")
            elif first > position:
                what = f"{here} begins at frame {first}; frames {position} to {first} are nobody's"
                self._report.warning(where, what, _REMOVED, f"gap of {key}")
            position = max(position, first + record.length)
        return position

    def _check_header(self, stream: Any, needed: int) -> None:
        context, fps = stream.codec_context, self._fps
        _, height, width = self._feature.picture_size
        if (context.height, context.width) != (height, width):
            said = f"it is {context.width}x{context.height}"
            self._error(f"{said}, info.json says {width}x{height}")
        rate = stream.average_rate
        if rate is None or abs(float(rate) - fps) > 1e-3 * fps / max(needed, 1):
            # torchcodec finds a frame by round(time * this rate).
            self._error(f"it has {rate} frames per second, not {fps}")
        if stream.duration is not None and stream.time_base is not None and stream.frames:
            duration_s = float(stream.duration * stream.time_base)
            if abs(duration_s - stream.frames / fps) > TOLERANCE_S:
                self._report.warning(
                    self._job.file,
                    f"it lasts {duration_s:.6f} s with {stream.frames} frames: lerobot would shift "
                    "what it appends to it",
                    "do not merge this dataset with lerobot",
                )
        actual = {
            "video.codec": context.codec.canonical_name,
            "video.pix_fmt": pixel_format(context),
            "video.height": context.height,
            "video.width": context.width,
            "video.fps": fps,
        }
        stated = self._feature.info or {}
        for name, value in actual.items():
            if name in stated and stated[name] != value:
                self._report.warning(
                    self._job.file,
                    f"{name} is {value!r}, info.json says {stated[name]!r}",
                    "correct the info of the feature",
                    f"{name} of {self._job.key}",
                )

    def _decode_all(self, container: Any, stream: Any, needed: int) -> dict[int, PictureStats]:
        """Decode every frame: count, time, size, damage; sample the brightness."""
        wanted: dict[int, int] = {}  # frames to sample: number in the file -> episode
        for record in self._job.records if not self._feature.is_depth else ():
            frames = self._first(record) + sample_indices(record.length, 0.75)
            wanted |= dict.fromkeys(frames.tolist(), record.index)
        found: dict[int, PictureStats] = {}
        count = 0
        try:
            for frame in container.decode(stream):
                check_stop()
                self._check_frame(frame, count)
                if count in wanted:
                    picture = frame.to_ndarray(format="rgb24")
                    found.setdefault(wanted[count], PictureStats()).add(counted_lines(picture))
                count += 1
        except (av.FFmpegError, ValueError, MemoryError) as error:
            self._error(f"frame {count} does not decode: {_reason(error)}")
            return {}
        finally:
            self._report.count("frames decoded", count)
        if count < needed:
            self._error(f"it has {count} frames, its episodes need {needed}")
        elif count > needed:
            what = f"it has {count} frames, its episodes use {needed}"
            self._report.warning(self._job.file, what, _REMOVED)
        if stream.frames and stream.frames != count:
            self._error(f"it promises {stream.frames} frames and has {count}")
        return found

    def _check_frame(self, frame: Any, number: int) -> None:
        _, height, width = self._feature.picture_size
        time_s = number / self._fps
        if frame.time is None or abs(frame.time - time_s) > TOLERANCE_S:
            what = f"frame {number} is shown at {frame.time} s, not {time_s:.6f} s"
            self._error(what, "frame times")
        if frame.is_corrupt:
            self._error(f"frame {number} is damaged", "damaged frames")
        if (frame.height, frame.width) != (height, width):
            self._error(f"frame {number} is {frame.width}x{frame.height}", "frame sizes")

    def _decode_sample(self, container: Any, stream: Any) -> None:
        """Decode the first, a middle and the last frame of every episode."""
        still = 0
        for record in self._job.records:
            seen: list[bytes] = []
            first = self._first(record)
            for number in sorted({first, first + record.length // 2, first + record.length - 1}):
                frame = next(_frames_from(container, stream, number, self._fps), None)
                if frame is None:
                    self._error(f"frame {number} is not there", "missing frames")
                    continue
                self._check_frame(frame, number)
                self._report.count("frames decoded")
                seen.append(bytes(frame.planes[0]))
            still += len(seen) == 3 and len(set(seen)) == 1
        if still:
            what = f"{self._job.key} stands still in {still} of {len(self._job.records)} episodes"
            self._report.note(self._job.file, what, "check whether the camera was frozen")


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def _frames_from(container: Any, stream: Any, number: int, fps: float) -> Iterator[Any]:
    target_s = number / fps
    container.seek(math.floor(target_s / stream.time_base), stream=stream)
    for frame in container.decode(stream):
        if frame.time is not None and frame.time > target_s - TOLERANCE_S:
            yield frame
