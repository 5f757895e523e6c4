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
from penstock.core.kernels.planes import join_planes, split_planes

LZ4, BITS, PLAIN, RAW, TAGGED = 0, 1, 2, 4, -1  # how frames are packed; PLAIN: no differences
GROUP = 64  # values of the bit packer that share a width
OCTET = 8  # words of the gradient packer that do
_LOW1 = 0x0101010101010101  # the lowest bit of each of eight bytes, and so on
_LOW2, _LOW4, _LOW7 = 3 * _LOW1, 15 * _LOW1, 127 * _LOW1


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
def encode_pictures(frames, method, row, level, step, tag, scratch, state, out, lengths):
    """Compress frames [n, size] into `out`, note the bytes of each; return those of all.

    `method` is `LZ4` or `BITS`. Level 0 is LZ4's fast mode, above it its slow, smaller one, which
    needs `LZ4_HARD_BYTES` as state. A tag is a byte before each frame that is not stored as it is;
    below 0 there is none. `scratch` is a frame in whole groups of 64 bytes, `out` is n frames and
    what the worst of one takes.
    """
    count, size = frames.shape
    head = 1 if tag >= 0 else 0
    at = used = 0
    for i in range(count):
        source = frames[i]
        if row:
            _subtract_rows(source, scratch, row)
            source = scratch[:size]
        if head:
            out[at] = tag
        target = out[at + head :]
        if method == BITS:
            if not row:
                scratch[:size] = source
            scratch[size:] = 0
            used = _pack_bits(scratch, target)
        elif level:
            work, begin, end = address_of(state), address_of(source), address_of(target)
            if used > 0:
                used = lz4_pack_hard_again(work, begin, end, size, target.size, level)
            else:
                used = lz4_pack_hard(work, begin, end, size, target.size, level)
        else:
            used = lz4_pack_fast(address_of(source), address_of(target), size, target.size, step)
        lengths[i] = used + head
        if used <= 0 or used + head >= size:
            copy_bytes(address_of(out[at:]), address_of(frames[i]), size)
            lengths[i] = size
        at += lengths[i]
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
def narrow(values, scale, head, tail, out, exact):
    """Write float32 frames [n, size] as bytes, each times `scale`; note which are so exactly.

    `head` and `tail` are as for `widen`: what that gives must be the same bit for bit.
    """
    count, size = values.shape
    for i in range(count):
        frame, bits, narrowed = values[i], values[i].view(np.uint32), out[i]
        differs = np.uint32(0)
        for k in range(size):
            level = np.int32(frame[k] * scale + np.float32(0.5)) & 255
            narrowed[k] = np.uint8(level)
            back = np.float32(np.float32(level) * head + np.float32(level) * tail)
            differs |= back.view(np.uint32) ^ bits[k]
        exact[i] = differs == 0


@compiled
def widen(frames, head, tail, out):
    """Undo `narrow`: `head` + `tail` is 1 / scale, so exact that bytes times it are rounded right.

    A division takes twice as long.
    """
    for i in range(len(frames)):
        frame, widened = frames[i], out[i]
        for k in range(frame.size):
            widened[k] = np.float32(frame[k]) * head + np.float32(frame[k]) * tail


@compiled
def _width(largest):
    """Return how many bits the largest byte of a word has."""
    for half in (32, 16, 8):
        largest |= largest >> np.uint64(half)
    byte = np.int64(largest & np.uint64(255))
    bits = 0
    for k in range(8):  # without branches, which cannot be predicted here
        bits += byte >= (1 << k)
    return bits


@compiled
def _pack_bits(scratch, out):
    """Pack bytes into as few bits as each group of 64 needs: for pictures with noise.

    The sign goes to the lowest bit. A group is written as planes of 4, 2 and 1 bits, each plane
    only if the width has it. Returns how many bytes that takes.
    """
    words, begins = scratch.view(np.uint64), address_of(out)
    low7, low1, sign = np.uint64(_LOW7), np.uint64(_LOW1), np.uint64(255)
    groups = scratch.size // GROUP
    at = groups
    for g in range(groups):
        largest = np.uint64(0)
        for k in range(8 * g, 8 * g + 8):
            word = words[k]
            code = (word & low7) << np.uint64(1) ^ ((word >> np.uint64(7)) & low1) * sign
            words[k] = code
            largest |= code
        width = _width(largest)
        out[g] = width
        packed = carray(pointer(begins + np.uint64(at)), width, np.uint64)
        _pack_group(words, 8 * g, width, packed)
        at += 8 * width
    return at


