"""quantize_nvfp4: weights to NVFP4 along their rows, by torch's operators on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.checks import check_plain, refuse_gradients, shape_text
from ..e2m1 import MAGNITUDES, bytes_of_numbers
from ..four_bits import FourBits
from ..scaled import SOURCE_DTYPES
from .tensor import BLOCK, SCALE_DTYPE, NVFP4Tensor

OP = "quantize_nvfp4"
MOST_SCALE, LEAST_SCALE = 448.0, 2.0**-9
CHUNK_ROWS = 2**14
"""Rows that are quantised together: their float32 copies take memory."""


def quantize_nvfp4(w: Tensor) -> NVFP4Tensor:
    """w in NVFP4: E2M1 elements, an E4M3 scale for each 16 along a row, a global scale for each matrix.

    The global scale is amax / (6 * 448), 1 for a matrix of zeros. A block's scale is amax / 6 over that, rounded to
    E4M3 and at least 2^-9; that of a block of zeros is 1. Elements are rounded to nearest even. A NaN or an Inf makes
    its block's scale NaN, and so NaN of its row's products; it counts for no amax.

    Args:
        w: [N, K] or [E, N, K], bfloat16, float16 or float32; K a multiple of 32.

    Returns:
        NVFP4Tensor of w's shape; its global scale is one number, or [E].

    Raises:
        ValueError, TypeError: an argument that does not fit.
        GradientNotSupported: grad mode is on and w requires a gradient.
    """
    _check(w)
    refuse_gradients(OP, w=w)
    with torch.no_grad():
        matrices = w if w.dim() == 3 else w[None]
        made = [_quantized(matrix) for matrix in matrices]
        if w.dim() == 2:
            return NVFP4Tensor(*made[0])
        rows, k = w.shape[1:]
        data = w.new_empty(len(w), rows, k // 2, dtype=torch.uint8)
        scale = w.new_empty(len(w), rows, k // BLOCK, dtype=SCALE_DTYPE)
        global_scale = w.new_ones(len(w), dtype=torch.float32)
        for expert, parts in enumerate(made):
            for whole, part in zip((data, scale, global_scale), parts, strict=True):
                whole[expert] = part
        return NVFP4Tensor(data, scale, global_scale)


def _check(w: Tensor) -> None:
    if not isinstance(w, Tensor) or w.dtype not in SOURCE_DTYPES:
        got = w.dtype if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"{OP}: w is {got}; give a tensor of {', '.join(map(str, SOURCE_DTYPES))}")
    check_plain(OP, "w", w)
    if w.dim() not in (2, 3) or w.shape[-1] % FourBits.multiple:
        raise ValueError(
            f"{OP}: w has shape {shape_text(w.shape)}; give [N, K] or [E, N, K] with K a multiple of "
            f"{FourBits.multiple}, so pad it with zeros"
        )


def _quantized(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Data, scales and global scale of [N, K]."""
    pieces = matrix.split(CHUNK_ROWS)
    greatest = [torch.where(piece.isfinite(), piece, 0).abs().amax().float() for piece in pieces if piece.numel()]
    amax = torch.stack(greatest).amax() if greatest else matrix.new_zeros((), dtype=torch.float32)
    # By tensors: of a number torch's GPU operators multiply by the reciprocal, and round otherwise than the CPU's.
    global_scale = torch.where(amax > 0, amax / torch.full_like(amax, MAGNITUDES[-1] * MOST_SCALE), 1.0)
    made = [_rows(piece, global_scale) for piece in pieces]
    return torch.cat([data for data, _ in made]), torch.cat([scale for _, scale in made]), global_scale


def _rows(rows: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    blocks = rows.float().unflatten(1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=2)  # NaN of a block that has one
    scale = (amax / torch.full_like(amax, MAGNITUDES[-1]) / global_scale).clamp(LEAST_SCALE, MOST_SCALE)
    scale = torch.where(amax == 0, 1.0, scale).masked_fill(~amax.isfinite(), torch.nan).to(SCALE_DTYPE)
    numbers = blocks / (scale.float() * global_scale)[:, :, None]
    return bytes_of_numbers(numbers.flatten(1)), scale
