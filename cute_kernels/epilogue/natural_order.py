"""Epilogues of a gated FC1 of transposed weights, whose tile has the columns of a and u in memory's order.

Loads copy runs of 16 bytes of a row, so they cannot separate columns of a and u that alternate. But a thread's
accumulators (fragments.py) hold both columns of each of its outputs: registers 2 i and 2 i + 1 if a and u are
neighbours; registers 16 apart if 32 columns of a come before 32 of u. Biases and preactivations are in the order of the
columns, too.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device.select import select
from ..specs import BLOCK_ROWS, GroupedGluSpec
from .activation import ActivationEpilogue
from .fragments import chunk_of
from .sizes import ROWS, THREADS
from .slots import narrowed

BLOCK_REGS = ROWS * BLOCK_ROWS // THREADS
QUAD = 4
# Selectors of `prmt`, which numbers the bytes of its first word 0 to 3 and of its second 4 to 7. They take the lower
# (LOWER) or the upper half of both words; the first word's half goes below, in the second selector above.
LOWER, UPPER = (0x5410, 0x1054), (0x7632, 0x3276)


class BlocksEpilogue(ActivationEpilogue):
    """Epilogue for layout "interleaved32". A thread has a and u of its outputs, and the outputs are in the order of
    accumulators."""

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec):
        super().__init__(dtype, spec, in_order=True)

    def arguments_of(self, acc: cute.Tensor, chunk: int, cols: int) -> tuple[cute.Tensor, ...]:
        both = chunk_of(acc, chunk, 2 * cols)
        blocks = cute.make_layout((BLOCK_REGS, cols // BLOCK_ROWS), stride=(1, 2 * BLOCK_REGS))
        return tuple(cute.make_tensor(both.iterator + part * BLOCK_REGS, blocks) for part in range(2))


class NeighboursEpilogue(ActivationEpilogue):
    """Epilogue for layout "interleaved". A thread has one of each 4 neighbouring outputs of a row, so the four lanes of
    a quad exchange outputs, in 16 bits."""

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec):
        super().__init__(dtype, spec, in_order=True)

    def arguments_of(self, acc: cute.Tensor, chunk: int, cols: int) -> tuple[cute.Tensor, ...]:
        both = chunk_of(acc, chunk, 2 * cols)
        pairs = cute.make_layout(cute.size(both) // 2, stride=2)
        return tuple(cute.make_tensor(both.iterator + part, pairs) for part in range(2))

    def row_of_output(self, i: int) -> int:
        return i % 2

    def ordered(self, outputs: cute.Tensor, lane: Int32) -> cute.Tensor:
        return in_accumulators_order(narrowed(outputs, self.dtype), lane)


@cute.jit
def in_accumulators_order(outputs: cute.Tensor, lane: Int32) -> cute.Tensor:
    """Return a quad's 16-bit outputs in the order of accumulators; its four lanes exchange them.

    A thread's output 2 j + row, where row is 0 or 1, is in column 4 j + lane % 4; a word holds both rows of a column.
    For each 8 columns a thread needs the two columns from 2 (lane % 4) on, and has one of the first four and one of the
    last four. In two rounds each lane of a quad sends both of its words: lanes 0, 1, 2, 3 receive from lanes 0, 2, 1,
    3, then from lanes 1, 3, 0, 2. So 64 columns take 16 shuffles, 16 `prmt` and 16 selects a thread.
    """
    result = cute.make_rmem_tensor(cute.size(outputs), outputs.element_type)
    words, wanted = cute.recast_tensor(outputs, Int32), cute.recast_tensor(result, Int32)
    is_odd, is_upper = lane % 2 == 1, lane % QUAD >= QUAD // 2
    source = lane // QUAD * QUAD + lane % 2 * 2 + lane % QUAD // 2
    lower, upper = (select(is_upper, Int32(second), Int32(first)) for first, second in (LOWER, UPPER))
    for j in cutlass.range_constexpr(cute.size(words) // 2):
        first, last = words[2 * j], words[2 * j + 1]
        one = cute.arch.shuffle_sync(select(is_odd, last, first), source)
        other = cute.arch.shuffle_sync(select(is_odd, first, last), source ^ 1)
        wanted[2 * j] = Int32(cute.arch.prmt(one, other, lower))
        wanted[2 * j + 1] = Int32(cute.arch.prmt(one, other, upper))
    return result


NATURAL_EPILOGUES: dict[str, type[ActivationEpilogue]] = {
    "interleaved": NeighboursEpilogue,
    "interleaved32": BlocksEpilogue,
}
"""Epilogues for transposed weights, by gate layout. "concat" needs none of them: its a and u are loaded as two boxes of
columns."""
