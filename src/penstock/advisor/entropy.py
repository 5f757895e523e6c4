"""How small a memoryless coder could make values: the bound that codecs are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.codecs.base import SIGNED, UNSIGNED

Array = NDArray[Any]

HIGHEST = 1000.0  # a pack is padded to that
_MOST_BYTES = 2 << 20


def memoryless_bound(frames: Array) -> float:
    """Return the best ratio that a coder without memory could reach on frames [time, ...].

    That is the order-0 entropy of the byte planes of one of: the values; their differences in time;
    the values without the zeros, which are a bitmap; the differences between what is left; the
    differences to the row above. The smallest counts. A coder that also finds repeats may
    do better.

    Args:
        frames: Words of 1, 2, 4 or 8 bytes (complex numbers count as two), neighbours in time along
            the first axis.
    """
    if frames.dtype.kind == "c":
        half = np.float32 if frames.itemsize == 8 else np.float64
        frames = np.ascontiguousarray(frames)[..., np.newaxis].view(half)
    words = np.ascontiguousarray(frames).view(UNSIGNED[frames.itemsize])
    if not words.size:
        return 1.0
    per_frame = max(1, words[0].nbytes)
    words = words[: max(2, _MOST_BYTES // per_frame)]
    bits = min(_candidates(words))
    return min(HIGHEST, 8 * words.nbytes / bits) if bits else HIGHEST


def _candidates(words: Array) -> Iterator[float]:
    flat = words.reshape(-1)
    yield _plane_bits(flat)
    if len(words) > 1:
        yield _plane_bits(np.concatenate([words[:1].reshape(-1), _gaps(words).reshape(-1)]))
    series = np.ascontiguousarray(words.reshape(len(words), -1).T).reshape(-1)  # time comes last
    present = series != 0
    share = float(np.count_nonzero(present)) / series.size
    bitmap = series.size * _binary_entropy(share)
    kept = series[present]
    yield bitmap + _plane_bits(kept)
    if kept.size > 1:
        yield bitmap + _plane_bits(np.concatenate([kept[:1], _gaps(kept)]))
    if words.ndim >= 3 and words.shape[1] > 1:
        turned = np.moveaxis(words, 1, 0)
        yield _plane_bits(np.concatenate([turned[:1].reshape(-1), _gaps(turned).reshape(-1)]))


def _gaps(words: Array) -> Array:
    """Differences along the first axis, the sign in the lowest bit."""
    signed = SIGNED[words.itemsize]
    gaps = np.diff(words, axis=0).view(signed)
    codes: Array = ((gaps << 1) ^ (gaps >> (8 * words.itemsize - 1))).view(words.dtype)
    return codes


def _plane_bits(words: Array) -> float:
    """Bits of the byte planes of values, each plane coded by how often its bytes appear."""
    if not words.size:
        return 0.0
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.itemsize)
    total = 0.0
    for k in range(words.itemsize):
        counts = np.bincount(planes[:, k], minlength=256)
        counts = counts[counts > 0]
        total -= float(np.sum(counts * np.log2(counts / words.size)))
    return total


def _binary_entropy(share: float) -> float:
    if share in (0.0, 1.0):
        return 0.0
    return float(-share * np.log2(share) - (1 - share) * np.log2(1 - share))
