"""Pictures in every encoding of sensor_msgs and Foxglove, against FFmpeg's own conversions."""

from __future__ import annotations

import struct
from contextlib import suppress
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest

from penstock.errors import DataError
from penstock.media.depth import read_rvl
from penstock.media.encodings import DEPTH_ENCODINGS, ImageMessage
from penstock.media.headers import picture_size
from penstock.media.images import ImageDecoder, to_rgb
from penstock.media.video import VideoSettings, VideoWriter, read_video

WIDTH, HEIGHT = 48, 32


def picture() -> np.ndarray[Any, Any]:
    """Smooth colours, so that coarse chroma does little harm."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    return np.stack([60 + 3 * x, 200 - 4 * y, 40 + 2 * x + 2 * y], axis=2).astype(np.uint8)


def planes(frame: av.VideoFrame) -> bytes:
    """The pixels of a frame without padding."""
    found = b""
    for number, plane in enumerate(frame.planes):
        rows = np.frombuffer(bytes(plane), np.uint8).reshape(-1, plane.line_size)
        colours = 2 * WIDTH if frame.format.name == "nv24" else WIDTH
        width = colours if number else _row_bytes(frame)
        found += rows[: plane.height, :width].tobytes()
    return found


def _row_bytes(frame: av.VideoFrame) -> int:
    per_pixel = {"rgba64le": 8, "bgra64be": 8, "rgb48le": 6, "bgr48be": 6, "uyvy422": 2,
                 "yuyv422": 2, "rgba": 4, "bgra": 4}  # fmt: skip
    return WIDTH * per_pixel.get(frame.format.name, 1)


@pytest.mark.parametrize(
    ("encoding", "name", "big"),
    [
        ("rgba16", "rgba64le", False),
        ("bgra16", "bgra64be", True),
        ("rgb16", "rgb48le", False),
        ("bgr16", "bgr48be", True),
        ("16UC3", "bgr48be", True),
        ("rgba8", "rgba", False),
        ("bgra8", "bgra", False),
        ("yuv422", "uyvy422", False),
        ("yuyv", "yuyv422", False),
        ("nv12", "nv12", False),
        ("nv21", "nv21", False),
        ("nv24", "nv24", False),
    ],
)
def test_raw_pixels(encoding, name, big):
    made = av.VideoFrame.from_ndarray(picture(), "rgb24").reformat(format=name)
    data = planes(made)
    frame = ImageDecoder().color(ImageMessage(encoding, data, WIDTH, HEIGHT, is_big_endian=big))
    assert frame.format.name == name
    assert planes(frame) == data
    error = np.abs(to_rgb(frame).astype(int) - picture())
    assert error.mean() < 4
    with pytest.raises(DataError):
        ImageDecoder().color(ImageMessage(encoding, data[:-200], WIDTH, HEIGHT, is_big_endian=big))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("order", ["rggb", "bggr", "gbrg", "grbg"])
def test_bayer(order, bits):
    """A picture of one colour has that colour whatever the order of its sensors."""
    values = dict(zip("rgb", (200, 120, 40), strict=True))
    cell = np.array([values[letter] for letter in order]).reshape(2, 2)
    mosaic = np.tile(cell, (HEIGHT // 2, WIDTH // 2)) * (257 if bits == 16 else 1)
    data = mosaic.astype(f"<u{bits // 8}").tobytes()
    decoder = ImageDecoder()
    frame = decoder.color(ImageMessage(f"bayer_{order}{bits}", data, WIDTH, HEIGHT))
    assert np.abs(to_rgb(frame)[4:-4, 4:-4].astype(int) - (200, 120, 40)).max() <= 2
    small = to_rgb(decoder.resize(frame, WIDTH // 2, HEIGHT // 2))
    assert np.abs(small[4:-4, 4:-4].astype(int) - (200, 120, 40)).max() <= 2


@pytest.mark.parametrize("encoding", ["8UC2", "32FC3", "64FC4", "16SC2", "h264", "", "\x1b[31m"])
def test_what_has_no_colours_is_named(encoding):
    with pytest.raises(DataError, match="not known"):
        ImageDecoder().color(ImageMessage(encoding, bytes(10_000), 4, 4))


@pytest.mark.parametrize("lossless", ["0", "1"])
def test_webp(lossless):
    encoder = av.CodecContext.create("libwebp", "w")
    encoder.width, encoder.height = WIDTH, HEIGHT
    encoder.pix_fmt = "bgra" if lossless == "1" else "yuv420p"
    encoder.time_base, encoder.options = Fraction(1), {"lossless": lossless, "quality": "90"}
    frame = av.VideoFrame.from_ndarray(picture(), "rgb24").reformat(format=encoder.pix_fmt)
    frame.pts = 0
    data = b"".join(bytes(p) for p in [*encoder.encode(frame), *encoder.encode(None)])
    assert picture_size(ImageMessage("webp", data)) == (WIDTH, HEIGHT)
    found = to_rgb(ImageDecoder().color(ImageMessage("webp", data))).astype(int)
    assert np.abs(found - picture()).mean() < (0.01 if lossless == "1" else 4)
    for cut in (0, 3, 20, 29, len(data) // 2):
        with pytest.raises(DataError):
            ImageDecoder().color(ImageMessage("webp", data[:cut]))


def rvl(depth: np.ndarray[Any, Any]) -> bytes:
    """Encode a depth map as the paper has it, number by number."""
    nibbles: list[int] = []

    def put(value: int) -> None:
        while True:
            part, value = value & 7, value >> 3
            nibbles.append(part | (8 if value else 0))
            if not value:
                return

    values, at, before = depth.ravel().tolist(), 0, 0
    while at < len(values):
        zeros = 0
        while at + zeros < len(values) and not values[at + zeros]:
            zeros += 1
        at += zeros
        run = []
        while at + len(run) < len(values) and values[at + len(run)]:
            run.append(values[at + len(run)])
        put(zeros)
        put(len(run))
        for value in run:
            step = value - before
            put((step << 1) ^ (step >> 63))
            before = value
        at += len(run)
    nibbles += [0] * (-len(nibbles) % 8)
    words = []
    for first in range(0, len(nibbles), 8):
        word = 0
        for nibble in nibbles[first : first + 8]:
            word = word << 4 | nibble
        words.append(struct.pack("<I", word))
    return b"".join(words)


@pytest.mark.parametrize("seed", range(12))
def test_rvl(seed):
    chance = np.random.default_rng(seed)
    height, width = chance.integers(1, 60, 2)
    depth = chance.integers(0, 65536 if seed % 2 else 3000, (height, width)).astype(np.uint16)
    depth[chance.random(depth.shape) < chance.choice([0, 0.3, 0.9, 1.0])] = 0
    data = rvl(depth)
    assert np.array_equal(read_rvl(data, width, height), depth)
    assert np.array_equal(ImageDecoder().depth_mm(ImageMessage("rvl", data, width, height)), depth)


def test_damaged_rvl():
    chance = np.random.default_rng(1)
    depth = chance.integers(0, 3000, (40, 40)).astype(np.uint16)
    data = rvl(depth)
    for size in range(0, len(data) - 8, 50):
        with pytest.raises(DataError):
            read_rvl(data[:size], 40, 40)
    for _ in range(300):
        noise = bytes(chance.integers(0, 256, 400, dtype=np.uint8))
        with suppress(DataError):
            assert read_rvl(noise, 20, 20).shape == (20, 20)
    with pytest.raises(DataError):
        ImageDecoder().depth_mm(ImageMessage("rvl", data, 100_000, 100_000))


@pytest.mark.parametrize(("encoding", "kind", "scale"), [
    ("16UC1", "<u2", 1), ("16SC1", "<i2", 1), ("32FC1", "<f4", 1e-3), ("64FC1", "<f8", 1e-3),
])  # fmt: skip
def test_raw_depth(encoding, kind, scale):
    depth = np.arange(600).reshape(20, 30)
    data = (depth * scale).astype(kind).tobytes()
    assert encoding in DEPTH_ENCODINGS
    assert np.array_equal(ImageDecoder().depth_mm(ImageMessage(encoding, data, 30, 20)), depth)


@pytest.mark.parametrize("encoding", ["yuv422", "nv12", "rgb8"])
def test_a_video_has_the_colours_of_the_picture(tmp_path, encoding):
    """Packed YUV is of limited range, as cameras send it and `to_rgb` reads it."""
    name = {"yuv422": "uyvy422", "nv12": "nv12", "rgb8": "rgb24"}[encoding]
    made = av.VideoFrame.from_ndarray(picture(), "rgb24").reformat(format=name)
    data = picture().tobytes() if encoding == "rgb8" else planes(made)
    frame = ImageDecoder().color(ImageMessage(encoding, data, WIDTH, HEIGHT))
    settings = VideoSettings("h264", crf=1)
    with VideoWriter(tmp_path / "a.mp4", settings, 30, WIDTH, HEIGHT) as writer:
        writer.encode(frame)
    (found,) = read_video(tmp_path / "a.mp4")
    assert np.abs(found.astype(int) - to_rgb(frame)).mean() < 3
