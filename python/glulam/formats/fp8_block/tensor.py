"""FP8BlockTensor: weights in the format of Qwen's FP8 checkpoints and DeepSeek-V3."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ...calls.checks import shape_text
from ..scaled import Stored
from .codec import BLOCK, decoded, num_blocks

MULTIPLE = 16
"""K must be a multiple of this: kernels load 16 bytes at a time."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FP8BlockTensor(Stored):
    """A matrix [N, K], or E of them [E, N, K], in E4M3 with a float32 scale for each block of 128 x 128.

    The value of an element is its E4M3 number times its block's scale. The last blocks along N and along K may be
    smaller, so neither need be a multiple of 128.

    A gated w1 in layout "concat" holds two matrices: N/2 rows of the gate, then N/2 rows of the up-projection. If N/2
    is a multiple of 128, one grid of blocks over all N rows is the same as one grid for each half, and `scale` is
    always stored as [E, N/128, ceil(K / 128)]. If N/2 is not a multiple of 128, a block of one grid would hold rows of
    both matrices. Such weights are quantised half by half, as in checkpoints, and their scales have one more dimension:
    a grid for each half, [E, 2, ceil(N/2 / 128), ceil(K / 128)]. transformers loads a grid for each half into
    `gate_up_proj_scale_inv`, but its own kernels read one grid over all rows, which is right only if N/2 is a multiple
    of 128.

    Attributes:
        data: [..., N, K] float8_e4m3fn, K a multiple of 16.
        scale: [..., ceil(N / 128), ceil(K / 128)] float32; or [..., 2, ceil(N/2 / 128), ceil(K / 128)], see above.

    Raises:
        ValueError, TypeError: data and scale do not fit together.
    """

    data: Tensor
    scale: Tensor

    format = "FP8 blocks"
    recipe, weight_only = "fp8_block", "fp8_block_weight_only"
    scale_dtype = torch.float32

    def __post_init__(self) -> None:
        self.check_parts()
        shape = tuple(self.data.shape)
        if len(shape) not in (2, 3) or shape[-1] % MULTIPLE:
            raise ValueError(
                f"FP8BlockTensor: data has shape {shape_text(shape)}; give [N, K] or [E, N, K] with K a multiple of "
                f"{MULTIPLE}, so pad it with zeros"
            )
        check_scale_shape("FP8BlockTensor: scale", self.scale, shape)
        if self.has_grid_of_halves and not shape[-2] // 2 % BLOCK:
            object.__setattr__(self, "scale", self.scale.flatten(-3, -2))
            self.note()

    @property
    def has_grid_of_halves(self) -> bool:
        """True if each half of the rows has its own grid of scales, because one grid over all rows would differ."""
        return self.scale.dim() > self.data.dim()

    def form_name(self) -> str:
        return "fp8_block"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values in `dtype`, rounded once from float32; exact in float64."""
        wide = torch.promote_types(dtype, torch.float32)
        return values_of(self.data, self.scale, wide).to(dtype)

    def __getitem__(self, index: int | slice) -> FP8BlockTensor:
        """Return a view of entries of the leading dimension, such as an expert's matrix of [E, N, K]."""
        if self.data.dim() < 3:
            raise IndexError("FP8BlockTensor: a single matrix has no leading dimension to index; slice its data")
        return self._with(data=self.data[index], scale=self.scale[index])


def grid_shape(shape: tuple[int, ...], halves: int) -> tuple[int, ...]:
    """Return the shape of the scales of a weight of shape [..., N, K].

    Args:
        shape: the weight's shape.
        halves: 2 if each half of the rows has its own grid of scales, else 1.
    """
    *lead, n, k = shape
    return (*lead, *((halves,) if halves > 1 else ()), num_blocks(n // halves), num_blocks(k))


def check_scale_shape(name: str, scale: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `scale` has a valid shape for a weight of this shape."""
    valid = [grid_shape(shape, 1)] + ([] if shape[-2] % 2 else [grid_shape(shape, 2)])
    if tuple(scale.shape) not in valid:
        raise ValueError(
            f"{name} has shape {shape_text(scale.shape)}; of data {shape_text(shape)} it is "
            f"{' or, with a grid for each half of the rows, '.join(map(shape_text, valid))}: a number for each block "
            f"of {BLOCK} x {BLOCK}"
        )


def values_of(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values [..., N, K] of an FP8BlockTensor's data and scale."""
    return decoded(data, _scales_of_rows(scale, data), dtype)


def _scales_of_rows(scale: Tensor, data: Tensor) -> Tensor:
    """Return the scales of each row of data, [..., N, ceil(K / 128)]."""
    rows = scale.repeat_interleave(BLOCK, dim=-2)
    if scale.dim() == data.dim():
        return rows[..., : data.shape[-2], :]
    return rows[..., : data.shape[-2] // 2, :].flatten(-3, -2)
