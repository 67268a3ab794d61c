"""quantize_nvfp4: quantise weights to NVFP4 along their rows, by torch's operators on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..e2m1 import MAGNITUDES, bytes_of_numbers
from ..four_bits import FourBits
from ..sources import CHUNK_ROWS, check_source, divided
from .tensor import BLOCK, SCALE_DTYPE, NVFP4Tensor

MOST_SCALE, LEAST_SCALE = 448.0, 2.0**-9


def quantize_nvfp4(w: Tensor) -> NVFP4Tensor:
    """Quantise weights to NVFP4: E2M1 elements, an E4M3 scale for each 16 elements of a row, a global scale a matrix.

    A matrix's global scale is (the matrix's amax) / (6 * 448); 1 for a matrix of zeros. A block's scale is (the block's
    amax) / 6 / (global scale), rounded to E4M3 and at least 2^-9; 1 for a block of zeros. Elements are rounded to
    nearest even. A NaN or an Inf makes its block's scale NaN, so products with that row are NaN; the matrix's amax
    ignores it.

    Args:
        w: [N, K] or [E, N, K], bfloat16, float16 or float32; K a multiple of 32.

    Returns:
        NVFP4Tensor of w's shape; its global scale is one number, or [E].

    Raises:
        ValueError, TypeError: w has the wrong dtype or shape.
        GradientNotSupported: grad mode is on and w requires a gradient.
    """
    check_source("quantize_nvfp4", w, FourBits.multiple)
    *lead, k = w.shape
    with torch.no_grad():
        data = w.new_empty(*lead, k // 2, dtype=torch.uint8)
        scale = w.new_empty(*lead, k // BLOCK, dtype=SCALE_DTYPE)
        global_scale = w.new_empty(lead[:-1], dtype=torch.float32)
        experts = [part if w.dim() == 3 else part[None] for part in (w, data, scale, global_scale)]
        for expert in zip(*experts, strict=True):
            _quantize(*expert)
    return NVFP4Tensor(data, scale, global_scale)


def _quantize(matrix: Tensor, data: Tensor, scale: Tensor, global_scale: Tensor) -> None:
    """Quantise a matrix [N, K] into data [N, K/2], scale [N, K/16] and global_scale []."""
    num_rows = len(matrix) if matrix.numel() else 0
    chunks = [slice(first, first + CHUNK_ROWS) for first in range(0, num_rows, CHUNK_ROWS)]
    maxima = [torch.where(matrix[rows].isfinite(), matrix[rows], 0).abs().amax().float() for rows in chunks]
    amax = torch.stack([matrix.new_zeros((), dtype=torch.float32), *maxima]).amax()
    global_scale.copy_(torch.where(amax > 0, divided(amax, MAGNITUDES[-1] * MOST_SCALE), 1.0))
    for rows in chunks:
        data[rows], scale[rows] = _encoded(matrix[rows], global_scale)


def _encoded(rows: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    blocks = rows.float().unflatten(1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=2)  # NaN if the block has a NaN
    scale = (divided(amax, MAGNITUDES[-1]) / global_scale).clamp(LEAST_SCALE, MOST_SCALE)
    scale = torch.where(amax == 0, 1.0, scale).masked_fill(~amax.isfinite(), torch.nan).to(SCALE_DTYPE)
    numbers = blocks / (scale.float() * global_scale)[:, :, None]
    return bytes_of_numbers(numbers.flatten(1)), scale
