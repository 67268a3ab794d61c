"""Copies of tokens to the rows of their experts, and sums back. row_of [N, k] has the row of token n's j-th choice of
an expert.

    permute    out[row_of[n, j]] = x[n]
    combine    out[n] = residual[n] + sum over j of y[row_of[n, j]]

Each of the two is the gradient of the other. A thread handles 16 bytes of a token and of its k rows, one row after the
other. The bytes of N k + N rows (with a residual N more) bound the time. Sums are float32, in the order of j, and
rounded once. Row -1 means no row: nothing is read or written for it. The same holds for row numbers from `bound` on,
which occur only if a routing was edited by hand.

A CTA has 128 vectors of one token. A thread must not compute token and column from its index: this 64-bit division
takes as long as two rows. With it, combine of 4096 tokens with 2 rows of 4096 reached only 0.65 of the copy rate.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.select import select
from ..device.target import early, let_next_begin, wait_for_earlier
from ..device.vectors import elements, floats, load_vector, store_vector
from ..specs import LayerSpec
from ..tracing import DTYPES, Traced, traced

THREADS = 256
VECTORS = 128  # vectors of a token in a CTA
UNROLL = 4  # rows that a thread loads at once: with 8, registers leave an SM 900 threads, too few for sums of 2 rows


class _Rows(Invariant):
    """Base of the kernels of permute and combine, which have a thread for each 16 bytes of each token."""

    def __init__(self, spec: LayerSpec):
        self.name = spec.name
        self.dtype = DTYPES[spec.dtype]

    kernel: Any

    def _launch(
        self, arguments: tuple, tokens: Int32, k: Int32, width: Int32, position: Int32, stream: cuda.CUstream
    ) -> None:  # fmt: skip
        """Launch the kernel. If the same call launched other kernels before (`position` > 0), this is a programmatic
        dependent launch, so that the kernel starts early.

        Args:
            arguments: the kernel's arguments except k and the vectors of a token.
            k: choices of a token.
            width: H, columns of a token.
        """
        vectors = width // elements(self.dtype)
        name_kernel(self.kernel, self.name)
        self.kernel(*arguments, k, vectors).launch(
            grid=(tokens, cute.ceil_div(vectors, VECTORS), 1),
            block=(VECTORS, 1, 1),
            stream=stream,
            use_pdl=early(Int32(position > 0)),
        )

    @staticmethod
    def _place() -> tuple[Int64, Int32]:
        """Return the index of this thread's token, and the index of the thread's vector (16 bytes) within the token."""
        thread, _, _ = cute.arch.thread_idx()
        token, part, _ = cute.arch.block_idx()
        return Int64(token), part * VECTORS + thread


class Combine(_Rows):
    """Kernel of combine: out[n] = residual[n] + sum over j of y[row_of[n, j]].

    residual: 0: the sum alone. bound: number of rows of y.
    """

    @cute.jit
    def __call__(
        self, y: Int64, row_of: Int64, residual: Int64, out: Int64, tokens: Int32, k: Int32, width: Int32,
        bound: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            self._launch((y, row_of, residual, out, bound), tokens, k, width, position, stream)

    @cute.kernel
    def kernel(self, y: Int64, row_of: Int64, residual: Int64, out: Int64, bound: Int32, k: Int32, vectors: Int32):
        token, column = self._place()
        index = token * vectors + column
        wait_for_earlier()
        if column < vectors:
            count = elements(self.dtype)
            sums = cute.make_rmem_tensor(count, Float32)
            sums.fill(0.0)
            if residual != 0:
                sums.store(floats(load_vector(self.dtype, residual, index)).load())
            rows = vector_at(Int32, row_of + token * k * 4)
            for first in cutlass.range(0, k, UNROLL, unroll=1):
                # All loads are issued before the first sum.
                found = cute.make_rmem_tensor(UNROLL, Int32)
                found.fill(-1)
                raw = cute.make_rmem_tensor((count, UNROLL), self.dtype)
                for j in cutlass.range_constexpr(UNROLL):
                    if first + j < k:
                        row = rows[first + j]
                        found[j] = select(row < bound, row, Int32(-1))
                for j in cutlass.range_constexpr(UNROLL):
                    if found[j] >= 0:
                        raw[None, j].store(load_vector(self.dtype, y, Int64(found[j]) * vectors + column).load())
                for j in cutlass.range_constexpr(UNROLL):
                    if found[j] >= 0:
                        sums.store(sums.load() + raw[None, j].load().to(Float32))
            store_vector(self.dtype, out, index, sums)


class Permute(_Rows):
    """Kernel of permute: out[row_of[n, j]] = x[n]. `out` has N k rows."""

    @cute.jit
    def __call__(
        self, x: Int64, row_of: Int64, out: Int64, tokens: Int32, k: Int32, width: Int32, position: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            self._launch((x, row_of, out), tokens, k, width, position, stream)

    @cute.kernel
    def kernel(self, x: Int64, row_of: Int64, out: Int64, k: Int32, vectors: Int32):
        wait_for_earlier()
        # Only after the wait, since the next kernel may read results of earlier kernels before its own wait.
        let_next_begin()
        token, column = self._place()
        if column < vectors:
            value = floats(load_vector(self.dtype, x, token * vectors + column))
            rows, (tokens, _, _) = vector_at(Int32, row_of + token * k * 4), cute.arch.grid_dim()
            bound = tokens * k
            for j in cutlass.range(k, unroll=UNROLL):
                row = rows[j]
                if (row >= 0) & (row < bound):
                    store_vector(self.dtype, out, Int64(row) * vectors + column, value)


class RowWeightsBackward(Invariant):
    """Kernel for the gradient of the choices' weights: d_weights[n, j] = d_rows[row_of[n, j]], or 0 if the choice has
    no row.

    d_rows: float32, the gradient of each row's weight. bound: the number of elements of d_rows.
    """

    def __init__(self, spec: LayerSpec):
        self.name = spec.name

    @cute.jit
    def __call__(
        self, d_rows: Int64, row_of: Int64, d_weights: Int64, tokens: Int32, k: Int32, bound: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if tokens > 0:
            name_kernel(self.kernel, self.name)
            self.kernel(d_rows, row_of, d_weights, tokens * k, bound).launch(
                grid=(cute.ceil_div(tokens * k, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
            )

    @cute.kernel
    def kernel(self, d_rows: Int64, row_of: Int64, d_weights: Int64, total: Int32, bound: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * THREADS + thread
        if index < total:
            row = vector_at(Int32, row_of)[index]
            is_row = (row >= 0) & (row < bound)
            there = vector_at(Float32, d_rows)[select(is_row, row, Int32(0))]
            vector_at(Float32, d_weights)[index] = select(is_row, there, Float32(0.0))


KERNELS = {"combine": Combine, "permute": Permute, "row_weights_backward": RowWeightsBackward}


def trace(spec: LayerSpec) -> Traced:
    return traced(spec, KERNELS[spec.kernel](spec))
