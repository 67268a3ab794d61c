"""Encoding and decoding of MXFP4, by plain torch operators, on any device. Source: OCP Microscaling Formats 1.0."""

from __future__ import annotations

import torch
from torch import Tensor

from ..e2m1 import bytes_of_numbers, numbers_of
from ..scaled import BLOCK, E8M0_NAN, F32_MANTISSA_BITS, multipliers_of, scales_of

MAX_EXPONENT = 2
"""Exponent of the greatest element, 6 = 1.5 * 2^2."""
SCALE_BIAS = 127
"""The scale byte that means 1."""


def values_of(data: Tensor, exponents: Tensor) -> Tensor:
    """Decode E2M1 bytes [..., K/2] with scales as E8M0 bytes [..., K/32]: return the values, float32 [..., K].

    They are exact below float32's limit, 2^128.
    """
    return numbers_of(data) * scales_of(exponents).repeat_interleave(BLOCK, dim=-1)


def scale_exponents(amax: Tensor) -> Tensor:
    """Return the blocks' scales 2^(floor(log2 amax) - 2) as E8M0 bytes, uint8.

    Args:
        amax: the greatest magnitude of each block, float32.
    """
    exponent = (amax.view(torch.int32) >> F32_MANTISSA_BITS) - MAX_EXPONENT
    return exponent.clamp(min=0).masked_fill(amax.isnan(), E8M0_NAN).to(torch.uint8)


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode x [R, K] along rows: return E2M1 bytes [R, K/2] and the scales as E8M0 bytes [R, K/32].

    A block with a NaN gets the scale NaN and elements 0.
    """
    blocks = x.float().unflatten(1, (-1, BLOCK))
    exponents = scale_exponents(blocks.abs().amax(dim=2))
    return bytes_of_numbers((blocks * multipliers_of(exponents)[:, :, None]).flatten(1)), exponents
