"""The last kernel of a backward. It adds the tiles' partial sums of the row scale's gradient. It also zeroes, in dx and
in that gradient, the rows that belong to no expert."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.select import select
from ..device.target import early, wait_for_earlier
from ..device.warps import WARP
from ..schedule.groups import Groups, last_row_end
from ..specs import BackwardCleanupSpec
from ..tracing import DTYPES, Traced, traced

THREADS = 256
VECTOR = 8  # 16-bit elements of one 16-byte store
LOADS = 16  # partial sums that a thread loads at once: a row of Mixtral-8x7B has 112


class RowSums(NamedTuple):
    """The gradient of the row scale: for each row, a sum of partial sums.

    Attributes:
        result: the address of float32 [T], the sums to write; 0: not wanted.
        parts: the address of float32 [num_parts, T], the partial sums of each tile of columns.
        num_parts: number of partial sums of a row.
    """

    result: Int64
    parts: Int64
    num_parts: Int32


class Rows(NamedTuple):
    """A 16-bit matrix (dx) whose rows after the last group are zeroed.

    Attributes:
        address: the address of the matrix.
        columns: number of columns; 0: no matrix is given.
        pitch: elements from row to row.
    """

    address: Int64
    columns: Int32
    pitch: Int64


class FinishBackward(Invariant):
    """Kernel that adds each row's partial sums of the row scale's gradient, in a fixed order. For rows after the last
    group (rows that belong to no expert), it zeroes these sums and the rows of a 16-bit matrix, dx.

    It follows the kernels that make the partial sums and the matrix, and starts while they drain. That is safe for the
    zeros, since those kernels write none of the memory that this kernel writes. Zeros are written first, since the
    partial sums are complete only when those kernels have ended.
    """

    def __init__(self, name: str, dtype: type[cutlass.Numeric]):
        self.name = name
        self.dtype = dtype

    @cute.jit
    def launch(self, matrix: Rows, sums: RowSums, groups: Groups, num_sms: Int32, stream: cuda.CUstream):
        name_kernel(self.kernel, self.name)
        self.kernel(matrix, sums, groups).launch(
            grid=(num_sms, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=early(True)
        )

    @cute.kernel
    def kernel(self, matrix: Rows, sums: RowSums, groups: Groups):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        end = last_row_end(groups)
        if matrix.columns > 0:
            self._zero_rows(matrix, end + block * (THREADS // WARP) + thread // WARP, groups.rows, blocks)
        first, step = block * THREADS + thread, blocks * THREADS
        if sums.result != 0:
            for row in cutlass.range(end + first, groups.rows, step):
                vector_at(Float32, sums.result)[row] = Float32(0.0)
        # Without this wait, the next kernel in the stream could not rely on all kernels before this one having ended.
        wait_for_earlier()
        if sums.result != 0:
            for row in cutlass.range(first, end, step):
                self._add(sums, row, groups.rows)

    @cute.jit
    def _zero_rows(self, matrix: Rows, first: Int32, num_rows: Int32, blocks: Int32):
        """Zero this warp's share of the matrix's rows: `first`, first + number of warps in the grid, ..., below
        `num_rows`.

        blocks: number of CTAs of the grid.
        """
        zeros = cute.make_rmem_tensor(VECTOR, self.dtype)
        zeros.fill(0.0)
        for row in cutlass.range(first, num_rows, blocks * (THREADS // WARP)):
            line = vector_at(self.dtype, matrix.address + Int64(row) * matrix.pitch * (self.dtype.width // 8))
            for i in cutlass.range(cute.arch.lane_idx(), matrix.columns // VECTOR, WARP):
                at = (line.iterator + i * VECTOR).align(VECTOR * self.dtype.width // 8)
                cute.make_tensor(at, cute.make_layout(VECTOR)).store(zeros.load())

    @cute.jit
    def _add(self, sums: RowSums, row: Int32, num_rows: Int32):
        parts = vector_at(Float32, sums.parts)
        total = Float32(0.0)
        for part in cutlass.range(sums.num_parts, unroll=LOADS):
            total += parts[part * num_rows + row]
        vector_at(Float32, sums.result)[row] = total


class Finish:
    """Host function that launches `FinishBackward`.

    Args:
        act: a tensor [T, I], from which only its sizes are used.
        dx: the address of 16-bit rows of dx_columns elements, dx_pitch elements apart, of which rows after the last
            group are zeroed; 0: not given.
        dx_tokens: not 0: nothing is zeroed in dx, since only rows of groups are read from it later.
        d_scale: the address of float32 [T], the gradient of the row scale to write; 0: not wanted.
        partials: the address of its partial sums, float32 [ceil(I / part_columns), T].
        groups, group_form, num_groups, tickets: the group sizes (`schedule.groups.Groups`).
    """

    def __init__(self, spec: BackwardCleanupSpec):
        self.finish = FinishBackward(spec.name, DTYPES[spec.dtype])

    @cute.jit
    def __call__(
        self, act: cute.Tensor, dx: Int64, dx_tokens: Int64, dx_columns: Int32, dx_pitch: Int64, d_scale: Int64,
        partials: Int64, part_columns: Int32, groups: Int64, group_form: Int32, num_groups: Int32, tickets: Int64,
        num_sms: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            sums = RowSums(d_scale, partials, cute.ceil_div(act.shape[1], part_columns))
            sizes = Groups(groups, group_form, num_groups, tickets, act.shape[0])
            columns = select(dx_tokens == 0, dx_columns, Int32(0))
            self.finish.launch(Rows(dx, columns, dx_pitch), sums, sizes, num_sms, stream)


def trace(spec: BackwardCleanupSpec) -> Traced:
    return traced(spec, Finish(spec))
