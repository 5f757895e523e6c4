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
    """Compress one picture, an array or CPU tensor of numbers of any shape, to an LZ4 frame.

    Shape and type are not in it: keep them. Levels 0 to 2 are fast, 3 to 16 smaller and slower.
    """
    return _compress(_numbers("the picture", img), level)


def decompress_image(
    data: bytes, image_shape: Sequence[int], dtype: DTypeLike = np.uint8
) -> NDArray[Any]:
    """Return the picture that `compress_image` was given, in fresh, writable memory.

    Data that are damaged, or hold another size than that of the shape, are a CorruptFile.
    """
    return _decompress(data, tuple(image_shape), dtype)


def compress_image_seq(images: ArrayLike | Sequence[ArrayLike], level: int = 9) -> bytes:
    """Compress a sequence of equal pictures as one, which uses what neighbours have in common."""
    if not isinstance(images, list | tuple):
        return _compress(_numbers("the sequence", images), level)
    pictures = [_numbers(f"picture {k}", image) for k, image in enumerate(images)]
    if not pictures:
        raise UsageError("the sequence has no pictures; give at least one")
    kinds = [f"{picture.dtype}{list(picture.shape)}" for picture in pictures]
    for k, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise UsageError(f"picture {k} is {kind}, the first is {kinds[0]}; make them alike")
    return _compress(np.stack(pictures), level)


def decompress_image_seq(
    compressed_data: bytes,
    image_shape: Sequence[int],
    batch_size: int,
    dtype: DTypeLike = np.uint8,
) -> NDArray[Any]:
    """Return the [batch, ...] pictures that `compress_image_seq` was given, as `decompress_image`.

    `image_shape` is that of one picture.
    """
    return _decompress(compressed_data, (batch_size, *image_shape), dtype)


def _numbers(what: str, value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):  # a torch tensor, without importing torch for it
        try:
            value = value.detach().cpu().resolve_conj().resolve_neg().numpy()
        except TypeError as error:
            raise UnsupportedValue(f"{what} is {value.dtype}, which numpy has not") from error
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
        # Bounded by one byte more than is wanted, which tells "too long" from "just right".
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
