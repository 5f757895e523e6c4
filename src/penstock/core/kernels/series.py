"""Kernels for blocks of time series.

Integers narrower than 64 bits become 64 bits wide in compiled code, and are cut when stored: the
upper half of what is computed here means nothing.
"""

from __future__ import annotations

import numpy as np

from penstock.core.kernels.native import (
    ZstdRoom,
    address_of,
    bytes_at,
    compiled,
    copy_bytes,
    crc32,
    lz4_pack_fast,
    lz4_unpack,
    zstd_pack,
    zstd_reset,
    zstd_set,
    zstd_unpack,
)
from penstock.core.kernels.planes import join_planes, split_planes

__all__ = ["ZstdRoom", "decode_blocks", "encode_blocks"]

if zstd_unpack is None:
    raise ImportError("zstd is not visible; pip install --force-reinstall backports.zstd")

AS_IT_IS, LZ4, ZSTD = 0, 1, 2  # how a bitmap or plane is kept
_LZ4_ACCELERATION = 4  # some speed for little size: matches are short or plenty here
_SAMPLE, _SAMPLE_ERROR = 4096, 1 / 8  # bytes on which zstd is tried, and what they may be wrong by
_ZSTD_RESET_ALL = 3
_ROWS_BYTES = 16 * 1024  # that are put in their places at a time


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
    # Unsigned places: a signed one is checked for being negative, at twice the time.
    used, most, eight = np.uint64(0), np.uint64(gaps.size), np.uint64(8)
    whole = out.size // 8
    for byte in range(marks.size):
        mask, base = marks[byte], np.uint64(8 * byte)
        if byte == whole or used + eight > most:  # near the end: each step is checked
            count = min(8, out.size - 8 * byte)
            if mask >> count:
                return -1, last
            for k in range(count):
                marked = (mask >> k) & 1
                if marked:
                    if used == most:
                        return -1, last
                    last += np.uint64(gaps[used])
                    used += np.uint64(1)
                out[base + np.uint64(k)] = last if marked else np.uint64(0)
        elif mask == 0:
            for k in range(8):
                out[base + np.uint64(k)] = 0
        elif mask == 255:
            for k in range(8):
                last += np.uint64(gaps[used + np.uint64(k)])
                out[base + np.uint64(k)] = last
            used += eight
        else:  # without branches, which cannot be predicted here
            for k in range(8):
                bit = np.uint64((mask >> k) & 1)
                keep = np.uint64(0) - bit
                last += np.uint64(gaps[used]) & keep
                out[base + np.uint64(k)] = last & keep
                used += bit
    return np.int64(used), last


@compiled
def _number_at(data, at):
    return (
        np.int64(data[at])
        | np.int64(data[at + 1]) << 8
        | np.int64(data[at + 2]) << 16
        | np.int64(data[at + 3]) << 24
    )


@compiled
def _unpack(zstd, method, source, length, target, expected):
    """Unpack a bitmap or plane; return whether it makes sense."""
    if method == LZ4:
        return lz4_unpack(source, target, length, expected) == expected
    return method == ZSTD and zstd_unpack(zstd, target, expected, source, length) == expected


@compiled
def _unpack_pieces(zstd, data, nonzero, count, room, addresses):
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
        if not _unpack(zstd, method, addresses[piece], length, target, expected):
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
    """Put words in their places, a few rows at a time while they are in the cache.

    Returns whether bitmap and gaps fit, and, if `check`, the checksum of the words as on disk.
    """
    row = max(features * steps, 1)
    most = out.size  # in one piece, or as many rows as begin with a byte of the bitmap
    if steps:
        most = row * max(8, _ROWS_BYTES // (row * out.itemsize) // 8 * 8)
        if row % 8 == 0:
            most = row * max(1, _ROWS_BYTES // (row * out.itemsize))
    checksum = np.uint32(0)
    used, last = 0, np.uint64(0)
    for start in range(0, out.size, max(most, 1)):
        size = min(most, out.size - start)
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
            for at in range(0, size, row):
                _turn(here[at : at + row], features, steps, target[at : at + row])
    return used == gaps.size, checksum


@compiled
def decode_blocks(zstd, data, blocks, features, steps, room, gaps, words, out):
    """Decode consecutive blocks into `out`, as `Series.decode_blocks` says; tell if all are good.

    A checksum below 0 is not checked. `zstd` is a `ZstdRoom`'s, `room` is for what is unpacked of
    one block, `gaps` and `words` (none without `steps`) for its words.
    """
    addresses = np.empty(out.itemsize + 1, np.uint64)
    at, done = 0, 0
    for block in range(blocks.shape[1]):
        size, count, crc = blocks[0, block], blocks[1, block], blocks[2, block]
        coded = data[at : at + size]
        at += size
        target = out[done : done + count]
        done += count
        nonzero = _number_at(coded, 0) if coded.size >= 4 else count + 1
        if nonzero > count or not _unpack_pieces(zstd, coded, nonzero, count, room, addresses):
            return False
        join_planes(addresses[1:], gaps[:nonzero])
        marks = bytes_at(addresses[0], (count + 7) // 8)
        check = crc >= 0
        fits, found = _put_rows(marks, gaps[:nonzero], features, steps, words, check, target)
        if not fits or (check and np.int64(found) != crc):
            return False
    return True


@compiled
def _put_number(number, out, at):
    for k in range(4):
        out[at + k] = (number >> (8 * k)) & 255


@compiled
def _pack(zstd, source, worth, room, out, at):
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
        share = zstd_pack(zstd, address_of(room), room.size, begin, sample) / max(sample, 1)
        if share < worth[2] * length / max(size, 1) + _SAMPLE_ERROR:
            packed = zstd_pack(zstd, address_of(room), room.size, address_of(source), size)
        if packed < np.uint64(worth[2] * length):  # an error is a number beyond all sizes
            method, length = ZSTD, np.int64(packed)
            copy_bytes(into, address_of(room), length)
        elif method == AS_IT_IS:
            copy_bytes(into, address_of(source), size)
    out[at] = method
    _put_number(length, out, at + 1)
    return at + 5 + length


@compiled
def encode_blocks(zstd, source, size, features, steps, options, worth, rooms, out, ends, checksums):
    """Encode blocks of `size` words into `out`; note where each ends, and the words' checksum.

    With `steps`, `source` is rows of [steps, features], which are turned in `words`. `options` are
    pairs of numbers for `zstd`, a `ZstdRoom`'s.
    """
    words, gaps, marks, planes, room = rooms  # to work in
    zstd_reset(zstd, _ZSTD_RESET_ALL)
    for k in range(options.shape[0]):
        zstd_set(zstd, options[k, 0], options[k, 1])
    width, row, end = source.itemsize, features * steps, 0
    for block in range(ends.size):
        stored = here = source[block * size : (block + 1) * size]
        if steps:
            stored = words[: here.size]
            for at in range(0, here.size, row):
                _turn(here[at : at + row], steps, features, stored[at : at + row])
        nbytes = np.uint64(stored.size * width)
        checksums[block] = crc32(np.uint32(0), address_of(stored), nbytes)
        bitmap = marks[: (stored.size + 7) // 8]
        count = take_nonzero(stored, bitmap, gaps)
        split_planes(gaps[:count], planes[: width * count].reshape(width, count))
        _put_number(count, out, end)
        end = _pack(zstd, bitmap, worth, room, out, end + 4)
        for k in range(width):
            end = _pack(zstd, planes[k * count : (k + 1) * count], worth, room, out, end)
        ends[block] = end
