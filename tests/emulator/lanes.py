"""Arithmetic on lanes, exact unless a docstring says otherwise. Immediates are numpy scalars.

NaN: PTX's float32 instructions return one NaN, 0x7fffffff. Here a NaN has numpy's bits until an integer instruction
reads it (float_registers.py); conversions to narrower formats return PTX's NaN. Approximations (.approx, .full) are
numpy's float32 functions; the hardware's differ by a few units in the last place.
"""

from __future__ import annotations

import numpy as np

from . import formats
from .formats import bf16, f16, to_bf16, to_f16, wide

SHARED_BASE = 0x400  # the first KiB is the system's, from sm_90 on
TINY = np.float32(2.0**-126)  # numbers below are subnormal in float32


def both(m, guard):
    """Return the lanes of m for which guard is true; True: all lanes, None: no lanes."""
    kept = guard.copy() if m is True else m & guard
    count = np.count_nonzero(kept)
    if not count:
        return None
    return True if count == kept.size else kept


# floats -------------------------------------------------------------------------------------------------------------
def exact_sum(a, b):
    """Return a + b in float64, rounded to odd, so that a second rounding to at most 51 bits gives the correct result.

    Knuth's two-sum gives the error of the sum, and thereby the direction of its rounding.
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    if not np.count_nonzero(error):
        return total
    bits = total.view(np.int64)
    inexact_and_even = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact_and_even, bits + step, bits).view(np.float64)


# By format: the part of a float64's fraction that rounding takes away, its half, and the smallest normal number.
_ROUNDING = {
    name: (np.int64((1 << 52 - fraction) - 1), np.int64(1 << 51 - fraction), np.float64(smallest))
    for name, fraction, smallest in (("f32", 23, 2.0**-126), ("bf16", 7, 2.0**-126), ("f16", 10, 2.0**-14))
}


def sum_to_round(a, b, name):
    """Return a + b such that rounding it to a format rounds the exact sum.

    Rounding twice differs from rounding once only if the first result is half way between two numbers of the format;
    subnormal results are suspect, too. Such sums are computed by `exact_sum`. All others need only one addition.
    """
    total = a + b
    tail, half, smallest = _ROUNDING[name]
    suspect = np.count_nonzero(total.view(np.int64) & tail == half)
    if not suspect:
        small = np.abs(total) < smallest
        suspect = np.count_nonzero(small) and np.count_nonzero(small & (total != 0))
    return exact_sum(a, b) if suspect else total


def fma(a, b, c):
    """Return a * b + c of float32, rounded once to nearest even. The product is exact in float64 (48 bits)."""
    return sum_to_round(np.multiply(a, b, dtype=np.float64), wide(c, np.float64), "f32").astype(np.float32)


def fma_rounded(a, b, c, rounding):
    a, b, c = (wide(x, np.float64) for x in (a, b, c))
    return formats.float64_to_float32(np.atleast_1d(exact_sum(a * b, c)), rounding)


def pairs(operation, name, *sources):
    """Apply add, sub, mul or fma to both numbers of registers, rounding once."""
    format_ = "f32" if name == "f32x2" else name[:-2]
    x = [formats.halves_of(s, name) for s in sources]
    if operation == "mul":
        exact = x[0] * x[1]
    elif operation == "fma":
        exact = sum_to_round(x[0] * x[1], x[2], format_)
    else:
        exact = sum_to_round(x[0], x[1] if operation == "add" else -x[1], format_)
    return formats.to_halves(exact, name)


def flush(x):
    """Replace subnormal numbers by zeros of the same sign, as .ftz does."""
    small = np.abs(x) < TINY
    return np.where(small, np.copysign(x.dtype.type(0), x), x) if np.count_nonzero(small) else x


def saturate(x):
    """Clamp to [0, 1], NaN to +0, as .sat does (PTX ISA, section Floating Point Instructions)."""
    return np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1)) + x.dtype.type(0)


def float_max(a, b):
    """Return the larger value; if one is NaN, the other. +0 is greater than -0."""
    return _extreme(np.fmax, np.bitwise_and, a, b)


def float_min(a, b):
    return _extreme(np.fmin, np.bitwise_or, a, b)


def float_max_nan(a, b):
    """Return the larger value, or NaN if one is NaN."""
    return _extreme(np.maximum, np.bitwise_and, a, b)


def float_min_nan(a, b):
    return _extreme(np.minimum, np.bitwise_or, a, b)


def _extreme(choose, merge_signs, a, b):
    result = choose(a, b)
    if np.count_nonzero(result) == result.size:
        return result
    unsigned = np.dtype(f"u{result.itemsize}").type  # for two zeros, numpy returns either one
    return np.where(a == b, merge_signs(a.view(unsigned), b.view(unsigned)).view(result.dtype), result)


_EXTREMES = {"max": float_max, "min": float_min, "max.NaN": float_max_nan, "min.NaN": float_min_nan}


def extreme_of_halves(which, x, y, name):
    """Return min or max of f16 or bf16 numbers, or of pairs, computed exactly in float32."""
    to_float, to_code = (bf16, to_bf16) if name.startswith("bf16") else (f16, to_f16)
    x, y = (np.atleast_1d(s).view(np.uint16) for s in (x, y))
    codes = to_code(_EXTREMES[which](to_float(x), to_float(y)))
    return codes.view(np.uint32) if name.endswith("x2") else codes


def unordered(x, y):
    return np.isnan(x) | np.isnan(y)


def copysign(a, b):
    """Return b with the sign of a."""
    return np.copysign(b, a)


# integers -----------------------------------------------------------------------------------------------------------
def div(a, b):
    """Divide, rounding towards zero.

    guess: division by zero gives ones in all bits; the ISA calls the result unspecified.
    """
    a, b = np.broadcast_arrays(a, b)
    quotient = a // b
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient * b != a) & ((a < 0) != (b < 0)))
    return np.where(b == 0, ~np.zeros((), a.dtype), quotient).astype(a.dtype)


def rem(a, b):
    """Return the remainder, which has the sign of a. guess: a, if b is zero."""
    return np.where(b == 0, a, a - div(a, b) * b)


def multiply_high(a, b):
    """Return the upper half of a product."""
    if a.dtype.itemsize < 8:
        twice = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}").type
        return (wide(a, twice) * wide(b, twice) >> twice(8 * a.dtype.itemsize)).astype(a.dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + (x0 * y0 >> half)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def shift(fn, a, n, bits):
    """Shift; amounts beyond the width count as the width (PTX ISA, shl, shr)."""
    inside = np.minimum(n, bits - 1).astype(a.dtype)
    if fn is np.right_shift and a.dtype.kind == "i":
        return fn(a, inside)
    return np.where(np.asarray(n) >= bits, a.dtype.type(0), fn(a, inside))


def funnel(left, low, high, n, wrap):
    """Shift high:low by n mod 32 (wrap) or at most 32; return the upper word after a left shift, else the lower."""
    n = wide(n, np.uint64)
    n = n & np.uint64(31) if wrap else np.minimum(n, np.uint64(32))
    x = (wide(high, np.uint64) << np.uint64(32)) | wide(low, np.uint64)
    if left:  # by 32 the lower word is the result: two steps, since numpy shifts by less than 64
        return (x << n >> np.uint64(32)).astype(np.uint32)
    return (x >> n).astype(np.uint32)


def highest_bit(x):
    """Return the index of the highest 1 as int64; -1 for 0."""
    if x.dtype.itemsize == 8:
        upper = x >> np.uint64(32)
        return np.where(upper != 0, _exponent(upper) + 32, _exponent(x & np.uint64(0xFFFFFFFF)))
    return _exponent(x)


def _exponent(x):
    return np.frexp(x.astype(np.float64))[1].astype(np.int64) - 1


def bfind(x, shiftamt):
    """Return the index of the highest bit that differs from the sign; all ones if there is none.

    shiftamt: return instead the shift that moves this bit to the top.
    """
    bits = 8 * x.dtype.itemsize
    unsigned = x.view(f"u{x.dtype.itemsize}")
    found = highest_bit(np.where(x < 0, ~unsigned, unsigned) if x.dtype.kind == "i" else unsigned)
    return np.where(found < 0, -1, bits - 1 - found if shiftamt else found).astype(np.uint32)


def clz(x):
    return (8 * x.dtype.itemsize - 1 - highest_bit(x)).astype(np.uint32)


def popc(x):
    """Return the number of 1 bits; numpy 1 has no function for it."""
    octets = np.unpackbits(np.ascontiguousarray(np.atleast_1d(x)).view(np.uint8).reshape(-1, x.dtype.itemsize), axis=1)
    return octets.sum(1, dtype=np.uint32)


def brev(x):
    x = np.ascontiguousarray(np.atleast_1d(x))
    big = x.astype(x.dtype.newbyteorder(">")).view(np.uint8).reshape(x.size, -1)
    flipped = np.packbits(np.unpackbits(big, axis=1)[:, ::-1], axis=1)
    return flipped.view(x.dtype.newbyteorder(">")).reshape(-1).astype(x.dtype)


def bfe(a, position, length):
    """Return `length` bits from `position` on; for a signed type, extended by the field's highest bit inside a."""
    bits = 8 * a.dtype.itemsize
    position, length = (np.asarray(x).astype(np.int64) & 255 for x in (position, length))
    inside = _ones(np.minimum(length, np.maximum(bits - position, 0)))
    unsigned = wide(a.view(f"u{a.dtype.itemsize}"), np.uint64)
    field = unsigned >> np.minimum(position, bits - 1).astype(np.uint64) & inside
    if a.dtype.kind == "i":
        top = np.minimum(position + np.maximum(length, 1) - 1, bits - 1).astype(np.uint64)
        negative = (unsigned >> top & np.uint64(1) == 1) & (length > 0)
        field = np.where(negative, field | ~inside, field)
    return field.astype(f"u{a.dtype.itemsize}").view(a.dtype)


