"""Join pieces of videos by copying their packets: nothing is decoded, and no quality is lost."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from penstock.errors import CorruptFile
from penstock.media.video import TICKS, mp4_options, open_video, write_failure


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames of a video file, the first of which stands alone (a key frame)."""

    path: Path
    first: int
    frames: int


def coding(path: Path | str) -> str:
    """Name what two videos must have in common to be joined without encoding them anew."""
    with open_video(path) as (_, stream):
        context = stream.codec_context
        data = bytes(context.extradata or b"")
        size = (context.width, context.height, context.pix_fmt)
        facts = (context.codec.canonical_name, size, stream.time_base, stream.average_rate, data)
        return hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()


def join(clips: Sequence[Clip], out: Path | str, fps: int) -> None:
    """Join clips of equal coding by copying their packets; frame n gets the time n / fps.

    Raises:
        CorruptFile: A clip is not in its file.
        StorageError: The disk refuses; nothing is left behind.
    """
    target = Path(out)
    base = Fraction(1, fps * TICKS)
    options = mp4_options(sum(clip.frames for clip in clips))
    try:
        output: Any = av.open(str(target), "w", format="mp4", container_options=options)
    except (av.FFmpegError, OSError, ValueError) as error:
        raise write_failure("write", target, error) from error
    try:
        copy: Any = None
        done = 0
        for clip in clips:
            with open_video(clip.path) as (container, stream):
                if copy is None:
                    copy = output.add_stream_from_template(stream, opaque=True)
                    copy.time_base = base
                for packet in _packets(container, stream, clip, fps):
                    shift, scale = (done - clip.first) * TICKS, packet.time_base / base
                    packet.pts = shift + round(packet.pts * scale)
                    packet.dts = shift + round(packet.dts * scale)
                    packet.time_base, packet.duration, packet.stream = base, TICKS, copy
                    try:
                        output.mux(packet)
                    except (av.FFmpegError, OSError, ValueError) as error:
                        raise write_failure("write", target, error) from error
            done += clip.frames
        output.close()
        with open(target, "rb") as file:
            os.fsync(file.fileno())
    except BaseException as error:
        with suppress(av.FFmpegError, OSError, ValueError):
            output.close()
        with suppress(OSError):
            target.unlink()
        if isinstance(error, av.FFmpegError | OSError | ValueError):
            raise write_failure("write", target, error) from error
        raise


def _packets(container: Any, stream: Any, clip: Clip, fps: int) -> Iterator[Any]:
    """Yield the packets of a clip, in the order of decoding."""
    if clip.first:
        container.seek(round(Fraction(clip.first, fps) / stream.time_base), stream=stream)
    count = 0
    for packet in container.demux(stream):
        if packet.size == 0 or packet.pts is None or packet.dts is None:
            continue
        if clip.first <= round(packet.pts * packet.time_base * fps) < clip.first + clip.frames:
            count += 1
            yield packet
            if count == clip.frames:
                return
    raise CorruptFile(
        f"{clip.path} is damaged: of its frames {clip.first} to {clip.first + clip.frames - 1} "
        f"only {count} are there"
    )
