"""d_weight from the sums that warps of the projection's backward hold in registers, each of a part of the tokens.

A warp's sums are `count` fragments, 4 registers a lane, as an MMA leaves them. In memory they lie as in registers, 16
bytes a thread: as rows of d_weight they would be stored 32 bytes at a time. Another kernel, a CTA for each fragment of
a CTA's warps, adds the parts in order, so that d_weight has the same bits every time.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.invariant import Invariant
from ..device.target import early, wait_for_earlier
from ..device.vectors import run_at, store_param
from .shapes import SPREAD_WARPS, outputs, spread_blocks
from .warp_columns import VECTOR, WarpColumns

LANES = 32
THREADS = SPREAD_WARPS * LANES
FRAGMENT = 4
PARTS = 4  # read at a time


class TileSums(Invariant):
    """d_weight[k, c] = sum over parts, in any of PARAM_FORMS. `leave` is for the kernel that makes the sums, whose CTAs
    (block, part) each have `SPREAD_WARPS` warps' columns.
    """

    def __init__(self, name: str, n: int, columns: WarpColumns):
        self.name = name
        self.n = n
        self.columns = columns
        self.pairs = columns.vectors // 2
        self.count = outputs(n) // 8 * self.pairs

    @cute.jit
    def leave(self, partials: Int64, part: Int32, block: Int32, blocks: Int32, sums: cute.Tensor):
        """A thread's sums (FRAGMENT, outputs / 8, pairs of vectors)."""
        for i in cutlass.range_constexpr(self.count):
            mine = sums[None, i // self.pairs, i % self.pairs]
            self._fragment(partials, part * blocks + block, i).store(mine.load())

    def _fragment(self, partials: Int64, row: Int32, index: Int32) -> cute.Tensor:
        """A thread's registers of a CTA's fragment. row: the CTA's number, those of a part side by side."""
        thread, _, _ = cute.arch.thread_idx()
        return run_at(Float32, partials, (Int64(row * self.count + index) * THREADS + thread) * FRAGMENT, FRAGMENT)

    @cute.jit
    def launch(self, partials: Int64, parts: Int32, width: Int32, out: Int64, code: Int32, stream: cuda.CUstream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(partials, parts, width, out, code).launch(
            grid=(spread_blocks(self.n, 2, width), self.count, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=early(True),
        )

    @cute.kernel
    def kernel(self, partials: Int64, parts: Int32, width: Int32, out: Int64, code: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, index, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = block * SPREAD_WARPS + thread // LANES
        wait_for_earlier()
        if warp < self.columns.warps(width):
            total = cute.make_rmem_tensor(FRAGMENT, Float32)
            total.fill(0.0)
            for part in cutlass.range(parts, unroll=PARTS):
                total.store(total.load() + self._fragment(partials, part * blocks + block, index).load())
            self._store(out, code, warp, width, index, total)

    @cute.jit
    def _store(self, out: Int64, code: Int32, warp: Int32, width: Int32, index: Int32, total: cute.Tensor):
        """A fragment at its place in d_weight: 8 lanes have 8 neighbours of a row."""
        lane, place = cute.arch.lane_idx(), self.columns.place(warp, width)
        for k in cutlass.range_constexpr(FRAGMENT):
            vector = index % self.pairs * 2 + k // 2
            if vector < place.inside:
                row = Int64(index // self.pairs * 8 + lane % 4 * 2 + k % 2)
                column = place.at + vector * VECTOR + lane // 4
                store_param(out, code, row * (width * self.n) + column, total[k])
