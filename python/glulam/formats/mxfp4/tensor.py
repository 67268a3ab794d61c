"""MXFP4Tensor: weights in the format of gpt-oss's and DeepSeek's checkpoints."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...calls.checks import shape_text
from ..four_bits import FourBits
from ..scaled import BLOCK
from .codec import values_of

BLOCK_BYTES = BLOCK // 2


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXFP4Tensor(FourBits):
    """A matrix [N, K], or a batch of them, in MXFP4: E2M1 elements, one E8M0 scale for each 32 elements of a row.

    The value of an element is its E2M1 number times 2^(scale byte - 127); a scale byte of 255 is NaN. Leading
    dimensions, such as E of expert weights [E, N, K], count independent matrices.

    Attributes:
        data: [..., N, K/2] uint8, two elements a byte, the even one in its lower half. After `prepare_`:
            [..., N, K/8] int32, words as kernels read them (`formats/words.py`).
        scale: [..., N, K/32] float8_e8m0fnu; uint8 is accepted.

    Raises:
        ValueError, TypeError: data and scale do not fit together.
    """

    data: Tensor
    scale: Tensor

    format = "MXFP4"
    recipe = weight_only = "mxfp4_weight_only"
    block = BLOCK

    def form_name(self) -> str:
        return "mxfp4"

    @classmethod
    def from_blocks(cls, blocks: Tensor, scales: Tensor) -> MXFP4Tensor:
        """Return a view of the blocks and scales of gpt-oss's checkpoints, without a copy.

        Args:
            blocks: [..., N, K/32, 16] uint8, the last two dimensions contiguous.
            scales: [..., N, K/32] uint8 or float8_e8m0fnu.

        Raises:
            ValueError, TypeError: blocks and scales do not fit together, or blocks cannot be viewed as rows.
        """
        if not isinstance(blocks, Tensor) or blocks.dim() < 3 or blocks.shape[-1] != BLOCK_BYTES:
            got = shape_text(blocks.shape) if isinstance(blocks, Tensor) else type(blocks).__name__
            raise ValueError(f"MXFP4Tensor.from_blocks: blocks is {got}; give [..., N, K/32, {BLOCK_BYTES}]")
        if blocks.stride(-1) != 1 or (blocks.shape[-2] > 1 and blocks.stride(-2) != BLOCK_BYTES):
            raise ValueError("MXFP4Tensor.from_blocks: blocks of a row do not lie together; give blocks.contiguous()")
        return cls(blocks.flatten(-2), scales)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [..., N, K] in `dtype`; magnitudes from 2^128 on become infinite.

        All other values are exact in float32 and bfloat16; float16 rounds them and has a smaller range.
        """
        return values_of(self.bytes, self.scale.view(torch.uint8)).to(dtype)
