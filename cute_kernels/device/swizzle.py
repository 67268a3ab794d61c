"""The swizzle of shared memory. It puts 8 rows of an operand, or of an epilogue's slot, into different banks."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

# The widest swizzle: 4 bytes of each of 32 banks.
SWIZZLE_BYTES = 128


def swizzled_layout(dtype: type[cutlass.Numeric], shape: tuple[int, ...]) -> cute.ComposedLayout:
    """Make a swizzled shared-memory layout of shape (rows, columns, ...).

    For rows of 32 or 64 bytes, the swizzle is as wide as a row. Longer rows are split into pieces of 128 bytes, and the
    swizzle is as wide as a piece.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    narrow = {SWIZZLE_BYTES // 4: kinds.K_SW32, SWIZZLE_BYTES // 2: kinds.K_SW64}
    kind = narrow.get(shape[1] * dtype.width // 8, kinds.K_SW128)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=tuple(range(len(shape))))


def swizzle_of(row: Int32, row_bytes: int) -> Int32:
    """Return the number that is XORed with the index of each 16-byte chunk in a row.

    row_bytes: 32, 64 or 128; also the width of the swizzle.
    """
    return row % 8 // (SWIZZLE_BYTES // row_bytes)
