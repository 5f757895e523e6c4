"""Where the pictures of one camera go while an episode is staged: a video, or PNGs in a parquet.

Each takes the statistics of sampled frames, and belongs to one thread.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from numpy.typing import NDArray

from penstock.core.files import storage_error
from penstock.dataset.layout import IMAGE_TYPE, Feature
from penstock.dataset.stats import PictureStats, picture_stride, sample_indices
from penstock.dataset.tables import new_parquet
from penstock.errors import DataError, PenstockError, UsageError
from penstock.media.av_versions import Reformatter
from penstock.media.images import ImageDecoder, plane_rows, to_rgb
from penstock.media.video import Picture, VideoSettings, VideoWriter

_GROUP_BYTES = 16 << 20
# Full-range planes and how many pixels share a chroma value, across and down.
_FULL_YUV = {"yuvj420p": (2, 2), "yuvj422p": (2, 1), "yuvj444p": (1, 1), "yuvj440p": (1, 2)}


class PictureSink:
    """Takes the frames of one camera, in order, and the statistics of sampled ones.

    Args:
        path: The file to make: a video, or a parquet of PNGs if that is what the feature is.
        feature: The camera.
        settings: How a video is stored.
        fps: Frames per second.
        frames_expected: How many will come.

    Attributes:
        frames: How many there are so far.
        info: That of the feature, at the end.
    """

    def __init__(
        self, path: Path, feature: Feature, settings: VideoSettings, fps: int, frames_expected: int
    ) -> None:
        self.path, self.frames = path, 0
        _, height, width = feature.picture_size
        self.stats = PictureStats.of(feature)
        if self.stats.channels not in (1, 3):
            raise UsageError(f"pictures of {self.stats.channels} channels cannot be stored: 1 or 3")
        self.info: dict[str, Any] | None = None
        self._stride = picture_stride(height, width)
        self._sampled = sample_indices(frames_expected)
        self._next_sample = 0
        self._decoder = ImageDecoder()
        self._reformatter = Reformatter()
        self._copies = settings.codec == "copy"
        if feature.dtype == "image":
            self._writer: Any = _PngWriter(path, width, height, self.stats.depth)
            return
        if (settings.codec == "depth12") != (self.stats.channels == 1):
            raise UsageError(
                f"codec {settings.codec} does not fit pictures of {self.stats.channels} channels"
            )
        self._writer = VideoWriter(path, settings, fps, width, height, frames_expected)

    def add_frame(self, frame: Picture) -> None:
        """Add a decoded picture, HxWx3 RGB of uint8, or HxW depth in mm of uint16."""
        as_it_is = isinstance(self._writer, VideoWriter)
        self._writer.encode(frame if as_it_is else self._pixels(frame))
        self._count(frame)

    def add_jpeg(self, data: bytes) -> None:
        """Add a picture that is a JPEG: as it is with codec "copy", decoded otherwise."""
        if not self._copies:
            self.add_frame(self._decoder.jpeg(data))
            return
        body = bytes(data)
        self._writer.copy(body)
        self._count(body)

    def add_packet(self, data: bytes, frame: int, turn: int, is_key: bool) -> None:
        """Add a packet of a video as it is; see `VideoWriter.copy_packet`."""
        self._writer.copy_packet(data, frame, turn, is_key)

    def add_copied(self, picture: Picture) -> None:
        """Count a frame whose packet is, or will be, added; in the order of the frames."""
        self._count(picture)

    def close(self) -> None:
        """Finish the file and make it durable; safe to call twice."""
        if self.info is None:
            self.info = self._writer.close()

    def abandon(self) -> None:
        """Remove the file; safe to call twice."""
        self._writer.abandon()

    def _count(self, picture: Picture | bytes) -> None:
        """Note a frame that was written, and take its statistics if it is a sampled one."""
        place = self._next_sample
        if place < len(self._sampled) and self.frames == self._sampled[place]:
            self._next_sample += 1
            self.stats.add(self._sample(picture))
        self.frames += 1

    def _sample(self, picture: Picture | bytes) -> NDArray[Any]:
        """Return the pixels that count, every 4th at 640x480, as HxWxC."""
        if isinstance(picture, bytes):
            picture = self._decoder.jpeg(picture)
        if isinstance(picture, av.VideoFrame) and picture.format.name in _FULL_YUV:
            return _sampled_rgb(picture, self._stride)
        sample: NDArray[Any] = self._pixels(picture)[:: self._stride, :: self._stride]
        return sample

    def _pixels(self, picture: Picture) -> NDArray[Any]:
        if isinstance(picture, np.ndarray):
            return picture
        return to_rgb(picture, self._reformatter)


def _sampled_rgb(frame: av.VideoFrame, stride: int) -> NDArray[np.uint8]:
    """Convert only the pixels that count, full-range BT.601: a tenth of the time of them all."""
    across, down = _FULL_YUV[frame.format.name]
    height, width = frame.height, frame.width
    luma = plane_rows(frame)[:height:stride, :width:stride]
    rows, columns = np.arange(0, height, stride) // down, np.arange(0, width, stride) // across
    sample = np.empty((*luma.shape, 3), np.uint8)
    blue, red = (plane_rows(frame, plane=k)[rows][:, columns] for k in (1, 2))
    # In units of 1/256, so that sums stay whole numbers; 128 rounds.
    bright = (luma.astype(np.int32) << 8) + 128
    blue, red = blue.astype(np.int32) - 128, red.astype(np.int32) - 128
    for channel, value in enumerate(
        (bright + 359 * red, bright - 88 * blue - 183 * red, bright + 454 * blue)
    ):
        np.clip(value >> 8, 0, 255, out=value)
        sample[..., channel] = value
    return sample


class _PngWriter:
    """PNGs in a parquet file of their own, which the build joins with the other columns."""

    def __init__(self, path: Path, width: int, height: int, depth: bool) -> None:
        self._path, self._width, self._height, self._depth = path, width, height, depth
        self._kind, self._dtype = ("gray16be", ">u2") if depth else ("rgb24", "u1")
        encoder = CodecContext.create("png", "w")
        encoder.width, encoder.height, encoder.pix_fmt = width, height, self._kind
        encoder.time_base, encoder.thread_count = Fraction(1, 1), 1
        encoder.options = {"compression_level": "1", "pred": "up"}
        self._encoder: VideoCodecContext = encoder
        self._frames = 0
        self._waiting: list[dict[str, Any]] = []
        self._waiting_bytes = 0
        self._stack = ExitStack()
        schema = pa.schema([("image", IMAGE_TYPE)])
        # A PNG is compressed already.
        parquet = new_parquet(path, schema, compression="none", dictionary=False)
        self._parquet: Any = self._stack.enter_context(parquet)

    def encode(self, pixels: NDArray[Any]) -> None:
        if pixels.shape[:2] != (self._height, self._width):
            raise DataError(
                f"a picture of {pixels.shape[1]}x{pixels.shape[0]} does not fit the feature of "
                f"{self._width}x{self._height}: scale it first"
            )
        depth = pixels.ndim == 2
        if depth != self._depth or pixels.dtype != (np.uint16 if depth else np.uint8):
            raise UsageError(f"a picture of {pixels.shape} {pixels.dtype} does not fit the feature")
        frame = av.VideoFrame(self._width, self._height, self._kind)
        rows = pixels.reshape(self._height, -1)
        plane_rows(frame, self._dtype)[: self._height, : rows.shape[1]] = rows
        frame.pts = self._frames
        try:
            data = b"".join(bytes(packet) for packet in self._encoder.encode(frame))
        except (av.FFmpegError, ValueError) as error:
            raise DataError(f"a picture cannot be stored as PNG ({error})") from error
        self._waiting.append({"bytes": data, "path": f"frame-{self._frames:06d}.png"})
        self._waiting_bytes += len(data)
        self._frames += 1
        if self._waiting_bytes >= _GROUP_BYTES:
            self._flush()

    def close(self) -> dict[str, Any]:
        if not self._frames:
            raise DataError("a camera needs at least one frame")
        self._flush()
        self._stack.close()
        return {"video.is_depth_map": True} if self._depth else {}

    def abandon(self) -> None:
        with suppress(PenstockError, OSError, pa.ArrowException):
            self._stack.__exit__(DataError, DataError("given up"), None)

    def _flush(self) -> None:
        if self._waiting:
            column = pa.array(self._waiting, IMAGE_TYPE)
            try:
                self._parquet.write_table(pa.table({"image": column}))
            except OSError as error:
                raise storage_error("write", self._path, error) from error
        self._waiting, self._waiting_bytes = [], 0
