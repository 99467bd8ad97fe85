"""Rounding to small floats in a kernel, bit for bit as the codec in mxfp4prep.mxfp4 does it."""

from __future__ import annotations

import triton
import triton.language as tl

RINT = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a float32 of magnitude below 2^22 to an integer,
ties to even."""


@triton.jit
def power_of_two(exponent):
    """2^exponent exactly, for int32 exponents in -127..127."""
    bits = tl.where(exponent == -127, 1 << 22, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nearest(magnitude, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):
    """The value nearest to each float32 magnitude, ties to even, saturating at LARGEST.

    MANTISSA, SMALLEST   mantissa bits and the exponent of the smallest normal number
    """
    magnitude = tl.minimum(magnitude, LARGEST)
    exponent = (magnitude.to(tl.int32, bitcast=True) >> 23) - 127
    unit = tl.maximum(exponent, SMALLEST) - MANTISSA
    return ((magnitude * power_of_two(-unit) + RINT) - RINT) * power_of_two(unit)


@triton.jit
def mx_exponent(amax, MANTISSA: tl.constexpr, TOP: tl.constexpr):
    """The scale exponents of groups with these absolute maxima, scale mode EVEN: int32, -127..127.

    MANTISSA, TOP   the element's mantissa bits and the exponent of its largest number

    The maximum rounds up to the next power of two where its mantissa would in the element's
    precision; a maximum that is or becomes infinite gives 127.
    """
    rounded = (amax.to(tl.int32, bitcast=True) + (1 << (22 - MANTISSA))) >> 23
    exponent = tl.minimum(tl.maximum(rounded - 127 - TOP, -127), 127)
    return tl.where(rounded >= 255, 127, exponent)
