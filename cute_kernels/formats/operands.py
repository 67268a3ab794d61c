"""Operands of GEMMs: formats of rows and weights that kernels multiply together."""

from __future__ import annotations

import dataclasses

from .format import DENSE, Format
from .fp8_block import FP8_BLOCK, FP8_ROWS
from .mxfp4 import MXFP4, MXFP4_ROWS
from .mxfp8 import MXFP8, MXFP8_FOLDED, MXFP8_VALUES, MXFP8_WIDE
from .nvfp4 import NVFP4


@dataclasses.dataclass(frozen=True)
class Operands:
    """Formats of a GEMM's rows (x), of its weights (w), and of the activation that it stores (act). prefix: their
    prefix in names of functions."""

    x: Format
    w: Format
    act: Format
    prefix: str

    @property
    def decodes(self) -> bool:
        """True if kernels decode weights to 16 bits, in registers, so that weights are the rows of a swapped MMA."""
        return not self.x.scale and self.w.element != self.x.element

    @property
    def decodes_to_fp8(self) -> bool:
        """True if kernels decode weights to x's elements in FP8, in shared memory."""
        return self.has_scaled_rows and self.w.element != self.x.element

    @property
    def has_data_gradients(self) -> bool:
        """True if gradients of rows pass through decoded weights: kernels also contract over these weights' rows."""
        return self.decodes and self.x.holds is None

    @property
    def has_scaled_rows(self) -> bool:
        """True if x is multiplied in FP8 and has scales."""
        return bool(self.x.scale)

    @property
    def multiplies_blocks(self) -> bool:
        """True if tensor cores apply the scales of both operands' blocks."""
        return self.x == self.w == MXFP8

    @property
    def trains(self) -> bool:
        """True if training kernels take these operands: 16-bit ones, and weights that are quantised after each step."""
        return self.w.element == self.x.element and self.w.rows == 1

    @property
    def multiple(self) -> int:
        """Widths of matrices are multiples of this number of elements."""
        return max(self.x.multiple, self.w.multiple)


def weight_only(weights: Format) -> Operands:
    """Make operands of 16-bit rows and weights that kernels decode to 16-bit numbers."""
    return Operands(DENSE, weights, DENSE, f"{weights.name}w_")


OPERANDS = {
    "16bit": Operands(DENSE, DENSE, DENSE, ""),
    "mxfp8": Operands(MXFP8_WIDE, MXFP8_FOLDED, MXFP8_WIDE, "mxfp8_"),
    "mxfp8_blocks": Operands(MXFP8, MXFP8, MXFP8, "mxfp8blocks_"),
    "mxfp8_weight_only": weight_only(MXFP8),
    "mxfp8_exact": Operands(MXFP8_VALUES, MXFP8, MXFP8_VALUES, "mxfp8exact_"),
    "mxfp4_weight_only": weight_only(MXFP4),
    "nvfp4_weight_only": weight_only(NVFP4),
    "mxfp4": Operands(MXFP8_WIDE, MXFP4_ROWS, MXFP8_WIDE, "mxfp4_"),
    "fp8_block": Operands(FP8_ROWS, FP8_BLOCK, FP8_ROWS, "fp8block_"),
    "fp8_block_weight_only": weight_only(FP8_BLOCK),
}
"""Operands by a spec's `operands`. Results, biases and preactivations have the spec's dtype with all operands."""
DECODED = tuple(name for name, operands in OPERANDS.items() if operands.decodes)


def next_operands(name: str) -> str:
    """Return the name of the operands of FC2, given those of FC1: FC2 reads the activation that FC1 makes."""
    made = OPERANDS[name]
    reads = (other for other, row in OPERANDS.items() if (row.x, row.w) == (made.act.stored, made.w))
    return next(reads)
