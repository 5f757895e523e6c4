"""Videos of a constant frame rate in mp4 files, written and read by FFmpeg.

Frame i has the time i / fps exactly, and the count of frames is exact: readers find a frame by its
number. The same frames give the same bytes: one thread per encoder, no dates in the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

import av
import numpy as np
from av.video.reformatter import ColorRange
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.core.files import storage_error
from penstock.errors import CorruptFile, DataError, PenstockError, UsageError
from penstock.media.av_versions import (
    ACCURATE_RND,
    ANY_METADATA,
    BILINEAR,
    BITEXACT,
    Reformatter,
    add_copy_stream,
)
from penstock.media.depth import DepthCoding
from penstock.media.headers import JpegSize, check_pixels, jpeg_size
from penstock.media.images import BT709, FULL_RANGE, STRICT, converted, plane_rows, to_rgb

Codec = Literal["h264", "av1", "copy", "depth12", "png"]
Picture = av.VideoFrame | NDArray[Any]
VideoSource = Path | str | BinaryIO  # a file, or one that is open for reading

TICKS = 512  # per frame: lerobot's own time base, 1/15360 s at 30 fps
_BT601 = 6  # AVCOL_SPC_SMPTE170M
# Full range to limited range: 0..255 to 16..235, and chroma to 16..240.
_LUMA = bytes(round(16 + value * 219 / 255) for value in range(256))
_CHROMA = bytes(round(128 + (value - 128) * 224 / 255) for value in range(256))
_JPEG_FORMATS = {
    **{"420": "yuvj420p", "422": "yuvj422p", "444": "yuvj444p", "440": "yuvj440p"},
    "gray": "gray",
}


def open_mp4(path: Path, frames: int | None) -> Any:
    """Open an mp4 file of so many frames for writing: the same frames give the same bytes.

    Room for the table of frames is kept at the beginning, so that a player can start before it has
    the whole file: 25 bytes per frame at most. (To move it there later would write all again.)
    """
    options = {"fflags": "+bitexact", "write_btrt": "0"}
    if frames is not None:
        options["moov_size"] = str(8192 + 28 * frames)
    open(path, "wb").close()  # av would find a missing folder only much later
    return av.open(os.path.abspath(path), "w", format="mp4", container_options=options)


def close_mp4(container: Any, path: Path) -> None:
    """Finish an mp4 file, and make it durable."""
    container.close()
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell a disk that refuses from pictures that cannot be encoded."""
    try:
        yield
    except (av.FFmpegError, OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        if isinstance(error, OSError) and isinstance(number, int) and 0 < number < 200:
            raise storage_error("write", path, OSError(number, os.strerror(number))) from error
        raise DataError(f"cannot write {path}: {error}") from error


@dataclass(frozen=True)
class _Encoder:
    name: str
    pix_fmt: str
    crf: int | None
    preset: str
    canonical: str


_ENCODERS: Mapping[str, _Encoder] = MappingProxyType(
    {
        "h264": _Encoder("libx264", "yuv420p", 23, "ultrafast", "h264"),
        "av1": _Encoder("libsvtav1", "yuv420p", 30, "12", "av1"),
        "depth12": _Encoder("libx265", "gray12le", None, "ultrafast", "hevc"),
    }
)


@dataclass(frozen=True)
class VideoSettings:
    """How the pictures of a camera are stored.

    Args:
        codec: "h264" plays everywhere; "av1" is smaller and takes 6 times the time; "copy" puts
            JPEGs, or packets of a video, into the video as they are; "depth12" is lossless for
            12-bit depth codes; "png" makes no video: the pictures lie in the parquet.
        crf: Quality, less is better; None for the codec's default.
        preset: The encoder's own speed setting; None for the codec's default.
        g: Frames from one that stands alone to the next: what a random access decodes at most.
        depth: How "depth12" codes distances.
        copied: What "copy" copies, FFmpeg's names: "mjpeg", "h264", "hevc", "av1" or "vp9".
        copied_pix_fmt: The pixels of the packets; those of JPEGs tell theirs.
    """

    codec: Codec = "h264"
    crf: int | None = None
    preset: str | None = None
    g: int = 2
    depth: DepthCoding = DepthCoding()  # noqa: RUF009 - immutable
    copied: str = "mjpeg"
    copied_pix_fmt: str = "yuvj420p"

    def __post_init__(self) -> None:
        if self.codec not in (*_ENCODERS, "copy", "png"):
            raise UsageError(f"codec {self.codec!r} is not known: h264, av1, copy, depth12 or png")
        if self.g < 1:
            raise UsageError(f"g must be 1 or more, not {self.g}")


class VideoWriter:
    """Write one video; it belongs to one thread.

    Args:
        path: The mp4 file. It is incomplete, and of no use, until `close` returned.
        settings: The codec.
        fps: Frames per second.
        width: Of every frame.
        height: Of every frame.
        frames: How many there will be at the most; None if that is not known.
    """

    def __init__(
        self,
        path: Path | str,
        settings: VideoSettings,
        fps: int,
        width: int,
        height: int,
        frames: int | None = None,
    ) -> None:
        if settings.codec == "png":
            raise UsageError("png pictures are no video: they go into the data files")
        if settings.codec != "copy":
            if width < 2 or height < 2 or width % 2 or height % 2:
                raise UsageError(f"a video of {width}x{height} is not possible: both must be even")
            check_pixels(width, height)
        if not 0 < fps <= 1000:
            raise UsageError(f"a video of {fps} frames per second is not possible")
        self.path = Path(path)
        self.frames = 0
        self._settings = settings
        self._fps = fps
        self._tick = Fraction(1, fps * TICKS)
        self._size = (width, height)
        self._reformatter = Reformatter()
        self._jpeg: JpegSize | None = None
        self._last: tuple[Picture, av.VideoFrame] | None = None
        with writing(self.path):
            self._container: Any = open_mp4(self.path, frames)
            self._stream: Any = self._open_stream()

    def encode(self, frame: Picture) -> None:
        """Add a frame: a decoded picture, HxWx3 RGB of uint8, or HxW depth in mm of uint16."""
        if self._settings.codec == "copy":
            raise UsageError("codec copy takes JPEGs: use add_jpeg, or another codec")
        if self._last is None or frame is not self._last[0] or isinstance(frame, np.ndarray):
            depth = self._settings.codec == "depth12"
            self._last = frame, self._depth_frame(frame) if depth else self._colour_frame(frame)
        prepared = self._last[1]  # a frame that is shown again is not converted again
        prepared.pts = self.frames
        prepared.time_base = Fraction(1, self._fps)
        opens = self._settings.codec == "av1" and not self.frames
        with writing(self.path):
            with _no_realtime() if opens else nullcontext():
                packets = self._stream.encode(prepared)
            self._container.mux(packets)
        self.frames += 1

    def copy(self, jpeg: bytes) -> None:
        """Add a JPEG as it is, nothing decoded (codec "copy")."""
        if self._settings.codec != "copy":
            raise UsageError(f"codec {self._settings.codec} takes decoded pictures, not JPEGs")
        size = jpeg_size(jpeg)
        if (size.width, size.height) != self._size:
            raise DataError(
                f"a JPEG of {size.width}x{size.height} does not fit the video of "
                f"{self._size[0]}x{self._size[1]}: codec copy cannot scale"
            )
        self._jpeg = self._jpeg or size
        self.copy_packet(jpeg, self.frames, self.frames, is_key=True)

    def copy_packet(self, data: bytes, frame: int, turn: int, is_key: bool) -> None:
        """Add a packet as it is (codec "copy").

        Args:
            data: The packet.
            frame: The number of the frame that it shows.
            turn: When it is decoded, in frames; rises, and is never after `frame`.
            is_key: It stands alone.
        """
        packet = av.Packet(data)
        packet.stream = self._stream
        packet.time_base = self._tick
        packet.pts, packet.dts = frame * TICKS, turn * TICKS
        packet.duration = TICKS
        packet.is_keyframe = is_key
        with writing(self.path):
            self._container.mux_one(packet)
        self.frames += 1

    def close(self) -> dict[str, Any]:
        """Finish the file, make it durable, and return the info of the feature."""
        if not self.frames:
            self.abandon()
            raise DataError(f"{self.path.name}: a video needs at least one frame")
        try:
            with writing(self.path):
                if self._settings.codec != "copy":
                    self._container.mux(self._stream.encode(None))
                close_mp4(self._container, self.path)
        except BaseException:
            self.abandon()
            raise
        self._stream = None
        return self._info()

    def abandon(self) -> None:
        """Remove the file; safe to call twice, and after `close` it does nothing."""
        if self._stream is None:
            return
        self._stream = None
        with suppress(av.FFmpegError, OSError, ValueError):
            self._container.close()
        with suppress(OSError):
            self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._stream is not None:
            self.close()
        else:
            self.abandon()

    def _open_stream(self) -> Any:
        width, height = self._size
        if self._settings.codec == "copy":
            copied = self._settings.copied
            stream: Any = add_copy_stream(self._container, copied, self._fps, width, height)
            stream.time_base = self._tick
            return stream
        encoder = _ENCODERS[self._settings.codec]
        if encoder.name == "libsvtav1":
            # It writes ten lines about itself for every video, unless told not to.
            os.environ.setdefault("SVT_LOG", "1")
        stream = self._container.add_stream(
            encoder.name, rate=self._fps, options=self._options(encoder)
        )
        stream.width, stream.height, stream.pix_fmt = width, height, encoder.pix_fmt
        stream.time_base = self._tick
        context = stream.codec_context
        context.time_base = Fraction(1, self._fps)
        context.thread_count = 1
        context.color_range = ColorRange.JPEG if encoder.canonical == "hevc" else ColorRange.MPEG
        if encoder.canonical != "hevc":
            context.colorspace = _BT601
        return stream

    def _options(self, encoder: _Encoder) -> dict[str, str]:
        settings = self._settings
        options = {"preset": settings.preset or encoder.preset, "g": str(settings.g)}
        crf = encoder.crf if settings.crf is None else settings.crf
        if crf is not None:
            options["crf"] = str(crf)
        if encoder.name == "libsvtav1":
            options["svtav1-params"] = "lp=1"
        if encoder.name == "libx265":
            options["x265-params"] = (
                f"lossless=1:pools=none:frame-threads=1:wpp=0:log-level=none:bframes=0:"
                f"keyint={settings.g}:info=0:rc-lookahead=0"
            )
        return options

    def _colour_frame(self, frame: Picture) -> av.VideoFrame:
        """Return the frame as yuv420p of limited range, BT.601."""
        if isinstance(frame, np.ndarray):
            if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
                raise UsageError(f"a frame must be HxWx3 of uint8, not {frame.shape} {frame.dtype}")
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")
        self._check_frame(frame.width, frame.height)
        name = frame.format.name
        is_yuv = name.startswith(("yuv", "uyvy", "yuyv", "nv"))
        full = not is_yuv or name.startswith("yuvj") or frame.color_range == FULL_RANGE
        if name == "yuv420p" and not full and frame.colorspace != BT709:
            return frame
        # FFmpeg's own narrowing of the range moves both chroma planes up by half a step. From BGR
        # it has a short way that rounds down: pictures become darker, and green.
        narrow = name.startswith("yuvj")
        flags = BILINEAR | BITEXACT | (ACCURATE_RND if name == "bgr24" else 0)
        if name != "yuvj420p":
            made = "yuvj420p" if narrow else "yuv420p"
            frame = converted(frame, made, full, narrow, flags, self._reformatter)
        return _limited_range(frame) if narrow else frame

    def _depth_frame(self, depth: Picture) -> av.VideoFrame:
        if not isinstance(depth, np.ndarray) or depth.ndim != 2 or depth.dtype != np.uint16:
            raise UsageError("codec depth12 takes HxW depth in millimetres of uint16")
        height, width = depth.shape
        self._check_frame(width, height)
        frame = av.VideoFrame(width, height, "gray12le")
        plane_rows(frame, "<u2")[:height, :width] = self._settings.depth.encode(depth)
        return frame

    def _check_frame(self, width: int, height: int) -> None:
        if (width, height) != self._size:
            raise DataError(
                f"a picture of {width}x{height} does not fit the video of "
                f"{self._size[0]}x{self._size[1]}: scale it first"
            )

    def _info(self) -> dict[str, Any]:
        codec = self._settings.codec
        if codec == "copy":
            name, pix_fmt = self._settings.copied, self._settings.copied_pix_fmt
            if self._jpeg is not None:
                pix_fmt = _JPEG_FORMATS.get(self._jpeg.subsampling, "yuvj420p")
        else:
            name, pix_fmt = _ENCODERS[codec].canonical, _ENCODERS[codec].pix_fmt
        info = video_info(*self._size, self._fps, name, pix_fmt)
        if codec == "depth12":
            info |= {"video.is_depth_map": True, **self._settings.depth.to_info()}
        return info


def video_info(width: int, height: int, fps: int, codec: str, pix_fmt: str) -> dict[str, Any]:
    """Return what info.json says of a video of colours."""
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": codec,
        "video.pix_fmt": pix_fmt,
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 1 if pix_fmt.startswith("gray") else 3,
        "has_audio": False,
    }


