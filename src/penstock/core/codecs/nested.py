"""Codecs around another one: the difference to a base, and floats within a stated error."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from penstock.core.codecs.base import SIGNED, Array, Buffer, Codec, as_unsigned, expect
from penstock.core.codecs.planes import Planes
from penstock.core.reuse import SCRATCH
from penstock.errors import UnsupportedValue, UsageError

_LARGEST_EPSILON = 1e300  # twice that is still a number
_GRID = 1.9375  # in epsilons; under 2, to leave room for the rounding of the float type itself


@dataclass(frozen=True)
class Delta(Codec):
    """The difference to a base block, as integers, with the sign in the lowest bit.

    Subtracting the bit patterns beats XOR on weights: close floats have close patterns.
    """

    id = "delta"
    needs_base = True
    inner: Codec = field(default_factory=Planes)

    def __post_init__(self) -> None:
        _check_inner(self)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Encode the difference to `base`, which must have the same size."""
        current, reference = as_unsigned(values), _reference(values, base)
        signed = SIGNED[current.itemsize]
        difference = SCRATCH.array("difference", current.size, current.dtype)
        difference = np.subtract(current, reference, out=difference).view(signed)
        sign = SCRATCH.array("sign", current.size, signed)
        np.right_shift(difference, 8 * current.itemsize - 1, out=sign)
        np.left_shift(difference, 1, out=difference)
        np.bitwise_xor(difference, sign, out=difference)
        return self.inner.encode(difference.view(current.dtype))

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decode the difference and add it to `base`."""
        target, reference = as_unsigned(out), _reference(out, base)
        self.inner.decode(data, target)
        negative = (target & target.dtype.type(1)).view(SIGNED[target.itemsize])
        np.right_shift(target, 1, out=target)
        np.bitwise_xor(target, np.negative(negative).view(target.dtype), out=target)
        np.add(target, reference, out=target)


def _reference(values: Array, base: Array | None) -> Array:
    if base is None or base.nbytes != values.nbytes:
        raise UsageError("delta: a base block of the same size is needed")
    return as_unsigned(base).view(as_unsigned(values).dtype)


@dataclass(frozen=True)
class Quantize(Codec):
    """Floats rounded to a grid of nearly 2 * epsilon: every value comes back within epsilon.

    Hazard: lossy. NaN and infinities cannot be held and are refused, as are values so large that
    the grid or the float type cannot keep the bound.
    """

    id = "quantize"
    lossy = True
    epsilon: float
    inner: Codec = field(default_factory=Planes)

    def __post_init__(self) -> None:
        if not (isinstance(self.epsilon, int | float) and 0 < self.epsilon <= _LARGEST_EPSILON):
            raise UsageError(f"quantize: epsilon must be a positive number, not {self.epsilon!r}")
        object.__setattr__(self, "epsilon", float(self.epsilon))
        _check_inner(self)

    def encode(self, values: Array, base: Array | None = None) -> list[Buffer]:
        """Round, check the bound on the values that will be read back, then encode."""
        if values.dtype.kind != "f":
            raise UnsupportedValue(f"quantize holds floats only, not {values.dtype}")
        if not np.isfinite(values).all():
            raise UnsupportedValue("quantize cannot hold NaN or infinity; store it losslessly")
        step = self.epsilon * _GRID
        with np.errstate(over="ignore"):  # an infinite number of steps is refused below
            steps = np.rint(values.astype(np.float64) / step)
        largest = float(np.abs(steps).max(initial=0.0))
        if largest >= 2**31:
            raise UnsupportedValue(
                f"quantize: values up to {largest * step:.3g} do not fit a grid of {step:.3g}; use "
                "a larger epsilon"
            )
        grid = steps.astype(np.int16 if largest < 2**15 else np.int32)
        read_back = np.empty_like(values)
        self._scale(grid, read_back)
        error = np.abs(read_back.astype(np.float64) - values)
        if float(error.max(initial=0.0)) > self.epsilon:
            raise UnsupportedValue(
                f"quantize: {values.dtype} cannot keep an error of {self.epsilon:.3g} at values up "
                f"to {float(np.abs(values).max()):.3g}; use a larger epsilon"
            )
        return [struct.pack("<B", grid.itemsize), *self.inner.encode(grid)]

    def decode(self, data: memoryview, out: Array, base: Array | None = None) -> None:
        """Decode the grid and scale it."""
        expect(out.dtype.kind == "f", "a quantised block can only hold floats")
        expect(len(data) > 0 and data[0] in (2, 4), "a quantised block has no grid width")
        grid = np.empty(out.size, SIGNED[data[0]])
        self.inner.decode(data[1:], grid)
        self._scale(grid, out)

    def _scale(self, grid: Array, out: Array) -> None:
        with np.errstate(over="ignore"):  # found by the check of the bound, or by the checksum
            out[:] = grid.astype(np.float64) * (self.epsilon * _GRID)


def _check_inner(codec: Delta | Quantize) -> None:
    if isinstance(codec.inner, Delta | Quantize):
        raise UsageError(f"{codec.id}: the inner codec cannot be {codec.inner.id}; use a plain one")
