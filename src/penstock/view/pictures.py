"""Pictures for the page: JPEGs of colours, and of depth in false colours."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from penstock.errors import CorruptFile
from penstock.media.depth import false_colours
from penstock.media.images import resize_depth, thumbnail
from penstock.media.video import VideoSource, name_of, open_video

PLAYABLE = ("h264", "av1", "vp9")  # by every current browser, with 8 bits and 4:2:0
_STILL_BYTES = 24  # of an H.264 picture of which every block is skipped
DEPTH_MM = (200, 6000)  # what false colours show where nothing else is known


def depth_jpeg(depth_mm: NDArray[Any], range_mm: tuple[int, int], width: int) -> bytes:
    """Return a depth map as JPEG: near is red, far is blue, black is no measurement."""
    rows, columns = depth_mm.shape[:2]
    if columns > width:
        depth_mm = resize_depth(depth_mm.reshape(rows, columns), width, rows * width // columns)
    return thumbnail(false_colours(depth_mm, range_mm), width)


def plays(video: VideoSource) -> bool:
    """Whether a browser may play a video as it is."""
    with open_video(video) as (_, stream):
        context = stream.codec_context
        return context.codec.canonical_name in PLAYABLE and str(context.pix_fmt) in (
            "yuv420p",
            "yuvj420p",
        )


class Packet(NamedTuple):
    """A frame of a video, not decoded.

    Attributes:
        number: Of the frame.
        is_still: It says that nothing changed (H.264; the packets of AV1 do not tell).
        jpeg: The picture, in a video of JPEGs.
    """

    number: int
    is_still: bool
    jpeg: bytes | None


def packets(video: VideoSource, first: int, count: int) -> list[Packet]:
    """Return some frames of a video, numbered from 0; nothing is decoded."""
    found: list[Packet] = []
    with open_video(video) as (container, stream):
        rate, base = stream.average_rate, stream.time_base
        if not rate or base is None:
            raise CorruptFile(f"{name_of(video)} is damaged: it has no frame rate")
        codec = stream.codec_context.codec.canonical_name
        container.seek(round(first / rate / base) + (stream.start_time or 0), stream=stream)
        for packet in container.demux(stream):
            if packet.pts is None:
                continue
            number = round((packet.pts - (stream.start_time or 0)) * base * rate)
            if first <= number < first + count:
                still = codec == "h264" and packet.size <= _STILL_BYTES
                jpeg = bytes(packet) if codec == "mjpeg" else None
                found.append(Packet(number - first, still, jpeg))
            if number >= first + count + 32:  # frames may be stored in another order
                break
    return sorted(found)
