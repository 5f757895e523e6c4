"""Pictures as cameras send them, decoded by FFmpeg: JPEG, PNG, WebP, raw pixels, depth maps.

A size is read from the header and checked before anything is decoded. Whatever is wrong with the
bytes of a picture is a DataError.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, cast

import av
import numpy as np
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from av.video.reformatter import ColorRange, Colorspace
from numpy.typing import NDArray

from penstock.errors import DataError, UsageError
from penstock.media.av_versions import ACCURATE_RND, BILINEAR, BITEXACT, FULL_CHR_H_INT, Reformatter
from penstock.media.depth import read_rvl
from penstock.media.encodings import DEPTH_FORMATS, PNG_MAGIC, RAW_FORMATS, ImageMessage
from penstock.media.headers import (
    MAX_PIXELS,
    Buffer,
    check_jpeg,
    check_pixels,
    png_size,
    webp_size,
)

STRICT = "crccheck+bitstream+buffer+explode"  # otherwise FFmpeg paints over what is damaged
FULL_RANGE = 2  # AVCOL_RANGE_JPEG
BT709 = 1  # AVCOL_SPC_BT709
# Without the last two FFmpeg is faster and rounds down: pictures become darker by 1 of 255.
_EXACT = BILINEAR | BITEXACT | ACCURATE_RND | FULL_CHR_H_INT


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

    def stored(self, data: Buffer) -> NDArray[Any]:
        """Decode a picture of a dataset, a PNG, JPEG or TIFF.

        Returns:
            RGB, (height, width, 3) of uint8; of 16 bits in one channel, which are distances, the
            millimetres, (height, width) of uint16.
        """
        head = bytes(memoryview(data)[:4])
        if head == PNG_MAGIC[:4]:
            frame = self.png(data)
        elif head[:2] == b"\xff\xd8":
            frame = self.jpeg(data)
        elif head in (b"II*\0", b"MM\0*"):
            frame = self._decode("tiff", data)
        else:
            raise DataError(f"a picture is no PNG, JPEG or TIFF: it begins with {head.hex()}")
        return _words(frame) if frame.format.name.startswith("gray16") else to_rgb(frame)

    def color(self, image: ImageMessage) -> av.VideoFrame:
        """Decode a colour picture of any kind: "jpeg", "png", "webp", or raw pixels."""
        if image.encoding == "jpeg":
            return self.jpeg(image.data)
        if image.encoding == "webp":
            check_pixels(*webp_size(image.data))
            return self._decode("webp", image.data)
        is_png = image.encoding in ("png", "compressedDepth")
        return self.png(image.data) if is_png else _raw_frame(image)

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
        self, image: ImageMessage, size: tuple[int, int] | None = None
    ) -> NDArray[np.uint16]:
        """Decode a depth map to millimetres: a 16-bit PNG, RVL, 16UC1 (mm) or 32FC1 (metres).

        What 16 bits cannot hold, and NaN, becomes 0: no measurement.

        Args:
            image: The picture.
            size: (width, height) to scale to, by the nearest pixel.
        """
        depth = self._depth_mm(image)
        if image.depth_quantization is not None:
            a, b = image.depth_quantization
            with np.errstate(divide="ignore", invalid="ignore"):
                depth = _millimetres(np.where(depth > 0, a / (depth - np.float64(b)), 0))
        return resize_depth(depth, *size) if size else depth

    def _depth_mm(self, image: ImageMessage) -> NDArray[np.uint16]:
        if image.encoding in ("png", "compressedDepth"):
            frame = self.png(image.data)
            if not frame.format.name.startswith("gray16"):
                raise DataError(f"a depth PNG must have 16 bits, this one is {frame.format.name}")
            return _words(frame)
        if image.encoding == "rvl":
            check_pixels(image.width, image.height)
            return read_rvl(image.data, image.width, image.height)
        if image.encoding not in DEPTH_FORMATS:
            known = ", ".join(["png", *DEPTH_FORMATS])
            raise DataError(f"depth in the encoding {image.encoding[:40]!r} is not known: {known}")
        kind = np.dtype((">" if image.is_big_endian else "<") + DEPTH_FORMATS[image.encoding])
        rows = _raw_rows(image.data, image.width, image.height, kind.itemsize, image.step)
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
            kind = {"mjpeg": "JPEG", "png": "PNG", "webp": "WebP", "tiff": "TIFF"}[name]
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise DataError(f"the {kind} cannot be decoded ({reason})") from error
        if len(frames) != 1 or frames[0].is_corrupt:
            raise DataError(f"the picture of {len(data)} bytes cannot be decoded")
        if name == "mjpeg":
            self._jpegs = codec
        return frames[0]


def _new_codec(name: str) -> VideoCodecContext:
    codec = cast(VideoCodecContext, CodecContext.create(name, "r"))
    codec.thread_count = 1  # one picture is one frame: threads would only delay it
    codec.options = {"err_detect": STRICT, "max_pixels": str(MAX_PIXELS)}
    return codec


def _words(frame: av.VideoFrame) -> NDArray[np.uint16]:
    """Return the pixels of a grey picture of 16 bits."""
    words = plane_rows(frame, ">u2" if frame.format.name.endswith("be") else "<u2")
    return words[: frame.height, : frame.width].astype(np.uint16)


def _raw_frame(image: ImageMessage) -> av.VideoFrame:
    """Wrap raw pixels."""
    width, height, step = image.width, image.height, image.step
    if image.encoding not in RAW_FORMATS:
        raise DataError(
            f"pictures in the encoding {image.encoding[:40]!r} are not known: raw ones of "
            "sensor_msgs, JPEG, PNG, WebP and compressed depths are"
        )
    name, pixel_bytes = RAW_FORMATS[image.encoding]
    if name.endswith(("16", "48", "64")):
        name += "be" if image.is_big_endian else "le"
    rows = _raw_rows(image.data, width, height, pixel_bytes, step)
    frame = av.VideoFrame(width, height, name)
    plane_rows(frame)[:height, : rows.shape[1]] = rows
    if name.startswith("nv"):  # the colours follow in a plane of their own
        across, down = (1, 1) if name == "nv24" else (2, 2)
        start, step = (step or width) * height, (step or width) * 2 // across
        chroma = memoryview(image.data)[start:]
        half = _raw_rows(chroma, -(-width // across), -(-height // down), 2, step)
        plane_rows(frame, plane=1)[: len(half), : half.shape[1]] = half
    if name.startswith("bayer"):  # FFmpeg cannot scale it, and has a coarse way to YUV
        frame = converted(frame, "rgb24", True, True, _EXACT, Reformatter())
    return frame


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


def converted(
    frame: av.VideoFrame,
    name: str,
    from_full: bool,
    to_full: bool,
    flags: int,
    reformatter: Reformatter,
) -> av.VideoFrame:
    """Convert the pixels of a picture, by the colour matrix it says it has, to BT.601."""
    matrix = Colorspace.ITU709 if frame.colorspace == BT709 else Colorspace.ITU601
    try:
        return reformatter.reformat(
            frame,
            format=name,
            src_colorspace=matrix,
            dst_colorspace=Colorspace.ITU601,
            src_color_range=ColorRange.JPEG if from_full else ColorRange.MPEG,
            dst_color_range=ColorRange.JPEG if to_full else ColorRange.MPEG,
            interpolation=flags,
        )
    except (av.FFmpegError, ValueError) as error:
        old = frame.format.name
        raise DataError(f"cannot convert a {old} picture to {name} ({error})") from error


def to_rgb(frame: av.VideoFrame, reformatter: Reformatter | None = None) -> NDArray[np.uint8]:
    """Convert a decoded picture to HxWx3 RGB, by the colour matrix and range it says it has."""
    name = frame.format.name
    if name == "rgb24":
        rgb = frame
    else:
        full = name.startswith(("yuvj", "gray")) or frame.color_range == FULL_RANGE
        rgb = converted(frame, "rgb24", full, True, _EXACT, reformatter or Reformatter())
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
