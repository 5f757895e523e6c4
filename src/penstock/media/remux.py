"""Join pieces of videos by copying their packets: nothing is decoded, and no quality is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
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

_REORDERED = 64  # frames behind a clip that its last ones may need


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames of a video file.

    Attributes:
        path: The file.
        first: The number of the first frame.
        frames: How many.
    """

    path: Path
    first: int
    frames: int


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
    runs = _runs(clips)
    leads = _leads([run for run, _ in runs], fps)
    room = sum(clip.frames for clip in clips) + sum(lead + _REORDERED for lead in leads if lead)
    with writing(target):
        output = open_mp4(target, room)
    try:
        copy: Any = None
        done, firsts = 0, []
        for path, own in groupby(runs, lambda run: run[0].path):
            with open_video(path) as (container, stream):
                if copy is None:
                    copy = output.add_stream_from_template(stream, opaque=True)
                    copy.time_base = base
                begin, scale = stream.start_time or 0, stream.time_base * fps * TICKS
                above, below = scale.numerator, scale.denominator
                for run, starts in own:
                    low = high = -1
                    for number, packet in _packets(container, stream, run, fps):
                        low, high = number if low < 0 else low, max(high, number)
                        shift = (done - low) * TICKS
                        packet.pts = shift + number * TICKS
                        packet.dts = shift + _divided((packet.dts - begin) * above, below)
                        packet.time_base, packet.duration, packet.stream = base, TICKS, copy
                        with writing(target):
                            output.mux(packet)
                    firsts += [done + start - low for start in starts]
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


def _runs(clips: Sequence[Clip]) -> list[tuple[Clip, list[int]]]:
    """Join clips that lie behind each other in a file; return where each of them begins, too."""
    found: list[tuple[Clip, list[int]]] = []
    for clip in clips:
        run, starts = found[-1] if found else (None, [])
        if run and (run.path, run.first + run.frames) == (clip.path, clip.first):
            longer = Clip(run.path, run.first, run.frames + clip.frames)
            starts.append(clip.first)
            found[-1] = longer, starts
        else:
            found.append((clip, [clip.first]))
    return found


def _leads(clips: Iterable[Clip], fps: int) -> list[int]:
    """Return how many frames lie between each clip and the key frame that it needs, if any do."""
    found = []
    later = (clip for clip in clips if clip.first > 0)
    for path, own in groupby(later, lambda clip: clip.path):
        with open_video(path) as (container, stream):
            for clip in own:
                number, _ = next(_packets(container, stream, clip, fps))
                found.append(clip.first - number)
    return found


def begins_alone(clip: Clip, fps: int) -> bool:
    """Whether a clip begins with a key frame, so that it can be a video of its own."""
    return not any(_leads([clip], fps))


def _divided(value: int, by: int) -> int:
    """Return the nearest whole number."""
    return (2 * value + by) // (2 * by)


def _packets(container: Any, stream: Any, clip: Clip, fps: int) -> Iterator[tuple[int, Any]]:
    """Yield (frame number, packet) of a clip and of what it needs, in the order of decoding."""
    begin, scale = stream.start_time or 0, stream.time_base * fps
    container.seek(begin + round(clip.first / scale), stream=stream)
    above, below = scale.numerator, scale.denominator
    stop = clip.first + clip.frames
    low = high = -1
    wanted = count = 0
    for packet in container.demux(stream):
        if packet.size == 0 or packet.pts is None or packet.dts is None:
            continue
        number = _divided((packet.pts - begin) * above, below)
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
