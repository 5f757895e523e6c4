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
    copy_bytes,
    crc32,
    lz4_pack_fast,
    lz4_unpack,
    zstd_unpack,
)

__all__ = [
    "HAS_ZSTD",
    "NEEDS_ZSTD",
    "decode_blocks",
    "encode_block",
    "split_planes",
    "take_nonzero",
]

AS_IT_IS, LZ4, ZSTD = 0, 1, 2  # how a bitmap or plane is kept
_SAMPLE = 4096
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
def put_nonzero(marks, gaps, last, out):
    """Undo `take_nonzero`, from where it stands.

    Args:
        marks: The bits of these words alone.
        gaps: The gaps that are left.
        last: The word that those before led to.
        out: The words to fill.

    Returns:
        How many gaps were used (-1 if bitmap and gaps do not fit), and the last word.
    """
    used = 0
    for byte in range(marks.size):
        mask = marks[byte]
        base = 8 * byte
        count = min(8, out.size - base)
        if mask >> count:
            return -1, last
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
                        return -1, last
                    last += np.uint64(gaps[used])
                    used += 1
                    out[base + k] = last
                else:
                    out[base + k] = 0
    return used, last


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
def _bits_per_byte(plane):
    """Estimate the entropy of a plane from a sample of it."""
    counts = np.zeros(256, np.int64)
    step = max(1, plane.size // _SAMPLE)
    total = 0
    for i in range(0, plane.size, step):
        counts[plane[i]] += 1
        total += 1
    bits = 0.0
    for value in range(256):
        if counts[value]:
            bits -= counts[value] * np.log2(counts[value] / total)
    return bits / max(1, total)


@compiled
def encode_block(words, acceleration, worth_lz4, try_zstd, marks, gaps, planes, out):
    """Encode a block of a series, but for planes that need an entropy coder.

    Args:
        words: The block.
        acceleration: Of LZ4.
        worth_lz4: Largest share of a piece that LZ4 may leave.
        try_zstd: An entropy coder is worth a try if the estimate is below this share.
        marks: uint8 [words / 8, rounded up].
        gaps: Words.
        planes: uint8 [words * width].
        out: uint8, at least the block and 1/16 more.

    Returns:
        The bytes of `out` that are used. A piece that is better compressed by an entropy coder is
        there as it is, with ZSTD as its method: the caller replaces it.
    """
    width = words.itemsize
    count = take_nonzero(words, marks, gaps)
    rows = planes[: width * count].reshape(width, count)
    split_planes(gaps[:count], rows)
    for k in range(4):
        out[k] = (count >> (8 * k)) & 255
    at = 4
    for piece in range(width + 1):
        plane = marks if piece == 0 else rows[piece - 1]
        head, at = at, at + 5
        source, target = address_of(plane), address_of(out) + np.uint64(at)
        limit = np.int64(plane.size * worth_lz4)
        # LZ4 gives up at the limit by itself: there is no more room.
        length = np.int64(lz4_pack_fast(source, target, plane.size, limit, acceleration))
        method = LZ4
        if length <= 0 or 2 * length > plane.size:
            share = _bits_per_byte(plane) / 8
            kept = length if length > 0 else plane.size
            if share < try_zstd and share * plane.size < 0.75 * kept:
                method = ZSTD
            elif length <= 0:
                method = AS_IT_IS
        if method != LZ4:
            length = plane.size
            copy_bytes(target, source, length)
        out[head] = method
        for k in range(4):
            out[head + 1 + k] = (length >> (8 * k)) & 255
        at += length
    return at


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
def _turn(words, features, steps, out):
    """Copy one row of [features, steps] to [steps, features]."""
    # Views of two axes: a computed index is checked for being negative, at twice the time.
    source = words.reshape(features, steps)
    target = out.reshape(steps, features)
    for t in range(steps):
        for f in range(features):
            target[t, f] = source[f, t]


@compiled
def _put_rows(marks, gaps, features, steps, words, check, out):
    """Put words in their places, row by row while a row is in the cache.

    Returns:
        Whether bitmap and gaps fit, and, if `check`, the checksum of the words as on disk.
    """
    size = features * steps
    if steps == 0 or size % 8:  # in one piece: a row does not begin with a byte of the bitmap
        size = out.size
    checksum = np.uint32(0)
    used, last = 0, np.uint64(0)
    for start in range(0, out.size, size):
        target = out[start : start + size]
        here = words[:size] if steps else target
        bits = marks[start // 8 : (start + size + 7) // 8]
        taken, last = put_nonzero(bits, gaps[used:], last, here)
        if taken < 0:
            return False, checksum
        used += taken
        if check:
            checksum = crc32(checksum, address_of(here), np.uint64(size * out.itemsize))
        if steps:
            row = features * steps
            for at in range(0, size, row):
                _turn(here[at : at + row], features, steps, target[at : at + row])
    return used == gaps.size, checksum


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
        words: Words, for one block; none without `steps`.
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
        join_planes(addresses[1:], gaps[:nonzero])
        marks = bytes_at(addresses[0], (count + 7) // 8)
        check = crcs[block] >= 0
        fits, found = _put_rows(marks, gaps[:nonzero], features, steps, words, check, target)
        if not fits or (check and np.int64(found) != crcs[block]):
            return block
    return -1
