"""Rounding by rational numbers: a slow, independent definition, to which the emulator's arithmetic is compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Form:
    """A binary float format.

    Its fields: the number of fraction bits, the lowest exponent of normal numbers, the largest finite number, and
    whether it has infinities.
    """

    fraction: int
    lowest: int
    largest: float
    infinity: bool = True


F32 = Form(23, -126, (2 - 2.0**-23) * 2.0**127)
F16 = Form(10, -14, 65504.0)
BF16 = Form(7, -126, (2 - 2.0**-7) * 2.0**127)
E4M3 = Form(3, -6, 448.0, False)
E5M2 = Form(2, -14, 57344.0)
E2M1 = Form(1, 0, 6.0, False)


def _unit(size: Fraction, form: Form) -> Fraction:
    """Return the distance between neighbouring numbers of the format around a positive number."""
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    return Fraction(2) ** (max(exponent, form.lowest) - form.fraction)


def rounded(x: Fraction, form: Form, mode: str = "rn", saturate: bool = False) -> float:
    """Return the number to which a format rounds an exact value; zero is 0.0, without a sign."""
    if not x:
        return 0.0
    unit = _unit(abs(x), form)
    steps = x / unit
    if mode == "rn":
        whole = round(steps)
    elif mode == "rz":
        whole = math.trunc(steps)
    else:
        whole = math.floor(steps) if mode == "rm" else math.ceil(steps)
    value = whole * unit
    if abs(value) <= Fraction(form.largest):
        return math.copysign(float(value), x)
    toward = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
    if saturate or toward:
        return math.copysign(form.largest, x)
    return math.copysign(math.inf if form.infinity else math.nan, x)


SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0**-149,
        -(2.0**-149),
        2.0**-126,
        2.0**-127,
        3.4028235e38,
        -3.4028235e38,
        65504.0,
        2.0**-24,
        448.0,
        6.0,
        0.5,
        1 + 2.0**-23,
    ],
    np.float32,
)


def floats(seed: int, count: int = 512) -> np.ndarray:
    """Return random finite float32 numbers, uniform over bit patterns, with SPECIAL among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.where(np.isfinite(values), values, np.float32(1))
    values[: SPECIAL.size] = np.random.default_rng(seed + 100).permutation(SPECIAL)
    return values


def same_float32(got, wanted) -> bool:
    return bool(((got == wanted) | (np.isnan(got) & np.isnan(wanted))).all())
