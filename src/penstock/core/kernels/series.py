"""Kernels for blocks of time series.

Integers narrower than 64 bits become 64 bits wide in compiled code, and are cut when stored: the
upper half of what is computed here means nothing.
"""

from __future__ import annotations

import numpy as np

from penstock.core.kernels.native import (
    address_of,
    bytes_at,
    compiled,
    copy_bytes,
    crc32,
    lz4_pack_fast,
    lz4_unpack,
    zstd_close,
    zstd_open,
    zstd_pack,
    zstd_set,
    zstd_unpack,
)

if zstd_unpack is None:
    raise ImportError("zstd is not visible; pip install --force-reinstall backports.zstd")

AS_IT_IS, LZ4, ZSTD = 0, 1, 2  # how a bitmap or plane is kept
_LZ4_ACCELERATION = 4  # some speed for little size: matches are short or plenty here
_SAMPLE, _SAMPLE_ERROR = 4096, 1 / 8  # bytes on which zstd is tried, and what they may be wrong by
_IN_CACHE = 2048  # words


@compiled
def take_nonzero(words, marks, gaps):
    """Mark what is not zero in a bitmap, note each as a gap to the one before; count the gaps."""
    marks[:] = 0
    last = np.uint64(0)
    used = 0
    for i in range(words.size):
        word = np.uint64(words[i])
        if word:
            marks[i >> 3] |= np.uint8(1 << (i & 7))
            gaps[used] = word - last
            last = word
            used += 1
    return used


@compiled
def put_nonzero(marks, gaps, last, out):
    """Undo `take_nonzero` for some words, from the word `last` and the gaps that are left.

    Returns how many gaps were used (-1 if bitmap and gaps do not fit), and the last word.
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


@compiled
def _number_at(data, at):
    return (
        np.int64(data[at])
        | np.int64(data[at + 1]) << 8
        | np.int64(data[at + 2]) << 16
        | np.int64(data[at + 3]) << 24
    )


@compiled
def _unpack(method, source, length, target, expected):
    """Unpack a bitmap or plane; return whether it makes sense."""
    if method == LZ4:
        return lz4_unpack(source, target, length, expected) == expected
    return method == ZSTD and zstd_unpack(target, expected, source, length) == expected


@compiled
def _unpack_pieces(data, nonzero, count, room, addresses):
    """Unpack the bitmap and planes of one block, note where they lie; return as `_unpack`."""
    at, used = 4, 0
    for piece in range(addresses.size):
        expected = (count + 7) // 8 if piece == 0 else nonzero
        if at + 5 > data.size:
            return False
        method, length = data[at], _number_at(data, at + 1)
        at += 5
        if at + length > data.size:
            return False
        addresses[piece] = address_of(data) + np.uint64(at)
        at += length
        if method == AS_IT_IS and length == expected:
            continue
        target = address_of(room) + np.uint64(used)
        if not _unpack(method, addresses[piece], length, target, expected):
            return False
        addresses[piece] = target
        used += expected
    return at == data.size


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

    Returns whether bitmap and gaps fit, and, if `check`, the checksum of the words as on disk.
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
def decode_blocks(data, sizes, counts, crcs, features, steps, room, gaps, words, out):
    """Decode consecutive blocks into `out`, as `Series.decode_blocks` says; tell if all are good.

    A checksum below 0 is not checked. `room` is for what is unpacked of one block, `gaps` and
    `words` (none without `steps`) for its words.
    """
    addresses = np.empty(out.itemsize + 1, np.uint64)
    at, done = 0, 0
    for block in range(sizes.size):
        count = counts[block]
        coded = data[at : at + sizes[block]]
        at += sizes[block]
        target = out[done : done + count]
        done += count
        nonzero = _number_at(coded, 0) if coded.size >= 4 else count + 1
        if nonzero > count or not _unpack_pieces(coded, nonzero, count, room, addresses):
            return False
        join_planes(addresses[1:], gaps[:nonzero])
        marks = bytes_at(addresses[0], (count + 7) // 8)
        check = crcs[block] >= 0
        fits, found = _put_rows(marks, gaps[:nonzero], features, steps, words, check, target)
        if not fits or (check and np.int64(found) != crcs[block]):
            return False
    return True


@compiled
def _put_number(number, out, at):
    for k in range(4):
        out[at + k] = (number >> (8 * k)) & 255


@compiled
def _pack(context, source, worth, room, out, at):
    """Write a bitmap or plane behind `at`, in the way that is worth it; return where it ends.

    `worth` says which share of its size must be reached: by LZ4, so that zstd is not tried, by LZ4
    at all, and by zstd, of what it would take otherwise.
    """
    size = source.size
    left = np.int64(out.size - at - 5)
    into = address_of(out[at + 5 :])
    fast = np.int64(lz4_pack_fast(address_of(source), into, size, left, _LZ4_ACCELERATION))
    method, length = LZ4, fast
    if fast == 0 or fast > worth[0] * size:
        if fast == 0 or fast > worth[1] * size:
            method, length = AS_IT_IS, size
        packed = np.uint64(size)
        sample = min(size, _SAMPLE)
        begin = address_of(source[(size - sample) // 2 :])
        share = zstd_pack(context, address_of(room), room.size, begin, sample) / max(sample, 1)
        if share < worth[2] * length / max(size, 1) + _SAMPLE_ERROR:
            packed = zstd_pack(context, address_of(room), room.size, address_of(source), size)
        if packed < np.uint64(worth[2] * length):  # an error is a number beyond all sizes
            method, length = ZSTD, np.int64(packed)
            copy_bytes(into, address_of(room), length)
        elif method == AS_IT_IS:
            copy_bytes(into, address_of(source), size)
    out[at] = method
    _put_number(length, out, at + 1)
    return at + 5 + length


@compiled
def encode_block(source, features, steps, options, worth, words, marks, gaps, planes, room, out):
    """Encode one block into `out`; return the bytes used of it, and the checksum of the words.

    With `steps`, `source` is rows of [steps, features], which are turned in `words`. `options` are
    pairs of numbers for zstd; the other arrays are room to work in.
    """
    stored = source
    if steps:
        stored, row = words, features * steps
        for at in range(0, source.size, row):
            _turn(source[at : at + row], steps, features, words[at : at + row])
    checksum = crc32(np.uint32(0), address_of(stored), np.uint64(stored.size * stored.itemsize))
    count, width = take_nonzero(stored, marks, gaps), stored.itemsize
    split_planes(gaps[:count], planes[: width * count].reshape(width, count))
    context = zstd_open()
    for k in range(options.shape[0]):
        zstd_set(context, options[k, 0], options[k, 1])
    _put_number(count, out, 0)
    end = _pack(context, marks, worth, room, out, 4)
    for k in range(width):
        end = _pack(context, planes[k * count : (k + 1) * count], worth, room, out, end)
    zstd_close(context)
    return end, checksum
