"""The MXFP8 quantiser in plain torch operators, by the rules of docs/mxfp8.md; kernels must match it to the bit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..scaled import BLOCK, E8M0_INF, E8M0_NAN, F32_MANTISSA_BITS, F32_TWO_TO_MINUS_127, multipliers_of, scales_of
from .layout import DATA_DTYPE, GROUP_ALIGNMENT, num_blocks, outer_and_blocks, round_up, swizzled, unswizzled

E4M3_MAX = 448.0
F32_MANTISSA = 0x7FFFFF
E4M3_NAN = 0x7F


def scale_exponents(amax: Tensor) -> Tensor:
    """Return the scales of blocks as E8M0 bytes, uint8.

    Args:
        amax: the greatest magnitude of each block, float32. NaN if an element is NaN, as torch's amax and the kernels
            make it.
    """
    quotient = amax * torch.tensor(1 / E4M3_MAX, dtype=torch.float32, device="cpu")
    bits = quotient.view(torch.int32)
    exponent, mantissa = bits >> F32_MANTISSA_BITS, bits & F32_MANTISSA
    tiny = (exponent == 0) & (mantissa <= F32_TWO_TO_MINUS_127)
    exponent = exponent + ((mantissa > 0) & (exponent != E8M0_INF) & ~tiny)
    exponent = exponent.masked_fill(quotient.isinf(), E8M0_INF).masked_fill(quotient.isnan(), E8M0_NAN)
    return exponent.to(torch.uint8)


def to_e4m3(values: Tensor) -> Tensor:
    """Round float32 to E4M3: to nearest even, saturating at 448; every NaN becomes byte 0x7F."""
    rounded = values.clamp(-E4M3_MAX, E4M3_MAX).to(DATA_DTYPE)
    return rounded.view(torch.uint8).masked_fill(values.isnan(), E4M3_NAN).view(DATA_DTYPE)


def quantize_rows(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Quantise x [R, C] in blocks of `size` elements along rows.

    Returns:
        E4M3 [R, C], and E8M0 bytes [R, ceil(C/32)], one for each 32 elements.
    """
    rows, columns = x.shape
    blocks = pad(x.float(), (0, -columns % size)).unflatten(1, (-1, size))
    exponents = scale_exponents(blocks.abs().amax(dim=2))
    data = to_e4m3(blocks * multipliers_of(exponents)[:, :, None]).flatten(1)
    return data[:, :columns], exponents.repeat_interleave(size // BLOCK, dim=1)[:, : num_blocks(columns)]


def dequantized(data: Tensor, exponents: Tensor) -> Tensor:
    """Return the float32 values of E4M3 data [..., C] with E8M0 bytes [..., ceil(C/32)] as scales."""
    scales = scales_of(exponents).repeat_interleave(BLOCK, dim=-1)[..., : data.shape[-1]]
    return data.float() * scales


def padded_groups(x: Tensor, ends: list[int]) -> Tensor:
    """Zero the rows of x [T, K] after a group's end, and drop those after the last tile of 128 rows of the last group.

    A group begins at a multiple of 128 rows, so a tile belongs to the first group that ends after the tile's start.

    Args:
        ends: each group's end.
    """
    last = max(ends, default=0)
    rows = min(x.shape[0], round_up(last, GROUP_ALIGNMENT))
    row = torch.arange(rows, device=x.device)
    sorted_ends = torch.tensor(ends, device=x.device)
    group = torch.searchsorted(sorted_ends, row // GROUP_ALIGNMENT * GROUP_ALIGNMENT, right=True)
    is_tail = row >= sorted_ends[group] if rows else row > 0
    return x[:rows].masked_fill(is_tail[:, None], 0)


def quantize(
    x: Tensor, axis: str, size: int, is_swizzled: bool, ends: list[int] | None, data: Tensor, scale: Tensor
) -> None:
    """Quantise x, and write the data [T, K] and the scales of one copy.

    Args:
        x: [T, K]. If a column copy is made, x must be the result of `padded_groups`, for the row copy too.
        axis: "row" or "col".
        size: elements that share a scale, 32 or 128.
        is_swizzled: True: scales are swizzled; False: they are plain.
        ends: each group's end; rows after the last end are not written. None: all rows are quantised.
        data, scale: buffers for the results.
    """
    outer, blocks = outer_and_blocks(data.shape[0], data.shape[1], axis)
    out = scale.view(torch.uint8)
    if axis == "row":
        x = x if ends is None else x[: ends[-1]]
    else:
        x, data, out = x.mT, data.mT, out if is_swizzled else out.mT
    values, scales = quantize_rows(x, size)
    data[: values.shape[0], : values.shape[1]] = values
    plain = unswizzled(out, outer, blocks).clone() if is_swizzled else out
    plain[: scales.shape[0], : scales.shape[1]] = scales
    if is_swizzled:
        out.copy_(swizzled(plain))
