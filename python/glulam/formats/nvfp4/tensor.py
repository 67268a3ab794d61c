"""NVFP4Tensor: weights in the format of NVIDIA's checkpoints."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...calls.checks import check_plain, shape_text
from ...host import device as gpus
from ..e2m1 import numbers_of
from ..four_bits import FourBits

BLOCK = 16
SCALE_DTYPE = torch.float8_e4m3fn
NAN_BYTE = 0x7F


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NVFP4Tensor(FourBits):
    """A matrix [N, K], or E of them [E, N, K], in NVFP4.

    The value of an element is its E2M1 number, times the E4M3 scale of its block of 16 elements of a row, times the
    global scale.

    Attributes:
        data: [..., N, K/2] uint8, two elements a byte, the even one in its lower half. After `prepare_`:
            [..., N, K/8] int32, words as kernels read them (`formats/words.py`).
        scale: [..., N, K/16] float8_e4m3fn; uint8 is accepted. A scale with its sign bit set, even -0, counts as NaN.
        global_scale: float32, positive. []: one for all matrices. [E]: one for each matrix. [E, 2]: for each matrix one
            for the first N/2 rows and one for the last N/2 rows, the halves of a gated w1 in layout "concat".

    Raises:
        ValueError, TypeError: data, scale and global_scale do not fit together, or a global scale is not a positive
            number.
    """

    data: Tensor
    scale: Tensor
    global_scale: Tensor

    format = "NVFP4"
    recipe = weight_only = "nvfp4_weight_only"
    scale_dtype = SCALE_DTYPE
    block = BLOCK

    def __post_init__(self) -> None:
        super().__post_init__()
        check_global_scale("NVFP4Tensor: global_scale", self.global_scale, tuple(self.shape))
        if not is_compiling() and not gpus.is_traced(self.global_scale):
            check_plain("NVFP4Tensor", "global_scale", self.global_scale)  # before its values are read
            _check_positive(self.global_scale)

    def form_name(self) -> str:
        return "nvfp4"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values in `dtype`, rounded once from float32."""
        signed = self.scale.view(torch.uint8) > NAN_BYTE  # these count as NaN
        scale = self.scale.float().masked_fill(signed, torch.nan)
        exact = numbers_of(self.bytes) * scale.repeat_interleave(BLOCK, dim=-1)
        return (exact * by_row(self.global_scale, tuple(self.shape))).to(dtype)

    def others_at(self, index: int | slice) -> dict[str, Tensor]:
        if self.data.dim() < 3 or not self.global_scale.dim():  # rows of a matrix have its global scale
            return {}
        if self.global_scale.dim() == 2 and isinstance(index, int):
            raise IndexError("NVFP4Tensor: a matrix of two global scales is no NVFP4Tensor; take a slice of experts")
        return {"global_scale": self.global_scale[index]}


def check_global_scale(name: str, global_scale: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError if `global_scale` is not [], [E] or [E, 2], as a weight of this shape may have it."""
    valid: list[tuple[int, ...]] = [()]
    if len(shape) == 3:
        valid += [shape[:1], (shape[0], 2)]
    if tuple(global_scale.shape) not in valid or (global_scale.dim() == 2 and shape[1] % 2):
        wanted = ", ".join(shape_text(one) for one in valid)
        raise ValueError(
            f"{name} has shape {shape_text(global_scale.shape)}; of a weight {shape_text(shape)} it is {wanted}"
        )


def by_row(global_scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the global scale reshaped to broadcast over a weight of this shape: [], [E, 1, 1] or [E, N, 1]."""
    if global_scale.dim() < 2:
        return global_scale if not global_scale.dim() else global_scale[:, None, None]
    return global_scale.repeat_interleave(shape[-2] // 2, dim=1)[:, :, None]


def _check_positive(global_scale: Tensor) -> None:
    if not bool(((global_scale > 0) & global_scale.isfinite()).all()):
        raise ValueError(
            "NVFP4Tensor: global_scale has a number that is 0, negative, NaN or infinite; give positive ones: of "
            "modelopt's checkpoints `weight_scale_2`, of compressed-tensors' 1 / `weight_global_scale`"
        )
