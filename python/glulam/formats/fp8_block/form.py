"""FP8 with block scales, as kernels read it: the layout of weights (`Fp8Block`), and the format of rows (`Fp8Rows`)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..form import Form
from ..mxfp8.layout import DATA_DTYPE
from ..scaled import Parts
from .codec import BLOCK, decoded, encoded_rows
from .quantize import quantize_fp8_block
from .tensor import MULTIPLE, FP8BlockTensor, grid_shape, values_of


@dataclasses.dataclass(frozen=True)
class Fp8Block(Form):
    """The layout in which kernels read FP8 weights: one float32 scale for each 128 x 128 elements (FP8BlockTensor).

    Attributes:
        decoded_to: dtype to which kernels round an element times its scale before they multiply. None: kernels multiply
            the E4M3 elements themselves, and scale each sum of 128 products.
        in_halves: True: a weight in 16 bits is quantised in two halves of rows, each with its own grid of scales (see
            FP8BlockTensor).
    """

    name = "fp8_block"
    kind = FP8BlockTensor
    classes = (FP8BlockTensor,)
    block, multiple = BLOCK, MULTIPLE
    ready_as = DATA_DTYPE, 3

    decoded_to: torch.dtype | None = None
    in_halves: bool = False

    def quantize(self, w: Tensor) -> FP8BlockTensor:
        return quantize_fp8_block(w, in_halves=self.in_halves)

    def of_gate(self, num_rows: int) -> Fp8Block:
        return dataclasses.replace(self, in_halves=True) if num_rows // 2 % BLOCK else self

    def is_ready(self, parts: Parts) -> bool:
        return parts.scale is not None

    def made(self, parts: Parts, report: bool) -> Parts:
        return self.quantized(parts.data)

    def check_fit(self, op: str, name: str, parts: Parts, shape: tuple[int, ...], is_concatenated: bool) -> None:
        assert parts.scale is not None
        has_halves, half = parts.scale.dim() > len(shape), shape[1] // 2
        if not half % BLOCK or has_halves == is_concatenated:
            return
        if has_halves:
            raise ValueError(
                f"{op}: {name}'s scale has a grid for each half of the rows, which are no halves of a gate in "
                "glu_layout 'concat'; quantise it without in_halves"
            )
        raise ValueError(
            f"{op}: {name} has halves of {half} rows, which end inside a block of {BLOCK}, but one grid of scales for "
            f"both; in glu_layout 'concat' each half needs its own: give quantize_fp8_block({name}, in_halves=True) of "
            f"the weight in 16 bits, or glulam.load_experts' weights"
        )

    def on_meta(self, like: Tensor, shape: tuple[int, ...]) -> Parts:
        scale = like.new_empty(grid_shape(shape, 2 if self.in_halves else 1), dtype=torch.float32)
        return super().on_meta(like, shape)._replace(scale=scale)

    def tensor_of(self, parts: Parts) -> FP8BlockTensor:
        made: FP8BlockTensor = FP8BlockTensor.unchecked(parts.data.view(DATA_DTYPE), parts.scale)
        return made

    def scale_shape(self, shape: tuple[int, ...], scale: Tensor) -> tuple[int, ...]:
        return grid_shape(shape, 2 if scale.dim() > len(shape) else 1)

    def values(self, parts: Parts, expert: int) -> Tensor:
        assert parts.scale is not None
        values = values_of(parts.data[expert], parts.scale[expert])
        return values if self.decoded_to is None else values.to(self.decoded_to).float()


FP8_BLOCK = Fp8Block()
FP8_BLOCK_IN_BF16 = Fp8Block(torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Fp8Rows:
    """The format to which GEMMs quantise rows of x or of the activation: E4M3, a float32 scale for 128 elements."""

    def rounded(self, values: Tensor) -> Tensor:
        """Quantise values [R, C] to this format and dequantise them again; the result is float32 or float64."""
        dtype = torch.promote_types(values.dtype, torch.float32)
        return decoded(*encoded_rows(values), dtype=dtype)


FP8_ROWS = Fp8Rows()
