"""Number formats on lanes: widening is exact, narrowing rounds once (PTX ISA, sections Fundamental Types and cvt)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Instructions return this code for NaN, in float16 and in bfloat16.
F32_NAN, F16_NAN = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)


def wide(x, dtype):
    """Convert to a type of more bits, keeping the value."""
    return x.astype(dtype) if isinstance(x, np.ndarray) else dtype(x)


def ptx_nan(bits):
    """Return registers in which each float32 NaN is replaced by the NaN that PTX instructions return."""
    nan = np.isnan(bits.view(np.float32))
    return np.where(nan, F32_NAN.view(bits.dtype), bits) if np.count_nonzero(nan) else bits


# 16 bits ------------------------------------------------------------------------------------------------------------
def bf16(x):
    return (wide(x, np.uint32) << np.uint32(16)).view(np.float32)


def f16(x):
    return x.view(np.float16).astype(np.float32)


def _nearest_bf16(x):
    """Round float32 to nearest even; return bfloat16 codes in the upper halves of registers.

    The lower halves are undefined.
    """
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    nan = np.isnan(x)
    return np.where(nan, F32_NAN, rounded) if np.count_nonzero(nan) else rounded


def to_bf16(x):
    """Round float32 to bfloat16, nearest even; return codes."""
    return (_nearest_bf16(x) >> np.uint32(16)).astype(np.uint16)


def bf16_pair(high, low):
    """Round two float32 numbers to bfloat16, nearest even; return both codes in one register."""
    return _nearest_bf16(high) & np.uint32(0xFFFF0000) | _nearest_bf16(low) >> np.uint32(16)


def to_f16(x):
    """Round float32 to float16, nearest even; return codes."""
    return np.where(np.isnan(x), F16_NAN, np.asarray(x, np.float32).astype(np.float16).view(np.uint16))


def to_tf32(x):
    """Round float32 to 10 fraction bits, ties away from zero; the low 13 bits are zero here.

    guess: the ISA leaves the low 13 bits undefined; the tensor core does not read them.
    """
    bits = x.view(np.uint32)
    away = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), F32_NAN, np.where(np.isinf(x), bits, away))


def odd_float32(x):
    """Round float64 to float32 "to odd": an inexact result ends in a 1.

    A second rounding then gives the correct result.
    """
    near = x.astype(np.float32)
    inexact = near.astype(np.float64) != x
    if not np.count_nonzero(inexact):
        return near
    inexact &= ~np.isnan(x)
    bits = near.view(np.uint32)
    toward_zero = np.where(inexact & (np.abs(near.astype(np.float64)) > np.abs(x)), bits - np.uint32(1), bits)
    return np.where(inexact, toward_zero | np.uint32(1), bits).view(np.float32)


def float64_to_bf16(x):
    return to_bf16(odd_float32(x))


def float64_to_f16(x):
    return np.where(np.isnan(x), F16_NAN, x.astype(np.float16).view(np.uint16))


def float64_to_float32(x, rounding="rn"):
    """Round float64 to float32 once. If x was itself rounded to odd, the result is that of the exact value."""
    near = x.astype(np.float32)
    if rounding == "rn":
        return near
    if rounding == "rz":
        limit = np.float32(0)
        wrong = np.abs(near.astype(np.float64)) > np.abs(x)
    elif rounding == "rm":
        limit = np.float32(-np.inf)
        wrong = near > x
    else:
        limit = np.float32(np.inf)
        wrong = near < x
    return np.where(wrong & np.isfinite(x), np.nextafter(near, limit), near)


# 8 and 4 bits -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Format:
    """A floating-point format of few bits.

    nan: the code of NaN; infinity: True if the format has infinities.
    """

    exponent: int
    fraction: int
    bias: int
    largest: float
    nan: int
    infinity: bool = False

    def values(self) -> np.ndarray:
        """Return the value of each code as float32."""
        codes = np.arange(1 << (1 + self.exponent + self.fraction))
        e = codes >> self.fraction & ((1 << self.exponent) - 1)
        f = (codes & ((1 << self.fraction) - 1)) / 2.0**self.fraction
        value = np.where(e == 0, f * 2.0 ** (1 - self.bias), (1 + f) * 2.0 ** (e - float(self.bias)))
        beyond = value > self.largest
        if self.infinity:
            value = np.where(beyond & (f == 0), np.inf, np.where(beyond, np.nan, value))
        else:
            value = np.where(beyond, np.nan, value)
        return np.where(codes >> (self.exponent + self.fraction), -value, value).astype(np.float32)


# e2m1 has no NaN: cvt makes the largest number of it (PTX ISA, cvt: .satfinite).
FORMATS = {
    "e4m3": Format(4, 3, 7, 448.0, 0x7F),
    "e5m2": Format(5, 2, 15, 57344.0, 0x7F, True),
    "e2m1": Format(2, 1, 1, 6.0, 0x7),
    "f16": Format(5, 10, 15, 65504.0, 0x7FFF, True),
    "bf16": Format(8, 7, 127, (2 - 2.0**-7) * 2.0**127, 0x7FFF, True),
}
E4M3, E5M2, E2M1 = (FORMATS[name].values() for name in ("e4m3", "e5m2", "e2m1"))
_CODES_TO_F16 = {name: to_f16(FORMATS[name].values()) for name in ("e4m3", "e5m2", "e2m1")}


def narrow(x, name, rounding="rn", satfinite=False):
    """Round to a format of FORMATS; return codes as uint16.

    .satfinite converts infinity and larger numbers to the format's largest number (PTX ISA, cvt). guess: NaN loses its
    sign, since the ISA mentions only one NaN for each format.
    """
    to = FORMATS[name]
    x = np.asarray(x)
    size = np.abs(x).astype(np.float64)
    _, exponent = np.frexp(size)
    lowest = 1 - to.bias - to.fraction
    unit = np.maximum(exponent - 1 - to.fraction, lowest)
    steps = np.ldexp(size, -unit)
    if rounding == "rn":
        steps = np.rint(steps)
    elif rounding == "rna":
        steps = np.floor(steps + 0.5)
    else:
        up = {"rz": False, "rp": ~np.signbit(x), "rm": np.signbit(x)}[rounding]
        steps = np.where(up, np.ceil(steps), np.floor(steps))
    top = _code_of_largest(to)
    positive = np.isfinite(size) & (steps > 0)
    code = np.where(positive, (unit - lowest << to.fraction) + np.where(positive, steps, 0).astype(np.int64), 0)
    beyond = top if satfinite or (rounding == "rz") else top + 1
    code = np.where(code > top, beyond, code)
    code = np.where(np.isinf(size), top if satfinite else top + 1, code)
    code = code | np.signbit(x).astype(np.int64) << (to.exponent + to.fraction)
    return np.where(np.isnan(size), to.nan, code).astype(np.uint16)


def _code_of_largest(to: Format) -> int:
    fraction, exponent = np.frexp(to.largest)
    return ((int(exponent) - 1 + to.bias - 1) << to.fraction) + int(fraction * 2 ** (to.fraction + 1))


def pair_to_f16x2(x, name):
    """Widen two codes in a uint16 (of e2m1: in its low byte) to a float16 pair."""
    table = _CODES_TO_F16[name]
    if name == "e2m1":
        low, high = table[x & np.uint16(15)], table[x >> np.uint16(4) & np.uint16(15)]
    else:
        low, high = table[x & np.uint16(255)], table[x >> np.uint16(8)]
    return pack(high, low)


def pack(high, low):
    """Combine two uint16 to a uint32."""
    return (wide(high, np.uint32) << np.uint32(16)) | low


def ue8m0(x):
    """Return 2^(x - 127); 255 is NaN."""
    return np.where(x == 255, np.nan, np.ldexp(1.0, x.astype(np.int32) - 127))


# pairs in a register ------------------------------------------------------------------------------------------------
def halves_of(x, name):
    """Return float64 values of each register's two numbers, low one first, as [2 n]."""
    codes = np.ascontiguousarray(x).reshape(-1)
    if name == "f32x2":
        return codes.view(np.float32).astype(np.float64)
    return (bf16 if name == "bf16x2" else f16)(codes.view(np.uint16)).astype(np.float64)


def to_halves(x, name):
    """Round float64 values, [2 n], to pairs in registers."""
    if name == "f32x2":
        return x.astype(np.float32).view(np.uint64)
    return (float64_to_bf16 if name == "bf16x2" else float64_to_f16)(x).view(np.uint32)


# integers -----------------------------------------------------------------------------------------------------------
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def float_to_int(x, rounding, dtype):
    """Clamp to the integer type's range; NaN is 0 (PTX ISA, cvt)."""
    whole = _ROUND[rounding](np.where(np.isnan(x), 0, x).astype(np.float64))
    limit = np.iinfo(dtype)
    inside = (whole > float(limit.min)) & (whole < float(limit.max))
    exact = np.where(inside, whole, 0).astype(dtype)
    return np.where(inside, exact, np.where(whole > 0, dtype(limit.max), dtype(limit.min)))


def clamp(x, dtype):
    """Clamp integers to the range of an integer type."""
    to, of = np.iinfo(dtype), np.iinfo(x.dtype)
    return np.clip(x, x.dtype.type(max(to.min, of.min)), x.dtype.type(min(to.max, of.max))).astype(dtype)


def round_to_integral(x, rounding):
    return _ROUND[rounding](x)
