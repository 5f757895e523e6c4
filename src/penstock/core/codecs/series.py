"""The codec for what sensors say over time: zeros, and values close to the one before."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.codecs.base import (
    SIGNED,
    Array,
    Buffer,
    Codec,
    as_unsigned,
    compiled_kernels,
    expect,
    unlz4,
    unzstd,
)
from penstock.core.codecs.planes import Planes, join, split
from penstock.core.reuse import BLOCKS
from penstock.errors import CorruptFile

_HEAD = struct.Struct("<I")  # how many values are not zero
_PIECE = struct.Struct("<BI")  # how the bitmap or a plane is kept, and its bytes
_AS_IT_IS, _LZ4, _ZSTD = range(3)
_OF_THREAD = threading.local()


@dataclass(frozen=True)
class Series(Codec):
    """Zeros as a bitmap, the rest as the gaps between neighbours, in byte planes; time comes last.

    Of 36 x 4 lidar rays most see nothing, and the others change little from step to step: the
    bitmap takes out the zeros, and of the gaps only the lower bytes are noise. Any data comes back
    exactly, bit for bit.

    Args:
        level: 0 and 1 compress a plane only where that is worth the time to read it, with LZ4 if
            that is enough; 2 and above make everything as small as `Planes` of this level can.
    """

    id = "series"
    levels = range(23)
    level: int = 2

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Take out the zeros and encode the differences between the rest."""
        words = as_unsigned(values)
        if not self.compiled:
            return _encode_slowly(words, self.level)
        ((data, _),) = self.encode_blocks(words, words.size, (0, 0))
        return [data]

    @property
    def compiled(self) -> bool:
        """Whether there are kernels, for `encode_blocks` and `decode_blocks`."""
        return compiled_kernels() is not None

    def encode_blocks(
        self, words: Array, size: int, turn: tuple[int, int]
    ) -> list[tuple[Buffer, int]]:
        """Encode blocks in one compiled call, without the GIL.

        `size` is how many words there are in each but the last, `turn` that of `decode_blocks`, the
        other way round. Of each block the checksum is returned, too, of the words as on disk.
        """
        count, width = min(size, words.size), words.itemsize
        blocks = max(1, -(-words.size // max(size, 1)))
        largest = count * width + count * width // 255 + 1024  # what LZ4 or zstd make of noise
        # How small a plane must get: with LZ4, to leave it at that, or at all; then with zstd.
        worth = (1 / 8, 0, 1) if self.level >= 2 else (1 / 2, 7 / 8, 2 / 3)
        out = BLOCKS.array((blocks * (largest + count // 8),), np.uint8)
        ends, checksums = np.empty(blocks, np.int64), np.empty(blocks, np.uint32)
        options = np.array(list(Planes(level=self.level).options(width).items()), np.int32)
        words_room = BLOCKS.array((count if turn[1] else 0,), words.dtype)
        gaps = BLOCKS.array((count,), words.dtype)
        sizes = (-(-count // 8), count * width, largest)  # of the bitmap, the planes, one packed
        rooms = (words_room, gaps, *(BLOCKS.array((size,), np.uint8) for size in sizes))
        kernels = compiled_kernels()
        zstd = _zstd_room(kernels).packing
        worths = np.array(worth, np.float64)
        kernels.encode_blocks(
            zstd, words, size, *turn, options, worths, rooms, out, ends, checksums
        )
        starts = np.append(0, ends[:-1])
        parts = zip(starts.tolist(), ends.tolist(), checksums.tolist(), strict=True)
        return [(out[start:end].data, checksum) for start, end, checksum in parts]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Add the gaps up and put the zeros in again."""
        words = as_unsigned(out)
        content = np.frombuffer(data, np.uint8)
        if compiled_kernels() is None:
            _decode_slowly(data, words)
        elif not self.decode_blocks(content, [len(data)], [words.size], [-1], (0, 0), words):
            raise CorruptFile("a series makes no sense")

    def decode_blocks(
        self,
        data: Array,
        sizes: Sequence[int],
        counts: Sequence[int],
        crcs: Sequence[int],
        turn: tuple[int, int],
        out: Array,
    ) -> bool:
        """Decode blocks that lie one behind the other in one compiled call, without the GIL.

        Of each, `sizes` has the bytes, `counts` the words, and `crcs` the checksum to compare (-1
        for none). By `turn`, (features, steps), each row on disk is turned to (steps, features);
        zeros leave the order as it is. `out` are unsigned words. False where there are no kernels,
        or a block is bad.
        """
        if (kernels := compiled_kernels()) is None:
            return False
        largest = max(counts)
        blocks = np.array([sizes, counts, crcs], np.int64)
        room = BLOCKS.array((largest * out.itemsize + largest // 8 + 1,), np.uint8)
        gaps, words = (BLOCKS.array((n,), out.dtype) for n in (largest, largest if turn[1] else 0))
        zstd = _zstd_room(kernels).unpacking
        decoded: bool = kernels.decode_blocks(zstd, data, blocks, *turn, room, gaps, words, out)
        return decoded


def _zstd_room(kernels: Any) -> Any:
    """Return what zstd works in: making it takes as long as packing a small block."""
    if not hasattr(_OF_THREAD, "room"):
        _OF_THREAD.room = kernels.ZstdRoom()
    return _OF_THREAD.room


def _encode_slowly(words: Array, level: int) -> list[Buffer]:
    """Encode without the kernel, and without its choice between LZ4 and zstd."""
    present = words != 0
    kept = words[present]
    gaps = np.diff(kept, prepend=kept.dtype.type(0)).view(SIGNED[kept.itemsize])
    codes = ((gaps << 1) ^ (gaps >> (8 * kept.itemsize - 1))).view(kept.dtype)
    planes = [split(codes, k, np.empty(codes.size, np.uint8)) for k in range(kept.itemsize)]
    compress = Planes(level=level).compressor(kept.itemsize)
    parts: list[Buffer] = [_HEAD.pack(kept.size)]
    for piece in [np.packbits(present, bitorder="little"), *planes]:
        packed = compress(piece)
        method, data = (_ZSTD, packed) if len(packed) < piece.size else (_AS_IT_IS, piece.data)
        parts += [_PIECE.pack(method, len(data)), data]
    return parts


def _decode_slowly(data: memoryview, out: Array) -> None:
    """Decode step by step what the kernel does in one call."""
    expect(len(data) >= _HEAD.size, "a series is too short")
    (count,) = _HEAD.unpack_from(data)
    expect(count <= out.size, "a series has the wrong length")
    pieces = []
    at = _HEAD.size
    for size in [-(-out.size // 8), *[count] * out.itemsize]:
        expect(len(data) >= at + _PIECE.size, "a series is too short")
        method, length = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        piece: Buffer = data[at : at + length]
        at += length
        if method in (_LZ4, _ZSTD):
            piece = (unlz4 if method == _LZ4 else unzstd)(piece, size)
        expect(method <= _ZSTD and len(piece) == size, "a plane has the wrong length")
        pieces.append(np.frombuffer(piece, np.uint8))
    expect(at == len(data), "a series has the wrong length")
    bits = np.unpackbits(pieces[0], bitorder="little")
    present = bits[: out.size].view(bool)
    fits = not bits[out.size :].any() and np.count_nonzero(present) == count
    expect(fits, "a series does not fit its bitmap")
    codes = np.empty(count, out.dtype)
    join(pieces[1:], codes)
    one = codes.dtype.type(1)
    out[:] = 0
    out[present] = np.cumsum((codes >> one) ^ (~(codes & one) + one), dtype=codes.dtype)