def _limited_range(frame: av.VideoFrame) -> av.VideoFrame:
    """Return a full-range 4:2:0 picture in limited range, every value rounded."""
    narrowed = av.VideoFrame(frame.width, frame.height, "yuv420p")
    narrowed.color_range = ColorRange.MPEG
    for plane, table in enumerate((_LUMA, _CHROMA, _CHROMA)):
        old, new = plane_rows(frame, plane=plane), plane_rows(narrowed, plane=plane)
        rows = np.frombuffer(old.tobytes().translate(table), np.uint8).reshape(old.shape)
        height, width = min(len(old), len(new)), min(old.shape[1], new.shape[1])
        new[:height, :width] = rows[:height, :width]
    return narrowed


def read_video(
    source: VideoSource,
    start_frame: int = 0,
    count: int | None = None,
    depth: DepthCoding | None = None,
) -> Iterator[NDArray[Any]]:
    """Decode frames, one at a time.

    Args:
        source: The video.
        start_frame: The first frame wanted.
        count: How many; None for all that follow.
        depth: How 12-bit depth was coded; lerobot's default if None.

    Yields:
        HxWx3 RGB of uint8, or HxW depth in millimetres of uint16.

    Raises:
        CorruptFile: The video cannot be decoded, or ends before the frames asked for.
    """
    path = name_of(source)
    with open_video(source) as (container, stream):
        rate = stream.average_rate
        if not rate or stream.time_base is None:
            raise CorruptFile(f"{path} is damaged: it has no frame rate")
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"err_detect": STRICT}
        first_pts = stream.start_time or 0
        if start_frame:
            ticks = round(start_frame / rate / stream.time_base)
            container.seek(first_pts + ticks, stream=stream)
        reformatter = Reformatter()
        coding = depth or DepthCoding()
        wanted = start_frame
        stop = None if count is None else start_frame + count
        if count == 0:
            return
        for frame in container.decode(stream):
            if frame.pts is None:
                raise CorruptFile(f"{path} is damaged: a frame has no time")
            number = round((frame.pts - first_pts) * stream.time_base * rate)
            if number < wanted:
                continue
            if number > wanted:
                raise CorruptFile(f"{path} is damaged: frame {wanted} is missing")
            if frame.format.name.startswith("gray1") and frame.format.name != "gray16le":
                codes = plane_rows(frame, "<u2")[: frame.height, : frame.width]
                yield coding.decode(codes)
            else:
                yield to_rgb(frame, reformatter)
            wanted += 1
            if wanted == stop:
                return
        if stop is not None:
            raise CorruptFile(f"{path} ends at frame {wanted}: {stop} were expected")


