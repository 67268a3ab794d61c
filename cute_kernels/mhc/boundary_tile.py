"""Layout of a pipeline stage in shared memory, in the backward of the boundary.

The boundary (boundary.py) is the step between two sublayers: from n residual streams [T, n, D] and a sublayer's output
y [T, D] it makes the updated streams, and from their weighted sum, the mix [T, D], the next sublayer's input x [T, D].

A stage holds a token tile: 16 tokens, at the CTA's columns. It has these arrays of [16 tokens, columns], in this order
(`slice_tile.py`): n streams, n gradients of the updated streams, y, and d_x (the gradient of x). After the arrays comes
the tile's block: dp, the gradient of the projection, and a record of coefficients for each token
(`boundary_backward_shapes.block_bytes`).

The kernel overwrites two kinds of arrays in place. Each incoming gradient of an updated stream becomes d', the whole
gradient (formula at the top of boundary_backward.py), and d_x becomes the gradient of the mix.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .boundary_backward_shapes import block_bytes, coefficient_floats, dp_bytes
from .boundary_shapes import SliceCta
from .slice_tile import SliceTile


class BoundaryTile(SliceTile):
    """Layout of a stage of the boundary's backward (both at the top of this file): 2n + 2 arrays of 16-bit numbers,
    each [16 tokens, the CTA's columns], then the token tile's block.

    The block holds dp (the gradient of the projection p of the updated streams) and a record for each token: the
    token's coefficients as float32 numbers (`record`).

    Attributes:
        streams: index of the first of the n arrays of streams.
        gradients: index of the first of the n arrays of gradients of the updated streams.
        y, d_x: index of y's array and of d_x's array.
    """

    def __init__(self, dtype: type[cutlass.Numeric], n: int, cta: SliceCta):
        self.block_words = block_bytes(n) // 4
        super().__init__(dtype, n, cta, 2 * n + 2, self.block_words)
        self.streams, self.gradients, self.y, self.d_x = 0, n, 2 * n, 2 * n + 1
        self.pitch = coefficient_floats(n)
        self.records = 2 * dp_bytes(n) // 4  # where a block's records begin

    def record(self, stage: cute.Pointer, row: Int32) -> list:
        """Return a token's record as lists of 4 float32 numbers.

        The lists are: for each updated stream j, its coefficients comb_ij, i = 0 .. n - 1; post; pre; and r, factor, f
        (`boundary_tokens.py`) and a zero.

        row: the token's number in the tile.
        """
        start = stage + (self.arrays * self.array_words + self.records) + row * self.pitch
        return self.vectors_at(start, self.pitch // 4)
