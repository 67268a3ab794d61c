"""Zeros behind the last group: the rows of a gradient that belong to no expert, and that no tile covers."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..gmem import vector_at
from ..invariant import Invariant
from . import tile_scheduler as sched

THREADS = 256
WARP = 32
VECTOR = 8  # 16-bit elements of one 16-byte store


class TailZeros(Invariant):
    """Zeroes the tail of a 16-bit matrix and of a float32 vector, neither of which any kernel before it writes there.

    It comes behind a kernel of this package and starts while that one drains.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric]):
        self.name = f"tail_of_{name}"
        self.dtype = dtype

    @cute.jit
    def launch(
        self, matrix: cute.Tensor, columns: Int32, vector: Int64, groups: sched.Groups, num_sms: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """`columns` of the matrix: 0 leaves it alone. `vector`: an address, 0 where there is none."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(matrix, columns, vector, groups).launch(
            grid=(num_sms, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, matrix: cute.Tensor, columns: Int32, vector: Int64, groups: sched.Groups):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        end = sched.last_row_end(groups)
        zeros = cute.make_rmem_tensor(VECTOR, self.dtype)
        zeros.fill(0.0)
        lane, warps = thread % WARP, THREADS // WARP
        if columns > 0:
            for row in cutlass.range(end + block * warps + thread // WARP, groups.rows, blocks * warps):
                line = matrix[row, None]
                for i in cutlass.range(lane, columns // VECTOR, WARP):
                    at = (line.iterator + i * VECTOR).align(VECTOR * self.dtype.width // 8)
                    cute.make_tensor(at, cute.make_layout(VECTOR)).store(zeros.load())
        if vector != 0:
            for row in cutlass.range(end + block * THREADS + thread, groups.rows, blocks * THREADS):
                vector_at(Float32, vector)[row] = Float32(0.0)
        # Whoever comes next in the stream may rely on the kernels before this one being done.
        cute.arch.griddepcontrol_wait()
