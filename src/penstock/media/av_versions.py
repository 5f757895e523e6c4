"""What differs between the versions 15 to 19 of av."""

from __future__ import annotations

from typing import Any

import av
import av.logging
from av.video.reformatter import VideoReformatter

from penstock.errors import UsageError

_MAJOR = int(av.__version__.split(".")[0])
# Before 19 it raises at metadata that are no UTF-8, unless it is told to replace them.
ANY_METADATA: dict[str, Any] = {} if _MAJOR >= 19 else {"metadata_errors": "replace"}
# Before 17 it has no other way than one thread.
_ONE_THREAD: dict[str, Any] = {"threads": 1} if _MAJOR >= 17 else {}

# Before 8.1, FFmpeg may decode what builds on a lost picture of H.265, in grey: it only logs that.
_PAINTS_OVER = av.library_versions["libavcodec"] < (62, 28)
if _PAINTS_OVER:
    av.logging.set_skip_repeated(False)

# FFmpeg's flags of scaling, as numbers: av has names for the last three from 18 on.
BILINEAR = 0x2
FULL_CHR_H_INT = 0x2000
ACCURATE_RND = 0x40000
BITEXACT = 0x80000


def pixel_format(context: Any) -> str | None:
    """Return the name of a stream's pixel format; None where a damaged file does not say it.

    `context.pix_fmt` ends the process then, before version 18.
    """
    return context.format.name if context.format else None


def add_copy_stream(container: Any, codec: str, fps: int, width: int, height: int) -> Any:
    """Add a stream for JPEGs, or packets of a video, that are there already.

    Before version 17 a stream has an encoder; that of JPEGs never gets a picture, those of videos
    would write their own settings into the file.
    """
    if hasattr(container, "add_mux_stream"):
        return container.add_mux_stream(codec, rate=fps, width=width, height=height)
    if codec != "mjpeg":
        raise UsageError(f"codec copy of {codec} needs av 17 or newer: use h264")
    stream = container.add_stream("mjpeg", rate=fps)
    stream.width, stream.height, stream.pix_fmt = width, height, "yuvj420p"
    return stream


def decode(context: Any, packet: Any) -> tuple[list[av.VideoFrame], bool]:
    """Decode a packet; tell whether FFmpeg painted over a picture that it did not have."""
    if not _PAINTS_OVER:
        return context.decode(packet), False
    level = av.logging.get_level()
    av.logging.set_level(av.logging.ERROR)
    try:
        with av.logging.Capture() as messages:
            frames = context.decode(packet)
    finally:
        av.logging.set_level(level)
    return frames, any("Could not find ref" in text for _, _, text in messages)


class Reformatter:
    """Scales pictures and converts their pixels, in the calling thread."""

    def __init__(self) -> None:
        self._reformatter: Any = VideoReformatter()  # its arguments differ

    def reformat(self, frame: av.VideoFrame, *words: Any, **options: Any) -> av.VideoFrame:
        """Return the picture in another size or format; see av's VideoReformatter."""
        made: av.VideoFrame = self._reformatter.reformat(frame, *words, **options, **_ONE_THREAD)
        return made
