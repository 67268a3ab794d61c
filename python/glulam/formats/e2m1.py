"""E2M1, the 4-bit elements of MXFP4 and NVFP4: codes and their values, by plain torch operators, on any device.

An element is a sign, two bits of exponent and one of significand: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. A
byte holds two elements, the even one in its lower half. Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Midpoints between neighbouring magnitudes, and whether a midpoint is rounded up, to the even code."""
SIGN = 8


def numbers_of(data: Tensor) -> Tensor:
    """Return the values, float32 [..., K], of E2M1 elements in bytes [..., K/2]."""
    magnitudes = torch.tensor(MAGNITUDES, device=data.device)
    numbers = torch.cat((magnitudes, -magnitudes))
    return numbers[torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).int()]


def bytes_of_numbers(numbers: Tensor) -> Tensor:
    """Return E2M1 bytes [R, K/2] of float32 [R, K]: rounded to nearest even, at most 6 in magnitude; NaN becomes 0."""
    magnitude = numbers.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for midpoint, is_upper_even in _MIDPOINTS:
        codes += magnitude >= midpoint if is_upper_even else magnitude > midpoint
    codes += SIGN * (numbers.signbit() & ~numbers.isnan()).to(torch.uint8)
    low, high = codes.unflatten(1, (-1, 2)).unbind(dim=2)
    return low | high << 4
