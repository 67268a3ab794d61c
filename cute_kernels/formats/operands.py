"""What GEMMs multiply: formats of rows and weights that kernels take together."""

from __future__ import annotations

import dataclasses

from .format import DENSE, Format
from .fp8_block import FP8_BLOCK, FP8_ROWS
from .mxfp4 import MXFP4
from .mxfp8 import MXFP8, MXFP8_FOLDED, MXFP8_VALUES, MXFP8_WIDE
from .nvfp4 import NVFP4


@dataclasses.dataclass(frozen=True)
class Operands:
    """A GEMM's rows and weights, and what an activation becomes. prefix: what names of functions say of them."""

    x: Format
    w: Format
    act: Format
    prefix: str

    @property
    def decodes(self) -> bool:
        """Whether weights become what x is: from registers, so that they are the rows of the MMA, in a swapped tile."""
        return self.w.element != self.x.element

    @property
    def has_scaled_rows(self) -> bool:
        """Whether x is multiplied as it is stored, by scales as well: in FP8."""
        return bool(self.x.scale)

    @property
    def trains(self) -> bool:
        """Whether kernels of training take them: 16-bit operands, and weights that are folded after each step."""
        return not self.decodes and self.w.rows == 1

    @property
    def multiple(self) -> int:
        """Widths of matrices are multiples of this number of elements."""
        return max(self.x.multiple, self.w.multiple)


def weight_only(weights: Format) -> Operands:
    """16-bit rows, and weights that become 16-bit numbers on the way."""
    return Operands(DENSE, weights, DENSE, f"{weights.name}w_")


OPERANDS = {
    "16bit": Operands(DENSE, DENSE, DENSE, ""),
    "mxfp8": Operands(MXFP8_WIDE, MXFP8_FOLDED, MXFP8_WIDE, "mxfp8_"),
    "mxfp8_weight_only": weight_only(MXFP8),
    "mxfp8_exact": Operands(MXFP8_VALUES, MXFP8, MXFP8_VALUES, "mxfp8exact_"),
    "mxfp4_weight_only": weight_only(MXFP4),
    "nvfp4_weight_only": weight_only(NVFP4),
    "fp8_block": Operands(FP8_ROWS, FP8_BLOCK, FP8_ROWS, "fp8block_"),
    "fp8_block_weight_only": weight_only(FP8_BLOCK),
}
"""By a spec's `operands`. Results, biases and preactivations are of the spec's dtype, whatever is multiplied."""
DECODED = tuple(name for name, operands in OPERANDS.items() if operands.decodes)


def next_operands(name: str) -> str:
    """Those of a GEMM with the same weights that reads the activation which one with these makes."""
    made = OPERANDS[name]
    reads = (other for other, row in OPERANDS.items() if (row.x, row.w) == (made.act.stored, made.w))
    return next(reads)