@compiled
def _pack_group(words, start, width, out):
    """Pack 64 values, eight at a time in a word; see `_unpack_group`."""
    low4, low2, low1 = np.uint64(_LOW4), np.uint64(_LOW2), np.uint64(_LOW1)
    at = width & 4
    if width == 8:
        for k in range(8):
            out[k] = words[start + k]
        return
    if at:
        for k in range(4):
            out[k] = (words[start + k] & low4) | (words[start + k + 4] & low4) << np.uint64(4)
    if width & 2:
        first = second = np.uint64(0)
        for k in range(0, 8, 2):
            first |= ((words[start + k] >> np.uint64(at)) & low2) << np.uint64(k)
            second |= ((words[start + k + 1] >> np.uint64(at)) & low2) << np.uint64(k)
        out[at], out[at + 1] = first, second
    if width & 1:
        last = np.uint64(0)
        for k in range(8):
            last |= ((words[start + k] >> np.uint64(width & 6)) & low1) << np.uint64(k)
        out[width - 1] = last


@compiled
def _unpack_bits(address, length, scratch, out):
    """Undo `_pack_bits`; return whether it makes sense."""
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
    """Undo `encode_pictures`, straight into the rows of `out`.

    `method` is `LZ4` or `BITS`, as differences of rows or `PLAIN`; of `TAGGED` the first byte says.
    Of `RAW` all frames are as long as they are.
    `scratch` is eight words for each group of the bit packer.
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


@compiled
def gradient_encode(frames, row, scratch, planes, out, lengths):
    """Write how the slope of words [n, size] changes, in as few bytes as each 8 of them need.

    A word becomes (here - left) - (above - above left), the sign in the lowest bit. A frame is one
    width for each 8 words, then so many planes of 8 bytes for each. `scratch` is a frame of whole
    eights, `planes` its bytes [4, ...], `out` n frames and 10 * size + 80 bytes.
    """
    count, size = frames.shape
    groups = planes.shape[1] // OCTET
    octets, begins = planes.view(np.uint64), address_of(out)
    first, second, third, fourth = octets[0], octets[1], octets[2], octets[3]
    at = 0
    for n in range(count):
        _to_gradient(frames[n], row, scratch)
        split_planes(scratch, planes)
        begin = at
        at += groups
        for g in range(groups):  # without branches, which cannot be predicted here
            packed = carray(pointer(begins + np.uint64(at)), 4, np.uint64)
            packed[0], packed[1], packed[2], packed[3] = first[g], second[g], third[g], fourth[g]
            largest = fourth[g]
            width = np.int64(largest != 0)
            largest |= third[g]
            width += largest != 0
            largest |= second[g]
            width += largest != 0
            width += (largest | first[g]) != 0
            out[begin + g] = width
            at += OCTET * width
        if at - begin >= 4 * size:
            at = begin + 4 * size
            out[begin:at] = frames[n].view(np.uint8)
        lengths[n] = at - begin
    return at


@compiled
def _to_gradient(words, row, out):
    out[words.size :] = 0
    above = np.zeros(row, np.uint32)
    for start in range(0, words.size, row):
        here, changes = words[start : start + row], out[start : start + row]
        changes[0] = here[0] - above[0]
        for i in range(1, here.size):
            changes[i] = (here[i] - above[i]) - (here[i - 1] - above[i - 1])
        above = here


@compiled
def gradient_decode(addresses, lengths, row, scratch, planes, room, out):
    """Undo `gradient_encode`; `out` is uint32 [n, words], `room` a frame and 4 words of 64 bits."""
    count, size = out.shape
    groups = planes.shape[1] // OCTET
    octets, begin = planes.view(np.uint64), address_of(room)
    places = address_of(planes) + np.arange(4).astype(np.uint64) * np.uint64(planes.shape[1])
    zero = np.uint64(0)
    for n in range(count):
        length = lengths[n]
        if length == 4 * size:
            copy_bytes(address_of(out[n]), addresses[n], length)
            continue
        if length < groups or length > 4 * size:
            return n
        copy_bytes(begin, addresses[n], length)  # all four are read below, perhaps beyond the end
        at = groups
        for g in range(groups):
            width = np.int64(room[g])
            if width > 4 or at + OCTET * width > length:
                return n
            packed = carray(pointer(begin + np.uint64(at)), 4, np.uint64)
            for k in range(4):
                octets[k, g] = packed[k] & (zero - np.uint64(width > k))
            at += OCTET * width
        if at != length:
            return n
        join_planes(places, scratch)
        above, slope = np.zeros(row, np.uint32), np.uint32(0)
        for start in range(0, size, row):
            changes, here = scratch[start : min(start + row, size)], out[n, start : start + row]
            slope = np.uint32(0)
            for i in range(here.size):
                slope += changes[i]
                here[i] = above[i] + slope
            above = here
    return -1
