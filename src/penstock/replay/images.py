"""Single pictures and sequences of them as LZ4 frames: the calls and the bytes of older programs.

Whatever these functions write, a plain `lz4.frame.decompress` reads, and the other way round. What
is read may come from anywhere: no more is ever decompressed than the shape that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lz4.frame
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from penstock.errors import CorruptFile, UnsupportedValue, UsageError

_LEVELS = range(17)


def compress_image(img: ArrayLike, level: int = 9) -> bytes:
    """Compress one picture.

    Args:
        img: An array or CPU tensor of numbers, of any shape.
        level: LZ4's: 0 to 2 are fast, 3 to 16 smaller and slower.

    Returns:
        An LZ4 frame that states its size. Shape and type are not in it: keep them.
    """
    return _compress(_numbers("the picture", img), level)


def decompress_image(
    data: bytes, image_shape: Sequence[int], dtype: DTypeLike = np.uint8
) -> NDArray[Any]:
    """Return the picture that `compress_image` was given, in fresh, writable memory.

    Args:
        data: The LZ4 frame.
        image_shape: The picture's shape.
        dtype: Its type.

    Raises:
        CorruptFile: The data are damaged, or hold another size than that of the shape.
        UsageError: The shape or the type makes no sense.
    """
    return _decompress(data, tuple(image_shape), dtype)


def compress_image_seq(images: ArrayLike | Sequence[ArrayLike], level: int = 9) -> bytes:
    """Compress a sequence of equal pictures as one, which uses what neighbours have in common.

    Args:
        images: An array or CPU tensor [batch, ...], or a list of pictures.
        level: As for `compress_image`.
    """
    if isinstance(images, list | tuple):
        pictures = [_numbers(f"picture {k}", image) for k, image in enumerate(images)]
        for k, picture in enumerate(pictures):
            first = pictures[0]
            if (picture.shape, picture.dtype) != (first.shape, first.dtype):
                raise UsageError(
                    f"picture {k} is {picture.dtype}{list(picture.shape)}, the first is "
                    f"{first.dtype}{list(first.shape)}; make them alike"
                )
        if not pictures:
            raise UsageError("the sequence has no pictures; give at least one")
        return _compress(np.stack(pictures), level)
    return _compress(_numbers("the sequence", images), level)


def decompress_image_seq(
    compressed_data: bytes,
    image_shape: Sequence[int],
    batch_size: int,
    dtype: DTypeLike = np.uint8,
) -> NDArray[Any]:
    """Return the [batch, ...] pictures that `compress_image_seq` was given; see there.

    Arguments and errors are those of `decompress_image`, `image_shape` that of one picture.
    """
    return _decompress(compressed_data, (batch_size, *image_shape), dtype)


def _numbers(what: str, value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):  # a torch tensor, without importing torch for it
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise UnsupportedValue(f"{what} is an array of {array.dtype}; use numbers")
    return array


def _compress(array: NDArray[Any], level: int) -> bytes:
    if level not in _LEVELS:
        raise UsageError(f"compression level {level!r} is not one of LZ4's, 0 to 16")
    flat = np.ascontiguousarray(array).reshape(-1)
    data: bytes = lz4.frame.compress(
        flat.view(np.uint8),
        compression_level=int(level),
        content_checksum=True,  # readers check it: damage is never just a wrong picture
        store_size=True,
    )
    return data


def _decompress(data: bytes, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    kind = np.dtype(dtype)
    if kind.kind not in "biufc":
        raise UnsupportedValue(f"pictures of {kind} cannot be read; use a type of numbers")
    if any(isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0 for n in shape):
        raise UsageError(f"{shape} is not a shape; give whole numbers from 0")
    expected = math.prod(int(n) for n in shape) * kind.itemsize
    try:
        info = lz4.frame.get_frame_info(data)
        # The stated size is only a claim (and may be missing): the decompression itself is bounded
        # as well, by one byte more than is wanted, which tells "too long" from "just right".
        stated = int(info["content_size"])
        if stated and stated != expected:
            raise CorruptFile(f"an LZ4 frame of {stated} bytes, {expected} expected for {shape}")
        decompressor = lz4.frame.LZ4FrameDecompressor()
        content = decompressor.decompress(data, max_length=expected + 1)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CorruptFile(f"not an LZ4 frame, or a damaged one ({error})") from error
    if len(content) != expected or not decompressor.eof or decompressor.unused_data:
        raise CorruptFile(
            f"an LZ4 frame of {len(content)} bytes or more, {expected} expected for {shape}; it is "
            "damaged, or the shape or type is another"
        )
    return np.frombuffer(bytearray(content), kind).reshape(shape)
