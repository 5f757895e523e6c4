"""Pictures as cameras send them, decoded by FFmpeg: JPEG, PNG, WebP, raw pixels, depth maps.

A size is read from the header and checked before anything is decoded. Whatever is wrong with the
bytes of a picture is a DataError.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, cast

import av
import numpy as np
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import ColorRange, Colorspace
from numpy.typing import NDArray

from penstock.errors import DataError, UsageError
from penstock.media.av_versions import (
    ACCURATE_RND,
    BILINEAR,
    BITEXACT,
    FULL_CHR_H_INT,
    Reformatter,
)
from penstock.media.headers import (
    MAX_PIXELS,
    Buffer,
    JpegSize,
    check_jpeg,
    check_pixels,
    jpeg_body,
    jpeg_size,
    picture_size,
    png_size,
    webp_size,
)
from penstock.media.rvl import read_rvl

__all__ = [
    "DEPTH_ENCODINGS",
    "MAX_PIXELS",
    "ImageDecoder",
    "JpegSize",
    "grey_from_depth",
    "jpeg_body",
    "jpeg_size",
    "picture_size",
    "plane_rows",
    "png_size",
    "resize_depth",
    "thumbnail",
    "to_rgb",
]

_FULL_RANGE = 2  # AVCOL_RANGE_JPEG
_BT709 = 1  # AVCOL_SPC_BT709
# Without the last two FFmpeg is faster and rounds down: pictures become darker by 1 of 255.
_EXACT = BILINEAR | BITEXACT | ACCURATE_RND | FULL_CHR_H_INT
# Raw pixels as sensor_msgs/Image and Foxglove name them: FFmpeg's name (without the byte order of
# 16 bits) and the bytes of a pixel in the first plane. OpenCV's names have blue first.
_RAW_FORMATS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        **{"rgb8": ("rgb24", 3), "bgr8": ("bgr24", 3), "8UC3": ("bgr24", 3)},
        **{"rgba8": ("rgba", 4), "bgra8": ("bgra", 4), "8UC4": ("bgra", 4)},
        **{"rgb16": ("rgb48", 6), "bgr16": ("bgr48", 6), "16UC3": ("bgr48", 6)},
        **{"rgba16": ("rgba64", 8), "bgra16": ("bgra64", 8), "16UC4": ("bgra64", 8)},
        **{"mono8": ("gray", 1), "8UC1": ("gray", 1), "mono16": ("gray16", 2)},
        **{"yuv422": ("uyvy422", 2), "uyvy": ("uyvy422", 2)},
        **{"yuv422_yuy2": ("yuyv422", 2), "yuyv": ("yuyv422", 2)},
        **{"nv12": ("nv12", 1), "nv21": ("nv21", 1), "nv24": ("nv24", 1)},
        **{
            f"bayer_{order}{bits}": (f"bayer_{order}{bits}", bits // 8)
            for order in ("rggb", "bggr", "gbrg", "grbg")
            for bits in (8, 16)
        },
    }
)
# Distances: whole numbers are millimetres, the others metres.
_DEPTH_FORMATS: Mapping[str, str] = MappingProxyType(
    {"16UC1": "u2", "mono16": "u2", "16SC1": "i2", "32FC1": "f4", "64FC1": "f8"}
)
DEPTH_ENCODINGS = ("16UC1", "16SC1", "32FC1", "64FC1", "compressedDepth", "rvl")


def _millimetres(metres: NDArray[Any]) -> NDArray[np.uint16]:
    """Return distances as 16 bits of millimetres; what does not fit, and NaN, is 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        millimetres = np.rint(metres * metres.dtype.type(1000))
        good = (millimetres >= 0) & (millimetres <= 65535)
        return np.where(good, millimetres, 0).astype(np.uint16)


