"""Kernels for blocks of time series.

Integers narrower than 64 bits become 64 bits wide in compiled code, and are cut when stored: the
upper half of what is computed here means nothing.
"""

from __future__ import annotations

import numpy as np

from penstock.core.kernels.native import bytes_at, compiled


@compiled
def take_nonzero(words, marks, gaps):
    """Mark what is not zero in a bitmap, and note each as the gap to the one before it.

    Returns:
        The number of gaps.
    """
    last = np.uint64(0)
    used = 0
    for byte in range(marks.size):
        base = 8 * byte
        count = min(8, words.size - base)
        mask = np.uint64(0)
        for k in range(count):
            mask |= np.uint64(words[base + k] != 0) << np.uint64(k)
        marks[byte] = mask
        if mask == 0:
            continue
        if mask == 255:  # most of the time: all or nothing
            for k in range(8):
                word = np.uint64(words[base + k])
                gaps[used + k] = word - last
                last = word
            used += 8
            continue
        for k in range(count):
            if (mask >> np.uint64(k)) & np.uint64(1):
                word = np.uint64(words[base + k])
                gaps[used] = word - last
                last = word
                used += 1
    return used


@compiled
def put_nonzero(marks, gaps, out):
    """Undo `take_nonzero`; return whether the bitmap and the gaps fit each other."""
    last = np.uint64(0)
    used = 0
    for byte in range(marks.size):
        mask = marks[byte]
        base = 8 * byte
        count = min(8, out.size - base)
        if mask >> count:
            return False
        if mask == 0:
            for k in range(count):
                out[base + k] = 0
        elif mask == 255 and used + 8 <= gaps.size:
            for k in range(8):
                last += np.uint64(gaps[used + k])
                out[base + k] = last
            used += 8
        else:
            for k in range(count):
                if (mask >> k) & 1:
                    if used == gaps.size:
                        return False
                    last += np.uint64(gaps[used])
                    used += 1
                    out[base + k] = last
                else:
                    out[base + k] = 0
    return used == gaps.size


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
    """Undo `split_planes`; the planes lie at these addresses."""
    count = out.size
    if out.itemsize == 4:
        first = bytes_at(addresses[0], count)
        second = bytes_at(addresses[1], count)
        third = bytes_at(addresses[2], count)
        fourth = bytes_at(addresses[3], count)
        for i in range(count):
            low = np.uint32(first[i]) | (np.uint32(second[i]) << np.uint32(8))
            high = np.uint32(third[i]) | (np.uint32(fourth[i]) << np.uint32(8))
            code = np.uint32(low | (high << np.uint32(16)))
            out[i] = (code >> np.uint32(1)) ^ np.uint32(0 - (code & np.uint32(1)))
        return
    one = np.uint64(1)
    for i in range(count):
        code = np.uint64(0)
        for k in range(out.itemsize):
            code |= np.uint64(bytes_at(addresses[k], count)[i]) << np.uint64(8 * k)
        out[i] = (code >> one) ^ (np.uint64(0) - (code & one))
