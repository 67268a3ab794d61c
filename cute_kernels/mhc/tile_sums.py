"""The last step of the projection's backward for 16-bit streams: makes d_weight from partial sums. d_weight [K, n C] is
the gradient of the projection's weight, for n residual streams of C columns and K = n^2 + 2n outputs.

The tokens are divided into parts (ranges). A warp of the main kernel holds its sums for d_weight over one part in
registers. These sums are `count` fragments of 4 registers a lane, in the order in which an MMA leaves them. The
workspace has them in the same order, 16 bytes a thread; in the order of d_weight, a warp would store 32 bytes at a
time. A second kernel has one CTA for each pair of a block of columns and a fragment. It adds the sums of all parts in
order, so that d_weight has the same bits every time.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.target import early, wait_for_earlier
from ..device.vectors import run_at, store_param
from ..device.warps import WARP
from .shapes import SPREAD_WARPS, outputs, spread_blocks
from .warp_columns import VECTOR, WarpColumns

THREADS = SPREAD_WARPS * WARP
FRAGMENT = 4
PARTS = 4  # parts that are read at a time


class TileSums(Invariant):
    """The kernel that makes d_weight in the backward of `project` (`launch`), and the device code by which the kernel
    before it, `TileGradients`, stores its sums (`leave`).

    `TileGradients` has a CTA for each pair of a block of columns and a part of the tokens. A block is the columns of
    SPREAD_WARPS warps; `WarpColumns` says which columns a warp has.
    """

    def __init__(self, name: str, n: int, columns: WarpColumns):
        self.name = name
        self.n = n
        self.columns = columns
        self.pairs = columns.vectors // 2
        self.count = outputs(n) // 8 * self.pairs

    @cute.jit
    def leave(self, partials: Int64, part: Int32, block: Int32, blocks: Int32, sums: cute.Tensor):
        """Store this thread's sums for d_weight in the workspace `partials`.

        Args:
            part: the CTA's part of the tokens.
            block: the CTA's block of columns.
            blocks: number of blocks of columns.
            sums: [FRAGMENT, K / 8, pairs of vectors], K = n^2 + 2n.
        """
        for i in cutlass.range_constexpr(self.count):
            mine = sums[None, i // self.pairs, i % self.pairs]
            self._fragment(partials, part * blocks + block, i).store(mine.load())

    def _fragment(self, partials: Int64, row: Int32, index: Int32) -> cute.Tensor:
        """Return a view of the workspace: the thread's 4 registers of fragment `index` of a CTA.

        Args:
            partials: the address of all CTAs' sums.
            row: the CTA's index, part * blocks + block.
        """
        thread, _, _ = cute.arch.thread_idx()
        return run_at(Float32, partials, (Int64(row * self.count + index) * THREADS + thread) * FRAGMENT, FRAGMENT)

    @cute.jit
    def launch(self, partials: Int64, parts: Int32, width: Int32, out: Int64, code: Int32, stream: cuda.CUstream):
        """Launch the second kernel.

        Args:
            partials: the address of the sums that `leave` stored.
            parts: number of parts of the tokens.
            out, code: the address of d_weight and its dtype.
            width: C.
        """
        name_kernel(self.kernel, self.name)
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
        warp = block * SPREAD_WARPS + thread // WARP
        wait_for_earlier()
        if warp < self.columns.warps(width):
            total = cute.make_rmem_tensor(FRAGMENT, Float32)
            total.fill(0.0)
            for part in cutlass.range(parts, unroll=PARTS):
                total.store(total.load() + self._fragment(partials, part * blocks + block, index).load())
            self._store(out, code, warp, width, index, total)

    @cute.jit
    def _store(self, out: Int64, code: Int32, warp: Int32, width: Int32, index: Int32, total: cute.Tensor):
        """Store a fragment's sums in d_weight (`out`). There, 8 lanes have 8 neighbouring elements of a row.

        Args:
            code: the dtype of d_weight.
            warp: number of the warp of `TileGradients` that has these columns.
            width: C.
            index: the fragment's number.
            total: the fragment's sums over all parts.
        """
        lane, place = cute.arch.lane_idx(), self.columns.place(warp, width)
        for k in cutlass.range_constexpr(FRAGMENT):
            vector = index % self.pairs * 2 + k // 2
            if vector < place.inside:
                row = Int64(index // self.pairs * 8 + lane % 4 * 2 + k % 2)
                column = place.at + vector * VECTOR + lane // 4
                store_param(out, code, row * (width * self.n) + column, total[k])
