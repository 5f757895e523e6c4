"""Pictures of every kind, whole and broken."""

from __future__ import annotations

import random
import runpy
import struct
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest

from penstock.errors import DataError, LimitExceeded, UsageError
from penstock.media import images
from penstock.media.encodings import ImageMessage
from penstock.media.headers import MAX_PIXELS, jpeg_body, jpeg_size, picture_size
from penstock.media.images import ImageDecoder, to_rgb

s = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "dataset" / "staging.py")))
PIXELS = s.picture(0b10110010, 320, 240)
JPEG = s.jpeg(PIXELS)


def png(pixels: np.ndarray, pix_fmt: str, pred: str = "none") -> bytes:
    encoder = av.CodecContext.create("png", "w")
    encoder.options = {"pred": pred}
    encoder.height, encoder.width, encoder.pix_fmt = *pixels.shape[:2], pix_fmt
    frame = av.VideoFrame.from_ndarray(pixels, format=pix_fmt)
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


def rmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(((a.astype(float) - b) ** 2).mean()))


@pytest.mark.parametrize("kind", ["420", "422", "444"])
def test_jpegs_are_decoded_in_full_range(kind: str) -> None:
    data = s.jpeg(PIXELS, f"yuvj{kind}p")
    assert jpeg_size(data) == (320, 240, kind, 3)
    assert rmse(to_rgb(ImageDecoder().jpeg(data)), PIXELS) < 4


def test_a_jpeg_that_is_padded_or_cut() -> None:
    decoder = ImageDecoder()
    padded = JPEG + bytes(100)
    body, width, height = jpeg_body(padded)
    assert (body, width, height) == (JPEG, 320, 240)
    assert np.array_equal(to_rgb(decoder.jpeg(padded)), to_rgb(decoder.jpeg(JPEG)))
    for end in range(0, len(JPEG) - 1, 97):
        with pytest.raises(DataError):
            decoder.jpeg(JPEG[:end])
    with pytest.raises(DataError, match="end marker"):
        jpeg_body(JPEG[:-2])


def test_broken_jpegs_are_errors_or_pictures_and_never_worse() -> None:
    decoder, dice = ImageDecoder(), random.Random(1)
    good = to_rgb(decoder.jpeg(JPEG)).copy()
    refused = 0
    for _ in range(300):
        data = bytearray(JPEG)
        for _ in range(3):
            data[dice.randrange(2, len(data))] = dice.randrange(256)
        try:
            frame = decoder.jpeg(data)
            assert frame.width * frame.height <= MAX_PIXELS
        except DataError:
            refused += 1
    assert refused > 30
    assert np.array_equal(to_rgb(decoder.jpeg(JPEG)), good)  # the codec has forgotten them all


def test_sizes_above_the_limit_are_refused_before_decoding() -> None:
    at = JPEG.index(b"\xff\xc0") + 5
    huge = JPEG[:at] + struct.pack(">HH", 65000, 65000) + JPEG[at + 4 :]
    with pytest.raises(LimitExceeded, match="65000x65000"):
        ImageDecoder().jpeg(huge)
    small = png(np.zeros((4, 4, 3), np.uint8), "rgb24")
    bomb = small[:16] + struct.pack(">II", 100_000, 100_000) + small[24:]
    with pytest.raises(LimitExceeded):
        ImageDecoder().png(bomb)
    with pytest.raises(LimitExceeded):
        ImageDecoder().color(ImageMessage("rgb8", b"", 100_000, 100_000))


def test_a_png_is_lossless_and_a_broken_one_an_error() -> None:
    data = png(PIXELS, "rgb24")
    assert np.array_equal(to_rgb(ImageDecoder().png(data)), PIXELS)
    assert picture_size(ImageMessage("png", memoryview(data))) == (320, 240)
    broken = data[:60] + bytes([data[60] ^ 1]) + data[61:]
    with pytest.raises(DataError):
        ImageDecoder().png(broken)


