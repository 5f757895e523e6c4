"""Join pieces of videos by copying their packets: nothing is decoded, and no quality is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import av

from penstock.errors import CorruptFile
from penstock.media.av_versions import pixel_format
from penstock.media.video import TICKS, close_mp4, open_mp4, open_video, writing


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames of a video file.

    Attributes:
        path: The file.
        first: The number of the first frame.
        frames: How many.
        spare: How many others may have to come along, which these need.
    """

    path: Path
    first: int
    frames: int
    spare: int = 0


def coding(path: Path | str) -> str:
    """Name what two videos must have in common to be joined without encoding them anew."""
    with open_video(path) as (_, stream):
        context = stream.codec_context
        data = bytes(context.extradata or b"")
        size = (context.width, context.height, pixel_format(context))
        facts = (context.codec.canonical_name, size, stream.time_base, stream.average_rate, data)
        return hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()


def join(clips: Sequence[Clip], out: Path | str, fps: int) -> list[int]:
    """Join clips of equal coding by copying their packets; frame n gets the time n / fps.

    A clip that does not begin with a key frame brings along the frames from the key frame on, and
    at its end those that its last frames need: they are in the file, and belong to nobody.

    Returns:
        The number of each clip's first frame in the new file.

    Raises:
        CorruptFile: A clip is not in its file.
        StorageError: The disk refuses; nothing is left behind.
    """
    target = Path(out)
    base = Fraction(1, fps * TICKS)
    with writing(target):
        output = open_mp4(target, sum(clip.frames + clip.spare for clip in clips))
    try:
        copy: Any = None
        done, firsts = 0, []
        for path, own in groupby(clips, lambda clip: clip.path):
            with open_video(path) as (container, stream):
                if copy is None:
                    copy = output.add_stream_from_template(stream, opaque=True)
                    copy.time_base = base
                scale = stream.time_base * fps * TICKS
                above, below = scale.numerator, scale.denominator
                for clip in own:
                    low = high = -1
                    for number, packet in _packets(container, stream, clip, fps):
                        low, high = number if low < 0 else low, max(high, number)
                        shift = (done - low) * TICKS
                        packet.pts = shift + number * TICKS
                        packet.dts = shift + _divided(packet.dts * above, below)
                        packet.time_base, packet.duration, packet.stream = base, TICKS, copy
                        with writing(target):
                            output.mux(packet)
                    firsts.append(done + clip.first - low)
                    done += high - low + 1
        with writing(target):
            close_mp4(output, target)
    except BaseException:
        with suppress(av.FFmpegError, OSError, ValueError):
            output.close()
        with suppress(OSError):
            target.unlink()
        raise
    return firsts


def _divided(value: int, by: int) -> int:
    """Return the nearest whole number."""
    return (2 * value + by) // (2 * by)


def _packets(container: Any, stream: Any, clip: Clip, fps: int) -> Iterator[tuple[int, Any]]:
    """Yield (frame number, packet) of a clip and of what it needs, in the order of decoding."""
    container.seek(round(Fraction(clip.first, fps) / stream.time_base), stream=stream)
    scale = stream.time_base * fps
    above, below = scale.numerator, scale.denominator
    stop = clip.first + clip.frames
    low = high = -1
    wanted = count = 0
    for packet in container.demux(stream):
        if packet.size == 0 or packet.pts is None or packet.dts is None:
            continue
        number = _divided(packet.pts * above, below)
        low = number if low < 0 else low
        if number < low:
            continue  # shown before the key frame, and not whole without the one before
        high = max(high, number)
        wanted += clip.first <= number < stop
        count += 1
        yield number, packet
        # Behind the last wanted frame in the order of decoding there may be gaps to fill.
        if wanted == clip.frames and count == high - low + 1:
            return
    raise CorruptFile(
        f"{clip.path} is damaged: of its frames {clip.first} to {stop - 1} only {wanted} are there"
    )
