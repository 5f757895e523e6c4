"""Packets of a video as cameras send them, one picture each: H.264, H.265, AV1, VP9.

A packet says which packets it builds on only to a decoder, so they are decoded one after the other
from a key frame on. A picture is told by the number of its packet, whatever order they come out in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, cast

import av
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from av.video.frame import PictureType

from penstock.errors import DataError
from penstock.media.av_versions import decode
from penstock.media.encodings import CODECS
from penstock.media.headers import Buffer
from penstock.media.images import STRICT

_HIGH_PROFILES: Final = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)
_MAX_PIXELS: Final = 1 << 24  # 4096x4096
_MOST_WAITING: Final = 64
_SPS_BYTES: Final = 4096
_SLICE_BYTES: Final = 64


class KeyFrame(NamedTuple):
    """The first packet of a topic that stands alone; its codec as messages name it."""

    ordinal: int
    codec: str
    width: int
    height: int
    pix_fmt: str


def is_key(codec: str, data: Buffer) -> bool:
    """Tell whether a packet stands alone, with all that a decoder needs to begin with it."""
    if codec == "h264":
        return any(unit[0] & 31 == 5 for unit in _units(data))
    if codec == "h265":
        return any(16 <= unit[0] >> 1 & 63 <= 21 for unit in _units(data))
    if codec == "av1":
        return 1 in _obus(data)  # only key frames have a sequence header
    return len(data) > 0 and data[0] >> 6 == 2 and not data[0] & 12


class PacketDecoder:
    """Decodes the packets of one video; it belongs to one thread.

    Args:
        codec: As messages name it: "h264", "h265", "av1" or "vp9".
    """

    def __init__(self, codec: str) -> None:
        if codec not in CODECS:
            raise DataError(f"video packets are {codec[:40]!r}: {', '.join(CODECS)} can be read")
        self._codec = codec
        self._context: VideoCodecContext | None = None
        self._broken = False  # until the next key frame
        self._order = _ReferenceOrder()
        self._waiting: set[int] = set()  # the last packets whose picture has not come

    @property
    def reorders(self) -> bool:
        """Whether pictures come in another order than their packets (B-frames)."""
        return self._context is not None and bool(self._context.has_b_frames)

    def decode(self, number: int, data: Buffer) -> list[tuple[int, av.VideoFrame]]:
        """Take a packet; return the pictures that are ready, with the numbers of their packets.

        Raises:
            DataError: This packet gives no picture: it is damaged, or one that it needs is not
                there. Nor do those that follow until the next key frame.
        """
        key = is_key(self._codec, data)
        if key:
            self._broken = False
        elif self._context is None or self._broken:
            raise DataError("it needs packets that are not there or damaged")
        if self._codec == "h264" and self._order.lost(data):
            self._broken = True
            raise DataError("the packet before it was lost")
        self._waiting = {n for n in self._waiting if n > number - _MOST_WAITING} | {number}
        packet = av.Packet(cast(bytes, data))
        packet.pts = packet.dts = number
        return list(self._run(packet))

    def flush(self) -> list[tuple[int, av.VideoFrame]]:
        """Return the pictures that are left; the next packet must be a key frame."""
        try:
            return list(self._run(None)) if self._context is not None else []
        finally:
            self._context = None

    def _run(self, packet: Any) -> Iterator[tuple[int, av.VideoFrame]]:
        if self._context is None:
            name = CODECS[self._codec][1]
            self._context = cast(VideoCodecContext, CodecContext.create(name, "r"))
            self._context.thread_count = 1
            # FFmpeg checks the size before it gives memory to as many as 16 pictures.
            self._context.options = {"err_detect": STRICT, "max_pixels": str(_MAX_PIXELS)}
        try:
            frames, painted_over = decode(self._context, packet)
        except (av.FFmpegError, ValueError, MemoryError) as error:
            self._broken = True
            reason = getattr(error, "strerror", None) or str(error)
            raise DataError(f"the packet cannot be decoded ({reason})") from error
        if painted_over:
            self._broken = True
            self._waiting.discard(packet.pts)
        for frame in frames:
            # A damaged packet may give a second picture: it is nobody's.
            if frame.pts in self._waiting and not frame.is_corrupt:
                self._waiting.remove(frame.pts)
                frame.pict_type = PictureType.NONE  # an encoder would take it for an order
                yield frame.pts, frame


class _ReferenceOrder:
    """Tells by the numbers that H.264 gives its pictures whether one of them is missing.

    FFmpeg does not say so: it paints the next pictures from an older one. (Of H.265 it does say so;
    VP9 and AV1 have no such numbers in plain sight.)
    """

    def __init__(self) -> None:
        self._bits = 0  # of a number; 0 as long as it is not known, or gaps are allowed
        self._before: int | None = None  # of the last picture that others build on

    def lost(self, packet: Buffer) -> bool:
        """Take a packet; return whether one before it is missing."""
        for unit in _units(packet):
            kind = unit[0] & 31
            if kind == 7:
                self._bits = _number_bits(unit)
            elif kind in (1, 5) and self._bits:
                bits = _Bits(unit, _SLICE_BYTES)
                bits.skip(8)
                for _ in range(3):  # first macroblock, type of slice, picture parameters
                    bits.golomb()
                number, before = bits.read(self._bits), self._before
                if unit[0] & 0x60 or kind == 5:
                    self._before = number
                if kind == 5 or before is None:
                    return False
                return number not in (before, (before + 1) % (1 << self._bits))
        return False


def _number_bits(sps: bytes) -> int:
    """Return the length of the numbers of pictures; 0 where they may have gaps."""
    bits = _Bits(sps, _SPS_BYTES)
    bits.skip(8)
    profile = bits.read(8)
    bits.skip(16)
    bits.golomb()
    if profile in _HIGH_PROFILES:
        chroma = bits.golomb()
        if chroma == 3:
            bits.skip(1)
        bits.golomb()
        bits.golomb()
        bits.skip(1)
        if bits.read(1):
            for place in range(12 if chroma == 3 else 8):
                if bits.read(1):
                    _skip_scaling(bits, 16 if place < 6 else 64)
    length = bits.golomb() + 4
    kind = bits.golomb()
    if kind == 0:
        bits.golomb()
    elif kind == 1:
        bits.skip(1)
        bits.golomb()
        bits.golomb()
        for _ in range(min(bits.golomb(), 255)):
            bits.golomb()
    bits.golomb()
    gaps_allowed = bits.read(1)
    return 0 if gaps_allowed or length > 16 else length


def _skip_scaling(bits: _Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            code = bits.golomb()
            following = (last + (code + 1) // 2 * (1 if code % 2 else -1)) % 256
        last = following or last


class _Bits:
    """Reads bits, without the bytes that only keep start codes out; zeros after the end."""

    def __init__(self, unit: bytes, most_bytes: int) -> None:
        plain = unit[:most_bytes].replace(b"\0\0\3", b"\0\0")
        self._value, self._left = int.from_bytes(plain, "big"), 8 * len(plain)

    def read(self, count: int) -> int:
        self._left -= count
        return self._value >> max(self._left, 0) & ((1 << count) - 1) if self._left >= 0 else 0

    skip = read

    def golomb(self) -> int:
        zeros = 0
        while zeros < 32 and self._left > 0 and not self.read(1):
            zeros += 1
        return (1 << zeros) - 1 + self.read(zeros)


def _units(packet: Buffer) -> Iterator[bytes]:
    """Yield the units of an H.264 or H.265 packet, which start codes separate."""
    _, *units = bytes(packet).split(b"\0\0\1")
    yield from (unit for unit in units if len(unit) > 1)


def _obus(view: Buffer) -> Iterator[int]:
    """Yield the kinds of the units of an AV1 packet."""
    at = 0
    while at < len(view):
        kind, extended, sized = view[at] >> 3 & 15, view[at] >> 2 & 1, view[at] >> 1 & 1
        yield kind
        at += 1 + extended
        size = shift = 0
        while sized and at < len(view) and shift < 56:
            size |= (view[at] & 127) << shift
            shift += 7
            at += 1
            if not view[at - 1] & 128:
                break
        at = at + size if sized else len(view)
