"""Bytes of MXFP4 and their values, by plain torch operators, on any device.

An element is a sign, two bits of exponent and one of significand: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. The
even element of a pair has the lower half of their byte. Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..scaled import BLOCK, E8M0_NAN, F32_MANTISSA_BITS, multipliers_of, scales_of

MAX_EXPONENT = 2
"""Of the greatest element, 6 = 1.5 * 2^2."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Between neighbouring magnitudes, and whether the upper one is the even one, to which the midpoint is rounded."""
SIGN = 8
SCALE_BIAS = 127
"""The scale byte of 1."""


def values_of(data: Tensor, exponents: Tensor) -> Tensor:
    """float32 [..., K] of bytes [..., K/2] with E8M0 bytes [..., K/32]; exact, but that float32 ends at 2^128."""
    magnitudes = torch.tensor(MAGNITUDES, device=data.device)
    numbers = torch.cat((magnitudes, -magnitudes))
    halves = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
    return numbers[halves.int()] * scales_of(exponents).repeat_interleave(BLOCK, dim=-1)


def scale_exponents(amax: Tensor) -> Tensor:
    """The E8M0 bytes, uint8, of blocks whose greatest magnitudes are `amax`, float32: 2^(floor(log2 amax) - 2)."""
    exponent = (amax.view(torch.int32) >> F32_MANTISSA_BITS) - MAX_EXPONENT
    return exponent.clamp(min=0).masked_fill(amax.isnan(), E8M0_NAN).to(torch.uint8)


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K] in MXFP4 by rows: bytes [R, K/2] and E8M0 bytes [R, K/32]. Elements of a block with a NaN are 0."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    exponents = scale_exponents(blocks.abs().amax(dim=2))
    scaled = blocks * multipliers_of(exponents)[:, :, None]
    magnitude = scaled.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for midpoint, is_upper_even in _MIDPOINTS:
        codes += magnitude >= midpoint if is_upper_even else magnitude > midpoint
    codes += SIGN * (scaled.signbit() & ~scaled.isnan()).to(torch.uint8)
    low, high = codes.flatten(1).unflatten(1, (-1, 2)).unbind(dim=2)
    return low | high << 4, exponents
