"""Small episodes of known content, and the program that the kill test kills."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from penstock.dataset.episode import EpisodeWriter, StagedEpisode
from penstock.dataset.layout import Feature, FileLimits, Version
from penstock.media.video import VideoSettings
from penstock.dataset.writer import DatasetWriter

WIDTH, HEIGHT, FPS = 64, 48, 10
CAMERA = "observation.images.head"
FEATURES = {
    "observation.state": Feature("float32", (3,), ["a", "b", "c"]),
    "action": Feature("float32", (2,)),
    CAMERA: Feature("video", (3, HEIGHT, WIDTH), ["channels", "height", "width"]),
}


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


def rows(episode: int, frames: int) -> dict[str, np.ndarray]:
    t = np.arange(frames)[:, None] / FPS
    state = np.sin(t + episode + np.arange(3)).astype(np.float32)
    return {"observation.state": state, "action": (state[:, :2] * 2).astype(np.float32)}


def stage(
    folder: Path,
    episode: int = 0,
    frames: int = 12,
    task: str = "pick",
    codec: str = "h264",
    fps: int = FPS,
) -> StagedEpisode:
    settings = {CAMERA: VideoSettings(codec)}
    writer = EpisodeWriter(folder, FEATURES, fps, frames, settings)
    writer.add_rows(rows(episode, frames))
    sink = writer.video(CAMERA)
    for frame in range(frames):
        sink.add_jpeg(jpeg(picture(episode * 16 + frame)))
    return writer.finish(task)


def write_dataset(
    out: Path,
    episodes: int,
    *,
    version: Version = "v3.0",
    mode: str = "create",
    finalize: bool = True,
    limits: FileLimits | None = None,
    settings: dict | None = None,
    tell=lambda line: None,
) -> None:
    """Write a dataset of so many episodes, skipping those that are committed."""
    with DatasetWriter(
        out,
        FEATURES,
        FPS,
        "testbot",
        version=version,
        mode=mode,
        settings=settings or {"x": 1},
        limits=limits,
    ) as writer:
        done = {source["number"] for source in writer.committed}
        for number in range(episodes):
            if number in done:
                continue
            staged = stage(
                writer.staging(f"e{number}"), number, 5 + number % 4, f"task {number % 3}"
            )
            writer.commit(staged, {"number": number})
            tell(f"committed {number}")
        if finalize:
            writer.finalize()
            tell("finalized")


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
