"""quantize_fp8_block: quantise weights to FP8 with block scales, by torch's operators on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.checks import check_flag
from ..mxfp8.layout import DATA_DTYPE
from ..sources import check_source
from .codec import BLOCK, encoded_tiles
from .tensor import MULTIPLE, FP8BlockTensor, grid_shape

OP = "quantize_fp8_block"
CHUNK_BLOCKS = 128
"""Blocks of 128 rows that are quantised together, which bounds the memory of their float32 copies."""


def quantize_fp8_block(w: Tensor, *, in_halves: bool = False) -> FP8BlockTensor:
    """Quantise weights to FP8 (E4M3) with a float32 scale for each block of 128 x 128.

    A block's scale is amax / 448, at least 2^-126; the scale of a block of zeros is 1. Elements are rounded to nearest
    even. A NaN or an Inf makes its block's scale and all elements of the block NaN.

    Args:
        w: [N, K] or [E, N, K], bfloat16, float16 or float32; K a multiple of 16.
        in_halves: True: quantise the first N/2 rows and the last N/2 rows separately, for a gated w1 in layout
            "concat"; see FP8BlockTensor. The result differs only if N/2 is no multiple of 128.

    Returns:
        FP8BlockTensor of w's shape.

    Raises:
        ValueError, TypeError: an argument is invalid.
        GradientNotSupported: grad mode is on and w requires a gradient.
    """
    check_source(OP, w, MULTIPLE)
    check_flag(OP, "in_halves", in_halves)
    if in_halves and w.shape[-2] % 2:
        raise ValueError(f"{OP}: in_halves is True, but w has {w.shape[-2]} rows, an odd number; leave in_halves out")
    halves = 2 if in_halves else 1
    with torch.no_grad():
        data = torch.empty(w.shape, dtype=DATA_DTYPE, device=w.device)
        scale = w.new_empty(grid_shape(tuple(w.shape), halves), dtype=torch.float32)
        experts = [part if w.dim() == 3 else part[None] for part in (w, data, scale)]
        for matrix, elements, grid in zip(*experts, strict=True):
            grids = grid if in_halves else grid[None]
            for half in zip(matrix.tensor_split(halves), elements.tensor_split(halves), grids, strict=True):
                _quantize(*half)
    return FP8BlockTensor(data, scale)


def _quantize(matrix: Tensor, data: Tensor, grid: Tensor) -> None:
    """Quantise a matrix [N, K] into data [N, K] and grid [ceil(N / 128), ceil(K / 128)], its scales."""
    for first in range(0, len(grid), CHUNK_BLOCKS):
        rows = slice(first * BLOCK, (first + CHUNK_BLOCKS) * BLOCK)
        data[rows], grid[first : first + CHUNK_BLOCKS] = encoded_tiles(matrix[rows])
