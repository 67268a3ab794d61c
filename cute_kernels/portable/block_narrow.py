"""E4M3 weights with a float32 scale for each block of 128 x 128, decoded between shared memory and mma.sync.

Elements are decoded as in narrow.py, but here a scale need not be a power of two. So a pair of elements becomes two
float32 numbers, which are multiplied by the block's scale and rounded to bfloat16. The result equals the weight
dequantised to bfloat16. Scaling a pair takes 5 instructions; with powers of two it takes 1. A stage holds 64 elements
of a weight row, half a block, so each weight row has one scale in a stage.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..formats import Format
from ..memory.block_scales import BLOCK, SCALE_BYTES, block_grid, grid_row
from ..schedule.work import WorkTile
from .mainloop import DEPTH
from .narrow import Narrow, NarrowE4m3, NarrowE4m3ByFours, NarrowLines
from .operands import Lines
from .sources import Weights


class PendingScales(Invariant):
    """Registers for the scales that a thread is loading: the bits of one float32 number for each k-tile of a run.

    A run is the k-tiles between two barriers (mainloop.py).
    """

    def __init__(self, run: int):
        self.words = cute.make_rmem_tensor(run, Int32)
        self.words.fill(0)

    def byte(self, place: int, block: int) -> Int32:
        """Return the scale of k-tile number `place` of the run, as the bits of a float32 number.

        block: always 0, since a k-tile lies in one scale block.
        """
        return self.words[place]

    @cute.jit
    def start_loads(self, sources: NarrowLines, place: cutlass.Constexpr[int], tile: Int32):
        """Start to load the scale of one k-tile into a register.

        Past the last block, use scale 0, since a stale NaN scale would turn padding zeros into NaN.

        Args:
            sources: the address of the scales of the thread's weight row, and their number.
            place: index of the k-tile in its run.
            tile: index of the k-tile in the contraction.
        """
        number = tile // (BLOCK // DEPTH)
        self.words[place] = Int32(0)
        if number < sources.blocks:
            self.words[place] = vector_at(Int32, sources.scales)[number]


def product_in_float32(pair: Int32, scale: Int32) -> Int32:
    """Return two bfloat16 numbers times a float32 number, rounded to bfloat16, in a 32-bit word.

    Args:
        pair: the two numbers in a 32-bit word.
        scale: the bits of the float32 number.
    """
    ptx = """{
    .reg .b32 low, high; .reg .f32 first, second, scale;
    shl.b32 low, {$r0}, 16;
    and.b32 high, {$r0}, 0xFFFF0000;
    mov.b32 first, low;
    mov.b32 second, high;
    mov.b32 scale, {$r1};
    mul.rn.f32 first, first, scale;
    mul.rn.f32 second, second, scale;
    cvt.rn.bf16x2.f32 {$w0}, second, first;
    }"""
    return Int32(cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[pair, scale]))


class BlockScaled(Narrow):
    """Mixin for an operand of weights with float32 block scales.

    The multipliers of `Narrow`, in registers and in shared memory, are here the bits of float32 scales instead of
    bfloat16 numbers.
    """

    def make_pending(self, weights: Format) -> PendingScales:
        return PendingScales(self.run)

    def _scaled(self, pair: Int32, multiplier: Int32) -> Int32:
        return product_in_float32(pair, multiplier)


class BlockE4m3(BlockScaled, NarrowE4m3):
    """E4M3 weights with float32 block scales, for tiles of many rows of x."""

    pass


class BlockE4m3ByFours(BlockScaled, NarrowE4m3ByFours):
    """E4M3 weights with float32 block scales, for tiles of few rows of x."""

    pass


@cute.jit
def block_narrow_sources(
    lines: Lines, weights: Weights, w_scale: Int64, depth: Int32, work: WorkTile,
    weight_format: cutlass.Constexpr[Format], parts: cutlass.Constexpr[int], part_n: cutlass.Constexpr[int],
    layout: cutlass.Constexpr[str],
) -> NarrowLines:  # fmt: skip
    """Return the addresses from which a thread copies weights and loads float32 block scales.

    Threads past an expert's last weight row read the scales of the last weight row again.

    Args:
        lines: the addresses of the thread's weight rows.
        weights: the experts' weight rows.
        w_scale: the address of the scales (memory/block_scales.py).
        depth: elements of a weight row.
        work: the output tile.
        weight_format: the format of the weights.
        parts, part_n: number of parts of the tile's columns (2 with a gate: a and u, else 1), and columns of each part.
        layout: the order of weight rows, a key of specs.LAYOUT_FORMS.
    """
    thread, _, _ = cute.arch.thread_idx()
    gate, half = weights.gate, weights.count
    grid = block_grid(w_scale, layout, gate, parts, parts * half, weight_format.num_scales(depth))
    column = cutlass.min(work.n_tile * part_n + thread % part_n, half - 1)
    row = grid_row(grid, layout, gate, column, thread // part_n, half)
    scales = grid.expert(work.expert) + row * (grid.blocks * SCALE_BYTES)
    return NarrowLines(lines.parts, lines.distances, scales, grid.blocks)