def name_of(source: VideoSource) -> str:
    """Return what a video is called in messages."""
    return str(source) if isinstance(source, Path | str) else str(source.name)


@contextmanager
def open_video(source: VideoSource) -> Iterator[tuple[Any, Any]]:
    """Open a video for reading; what FFmpeg says of a bad one becomes a CorruptFile."""
    path = name_of(source)
    expected: tuple[type[BaseException], ...] = (av.FFmpegError, OSError, ValueError)
    try:
        # FFmpeg takes what stands before a colon in a relative path for a protocol.
        opened = os.path.abspath(source) if isinstance(source, Path | str) else source
        with av.open(opened, **ANY_METADATA) as container:
            expected = (av.FFmpegError, MemoryError, ZeroDivisionError, OverflowError)
            if not container.streams.video:
                raise CorruptFile(f"{path} holds no video")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise CorruptFile(f"{path} is damaged: its codec is not known")
            yield container, stream
    except expected as error:
        if isinstance(error, PenstockError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise CorruptFile(f"{path} cannot be read as a video ({reason})") from error


@contextmanager
def _no_realtime() -> Iterator[None]:
    """Take the real-time scheduling back that a library gives to threads meanwhile (Linux).

    SVT-AV1, when root runs it, puts the thread that opens it and all of its own before every other
    program of the machine, for ever; children of the process inherit that.
    """
    before = _realtime_threads()
    try:
        yield
    finally:
        for thread in _realtime_threads() - before:
            with suppress(OSError):  # it has ended
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _realtime_threads() -> set[int]:
    found = set()
    if sys.platform == "linux":
        for name in os.listdir("/proc/self/task"):
            with suppress(OSError):
                if os.sched_getscheduler(int(name)) in (os.SCHED_FIFO, os.SCHED_RR):
                    found.add(int(name))
    return found