@pytest.mark.parametrize(
    ("encoding", "array"),
    [
        ("rgb8", PIXELS),
        ("bgr8", PIXELS[:, :, ::-1]),
        ("rgba8", np.dstack([PIXELS, np.full((240, 320), 255, np.uint8)])),
        ("bgra8", np.dstack([PIXELS[:, :, ::-1], np.full((240, 320), 255, np.uint8)])),
    ],
)
@pytest.mark.parametrize("padding", [0, 20])
def test_raw_pixels(encoding: str, array: np.ndarray, padding: int) -> None:
    rows = np.ascontiguousarray(array).reshape(240, -1)
    step = rows.shape[1] + padding
    data = np.pad(rows, ((0, 0), (0, padding))).tobytes()
    frame = ImageDecoder().color(ImageMessage(encoding, data, 320, 240, step))
    assert np.array_equal(to_rgb(frame), PIXELS)


def test_raw_grey_of_8_and_16_bits() -> None:
    grey = np.linspace(0, 255, 320 * 240).astype(np.uint8).reshape(240, 320)
    found = to_rgb(ImageDecoder().color(ImageMessage("mono8", grey.tobytes(), 320, 240)))
    assert np.abs(found.astype(int) - grey[:, :, None]).max() <= 1
    words = (grey.astype(np.uint16) * 257).astype(">u2")
    found = to_rgb(
        ImageDecoder().color(ImageMessage("mono16", words.tobytes(), 320, 240, is_big_endian=True))
    )
    assert np.abs(found.astype(int) - grey[:, :, None]).max() <= 1


@pytest.mark.parametrize(
    ("width", "height", "encoding", "step", "size"),
    [(4, 4, "rgb8", 0, 47), (4, 4, "rgb8", 11, 999), (0, 4, "rgb8", 0, 0), (4, 4, "what", 0, 64)],
)
def test_raw_pixels_that_do_not_fit(
    width: int, height: int, encoding: str, step: int, size: int
) -> None:
    with pytest.raises(DataError):
        ImageDecoder().color(ImageMessage(encoding, bytes(size), width, height, step))


def test_depth_of_every_kind_is_millimetres() -> None:
    decoder = ImageDecoder()
    depth = np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 20
    assert np.array_equal(decoder.depth_mm(ImageMessage("png", png(depth, "gray16be"))), depth)
    assert np.array_equal(decoder.depth_mm(ImageMessage("16UC1", depth.tobytes(), 64, 48)), depth)
    swapped = depth.astype(">u2").tobytes()
    assert np.array_equal(decoder.depth_mm(ImageMessage("16UC1", swapped, 64, 48, 0, True)), depth)
    metres = (depth / 1000).astype(np.float32)
    assert np.array_equal(decoder.depth_mm(ImageMessage("32FC1", metres.tobytes(), 64, 48)), depth)
    metres[0, :4] = np.nan, np.inf, -1, 70
    assert not decoder.depth_mm(ImageMessage("32FC1", metres.tobytes(), 64, 48))[0, :4].any()
    # As ROS 2 compresses metres: a value v means a / (v - b) metres.
    a, b = 1010.0, -100.0
    far = np.linspace(0.5, 9.0, 64 * 48).reshape(48, 64)
    codes = np.rint(a / far + b).astype(np.uint16)
    codes[0, 0] = 0  # no measurement
    found = decoder.depth_mm(
        ImageMessage("compressedDepth", png(codes, "gray16be"), depth_quantization=(a, b))
    )
    assert found[0, 0] == 0
    np.testing.assert_allclose(found.ravel()[1:], 1000 * far.ravel()[1:], rtol=0.05)
    small = decoder.depth_mm(ImageMessage("16UC1", depth.tobytes(), 64, 48), size=(32, 24))
    assert np.array_equal(small, depth[::2, ::2])
    with pytest.raises(DataError, match="16 bits"):
        decoder.depth_mm(ImageMessage("png", png(PIXELS, "rgb24")))


