"""Encoding of blocks as E4M3 elements with a float32 scale, by plain torch operators, on any device.

    scale      max(fl32(amax / 448), 2^-126); 1 for a block of zeros; NaN for a block with a NaN or an Inf
    element    x * fl32(1 / scale), rounded to nearest even, at most 448; NaN if the block's scale is NaN

fl32(v) is v rounded to float32. 2^-126, the least normal number of float32, keeps 1 / scale finite.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..mxfp8.layout import DATA_DTYPE
from ..mxfp8.reference import E4M3_MAX, to_e4m3
from ..sources import divided

BLOCK = 128
"""Size of blocks: 128 elements of a row of x, or 128 x 128 elements of a weight, share a scale."""
LEAST_SCALE = 2.0**-126


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def scales_of_maxima(amax: Tensor) -> Tensor:
    """Return the float32 scales of blocks. `amax`: the greatest magnitude of each block, float32."""
    scale = divided(amax, E4M3_MAX).clamp(min=LEAST_SCALE)
    return torch.where(amax == 0, 1.0, scale).masked_fill(~amax.isfinite(), torch.nan)


def encoded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode x [R, C] with a scale for each 128 elements of a row: E4M3 [R, C], float32 scales [R, ceil(C / 128)]."""
    data, scale = _encoded(x.float()[:, None])
    return data[:, 0], scale


def encoded_tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Encode x [R, C] with a scale for each 128 x 128 block: E4M3 [R, C], float32 [ceil(R / 128), ceil(C / 128)]."""
    rows = x.shape[0]
    data, scale = _encoded(pad(x.float(), (0, 0, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK)))
    return data.flatten(0, 1)[:rows], scale


def _encoded(strips: Tensor) -> tuple[Tensor, Tensor]:
    """Encode float32 [S, rows, C], where all rows of a strip s and 128 columns share a scale.

    Returns E4M3 [S, rows, C] and float32 scales [S, ceil(C / 128)].
    """
    columns = strips.shape[2]
    blocks = pad(strips, (0, -columns % BLOCK)).unflatten(2, (-1, BLOCK))
    scale = scales_of_maxima(blocks.abs().amax(dim=(1, 3)))
    data = to_e4m3(blocks * scale.reciprocal()[:, None, :, None])
    return data.flatten(2)[:, :, :columns], scale


def decoded(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of E4M3 data [..., R, C] with scales [..., R, ceil(C / 128)], one for 128 elements of a row.

    They are exact in float64.
    """
    assert data.dtype == DATA_DTYPE
    return data.to(dtype) * scale.to(dtype).repeat_interleave(BLOCK, dim=-1)[..., : data.shape[-1]]
