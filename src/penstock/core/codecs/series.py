"""The codec for what sensors say over time: zeros, and values close to the one before."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import lz4.block
import numpy as np

from penstock.core.codecs.base import (
    SIGNED,
    Array,
    Buffer,
    Codec,
    as_unsigned,
    bytes_of,
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
        if (coded := self.encode_block(words, (0, 0))) is not None:
            return [coded[0]]
        pieces = slow_split_gaps(words)
        parts: list[Buffer] = [_HEAD.pack(pieces[-1].size)]
        for piece in pieces:
            method, data = self._packed(piece, len(pieces) - 1)
            parts += [_PIECE.pack(method, len(data)), data]
        return parts

    def encode_block(self, words: Array, turn: tuple[int, int]) -> tuple[Buffer, int] | None:
        """Encode a block in one compiled call, without the GIL; None where there are no kernels.

        Args:
            words: Unsigned, contiguous.
            turn: As for `decode_blocks`, the other way round.

        Returns:
            The coded block, and the checksum of the words as they are on disk.
        """
        if (kernels := compiled_kernels()) is None:
            return None
        count, width = words.size, words.itemsize
        largest = words.nbytes + words.nbytes // 255 + 1024  # what LZ4 or zstd make of noise
        out = BLOCKS.array((largest + count // 8,), np.uint8)
        end, checksum = kernels.encode_block(
            words,
            *turn,
            np.array(list(Planes(level=self.level).options(width).items()), np.int32),
            np.array(self._worth, np.float64),
            BLOCKS.array((count if turn[1] else 0,), words.dtype),
            BLOCKS.array((-(-count // 8),), np.uint8),
            BLOCKS.array((count,), words.dtype),
            BLOCKS.array((words.nbytes,), np.uint8),
            BLOCKS.array((largest,), np.uint8),
            out,
        )
        return out[:end].data, checksum

    @property
    def _worth(self) -> tuple[float, float, float]:
        """How small a plane must get: with LZ4, to leave it at that, or at all; then with zstd."""
        return (1 / 8, 0, 1) if self.level >= 2 else (1 / 2, 7 / 8, 2 / 3)

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
        """Decode consecutive blocks in one compiled call, without the GIL.

        Args:
            data: The coded blocks, one behind the other.
            sizes: Bytes of each.
            counts: Words of each.
            crcs: Checksums to compare; -1 for none.
            turn: (features, steps): each row on disk is turned to (steps, features); zeros leave
                the order as it is.
            out: Unsigned words, filled.

        Returns:
            Whether that was possible: False where there are no kernels, or a block is bad.
        """
        if (kernels := compiled_kernels()) is None:
            return False
        largest = max(counts)
        decoded: bool = kernels.decode_blocks(
            data,
            np.array(sizes, np.int64),
            np.array(counts, np.int64),
            np.array(crcs, np.int64),
            *turn,
            BLOCKS.array((largest * out.itemsize + largest // 8 + 1,), np.uint8),
            BLOCKS.array((largest,), out.dtype),
            BLOCKS.array((largest if turn[1] else 0,), out.dtype),
            out,
        )
        return decoded

    def _packed(self, plane: Array, width: int) -> tuple[int, Buffer]:
        """Compress a plane if that is worth it; say how."""
        enough, worth_lz4, worth_zstd = self._worth
        kept: tuple[int, Buffer] = _AS_IT_IS, plane.data
        fast = lz4.block.compress(bytes_of(plane), store_size=False)
        if len(fast) <= plane.size * enough:
            return _LZ4, fast
        if len(fast) <= plane.size * worth_lz4:
            kept = _LZ4, fast
        packed = Planes(level=self.level).compressor(width)(plane)
        return (_ZSTD, packed) if len(packed) < len(kept[1]) * worth_zstd else kept


def _unpacked(method: int, data: memoryview, size: int) -> Array:
    if method == _LZ4:
        return np.frombuffer(unlz4(data, size), np.uint8)
    if method == _ZSTD:
        return np.frombuffer(unzstd(data, size), np.uint8)
    expect(method == _AS_IT_IS and len(data) == size, "a plane has the wrong length")
    return np.frombuffer(data, np.uint8)


def _decode_slowly(data: memoryview, words: Array) -> None:
    """Decode step by step what the kernel does in one call."""
    expect(len(data) >= _HEAD.size, "a series is too short")
    (count,) = _HEAD.unpack_from(data)
    expect(count <= words.size, "a series has the wrong length")
    pieces = []
    at = _HEAD.size
    for size in [-(-words.size // 8), *[count] * words.itemsize]:
        expect(len(data) >= at + _PIECE.size, "a series is too short")
        method, length = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        pieces.append(_unpacked(method, data[at : at + length], size))
        at += length
    expect(at == len(data), "a series has the wrong length")
    expect(slow_join_gaps(pieces[0], pieces[1:], words), "a series does not fit its bitmap")


def slow_split_gaps(words: Array) -> list[Array]:
    """Return the bitmap of what is not zero, and the byte planes of the gaps between the rest."""
    present = words != 0
    kept = words[present]
    gaps = np.diff(kept, prepend=kept.dtype.type(0)).view(SIGNED[kept.itemsize])
    codes = ((gaps << 1) ^ (gaps >> (8 * kept.itemsize - 1))).view(kept.dtype)
    planes = [split(codes, k, np.empty(codes.size, np.uint8)) for k in range(kept.itemsize)]
    return [np.packbits(present, bitorder="little"), *planes]


def slow_join_gaps(marks: Array, planes: list[Array], out: Array) -> bool:
    """Do in numpy what the kernels do."""
    bits = np.unpackbits(marks, bitorder="little")
    present = bits[: out.size].view(bool)
    codes = np.empty(planes[0].size, out.dtype)
    if bits[out.size :].any() or int(np.count_nonzero(present)) != codes.size:
        return False
    join(planes, codes)
    one = codes.dtype.type(1)
    out[:] = 0
    out[present] = np.cumsum((codes >> one) ^ (~(codes & one) + one), dtype=codes.dtype)
    return True
