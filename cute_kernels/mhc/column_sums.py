"""Sums of a matrix's columns in a fixed order. Kernels use them to turn partial sums of many CTAs (one row for each
CTA) into one gradient."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.vectors import store_param
from .token_sums import TokenSums

# A CTA takes 32 columns, 128 bytes of a row, and its warps every 16th row each.
WARPS = 16
COLUMNS = 32
THREADS = WARPS * COLUMNS
SMEM_BYTES = TokenSums.num_bytes(COLUMNS, THREADS)


class ColumnSums(Invariant):
    """Kernel for out[c] = sum over r of partials[r, c], in a fixed order.

    Args:
        partials: the address of float32 [rows, columns].
        code: the dtype of out (`dtypes.PARAM_FORMS`).
    """

    def __init__(self, name: str):
        self.name = name

    @cute.jit
    def launch(self, partials: Int64, rows: Int32, columns: Int32, out: Int64, code: Int32, stream: cuda.CUstream):
        name_kernel(self.kernel, self.name)
        self.kernel(partials, rows, columns, out, code).launch(
            grid=(cute.ceil_div(columns, COLUMNS), 1, 1),
            block=(THREADS, 1, 1),
            smem=SMEM_BYTES,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, partials: Int64, rows: Int32, columns: Int32, out: Int64, code: Int32):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % COLUMNS, thread // COLUMNS
        column = block * COLUMNS + lane
        total = Float32(0.0)
        if column < columns:
            values = vector_at(Float32, partials + Int64(column) * 4)
            for row in cutlass.range(warp, rows, WARPS, unroll=8):
                total += values[Int64(row) * columns]
        sums = TokenSums(COLUMNS, THREADS)
        sums.smem[lane, warp, 0] = total
        cute.arch.sync_threads()
        if (warp == 0) & (column < columns):
            store_param(out, code, Int64(column), sums.total(lane, 0))
