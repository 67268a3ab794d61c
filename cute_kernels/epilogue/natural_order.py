"""Epilogues of a gated FC1 with transposed weights. In its tiles, the columns of a (the activated half) and u (the
linear half) alternate as they do in memory.

The columns of a and u are columns of the transposed weight. The weight's loads copy runs of 16 bytes, so they cannot
separate columns that alternate. They need not: a thread's accumulators (fragments.py) hold both a and u of each of its
outputs.

    layout         columns in memory                     registers of a and u
    interleaved    a and u alternate                     neighbours, 2 i and 2 i + 1
    interleaved32  32 columns of a, then 32 of u, ...    16 apart

Biases and preactivations lie in memory in the same order, so they are not reordered.
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
# Selectors of `prmt`, which numbers the bytes of its first word 0 to 3 and of its second 4 to 7. The result is made of
# the lower (LOWER) or the upper (UPPER) halves of both words. With the first selector of a pair the first word's half
# becomes the lower half of the result, with the second selector its upper half.
LOWER, UPPER = (0x5410, 0x1054), (0x7632, 0x3276)


class BlocksEpilogue(ActivationEpilogue):
    """Epilogue for layout "interleaved32". A thread's outputs need no reordering: they already have the order of
    accumulators."""

    def __init__(self, dtype: type[cutlass.Numeric], spec: GroupedGluSpec):
        super().__init__(dtype, spec, in_order=True)

    def arguments_of(self, acc: cute.Tensor, chunk: int, cols: int) -> tuple[cute.Tensor, ...]:
        both = chunk_of(acc, chunk, 2 * cols)
        blocks = cute.make_layout((BLOCK_REGS, cols // BLOCK_ROWS), stride=(1, 2 * BLOCK_REGS))
        return tuple(cute.make_tensor(both.iterator + part * BLOCK_REGS, blocks) for part in range(2))


class NeighboursEpilogue(ActivationEpilogue):
    """Epilogue for layout "interleaved". Of each 4 neighbouring outputs of a row, a thread has one, but in the order of
    accumulators it needs two neighbours. So the four lanes of a quad (equal lane / 4) exchange outputs, in 16 bits."""

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
    """Return the thread's 16-bit outputs of a chunk in the order of accumulators (fragments.py). The four lanes of a
    quad exchange outputs to get there.

    Let q = lane % 4. Before the exchange, output 2 j + r of a thread is in column 4 j + q of its row r (0 or 1), so
    word j holds column 4 j + q of both rows. After it, a thread has columns 2 q and 2 q + 1 of each 8 columns, a word
    for each row. The exchange takes two rounds. In each round, a lane sends one of its two words of the 8 columns:

        q    has columns    needs columns    round 1, from lane    round 2, from lane
        0    0, 4           0, 1             column 0, lane 0      column 1, lane 1
        1    1, 5           2, 3             column 2, lane 2      column 3, lane 3
        2    2, 6           4, 5             column 5, lane 1      column 4, lane 0
        3    3, 7           6, 7             column 7, lane 3      column 6, lane 2

    `prmt` then joins the halves of the two received words by rows. 64 columns take 16 shuffles, 16 `prmt` and 16
    selects a thread.
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
"""Epilogues for transposed weights, by gate layout. Layout "concat" has no entry: its columns of a and of u are loaded
as two boxes, so it uses ActivationEpilogue."""
