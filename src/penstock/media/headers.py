"""What the headers of pictures say: sizes, read and checked before anything is decoded."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from penstock.errors import DataError, LimitExceeded
from penstock.media.encodings import PNG_MAGIC, ImageMessage

Buffer = bytes | bytearray | memoryview

MAX_PIXELS = 1 << 26  # 67 megapixels: above any robot camera, 200 MB as RGB
_TAIL_BYTES = 4096  # cameras may pad a JPEG behind its end marker


class JpegSize(NamedTuple):
    """What the frame header of a JPEG says."""

    width: int
    height: int
    subsampling: str  # "420", "422", "444", "440", "411", "gray", or the bare factors
    components: int


def jpeg_size(data: Buffer) -> JpegSize:
    """Read the size of a JPEG from its frame header, decoding nothing."""
    view = memoryview(data).cast("B")
    if bytes(view[:2]) != b"\xff\xd8":
        raise DataError("the picture is no JPEG: it does not start with ff d8")
    at, end = 2, len(view)
    while at + 4 <= end:
        if view[at] != 0xFF:
            raise DataError(f"the JPEG is damaged: no marker at byte {at}")
        marker = view[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:  # markers without a segment
            at += 2
            continue
        if marker in (0xD9, 0xDA):
            break
        length = view[at + 2] << 8 | view[at + 3]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return _frame_header(bytes(view[at + 4 : at + 2 + length]))
        at += 2 + length
    raise DataError("the JPEG is damaged: it has no frame header")


@lru_cache(maxsize=32)  # the pictures of a camera have the same
def _frame_header(segment: bytes) -> JpegSize:
    if len(segment) < 6:
        raise DataError("the JPEG is damaged: its frame header is cut")
    _, height, width, components = struct.unpack_from(">BHHB", segment)
    factors = [segment[7 + 3 * i] for i in range(components) if 7 + 3 * i < len(segment)]
    if len(factors) != components or not components or not width or not height:
        raise DataError(f"the JPEG is damaged: {width}x{height} with {components} components")
    if components == 1:
        return JpegSize(width, height, "gray", 1)
    names = {(2, 2): "420", (2, 1): "422", (1, 1): "444", (1, 2): "440", (4, 1): "411"}
    luma, *chroma = [(factor >> 4, factor & 15) for factor in factors]
    alike = components == 3 and chroma[0] == chroma[1] and all(chroma[0])
    ratio = (luma[0] // chroma[0][0], luma[1] // chroma[0][1]) if alike else (0, 0)
    name = names.get(ratio, "x".join(f"{factor:02x}" for factor in factors))
    return JpegSize(width, height, name, components)


def png_size(data: Buffer) -> tuple[int, int]:
    """Read (width, height) of a PNG from its header, decoding nothing."""
    view = memoryview(data).cast("B")
    if bytes(view[:8]) != PNG_MAGIC or len(view) < 33 or bytes(view[12:16]) != b"IHDR":
        raise DataError("the picture is no PNG: its signature or header is wrong")
    width, height = struct.unpack_from(">II", view, 16)
    if not width or not height:
        raise DataError(f"the PNG is damaged: its size is {width}x{height}")
    return width, height


def png_bits(data: Buffer) -> int:
    """Read the bits of a channel of a PNG from its header."""
    png_size(data)  # that there is one
    return memoryview(data).cast("B")[24]


def webp_size(data: Buffer) -> tuple[int, int]:
    """Read (width, height) of a WebP from its header, decoding nothing."""
    head = bytes(memoryview(data).cast("B")[:30])
    kind = head[12:16]
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP" or len(head) < 30:
        raise DataError("the picture is no WebP: its signature or header is wrong")
    if kind == b"VP8X":
        sides = [int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27)]
    elif kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        sides = [(bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1]
    else:
        sides = [side & 0x3FFF for side in struct.unpack_from("<HH", head, 26)]
    if not all(sides):
        raise DataError(f"the WebP is damaged: its size is {sides[0]}x{sides[1]}")
    return sides[0], sides[1]


def check_pixels(width: int, height: int) -> None:
    """Refuse a picture that is too large to be one, before memory is given to it."""
    if width * height > MAX_PIXELS:
        raise LimitExceeded(f"a picture of {width}x{height} pixels is over the limit {MAX_PIXELS}")


def check_jpeg(data: Buffer) -> tuple[JpegSize, int]:
    """Check the size of a JPEG and that it has an end; return the size, and its length in bytes."""
    size = jpeg_size(data)
    check_pixels(size.width, size.height)
    view = memoryview(data).cast("B")
    start = max(0, len(view) - _TAIL_BYTES)
    end = bytes(view[start:]).rfind(b"\xff\xd9")
    if end < 0:
        raise DataError(f"the JPEG is cut off after {len(view)} bytes: it has no end marker")
    return size, start + end + 2


def picture_size(image: ImageMessage) -> tuple[int, int]:
    """Return (width, height) of a picture of any kind, decoding nothing."""
    if image.encoding == "jpeg":
        return jpeg_size(image.data)[:2]
    if image.encoding in ("png", "compressedDepth"):
        return png_size(image.data)
    return webp_size(image.data) if image.encoding == "webp" else (image.width, image.height)


def jpeg_body(data: Buffer) -> tuple[bytes, int, int]:
    """Return a JPEG without what follows its end marker, and its width and height."""
    size, length = check_jpeg(data)
    return bytes(memoryview(data)[:length]), size.width, size.height
