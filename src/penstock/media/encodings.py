"""Pictures as messages hold them, and the one table of how their pixels may be encoded."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

# Raw pixels as sensor_msgs/Image and Foxglove name them: FFmpeg's name (without the byte order of
# 16 bits) and the bytes of a pixel in the first plane. OpenCV's names have blue first.
RAW_FORMATS: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
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
DEPTH_FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {"16UC1": "u2", "mono16": "u2", "16SC1": "i2", "32FC1": "f4", "64FC1": "f8"}
)
DEPTH_ENCODINGS: Final = ("16UC1", "16SC1", "32FC1", "64FC1", "compressedDepth", "rvl")
# How messages name the codec of a video: FFmpeg's name of it, and of its decoder.
CODECS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "h264": ("h264", "h264"),
        "h265": ("hevc", "hevc"),
        "av1": ("av1", "libdav1d"),
        "vp9": ("vp9", "vp9"),
    }
)
_CODEC_NAMES: Final = {"hevc": "h265", "libx264": "h264", "libx265": "h265", "avc": "h264"}
PNG_MAGIC: Final = b"\x89PNG\r\n\x1a\n"
_JPEG_MAGIC: Final = b"\xff\xd8\xff"
_DEPTH_HEADER_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class ImageMessage:
    """A picture as a message holds it.

    Attributes:
        encoding: "jpeg", "png", "webp", "compressedDepth" (the data starts at the PNG magic), "rvl"
            or the encoding of a raw picture: "rgb8", "bgr8", "mono8", "mono16", "16UC1", ...
            A packet of a video has that of the video: "h264", "h265", "av1", "vp9".
            A compressed picture of another kind has the first word of its format.
        data: The pixels, or the compressed file; not copied.
        width: Columns; 0 if compressed, but for "rvl".
        height: Rows; 0 if compressed, but for "rvl".
        step: Bytes from row to row; 0 if compressed.
        is_big_endian: Of raw pixels wider than a byte.
        depth_quantization: Of a compressed depth that was recorded in metres (32FC1), the numbers a
            and b: a value v means a / (v - b) metres, and 0 none. None for values as recorded.
    """

    encoding: str
    data: memoryview
    width: int = 0
    height: int = 0
    step: int = 0
    is_big_endian: bool = False
    depth_quantization: tuple[float, float] | None = None


def video_packet(text: str, data: memoryview) -> ImageMessage:
    """Return a packet of a video, whose codec a text names: "H.264", "hevc", "libx264", …."""
    words = text.lower().replace(";", " ").replace(",", " ").split()
    name = words[0].replace(".", "").replace("-", "") if words else "unknown"
    name = name.partition("_")[0]
    return ImageMessage(_CODEC_NAMES.get(name, name), data)


def compressed_image(text: str, data: memoryview) -> ImageMessage:
    """Return a compressed picture; its own first bytes count more than the format's text."""
    head = bytes(data[: _DEPTH_HEADER_BYTES + 8])
    body, is_depth = head[_DEPTH_HEADER_BYTES:], "compressedDepth" in text
    quantization = None
    if is_depth and text.startswith("32FC1") and body:
        quantization = struct.unpack_from("<4x2f", head)
    if head.startswith(_JPEG_MAGIC):
        encoding = "jpeg"
    elif head.startswith(PNG_MAGIC):
        encoding = "compressedDepth" if text.startswith("16UC1") else "png"
    elif head[8:12] == b"WEBP":
        encoding = "webp"
    elif body == PNG_MAGIC:
        encoding, data = "compressedDepth", data[_DEPTH_HEADER_BYTES:]
    elif is_depth and "rvl" in text.lower():
        if len(body) < 8:
            return ImageMessage("rvl", data, depth_quantization=quantization)
        width, height = struct.unpack("<2I", body)
        return ImageMessage("rvl", data[len(head) :], width, height, 0, False, quantization)
    elif is_depth:
        encoding = "compressedDepth"
    elif "jpeg" in text.lower() or "jpg" in text.lower():
        encoding = "jpeg"
    elif "png" in text.lower():
        encoding = "png"
    elif video_packet(text, data).encoding in CODECS:
        return video_packet(text, data)
    else:
        encoding = text.split()[0].rstrip(";") if text.split() else "unknown"
    return ImageMessage(encoding, data, depth_quantization=quantization)