def test_scaling_keeps_the_picture() -> None:
    decoder = ImageDecoder()
    frame = decoder.jpeg(JPEG)
    small = decoder.resize(frame, 160, 120)
    assert (small.width, small.height, small.format.name) == (160, 120, "yuvj420p")
    assert rmse(to_rgb(small), PIXELS[::2, ::2]) < 12
    assert decoder.resize(frame, 320, 240) is frame


def test_grey_depth_follows_a_fixed_range() -> None:
    depth = np.array([[0, 500, 1000, 1500, 60000, 250] * 4] * 2, np.uint16)
    grey = to_rgb(images.grey_from_depth(depth, 0, 1000))[0, :6, 0]
    assert [int(g) for g in grey] == [0, 128, 255, 255, 255, 64]
    with pytest.raises(UsageError):
        images.grey_from_depth(depth, 10, 10)


def test_a_thumbnail_is_a_small_jpeg() -> None:
    data = images.thumbnail(ImageDecoder().jpeg(JPEG))
    assert jpeg_size(data)[:2] == (160, 120)
    assert s.number_of(to_rgb(ImageDecoder().jpeg(data))) == 0b10110010


@pytest.mark.parametrize("pred", ["none", "sub", "up", "avg", "paeth", "mixed"])
def test_one_decoder_decodes_many_pngs(pred: str) -> None:
    """FFmpeg 8.1 remembers a row of the PNG before, if the same codec decodes both."""
    decoder, dice = ImageDecoder(), np.random.default_rng(2)
    for _ in range(4):
        depth = dice.integers(0, 60_000, (48, 64)).astype(np.uint16)
        assert np.array_equal(
            decoder.depth_mm(ImageMessage("png", png(depth, "gray16be", pred))), depth
        )
        pixels = dice.integers(0, 256, (48, 64, 3)).astype(np.uint8)
        assert np.array_equal(to_rgb(decoder.png(png(pixels, "rgb24", pred))), pixels)


def test_one_decoder_decodes_jpegs_as_a_new_one_does() -> None:
    decoder, dice = ImageDecoder(), np.random.default_rng(3)
    for number in range(200):
        width, height = ((64, 48), (128, 96), (320, 240))[dice.integers(3)]
        noise = dice.integers(-30, 30, (height, width, 3))
        pixels = np.clip(s.picture(number, width, height) + noise, 0, 255).astype(np.uint8)
        kind = f"yuvj{('420', '422', '444')[dice.integers(3)]}p"
        data = s.jpeg(pixels, kind, int(dice.integers(2, 12)))
        assert np.array_equal(to_rgb(decoder.jpeg(data)), to_rgb(ImageDecoder().jpeg(data)))


def test_rgb_is_rounded_and_not_cut_off() -> None:
    """FFmpeg's quick conversion makes every picture darker, by 1 of 255, and green by more."""
    frame = ImageDecoder().jpeg(s.jpeg(smooth(), "yuvj444p"))
    luma, blue, red = (
        images.plane_rows(frame, plane=k)[:240, :320].astype(float) for k in range(3)
    )
    blue, red = blue - 128, red - 128
    exact = [luma + 1.402 * red, luma - 0.344136 * blue - 0.714136 * red, luma + 1.772 * blue]
    off = to_rgb(frame) - np.clip(np.stack(exact, axis=-1), 0, 255)
    assert np.abs(off.mean((0, 1))).max() < 0.05
    assert np.abs(off).max() < 1.5


def smooth() -> np.ndarray:
    y, x = np.mgrid[0:240, 0:320]
    waves = [128 + 90 * np.sin(x / 40 + k) * np.cos(y / (30 + 9 * k)) for k in range(3)]
    return np.stack(waves, axis=-1).astype(np.uint8)