class ImageDecoder:
    """Decodes the pictures of one camera; it keeps its codec open, and belongs to one thread.

    Example:
        decoder = ImageDecoder()
        frame = decoder.jpeg(message.data)     # planes of YUV, no copy into RGB
        pixels = to_rgb(frame)                 # if they are wanted
    """

    def __init__(self) -> None:
        self._jpegs: VideoCodecContext | None = None
        self._reformatter = Reformatter()

    def jpeg(self, data: Buffer) -> av.VideoFrame:
        """Decode a JPEG into the planes it holds (YUV, full range)."""
        check_jpeg(data)
        return self._decode("mjpeg", data)

    def png(self, data: Buffer) -> av.VideoFrame:
        """Decode a PNG into the pixels it holds."""
        check_pixels(*png_size(data))
        return self._decode("png", data)

    def raw(
        self,
        data: Buffer,
        width: int,
        height: int,
        encoding: str,
        step: int = 0,
        is_big_endian: bool = False,
    ) -> av.VideoFrame:
        """Wrap raw pixels of a sensor_msgs/Image; `step` is the length of a row in bytes."""
        if encoding not in _RAW_FORMATS:
            known = ", ".join(_RAW_FORMATS)
            raise DataError(f"pictures in the encoding {encoding[:40]!r} are not known: {known}")
        name, pixel_bytes = _RAW_FORMATS[encoding]
        if name.endswith(("16", "48", "64")):
            name += "be" if is_big_endian else "le"
        rows = _raw_rows(data, width, height, pixel_bytes, step)
        frame = av.VideoFrame(width, height, name)
        plane_rows(frame)[:height, : rows.shape[1]] = rows
        if name.startswith("nv"):  # the colours follow in a plane of their own
            across, down = (1, 1) if name == "nv24" else (2, 2)
            start, step = (step or width) * height, (step or width) * 2 // across
            chroma = memoryview(data)[start:]
            half = _raw_rows(chroma, -(-width // across), -(-height // down), 2, step)
            plane_rows(frame, plane=1)[: len(half), : half.shape[1]] = half
        return frame

    def color(
        self,
        data: Buffer,
        encoding: str,
        width: int = 0,
        height: int = 0,
        step: int = 0,
        is_big_endian: bool = False,
    ) -> av.VideoFrame:
        """Decode a colour picture of any kind: "jpeg", "png", "webp", or the name of raw pixels."""
        if encoding == "jpeg":
            return self.jpeg(data)
        if encoding == "webp":
            check_pixels(*webp_size(data))
            return self._decode("webp", data)
        if encoding == "png":
            return self.png(data)
        return self.raw(data, width, height, encoding, step, is_big_endian)

    def resize(self, frame: av.VideoFrame, width: int, height: int) -> av.VideoFrame:
        """Scale a colour picture, bilinear; its format and range stay."""
        if (frame.width, frame.height) == (width, height):
            return frame
        full = frame.color_range
        try:
            return self._reformatter.reformat(
                frame,
                width,
                height,
                interpolation=BILINEAR | BITEXACT,
                src_color_range=full,
                dst_color_range=full,
            )
        except (av.FFmpegError, ValueError) as error:
            raise DataError(f"cannot scale a {frame.format.name} picture ({error})") from error

    def depth_mm(
        self,
        data: Buffer,
        encoding: str = "png",
        width: int = 0,
        height: int = 0,
        step: int = 0,
        is_big_endian: bool = False,
        size: tuple[int, int] | None = None,
        quantization: tuple[float, float] | None = None,
    ) -> NDArray[np.uint16]:
        """Decode a depth map to millimetres: a 16-bit PNG, RVL, 16UC1 (mm) or 32FC1 (metres).

        What 16 bits cannot hold, and NaN, becomes 0: no measurement.

        Args:
            data: The PNG, or the pixels.
            encoding: "png", "compressedDepth", "rvl", "mono16", or raw: "16UC1", "32FC1", ….
            width: Of raw pixels.
            height: Of raw pixels.
            step: Bytes from one row of raw pixels to the next; 0 for no padding.
            is_big_endian: The byte order of raw pixels.
            size: (width, height) to scale to, by the nearest pixel.
            quantization: Of a PNG of metres, a and b: a value v means a / (v - b) metres.
        """
        depth = self._depth_mm(data, encoding, width, height, step, is_big_endian)
        if quantization is not None:
            a, b = quantization
            with np.errstate(divide="ignore", invalid="ignore"):
                depth = _millimetres(np.where(depth > 0, a / (depth - np.float64(b)), 0))
        return resize_depth(depth, *size) if size else depth

    def _depth_mm(
        self,
        data: Buffer,
        encoding: str,
        width: int,
        height: int,
        step: int,
        is_big_endian: bool,
    ) -> NDArray[np.uint16]:
        if encoding in ("png", "compressedDepth"):
            frame = self.png(data)
            if not frame.format.name.startswith("gray16"):
                raise DataError(f"a depth PNG must have 16 bits, this one is {frame.format.name}")
            order = ">u2" if frame.format.name.endswith("be") else "<u2"
            words = plane_rows(frame, order)
            return words[: frame.height, : frame.width].astype(np.uint16)
        if encoding == "rvl":
            check_pixels(width, height)
            return read_rvl(data, width, height)
        if encoding not in _DEPTH_FORMATS:
            known = ", ".join(["png", *_DEPTH_FORMATS])
            raise DataError(f"depth in the encoding {encoding[:40]!r} is not known: {known}")
        kind = np.dtype(_DEPTH_FORMATS[encoding]).newbyteorder(">" if is_big_endian else "<")
        rows = _raw_rows(data, width, height, kind.itemsize, step)
        values = np.ascontiguousarray(rows).view(kind)
        if kind.kind in "ui":
            native: NDArray[np.uint16] = np.maximum(values, 0).astype(np.uint16)
            return native
        return _millimetres(values.astype(np.float32))

    def _decode(self, name: str, data: Buffer) -> av.VideoFrame:
        # A PNG codec of FFmpeg 8.1 that is used twice takes the last row of the picture before for
        # the one above the first. Opening one costs 0.1 ms; JPEGs have no such memory.
        codec = (self._jpegs if name == "mjpeg" else None) or _new_codec(name)
        self._jpegs = None  # a codec that failed may remember what it failed on
        try:
            frames = codec.decode(av.Packet(cast(bytes, data)))
        except (av.FFmpegError, ValueError, MemoryError) as error:
            kind = {"mjpeg": "JPEG", "png": "PNG", "webp": "WebP"}[name]
            raise DataError(f"the {kind} cannot be decoded ({_reason(error)})") from error
        if len(frames) != 1 or frames[0].is_corrupt:
            raise DataError(f"the picture of {len(data)} bytes cannot be decoded")
        if name == "mjpeg":
            self._jpegs = codec
        return frames[0]


def _new_codec(name: str) -> VideoCodecContext:
    codec = cast(VideoCodecContext, CodecContext.create(name, "r"))
    codec.thread_count = 1  # one picture is one frame: threads would only delay it
    codec.options = {"err_detect": "crccheck+bitstream+buffer+explode"}
    return codec


def plane_rows(frame: av.VideoFrame, dtype: str = "u1", plane: int = 0) -> NDArray[Any]:
    """View a plane of a picture as rows, with whatever padding they end in; no copy."""
    found: Any = frame.planes[plane]
    kind = np.dtype(dtype)
    words = np.frombuffer(found, kind)
    return words.reshape(-1, found.line_size // kind.itemsize)


def resize_depth(depth: NDArray[Any], width: int, height: int) -> NDArray[Any]:
    """Scale a depth map by the nearest pixel: distances are never mixed."""
    old_height, old_width = depth.shape
    if (old_width, old_height) == (width, height):
        return depth
    rows = np.arange(height) * old_height // height
    columns = np.arange(width) * old_width // width
    scaled: NDArray[Any] = depth[rows[:, None], columns[None, :]]
    return scaled


def grey_from_depth(depth: NDArray[np.uint16], low_mm: float, high_mm: float) -> av.VideoFrame:
    """Show depth as 8-bit grey: black at `low_mm` and nearer, white at `high_mm` and beyond."""
    if not low_mm < high_mm:
        raise UsageError(f"a depth range must rise, and this one is {low_mm} to {high_mm} mm")
    table = (np.arange(65536) - low_mm) * (255 / (high_mm - low_mm))
    grey = np.rint(table.clip(0, 255)).astype(np.uint8)[depth]
    frame = av.VideoFrame(depth.shape[1], depth.shape[0], "gray")
    plane_rows(frame)[: depth.shape[0], : depth.shape[1]] = grey
    return frame


def thumbnail(picture: av.VideoFrame | NDArray[np.uint8], width: int = 160) -> bytes:
    """Return a JPEG of a picture, at most so wide; an array is RGB."""
    if isinstance(picture, np.ndarray):
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
    width = max(2, min(width, picture.width) // 2 * 2)
    height = max(2, round(picture.height * width / picture.width / 2) * 2)
    encoder = CodecContext.create("mjpeg", "w")
    encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuvj420p"
    encoder.time_base, encoder.thread_count = Fraction(1, 1), 1
    encoder.options = {"qmin": "2", "qmax": "5"}
    try:
        small = Reformatter().reformat(picture, width, height, "rgb24")
        small = Reformatter().reformat(small, format="yuvj420p", dst_colorspace=Colorspace.ITU601)
        small.pts = 0
        return b"".join(bytes(packet) for packet in [*encoder.encode(small), *encoder.encode()])
    except (av.FFmpegError, ValueError) as error:
        raise DataError(f"cannot scale a {picture.format.name} picture ({error})") from error


def to_rgb(frame: av.VideoFrame, reformatter: Reformatter | None = None) -> NDArray[np.uint8]:
    """Convert a decoded picture to HxWx3 RGB, by the colour matrix and range it says it has."""
    name = frame.format.name
    if name == "rgb24":
        rgb = frame
    else:
        full = name.startswith(("yuvj", "gray")) or frame.color_range == _FULL_RANGE
        try:
            rgb = (reformatter or Reformatter()).reformat(
                frame,
                format="rgb24",
                src_colorspace=Colorspace.ITU709
                if frame.colorspace == _BT709
                else Colorspace.ITU601,
                dst_colorspace=Colorspace.ITU601,
                src_color_range=ColorRange.JPEG if full else ColorRange.MPEG,
                dst_color_range=ColorRange.JPEG,
                interpolation=_EXACT,
            )
        except (av.FFmpegError, ValueError) as error:
            raise DataError(f"cannot convert a {name} picture to RGB ({error})") from error
    rows = plane_rows(rgb)[: rgb.height, : 3 * rgb.width]
    return rows.reshape(rgb.height, rgb.width, 3)


def _raw_rows(
    data: Buffer, width: int, height: int, pixel_bytes: int, step: int
) -> NDArray[np.uint8]:
    """Check the size of raw pixels and view them as rows without their padding."""
    row_bytes = width * pixel_bytes
    step = step or row_bytes
    if width < 1 or height < 1 or step < row_bytes:
        raise DataError(f"a raw picture of {width}x{height} cannot have rows of {step} bytes")
    check_pixels(width, height)
    have = memoryview(data).nbytes
    if have < step * (height - 1) + row_bytes:
        raise DataError(
            f"a raw picture of {width}x{height} needs {step * height} bytes, not {have}"
        )
    flat = np.frombuffer(data, np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (height, row_bytes), (step, 1), writeable=False)


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
