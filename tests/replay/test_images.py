"""Pictures as LZ4 frames: exact, exchangeable with the seed's functions, bounded on reading."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import lz4.frame
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.errors import CorruptFile, UnsupportedValue, UsageError
from penstock.replay.images import (
    compress_image,
    compress_image_seq,
    decompress_image,
    decompress_image_seq,
)

DTYPES = ["bool", "uint8", "int16", "uint16", "int64", "float16", "float32", "float64", "complex64"]


def seed_compress_image(img: Any, level: int = 9) -> bytes:
    if type(img) == np.ndarray:  # noqa: E721
        img_byte_data = img.tobytes()
    return lz4.frame.compress(img_byte_data, compression_level=level, store_size=True)


def seed_compress_image_seq(images: Any, level: int = 9) -> bytes:
    concatenated = np.concatenate(images, axis=0).tobytes()
    return lz4.frame.compress(concatenated, compression_level=level)


def seed_decompress_image_seq(
    compressed_data: bytes, image_shape: Any, batch_size: int, dtype: Any = np.uint8
) -> Any:
    decompressed = lz4.frame.decompress(compressed_data)
    flat_array = np.frombuffer(decompressed, dtype=dtype)
    return flat_array.reshape(batch_size, *image_shape)


@st.composite
def pictures(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=9))
    count = int(np.prod(shape)) * dtype.itemsize
    if draw(st.booleans()):
        return np.zeros(shape, dtype)
    raw = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(count)
    if dtype == np.bool_:
        return (np.frombuffer(raw, np.uint8) & 1).astype(bool).reshape(shape)
    return np.frombuffer(raw, dtype).reshape(shape)


def test_views_that_torch_works_out_later():
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    got = decompress_image(compress_image(numbers.conj()), (2,), np.complex64)
    assert got.tolist() == [1 - 2j, 3 + 4j]
    with pytest.raises(UnsupportedValue, match="bfloat16"):
        compress_image(torch.zeros(3, dtype=torch.bfloat16))


@settings(max_examples=150, deadline=None)
@given(pictures(), st.integers(0, 16))
def test_round_trip(picture: np.ndarray[Any, Any], level: int) -> None:
    data = compress_image(picture, level)
    again = decompress_image(data, picture.shape, picture.dtype)
    assert (again.shape, again.dtype) == (picture.shape, picture.dtype)
    assert again.tobytes() == picture.tobytes()
    assert again.flags.writeable
    sequence = decompress_image_seq(
        compress_image_seq(picture, level), picture.shape[1:], picture.shape[0], picture.dtype
    )
    assert sequence.tobytes() == picture.tobytes()
    assert sequence.shape == picture.shape


@pytest.mark.parametrize("level", [0, 9])
def test_the_seed_reads_ours_and_we_read_the_seeds(level: int) -> None:
    images = np.random.default_rng(0).integers(0, 9, (7, 3, 12, 10)).astype(np.uint8)
    ours = compress_image_seq(images, level)
    assert np.array_equal(seed_decompress_image_seq(ours, (3, 12, 10), 7), images)
    theirs = seed_compress_image_seq(images, level)
    assert np.array_equal(decompress_image_seq(theirs, (3, 12, 10), 7), images)
    one = seed_decompress_image_seq(compress_image(images[0], level), (3, 12, 10), 1)[0]
    assert np.array_equal(one, images[0])
    assert np.array_equal(
        decompress_image(seed_compress_image(images[0], level), (3, 12, 10)), images[0]
    )


def test_tensors_and_lists_are_accepted() -> None:
    frames = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    expected = frames.numpy()
    whole = compress_image_seq(frames.requires_grad_())
    assert compress_image_seq(list(expected)) == whole
    assert compress_image_seq([torch.from_numpy(f) for f in expected]) == whole
    assert np.array_equal(decompress_image_seq(whole, (3, 4), 2, np.float32), expected)
    turned = expected.transpose(2, 0, 1)  # not contiguous
    data = compress_image(turned)
    assert np.array_equal(decompress_image(data, turned.shape, np.float32), turned)


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    honest = lz4.frame.compress(bytes(200 << 20), store_size=True)
    unstated = lz4.frame.compress(bytes(200 << 20), store_size=False)
    lying = bytearray(honest)  # the header claims what the caller expects
    lying[6:14] = struct.pack("<Q", 100)
    tracemalloc.start()
    try:
        for bomb in (honest, unstated, bytes(lying)):
            with pytest.raises(CorruptFile):
                decompress_image(bomb, (10, 10))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_every_flipped_bit_is_noticed() -> None:
    image = np.random.default_rng(0).integers(0, 4, (40, 40)).astype(np.uint8)
    data = compress_image(image)
    noticed = 0
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert np.array_equal(decompress_image(bytes(damaged), (40, 40)), image)
        except CorruptFile:
            noticed += 1
    assert noticed > 7 * len(data)


@pytest.mark.parametrize("cut", [0, 1, 5, 15, 40, -1])
def test_a_cut_frame_is_refused(cut: int) -> None:
    data = compress_image(np.arange(200, dtype=np.uint8))
    with pytest.raises(CorruptFile):
        decompress_image(data[:cut], (200,))


def test_another_size_is_refused() -> None:
    data = compress_image(np.zeros((4, 5), np.uint8))
    for shape, dtype in [((4, 4), np.uint8), ((4, 6), np.uint8), ((4, 5), np.uint16)]:
        with pytest.raises(CorruptFile, match="expected"):
            decompress_image(data, shape, dtype)
    with pytest.raises(CorruptFile):
        decompress_image(data + b"x", (4, 5))


@pytest.mark.parametrize("level", [-1, 17, 1.5, "9", None])
def test_a_bad_level_is_refused(level: Any) -> None:
    with pytest.raises(UsageError, match="level"):
        compress_image(np.zeros(3, np.uint8), level)


def test_what_holds_no_numbers_is_refused() -> None:
    with pytest.raises(UnsupportedValue, match="object"):
        compress_image(np.array([None, "x"]))
    with pytest.raises(UnsupportedValue, match="object"):
        decompress_image(b"", (1,), object)
    with pytest.raises(UsageError, match="shape"):
        decompress_image(b"", (-1,))
    with pytest.raises(UsageError, match="picture 1 is"):
        compress_image_seq([np.zeros(3), np.zeros(4)])
    with pytest.raises(UsageError, match="no pictures"):
        compress_image_seq([])
