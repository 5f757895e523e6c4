"""Kernels for blocks of time series.

Integers narrower than 64 bits become 64 bits wide in compiled code, and are cut when stored: the
upper half of what is computed here means nothing.
"""

from __future__ import annotations

import numpy as np

from penstock.core.kernels.native import (
    HAS_ZSTD,
    address_of,
    bytes_at,
    compiled,
    crc32,
    lz4_unpack,
    zstd_unpack,
)

__all__ = [
    "HAS_ZSTD",
    "NEEDS_ZSTD",
    "decode_blocks",
    "split_planes",
    "take_nonzero",
]

AS_IT_IS, LZ4, ZSTD = 0, 1, 2  # how a bitmap or plane is kept
NEEDS_ZSTD = -2


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


@compiled
def _number_at(data, at):
    return (
        np.int64(data[at])
        | np.int64(data[at + 1]) << 8
        | np.int64(data[at + 2]) << 16
        | np.int64(data[at + 3]) << 24
    )


@compiled
def _unpack_pieces(data, nonzero, count, has_zstd, room, addresses):
    """Unpack the bitmap and the planes of one block; note where they lie.

    Returns:
        0, or 1 if the block makes no sense, or NEEDS_ZSTD.
    """
    at, used = 4, 0
    for piece in range(addresses.size):
        expected = (count + 7) // 8 if piece == 0 else nonzero
        if at + 5 > data.size:
            return 1
        method, length = data[at], _number_at(data, at + 1)
        at += 5
        if at + length > data.size:
            return 1
        source = address_of(data) + np.uint64(at)
        at += length
        if method == AS_IT_IS:
            if length != expected:
                return 1
            addresses[piece] = source
            continue
        target = address_of(room) + np.uint64(used)
        if method == LZ4:
            if lz4_unpack(source, target, length, expected) != expected:
                return 1
        elif method == ZSTD:
            if not has_zstd:
                return NEEDS_ZSTD
            if zstd_unpack(target, expected, source, length) != expected:
                return 1
        else:
            return 1
        addresses[piece] = target
        used += expected
    return 0 if at == data.size else 1


@compiled
def _turn_rows(words, features, steps, out):
    """Copy rows of [features, steps] to rows of [steps, features]."""
    size = features * steps
    for start in range(0, words.size, size):
        for t in range(steps):
            for f in range(features):
                out[start + t * features + f] = words[start + f * steps + t]


@compiled
def decode_blocks(data, sizes, counts, crcs, features, steps, has_zstd, room, gaps, words, out):
    """Decode consecutive blocks of a series into `out`, and check them.

    Args:
        data: uint8: the coded blocks, one behind the other.
        sizes: int64 [n]: bytes of each.
        counts: int64 [n]: words of each, decoded.
        crcs: int64 [n]: checksums of the decoded bytes; below 0 is not checked.
        features: With `steps`: each row of features x steps is turned; 0 leaves the order.
        steps: See `features`.
        has_zstd: Whether planes may be unpacked with zstd here.
        room: uint8, for what is unpacked.
        gaps: Words, for one block.
        words: Words, for one block.
        out: Words, for all blocks.

    Returns:
        The number of the first bad block, -1 if all are good, or NEEDS_ZSTD.
    """
    addresses = np.empty(out.itemsize + 1, np.uint64)
    at, done = 0, 0
    for block in range(sizes.size):
        count = counts[block]
        coded = data[at : at + sizes[block]]
        at += sizes[block]
        target = out[done : done + count]
        done += count
        if coded.size < 4:
            return block
        nonzero = _number_at(coded, 0)
        if nonzero > count:
            return block
        problem = _unpack_pieces(coded, nonzero, count, has_zstd, room, addresses)
        if problem:
            return block if problem == 1 else problem
        here = words[:count] if steps else target
        join_planes(addresses[1:], gaps[:nonzero])
        if not put_nonzero(bytes_at(addresses[0], (count + 7) // 8), gaps[:nonzero], here):
            return block
        if crcs[block] >= 0:
            found = crc32(np.uint32(0), address_of(here), np.uint64(count * out.itemsize))
            if np.int64(found) != crcs[block]:
                return block
        if steps:
            _turn_rows(here, features, steps, target)
    return -1
