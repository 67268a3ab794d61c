"""The swizzle of shared memory, by which 8 rows of an operand or a slot lie in different banks."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

# The widest swizzle: 4 bytes of each of 32 banks.
SWIZZLE_BYTES = 128


def swizzled_layout(dtype: type[cutlass.Numeric], shape: tuple[int, ...]) -> cute.ComposedLayout:
    """Make a layout (row, column, *more). The swizzle is as wide as a row of 32 or 64 bytes; longer rows are split into
    parts of 128 bytes."""
    kinds = warpgroup.SmemLayoutAtomKind
    narrow = {SWIZZLE_BYTES // 4: kinds.K_SW32, SWIZZLE_BYTES // 2: kinds.K_SW64}
    kind = narrow.get(shape[1] * dtype.width // 8, kinds.K_SW128)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=tuple(range(len(shape))))


def swizzle_of(row: Int32, row_bytes: int) -> Int32:
    """Return the number by which 16-byte chunk numbers are XORed, in a row of 32, 64 or 128 bytes with a swizzle of the
    same width."""
    return row % 8 // (SWIZZLE_BYTES // row_bytes)
