"""Kernels for the byte planes of words that are differences."""

from __future__ import annotations

import numpy as np

from penstock.core.kernels.native import bytes_at, compiled

_IN_CACHE = 2048  # words


@compiled
def split_planes(gaps, out):
    """Move the sign of each gap to its lowest bit, and write byte k of all into row k of `out`."""
    if gaps.itemsize == 4:
        first, second, third, fourth = out[0], out[1], out[2], out[3]
        for i in range(gaps.size):
            gap = np.uint32(gaps[i])
            code = np.uint32(gap << np.uint32(1)) ^ np.uint32(0 - (gap >> np.uint32(31)))
            first[i] = code & 255
            second[i] = (code >> 8) & 255
            third[i] = (code >> 16) & 255
            fourth[i] = (code >> 24) & 255
        return
    one, top = np.uint64(1), np.uint64(8 * gaps.itemsize - 1)
    for k in range(gaps.itemsize):
        row, shift = out[k], np.uint64(8 * k)
        for i in range(gaps.size):
            gap = np.uint64(gaps[i])
            code = (gap << one) ^ (np.uint64(0) - ((gap >> top) & one))
            row[i] = (code >> shift) & np.uint64(255)


@compiled
def join_planes(addresses, out):
    """Undo `split_planes`, of planes that lie at these addresses."""
    word, width = out.dtype.type, addresses.size
    one = word(1)
    step = min(width, 4)  # planes that one pass joins
    for start in range(0, out.size, _IN_CACHE):
        target = out[start : start + _IN_CACHE]
        count = target.size
        for k in range(0, width, step):
            first = bytes_at(addresses[k] + np.uint64(start), count)
            second = bytes_at(addresses[k + (step > 1)] + np.uint64(start), count)
            third = bytes_at(addresses[k + step // 2] + np.uint64(start), count)
            fourth = bytes_at(addresses[k + step - 1] + np.uint64(start), count)
            if step == 4:
                for i in range(count):
                    low = np.uint32(first[i]) | (np.uint32(second[i]) << np.uint32(8))
                    high = np.uint32(third[i]) | (np.uint32(fourth[i]) << np.uint32(8))
                    joined = word(np.uint32(low | (high << np.uint32(16))))
                    target[i] = joined if k == 0 else target[i] | word(joined << word(8 * k))
            elif step == 2:
                for i in range(count):
                    target[i] = word(first[i]) | word(word(second[i]) << word(8))
            else:
                for i in range(count):
                    target[i] = first[i]
        for i in range(count):
            target[i] = word(target[i] >> one) ^ word(word(0) - word(target[i] & one))
