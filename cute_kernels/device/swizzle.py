"""The swizzle of shared memory, by which 8 rows of an operand or a slot lie in banks of their own."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

# Of all banks, 4 each: the widest swizzle.
SWIZZLE_BYTES = 128


def swizzled_layout(dtype: type[cutlass.Numeric], shape: tuple[int, ...]) -> cute.ComposedLayout:
    """(row, column, *more), its swizzle as wide as rows are, 32 bytes or 64, or else as parts of 128 bytes of them."""
    kinds = warpgroup.SmemLayoutAtomKind
    narrow = {SWIZZLE_BYTES // 4: kinds.K_SW32, SWIZZLE_BYTES // 2: kinds.K_SW64}
    kind = narrow.get(shape[1] * dtype.width // 8, kinds.K_SW128)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=tuple(range(len(shape))))


def swizzle_of(row: Int32, row_bytes: int) -> Int32:
    """What the number of a 16-byte chunk is XORed with, in a row of 32, 64 or 128 bytes with a swizzle as wide."""
    return row % 8 // (SWIZZLE_BYTES // row_bytes)
