"""Compiled kernels (numba) for many small frames: each function takes a whole batch.

Frames are rows of bytes. An encoded frame as long as the frame itself is stored as it is. A decoder
returns the number of the first frame that makes no sense, or -1.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from penstock.core.kernels.native import (
    address_of,
    bytes_at,
    compiled,
    copy_bytes,
    lz4_pack_fast,
    lz4_pack_hard,
    lz4_pack_hard_again,
    lz4_unpack,
    pointer,
)

LZ4, BITS, PLAIN, TAGGED = 0, 1, 2, -1  # how a frame is packed; PLAIN: not as differences of rows
GROUP = 64  # values of the bit packer that share a width
_LOW1 = 0x0101010101010101  # the lowest bit of each of eight bytes, and so on
_LOW2, _LOW4, _LOW7 = 3 * _LOW1, 15 * _LOW1, 127 * _LOW1


@compiled
def copy_frames(addresses, lengths, out):
    """Fill the rows of `out` with the bytes at `addresses`."""
    count, size = out.shape
    for i in range(count):
        if lengths[i] != size:
            return i
        copy_bytes(address_of(out[i]), addresses[i], size)
    return -1


@compiled
def _subtract_rows(frame, out, row):
    """Write each row as the difference to the one above."""
    out[:row] = frame[:row]
    for start in range(row, frame.size, row):  # by rows, so that it is vectorised
        above = frame[start - row : start]
        here = frame[start : start + row]
        change = out[start : start + row]
        for i in range(here.size):
            change[i] = here[i] - above[i]


@compiled
def _add_rows(frame, row):
    """Undo `_subtract_rows` in place; the inner loop has no dependence, so it is vectorised."""
    for start in range(row, frame.size, row):
        above = frame[start - row : start]
        here = frame[start : start + row]
        for i in range(here.size):
            here[i] += above[i]


@compiled
def lz4_encode(frames, row, level, step, tag, scratch, state, out, lengths):
    """Compress frames one after another into `out`; return the bytes used.

    Args:
        frames: uint8 [n, size].
        row: Bytes of a picture row, each stored as the difference to the one above; 0 for none.
        level: 0 is the fast mode of LZ4, above it its slow, smaller one.
        step: In the fast mode, how many bytes LZ4 goes ahead where it finds nothing.
        tag: A byte to write before each frame that is not stored as it is; below 0 for none.
        scratch: uint8 [size].
        state: uint64, `LZ4_HARD_BYTES` long, or empty for level 0.
        out: uint8, at least n * size + LZ4's worst case of one frame.
        lengths: int64 [n], filled.
    """
    count, size = frames.shape
    head = 1 if tag >= 0 else 0
    at = 0
    used = 0
    for i in range(count):
        source = frames[i]
        if row:
            _subtract_rows(source, scratch, row)
            source = scratch
        start = at
        if head:
            out[start] = tag
        at += head
        room = out.size - at
        if level:
            work, begin, end = address_of(state), address_of(source), address_of(out[at:])
            if used > 0:
                used = lz4_pack_hard_again(work, begin, end, size, room, level)
            else:
                used = lz4_pack_hard(work, begin, end, size, room, level)
        else:
            used = lz4_pack_fast(address_of(source), address_of(out[at:]), size, room, step)
        lengths[i] = used + head
        if used <= 0 or used + head >= size:
            copy_bytes(address_of(out[start:]), address_of(frames[i]), size)
            lengths[i] = size
        at = start + lengths[i]
    return at


@compiled
def sparse_encode(words, out, lengths):
    """Write each frame of 32-bit words as a bitmap of what is not zero, then those words."""
    count, size = words.shape
    marks = (size + 7) // 8
    at = 0
    for i in range(count):
        start = at
        at += marks
        out[start:at] = 0
        for k in range(size):
            word = words[i, k]
            if word != 0:
                if at - start + 4 >= 4 * size:
                    break
                out[start + k // 8] |= np.uint8(1 << (k % 8))
                out[at] = word & 255
                out[at + 1] = (word >> 8) & 255
                out[at + 2] = (word >> 16) & 255
                out[at + 3] = word >> 24
                at += 4
        else:
            lengths[i] = at - start
            continue
        at = start + 4 * size  # not smaller: as it is
        out[start:at] = words[i].view(np.uint8)
        lengths[i] = 4 * size
    return at


@compiled
def sparse_decode(addresses, lengths, out):
    """Undo `sparse_encode`; `out` is uint32 [n, words]."""
    count, size = out.shape
    marks = (size + 7) // 8
    for i in range(count):
        length = lengths[i]
        if length == 4 * size:
            out[i].view(np.uint8)[:] = bytes_at(addresses[i], length)
            continue
        if length < marks or length > 4 * size or (length - marks) % 4:
            return i
        source = bytes_at(addresses[i], length)
        values = carray(pointer(addresses[i] + np.uint64(marks)), (length - marks) // 4, np.uint32)
        row = out[i]
        used = 0
        for byte in range(marks):
            mask = source[byte]
            base = 8 * byte
            top = min(8, size - base)
            if mask == 0:
                for k in range(top):
                    row[base + k] = 0
                continue
            if mask >> top or used + 8 > values.size:  # near the end: every step is checked
                for k in range(8):
                    if (mask >> k) & 1:
                        if k >= top or used >= values.size:
                            return i
                        row[base + k] = values[used]
                        used += 1
                    elif k < top:
                        row[base + k] = 0
                continue
            for k in range(top):
                bit = (mask >> k) & 1
                row[base + k] = values[used] if bit else 0
                used += bit
        if used != values.size:
            return i
    return -1


@compiled
def narrow(values, scale, out, back, exact):
    """Write float32 frames [n, size] as bytes, each times `scale`; note which are so exactly.

    `back` is float32 [size], for what a reader would get: it must be the same bit for bit.
    """
    count, size = values.shape
    again = back.view(np.uint32)
    for i in range(count):
        frame, bits = values[i], values[i].view(np.uint32)
        for k in range(size):
            out[i, k] = np.uint8(np.int32(frame[k] * scale + np.float32(0.5)))
        _divide(out[i], scale, back)
        differs = np.uint32(0)
        for k in range(size):
            differs |= again[k] ^ bits[k]
        exact[i] = differs == 0


@compiled
def _divide(frame, scale, out):
    for k in range(frame.size):
        out[k] = np.float32(frame[k]) / scale


@compiled
def widen(frames, scale, out):
    """Undo `narrow`."""
    for i in range(len(frames)):
        _divide(frames[i], scale, out[i])


@compiled
def _width(largest):
    bits = 0
    while largest >> bits:
        bits += 1
    return bits


@compiled
def bits_encode(frames, row, tag, scratch, out, lengths):
    """Pack bytes into as few bits as each group of 64 needs: for pictures with noise.

    Each byte becomes its difference to the one above (`row` bytes back), the sign in the lowest
    bit. A group is written as planes of 4, 2 and 1 bits, each plane only if the width has it.

    Args:
        frames: uint8 [n, size].
        row: As for `lz4_encode`.
        tag: As for `lz4_encode`.
        scratch: uint8 [size, rounded up to a multiple of 64].
        out: uint8, at least n * (size + size / 32 + 128).
        lengths: int64 [n], filled.
    """
    count, size = frames.shape
    groups = (size + GROUP - 1) // GROUP
    at = 0
    for i in range(count):
        begin = at
        if tag >= 0:
            out[at] = tag
            at += 1
        scratch[size:] = 0
        if row:
            _subtract_rows(frames[i], scratch, row)
        else:
            scratch[:size] = frames[i]
        for k in range(size):
            value = scratch[k]
            scratch[k] = np.uint8(value << 1) ^ np.uint8(0 - (value >> 7))
        start = at
        at += groups
        for g in range(groups):
            group = scratch[g * GROUP : (g + 1) * GROUP]
            largest = np.uint8(0)
            for k in range(GROUP):
                largest |= group[k]
            width = _width(largest)
            out[start + g] = width
            if width == 8:
                out[at : at + GROUP] = group
                at += GROUP
                continue
            shift = 0
            for plane in (4, 2, 1):
                if width & plane:
                    lane = GROUP * plane // 8
                    mask = (1 << plane) - 1
                    for k in range(lane):
                        packed = 0
                        for part in range(8 // plane):
                            packed |= ((group[k + part * lane] >> shift) & mask) << (part * plane)
                        out[at + k] = packed
                    at += lane
                    shift += plane
        if at - begin >= size:
            at = begin + size
            out[begin:at] = frames[i]
        lengths[i] = at - begin
    return at


@compiled
def _unpack_bits(address, length, scratch, out):
    """Undo `bits_encode` for one frame, but for the rows; return whether it makes sense."""
    groups = (out.size + GROUP - 1) // GROUP
    if length < groups:
        return False
    widths = bytes_at(address, groups)
    at = groups
    for g in range(groups):
        width = widths[g]
        if width > 8 or at + 8 * width > length:
            return False
        packed = carray(pointer(address + np.uint64(at)), width, np.uint64)
        _unpack_group(packed, width, scratch, 8 * g)
        at += 8 * width
    copy_bytes(address_of(out), address_of(scratch), out.size)
    return at == length


@compiled
def _unpack_group(packed, width, out, start):
    """Unpack 64 values, eight at a time in a word, and take their sign from the lowest bit."""
    low4, low2, low1 = np.uint64(_LOW4), np.uint64(_LOW2), np.uint64(_LOW1)
    low7, sign = np.uint64(_LOW7), np.uint64(255)
    at = np.uint64(width & 4)
    shift = np.uint64(width & 4)
    second = at + np.uint64(width & 2)
    for k in range(8):
        value = np.uint64(0)
        if width == 8:
            value = packed[k]
        else:
            if width & 4:
                value = (packed[k & 3] >> np.uint64(k & 4)) & low4
            if width & 2:
                part = packed[at + np.uint64(k & 1)] >> np.uint64(k & 6)
                value |= (part & low2) << shift
            if width & 1:
                part = packed[second] >> np.uint64(k)
                value |= (part & low1) << np.uint64(width & 6)
        out[start + k] = ((value >> np.uint64(1)) & low7) ^ ((value & low1) * sign)


@compiled
def decode_pictures(addresses, lengths, method, row, scratch, out):
    """Undo `lz4_encode` and `bits_encode`, straight into the rows of `out`.

    Args:
        addresses: uint64 [n]: where the frames lie.
        lengths: int64 [n]: bytes of each.
        method: `LZ4` or `BITS`, as differences of rows or `PLAIN`; `TAGGED`: the first byte says.
        row: Bytes of a picture row.
        scratch: uint64, eight for each group of the bit packer; empty where it is not needed.
        out: uint8 [n, size], filled.
    """
    count, size = out.shape
    for i in range(count):
        at, length = addresses[i], lengths[i]
        if length == size:
            copy_bytes(address_of(out[i]), at, size)
            continue
        if length <= 0 or length > size:
            return i
        kind = method
        if kind == TAGGED:
            kind = bytes_at(at, 1)[0]
            at, length = at + np.uint64(1), length - 1
        if kind > BITS | PLAIN:
            return i
        if kind & BITS:
            if not _unpack_bits(at, length, scratch, out[i]):
                return i
        elif lz4_unpack(at, address_of(out[i]), length, size) != size:
            return i
        if row and not kind & PLAIN:
            _add_rows(out[i], row)
    return -1
