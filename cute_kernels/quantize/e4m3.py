"""Conversion of float32 numbers to E4M3, rounded to nearest even. Magnitudes are at most 448, E4M3's greatest number.
The GPU's instruction converts where there is one; elsewhere integer arithmetic does."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint8, const_expr

from ..device.select import select
from ..device.target import has_fp8

MAGNITUDE, SIGN, GREATEST, NAN = 0x7FFFFFFF, 0x80, 0x7E, 0x7F
# Bits of float32's significand below E4M3's 3 bits; difference of the exponents' biases, shifted to E4M3's exponent.
DROPPED_BITS, BIAS = 20, 120 << 3
LEAST_NORMAL, STEPS_OF_SUBNORMALS = 2.0**-6, 2.0**14
"""LEAST_NORMAL: E4M3's least normal number.

STEPS_OF_SUBNORMALS: a float32 number by which to round to E4M3's subnormals. float32 numbers near it are 2^-9 apart,
like E4M3's subnormals. So adding it to a number below LEAST_NORMAL rounds that number to a subnormal.
"""
F32_INF = 0x7F800000


def e4m3_byte(value: Float32) -> Int32:
    """Return a number's E4M3 byte as an integer. Magnitudes above 448 become 448, NaN becomes 0x7F."""
    bits = value.bitcast(Int32)
    magnitude = bits & MAGNITUDE
    half = (1 << DROPPED_BITS - 1) - 1
    normal = (magnitude + half + (magnitude >> DROPPED_BITS & 1) >> DROPPED_BITS) - BIAS
    shifted = (magnitude.bitcast(Float32) + Float32(STEPS_OF_SUBNORMALS)).bitcast(Int32)
    is_small = magnitude.bitcast(Float32) < Float32(LEAST_NORMAL)
    number = cutlass.min(select(is_small, shifted & 0xF, normal), Int32(GREATEST))
    return select(magnitude > F32_INF, Int32(NAN), number) | bits >> 24 & SIGN


def e4m3_value(value: Float32) -> Float32:
    """Round a number of at most 448 to the nearest E4M3 value, and return it in float32. NaN and Inf stay as they
    are."""
    bits = value.bitcast(Int32)
    half = (1 << DROPPED_BITS - 1) - 1
    normal = bits + half + (bits >> DROPPED_BITS & 1) & -(1 << DROPPED_BITS)
    steps = Float32(1.5 * STEPS_OF_SUBNORMALS)
    small = ((value + steps) - steps).bitcast(Int32)
    is_small = (bits & MAGNITUDE).bitcast(Float32) < Float32(LEAST_NORMAL)
    return select(is_small, small, normal).bitcast(Float32)


def to_e4m3(numbers: cute.TensorSSA, count: int) -> cute.Tensor:
    """Convert `count` numbers to E4M3; returns a register tensor."""
    result = cute.make_rmem_tensor(count, Float8E4M3FN)
    if const_expr(has_fp8()):
        result.store(numbers.to(Float8E4M3FN))
    else:
        bytes_of = cute.recast_tensor(result, Uint8)
        for i in range(count):
            bytes_of[i] = e4m3_byte(Float32(numbers[i])).to(Uint8)
    return result


def e4m3_values(numbers: cute.TensorSSA, count: int) -> cute.TensorSSA:
    """Round `count` numbers to E4M3 values, and return them in float32."""
    if const_expr(has_fp8()):
        return numbers.to(Float8E4M3FN).to(Float32)
    result = cute.make_rmem_tensor(count, Float32)
    for i in range(count):
        result[i] = e4m3_value(Float32(numbers[i]))
    return result.load()