def bfi(a, b, position, length):
    """Return b with the low `length` bits of a inserted at `position`."""
    bits = 8 * b.dtype.itemsize
    position, length = (np.asarray(x).astype(np.int64) & 255 for x in (position, length))
    place = np.minimum(position, 63).astype(np.uint64)
    where = np.where(position < bits, _ones(np.minimum(length, 64)) << place, np.uint64(0))
    return (wide(b, np.uint64) & ~where | wide(a, np.uint64) << place & where).astype(b.dtype)


def _ones(length):
    """Return a number whose lowest `length` bits are 1."""
    short = np.minimum(length, 63).astype(np.uint64)
    return np.where(length >= 64, ~np.uint64(0), (np.uint64(1) << short) - np.uint64(1))


def prmt(a, b, selector):
    """Select bytes of b:a by the selector's nibbles.

    The top bit of a nibble replicates the selected byte's sign to all 8 bits.
    """
    a, b, selector = np.broadcast_arrays(a, b, selector)
    return _pick_bytes(a, b, [selector >> np.uint32(4 * i) & np.uint32(15) for i in range(4)])


# Bytes of b:a by mode and the selector's low 2 bits (PTX ISA, table of prmt's modes), result's lowest byte first.
PRMT_MODES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def prmt_mode(a, b, selector, mode):
    a, b, selector = np.broadcast_arrays(a, b, selector)
    table = np.array(PRMT_MODES[mode], np.uint32)[selector & np.uint32(3)]
    return _pick_bytes(a, b, [table[..., i] for i in range(4)])


def _pick_bytes(a, b, selectors):
    x = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(a.shape, np.uint32)
    for i, each in enumerate(selectors):
        byte = (x >> ((each & np.uint32(7)).astype(np.uint64) * np.uint64(8)) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        out |= np.where(each & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return out


def lop3(a, b, c, table):
    """Apply a table to each bit: bit i of the table is the result if the bits of a, b, c form i."""
    out = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out
