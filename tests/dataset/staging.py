"""Small episodes of known content, and the program that the kill test kills."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from penstock.dataset.layout import Feature, FileLimits, Version
from penstock.dataset.unit import Episode, Unit, UnitRecord, UnitWriter, make_key
from penstock.dataset.writer import DatasetWriter
from penstock.media.video import VideoSettings, open_video

WIDTH, HEIGHT, FPS = 64, 48, 10
CAMERA = "observation.images.head"
FEATURES = {
    "observation.state": Feature("float32", (3,), ["a", "b", "c"]),
    "action": Feature("float32", (2,)),
    CAMERA: Feature("video", (3, HEIGHT, WIDTH), ["channels", "height", "width"]),
}


def length_of(number: int) -> int:
    return 5 + number % 4


def picture(number: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """A picture that shows its number: 8 grey bars, one per bit, over a coloured ground."""
    pixels = np.full((height, width, 3), (40, 90, 160), np.uint8)
    for bit in range(8):
        step = width // 8
        pixels[: height // 2, bit * step : (bit + 1) * step] = 230 if number >> bit & 1 else 20
    return pixels


def number_of(pixels: np.ndarray) -> int:
    """Read the number back."""
    height, width, _ = pixels.shape
    step = width // 8
    bars = [pixels[height // 4, bit * step + step // 2].mean() > 128 for bit in range(8)]
    return sum(bar << bit for bit, bar in enumerate(bars))


def jpeg(pixels: np.ndarray, pix_fmt: str = "yuvj420p", quality: int = 2) -> bytes:
    height, width, _ = pixels.shape
    encoder = av.CodecContext.create("mjpeg", "w")
    encoder.width, encoder.height, encoder.pix_fmt = width, height, pix_fmt
    encoder.time_base, encoder.qmin, encoder.qmax = Fraction(1, 30), quality, quality
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), "rgb24")
    frame = frame.reformat(format=pix_fmt, dst_colorspace="ITU601", dst_color_range="JPEG")
    frame.pts = 0
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


def header_of(path: Path) -> tuple[int, Fraction, str]:
    """Return the frames, the rate and the codec that the header of a video states."""
    with open_video(path) as (_, stream):
        return stream.frames, stream.average_rate, stream.codec_context.codec.canonical_name


def rows(episode: int, frames: int) -> dict[str, np.ndarray]:
    t = np.arange(frames)[:, None] / FPS
    state = np.sin(t + episode + np.arange(3)).astype(np.float32)
    return {"observation.state": state, "action": (state[:, :2] * 2).astype(np.float32)}


def episodes(*numbers: int) -> list[Episode]:
    return [Episode(length_of(number), f"task {number % 3}") for number in numbers]


def fill(unit: UnitWriter, *numbers: int) -> UnitWriter:
    """Give a unit the rows and pictures of these episodes."""
    for place, number in enumerate(numbers):
        frames = length_of(number)
        unit.add_rows(rows(number, frames))
        sink = unit.video(CAMERA, place)
        for frame in range(frames):
            sink.add_jpeg(jpeg(picture(number * 16 + frame)))
    return unit


def commit(
    writer: DatasetWriter, *numbers: int, codec: str = "h264", source: dict | None = None
) -> Unit:
    """Commit the episodes of these numbers as one unit, behind all others."""
    settings = {CAMERA: VideoSettings(codec)}
    given = {"number": numbers[0]} if source is None else source
    with writer.unit(given, episodes(*numbers), settings) as unit:
        return fill(unit, *numbers).commit()


def worker(units: Path, position: int, *numbers: int, fps: int = FPS) -> Unit:
    """Make a unit for a place in the dataset as a worker does: without the writer."""
    source = {"number": numbers[0]}
    record = UnitRecord(make_key(source), position, source, episodes(*numbers))
    with UnitWriter(units, record, FEATURES, fps) as unit:
        return fill(unit, *numbers).commit()


def open_writer(out: Path, mode: str = "create", **more: object) -> DatasetWriter:
    more.setdefault("settings", {"x": 1})
    return DatasetWriter(out, FEATURES, FPS, "testbot", mode=mode, **more)


def write_dataset(
    out: Path,
    count: int,
    *,
    version: Version = "v3.0",
    mode: str = "create",
    build: bool = True,
    limits: FileLimits | None = None,
    tell=lambda line: None,
) -> None:
    """Write a dataset of so many episodes, a unit each, skipping those that are committed."""
    with open_writer(out, mode, version=version, limits=limits) as writer:
        done = {source["number"] for source in writer.committed}
        for number in range(count):
            if number not in done:
                commit(writer, number)
                tell(f"committed {number}")
            if build and number == count // 2:
                writer.build()
        if build:
            writer.build()
            tell("built")


def files_of(root: Path) -> dict[str, bytes]:
    """Everything a dataset consists of, without the private folder and the lock."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.relative_to(root).parts[0].startswith(".penstock")
    }


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    tell("imported")
    write_dataset(
        Path(sys.argv[1]), int(sys.argv[2]), version=sys.argv[3], mode="resume", tell=tell
    )
