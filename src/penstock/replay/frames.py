"""Frames to bytes and back, a whole batch in one native call; and which codec suits which key.

A frame is one row of bytes: one observation of one key. An encoded frame that would not be smaller
is kept as it is, so no codec ever makes data larger. Everything is lossless.

    raw      as it is
    lz4      pictures and maps: each row as the difference to the one above, if that helps, then LZ4
    lz4hc    the same by LZ4's slow mode: up to half the size, 3 to 8 times slower to write, as fast
             to read
    bits     noisy pictures: the same differences, in as few bits as each 64 of them need
    mixed    pictures of bytes: lz4 with and without differences or bits, whatever suits the frames
             that are written; what is seen later may be another scene than what was seen first
    gradient pictures of 32-bit words, such as depth in metres: how the slope between neighbours
             changes, in as few bytes as each 8 need
    sparse   lidar: a bitmap of what is not zero, then the rest (32-bit words)
    narrow   float32 pictures that are bytes, or bytes / 255: as bytes, then lz4 or bits
    zstd     smallest, several times slower to read
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.codecs import unzstd, zstd
from penstock.core.reuse import BLOCKS
from penstock.errors import CorruptFile, MissingExtra, UsageError
from penstock.ui.suggestions import did_you_mean

try:
    from penstock.core.kernels.native import LZ4_HARD_BYTES
    from penstock.replay import kernels
except ModuleNotFoundError as error:
    raise MissingExtra("numba", "rl") from error

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Addresses = NDArray[np.uint64]

LARGEST_FRAME_BYTES = 0x7E000000  # what LZ4 takes
_LEAST_RATIO = 1.1
_LEAST_FRAME_BYTES = 256
_SAMPLE_FRAMES = 64
_LEAST_LEVELS = 16
_SCALES = (1, 255)
_LZ4HC_LEVEL = 6
_TRIED_FRAMES = 6
_GROUP = kernels.GROUP


@dataclass(frozen=True)
class FrameCodec(ABC):
    """One way to keep frames of equal size."""

    id: ClassVar[str]
    size: int

    @abstractmethod
    def encode(self, frames: Bytes) -> tuple[Bytes, Ints]:
        """Encode frames [n, size]; return all bytes, one behind the other, and their lengths."""

    @abstractmethod
    def _decode(self, addresses: Addresses, lengths: Ints, out: Bytes) -> int:
        """Fill the rows of `out`; return the first that makes no sense, or -1."""

    def decode(self, addresses: Addresses, lengths: Ints, out: Bytes) -> None:
        """Decode the frames at these addresses into the rows of `out` [n, size]."""
        bad = self._decode(addresses, lengths, out)
        if bad >= 0:
            raise CorruptFile(
                f"frame {bad} of the batch is not {self.id} data of {self.size} bytes"
            )

    def config(self) -> dict[str, Any]:
        """Return the JSON settings from which `frame_codec` rebuilds this codec."""
        return {"id": self.id, **asdict(self)}


@dataclass(frozen=True)
class RawFrames(FrameCodec):
    """Frames as they are."""

    id = "raw"

    def encode(self, frames: Bytes) -> tuple[Bytes, Ints]:
        """Return the bytes as they are."""
        return frames.reshape(-1), np.full(len(frames), self.size, np.int64)

    def _decode(self, addresses: Addresses, lengths: Ints, out: Bytes) -> int:
        nothing = np.empty(0, np.uint64)
        return int(kernels.decode_pictures(addresses, lengths, kernels.RAW, 0, nothing, out))


@dataclass(frozen=True)
class _PictureFrames(FrameCodec):
    """Codecs of pictures: with a `row`, its bytes, each byte as the difference to the one above."""

    row: int = 0
    _method: ClassVar[int]

    def _encode(self, frames: Bytes, tag: int, level: int = 0, step: int = 1) -> tuple[Bytes, Ints]:
        lengths, groups = np.empty(len(frames), np.int64), -(-self.size // _GROUP)
        # Frames that do not shrink are kept as they are: only the last one needs the worst case.
        out = BLOCKS.array((frames.size + groups * (_GROUP + 1) + 64,), np.uint8)
        scratch = BLOCKS.array((groups * _GROUP,), np.uint8)
        state = BLOCKS.array((-(-LZ4_HARD_BYTES // 8) if level else 0,), np.uint64)
        settings = self._method, self.row, level, step, tag
        used = kernels.encode_pictures(frames, *settings, scratch, state, out, lengths)
        return out[:used], lengths

    def _decode(self, addresses: Addresses, lengths: Ints, out: Bytes) -> int:
        words = 0 if self._method == kernels.LZ4 else -(-self.size // _GROUP) * _GROUP // 8
        scratch, method = BLOCKS.array((words,), np.uint64), self._method
        return int(kernels.decode_pictures(addresses, lengths, method, self.row, scratch, out))


@dataclass(frozen=True)
class Lz4Frames(_PictureFrames):
    """LZ4.

    In the fast mode, `step` is how far LZ4 goes ahead where it finds nothing: 4 bytes keep to the
    bounds of floats; measured, that takes less time and makes them smaller.
    """

    id = "lz4"
    _method = kernels.LZ4
    level: int = 0  # above 0 it is one of LZ4's slow mode
    step: int = 1

    def encode(self, frames: Bytes, tag: int = -1) -> tuple[Bytes, Ints]:
        """Compress; a tag is a byte before each frame."""
        return self._encode(frames, tag, self.level, self.step)


@dataclass(frozen=True)
class BitFrames(_PictureFrames):
    """As few bits as each group of 64 needs."""

    id = "bits"
    _method = kernels.BITS

    def encode(self, frames: Bytes, tag: int = -1) -> tuple[Bytes, Ints]:
        """Pack; a tag is a byte before each frame."""
        return self._encode(frames, tag)


@dataclass(frozen=True)
class MixedFrames(_PictureFrames):
    """Lz4Frames with or without differences, or BitFrames: a byte before each frame says which.

    Each call of `encode` tries all on some of its frames, and takes the smallest for all of them.
    """

    id = "mixed"
    _method = kernels.TAGGED

    def encode(self, frames: Bytes) -> tuple[Bytes, Ints]:
        """Compress by what suits these frames best."""
        row = self.row
        ways: dict[int, Lz4Frames | BitFrames] = {
            kernels.LZ4: Lz4Frames(self.size, row),
            kernels.BITS: BitFrames(self.size, row),
        }
        if row:
            ways[kernels.LZ4 | kernels.PLAIN] = Lz4Frames(self.size)
        some = frames[:: max(1, len(frames) // _TRIED_FRAMES)][:_TRIED_FRAMES]
        sizes = {tag: int(way.encode(some, tag)[1].sum()) for tag, way in ways.items()}
        best = min(sizes, key=sizes.__getitem__)
        return ways[best].encode(frames, best)


@dataclass(frozen=True)
class SparseFrames(FrameCodec):
    """A bitmap of the 32-bit words that are not zero, then those words."""

    id = "sparse"

    def __post_init__(self) -> None:
        if self.size % 4:
            raise UsageError(f"sparse: frames of {self.size} bytes are no whole 32-bit words")

    def encode(self, frames: Bytes) -> tuple[Bytes, Ints]:
        """Take out the zeros."""
        lengths = np.empty(len(frames), np.int64)
        out = BLOCKS.array((frames.size + self.size // 32 + 8,), np.uint8)
        used = kernels.sparse_encode(frames.view(np.uint32), out, lengths)
        return out[:used], lengths

    def _decode(self, addresses: Addresses, lengths: Ints, out: Bytes) -> int:
        return int(kernels.sparse_decode(addresses, lengths, out.view(np.uint32)))


@dataclass(frozen=True)
class GradientFrames(FrameCodec):
    """How the slope of 32-bit words changes, in as few bytes as each 8 need; `row` is in words."""

    id = "gradient"
    row: int = 1

    def __post_init__(self) -> None:
        if self.size % 4 or not 1 <= self.row <= self.size:
            raise UsageError(f"gradient: frames of {self.size} bytes, rows of {self.row} words")

    def encode(self, frames: Bytes) -> tuple[Bytes, Ints]:
        """Pack."""
        lengths = np.empty(len(frames), np.int64)
        words, scratch, planes = frames.view(np.uint32), *self._scratch
        out = BLOCKS.array((frames.size + 2 * scratch.nbytes,), np.uint8)
        used = kernels.gradient_encode(words, self.row, scratch, planes, out, lengths)
        return out[:used], lengths

    def _decode(self, addresses: Addresses, lengths: Ints, out: Bytes) -> int:
        words, room = out.view(np.uint32), BLOCKS.array((self.size + 32,), np.uint8)
        bad = kernels.gradient_decode(addresses, lengths, self.row, *self._scratch, room, words)
        return int(bad)

    @property
    def _scratch(self) -> tuple[NDArray[np.uint32], Bytes]:
        words = -(-self.size // (4 * kernels.OCTET)) * kernels.OCTET
        return BLOCKS.array((words,), np.uint32), BLOCKS.array((4, words), np.uint8)


@dataclass(frozen=True)
class NarrowFrames(FrameCodec):
    """Frames of float32 that are whole numbers of 0 to 255, divided by `scale`.

    They are kept as bytes, by `BitFrames` or `Lz4Frames`; a frame that is not so, bit for bit, is
    kept as it is.
    """

    id = "narrow"
    scale: int = 255
    row: int = 0
    bits: int = 0

    def __post_init__(self) -> None:
        if self.size % 4 or self.scale not in _SCALES:
            raise UsageError(f"narrow: frames of {self.size} bytes, a scale of {self.scale}")

    @property
    def _inner(self) -> FrameCodec:
        return (BitFrames if self.bits else Lz4Frames)(self.size // 4, self.row)

    def encode(self, frames: Bytes) -> tuple[Bytes, Ints]:
        """Narrow, then compress."""
        small, exact = self.narrowed(frames)
        data, lengths = self._inner.encode(small)
        if exact.all():
            return data, lengths
        coded = np.split(data, np.cumsum(lengths)[:-1])
        kept = [part if good else row for part, good, row in zip(coded, exact, frames, strict=True)]
        return np.concatenate(kept), np.where(exact, lengths, self.size)

    def narrowed(self, frames: Bytes) -> tuple[Bytes, NDArray[np.bool_]]:
        """Return frames as bytes, and which of them are so exactly."""
        values = frames.view(np.float32)
        small = BLOCKS.array(values.shape, np.uint8)
        exact = np.empty(len(frames), np.bool_)
        kernels.narrow(values, np.float32(self.scale), *self._reciprocal, small, exact)
        return small, exact

    @property
    def _reciprocal(self) -> tuple[np.float32, np.float32]:
        """1 / scale as the sum of two floats, the first of 16 bits: a byte times it is exact."""
        head = (np.float32(1 / self.scale).view(np.uint32) >> 8 << 8).view(np.float32)
        return head, np.float32(1 / self.scale - float(head))

    def _decode(self, addresses: Addresses, lengths: Ints, out: Bytes) -> int:
        exact = lengths != self.size
        if not exact.all():
            for some, decode in ((exact, self._decode), (~exact, RawFrames(self.size)._decode)):
                rows = np.empty((int(some.sum()), self.size), np.uint8)
                bad = decode(addresses[some], lengths[some], rows)
                if bad >= 0:
                    return int(np.flatnonzero(some)[bad])
                out[some] = rows
            return -1
        small = BLOCKS.array((len(out), self.size // 4), np.uint8)
        bad = self._inner._decode(addresses, lengths, small)
        if bad < 0:
            kernels.widen(small, *self._reciprocal, out.view(np.float32))
        return bad


@dataclass(frozen=True)
class ZstdFrames(FrameCodec):
    """Zstandard, frame by frame."""

    id = "zstd"
    level: int = 3

    def encode(self, frames: Bytes) -> tuple[Bytes, Ints]:
        """Compress."""
        packed = [zstd.compress(frame.data, self.level) for frame in frames]
        kept = [
            data if len(data) < self.size else frame.tobytes()
            for data, frame in zip(packed, frames, strict=True)
        ]
        lengths = np.array([len(data) for data in kept], np.int64)
        return np.frombuffer(b"".join(kept), np.uint8), lengths

    def _decode(self, addresses: Addresses, lengths: Ints, out: Bytes) -> int:
        for i, (address, length) in enumerate(
            zip(addresses.tolist(), lengths.tolist(), strict=True)
        ):
            if not 0 < length <= self.size:
                return i
            data = ctypes.string_at(address, length)
            if length != self.size:
                try:
                    data = unzstd(data, self.size)
                except CorruptFile:
                    return i
            out[i] = np.frombuffer(data, np.uint8)
        return -1


_PICTURES = (Lz4Frames, BitFrames, MixedFrames, GradientFrames, NarrowFrames)
_KINDS: dict[str, type[FrameCodec]] = {
    kind.id: kind for kind in (RawFrames, *_PICTURES, SparseFrames, ZstdFrames)
}
CODEC_NAMES = ("auto", "lz4hc", *_KINDS)


def frame_codec(config: Mapping[str, Any]) -> FrameCodec:
    """Rebuild a codec from its settings; anything unexpected is a CorruptFile."""
    settings = dict(config)
    kind = _KINDS.get(settings.pop("id", ""))
    whole = all(type(value) is int and value >= 0 for value in settings.values())
    if kind is None or not whole:
        raise CorruptFile(f"frame codec {dict(config)!r} makes no sense")
    try:
        return kind(**settings)
    except (TypeError, UsageError) as error:
        raise CorruptFile(f"frame codec {dict(config)!r} makes no sense ({error})") from error


def check_codec(codec: str, where: str) -> None:
    """Refuse the name of a codec that there is not."""
    if codec not in CODEC_NAMES:
        hint = did_you_mean(codec, CODEC_NAMES)
        raise UsageError(f"{where}: there is no codec {codec!r}; {hint}")


def choose_codec(sample: NDArray[Any], codec: str = "auto", where: str = "a frame") -> FrameCodec:
    """Choose a codec for frames [n, *shape] like these, of which some are tried.

    `codec` is a name, or "auto": the smallest of the fast ones, raw if it saves less than 10 %.
    `where` names the key in messages.
    """
    size = int(np.prod(sample.shape[1:], dtype=np.int64)) * sample.itemsize
    check_codec(codec, where)
    if codec != "raw" and size > LARGEST_FRAME_BYTES:
        raise UsageError(f"{where}: a frame of {size} bytes is too large for {codec}; use raw")
    small = size < _LEAST_FRAME_BYTES or not len(sample)
    if codec == "raw" or (codec == "auto" and small):
        return RawFrames(size)
    some = sample[:: max(1, len(sample) // _SAMPLE_FRAMES)][:_SAMPLE_FRAMES]  # spread over all
    frames = np.ascontiguousarray(some).reshape(len(some), -1).view(np.uint8)
    tried = [
        (_measured(candidate, frames, where), candidate)
        for candidate in _candidates(codec, sample, frames)
    ]
    if not tried:
        raise UsageError(
            f"{where}: {codec} cannot hold frames of {sample.dtype} with {size} bytes; use auto"
        )
    nbytes, best = min(tried, key=lambda pair: pair[0])
    if codec == "auto" and nbytes * _LEAST_RATIO > frames.size:
        return RawFrames(size)
    return best


def _candidates(codec: str, sample: NDArray[Any], frames: Bytes) -> list[FrameCodec]:
    size = frames.shape[1]
    rows = sorted({0, _row_bytes(sample.shape[1:], sample.itemsize)})
    found: list[FrameCodec] = []
    if codec == "mixed" or (codec == "auto" and sample.itemsize == 1):
        found.append(MixedFrames(size, rows[-1]))
    elif codec in ("auto", "lz4"):
        step = 4 if sample.itemsize >= 4 else 1
        found += [Lz4Frames(size, row, step=step) for row in rows]
    if codec == "lz4hc":
        found += [Lz4Frames(size, row, _LZ4HC_LEVEL) for row in rows]
    if codec == "bits":
        found += [BitFrames(size, row) for row in rows]
    if codec in ("auto", "gradient") and sample.itemsize == 4:
        found.append(GradientFrames(size, rows[-1] // 4 or size // 4))
    if codec in ("auto", "sparse") and size % 4 == 0:
        found.append(SparseFrames(size))
    if codec in ("auto", "narrow") and sample.dtype == np.float32:
        for scale in _SCALES:
            small, exact = NarrowFrames(size, scale).narrowed(frames)
            # Black frames at the beginning say nothing of those that come.
            if codec == "narrow" or (exact.all() and np.unique(small).size >= _LEAST_LEVELS):
                found += [NarrowFrames(size, scale, r // 4, b) for r in rows for b in (0, 1)]
    if codec == "zstd":
        found.append(ZstdFrames(size))
    return found


def _row_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Return how many bytes back the pixel above lies, in [H, W], [C, H, W], [H, W, C]; or 0."""
    channels_last = len(shape) >= 3 and shape[-1] <= 4
    row = itemsize * math.prod(shape[-2:] if channels_last else shape[-1:])
    return row if len(shape) >= 2 and row > 1 else 0


def _measured(codec: FrameCodec, frames: Bytes, where: str) -> int:
    """Return the bytes that a sample takes; a codec that does not give it back is our defect."""
    data, lengths = codec.encode(frames)
    data = np.ascontiguousarray(data)
    starts = (np.cumsum(lengths) - lengths).astype(np.uint64)
    out = np.empty_like(frames)
    codec.decode(starts + np.uint64(data.__array_interface__["data"][0]), lengths, out)
    if not np.array_equal(out, frames):
        raise AssertionError(f"{where}: {codec.id} does not give its data back")
    return int(lengths.sum())
