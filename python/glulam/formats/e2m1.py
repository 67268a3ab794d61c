"""E2M1, the 4-bit elements of MXFP4 and NVFP4: encoding and decoding, by plain torch operators, on any device.

An element has a sign bit, two bits of exponent and one of significand. Its values are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and
their negatives. A byte holds two elements, the even one in its lower half. Source: OCP Microscaling Formats (MX)
Specification 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Midpoints between neighbouring magnitudes; True: a number at the midpoint is rounded up, where the even code is."""
SIGN = 8


def numbers_of(data: Tensor) -> Tensor:
    """Decode E2M1 bytes [..., K/2] to values, float32 [..., K]."""
    magnitudes = torch.tensor(MAGNITUDES, device=data.device)
    numbers = torch.cat((magnitudes, -magnitudes))
    return numbers[torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).int()]


def bytes_of_numbers(numbers: Tensor) -> Tensor:
    """Encode float32 [R, K] as E2M1 bytes [R, K/2]: rounded to nearest even, saturated at +-6; NaN becomes 0."""
    magnitude = numbers.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for midpoint, is_upper_even in _MIDPOINTS:
        codes += magnitude >= midpoint if is_upper_even else magnitude > midpoint
    codes += SIGN * (numbers.signbit() & ~numbers.isnan()).to(torch.uint8)
    low, high = codes.unflatten(1, (-1, 2)).unbind(dim=2)
    return low | high << 4
