"""Operands of GEMMs: the pairs of formats, of x and of weights, that kernels multiply."""

from __future__ import annotations

import dataclasses

from .format import DENSE, Format
from .fp8_block import FP8_BLOCK, FP8_ROWS
from .mxfp4 import MXFP4, MXFP4_ROWS
from .mxfp8 import MXFP8, MXFP8_FOLDED, MXFP8_VALUES, MXFP8_WIDE
from .nvfp4 import NVFP4


@dataclasses.dataclass(frozen=True)
class Operands:
    """The formats of a GEMM's operands and of the activation that it stores.

    Attributes:
        x: the format of the rows of x.
        w: the format of the weights.
        act: the format of the activation that a fused FC1 stores.
        prefix: the prefix of these operands in names of functions.
    """

    x: Format
    w: Format
    act: Format
    prefix: str

    @property
    def decodes(self) -> bool:
        """True if x has 16 bits and kernels decode weights to 16 bits in registers. Then, on Hopper, the MMA is swapped
        (y^T = w x^T), so that weights are its rows."""
        return not self.x.scale and self.w.element != self.x.element

    @property
    def decodes_to_fp8(self) -> bool:
        """True if x is in FP8 and kernels also decode weights to FP8, in shared memory."""
        return self.has_scaled_rows and self.w.element != self.x.element

    @property
    def has_data_gradients(self) -> bool:
        """True if there is a kernel for the gradient of x. This kernel decodes the weights and contracts over their
        rows."""
        return self.decodes and self.x.holds is None

    @property
    def has_scaled_rows(self) -> bool:
        """True if x is multiplied in FP8 and has scales."""
        return bool(self.x.scale)

    @property
    def multiplies_blocks(self) -> bool:
        """True if both operands have block scales that the tensor cores themselves apply."""
        return self.x == self.w == MXFP8

    @property
    def trains(self) -> bool:
        """True if training kernels take these operands. They take 16-bit operands, and formats whose weights are
        quantised again after each step of the optimizer."""
        return self.w.element == self.x.element and self.w.rows == 1

    @property
    def multiple(self) -> int:
        """Number that must divide the widths of matrices, in elements."""
        return max(self.x.multiple, self.w.multiple)


def weight_only(weights: Format) -> Operands:
    """Make the operands for 16-bit x and weights in a format that kernels decode to 16 bits."""
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
"""All operands, by the name that a spec's `operands` has. Results, biases and preactivations always have the spec's
dtype."""
DECODED = tuple(name for name, operands in OPERANDS.items() if operands.decodes)
"""Names of the operands whose weights kernels decode to 16 bits."""


def next_operands(name: str) -> str:
    """Return the name of the operands of FC2, if FC1 has the operands `name`. FC2's x has the format of the activation
    that FC1 stores, and FC2's weights have the format of FC1's weights."""
    made = OPERANDS[name]
    reads = (other for other, row in OPERANDS.items() if (row.x, row.w) == (made.act.stored, made.w))
    return next(reads)
