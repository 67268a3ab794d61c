"""mxfp8_of_square_blocks: convert FP8 (E4M3) weights that have one scale for each 32 x 32 block to MXFP8.

The scales are powers of two in both formats, so the values stay the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...calls.checks import check_plain, shape_text
from ..scaled import BLOCK, SCALE_DTYPE
from .layout import DATA_DTYPE, num_blocks
from .tensor import MXFP8Tensor

OP = "mxfp8_of_square_blocks"


def mxfp8_of_square_blocks(data: Tensor, scale: Tensor) -> MXFP8Tensor:
    """Convert FP8 weights that have one scale for each 32 x 32 block to an MXFP8Tensor of the same values.

    Each scale is repeated for its block's 32 rows. DeepSeek-V4.1 ships dense weights with such scales: in its
    configuration `weight_block_size` is [32, 32] and `scale_fmt` is "ue8m0".

    Args:
        data: [..., N, K] float8_e4m3fn; the result shares its memory.
        scale: [..., ceil(N / 32), ceil(K / 32)] float8_e8m0fnu; uint8 is accepted.

    Returns:
        MXFP8Tensor [..., N, K] with scales along rows.

    Raises:
        ValueError, TypeError: data and scale do not fit together, or a dtype is wrong.
    """
    wanted_of = {"data": (data, (DATA_DTYPE,)), "scale": (scale, (SCALE_DTYPE, torch.uint8))}
    for name, (tensor, dtypes) in wanted_of.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{OP}: {name} is {got}; give a tensor of {' or '.join(map(str, dtypes))}")
        check_plain(OP, name, tensor)
    if scale.device != data.device:
        raise ValueError(f"{OP}: scale is on {scale.device} but data is on {data.device}; move it there")
    if data.dim() < 2:
        raise ValueError(f"{OP}: data has shape {shape_text(data.shape)}; give [..., N, K]")
    *lead, n, k = data.shape
    if scale.shape != (wanted := (*lead, num_blocks(n), num_blocks(k))):
        raise ValueError(
            f"{OP}: scale has shape {shape_text(scale.shape)}; of data {shape_text(data.shape)} it is "
            f"{shape_text(wanted)}, a number for each {BLOCK} x {BLOCK}"
        )
    rows = scale.view(torch.uint8).repeat_interleave(BLOCK, dim=-2)[..., :n, :]
    return MXFP8Tensor(data.detach(), rows.contiguous().view(SCALE_DTYPE))
