"""Float32 scales of blocks of E4M3 elements: formulas of the scale, and of the factor that turns a number x into an
element.

fl32 rounds to float32; amax is the greatest magnitude in the block.

    scale       max(fl32(amax / 448), 2^-126); 1 if all elements are 0; NaN if an element is NaN or infinite
    element     x * fl32(1 / scale), rounded to nearest even, saturating; NaN is 0x7F

If a block has a NaN or infinite x, its scale and all its elements are NaN. 2^-126 is the least normal number; as the
least scale, it keeps the reciprocal finite.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

INVERSE_OF_448, MINUS_448, LEAST_SCALE, ONE = "0f3B124925", "0fC3E00000", "0f00800000", "0f3F800000"


def scale_of(amax: Float32) -> Float32:
    """Return the scale of a block whose greatest magnitude is amax.

    The quotient amax / 448 is rounded correctly. It is the product with fl32(1/448), corrected by one step of Newton's
    method. An fma computes the remainder of this step exactly; the remainder is NaN if amax is infinite.
    """
    ptx = f"""{{
        .reg .f32 amax, quotient, rest; .reg .pred is_zero;
        mov.f32 amax, {{$r0}};
        mul.rn.f32 quotient, amax, {INVERSE_OF_448};
        fma.rn.f32 rest, quotient, {MINUS_448}, amax;
        fma.rn.f32 quotient, rest, {INVERSE_OF_448}, quotient;
        max.NaN.f32 quotient, quotient, {LEAST_SCALE};
        setp.eq.f32 is_zero, amax, 0f00000000;
        selp.f32 {{$w0}}, {ONE}, quotient, is_zero;
        }}"""
    return Float32(cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[amax]))


def inverse_of(scale: Float32) -> Float32:
    """Return 1 / scale, rounded to float32."""
    return Float32(cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[scale]))
