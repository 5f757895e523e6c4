"""Pictures like those of a camera, that carry their own number.

The number is written as 16 black or white blocks along the top edge, lowest bit first.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_QUANTISER: Final = 3  # about 60 KB for a 640x480 picture
_PAN: Final = 240  # pixels after which the scene repeats itself
_NOISE: Final = 2.0  # of a camera in good light
_DEPTH_DARK_MM: Final = 300
_DEPTH_BRIGHT_MM: Final = 1200


class Pictures:
    """Makes JPEG, RGB and depth pictures of a moving scene.

    Args:
        width: Columns, a multiple of 16.
        height: Rows, a multiple of 16.
        seed: Of the noise.
        scenes: Number of different scenes; pictures beyond cycle through them.
        numbered: Write its number into each picture; otherwise a fixed set is made once and
            used again, which is much faster.
    """

    def __init__(
        self, width: int, height: int, seed: int, *, scenes: int = 60, numbered: bool = True
    ) -> None:
        self.width, self.height, self.numbered = width, height, numbered
        self._scenes = min(scenes, 12) if numbered else scenes
        self._seed = seed
        self._luma: dict[int, NDArray[np.uint8]] = {}
        self._kept: dict[tuple[str, int], bytes] = {}
        self._encoder = self._new_encoder()

    def jpeg(self, number: int, camera: int = 0) -> bytes:
        """Return a JPEG file; cameras see different scenes."""
        return self._once("jpeg", number, camera, self._jpeg)

    def depth_png(self, number: int, camera: int = 0) -> bytes:
        """Return a 16-bit PNG file of millimetres."""
        return self._once("png", number, camera, self._depth_png)

    def rgb(self, number: int, camera: int = 0) -> NDArray[np.uint8]:
        """Return RGB pixels."""
        luma = self._numbered_luma(number, camera)
        shift = np.array([0, -10, 10], np.int16)
        pixels: NDArray[np.int16] = luma[..., None].astype(np.int16) + shift
        return np.clip(pixels, 0, 255).astype(np.uint8)

    def _once(
        self, kind: str, number: int, camera: int, make: Callable[[int, int], bytes]
    ) -> bytes:
        if self.numbered:
            return make(number, camera)
        key = (kind, self._scene(number, camera))
        if key not in self._kept:
            self._kept[key] = make(key[1], 0)
        return self._kept[key]

    def _scene(self, number: int, camera: int) -> int:
        return (number + camera * self._scenes // 3) % self._scenes

    def _jpeg(self, number: int, camera: int) -> bytes:
        import av

        height, width = self.height, self.width
        planes = np.empty((height * 3 // 2, width), np.uint8)
        planes[:height] = self._numbered_luma(number, camera)
        blue, red = planes[height:].reshape(2, -1)
        ramp = np.linspace(-30, 30, blue.size) + 20 * np.sin(number / 20)
        blue[:] = (128 + ramp).astype(np.uint8)
        red[:] = (128 - ramp).astype(np.uint8)
        frame = av.VideoFrame.from_ndarray(planes, format="yuvj420p")
        frame.pts = None
        (packet,) = self._encoder.encode(frame)
        return bytes(packet)

    def _depth_png(self, number: int, camera: int) -> bytes:
        y, x = np.mgrid[0 : self.height, 0 : self.width]
        slope = 600 + 300 * np.sin((x + 3 * number) / 90 + camera) + y // 4
        depth = slope.astype(np.uint16)
        if self.numbered:
            write_number(depth, number, _DEPTH_DARK_MM, _DEPTH_BRIGHT_MM)
        return png_gray16(depth)

    def _numbered_luma(self, number: int, camera: int) -> NDArray[np.uint8]:
        scene = self._scene(number, camera)
        if scene not in self._luma:
            rng = np.random.default_rng([self._seed, scene])
            shift = scene * _PAN // self._scenes
            view = self._texture()[:, shift : shift + self.width]
            noise = rng.normal(0, _NOISE, view.shape)
            self._luma[scene] = np.clip(view + noise, 0, 255).astype(np.uint8)
        luma: NDArray[np.uint8] = self._luma[scene].copy()
        if self.numbered:
            write_number(luma, number, 16, 240)
        return luma

    def _texture(self) -> NDArray[np.float32]:
        """Return what the camera pans over: it repeats itself, so that the pan has no end."""
        rng = np.random.default_rng(self._seed)
        grain = rng.normal(0, 30, (self.height, _PAN)).astype(np.float32)
        for axis in (0, 1):  # as sharp as a lens: three pixels wide
            grain = (np.roll(grain, 1, axis) + grain + np.roll(grain, -1, axis)) / np.float32(3)
        y, x = np.mgrid[0 : self.height, 0:_PAN].astype(np.float32)
        wave = 128 + 50 * np.sin(2 * np.pi * x / _PAN) + 40 * np.cos(y / 25)
        copies = -(-self.width // _PAN) + 1
        return np.tile((wave + grain).astype(np.float32), (1, copies))

    def _new_encoder(self) -> Any:
        import av

        encoder: Any = av.CodecContext.create("mjpeg", "w")
        encoder.width, encoder.height = self.width, self.height
        encoder.pix_fmt = "yuvj420p"
        encoder.time_base = Fraction(1, 30)
        encoder.qmin = encoder.qmax = _QUANTISER
        encoder.thread_count = 1
        return encoder


def write_number(pixels: NDArray[Any], number: int, dark: int, bright: int) -> None:
    """Write a number of up to 16 bits into the top edge of a grey picture, in place."""
    size = min(16, pixels.shape[1] // 16)
    for bit in range(16):
        value = bright if number >> bit & 1 else dark
        pixels[:size, bit * size : (bit + 1) * size] = value


def read_number(pixels: NDArray[Any], threshold: int = 128) -> int:
    """Return the number in a grey or RGB picture (`threshold` 750 for depth in millimetres)."""
    grey = pixels if pixels.ndim == 2 else pixels.mean(axis=2)
    size = min(16, grey.shape[1] // 16)
    edge = size // 4
    return sum(
        int(
            grey[edge : size - edge, bit * size + edge : (bit + 1) * size - edge].mean() > threshold
        )
        << bit
        for bit in range(16)
    )


def png_gray16(pixels: NDArray[np.uint16]) -> bytes:
    """Return a 16-bit grey PNG file."""
    import av

    encoder: Any = av.CodecContext.create("png", "w")
    encoder.height, encoder.width = pixels.shape
    encoder.pix_fmt, encoder.time_base = "gray16be", Fraction(1, 30)
    encoder.options = {"compression_level": "1"}
    frame = av.VideoFrame.from_ndarray(pixels, format="gray16le").reformat(format="gray16be")
    return b"".join(bytes(packet) for packet in (*encoder.encode(frame), *encoder.encode(None)))
