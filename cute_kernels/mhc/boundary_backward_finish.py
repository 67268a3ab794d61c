"""The last kernel of the boundary's backward (boundary_backward.py). It adds, in a fixed order, the partial sums that
the CTAs of the kernels before it stored.

The names: of n residual streams with D columns each, a slice is a range of the D columns. base and scale are the
parameters of the gates that make the coefficients comb [n, n], post [n] and pre [n]. The norm is the RMS norm of the
mix.

The kernel's CTAs are, in this order:

- one for the gradients of base and scale;
- one for each fragment of a slice of the weight's gradient;
- one for each slice of the gradient of the norm's weight;
- the remaining CTAs for the gradients of the coefficients, with a thread for each of a token's K = n^2 + 2n numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..device.gmem import vector_at
from ..device.invariant import Invariant
from ..device.naming import name_kernel
from ..device.target import early, wait_for_earlier
from ..device.vectors import run_at, store_param
from ..device.warps import WARP
from .boundary_shapes import WARP_COLUMNS, SliceCta, slices_of
from .boundary_sums import FRAGMENT, fragment
from .gates_backward import GateRows, GateSums
from .shapes import outputs

READS = 8


class Finished(NamedTuple):
    """Addresses of the gradients to write; 0: not wanted.

    Attributes:
        pre, post, comb: gradients of the coefficients, float32.
        weight: the gradient of the projection's weight.
        norm: the gradient of the norm's weight.
        weight_code, norm_code: the dtypes of these two gradients (`dtypes.PARAM_FORMS`).
    """

    pre: Int64
    post: Int64
    comb: Int64
    weight: Int64
    norm: Int64
    weight_code: Int32
    norm_code: Int32


class Cut(NamedTuple):
    """Number of slices into which the columns are divided, and number of parts into which the tokens are divided."""

    slices: Int32
    parts: Int32


class BoundaryBackwardFinish(Invariant):
    """Kernel that adds the partial sums of the boundary's backward. The top of this file says which CTA adds which
    sums."""

    def __init__(self, name: str, n: int, cta: SliceCta):
        self.name = name
        self.n = n
        self.cta = cta
        self.outputs = outputs(n)
        self.threads = cta.warps * WARP
        self.fragments = self.outputs // 8 * n
        self.gates = GateSums(n, cta.warps)

    @cute.jit
    def launch(
        self, sums: tuple, rows: GateRows, finished: Finished, tokens: Int32, width: Int32, parts: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """Launch the kernel.

        Args:
            sums: the addresses `dots`, `weights` and `norms` of `BackwardWorkspace`.
            rows: the sums for the gradients of base and scale, which the first kernel stored, and where to write the
                gradients.
            finished: the addresses of the other gradients.
            width: D.
            parts: number of parts of the tokens in the main kernel.
        """
        cut = Cut(slices_of(self.cta, width), parts)
        of_tokens = Int32(cute.ceil_div(Int64(tokens) * self.outputs, self.threads))
        of_slices = cut.slices * (self.fragments + 1)
        name_kernel(self.kernel, self.name)
        self.kernel(sums, rows, finished, cut, tokens, width).launch(
            grid=(of_tokens + of_slices + 1, 1, 1),
            block=(self.threads, 1, 1),
            smem=self.gates.smem_bytes,
            stream=stream,
            use_pdl=early(True),
        )

    @cute.kernel
    def kernel(
        self, sums: tuple, rows: GateRows, finished: Finished, cut: Cut, tokens: Int32, width: Int32
    ):  # fmt: skip
        block, _, _ = cute.arch.block_idx()
        dots, weights, norms = sums
        of_weight = block - 1
        of_norm = of_weight - cut.slices * self.fragments
        of_tokens = of_norm - cut.slices
        wait_for_earlier()
        if block == 0:
            self.gates.add(rows)
        elif of_norm < 0:
            if finished.weight != 0:
                self._weight(weights, finished, cut, of_weight // self.fragments, of_weight % self.fragments, width)
        elif of_tokens < 0:
            if finished.norm != 0:
                self._norm(norms, finished, cut, of_norm, width)
        else:
            self._token(dots, finished, cut, of_tokens, tokens)

    @cute.jit
    def _weight(
        self, weights: Int64, finished: Finished, cut: Cut, slice_: Int32, index: Int32, width: Int32
    ):  # fmt: skip
        """Store one fragment of the weight's gradient (8 outputs of one stream, at the columns of a slice): the sum
        over all parts of the tokens.

        Args:
            weights: the address of the main kernel's partial sums (`BackwardWorkspace.weights`).
            slice_: the slice's number.
            index: the fragment's number. With K = n^2 + 2n outputs, it has the 8 outputs from 8 (index % (K / 8)) on,
                of stream index / (K / 8).
            width: D.
        """
        thread, _, _ = cute.arch.thread_idx()
        lane, steps = thread % WARP, self.outputs // 8
        total = cute.make_rmem_tensor(FRAGMENT, Float32)
        total.fill(0.0)
        for part in cutlass.range(cut.parts, unroll=4):
            number = (part * cut.slices + slice_) * self.fragments + index
            total.store(total.load() + fragment(weights, self.cta.warps, number).load())
        for k in cutlass.range_constexpr(FRAGMENT):
            column = slice_ * self.cta.columns + thread // WARP * WARP_COLUMNS + k // 2 * 8 + lane // 4
            output = index % steps * 8 + lane % 4 * 2 + k % 2
            if column < width:
                at = Int64(output) * (width * self.n) + (index // steps * width + column)
                store_param(finished.weight, finished.weight_code, at, total[k])

    @cute.jit
    def _norm(self, norms: Int64, finished: Finished, cut: Cut, slice_: Int32, width: Int32):
        """Store the gradient of the norm's weight at the columns of slice number `slice_`. It is the sum over all parts
        of the tokens.

        norms: the address of the main kernel's partial sums (`BackwardWorkspace.norms`).
        """
        thread, _, _ = cute.arch.thread_idx()
        column = slice_ * self.cta.columns + thread
        if (thread < self.cta.columns) & (column < width):
            total = Float32(0.0)
            for part in cutlass.range(cut.parts, unroll=4):
                total += vector_at(Float32, norms)[Int64(part * cut.slices + slice_) * self.cta.columns + thread]
            store_param(finished.norm, finished.norm_code, Int64(column), total)

    @cute.jit
    def _token(self, dots: Int64, finished: Finished, cut: Cut, block: Int32, tokens: Int32):
        """Store one of the n^2 + 2n elements of a token's gradients of comb, post and pre: the sum of its partial sums
        over all slices of the columns.

        Args:
            dots: the address of the main kernel's partial sums (`BackwardWorkspace.dots`).
            block: the CTA's number among the CTAs that do this.
        """
        thread, _, _ = cute.arch.thread_idx()
        n, place = self.n, Int64(block) * self.threads + thread
        count = Int64(tokens) * self.outputs
        if place < count:
            total = Float32(0.0)
            for index in cutlass.range(cut.slices, unroll=READS):
                total += run_at(Float32, dots, Int64(index) * count + place, 1)[0]
            token = place // self.outputs
            k = Int32(place - token * self.outputs)
            if k < n * n:
                if finished.comb != 0:
                    vector_at(Float32, finished.comb)[token * (n * n) + k] = total
            elif k < n * n + n:
                if finished.post != 0:
                    vector_at(Float32, finished.post)[token * n + k - n * n] = total
            else:
                if finished.pre != 0:
                    vector_at(Float32, finished.pre)[token * n + k - (n * n + n)] = total
