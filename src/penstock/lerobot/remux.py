"""Join videos by copying their packets: nothing is decoded, and no quality is lost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from penstock.lerobot.video import OPEN_OPTIONS, TICKS, open_video, write_failure


def coding(path: Path | str) -> tuple[object, ...]:
    """Return what two videos must have in common to be joined without encoding them anew."""
    with open_video(path) as (_, stream):
        context = stream.codec_context
        data = bytes(context.extradata or b"")
        size = (context.width, context.height, context.pix_fmt)
        return context.codec.canonical_name, size, stream.time_base, stream.average_rate, data


def concat(paths: Sequence[Path | str], out: Path | str, fps: int) -> int:
    """Join videos of equal coding by copying their packets; frame n keeps the time n / fps.

    Returns:
        The number of frames.
    """
    target = Path(out)
    base = Fraction(1, fps * TICKS)
    frames = 0
    try:
        output: Any = av.open(str(target), "w", format="mp4", container_options=OPEN_OPTIONS)
    except (av.FFmpegError, OSError, ValueError) as error:
        raise write_failure("write", target, error) from error
    try:
        copy: Any = None
        for path in paths:
            with open_video(path) as (container, stream):
                if copy is None:
                    copy = output.add_stream_from_template(stream, opaque=True)
                    copy.time_base = base
                start, count = frames, 0
                for packet in container.demux(stream):
                    if packet.size == 0 or packet.pts is None or packet.dts is None:
                        continue
                    scale = packet.time_base / base
                    packet.pts = start * TICKS + round(packet.pts * scale)
                    packet.dts = start * TICKS + round(packet.dts * scale)
                    packet.time_base = base
                    packet.duration = TICKS
                    packet.stream = copy
                    try:
                        output.mux(packet)
                    except (av.FFmpegError, OSError, ValueError) as error:
                        raise write_failure("write", target, error) from error
                    count += 1
                frames += count
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
    return frames
